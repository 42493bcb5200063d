"""The first hour on this machine's CPUs, from an empty folder to the archive that one can send to whoever helps.

With one level a sweep, and without the spread that other live tests launch, it is the smoke test of collocated and
pack, of the transfer check, the doctor, sweeps, the report and the comparison with a plan.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from support.long import LONG

from pdlab.first_hour.steps import LEVELS
from pdlab.results.store import Store
from tests.live.conftest import BUSY_MACHINE, Stack

pytestmark = pytest.mark.timeout(2400)

SHORT = (2,)
LABELS = ("collocated-1xtp1", "pd-pack-p1xtp1-d1xtp1", *(("pd-spread-p1xtp1-d1xtp1",) if LONG else ()))
STEPS = 8 + 2 * len(LABELS)


def test_every_step_runs_well_and_the_archive_says_so(stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "first-hour"
    levels = LEVELS["local"] if LONG else SHORT
    program = ("-m", "pdlab") if LONG else ("-m", "tests.support.short_hour", *map(str, SHORT))
    words = (*program, "first-hour", "--local", "--port", str(stack.port), "--out", str(out))
    done = stack.run(*words, timeout_s=2300)
    assert done.code in (0, 3), f"3 where a busy machine spoils a level: {done.text}"
    assert done.text.index("estimate:") < done.text.index(f"1/{STEPS} doctor"), "shown before it starts"
    outcomes = json.loads((out / "first-hour.json").read_text(encoding="utf-8"))["outcomes"]
    assert len(outcomes) == STEPS
    others = {name: each["verdict"] for name, each in outcomes.items() if each["verdict"] != "ok"}
    spoiled = [name for name in others if name.startswith(("smoke", "sweep "))]
    assert others == dict.fromkeys(spoiled, "finding")
    assert (done.code == 0) is not bool(others)
    for label in LABELS:
        runs = Store(out / "results" / label).load().runs
        assert [run.key.stem for run in runs] == [f"concurrency{number}" for number in levels]
        for run in runs:
            assert set(run.validity.failed_gates) <= BUSY_MACHINE, run.validity
    assert stack.nodes() is None, "it takes down what it starts"
    (path,) = out.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers()}
    assert {"first-hour.json", "doctor.json", "transfer-pack.json", "transfer-spread.json", "report.html"} <= names
    assert {f"results/{label}/manifest.json" for label in LABELS} <= names
    assert sum(name.startswith("logs/") for name in names) == STEPS
    assert (out / "report.png").stat().st_size and (out / "prediction.png").stat().st_size
