"""Command line of the sweep: ``./run_bm.sh`` or ``python -m pdlab bench``; with ``run FILE`` of a whole
experiment (pdlab.bench.experiment.run), with ``ratio`` of the P:D ratio that the phases imply
(pdlab.analysis.phase_ratio).

Exit codes: 0 every level is valid; 1 the load could not be driven; 2 bad input, which includes a
server that does not answer and a folder that would be overwritten; 3 finished, but some level is
invalid; 130 interrupted (finished levels are kept).
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

from pdlab.bench.fill import FillCache, planned
from pdlab.bench.levels import FINAL_HOLD_S, HOLD_S
from pdlab.bench.measure import title
from pdlab.bench.recovery import RECOVER_S
from pdlab.bench.slo_search import Search
from pdlab.bench.sweep import BASE_URL, SweepOptions, SweepResult, build, run_sweep, with_loads
from pdlab.bench.target import check_name, normal_url
from pdlab.core.arguments import (
    LENGTHS_HELP,
    MAX_HOLD_S,
    MAX_LOAD,
    MAX_REPEATS,
    MAX_REQUESTS,
    MAX_TOKENS,
    OneLineParser,
    above_zero,
    check_folder,
    client_processes,
    exit_code,
    lengths,
    positive,
    seconds,
    seconds_or_none,
    seed,
    share,
    whole,
)
from pdlab.core.commands import typed
from pdlab.core.errors import UsageError
from pdlab.core.length_distribution import LengthDistribution
from pdlab.core.mixes import parse_mixes
from pdlab.core.schema import validate
from pdlab.core.text import aligned, choices
from pdlab.core.workload import Closed, Load, Open, Ramp, WorkloadMode, parse_slo, workload_of_flags
from pdlab.deploy.endpoint import reach
from pdlab.results.schema import Distribution, Run
from pdlab.results.soak import changes

INVALID = 3
EPILOG = """\
examples:
  ./run_bm.sh
      the default levels against what launch_gptoss.py serves on this machine
  ./run_bm.sh -e collocated-4xtp2 -c 4,16,64 --itl 5000 --otl 250 --repeats 3
      three levels, each three times, so that noise can be told from difference
  ./run_bm.sh --slo ttft_ms=2000,tpot_ms=50
      the highest request rate within an SLO
  ./run_bm.sh run pd-ratio --dry-run
      a whole experiment of configs/sweeps/ (./run_bm.sh run --help)
  ./run_bm.sh ratio --prefill bm_results/p --decode bm_results/d
      the P:D ratio that measured phases imply (./run_bm.sh ratio --help)

