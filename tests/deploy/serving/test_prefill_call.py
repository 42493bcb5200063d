"""Decode's call of prefill: what follows a failed or late one, and who is told when a client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import prefill_call, timeline
from pdlab.deploy.serving.early_token import EarlyToken
from pdlab.deploy.serving.prefill_call import ROUTE, CallsPrefill, PrefillRules
from pdlab.marks.engine_marks import FIRST_TOKEN
from pdlab.marks.request_parts import seconds_of

RULES = PrefillRules(120.0, 5.0, ("retry", "local"), early_token=False, reuse_first_token=False)


class Cancelled(Exception):
    """Stands for Ray's TaskCancelledError."""


class Error:
    """Stands for Ray's ErrorResponse."""

    def __init__(self, error: Any) -> None:
        self.error = error


class Orchestrator:
    """Stands for Ray's mixin, whose own way must not be gone."""

    async def _pd_handle_request(self, request: Any, raw: Any = None) -> AsyncIterator[Any]:
        yield "Ray's own way"


class Engine:
    """Stands for Ray's engine server below the mixin: answers at once with what it was asked."""

    tokens: tuple[str, ...] = ("one", "two")

    async def completions(self, request: Any, raw: Any = None) -> AsyncIterator[Any]:
        if self.before is not None:  # type: ignore[attr-defined]
            await self.before()  # type: ignore[attr-defined]

        async def stream() -> AsyncIterator[Any]:
            self.decoded.append(request)  # type: ignore[attr-defined]
            for token in self.tokens:
                yield token

        return stream()


class Call:
    """Stands for a handle's response: an outcome that comes when ``ready`` says so."""

    def __init__(self, outcome: Any, ready: asyncio.Event | None) -> None:
        self.outcome, self.ready, self.cancelled = outcome, ready, False

    async def __anext__(self) -> Any:
        if self.ready is not None:
            await self.ready.wait()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Prefill:
    """Stands for the handle; the replicas r0, r1... take the calls in turn, save those to be avoided."""

    def __init__(self, outcomes: list[Any], replicas: int = 2, ready: asyncio.Event | None = None) -> None:
        self.outcomes, self.replicas, self.ready = outcomes, [f"r{i}" for i in range(replicas)], ready
        self.calls: list[tuple[str, Call]] = []
        self.completions = SimpleNamespace(remote=self.remote)

    def remote(self, request: Any, raw: Any, **more: Any) -> Any:
        route = more.pop(ROUTE)
        assert not more
        if not self.replicas:  # Ray's router waits until there is one
            self.calls.append(("", Call("an answer", asyncio.Event())))
            return self.calls[-1][1]
        others = [replica for replica in self.replicas if replica not in route.avoid]
        if not others:
            route.no_other = True
            return Call(LookupError("there is no other replica"), None)
        route.replica = others[len(self.calls) % len(others)]
        outcome = self.outcomes[len(self.calls)]
        never = asyncio.Event() if outcome == "hangs" else None
        call = Call(outcome, never or self.ready)
        self.calls.append((route.replica, call))
        return call


Made = Callable[..., Any]


@pytest.fixture
def counted() -> dict[str, int]:
    return {}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, counted: dict[str, int]) -> Iterator[Made]:
    @contextlib.contextmanager
    def reuse(token_ids: Any) -> Iterator[None]:
        yield

    pd = SimpleNamespace(
        PDOrchestratorMixin=Orchestrator, ChatCompletionRequest=int, ErrorResponse=Error, _reuse_prompt_token_ids=reuse,
        serve=SimpleNamespace(get_multiplexed_model_id=lambda: ""), session_id_from_headers=lambda headers: None,
    )  # fmt: skip
    modules = {
        prefill_call.PD: pd,
        prefill_call.MODELS: SimpleNamespace(ErrorResponse=Error, ErrorInfo=SimpleNamespace),
        "ray.exceptions": SimpleNamespace(TaskCancelledError=Cancelled),
    }
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: modules.get(name) or real(name, *rest))
    monkeypatch.setattr(prefill_call, "count", lambda name: counted.update({name: counted.get(name, 0) + 1}))

    class Decode(CallsPrefill, Orchestrator, Engine):
        prefill_rules = replace(RULES, timeout_s=0.05)

    def made(prefill: Prefill, on_failure: str = "retry,local", **flags: bool) -> Any:
        decode: Any = Decode()
        decode.prefill_rules = replace(RULES, timeout_s=0.05, absent_s=0.02, on_failure=tuple(on_failure.split(",")))
        decode._prefill_handle, decode.decoded, decode.before, decode.notified = prefill, [], None, []

        async def notify(name: str, given: dict[str, Any]) -> None:
            decode.notified.append(given)

        decode.engine = SimpleNamespace(_engine_client=SimpleNamespace(notify_kv_transfer_request_rejected=notify))
        decode._get_connector_backend = lambda: SimpleNamespace(
            requires_peer_binding=flags.get("peer", False), concurrent_handoff=False,
            prepare_prefill_request=lambda request, peer: request,
            prepare_decode_request=lambda request, peer, prefill_response: (request, prefill_response),
        )  # fmt: skip
        decode._pd_tokenize_once = False
        return decode

    yield made


