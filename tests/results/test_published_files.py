"""One file of others: what is read of it whatever it lacks, and what it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import published

from pdlab.core.errors import StoreError
from pdlab.core.workload import Closed, Open, Ramp
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Run


def read(tmp_path: Path, *, folder: str = "x_1xtp2", stem: str = "a", **changes: Any) -> Run:
    (run,) = load_experiment(published.write(tmp_path / folder, {stem: published.content(**changes)})).runs
    return run


LATENCIES = dict.fromkeys(
    [f"{statistic}_{metric}_ms" for statistic in ("mean", "median") for metric in ("ttft", "tpot")]
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"median_ttft_ms": None}, (0.1, {})),
        ({"mean_ttft_ms": None}, (None, {"p50": 0.1})),
        ({"median_ttft_ms": None, "p99_ttft_ms": 300.0}, (0.1, {"p99": 0.3})),
        ({"mean_ttft_ms": None, "median_ttft_ms": None}, None),
        ({"mean_ttft_ms": "slow", "median_ttft_ms": [1]}, None),
        ({"mean_ttft_ms": 0.0, "median_ttft_ms": 0, "p99_ttft_ms": 300.0}, (None, {"p99": 0.3})),  # 0: not measured
        ({**LATENCIES, "median_ttft": 0.18, "p99_ttft": 0.5}, (None, {"p50": 0.18, "p99": 0.5})),
        ({**LATENCIES, "mean_ttft_s": 0.2}, (0.2, {})),
        ({"mean_ttft": 0.3, "median_ttft": 0.3}, (0.1, {"p50": 0.1})),  # a key in milliseconds counts
    ],
)
def test_what_a_file_has_is_read_without_what_it_lacks(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[float | None, dict[str, float]] | None
) -> None:
    ttft = read(tmp_path, **changes).whole.ttft
    if expected is None:
        assert ttft is None
        return
    assert ttft is not None
    assert ttft.mean_s == (None if expected[0] is None else pytest.approx(expected[0]))
    assert ttft.percentiles_s == pytest.approx(expected[1])


def test_seconds_that_are_longer_than_the_run_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"median_ttft is 180, which is read in seconds.*ends in _ms"):
        read(tmp_path, **LATENCIES, median_ttft=180)


def test_seconds_between_tokens_make_no_answer_longer_than_the_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"median_tpot is 40, .*an answer of 101 tokens takes longer than the run"):
        read(tmp_path, **LATENCIES, median_tpot=40)
    tpot = read(tmp_path, folder="y_1xtp2", **LATENCIES, median_tpot=0.04, p99_tpot=1.0).whole.tpot
    assert tpot is not None and tpot.percentiles_s == {"p50": 0.04, "p99": 1.0}


@pytest.mark.parametrize("metric", ["e2el_ms", "e2e_latency_ms"])
def test_either_name_of_e2el(tmp_path: Path, metric: str) -> None:
    whole = read(tmp_path, **{f"mean_{metric}": 4100.0}).whole
    assert whole.e2el is not None and whole.e2el.mean_s == pytest.approx(4.1)


RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 40}


@pytest.mark.parametrize("load", [{"request_rate": "inf"}, {"request_rate": 5.0}, {"max_concurrency": None}])
@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_a_ramp_is_a_ramp_whatever_else_it_carries(tmp_path: Path, load: dict[str, Any], shape: str) -> None:
    run = read(tmp_path, **{**RAMP, "ramp_up_strategy": shape, **load})
    assert run.load == Ramp(start_rps=1, end_rps=40, shape=shape)  # type: ignore[arg-type]
    assert (run.key.kind, run.key.value) == ("ramp", 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ramp_up_strategy": "steps"}, "ramp_up_strategy is 'steps'; expected linear or exponential"),
        ({"ramp_up_start_rps": 0}, "ramp_up_start_rps is 0"),
        ({"ramp_up_end_rps": None}, "ramp_up_end_rps is None"),
        ({"ramp_up_end_rps": "fast"}, "ramp_up_end_rps is 'fast'"),
    ],
)
def test_no_ramp(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        read(tmp_path, **{**RAMP, **changes})


@pytest.mark.parametrize(
    ("changes", "capped"),
    [
        ({"max_concurrent_requests": 8}, True),
        ({"max_concurrent_requests": 7}, False),
        ({"max_concurrent_requests": None}, True),  # by Little's law it was at the limit on average
        ({"max_concurrent_requests": None, "max_concurrency": 16}, False),
        ({"max_concurrent_requests": None, "max_concurrency": None}, False),
        ({"max_concurrent_requests": 8, "request_rate": 8 / 4.1}, False),  # what was to arrive was served
        ({**RAMP, "max_concurrent_requests": 8}, True),
        ({"max_concurrent_requests": 8, "request_rate": "inf"}, False),  # a closed loop has no other load
    ],
)
def test_an_open_loop_that_its_client_held_back_is_not_valid(
    tmp_path: Path, changes: dict[str, Any], capped: bool
) -> None:
    run = read(tmp_path, **{"request_rate": 20.0, **changes})
    assert isinstance(run.load, Closed if changes.get("request_rate") == "inf" else Open | Ramp)
    assert run.validity.valid is not capped
    assert any("the client stopped at 8 in flight" in reason for reason in run.validity.reasons) is capped


@pytest.mark.parametrize(
    ("folder", "stem", "tokens", "expected", "requested", "valid"),
    [
        ("x_itl1000_otl101_1xtp2", "a", (1000, 101), (1000, 101), None, True),
        ("x_itl1000_otl101_1xtp2", "a", (1003, 100), (1000, 101), None, True),  # a tokenizer's rounding
        ("x_itl1000_otl200_1xtp2", "a", (1000, 62), (1000, 62), 200, True),
        ("x_1xtp2", "conc8_in1000_out200", (1000, 62), (1000, 62), 200, True),
        ("x_itl9000_otl9000_1xtp2", "c8_isl1000_osl101", (1000, 101), (1000, 101), None, True),  # the file's own name
        ("x_itl1000_otl100_1xtp2", "a", (1000, 150), (1000, 150), None, False),
        ("x_itl1000_otl100_1xtp2", "a", (2000, 100), (2000, 100), None, False),
        ("x_1xtp2", "a", (1000, 62), (1000, 62), None, True),
    ],
)
def test_lengths_are_those_of_the_file(
    tmp_path: Path,
    folder: str,
    stem: str,
    tokens: tuple[int, int],
    expected: tuple[int, int],
    requested: int | None,
    valid: bool,
) -> None:
    run = read(
        tmp_path, folder=folder, stem=stem, total_input_tokens=160 * tokens[0], total_output_tokens=160 * tokens[1]
    )
    assert (run.workload.sent_input_tokens, run.workload.sent_output_tokens) == expected
    assert (run.requested_tokens and run.requested_tokens[1]) == requested
    assert run.validity.valid is valid
    assert bool(run.validity.notes) is (requested is not None)


def of_sglang(ratio: float | None, inputs: float, outputs: float, **changes: Any) -> dict[str, Any]:
    """A level of SGLang's client with these mean lengths."""
    return {
        **{"total_output_tokens_retokenized": 160 * outputs, "dataset_name": "random", "random_range_ratio": ratio},
        **{"random_input_len": 4000, "random_output_len": 500},
        **{"total_input_tokens": 160 * inputs, "total_output_tokens": 160 * outputs},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "label", "means"),
    [
        (of_sglang(0.0, 2010, 247), "4000:500 uniform 0.0-1.0", (2000, 250)),
        (of_sglang(0.8, 3603, 451), "4000:500 uniform 0.8-1.0", (3600, 450)),
        (of_sglang(1.0, 4000, 500), "4000:500", (4000, 500)),
        (of_sglang(None, 2010, 247), "2010:247", (2010, 247)),
        (of_sglang(0.0, 2010, 247, dataset_name="sharegpt"), "2010:247", (2010, 247)),
        (of_sglang(0.0, 2010, 90), "2010:90", (2010, 90)),  # answers ended by themselves
        (of_sglang(0.0, 2010, 247, total_output_tokens_retokenized=None), "2010:247", (2010, 247)),  # vLLM's client
    ],
)
def test_lengths_that_sglang_drew(
    tmp_path: Path, changes: dict[str, Any], label: str, means: tuple[float, float]
) -> None:
    run = read(tmp_path, **changes)
    assert run.workload.label == label
    assert run.workload.mean_tokens == pytest.approx(means, abs=1)
    assert run.validity.valid and run.requested_tokens is None


