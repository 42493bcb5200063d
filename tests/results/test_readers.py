"""Files as each benchmark client writes them, in the smallest form: the figures of the file are those of the level."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pdlab
from pdlab.analysis.curves import curves
from pdlab.analysis.goodput import met_share
from pdlab.core.errors import StoreError
from pdlab.core.workload import Closed, Open, Slo
from pdlab.results.published_folders import load_experiments, sourced_experiments
from pdlab.results.readers import READERS, read_file
from pdlab.results.schema import Run

VLLM: dict[str, Any] = {
    "model_id": "org/m", "num_prompts": 4, "request_rate": "inf", "max_concurrency": 2, "duration": 2.0,
    "completed": 4, "total_input_tokens": 400, "total_output_tokens": 12, "request_throughput": 2.0,
    "mean_ttft_ms": 250.0, "median_ttft_ms": 250.0, "p99_ttft_ms": 397.0,
}  # fmt: skip
DETAILED = VLLM | {
    "ttfts": [0.1, 0.2, 0.3, 0.4], "itls": [[0.01, 0.03]] * 4, "input_lens": [100] * 4, "output_lens": [3] * 4,
    "errors": [""] * 4, "generated_texts": ["x"] * 4,
}  # fmt: skip
SGLANG = {
    **{name: value for name, value in DETAILED.items() if name not in ("model_id", "num_prompts")},
    "sharegpt_output_len": None, "random_input_len": 100, "mean_e2e_latency_ms": 290.0,
    "server_info": {"model_path": "org/m", "tp_size": 2},
}  # fmt: skip


def aiperf_metric(unit: str, avg: float, **more: float) -> dict[str, Any]:
    return {"unit": unit, "avg": avg, **more}


AIPERF: dict[str, Any] = {
    "request_throughput": aiperf_metric("requests/sec", 2.0), "request_count": aiperf_metric("requests", 4.0),
    "benchmark_duration": aiperf_metric("sec", 2.0), "request_latency": aiperf_metric("ms", 290.0, p50=290.0),
    "time_to_first_token": aiperf_metric("ms", 250.0, p50=250.0, p99=397.0),
    "inter_token_latency": aiperf_metric("ms", 20.0, p50=20.0),
    "inter_chunk_latency": aiperf_metric("ms", 20.0), "input_sequence_length": aiperf_metric("tokens", 100.0, sum=400),
    "output_sequence_length": aiperf_metric("tokens", 3.0, sum=12),
    "input_config": {
        "models": {"items": [{"name": "org/m"}]}, "phases": [{"kind": "profiling", "concurrency": 2}],
    },
}  # fmt: skip
GENAI_PERF = {name: value for name, value in AIPERF.items() if name not in ("benchmark_duration", "input_config")} | {
    "input_config": {"endpoint": {"model_names": ["org/m"]}, "loadgen": {"concurrency": 2}}
}
GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": kind, **more}, "backend": {"model": "org/m"}},
            "duration": 2.0,
            "metrics": {
                "request_totals": {"successful": 4, "errored": 0, "incomplete": 1, "total": 5},
                "prompt_token_count": {"successful": {"total_sum": 400.0}},
                "output_token_count": {"successful": {"total_sum": 12.0}},
                "time_to_first_token_ms": {"successful": {"mean": 250.0, "percentiles": {"p50": 250.0, "p99": 397.0}}},
                "inter_token_latency_ms": {"successful": {"mean": 20.0, "percentiles": {"p50": 20.0}}},
                "time_per_output_token_ms": {"successful": {"mean": 97.0, "percentiles": {"p50": 97.0}}},
                "request_latency": {"successful": {"mean": 0.29, "percentiles": {"p50": 0.29}}},
            },
        }
        for kind, more in (("concurrent", {"streams": 2}), ("poisson", {"rate": 2.0}))
    ],
}
LIFECYCLE: dict[str, Any] = {
    "load_summary": {"count": 4, "requested_rate": 2.0, "achieved_rate": 2.0},
    "successes": {
        "count": 4,
        "latency": {
            "time_to_first_token": {"mean": 0.25, "median": 0.25, "p99": 0.397},
            "time_per_output_token": {"mean": 0.02, "median": 0.02},
            "inter_token_latency": {"mean": 0.02, "median": 0.02},
            "request_latency": {"mean": 0.29, "median": 0.29},
        },
        "throughput": {"requests_per_sec": 2.0},
        "prompt_tokens": {"total": 400.0},
        "output_tokens": {"total": 12.0},
    },
    "failures": {"count": 0},
}
LLMD_LATENCY = {
    "time_to_first_token": {"units": "ms", "mean": 250.0, "p50": 250.0, "p99": 397.0},
    "time_per_output_token": {"units": "s/token", "mean": 0.02, "p50": 0.02},
    "request_latency": {"units": "s", "mean": 0.29, "p50": 0.29},
}
LLMD = {
    "version": "0.2",
    "scenario": {"load": {"standardized": {"rate_qps": 2.0}}},
    "results": {
        "request_performance": {
            "aggregate": {
                "requests": {"total": 4, "failures": 0, "input_length": {"mean": 100}, "output_length": {"mean": 3}},
                "latency": LLMD_LATENCY,
                "throughput": {"request_rate": {"units": "queries/s", "mean": 2.0}},
            }
        }
    },
}
GENAI_BENCH = {
    "aggregated_metrics": {
        "scenario": "D(100,3)", "num_concurrency": 2, "run_duration": 2.0, "requests_per_second": 2.0,
        "num_completed_requests": 4, "num_requests": 4,
        "stats": {
            "ttft": {"mean": 0.25, "p99": 0.397}, "tpot": {"mean": 0.02}, "e2e_latency": {"mean": 0.29},
            "num_input_tokens": {"sum": 400}, "num_output_tokens": {"sum": 12},
        },
    },
    "individual_request_metrics": [
        {"ttft": ttft, "tpot": 0.02, "e2e_latency": ttft + 0.04, "error_code": None} for ttft in (0.1, 0.2, 0.3, 0.4)
    ],
    "_time_unit": "s",
}  # fmt: skip
GENAI_METADATA = {"benchmark_version": "0.0.5", "api_model_name": "org/m", "server_gpu_count": "2"}
EVALSCOPE = {
    "Test Duration (s)": 2.0, "Concurrency": 2, "Request Rate (req/s)": -1.0, "Total Requests": 4,
    "Success Requests": 4, "Req Throughput (req/s)": 2.0, "Avg Latency (s)": 0.29, "Avg Input Tokens": 100.0,
    "Avg TTFT (ms)": 250.0, "Avg TPOT (ms)": 20.0, "Avg ITL (ms)": 20.0, "Avg Output Tokens": 3.0,
}  # fmt: skip
EVALSCOPE_PERCENTILES = [
    {"Percentiles": "50%", "Latency (s)": 0.29, "TTFT (ms)": 250.0, "ITL (ms)": 20.0, "TPOT (ms)": 20.0},
    {"Percentiles": "99%", "Latency (s)": 0.43, "TTFT (ms)": 397.0, "ITL (ms)": 20.0, "TPOT (ms)": 20.0},
]
INFERENCEX = {
    "hw": "h100", "model": "org/m", "framework": "vllm", "tp": 2, "conc": 2, "isl": 100, "osl": 3,
    "output_tput_per_gpu": 3.0, "median_ttft": 0.25, "p99_ttft": 0.397, "mean_ttft": 0.25, "median_tpot": 0.02,
    "median_e2el": 0.29,
}  # fmt: skip


class Case(NamedTuple):
    tool: str
    files: dict[str, Any]
    tpot: bool = True


CASES = {
    "vllm": Case("vllm bench serve", {"a.json": VLLM}, tpot=False),
    "vllm-detailed": Case("vllm bench serve", {"a.json": DETAILED}),
    "sglang": Case("SGLang bench_serving", {"a.jsonl": [SGLANG]}),
    "aiperf": Case(
        "AIPerf",
        {
            "c2/profile_export_aiperf.json": AIPERF,
            "c2/inputs.json": {"data": []},
            "c2/server_metrics_export.json": {"x": []},
        },
    ),
    "genai-perf": Case("AIPerf", {"profile_export_genai_perf.json": GENAI_PERF}),
    "guidellm": Case("guidellm", {"benchmarks.json": GUIDELLM}),
    "inference-perf": Case(
        "inference-perf",
        {"stage_0_lifecycle_metrics.json": LIFECYCLE, "summary_lifecycle_metrics.json": LIFECYCLE},
    ),
    "llm-d": Case("llm-d benchmark report", {"benchmark_report,_stage_0.json": LLMD}),
    "genai-bench": Case("genai-bench", {"level.json": GENAI_BENCH, "experiment_metadata.json": GENAI_METADATA}),
    "evalscope": Case(
        "evalscope perf",
        {
            "p2/benchmark_summary.json": EVALSCOPE,
            "p2/benchmark_percentile.json": EVALSCOPE_PERCENTILES,
            "p2/benchmark_args.json": {"model": "org/m"},
        },
    ),
    "inferencex": Case("InferenceX", {"agg.json": [INFERENCEX]}),
}


def written(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.suffix == ".jsonl"
        path.write_text("\n".join(map(json.dumps, content)) if lines else json.dumps(content))
    return folder


def runs_of(folder: Path) -> list[Run]:
    return [run for each in sourced_experiments(folder, 2) for run in each.experiment.runs]


@pytest.mark.parametrize("name", CASES)
def test_the_figures_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    runs = runs_of(written(tmp_path / "x", case.files))
    assert len(runs) == (2 if name == "guidellm" else 1)
    for run in runs:
        whole = run.whole
        assert isinstance(run.load, Closed) or (isinstance(run.load, Open) and run.load.rate_rps == 2.0)
        assert run.validity.valid and whole.requests_per_s == pytest.approx(2.0)
        assert (whole.input_tokens_per_s, whole.output_tokens_per_s) == (pytest.approx(200.0), pytest.approx(6.0))
        assert whole.ttft is not None and whole.ttft.mean_s == pytest.approx(0.25)
        assert whole.ttft.percentiles_s["p50"] == pytest.approx(0.25)
        assert whole.ttft.percentiles_s["p99"] == pytest.approx(0.397, rel=1e-3)
        if case.tpot:
            assert whole.tpot is not None and whole.tpot.percentiles_s["p50"] == pytest.approx(0.02)
            assert whole.e2el is not None and whole.e2el.percentiles_s["p50"] == pytest.approx(0.29)
        if name not in ("inference-perf", "llm-d"):
            assert run.model == "org/m"


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_recognised_by_what_is_in_it(name: str, tmp_path: Path) -> None:
    written(tmp_path, CASES[name].files)
    readings = [read_file(tmp_path / file) for file in CASES[name].files]
    assert {reading.tool for reading in readings} == {CASES[name].tool}
    assert sum(bool(reading.levels) for reading in readings) == 1
    assert all(reading.skipped for reading in readings if not reading.levels)


def guidellm_of_0_2(**more: Any) -> dict[str, Any]:
    """As 0.2 and 0.3 write it: totals, arguments and the worker beside the metrics."""
    benchmark = json.loads(json.dumps(GUIDELLM["benchmarks"][0]))
    strategy = benchmark.pop("config")["strategy"]
    benchmark["args"] = {"strategy": strategy, "strategy_index": 0}
    benchmark["request_totals"] = benchmark["metrics"].pop("request_totals")
    benchmark["worker"] = {"type_": "generative_requests_worker", "backend_model": "org/m"}
    return {"benchmarks": [{**benchmark, **more}]}


def test_earlier_reports_of_guidellm(tmp_path: Path) -> None:
    (run,) = runs_of(written(tmp_path / "x", {"benchmarks.json": guidellm_of_0_2()}))
    assert (run.completed, run.load, run.model) == (4, Closed(concurrency=2), "org/m")
    assert run.whole.requests_per_s == pytest.approx(2.0) and run.validity.valid
    with pytest.raises(StoreError, match=r"benchmarks\.json: it begins as a file of guidellm.*no request_totals"):
        runs_of(written(tmp_path / "y", {"benchmarks.json": guidellm_of_0_2(request_totals=None)}))


def genai_perf(config: dict[str, Any], *, counted: bool) -> dict[str, Any]:
    return {name: value for name, value in GENAI_PERF.items() if counted or name != "request_count"} | {
        "input_config": config
    }


@pytest.mark.parametrize(
    ("content", "load", "notes"),
    [
        (
            genai_perf({"model": ["org/m"], "concurrency": 2, "request_rate": None, "streaming": True}, counted=False),
            Closed(concurrency=2),
            ["file_counts_unknown"],
        ),
        (
            genai_perf({"model": ["org/m"], "concurrency": None, "request_rate": 2.0}, counted=False),
            Open(rate_rps=2.0, burstiness=1000.0),
            ["file_counts_unknown"],
        ),
        (
            genai_perf({"model_names": ["org/m"], "perf_analyzer": {"stimulus": {"concurrency": 2}}}, counted=True),
            Closed(concurrency=2),
            [],
        ),
        (
            genai_perf({"model_names": ["org/m"], "perf_analyzer": {"stimulus": {"request_rate": 2}}}, counted=True),
            Open(rate_rps=2.0, burstiness=1000.0),
            [],
        ),
    ],
)
def test_versions_of_genai_perf(tmp_path: Path, content: dict[str, Any], load: Closed | Open, notes: list[str]) -> None:
    """0.0.8 has the load in its configuration, and no number of requests; 0.0.16 has that of perf_analyzer."""
    raw = {"service_kind": "openai", "endpoint": "v1/chat", "experiments": [{}], "version": "1"}
    files = {"profile_export_genai_perf.json": content, "profile_export.json": raw, "inputs.json": {"data": []}}
    (run,) = runs_of(written(tmp_path / "x", files))
    assert (run.load, run.model, [note.code for note in run.validity.notes]) == (load, "org/m", notes)
    assert run.validity.valid and run.whole.requests_per_s == pytest.approx(2.0)
    assert run.whole.output_tokens_per_s == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("generator", "burstiness"),
    [
        ({"request_rate": 2.0, "request_rate_mode": "constant"}, 1000.0),
        ({"request_rate": 2.0, "request_rate_mode": "poisson"}, 1.0),
        ({"request_rate": 2.0}, 1.0),
    ],
)
def test_arrivals_of_aiperf(tmp_path: Path, generator: dict[str, Any], burstiness: float) -> None:
    content = AIPERF | {"input_config": {"endpoint": {"model_names": ["org/m"]}, "loadgen": generator}}
    (run,) = runs_of(written(tmp_path / "x", {"profile_export_aiperf.json": content}))
    assert run.load == Open(rate_rps=2.0, burstiness=burstiness)
    word = generator.get("request_rate_mode")
    command = "aiperf profile --request-rate 2" + (f" --request-rate-mode '{word}'" if word else "")
    older = {name: value for name, value in AIPERF.items() if name != "input_config"} | {"cli_command": command}
    (run,) = runs_of(written(tmp_path / "y", {"profile_export_aiperf.json": older}))
    assert run.load == Open(rate_rps=2.0, burstiness=burstiness)


def test_a_cancelled_run_of_aiperf_is_not_valid(tmp_path: Path) -> None:
    for cancelled in (True, False):
        content = AIPERF | {"was_cancelled": cancelled}
        (run,) = runs_of(written(tmp_path / str(cancelled), {"profile_export_aiperf.json": content}))
        assert [finding.text for finding in run.validity.findings] == (
            ["marked as not valid in the file: AIPerf's run was cancelled"] if cancelled else []
        )


def test_levels_that_vllm_appended_to_one_file(tmp_path: Path) -> None:
    """--append-result writes a line per level, whatever the suffix."""
    levels = [VLLM | {"max_concurrency": conc} for conc in (2, 4)]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.json").write_text("\n".join(map(json.dumps, levels)))
    assert [run.load for run in runs_of(tmp_path / "x")] == [Closed(concurrency=2), Closed(concurrency=4)]
    (tmp_path / "x" / "a.json").write_text(json.dumps(VLLM) + '\n{"a"')
    with pytest.raises(StoreError, match=r"a\.json: cannot be read as JSON \(line 2"):
        runs_of(tmp_path / "x")


EARLIER_EVALSCOPE = {
    "Time taken for tests (s)": 2.0, "Number of concurrency": 2, "Total requests": 4, "Succeed requests": 4,
    "Failed requests": 0, "Output token throughput (tok/s)": 6.0, "Total token throughput (tok/s)": 206.0,
    "Request throughput (req/s)": 2.0, "Average latency (s)": 0.29, "Average time to first token (s)": 0.25,
    "Average time per output token (s)": 0.02, "Average inter-token latency (s)": 0.02,
    "Average input tokens per request": 100.0, "Average output tokens per request": 3.0,
}  # fmt: skip


def test_earlier_summaries_of_evalscope(tmp_path: Path) -> None:
    percentiles = [{"Percentiles": "99%", "TTFT (s)": 0.397, "ITL (s)": 0.02, "TPOT (s)": 0.02, "Latency (s)": 0.43}]
    files = {"benchmark_summary.json": EARLIER_EVALSCOPE, "benchmark_percentile.json": percentiles}
    (run,) = runs_of(written(tmp_path / "x", files))
    whole = run.whole
    assert run.load == Closed(concurrency=2) and run.validity.valid and (run.completed, run.num_requests) == (4, 4)
    assert (whole.requests_per_s, whole.input_tokens_per_s, whole.output_tokens_per_s) == (2.0, 200.0, 6.0)
    figures = {name: getattr(whole, name) for name in ("ttft", "tpot", "itl", "e2el")}
    means = {"ttft": 0.25, "tpot": 0.02, "itl": 0.02, "e2el": 0.29}
    assert {name: each.mean_s for name, each in figures.items()} == pytest.approx(means)
    last = {"ttft": 0.397, "tpot": 0.02, "itl": 0.02, "e2el": 0.43}
    assert {name: each.percentiles_s["p99"] for name, each in figures.items()} == pytest.approx(last)


def test_servers_of_both_roles_behind_sglangs_router(tmp_path: Path) -> None:
    server = {"model_path": "org/m", "version": "0.5.5"}
    info = {"prefill": [server | {"tp_size": 4}], "decode": [server | {"tp_size": 2, "pp_size": 2}]}
    folder = written(tmp_path / "x", {"1p3d_conc2.jsonl": [SGLANG | {"server_info": info, "backend": "sglang-oai"}]})
    (experiment,) = load_experiments(folder)
    assert experiment.manifest.gpus == 4 + 3 * 4 and experiment.runs[0].model == "org/m"
    assert experiment.manifest.versions == {"sglang": "0.5.5"}


ACCELERATOR = {"model": "H100", "count": 4, "parallelism": {"tp": 4, "dp": 1, "pp": 1}}


def test_the_accelerators_of_llm_ds_first_report(tmp_path: Path) -> None:
    """In 0.1 each entry of the host is an accelerator, and metrics are beside the scenario."""

    def report(roles: list[str]) -> dict[str, Any]:
        host = {"type": roles, "accelerator": [ACCELERATOR] * len(roles)}
        performance = LLMD["results"]["request_performance"]["aggregate"]
        load = LLMD["scenario"]["load"]
        return {"version": "0.1", "scenario": {"host": host, "load": load}, "metrics": performance}

    (experiment,) = load_experiments(written(tmp_path / "x", {"r.json": report(["prefill", "decode"])}))
    assert experiment.manifest.gpus == 8 and experiment.manifest.hardware == {"gpu": "H100"}
    splits = {"a.json": report(["prefill", "prefill", "decode"]), "b.json": report(["prefill", "decode", "decode"])}
    both = load_experiments(written(tmp_path / "y", splits))
    assert [(len(each.runs), each.manifest.gpus) for each in both] == [(1, 12), (1, 12)]


def test_engines_of_an_llm_d_stack_that_differ_are_no_repeats(tmp_path: Path) -> None:
    def report(tp: int, replicas: int) -> dict[str, Any]:
        engine = {"kind": "inference_engine", "tool": "vllm", "role": "decode", "replicas": replicas}
        parts = [{"standardized": engine | {"accelerator": {"model": "H100", "count": 8, "parallelism": {"tp": tp}}}}]
        return LLMD | {"scenario": LLMD["scenario"] | {"stack": parts}}

    files = {"a.json": report(8, 1), "b.json": report(4, 2), "c.json": report(8, 1)}
    assert sorted(len(each.runs) for each in load_experiments(written(tmp_path / "x", files), 8)) == [1, 2]


NOT_FINITE = (float("nan"), float("inf"))


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("name", ["ttfts", "itls", "start_times"])
def test_times_that_are_not_finite_make_requests_unusable(name: str, value: float, tmp_path: Path) -> None:
    """As those that lack: the file's own figures stay, and what it leaves out is of the other requests."""
    starts = {"start_times": [0.0, 0.1, 1.0, 1.2]}
    lists = json.loads(json.dumps({each: (DETAILED | starts)[each] for each in ("ttfts", "itls", "start_times")}))
    if name == "itls":
        lists["itls"][0][1] = value
    else:
        lists[name][0] = value
    (loaded,) = pdlab.load(written(tmp_path / "x", {"a.json": DETAILED | lists}), gpus={"x": 2}).loaded
    (run,) = loaded.experiment.runs
    assert run.whole.ttft is not None and run.whole.ttft.percentiles_s["p50"] == pytest.approx(0.25)
    assert run.whole.e2el is not None and run.whole.tpot is not None and run.validity.valid
    expected_ms = {"ttfts": 340.0, "itls": 340.0, "start_times": 290.0}  # of the three others, or of all
    assert run.whole.e2el.mean_s == pytest.approx(expected_ms[name] / 1e3)
    assert run.whole.tpot.mean_s == pytest.approx(0.02)
    assert len(loaded.requests) == (name == "start_times")
    report = pdlab.build_report(pdlab.load(tmp_path / "x", gpus={"x": 2}))
    assert report.curves


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("client", ["genai-bench", "guidellm", "aiperf"])
def test_requests_of_other_clients_that_are_not_finite(client: str, value: float, tmp_path: Path) -> None:
    files = json.loads(json.dumps(WITH_REQUESTS[client]))
    if client == "genai-bench":
        files["level.json"]["individual_request_metrics"][0]["ttft"] = value
    elif client == "guidellm":
        files["benchmarks.json"]["benchmarks"][0]["requests"]["successful"][0]["request_latency"] = value
    else:
        files["profile_export.jsonl"][0]["metrics"]["time_to_first_token"]["value"] = value
    (loaded,) = pdlab.load(written(tmp_path / "x", files), gpus={"x": 2}).loaded
    assert not loaded.requests and loaded.experiment.runs[0].validity.valid


