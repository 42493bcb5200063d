#!/usr/bin/env python3
"""Result folders -> tables, plots and one plain sentence."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.core.arguments import (
    OneLineParser,
    above_zero,
    check_output,
    check_picture,
    distinct,
    exit_code,
    not_for,
    positive,
    share,
)
from pdlab.core.commands import typed
from pdlab.core.gpu_count import DEFAULT_COUNT, add_count_gpus

if TYPE_CHECKING:
    from pdlab.analysis.curves import Curve, View
    from pdlab.analysis.loading import Loaded
    from pdlab.results.chaos import Chaos


DESCRIPTION = """\
Compare experiments: TPOT and TTFT against load, and throughput against latency, as plots and tables.

The last lines compare whole curves: the mean ratio of throughput, TTFT and TPOT over the loads that two
deployments share, with an interval from the repeats. Within latencies of your own: --at.

Throughput is per node (8 GPUs, see --gpus-per-node), so that deployments of different sizes can be
compared; on a CPU cluster an engine rank stands for a GPU. The yellow band and the rings are the Pareto
frontier: points that no other point of the same kind of load beats in both latency and throughput. A
crossed hollow point failed a check; it is shown, never compared. Bands and +- are intervals; a winner
is named only where the intervals allow it.
"""

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
DEFAULT_STATISTIC = "p50"


def parser() -> argparse.ArgumentParser:
    """The command line; importing nothing heavy, so that --help answers at once."""
    p = OneLineParser(
        prog="viz.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = p.add_argument_group("which results")
    which.add_argument(
        "--exps",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="experiment folders: of run_bm.sh, of a whole bench run, or as published (concN.json, concN_rrR.json)",
    )
    which.add_argument(
        "--audit",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="in place of a plot: what in these folders would make a plot of them wrong; exit code 3 when something is",
    )
    which.add_argument(
        "--gpus",
        action="append",
        default=[],
        metavar="NAME=N",
        help="the number of GPUs of every folder whose path ends in NAME, if neither a manifest nor its name has it "
        "(a/NAME tells it from b/NAME); repeatable",
    )
    shown = p.add_argument_group("what is shown")
    shown.add_argument(
        "--use-normalized",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="throughput per node (default), or with --no-use-normalized of the whole deployment",
    )
    shown.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="GPUs that make a node (default 8); 1: per GPU"
    )
    shown.add_argument(
        "--per-role",
        choices=["all", "prefill", "decode"],
        default="all",
        help="count all GPUs (default), or those of prefill or decode alone; collocated experiments are then left out",
    )
    shown.add_argument(
        "--latency-mode",
        choices=["token", "first_token", "chunk"],
        default=None,
        help="latency of the throughput plot: token = TPOT (default), first_token = TTFT (default where no level has a "
        "TPOT), chunk = (chunk size - 1) * TPOT + TTFT",
    )
    shown.add_argument(
        "--chunk-size", type=positive, default=None, metavar="TOKENS", help="with --latency-mode chunk (default 16)"
    )
    shown.add_argument(
        "--use-interactivity",
        action="store_true",
        help="1000 / TPOT in tokens/s per user in place of the latency (higher is better)",
    )
    shown.add_argument(
        "--throughput-metric",
        choices=["output", "input", "total"],
        default="output",
        help="which tokens are counted (default output); requests/s are always written at the points",
    )
    shown.add_argument(
        "--stat",
        choices=["mean", "p50", "p90", "p95", "p99"],
        default=None,
        help="which statistic of TTFT and TPOT over the requests of a level (default p50, the median; where no level "
        "has it, the mean)",
    )
    shown.add_argument(
        "--confidence", type=share, default=0.95, metavar="P", help="level of intervals and verdicts (default 0.95)"
    )
    add_count_gpus(shown)
    answers = p.add_argument_group("what is answered")
    answers.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="BOUNDS",
        help="which configuration serves most with tpot_ms=12,ttft_p95_ms=2000: bounds on statistics of a level "
        "(METRIC_STATISTIC_ms, without a statistic that of --stat); repeatable (default: those of the "
        "experiments' files, at:)",
    )
    answers.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="BOUNDS",
        help="which configuration serves most within ttft_ms=2000,tpot_ms=50[,e2el_ms=N]; repeatable "
        "(default: the SLOs that the experiments searched for)",
    )
    answers.add_argument(
        "--slo-quantile",
        type=share,
        metavar="Q",
        help="share of requests that must be within every bound of --slo (default 0.95)",
    )
    answers.add_argument(
        "--price-per-gpu-hour", type=above_zero, default=None, metavar="PRICE", help="adds the cost of a million tokens"
    )
    answers.add_argument(
        "--published",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="tables that others published, as CSV (docs/metrics.md has the columns): shown beside, never ranked",
    )
    made = p.add_argument_group("what is made")
    made.add_argument(
        "--log-latency",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="logarithmic latency axes (default: where the values span more than 20 times, or one curve reaches three "
        "times beyond all others)",
    )
    made.add_argument(
        "--log-concurrency",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="logarithmic (base 2) load axes (default: where more than half of the loads would lie in the first tenth)",
    )
    made.add_argument(
        "--plot-path", type=Path, default=None, metavar="FILE", help="where the plot goes (default out/viz.png)"
    )
    made.add_argument(
        "--note",
        action="append",
        default=[],
        metavar="TEXT",
        help="a line under the plot and the tables, for what the folders do not tell; repeatable",
    )
    made.add_argument("--no-plot", action="store_true", help="tables and reading only")
    made.add_argument(
        "--report",
        type=Path,
        default=None,
        metavar="FILE",
        help="one self-contained HTML file with all of it, in place of the plot and the printed tables "
        "(add --plot-path or --show-tables to have these as well)",
    )
    made.add_argument(
        "--show-tables",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print the tables, raw and per node (default yes; no with --report)",
    )
    made.add_argument(
        "--format", choices=["png", "svg", "pdf"], default=None, help="default: the suffix of --plot-path, else png"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for bad input."""

    def run() -> int:
        args = parser().parse_args(argv)
        if args.audit:
            return _audit(args)
        _show(args, sys.argv[1:] if argv is None else argv)
        return 0

    return exit_code(run)


