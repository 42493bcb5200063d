"""A measured replay beside the simulation of its requests."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from support.replays import write_replay

from pdlab.cli import plan, viz
from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.replayed import COMPILED
from pdlab.core.workload import Level, Open, RunKey, Workload
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.results.store import Store
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import Trace
from pdlab.sim.simulator import simulate
from pdlab.traffic.requests import TrafficRequest

LABEL = "pd-pack-p1xtp1-d1xtp1"
KEY = RunKey(kind="replay", value=1.0)


def requests() -> list[TrafficRequest]:
    """Thirty conversations of two turns, seconds apart: each finds the engines idle."""
    made = []
    for n in range(30):
        first, blocks = f"c{n}t1", (("system", 640), (f"c{n}/a", 300 + 40 * n))
        made.append(TrafficRequest(first, f"c{n}", blocks, 20, at_s=9.0 * n))
        made.append(TrafficRequest(f"c{n}t2", f"c{n}", ((f"c{n}/b", 200),), 30, parent=first, gap_s=2.0))
    return made


def measured(
    folder: Path, *, ttft_factor: float = 1.0, tpot_factor: float = 1.0, hybrid: bool = True, **engine_kwargs: object
) -> Path:
    """What the simulator says of one engine pair, with other times to the first token and between tokens."""
    shape, hardware = require_shape("gpt-oss-120b"), load_hardware("h100-vllm-0.11")
    hardware = hardware.model_copy(update={"hybrid_kv": hybrid})
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
    assert "does not hold" in capsys.readouterr().err


def test_rehearsed_engines_have_the_caches_of_their_hardware_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = measured(tmp_path / "slow", hybrid=False)

    def shares() -> list[str]:
        assert plan.main(["--compare", str(folder)]) == 0
        (row,) = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| slow")]
        return row[7].split()[::2]

    ours, theirs = shares()
    assert ours != theirs, "as of an engine that was measured, whose windowed layers have a group of their own"
    store = Store(folder)
    store.write_manifest(store.read_manifest().model_copy(update={"rehearsal": Rehearsal(slow_down=4)}))
    ours, theirs = shares()
    assert ours == theirs


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


def test_the_simulated_replay_is_a_result_that_is_shown_beside_the_measured_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = measured(tmp_path / "slow", ttft_factor=2.0), tmp_path / "simulated"
    assert plan.main(["--compare", str(folder), "--out", str(out)]) == 0
    assert f"Simulated replay: {out / 'slow'}" in capsys.readouterr().out
    ours, theirs = (
        {r.replayed.id: r for r in Store(each).read_records(KEY) if r.replayed} for each in (out / "slow", folder)
    )
    assert set(ours) == set(theirs) and len(ours) == 60
    for name, record in ours.items():
        assert record.replayed and record.input_tokens == theirs[name].input_tokens
        assert (record.replayed.turn, record.replayed.parent) == (2, name[:-1] + "1") or name.endswith("t1")
        assert record.replayed.foreseen_tokens == theirs[name].replayed.cached_tokens  # type: ignore[union-attr]
    page, picture = tmp_path / "replay.html", tmp_path / "plot.svg"
    words = ["--exps", str(folder), "--simulated", str(out / "slow"), "--slo", "ttft_ms=900"]
    assert viz.main([*words, "--report", str(page), "--plot-path", str(picture), "--show-tables"]) == 0
    rows = {cells[0]: cells for line in capsys.readouterr().out.splitlines() if (cells := re.split(r"\s{2,}", line))}
    assert rows["TTFT p50, ms"][3] == "-50" and rows["requests/s"][3] in ("+0", "-0")
    median_ms = 1000 * statistics.median(r.ttft_s or 0.0 for r in ours.values() if r.replayed and r.replayed.turn == 2)
    assert float(rows["turn 2"][-2]) == pytest.approx(median_ms, rel=0.01)
    text = page.read_text()
    assert "<h2>Replays of sessions</h2>" in text and ', simulated"' in text
    assert {each.name for each in tmp_path.glob("plot*.svg")} == {
        f"plot{n}.svg" for n in ("", "-roles", "-classes", "-replay")
    }


def test_requests_that_share_nothing_keep_their_names(tmp_path: Path) -> None:
    """Their trace is in order of arrival, and the file is not."""
    sent = [TrafficRequest(f"r{n}", f"r{n}", ((f"r{n}", 100 + n),), 5, at_s=20.0 - n) for n in range(20)]
    records = [
        RequestRecord(
            arrival_s=20.0 - n, first_token_s=20.1 - n, finish_s=20.2 - n, input_tokens=100 + n, output_tokens=5,
            replayed=ReplayedRequest(id=f"r{n}", session=f"r{n}"),
        )
        for n in range(20)
    ]  # fmt: skip
    folder = write_replay(tmp_path / "apart", "collocated-1xtp1", sent, records)
    assert plan.main(["--compare", str(folder), "--out", str(tmp_path / "out")]) == 0
    simulated = Store(tmp_path / "out" / "apart").read_records(KEY)
    assert {r.replayed.id: r.input_tokens for r in simulated if r.replayed} == {f"r{n}": 100 + n for n in range(20)}
    assert simulated[0].replayed and simulated[0].replayed.id == "r19", "the last of the file comes first"


def test_simulations_of_nothing_that_is_shown_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = measured(tmp_path / "one"), measured(tmp_path / "other")
    assert plan.main(["--compare", str(one), "--out", str(tmp_path)]) == 2
    assert "holds what was measured" in capsys.readouterr().err
    assert plan.main(["--compare", str(one), "--out", str(tmp_path / "out")]) == 0
    assert viz.main(["--exps", str(other), "--simulated", str(tmp_path / "out" / "one"), "--no-plot"]) == 2
    error = capsys.readouterr().err
    assert "simulates no replay that is shown" in error and error.count("\n") == 1
    again = measured(tmp_path / "more" / "one")
    assert plan.main(["--compare", str(one), str(again), "--out", str(tmp_path / "both")]) == 2
    assert "two experiments are called one" in capsys.readouterr().err
