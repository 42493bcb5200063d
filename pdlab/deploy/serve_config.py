"""Deployment + Placement -> the plain arguments of `pdlab.deploy.serving.builders`. Imports neither Ray nor vLLM.

Engine arguments, later ones win: device defaults, the model's, the model's for that TP degree on GPUs, the
deployment's, the pool's, and last the ones that pdlab itself owns (`pdlab.core.deployment.RESERVED_ENGINE_KWARGS`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, Pool, Routing, Transport
from pdlab.core.environment import secret_values
from pdlab.core.hybrid_kv import TURNED_OFF, is_hybrid
from pdlab.core.nodes import WIRE_OF_NIC, ClusterView, Placement, Role
from pdlab.core.request_lengths import ARGUMENT, configured_length
from pdlab.core.schema import Frozen
from pdlab.core.served_model import in_bucket
from pdlab.deploy.engine_arguments import reads_tool_calls
from pdlab.placement.place import bundle_nodes, node_selector
from pdlab.roles.spec import FluidSpec

OPENAI_BUILDER = "pdlab.deploy.serving.builders:build_openai_app"
DP_BUILDER = "pdlab.deploy.serving.builders:build_dp_openai_app"
PD_BUILDER = "pdlab.deploy.serving.builders:build_pd_openai_app"
FLUID_BUILDER = "pdlab.deploy.serving.builders:build_fluid_openai_app"
# By name: what they are runs inside engines.
KV_GUARD_CONNECTOR = "pdlab.guard.connector"
KV_GUARD_SCHEDULER = "pdlab.guard.scheduler.GuardScheduler"
KV_GUARD_DEADLINE = "pdlab_deadline_s"
KV_GUARD_POLL = "pdlab_poll_s"
HOST_COPY_SPEC = "pdlab.deploy.cpu_engine.host_copy"

# vLLM's argument, in units of 2**30 bytes.
OFFLOAD_ARGUMENT = "kv_offloading_size"

# Every head node of Ray has 1 of it; replicas that take a share of it are there.
HEAD_RESOURCE, HEAD_SHARE = "node:__internal_head__", 0.001
# Of the request router that lets a call of prefill avoid a replica.
PREFILL_ROUTER = "pdlab.deploy.serving.prefill_router.PrefillRouter"
# By `Pool.routing`. Ray's router by prefix is not among them: it fails on prompts of token ids (Ray 2.60), which
# pdlab's own load sends.
ROUTERS: dict[Routing, str | None] = {
    "power-of-two": None,
    "round-robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
    "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
PREFILL_ROUTERS: dict[Routing, str] = {
    "power-of-two": PREFILL_ROUTER,
    "round-robin": "pdlab.deploy.serving.prefill_router.PrefillInTurn",
    "session": "pdlab.deploy.serving.prefill_router.PrefillBySession",
}
# vLLM keeps prefill's KV blocks for a read for 30 s, its lease. A replica that is to stop waits until they are read or
# the lease has ended; then Ray Serve would end it.
KV_DRAIN_S, SHUTDOWN_WINDOW_S = 35.0, 45.0
# KV cache of one CPU engine rank: 400,000 tokens of the tiny model, 64 requests of 5,000.
CPU_KV_BYTES = 512 * 2**20


class ServeApp(Frozen):
    """One Ray Serve application: the builder's import path and the arguments it is called with. ``scaled``: pdlab, not
    Ray Serve's autoscaling, changes the number of replicas.
    """

    import_path: str
    args: dict[str, Any]
    scaled: bool = False


def render(
    deployment: Deployment,
    placement: Placement,
    view: ClusterView,
    shape: ModelShape | None,
    model_source: str,
) -> ServeApp:
    """The application that serves ``deployment`` as placed.

    ``shape`` is None for a model whose config.json is not at hand; ``model_source`` is the Hugging
    Face id or the folder that the engines load.
    """
    configs = {role: _llm_config(deployment, role, placement, view, shape, model_source) for role in placement.roles}
    # With direct streaming there is no ingress deployment, and Ray rejects options for one.
    direct = deployment.serving.direct_streaming
    ingress: dict[str, Any] = {} if direct else {"ingress_deployment_config": ingress_options(deployment)}
    tools = all(reads_tool_calls(config["engine_kwargs"]) for config in configs.values())
    if deployment.serving.otlp_endpoint is not None:
        ingress["traces"] = {"share": deployment.serving.otlp_sample}
    ingress["guard"] = {**deployment.serving.requests.model_dump(mode="json"), "tools": tools}
    if deployment.transport is not None:
        serving = deployment.serving
        call = {
            "timeout_s": serving.prefill_timeout_s,
            "absent_s": serving.prefill_absent_s,
            "on_failure": list(serving.on_prefill_failure),
            "early_token": serving.early_token,
            "reuse_first_token": deployment.transport.reuse_first_token,
        }
        ingress |= {"prefill_call": call, "kv_drain_s": KV_DRAIN_S}
        if deployment.transport.kv_guard:
            # The engines of local nodes find pdlab itself.
            ingress["kv_guard"] = {"send_sources": placement.device == "gpu"}
    if isinstance(deployment.topology, Fluid):
        fluid = {"llm_config": configs["fluid"], "roles": FluidSpec.of(deployment.topology).changed, **ingress}
        if deployment.topology.pool.routing == "session":
            fluid["by_session"] = True
        return ServeApp(import_path=FLUID_BUILDER, args=fluid, scaled=deployment.topology.moves)
    if isinstance(deployment.topology, Disaggregated):
        pd = {"prefill_config": configs["prefill"], "decode_config": configs["decode"], **ingress}
        return ServeApp(import_path=PD_BUILDER, args=pd)
    if deployment.topology.pool.dp > 1:
        return ServeApp(import_path=DP_BUILDER, args={"llm_config": configs["collocated"], **ingress})
    return ServeApp(import_path=OPENAI_BUILDER, args={"llm_configs": [configs["collocated"]], **ingress})


def engine_configs(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configurations of engines in the arguments of a builder, in the order of the deployment's pools."""
    named = [args[key] for key in ("prefill_config", "decode_config", "llm_config") if key in args]
    return [*named, *args.get("llm_configs", ())]


