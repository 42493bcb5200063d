"""Files of one folder: which are repeats of each other, which are curves of their own, and what is refused."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import published

import pdlab
from pdlab.core.errors import StoreError
from pdlab.report.build import build_report
from pdlab.results.published_folders import load_experiment, load_experiments
from pdlab.results.schema import Experiment

USUAL = {"num_prompts": 100, "completed": 100, "total_input_tokens": 100_000, "total_output_tokens": 10_000}


def written(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    return published.write(folder, {name: published.content(**USUAL | changes) for name, changes in files.items()})


def shown(experiments: tuple[Experiment, ...]) -> dict[str, list[str]]:
    """Part -> the keys of its runs."""
    return {each.part: [run.key.stem for run in each.runs] for each in experiments}


REPEATED = {"": ["concurrency8", "concurrency8-r1"]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": {}, "b": {}}, REPEATED),
        ({"conc8": {}, "conc8_r1": {"duration": 51.0}}, REPEATED),
        ({"conc8_run1": {"date": "20260101-000000"}, "conc8_run2": {"date": "20260301-000000"}}, REPEATED),
        ({"a": {"date": "20260105-010000"}, "b": {"date": "20260105-230000"}}, REPEATED),
        ({"a": {"date": "20260105-010000"}, "b": {"date": None}}, REPEATED),
        (
            {"a": {}, "b": {"accept_length": 2.5}},
            {"no spec_decoding": ["concurrency8"], "spec_decoding=on": ["concurrency8"]},
        ),
        ({"a": {"accept_length": 2.4}, "b": {"accept_length": 2.5}}, REPEATED),
        ({"a": {"seed": "1", "run_id": "x"}, "b": {"seed": "2", "run_id": "y"}}, REPEATED),
        (
            {"vllm-infqps-concurrency8-m-20260105-120000": {}, "vllm-infqps-concurrency8-m-20260105-130000": {}},
            REPEATED,
        ),
        ({"0f3a9c81d2": {}, "77b2e01ac4": {}}, REPEATED),
        ({"a": {"total_output_tokens": 9_500}, "b": {"total_output_tokens": 10_000}}, REPEATED),
        ({"a": {"tokens_per_gpu": 100, "num_workers": 4}, "b": {"tokens_per_gpu": 101, "num_workers": 5}}, REPEATED),
    ],
)
def test_repeats(tmp_path: Path, files: dict[str, dict[str, Any]], expected: dict[str, list[str]]) -> None:
    assert shown(load_experiments(written(tmp_path / "x_1xtp2", files))) == expected


@pytest.mark.parametrize(
    ("files", "unmarked"),
    [
        (["mnbt_2048_conc8", "mnbt_8192_conc8"], True),
        (["mnbt_2048_conc8_r1", "mnbt_8192_conc8_r2"], True),
        (["conc8_1", "conc8_2"], True),
        (["a", "b"], True),
        (["conc8", "conc8_r1", "run3/conc8"], False),
        (["batched2048_conc8", "batched8192_conc8"], False),
        (["vllm-0.10.2/conc8", "vllm-0.11.0/conc8"], False),
        (["vllm-infqps-concurrency8-m-20260105-120000", "vllm-infqps-concurrency8-m-20260105-130000"], False),
        (["0f3a9c81d2", "77b2e01ac4"], False),
    ],
)
def test_repeats_by_numbers_in_their_names_are_noted(tmp_path: Path, files: list[str], unmarked: bool) -> None:
    folder = written(tmp_path / "x_1xtp2", {name: {} for name in files})
    notes = [note for note in build_report(pdlab.load(folder)).notes if note.code == "unmarked_repeats"]
    assert len(notes) == unmarked
    for note in notes:
        assert f"({files[0]}.json and {files[1]}.json)" in note.text and str(folder) in note.text


def test_versions_in_names_are_curves_of_their_own(tmp_path: Path) -> None:
    folders = {"vllm-0.10.2/conc8": {}, "vllm-0.11.0/conc8": {"duration": 51.0}}
    assert list(shown(load_experiments(written(tmp_path / "x_1xtp2", folders)))) == ["0.10.2", "0.11.0"]


LATER = {"date": "20260109-120000"}
RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 40}


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({"a": {}, "b": {"total_input_tokens": 400_000}}, ["1000:100", "4000:100"]),
        ({"a": {}, "b": {"total_output_tokens": 50_000, "max_concurrency": 16}}, ["1000:100", "1000:500"]),
        ({"a": {}, "b": {"total_output_tokens": 100}}, ["1000:100", "1000:1"]),
        ({"a": {}, "b": {"model_id": "org/model-b"}}, ["org/model-a", "org/model-b"]),
        ({"a": {}, "b": {"model_id": None}}, ["org/model-a", ""]),
        ({"a": {"tag": "x"}, "b": {"tag": "y"}}, ["tag=x", "tag=y"]),
        ({"a": {"tag": "x"}, "b": {}}, ["tag=x", "no tag"]),
        ({"a": {"version": "0.3"}, "b": {"version": "0.4", "max_concurrency": 16}}, ["version=0.3", "version=0.4"]),
        ({"a": {"label": "mine"}, "b": {"label": "yours"}}, ["label=mine", "label=yours"]),
        ({"a": {"backend": "vllm"}, "b": {"backend": "sglang"}}, ["vllm", "sglang"]),
        ({"a": {"tokenizer_id": "org/other"}, "b": {}}, ["tokenizer_id=org/other", "tokenizer_id=org/model-a"]),
        (
            {"a": {"request_rate": 2, "burstiness": 0.5}, "b": {"request_rate": 2}},
            ["burstiness=0.5", "burstiness=1.0"],
        ),
        (
            {"a": {**RAMP, "ramp_up_start_rps": 1}, "b": {**RAMP, "ramp_up_start_rps": 30}},
            ["ramp=linear 1 to 40/s", "ramp=linear 30 to 40/s"],
        ),
        (
            {"a": RAMP, "b": {**RAMP, "ramp_up_strategy": "exponential"}},
            ["ramp=linear 1 to 40/s", "ramp=exponential 1 to 40/s"],
        ),
        ({"a": {"metadata": {"image": "x"}}, "b": {"metadata": {"image": "y"}}}, ["image=x", "image=y"]),
        ({"a": {"metadata": {"max_num_seqs": 8}}, "b": {}}, ["max_num_seqs=8", "no max_num_seqs"]),
        ({"a": {"eager": True}, "b": {"eager": False}}, ["eager=true", "eager=false"]),
        ({"baseline_conc8": {}, "tuned_conc8": {}}, ["baseline", "tuned"]),
        ({"conc8_in2048_out128": {}, "conc8_in2048_out256": {}}, ["2048:128", "2048:256"]),
        ({"4xtp2_conc8": {}, "2xtp4_conc8": {}}, ["2xtp4", "4xtp2"]),
        ({"conc8-a": {}, "conc16-a": {"max_concurrency": 16}, "conc8-b": LATER}, ["2026-01-05", "2026-01-09"]),
    ],
)
def test_no_repeats(tmp_path: Path, files: dict[str, dict[str, Any]], parts: list[str]) -> None:
    folder = written(tmp_path / ("x" if "4xtp2_conc8" in files else "x_1xtp2"), files)
    experiments = load_experiments(folder)
    assert sorted(each.part for each in experiments) == sorted(parts)
    assert {run.key.repeat for each in experiments for run in each.runs} == {0}
    assert len({each.name for each in experiments}) == len(experiments)
    with pytest.raises(StoreError, match=r"x.* holds 2 curves"):
        load_experiment(folder)


def test_the_configuration_in_a_files_name_gives_its_gpus(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"4xtp2_conc8": {}, "1xtp2-1xtp2_conc8": {}})
    assert {each.part: each.manifest.gpus for each in load_experiments(folder)} == {"4xtp2": 8, "1xtp2 1xtp2": 4}
    others = {"4ptp1-2dtp2_conc8": {}, "2xtpep4_conc8": {}, "xtpep8_conc8": {}, "1p3d_conc8": {"tp": 2}}
    parts = {each.part: each.manifest.gpus for each in load_experiments(written(tmp_path / "z", others))}
    sizes = {part.split(", ")[-1]: gpus for part, gpus in parts.items()}
    assert sizes == {"4ptp1-2dtp2": 8, "2xtpep4": 8, "xtpep8": 8, "1p3d": 8}
    degrees = {"1p1d_conc8": {"tp": 4, "pp": 2}, "1p3d_conc8": {"metadata": {"tp": "4", "pp": "2"}}}
    degrees["2p2d_conc8"] = {"prefill_tp": 2, "prefill_pp": 2, "decode_tp": 4, "decode_pp": 1}
    stages = load_experiments(written(tmp_path / "stages", degrees))
    assert sorted(each.manifest.gpus or 0 for each in stages) == [16, 16, 32]
    ranks = written(tmp_path / "ranks", {"1p1d_conc8": {"tp": 4, "dp": 2}})
    with pytest.raises(StoreError, match="nothing can be normalised"):
        load_experiments(ranks)
    attention = written(tmp_path / "attention", {"1p1d_conc8": {"tp": 4, "dp": 4, "enable_dp_attention": True}})
    assert [each.manifest.gpus for each in load_experiments(attention)] == [8]
    folder = written(tmp_path / "y_1xtp2", {"4xtp2_conc8": {}})
    with pytest.raises(StoreError, match=r"4xtp2.*1xtp2"):
        load_experiments(folder)


@pytest.mark.parametrize(
    ("files", "by"),
    [
        ({"1p3d_conc8_in1000_out100": {}, "2p2d_conc8_in1000_out100": {}}, "1p3d"),
        ({"1P3D_conc8": {}, "conc16": {"max_concurrency": 16}}, "1p3d"),
        ({"tp4_c8": {}, "tp8_c8": {}}, "tp4"),
        ({"a": {"tag": "pd_1p3d"}, "b": {"tag": "pd_1p1d"}}, "tag is pd_1p3d in a.json, pd_1p1d in b.json"),
        ({"a": {"tp": "1"}, "b": {"tp": "2"}}, "tp is 1 in a.json, 2 in b.json"),
        ({"a": {"decode_replicas": "1"}, "b": {"decode_replicas": "3"}}, "decode_replicas"),
        ({"a": {"tensor_parallel_size": 4}, "b": {"tensor_parallel_size": 8}}, "tensor_parallel_size is 4 in a.json"),
        ({"a": {"num_prefill_gpus": 4}, "b": {"num_prefill_gpus": 8}}, "num_prefill_gpus"),
        ({"a": {"enable_ep": True}, "b": {"enable_ep": False}}, "enable_ep"),
        ({"a": {"metadata": {"tp": 4}}, "b": {"metadata": {"tp": 8}}}, "tp is 4 in a.json, 8 in b.json"),
    ],
)
def test_several_sizes_in_one_folder_are_refused(tmp_path: Path, files: dict[str, dict[str, Any]], by: str) -> None:
    folder = written(tmp_path / "x_1xtp2", files)
    with pytest.raises(StoreError, match="several deployments") as refused:
        load_experiments(folder)
    assert by in str(refused.value) and "--gpus x_1xtp2=N" in str(refused.value)
    stated = load_experiments(folder, stated=8)
    assert len(stated) == 2 and {each.manifest.gpus for each in stated} == {8}
    assert all(each.manifest.deployment is None for each in stated), "no one configuration holds for both"


def test_days_apart_are_two_sessions_only_where_a_load_comes_twice(tmp_path: Path) -> None:
    one = {"conc8": {}, "conc16": {"max_concurrency": 16, **LATER}}
    assert list(shown(load_experiments(written(tmp_path / "one_1xtp2", one)))) == [""]
    days = ["20260101-010000", "20260101-230000", "20260102-220000", "20260103-210000"]
    chain = {f"{i}": {"date": date, "max_concurrency": 8 if i in (0, 3) else 8 + i} for i, date in enumerate(days)}
    assert all((int(b[6:8]) - int(a[6:8])) <= 1 for a, b in pairwise(days)), "no day without a file"
    parts = shown(load_experiments(written(tmp_path / "chain_1xtp2", chain)))
    assert [len(stems) for stems in parts.values()] == [3, 1]


def test_a_level_without_an_answer_goes_with_the_others(tmp_path: Path) -> None:
    nothing = {"completed": 0, "total_input_tokens": 0, "total_output_tokens": 0, "max_concurrency": 16}
    assert len(load_experiments(written(tmp_path / "x_1xtp2", {"a": {}, "b": nothing}))) == 1


def test_the_lengths_of_a_level_without_an_answer(tmp_path: Path) -> None:
    """They are those of its curve, else of its file's name, else of the folder."""
    nothing = {"completed": 0, "total_input_tokens": 0, "total_output_tokens": 0}
    files = {
        "a": {"tag": "one"},
        "b": {"tag": "one", "max_concurrency": 16, **nothing},
        "c": {"tag": "two", **nothing},
        "d_itl300_otl40": nothing,
        "e_itl300_otl1": {"total_input_tokens": 30_000, "total_output_tokens": 100},
        "f_itl300_otl1": {"max_concurrency": 16, **nothing},
    }
    experiments = load_experiments(written(tmp_path / "x_1xtp2", files))
    lengths = {(each.part, run.key.value): run.workload for each in experiments for run in each.runs}
    tokens = sorted((workload.label, workload.mode) for workload in lengths.values())
    assert len(lengths) == 6
    assert tokens == [*[("1000:100", "mixed")] * 3, *[("300:1", "prefill-only")] * 2, ("300:40", "mixed")]


