"""What fluid engines stand on inside Ray and vLLM: the built application, the router, the board, roles by request."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from contract.conftest import SERVE, by_value, parameters, printed_without_pdlab, quietly
from contract.routers import ROUTERS, Replica, new_router, pending
from contract.test_guarded_servers import built

from pdlab.deploy.serve_config import KV_DRAIN_S, SHUTDOWN_WINDOW_S
from pdlab.deploy.serving import prefill_call
from pdlab.deploy.serving.builders import BY_VALUE, FLUID_ROUTER
from pdlab.deploy.serving.role_board import BOARD_PREFIX, MOST_NEWS_S, NAMESPACE, REPORT_S, SILENT_S
from pdlab.roles.messages import EngineReport, RoleNews
from pdlab.roles.prefixes import to_compute
from pdlab.roles.spec import FluidSpec

pytestmark = pytest.mark.usefixtures("ray_llm", "no_cluster", "import_warnings_aside")
MIXINS = {"SwitchesRoles", "SplitsSequences", "CallsPrefill", "DrainsBeforeStop", "HoldsPort"} | {
    "WatchesSteps",
    "ExplainsErrors",
    "StopsWithEngine",
    "CountsPoolTokens",
}


@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
def test_the_built_application_plays_roles(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {d.name.split(":")[0]: d for d in built("pd-fluid-3xtp1-p1d2", direct=direct, monkeypatch=monkeypatch)}
    engines = found["Fluid"]
    served = engines.func_or_class
    names = [base.__name__ for base in served.__mro__]
    assert set(names) >= MIXINS and ("HttpFront" in names) is direct
    assert names.index("SwitchesRoles") < names.index("SplitsSequences") < names.index("CallsPrefill")
    assert names.index("CallsPrefill") < names.index("PDOrchestratorMixin") < names.index("LLMServer")
    assert inspect.iscoroutinefunction(served.__init__) and inspect.iscoroutinefunction(served.__del__)
    config = engines._deployment_config
    assert config.num_replicas == 3 and config.graceful_shutdown_timeout_s == SHUTDOWN_WINDOW_S > KV_DRAIN_S
    assert config.request_router_config.request_router_class == FLUID_ROUTER
    router_kwargs = config.request_router_config.request_router_kwargs
    assert router_kwargs == {"board": served.board_name, "prefill": 1} and served.board_name.startswith(BOARD_PREFIX)
    assert served.board_spec.roles == "1:2"
    (llm_config,) = [value for value in engines.init_kwargs.values() if hasattr(value, "engine_kwargs")]
    assert llm_config.engine_kwargs["kv_transfer_config"]["kv_role"] == "kv_consumer"
    again = built("pd-fluid-3xtp1-p1d2", direct=direct, monkeypatch=monkeypatch)
    (other,) = [d.func_or_class for d in again if d.name.startswith("Fluid:")]
    assert other.board_name != served.board_name, "an application that was built again has a board of its own"


def test_the_role_is_a_field_of_the_request() -> None:
    """vLLM decides by the request's parameters; `kv_role` fences blocks of consumers and says nothing of prefill."""
    pull = inspect.getsource(quietly("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler"))
    base = inspect.getsource(quietly("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler"))
    assert '"do_remote_prefill"' in pull and '"do_remote_decode"' in pull
    for text in (pull, base):
        assert "is_kv_producer" not in text and "is_kv_consumer" not in text, "a role is enforced: roles cannot move"
    config = quietly("vllm.config.kv_transfer").KVTransferConfig
    made = config(kv_connector="NixlConnector", kv_role="kv_consumer", engine_id="e")
    assert made.is_kv_consumer and not made.is_kv_producer
    backend = inspect.getsource(quietly(f"{SERVE}.engines.vllm.kv_transfer.nixl"))
    assert "kv_role" not in backend, "Ray's backend shapes requests whatever the engine's role"


def test_a_salt_keeps_prefix_caches_apart() -> None:
    request = quietly(f"{SERVE}.core.configs.openai_api_models").CompletionRequest
    made = request(model="m", prompt="x", cache_salt="a")
    assert made.model_copy(update={"cache_salt": "b", "request_id": "r"}, deep=True).cache_salt == "b"


