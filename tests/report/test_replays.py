"""A replay in a report: its section, its picture over time, and levels of other replays beside it."""

from __future__ import annotations

import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from support import records as made

import pdlab
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.replayed import Replayed
from pdlab.core.workload import Replay, Workload
from pdlab.report.html import write_html
from pdlab.report.pictures import draw
from pdlab.report.replays import class_figure
from pdlab.report.text import render_text
from pdlab.results.schema import Manifest, ReplayedRequest
from pdlab.results.store import Store
from pdlab.results.timeline import RequestTimeline


def replay(folder: Path, label: str, *, sha256: str = "5" * 64, cached: bool = True, slower_s: float = 0.0) -> Path:
    """Twenty sessions of two requests; the second finds 80 of its 100 tokens cached and has its first token sooner."""
    records = []
    for number in range(20):
        for turn in (1, 2):
            arrival_s = 0.5 * number + 3.0 * (turn - 1)
            own = ReplayedRequest(
                id=f"c{number}t{turn}",
                session=f"c{number}",
                turn=turn,
                parent=f"c{number}t1" if turn == 2 else None,
                cached_tokens=80 * (turn - 1) if cached else None,
            )
            ttft_s = slower_s + (0.8 if turn == 1 else 0.2)
            records.append(
                made.record(arrival_s, ttft_s, 0.1, 11, itl_s=(0.1,) * 10, requested=(100, 11), replayed=own)
            )
    lengths = Replayed(
        name="chat.yaml", sha256=sha256, requests=40, sessions=20, groups=20, last_s=9.5, mean_tokens=(100, 11),
        longest_request=(100, 11), input_range=(100, 100),
    )  # fmt: skip
    workload, deployment = Workload(lengths=lengths), Deployment(topology=parse_label(label))
    run = made.run(records, Replay(), label=label, workload=workload, requested_tokens=(100.0, 11.0))
    store = Store(folder)
    store.write_manifest(
        Manifest(origin="measured", label=label, deployment=deployment, gpus=deployment.gpus, workload=workload)
    )
    store.write(run, records)
    return folder


def test_the_section_has_turns_hits_and_sessions(tmp_path: Path) -> None:
    folder = replay(tmp_path / "a", "collocated-2xtp1")
    text = render_text(pdlab.build_report(pdlab.load(folder), slos=["ttft_ms=500", "ttft_ms=900"]))
    assert "Replay of sessions: " in text and "replay chat.yaml 55555555" in text
    assert "40 of 40 requests were answered. 20 of 20 sessions had every answer." in text
    # From the first request's sending to the second's end: 3 s and 1.2 s.
    assert "Session completion time, pauses included: p50 4.20 s" in text
    assert (
        "(TTFT <= 500 ms in every request): 0 of 20" in text and "(TTFT <= 900 ms in every request): 20 of 20" in text
    )
    assert "40 % of the prompt tokens came from prefix caches (as the server counts them)" in text
    # 11 tokens in 1.8 s, which half of the requests take.
    assert "Normalised interactivity at P90 (output tokens over E2EL): 6.11 tokens/s." in text
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["turn 1"][2:4] == ["20", "800.0"] and rows["turn 2"][2:4] == ["20", "200.0"]
    assert rows["some of the prompt cached"][5:7] == ["20", "200.0"] and rows["nothing cached"][2:4] == ["20", "800.0"]
    assert "none changed" not in text, "of roles there is nothing to say"


def test_hits_that_nobody_counts_are_unknown(tmp_path: Path) -> None:
    text = render_text(pdlab.build_report(pdlab.load(replay(tmp_path / "a", "collocated-2xtp1", cached=False))))
    assert "The share of prompt tokens from prefix caches is unknown for some requests." in text
    assert "nothing cached" not in text


def test_a_replay_has_a_picture_over_time(tmp_path: Path) -> None:
    folder = replay(tmp_path / "a", "collocated-2xtp1")
    report = pdlab.build_report(pdlab.load(folder))
    made = draw(report, tmp_path / "plot.png")
    assert [each.path.name for each in made] == ["plot.png", "plot-roles.png", "plot-classes.png"]
    assert all(each.path.stat().st_size > 10_000 for each in made)
    (level,) = report.timelines
    series = level.bins
    # In the sixth second: first requests of sessions 10 and 11, second ones of sessions 4 and 5.
    assert series[5].hit_share == pytest.approx(0.4) and series[0].hit_share == 0.0
    assert sum(one.in_flight for one in series) * 12.5 / len(series) == pytest.approx(20 * (1.8 + 1.2), rel=0.05)


def test_two_compiled_workloads_are_not_compared(tmp_path: Path) -> None:
    same = [replay(tmp_path / name, label) for name, label in (("a", "collocated-2xtp1"), ("b", "collocated-2xtp2"))]
    other = replay(tmp_path / "c", "collocated-3xtp1", sha256="6" * 64)
    compared = render_text(pdlab.build_report(pdlab.load(*same)))
    # Of two sizes, too: the replay is one load, and not so many requests per GPU.
    assert "2xTP2 collocated over 2xTP1 collocated" in compared and "over 1 times the replay's speed" in compared
    assert "different workloads" not in compared
    text = render_text(pdlab.build_report(pdlab.load(same[0], other)))
    assert "different workloads" in text and "chat.yaml 55555555" in text and "chat.yaml 66666666" in text


