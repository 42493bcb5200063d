"""Folders of the published format: what is read, what is not known, what is refused."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import published

from pdlab.core.deployment import Collocated, Disaggregated, Pool
from pdlab.core.errors import StoreError, UsageError
from pdlab.results.published_folders import load_experiment
from pdlab.results.published_names import parse_file_name, parse_name
from pdlab.results.schema import Manifest
from pdlab.results.store import Store

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
REFERENCE = ROOT.parent / "shared" / "reference" / "measured-h100"

PD = "demo_itl1000_otl100_mixed_1xtp2-1xtp2"
RATES = "demo_itl2000_otl50_1xtp4"


def edited(tmp_path: Path, name: str, stem: str, **changes: Any) -> Path:
    """A copy of a folder with keys of one file changed (None: taken away)."""
    folder = tmp_path / name
    if not folder.exists():
        shutil.copytree(PUBLISHED / name, folder)
    file = folder / f"{stem}.json"
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return folder


def test_prefill_decode_folder() -> None:
    experiment = load_experiment(PUBLISHED / PD)
    manifest = experiment.manifest
    assert manifest.origin == "imported"
    assert manifest.gpus == 4
    assert manifest.deployment is not None
    assert manifest.deployment.label == "pd-pack-p1xtp2-d1xtp2"
    assert manifest.deployment.model == "example/model-a"
    assert [run.key.stem for run in experiment.runs] == ["concurrency2", "concurrency4", "concurrency8"]
    first = experiment.runs[0]
    assert (first.workload.input_tokens, first.workload.output_tokens, first.workload.mode) == (1000, 100, "mixed")
    assert first.whole.requests_per_s == pytest.approx(2.5)
    assert first.whole.input_tokens_per_s == pytest.approx(2500)
    assert first.whole.output_tokens_per_s == pytest.approx(250)
    assert first.whole.ttft is not None
    assert first.whole.ttft.mean_s == pytest.approx(0.090)
    assert first.whole.ttft.percentiles_s == pytest.approx({"p50": 0.080, "p99": 0.160})
    assert first.validity.valid


def test_unknown_figures_are_none() -> None:
    run = load_experiment(PUBLISHED / PD).runs[0]
    assert run.whole.e2el is None
    assert run.steady is None
    assert run.seed is None
    assert run.client_cpu_share is None
    assert run.nixl_after is None


def test_failed_requests_are_kept_and_not_valid() -> None:
    run = load_experiment(PUBLISHED / PD).runs[2]
    assert (run.num_requests, run.completed, run.failed) == (80, 78, 2)
    assert run.validity.reasons == ("2 of 80 requests failed",)


def test_rate_runs_are_keyed_by_rate() -> None:
    runs = load_experiment(PUBLISHED / RATES).runs
    assert {json.loads(p.read_text())["max_concurrency"] for p in (PUBLISHED / RATES).glob("*.json")} == {64}
    assert [(run.key.kind, run.key.value) for run in runs] == [("rate", 1), ("rate", 2), ("rate", 4)]


def test_rate_from_the_file_name_when_the_content_has_none(tmp_path: Path) -> None:
    runs = load_experiment(edited(tmp_path, RATES, "conc32_rr1", request_rate="inf")).runs
    assert [run.key.value for run in runs] == [1, 2, 4]


def test_prefill_only_has_no_tpot() -> None:
    run = load_experiment(PUBLISHED / "demo_prefill_only_4xtp1").runs[0]
    assert run.workload.mode == "prefill-only"
    assert run.workload.sent_output_tokens == 1
    assert run.whole.tpot is None
    assert run.whole.itl is None
    assert run.whole.ttft is not None


def test_same_load_twice_is_a_repeat(tmp_path: Path) -> None:
    folder = edited(tmp_path, PD, "conc2")
    shutil.copy(folder / "conc2.json", folder / "conc2_r1.json")
    assert [run.key.stem for run in load_experiment(folder).runs][:2] == ["concurrency2", "concurrency2-r1"]


def test_contradictions_make_a_level_not_valid(tmp_path: Path) -> None:
    folder = edited(tmp_path, PD, "conc2", max_concurrency=3, total_input_tokens=22000)
    run = next(run for run in load_experiment(folder).runs if run.key.value == 3)
    assert (run.workload.input_tokens, run.workload.output_tokens) == (1100, 100)
    assert any("name has concurrency 2, its content 3" in reason for reason in run.validity.reasons)
    assert any("1000 input tokens per request, the file has 1100" in reason for reason in run.validity.reasons)


def test_gpus_for_a_name_without_a_configuration() -> None:
    folder = PUBLISHED / "results-of-tuesday"
    with pytest.raises(StoreError, match=r"results-of-tuesday.*--gpus results-of-tuesday=N"):
        load_experiment(folder)
    experiment = load_experiment(folder, stated=8)
    assert experiment.manifest.gpus == 8
    assert experiment.manifest.deployment is None


def test_stated_gpus_win_over_the_name() -> None:
    manifest = load_experiment(PUBLISHED / PD, stated=8).manifest
    assert (manifest.gpus, manifest.deployment) == (8, None)
    agreed = load_experiment(PUBLISHED / PD, stated=4).manifest
    assert agreed.deployment is not None


@pytest.mark.parametrize("gpus", [None, 4, 8])
def test_the_files_model_is_kept_whatever_gpus_are_given(gpus: int | None) -> None:
    experiment = load_experiment(PUBLISHED / PD, stated=gpus)
    assert experiment.model == "example/model-a"
    assert {run.model for run in experiment.runs} == {"example/model-a"}


@pytest.mark.parametrize("model_id", [None, "", 7, ["m"]])
def test_a_file_without_a_model_has_no_model(tmp_path: Path, model_id: Any) -> None:
    experiment = load_experiment(published.write(tmp_path / "x_1xtp2", {"a": published.content(model_id=model_id)}))
    assert experiment.model is None and [run.model for run in experiment.runs] == [None]


def pd(prefill: Pool, decode: Pool, placement: Any) -> Disaggregated:
    return Disaggregated(prefill=prefill, decode=decode, placement=placement)


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("x_itl5000_otl250_mixed_4xtp2", Collocated(pool=Pool(replicas=4, tp=2))),
        ("x_itl5000_otl250_mixed_baseline_8xTP1", Collocated(pool=Pool(replicas=8))),
        ("4xtp2", Collocated(pool=Pool(replicas=4, tp=2))),
        ("collocated-4xtp2", Collocated(pool=Pool(replicas=4, tp=2))),
        ("x_1xtp8_ep", Collocated(pool=Pool(tp=8, expert_parallel=True))),
        ("x_1xtp1-1xtp2", pd(Pool(), Pool(tp=2), "pack")),
        ("x_3xtp2-1xtp2-pack-run2", pd(Pool(replicas=3, tp=2), Pool(tp=2), "pack")),
        ("x_1xtp4-1xtp4-spread-ucx120", pd(Pool(tp=4), Pool(tp=4), "spread")),
        ("x_1xtp8-1xtp8", pd(Pool(tp=8), Pool(tp=8), "spread")),
        ("pd-spread-p1xtp4-d2xtp2", pd(Pool(tp=4), Pool(replicas=2, tp=2), "spread")),
        ("x_1xdp32ep-1xdp72ep", pd(Pool(dp=32, expert_parallel=True), Pool(dp=72, expert_parallel=True), "spread")),
        ("x_1xtp4-1xtp4-ep", pd(Pool(tp=4, expert_parallel=True), Pool(tp=4, expert_parallel=True), "pack")),
        ("x_1xtp4-pp2", Collocated(pool=Pool(tp=4, pp=2))),
        ("x_1xtp4_pp_2_dp2", Collocated(pool=Pool(tp=4, pp=2, dp=2))),
        ("x_ep4_dp2_2xtp2", Collocated(pool=Pool(replicas=2, tp=2, dp=2, expert_parallel=True))),
        ("x_1xtp4_ep1-run2", Collocated(pool=Pool(tp=4))),
        ("x_1xtp4-1xtp4-dp2", pd(Pool(tp=4, dp=2), Pool(tp=4, dp=2), "spread")),
        ("2ptp1-1dtp2-pp2", pd(Pool(replicas=2, pp=2), Pool(tp=2, pp=2), "pack")),
        ("x_1xtp4-tp4", Collocated(pool=Pool(tp=4))),
        ("x_1xtp4-tp8", None),
        ("x_1xtp4_ep8", Collocated(pool=Pool(tp=4))),
        ("4xtp2_ep8", Collocated(pool=Pool(replicas=4, tp=2))),
        ("deepseek-ep3_1xtp8", Collocated(pool=Pool(tp=8))),
        ("2ptp4-1dtp8-ep8", pd(Pool(replicas=2, tp=4), Pool(tp=8, expert_parallel=True), "spread")),
        ("1xtp16_dp16_ep16", Collocated(pool=Pool(tp=16, expert_parallel=True))),
        ("x_1xtp4-1xtp8-tp8", pd(Pool(tp=4), Pool(tp=8), "spread")),
        ("fluid-test-4xtp2", Collocated(pool=Pool(replicas=4, tp=2))),
        ("qwen-pp512_1xtp4", Collocated(pool=Pool(tp=4))),
        ("qwen-dp4096-tp128_1xtp4-pp16", Collocated(pool=Pool(tp=4, pp=16))),
        ("4xtp2_ep_off", Collocated(pool=Pool(replicas=4, tp=2))),
        ("4xtp2_no-ep", Collocated(pool=Pool(replicas=4, tp=2))),
        ("without_ep_4xtp2", Collocated(pool=Pool(replicas=4, tp=2))),
        ("ep-off_4xtp2", Collocated(pool=Pool(replicas=4, tp=2))),
        ("4xtp2_ep=false", None),
        ("4xtp2_ep_0", Collocated(pool=Pool(replicas=4, tp=2))),
        ("2xtpep4_ep_off", None),
        ("results_tp8_4xtp2", None),
        ("x_1xtp4pp4-pp2", None),
        ("pd-fluid-8xtp2-n2to9_run1", None),
        ("x_itl5000_otl250", None),
        ("x_1xtp2-1xtp2-1xtp2", None),
        ("x_4x", None),
        ("x_1xtp2_and_2xtp4", None),
    ],
)
def test_names(name: str, topology: Collocated | Disaggregated | None) -> None:
    assert parse_name(name).topology == topology


def of_sglang(**info: Any) -> dict[str, Any]:
    """A result of SGLang whose server reports these settings."""
    return published.content() | {"sharegpt_output_len": None, "server_info": {"model_path": "m", **info}}


@pytest.mark.parametrize(
    ("name", "info", "gpus", "label"),
    [
        ("1xtp8_dp8", {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8, "collocated-1xtp8"),
        ("1xtp8dp8", {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8, "collocated-1xtp8"),
        ("1xtp1_dp8", {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8, "collocated-1xdp8"),
        ("1xdp8ep", {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8, "collocated-1xdp8ep"),
        ("1xtp4_dp2", {"tp_size": 4, "dp_size": 2, "enable_dp_attention": False}, 8, "collocated-1xtp4dp2"),
        ("qwen-pp8_1xtp4", {"tp_size": 4, "pp_size": 1, "dp_size": 1}, 4, "collocated-1xtp4"),
        ("qwen-dp8_1xtp4", {"tp_size": 4, "pp_size": 1, "dp_size": 1}, 4, "collocated-1xtp4"),
        ("1xtp4_pp2", {"tp_size": 4, "pp_size": 2, "dp_size": 1}, 8, "collocated-1xtp4pp2"),
        ("1xtp4-1xtp4_dp4", {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 8, "pd-pack-p1xtp4-d1xtp4"),
    ],
)
def test_the_degrees_in_a_file_count_before_those_beside_a_name(
    name: str, info: dict[str, Any], gpus: int, label: str, tmp_path: Path
) -> None:
    """SGLang's ranks of DP attention are among the GPUs of its TP degree."""
    for folder, file in ((name, "r"), ("other", f"{name}_conc8")):
        manifest = load_experiment(published.write(tmp_path / folder, {file: of_sglang(**info)})).manifest
        assert manifest.deployment is not None and (manifest.gpus, manifest.deployment.label) == (gpus, label)


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("results_tp8_4xtp2", "conc8", "results_tp8_4xtp2: tp8 contradicts 4xtp2; name one of them"),
        ("x", "1xtp4pp4-pp2_conc8", "pp2 contradicts 1xtp4pp4; name one of them"),
    ],
)
def test_a_name_that_contradicts_itself_is_told_so(name: str, file: str, said: str, tmp_path: Path) -> None:
    folder = published.write(tmp_path / name, {file: published.content()})
    with pytest.raises(StoreError) as refused:
        load_experiment(folder)
    assert said in str(refused.value) and "does not give the configuration" not in str(refused.value)
    assert load_experiment(folder, stated=8).manifest.gpus == 8


