"""What a rendering says: precedence of engine arguments, pins, strategies, environment."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from pdlab.core.catalog import load_cluster, local_cluster, resolve_model
from pdlab.core.deployment import (
    Collocated,
    Deployment,
    Disaggregated,
    Fluid,
    Pool,
    RequestLimits,
    Routing,
    Serving,
    Transport,
    parse_label,
)
from pdlab.core.nodes import ClusterView, Nic
from pdlab.deploy.serve_config import (
    DP_BUILDER,
    FLUID_BUILDER,
    KV_GUARD_POLL,
    KV_GUARD_SCHEDULER,
    OPENAI_BUILDER,
    PD_BUILDER,
    ServeApp,
    engine_configs,
    model_id,
    render,
    serve_config,
)
from pdlab.placement.place import place
from pdlab.roles.spec import FluidSpec


def app_of(deployment: Deployment, view: ClusterView | None = None) -> ServeApp:
    view = view or load_cluster("p5.48xlarge-x2")
    shape, source = resolve_model(deployment.model)
    return render(deployment, place(deployment, view), view, shape, source or "/models/tiny")


def labelled(label: str, **rest: Any) -> Deployment:
    return Deployment(topology=parse_label(label), **rest)


@pytest.mark.parametrize(
    ("label", "builder"),
    [
        ("collocated-4xtp2", OPENAI_BUILDER),
        ("collocated-2xtp2dp2", DP_BUILDER),
        ("pd-pack-p1xtp4-d1xtp4", PD_BUILDER),
        ("pd-spread-p1xtp2dp2-d1xtp4", PD_BUILDER),
    ],
)
def test_builder(label: str, builder: str) -> None:
    assert app_of(labelled(label)).import_path == builder


RAYS = "ray.serve.experimental"
OURS = "pdlab.deploy.serving.prefill_router"


@pytest.mark.parametrize(
    ("routing", "collocated", "prefill"),
    [
        ("power-of-two", None, f"{OURS}.PrefillRouter"),
        ("round-robin", f"{RAYS}.round_robin_router.RoundRobinRouter", f"{OURS}.PrefillInTurn"),
        ("session", f"{RAYS}.consistent_hash_router.ConsistentHashRouter", f"{OURS}.PrefillBySession"),
    ],
)
def test_each_pool_has_its_router(routing: Routing, collocated: str | None, prefill: str) -> None:
    def router(config: dict[str, Any]) -> Any:
        return config["deployment_config"].get("request_router_config", {}).get("request_router_class")

    pool = Pool(replicas=2, routing=routing)
    (alone,) = app_of(Deployment(topology=Collocated(pool=pool))).args["llm_configs"]
    assert router(alone) == collocated
    args = app_of(Deployment(topology=Disaggregated(prefill=pool, decode=Pool(), placement="pack"))).args
    assert (router(args["prefill_config"]), router(args["decode_config"])) == (prefill, None)
    args = app_of(Deployment(topology=Disaggregated(prefill=Pool(), decode=pool, placement="pack"))).args
    assert (router(args["prefill_config"]), router(args["decode_config"])) == (f"{OURS}.PrefillRouter", collocated)


def test_a_fluid_pool_keeps_sessions_if_asked() -> None:
    def args(routing: Routing) -> dict[str, Any]:
        return app_of(Deployment(topology=Fluid(pool=Pool(replicas=3, routing=routing)))).args

    assert args("session")["by_session"] is True and "by_session" not in args("power-of-two")
    assert "request_router_config" not in args("session")["llm_config"]["deployment_config"]
    with pytest.raises(ValueError, match="routing round-robin: roles and loads decide"):
        args("round-robin")
    with pytest.raises(ValueError, match="routing session: the ranks of dp 2"):
        Pool(dp=2, routing="session")


def test_engine_argument_precedence() -> None:
    shape, source = resolve_model("gpt-oss-120b")
    assert shape and source
    shape = shape.model_copy(update={"engine_kwargs": {"a": "model", "b": "model", "c": "model"}})
    deployment = Deployment(
        topology=Collocated(pool=Pool(engine_kwargs={"c": "pool"})), engine_kwargs={"b": "all", "c": "all"}
    )
    view = load_cluster("p5.48xlarge-x2")
    args = render(deployment, place(deployment, view), view, shape, source).args
    kwargs = args["llm_configs"][0]["engine_kwargs"]
    assert [kwargs[key] for key in "abc"] == ["model", "all", "pool"]
    assert kwargs["tensor_parallel_size"] == 1 and "data_parallel_size" not in kwargs


@pytest.mark.parametrize(
    ("label", "changes", "reads"),
    [
        ("collocated-4xtp2", {}, True),
        ("pd-spread-p1xtp4-d1xtp4", {}, True),
        ("pd-fluid-2xtp1", {}, True),
        ("collocated-1xtp8", {"engine_kwargs": {"enable_auto_tool_choice": False}}, False),
        ("collocated-1xtp8", {"engine_kwargs": {"tool_call_parser": None}}, False),
        ("pd-spread-p1xtp4-d1xtp4", {"engine_kwargs": {"enable_auto_tool_choice": False}}, False),
        ("collocated-1xtp8", {"model": "somebody/model"}, False),
        ("collocated-1xtp8", {"model": "somebody/model", "engine_kwargs": {"tool_call_parser": "hermes"}}, False),
        ("collocated-1xtp8", {"model": "somebody/model",
                              "engine_kwargs": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}}, True),
    ],
)  # fmt: skip
def test_the_guard_knows_whether_the_engines_read_tool_calls(label: str, changes: dict[str, Any], reads: bool) -> None:
    app = app_of(labelled(label, **changes))
    assert app.args["guard"]["tools"] is reads
    parsers = [config["engine_kwargs"].get("tool_call_parser") for config in engine_configs(app.args)]
    assert parsers and ("model" in changes or "engine_kwargs" in changes or set(parsers) == {"openai"})


def test_roles_and_transport() -> None:
    transport = Transport(backends=("LIBFABRIC", "UCX"), ucx_tls="tcp", verbose=True)
    topology = Disaggregated(prefill=Pool(tp=2), decode=Pool(tp=4), placement="spread", transport=transport)
    args = app_of(Deployment(topology=topology)).args
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = args[f"{role}_config"]
        transfer = config["engine_kwargs"]["kv_transfer_config"]
        assert transfer["kv_role"] == kv_role
        assert transfer["kv_connector_extra_config"]["backends"] == ["LIBFABRIC", "UCX"]
        env = config["runtime_env"]["env_vars"]
        assert env["UCX_TLS"] == "tcp" and env["NIXL_LOG_LEVEL"] == "DEBUG" and "UCX_PROTO_INFO" in env
    assert args["decode_config"]["experimental_configs"] == {"_prewarm_prefill_decode": True}
    assert "experimental_configs" not in args["prefill_config"]


def pd_engine(transport: Transport, role: str = "decode") -> dict[str, Any]:
    topology = Disaggregated(prefill=Pool(tp=2), decode=Pool(tp=4), placement="spread", transport=transport)
    kwargs: dict[str, Any] = app_of(Deployment(topology=topology)).args[f"{role}_config"]["engine_kwargs"]
    return kwargs


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [("grpc://collector:4317", "grpc"), ("https://collector:4318/v1/traces", "http/protobuf")],
)
@pytest.mark.parametrize("label", ["pd-spread-p1xtp4-d1xtp4", "collocated-2xtp4", "collocated-2xtp2dp2"])
def test_spans_are_made_where_an_endpoint_is_given(endpoint: str, protocol: str, label: str) -> None:
    quiet = app_of(labelled(label))
    assert "traces" not in quiet.args and "otlp" not in str(quiet.args).lower()
    deployment = labelled(label, serving=Serving(otlp_endpoint=endpoint, otlp_sample=0.25))
    args = app_of(deployment).args
    assert args["traces"] == {"share": 0.25}
    for role, config in zip(deployment.pools, engine_configs(args), strict=True):
        assert config["engine_kwargs"]["otlp_traces_endpoint"] == endpoint
        env = {name: text for name, text in config["runtime_env"]["env_vars"].items() if name.startswith("OTEL_")}
        assert env == {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "3",
            "OTEL_SERVICE_NAME": f"pdlab-{role}",
        }


def test_decode_is_told_whether_it_takes_the_first_token() -> None:
    topology = Disaggregated(
        prefill=Pool(), decode=Pool(), placement="spread", transport=Transport(reuse_first_token=True)
    )
    assert app_of(Deployment(topology=topology)).args["prefill_call"]["reuse_first_token"] is True


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_how_often_decode_looks_for_the_ends_of_reads_is_told_where_it_reads(role: str) -> None:
    def extra(**transport: Any) -> dict[str, Any]:
        engine = pd_engine(Transport(**transport), role)
        given: dict[str, Any] = engine["kv_transfer_config"]["kv_connector_extra_config"]
        return given

    assert extra(kv_poll_s=0.002).get(KV_GUARD_POLL) == (0.002 if role == "decode" else None)
    assert KV_GUARD_POLL not in extra() | extra(kv_guard=False, kv_poll_s=0.002)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pd_is_served_with_the_kv_guard(role: str) -> None:
    kwargs = pd_engine(Transport(kv_deadline_s=4.0), role)
    assert kwargs["scheduler_cls"] == "pdlab.guard.scheduler.GuardScheduler"
    transfer = kwargs["kv_transfer_config"]
    assert transfer["kv_connector"] == "NixlConnector"
    assert transfer["kv_connector_module_path"] == "pdlab.guard.connector"
    assert transfer["kv_connector_extra_config"] == {"backends": ["UCX"], "pdlab_deadline_s": 4.0}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_the_kv_guard_the_engines_are_vllms_own(role: str) -> None:
    kwargs = pd_engine(Transport(kv_guard=False), role)
    assert "scheduler_cls" not in kwargs and "kv_connector_module_path" not in kwargs["kv_transfer_config"]
    assert kwargs["kv_transfer_config"]["kv_connector_extra_config"] == {"backends": ["UCX"]}


def test_the_kv_guard_is_brought_to_nodes_without_pdlab() -> None:
    pd = labelled("pd-spread-p1xtp1-d1xtp1", model="tiny-gptoss")
    assert app_of(pd).args["kv_guard"] == {"send_sources": True}
    assert app_of(pd, local_cluster(2)).args["kv_guard"] == {"send_sources": False}
    assert "kv_guard" not in app_of(pd.with_topology(transport=Transport(kv_guard=False))).args
    assert "kv_guard" not in app_of(labelled("collocated-1xtp1")).args


def env_of(deployment: Deployment, role: str = "decode", view: ClusterView | None = None) -> dict[str, str]:
    env: dict[str, str] = app_of(deployment, view).args[f"{role}_config"]["runtime_env"]["env_vars"]
    return env


UCX_TABLE = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}


@pytest.mark.parametrize("placement", ["pack", "spread"])
@pytest.mark.parametrize("backends", [("UCX",), ("LIBFABRIC",)])
def test_ucx_prints_how_it_reads_where_it_is_used(
    placement: Literal["pack", "spread"], backends: tuple[str, ...]
) -> None:
    """Into a stream without a buffer: an engine's standard output is written when it ends."""
    for view in (load_cluster("p5.48xlarge-x2"), local_cluster(2)):
        transport = Transport(backends=backends)
        topology = Disaggregated(prefill=Pool(), decode=Pool(), placement=placement, transport=transport)
        env = env_of(Deployment(topology=topology, model="tiny-gptoss"), view=view)
        assert {name: env[name] for name in UCX_TABLE if name in env} == (UCX_TABLE if "UCX" in backends else {})
    used = labelled("pd-pack-p1xtp1-d1xtp1", env={"UCX_PROTO_INFO": "used"})
    assert env_of(used)["UCX_PROTO_INFO"] == "used"


