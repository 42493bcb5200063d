"""The environment of engines: per pool, in the fingerprint, refused where it would have no effect, secrets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.cli import launch
from pdlab.core.catalog import load_cluster, load_deployment
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Fluid, Pool, Topology, launch_words
from pdlab.core.environment import SET_ELSEWHERE, before_ray_start, is_secret
from pdlab.core.errors import UsageError
from pdlab.core.schema import to_yaml
from pdlab.core.settings import parse
from pdlab.deploy import preflight
from pdlab.deploy.options import LaunchSettings, deployment_from
from pdlab.deploy.serve_config import ServeApp, engine_configs, render, with_secrets
from pdlab.placement.place import place
from pdlab.report import html
from pdlab.results.schema import Manifest

X2 = load_cluster("p5.48xlarge-x2")
SECRET = "hf_0123456789abcdef"


def rendered(deployment: Deployment) -> ServeApp:
    return render(deployment, place(deployment, X2), X2, None, "org/model")


def variables(app: ServeApp, role: str) -> dict[str, Any]:
    env: dict[str, Any] = engine_configs(app.args)[-1 if role == "decode" else 0]["runtime_env"]["env_vars"]
    return env


def from_words(*words: str) -> Deployment:
    return deployment_from(parse(LaunchSettings, [*words, "--cluster", "p5.48xlarge-x2"]))


@pytest.mark.parametrize("mode", ["--pd-pack", "--pd-spread"])
def test_each_pool_has_its_own_beside_those_of_both(mode: str) -> None:
    """In a pack both pools are on one node: the variables are of the engines, not of nodes."""
    deployment = from_words(
        mode, "--p-tp", "2", "--d-tp", "2", "--env", "A=all", "B=all", "--p-env", "B=prefill", "--d-env", "C=decode"
    )
    app = rendered(deployment)
    assert {name: variables(app, "prefill").get(name) for name in "ABC"} == {"A": "all", "B": "prefill", "C": None}
    assert {name: variables(app, "decode").get(name) for name in "ABC"} == {"A": "all", "B": "all", "C": "decode"}
    assert deployment_from(parse(LaunchSettings, launch_words(deployment))) == deployment


def test_flags_win_over_a_file(tmp_path: Path) -> None:
    pools = {"prefill": Pool(env={"A": "1"}), "decode": Pool()}
    file = tmp_path / "mine.yaml"
    deployment = Deployment(topology=Disaggregated(placement="spread", **pools), env={"B": "1", "C": "1"})
    file.write_text(to_yaml(deployment))
    assert load_deployment(str(file)) == deployment
    changed = from_words("--config", str(file), "--p-env", "A=2", "--env", "B=2")
    assert changed.env_of("prefill") == {"A": "2", "B": "2", "C": "1"}
    assert changed.env_of("decode") == {"B": "2", "C": "1"}


@pytest.mark.parametrize(
    "topology",
    [
        Collocated(pool=Pool(tp=2)),
        Fluid(pool=Pool(replicas=2, tp=2)),
        Disaggregated(prefill=Pool(tp=2), decode=Pool(tp=2), placement="spread"),
    ],
    ids=["collocated", "fluid", "pd"],
)
def test_a_variable_of_any_pool_changes_the_fingerprint(topology: Topology) -> None:
    plain = Deployment(topology=topology)
    field = "decode" if isinstance(topology, Disaggregated) else "pool"
    own = topology.model_copy(update={field: Pool(**{**dict(getattr(topology, field)), "env": {"A": "1"}})})
    prints = [plain.fingerprint, Deployment(topology=topology, env={"A": "1"}).fingerprint]
    prints += [Deployment(topology=own).fingerprint, Deployment(topology=topology, env={"A": None}).fingerprint]
    assert len(set(prints)) == 4
    assert variables(rendered(Deployment(topology=own)), "decode")["A"] == "1"


@pytest.mark.parametrize("name", [*SET_ELSEWHERE, "RAY_SERVE_ENABLE_HA_PROXY", "RAY_AUTH_MODE", "HF_TOKEN", "1A", ""])
@pytest.mark.parametrize("pool", [False, True], ids=["both", "pool"])
def test_what_would_have_no_effect_or_be_written_down_is_refused(name: str, pool: bool) -> None:
    topology = Collocated(pool=Pool())
    with pytest.raises(ValueError, match=name or "name of a variable"):
        Collocated(pool=Pool(env={name: "7"})) if pool else Deployment(topology=topology, env={name: "7"})


def test_variables_of_ray_that_engines_read_are_taken() -> None:
    assert not before_ray_start("RAY_CGRAPH_get_timeout") and before_ray_start("RAY_memory_monitor_refresh_ms")
    assert from_words("--collocated", "--env", "RAY_CGRAPH_get_timeout=300").env == {"RAY_CGRAPH_get_timeout": "300"}


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("AWS_SECRET_ACCESS_KEY", True), ("apikey", True), ("DB_PASSWORD", True),
     ("TOKENIZERS_PARALLELISM", False), ("VLLM_MAX_TOKENS_PER_EXPERT", False), ("NCCL_DEBUG", False)],
)  # fmt: skip
def test_a_secret_is_known_by_its_name(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_a_variable_without_a_value_has_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    deployment = from_words("--pd-spread", "--env", "NCCL_SOCKET_IFNAME", "--p-env", "HF_TOKEN")
    assert deployment.env == {"NCCL_SOCKET_IFNAME": "eth1"} and deployment.secrets == ["HF_TOKEN"]
    app = rendered(deployment)
    assert "HF_TOKEN" not in variables(app, "prefill")
    submitted = with_secrets(app, deployment, {"HF_TOKEN": SECRET})
    assert variables(submitted, "prefill")["HF_TOKEN"] == SECRET and "HF_TOKEN" not in variables(submitted, "decode")
    assert SECRET not in str(app) and SECRET not in deployment.model_dump_json()
    with pytest.raises(UsageError, match="no HF_TOKEN: export it"):
        with_secrets(app, deployment, {})


def test_a_secret_is_in_no_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    words = ["--pd-pack", "--env", "HF_TOKEN", "--cluster", "p5.48xlarge-x2"]
    out = tmp_path / "app.yaml"
    assert launch.main([*words, "--dry-run", "--export", str(out)]) == 0
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err + out.read_text()
    assert "HF_TOKEN" in shown.out and "`ray start` every node has HF_TOKEN" in " ".join(out.read_text().split())
    yaml.safe_load(out.read_text())
    monkeypatch.delenv("HF_TOKEN")
    assert launch.main(words) == 2, "before anything starts"
    assert "no HF_TOKEN" in capsys.readouterr().err


def test_a_value_of_a_secret_is_not_repeated_in_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--env", f"HF_TOKEN={SECRET}"], ["--env", f"HF-TOKEN={SECRET}"], ["--p-env", f"HF_TOKEN={SECRET}"]):
        assert launch.main(["--pd-pack", *words, "--cluster", "p5.48xlarge-x2", "--dry-run"]) == 2
        assert SECRET not in capsys.readouterr().err


def test_nodes_are_asked_with_the_environment_of_their_own_engines() -> None:
    environments: list[dict[str, str]] = []

    class Nodes:
        local = None

        def call_nodes(self, probe: Any, ports: Any, environment: dict[str, str], *rest: Any) -> dict[str, Any]:
            environments.append(environment)
            return {node: {"environment": environment} for node in ("n1", "n2")}

    labels = {"ray.io/node-id": "n1"}, {"ray.io/node-id": "n2"}
    nodes = [n.model_copy(update={"labels": each}) for n, each in zip(X2.nodes, labels, strict=True)]
    view = X2.model_copy(update={"nodes": tuple(nodes)})
    prefill, decode = Pool(tp=2, env={"UCX_NET_DEVICES": "a"}), Pool(tp=2, env={"UCX_NET_DEVICES": "b"})
    deployment = Deployment(topology=Disaggregated(prefill=prefill, decode=decode, placement="spread"))
    placement = place(deployment, view)
    facts = preflight._ask(Nodes(), deployment, view, placement, lambda: None, ())  # type: ignore[arg-type]
    of_role = {role: view.node(placement.nodes_of(role)[0]).labels["ray.io/node-id"] for role in ("prefill", "decode")}  # type: ignore[arg-type]
    assert facts[of_role["prefill"]]["environment"]["UCX_NET_DEVICES"] == "a"
    assert facts[of_role["decode"]]["environment"]["UCX_NET_DEVICES"] == "b"
    assert len(environments) == 2 and not preflight.may_choose(deployment)


def test_the_report_names_the_variables_of_each_pool() -> None:
    deployment = Deployment(
        topology=Disaggregated(prefill=Pool(env={"A": "1"}), decode=Pool(), placement="spread"), env={"HF_TOKEN": None}
    )
    manifest = Manifest(origin="measured", label=deployment.label, deployment=deployment)
    facts = dict(html._manifest_facts(manifest))
    assert facts["environment"] == "prefill: HF_TOKEN, A=1; decode: HF_TOKEN"
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