def router(
    roles: dict[str, str],
    loads: dict[str, tuple[int, int]] | None = None,
    own: str | None = None,
    *,
    by_session: bool = False,
) -> Any:
    """Of engines ``a`` (node 1), ``b`` (node 1), ``c`` and ``d`` (node 2), asked by an engine of node 1."""
    found = new_router("fluid_router", "FluidRouter", self_node_id="1")
    found.initialize_state(board="nobody", prefill=1, by_session=by_session)
    found._following = SimpleNamespace(done=lambda: False)
    found._known = RoleNews(1, 1, roles, loads or {})
    found._own = own
    found.update_replicas([Replica(name, node=node) for name, node in zip("abcd", "1122", strict=True)])
    return found


def of_100_tokens(avoid: frozenset[str] = frozenset()) -> prefill_call.Route:
    route = prefill_call.Route(avoid)
    route.tokens = 100
    return route


def chosen_for(ours: Any, route: prefill_call.Route | None, times: int = 40) -> set[str]:
    async def choose() -> str:
        queued = pending(route)
        replica = await ours._choose_replica_for_request(queued)
        assert queued.kwargs == {}, "the replica's method would refuse it"
        return str(replica.replica_id.unique_id)

    async def several() -> set[str]:
        return {await choose() for _ in range(times)}

    return asyncio.run(several())


ROLES = {"a": "prefill", "b": "decode", "c": "prefill", "d": "decode"}


@pytest.fixture(autouse=True)
def in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """`update_replicas` asks new replicas for their queues, in the background of the router's loop."""
    module = quietly(f"{ROUTERS}.request_router")
    monkeypatch.setattr(module.RequestRouter, "_event_loop", SimpleNamespace(create_task=lambda work: work.close()))


def test_clients_go_to_engines_that_decode() -> None:
    assert chosen_for(router(ROLES), None) == {"b", "d"}
    assert chosen_for(router({**ROLES, "d": "draining"}), None) == {"b"}


@pytest.mark.parametrize("role", ["joining", "leaving", "draining"])
def test_engines_that_take_no_work_get_none_unless_there_is_no_other(role: str) -> None:
    assert chosen_for(router({**ROLES, "c": role, "d": role}), None) == {"b"}
    assert chosen_for(router({**ROLES, "c": role, "d": role}), of_100_tokens()) == {"a"}
    assert chosen_for(router({"a": "prefill", "b": role, "c": role, "d": role}), None) == {"a"}
    assert chosen_for(router(dict.fromkeys("abcd", role), own="a"), of_100_tokens()) == {"b", "c", "d"}
    assert chosen_for(router({"a": "prefill", "b": "decode"}), None) == {"b"}, "of whom nobody has told"


async def test_a_session_stays_with_one_engine_that_decodes() -> None:
    async def of(ours: Any, session: str) -> set[str]:
        found = set()
        for _ in range(6):
            queued = pending(session=session)
            found.add((await ours._choose_replica_for_request(queued)).replica_id.unique_id)
            found.add((await ours.choose_replicas([], queued))[0][0].replica_id.unique_id)
        return found

    ours, another = router(ROLES, by_session=True), router(ROLES, by_session=True)
    homes = [await of(ours, f"s{number}") for number in range(12)]
    assert homes == [await of(another, f"s{number}") for number in range(12)], "each router finds the same"
    assert all(len(home) == 1 for home in homes) and set().union(*homes) == {"b", "d"}
    left = router({**ROLES, "d": "draining"}, by_session=True)
    moved = [await of(left, f"s{number}") for number in range(12)]
    assert moved == [{"b"}] * 12
    assert set().union(*[await of(router(ROLES), f"s{number}") for number in range(4)]) == {"b", "d"}


def test_the_engine_with_fewest_requests_decodes() -> None:
    loads = {"b": (0, 9), "d": (0, 3)}
    assert chosen_for(router(ROLES, loads), None, times=6) == {"d"}
    assert chosen_for(router(ROLES, loads), None, times=8) == {"b", "d"}, "those sent meanwhile count too"


def test_prompts_and_requests_that_were_sent_are_counted_apart() -> None:
    """An engine that was given a prompt as the roles changed is not one with hundreds of requests."""
    ours = router({"a": "prefill", "b": "prefill", "c": "prefill", "d": "decode"})
    ours._count(ours._with_role("decode", frozenset())[0], 0, 500)
    ours._known = replace(ours._known, roles=ROLES)
    assert chosen_for(ours, None, times=40) == {"b", "d"}


def test_prompts_go_to_engines_that_prefill_and_never_to_oneself() -> None:
    route = of_100_tokens()
    assert chosen_for(router(ROLES), route) == {"a", "c"}
    assert route.replica in {"a", "c"}
    assert chosen_for(router(ROLES, own="a"), of_100_tokens()) == {"c"}
    assert chosen_for(router(ROLES), of_100_tokens(frozenset({"c"}))) == {"a"}