def test_gpu_engines_compile_no_sampler_and_use_every_rail() -> None:
    """A p5.48xlarge has four EFA devices per GPU, and NIXL lets UCX use two of them."""
    assert env_of(labelled("pd-spread-p1xtp4-d1xtp4")) == {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "UCX_MAX_RMA_RAILS": "4",
        **UCX_TABLE,
    }
    alone = app_of(labelled("collocated-1xtp4")).args["llm_configs"][0]["runtime_env"]["env_vars"]
    assert alone == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def test_rails_follow_the_nodes_and_the_persons_own_variables_win() -> None:
    nodes = load_cluster("p5.48xlarge-x2").nodes
    two = tuple(n.model_copy(update={"nic": n.nic.model_copy(update={"count": 16})}) for n in nodes)
    assert "UCX_MAX_RMA_RAILS" not in env_of(labelled("pd-pack-p1xtp2-d1xtp2"), view=ClusterView(nodes=two))
    infiniband = tuple(n.model_copy(update={"nic": Nic(kind="infiniband", count=32)}) for n in nodes)
    assert env_of(labelled("pd-pack-p1xtp2-d1xtp2"), view=ClusterView(nodes=infiniband))["UCX_MAX_RMA_RAILS"] == "4"
    assert "UCX_MAX_RMA_RAILS" not in env_of(
        labelled("pd-spread-p1xtp1-d1xtp1", model="tiny-gptoss"), view=local_cluster(2)
    )
    own: dict[str, str | None] = {"UCX_MAX_RMA_RAILS": "1", "UCX_IB_PREFER_NEAREST_DEVICE": "y"}
    env = env_of(labelled("pd-spread-p1xtp2-d1xtp2", env=own))
    assert (env["UCX_MAX_RMA_RAILS"], env["UCX_IB_PREFER_NEAREST_DEVICE"]) == ("1", "y")


