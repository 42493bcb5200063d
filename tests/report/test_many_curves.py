"""Pictures of many curves: which have a colour, which panels there are, and what is written in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import golden
from support.curves import many, one

from pdlab.analysis.view import View
from pdlab.report import paper, plots
from pdlab.report.curve_figure import curve_figure
from pdlab.report.highlight import MOST_ALIKE, MOST_COLOURED, highlighted, panels
from pdlab.report.style import GREY, HUES, lightness, styles

GOLDEN = Path(__file__).parent / "golden" / "many_curves.txt"


def test_few_curves_all_have_a_colour() -> None:
    assert highlighted(many(MOST_ALIKE), View()) is None


def test_of_many_curves_the_frontier_and_the_best_have_colours_of_which_there_are_few() -> None:
    curves = many(30)
    chosen = highlighted(curves, View())
    assert chosen is not None
    assert "c29" in chosen and "c0" not in chosen and 1 <= len(chosen) <= MOST_COLOURED <= len(HUES)
    with_best = highlighted(curves, View(), ("c0",))
    assert with_best is not None and "c0" in with_best and len(with_best) <= MOST_COLOURED
    found = {curve.label: look for curve, look in zip(curves, styles(curves, chosen), strict=True)}
    assert {label for label, look in found.items() if not look.quiet} == chosen
    assert len({(found[label].color, found[label].marker) for label in chosen}) == len(chosen)
    assert {look.color for look in found.values() if look.quiet} == {GREY}
    assert all(lightness(found[label].color) < lightness(GREY) + 1 for label in chosen)


def test_each_workload_has_its_colours_and_its_panel() -> None:
    curves = [*many(8), *many(9, 2000, "long ")]
    assert [(name.split()[0], len(each)) for name, each in panels(curves, View())] == [
        ("1000:2000", 9),
        ("1000:100", 8),
    ]
    chosen = highlighted(curves, View())
    assert chosen is not None and {"c7", "long 8"} <= chosen
    assert len(panels(many(30), View())) == 1
    assert len(panels([one("a", 1), one("b", 1, 2000)], View())) == 1


@pytest.mark.parametrize(("factors", "expected"), [((1, 2, 5), False), ((1, 2, 30), True), ((0, 0), False)])
def test_the_rate_axis_is_logarithmic_where_curves_span(factors: tuple[float, ...], expected: bool) -> None:
    spec = curve_figure([one(str(i), each) for i, each in enumerate(factors)], View())
    assert spec.shown(spec.panels[0]).y.log is expected


def test_curves_of_one_gpu_and_framework_have_one_hue() -> None:
    settings = [("h100", "vllm"), ("h100", "vllm"), ("h200", "vllm"), ("h200", "sglang")]
    curves = [one(str(i), 1, settings={"gpu": g, "framework": f, "tp": str(i)}) for i, (g, f) in enumerate(settings)]
    families = [look.family for look in styles(curves)]
    assert families == ["h100 vllm", "h100 vllm", "h200 vllm", "h200 sglang"]


@pytest.mark.golden
def test_what_is_written_in_a_picture_of_many_curves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[str] = []
    saved = paper.save

    def keep(figure: Any, path: Path) -> None:
        width = figure.bbox.width
        renderer = figure.canvas.get_renderer()
        for axes in figure.axes:
            coloured = sum(line.get_color() != GREY for line in axes.lines)
            kept.append(f"panel {axes.get_title('left')!r}: {len(axes.lines)} lines, {coloured} of a colour")
            if axes.get_title("left"):
                kept.append(f"  {axes.get_xscale()} {axes.get_xlabel()}; {axes.get_yscale()} {axes.get_ylabel()}")
            kept.extend(f"  {text.get_text()}" for text in axes.texts)
        kept.extend(text.get_text() for text in figure.texts)
        assert all(text.get_window_extent(renderer).x1 <= width for text in figure.texts)
        saved(figure, path)

    monkeypatch.setattr(paper, "save", keep)
    spec = curve_figure([*many(18), *many(30, 2000, "long ")], View(), best=["c3"])
    plots.draw(spec, tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000
    text = "\n".join(kept) + "\n"
    golden.compare(text, GOLDEN)