def _audit(args: argparse.Namespace) -> int:
    from pdlab.analysis.audit import rules
    from pdlab.core.errors import UsageError
    from pdlab.results.published_folders import require_folder
    from pdlab.results.store import experiment_folders, unfinished

    if args.exps:
        raise UsageError("--audit examines folders and draws nothing; leave --exps out")
    drawn = [f"--{name.replace('_', '-')}" for name in vars(args) if name not in ("audit", "exps", "gpus")]
    not_for(args, parser(), drawn, "--audit, which draws nothing")
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


def _show(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from pdlab.analysis import curves as analysis
    from pdlab.analysis import goodput, loading, published_tables, ranking
    from pdlab.cli import whole_nodes
    from pdlab.core.bounds import parse_bounds
    from pdlab.core.errors import UsageError
    from pdlab.core.schema import validate
    from pdlab.core.workload import parse_slo
    from pdlab.report import chaos as chaos_report
    from pdlab.report import sections, soaks, tables, timelines, verdicts
    from pdlab.results import chaos as chaos_results
    from pdlab.results.store import bounds_in_files, experiment_folders, stopped, tuning_of, unfinished

    if args.chunk_size is not None and args.latency_mode != "chunk":
        raise UsageError("--chunk-size goes with --latency-mode chunk; add it, or leave --chunk-size out")
    if not args.use_normalized and args.gpus_per_node != parser().get_default("gpus_per_node"):
        raise UsageError(
            "--gpus-per-node is for throughput per node, which --no-use-normalized turns off: leave one out"
        )
    if not args.use_normalized and args.per_role != "all":
        raise UsageError("--per-role counts GPUs per node, which --no-use-normalized turns off: leave one out")
    if args.count_gpus != DEFAULT_COUNT and not args.use_normalized and args.price_per_gpu_hour is None:
        raise UsageError("--count-gpus is for throughput per node, which --no-use-normalized turns off: leave one out")
    if args.slo_quantile is not None and not args.slo:
        raise UsageError("--slo-quantile is for --slo, which is not given: add --slo, or leave --slo-quantile out")
    if args.use_interactivity and args.latency_mode not in (None, "token"):
        raise UsageError("--use-interactivity is 1000/TPOT: it goes with --latency-mode token alone")
    if args.no_plot and (args.plot_path or args.format):
        raise UsageError("--no-plot makes no file; leave out --plot-path and --format, or --no-plot")
    view = validate(
        analysis.View,
        {
            "latency_mode": args.latency_mode or "token",
            "chunk_size": analysis.DEFAULT_CHUNK if args.chunk_size is None else args.chunk_size,
            "use_interactivity": args.use_interactivity,
            "throughput_metric": args.throughput_metric,
            "statistic": args.stat or DEFAULT_STATISTIC,
            "normalized": args.use_normalized,
            "gpus_per_node": args.gpus_per_node,
            "role": args.per_role,
            "count": args.count_gpus,
            "confidence": args.confidence,
        },
        where="the flags",
        names={"gpus_per_node": "--gpus-per-node", "chunk_size": "--chunk-size", "confidence": "--confidence"},
    )
    if args.no_plot:
        not_for(args, parser(), ["--log-concurrency"], "--no-plot")
        if args.report is None:
            not_for(args, parser(), ["--log-latency"], "--no-plot")
    if twice := [text for text in args.slo if args.slo.count(text) > 1]:
        raise UsageError(f"--slo {twice[0]} is given twice; give it once")
    plot_path = _plot_path(args.plot_path, args.format)
    if args.report is not None and args.report.suffix.lower() not in (".html", ".htm"):
        example = args.report.with_suffix(".html") if args.report.name else "report.html"
        raise UsageError(f"--report {args.report}: give an .html file, for example {example}")
    show_tables = args.report is None if args.show_tables is None else args.show_tables
    draw = not args.no_plot and (args.report is None or args.plot_path is not None or args.format is not None)
    if not args.exps:
        raise UsageError("--exps is needed: the folders to compare (or --audit and the folders to examine)")
    at = [parse_bounds(text, view.statistic) for text in args.at]
    if twice := [text for text, bounds in zip(args.at, at, strict=True) if at.count(bounds) > 1]:
        raise UsageError(f"--at {twice[0]} is given twice; give it once")
    slos = [parse_slo(text, 0.95 if args.slo_quantile is None else args.slo_quantile) for text in args.slo]
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

        scales = {"log_latency": args.log_latency, "log_load": args.log_concurrency}
        plots.draw(curves, view, plot_path, **scales, remarks=[*args.note, *([doubt] if doubt else [])])
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
    args: argparse.Namespace, argv: Sequence[str], folders: Sequence[Path], plot_path: Path | None, *, show_tables: bool
) -> None:
    """Faults made under load alone: there is no load level to compare."""
    from pdlab.report import chaos as chaos_report
    from pdlab.report import html
    from pdlab.results import chaos as chaos_results

    kept = {"exps", "plot_path", "format", "no_plot", "report", "show_tables", "note", "audit"}
    compared = [f"--{name.replace('_', '-')}" for name in vars(args) if name not in kept]
    not_for(args, parser(), compared, "folders of faults, which have no load levels")
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


