"""What makes every level of a sweep invalid ends the warm-up: nothing is measured, one line names it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.sweep import Oracle, pd_deployment, publish, run_bm

from pdlab.results.schema import Run

pytestmark = pytest.mark.usefixtures("warm_client")

Faults = dict[str, float]


@pytest.fixture
def cache(oracle: Oracle, tokenizer: Path, tmp_path: Path) -> Path:
    publish(tmp_path, oracle, tokenizer, pd_deployment())
    return tmp_path


def sweep(
    oracle: Oracle, cache: Path, faults: Faults, otl: int = 64, *more: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The sweep's end, and what the server saw of its level."""
    oracle.configure({"": {"ttft_s": 0.02, "tpot_s": 0.001, **faults}})
    done = run_bm(
        *("-u", oracle.url, "-c", "2", "--itl", "16", "--otl", str(otl), "--prompts-per-level", "20"),
        *("--request-timeout-s", "3", "--out", str(cache / "bm"), *more),
        cache=cache,
    )
    return done, oracle.log_of("concurrency")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"fail_every": 1}, 'is answered with HTTP 500: {"error": "planted"} (3 of 3 times, before the warm-up)'),
        ({"no_model": 1}, 'is answered with HTTP 404: {"error": {"message": "The model `oracle` does not exist."}}'),
        ({"no_stream": 1}, "does not stream: a streamed completion is answered as application/json"),
        ({"buffered": 1}, "the 64 tokens of an answer arrive at once"),
        ({"hang_every": 1}, "no warm-up request was answered (first: no complete answer within 3 s)"),
        ({"prompt_tokens_off": 1}, "8 of 8 answers have a wrong input token count (17, not 16)"),
        ({"short_every": 8}, "1 of 8 answers have a wrong output token count (63, not 64)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_fault_of_every_level_ends_the_sweep(oracle: Oracle, cache: Path, faults: Faults, message: str) -> None:
    done, measured = sweep(oracle, cache, faults)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert measured == []
    assert not list((cache / "bm").glob("*/concurrency*"))


def test_a_sweep_that_measured_nothing_leaves_the_folder_to_the_corrected_command(oracle: Oracle, cache: Path) -> None:
    done, _ = sweep(oracle, cache, {"prompt_tokens_off": 1}, 64)
    assert done.returncode == 1
    for _ in range(2):  # the level that is there then is kept, and pins the lengths
        done, measured = sweep(oracle, cache, {}, 32, "--resume")
        assert done.returncode in (0, 3), done.stderr
        assert len(measured) == 20
    done, _ = sweep(oracle, cache, {}, 64, "--resume")
    assert done.returncode == 2 and "was measured with workload output_tokens 32, now it is 64" in done.stderr


def test_a_short_answer_in_one_piece_is_noted_and_measured(oracle: Oracle, cache: Path) -> None:
    """Ray Serve LLM hands tokens on every 50 ms."""
    done, measured = sweep(oracle, cache, {"buffered": 1}, 8)
    assert len(measured) == 20
    assert "too short to show whether the server streams" in done.stderr


def test_one_failed_request_is_no_reason_to_stop(oracle: Oracle, cache: Path) -> None:
    """The first requests after a start may time out: that is what a warm-up is for."""
    done, measured = sweep(oracle, cache, {"fail_every": 8})
    assert "1 of 8 failed" in done.stderr
    assert len(measured) == 20


def test_a_server_that_reports_no_usage_is_noted_and_measured(oracle: Oracle, cache: Path) -> None:
    """Also if the text of its answers has another number of tokens: nothing shows how many it made."""
    done, measured = sweep(oracle, cache, {"no_usage": 1, "short_every": 1})
    assert len(measured) == 20 and done.returncode in (0, 3), done.stderr
    words = "the server reports no usage at the end of a stream ({} of {} answers), so token counts are not checked"
    assert f"warm-up: {words.format(8, 8)}" in done.stderr
    assert "in 8 of them not the requested number" in done.stderr
    (run,) = next((cache / "bm").glob("*/concurrency2.json")).parent.glob("concurrency2.json")
    validity = Run.model_validate_json(run.read_text()).validity
    assert validity.unchecked["token_counts"].text.startswith(words.format(20, 20))
    assert "token_counts" not in validity.failed_gates