def test_the_verdict_is_on_deployments_that_replayed_the_same_requests(tmp_path: Path) -> None:
    fast = replay(tmp_path / "a", "collocated-2xtp1")
    slow = replay(tmp_path / "b", "collocated-2xtp2", slower_s=1.0)
    report = pdlab.build_report(pdlab.load(fast, slow), slos=["ttft_ms=900"])
    assert report.replay_verdicts[0].code == "replay_best"
    assert report.replay_verdicts[0].numbers["best"] == "2xTP1 collocated"
    assert report.replay_verdicts[1].code == "replay_sizes_differ"
    assert report.replay_verdicts[0].text in render_text(report)
    write_html(report, tmp_path / "page.html")
    assert report.replay_verdicts[0].text in unescape((tmp_path / "page.html").read_text())
    page = (tmp_path / "page.html").read_text()
    for name in ("TTFT by turn", "TPOT by turn", "TTFT by prompt tokens", "TPOT by prompt tokens"):
        assert page.count(f'"label":"{name}, ms\\n(log scale)"') == 1, name
    other = replay(tmp_path / "c", "collocated-3xtp1", sha256="6" * 64, slower_s=1.0)
    assert pdlab.build_report(pdlab.load(fast, other)).replay_verdicts == ()


def test_dashes_are_explained_where_there_are_some(tmp_path: Path) -> None:
    """A tail of too few requests is not given."""
    (level,) = pdlab.build_report(pdlab.load(replay(tmp_path / "a", "collocated-2xtp1"))).replays
    rare = level.measured.facts._replace(
        by_turn={turn: each._replace(requests=3) for turn, each in level.measured.facts.by_turn.items()},
        by_length={length: each._replace(requests=1000) for length, each in level.measured.facts.by_length.items()},
    )
    by_turn, by_length = class_figure([level._replace(measured=level.measured._replace(facts=rare))]).rows[-1]
    assert by_turn.x.label == "turn (o p50)" and by_length.x.label == "prompt tokens (o p50, dashes p90)"


MEASURE = """
import re, sys
from pathlib import Path
from pdlab.cli.viz import main
code = main(["--exps", sys.argv[1], "--slo", "ttft_ms=500", "--report", sys.argv[1] + ".html"])
print(code, re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.long
def test_peak_memory_of_four_times_as_many_requests(tmp_path: Path) -> None:
    """With timelines, and answers of 50 tokens; an object of each request would take 15 kB of memory."""
    peaks_mb = []
    for count in (15_000, 60_000):
        folder = tmp_path / f"{count}"
        many(folder, count)
        done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
        code, peak_kb = map(int, done.stdout.split()[-2:])
        assert code == 0
        peaks_mb.append(peak_kb / 1024)
    print(peaks_mb)
    assert peaks_mb[1] - peaks_mb[0] < 45_000 * 1500 / 2**20, peaks_mb


def many(folder: Path, count: int, tokens: int = 50) -> None:
    """A replay of so many requests in sessions of four, with timelines."""
    records, timelines = [], []
    for n in range(count):
        turn, arrival_s, ttft_s = n % 4 + 1, n / 50, 0.1 + n % 97 / 100
        own = ReplayedRequest(id=f"s{n // 4}t{turn}", session=f"s{n // 4}", turn=turn, cached_tokens=n % 3 * 16)
        gaps_s = tuple((1 + (n + k) % 7) / 100 for k in range(tokens - 1))
        requested = (100, tokens)
        records.append(made.record(arrival_s, ttft_s, 0.03, tokens, itl_s=gaps_s, requested=requested, replayed=own))
        first_ms = 1000 * ttft_s - 5
        marks = {"queued": 1.0, "scheduled": first_ms - 20, "first": first_ms, "first_byte": first_ms + 1}
        timelines.append(RequestTimeline(id=own.id, path="collocated", t=marks, arrival_s=arrival_s, ttft_s=ttft_s))
    lengths = Replayed(
        name="chat.yaml", sha256="5" * 64, requests=count, sessions=count // 4, groups=count // 4, last_s=count / 50,
        mean_tokens=(100, tokens), longest_request=(100, tokens), input_range=(100, 100),
    )  # fmt: skip
    workload, deployment = Workload(lengths=lengths), Deployment(topology=parse_label("collocated-2xtp1"))
    label = deployment.label
    run = made.run(records, Replay(), label=label, workload=workload, requested_tokens=(100.0, float(tokens)))
    store = Store(folder)
    store.write_manifest(
        Manifest(origin="measured", label=label, deployment=deployment, gpus=deployment.gpus, workload=workload)
    )
    store.write(run, records, timelines)
