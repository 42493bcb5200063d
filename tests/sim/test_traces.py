"""Requests from a trace file: how it is read, and a plan for it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pdlab.cli import plan
from pdlab.core.errors import UsageError
from pdlab.sim import traces
from pdlab.sim.level import Trace

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
    trace = traces.read(written(tmp_path, text))
    assert trace.arrival_s == pytest.approx(WANTED.arrival_s)
    assert (trace.input_tokens, trace.output_tokens) == (WANTED.input_tokens, WANTED.output_tokens)
    assert trace.rate_rps == pytest.approx(2 / 2.25) and trace.longest == (300, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs the columns"),
        ("arrival_s,input_tokens\n1,2\n", "needs the columns"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n", "holds 1 requests"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n1,2,3\n", "at the same time"),
        ("arrival_s,input_tokens,output_tokens\nsoon,2,3\n", "line 2: 'soon' is not a time"),
        ("arrival_s,input_tokens,output_tokens\nnan,2,3\n", "line 2: 'nan' is not a time"),
        ("arrival_s,input_tokens,output_tokens\n1,2,0\n", "line 2: '0' is not a number of tokens"),
        ("arrival_s,input_tokens,output_tokens\n1,2.5,1\n", "line 2: '2.5' is not a number of tokens"),
        ("arrival_s,input_tokens,output_tokens\n1,2\n", "line 2: 2 cells for 3 columns"),
    ],
)
def test_bad_traces(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--trace") as caught:
        traces.read(written(tmp_path, text))
    assert message in str(caught.value)


def test_copies_share_a_trace() -> None:
    parts = [WANTED.part(n) for n in (1, 2)]
    assert parts[0] == WANTED
    assert parts[1] == Trace((0.0, 2.25), (100, 200), (10, 20))


def test_a_plan_for_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the requests arrive in bursts: that takes more GPUs than the same requests evenly spaced."""
    used = []
    for burst in (1, 40):
        rows = [f"{n // burst * burst / 8},{4000 + n % 5 * 500},{200 + n % 3 * 50}" for n in range(400)]
        path = written(tmp_path, "arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
        words = f"--gpus 16 --trace {path} --slo-ttft-ms 1000 --slo-tpot-ms 15"
        assert plan.main(shlex.split(words)) == 0
        out = capsys.readouterr().out
        assert "5000:250 tokens (means of a trace of 400 requests at 8" in out and "longest 6000:300" in out
        best = next(line for line in out.splitlines() if line.startswith(" 1 "))
        used.append(int(best.split()[3]))
    assert used[0] < used[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace nowhere.csv", "cannot be read"),
        ("--trace t.csv --rate 3", "leave --rate out"),
        ("--trace t.csv --itl 3", "leave --itl out"),
        ("--burstiness 0.5", "--burstiness is for --rate, which is not given"),
    ],
)
def test_bad_words(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(shlex.split(words)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_bursts_take_more(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for burstiness in ("1", "0.1"):
        words = f"--explain pd-pack-p1xtp2-d1xtp2 --rate 5 --burstiness {burstiness} --slo-ttft-ms 1000"
        assert plan.main(shlex.split(words)) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rate 5"))
        shares.append(float(row.split()[8]))
    assert shares[1] > 1.2 * shares[0], "a longer time in the system"
