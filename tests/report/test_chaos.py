"""Faults made under load: in tables, in a picture, in a page, through viz."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import folders, golden
from support.chaos import example, fault, request, run, write

from pdlab.cli import viz
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.rehearsal import Rehearsal
from pdlab.report import chaos as report
from pdlab.report import paper
from pdlab.results.chaos import Chaos, ChaosRequest, InjectedFault, Leftovers

GOLDEN = Path(__file__).parent / "golden" / "chaos.txt"


@pytest.mark.golden
def test_text() -> None:
    text = f"{report.text(example())}\n\n{report.fault_list(example())}\n"
    golden.compare(text, GOLDEN)


def test_the_title_of_a_rehearsal_names_it() -> None:
    made = example()
    rehearsed = made._replace(manifest=made.manifest.model_copy(update={"rehearsal": Rehearsal(slow_down=4)}))
    assert "rehearsed (engines simulated, 4 times slower)" in report.title(rehearsed)
    assert "rehearsed" not in report.title(made)


def test_well_is_what_has_neither_wrong_nor_hanging_nor_left_ones() -> None:
    good = example()._replace(requests=tuple(r for r in example().requests if r.outcome in ("right", "error", "left")))
    assert report.well(good) and not report.well(example())
    for change in (
        {"processes": {"haproxy": 1}},
        {"ports": {"haproxy": 1}},
        {"actors": {"ProxyActor": 1}},
        {"kv_free_after_s": None},
    ):
        left = good.run.leftovers
        assert left is not None
        bad = good._replace(run=good.run.model_copy(update={"leftovers": left.model_copy(update=change)}))
        assert not report.well(bad), change
    assert not report.well(good._replace(run=run())), "interrupted: nothing is known of what is left"


def ended(requests: list[ChaosRequest], faults: list[InjectedFault], **left: object) -> Chaos:
    """A run to its end, in which nothing else is wrong."""
    leftovers = Leftovers(kv_free_after_s=1.0, kv_limit_s=35.0).model_copy(update=left)
    return example()._replace(requests=tuple(requests), faults=tuple(faults), run=run(leftovers=leftovers))


def answers(dead: range) -> list[ChaosRequest]:
    return [request(i, i, i + 0.5, "error" if i in dead else "right") for i in range(100)]


def not_done(number: int, outcome: str, kind: str = "kill_prefill_engine", acts: tuple[str, ...] = ()) -> InjectedFault:
    return fault(number, kind, 10.0 * number, 10.0 * number).model_copy(update={"outcome": outcome, "acts": acts})


KILL, STOP = fault(1, "kill_prefill_engine", 10, 10.1), fault(2, "stop_decode_engine", 40, 40.1)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (ended(answers(range(0)), [not_done(1, "skipped"), not_done(2, "failed")]), ["no fault was injected"]),
        (ended(answers(range(0)), []), ["no fault was injected"]),
        (ended(answers(range(10, 100)), [KILL]), ["no recovery from the last fault (kill_prefill_engine)"]),
        (ended([], [KILL]), ["no recovery from the last fault"]),
        (ended(answers(range(12, 100)), [KILL, not_done(2, "failed", acts=("a",))]), ["no recovery from the last"]),
        (ended(answers(range(60, 100)), [KILL, STOP]), ["no right answer among the last 3 requests"]),
        (ended(answers(range(0)), [KILL], missing={"decode engine core": 1}), ["engines are missing"]),
        (ended(answers(range(10, 60)), [KILL, STOP]), []),
        (ended(answers(range(10, 20)), [KILL, not_done(2, "skipped")]), []),
    ],
    ids=[
        "skipped",
        "no fault",
        "dead",
        "no request",
        "dead by one that failed",
        "dead later",
        "missing",
        "crossing",
        "well",
    ],
)
def test_a_run_is_clean_if_faults_were_injected_and_survived(made: Chaos, words: list[str]) -> None:
    (verdict,) = [line for line in report.lines(made) if line.startswith("Verdict")]
    assert [word in verdict for word in words] == [True] * len(words)
    assert ("not clean" in verdict) == bool(words) != report.well(made)


def test_faults_that_were_not_made_have_a_row_per_outcome() -> None:
    faults = [not_done(1, "failed"), not_done(2, "skipped"), not_done(3, "skipped")]
    rows = [line.split()[:3] for line in report.table(ended([], faults)).splitlines()[2:]]
    assert rows == [["kill_prefill_engine", "(failed)", "1"], ["kill_prefill_engine", "(skipped)", "2"]]


def test_a_recovery_that_the_next_fault_forestalls_is_named() -> None:
    made = ended(answers(range(10, 60)), [KILL, STOP])
    first, second = report.table(made).splitlines()[2:]
    assert "not before the next fault" in first and second.split()[-2] == "20.5"
    assert "not before the next fault" in report.fault_list(made) and "never" not in report.fault_list(made)
    dead = ended(answers(range(10, 100)), [KILL])
    assert " never " in report.table(dead) and report.fault_list(dead).endswith("never")


@pytest.mark.parametrize(
    ("label", "guard", "words"),
    [
        ("pd-spread-p1xtp1-d1xtp1", True, "with the KV guard"),
        ("pd-spread-p1xtp1-d1xtp1", False, "without the KV guard"),
        ("collocated-1xtp1", None, "without KV transfer"),
        (None, None, "KV guard unknown"),
    ],
)
def test_the_title_tells_of_the_guard_only_what_is_known(label: str | None, guard: bool | None, words: str) -> None:
    made = example()
    deployment = None if label is None else Deployment(topology=parse_label(label))
    known = made._replace(manifest=made.manifest.model_copy(update={"deployment": deployment}), run=run(guarded=guard))
    assert f", {words}," in report.title(known)


def test_what_is_left_is_named() -> None:
    left = Leftovers(
        kv_use={"prefill b2": 0.125, "decode a1": 0.0, "prefill c3": None}, kv_limit_s=35.0,
        processes={"haproxy": 2}, ports={"haproxy": 1}, missing={"decode engine core": 1, "decode replica": 2},
    )  # fmt: skip
    (text,) = [line for line in report.lines(example()._replace(run=run(leftovers=left))) if "Left: " in line]
    assert text == (
        "Left: KV blocks not all free within 35 s (prefill b2 12.5 %, prefill c3 unknown); more than before: "
        "2 processes (2 haproxy), 1 port (1 haproxy); fewer engines than before: 1 decode engine core, "
        "2 decode replica."
    )


@pytest.mark.parametrize(("wrong", "words"), [(0, "100 %, at least 99 %"), (5, "90 %, below 99 %")])
def test_what_healthy_replicas_could_serve(wrong: int, words: str) -> None:
    requests = [request(i, 10 + i * 0.1, 10.5 + i * 0.1, "error" if i < wrong else "right") for i in range(50)]
    made = example()._replace(requests=tuple(requests), faults=(fault(1, "kill_prefill_engine", 10, 15, spared=True),))
    assert words in "\n".join(report.lines(made))


def nothing() -> Chaos:
    return example()._replace(requests=(), faults=(), samples=(), run=run(loaded_s=0.0))


@pytest.mark.parametrize("made", [example(), nothing()], ids=["example", "nothing"])
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_picture(made: Chaos, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"p.{kind}"
    paper.draw(report.figure(made), path)
    assert path.stat().st_size > 1000


def test_the_page_has_the_panels_of_the_picture() -> None:
    rows = json.loads(report.figure(example()).page())["rows"]
    assert [[panel["y"]["label"] for panel in row] for row in rows] == [
        [panel.y.label for panel in row] for row in report.figure(example()).rows
    ]
    for row in rows:
        assert [len(panel["spans"]) for panel in row] == [2], "two faults"
    assert [len(row[0]["lines"]) for row in rows[:2]] == [1, len(report.DRAWN) - 1]
    assert json.loads(report.figure(nothing()).page())["rows"] == []


def test_viz_shows_it_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, example())
    plot, page = tmp_path / "out" / "f.svg", tmp_path / "r.html"
    assert viz.main(["--exps", str(folder), "--plot-path", str(plot), "--report", str(page), "--show-tables"]) == 0
    out = capsys.readouterr().out
    assert report.table(example()) in out and "1 wrong" in out
    assert plot.read_text().count("<path") > 20
    text = page.read_text()
    assert "Faults under load" in text and "kill_prefill_before_read" in text and "python -m pdlab chaos short" in text
    assert text.count("<script>") == 1 and text.count('<div class="figure">') == 1


def test_viz_shows_it_beside_load_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, example())
    levels = folders.write(tmp_path / "one", folders.deployments(1)[0], repeats=1)
    page = tmp_path / "r.html"
    words = ["--exps", str(levels), str(folder), "--plot-path", str(tmp_path / "p.png"), "--report", str(page)]
    assert viz.main(words) == 0
    assert "p-faults.png" in capsys.readouterr().out and (tmp_path / "p-faults.png").exists()
    text = page.read_text()
    assert text.count("kill_prefill_before_read") >= 2 and '<section id="faults">' in text and 'id="levels"' in text


def test_a_flag_for_load_levels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, example())
    assert viz.main(["--exps", str(folder), "--no-plot", "--slo", "ttft_ms=1"]) == 2
    assert "which have no load levels" in capsys.readouterr().err


def test_there_is_nothing_to_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, example())
    assert viz.main(["--audit", str(folder)]) == 2
    assert "nothing to audit" in capsys.readouterr().err


def test_names_never_become_markup(tmp_path: Path) -> None:
    made = example()
    strange = made._replace(run=made.run.model_copy(update={"label": "<b>x</b>", "command": "<i>"}))
    folder = tmp_path / "c"
    write(tmp_path, made).rename(folder)
    (folder / "chaos.json").write_text(strange.run.model_dump_json())
    page = tmp_path / "r.html"
    assert viz.main(["--exps", str(folder), "--report", str(page)]) == 0
    assert "<b>x" not in page.read_text() and "&lt;b&gt;x" in page.read_text()
