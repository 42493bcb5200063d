"""Figures that cannot be are forgotten as experiments are loaded: never drawn, never ranked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import folders
from support.curves import read

from pdlab.analysis.curves import curves
from pdlab.analysis.loading import load
from pdlab.analysis.ranking import drawn_points
from pdlab.analysis.view import View


def changed(folder: Path, level: str, change: dict[str, Any]) -> None:
    """Set values deep in a level's file: ``whole.ttft.mean_s`` -> value."""
    path = folder / f"{level}.json"
    content = json.loads(path.read_text())
    for key, value in change.items():
        *parts, last = key.split(".")
        inner = content
        for part in parts:
            inner = inner[part]
        inner[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "drawn", "reason"),
    [
        ({"steady.tpot.mean_s": -0.01}, False, "TPOT below 0 or not a number"),
        ({"steady.tpot.percentiles_s.p50": float("nan")}, False, "TPOT below 0 or not a number"),
        # The whole run stands in for a window that has no figures.
        ({"steady.requests_per_s": float("nan")}, True, "a rate is below 0 or not a number"),
        (
            {"steady.requests_per_s": float("nan"), "whole.requests_per_s": -1.0},
            False,
            "a rate is below 0 or not a number",
        ),
        ({"steady.tpot.percentiles_s.p50": 5.0}, True, "percentiles of TPOT do not rise"),
        ({"steady.ttft.mean_s": 9.0}, True, "TTFT is longer than E2EL"),
    ],
    ids=["negative", "nan", "rate", "rates", "percentiles", "ttft"],
)
def test_an_impossible_level_is_not_ranked(tmp_path: Path, change: dict[str, Any], drawn: bool, reason: str) -> None:
    folder = folders.write(tmp_path / "one", folders.deployments(1)[0], repeats=1)
    changed(folder, "concurrency4", change)
    view = View()
    (curve,) = curves([each.experiment for each in load([folder], {})])
    wrong = next(point for point in curve.points if point.value == 4)
    assert not wrong.valid and any(reason in each for each in wrong.reasons)
    assert any(drawn.point is wrong for drawn in drawn_points([curve], view)) is drawn
    assert [point.valid for point in curve.points if point.value != 4] == [True, True]
    assert read([curve], 1000.0).ranking


def test_what_is_possible_is_as_it_was(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "one", folders.deployments(1)[0])
    (loaded,) = load([folder], {})
    assert all(run.validity.valid for run in loaded.experiment.runs)