@pytest.mark.parametrize("more", [{}, {"ramp": RAMP}, {"conc8_rr4": {"request_rate": 4.0, "burstiness": None}}])
def test_a_sweep_of_closed_and_open_loops_is_one_experiment(tmp_path: Path, more: dict[str, dict[str, Any]]) -> None:
    """Every file has a burstiness, which a closed loop does not use; without one arrivals are Poisson."""
    files = {"conc8": {}, "conc16": {"max_concurrency": 16}, "conc8_rr2": {"request_rate": 2.0}, **more}
    (experiment,) = load_experiments(written(tmp_path / "x_1xtp2", files))
    assert (experiment.part, len(experiment.runs)) == ("", len(files))


DISAGGREGATED: dict[str, Any] = {
    "hw": "b200", "model": "org/model-a", "framework": "dynamo-trt", "precision": "fp4", "isl": 8192, "osl": 1024,
    "is_multinode": True, "disagg": True, "prefill_tp": 8, "prefill_ep": 8, "prefill_dp_attention": True,
    "prefill_num_workers": 1, "decode_tp": 8, "decode_ep": 8, "decode_dp_attention": True, "decode_num_workers": 2,
    "num_prefill_gpu": 8, "num_decode_gpu": 16, "tput_per_gpu": 1000.0, "mean_intvty": 54.1, "median_ttft": 0.9,
    "median_tpot": 0.018,
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".json", ".csv"])
@pytest.mark.parametrize(
    "other",
    [
        {"prefill_num_workers": 2, "num_prefill_gpu": 16, "decode_num_workers": 1, "num_decode_gpu": 8},
        {"num_prefill_gpu": 16, "num_decode_gpu": 8},
        {"prefill_ep": 1},
        {"decode_ep": 1},
        {"prefill_dp_attention": False},
        {"decode_dp_attention": False},
        {"disagg": False},
        {"is_multinode": False},
        {"dp_attention": True},
    ],
)
def test_rows_of_inferencex_with_other_settings_are_no_repeats(
    tmp_path: Path, other: dict[str, Any], suffix: str
) -> None:
    rows = [
        DISAGGREGATED | {"conc": conc, "dp_attention": False} | more | figures
        for conc in (64, 128)
        for more, figures in (({}, {}), (other, {"tput_per_gpu": 600.0, "mean_intvty": 31.7}))
    ]
    write_rows(tmp_path / "x" / f"rows{suffix}", rows)
    experiments = load_experiments(tmp_path / "x")
    assert [[run.key.stem for run in each.runs] for each in experiments] == [["concurrency64", "concurrency128"]] * 2
    assert len({each.part for each in experiments}) == 2


