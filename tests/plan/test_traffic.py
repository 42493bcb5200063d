"""A workload file or a trace in a plan: how it is read, what is refused, what it changes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pdlab.cli import plan
from pdlab.core.catalog import require_shape
from pdlab.plan.traffic import assumed_hit_share, has_requests, trace_of_file
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import Trace

DATA = Path(__file__).resolve().parents[1] / "data" / "traffic"
WANTED = Trace((0.0, 0.5, 2.25), (100, 300, 200), (10, 30, 20))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,input_tokens,output_tokens\n10,100,10\n10.5,300,30\n12.25,200,20\n",
        "output_tokens,other,timestamp_ms,input_tokens\n20,x,2250,200\n10,x,0,100\n\n30,x,500,300\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,10\n"
        "2023-11-16 18:15:47.1805900,300,30\n2023-11-16 18:15:48.9305900,200,20\n",
        "timestamp,input_length,output_length\n2026-01-01T00:00:00Z,100,10\n2026-01-01T00:00:00.5Z,300,30\n"
        "2026-01-01T01:00:02.25+01:00,200,20\n",
    ],
)
def test_ways_to_write_a_trace(text: str, tmp_path: Path) -> None:
    trace = trace_of_file(written(tmp_path, text))
    assert trace.arrival_s == pytest.approx(WANTED.arrival_s)
    assert (trace.input_tokens, trace.output_tokens) == (WANTED.input_tokens, WANTED.output_tokens)
    assert trace.rate_rps == pytest.approx(2 / 2.25) and trace.longest == (300, 30)


def test_copies_share_a_trace() -> None:
    parts = [WANTED.part(n) for n in (1, 2)]
    assert parts[0] == WANTED
    assert parts[1] == Trace((0.0, 2.25), (100, 200), (10, 20))


def test_files_that_list_their_requests(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.yaml"
    lengths.write_text("input_tokens: 500\n", encoding="utf-8")
    assert [has_requests(path) for path in (DATA / "chat.yaml", DATA / "mooncake.jsonl", lengths)] == [
        True,
        True,
        False,
    ]
    assert not has_requests(tmp_path / "nowhere.yaml")


def test_requests_that_share_nothing_are_lengths_and_moments_alone() -> None:
    assert trace_of_file(DATA / "azure-2023.csv").requests == ()
    assert len(trace_of_file(DATA / "mooncake.jsonl").requests) == 8


def test_the_share_of_a_cache_that_forgets_nothing() -> None:
    """Agents hit most of their prompts, also by the rules of windowed layers, which find less."""
    shape, hardware = require_shape("gpt-oss-120b"), load_hardware("h100-vllm-0.11")
    given = trace_of_file(DATA / "agents.yaml")
    full = assumed_hit_share(given, hardware, shape)
    windowed = assumed_hit_share(given, hardware.model_copy(update={"hybrid_kv": True}), shape)
    assert 0.7 < windowed < full < 0.95
    assert assumed_hit_share(trace_of_file(DATA / "azure-2023.csv"), hardware, shape) == 0


def test_a_plan_names_the_hit_share_that_it_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan.main(shlex.split(f"--gpus 4 --workload {DATA / 'agents.yaml'} --slo-ttft-ms 1000 --slo-tpot-ms 15")) == 0
    )
    first = capsys.readouterr().out.splitlines()[0]
    assert "by vLLM's rules 90.0%" in first and "are in prefix caches" in first
    assert "rate matching assumes 90.0%" in first


def test_another_rate_moves_sessions_and_not_what_is_within_them() -> None:
    given = trace_of_file(DATA / "chat.yaml")
    faster = given.at_rate(2 * given.rate_rps)
    for a, b in zip(given.requests, faster.requests, strict=True):
        assert b.gap_s == a.gap_s
        assert b.at_s == (None if a.at_s is None else pytest.approx(a.at_s / 2))


def test_a_plan_for_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the requests arrive at once, twice: that takes more GPUs than the same requests evenly spaced."""
    used = []
    for burst in (1, 200):
        rows = [f"{n // burst * burst / 8},{4000 + n % 5 * 500},{200 + n % 3 * 50}" for n in range(400)]
        path = written(tmp_path, "arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
        words = f"--gpus 16 --workload {path} --slo-ttft-ms 1000 --slo-tpot-ms 15"
        assert plan.main(shlex.split(words)) == 0
        out = capsys.readouterr().out
        assert "5000:250 tokens (means of a trace of 400 requests at 8" in out and "longest 6000:300" in out
        best = next(line for line in out.splitlines() if line.startswith(" 1 "))
        used.append(int(best.split()[3]))
    assert used[0] < used[1]


def test_bursts_take_more(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for burstiness in ("1", "0.1"):
        words = f"--explain pd-pack-p1xtp2-d1xtp2 --rate 5 --burstiness {burstiness} --slo-ttft-ms 1000"
        assert plan.main(shlex.split(words)) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rate 5"))
        shares.append(float(row.split()[8]))
    assert shares[1] > 1.2 * shares[0], "a longer time in the system"