def test_the_near_engine_prefills_unless_it_has_much_more_to_do() -> None:
    def chosen(near_tokens: int) -> set[str]:
        route = prefill_call.Route()
        route.tokens = 1000
        return chosen_for(router(ROLES, {"a": (near_tokens, 0), "c": (0, 0)}), route, times=1)

    assert chosen(1000) == {"a"}
    assert chosen(1001) == {"c"}


@pytest.mark.parametrize(
    ("cached", "loads", "to"),
    [
        ({}, {}, {"a", "b", "c"}),
        ({"c": 640}, {}, {"c"}),
        ({"c": 640}, {"c": 640}, {"c"}),
        ({"c": 640}, {"c": 641}, {"a", "b"}),  # what is cached there takes longer to wait for
        ({"a": 640, "c": 704}, {}, {"c"}),
        ({"a": 640, "c": 704}, {"c": 1000}, {"a", "b"}),
        ({"a": 640, "c": 640}, {}, {"a", "c"}),
        ({"a": 896, "c": 832}, {}, {"a"}),  # a step takes as long with either
        ({"b": 64, "d": 744, "gone": 744}, {}, {"b"}),  # d does not prefill
    ],
)
def test_a_prompt_goes_where_its_beginning_is_if_that_ends_earlier(
    cached: dict[str, int], loads: dict[str, int], to: set[str]
) -> None:
    """By an engine of a node of its own, so that none is near."""
    seen = set()
    for _ in range(30):
        ours = router({**ROLES, "b": "prefill"}, {name: (load, 0) for name, load in loads.items()})
        ours._self_node_id = "3"
        route = prefill_call.Route()
        route.tokens, route.cached = 1000, cached
        (chosen,) = chosen_for(ours, route, times=1)
        seen.add(chosen)
        assert ours._sent[chosen, 0] == to_compute(1000, cached.get(chosen, 0)), "what is cached is no work"
    assert seen <= to and (to == seen or len(to) > 2 or loads)


def test_what_waits_now_counts_more_than_what_was_told_and_sent() -> None:
    """The parent of a follow-up was counted when it was sent, and told while it waited; it has ended since."""
    ours = router(ROLES, {"c": (5000, 0)})
    ours._count(next(each for each in ours._replicas.values() if each.replica_id.unique_id == "c"), 0, 5000)
    route = prefill_call.Route()
    route.tokens, route.cached, route.waiting = 1000, {"c": 640}, {"a": 0, "c": 0}
    assert chosen_for(ours, route, times=6) == {"c"}
    route.waiting = {"a": 0, "c": 5000}
    assert chosen_for(ours, route, times=6) == {"a"}


def test_an_engine_that_must_be_avoided_is_so_whatever_it_has() -> None:
    route = prefill_call.Route(frozenset("c"))
    route.tokens, route.cached = 1000, {"c": 744}
    assert chosen_for(router(ROLES), route) == {"a"}


def test_an_engine_of_another_role_does_what_nobody_else_can() -> None:
    roles = dict.fromkeys("abcd", "decode")
    assert "a" not in chosen_for(router(roles, own="a"), of_100_tokens())
    assert chosen_for(router({**roles, "c": "draining"}, own="a"), of_100_tokens()) == {"b", "d"}
    route = of_100_tokens(frozenset("bcd"))
    with pytest.raises(LookupError):
        chosen_for(router(roles, own="a"), route)
    assert route.no_other


def test_without_a_board_the_first_engines_prefill() -> None:
    assert chosen_for(router({}), prefill_call.Route()) == {"a"}
    assert chosen_for(router({}), None) == {"b", "c", "d"}


