"""What the command checks before the first launch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.bench.experiment.schedule import make_schedule
from pdlab.cli import experiment
from pdlab.rehearsal import fake_cluster


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


def test_a_rehearsal_is_estimated_in_the_seconds_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's own slow-down is known before a launch: two cores carry 20 requests/s."""
    monkeypatch.setattr(fake_cluster, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(fake_cluster, "best_rate_rps", lambda *_: 140.0)
    words = ["rehearsed-pack-vs-spread", "--dry-run", "--out", str(tmp_path / "out")]

    def total_s(text: str) -> int:
        minutes, seconds = re.findall(r"^about (\d+):(\d+) \(minutes:seconds\) in all", text, re.MULTILINE)[0]
        return 60 * int(minutes) + int(seconds)

    assert experiment.main(words) == 0
    text = capsys.readouterr().out
    assert text.count("8 GPUs, simulated; a simulated second takes 7 s\n") == 3
    monkeypatch.setattr(fake_cluster, "best_rate_rps", lambda *_: 300.0)
    assert experiment.main(words) == 0
    slower = capsys.readouterr().out
    assert "a simulated second takes 15 s" in slower and total_s(slower) - total_s(text) > 300
    plain = experiment.describe(make_schedule("rehearsed-pack-vs-spread"), tmp_path / "out")
    assert "simulated; its levels are estimated in simulated seconds" in plain


def test_a_dry_run_needs_no_folder_that_can_be_written(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    words = ["local-pack-vs-spread", "--out", str(small_disk / "out")]
    assert experiment.main([*words, "--dry-run"]) == 0
    assert make_schedule(words[0]).file.name in capsys.readouterr().out
    assert experiment.main(words) == 2