NO_ANSWERS: dict[str, dict[str, Any]] = {
    "vllm": {"a.json": VLLM | {"completed": 0}},
    "sglang": {"a.jsonl": [SGLANG | {"completed": 0}]},
    "aiperf": {"profile_export_aiperf.json": AIPERF | {"request_count": aiperf_metric("requests", 0.0)}},
    "inference-perf": {
        "stage_0_lifecycle_metrics.json": LIFECYCLE | {"successes": LIFECYCLE["successes"] | {"count": 0}}
    },
    "genai-bench": {
        "a.json": GENAI_BENCH
        | {"aggregated_metrics": GENAI_BENCH["aggregated_metrics"] | {"num_completed_requests": 0, "num_requests": 0}}
    },
    "evalscope": {"benchmark_summary.json": EVALSCOPE | {"Success Requests": 0, "Total Requests": 0}},
}


@pytest.mark.parametrize("client", NO_ANSWERS)
def test_figures_without_an_answered_request_are_not_valid(client: str, tmp_path: Path) -> None:
    files = json.loads(json.dumps(NO_ANSWERS[client]))
    for content in files.values():
        for level in content if isinstance(content, list) else [content]:
            level.pop("num_prompts", None)
            if client == "sglang":
                level.pop("errors")
            if client == "aiperf":
                level["benchmark_duration"] = aiperf_metric("sec", 2.0)
            if client == "inference-perf":
                level["benchmark_time_seconds"] = 2.0
    (run,) = runs_of(written(tmp_path / "x_isl100_otl3", files))
    assert [finding.code for finding in run.validity.findings] == ["file_no_answers"]