def model_id(deployment: Deployment, shape: ModelShape | None) -> str:
    """The name that clients use: --model-id, the catalogue's name, the folder's name, or the Hugging Face id."""
    if deployment.model_id:
        return deployment.model_id
    if shape is not None:
        return shape.name
    if in_bucket(deployment.model):
        return deployment.model.rstrip("/").rpartition("/")[2]
    path = Path(deployment.model).expanduser()
    return path.name if path.is_absolute() or deployment.model.startswith(".") else deployment.model


def _llm_config(
    deployment: Deployment,
    role: Role,
    placement: Placement,
    view: ClusterView,
    shape: ModelShape | None,
    model_source: str,
) -> dict[str, Any]:
    pool = deployment.pools[role]
    transport = deployment.transport
    cpu = placement.device == "cpu"
    batching_ms = deployment.serving.stream_batching_ms
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": model_id(deployment, shape), "model_source": model_source},
        "engine_kwargs": engine_kwargs(deployment, role, shape, cpu=cpu),
        "placement_group_config": {
            "bundle_per_worker": {"CPU": 1} if cpu else {"GPU": 1, "CPU": 1},
            "strategy": _strategy(placement, role),
        },
        "deployment_config": {
            "num_replicas": pool.replicas,
            "placement_group_bundle_label_selector": [
                {label: one_of(values)} for label, values in _selectors(pool, placement, role, view)
            ],
        },
    }
    if transport:
        config["deployment_config"]["graceful_shutdown_timeout_s"] = SHUTDOWN_WINDOW_S
    if (router := router_of(role, pool)) is not None:
        config["deployment_config"]["request_router_config"] = {"request_router_class": router}
    experimental: dict[str, Any] = {} if batching_ms is None else {"stream_batching_interval_ms": batching_ms}
    if role == "decode":
        experimental["_prewarm_prefill_decode"] = True
    if role in ("decode", "fluid") and deployment.serving.tokenize_once:
        experimental["pd_tokenize_once"] = True
    if experimental:
        config["experimental_configs"] = experimental
    if cpu:
        config["accelerator_config"] = {"kind": "cpu"}
        config["callback_config"] = {"callback_class": "pdlab.deploy.cpu_engine.replica.LocalCallback"}
        # The replica's own process takes no CPU slot: the engine ranks have them.
        config["deployment_config"]["ray_actor_options"] = {"num_cpus": 0}
    config["runtime_env"] = {"env_vars": engine_env(deployment, role, view)}
    return config


