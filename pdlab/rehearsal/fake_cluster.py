"""The parts of a launch that a rehearsal replaces: fake nodes, simulated engines, slow time."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.cluster.machine import usable_cores
from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.engine_cache import EngineCache
from pdlab.core.errors import UsageError
from pdlab.core.files import built_once, cache_dir
from pdlab.core.nodes import Role
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.request_lengths import served_length
from pdlab.core.served_model import require_served_shape
from pdlab.core.workload import Closed, Level, Workload
from pdlab.deploy.cpu_engine.tiny_model import build_tokenizer
from pdlab.deploy.options import LaunchRequest
from pdlab.deploy.prepared import Prepared
from pdlab.deploy.serve_config import ServeApp, engine_configs
from pdlab.rehearsal import stand_ins
from pdlab.rehearsal.spec import ENGINE_CLASS, SPEC, EngineSpec, write_spec
from pdlab.results.schema import Manifest
from pdlab.sim.argument_effects import with_added
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.sim.step_time import engine_cache

ENGINE_CLASS_ENV = "RAYLLM_VLLM_ENGINE_CLS"  # Ray's variable
VOCABULARY = 1024
# Requests/s of router, ingress and proxy per core of this machine that a rehearsal uses (docs/scale.md).
REQUESTS_PER_CORE_S = 10.0
LEAST_SLOW_DOWN, MOST_SLOW_DOWN = 4.0, 1000.0
MANY_NODES = 8
EXPORT_S = 10.0  # Ray's default, used for many nodes
PER_GPU = 8  # requests in flight per GPU at the best rate of the engines


class RehearsalSubstitutes:
    """`pdlab.deploy.launch.Substitutes` of a rehearsal. Raises UsageError if hardware or model cannot be simulated."""

    def __init__(self, request: LaunchRequest) -> None:
        assert request.rehearsal is not None and request.cluster is not None
        self._cluster = request.cluster
        self._hardware = load_hardware(request.rehearsal.hardware).serving(request.deployment)
        if self._hardware.cpu:
            raise UsageError(f"--hardware {request.rehearsal.hardware} is of CPU engines: give that of a GPU")
        shape = require_served_shape(request.deployment)
        self._shape: ModelShape = shape
        slow_down, self._why = request.rehearsal.slow_down, "as requested"
        if slow_down is None:
            slow_down, self._why = choose_slow_down(
                request.deployment, request.workload, self._hardware, shape, usable_cores()
            )
        self._slow_down: float = slow_down
        self._rehearsal: Rehearsal = request.rehearsal.model_copy(update={"slow_down": slow_down})

    @property
    def slow_down(self) -> float:
        """Real seconds per simulated second, as requested or chosen for this machine."""
        return self._slow_down

    def describe(self) -> str:
        """One line with the simulated hardware and the slow-down."""
        return (
            f"rehearsal: engines of {self._hardware.name} are simulated, {self._slow_down:g} times slower ({self._why})"
        )

    def start_nodes(self, announce: Callable[[str, str], None] | None = None) -> LocalNodes:
        return local_nodes.start_made_up(self._cluster, node_env(len(self._cluster.nodes)), announce)

    def environment(self) -> dict[str, str]:
        return serve_env(self._slow_down)

    def tokenizer(self) -> str:
        return str(ensure_tokenizer(cache_dir()))

    def simulated(self, prepared: Prepared, local: LocalNodes, progress: Callable[[str], None]) -> ServeApp:
        progress(self.describe())
        folder = Path(local.temp_dir) / "rehearsal"
        shutil.rmtree(folder / "shared", ignore_errors=True)
        files = {}
        for role in prepared.deployment.pools:
            files[role] = folder / f"{role}.json"
            write_spec(self._spec(prepared.deployment, role, folder / "shared"), files[role])
        return with_simulated_engines(prepared.app, files, self._slow_down)

    def _spec(self, deployment: Deployment, role: Role, shared: Path) -> EngineSpec:
        shape = self._shape
        length = served_length(deployment, role, shape, cpu=False) or shape.max_context
        return EngineSpec(
            rehearsal=self._rehearsal,
            role=role,
            hardware=self._hardware,
            shape=shape,
            deployment=with_added(deployment, self._hardware, shape),
            tokenizer=str(Path(self.tokenizer()) / "tokenizer.json"),
            folder=str(shared),
            max_model_len=length,
        )

    def manifest(self, manifest: Manifest) -> Manifest:
        versions = {**manifest.versions, "vllm": f"simulated ({self._hardware.stack})", "torch": None, "nixl": None}
        rehearsal = self._rehearsal.model_copy(update={"caches": self._caches(manifest.deployment)})
        changed = {"origin": "simulated", "rehearsal": rehearsal, "versions": versions, "transport_env": {}}
        return manifest.model_copy(update=changed)

    def _caches(self, deployment: Deployment | None) -> dict[str, EngineCache]:
        assert deployment is not None, "a launch has a deployment"
        return {
            role: engine_cache(deployment, pool, self._hardware, self._shape)
            for role, pool in with_added(deployment, self._hardware, self._shape).served_pools.items()
        }


# Longer intervals of Ray's daemons: on one machine those of 16 nodes take a quarter of a core.
OF_MANY_NODES = {
    "REPORTER_UPDATE_INTERVAL_MS": "15000",  # Ray: 5 s; the agents read facts of every process
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
}


def node_env(nodes: int) -> dict[str, str]:
    """Environment of the processes of a number of fake nodes."""
    # Sweeps need 1 s. With 1 s the agents of 13 nodes take a third of a core for 120 idle replicas.
    export_s = EXPORT_S if nodes >= MANY_NODES else 1.0
    return (
        stand_ins.WITHOUT_ARROW
        | (OF_MANY_NODES if nodes >= MANY_NODES else {})
        | {
            "RAY_metrics_report_interval_ms": f"{1000 * export_s:g}",
            "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": f"{1000 * export_s:g}",
            "RAY_SERVE_STATUS_GAUGE_REPORT_INTERVAL_S": f"{export_s:g}",
            local_nodes.AT_START: stand_ins.__name__,
            # Ray starts as many workers at once as the node has CPUs, but these CPUs are fake.
            "RAY_worker_maximum_startup_concurrency": str(max(2, int(usable_cores()))),
        }
    )


def serve_env(slow_down: float) -> dict[str, str]:
    """Environment of Ray Serve's processes: Ray's timeouts for routing are ``slow_down`` times longer."""
    return {"RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": f"{10 * slow_down:g}"}


def with_simulated_engines(app: ServeApp, files: Mapping[Role, Path], slow_down: float = 1.0) -> ServeApp:
    """The application with simulated engines, ``slow_down`` times slower. ``files``: role -> specification's file,
    in the order of the deployment's pools.
    """
    args = copy.deepcopy(app.args)
    args.pop("kv_guard", None)  # needs vLLM's engines, and its sources would hide the rest of pdlab on the nodes
    if "roles" in args:
        args["roles"]["slow_down"] = slow_down
    for file, config in zip(files.values(), engine_configs(args), strict=True):
        config["runtime_env"]["env_vars"] |= {ENGINE_CLASS_ENV: ENGINE_CLASS, SPEC: str(file)}
    return app.model_copy(update={"args": args})


def choose_slow_down(
    deployment: Deployment, workload: Workload, hardware: Hardware, shape: ModelShape, cores: float
) -> tuple[float, str]:
    """(slow-down, reason): at this slow-down this machine's serving path carries the best rate of the engines.

    Raises UsageError if the model or a request does not fit the engines.
    """
    rate_rps = best_rate_rps(deployment, workload, hardware, shape)
    carried_rps = REQUESTS_PER_CORE_S * cores
    needed = max(LEAST_SLOW_DOWN, rate_rps / carried_rps)
    digits = 10 ** math.floor(math.log10(needed))
    slow_down = min(MOST_SLOW_DOWN, math.ceil(needed / digits * 2) / 2 * digits)
    why = (
        f"{deployment.gpus} GPUs answer up to {rate_rps:.3g} requests/s of {workload.label}, the serving path on "
        f"{cores:g} cores {carried_rps:.3g}"
    )
    return slow_down, why


def best_rate_rps(deployment: Deployment, workload: Workload, hardware: Hardware, shape: ModelShape) -> float:
    """Simulated requests/s with `PER_GPU` requests in flight per GPU."""
    engines = sum(pool.replicas * pool.engines_per_replica for pool in deployment.pools.values())
    concurrency = max(PER_GPU * deployment.gpus, 2 * engines)
    level = Level(load=Closed(concurrency=concurrency), num_requests=3 * concurrency, seed=0)
    deployment = with_added(deployment, hardware, shape)
    return figures(simulate(deployment, [level], workload, hardware, shape)[0]).requests_per_s


def ensure_tokenizer(cache: Path) -> Path:
    """Folder of the tokenizer of all rehearsals; builds it at the first call (about 1 s)."""
    folder = cache / "models" / f"rehearsal-tokenizer-{VOCABULARY}"
    return built_once(folder, lambda part: build_tokenizer(part, VOCABULARY))