def zeros(value: Any) -> Any:
    """The value with 0 in place of each number."""
    if isinstance(value, dict):
        return {name: zeros(each) for name, each in value.items()}
    if isinstance(value, list):
        return [zeros(each) for each in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


GUIDELLM_CLOSED = {**GUIDELLM, "benchmarks": GUIDELLM["benchmarks"][:1]}
LLMD_FAILED = {"requests": {"total": 4, "failures": 4}, "latency": {}, "throughput": {}}
SGLANG_FAILED = zeros(SGLANG) | {"duration": 2.0, "max_concurrency": 4, "random_input_len": 100}
# Client -> a level with answers, and one at another load whose every request failed.
UNANSWERED: dict[str, dict[str, Any]] = {
    "vllm": {"a.json": VLLM, "b.json": zeros(VLLM) | {"duration": 2.0, "num_prompts": 4, "max_concurrency": 4}},
    "vllm-detailed": {
        "a.json": DETAILED,
        "b.json": zeros(DETAILED)
        | {"duration": 2.0, "num_prompts": 4, "max_concurrency": 4, "errors": ["Internal Server Error"] * 4},
    },
    "sglang": {"a.jsonl": [SGLANG, SGLANG_FAILED | {"errors": ["Internal Server Error"] * 4}]},
    "sglang-summary": {
        "a.jsonl": [
            SGLANG,
            {name: value for name, value in SGLANG_FAILED.items() if not isinstance(value, list)},
        ]
    },
    "aiperf": {
        "c2/profile_export_aiperf.json": AIPERF,
        "c4/profile_export_aiperf.json": {
            "request_throughput": aiperf_metric("requests/sec", 0.0),
            "benchmark_duration": aiperf_metric("sec", 2.0),
            "error_request_count": aiperf_metric("requests", 4.0),
            "input_config": {**AIPERF["input_config"], "phases": [{"kind": "profiling", "concurrency": 4}]},
        },
    },
    "guidellm": {
        "a.json": GUIDELLM_CLOSED,
        "b.json": {
            "benchmarks": [
                {
                    "config": {"strategy": {"type_": "concurrent", "streams": 4}, "backend": {"model": "org/m"}},
                    "duration": 2.0,
                    "metrics": {
                        **zeros(GUIDELLM_CLOSED["benchmarks"][0]["metrics"]),
                        "request_totals": {"successful": 0, "errored": 4, "incomplete": 0, "total": 4},
                    },
                }
            ]
        },
    },
    "inference-perf": {
        "stage_0_lifecycle_metrics.json": LIFECYCLE,
        "stage_1_lifecycle_metrics.json": {
            "load_summary": {"count": 4, "requested_rate": 4.0, "send_duration": 2.0},
            "successes": {"count": 0, "latency": None, "throughput": None},
            "failures": {"count": 4},
        },
    },
    "llm-d": {
        "a.json": LLMD,
        "b.json": {
            **LLMD,
            "scenario": {"load": {"standardized": {"rate_qps": 4.0}}},
            "results": {"request_performance": {"aggregate": LLMD_FAILED | {"time": {"duration": 2.0}}}},
        },
    },
    "genai-bench": {
        "a.json": GENAI_BENCH,
        "b.json": {
            "aggregated_metrics": zeros(GENAI_BENCH["aggregated_metrics"])
            | {"num_concurrency": 4, "run_duration": 2.0, "num_requests": 4},
            "individual_request_metrics": [{"error_code": 500}] * 4,
        },
    },
    "evalscope": {
        "p2/benchmark_summary.json": EVALSCOPE,
        "p4/benchmark_summary.json": zeros(EVALSCOPE)
        | {"Test Duration (s)": 2.0, "Concurrency": 4, "Request Rate (req/s)": -1.0, "Total Requests": 4},
    },
}


@pytest.mark.parametrize("client", UNANSWERED)
def test_a_level_whose_requests_failed_has_the_lengths_of_the_others(client: str, tmp_path: Path) -> None:
    good, failed = runs_of(written(tmp_path / "x", UNANSWERED[client]))
    assert (good.completed, failed.completed, good.validity.valid) == (4, 0, True)
    assert good.workload.label == "100:3" and failed.workload == good.workload
    expected = "file_nothing_answered" if client == "sglang-summary" else "file_requests_failed"
    assert [finding.code for finding in failed.validity.findings] == [expected]


@pytest.mark.parametrize(
    "files",
    [
        {
            "c2/profile_export_genai_perf.json": GENAI_PERF,
            "c4/profile_export_genai_perf.json": {
                name: value for name, value in zeros(GENAI_PERF).items() if name != "input_config"
            },
        },
        {"a.json": LLMD, "b.json": {**LLMD, "results": {"request_performance": {"aggregate": LLMD_FAILED}}}},
        {"agg.json": [INFERENCEX, INFERENCEX | {"conc": 4, "output_tput_per_gpu": 0.0}]},
    ],
    ids=["genai-perf", "llm-d", "inferencex"],
)
def test_a_level_with_neither_answers_nor_a_duration_hides_no_other(files: dict[str, Any], tmp_path: Path) -> None:
    (run,) = runs_of(written(tmp_path / "x", files))
    assert run.validity.valid and run.workload.label == "100:3"


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    written(tmp_path, {"x.json": {"hello": 1}})
    with pytest.raises(StoreError, match=r"no known benchmark client.*its first keys are hello"):
        read_file(tmp_path / "x.json")
    (tmp_path / "t.csv").write_text("Scenario,Division,Units,Result\nOffline,Closed,Tokens/s,1\n")
    assert read_file(tmp_path / "t.csv").skipped
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(StoreError, match="line 2"):
        read_file(tmp_path / "bad.jsonl")


def test_every_reader_has_a_case() -> None:
    of_readers = {reader: import_module(f"pdlab.results.readers.{reader}").TOOL for reader in READERS}
    # Their cases are below, in tests/report/test_export.py, and in tests/cli.
    elsewhere = {"mlperf", "levels_table", "pdlab_level"}
    assert {tool for reader, tool in of_readers.items() if reader not in elsewhere} <= {c.tool for c in CASES.values()}


def test_requests_that_failed_are_left_out_of_statistics(tmp_path: Path) -> None:
    failed = DETAILED | {
        "completed": 3, "errors": ["", "", "", "boom"], "ttfts": [0.1, 0.2, 0.3, 9.0],
        "mean_ttft_ms": None, "median_ttft_ms": None,
    }  # fmt: skip
    del failed["mean_ttft_ms"], failed["median_ttft_ms"]
    (run,) = runs_of(written(tmp_path / "x", {"a.json": failed}))
    assert run.whole.ttft is not None and run.whole.ttft.mean_s == pytest.approx(0.2)


def test_every_file_is_read_once_for_plot_and_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = Path.read_bytes
    folder = written(tmp_path / "x_1xtp2", {"conc2.json": DETAILED, "more/no.json": VLLM})

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    report = pdlab.build_report(pdlab.load(folder))
    assert "few_prompts" in {finding.code for finding in report.findings}
    assert read == ["conc2.json"]


@pytest.mark.parametrize("changed", [{"itls": [[0.01, "x"]] * 4}, {"output_lens": ["x"] * 4}])
def test_requests_that_are_no_numbers_are_one_line(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a\.json: its requests are not numbers"):
        runs_of(written(tmp_path / "x", {"a.json": DETAILED | changed}))


RECOUNTED = {
    "aiperf": {
        "profile_export_aiperf.json": AIPERF | {"total_usage_completion_tokens": aiperf_metric("tokens", 8.0)},
    },
    "inference-perf": {
        "stage_0_lifecycle_metrics.json": LIFECYCLE
        | {
            "successes": LIFECYCLE["successes"]
            | {
                "throughput": {"requests_per_sec": 2.0, "output_tokens_per_sec": 6.0},
                "output_tokens": {"total": 8.0},
                "output_len": {"mean": 3.0},
            }
        }
    },
}


@pytest.mark.parametrize("client", RECOUNTED)
def test_tokens_that_the_client_recounted_are_a_finding(client: str, tmp_path: Path) -> None:
    """The client's own throughput stays; a level whose counts differ from the server's is not valid."""
    (run,) = runs_of(written(tmp_path / "x", RECOUNTED[client]))
    assert run.whole.output_tokens_per_s == pytest.approx(6.0)
    (finding,) = run.validity.findings
    assert (finding.code, finding.numbers) == ("file_tokens_recounted", {"client": 3.0, "server": 2.0})


def test_a_token_more_in_a_hundred_is_no_other_count(tmp_path: Path) -> None:
    close = AIPERF | {"total_usage_completion_tokens": aiperf_metric("tokens", 12.2)}
    (run,) = runs_of(written(tmp_path / "x", {"profile_export_aiperf.json": close}))
    assert run.validity.valid


def test_sglangs_own_figure_of_whole_requests_stays(tmp_path: Path) -> None:
    """Its requests end with their streams, after their last tokens: the times that the file keeps are shorter."""
    longer = SGLANG | {"mean_e2e_latency_ms": 295.0}
    (run,) = runs_of(written(tmp_path / "x", {"a.jsonl": [longer]}))
    assert run.whole.e2el is not None and run.whole.e2el.mean_s == pytest.approx(0.295)


def test_rates_of_aiperf_are_over_the_time_of_its_requests(tmp_path: Path) -> None:
    longer = AIPERF | {"benchmark_duration": aiperf_metric("sec", 2.1)}
    (run,) = runs_of(written(tmp_path / "x", {"profile_export_aiperf.json": longer}))
    assert run.whole.requests_per_s == pytest.approx(2.0)


def test_a_sweep_of_aiperf_has_the_load_of_each_level(tmp_path: Path) -> None:
    """Its command has all values; the configuration has the one of the level."""
    command = {"run_info": {"cli_command": "aiperf profile --concurrency '8,2'"}}
    (run,) = runs_of(written(tmp_path / "x", {"profile_export_aiperf.json": AIPERF | command}))
    assert run.load == Closed(concurrency=2)
    older = {name: value for name, value in AIPERF.items() if name != "input_config"}
    (run,) = runs_of(
        written(
            tmp_path / "y",
            {"profile_export_aiperf.json": older | {"run_info": {"cli_command": "aiperf profile --concurrency 8"}}},
        )
    )
    assert run.load == Closed(concurrency=8)


def test_the_table_of_a_sweep_without_its_files_has_the_levels(tmp_path: Path) -> None:
    rows = [VLLM, VLLM | {"max_concurrency": 4, "request_goodput": None}]
    names = list(rows[1])
    lines = [",".join(("", *names))]
    lines += [
        ",".join([str(i), *("" if (value := row.get(name)) is None else str(value) for name in names)])
        for i, row in enumerate(rows)
    ]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "summary.csv").write_text("\n".join(lines))
    alone = runs_of(tmp_path / "x")
    assert [run.load for run in alone] == [Closed(concurrency=2), Closed(concurrency=4)]
    assert {run.whole.requests_per_s for run in alone} == {2.0} and {run.model for run in alone} == {"org/m"}
    written(tmp_path / "x" / "BENCH--max_concurrency=2", {"run=0.json": VLLM, "summary.json": [VLLM]})
    assert [run.load for run in runs_of(tmp_path / "x")] == [Closed(concurrency=2)]


def test_the_settings_beside_the_stages_of_inference_perf(tmp_path: Path) -> None:
    settings = "api: {}\ndata: {}\nload: {type: KIND, stages: []}\nserver: {model_name: org/m, base_url: 'http://a'}\n"
    stages = {"stage_0_lifecycle_metrics.json": LIFECYCLE, "validation.json": {"global": {}, "reports": {}}}
    for kind, burstiness in (("poisson", 1.0), ("constant", 1000.0)):
        folder = written(tmp_path / kind, stages)
        (folder / "config.yaml").write_text(settings.replace("KIND", kind))
        (run,) = runs_of(folder)
        assert run.model == "org/m" and run.load == Open(rate_rps=2.0, burstiness=burstiness)
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(StoreError, match=r"config\.yaml: cannot be read as YAML \(.*line 2"):
        runs_of(folder)


def aiperf_line(ttft_ms: float, start_s: float, **more: Any) -> dict[str, Any]:
    values = {"time_to_first_token": ttft_ms, "inter_token_latency": 20.0, "request_latency": ttft_ms + 40.0}
    return {
        "metadata": {"benchmark_phase": "profiling", "request_start_ns": int(start_s * 1e9)},
        "metrics": {name: {"value": value, "unit": "ms"} for name, value in values.items()},
        "error": None,
    } | more


WITH_REQUESTS = {
    "vllm": {"a.json": DETAILED | {"start_times": [0.0, 0.1, 1.0, 1.2]}},
    "vllm-without-starts": {"a.json": DETAILED},
    "sglang": CASES["sglang"].files,
    "genai-bench": CASES["genai-bench"].files,
    "guidellm": {
        "benchmarks.json": GUIDELLM
        | {
            "benchmarks": [
                GUIDELLM["benchmarks"][0]
                | {
                    "requests": {
                        "successful": [
                            {
                                "time_to_first_token_ms": 1000 * ttft,
                                "inter_token_latency_ms": 20.0,
                                "request_latency": ttft + 0.04,
                                "request_start_time": 100.0 - ttft,
                            }
                            for ttft in (0.1, 0.2, 0.3, 0.4)
                        ]
                    }
                }
            ]
        }
    },
    "aiperf": {
        "profile_export_aiperf.json": AIPERF,
        "profile_export.jsonl": [
            *(aiperf_line(1000 * ttft, ttft) for ttft in (0.1, 0.2, 0.3, 0.4)),
            aiperf_line(1.0, 0.0, metadata={"benchmark_phase": "warmup"}),
            aiperf_line(1.0, 0.0, error={"code": 500}),
        ],
    },
}


@pytest.mark.parametrize("client", WITH_REQUESTS)
def test_requests_that_a_client_kept_give_the_share_within_an_slo(client: str, tmp_path: Path) -> None:
    """Of four requests with TTFT 100 to 400 ms and TPOT 20 ms."""
    folder = written(tmp_path / "x", WITH_REQUESTS[client])
    (loaded,) = pdlab.load(folder, gpus={"x": 2}).loaded
    ((key, requests),) = loaded.requests.items()
    assert key == loaded.experiment.runs[0].key and len(requests) == 4
    for slo, share in (
        (Slo(ttft_s=0.25), 0.5),
        (Slo(ttft_s=0.45), 1.0),
        (Slo(ttft_s=0.35, tpot_s=0.025), 0.75),
        (Slo(tpot_s=0.015), 0.0),
        (Slo(e2el_s=0.2), 0.25),
    ):
        assert met_share(requests, slo) == share, slo
    of_starts = client in ("vllm", "guidellm", "aiperf")
    assert len(requests.finish_s) == (4 if of_starts else 0)
    (curve,) = curves([loaded.experiment], [loaded.requests])
    assert curve.points[0].rate_estimate("requests").value == pytest.approx(2.0)


def test_requests_of_which_some_are_missing_are_not_taken_for_all(tmp_path: Path) -> None:
    files = WITH_REQUESTS["aiperf"]["profile_export.jsonl"][:3]
    folder = written(tmp_path / "x", {"profile_export_aiperf.json": AIPERF, "profile_export.jsonl": files})
    (loaded,) = pdlab.load(folder, gpus={"x": 2}).loaded
    assert not loaded.requests


def test_a_request_that_failed_is_within_no_slo(tmp_path: Path) -> None:
    failed = DETAILED | {"completed": 3, "errors": ["", "", "", "boom"]}
    (loaded,) = pdlab.load(written(tmp_path / "x", {"a.json": failed}), gpus={"x": 2}).loaded
    (requests,) = loaded.requests.values()
    assert met_share(requests, Slo(ttft_s=1.0)) == 0.75


LOADGEN = Path(__file__).parents[1] / "data" / "mlperf_log_summary.txt"


def test_a_summary_of_loadgen(tmp_path: Path) -> None:
    """LoadGen 6.0 wrote it of a stand-in that sends a first token after 30 ms and 15 more, 5 ms apart."""
    folder = tmp_path / "x_isl64_otl16"
    folder.mkdir()
    (folder / LOADGEN.name).write_text(LOADGEN.read_text())
    (folder / "notes.txt").write_text("of no client")
    (run,) = runs_of(folder)
    assert run.load == Open(rate_rps=60.0, burstiness=1.0) and run.validity.valid
    assert [note.code for note in run.validity.notes] == ["file_counts_unknown"]
    assert run.whole.requests_per_s == pytest.approx(59.02) and run.whole.output_tokens_per_s == pytest.approx(945.9)
    for metric, least_s in (("ttft", 0.030), ("tpot", 0.005), ("e2el", 0.105)):
        figures = getattr(run.whole, metric)
        assert least_s <= figures.percentiles_s["p50"] <= figures.percentiles_s["p99.9"]
        assert figures.mean_s == pytest.approx(least_s, rel=0.05)


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("Result is : VALID", "Result is : INVALID", "file_not_valid"),
        ("Early stopping satisfied: Yes", "Early stopping satisfied: NO", None),
        ("target_qps : 60", "target_qps : 0", "skipped"),
        ("first token latency", "other latency", "skipped"),
    ],
)
def test_a_summary_of_loadgen_that_is_no_level_or_not_valid(
    old: str, new: str, finding: str | None, tmp_path: Path
) -> None:
    text = LOADGEN.read_text()
    assert old in text
    folder = tmp_path / "x_isl64_otl16"
    folder.mkdir()
    (folder / LOADGEN.name).write_text(
        text.replace(old, new).replace("First Token", "Other") if "first" in old else text.replace(old, new)
    )
    if finding == "skipped":
        assert "token latencies" in read_file(folder / LOADGEN.name).skipped
    else:
        (run,) = runs_of(folder)
        assert [each.code for each in run.validity.findings] == ([finding] if finding else [])


