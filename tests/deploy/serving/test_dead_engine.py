"""A replica ends when vLLM's client says that its engine core has died, and not before; never while it is stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import dead_engine
from pdlab.deploy.serving.dead_engine import ELSEWHERE, EXIT_CODE, RefusesWhenDead, StopsWithEngine, end_with


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_engine, "POLL_S", 0.001)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


async def test_it_ends_after_the_engine_and_not_before() -> None:
    client, codes = SimpleNamespace(errored=False), []
    task = asyncio.create_task(end_with(client, codes.append, answers_s=0.0))
    await turns()
    assert not codes and not task.done()
    client.errored = True
    await asyncio.wait_for(task, 10)
    assert codes == [EXIT_CODE]


@pytest.fixture
def mixed() -> Iterator[Callable[[Any], Any]]:
    """A server of that engine; its class is left without ``__del__``, for none is to run when it is collected."""

    class Server:
        def __init__(self, engine: Any) -> None:
            self.engine = engine
            self.calls: list[str] = []

        async def start(self) -> None:
            self.calls.append("start")

        async def __del__(self) -> None:
            self.calls.append("stop")

    class Mixed(StopsWithEngine, Server):
        pass

    made = []

    def server(engine: Any) -> Any:
        made.append(Mixed(engine))
        return made[-1]

    yield server
    Mixed.__del__ = Server.__del__ = lambda self: None  # type: ignore[assignment, method-assign]


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ended: list[int] = []

    async def fake(client: Any) -> None:
        await end_with(client, ended.append, answers_s=0.0)

    monkeypatch.setattr(dead_engine, "end_with", lambda client: fake(client))
    return ended


async def test_a_server_that_runs_ends_with_its_engine(mixed: Callable[[Any], Any], codes: list[int]) -> None:
    client = SimpleNamespace(errored=False)
    server = mixed(SimpleNamespace(_engine_client=client))
    await server.start()
    client.errored = True
    await turns()
    assert server.calls == ["start"] and codes == [EXIT_CODE]
    await server.__del__()


async def test_a_server_that_is_stopped_is_left_to_ray(mixed: Callable[[Any], Any], codes: list[int]) -> None:
    client = SimpleNamespace(errored=False)
    server = mixed(SimpleNamespace(_engine_client=client))
    await server.start()
    await server.__del__()
    client.errored = True  # as vLLM's own shutdown leaves it
    await turns()
    assert server.calls == ["start", "stop"] and not codes


async def test_an_engine_without_vllms_client_is_not_watched(mixed: Callable[[Any], Any], codes: list[int]) -> None:
    server = mixed(SimpleNamespace())
    await server.start()
    await turns()
    await server.__del__()
    assert server.calls == ["start", "stop"] and not codes


@pytest.mark.parametrize(
    ("kind", "method", "errored", "taken"),
    [
        ("http", "POST", False, True),
        ("http", "POST", True, False),
        ("http", "GET", True, True),  # whoever asks for health or metrics is told what is
        ("lifespan", None, True, True),
    ],
)
def test_what_comes_after_the_death_is_sent_elsewhere(
    kind: str, method: str | None, errored: bool, taken: bool
) -> None:
    came: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing of the body is read")

    scope = {"type": kind} | ({"method": method} if method else {})
    asyncio.run(RefusesWhenDead(app, SimpleNamespace(errored=errored))(scope, receive, send))
    assert bool(came) is taken
    assert [message.get("status") for message in sent] == ([] if taken else [ELSEWHERE, None])
    if not taken:
        assert json.loads(sent[1]["body"])["error"]["code"] == ELSEWHERE


@pytest.mark.parametrize("watched", [True, False])
def test_a_replica_that_answers_http_itself_has_it_in_front(watched: bool) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    client = SimpleNamespace(**({"errored": False} if watched else {}))
    app = FastAPI()
    app.post("/")(lambda: {})
    app.middleware_stack = app.build_middleware_stack()  # as vLLM leaves it

    class Native:
        engine = SimpleNamespace(_engine_client=client)

        async def __serve_build_asgi_app__(self) -> Any:
            return app

    class Mixed(StopsWithEngine, Native):
        def __del__(self) -> None:  # type: ignore[override]
            """None is to run when it is collected."""

    browser = TestClient(asyncio.run(Mixed().__serve_build_asgi_app__()))
    assert browser.post("/").status_code == 200
    client.errored = True
    assert browser.post("/").status_code == (ELSEWHERE if watched else 200)
