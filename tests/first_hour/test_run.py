"""Steps that run as processes: limits, verdicts, what they leave, and going on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes import failing_program

from pdlab.core.errors import StoreError, UsageError
from pdlab.first_hour.run import STATE, FirstHourState, _adapted, open_state, run
from pdlab.first_hour.steps import Step

PYTHON = ("-c",)
SETTINGS: dict[str, Any] = {"model": "m", "local": True, "port": 8000}


def step(name: str, program: str, **more: Any) -> Step:
    fields: dict[str, Any] = {
        "title": name,
        "estimate_s": 100.0,
        "advice": f"mend {name}",
        "codes": {0: "ok", 3: "finding"},
    }
    return Step(name=name, command=(program,), **{**fields, **more})


def ran(steps: tuple[Step, ...], out: Path, state: FirstHourState | None = None) -> tuple[FirstHourState, list[str]]:
    lines: list[str] = []
    state = run(steps, out, state or FirstHourState(settings=SETTINGS), lines.append, PYTHON)
    return state, lines


def verdicts(state: FirstHourState) -> dict[str, str]:
    return {name: outcome.verdict for name, outcome in state.outcomes.items()}


def test_every_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlab.first_hour.steps.LEAST_LIMIT_S", 1.0)
    steps = (
        step("good", "print('all is well')"),
        step("seen", "print('two findings'); raise SystemExit(3)"),
        step("bad", failing_program("no luck")),
        step("after", "print('never')", needs=("bad",)),
        step("beside", "print('still')", needs=("good",)),
        step("slow", "import time; time.sleep(600)", estimate_s=0.1),
    )
    state, lines = ran(steps, tmp_path)
    assert verdicts(state) == {
        "good": "ok", "seen": "finding", "bad": "failed", "after": "skipped", "beside": "ok", "slow": "timed out"
    }  # fmt: skip
    outcomes = state.outcomes
    assert outcomes["good"].detail == "all is well" and outcomes["good"].next_action is None
    assert outcomes["bad"].detail == "error: no luck" and outcomes["bad"].next_action == "mend bad"
    assert outcomes["after"].detail == "it needs bad"
    assert outcomes["slow"].detail.startswith("not done within 1 s; last: ")
    assert (tmp_path / str(outcomes["bad"].log)).read_text() == "error: no luck\nbye\n"
    assert any(line.startswith("3/6 bad: FAILED") for line in lines) and "    next: mend bad" in lines
    assert FirstHourState.model_validate_json((tmp_path / STATE).read_text()) == state


def test_going_on_keeps_what_ended_well(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    count = f"open({str(counted)!r}, 'a').write('x')"
    mended = tmp_path / "mended"
    steps = (
        step("good", count),
        step("launch", count, serves=True),
        step(
            "sweep", f"import pathlib; raise SystemExit(not pathlib.Path({str(mended)!r}).exists())", needs=("launch",)
        ),
        step("down", "", always=True),
    )
    out = tmp_path / "out"
    state, _ = ran(steps, out)
    assert verdicts(state)["sweep"] == "failed" and counted.read_text() == "xx"
    mended.touch()
    state, _ = ran(steps, out, open_state(out, SETTINGS, resume=True))
    assert set(verdicts(state).values()) == {"ok"}
    assert counted.read_text() == "xxx", "the launch again, for the sweep needs it; the first step not"
    assert ran(steps, out, open_state(out, SETTINGS, resume=True))[1] == []


def test_an_interruption_ends_the_step_and_still_takes_down(tmp_path: Path) -> None:
    down = tmp_path / "down"
    began = tmp_path / "began"
    steps = (
        step("long", f"import pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(600)"),
        step("next", "print('never')"),
        step("shutdown", f"import pathlib; pathlib.Path({str(down)!r}).touch()", always=True),
    )

    def interrupt() -> None:
        while not began.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(steps, tmp_path, FirstHourState(settings=SETTINGS), lambda _: None, PYTHON)
    state = FirstHourState.model_validate_json((tmp_path / STATE).read_text())
    assert verdicts(state) == {"long": "interrupted", "next": "skipped", "shutdown": "ok"}
    assert down.exists()


def test_the_logs_of_failed_replicas_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    stale = tmp_path / "cache" / "logs" / "last-failure"
    stale.mkdir(parents=True)
    (stale / "worker-0.err").write_text("of last week")
    write = f"import pathlib, shutil; p = pathlib.Path({str(stale)!r}); shutil.rmtree(p); p.mkdir(); "
    write += "(p / 'worker-1.err').write_text('ValueError: why')\n" + failing_program("a replica died", stale)
    ran(
        (step("launch other", failing_program("no nodes"), serves=True), step("launch pack", write, serves=True)),
        tmp_path,
    )
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "failed-replicas").rglob("*.err"))
    assert kept == ["failed-replicas/launch-pack/worker-1.err"]


TRANSFER = {
    "runs": [
        {"backend": "UCX", "exit_code": 0, "verdict": {"text": "OK: spread over srd"}},
        {"backend": "LIBFABRIC", "exit_code": 4, "verdict": {"text": "CORRUPT: swapped blocks"}},
    ]
}


def test_both_backends_verdicts_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "transfer-spread.json").write_text(json.dumps(TRANSFER))
    state, _ = ran((step("transfer", "raise SystemExit(3)", summary="transfer-spread.json"),), tmp_path)
    assert state.outcomes["transfer"].detail == "UCX: OK: spread over srd | LIBFABRIC: CORRUPT: swapped blocks"


@pytest.mark.parametrize(
    ("codes", "flag"),
    [((0, 4), ("--use-ucx",)), ((3, 0), ("--use-libfabric",)), ((0, 0), ()), ((4, 5), ())],
)
def test_a_launch_names_the_one_backend_that_was_proven(
    codes: tuple[int, int], flag: tuple[str, ...], tmp_path: Path
) -> None:
    runs = [{"backend": name, "exit_code": code} for name, code in zip(("UCX", "LIBFABRIC"), codes, strict=True)]
    (tmp_path / "transfer-spread.json").write_text(json.dumps({"runs": runs}))
    assert _adapted(step("launch spread", "x", serves=True), tmp_path) == ("x", *flag)
    assert _adapted(step("launch collocated", "x", serves=True), tmp_path) == ("x",)


def test_a_report_leaves_out_folders_that_were_never_made(tmp_path: Path) -> None:
    (tmp_path / "results" / "a").mkdir(parents=True)
    words = ("viz", str(tmp_path / "results" / "a"), str(tmp_path / "results" / "b"), str(tmp_path / "report.png"))
    report = Step(name="report", title="", command=words, estimate_s=1, advice="", codes={}, any_of=("sweep a",))
    assert _adapted(report, tmp_path) == (words[0], words[1], words[3])


class TestOpenState:
    def test_new(self, tmp_path: Path) -> None:
        assert open_state(tmp_path / "new", SETTINGS, resume=False) == FirstHourState(settings=SETTINGS)

    def test_refusals(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"has no first-hour\.json"):
            open_state(tmp_path, SETTINGS, resume=True)
        (tmp_path / "mine").touch()
        with pytest.raises(StoreError, match="has other results"):
            open_state(tmp_path, SETTINGS, resume=False)
        (tmp_path / STATE).write_text(FirstHourState(settings=SETTINGS).model_dump_json())
        with pytest.raises(StoreError, match="has an earlier run"):
            open_state(tmp_path, SETTINGS, resume=False)
        with pytest.raises(StoreError, match=r"was made with another port \(8000, now 9000\); repeat"):
            open_state(tmp_path, {**SETTINGS, "port": 9000}, resume=True)
        (tmp_path / STATE).write_text("{")
        with pytest.raises(StoreError, match="cannot be read"):
            open_state(tmp_path, SETTINGS, resume=True)