def test_the_requests_of_aiperf_without_their_summary_are_a_level(tmp_path: Path) -> None:
    lengths = {name: {"value": value, "unit": "tokens"} for name, value in
               (("input_sequence_length", 100), ("output_sequence_length", 3))}  # fmt: skip
    lines = []
    for ttft, start_s in zip((0.1, 0.2, 0.3, 0.4), (0.0, 0.1, 1.0, 1.56), strict=True):
        line = aiperf_line(1000 * ttft, start_s)
        line["metadata"]["request_end_ns"] = int((start_s + ttft + 0.04) * 1e9)
        line["metrics"] |= lengths
        lines.append(line)
    (run,) = runs_of(written(tmp_path / "x", {"conc2.jsonl": lines}))
    assert run.load == Closed(concurrency=2) and run.validity.valid
    assert run.whole.requests_per_s == pytest.approx(2.0)
    assert (run.whole.input_tokens_per_s, run.whole.output_tokens_per_s) == (pytest.approx(200), pytest.approx(6))
    assert run.whole.ttft is not None and run.whole.ttft.percentiles_s["p50"] == pytest.approx(0.25)
    assert run.whole.tpot is not None and run.whole.tpot.mean_s == pytest.approx(0.02)
    with pytest.raises(StoreError, match="neither a request rate nor max_concurrency"):
        runs_of(written(tmp_path / "y", {"profile_export.jsonl": lines}))
    refused = {"metadata": lines[0]["metadata"], "metrics": {}, "error": {"code": 500}}
    (run,) = runs_of(written(tmp_path / "z", {"conc2/profile_export.jsonl": [refused, *lines]}))
    assert (run.completed, run.num_requests) == (4, 5)
    assert [finding.code for finding in run.validity.findings] == ["file_requests_failed"]
    (run,) = runs_of(written(tmp_path / "none_isl100_otl3", {"conc2/profile_export.jsonl": [refused, refused]}))
    assert (run.completed, run.num_requests) == (0, 2) and not run.validity.valid