def test_tp1_of_the_large_model_takes_smaller_batches() -> None:
    for label, expected in (("collocated-8xtp1", (4096, 256, 0.94)), ("collocated-4xtp2", (None, None, None))):
        kwargs = app_of(labelled(label)).args["llm_configs"][0]["engine_kwargs"]
        names = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")
        assert tuple(kwargs.get(name) for name in names) == expected
        assert kwargs["max_model_len"] == 16384, "else vLLM reserves KV cache for one request of 131,072 tokens"


def test_a_fingerprint_is_of_what_serves_too() -> None:
    """`--resume` compares them."""
    today = labelled("pd-spread-p1xtp4-d1xtp4")
    limited = labelled("pd-spread-p1xtp4-d1xtp4", serving=Serving(requests=RequestLimits(max_prompts=8)))
    assert limited.fingerprint != today.fingerprint
    patient = labelled("pd-spread-p1xtp4-d1xtp4", serving=Serving(prefill_timeout_s=600))
    assert patient.fingerprint not in (today.fingerprint, limited.fingerprint)


def test_calls_of_prefill_and_the_window_of_a_stop() -> None:
    serving = Serving(prefill_timeout_s=30, prefill_absent_s=5, on_prefill_failure=("fail",))
    args = app_of(labelled("pd-spread-p1xtp4-d1xtp4", serving=serving)).args
    assert args["prefill_call"] == {
        **{"timeout_s": 30, "absent_s": 5, "on_failure": ["fail"]},
        **{"early_token": False, "reuse_first_token": False},
    }
    windows = [
        args[f"{role}_config"]["deployment_config"]["graceful_shutdown_timeout_s"] for role in ("prefill", "decode")
    ]
    assert windows == [45.0, 45.0] and args["kv_drain_s"] < 45.0, "Serve ends a replica that drains for longer"
    assert args["kv_drain_s"] > 30.0, "vLLM's lease"
    assert "request_router_config" in args["prefill_config"]["deployment_config"]
    assert "request_router_config" not in args["decode_config"]["deployment_config"], "clients' requests go Ray's way"
    alone = app_of(labelled("collocated-1xtp4", serving=serving)).args
    assert not {"prefill_call", "kv_drain_s"} & set(alone)
    assert "graceful_shutdown_timeout_s" not in alone["llm_configs"][0]["deployment_config"]


