"""The first hour on this machine's CPUs, from an empty folder to the archive that one can send to whoever helps."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.live.conftest import Stack

pytestmark = pytest.mark.timeout(2400)

LABELS = ("collocated-1xtp1", "pd-pack-p1xtp1-d1xtp1", "pd-spread-p1xtp1-d1xtp1")


def test_every_step_ends_well_and_the_archive_says_so(stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "first-hour"
    words = ("-m", "pdlab", "first-hour", "--local", "--port", str(stack.port), "--out", str(out))
    done = stack.run(*words, timeout_s=2300)
    assert done.code == 0, done.text
    assert done.text.index("estimate:") < done.text.index("1/14 doctor"), "shown before it starts"
    outcomes = json.loads((out / "first-hour.json").read_text(encoding="utf-8"))["outcomes"]
    assert {name: each["verdict"] for name, each in outcomes.items()} == dict.fromkeys(outcomes, "ok")
    assert len(outcomes) == 14
    assert stack.nodes() is None, "it takes down what it starts"
    (path,) = out.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers()}
    assert {"first-hour.json", "doctor.json", "transfer-pack.json", "transfer-spread.json", "report.html"} <= names
    assert {f"results/{label}/manifest.json" for label in LABELS} <= names
    assert sum(name.startswith("logs/") for name in names) == 14
    assert (out / "report.png").stat().st_size and (out / "prediction.png").stat().st_size