def prefilled(number: int = 0) -> Any:
    return SimpleNamespace(kv_transfer_params={"remote_request_id": f"p{number}"})


def answer(decode: Any, request: Any = "a prompt") -> list[Any]:
    async def run() -> list[Any]:
        return [item async for item in decode._pd_handle_request(request)]

    return asyncio.run(run())


DEAD = RuntimeError("The actor died\nunexpectedly")
BUSY = Error(SimpleNamespace(code=500, message="EngineDeadError"))


def test_one_that_answers_is_read_by_decode(server: Made, counted: dict[str, int]) -> None:
    given = prefilled()
    decode = server(Prefill([given]))
    assert answer(decode) == ["one", "two"]
    assert decode.decoded == [("a prompt", given)] and decode.notified == []
    assert counted == {"calls": 1}


@pytest.mark.parametrize("reuses", [False, True])
def test_the_first_token_is_handed_to_decodes_engine(
    server: Made, monkeypatch: pytest.MonkeyPatch, reuses: bool
) -> None:
    monkeypatch.setattr(prefill_call, "first_token", lambda request, answer, longest, prompt_ids, token_ids: token_ids)
    ids = (timeline.packed([5, 6]), timeline.packed([9]))
    decode = server(Prefill([SimpleNamespace(kv_transfer_params={"remote_request_id": "p", timeline.IDS_KEY: ids})]))
    decode.prefill_rules, decode._pd_tokenize_once = replace(RULES, reuse_first_token=reuses), True
    decode.engine._engine_client.model_config = SimpleNamespace(max_model_len=100, has_inner_state=False)
    backend = decode._get_connector_backend()
    backend.prepare_decode_request = lambda request, peer, prefill_response: prefill_response
    decode._get_connector_backend = lambda: backend
    sent_request = SimpleNamespace(prompt=[5, 6], kv_transfer_params={})
    assert answer(decode, sent_request) == ["one", "two"]
    assert sent_request.kv_transfer_params == ({timeline.IDS_KEY: True} if reuses else {}), (
        "a prompt of ids decode has itself"
    )
    (given,) = decode.decoded
    handed = {FIRST_TOKEN: [9]} if reuses else {}
    assert given.kv_transfer_params == {"remote_request_id": "p", **handed}


@pytest.mark.parametrize("failure", [DEAD, BUSY, "hangs", StopAsyncIteration()], ids=["dead", "500", "hangs", "empty"])
def test_after_a_failure_another_replica_is_asked(server: Made, counted: dict[str, int], failure: Any) -> None:
    given = prefilled()
    prefill = Prefill([failure, given])
    decode = server(prefill)
    assert answer(decode) == ["one", "two"]
    assert [replica for replica, _ in prefill.calls] == ["r0", "r1"]
    assert decode.decoded == [("a prompt", given)]
    assert counted == {"calls": 1, "retries": 1} | ({"timeouts": 1} if failure == "hangs" else {})
    assert prefill.calls[0][1].cancelled is (failure == "hangs"), "a hung engine must not begin with it later"


def test_when_all_fail_decode_computes_the_prompt(server: Made, counted: dict[str, int]) -> None:
    prefill = Prefill([DEAD, DEAD, DEAD], replicas=3)
    decode = server(prefill)
    assert answer(decode) == ["one", "two"]
    assert len(prefill.calls) == 2, "one retry"
    assert decode.decoded == ["a prompt"], "without transfer parameters"
    assert counted == {"calls": 1, "retries": 1, "local": 1}