def test_pools_share_no_nested_value() -> None:
    args = app_of(labelled("pd-pack-p1xtp4-d1xtp4", engine_kwargs={"hf_overrides": {"x": 1}})).args
    prefill, decode = (args[f"{role}_config"]["engine_kwargs"]["hf_overrides"] for role in ("prefill", "decode"))
    assert prefill == decode and prefill is not decode


@pytest.mark.parametrize(
    ("label", "strategy", "selectors"),
    [
        ("collocated-2xtp2", "STRICT_PACK", [{"ray.io/node-id": "a"}] * 2),
        ("collocated-3xtp4", "STRICT_PACK", [{"ray.io/node-id": "in(a,b)"}] * 4),
        ("collocated-1xtp4pp3", "PACK", [{"ray.io/node-id": "a"}] * 8 + [{"ray.io/node-id": "b"}] * 4),
        ("collocated-1xtp4dp3", "PACK", [{"ray.io/node-id": "in(a,b)"}] * 4),
        ("collocated-1xtp16", "PACK", [{"ray.io/node-id": "a"}] * 8 + [{"ray.io/node-id": "b"}] * 8),
    ],
)
def test_pins(label: str, strategy: str, selectors: list[dict[str, str]]) -> None:
    nodes = load_cluster("p5.48xlarge-x2").nodes
    live = ClusterView(
        nodes=tuple(
            n.model_copy(update={"id": i, "labels": {"ray.io/node-id": i}}) for n, i in zip(nodes, "ab", strict=True)
        )
    )
    (config,) = engine_configs(app_of(labelled(label), live).args)
    assert config["placement_group_config"]["strategy"] == strategy
    assert config["deployment_config"]["placement_group_bundle_label_selector"] == selectors


