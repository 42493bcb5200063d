#!/usr/bin/env python3
"""Predict before a GPU is booked: which P:D ratio, TP degrees and placement to run; see --help."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.core.arguments import (
    LENGTHS_HELP,
    MAX_LOAD,
    MIN_RATE_RPS,
    OneLineParser,
    above_zero,
    check_folder,
    check_picture,
    check_writable,
    distinct,
    exit_code,
    lengths,
    not_for,
    numbers,
    positive,
    seed,
    share,
    whole,
)
from pdlab.core.errors import UsageError
from pdlab.core.files import write_output
from pdlab.core.gpu_count import DEFAULT_COUNT, add_count_gpus

if TYPE_CHECKING:
    from pdlab.analysis.goodput_map import Served
    from pdlab.core.catalog import ModelShape
    from pdlab.core.gpu_count import Count
    from pdlab.core.nodes import ClusterView
    from pdlab.core.workload import Slo, Workload
    from pdlab.plan.planner import Candidate, Plan
    from pdlab.plan.scene import Scene
    from pdlab.results.schema import Experiment
    from pdlab.sim.hardware import Hardware
    from pdlab.sim.level import Trace
    from pdlab.sim.simulator import Prompts


DEFAULT_MODEL = "gpt-oss-120b"
MAX_GPUS = 1024  # more are copies of what is best on fewer
MAX_IN_FLIGHT = 20_000
MOST_UNREAD = 12  # names of columns in a note
MAPPED = 5  # of the ranking, in a goodput map
SHOWN_AFTER_S, SHOWN_EVERY_S = 2.0, 5.0

EPILOG = """\
examples:
  python plan.py --gpus 16 --itl 5000 --otl 250 --slo-ttft-ms 2000 --slo-tpot-ms 12
      rank what fits 16 H100 for prompts of 5000 tokens and answers of 250
  python plan.py --gpus 8 --slo-ttft-ms 2000 --slo-tpot-ms 12 --placement pack --out planned/
      and write the best ones as files for launch_gptoss.py --config
  python plan.py --gpus 8 --explain pd-pack-p1xtp2-d1xtp2 --concurrency 8,32
      where the time of a request goes
  python plan.py --gpus 32 --fluid --lengths mixes:5000:250,1000:1000,every=60 --slo-ttft-ms 2000 --slo-tpot-ms 12
      whether roles that follow a mix that moves serve more than any fixed split
  python plan.py --compare bm_results/pd-pack-p1xtp2-d1xtp2
      measured beside predicted, with the error
  python plan.py --predict configurations.csv --out predicted.csv
      predictions for your own list; the columns are in docs/planning.md