POOLS = {
    "tp": None, "disagg": True, "num_prefill_gpu": 4, "num_decode_gpu": 8, "isl": 1000, "osl": 500,
    "output_tput_per_gpu": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "rates",
    [
        # 6 requests/s on 12 GPUs: 6,000 input tokens/s on 4 of them, 3,000 output tokens/s on the other 8.
        {"tput_per_gpu": 750.0, "input_tput_per_gpu": 1500.0, "output_tput_per_gpu": 375.0},
        {"tput_per_gpu": 750.0},
        {"output_tput_per_gpu": 375.0},
        {"out_tok_s_per_gpu_derived": 250.0},
        {"tput_per_gpu": 750.0, "input_tput_per_gpu": 500.0, "output_tput_per_gpu": 250.0},
    ],
)
def test_rates_of_a_disaggregated_row_are_per_gpu_of_their_role(tmp_path: Path, rates: dict[str, float]) -> None:
    row = {name: value for name, value in (INFERENCEX | POOLS | rates).items() if value is not None}
    (experiment,) = pdlab.load(written(tmp_path, {"rows.json": [row]})).experiments
    (run,) = experiment.runs
    assert (experiment.manifest.gpus, run.whole.requests_per_s) == (12, pytest.approx(6.0))
    assert run.whole.output_tokens_per_s == pytest.approx(3000.0)