def router_of(role: Role, pool: Pool) -> str | None:
    """The class that picks a replica of the pool; None: Ray Serve's own, or that of a fluid pool's builder."""
    if role == "fluid":
        return None
    return (PREFILL_ROUTERS if role == "prefill" else ROUTERS)[pool.routing]


def engine_kwargs(deployment: Deployment, role: Role, shape: ModelShape | None, *, cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for one pool."""
    pool = deployment.pools[role]
    merged: dict[str, Any] = cpu_engine_kwargs() if cpu else {}
    length = configured_length(deployment, pool, shape, cpu=cpu)
    longest = {} if length is None else {ARGUMENT: length}
    merged |= longest
    if shape:
        merged |= shape.engine_kwargs
    if shape and not cpu:
        merged |= shape.engine_kwargs_by_tp.get(pool.tp, {})
    merged |= deployment.engine_kwargs_of(pool) | longest
    merged["tensor_parallel_size"] = pool.tp
    if deployment.serving.otlp_endpoint is not None:
        merged["otlp_traces_endpoint"] = deployment.serving.otlp_endpoint
    if pool.pp > 1:
        merged["pipeline_parallel_size"] = pool.pp
    if pool.dp > 1:
        merged["data_parallel_size"] = pool.dp
    if pool.expert_parallel:
        merged["enable_expert_parallel"] = True
    if deployment.transport is not None:
        merged["kv_transfer_config"] = _kv_transfer_config(deployment, deployment.transport, role, cpu=cpu)
        if deployment.transport.kv_guard:
            merged["scheduler_cls"] = KV_GUARD_SCHEDULER
        # A store beside prefill's connector may turn the manager off there; vLLM moves KV only between equal engines.
        if role == "decode" and not is_hybrid(
            {"kv_transfer_config": _kv_transfer_config(deployment, deployment.transport, "prefill", cpu=cpu)}
        ):
            merged.setdefault(TURNED_OFF, True)
    elif deployment.decode_bench:
        merged |= decode_bench_kwargs()
    elif stores := _stores(deployment, cpu=cpu):
        merged["kv_transfer_config"] = stores[0] if len(stores) == 1 else _several(stores)
    # Ray and vLLM write into what they are given: no pool shares a nested value with another.
    return copy.deepcopy(merged)


def _kv_transfer_config(deployment: Deployment, transport: Transport, role: Role, *, cpu: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": transport.connector,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {"backends": list(transport.backends)},
    }
    if transport.kv_guard:
        config["kv_connector_module_path"] = KV_GUARD_CONNECTOR
        config["kv_connector_extra_config"][KV_GUARD_DEADLINE] = transport.kv_deadline_s
        if transport.kv_poll_s and role != "prefill":
            config["kv_connector_extra_config"][KV_GUARD_POLL] = transport.kv_poll_s
    if cpu:
        config["kv_buffer_device"] = "cpu"
    # Decode takes all of a prompt from NIXL: what it stored beside would be copies that nobody loads.
    stores = _stores(deployment, cpu=cpu) if role == "prefill" else []
    if not stores:
        return config
    # The first one speaks to the other pool for all of them (Ray Serve LLM), and loads where several could.
    several = _several([config, *stores])
    if transport.kv_guard:
        several["kv_connector_module_path"] = KV_GUARD_CONNECTOR
    if cpu:
        several["kv_buffer_device"] = "cpu"
    return several


def _several(connectors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def _stores(deployment: Deployment, *, cpu: bool) -> list[dict[str, Any]]:
    """The connectors that keep KV cache outside of an engine's own memory."""
    stores: list[dict[str, Any]] = []
    if deployment.kv_offload_gb is not None:
        extra: dict[str, Any] = {"cpu_bytes_to_use": int(1e9 * deployment.kv_offload_gb)}
        # vLLM's own copies are for GPUs.
        extra |= {"spec_name": "HostCopySpec", "spec_module_path": HOST_COPY_SPEC} if cpu else {}
        stores.append({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra})
    return [{"kv_role": "kv_both", **store} for store in (*stores, *deployment.kv_connectors)]


def _own_offload_gib(deployment: Deployment, role: Role) -> float:
    """Host memory (2**30 bytes) of each engine, of which vLLM itself makes an OffloadingConnector by its engine
    arguments (vllm/config/vllm.py of 0.29). With another backend or VLLM_USE_SIMPLE_KV_OFFLOAD it makes another one."""
    arguments = deployment.engine_kwargs_of(deployment.pools[role])
    native = arguments.get("kv_offloading_backend") in (None, "native")
    simple = deployment.env_of(role).get("VLLM_USE_SIMPLE_KV_OFFLOAD") not in (None, "", "0")
    size = arguments.get(OFFLOAD_ARGUMENT)
    return size if native and not simple and isinstance(size, int | float) else 0


def host_copy_source(deployment: Deployment) -> str:
    """What gives the size that `host_copy_bytes` counts, as a user gives it."""
    if deployment.kv_offload_gb is not None:
        return "--kv-offload-gb"
    if any(_own_offload_gib(deployment, role) for role in deployment.pools):
        return f"--engine-arg {OFFLOAD_ARGUMENT}"
    return "cpu_bytes_to_use of --kv-connector"


def host_copy_bytes(deployment: Deployment, placement: Placement) -> Counter[str]:
    """Node id -> bytes of KV cache that the node's engines keep in its host memory with vLLM's OffloadingConnector.
    Nodes without any are absent. An engine that spans nodes counts on each, as each rank maps all of it."""
    held: Counter[str] = Counter()
    for role, pool in deployment.pools.items():
        sizes = [_own_offload_gib(deployment, role) * 2**30]
        for store in _stores(deployment, cpu=False) if role in ("prefill", "collocated") else ():
            if store.get("kv_connector") == "OffloadingConnector":
                size = store.get("kv_connector_extra_config", {}).get("cpu_bytes_to_use")
                sizes.append(size if isinstance(size, int | float) else 0)
        if not (of_engine := int(sum(sizes))):
            continue
        for replica in placement.of(role):
            ranks = {(name, number // pool.pp) for number, group in enumerate(replica.groups) for name in group.slots}
            held.update({name: of_engine * sum(name == each for each, _ in ranks) for name, _ in ranks})
    return held


def decode_bench_kwargs() -> dict[str, Any]:
    """vLLM's DecodeBenchConnector fills the KV cache of a prompt, all but its last token, so that the first
    step of a request is a decode step at its full context. A prompt that came from the prefix cache
    would not be filled. Constant values send every token to the same experts; hence a deviation,
    of the size of the connector's own default mean.
    """
    fill = {"fill_mean": 0.015, "fill_std": 0.015}
    connector = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": fill}
    return {"kv_transfer_config": connector, "enable_prefix_caching": False}


def gpu_env() -> dict[str, str]:
    """FlashInfer's sampler is compiled when an engine starts, with nvcc, which a node without the CUDA toolkit has
    not; greedy answers never come from it."""
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def rails(view: ClusterView) -> int | None:
    """RDMA devices per GPU where every node with GPUs has more than the two that NIXL lets UCX use; None: no need."""
    nodes = [node for node in view.nodes if node.gpus]
    per_gpu = [node.nic.count // node.gpus if node.nic.kind in WIRE_OF_NIC else 0 for node in nodes]
    return min(per_gpu) if per_gpu and min(per_gpu) > 2 else None


def transport_env(transport: Transport, view: ClusterView) -> dict[str, str]:
    """Environment of the engines that steers UCX and NIXL on those nodes."""
    env = {"UCX_TLS": transport.ucx_tls} if transport.ucx_tls else {}
    if (count := rails(view)) is not None:
        env["UCX_MAX_RMA_RAILS"] = str(count)
    if "UCX" in transport.backends:
        # For `pdlab.deploy.wire_proof`: UCX prints how it will read when it first uses a connection, not per transfer.
        # "used" would count, but print when the connection ends. Of the streams only stderr has no buffer.
        env |= {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
    if transport.verbose:
        env |= {"UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "DEBUG"}
    return env


def traces_env(endpoint: str, role: str) -> dict[str, str]:
    """How OpenTelemetry sends spans to the endpoint. The provider waits for it when a process ends, as long as the
    exporter tries: not longer than a replica may take to stop."""
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc" if endpoint.startswith("grpc:") else "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "3",
        "OTEL_SERVICE_NAME": f"pdlab-{role}",
    }


def engine_env(deployment: Deployment, role: Role, view: ClusterView) -> dict[str, str]:
    """Environment of a pool's engines, but the variables that are given by name only (`with_secrets`)."""
    env = cpu_env() if view.device == "cpu" else gpu_env()
    if deployment.transport is not None:
        env |= transport_env(deployment.transport, view)
    if deployment.serving.otlp_endpoint is not None:
        env |= traces_env(deployment.serving.otlp_endpoint, role)
    return env | {name: value for name, value in deployment.env_of(role).items() if value is not None}


def with_secrets(app: ServeApp, deployment: Deployment, environ: Mapping[str, str]) -> ServeApp:
    """The application with the values of the variables that are given by name only, to be submitted and not shown.
    Raises UsageError where ``environ`` lacks one."""
    args = copy.deepcopy(app.args)
    for role, config in zip(deployment.pools, engine_configs(args), strict=True):
        config["runtime_env"]["env_vars"] |= secret_values(deployment.env_of(role), environ)
    return app.model_copy(update={"args": args})


def _strategy(placement: Placement, role: Role) -> str:
    one_node_each = all(len(replica.nodes) == 1 for replica in placement.of(role))
    return "STRICT_PACK" if one_node_each else "PACK"


def _selectors(pool: Pool, placement: Placement, role: Role, view: ClusterView) -> list[tuple[str, tuple[str, ...]]]:
    """Per bundle the label and the values of it that are allowed."""
    label, values = node_selector(placement, role, view)
    return [(label, tuple(values[node_id] for node_id in node_ids)) for node_ids in bundle_nodes(pool, placement, role)]


def one_of(values: Sequence[str]) -> str:
    """Ray's label selector: the value itself, or in(a,b)."""
    return values[0] if len(values) == 1 else f"in({','.join(values)})"


def ingress_options(deployment: Deployment) -> dict[str, Any]:
    """Ray Serve options of the HTTP ingress: beside the proxy, which is on the head node, and in no engine's slot."""
    return {
        "num_replicas": deployment.ingress_replicas,
        # Ray's DP builder merges its autoscaling default in, which contradicts a number: None takes it out.
        "autoscaling_config": None,
        "ray_actor_options": {"num_cpus": 0, "resources": {HEAD_RESOURCE: HEAD_SHARE}},
    }


# CPU engines: vLLM's CPU backend on small nodes.


def cpu_engine_kwargs() -> dict[str, Any]:
    """gpt-oss experts run in bfloat16 only, and CPU attention takes KV blocks of multiples of 32."""
    return {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": CPU_KV_BYTES,
        "worker_extension_cls": "pdlab.deploy.cpu_engine.worker.WorkerExtension",
    }


def cpu_env() -> dict[str, str]:
    """One thread per engine rank, no look at a model hub, and the worker in the engine core's process."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "PDLAB_AT_START": "pdlab.deploy.cpu_engine.prefork",  # heard only on the local nodes
        "HF_HUB_OFFLINE": "1",
        # vLLM's sampler compiles C++ for log-probabilities, which needs a compiler and seconds.
        "TORCHDYNAMO_DISABLE": "1",
        "RAY_metrics_report_interval_ms": "1000",  # sweeps wait for what engines have counted after each level
        # vLLM sets it before it imports NIXL, which pdlab.deploy.cpu_engine.worker does earlier.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }


def serve_config(
    app: ServeApp,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    proxy_location: str = "HeadOnly",
    controller_env: Mapping[str, str] | None = None,
    py_modules: Sequence[str] = (),
) -> dict[str, Any]:
    """What ``serve deploy FILE`` accepts: Ray's ServeDeploySchema as plain data.

    ``controller_env``: environment of Ray Serve's own processes and of the replicas, if Ray Serve is not running yet.
    ``py_modules``: URLs of archives with modules for the task that builds the application, and for the replicas.
    """
    application: dict[str, Any] = {
        "name": "pdlab",
        "route_prefix": "/",
        "import_path": app.import_path,
        "args": app.args,
    }
    if app.scaled:
        application["external_scaler_enabled"] = True
    if py_modules:
        application["runtime_env"] = {"py_modules": list(py_modules)}
    config: dict[str, Any] = {"proxy_location": proxy_location, "http_options": {"host": host, "port": port}}
    if controller_env:
        config["controller_options"] = {"runtime_env": {"env_vars": dict(controller_env)}}
    return {**config, "applications": [application]}
