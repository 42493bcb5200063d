"""What pdlab.deploy.serving.prefill_call, prefill_router and drain stand on inside Ray and vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from contract.conftest import SERVE, parameters, printed_without_pdlab, quietly
from contract.routers import ROUTERS, Replica, new_router, pending
from contract.test_guarded_servers import answer, built, decode_server

from pdlab.deploy.serve_config import KV_DRAIN_S, PREFILL_ROUTER, SHUTDOWN_WINDOW_S
from pdlab.deploy.serving import prefill_call
from pdlab.deploy.serving.builders import FLUID_ROUTER

pytestmark = pytest.mark.usefixtures("ray_llm", "no_cluster", "import_warnings_aside")


@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
@pytest.mark.parametrize("label", ["pd-spread-p2xtp1-d1xtp1", "pd-pack-p1xdp2-d1xdp2"])
def test_the_built_application_calls_and_drains(label: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {d.name.split(":")[0]: d for d in built(label, direct=direct, monkeypatch=monkeypatch)}
    for role in ("Prefill", "Decode"):
        names = [base.__name__ for base in found[role].func_or_class.__mro__]
        assert {"DrainsBeforeStop", "HoldsPort"} <= set(names) and ("CallsPrefill" in names) is (role == "Decode")
        assert found[role].func_or_class.kv_drain_s == KV_DRAIN_S
        assert found[role]._deployment_config.graceful_shutdown_timeout_s == SHUTDOWN_WINDOW_S > KV_DRAIN_S
        assert inspect.iscoroutinefunction(found[role].func_or_class.__del__)
    rules = found["Decode"].func_or_class.prefill_rules
    assert dataclasses.astuple(rules) == (120.0, 5.0, ["retry", "local"], False, False)
    assert found["Prefill"]._deployment_config.request_router_config.request_router_class == PREFILL_ROUTER
    assert found["Decode"]._deployment_config.request_router_config.request_router_class != PREFILL_ROUTER


@pytest.mark.parametrize(
    ("router", "router_kwargs"),
    [(PREFILL_ROUTER, {}), (FLUID_ROUTER, {"board": "b", "prefill": 1})],
    ids=["prefill", "fluid"],
)
def test_the_router_travels_to_nodes_without_pdlab(router: str, router_kwargs: dict[str, Any]) -> None:
    config = quietly("ray.serve.config").RequestRouterConfig(
        request_router_class=router, request_router_kwargs=router_kwargs
    )
    load = "from ray import cloudpickle\nprint(cloudpickle.loads(sys.stdin.buffer.read()).__name__)\n"
    sent = config.get_serialized_request_router_cls()
    assert printed_without_pdlab(load, sent=sent) == [router.rpartition(".")[2]]


def router(*replicas: Replica, kind: str = "PrefillRouter") -> Any:
    found = new_router("prefill_router", kind, initial_backoff_s=0.001, max_backoff_s=0.002)
    if kind == "PrefillBySession":
        found.initialize_state()
    found.update_replicas(list(replicas))
    return found


def test_a_call_without_a_route_is_rays_own() -> None:
    async def run() -> Any:
        queued = pending()
        found = await router(Replica("r0"))._choose_replica_for_request(queued)
        return found.replica_id.unique_id

    assert asyncio.run(run()) == "r0"


async def test_a_call_learns_where_it_went_and_sends_no_route() -> None:
    route = prefill_call.Route()
    queued = pending(route)
    ours = router(Replica("r0", length=5), Replica("r1", length=1))
    first = await ours._choose_replica_for_request(queued)
    assert queued.kwargs == {}, "the replica's method would refuse it"
    assert route.replica == first.replica_id.unique_id == "r1", "the shorter queue, which is Ray's own choice"
    route.replica = None
    queued.reset_future()
    await ours._choose_replica_for_request(queued, is_retry=True)
    assert route.replica == "r1", "Ray asks once more where a replica refused"


async def test_a_call_whose_replica_died_is_at_none_until_there_is_another() -> None:
    """Ray sends it again by itself, and waits for a replica without a limit: decode must see that nobody has it."""
    route = prefill_call.Route()
    queued = pending(route)
    ours = router(Replica("r0", length=1))
    await ours._choose_replica_for_request(queued)
    assert route.replica == "r0"
    ours.update_replicas([])
    queued.reset_future()
    again = asyncio.ensure_future(ours._choose_replica_for_request(queued, is_retry=True))
    await asyncio.sleep(0.05)
    assert not again.done() and route.replica is None
    ours.update_replicas([Replica("r1")])
    await asyncio.wait_for(again, 20)
    assert route.replica == "r1"


async def test_a_replica_to_be_avoided_is_not_taken_for_another_ones_sake() -> None:
    """Ray hands a replica to the first request in line, whichever asked for it."""
    ours = router(Replica("r0"), Replica("r1", length=9))
    routes = [prefill_call.Route(frozenset({"r0"})) if i % 2 else prefill_call.Route() for i in range(20)]
    await asyncio.gather(*(ours._choose_replica_for_request(pending(route)) for route in routes))
    assert {route.replica for route in routes[1::2]} == {"r1"}
    assert "r0" in {route.replica for route in routes[::2]}


async def test_without_another_replica_it_says_so() -> None:
    route = prefill_call.Route(frozenset({"r0"}))
    with pytest.raises(LookupError):
        await router(Replica("r0"))._choose_replica_for_request(pending(route))
    assert route.no_other


def test_another_replica_that_is_full_is_waited_for() -> None:
    async def run() -> str | None:
        full, route = Replica("r1", length=10), prefill_call.Route(frozenset({"r0"}))
        queued = asyncio.ensure_future(router(Replica("r0"), full)._choose_replica_for_request(pending(route)))
        while full.probes < 3:
            assert not queued.done()
            await asyncio.sleep(0.001)
        full.length = 9
        await queued
        return route.replica

    assert asyncio.run(run()) == "r1"


async def test_a_session_goes_to_one_prefill_replica_unless_that_is_to_be_avoided() -> None:
    ours = router(*(Replica(f"r{number}", length=number) for number in range(4)), kind="PrefillBySession")

    async def of(session: str, avoid: frozenset[str] = frozenset()) -> str | None:
        route = prefill_call.Route(avoid)
        queued = pending(route, session)
        found = await asyncio.wait_for(ours._choose_replica_for_request(queued), 20)
        assert queued.kwargs == {} and found.replica_id.unique_id == route.replica
        return route.replica

    homes = [await of(f"s{number}") for number in range(16)]
    assert homes == [await of(f"s{number}") for number in range(16)] and len(set(homes)) > 1
    assert homes[0] is not None
    assert await of("s0", frozenset({homes[0]})) != homes[0]


def test_where_the_route_passes() -> None:
    """Through the handle and its router to the request that the router chooses for."""
    handle, private = quietly("ray.serve.handle"), quietly("ray.serve._private.router")
    assert "router.assign_request(metadata, *args, **kwargs)" in inspect.getsource(handle._DeploymentHandleBase._remote)
    assert "kwargs=request_kwargs" in inspect.getsource(private.AsyncioRouter.assign_request)
    once = inspect.getsource(private.AsyncioRouter._route_and_send_request_once)
    assert once.index("_choose_replica_for_request(") < once.index("try_send_request(")
    router = quietly(f"{ROUTERS}.request_router").RequestRouter
    assert parameters(router._select_from_candidate_replicas) == ["self", "candidates", "backoff_index"]
    assert parameters(router._backoff) == ["self", "attempt"]
    assert parameters(router._choose_replica_for_request) == ["self", "pending_request", "is_retry"]


def test_rays_response_ends_when_it_is_cancelled() -> None:
    handle = quietly("ray.serve.handle")
    response = handle.DeploymentResponseGenerator
    assert parameters(response.cancel) == ["self"] and inspect.iscoroutinefunction(response.__anext__)
    cancelled = quietly("ray.serve.exceptions").RequestCancelledError
    assert issubclass(cancelled, quietly("ray.exceptions").TaskCancelledError)


def test_rays_orchestration_is_what_we_follow(pd_server: ModuleType) -> None:
    source = inspect.getsource(pd_server.PDOrchestratorMixin._pd_handle_request)
    for step in (
        "backend.requires_peer_binding",
        "backend.concurrent_handoff",
        "self._request_prefill_token_ids(prefill_request)",
        "prefill_handle_method.remote(prefill_request, raw_request_info)",
        "_reuse_prompt_token_ids(self._decode_reuse_ids(prefill_chunk))",
        "request=request, peer=None, prefill_response=prefill_chunk",
        "session_id_from_headers(raw_request_info.headers)",
        "serve.get_multiplexed_model_id()",
    ):
        assert step in source
    assert callable(pd_server._reuse_prompt_token_ids) and callable(pd_server.session_id_from_headers)
    nixl = quietly(f"{SERVE}.engines.vllm.kv_transfer.nixl").NixlConnectorBackend
    assert (nixl.requires_peer_binding, nixl.concurrent_handoff) == (False, False)


def test_prefills_errors_are_told_by_code_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    models = quietly(f"{SERVE}.core.configs.openai_api_models")
    made = prefill_call._unavailable(["it is gone"])
    assert isinstance(made, models.ErrorResponse) and made.error.code == 503 and "it is gone" in made.error.message
    server, engines = decode_server(monkeypatch)

    async def dead(*_: Any, **__: Any) -> Any:
        error = models.ErrorInfo(message="EngineDeadError", type="InternalServerError", code=500)
        yield models.ErrorResponse(error=error)

    server._prefill_handle = SimpleNamespace(completions=SimpleNamespace(remote=dead))
    (found,) = answer(server, engines, prompt="a")
    assert found.choices[0].text == "after a" and engines.decode[0].kv_transfer_params is None


def test_vllm_tells_prefill_of_a_request_that_decode_rejects() -> None:
    engine = quietly("vllm.v1.engine.async_llm").AsyncLLM
    assert parameters(engine.notify_kv_transfer_request_rejected)[:3] == ["self", "request_id", "kv_transfer_params"]
    serving = quietly("vllm.entrypoints.generate.base.serving")
    source = inspect.getsource(serving)
    assert "notify_kv_transfer_request_rejected(" in source, "so decode tells it itself once it has the request"
    pull = quietly("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler")
    assert "remote_request_id=request.request_id" in inspect.getsource(pull)


def test_vllm_resets_its_prefix_cache_only_where_no_block_is_held() -> None:
    engine = quietly("vllm.v1.engine.async_llm").AsyncLLM
    assert inspect.signature(engine.reset_prefix_cache).return_annotation in (bool, "bool")
    pool = quietly("vllm.v1.core.block_pool").BlockPool
    made = pool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    assert made.reset_prefix_cache() is True
    held = made.get_new_blocks(1)
    assert made.reset_prefix_cache() is False
    made.free_blocks(held)
    assert made.reset_prefix_cache() is True
    steps = inspect.getsource(quietly("vllm.v1.core.sched.scheduler").Scheduler.has_finished_requests)
    assert "len(self.requests) > num_in_queues" in steps, "an idle engine that holds blocks goes on looking"


def test_rays_servers_end_by_their_destructor(llm_server: ModuleType) -> None:
    assert inspect.iscoroutinefunction(llm_server.LLMServer.__del__)
    replica = quietly("ray.serve._private.replica")
    assert "call_destructor()" in inspect.getsource(
        replica.Replica.shutdown if hasattr(replica, "Replica") else replica
    )


def test_where_ray_takes_the_port_of_the_side_channel_from() -> None:
    nixl = quietly(f"{SERVE}.engines.vllm.kv_transfer.nixl").NixlConnectorBackend
    source = inspect.getsource(nixl._set_side_channel_port)
    assert 'is_set("VLLM_NIXL_SIDE_CHANNEL_PORT")' in source and '"NIXL_SIDE_CHANNEL_PORT_BASE", 20000' in source
    assert "rc.rank.rank * num_devices" in inspect.getsource(nixl._compute_port_offset)
    start = inspect.getsource(quietly(f"{SERVE}.engines.vllm.vllm_engine").VLLMEngine.__init__)
    assert "setup_engine_backend()" in start, "in LLMServer.start, behind ours"


def test_the_controller_says_when_an_application_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.deploy.serving import drain

    serve, schema = quietly("ray.serve"), quietly("ray.serve.schema")
    assert schema.ApplicationStatus.DELETING.value == "DELETING"
    assert "applications" in schema.ServeStatus.__dataclass_fields__
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="pdlab"))
    for state, goes in ((schema.ApplicationStatus.RUNNING, False), (schema.ApplicationStatus.DELETING, True)):
        overview = schema.ApplicationStatusOverview(state, "", time.time(), {})
        monkeypatch.setattr(serve, "status", lambda o=overview: schema.ServeStatus(applications={"pdlab": o}))
        assert drain._application_goes() is goes
    monkeypatch.setattr(serve, "status", schema.ServeStatus)
    assert drain._application_goes() is True
