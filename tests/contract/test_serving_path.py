"""What Ray does with its one HTTP address, with HAProxy in front, and with chunks that are not to be held back."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest
from contract.conftest import SERVE, quietly
from contract.test_guarded_servers import built

from pdlab.deploy import serving_path
from pdlab.deploy.serve_config import HEAD_RESOURCE
from pdlab.deploy.serving.dead_engine import ELSEWHERE

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")


@pytest.fixture
def haproxy() -> ModuleType:
    return quietly("ray.serve._private.haproxy")


def manager(haproxy: ModuleType) -> Any:
    return haproxy.HAProxyManager.__ray_metadata__.modified_class


def test_haproxy_calls_replicas_of_its_node_on_loopback_and_others_at_their_address(haproxy: ModuleType) -> None:
    here = SimpleNamespace(_node_ip_address="10.0.0.1", _generate_server_name=lambda target: target.name)
    for ip, called in (("10.0.0.1", "127.0.0.1"), ("10.0.0.2", "10.0.0.2")):
        target = SimpleNamespace(ip=ip, port=30000, name="replica")
        assert manager(haproxy)._target_to_server(here, target).host == called


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "*"), ("10.0.0.5", "10.0.0.5")])
def test_haproxy_listens_at_the_same_address(host: str, bound: str, haproxy: ModuleType) -> None:
    options = quietly("ray.serve.config").HTTPOptions(host=host, port=8000)
    config = haproxy.HAProxyConfig(http_options=options, grpc_options=quietly("ray.serve.config").gRPCOptions())
    assert config.frontend_host == bound


def test_replicas_that_haproxy_calls_listen_at_the_one_address_and_ask_for_the_key() -> None:
    start = inspect.getsource(quietly("ray.serve._private.replica").Replica._maybe_start_direct_ingress_servers)
    assert "_controller_handle.get_http_config.remote()" in start
    assert 'HTTPOptions(**{**self._http_options.model_dump(), "port": port})' in start
    assert "configure_http_middlewares(" in start and "not self._is_ingress_request_router" in start


def test_haproxy_stands_before_an_ingress_that_is_no_router_of_its_own() -> None:
    """An ingress under HAProxy may have no request router of its own; Ray Serve LLM's has none."""
    build = inspect.getsource(quietly("ray.serve._private.build_app").build_app)
    assert "RAY_SERVE_ENABLE_HA_PROXY" in build and "CUSTOM_INGRESS_REQUEST_ROUTER_UNSUPPORTED_ERROR" in build
    options = quietly(f"{SERVE}.core.ingress.ingress").DEFAULT_INGRESS_OPTIONS
    assert "request_router_config" not in options
    assert options["max_ongoing_requests"] >= 10**6, "HAProxy does not queue: a busy replica would answer 503"


def test_the_head_node_has_the_resource_that_pins_the_ingress() -> None:
    assert quietly("ray._common.constants").HEAD_NODE_RESOURCE_NAME == HEAD_RESOURCE


def test_zero_holds_no_chunk_back() -> None:
    batcher = quietly(f"{SERVE}.utils.batcher").Batcher

    async def tokens() -> AsyncIterator[str]:
        for token in "abc":
            yield token

    async def batches(interval_ms: float) -> list[list[str]]:
        return [list(batch) async for batch in batcher(tokens(), interval_ms).stream()]

    assert asyncio.run(batches(0.0)) == [["a"], ["b"], ["c"]]
    assert asyncio.run(batches(50.0)) == [["a", "b", "c"]]
    interval = quietly(f"{SERVE}.core.server.llm_server").LLMServer._get_batch_interval_ms
    config = SimpleNamespace(experimental_configs={"stream_batching_interval_ms": 0.0})
    assert interval(SimpleNamespace(_llm_config=config)) == 0
    assert interval(SimpleNamespace(_llm_config=config), stream=False) is None, "prefill answers at once, in one piece"