def test_nodes_of_a_file_are_found_by_name() -> None:
    config = app_of(labelled("collocated-1xtp1")).args["llm_configs"][0]
    assert config["deployment_config"]["placement_group_bundle_label_selector"] == [{"pdlab/node": "node-1"}]


def test_cpu_engines() -> None:
    view = local_cluster(2)
    args = app_of(labelled("pd-spread-p1xtp1-d1xtp2", model="tiny-gptoss"), view).args
    config = args["decode_config"]
    assert config["accelerator_config"] == {"kind": "cpu"}
    assert config["placement_group_config"]["bundle_per_worker"] == {"CPU": 1}
    assert config["deployment_config"]["ray_actor_options"] == {"num_cpus": 0}
    assert config["engine_kwargs"]["kv_transfer_config"]["kv_buffer_device"] == "cpu"
    assert config["engine_kwargs"]["block_size"] % 32 == 0
    assert args["ingress_deployment_config"]["ray_actor_options"]["num_cpus"] == 0
    assert config["model_loading_config"] == {"model_id": "tiny-gptoss", "model_source": "/models/tiny"}


@pytest.mark.parametrize(
    ("model", "requested_id", "name"),
    [
        ("gpt-oss-120b", None, "gpt-oss-120b"),
        ("openai/gpt-oss-20b", None, "gpt-oss-20b"),
        ("gpt-oss-120b", "mine", "mine"),
        ("org/name", None, "org/name"),
        ("./models/mine", None, "mine"),
        ("/models/mine", None, "mine"),
    ],
)
def test_model_id(model: str, requested_id: str | None, name: str) -> None:
    shape = resolve_model(model)[0] if model[0] not in "./" else None
    assert model_id(labelled("collocated-1xtp1", model=model, model_id=requested_id), shape) == name


def test_serve_config_listens_where_told() -> None:
    config = serve_config(app_of(labelled("collocated-1xtp1")), host="10.0.0.1", port=9)
    assert config["http_options"] == {"host": "10.0.0.1", "port": 9}


def test_fluid_engines_are_all_consumers_and_the_board_is_told_the_rules() -> None:
    topology = Fluid(
        pool=Pool(replicas=4, tp=2),
        roles="1:3",
        p_min=1,
        d_min=2,
        slo_tpot_s=0.02,
        prefill_locally_below="auto",
        prefix_affinity=True,
    )
    app = app_of(Deployment(topology=topology), load_cluster("p5.48xlarge-x2"))
    assert app.import_path == FLUID_BUILDER
    engine = app.args["llm_config"]["engine_kwargs"]
    assert engine["kv_transfer_config"]["kv_role"] == "kv_consumer", "a producer has no fence that holds blocks back"
    assert engine["scheduler_cls"] == KV_GUARD_SCHEDULER and app.args["kv_guard"] == {"send_sources": True}
    assert app.args["llm_config"]["deployment_config"]["num_replicas"] == 4
    assert "request_router_config" not in app.args["llm_config"]["deployment_config"], "it has the board's name"
    assert FluidSpec(**app.args["roles"]) == FluidSpec(
        roles="1:3",
        p_min=1,
        d_min=2,
        slo_tpot_s=0.02,
        prefill_locally_below="auto",
        prefix_affinity=True,
        engines=4,
    )
    assert app.args["prefill_call"]["on_failure"] == ["retry", "local"]
    assert not app.scaled and "external_scaler_enabled" not in serve_config(app)["applications"][0]


def test_a_number_of_engines_that_moves_is_the_boards() -> None:
    app = app_of(Deployment(topology=parse_label("pd-fluid-4xtp2-n2to8")), load_cluster("p5.48xlarge-x2"))
    deployed = app.args["llm_config"]["deployment_config"]
    assert deployed["num_replicas"] == 4 and "autoscaling_config" not in deployed
    spec = FluidSpec(**app.args["roles"])
    assert (spec.engines, spec.least, spec.most, spec.down_after_s) == (4, 2, 8, 120.0)
    assert serve_config(app)["applications"][0]["external_scaler_enabled"] is True
    nodes = {value for each in deployed["placement_group_bundle_label_selector"] for value in each.values()}
    assert any("node-2" in each or "," in each for each in nodes), "where there is room for the others"
