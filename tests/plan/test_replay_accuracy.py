"""A measured replay beside the simulation of its requests."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from support.replays import write_replay

from pdlab.cli import plan
from pdlab.core.catalog import load_model
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.replayed import COMPILED
from pdlab.core.workload import Level, Open, RunKey, Workload
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.results.store import Store
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import Trace
from pdlab.sim.simulator import simulate
from pdlab.traffic.requests import TrafficRequest

LABEL = "pd-pack-p1xtp1-d1xtp1"


def requests() -> list[TrafficRequest]:
    """Thirty conversations of two turns, seconds apart: each finds the engines idle."""
    made = []
    for n in range(30):
        first, blocks = f"c{n}t1", (("system", 640), (f"c{n}/a", 300 + 40 * n))
        made.append(TrafficRequest(first, f"c{n}", blocks, 20, at_s=9.0 * n))
        made.append(TrafficRequest(f"c{n}t2", f"c{n}", ((f"c{n}/b", 200),), 30, parent=first, gap_s=2.0))
    return made


def measured(folder: Path, *, ttft_factor: float = 1.0, tpot_factor: float = 1.0, **engine_kwargs: object) -> Path:
    """What the simulator says of one engine pair, with other times to the first token and between tokens."""
    shape, hardware = load_model("gpt-oss-120b"), load_hardware("h100-vllm-0.11").model_copy(update={"hybrid_kv": True})
    assert shape is not None
    sent = requests()
    trace = Trace.of(sent)
    level = simulate(
        Deployment(topology=parse_label(LABEL)), [Level(load=Open(rate_rps=1.0), num_requests=60, seed=0)], Workload(),
        hardware, shape, trace=trace,
    )[0]  # fmt: skip
    records = []
    for n, request in enumerate(sent):
        first_s = level.arrival_s[n] + ttft_factor * (level.first_token_s[n] - level.arrival_s[n])
        own = ReplayedRequest(id=request.id, session=request.session, turn=1 + n % 2, parent=request.parent)
        cached = trace.input_tokens[n] - level.computed_tokens[n]
        records.append(
            RequestRecord(
                arrival_s=level.arrival_s[n],
                first_token_s=first_s,
                finish_s=first_s + tpot_factor * (level.finish_s[n] - level.first_token_s[n]),
                input_tokens=trace.input_tokens[n],
                output_tokens=request.out,
                replayed=own.model_copy(update={"cached_tokens": round(cached)}),
            )
        )
    return write_replay(folder, LABEL, sent, records, engine_kwargs=engine_kwargs)


def test_what_is_measured_is_simulated_with_the_requests_that_were_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times to the first token twice as long are told as such, and so are gaps that are a quarter shorter."""
    folder = measured(tmp_path / "slow", ttft_factor=2.0, tpot_factor=0.75)
    assert plan.main(["--compare", str(folder)]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| slow")]
    (row,) = rows
    assert row[2].strip() == "replay1"
    assert row[3].split()[-2:] == ["(-50", "%)"] and row[5].split()[-2:] == ["(+33", "%)"]
    ours, _, theirs = row[7].split()
    assert ours == theirs and 30 < float(ours.rstrip("%")) < 70


def test_it_is_the_median_of_the_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = measured(tmp_path / "as-is")
    records = Store(folder).read_records(RunKey(kind="replay", value=1.0))
    assert plan.main(["--compare", str(folder), "--plot", str(tmp_path / "plot.svg")]) == 0
    (row,) = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| as-is")]
    ttft_ms = 1000 * statistics.median(r.ttft_s for r in records if r.ttft_s is not None)
    tpot_ms = 1000 * statistics.median(r.tpot_s for r in records if r.tpot_s is not None)
    assert row[3].split()[2:] == [f"{ttft_ms:.0f}", "(+0", "%)"] and row[5].split()[2] == f"{tpot_ms:.2f}"
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_engines_have_the_kv_cache_that_they_were_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 MB hold some 1,000 tokens, fewer than a prompt; the hardware file alone has room for all of them."""
    assert plan.main(["--compare", str(measured(tmp_path / "small", kv_cache_memory_bytes=40_000_000))]) == 2
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "complaint"), [("{}\n", "what was sent has"), (None, "cannot be read")])
def test_other_requests_are_not_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, complaint: str
) -> None:
    folder = measured(tmp_path / "other")
    if text is None:
        (folder / COMPILED).unlink()
    else:
        (folder / COMPILED).write_text(text)
    assert plan.main(["--compare", str(folder)]) == 2
    error = capsys.readouterr().err
    assert complaint in error and COMPILED in error and error.count("\n") == 1