WORKERS = {
    "disagg": True, "isl": 1000, "osl": 500, "output_tput_per_gpu": None, "tput_per_gpu": 750.0,
    "prefill_num_workers": 2, "prefill_tp": 4, "decode_num_workers": 1, "decode_tp": 8, "decode_pp": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"tp": 8, "pp": 2}, 16),
        ({"tp": 8}, 8),
        ({"tp": 8, "pp": 2, "num_gpus": 32}, 32),
        ({**WORKERS, "tp": 8}, 24),
        ({**WORKERS, "tp": None}, 24),
        ({**WORKERS, "tp": 8, "disagg": False}, 8),
        ({**WORKERS, "tp": 8, "num_prefill_gpu": 4, "num_decode_gpu": 8}, 12),
    ],
)
def test_the_gpus_of_a_row_without_their_number(tmp_path: Path, changes: dict[str, Any], gpus: int) -> None:
    """Each worker has tp x pp GPUs; a stated number counts before them."""
    row = {name: value for name, value in (INFERENCEX | changes).items() if value is not None}
    (experiment,) = load_experiments(written(tmp_path, {"rows.json": [row]}))
    assert experiment.manifest.gpus == gpus


def test_the_platform_that_clients_state(tmp_path: Path) -> None:
    def platform(name: str, files: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str | None]]:
        (experiment,) = load_experiments(written(tmp_path / name, files), 2)
        return experiment.manifest.hardware, experiment.manifest.versions

    metadata = GENAI_METADATA | {"server_engine": "vLLM", "server_version": "0.11.2", "server_gpu_type": "H100"}
    genai = {"D(100,3)_text-to-text_num_concurrency_2_time_2s.json": GENAI_BENCH, "experiment_metadata.json": metadata}
    assert platform("genai", genai) == ({"gpu": "H100"}, {"vllm": "0.11.2"})
    server = SGLANG | {"server_info": {"model_path": "org/m", "version": "0.5.5"}, "backend": "sglang-oai"}
    assert platform("sglang", {"a.jsonl": [server]}) == ({}, {"sglang": "0.5.5"})
    row = INFERENCEX | {"image": "vllm/vllm-openai:v0.11.0"}
    assert platform("inferencex", {"a.json": [row]}) == ({"gpu": "h100"}, {"vllm": "0.11.0"})
    for name, tools, versions, stated in (
        ("one", ["vllm"] * 2, ["0.11.0"] * 2, {"vllm": "0.11.0"}),
        ("two", ["vllm"] * 2, ["0.11.0", "0.12.0"], {}),
        ("none", ["vllm"] * 2, [None, None], {}),
        ("half", ["vllm"] * 2, ["0.11.0", None], {}),
    ):
        stack = [
            {
                "standardized": {
                    "kind": "inference_engine", "tool": tool, "tool_version": version,
                    "accelerator": {"model": "H200", "count": 1},
                }
            }
            for tool, version in zip(tools, versions, strict=True)
        ]  # fmt: skip
        report = LLMD | {"scenario": LLMD["scenario"] | {"stack": stack}}
        assert platform(name, {"r.json": report}) == ({"gpu": "H200"}, stated)


@pytest.mark.parametrize(
    ("name", "content", "begin"),
    [
        ("a.csv", "Organization,Model,Result\nX,m,3\n", "the columns of its first row are Organization, Model, Result"),
        ("a.csv", "a,b,c,d,e\n1,2,3,4,5\n", "the columns of its first row are a, b, c, d, ..."),
        ("a.json", json.dumps([{"x" * 99: 1}]), f"the columns of its first row are {'x' * 40}"),
        ("a.json", "[1]", "it is a list of other values than rows"),
        ("a.yaml", "text", "it is a single value"),
        ("a.json", "{}", "it is empty"),
    ],
)
def test_a_file_of_no_known_client_is_named_by_its_columns(tmp_path: Path, name: str, content: str, begin: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(StoreError) as refused:
        read_file(tmp_path / name)
    assert f"({begin})" in str(refused.value)