def test_the_throughput_variable_does_what_we_say_of_it() -> None:
    text = inspect.getsource(quietly("ray.serve._private.constants"))
    after = text[text.index("if RAY_SERVE_THROUGHPUT_OPTIMIZED:") :]
    for name in (
        "RUN_USER_CODE_IN_SEPARATE_THREAD",
        "RUN_ROUTER_IN_SEPARATE_LOOP",
        "LOG_TO_STDERR",
        "USE_GRPC_BY_DEFAULT",
    ):
        assert f"RAY_SERVE_{name} = get_env_bool" in after


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
@pytest.mark.parametrize(("label", "answers"), [("collocated-2xtp1", "LLMServer"), ("pd-pack-p1xtp1-d2xtp1", "Decode")])
def test_with_direct_streaming_the_replica_that_answers_is_the_next_in_turn(
    label: str, answers: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pdlab.sim.router` has it; otherwise two choices."""
    found = {d.name.split(":")[0]: d for d in built(label, direct=direct, monkeypatch=monkeypatch)}
    router = found[answers]._deployment_config.request_router_config.get_request_router_class()
    assert router.__name__ == ("RoundRobinRouter" if direct else "PowerOfTwoChoicesRequestRouter")


def test_taking_turns_looks_at_no_queue() -> None:
    turns = quietly("ray.serve.experimental.round_robin_router").RoundRobinRouter

    class Turns(turns):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self._round_robin_counter = 4

    async def chosen() -> list[str]:
        ours = Turns()
        return [(await ours.choose_replicas(["a", "b", "c"]))[0][0] for _ in range(4)]

    assert asyncio.run(chosen()) == ["b", "c", "a", "b"]


def test_a_router_counts_down_when_its_request_has_ended() -> None:
    """As `pdlab.sim.router` has it with direct streaming."""
    router = quietly("ray.serve._private.request_router.request_router").RequestRouter
    cache: dict[str, int] = {"a": 2}
    ours = SimpleNamespace(
        _use_replica_queue_len_cache=True,
        _replica_queue_len_cache=SimpleNamespace(get=cache.get, update=cache.__setitem__),
        _update_router_queue_len_gauge=lambda *_: None,
    )
    for left in (1, 0, 0):
        router.decrement_queue_len_cache(ours, "a")
        assert cache["a"] == left
    sends = inspect.getsource(quietly("ray.serve._private.router").AsyncioRouter._route_and_send_request_once)
    assert "self._register_decrement_queue_len_cache_callback(" in sends


CONFIG = """
global
    tune.bufsize {bufsize}
defaults
    mode http
    timeout connect 5s
    timeout client 20s
    timeout server 20s
    option redispatch 1
    retry-on {retry_on}
    retries {retries}
    balance roundrobin
frontend front
    bind fd@{fd}
    use_backend engines
backend engines
    http-reuse always
    use-server pinned if TRUE
    server pinned 127.0.0.1:{pinned}
    server other 127.0.0.1:{other}
"""


BUFSIZE = serving_path.HAPROXY["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]
RETRIES = serving_path.HAPROXY["RAY_SERVE_HAPROXY_RETRIES"]
OURS = serving_path.HAPROXY["RAY_SERVE_HAPROXY_RETRY_ON"]


@pytest.mark.parametrize(
    ("size", "status", "retry_on", "answered"),
    [
        (50_000, ELSEWHERE, OURS, 200),
        (50_000, None, OURS, 200),
        (100_000, ELSEWHERE, OURS, ELSEWHERE),  # more than HAProxy keeps
        (1000, ELSEWHERE, "conn-failure", ELSEWHERE),  # Ray's own
        (1000, None, "conn-failure", 502),
        (1000, 500, OURS, 500),
    ],
    ids=["engine dead", "died", "too long", "engine dead, as Ray has it", "died, as Ray has it", "an error"],
)
def test_what_a_replica_has_not_answered_goes_to_another_one(
    size: int, status: int | None, retry_on: str, answered: int, haproxy: ModuleType, tmp_path: Path
) -> None:
    """To the real HAProxy, though its router has chosen the replica that refuses."""
    body = b"x" * size
    posted: list[int] = []

    async def server(code: int | None) -> tuple[asyncio.Server, int]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            posted.append(len(await reader.readexactly(len(body))))
            if code is not None:
                writer.write(f"HTTP/1.1 {code} -\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            writer.close()

        made = await asyncio.start_server(answer, "127.0.0.1", 0)
        return made, made.sockets[0].getsockname()[1]

    async def ask() -> int:
        (refuses, pinned), (answers, other) = await server(status), await server(200)
        with socket.create_server(("127.0.0.1", 0)) as front:
            port = front.getsockname()[1]
            config = tmp_path / "haproxy.cfg"
            config.write_text(
                CONFIG.format(
                    bufsize=BUFSIZE, retries=RETRIES, retry_on=retry_on, fd=front.fileno(), pinned=pinned, other=other
                )
            )
            process = subprocess.Popen(
                [haproxy.get_haproxy_binary(), "-db", "-f", str(config)], pass_fds=(front.fileno(),)
            )
        try:
            async with aiohttp.request("POST", f"http://127.0.0.1:{port}/", data=body) as answer:
                return answer.status
        finally:
            process.kill()
            process.wait()
            refuses.close()
            answers.close()

    assert asyncio.run(ask()) == answered
    assert posted == [len(body)] * (2 if answered == 200 else 1)


def test_rays_haproxy_takes_the_retry_policy_for_every_backend() -> None:
    constants = inspect.getsource(quietly("ray.serve._private.constants"))
    assert 'RAY_SERVE_HAPROXY_RETRY_ON = get_env_str("RAY_SERVE_HAPROXY_RETRY_ON", "conn-failure")' in constants
    template = quietly("ray.serve._private.haproxy_templates").HAPROXY_CONFIG_TEMPLATE
    defaults = template[template.index("\ndefaults\n") :]
    assert "    option redispatch 1\n    retry-on {{ config.retry_on }}\n" in defaults[: defaults.index("\nfrontend ")]
    assert template.count("retry-on {{") == template.count("retries {{") == 1
    assert 'get_env_int_non_negative("RAY_SERVE_HAPROXY_RETRIES", None)' in constants
    assert "    tune.bufsize {{ config.bufsize }}\n" in template
    assert '"RAY_SERVE_HAPROXY_TUNE_BUFSIZE", 16384' in " ".join(constants.split())
