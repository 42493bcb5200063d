"""The report in a real browser: it draws, answers to mouse, finger and keyboard, filters, and prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support import browser, folders

from pdlab.analysis.view import View
from pdlab.cli import viz
from pdlab.report.build import build_report
from pdlab.report.curve_figure import of_report
from pdlab.report.figure import Axis, Block, Figure, Line, PlotPanel, Span, rising, stacked
from pdlab.report.html import ASSETS
from pdlab.report.load import load

HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>"
POINT = """(() => {
  const box = document.querySelector('figure.main .curve[data-i="%d"] path[transform]').getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""
TIP = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
MAIN = "document.querySelector('figure.main svg')"
ROWS = "[...document.querySelectorAll('#levels tr[data-curve]')].filter((row) => !row.hidden).length"
# A curve is two groups: its band lies below the frontier, its line above.
CURVES = "[...new Set([...document.querySelectorAll('figure.main .curve%s')].map((group) => +group.dataset.i))]"
CHOOSE = """(() => {
  const node = document.getElementById('%s'); node.value = '%s'; node.dispatchEvent(new Event('%s'));
})()"""


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    executable = browser.find()
    if executable is None:
        pytest.skip(f"no browser of {', '.join(browser.NAMES)} is installed (Debian: apt-get install chromium)")
    with browser.page(executable) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experiments; in the last the highest load is not valid, for a reason that tries to be markup."""
    tmp_path = tmp_path_factory.mktemp("report")
    reasons = {(16, repeat): (HOSTILE,) for repeat in range(3)}
    paths = [
        folders.write(tmp_path / f"{'abc'[i]}-folder", deployment, faster=1 + i, reasons=reasons if i == 2 else None)
        for i, deployment in enumerate(folders.deployments(3))
    ]
    assert viz.main(["--exps", *map(str, paths), "--report", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


@pytest.fixture
def opened(page: browser.Page, file: Path) -> Iterator[browser.Page]:
    """On a desk's screen, plots in view; no error, and no request but for the file itself, at the end."""
    page.size(1280, 900)
    page.requests.clear()
    page.open(file)
    page.evaluate("document.getElementById('panels').scrollIntoView()")
    yield page
    assert page.messages == []
    assert {url.split("#")[0] for url in page.requests} == {file.resolve().as_uri()}
    assert page.evaluate("window.broken") is None


def test_every_panel_is_drawn(opened: browser.Page) -> None:
    titles = opened.evaluate("[...document.querySelectorAll('figure h3')].map((node) => node.textContent)")
    assert titles == ["Output throughput against TPOT", "TPOT against concurrency", "TTFT against concurrency"]
    assert opened.evaluate(CURVES % "") == [0, 1, 2]
    crossed = opened.evaluate('document.querySelectorAll(\'figure.main .curve[data-i="2"] path[fill="#fff"]\').length')
    assert crossed == 1, "the level that is not valid"
    bands = opened.evaluate(
        "[...document.querySelectorAll('figure')].map((each) => each.querySelectorAll('.band').length)"
    )
    assert bands == [3, 3, 3], "an interval for every curve in every panel"


def test_hovering_shows_all_of_a_point(opened: browser.Page) -> None:
    assert opened.evaluate(TIP) is None
    opened.mouse(*opened.evaluate(POINT % 1))
    tip = opened.evaluate(TIP)
    for expected in ("P1xTP2 D1xTP2 spread", "b-folder", "concurrency 1, 3 repeats", "steady window", "valid"):
        assert expected in tip
    for expected in ("TTFT", "TPOT", "ITL", "E2EL", "mean", "p50", "output tokens", "requests", "±"):
        assert expected in tip
    assert opened.evaluate("document.querySelectorAll('.here').length") == 3, "the same level in every panel"
    assert opened.evaluate(CURVES % ".on") == [1]
    opened.mouse(3, 3)
    assert opened.evaluate(TIP) is None


def test_an_invalid_level_shows_its_reasons_as_text(opened: browser.Page) -> None:
    last = POINT.replace("document.querySelector(", "[...document.querySelectorAll(").replace(
        "path[transform]')", "path[transform]')].pop()"
    )
    opened.mouse(*opened.evaluate(last % 2))
    assert f"not valid: {HOSTILE}" in opened.evaluate(TIP)


def test_the_keyboard_walks_through_the_points(opened: browser.Page) -> None:
    opened.evaluate("document.querySelector('figure.main svg').focus()")
    states = []
    for _ in range(3):
        opened.key("ArrowRight")
        states.append(opened.evaluate(TIP).splitlines()[2])
    assert [line.split(",")[0] for line in states] == ["concurrency 1", "concurrency 4", "concurrency 16"]
    opened.key("Escape")
    assert opened.evaluate(TIP) is None


def test_filters_change_plots_and_table(opened: browser.Page) -> None:
    assert opened.evaluate(ROWS) == 9
    opened.evaluate(CHOOSE % ("filter", "b-fold", "input"))
    assert (opened.evaluate(CURVES % ""), opened.evaluate(ROWS)) == ([1], 3)
    opened.evaluate(CHOOSE % ("filter", "nothing is called this", "input"))
    assert opened.evaluate(ROWS) == 0
    assert "Nothing is selected" in opened.evaluate("document.getElementById('panels').innerText")
    opened.evaluate(CHOOSE % ("filter", "", "input"))
    opened.evaluate("document.querySelector('.chip[data-i=\"0\"]').click()")
    assert (opened.evaluate(CURVES % ""), opened.evaluate(ROWS)) == ([1, 2], 6)
    opened.evaluate("document.querySelector('.chip[data-i=\"0\"]').click()")
    assert opened.evaluate(ROWS) == 9


@pytest.mark.parametrize(
    ("control", "value", "text"),
    [
        ("latency", "first_token", "TTFT p50, ms"),
        ("latency", "interactivity", "interactivity p50, tokens/s per user  (right is better)"),
        ("stat", "mean", "TPOT mean, ms"),
        ("rate", "requests", "requests/s, per node (8 GPUs)"),
        ("per", "whole", "output tokens/s, whole deployment"),
        ("per", "gpu", "output tokens/s, per GPU"),
    ],
)
def test_views(control: str, value: str, text: str, opened: browser.Page) -> None:
    opened.evaluate(CHOOSE % (control, value, "change"))
    assert text in opened.evaluate("document.querySelector('figure.main').textContent")
    assert opened.evaluate(CURVES % "") == [0, 1, 2]


def test_the_frontier_drawn_is_that_of_the_analysis(opened: browser.Page, file: Path) -> None:
    from pdlab.analysis import curves as analysis
    from pdlab.analysis import loading, ranking

    loaded = loading.load(sorted(file.parent.glob("*-folder")), {})
    curves = analysis.curves([each.experiment for each in loaded], [each.requests for each in loaded])
    for choice, view in (("token", View()), ("interactivity", View(use_interactivity=True))):
        opened.evaluate(CHOOSE % ("latency", choice, "change"))
        rings = opened.evaluate("document.querySelectorAll('figure.main .ring').length")
        assert rings == sum(len(points) for _, points in ranking.frontiers(curves, view)) > 1


@pytest.mark.parametrize("latency", ["token", "first_token", "interactivity"])
def test_levels_and_bands_lie_where_the_figure_has_them(latency: str, opened: browser.Page, file: Path) -> None:
    """The page works out the ends of axes and bands for what is shown by the rules of the figure."""
    spec = of_report(build_report(load(*sorted(file.parent.glob("*-folder")))), every=True)
    shown = spec.shown(spec.panels[0], latency=latency)
    opened.evaluate(CHOOSE % ("latency", latency, "change"))
    _, _, width, height = map(float, opened.evaluate(f"{MAIN}.getAttribute('viewBox')").split())
    edges = ((52, width - 14), (height - 40, 24))
    axes = (shown.x, shown.y)
    assert not (shown.x.log or shown.y.log)

    def on_page(places: Iterable[tuple[float, float | None]]) -> list[float]:
        return [
            begin + ((value or 0.0) - axis.low) / (axis.high - axis.low) * (end - begin)
            for place in places
            for value, axis, (begin, end) in zip(place, axes, edges, strict=True)
        ]

    def numbers(nodes: str, attribute: str) -> list[float]:
        texts = opened.evaluate(f"[...{MAIN}.querySelectorAll('{nodes}')].map((n) => n.getAttribute('{attribute}'))")
        return [float(number) for text in texts for number in re.findall(r"-?[\d.]+", text)]

    places = [place for line in shown.lines for place in line.points]
    assert numbers(".curve path[transform]", "transform") == pytest.approx(on_page(places), abs=0.1)
    outlines = [place for line in shown.lines for place in line.area]
    assert len(outlines) == 16, "3 levels of two curves and 2 of one, there and back"
    assert numbers(".band", "d") == pytest.approx(on_page(outlines), abs=0.1)


def test_a_phone(page: browser.Page, file: Path) -> None:
    page.size(390, 844, phone=True)
    page.open(file)
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    assert page.evaluate("document.querySelector('figure.main svg').getBoundingClientRect().width") <= 390
    page.evaluate("document.getElementById('panels').scrollIntoView()")
    page.tap(*page.evaluate(POINT % 0))
    assert "concurrency 1" in page.evaluate(TIP)
    box = page.evaluate("(({left, right, bottom}) => [left, right, bottom])(tip.getBoundingClientRect())")
    assert box == [0, 390, 844], "at the bottom, as wide as the screen"
    assert page.evaluate("[...tip.querySelectorAll('table')].every((t) => t.getBoundingClientRect().right <= 390)")


def test_it_prints(page: browser.Page, file: Path, tmp_path: Path) -> None:
    page.size(1280, 900)
    page.open(file)
    page.pdf(tmp_path / "report.pdf")
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF") and content.count(b"/Type /Page\n") >= 3
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0, "printed with its manifests"
    assert page.evaluate("document.querySelector('figure.main svg').viewBox.baseVal.width") > 800, "and drawn again"


def test_rates_that_span_are_drawn_in_powers(page: browser.Page, tmp_path: Path) -> None:
    """One serves 100 times as much per GPU as the other, which would lie on the ground of a linear axis."""
    axis = "[...document.querySelectorAll('figure.main svg > text')].map((text) => text.textContent)"
    named = {}
    for times in (2, 400):
        paths = [
            folders.write(tmp_path / f"{name}-{times}", deployment, faster=faster)
            for name, deployment, faster in zip("ab", folders.deployments(2), (1, times), strict=True)
        ]
        out = tmp_path / f"{times}.html"
        assert viz.main(["--exps", *map(str, paths), "--report", str(out)]) == 0
        page.size(1280, 900)
        page.open(out)
        named[times] = any("log scale" in text for text in page.evaluate(axis))
        lowest = page.evaluate("""(() => {
            const all = [...document.querySelectorAll('figure.main .curve path[transform]')];
            const ys = all.map((each) => +each.getAttribute('transform').match(/ ([-\\d.]+)\\)/)[1]);
            return ys.every(Number.isFinite) && ys.length > 3;
        })()""")
        assert lowest is True
    assert named == {2: False, 400: True}


# Figures without controls

PATHS = "[...document.querySelectorAll('.figure .row:nth-of-type(%d) path')].map((each) => each.getAttribute('d'))"
TEXTS = "[...document.querySelectorAll('.figure text')].map((each) => each.textContent)"


@pytest.fixture
def drawn(page: browser.Page, tmp_path: Path) -> Callable[[Figure], browser.Page]:
    """A page with this figure only; it is drawn without a message."""

    def draw(figure: Figure) -> browser.Page:
        script = (ASSETS / "figure.js").read_text(encoding="utf-8")
        place = f'<div class="figure"><script type="application/json">{figure.page()}</script></div>'
        path = tmp_path / "f.html"
        path.write_text(f"<!doctype html><body><section>{place}</section><script>{script}</script>", encoding="utf-8")
        page.size(900, 900)
        page.open(path)
        assert page.messages == []
        return page

    return draw


def test_a_line_leaves_gaps_and_more_is_higher(drawn: Callable[[Figure], browser.Page]) -> None:
    lines = [Line([(0, 1.0), (1, 3.0), (2, None), (3, 2.0), (4, 4.0)], "#0072b2", HOSTILE)]
    panel = PlotPanel(rising("load", lines), lines=lines, legend="best")
    opened = drawn(stacked([panel, panel._replace(lines=[])], "s", spans=[Span(1.0, 2.0, "f1")]))
    (path,) = opened.evaluate(PATHS % 1)
    assert re.sub("[^ML]", "", path) == "MLML", "nothing is drawn across what is not known"
    heights = [float(place.split()[1]) for place in re.split("[ML]", path)[1:]]
    assert heights[0] > heights[2] > heights[1] > heights[3]
    assert opened.evaluate("document.querySelectorAll('.span').length") == 1
    assert {"load", "s", "f1", "0", "2", "4"} <= set(opened.evaluate(TEXTS))
    assert opened.evaluate("document.querySelector('.keys').textContent") == HOSTILE
    assert opened.evaluate("window.broken") is None


@pytest.mark.parametrize("count", [3, 40])
def test_names_of_places_have_room_and_powers_have_equal_heights(
    count: int, drawn: Callable[[Figure], browser.Page]
) -> None:
    lines = [Line([(place + 0.5, 10.0 ** (place + 1)) for place in range(3)], "#0072b2", marker="o")]
    ticks = [(place + 0.5, f"{place:,} to\n{place + 1:,}") for place in range(count)]
    opened = drawn(stacked([PlotPanel(rising("ms", lines, log=True), lines=lines)], "tokens", ticks=ticks, ends=count))
    path = next(each for each in opened.evaluate(PATHS % 1) if "L" in each)
    heights = [float(place.split()[1]) for place in re.split("[ML]", path)[1:]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    texts = opened.evaluate(TEXTS)
    named = [each for each in texts if " to " in each]
    assert named[0] == "0 to 1" and (len(named) == 3 if count == 3 else 3 < len(named) < 20)
    assert {"10", "100", "1,000"} <= set(texts) and "0" not in texts


def test_blocks_lie_on_the_axes_and_have_their_names(drawn: Callable[[Figure], browser.Page]) -> None:
    blocks = [Block((0.0, row - 0.4), (50.0 * (row + 1), row + 0.4), "#4292c6", f"prefill {row}") for row in range(2)]
    y = Axis("request", 1.6, -0.6, ticks=[(0, "0.1 s"), (1, "0.2 s")])
    panel = PlotPanel(y, Axis("ms", high=100.0), blocks=blocks)
    opened = drawn(Figure([[panel]], keys=[("prefill", "#4292c6", "its step")]))
    wide = opened.evaluate("[...document.querySelectorAll('.figure rect')].map((r) => +r.getAttribute('width'))")
    up = opened.evaluate("[...document.querySelectorAll('.figure rect')].map((r) => +r.getAttribute('y'))")
    assert wide[1] == pytest.approx(2 * wide[0]) and up[0] < up[1], "an axis may go down"
    names = opened.evaluate("[...document.querySelectorAll('.figure rect title')].map((t) => t.textContent)")
    assert names == ["prefill 0", "prefill 1"]
    assert opened.evaluate("document.querySelector('.keys span').title") == "its step"


def test_figures_of_a_page_with_curves_are_drawn_too(page: browser.Page, tmp_path: Path) -> None:
    from support import timelines

    folder = timelines.write(tmp_path / "timelines", folders.deployments(1)[0])
    assert viz.main(["--exps", str(folder), "--report", str(tmp_path / "r.html")]) == 0
    page.size(1280, 900)
    page.open(tmp_path / "r.html")
    assert page.messages == []
    assert page.evaluate("document.querySelectorAll('#ttft .figure svg').length") == 3, "two loads and the slowest"
    assert page.evaluate("document.querySelectorAll('#ttft rect').length") > 40
