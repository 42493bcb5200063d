#!/usr/bin/env python3
"""Result folders -> tables, plots and one plain sentence."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pdlab.analysis.view import SHOWN, View
from pdlab.core.arguments import check_output, check_picture, distinct, exit_code
from pdlab.core.commands import typed
from pdlab.core.errors import UsageError
from pdlab.core.schema import validate
from pdlab.core.settings import (
    AboveZero,
    FlagsOf,
    NamedValues,
    Settings,
    Share,
    declared,
    flag_names,
    given_flags,
    not_given,
    parse,
    setting,
)

if TYPE_CHECKING:
    from pdlab.analysis.curves import Curve
    from pdlab.analysis.loading import Loaded
    from pdlab.results.chaos import Chaos


DESCRIPTION = """\
Compare experiments as tables and plots: TPOT and TTFT against load, throughput against latency.

The last lines compare whole curves: the mean ratio of throughput, TTFT and TPOT over the loads that
two deployments share, with an interval from the repeats. Within latencies of your own: --at.

Throughput is per node (8 GPUs, see --gpus-per-node), so that deployments of different sizes can be
compared; on a CPU cluster an engine rank takes the place of a GPU. The yellow band and the rings are
the Pareto frontier: points that no other point of the same kind of load beats in both latency and
throughput. A crossed hollow point failed a check; it is shown, never compared. Bands and +- are
intervals; a winner is named only where the intervals allow it."""

EPILOG = """\
examples:
  python viz.py --exps bm_results/collocated-4xtp2 bm_results/pd-pack-p1xtp4-d1xtp4
  python viz.py --exps bm_results/* --at tpot_ms=12,ttft_p95_ms=2000
  python viz.py --exps bm_results/* --latency-mode first_token --stat p90 --log-latency
  python viz.py --exps bm_results/* --use-interactivity --throughput-metric total --format svg --plot-path out/total
  python viz.py --exps bm_results/* --slo ttft_ms=2000,tpot_ms=50 --slo ttft_ms=500,tpot_ms=20 --price-per-gpu-hour 2.5
  python viz.py --exps published/gptoss_itl5000_otl250_mixed_1xtp2-1xtp2 oddly-named --gpus oddly-named=8
  python viz.py --exps bm_results/* --report out/report.html
  python viz.py --audit bm_results/* published/*

Formulas and units of every figure: docs/metrics.md
"""


HAS_FINDINGS = 3
DEFAULT_SLO_QUANTILE = 0.95
WHICH, ANSWERED, MADE = "which results", "what is answered", "what is made"


def _sizes(words: Sequence[str], flag: str) -> dict[str, int]:
    """Name of a folder -> its number of GPUs, of words NAME=N. Raises UsageError."""
    sizes: dict[str, int] = {}
    for word in words:
        name, _, count = word.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,6}", count) or int(count) < 1:
            raise UsageError(f"{flag} {word}: expected NAME=N with N at least 1, for example {flag} my-folder=8")
        if name in sizes:
            raise UsageError(f"{flag} {word}: {name} is given twice; keep one")
        sizes[name] = int(count)
    return sizes


class VizSettings(Settings):
    """Which results viz.py shows or audits, how, and where its output goes. ``view``: the fields of `View` that are
    given."""

    PROG = "viz.py"
    ABOUT = DESCRIPTION
    EXAMPLES = EPILOG
    GROUPS = (WHICH, SHOWN, ANSWERED, MADE)

    exps: tuple[Path, ...] = setting(
        (),
        "experiment folders: of run_bm.sh, of a whole bench run, or as published (concN.json, concN_rrR.json)",
        WHICH,
        several="words",
        value="DIR",
    )
    audit: tuple[Path, ...] = setting(
        (),
        "in place of a plot: what in these folders would make a plot of them wrong; exit code 3 when something is",
        WHICH,
        several="words",
        value="DIR",
    )
    gpus: Annotated[dict[str, int], NamedValues(_sizes)] = setting(
        {},
        "the number of GPUs of every folder whose path ends in NAME, if neither a manifest nor its name has it "
        "(a/NAME tells it from b/NAME); repeatable",
        WHICH,
        several="times",
        value="NAME=N",
    )
    view: Annotated[dict[str, Any], FlagsOf(View)] = Field(default_factory=dict)
    at: tuple[str, ...] = setting(
        (),
        "report the highest throughput within these latency limits: tpot_ms=12,ttft_p95_ms=2000 "
        "(METRIC_STATISTIC_ms; without a statistic that of --stat); repeatable",
        ANSWERED,
        several="times",
        value="BOUNDS",
        otherwise="those of the experiments' files, at:",
    )
    slo: tuple[str, ...] = setting(
        (),
        "which configuration serves most within ttft_ms=2000,tpot_ms=50[,e2el_ms=N]; repeatable",
        ANSWERED,
        several="times",
        value="BOUNDS",
        otherwise="the SLOs that the experiments searched for",
    )
    slo_quantile: Share | None = setting(
        None,
        "share of requests that must be within every bound of --slo",
        ANSWERED,
        value="Q",
        otherwise=str(DEFAULT_SLO_QUANTILE),
        needs="slo",
    )
    price_per_gpu_hour: AboveZero | None = setting(None, "adds the cost of a million tokens", ANSWERED, value="PRICE")
    published: tuple[Path, ...] = setting(
        (),
        "tables that others published, as CSV (docs/metrics.md has the columns): shown beside, never ranked",
        ANSWERED,
        several="words",
        value="FILE",
    )
    log_latency: bool | None = setting(
        None,
        "logarithmic latency axes",
        MADE,
        otherwise="where the values span more than 20 times, or one curve reaches three times beyond all others",
    )
    log_concurrency: bool | None = setting(
        None,
        "logarithmic (base 2) load axes",
        MADE,
        otherwise="where more than half of the loads would lie in the first tenth",
    )
    plot_path: Path | None = setting(None, "where the plot goes", MADE, value="FILE", otherwise="out/viz.png")
    note: tuple[str, ...] = setting(
        (),
        "a line under the plot and the tables, for what the folders do not tell; repeatable",
        MADE,
        several="times",
        value="TEXT",
    )
    no_plot: bool = setting(False, "tables and reading only", MADE)
    report: Path | None = setting(
        None,
        "one self-contained HTML file with all of it, in place of the plot and the printed tables (add --plot-path or "
        "--show-tables to have these as well)",
        MADE,
        value="FILE",
    )
    show_tables: bool | None = setting(
        None, "print the tables, raw and per node", MADE, otherwise="yes; no with --report"
    )
    format: Literal["png", "svg", "pdf"] | None = setting(
        None, "format of the plot", MADE, otherwise="the suffix of --plot-path, else png"
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
            raise UsageError("--use-interactivity is 1000/TPOT: it goes with --latency-mode token alone")
        if self.no_plot and (self.plot_path or self.format):
            raise UsageError("--no-plot makes no file; leave out --plot-path and --format, or --no-plot")
        if self.no_plot:
            not_given(self, ("log_concurrency",) if self.report else ("log_latency", "log_concurrency"), "--no-plot")
        if twice := [text for text in self.slo if self.slo.count(text) > 1]:
            raise UsageError(f"--slo {twice[0]} is given twice; give it once")
        if self.report is not None and self.report.suffix.lower() not in (".html", ".htm"):
            example = self.report.with_suffix(".html") if self.report.name else "report.html"
            raise UsageError(f"--report {self.report}: give an .html file, for example {example}")
        if not self.exps:
            raise UsageError("--exps is needed: the folders to compare (or --audit and the folders to examine)")

    def _check_audit(self) -> None:
        if self.exps:
            raise UsageError("--audit examines folders and draws nothing; leave --exps out")
        self.only("--audit, which draws nothing", "audit", "gpus")

    def _check_raw(self) -> None:
        """Flags of throughput per node. The GPUs are counted for a price, too."""
        what = "is for throughput per node, which --no-use-normalized turns off: leave one out"
        priced = ("view.count",) if self.price_per_gpu_hour is not None else ()
        for name, flag in given_flags(self).items():
            if name in ("view.gpus_per_node", "view.role", "view.count") and name not in priced:
                raise UsageError(f"{flag} {what}")

    def only(self, what: str, *kept: str) -> None:
        """Raises UsageError if a field other than ``kept`` was set."""
        not_given(self, [each.name for each in declared(type(self)) if each.name not in kept], what)

    @property
    def shown(self) -> View:
        """The view that the flags give; what they leave open is not set in it. Raises UsageError."""
        return validate(View, self.view, where="the flags", names=flag_names(VizSettings, "view"))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for bad input."""
    words = sys.argv[1:] if argv is None else argv

    def run() -> int:
        settings = parse(VizSettings, words)
        if settings.audit:
            return _audit(settings)
        _show(settings, words)
        return 0

    return exit_code(run)


def _audit(args: VizSettings) -> int:
    from pdlab.analysis.audit import rules
    from pdlab.results.published_folders import require_folder
    from pdlab.results.store import experiment_folders, unfinished

    for path in args.audit:
        require_folder(path)
    faults, measured = _split(args.audit)
    _note(f"{path}: faults made under load, not audited" for path in faults)
    if not measured:
        raise UsageError("--audit: these folders hold faults made under load, which have nothing to audit")
    folders = distinct(experiment_folders(measured), "--audit")
    _note(unfinished(path) for path in measured)
    findings = rules.audit(folders, _gpus(args.gpus, folders, "--audit"))
    print(rules.render(findings, len(folders)))
    return HAS_FINDINGS if findings else 0


def _show(args: VizSettings, argv: Sequence[str]) -> None:
    from pdlab.analysis import curves as analysis
    from pdlab.analysis import goodput, loading, published_tables, ranking
    from pdlab.cli import whole_nodes
    from pdlab.core.bounds import parse_bounds
    from pdlab.core.workload import parse_slo
    from pdlab.report import chaos as chaos_report
    from pdlab.report import sections, soaks, tables, timelines, verdicts
    from pdlab.results import chaos as chaos_results
    from pdlab.results.store import bounds_in_files, experiment_folders, stopped, tuning_of, unfinished

    view = args.shown
    plot_path = _plot_path(args.plot_path, args.format)
    show_tables = args.report is None if args.show_tables is None else args.show_tables
    draw = not args.no_plot and (args.report is None or args.plot_path is not None or args.format is not None)
    at = [parse_bounds(text, view.statistic) for text in args.at]
    if twice := [text for text, bounds in zip(args.at, at, strict=True) if at.count(bounds) > 1]:
        raise UsageError(f"--at {twice[0]} is given twice; give it once")
    slos = [parse_slo(text, args.slo_quantile or DEFAULT_SLO_QUANTILE) for text in args.slo]
    if draw:
        check_picture(plot_path, "--plot-path", make_folder=True)
    if args.report is not None:
        check_output(args.report, "--report")
    faults, measured = _split(args.exps)
    if not measured:
        _show_faults(args, argv, faults, plot_path if draw else None, show_tables=show_tables)
        return
    paths = distinct(experiment_folders(measured), "--exps")
    _note(unfinished(path) for path in measured)
    _note(stopped(path) for path in measured)
    _note(tuning_of(path) for path in measured)
    if not at:
        entries = bounds_in_files(measured)
        at = list(dict.fromkeys(parse_bounds(each.text, view.statistic, f"{each.folder}, at:") for each in entries))
    gpus = _gpus(args.gpus, paths, "--exps")
    loaded = loading.load(paths, gpus, every_request=bool(slos))
    searched = [search.slo for each in loaded for search in each.experiment.searches]
    if searched and not slos:
        slos = list(dict.fromkeys(searched))
        loaded = loading.load(paths, gpus, every_request=True)
    _note(_several(loaded))
    curves = [*analysis.curves([each.experiment for each in loaded], [each.requests for each in loaded])]
    curves = [whole_nodes.counted(curve) for curve in _drawn_once(curves)]
    curves += [curve for path in args.published for curve in published_tables.load(path)]
    curves = _with_role(curves, view)
    view = _view_of_what_is_known(curves, view, args)
    ranking.require_latency(analysis.own(curves), view)
    doubt = _doubt(paths, gpus, loading.hashes(loaded))
    _note([doubt])
    texts = ["\n".join(args.note), sections.crossover_text(curves, view), sections.split_text(curves)]
    if args.price_per_gpu_hour is not None:
        texts.append(sections.cost_text(curves, view, args.price_per_gpu_hour, at))
    held = soaks.held([each.experiment for each in loaded])
    texts += [soaks.text(each) for each in held]
    moving = timelines.moving([(each.folder, each.experiment) for each in loaded])
    texts += [timelines.text(each) for each in moving]
    made = [chaos_results.load(path) for path in faults]
    texts += [chaos_report.text(each) for each in made]
    if show_tables:
        print("\n\n".join(text for text in [tables.render(curves, view), *texts] if text), end="\n\n")
    if draw:
        from pdlab.report import plots

        plots.draw(
            curves,
            view,
            plot_path,
            log_latency=args.log_latency,
            log_load=args.log_concurrency,
            remarks=[*args.note, *([doubt] if doubt else [])],
        )
        print(f"Plot: {plot_path}")
        if held:
            over_time = plot_path.with_stem(f"{plot_path.stem}-over-time")
            soaks.draw(held, over_time)
            print(f"Plot over time: {over_time}")
        if moving:
            over_time = plot_path.with_stem(f"{plot_path.stem}-roles")
            timelines.draw(moving, over_time)
            left_out = f" (the first {timelines.MOST} of {len(moving)})" if len(moving) > timelines.MOST else ""
            print(f"Plot of load and roles over time: {over_time}{left_out}")
        _draw_faults(made, plot_path, beside=True)
    answers = []
    for slo in slos:
        for pick in goodput.picks(curves, slo, view):
            texts.append(sections.slo_text(pick, curves, view))
            answers.append(verdicts.slo_sentence(pick, curves, view))
            if show_tables:
                print(texts[-1], end="\n\n")
    if args.report is not None:
        from pdlab.report import html
        from pdlab.report.scales import latency_is_logarithmic

        log_latency = latency_is_logarithmic(curves, view, args.log_latency)
        command = typed("viz", *argv)
        in_own_section = {chaos_report.text(each) for each in made}
        known = [text for text in texts if text and text not in in_own_section]
        contents = html.Contents(
            loaded, curves, view, command, at, answers, known, log_latency=log_latency, chaos=made, gpus=gpus
        )
        html.write(contents, args.report)
        print(f"Report: {args.report}")
    print(verdicts.headline(curves, view))
    for bounds in at:
        for sentence in verdicts.at_sentences(curves, bounds, view):
            print(sentence)
    if not at and len(analysis.own(curves)) > 1:
        print(verdicts.NO_BOUND)
    for answer in answers:
        print(answer)


def _split(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Those that hold faults made under load, and the others."""
    from pdlab.results.chaos import is_chaos
    from pdlab.results.store import searched

    faults: list[Path] = []
    others: list[Path] = []
    for folder in folders:
        with searched(folder):
            (faults if is_chaos(folder) else others).append(folder)
    return distinct(faults, "--exps"), others


def _show_faults(
    args: VizSettings, argv: Sequence[str], folders: Sequence[Path], plot_path: Path | None, *, show_tables: bool
) -> None:
    """Faults made under load alone: there is no load level to compare."""
    from pdlab.report import chaos as chaos_report
    from pdlab.report import html
    from pdlab.results import chaos as chaos_results

    args.only(
        "folders of faults, which have no load levels",
        *("exps", "plot_path", "format", "no_plot", "report", "show_tables", "note"),
    )
    made = [chaos_results.load(folder) for folder in folders]
    if show_tables:
        print("\n\n".join(f"{chaos_report.text(each)}\n\n{chaos_report.fault_list(each)}" for each in made), end="\n\n")
    if plot_path is not None:
        _draw_faults(made, plot_path, beside=False)
    if args.report is not None:
        html.write_faults(made, typed("viz", *argv), args.report)
        print(f"Report: {args.report}")
    for line in args.note:
        print(line)
    for each in made:
        print(f"{each.name}: {chaos_report.lines(each)[0]}")


def _draw_faults(made: Sequence[Chaos], plot_path: Path, *, beside: bool) -> None:
    """A picture of each; ``beside`` another plot, which has the name itself."""
    from pdlab.report import chaos as chaos_report

    for number, each in enumerate(made, start=1):
        stem = f"{plot_path.stem}-faults" if beside else plot_path.stem
        path = plot_path.with_stem(stem if number == 1 else f"{stem}-{number}")
        chaos_report.draw(each, path)
        print(f"Plot of faults: {path}")


def _doubt(paths: Sequence[Path], gpus: Mapping[Path, int], hashes: Mapping[Path, str]) -> str | None:
    """That the audit finds something in these folders that makes a plot of them wrong; None where it does not."""
    from pdlab.analysis.audit import rules

    findings = rules.shared(rules.hard(rules.audit(paths, gpus, recompute=False, hashes=hashes)))
    if not findings:
        return None
    kinds = ", ".join(dict.fromkeys(finding.kind for finding in findings))
    named = list(map(str, paths)) if len(paths) <= 4 else ["DIR..."]
    more = "" if len(paths) <= 4 else " with these folders"
    return (
        f"the audit has findings that make a plot of these folders wrong ({kinds}): "
        f"{typed('viz', '--audit')} {shlex.join(named) if not more else named[0]}{more} lists them"
    )


def _drawn_once(curves: Sequence[Curve]) -> list[Curve]:
    from pdlab.analysis.curves import drawn_once

    kept = list(drawn_once(curves))
    if len(kept) < len(curves):
        names = [curve.label for curve in kept if curve not in curves]
        _note([f"identical results are drawn once: {'; '.join(names)}"])
    return kept


def _note(texts: Iterable[str | None]) -> None:
    for text in filter(None, texts):
        print(f"note: {text}", file=sys.stderr)


def _several(loaded: Sequence[Loaded]) -> Iterable[str]:
    """Folders that hold several curves, and which."""
    from pdlab.core.text import listed

    for folder in dict.fromkeys(each.folder for each in loaded):
        parts = [each.experiment.part for each in loaded if each.folder == folder]
        if len(parts) > 1:
            yield f"{folder} holds {len(parts)} curves, its files differ in more than their load: {listed(parts)}"


def _view_of_what_is_known(curves: list[Curve], view: View, args: VizSettings) -> View:
    """The view; where no level has its latency, one that some level has, as far as the flags leave that open."""
    from pdlab.analysis.curves import own
    from pdlab.analysis.ranking import spots

    given = args.view
    modes = ["token"] if view.use_interactivity else ["token", "first_token"]
    for mode in [view.latency_mode] if "latency_mode" in given else modes:
        for statistic in [view.statistic] if "statistic" in given else [view.statistic, "mean"]:
            other = view.model_copy(update={"latency_mode": mode, "statistic": statistic})
            if spots(own(curves), other):
                if other != view:
                    lacks, has = (f"{each.statistic} of {each.latency_name}" for each in (view, other))
                    _note([f"no level has the {lacks}: the {has} is shown"])
                return other
    return view


def _with_role(curves: list[Curve], view: View) -> list[Curve]:
    """The curves that the normalisation is defined for; those left out are named."""

    without = [curve.label for curve in curves if not curve.has_role(view)]
    if len(without) == len(curves):
        raise UsageError(f"--per-role {view.role}: no experiment has {view.role} GPUs of its own; leave it out")
    if without:
        print(f"Left out, with no {view.role} GPUs of their own: {', '.join(without)}\n")
    return [curve for curve in curves if curve.has_role(view)]


def _plot_path(path: Path | None, kind: str | None) -> Path:

    path = Path("out/viz") if path is None else path
    suffix = path.suffix.lower().removeprefix(".")
    try:
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False  # told where it is tried
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


def _gpus(named: Mapping[str, int], paths: list[Path], flag: str) -> dict[Path, int]:
    """Folder -> the GPUs that ``--gpus`` gives it. A name of more parts counts before a shorter one."""
    from pdlab.core.text import choices

    sizes: dict[Path, tuple[int, int]] = {}
    for name, count in named.items():
        meant = [path for path in paths if _is_called(path, name)]
        if not meant:
            known = [path.resolve().name for path in paths]
            raise UsageError(f"--gpus {name}={count}: no folder of {flag} is called {name!r}; {choices(name, known)}")
        for path in meant:
            sizes[path] = max(sizes.get(path, (0, 0)), (len(Path(name).parts), count), key=lambda each: each[0])
    return {path: count for path, (_, count) in sizes.items()}


def _is_called(path: Path, name: str) -> bool:
    """Whether the folder's path ends in ``name``, or ``name`` is a path to it."""
    parts = Path(name).parts
    ends = path.resolve().parts[-len(parts) :] == parts if parts else False
    return ends or Path(name).resolve() == path.resolve()
