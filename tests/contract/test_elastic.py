"""What a number of engines that moves stands on inside Ray Serve: numbers set from outside, and who is stopped."""

from __future__ import annotations

import asyncio
import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import parameters, quietly
from contract.test_guarded_servers import built

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.deploy.serve_config import HEAD_RESOURCE, render, serve_config
from pdlab.deploy.serving.elastic import RUNNING, STOPPING, WARM_S, RayServe, Replica, ReplicasOfPool, next_to_stop
from pdlab.deploy.serving.fluid import WARM_PROMPT, WARM_TOKENS
from pdlab.placement.place import place

pytestmark = pytest.mark.usefixtures("ray_llm", "no_cluster", "import_warnings_aside")
PRIVATE = "ray.serve._private"


def test_numbers_are_set_through_the_controller_from_outside() -> None:
    import ray
    from ray import serve

    controller = quietly(f"{PRIVATE}.controller").ServeController
    cls = getattr(controller, "__ray_metadata__", None)
    made = controller if cls is None else cls.modified_class
    assert parameters(made.update_deployment_replicas) == ["self", "deployment_id", "target_num_replicas"]
    assert callable(made.get_serve_instance_details)
    common = quietly(f"{PRIVATE}.common")
    assert parameters(common.DeploymentID) == ["name", "app_name"]
    assert {RUNNING, STOPPING, "STARTING"} <= {each.value for each in common.ReplicaState}
    assert quietly(f"{PRIVATE}.constants").SERVE_CONTROLLER_NAME == "SERVE_CONTROLLER_ACTOR"
    assert "external_scaler_enabled" in parameters(serve.RunTarget)
    details = quietly("ray.serve.schema").DeploymentDetails.model_fields
    assert {"target_num_replicas", "replicas"} <= details.keys()
    assert {"replica_id", "state", "node_id"} <= quietly("ray.serve.schema").ReplicaDetails.model_fields.keys()
    assert parameters(ray.nodes) == []


def test_a_number_alone_restarts_no_replica() -> None:
    """A version is what makes Ray Serve replace replicas: ours is made once, by whoever hands the application over."""
    state = quietly(f"{PRIVATE}.deployment_state")
    change = inspect.getsource(state.DeploymentState.set_target_num_replicas)
    assert "self._deployed_info," in change, "as it was deployed"
    create = inspect.getsource(state.DeploymentTargetState.create)
    assert "DeploymentVersion(\n            info.version," in create
    by_client = inspect.getsource(quietly(f"{PRIVATE}.client").ServeControllerClient.deploy_applications)
    assert "version=deployment._version or get_random_string()" in by_client
    by_config = inspect.getsource(quietly(f"{PRIVATE}.application_state").build_serve_application._function)
    assert "version=code_version" in by_config
    # A deployment that is applied again as it was keeps its number.
    deploy = inspect.getsource(state.DeploymentState.deploy)
    assert "if not deployment_settings_changed and not target_capacity_changed:" in deploy


def moving(label: str = "pd-fluid-2xtp1-n2to3") -> Any:
    view = ClusterView(nodes=tuple(ClusterNode(id=f"n{i}", gpus=4, cpus=64, head=not i) for i in range(2)))
    deployment = Deployment(topology=parse_label(label))
    return render(deployment, place(deployment, view), view, None, "/models/m")


def test_an_exported_config_has_its_numbers_from_outside() -> None:
    schema = quietly("ray.serve.schema").ServeDeploySchema
    (app,) = schema.model_validate(serve_config(moving())).applications
    assert app.external_scaler_enabled
    assert not schema.model_validate(serve_config(moving("pd-fluid-2xtp1"))).applications[0].external_scaler_enabled