@pytest.mark.parametrize(
    ("stem", "deployment", "repeat", "words"),
    [
        ("conc128_rr4", None, False, ""),
        ("conc8_r1", None, True, ""),
        ("concurrency-16.run2", None, True, ""),
        ("run-2026-01-05T12-00-00", None, False, "run"),
        ("vllm-2.0qps-concurrency64-gpt-oss-120b-20251010-164316", None, False, "vllm gpt oss 120b"),
        ("1p3d_conc32_in2048_out128", "1p3d", False, ""),
        ("2P2D", "2p2d", False, ""),
        ("p1d3-c16", "p1d3", False, ""),
        ("2prefill_1decode_c8", "2prefill 1decode", False, ""),
        ("prefill-only_conc8", None, False, ""),
        ("xtpep4", "xtpep4", False, ""),
        ("fp8_tp8_ep1_conc64", "tp8 ep1", False, "fp8"),
        ("tp8_no-ep_conc64", "tp8 no-ep", False, ""),
        ("tp8_ep_off_conc64", "tp8 ep_off", False, ""),
        ("h200_con32_gpus_8", "gpus_8", False, "h200"),
        ("b_disagg_spread", "disagg spread", False, ""),
        ("baseline_conc8_0f3a9c81d2", None, False, "baseline"),
        ("vllm-0.10.2/conc8", None, False, "vllm 0.10.2"),
        ("v0.11/conc8", None, False, "0.11"),
        ("conc8_20260105_12.30.45", None, False, ""),
        ("mnbt_2048_conc8", None, False, "mnbt"),
    ],
)
def test_names_of_files(stem: str, deployment: str | None, repeat: bool, words: str) -> None:
    name = parse_file_name(stem)
    assert (name.deployment, name.repeat, " ".join(name.words)) == (deployment, repeat, words)


