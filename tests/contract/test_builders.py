"""Ray's public builders, Ray's Serve schema and vLLM's engine arguments accept everything we render."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from contract.conftest import printed_without_pdlab, quietly

from pdlab.cli import launch
from pdlab.core.catalog import load_cluster, load_deployment, resolve_model
from pdlab.core.deployment import Deployment, Disaggregated, Transport, parse_label
from pdlab.core.nodes import ClusterView, Placement
from pdlab.deploy.serve_config import HEAD_RESOURCE, HEAD_SHARE, ServeApp, engine_configs, render, serve_config
from pdlab.deploy.serving.builders import _PDLAB
from pdlab.deploy.serving.guard_sources import digest, sources
from pdlab.placement.place import place
from tests.support.deployments import SHAPES

ALWAYS = ("ExplainsErrors", "StopsWithEngine", "CountsPoolTokens")
MIXED_IN = ("HttpFront", "SplitsSequences", "InstallsGuard", "WatchesSteps", *ALWAYS)
# Of other counts alone, for whoever reads them.
LIKE_OTHERS = {"pd-pack-p1xtp1-d2xtp2", "pd-pack-p1xtp4-d1xtp2", "pd-pack-p1xtp4-d1xtp4"}
# Shapes that no file has: data parallel collocated, TP over nodes, pipeline over nodes, local DP.
LABELS = [
    ("collocated-2xtp2dp2", "p5.48xlarge-x2"),
    ("collocated-1xtp16", "p5.48xlarge-x2"),
    ("collocated-1xtp8pp2", "p5.48xlarge-x2"),
    ("pd-spread-p2xtp4-d1xtp4dp2ep", "p5.48xlarge-x2"),
    ("pd-pack-p1xtp1-d1xdp2", "local-2"),
]


@dataclasses.dataclass(frozen=True)
class Rendered:
    deployment: Deployment
    view: ClusterView
    placement: Placement
    app: ServeApp


def rendered(deployment: Deployment, cluster: str) -> Rendered:
    view = load_cluster(cluster)
    placement = place(deployment, view)
    shape, source = resolve_model(deployment.model)
    return Rendered(deployment, view, placement, render(deployment, placement, view, shape, source or "/models/tiny"))


def all_cases() -> list[Rendered]:
    cases = []
    for name, cluster in SHAPES.items():
        if name not in LIKE_OTHERS:
            cases.append(rendered(load_deployment(name), cluster))
    for label, cluster_name in LABELS:
        model = "tiny-gptoss" if cluster_name.startswith("local") else "gpt-oss-120b"
        cases.append(rendered(Deployment(topology=parse_label(label), model=model), cluster_name))
    return cases


CASES = all_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.deployment.label)


def builder_of(app: ServeApp) -> Any:
    module, _, name = app.import_path.partition(":")
    return getattr(quietly(module), name)


@each_case
@pytest.mark.usefixtures("no_cluster")
def test_builder_accepts(case: Rendered, ray_llm: ModuleType) -> None:
    import ray

    builder = builder_of(case.app)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = builder(case.app.args)
    assert not ray.is_initialized()

    deployments = {deployment.name: deployment for deployment in deployments_of(built)}
    assert len(deployments) == len(case.deployment.pools) + 1
    for role, pool in case.deployment.pools.items():
        prefix = {"prefill": "Prefill:", "decode": "Decode:"}.get(role, "")
        (name,) = [n for n in deployments if n.startswith(prefix) and n != "OpenAiIngress" and (prefix or ":" in n)]
        made = deployments[name]
        assert made.num_replicas == pool.replicas * pool.dp
        config = made._replica_config
        bundles = config.placement_group_bundles
        assert len(bundles) == len(config.placement_group_bundle_label_selector) == pool.tp * pool.pp
        if case.placement.device == "gpu":
            # One more CPU in the first bundle: the replica's own process, which placement counts.
            assert [bundle["GPU"] for bundle in bundles] == [1] * len(bundles)
            assert sum(bundle["CPU"] for bundle in bundles) == len(bundles) + 1
        else:
            assert sum(bundle["CPU"] for bundle in bundles) == len(bundles)
    ingress = deployments["OpenAiIngress"]
    assert ingress.num_replicas == case.deployment.ingress_replicas
    assert ingress.ray_actor_options["resources"] == {HEAD_RESOURCE: HEAD_SHARE}
    assert ingress.ray_actor_options["num_cpus"] == 0


def deployments_of(built: Any) -> list[Any]:
    """Every deployment of a bound application, the ingress first."""
    from ray.serve.deployment import Application

    settings: dict[str, Any] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Application):
            bound = value._bound_deployment
            settings.setdefault(bound.name, bound)
            walk([*bound.init_args, *bound.init_kwargs.values()])
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)

    walk(built)
    return list(settings.values())


@each_case
@pytest.mark.usefixtures("ray_llm")
def test_export_fits_the_serve_schema(case: Rendered) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = yaml.safe_dump(serve_config(case.app, host="127.0.0.1", port=8123))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.http_options.host == "127.0.0.1" and schema.http_options.port == 8123
    assert [app.args for app in schema.applications] == [case.app.args]


def test_exported_file_fits_the_serve_schema(ray_llm: ModuleType, tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    path = tmp_path / "app.yaml"
    words = ["--pd-spread", "--p-num", "2", "--ingress-replicas", "2", "--cluster", "p5.48xlarge-x2"]
    assert launch.main([*words, "--export", str(path)]) == 0
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert schema.applications[0].args["prefill_config"]["deployment_config"]["num_replicas"] == 2
    assert schema.applications[0].args["ingress_deployment_config"]["num_replicas"] == 2


@each_case
@pytest.mark.usefixtures("ray_llm")
def test_vllm_knows_every_engine_argument(case: Rendered) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {field.name for kind in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(kind)}
    transfer = {field.name for field in dataclasses.fields(KVTransferConfig)}
    for config in engine_configs(case.app.args):
        kwargs = config["engine_kwargs"]
        assert set(kwargs) <= known
        if isinstance(case.deployment.topology, Disaggregated):
            assert set(kwargs["kv_transfer_config"]) <= transfer
            KVTransferConfig(**kwargs["kv_transfer_config"])


@each_case
@pytest.mark.usefixtures("ray_llm")
def test_ray_reads_our_label_selectors(case: Rendered) -> None:
    from ray._private.label_utils import validate_label_selector

    for config in engine_configs(case.app.args):
        for selector in config["deployment_config"]["placement_group_bundle_label_selector"]:
            assert validate_label_selector(selector) is None


def test_there_are_cases() -> None:
    assert len(CASES) >= len(SHAPES.keys() - LIKE_OTHERS) + len(LABELS)


@pytest.mark.usefixtures("no_cluster", "ray_llm")
def test_the_guard_is_in_front_and_needs_no_pdlab_on_the_nodes(tmp_path: Path) -> None:
    """The classes are unpickled in a process that cannot import pdlab, as on the nodes of a cluster."""
    expected = {}
    on_gpus = "pd-spread-p1xtp4-d1xtp4"
    for label in ("collocated-1xtp1", "pd-spread-p1xtp1-d1xtp1", "pd-pack-p1xtp1-d1xdp2", on_gpus):
        cluster, model = ("p5.48xlarge-x2", "gpt-oss-120b") if label == on_gpus else ("local-2", "tiny-gptoss")
        case = rendered(Deployment(topology=parse_label(label), model=model), cluster)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = deployments_of(builder_of(case.app)(case.app.args))
        guards = {}
        for deployment in made:
            name = deployment.name.partition(":")[0]
            (tmp_path / f"{label} {name}").write_bytes(deployment._replica_config.serialized_deployment_def)
            guards[name] = guards_of(deployment.func_or_class)
        assert made[0].name == "OpenAiIngress" and guards["OpenAiIngress"] == ["HttpFront"]
        expected |= {f"{label} {name}": guards[name] for name in guards}
        engine = ["WatchesSteps"] if label.startswith("pd") else []
        engine = [*(["InstallsGuard"] if label == on_gpus else []), *engine, *ALWAYS]
        assert guards.get("Decode", ["SplitsSequences", *engine]) == ["SplitsSequences", *engine]
        others = [guards[name] for name in guards.keys() - {"OpenAiIngress", "Decode"}]
        assert others and all(other == engine for other in others), "they answer to Ray's handles alone"
    program = (
        "import json, pathlib\n"
        "from ray import cloudpickle\n"
        "def guards(name):\n"
        "    made = cloudpickle.loads(pathlib.Path(name).read_bytes())\n"
        "    assert 'pdlab/guard/connector.py' in getattr(made, 'guard_files', {'pdlab/guard/connector.py': ''})\n"
        f"    return [base.__name__ for base in made.__mro__ if base.__name__ in {MIXED_IN}]\n"
        "print(json.dumps({name: guards(name) for name in sys.argv[1:]}))\n"
    )
    assert json.loads(printed_without_pdlab(program, *expected, cwd=tmp_path)[-1]) == expected


def guards_of(made: type) -> list[str]:
    return [base.__name__ for base in made.__mro__ if base.__name__ in MIXED_IN]


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "no guard"])
@pytest.mark.usefixtures("no_cluster", "ray_llm")
def test_engines_on_gpus_have_the_kv_guard_in_their_path(guarded: bool) -> None:
    topology = parse_label("pd-spread-p1xtp4-d1xtp4")
    assert isinstance(topology, Disaggregated)
    topology = topology.model_copy(update={"transport": Transport(kv_guard=guarded)})
    case = rendered(Deployment(topology=topology), "p5.48xlarge-x2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = deployments_of(builder_of(case.app)(case.app.args))
    engines = [one for one in made if "OpenAiIngress" not in one.name]
    assert len(engines) == 2
    for one in engines:
        path = one.ray_actor_options["runtime_env"]["env_vars"].get("PYTHONPATH")
        folder = f"${{HOME}}/.cache/pdlab/kv-guard/{digest(sources(_PDLAB))}"
        assert path == (f"{folder}:${{PYTHONPATH}}" if guarded else None)
        assert {"InstallsGuard", "WatchesSteps"} & set(guards_of(one.func_or_class)) == (
            {"InstallsGuard", "WatchesSteps"} if guarded else set()
        )