def test_lengths_that_sglang_drew_are_at_most_those_in_a_name(tmp_path: Path) -> None:
    drawn = of_sglang(0.0, 2010, 247)
    assert read(tmp_path, folder="x_itl4000_otl500_1xtp2", **drawn).validity.valid
    assert not read(tmp_path, folder="x_itl3000_otl500_1xtp2", **drawn).validity.valid


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        (
            {"spec_decode_acceptance_length": 1.9, "spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 30},
            (1.9, 3),
        ),
        ({"spec_decode_acceptance_length": 1.9}, (1.9, None)),
        ({"accept_length": 2.5}, (2.5, None)),
        ({"accept_length": 1.0}, None),
        ({"spec_decoding": "mtp"}, (None, None)),
        ({"spec_decoding": "none"}, None),
        ({"accept_length": "x"}, None),
    ],
)
def test_speculative_decoding_of_a_file(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[float | None, float | None] | None
) -> None:
    speculation = read(tmp_path, **changes).speculation
    assert (speculation and (speculation.accepted_tokens, speculation.guessed_tokens)) == expected


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"backend": "vllm"}, None),  # any server with the interface of OpenAI
        ({"backend": "openai"}, None),
        ({"backend": "sglang"}, "sglang"),
        ({"backend": "tensorrt-llm"}, "trtllm"),
        (of_sglang(1.0, 4000, 500, backend="sglang-oai"), "sglang"),
        (of_sglang(1.0, 4000, 500, backend="vllm"), "vllm"),
        ({"framework": "dynamo-trt"}, "trtllm"),
        ({"framework": "vLLM"}, "vllm"),
    ],
)
def test_the_engine_of_a_file(tmp_path: Path, changes: dict[str, Any], engine: str | None) -> None:
    assert read(tmp_path, **changes).engine == engine


@pytest.mark.parametrize(("mode", "tokens"), [("prefill-only", (1000, 101)), ("decode_only", (1000, 101))])
def test_a_mode_in_a_name_is_not_believed_against_the_file(tmp_path: Path, mode: str, tokens: tuple[int, int]) -> None:
    run = read(tmp_path, folder=f"x_itl1000_otl101_{mode}_1xtp2")
    assert run.workload.mode == "mixed"
    assert (run.workload.sent_input_tokens, run.workload.sent_output_tokens) == tokens
    assert not run.validity.valid