Exit codes: 0 all levels valid, 1 failed, 2 bad input or no server, 3 some level invalid, 130 interrupted.
Metrics: docs/metrics.md; gates: docs/methodology.md.
"""


def parser() -> argparse.ArgumentParser:
    """The flags; the published script's are accepted as they were."""
    every = ",".join(str(value) for value in ALL_CONCURRENCIES)
    rates = ",".join(f"{value:g}" for value in ALL_RATES_RPS)
    flags = OneLineParser(
        prog="run_bm.sh",
        description="Sweep load levels against a running deployment; results go to OUT/EXP_NAME/.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = flags.add_argument_group("load").add_argument
    load(
        "-t",
        "--type",
        choices=("concurrency", "request-rate", "ramp"),
        help="closed loop, open loop, or open loop of a growing rate (default: by what is given, else concurrency)",
    )
    load("-c", "--concurrency", metavar="all|N,N,...", help=f"requests in flight; all = {every} (default)")
    load("-r", "--request-rate", metavar="all|R,R,...", help=f"arrivals per second; all = {rates} (default)")
    load("--concurrency-per-gpu", metavar="N,N,...", help="requests in flight per GPU of the deployment")
    load("--ramp", metavar="START:END[,...]", help="arrivals per second, growing from START to END over a level")
    load("--ramp-shape", choices=("linear", "exponential"), help="how a ramp grows (default linear)")
    load("--burstiness", type=above_zero, metavar="B",
        help="open loop: shape of the gaps' gamma distribution (default 1: Poisson)")  # fmt: skip
    load("--client-processes", type=client_processes, metavar="N",
        help="a saturated load generator may grow to N processes (default: half of the cores)")  # fmt: skip
    request = flags.add_argument_group("requests").add_argument
    request("--itl", "--isl", "--input-len", dest="itl", type=positive, metavar="TOKENS",
        help="input tokens of a request (default 5000)")  # fmt: skip
    request("--otl", "--osl", "--output-len", dest="otl", type=positive, metavar="TOKENS",
        help="output tokens of a request (default 250)")  # fmt: skip
    request("--lengths", type=lengths, metavar="KIND", help=LENGTHS_HELP)
    request("--mixes", metavar="INPUT:OUTPUT[@RATE],...",
        help="mixes that take turns, each at RATE times the request rate (default 1): the short form of --lengths "
        "mixes:..., which can drift and have a flash crowd too")  # fmt: skip
    request("--mix-every", type=above_zero, metavar="S", help="with --mixes: each comes for S seconds (default 60)")
    request("--mode", choices=get_args(WorkloadMode), default="mixed",
        help="mixed ITL:OTL (default); prefill-only ITL:1; decode-only ITL:OTL on a deployment of launch_gptoss.py "
        "--decode-bench; decode-approx 1:OTL on any, which leaves out the cost of a real context")  # fmt: skip
    request("--shared-prefix", type=whole(0, MAX_TOKENS), default=0, metavar="TOKENS",
        help="of the input tokens so many are the same in every request (default 0)")  # fmt: skip
    request("--prompts-per-level", type=whole(1, MAX_REQUESTS), metavar="N",
        help="requests of a level (default: 10 per unit of concurrency, or what a held rate takes)")  # fmt: skip
    request("--hold-s", type=seconds, metavar="S",
        help="hold a request rate for S seconds, or 10 times E2EL where that is longer (default 60)")  # fmt: skip
    request("--final", action="store_true", help="hold every request rate for 600 s: figures to publish")
    request("--fill-cache", choices=get_args(FillCache), default="auto",
        help="fill every engine's KV pool once before the first level, with prompts of one token each: auto (default; "
        "where that takes at most 3 minutes, and not on CPUs of this machine), yes, no")  # fmt: skip
    request("--soak", type=above_zero, metavar="MINUTES",
        help="hold the one load for MINUTES and show TPOT and TTFT over time")  # fmt: skip
    request("--repeats", type=whole(1, MAX_REPEATS), default=1, metavar="N",
        help="measure every level N times, with new prompts (default 1)")  # fmt: skip
    request("--seed", type=seed, default=0, metavar="N",
        help="seed of the experiment, from which each level's is derived (default 0)")  # fmt: skip
    request("--request-timeout-s", type=seconds, default=600.0, metavar="S",
        help="a request without a complete answer after S seconds has failed (default 600)")  # fmt: skip
    request("--recover-s", type=seconds_or_none, default=RECOVER_S, metavar="S",
        help="where a replica died in a level, wait so long until the deployment is whole again, and measure that "
        f"level once more (default {RECOVER_S:g}; 0: end the sweep)")  # fmt: skip
    request("-s", "--smoke", action="store_true",
        help="one short level (the first), kept apart in EXP_NAME-smoke")  # fmt: skip
    slo = flags.add_argument_group("search for the highest rate within an SLO").add_argument
    slo("--slo", metavar="ttft_ms=N,tpot_ms=N[,...]",
        help="find the highest request rate of which --slo-quantile of the requests meet all bounds: ttft_ms, tpot_ms, "
        "e2el_ms, itl_p99_ms (of a request's own gaps), stall_ms (its longest gap)")  # fmt: skip
    slo("--slo-quantile", type=share, metavar="Q", help="share of requests that must (default 0.95)")
    slo("--slo-resolution", type=above_zero, metavar="R",
        help="end when the rates beside the answer are closer than 1 + R (default 0.1)")  # fmt: skip
    slo("--slo-start", type=above_zero, metavar="RATE",
        help="begin there (default: half of what closed loops reached, or 1)")  # fmt: skip
    slo("--start-from", choices=("plan",), help="begin the search where the same search ends on the simulator")
    slo("--hardware", metavar="NAME", help="of --start-from plan: calibrated step times, as plan.py takes them")
    server = flags.add_argument_group("server").add_argument
    server("-u", "--base-url", default=BASE_URL, metavar="URL", help=f"server (default {BASE_URL})")
    server("-m", "--served-model-name", metavar="NAME",
        help="model to ask for (default: the launcher's, or the only one served)")  # fmt: skip
    server("--tokenizer", metavar="DIR|ID",
        help="folder or Hugging Face id (default: the launcher's, or the served model's name)")  # fmt: skip
    server("--gpus", type=positive, metavar="N", help="GPUs of the deployment, where the launcher did not publish it")
    results = flags.add_argument_group("results").add_argument
    results("-e", "--exp-name", metavar="NAME", help="folder of the results (default: label of the running deployment)")
    results("--out", type=Path, default=Path("bm_results"), metavar="DIR",
        help="where results go (default bm_results)")  # fmt: skip
    results("--dry-run", action="store_true",
        help="print what would be measured, and for how long; ask nothing of the server")  # fmt: skip
    results("--resume", action="store_true", help="skip levels that are finished")
    results("--force", action="store_true", help="measure finished levels again and replace them")
    results("--retry-invalid", action="store_true",
        help="measure each invalid level once more, after all others (with --resume the finished ones too); the second "
        "result counts, the first moves to EXP_NAME/replaced/")  # fmt: skip
    return flags


def _lengths(args: argparse.Namespace) -> LengthDistribution | None:
    """Those of --lengths, or of its short form --mixes."""
    if args.mixes is None:
        if args.mix_every is not None:
            raise UsageError("--mix-every says how long each of --mixes comes: add --mixes, or leave --mix-every out")
        given: LengthDistribution | None = args.lengths
        return given
    if args.lengths is not None:
        raise UsageError("--mixes is a short form of --lengths: give one of the two")
    every = "" if args.mix_every is None else f",every={args.mix_every:g}"
    return parse_mixes(f"{args.mixes}{every}")


def options(argv: Sequence[str]) -> SweepOptions:
    """Flags to options, without any I/O. Raises UsageError."""
    args = parser().parse_args(argv)
    if args.resume and args.force:
        raise UsageError("--resume skips finished levels and --force replaces them: give one of the two")
    if args.slo is None:
        for flag in ("--slo-quantile", "--slo-resolution", "--slo-start"):
            if getattr(args, flag[2:].replace("-", "_")) is not None:
                raise UsageError(f"{flag} is for --slo, which is not given: add --slo, or leave {flag} out")
    workload = workload_of_flags(
        args.itl, args.otl, _lengths(args), mode=args.mode, seed=args.seed, shared_prefix_tokens=args.shared_prefix
    )
    if args.smoke and args.fill_cache == "yes":
        raise UsageError("--smoke is one short level, which fills no KV pool: leave --fill-cache out")
    searches = _searches(args)
    if searches and args.smoke:
        raise UsageError("--smoke is one short level, --slo measures many: leave one of the two out")
    loads = _loads(args, implied=not searches)
    soak_s = _soak_s(args, loads)
    return SweepOptions(
        loads=loads,
        hold_s=soak_s or _hold_s(args, timed=bool(searches) or any(not isinstance(load, Closed) for load in loads)),
        soak_s=soak_s,
        per_gpu=parse_per_gpu(args.concurrency_per_gpu) if args.concurrency_per_gpu is not None else (),
        searches=searches,
        workload=workload,
        base_url=args.base_url,
        name=args.exp_name,
        model=args.served_model_name,
        tokenizer=args.tokenizer,
        gpus=args.gpus,
        repeats=args.repeats,
        prompts_per_level=args.prompts_per_level,
        fill_cache=args.fill_cache,
        smoke=args.smoke,
        resume=args.resume,
        force=args.force,
        retry_invalid=args.retry_invalid,
        out=args.out,
        request_timeout_s=args.request_timeout_s,
        recover_s=args.recover_s,
        client_processes=args.client_processes,
        command=typed("bench", *argv),
    )


def _soak_s(args: argparse.Namespace, loads: Sequence[Load]) -> float | None:
    """Raises UsageError for flags that ask for anything but one load held for long."""
    if args.soak is None:
        return None
    per_gpu = parse_per_gpu(args.concurrency_per_gpu) if args.concurrency_per_gpu is not None else ()
    if len(loads) + len(per_gpu) != 1 or any(isinstance(load, Ramp) for load in loads) or args.slo is not None:
        raise UsageError("--soak holds one load: give one --concurrency or one --request-rate, and no --ramp or --slo")
    unused = {"--hold-s": args.hold_s is not None, "--final": args.final, "--smoke": args.smoke,
              "--prompts-per-level": args.prompts_per_level is not None, "--repeats": args.repeats != 1}  # fmt: skip
    if unused_flags := [flag for flag, is_set in unused.items() if is_set]:
        raise UsageError(f"--soak says how long the load is held, once: leave {unused_flags[0]} out")
    if 60 * args.soak > MAX_HOLD_S:
        raise UsageError(f"--soak {args.soak:g}: a load is held for at most {MAX_HOLD_S / 60:g} minutes, a day")
    return float(60 * args.soak)


def _hold_s(args: argparse.Namespace, *, timed: bool) -> float:
    flag = "--final" if args.final else "--hold-s"
    if not args.final and args.hold_s is None:
        return HOLD_S
    if args.final and args.hold_s is not None:
        raise UsageError(f"--final holds every rate for {FINAL_HOLD_S:g} s: leave --hold-s out")
    if args.prompts_per_level is not None:
        raise UsageError(
            f"{flag} holds a rate for a time, --prompts-per-level for so many requests: give one of the two"
        )
    if args.smoke:
        raise UsageError(f"--smoke is one short level: leave {flag} out")
    if not timed:
        raise UsageError(f"{flag} belongs to request rates, ramps and --slo, and none is asked for")
    if args.final:
        return FINAL_HOLD_S
    if args.hold_s > MAX_HOLD_S:
        raise UsageError(f"--hold-s {args.hold_s:g}: a rate is held for at most {MAX_HOLD_S} s, a day")
    return float(args.hold_s)


def _searches(args: argparse.Namespace) -> tuple[Search, ...]:
    if args.hardware is not None and args.start_from is None:
        raise UsageError("--hardware belongs to --start-from plan")
    if args.start_from is not None and args.slo_start is not None:
        raise UsageError("--start-from and --slo-start both say where the search begins: give one of the two")
    if args.slo is None:
        if args.start_from is not None:
            raise UsageError("--start-from belongs to --slo, and none is given")
        return ()
    slo = parse_slo(args.slo, 0.95 if args.slo_quantile is None else args.slo_quantile)
    settings = {"slo": slo, "start_rps": args.slo_start, "start_from": args.start_from, "hardware": args.hardware}
    settings |= {"resolution": args.slo_resolution} if args.slo_resolution is not None else {}
    settings |= {"burstiness": args.burstiness} if args.burstiness is not None else {}
    settings |= {"requests": args.prompts_per_level}
    return (validate(Search, settings, where="--slo", names=SEARCH_FLAGS),)


def _loads(args: argparse.Namespace, *, implied: bool) -> tuple[Load, ...]:
    load_flags = {
        "concurrency": [("--concurrency", args.concurrency), ("--concurrency-per-gpu", args.concurrency_per_gpu)],
        "request-rate": [("--request-rate", args.request_rate)],
        "ramp": [("--ramp", args.ramp), ("--ramp-shape", args.ramp_shape)],
    }
    named = [kind for kind, flags in load_flags.items() if any(value is not None for _, value in flags)]
    kind = args.type or (named[-1] if len(named) == 1 else "concurrency")
    for other, flags in load_flags.items():
        for flag, value in flags:
            if other != kind and value is not None:
                raise UsageError(f"{flag} belongs to --type {other}, but --type is {kind}")
    if args.burstiness is not None and kind == "concurrency" and args.slo is None:
        raise UsageError(f"--burstiness belongs to --type request-rate, but --type is {kind}")
    if not implied and args.type is None and not named:
        return ()  # a search alone
    shape = 1.0 if args.burstiness is None else args.burstiness
    if kind == "concurrency":
        if args.concurrency is None and args.concurrency_per_gpu is not None:
            return ()
        concurrencies = parse_concurrencies("all" if args.concurrency is None else args.concurrency)
        return tuple(Closed(concurrency=value) for value in concurrencies)
    if kind == "ramp":
        if args.ramp is None:
            raise UsageError("--type ramp needs --ramp START:END, for example --ramp 1:16")
        return parse_ramps(args.ramp, args.ramp_shape or "linear", shape)
    return tuple(
        Open(rate_rps=value, burstiness=shape)
        for value in parse_rates("all" if args.request_rate is None else args.request_rate)
    )


def table(runs: Sequence[Run]) -> str:
    """The levels as text: whole-run figures, and the steady-state output rate beside them."""
    header = (
        "level", "ok/asked", "req/s", "out tok/s", "steady", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "E2EL p50 ms"
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for run in runs:
        whole = run.whole
        rows.append(
            (
                run.key.stem,
                f"{run.completed}/{run.num_requests}",
                f"{whole.requests_per_s:.2f}",
                f"{whole.output_tokens_per_s:.1f}",
                f"{run.steady.output_tokens_per_s:.1f}" if run.steady else "-",
                *(_ms(whole.ttft, q) for q in ("p50", "p99")),
                *(_ms(whole.tpot, q) for q in ("p50", "p99")),
                _ms(whole.e2el, "p50"),
            )
        )
    lines = aligned(rows, left=(0,))
    for run in runs:
        if not run.validity.valid:
            lines.append(f"INVALID {run.key.stem}: {'; '.join(run.validity.reasons)}")
        if run.replaces:
            lines.append(
                f"measured twice: {run.key.stem}; the first result was not valid ({'; '.join(run.replaces.reasons)}) "
                f"and is kept in {run.replaces.file}"
            )
    fresh = [run.key.stem for run in runs if run.pool_age is not None and run.pool_age < 1]
    if fresh:
        which = "all levels" if len(fresh) == len(runs) else ", ".join(fresh)
        lines.append(f"on fresh KV pools (given fewer tokens than they hold when the level began): {which}")
    lines += [f"{run.key.stem} over {len(run.soak.windows)} minutes: {changes(run.soak)}" for run in runs if run.soak]
    return "\n".join(lines)


def _ms(values: Distribution | None, name: str) -> str:
    return f"{1000 * values.percentiles_s[name]:.1f}" if values else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep of the command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["run"], ["ratio"]):
        from pdlab.cli import experiment, ratio

        return experiment.main(argv[1:]) if argv[0] == "run" else ratio.main(argv[1:])
    # A shell starts background jobs with SIGINT ignored; a sweep must be stoppable all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def run() -> int:
        if argv and not argv[0].startswith("-"):
            near = choices(argv[0], ("run", "ratio"))
            raise UsageError(f"{argv[0]!r} is neither run nor ratio, and every other word follows a flag; {near}")
        sweep_options, dry_run = options(argv), parser().parse_args(argv).dry_run
        check_folder(sweep_options.out, "--out")
        check_name(sweep_options.name)
        if dry_run:
            print(describe(sweep_options))
            return 0
        sweep_options = _started(sweep_options)
        with reach(normal_url(sweep_options.base_url)):
            result = run_sweep(sweep_options)
        report(result)
        return 0 if result.valid else INVALID

    return exit_code(run, resume=_again(argv))


def _started(sweep_options: SweepOptions) -> SweepOptions:
    searches = []
    for search in sweep_options.searches:
        if search.start_from is not None:
            from pdlab.cli.slo_start import from_plan

            search, words = from_plan(search, sweep_options.workload, normal_url(sweep_options.base_url))
            print(words, file=sys.stderr)
        searches.append(search)
    return sweep_options.model_copy(update={"searches": tuple(searches)})


def describe(sweep: SweepOptions) -> str:
    """What a sweep would measure, in words; nothing is asked of the server. Raises UsageError for what it would."""
    w = sweep.workload
    lines = [f"dry run: nothing is sent to {normal_url(sweep.base_url)}"]
    lines.append(f"workload: {w.mode} {w.label}, seed {w.seed}")
    lines.append(f"KV pools: {planned(sweep.fill_cache, w, smoke=sweep.smoke, soak=sweep.soak_s is not None)}")
    sweep = with_loads(sweep, sweep.gpus) if sweep.gpus is not None else sweep
    lines += [
        f"  {value:g} requests in flight per GPU (how many GPUs is not known: --gpus N)" for value in sweep.per_gpu
    ]
    for level in build(sweep, attempt=0):
        held = ""
        if not isinstance(level.load, Closed) and sweep.prompts_per_level is None and not sweep.smoke:
            held = f", held for {sweep.hold_s:g} s, or 10 times E2EL where that is longer"
        if sweep.soak_s is not None and not isinstance(level.load, Closed):
            held += ", after a first round that is not kept"
        elif sweep.soak_s is not None:
            held = f" tell how many requests make {sweep.soak_s / 60:g} minutes, for which it is then held"
        repeat = f", repeat {level.repeat}" if level.repeat else ""
        lines.append(f"  {title(level.load)}{repeat}: {level.num_requests} requests{held}")
    for search in sweep.searches:
        start = "half of what closed loops reached, or 1"
        if search.start_from:
            start = "what the simulator finds"
        elif search.start_rps:
            start = f"{search.start_rps:g} requests/s"
        lines.append(f"  highest rate under {search.slo.label}, from {start}:")
        lines.append(
            f"    at most {search.max_points} levels, each of at least {search.requests_needed} requests and held for "
            f"{sweep.hold_s:g} s, to within {search.resolution:.0%} at {search.confidence:.0%} confidence"
        )
    lines.append(f"results: {sweep.out / sweep.name if sweep.name else f'{sweep.out}/(label of what is deployed)'}")
    return "\n".join(lines)


def _again(argv: Sequence[str]) -> str:
    kept = [arg for arg in argv if arg not in ("--resume", "--force")]
    return typed("bench", *kept, "--resume")


def report(result: SweepResult) -> None:
    """The sweep's table and what to do next, on standard output."""
    skipped = len(result.runs) - result.measured
    print(table(result.runs))
    for search in result.searches:
        print(f"SLO {search.slo.label}: {search.detail}")
    for note in dict.fromkeys(note for run in result.runs for note in run.validity.notes):
        print(f"note: {note}")
    if skipped > 0:
        print(f"{skipped} of {len(result.runs)} levels were already measured and skipped")
    print(f"results: {result.folder}")
    print(f"next: {typed('viz', '--exps', str(result.folder), '--use-normalized')}")


ALL_CONCURRENCIES = (4, 8, 16, 32, 48, 64)
ALL_RATES_RPS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)
SEARCH_FLAGS = {
    "resolution": "--slo-resolution",
    "start_rps": "--slo-start",
    "burstiness": "--burstiness",
    "requests": "--prompts-per-level",
}