Everything printed is simulated, from step times fitted to measured runs; docs/model.md says how
well they predict runs that they were not fitted to. Check the winner with run_bm.sh before you buy.
"""


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(
        prog="plan.py",
        description="Predict throughput and latency of collocated and PD deployments, and rank them for an SLO.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = p.add_argument_group("what to serve, on what")
    what.add_argument(
        "--model",
        help=f"a model of configs/models/ (default {DEFAULT_MODEL}; with --compare the one that was measured)",
    )
    what.add_argument(
        "--hardware",
        default="h100-vllm-0.11",
        help="calibrated step times, a name of configs/catalog/ or a file of pdlab calibrate (default %(default)s)",
    )
    what.add_argument(
        "--node",
        default="p5.48xlarge",
        metavar="NAME|FILE",
        help="node type of configs/clusters/, or a cluster's YAML file of nodes that are alike (default %(default)s)",
    )
    what.add_argument(
        "--gpus",
        type=_gpus,
        default=8,
        metavar="N",
        help="GPUs to plan for (default 8)",
    )
    load = p.add_argument_group("workload")
    load.add_argument("--itl", type=positive, metavar="TOKENS", help="input tokens per request (default 5000)")
    load.add_argument("--otl", type=positive, metavar="TOKENS", help="output tokens per request (default 250)")
    load.add_argument("--lengths", type=lengths, metavar="KIND", help=LENGTHS_HELP)
    load.add_argument("--workload", metavar="FILE", help="a Workload in YAML, in place of --itl, --otl and --lengths")
    load.add_argument("--rate", type=_rate, metavar="RPS", help="plan for this request rate over all GPUs")
    load.add_argument(
        "--burstiness",
        type=above_zero,
        metavar="B",
        help="with --rate: shape of the gamma-distributed gaps (default 1: Poisson; below 1 burstier)",
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="plan for these requests: arrival_s, input_tokens, output_tokens (docs/planning.md)",
    )
    load.add_argument(
        "--concurrency",
        type=_in_flight,
        metavar="N[,N...]",
        help="plan for these numbers of requests in flight over all GPUs (default: a ladder per GPU)",
    )
    load.add_argument(
        "--prefix-hit-rate",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of each prompt that the prefix cache answers (default 0)",
    )
    slo = p.add_argument_group("SLO: what a request must meet to count as goodput (unbounded where not given)")
    slo.add_argument("--slo-ttft-ms", type=above_zero, metavar="MS", help="time to first token")
    slo.add_argument("--slo-tpot-ms", type=above_zero, metavar="MS", help="time per output token")
    slo.add_argument("--slo-e2el-ms", type=above_zero, metavar="MS", help="end-to-end latency")
    slo.add_argument(
        "--slo-quantile",
        type=share,
        metavar="Q",
        help="share of requests that must meet it (default 0.95)",
    )
    how = p.add_argument_group("how")
    how.add_argument(
        "--placement",
        choices=["pack", "spread", "any"],
        default="any",
        help="default any: pack where one node takes it",
    )
    how.add_argument(
        "--assume-merged",
        action="store_true",
        help="scattered KV blocks within a node are not copied one by one",
    )
    how.add_argument(
        "--blocks",
        type=Path,
        metavar="FILE",
        help="what they cost on your nodes, in place of that guess: the --json of test_nixl_connector_ray.py "
        "--strategy pack --compare-blocks",
    )
    add_count_gpus(how)
    how.add_argument("--top", type=positive, default=3, metavar="N", help="configurations to hand over (default 3)")
    how.add_argument(
        "--fidelity",
        choices=["simulator", "vllm"],
        default="simulator",
        help="vllm: these configurations once more, with vLLM's own scheduler in every engine; needs vLLM, and up to a "
        "minute each",
    )
    how.add_argument("--seed", type=seed, default=0, help="of the simulation (default 0)")
    how.add_argument("--out", type=Path, metavar="PATH", help="folder for configuration files; with --predict a CSV")
    how.add_argument("--plot", type=Path, metavar="FILE", help="draw the predicted curves (png, svg or pdf)")
    how.add_argument(
        "--goodput-map",
        type=Path,
        metavar="FILE",
        help="draw goodput per GPU under Poisson arrivals over bounds on TTFT and TPOT (png, svg or pdf)",
    )
    how.add_argument(
        "--measured",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="with --goodput-map: experiments at request rates, which stand in for what is simulated of them",
    )
    how.add_argument(
        "--price-per-gpu-hour", type=above_zero, metavar="PRICE", help="with --goodput-map: cost of a million tokens"
    )
    instead = p.add_argument_group("instead of a ranking")
    other = instead.add_mutually_exclusive_group()
    other.add_argument("--explain", metavar="LABEL", help="where a request's time goes in one deployment")
    other.add_argument("--compare", nargs="+", type=Path, metavar="DIR", help="measured experiments beside predictions")
    other.add_argument(
        "--fluid",
        action="store_true",
        help="whether roles that follow the load (launch_gptoss.py --pd-fluid) serve more than every fixed P:D split",
    )
    other.add_argument("--predict", type=Path, metavar="CSV", help="predict every row of a CSV")
    instead.add_argument(
        "--prompts",
        choices=["fresh", "repeated"],
        help="with --compare: whether levels repeat prompts (default: published runs do, ours do not)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    from pdlab.core.catalog import load_model
    from pdlab.sim.hardware import load_hardware

    _applies(args)
    hardware = load_hardware(args.hardware)
    if args.predict:
        return _predict(args, hardware)
    if args.compare:
        return _compare(args, hardware)
    args.model = args.model or DEFAULT_MODEL
    shape = load_model(args.model)
    if shape is None:
        raise _unknown_model(args.model)
    if args.explain:
        return _explain(args, hardware, shape)
    if args.fluid:
        return _fluid(args, hardware, shape)
    return _rank(args, hardware, shape)


def _unknown_model(name: str) -> UsageError:
    from pdlab.core.catalog import known_models
    from pdlab.core.text import choices

    return UsageError(
        f"--model {name}: not in configs/models/; {choices(name, known_models())} (or add its shape there)"
    )


def _gpus(text: str) -> int:
    try:
        return whole(1, MAX_GPUS, "a number of GPUs")(text)
    except argparse.ArgumentTypeError as error:
        more = f" ({MAX_GPUS} take minutes to search; more are copies of what is best there)" if text.isdigit() else ""
        raise argparse.ArgumentTypeError(f"{error}{more}") from error


def _rate(text: str) -> float:
    value = above_zero(text)
    if not MIN_RATE_RPS <= value <= MAX_LOAD:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from {MIN_RATE_RPS:g} to {MAX_LOAD} requests/s")
    return value


def _in_flight(text: str) -> tuple[int, ...]:
    counts = numbers(text)
    if counts[-1] > MAX_IN_FLIGHT:
        raise argparse.ArgumentTypeError(
            f"{counts[-1]} requests in flight are too many to simulate, at most {MAX_IN_FLIGHT}"
        )
    return counts


def _applies(args: argparse.Namespace) -> None:
    """Flags that would have no effect are refused. Raises UsageError."""
    load = [
        "--itl",
        "--otl",
        "--lengths",
        "--workload",
        "--rate",
        "--burstiness",
        "--trace",
        "--concurrency",
        "--prefix-hit-rate",
    ]
    slo = ["--slo-ttft-ms", "--slo-tpot-ms", "--slo-e2el-ms", "--slo-quantile"]
    cluster = ["--node", "--gpus", "--placement", "--top", "--fidelity"]
    count = ["--count-gpus"]
    blocks = ["--assume-merged", "--blocks", "--goodput-map", "--measured", "--price-per-gpu-hour"]
    if args.predict:
        of_columns = ["--itl", "--otl", "--lengths", "--rate", "--burstiness", "--concurrency", "--prompts"]
        not_for(args, parser(), of_columns, "--predict, whose file has columns for it")
        unused = ["--plot", "--seed", *cluster, *load, *slo, *blocks, *count]
        not_for(args, parser(), unused, "--predict, which predicts each row of a file as it is")
    elif args.compare:
        not_for(
            args,
            parser(),
            ["--out", *cluster, *load, *slo, *blocks],
            "--compare, which predicts the measured runs",
        )
    elif args.explain:
        not_for(args, parser(), ["--plot", "--out", "--prompts", *cluster, *blocks[2:], *count], "--explain")
    elif args.fluid:
        unused = [
            "--plot",
            "--out",
            "--prompts",
            "--top",
            "--fidelity",
            "--placement",
            "--rate",
            "--burstiness",
            "--concurrency",
        ]
        not_for(args, parser(), [*unused, "--trace", *blocks[2:], *count], "--fluid")
    else:
        not_for(args, parser(), ["--prompts"], "a ranking: it is for --compare")
        if args.goodput_map is None:
            not_for(args, parser(), ["--measured", "--price-per-gpu-hour"], "a plan without --goodput-map")
    if args.blocks and args.assume_merged:
        raise UsageError("--blocks measured what --assume-merged guesses: leave --assume-merged out")
    if args.rate and args.concurrency:
        raise UsageError("--rate and --concurrency exclude each other: plan for one load")


def _slo(args: argparse.Namespace) -> Slo:
    from pdlab.core.schema import validate
    from pdlab.core.workload import Slo

    bounds = {name: getattr(args, f"slo_{name}_ms") for name in ("ttft", "tpot", "e2el")}
    if args.slo_quantile is not None and not any(bounds.values()):
        raise UsageError("--slo-quantile is the share within --slo-ttft-ms, --slo-tpot-ms or --slo-e2el-ms: give one")
    return validate(
        Slo,
        {f"{name}_s": ms / 1000 for name, ms in bounds.items() if ms is not None}
        | {"quantile": 0.95 if args.slo_quantile is None else args.slo_quantile},
        where="the SLO",
    )


def _workload(args: argparse.Namespace) -> Workload:
    from pdlab.core.lengths import beside
    from pdlab.core.schema import load_yaml
    from pdlab.core.workload import Workload, workload_of_flags

    if not 0 <= args.prefix_hit_rate < 1:
        raise UsageError(f"--prefix-hit-rate {args.prefix_hit_rate:g} must be from 0 to below 1")
    if args.workload:
        if args.itl or args.otl or args.lengths:
            raise UsageError("--workload replaces --itl, --otl and --lengths; give one or the other")
        path = Path(args.workload)
        return load_yaml(path, Workload, lambda data: beside(data, path.parent))
    return workload_of_flags(args.itl, args.otl, args.lengths)


def _trace(args: argparse.Namespace) -> Trace | None:
    """The requests of --trace, which say lengths and rate themselves."""
    if args.trace is None:
        return None
    from pdlab.sim import traces

    for name in ("rate", "concurrency", "itl", "otl", "lengths", "workload", "burstiness"):
        if getattr(args, name):
            raise UsageError(f"--trace says lengths and moments of its requests itself; leave --{name} out")
    return traces.read(args.trace)


def _view(args: argparse.Namespace, hardware: Hardware) -> ClusterView:
    """As many nodes of the asked kind as the GPUs need; the last one only in part where they are no multiple. Raises
    UsageError for nodes that the hardware file is not of.

    For hardware that is CPUs: nodes of this machine, on which an engine rank's slot stands for a GPU.
    """
    from pdlab.core.catalog import load_cluster
    from pdlab.core.nodes import ClusterView
    from pdlab.core.text import choices
    from pdlab.plan.extrapolation import require_node

    of_file = args.node.endswith((".yaml", ".yml"))
    try:
        found = load_cluster(args.node if of_file else f"{args.node}-x2").engine_nodes
    except UsageError as error:
        if of_file:
            raise
        raise UsageError(
            f"--node {args.node}: no configs/clusters/{args.node}-x2.yaml; {choices(args.node, _nodes())}"
        ) from error
    base = found[0]
    for each in found:
        require_node(hardware, each, args.node)
    if hardware.cpu:
        not_for(args, parser(), ["--node"], f"--hardware {args.hardware}, which is CPUs of this machine")
        base = base.model_copy(update={"gpus": hardware.gpus_per_node})
    count = -(-args.gpus // base.gpus)
    spread = args.placement == "spread"
    nodes = []
    for number in range(1, max(count, 2 if spread else 1) + 1):
        name = f"node-{number}"
        free = base.gpus if spread else min(base.gpus, args.gpus - (number - 1) * base.gpus)
        changes = {"id": name, "head": number == 1, "labels": {"pdlab/node": name}, "free_gpus": tuple(range(free))}
        nodes.append(base.model_copy(update=changes))
    kind = "local Ray node" if hardware.cpu else Path(args.node).stem if of_file else args.node
    return ClusterView(name=f"{len(nodes)} x {kind}", nodes=tuple(nodes))


def _nodes() -> list[str]:
    from pdlab.core.files import CONFIGS

    return [path.stem.removesuffix("-x2") for path in (CONFIGS / "clusters").glob("*-x2.yaml")]


def _scene(args: argparse.Namespace, hardware: Hardware, shape: ModelShape, slo: Slo) -> Scene:
    from pdlab.core.workload import Workload
    from pdlab.plan.scene import Scene
    from pdlab.sim.kv_transfer import with_scattered_blocks

    if args.burstiness and not args.rate:
        raise UsageError("--burstiness is of arrivals at a rate; give --rate too")
    trace, workload = _trace(args), _workload(args)
    if trace is not None:
        means = (sum(tokens) / len(tokens) for tokens in (trace.input_tokens, trace.output_tokens))
        workload = Workload(**dict(zip(("input_tokens", "output_tokens"), map(round, means), strict=True)))
    blocks = None
    if args.blocks is not None:
        from pdlab.plan.scattered_blocks import read

        blocks = read(args.blocks, shape.name, workload.sent_input_tokens, cpu=hardware.cpu)
        hardware = with_scattered_blocks(hardware, shape, blocks.extra_s_per_token)
    return Scene(
        hardware,
        shape,
        workload,
        slo,
        args.prefix_hit_rate,
        args.seed,
        args.burstiness or 1.0,
        trace,
        not args.assume_merged,
        blocks,
        args.count_gpus,
    )


def _rank(args: argparse.Namespace, hardware: Hardware, shape: ModelShape) -> int:
    from dataclasses import replace

    from pdlab.core.mixes import Mixes
    from pdlab.plan import next_steps
    from pdlab.plan.planner import plan
    from pdlab.plan.text import ranking

    if args.plot:
        check_picture(args.plot, "--plot")
    if args.goodput_map:
        check_picture(args.goodput_map, "--goodput-map")
        if args.trace:
            raise UsageError("--goodput-map is of Poisson arrivals at growing rates; leave --trace out")
    if args.out:
        check_folder(args.out, "--out")
    if args.fidelity == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UsageError("--fidelity vllm runs vLLM's own code, which is not installed here; leave it out")
    measured = _measured(args) if args.measured else []
    view = _view(args, hardware)
    scene = replace(_scene(args, hardware, shape, _slo(args)), nic=view.engine_nodes[0].nic.kind)
    if isinstance(scene.workload.lengths, Mixes):
        raise UsageError(
            f"--lengths {scene.workload.lengths.flag_value}: a ranking looks at closed loops, in which a mix cannot "
            "move with time; add --fluid, or rank for each mix by itself"
        )
    progress = _Progress()
    ranked_plan = plan(
        scene,
        args.model,
        view,
        args.gpus,
        placement=None if args.placement == "any" else args.placement,
        concurrencies=args.concurrency,
        rate_rps=scene.trace.rate_rps if scene.trace else args.rate,
        on_progress=progress,
    )
    progress.end()
    print(ranking(ranked_plan, scene, view, args.gpus))
    best = [candidate for candidate in ranked_plan.candidates if candidate.best][: args.top]
    print()
    if args.fidelity == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from pdlab.plan.second_fidelity import beside

        print(beside(scene, best) + "\n")
    model_flag = "" if args.model == DEFAULT_MODEL else f" --model {shlex.quote(args.model)}"
    model_flag += (
        "" if args.hardware == parser().get_default("hardware") else f" --hardware {shlex.quote(args.hardware)}"
    )
    print(
        next_steps.commands(
            best,
            scene.workload,
            None if hardware.cpu else args.node,
            args.out,
            model_flag,
            ranked_plan.best_candidate(collocated=True),
            scene.slo,
            "" if args.count_gpus == DEFAULT_COUNT else f" --count-gpus {args.count_gpus}",
            _extrapolated(scene, ranked_plan.candidates),
        )
    )
    if args.plot:
        collocated = ranked_plan.best_candidate(collocated=True)
        drawn = list(ranked_plan.candidates[: max(args.top, 5)])
        drawn += [collocated] if collocated is not None and collocated not in drawn else []
        beyond = {f"{label} {next_steps.PREDICTED}": found for label, found in _extrapolated(scene, drawn).items()}
        plot(args.plot, next_steps.experiments(drawn, scene.workload), [], hardware, args.count_gpus, beyond)
        print(f"Plot (simulated): {args.plot}")
    if args.goodput_map:
        _draw_map(args, scene, ranked_plan, measured)
    return 0


def _extrapolated(scene: Scene, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Label -> in what it is extrapolated, of those that are."""
    from pdlab.plan.extrapolation import outside_text
    from pdlab.plan.planner import outside

    found = {candidate.deployment.label: outside_text(outside(candidate, scene)) for candidate in candidates}
    return {label: text for label, text in found.items() if text}


