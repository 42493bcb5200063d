"""Pictures of curves: axes, titles, and no word from matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import curves as made

from pdlab.analysis.curves import Curve, workloads_name
from pdlab.analysis.view import View
from pdlab.core.workload import LoadKind, Workload
from pdlab.report import paper, plots
from pdlab.report.curve_figure import curve_figure


def curve(
    label: str,
    loads: Sequence[float],
    *,
    ttft_ms: Sequence[float] | None = None,
    workload: Workload | None = None,
    model: str | None = None,
    kind: LoadKind = "rate",
) -> Curve:
    workload = workload or Workload()
    points = tuple(
        made.point(
            load,
            made.sample(10 * load, {"ttft": ttft, "tpot": 5 + i}),
            kind=kind,
            window="whole",
            workloads=(workload,),
        )
        for i, (load, ttft) in enumerate(zip(loads, ttft_ms or [100.0 + load for load in loads], strict=True))
    )
    return made.curve(label, *points, model=model, workload=workloads_name([workload]))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures as they were when they were saved."""
    kept: list[Any] = []
    saved = paper.save

    def keep(figure: Any, path: Path) -> None:
        axes = [(each.get_xscale(), each.get_xlabel()) for each in figure.axes]
        renderer = figure.canvas.get_renderer()
        texts = [(text.get_text(), text.get_window_extent(renderer).x1 / figure.bbox.width) for text in figure.texts]
        kept.append((axes, texts))
        saved(figure, path)

    monkeypatch.setattr(paper, "save", keep)
    return kept


@pytest.mark.parametrize("mode", ["token", "first_token", "chunk"])
@pytest.mark.parametrize("log_latency", [None, True, False])
@pytest.mark.parametrize("ttft_ms", [(0.0, 2.0, 90.0), (0.0, 0.0, 0.0), (3.0, 3.0, 3.0)])
def test_matplotlib_has_nothing_to_warn_of(
    mode: str, log_latency: bool | None, ttft_ms: Sequence[float], tmp_path: Path
) -> None:
    """A latency of 0 has no place on a logarithmic axis; one value has no span."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = View.model_validate({"latency_mode": mode})
        spec = curve_figure([curve("a", (1, 2, 4), ttft_ms=ttft_ms)], view, log_latency=log_latency)
        plots.draw(spec, tmp_path / "p.png")


@pytest.mark.parametrize(
    ("loads", "forced", "scale"),
    [
        ((16, 32, 1000), None, "log"),
        ((1, 2, 4, 8, 16, 32, 64, 128, 256), None, "log"),
        ((1, 2, 4, 8, 16, 32), None, "linear"),
        ((8, 16, 24, 32), None, "linear"),
        ((8,), None, "linear"),
        ((16, 32, 1000), False, "linear"),
        ((8, 16, 24, 32), True, "log"),
    ],
)
@pytest.mark.parametrize("kind", ["rate", "concurrency"])
def test_one_high_load_does_not_press_the_others_together(
    loads: Sequence[float], forced: bool | None, scale: str, kind: LoadKind, figures: list[Any], tmp_path: Path
) -> None:
    plots.draw(curve_figure([curve("a", loads, kind=kind)], View(), log_load=forced), tmp_path / "p.png")
    ((axes, _),) = figures
    panels = [(x_scale, label) for x_scale, label in axes if "whole deployment" in label]
    assert panels and {x_scale for x_scale, _ in panels} == {scale}
    assert all(("log scale" in label) == (scale == "log") for _, label in panels)


def test_a_title_fits_and_has_no_path_of_this_machine(figures: list[Any], tmp_path: Path) -> None:
    """Many lengths, models in a folder: the names of models, a few lengths and a number of others."""
    curves = [
        curve(
            f"c{i}",
            (1, 2),
            workload=Workload(input_tokens=1000 * 2**i),
            model=f"/home/someone/models/org/model-{i % 3}",
        )
        for i in range(7)
    ]
    plots.draw(curve_figure(curves, View()), tmp_path / "p.png")
    ((_, texts),) = figures
    title, right = texts[0]
    assert right <= 1 and "/home" not in title
    assert all(f"model-{i}" in title for i in range(3)) and "4 others" in title