N = TypeVar("N", int, float)


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """``all`` or ``4,8,16``. Raises UsageError."""
    if text.strip() == "all":
        return ALL_CONCURRENCIES
    example = "--concurrency: expected all or whole numbers such as 4,8,16"
    values = []
    for part in text.split(","):
        if not part.strip().isascii() or not part.strip().isdigit():
            raise UsageError(f"{example}, got {text!r}")
        values.append(int(part))
    return _distinct("--concurrency", values)


def parse_rates(text: str) -> tuple[float, ...]:
    """``all`` or ``1,2.5,4`` (requests/s). Raises UsageError."""
    if text.strip() == "all":
        return ALL_RATES_RPS
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        example = "--request-rate: expected all or numbers such as 1,2.5,4 (requests/s)"
        raise UsageError(f"{example}, got {text!r}") from error
    return _distinct("--request-rate", values)


def parse_per_gpu(text: str) -> tuple[float, ...]:
    """``1,2.5,4`` requests in flight per GPU. Raises UsageError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        example = "--concurrency-per-gpu: expected numbers such as 1,2,4"
        raise UsageError(f"{example}, got {text!r}") from error
    return _distinct("--concurrency-per-gpu", values)


def parse_ramps(text: str, shape: Literal["linear", "exponential"], burstiness: float) -> tuple[Ramp, ...]:
    """``1:16,2:8``: from and to how many requests/s. Raises UsageError."""
    ramps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)\s*", part)
        if not match or not all(0 < float(value) <= MAX_LOAD for value in match.groups()):
            raise UsageError(f"--ramp: expected START:END in requests/s above 0, such as 1:16, got {text!r}")
        ramps.append(Ramp(start_rps=float(match[1]), end_rps=float(match[2]), shape=shape, burstiness=burstiness))
    _distinct("--ramp", [ramp.end_rps for ramp in ramps])
    return tuple(ramps)


def _distinct(flag: str, values: list[N]) -> tuple[N, ...]:
    for value in values:
        if not 0 < value <= MAX_LOAD:
            raise UsageError(f"{flag}: {value:g} is outside 0 < value <= {MAX_LOAD}")
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise UsageError(f"{flag}: {twice[0]:g} is given twice; use --repeats to measure a level again")
    return tuple(values)