@pytest.mark.parametrize("direct", [False, True], ids=["ingress", "direct"])
def test_the_engines_have_no_autoscaling_of_ray_serves(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {d.name.split(":")[0]: d for d in built("pd-fluid-2xtp1-n2to3", direct=direct, monkeypatch=monkeypatch)}
    engines = found["Fluid"]
    assert engines._deployment_config.num_replicas == 2
    for each in found.values():
        assert each._deployment_config.autoscaling_config is None, "Ray Serve refuses both at once"
    spec = engines.func_or_class.board_spec
    assert (spec.engines, spec.least, spec.most) == (2, 2, 3)


def scheduler(nodes: list[str], head: str) -> Any:
    module, mocks = quietly(f"{PRIVATE}.deployment_scheduler"), quietly(f"{PRIVATE}.test_utils")
    cache = mocks.MockClusterNodeInfoCache()
    for node in nodes:
        cache.add_node(node)
    return module.DeploymentScheduler(cache, head, create_placement_group_fn=None)


@pytest.mark.parametrize("seed", range(60))
def test_who_is_stopped_next_is_known(seed: int) -> None:
    """Against Ray Serve's own choice, of replicas on several nodes beside those of another deployment."""
    module, common = quietly(f"{PRIVATE}.deployment_scheduler"), quietly(f"{PRIVATE}.common")
    rng = random.Random(seed)
    nodes = [f"n{i}" for i in range(rng.randint(1, 5))]
    theirs = scheduler(nodes, nodes[0])
    ours, another = (common.DeploymentID(name=name, app_name="pdlab") for name in ("Fluid:m", "Ingress"))
    others: dict[str, int] = {}
    replicas = []
    for deployment in (ours, another):
        theirs.on_deployment_created(deployment, module.SpreadDeploymentSchedulingPolicy())
    for number in range(rng.randint(2, 12)):
        replica = Replica(f"r{number}", RUNNING, rng.choice(nodes))
        theirs.on_replica_running(common.ReplicaID(replica.name, deployment_id=ours), replica.node)
        replicas.append(replica)
    for number in range(rng.randint(0, 3)):
        node = rng.choice(nodes)
        theirs.on_replica_running(common.ReplicaID(f"i{number}", deployment_id=another), node)
        others[node] = others.get(node, 0) + 1
    (stopped,) = theirs._get_replicas_to_stop(ours, 1)
    served = ReplicasOfPool(len(replicas), tuple(replicas), others, nodes[0])
    assert next_to_stop(served) == stopped.unique_id


def test_replicas_are_told_in_the_order_in_which_they_came_to_run() -> None:
    """Ray Serve takes the newest of a node, by an order that its account of replicas shares."""
    state = quietly(f"{PRIVATE}.deployment_state")
    assert "for replica in self._replicas.get()" in inspect.getsource(state.DeploymentState.list_replica_details)
    started = inspect.getsource(state.DeploymentState._check_startup_replicas)
    added = started.index("self._replicas.add(ReplicaState.RUNNING, replica)")
    assert added < started.index("on_replica_running(")


def test_a_first_transfer_is_a_request_of_rays_own() -> None:
    models = quietly("ray.llm._internal.serve.core.configs.openai_api_models")
    request = models.CompletionRequest(
        model="m", prompt=list(WARM_PROMPT), max_tokens=WARM_TOKENS, temperature=0.0, ignore_eos=True
    )
    assert not request.stream and len(WARM_PROMPT) >= 2 * 32, "whole KV blocks of every device"
    assert request.model_copy(update={"cache_salt": "a", "request_id": "b"}, deep=True).cache_salt == "a"
    assert WARM_S > 10


def test_a_replica_that_stops_is_no_longer_told_to_routers() -> None:
    state = quietly(f"{PRIVATE}.deployment_state")
    source = inspect.getsource(state.DeploymentState.get_running_replica_infos)
    assert "ReplicaState.RUNNING" in source and "STOPPING" not in source


async def test_how_first_transfers_went_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fluid = quietly("pdlab.deploy.serving.fluid")
    made: Any = SimpleNamespace(_warmed={}, _warming=set(), _llm_config=SimpleNamespace(model_id="m"))
    calls_made: list[Any] = []

    async def answers_from(pairs: dict[str, list[str]], request: Any) -> tuple[str, dict[str, Any]]:
        calls_made.append((pairs, request.model, request.prompt))
        ((own, (engine,)),) = pairs.items()
        if engine == "slow":
            await asyncio.sleep(60)
        if engine == "dead":
            raise RuntimeError("no prefill")
        return own, {engine: SimpleNamespace(choices=[]) if engine == "well" else "an error"}

    made.answers_from = answers_from
    monkeypatch.setattr(fluid, "WARM_S", 0.05)
    for engine in ("well", "slow", "dead", "ill"):
        fluid.SwitchesRoles._warm(made, "own", engine)
    await asyncio.gather(*made._warming)
    assert made._warmed.pop("well") == ""
    assert "Timeout" in made._warmed["slow"] and "no prefill" in made._warmed["dead"]
    assert made._warmed["ill"] == "it answers 'an error'"
    assert calls_made[0] == ({"own": ["well"]}, "m", list(WARM_PROMPT)) and not made._warming


def test_what_the_controller_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    schema, common = quietly("ray.serve.schema"), quietly(f"{PRIVATE}.common")

    def deployment(name: str, target: int, **replicas: tuple[str, str]) -> Any:
        return schema.DeploymentDetails(
            name=name, status="HEALTHY", status_trigger="UNSPECIFIED", message="", required_resources={},
            deployment_config=schema.DeploymentSchema(name=name), target_num_replicas=target,
            replicas=[
                schema.ReplicaDetails(replica_id=name, state=common.ReplicaState(state), node_id=node, start_time_s=1)
                for name, (state, node) in replicas.items()
            ],
        ).model_dump(exclude_unset=True)  # fmt: skip

    engines = deployment("Fluid:m", 2, a=("RUNNING", "n0"), b=("RUNNING", "n1"), c=("STOPPING", "n1"))
    router = deployment("Router", 1, r=("RUNNING", "n0"), s=("STARTING", "n1"))
    details = {"applications": {"pdlab": {"deployments": {"Fluid:m": engines, "Router": router}}}}
    head = {"NodeID": "n0", "Resources": {"CPU": 1.0, HEAD_RESOURCE: 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "n1", "Resources": {}}, head])
    made = RayServe("pdlab", "Fluid:m")
    calls: list[Any] = []

    async def call(method: str, *arguments: Any) -> Any:
        calls.append((method, *arguments))
        return details

    monkeypatch.setattr(made, "_call", call)
    replicas = (Replica("a", RUNNING, "n0"), Replica("b", RUNNING, "n1"), Replica("c", STOPPING, "n1"))
    assert asyncio.run(made.look()) == ReplicasOfPool(2, replicas, {"n0": 1}, "n0")
    asyncio.run(made.set_target(3))
    assert calls[-1] == ("update_deployment_replicas", common.DeploymentID("Fluid:m", "pdlab"), 3)
