"""The command: shown before it starts, run, told, and archived whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pdlab.cli import first_hour
from pdlab.core.catalog import resolve_model
from pdlab.first_hour import run as run_module
from pdlab.first_hour import steps as steps_module
from pdlab.first_hour.steps import Step
from pdlab.steps import runner


def test_a_dry_run_shows_every_step_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert first_hour.main(["--dry-run", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "10 launch spread: start pd-spread-p1xtp4-d1xtp4" in text
    assert "python -m pdlab launch --pd-spread --p-tp 4 --d-tp 4 --model gpt-oss-120b" in text
    assert text.splitlines()[-1].startswith("estimate: ") and not out.exists()


def test_a_rehearsal_serves_and_measures_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first_hour.main(["--dry-run", "--rehearse", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "6 launch spread: start pd-spread-p1xtp4-d1xtp4" in text
    assert "--pd-spread --p-tp 4 --d-tp 4 --model gpt-oss-120b --rehearse" in text
    assert "doctor" not in text and "check-transfer" not in text


def test_launches_that_will_be_refused_are_named_before_the_hour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--model", "deepseek-v3", "--out", str(tmp_path / "out")]
    assert first_hour.main(words) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "left out" not in line]
    assert len(warnings) == 3, "the nodes may have more memory"
    assert all(
        "would be refused on p5.48xlarge-x2: " in line and "cannot hold deepseek-v3" in line for line in warnings
    )
    assert first_hour.main([*words, "--rehearse"]) == 2
    assert "every launch of the first hour will be refused" in capsys.readouterr().err


def test_a_launch_that_no_nodes_can_make_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = resolve_model("tiny-llama").shape
    assert known is not None and known.config is not None
    config = {**known.config, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 6 * 64, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert first_hour.main(["--dry-run", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: step launch spread will be refused: prefill TP 4 does not divide the 6 ")


def test_transfer_checks_that_cannot_move_the_models_cache_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_hour.main(["--dry-run", "--model", "deepseek-v3", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert "check-transfer" not in told.out and " 3 launch collocated" in told.out
    left_out = [line for line in told.err.splitlines() if "left out" in line]
    assert [line.split(": model")[0] for line in left_out] == [
        "warning: step transfer pack is left out",
        "warning: step transfer spread is left out",
    ]
    assert all("latent attention" in line for line in left_out)


def test_the_usual_hour_has_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where in ([], ["--local"], ["--rehearse"]):
        assert first_hour.main(["--dry-run", "--out", str(tmp_path / "out"), *where]) == 0
        assert not capsys.readouterr().err


def planted(out: Path, **_: object) -> tuple[Step, ...]:
    common = {"title": "t", "estimate_s": 1.0, "advice": "mend it", "codes": {0: "ok"}}
    return (
        Step(name="one", command=("print('well; RAY_AUTH_TOKEN=0a1b2c3d4e5f6a')",), **common),  # type: ignore[arg-type]
        Step(name="two", command=("raise SystemExit('error: broken')",), **common),  # type: ignore[arg-type]
        Step(name="three", command=("print('well')",), needs=("two",), **common),  # type: ignore[arg-type]
    )


def run_planted(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(cache))
    monkeypatch.setattr(first_hour, "plan", planted)
    monkeypatch.setattr(first_hour, "run", lambda *args: run_module.run(*args, front=("-c",)))
    monkeypatch.setattr(first_hour, "require_installed", lambda package: None)


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_known_home_folder_the_archive_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_planted(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(Path, "home", no_home)
    assert first_hour.main(["--out", str(tmp_path / "out")]) == 3
    assert len(list((tmp_path / "out").glob("*.tar.gz"))) == 1


def test_without_a_cache_folder_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_planted(monkeypatch, tmp_path)
    monkeypatch.delenv("PDLAB_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert first_hour.main(["--out", str(tmp_path / "out")]) == 2
    assert "set HOME, or PDLAB_CACHE_DIR" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_ray_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(first_hour, "run", lambda *args: pytest.fail("it runs"))
    assert first_hour.main(["--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the Python package ray is not installed")
    assert not (tmp_path / "out").exists()
    assert first_hour.main(["--out", str(tmp_path / "out"), "--dry-run"]) == 0


def test_a_dry_run_needs_no_folder_that_can_be_written(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert first_hour.main(["--dry-run", "--out", str(small_disk / "out")]) == 0
    assert first_hour.main(["--out", str(small_disk / "out")]) == 2


def test_the_steps_are_printed_as_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PDLAB", "pdlab")
    assert first_hour.main(["--dry-run", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "python -m" not in told and "     pdlab doctor" in told


def test_a_run_ends_with_verdicts_and_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_planted(monkeypatch, tmp_path / "cache")
    out = tmp_path / "out"
    assert first_hour.main(["--out", str(out)]) == 3
    text, err = capsys.readouterr()
    assert [line.split()[:2] for line in text.splitlines() if line[0] != " "] == [
        ["OK", "one:"], ["FAILED", "two:"], ["SKIPPED", "three:"]
    ]  # fmt: skip
    assert err.index("estimate: 3 s in all") < err.index("1/3 one"), "the estimate is shown before it starts"
    (made,) = out.glob("*.tar.gz")
    assert f"archive, to send to whoever helps: {made}" in err
    with tarfile.open(made) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers()}
        log = archive.extractfile(next(m for m in archive.getmembers() if m.name.endswith("01-one.log")))
        assert log is not None and b"0a1b2c3d4e5f6a" not in log.read()
    assert names == {"first-hour.json", "logs/01-one.log", "logs/02-two.log"}


def test_the_real_steps_fit_the_hour() -> None:
    for where, lengths in first_hour.LENGTHS.items():
        made = steps_module.plan(Path("/o"), where=where, model="m", port=1, lengths=lengths)
        assert steps_module.total_s(made) <= steps_module.MOST_TOTAL_S