def test_lengths_and_mode_from_the_name() -> None:
    parsed = parse_name("x_itl5000_otl250_decode-only_4xtp2")
    assert (parsed.input_tokens, parsed.output_tokens, parsed.mode) == (5000, 250, "decode-approx")
    assert parse_name("x_4xtp2")[1:] == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration": 0}, "duration is 0 s"),
        ({"duration": None}, "duration is None"),
        ({"completed": "many"}, "completed is 'many'"),
        ({"total_input_tokens": -1}, "total_input_tokens is -1"),
        ({"request_throughput": None}, "no known benchmark client"),
        ({"model_id": "another/model"}, "holds 2 curves: another/model and example/model-a"),
        ({"num_prompts": "x"}, "num_prompts is 'x'"),
        ({"num_prompts": float("nan")}, "num_prompts is nan"),
        ({"max_concurrency": -1}, "max_concurrency is -1"),
        ({"request_rate": -1}, "request_rate is -1"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = edited(tmp_path, PD, "conc2", **changes)
    with pytest.raises(StoreError) as caught:
        load_experiment(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_label_without_replicas_is_refused(tmp_path: Path) -> None:
    zero = tmp_path / "x_0xtp2"
    shutil.copytree(PUBLISHED / PD, zero)
    with pytest.raises(UsageError, match="from 1 to 10000"):
        load_experiment(zero)


def test_own_folder_without_gpus_or_levels(tmp_path: Path) -> None:
    store = Store(tmp_path / "mine")
    store.write_manifest(Manifest(origin="measured", label="mine"))
    with pytest.raises(StoreError, match="--gpus mine=N"):
        load_experiment(store.folder)
    with pytest.raises(StoreError, match="no finished level"):
        load_experiment(store.folder, stated=2)
    store.write_manifest(Manifest(origin="measured", label="mine", gpus=4))
    with pytest.raises(UsageError, match=r"has 4 GPUs, --gpus has 2"):
        load_experiment(store.folder, stated=2)


def test_published_h100_folders_import() -> None:
    if not REFERENCE.is_dir():
        pytest.skip("the published H100 results are not beside this checkout (../shared/reference/measured-h100)")
    folders = [path for path in sorted(REFERENCE.iterdir()) if path.is_dir()]
    assert folders
    for folder in folders:
        experiment = load_experiment(folder)
        assert experiment.manifest.gpus in (4, 8)
        assert len(experiment.runs) == len(list(folder.glob("*.json")))
        assert len({run.key for run in experiment.runs}) == len(experiment.runs)
        # Its client stopped at 512 in flight, where 16 requests/s were to arrive and 7.4 were served.
        capped = [16.0] if "itl10000" in folder.name else []
        assert [run.key.value for run in experiment.runs if not run.validity.valid] == capped
        assert {run.key.kind for run in experiment.runs} == ({"rate"} if "itl10000" in folder.name else {"concurrency"})


def test_a_latency_that_is_none_makes_its_level_invalid(tmp_path: Path) -> None:
    changed = {"mean_ttft_ms": float("nan"), "mean_tpot_ms": -1}
    (run,) = load_experiment(published.write(tmp_path / "nan_1xtp2", {"a": published.content(**changed)})).runs
    assert run.validity.reasons == ("mean_ttft_ms is nan and 1 more: not a latency",)


def test_the_flag_that_is_missing_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "runs of tuesday's"
    shutil.copytree(PUBLISHED / PD, folder)
    with pytest.raises(StoreError) as refused:
        load_experiment(folder)
    words = shlex.split(str(refused.value).rpartition("viz.py's ")[2])
    assert words == ["--gpus", "runs of tuesday's=N"]