def _measured(args: argparse.Namespace) -> list[Served]:
    """Experiments for the map. Raises UsageError for one that is not of this workload, or has no request rates."""
    from dataclasses import replace

    from pdlab.analysis import goodput_map, loading
    from pdlab.analysis.curves import gpus_of
    from pdlab.cli.whole_nodes import counted_gpus
    from pdlab.results.store import experiment_folders

    workload, loads = _workload(args), []
    for loaded in loading.load(experiment_folders(args.measured), {}, every_request=True):
        theirs = loaded.experiment.manifest.workload
        if theirs is not None and theirs.label != workload.label:
            raise UsageError(
                f"--measured {loaded.folder}: is of {theirs.label} tokens, the plan of {workload.label}; "
                "give --itl, --otl and --lengths as measured"
            )
        served = goodput_map.measured(loaded)
        if served is None:
            raise UsageError(
                f"--measured {loaded.folder}: no valid level at a request rate whose requests were kept; measure some "
                "with run_bm.sh -t request-rate"
            )
        gpus = counted_gpus(gpus_of(loaded.experiment), loaded.experiment.manifest.deployment)
        loads.append(replace(served, gpus=gpus.counted(args.count_gpus)))
    return loads


def _draw_map(args: argparse.Namespace, scene: Scene, ranked_plan: Plan, measured: Sequence[Served]) -> None:
    from pdlab.analysis.goodput_map import goodput_map
    from pdlab.plan.open_loop import under_rates
    from pdlab.report.goodput_map import draw

    shown = list(ranked_plan.candidates[: max(args.top, MAPPED)])
    collocated = ranked_plan.best_candidate(collocated=True)
    shown += [collocated] if collocated is not None and collocated not in shown else []
    labels = {served.label for served in measured}
    every = [*measured]
    for candidate in shown:
        if candidate.deployment.label not in labels:
            most_rps = max(outcome.requests_per_s for outcome in candidate.outcomes)
            gpus = candidate.total_gpus / candidate.copies
            every.append(under_rates(scene, candidate.deployment, most_rps, gpus))
    ttft_s = [factor * (scene.slo.ttft_s or 1.0) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    tpot_s = [factor * (scene.slo.tpot_s or 0.016) for factor in (0.5, 0.75, 1.0, 1.5, 2.0)]
    workload = scene.workload
    price = args.price_per_gpu_hour
    of = "used" if args.count_gpus == "used" else "of whole nodes"
    cost = f", and cost of a million output tokens at {price:g} per GPU hour" if price is not None else ""
    draw(
        goodput_map(every, ttft_s, tpot_s, scene.slo.quantile),
        args.goodput_map,
        title=f"Goodput, requests/s per GPU {of}, {scene.slo.quantile:.0%} of requests within both bounds{cost}; "
        f"{scene.shape.name}, {workload.label} tokens, Poisson arrivals; "
        f"hatched: simulated{', extrapolated' if scene.outside() else ''}",
        price_per_gpu_hour=price,
    )
    origin = "measured and simulated" if measured else "simulated"
    print(f"Goodput map ({origin}): {args.goodput_map}")


class _Progress:
    """What is being simulated, on standard error once it takes long: a line that is overwritten on a terminal, else
    one now and then."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, of: int, label: str) -> None:
        now = time.monotonic()
        if now - self._began < SHOWN_AFTER_S:
            return
        text = f"simulating {label} ({done + 1} of {of}, {now - self._began:.0f} s)"
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif now - self._shown >= (SHOWN_EVERY_S if self._shown > self._began else 0.0):
            print(text, file=sys.stderr, flush=True)
            self._shown = now

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _fluid(args: argparse.Namespace, hardware: Hardware, shape: ModelShape) -> int:
    from pdlab.plan.fluid_pools import fluid_plan
    from pdlab.plan.text import fluid

    scene, progress = _scene(args, hardware, shape, _slo(args)), _Progress()
    made = fluid_plan(scene, args.model, args.gpus, progress)
    progress.end()
    print(fluid(made, scene))
    return 0


def _explain(args: argparse.Namespace, hardware: Hardware, shape: ModelShape) -> int:
    from pdlab.core.deployment import Deployment, parse_label
    from pdlab.core.vllm_limits import check_divisibility
    from pdlab.plan.planner import evaluate, sized_alone
    from pdlab.plan.text import explanation

    deployment = Deployment(model=args.model, topology=parse_label(args.explain))
    if deployment.gpus > MAX_GPUS:
        raise UsageError(f"--explain {args.explain}: has {deployment.gpus} GPUs, at most {MAX_GPUS} can be simulated")
    check_divisibility(deployment, shape)
    scene = _scene(args, hardware, shape, _slo(args))
    rate_rps = scene.trace.rate_rps if scene.trace else args.rate
    loads = {"concurrencies": args.concurrency, "rate_rps": rate_rps}
    candidate = evaluate(scene, sized_alone(scene, deployment), deployment.gpus, **loads)
    print(explanation(candidate, scene))
    return 0


def _compare(args: argparse.Namespace, hardware: Hardware) -> int:
    from pdlab.plan import next_steps
    from pdlab.plan.accuracy import median_errors, table
    from pdlab.plan.calibration import compare, loads_in_flight, measured, other_kind
    from pdlab.plan.extrapolation import outside_fit, outside_text, ran_on
    from pdlab.plan.text import errors_of
    from pdlab.results.published_folders import load_experiment
    from pdlab.results.store import experiment_folders

    if args.plot:
        check_picture(args.plot, "--plot")
    points, experiments, predicted, names, rehearsed = [], [], [], [], []
    outside: dict[str, str] = {}
    for folder in distinct(experiment_folders(args.compare), "--compare"):
        experiment = load_experiment(folder)
        published = experiment.manifest.origin == "imported"
        prompts: Prompts = args.prompts or ("repeated" if published else "fresh")
        sweep = measured(experiment, prompts)
        shape = _measured_shape(args.model, sweep.deployment.model, folder)
        names.append(shape.name)
        other = other_kind(hardware, experiment)
        if other:
            print(f"note: {other}: give --hardware", file=sys.stderr)
        points += compare(hardware, shape, sweep)
        outside[experiment.name] = outside_text(
            outside_fit(
                hardware,
                sweep.deployment.model.rpartition("/")[2],
                sweep.deployment,
                [sweep.workload],
                ran_on=ran_on(experiment),
                in_flight_per_gpu=loads_in_flight(sweep),
            )
        )
        if experiment.manifest.rehearsal:
            rehearsed.append(experiment.name)
        if args.plot:
            experiments.append(experiment)
            whole = all(run.steady is None for run in experiment.runs)
            predicted.append(next_steps.as_measured(sweep, hardware, shape, args.seed, whole))
    models = " and ".join(dict.fromkeys(names))
    print(f"predicted for {models} on {hardware.gpu} ({hardware.name}) / measured (error)\n")
    print(table(points))
    if rehearsed:
        print(f"\nrehearsed, not measured (engines simulated by the same model): {', '.join(rehearsed)}")
    errors = median_errors(points, skip_first=False)
    print("\nmedian absolute error here: " + ", ".join(f"{name} {value:.1f} %" for name, value in errors.items()))
    for name, text in outside.items():
        if text:
            print(f"{name} is {text}: the errors of {hardware.name} are of other runs")
    if not all(outside.values()):
        print(f"of {hardware.name} elsewhere: {errors_of(hardware)}")
    if args.plot:
        beyond = {f"{name} {next_steps.PREDICTED}": text for name, text in outside.items() if text}
        plot(args.plot, predicted, experiments, hardware, args.count_gpus, beyond)
        print(f"Plot (measured and simulated): {args.plot}")
    return 0


def _measured_shape(model_flag: str | None, model: str, folder: Path) -> ModelShape:
    """The shape to predict with: of the model that was measured, or of the one that --model names."""
    from pdlab.core.catalog import load_model

    name = model.rpartition("/")[2]
    shape = load_model(model_flag or name)
    if shape is None and model_flag:
        raise _unknown_model(model_flag)
    if shape is None:
        raise UsageError(f"{folder} is of {model}, which is not in configs/models/; name one like it with --model")
    if shape.name != name:
        print(f"note: {folder} is of {model}, predicted as {shape.name}", file=sys.stderr)
    return shape


def _predict(args: argparse.Namespace, hardware: Hardware) -> int:
    from pdlab.plan import csv_predictions, csv_rows

    if args.out is not None:
        check_writable(args.out, "--out")
        if args.out.exists() and args.predict.exists() and args.out.samefile(args.predict):
            raise UsageError(f"--out {args.out} is the CSV that --predict reads, which would be lost: choose another")
    try:
        text = args.predict.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--predict {args.predict}: cannot be read as a text file; give a CSV") from error
    header, rows, requested, unread = csv_rows.read(text, str(args.predict), args.model or DEFAULT_MODEL)
    if unread:
        more = f" and {len(unread) - MOST_UNREAD} more" if len(unread) > MOST_UNREAD else ""
        columns = f"{', '.join(unread[:MOST_UNREAD])}{more}"
        print(f"note: {args.predict}: predictions do not depend on these columns: {columns}", file=sys.stderr)
    predictions = csv_predictions.predict(requested, hardware)
    for line in csv_predictions.refused(requested, predictions):
        print(f"{args.predict}, {line}", file=sys.stderr)
    out = csv_predictions.render(header, rows, predictions)
    if args.out is None:
        print(out, end="")
        return 0
    write_output(args.out, out, "--out")
    print(f"wrote {args.out}: {len(rows)} rows", file=sys.stderr)
    return 0


def plot(
    path: Path,
    predicted: Sequence[Experiment],
    measured: Sequence[Experiment],
    hardware: Hardware,
    count: Count,
    extrapolated: Mapping[str, str],
) -> None:
    """Measured and predicted curves in one picture, predicted ones with bands, but those that are extrapolated (name ->
    in what). Raises StoreError."""
    from pdlab.analysis.curves import View, curves
    from pdlab.cli.whole_nodes import counted
    from pdlab.plan.next_steps import PREDICTED
    from pdlab.report.plots import Band, draw
    from pdlab.sim.hardware import TO_90

    error, bands = hardware.error, {}
    inside = [experiment.name for experiment in predicted if experiment.name not in extrapolated]
    notes = [f"Predicted curves are simulated, with step times of {hardware.name} ({hardware.stack})."]
    if error is not None and inside:
        band = Band(*(math.expm1(TO_90 * percent / 100) for percent in (error.tpot_percent, error.ttft_percent)))
        bands = dict.fromkeys(inside, band)
        notes.append(
            f"Bands: 90 % of cases by the median errors on runs left out of the fit, TPOT {error.tpot_percent:g} %, "
            f"TTFT {error.ttft_percent:g} %."
        )
    for text in dict.fromkeys(extrapolated.values()):
        names = ", ".join(name for name, each in extrapolated.items() if each == text)
        notes.append(f"No band, since how far off they are is not known: {names}: {text}.")
    # Labels of each kind by themselves: told apart by the word, not by folder names.
    drawn = [
        curve if curve.rehearsed else curve.model_copy(update={"label": f"{curve.label}, {word}"})
        for word, group in (("measured", measured), (PREDICTED, predicted))
        for curve in map(counted, curves(group))
    ]
    draw(drawn, View(count=count), path, bands=bands, notes=notes)
