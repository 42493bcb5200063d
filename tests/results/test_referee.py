"""The verdict on a level comes from the same gates, whichever client wrote it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from results.test_readers import AIPERF, EVALSCOPE, GUIDELLM, INFERENCEX, LIFECYCLE, VLLM, written

from pdlab.analysis.audit.rules import audit
from pdlab.results.description import Stated
from pdlab.results.published_folders import load_experiments
from pdlab.results.schema import Run


def runs(folder: Path) -> list[Run]:
    return [run for each in load_experiments(folder, 2) for run in each.runs]


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


def of_guidellm(*, rate: float = 2.0, limit: int | None = None, stay_s: float = 0.29, count: int = 4) -> dict[str, Any]:
    report = deepcopy(GUIDELLM)
    report["benchmarks"] = report["benchmarks"][1:]
    (benchmark,) = report["benchmarks"]
    benchmark["config"]["strategy"] = {"type_": "poisson", "rate": rate, "max_concurrency": limit}
    metrics = benchmark["metrics"]
    metrics["request_latency"] = {"successful": {"mean": stay_s}}
    metrics["request_totals"] = {"successful": count}
    metrics["inter_token_latency_ms"] = {}
    return report


def of_aiperf(phase: dict[str, Any], stay_s: float = 0.29) -> dict[str, Any]:
    latency = {"unit": "ms", "avg": 1000 * stay_s}
    config = AIPERF["input_config"] | {"phases": [{"kind": "profiling", **phase}]}
    return AIPERF | {"input_config": config, "request_latency": latency}


NO_LENGTHS = {
    "vllm": {"a.json": without(VLLM, "total_input_tokens")},
    "aiperf": {"profile_export_aiperf.json": without(AIPERF, "input_sequence_length")},
    "evalscope": {"benchmark_summary.json": without(EVALSCOPE, "Avg Input Tokens")},
    "inference-perf": {
        "stage_0_lifecycle_metrics.json": LIFECYCLE | {"successes": without(LIFECYCLE["successes"], "prompt_tokens")}
    },
    "not-counted": {"a.json": VLLM | {"total_input_tokens": 0}},
}
# 20 requests/s were to arrive, 2 were served, each stayed for 2 s, and the client allowed 4 in flight.
CAPPED = {
    "vllm": {"a.json": VLLM | {"request_rate": 20.0, "max_concurrency": 4, "mean_e2el_ms": 2000.0, "duration": 2.0}},
    "aiperf": {"profile_export_aiperf.json": of_aiperf({"type": "poisson", "rate": 20.0, "concurrency": 4}, 2.0)},
    "guidellm": {"benchmarks.json": of_guidellm(rate=20.0, limit=4, stay_s=2.0)},
}
# The same with room for more: the server is slow, and the client sent all.
FREE = {
    "vllm": {"a.json": CAPPED["vllm"]["a.json"] | {"max_concurrency": 64}},
    "aiperf": {"profile_export_aiperf.json": of_aiperf({"type": "poisson", "rate": 20.0, "concurrency": 64}, 2.0)},
    "guidellm": {"benchmarks.json": of_guidellm(rate=20.0, limit=64, stay_s=2.0)},
}


@pytest.mark.parametrize("client", NO_LENGTHS)
def test_lengths_that_are_unknown(client: str, tmp_path: Path) -> None:
    (run,) = runs(written(tmp_path / "x", NO_LENGTHS[client]))
    (finding,) = run.validity.findings
    assert (finding.code, finding.numbers) == ("file_no_lengths", {"side": "input"})
    assert "invalid" in {each.code for each in audit([tmp_path / "x"], {tmp_path / "x": Stated(2)})}


@pytest.mark.parametrize("client", ["vllm", "aiperf", "evalscope"])
def test_lengths_that_the_folder_gives(client: str, tmp_path: Path) -> None:
    (run,) = runs(written(tmp_path / "x_isl100_osl3", NO_LENGTHS[client]))
    assert run.validity.valid
    assert run.workload.input_tokens == 100 and run.whole.input_tokens_per_s == pytest.approx(200)


@pytest.mark.parametrize("client", CAPPED)
def test_an_open_loop_that_its_client_stopped(client: str, tmp_path: Path) -> None:
    (run,) = runs(written(tmp_path / "capped", CAPPED[client]))
    assert [finding.code for finding in run.validity.findings] == ["file_rate_capped"]
    (run,) = runs(written(tmp_path / "free", FREE[client]))
    assert run.validity.valid


def test_short_requests_that_follow_one_another_are_not_in_flight_at_once(tmp_path: Path) -> None:
    """A client counts 18 requests in the best second: 2 in flight, each for 0.12 s."""
    short = VLLM | {
        "num_prompts": 32, "completed": 32, "duration": 1.92, "total_input_tokens": 3200, "total_output_tokens": 96,
        "mean_ttft_ms": 100.0, "median_ttft_ms": 100.0, "p99_ttft_ms": 110.0, "mean_tpot_ms": 10.0,
        "median_tpot_ms": 10.0, "request_throughput": 32 / 1.92,
    }  # fmt: skip
    codes = {}
    for peak in (18, 60):
        folder = written(tmp_path / f"p{peak}", {"conc2.json": short | {"max_concurrent_requests": peak}})
        codes[peak] = {finding.code for finding in audit([folder], {folder: Stated(2)})}
    assert "peak_contradicts" not in codes[18] and "peak_contradicts" in codes[60]
    slow = short | {"request_rate": 20.0, "max_concurrency": 16, "max_concurrent_requests": 18}
    (run,) = runs(written(tmp_path / "open", {"a.json": slow}))
    assert run.validity.valid, "about 2 of 16 were in flight"


FEW = {
    "vllm": {"a.json": VLLM},
    "aiperf": {"profile_export_aiperf.json": AIPERF},
    "guidellm-closed": {"benchmarks.json": GUIDELLM | {"benchmarks": GUIDELLM["benchmarks"][:1]}},
    "guidellm-open": {"benchmarks.json": of_guidellm()},
    "inference-perf": {"stage_0_lifecycle_metrics.json": LIFECYCLE},
}
# A second level of twice the concurrency, whose mean prompt came out a token longer.
TWICE = {
    "vllm": {"a.json": VLLM, "b.json": VLLM | {"max_concurrency": 4, "total_input_tokens": 404}},
    "aiperf": {
        "c2/profile_export_aiperf.json": AIPERF,
        "c4/profile_export_aiperf.json": of_aiperf({"concurrency": 4})
        | {"input_sequence_length": {"unit": "tokens", "avg": 101.0, "sum": 404}},
    },
    "evalscope": {
        "p2/benchmark_summary.json": EVALSCOPE,
        "p4/benchmark_summary.json": EVALSCOPE | {"Concurrency": 4, "Avg Input Tokens": 101.0},
    },
}


@pytest.mark.parametrize(
    ("codes", "files"),
    [
        *(pytest.param({"few_prompts", "few_arrivals"}, files, id=f"few-{client}") for client, files in FEW.items()),
        *(pytest.param({"reused_default_seed"}, files, id=f"warm-{client}") for client, files in TWICE.items()),
    ],
)
def test_the_audit_finds(codes: set[str], files: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path / "x", files)
    found = {finding.code for finding in audit([folder], {folder: Stated(2)})}
    assert codes & found and "unreadable" not in found


def test_what_a_row_without_counts_cannot_show_is_noted(tmp_path: Path) -> None:
    rows = [INFERENCEX | {"conc": 256 * number} for number in (1, 2)]
    folder = written(tmp_path / "x", {"agg.json": rows})
    for run in runs(folder):
        assert [note.code for note in run.validity.notes] == ["file_counts_unknown"]
    found = {finding.code for finding in audit([folder], {folder: Stated(2)})}
    assert not found & {"few_prompts", "few_arrivals", "reused_prompts", "reused_default_seed"}, (
        "the number of requests is not known"
    )