def _view_of_what_is_known(curves: list[Curve], view: View, args: argparse.Namespace) -> View:
    """The view; where no level has its latency, one that some level has, as far as the flags leave that open."""
    from pdlab.analysis.curves import own
    from pdlab.analysis.ranking import spots

    modes = ["token"] if args.use_interactivity else ["token", "first_token"]
    for mode in [args.latency_mode] if args.latency_mode else modes:
        for statistic in [args.stat] if args.stat else [DEFAULT_STATISTIC, "mean"]:
            other = view.model_copy(update={"latency_mode": mode, "statistic": statistic})
            if spots(own(curves), other):
                if other != view:
                    lacks, has = (f"{each.statistic} of {each.latency_name}" for each in (view, other))
                    _note([f"no level has the {lacks}: the {has} is shown"])
                return other
    return view


def _with_role(curves: list[Curve], view: View) -> list[Curve]:
    """The curves that the normalisation is defined for; those left out are named."""
    from pdlab.core.errors import UsageError

    without = [curve.label for curve in curves if not curve.has_role(view)]
    if len(without) == len(curves):
        raise UsageError(f"--per-role {view.role}: no experiment has {view.role} GPUs of its own; leave it out")
    if without:
        print(f"Left out, with no {view.role} GPUs of their own: {', '.join(without)}\n")
    return [curve for curve in curves if curve.has_role(view)]


def _plot_path(path: Path | None, kind: str | None) -> Path:
    from pdlab.core.errors import UsageError

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


def _gpus(texts: list[str], paths: list[Path], flag: str) -> dict[Path, int]:
    """Folder -> the GPUs that ``--gpus`` gives it. A name of more parts counts before a shorter one."""
    from pdlab.core.errors import UsageError
    from pdlab.core.text import choices

    sizes: dict[Path, tuple[int, int]] = {}
    names: list[str] = []
    for text in texts:
        name, _, count = text.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,6}", count) or int(count) < 1:
            raise UsageError(f"--gpus {text}: expected NAME=N with N at least 1, for example --gpus my-folder=8")
        meant = [path for path in paths if _is_called(path, name)]
        if not meant:
            known = [path.resolve().name for path in paths]
            raise UsageError(f"--gpus {text}: no folder of {flag} is called {name!r}; {choices(name, known)}")
        if name in names:
            raise UsageError(f"--gpus {text}: {name} is given twice; keep one")
        names.append(name)
        for path in meant:
            sizes[path] = max(sizes.get(path, (0, 0)), (len(Path(name).parts), int(count)), key=lambda each: each[0])
    return {path: count for path, (_, count) in sizes.items()}


def _is_called(path: Path, name: str) -> bool:
    """Whether the folder's path ends in ``name``, or ``name`` is a path to it."""
    parts = Path(name).parts
    ends = path.resolve().parts[-len(parts) :] == parts if parts else False
    return ends or Path(name).resolve() == path.resolve()