def test_rows_of_inferencex_that_differ_in_figures_only_are_repeats(tmp_path: Path) -> None:
    """Also if one file is a table, where true and 8 are written True and 8.0."""
    written = {**DISAGGREGATED, "conc": 64, "disagg": "True", "decode_tp": "8.0", "mean_intvty": 31.7}
    write_rows(tmp_path / "x" / "a.json", [DISAGGREGATED | {"conc": 64}])
    write_rows(tmp_path / "x" / "b.csv", [written])
    assert shown(load_experiments(tmp_path / "x")) == {"": ["concurrency64", "concurrency64-r1"]}


SWEPT: dict[str, Any] = {"run_number": 0, "mean_e2el_ms": 4100.0, "p99.9_e2el_ms": 4200.0, "new_throughput": 1.5}


@pytest.mark.parametrize("suffix", [".json", ".csv"])
@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("max_num_batched_tokens", (2048, 8192)),
        ("gpu_memory_utilization", (0.8, 0.9)),
        ("enforce-eager", (True, False)),
        ("temperature", (0.0, 0.7)),
        ("compilation_config", ({"mode": 0}, {"mode": 3})),
        ("max_num_seqs", (64, None)),
    ],
)
def test_combinations_of_a_vllm_sweep_are_no_repeats(
    tmp_path: Path, setting: str, values: tuple[Any, ...], suffix: str
) -> None:
    """But its runs of one combination are, and loads differ within a curve."""
    rows = [
        published.content(conc, **SWEPT | {setting: value, "run_number": run, "duration": 50.0 + run})
        | {"max-concurrency": conc, "_benchmark_name": f"conc {conc}", "num_prompts": 20 * conc}
        for value in values
        for conc in (8, 16)
        for run in (0, 1)
    ]
    if suffix == ".csv":
        write_rows(tmp_path / "x_1xtp4" / "summary.csv", [{"": number} | row for number, row in enumerate(rows)])
    else:
        for number, row in enumerate(rows):
            write_rows(tmp_path / "x_1xtp4" / f"{number // 2}" / f"run={number % 2}.json", row)
    experiments = load_experiments(tmp_path / "x_1xtp4")
    both = ["concurrency8", "concurrency8-r1", "concurrency16", "concurrency16-r1"]
    assert [[run.key.stem for run in each.runs] for each in experiments] == [both] * 2
    assert all(setting in each.part for each in experiments)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("chunked_prefill_size", (2048, 8192)),
        ("disable_radix_cache", (True, False)),
        ("mem_fraction_static", (0.8, 0.9)),
    ],
)
@pytest.mark.parametrize("roles", [False, True])
def test_settings_of_sglangs_servers_are_no_repeats(
    tmp_path: Path, name: str, values: tuple[Any, ...], roles: bool
) -> None:
    rows = []
    for value in values:
        for conc in (8, 16):
            server = {"tp_size": 4, "last_gen_throughput": 100.0 + len(rows), "random_seed": len(rows), name: value}
            info = {"prefill": [server], "decode": [{"tp_size": 4}]} if roles else server
            rows.append(published.content(conc, sharegpt_output_len=None) | {"sharegpt_output_len": None})
            rows[-1]["server_info"] = info
    (tmp_path / "x_1xtp4").mkdir()
    (tmp_path / "x_1xtp4" / "levels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    experiments = load_experiments(tmp_path / "x_1xtp4", stated=4)
    assert [[run.key.stem for run in each.runs] for each in experiments] == [["concurrency8", "concurrency16"]] * 2
    assert all(name in each.part for each in experiments)


def write_rows(file: Path, rows: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(json.dumps(rows))
        return
    with file.open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
        table.writeheader()
        table.writerows(rows)