@pytest.mark.parametrize(
    ("outcomes", "replicas", "requests", "parts"),
    [
        ([prefilled()], 2, 1, {"call": 1}),
        ([DEAD, prefilled()], 2, 1, {"failed_calls": 1, "call": 1}),
        ([DEAD, DEAD], 3, 1, {"failed_calls": 2}),
        ([DEAD], 1, 1, {"failed_calls": 1}),
        ([prefilled(), prefilled()], 2, 2, {"call": 1, "out": 1}),
    ],
    ids=["answered", "again", "twice in vain", "no other replica", "two sequences"],
)
def test_a_timeline_has_the_calls_that_were_made_and_the_time_of_those_that_failed(
    server: Made, counted: dict[str, int], outcomes: list[Any], replicas: int, requests: int, parts: dict[str, float]
) -> None:
    """A call takes a second, and nothing else takes time."""
    prefill = Prefill(outcomes, replicas)
    timing = timeline.RequestTiming(wanted=True, clock=lambda: float(len(prefill.calls)))
    timeline._context.set(timing)
    decode = server(prefill)
    for _ in range(requests):
        answer(decode)
    timeline._context.set(None)
    timing.chunk()
    record = timing.record("d", guarded=True)
    assert record["try"] == len(prefill.calls) == len(outcomes)
    assert {name: seconds for name, seconds in seconds_of(record).items() if seconds} == parts


