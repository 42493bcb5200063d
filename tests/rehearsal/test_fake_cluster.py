"""A launch that is a rehearsal: flags, slow time, and engines in the application's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.core.catalog import load_cluster, load_deployment, require_shape, resolve_model
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.settings import parse
from pdlab.core.workload import Workload
from pdlab.deploy.options import LaunchRequest, LaunchSettings, request_from, request_from_json, request_to_json
from pdlab.deploy.prepared import prepare_deployment
from pdlab.rehearsal.fake_cluster import RehearsalSubstitutes, best_rate_rps, choose_slow_down, with_simulated_engines
from pdlab.rehearsal.spec import ENGINE_CLASS, EngineSpec, read_spec, write_spec
from pdlab.results.schema import Manifest
from pdlab.sim.hardware import load_hardware
from pdlab.sim.step_time import engine_cache, kv_pool_blocks

HARDWARE = load_hardware("h100-vllm-0.11")
SHAPE = require_shape("gpt-oss-120b")


def launch_request(*words: str) -> LaunchRequest:
    return request_from(parse(LaunchSettings, words), words)


def test_flags_make_the_request_and_json_carries_it() -> None:
    plain = launch_request("--pd-spread", "--rehearse")
    assert plain.rehearsal == Rehearsal() and plain.cluster == load_cluster("p5.48xlarge-x2")
    assert plain.node_count == 2 and plain.local_nodes is None
    assert plain.known_view() == plain.cluster
    larger = launch_request("--pd-spread", "--rehearse", "--slow-down", "20", "--cluster", "p5.48xlarge-x13")
    assert larger.rehearsal is not None
    assert larger.rehearsal.slow_down == 20 and larger.node_count == 13
    assert request_from_json(request_to_json(larger)) == larger
    assert launch_request("--pd-spread").rehearsal is None
    assert launch_request("--pd-spread", "--rehearse", "--chunk-per-token").rehearsal == Rehearsal(chunk_per_token=True)
    assert launch_request("--pd-pack", "--rehearse", "--assume-merged").rehearsal == Rehearsal(assume_merged=True)


@pytest.mark.parametrize(
    "name", ["pd-spread-p1xtp4-d1xtp4", "collocated-2xtp4", "pd-spread-p1xdp32ep-d1xdp72ep", "pd-fluid-8xtp2"]
)
def test_every_engine_is_simulated_and_nothing_else_changes(name: str, tmp_path: Path) -> None:
    deployment = load_deployment(name)
    view = load_cluster("p5.48xlarge-x13")
    shape, source = resolve_model(deployment.model)
    prepared = prepare_deployment(deployment, view, shape, source or "", Workload())
    files = {role: tmp_path / f"{role}.json" for role in deployment.pools}
    app = with_simulated_engines(prepared.app, files, 8.0)
    board = app.args.pop("roles", None)
    assert board is None or board["slow_down"] == 8.0, "what decides on roles counts the engines' seconds"
    assert "slow_down" not in prepared.app.args.get("roles", {})
    assert app.import_path == prepared.app.import_path
    found = set()
    assert prepared.app.args.keys() - app.args.keys() <= {"kv_guard", "roles"}
    for key, after in app.args.items():
        before = prepared.app.args[key]
        for config, original in zip(
            after if isinstance(after, list) else [after], before if isinstance(before, list) else [before], strict=True
        ):
            if not isinstance(config, dict) or "model_loading_config" not in config:
                assert config == original
                continue
            env = config["runtime_env"]["env_vars"]
            assert env["RAYLLM_VLLM_ENGINE_CLS"] == ENGINE_CLASS
            found.add(env["PDLAB_REHEARSAL"])
            same = ("model_loading_config", "engine_kwargs", "placement_group_config", "deployment_config")
            assert all(config[field] == original[field] for field in same)
    assert found == {str(file) for file in files.values()}
    assert "PDLAB_REHEARSAL" not in str(prepared.app.args)


def test_time_is_slowed_down_by_requests_and_cores() -> None:
    small, large = (Deployment(topology=parse_label(f"pd-spread-p{n}xtp4-d{n}xtp4")) for n in (1, 13))
    workload = Workload()
    rates = [best_rate_rps(deployment, workload, HARDWARE, SHAPE) for deployment in (small, large)]
    assert rates[1] == pytest.approx(13 * rates[0], rel=0.25)
    slow, why = choose_slow_down(large, workload, HARDWARE, SHAPE, 1.0)
    slower, _ = choose_slow_down(large, workload, HARDWARE, SHAPE, 0.25)
    least, _ = choose_slow_down(small, workload, HARDWARE, SHAPE, 64.0)
    assert slower > 3 * slow > 3 * least
    assert rates[1] / slow <= 10.0
    assert "104 GPUs answer up to" in why


def test_the_manifest_records_the_rehearsal() -> None:
    substitutes = RehearsalSubstitutes(launch_request("--pd-spread", "--rehearse", "--slow-down", "7"))
    versions: dict[str, str | None] = {"vllm": "0.29.0", "torch": "2", "ray": "2.60.0"}
    deployment = Deployment(topology=parse_label("pd-spread-p2xtp4-d1xtp2"))
    manifest = Manifest(origin="measured", label="x", deployment=deployment, versions=versions)
    changed = substitutes.manifest(manifest)
    assert changed.origin == "simulated"
    assert changed.rehearsal is not None
    assert changed.rehearsal.model_copy(update={"caches": {}}) == Rehearsal(slow_down=7)
    assert {*changed.rehearsal.caches} == {"prefill", "decode"}
    for role, cache in changed.rehearsal.caches.items():
        pool = deployment.pools[role]
        assert cache == engine_cache(deployment, pool, HARDWARE, SHAPE)
        assert cache.blocks == kv_pool_blocks(HARDWARE, SHAPE, pool) > 10_000
        assert (cache.block_tokens, cache.window, cache.step_tokens) == (16, None, 8192)
    assert changed.rehearsal.caches["prefill"].blocks > changed.rehearsal.caches["decode"].blocks
    assert Rehearsal.model_validate_json(changed.rehearsal.model_dump_json()) == changed.rehearsal
    assert changed.versions["vllm"] == "simulated (vLLM 0.11, Ray 2.51, NIXL 0.6.1)"
    assert changed.versions["ray"] == "2.60.0"
    assert changed.on_local_nodes and not changed.local


def test_an_engine_reads_its_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    spec = EngineSpec(
        rehearsal=Rehearsal(slow_down=5), role="prefill", hardware=HARDWARE, shape=SHAPE, deployment=deployment,
        tokenizer="t", folder="f", max_model_len=16384,
    )  # fmt: skip
    file = tmp_path / "deep" / "prefill.json"
    write_spec(spec, file)
    monkeypatch.setenv("PDLAB_REHEARSAL", str(file))
    assert read_spec() == spec
    monkeypatch.setenv("PDLAB_REHEARSAL", str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_spec()
    monkeypatch.delenv("PDLAB_REHEARSAL")
    with pytest.raises(UsageError, match="is not set"):
        read_spec()