def test_a_driver_without_a_cluster_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.get_actor` would start a Ray of its own where the driver has let go of its cluster."""
    import ray

    looked_up: list[str] = []
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: looked_up.append(name))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    asyncio.run(router(ROLES)._take_news())
    assert not looked_up


def test_haproxys_pick_is_an_engine_that_decodes() -> None:
    """Without a reservation Ray takes the first of the first rank of `choose_replicas`."""
    source = inspect.getsource(quietly("ray.serve._private.router").AsyncioRouter.choose_replica)
    assert "_choose_replicas_with_backoff(" in source and "(await candidates.__anext__())[0]" in source
    assert '"_reserve": False' in inspect.getsource(quietly(f"{SERVE}.core.ingress.router").LLMRouter._pick_replica)
    ours = router(ROLES)

    async def pick() -> set[str]:
        return {(await ours.choose_replicas([], None))[0][0].replica_id.unique_id for _ in range(40)}

    assert asyncio.run(pick()) == {"b", "d"}


def test_where_ray_makes_the_router() -> None:
    private = quietly("ray.serve._private.router")
    source = inspect.getsource(private.AsyncioRouter.request_router.fget)
    assert "initialize_state(**(self._request_router_kwargs))" in source and "self_node_id=self._node_id" in source
    once = inspect.getsource(private.AsyncioRouter._route_and_send_request_once)
    assert "_choose_replica_for_request(" in once
    assert parameters(quietly(f"{ROUTERS}.request_router").RequestRouter.update_replicas) == ["self", "replicas"]


def test_what_the_builder_takes_of_rays_own() -> None:
    ingress = quietly(f"{SERVE}.core.ingress.builder")
    for name in (
        "LLMServingArgs",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING",
        "_validate_direct_streaming_ingress_config",
        "_build_direct_streaming_llm_deployment",
        "_build_openai_ingress_request_router",
        "maybe_apply_llm_deployment_config_defaults",
        "make_fastapi_ingress",
        "to_model_metadata",
    ):
        assert hasattr(ingress, name), name
    options = inspect.getsource(ingress._get_direct_streaming_serve_options)
    assert '"request_router_config" not in llm_config.deployment_config' in options, "ours stays"
    built_by_ray = inspect.getsource(quietly(f"{SERVE}.serving_patterns.prefill_decode.builder").build_pd_openai_app)
    for call in ("_build_direct_streaming_llm_deployment(", "_with_ingress_request_router(", "lora_paths="):
        assert call in built_by_ray, "our builder follows this one"


def test_what_the_server_takes_of_rays_orchestration(pd_server: ModuleType) -> None:
    mixin = pd_server.PDOrchestratorMixin
    assert "_prefill_handle" in mixin.__annotations__ and not hasattr(mixin, "_prefill_handle")
    init = inspect.getsource(pd_server.PDDecodeServer.__init__)
    assert 'experimental_configs.get("pd_tokenize_once")' in init and "_install_tokenize_once()" in init
    assert callable(pd_server._install_tokenize_once)


def test_nobody_is_silent_while_waiting() -> None:
    router, engine = quietly("pdlab.deploy.serving.fluid_router"), quietly("pdlab.deploy.serving.fluid")
    assert MOST_NEWS_S < router.ANSWER_S, "a router that waits for news would take the board for dead"
    assert engine.ALIVE_EVERY * REPORT_S < SILENT_S / 2, "an idle engine would be taken for dead"


def test_rays_options_of_the_board() -> None:
    import ray

    @ray.remote
    class Nothing:
        pass

    options = {"name": "n", "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    source = inspect.getsource(quietly("ray.actor").ActorClass._remote)
    assert "if scheduling_strategy is None or isinstance(" in source, "any other one leaves the placement group"
    options["scheduling_strategy"] = "DEFAULT"
    assert Nothing.options(**options, num_cpus=0, max_restarts=-1, max_concurrency=10_000)
    assert parameters(ray.get_actor) == ["name", "namespace"]
    assert "all_namespaces" in parameters(quietly("ray.util").list_named_actors)


def test_the_classes_travel_to_nodes_without_pdlab() -> None:
    role_board, fluid = (quietly(f"pdlab.deploy.serving.{name}") for name in ("role_board", "fluid"))
    load = (
        "import asyncio\n"
        "from ray import cloudpickle\n"
        "board, plays, make, spec, report = cloudpickle.loads(sys.stdin.buffer.read())\n"
        "cloudpickle.dumps(make.__globals__['RoleBoard'])  # as a replica does that makes the actor\n"
        "made = board(cloudpickle.loads(cloudpickle.dumps(spec(roles='1:1'))))\n"
        "counts = report(prompts={3: (1, 7)}).fields\n"
        "assert b'EngineReport' not in cloudpickle.dumps(counts), 'the class goes with every message'\n"
        "async def live():\n"
        "    for name in 'ab':\n"
        "        await made.report(name, 'node', counts)\n"
        "    made.decide()\n"
        "    made._running.cancel()\n"
        "    return await made.look()\n"
        "roles = [engine['role'] for engine in asyncio.run(live())['engines'].values()]\n"
        "assert sorted(roles) == ['decode', 'prefill'], roles\n"
    )
    classes = (role_board.RoleBoard, fluid.SwitchesRoles, role_board.board, FluidSpec, EngineReport)
    printed_without_pdlab(load, sent=by_value(classes, *BY_VALUE))
