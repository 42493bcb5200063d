#!/usr/bin/env python3
"""Result folders -> tables, plots and a verdict."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from pdlab.analysis.view import SHOWN, View
from pdlab.core.arguments import SLO_QUANTILE
from pdlab.core.commands import BENCH, PLAN, RUN_VIZ, VIZ, typed
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import NOT_CLEAN, exit_code
from pdlab.core.output_paths import check_output, check_picture, distinct
from pdlab.core.settings import (
    AboveZero,
    FlagsOf,
    NamedValues,
    Settings,
    declared,
    given_flags,
    not_given,
    parse,
    setting,
)
from pdlab.core.text import choices
from pdlab.core.workload import Slo, parse_slo

if TYPE_CHECKING:
    from pdlab.core.bounds import Bounds


DESCRIPTION = """\
Compare experiments as tables and plots: TPOT and TTFT against load, throughput against latency.

The last lines compare whole curves. They give the mean ratio of throughput, TTFT and TPOT over the
loads that two deployments share, with an interval from the repeats. --at compares within your own
latency limits.

Throughput is per node (8 GPUs, see --gpus-per-node), so that you can compare deployments of
different sizes. On a CPU cluster an engine rank takes the place of a GPU. The yellow band and the
rings are the Pareto frontier. No other point of the same kind of load beats these points in both
latency and throughput. A crossed hollow point failed a check; it is shown, never compared. Bands
and +- are intervals; a winner is named only if the intervals are clear."""

EPILOG = f"""\
examples:
  {RUN_VIZ} --exps bm_results/collocated-4xtp2 bm_results/pd-pack-p1xtp4-d1xtp4
  {RUN_VIZ} --exps bm_results/* --at tpot_ms=12,ttft_p95_ms=2000
  {RUN_VIZ} --exps bm_results/* --latency-mode first_token --stat p90 --log-latency
  {RUN_VIZ} --exps bm_results/* --use-interactivity --throughput-metric total --format svg --plot-path out/total
  {RUN_VIZ} --exps bm_results/* --slo ttft_ms=2000,tpot_ms=50 --slo ttft_ms=500,tpot_ms=20 --price-per-gpu-hour 2.5
  {RUN_VIZ} --exps published/gptoss_itl5000_otl250_mixed_1xtp2-1xtp2 oddly-named --gpus oddly-named=8
  {RUN_VIZ} --exps bm_results/* --report out/report.html
  {RUN_VIZ} --exps published/* --dry-run
  {RUN_VIZ} --audit bm_results/* published/*

Formulas and units of every figure: docs/metrics.md
"""


V = TypeVar("V")
# Fields that also make sense for folders of faults, which have no load levels.
WITHOUT_LEVELS = ("exps", "plot_path", "format", "no_plot", "report", "show_tables", "note")
EXPORTS = ("aiperf", "llmd", "inferencex", "csv", "parquet")
WHICH, ANSWERED, MADE = "which results", "limits, SLOs and cost", "output"


def _each_once(words: Sequence[str], flag: str, read: Callable[[str], tuple[str, V]]) -> dict[str, V]:
    """Name -> value, of each word by ``read``. Raises UsageError if a name is given twice."""
    values: dict[str, V] = {}
    for word in words:
        name, value = read(word)
        if name in values:
            raise UsageError(f"{flag} {word}: {name} is given twice; keep one")
        values[name] = value
    return values


def _sizes(words: Sequence[str], flag: str) -> dict[str, int]:
    """Pattern -> number of GPUs, from words PATTERN=N. Raises UsageError."""

    def size(word: str) -> tuple[str, int]:
        name, _, count = word.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,6}", count) or int(count) < 1:
            raise UsageError(f"{flag} {word}: expected PATTERN=N with N at least 1, for example {flag} my-folder=8")
        return name, int(count)

    return _each_once(words, flag, size)


def _labels(words: Sequence[str], flag: str) -> dict[str, str]:
    """Pattern -> label, from words PATTERN=TEXT. Raises UsageError."""

    def label(word: str) -> tuple[str, str]:
        pattern, _, text = word.partition("=")
        if not pattern or not text.strip():
            raise UsageError(f"{flag} {word}: expected PATTERN=TEXT, for example {flag} '1p3d*=1P 3D, TP2'")
        return pattern, text.strip()

    return _each_once(words, flag, label)


def _exports(words: Sequence[str], flag: str) -> dict[str, Path]:
    """Format -> output, from words FORMAT=PATH. Raises UsageError."""

    def export(word: str) -> tuple[str, Path]:
        name, _, path = word.partition("=")
        if name not in EXPORTS:
            raise UsageError(f"{flag} {word}: expected FORMAT=PATH; {choices(name, EXPORTS)}")
        if not path:
            raise UsageError(f"{flag} {word}: expected FORMAT=PATH, for example {flag} csv=out/levels.csv")
        return name, Path(path)

    return _each_once(words, flag, export)


class VizSettings(Settings):
    """Which results to show or audit, how, and where the output goes. ``view``: the given fields of `View`."""

    COMMAND = "viz"
    ABOUT = DESCRIPTION
    EXAMPLES = EPILOG
    GROUPS = (WHICH, SHOWN, ANSWERED, MADE)

    exps: tuple[Path, ...] = setting(
        (),
        f"experiment folders: of {BENCH}, of a whole experiment, or as published (concN.json, concN_rrR.json)",
        WHICH,
        several="words",
        value="DIR",
    )
    simulated: tuple[Path, ...] = setting(
        (),
        f"simulated replays, as {PLAN} --compare --out writes them, to show beside the measured replays of --exps",
        WHICH,
        several="words",
        value="DIR",
        needs="exps",
    )
    audit: tuple[Path, ...] = setting(
        (),
        "no plot: list everything in these folders that makes a plot of them wrong; exit code 3 if there is anything",
        WHICH,
        several="words",
        value="DIR",
    )
    gpus: Annotated[dict[str, int], NamedValues(_sizes)] = setting(
        {},
        "number of GPUs of the folders whose path ends in PATTERN, and of the result files whose name or path matches "
        "it; * is any text; overrides names and files; repeatable",
        WHICH,
        several="times",
        value="PATTERN=N",
    )
    label: Annotated[dict[str, str], NamedValues(_labels)] = setting(
        {},
        "label, in tables and plots, of the results that match PATTERN; results with one label are one curve; "
        "repeatable",
        WHICH,
        several="times",
        value="PATTERN=TEXT",
    )
    dry_run: bool = setting(
        False,
        "print how viz reads each folder: files, client, levels, lengths, model, GPUs, deployment, and the flags that "
        "it needs; draw nothing",
        WHICH,
    )
    view: Annotated[dict[str, Any], FlagsOf(View)] = Field(default_factory=dict)
    at: tuple[str, ...] = setting(
        (),
        "report the highest throughput within these latency limits: tpot_ms=12,ttft_p95_ms=2000 "
        "(METRIC_STATISTIC_ms; without a statistic, that of --stat); repeatable",
        ANSWERED,
        several="times",
        value="BOUNDS",
        otherwise="those of the experiments' files, at:",
    )
    slo: tuple[str, ...] = setting(
        (),
        "report the highest throughput within an SLO: ttft_ms=2000,tpot_ms=50[,e2el_ms=N]; itl_p99_ms=N and stall_ms=N "
        "only for an SLO that an experiment searched for; repeatable",
        ANSWERED,
        several="times",
        value="BOUNDS",
        otherwise="the SLOs that the experiments searched for",
    )
    share: Annotated[dict[str, Any], FlagsOf(Slo, ANSWERED, "slo-", only=("quantile",), needs="slo")] = Field(
        default_factory=dict
    )
    price_per_gpu_hour: AboveZero | None = setting(
        None, "price of one GPU hour in any currency; adds the cost of a million tokens", ANSWERED, value="PRICE"
    )
    published: tuple[Path, ...] = setting(
        (),
        "published tables, as CSV (columns: docs/metrics.md), to show beside the results; they are never ranked",
        ANSWERED,
        several="words",
        value="FILE",
    )
    log_latency: bool | None = setting(
        None,
        "logarithmic latency axes",
        MADE,
        otherwise="on if the values span a factor of 20, or if one curve reaches three times as far as all others",
    )
    log_concurrency: bool | None = setting(
        None,
        "logarithmic (base 2) load axes",
        MADE,
        otherwise="on if at least half of the loads would lie in the first tenth of the axis",
    )
    plot_path: Path | None = setting(None, "file of the plot", MADE, value="FILE", otherwise="out/viz.png")
    note: tuple[str, ...] = setting(
        (),
        "a line of text under the plot and the tables; repeatable",
        MADE,
        several="times",
        value="TEXT",
    )
    no_plot: bool = setting(False, "print tables and verdicts only; draw nothing", MADE)
    report: Path | None = setting(
        None,
        "write one self-contained HTML file, in place of the plot and the printed tables (--plot-path and "
        "--show-tables add these)",
        MADE,
        value="FILE",
    )
    export: Annotated[dict[str, Path], NamedValues(_exports)] = setting(
        {},
        "write the levels in another format: aiperf=FOLDER or llmd=FOLDER (a file per level, each in a folder of its "
        f"own), inferencex=FILE, csv=FILE, parquet=FILE (needs pyarrow); {VIZ} reads all of them; repeatable",
        MADE,
        several="times",
        value="FORMAT=PATH",
    )
    show_tables: bool | None = setting(
        None, "print the tables, raw and per node", MADE, otherwise="on; off with --report"
    )
    format: Literal["png", "svg", "pdf"] | None = setting(
        None, "file format of the plot", MADE, otherwise="the suffix of --plot-path, else png"
    )

    def check(self) -> None:
        if self.audit:
            self._check_audit()
            return
        view = self.view
        if "chunk_size" in view and view.get("latency_mode") != "chunk":
            raise UsageError("--chunk-size goes with --latency-mode chunk; add it, or leave --chunk-size out")
        if not view.get("normalized", True):
            self._check_raw()
        if view.get("use_interactivity") and view.get("latency_mode", "token") != "token":
            raise UsageError("--use-interactivity is 1000/TPOT: it works only with --latency-mode token")
        if self.no_plot and (self.plot_path or self.format):
            raise UsageError("--no-plot makes no file; leave out --plot-path and --format, or --no-plot")
        if self.no_plot:
            not_given(self, ("log_concurrency",) if self.report else ("log_latency", "log_concurrency"), "--no-plot")
        if twice := [text for text in self.slo if self.slo.count(text) > 1]:
            raise UsageError(f"--slo {twice[0]} is given twice; give it once")
        if self.report is not None and self.report.suffix.lower() not in (".html", ".htm"):
            example = self.report.with_suffix(".html") if self.report.name else "report.html"
            raise UsageError(f"--report {self.report}: give an .html file, for example {example}")
        if self.dry_run:
            self.only("--dry-run, which draws nothing", "exps", "dry_run", "gpus", "label")
        if not self.exps:
            raise UsageError("--exps is needed: the folders to compare (or --audit and the folders to examine)")

    def _check_audit(self) -> None:
        if self.exps:
            raise UsageError("--audit examines folders and draws nothing; leave --exps out")
        self.only("--audit, which draws nothing", "audit", "gpus", "label")

    def _check_raw(self) -> None:
        """Raises UsageError for flags of throughput per node. A price needs the count of GPUs, so it may stay."""
        what = "is for throughput per node, which --no-use-normalized turns off: leave one out"
        priced = ("view.count",) if self.price_per_gpu_hour is not None else ()
        for name, flag in given_flags(self).items():
            if name in ("view.gpus_per_node", "view.role", "view.count") and name not in priced:
                raise UsageError(f"{flag} {what}")

    def only(self, what: str, *kept: str) -> None:
        """Raises UsageError if a field other than ``kept`` was set."""
        not_given(self, [each.name for each in declared(type(self)) if each.name not in kept], what)

    @property
    def draws(self) -> bool:
        """Whether to make a plot; with --report only if a flag of the plot is given."""
        return not self.no_plot and (self.report is None or self.plot_path is not None or self.format is not None)

    @property
    def prints_tables(self) -> bool:
        return self.report is None if self.show_tables is None else self.show_tables

    @property
    def slos(self) -> list[Slo]:
        """The SLOs of --slo. Raises UsageError."""
        return [parse_slo(text, self.share.get("quantile", SLO_QUANTILE)) for text in self.slo]

    @property
    def shown(self) -> View:
        """The view of the flags. Fields without a flag are not set in it. Raises UsageError."""
        return self.value_of("view", View)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv

    def run() -> int:
        settings = parse(VizSettings, words)
        if settings.audit:
            return _audit(settings)
        if settings.dry_run:
            _dry_run(settings)
            return 0
        _show(settings, words)
        return 0

    return exit_code(run)


def _audit(settings: VizSettings) -> int:
    from pdlab.analysis.audit import rules
    from pdlab.report.load import find, stated_by_folder
    from pdlab.results.published_folders import require_folder

    for path in settings.audit:
        require_folder(path)
    found = find(settings.audit, "--audit")
    _note(f"{path}: faults made under load, not audited" for path in found.faults)
    if not found.given:
        raise UsageError("--audit: these folders hold faults made under load, which have nothing to audit")
    _note(note.text for note in found.notes if note.code == "visits_left")
    findings = rules.audit(
        found.experiments, stated_by_folder(settings.gpus, settings.label, found.experiments, "--audit")
    )
    print(rules.render(findings, len(found.experiments)))
    return NOT_CLEAN if findings else 0


def _dry_run(settings: VizSettings) -> None:
    from pdlab.report.load import find, stated_by_folder
    from pdlab.results.description import Stated
    from pdlab.results.interpretation import interpret, interpretation_text

    found = find(settings.exps, "--exps")
    _note(f"{path}: faults made under load" for path in found.faults)
    stated = stated_by_folder(settings.gpus, settings.label, found.experiments, "--exps")
    print(interpretation_text([interpret(path, stated.get(path, Stated())) for path in found.experiments]))


def _show(settings: VizSettings, words: Sequence[str]) -> None:
    """Load the results, build the report, then print, draw and write it."""
    from pdlab.report import text
    from pdlab.report.build import build_report
    from pdlab.report.load import find, read, stated_by_folder

    view, plot_path, slos = settings.shown, _plot_path(settings.plot_path, settings.format), settings.slos
    at = _bounds(settings, view)
    if settings.draws:
        check_picture(plot_path, "--plot-path", make_folder=True)
    if settings.report is not None:
        check_output(settings.report, "--report")
    if settings.export:
        from pdlab.report.export import check_exports, write_exports

        check_exports(settings.export, (*settings.exps, *settings.simulated, *settings.published))
    found = find(settings.exps, "--exps")
    if not found.given:
        settings.only("folders of faults, which have no load levels", *WITHOUT_LEVELS)
    _note(note.text for note in found.notes)
    stated = stated_by_folder(settings.gpus, settings.label, found.experiments, "--exps")
    results = read(found, stated, every_request=bool(slos))
    report = build_report(
        results,
        view,
        at=at,
        slos=slos,
        price_per_gpu_hour=settings.price_per_gpu_hour,
        published=settings.published,
        remarks=settings.note,
        simulated=distinct(list(settings.simulated), "--simulated"),
    )
    _note(note.text for note in report.notes if note not in found.notes)
    _print_block(text.left_out_text(report))
    if settings.prints_tables:
        _print_block(text.tables_text(report))
    if settings.draws:
        from pdlab.report.pictures import draw

        scales = (settings.log_latency, settings.log_concurrency)
        for picture in draw(report, plot_path, log_latency=scales[0], log_load=scales[1]):
            print(picture.line)
    if settings.prints_tables:
        for section in text.slo_sections(report):
            _print_block(section.text)
    if settings.report is not None:
        from pdlab.report.html import write_html

        write_html(report, settings.report, command=typed("viz", *words), log_latency=settings.log_latency)
        print(f"Report: {settings.report}")
    if settings.export:
        for export in write_exports(results, settings.export):
            print(export.line)
    print(text.verdict_text(report))


def _bounds(settings: VizSettings, view: View) -> list[Bounds]:
    """The bounds of --at. Raises UsageError."""
    from pdlab.core.bounds import parse_bounds

    at = [parse_bounds(text, view.statistic) for text in settings.at]
    if twice := [text for text, bounds in zip(settings.at, at, strict=True) if at.count(bounds) > 1]:
        raise UsageError(f"--at {twice[0]} is given twice; give it once")
    return at


def _print_block(text: str) -> None:
    if text:
        print(text, end="\n\n")


def _note(texts: Iterable[str]) -> None:
    for text in texts:
        print(f"note: {text}", file=sys.stderr)


def _plot_path(path: Path | None, kind: str | None) -> Path:
    path = Path("out/viz") if path is None else path
    suffix = path.suffix.lower().removeprefix(".")
    try:
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False  # writing there raises the error
    if path.name.endswith("."):
        raise UsageError(f"--plot-path {path}: the suffix selects the format; use .png, .svg or .pdf")
    if folder:
        raise UsageError(f"--plot-path {path} is a folder; give a file in it, for example {path / 'viz.png'}")
    if suffix in ("png", "svg", "pdf"):
        if kind not in (None, suffix):
            raise UsageError(f"--plot-path {path} and --format {kind} disagree; give one of them")
        return path
    if suffix and kind is None:
        raise UsageError(f"--plot-path {path}: .{suffix} is not a known format; use png, svg or pdf")
    return path.with_name(f"{path.name}.{kind or 'png'}")