@pytest.mark.parametrize(("prefill_fails", "cached"), [(False, 64), (True, 300)])
def test_what_was_cached_is_said_by_who_computed_the_prompt(
    server: Made, counted: dict[str, int], prefill_fails: bool, cached: int
) -> None:
    given = prefilled()
    given.usage = SimpleNamespace(prompt_tokens_details=SimpleNamespace(cached_tokens=64))
    decode = server(Prefill([DEAD if prefill_fails else given], replicas=1))
    usage = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 300}}
    decode.tokens = (f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n",)
    (last,) = answer(decode)
    assert json.loads(last.removeprefix("data: "))["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


def test_where_there_is_one_prefill_replica_nothing_is_retried(server: Made, counted: dict[str, int]) -> None:
    prefill = Prefill([DEAD], replicas=1)
    decode = server(prefill)
    assert answer(decode) == ["one", "two"]
    assert len(prefill.calls) == 1 and counted == {"calls": 1, "local": 1}


@pytest.mark.parametrize(("steps", "calls"), [("fail", 1), ("retry", 2), ("retry,fail", 2)])
def test_behind_the_last_step_is_a_503_that_says_why(
    server: Made, counted: dict[str, int], steps: str, calls: int
) -> None:
    prefill = Prefill([DEAD, BUSY])
    (error,) = answer(server(prefill, steps))
    assert error.error.code == 503 and len(prefill.calls) == calls
    assert "prefill replica r0: RuntimeError (The actor died)" in error.error.message
    assert ("prefill replica r1: HTTP 500, EngineDeadError" in error.error.message) is (calls == 2)
    assert "\n" not in error.error.message and "send the request again" in error.error.message
    assert counted["failures"] == 1


class Clock:
    """Stands for asyncio.wait where nothing ever ends: keeps how long it was waited for."""

    def __init__(self) -> None:
        self.waited: list[float | None] = []

    async def wait(self, tasks: Any, *, timeout: float | None = None) -> tuple[set[Any], Any]:
        await asyncio.sleep(0)
        self.waited.append(timeout)
        return set(), tasks


@pytest.mark.parametrize(("steps", "ends"), [("retry,local", ["one", "two"]), ("local", ["one", "two"]), ("fail", 503)])
def test_where_no_replica_takes_the_call_a_new_one_is_not_waited_for(
    server: Made, counted: dict[str, int], steps: str, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have died, and Ray Serve starts others: that took a minute on a busy machine."""
    prefill, clock = Prefill([], replicas=0), Clock()
    decode = server(prefill, steps)
    decode.prefill_rules = replace(RULES, on_failure=tuple(steps.split(",")))
    monkeypatch.setattr(prefill_call, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait": clock.wait}))
    given = answer(decode)
    assert (given[0].error.code if ends == 503 else given) == ends
    assert clock.waited == [RULES.absent_s], "once: a retry would find none either"
    assert prefill.calls[0][1].cancelled and "timeouts" not in counted and "retries" not in counted


def test_a_call_that_a_replica_has_taken_may_take_the_whole_time(
    server: Made, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, clock = Prefill(["hangs", "hangs"]), Clock()
    decode = server(prefill)
    decode.prefill_rules = RULES
    monkeypatch.setattr(prefill_call, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait": clock.wait}))
    assert answer(decode) == ["one", "two"]
    assert clock.waited == [5] * 48 and counted["timeouts"] == 2


def test_a_call_whose_replica_died_later_is_given_up_too(
    server: Made, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sends such a call again by itself, and its router waits until there is a replica."""
    prefill, clock = Prefill(["hangs"]), Clock()
    decode = server(prefill)
    decode.prefill_rules = RULES
    taken: list[Any] = []
    given = decode._call

    async def call(*args: Any) -> Any:
        taken.append(args[-1])
        return await given(*args)

    async def wait(tasks: Any, *, timeout: float | None = None) -> tuple[set[Any], Any]:
        if len(clock.waited) == 2:
            taken[-1].replica = None
        return await clock.wait(tasks, timeout=timeout)

    decode._call = call
    monkeypatch.setattr(prefill_call, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait": wait}))
    assert answer(decode) == ["one", "two"]
    assert clock.waited == [5, 5, 5] and counted == {"calls": 1, "local": 1}


def test_an_error_of_the_clients_is_the_answer(server: Made, counted: dict[str, int]) -> None:
    refused = Error(SimpleNamespace(code=400, message="too long"))
    prefill = Prefill([refused])
    decode = server(prefill)
    assert answer(decode) == [refused] and len(prefill.calls) == 1 and decode.decoded == []
    assert counted == {"calls": 1}


def test_a_connector_that_binds_peers_goes_rays_way(server: Made) -> None:
    assert answer(server(Prefill([]), peer=True)) == ["Ray's own way"]


def test_a_call_that_ray_cancelled_with_its_request_is_not_retried(server: Made, counted: dict[str, int]) -> None:
    prefill = Prefill([Cancelled()])
    with pytest.raises(Cancelled):
        answer(server(prefill))
    assert len(prefill.calls) == 1 and counted == {"calls": 1}


def leave(decode: Any, *, when: Callable[[], bool], then: Callable[[], None] = lambda: None) -> None:
    """Ask, cancel as Serve does once ``when`` is true, and let what is left in the background end."""

    async def run() -> None:
        async def ask() -> None:
            async for _ in decode._pd_handle_request("a prompt"):
                pass

        client = asyncio.ensure_future(ask())
        while not when():
            await asyncio.sleep(0)
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        then()
        for _ in range(1000):
            await asyncio.sleep(0)
            if not prefill_call._tasks:
                return
        raise AssertionError("something is left in the background")

    asyncio.run(run())


def leave_before_decode(decode: Any) -> None:
    """The client goes away while decode waits, before its engine is given the request."""
    reached: list[bool] = []

    async def slow() -> None:
        reached.append(True)
        await asyncio.sleep(3600)

    decode.before = slow
    leave(decode, when=lambda: bool(reached))


def test_a_client_that_leaves_before_decode_has_it_frees_the_blocks(server: Made, counted: dict[str, int]) -> None:
    decode = server(Prefill([prefilled(7)]))
    leave_before_decode(decode)
    assert decode.notified == [{"remote_request_id": "p7"}] and counted["released"] == 1


def test_an_answer_of_prefill_behind_the_clients_back_frees_the_blocks(server: Made, counted: dict[str, int]) -> None:
    ready = asyncio.Event()
    prefill = Prefill([prefilled(3)], ready=ready)
    decode = server(prefill)
    decode.prefill_rules = replace(RULES, timeout_s=60)
    leave(decode, when=lambda: bool(prefill.calls), then=ready.set)
    assert decode.notified == [{"remote_request_id": "p3"}] and decode.decoded == []


async def test_once_decode_has_it_vllm_itself_tells_prefill(server: Made) -> None:
    decode = server(Prefill([prefilled()]))
    stream = decode._pd_handle_request("a prompt")
    assert await stream.__anext__() == "one"
    await stream.aclose()
    assert decode.notified == [] and decode.decoded


@pytest.mark.parametrize(("items", "released"), [(1, True), (2, False)])
async def test_behind_an_early_token_decode_has_it_with_the_next_item(
    items: int, released: bool, server: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leaves with the token leaves before decode began."""
    decode = server(Prefill([prefilled(5)]))
    decode.prefill_rules = replace(RULES, early_token=True)
    early = EarlyToken("o", "data: o", (1,), 2)
    monkeypatch.setattr(prefill_call, "going_on", lambda *_: None)
    decode._where_exact = lambda *_: early
    decode.tokens = ('data: {"choices": [{"text": "one"}]}\n\n', "data: [DONE]\n\n")
    stream = decode._pd_handle_request("a prompt")
    for number in range(items):
        item = await stream.__anext__()
        assert item == ["data: o"] if number == 0 else '"ne"' in item
    await stream.aclose()
    while prefill_call._tasks:
        await asyncio.sleep(0)
    assert bool(decode.decoded) is not released
    assert decode.notified == ([{"remote_request_id": "p5"}] if released else [])


def test_a_prefill_that_cannot_be_told_is_no_error(server: Made, counted: dict[str, int]) -> None:
    decode = server(Prefill([prefilled()]))
    decode.engine = SimpleNamespace()  # dead: it has no client any more
    leave_before_decode(decode)
    assert "released" not in counted
