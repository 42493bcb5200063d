"""What the command checks before the first launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.bench.experiment.schedule import make_schedule
from pdlab.cli import experiment


def test_without_ray_nothing_starts_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(experiment, "run", lambda *args, **more: pytest.fail("it runs"))
    words = ["local-pack-vs-spread", "--out", str(tmp_path / "out")]
    assert experiment.main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the Python package ray is not installed")
    assert not (tmp_path / "out").exists()
    assert experiment.main([*words, "--dry-run"]) == 0


def test_a_dry_run_needs_no_folder_that_can_be_written(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    words = ["local-pack-vs-spread", "--out", str(small_disk / "out")]
    assert experiment.main([*words, "--dry-run"]) == 0
    assert make_schedule(words[0]).file.name in capsys.readouterr().out
    assert experiment.main(words) == 2
