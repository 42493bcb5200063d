"""Command line of the sweep: ``./run_bm.sh`` or ``python -m pdlab.bench``.

Exit codes: 0 every level is valid; 1 the load could not be driven; 2 bad input, which includes a
server that does not answer and a folder that would be overwritten; 3 finished, but some level is
invalid; 130 interrupted (finished levels are kept).
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pdlab.errors import PdlabError, UsageError
from pdlab.levels import ALL_CONCURRENCIES, ALL_RATES_RPS, parse_concurrencies, parse_rates
from pdlab.results import Distribution, Run
from pdlab.running import reach
from pdlab.spec import validate
from pdlab.sweep import BASE_URL, SweepOptions, SweepResult, run_sweep
from pdlab.target import normal_url
from pdlab.workload import Closed, Load, Open, Workload

INVALID = 3
INTERRUPTED = 130
MODE_NOTES = {
    "prefill-only": "prefill-only: one output token per request, so TPOT and ITL are not defined",
    "decode-only": "decode-only: one input token per request; it measures decode without the cost of a real context, "
    "and its one-token prompts repeat",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """The flags; the published script's are accepted as they were."""
    every = ",".join(str(value) for value in ALL_CONCURRENCIES)
    rates = ",".join(f"{value:g}" for value in ALL_RATES_RPS)
    flags = _Parser(
        prog="run_bm.sh",
        description="Sweep load levels against a running deployment; results go to OUT/EXP_NAME/.",
        epilog="Exit codes: 0 all levels valid, 1 failed, 2 bad input or no server, 3 some level invalid, "
        "130 interrupted. Metrics and gates: docs/metrics.md.",
        allow_abbrev=False,
    )
    add = flags.add_argument
    add("-e", "--exp-name", help="folder of the results (default: label of the running deployment)")
    add("-t", "--type", choices=("concurrency", "request-rate"), help="closed or open loop (default: concurrency)")
    add("-c", "--concurrency", metavar="all|N,N,...", help=f"requests in flight; all = {every} (default)")
    add("-r", "--request-rate", metavar="all|R,R,...", help=f"arrivals per second; all = {rates} (default)")
    add("--burstiness", type=float, help="open loop: shape of the gaps' gamma distribution (default 1: Poisson)")
    add("--itl", "--isl", "--input-len", dest="itl", type=int, default=5000, metavar="TOKENS",
        help="input tokens of a request (default 5000)")  # fmt: skip
    add("--otl", "--osl", "--output-len", dest="otl", type=int, default=250, metavar="TOKENS",
        help="output tokens of a request (default 250)")  # fmt: skip
    add("--mode", choices=("mixed", "prefill-only", "decode-only"), default="mixed",
        help="mixed ITL:OTL (default), prefill-only ITL:1, decode-only 1:OTL")  # fmt: skip
    add("-u", "--base-url", default=BASE_URL, help=f"server (default {BASE_URL})")
    add("-m", "--served-model-name", help="model to ask for (default: the launcher's, or the only one served)")
    add("--tokenizer", help="folder or Hugging Face id (default: the launcher's, or the served model's name)")
    add("-s", "--smoke", action="store_true",
        help="one short level (the first), kept apart in EXP_NAME-smoke")  # fmt: skip
    add("--repeats", type=int, default=1, metavar="N", help="measure every level N times, with new prompts (default 1)")
    add("--seed", type=int, default=0, help="seed of the experiment, from which each level's is derived (default 0)")
    add("--prompts-per-level", type=int, metavar="N",
        help="requests of a level (default: 10 per unit of concurrency or 60 s of arrivals, at least 20)")  # fmt: skip
    add("--request-timeout-s", type=float, default=600.0, metavar="S",
        help="a request without a complete answer after S seconds has failed (default 600)")  # fmt: skip
    add("--gpus", type=int, metavar="N", help="GPUs of the deployment, where the launcher did not publish it")
    add("--resume", action="store_true", help="skip levels that are finished")
    add("--force", action="store_true", help="measure finished levels again and replace them")
    add("--out", type=Path, default=Path("bm_results"), metavar="DIR", help="where results go (default bm_results)")
    return flags


def options(argv: Sequence[str]) -> SweepOptions:
    """Flags to options, without any I/O. Raises UsageError."""
    args = parser().parse_args(argv)
    if args.resume and args.force:
        raise UsageError("--resume skips finished levels and --force replaces them: give one of the two")
    if not math.isfinite(args.request_timeout_s) or args.request_timeout_s <= 0:
        raise UsageError(f"--request-timeout-s: more than 0 seconds, got {args.request_timeout_s:g}")
    workload: dict[str, Any] = {
        "input_tokens": args.itl, "output_tokens": args.otl, "mode": args.mode, "seed": args.seed
    }  # fmt: skip
    return SweepOptions(
        loads=_loads(args),
        workload=validate(Workload, workload, where="--itl, --otl, --seed"),
        base_url=args.base_url,
        name=args.exp_name,
        model=args.served_model_name,
        tokenizer=args.tokenizer,
        gpus=args.gpus,
        repeats=args.repeats,
        prompts_per_level=args.prompts_per_level,
        smoke=args.smoke,
        resume=args.resume,
        force=args.force,
        out=args.out,
        request_timeout_s=args.request_timeout_s,
        command=shlex.join(["./run_bm.sh", *argv]),
    )


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    rates, concurrencies, burstiness = args.request_rate, args.concurrency, args.burstiness
    implied = "request-rate" if rates is not None and concurrencies is None else "concurrency"
    if (args.type or implied) == "concurrency":
        for flag, value in (("--request-rate", rates), ("--burstiness", burstiness)):
            if value is not None:
                raise UsageError(f"{flag} belongs to --type request-rate, but --type is concurrency")
        asked = parse_concurrencies("all" if concurrencies is None else concurrencies)
        return tuple(Closed(concurrency=value) for value in asked)
    if concurrencies is not None:
        raise UsageError("--concurrency belongs to --type concurrency, but --type is request-rate")
    shape = 1.0 if burstiness is None else burstiness
    if not 0 < shape < math.inf:
        raise UsageError(f"--burstiness: a number above 0, got {shape:g}")
    return tuple(Open(rate_rps=value, burstiness=shape) for value in parse_rates("all" if rates is None else rates))


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
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    for run in runs:
        if not run.validity.valid:
            lines.append(f"INVALID {run.key.stem}: {'; '.join(run.validity.reasons)}")
    return "\n".join(lines)


def _ms(values: Distribution | None, name: str) -> str:
    return f"{1000 * values.percentiles_s[name]:.1f}" if values else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep of the command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # A shell starts background jobs with SIGINT ignored; a sweep must be stoppable all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asked = options(argv)
        if note := MODE_NOTES.get(asked.workload.mode):
            print(note, file=sys.stderr)
        with reach(normal_url(asked.base_url)):
            result = run_sweep(asked)
    except PdlabError as error:
        print(f"run_bm.sh: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            f"run_bm.sh: interrupted; finished levels are kept. Go on with: {_again(argv)}",
            file=sys.stderr,
        )
        return INTERRUPTED
    except OSError as error:
        print(f"run_bm.sh: error: {error}", file=sys.stderr)
        return 1
    report(result)
    return 0 if result.valid else INVALID


def _again(argv: Sequence[str]) -> str:
    kept = [arg for arg in argv if arg not in ("--resume", "--force")]
    return shlex.join(["./run_bm.sh", *kept, "--resume"])


def report(result: SweepResult) -> None:
    """The sweep's table and what to do next, on standard output."""
    skipped = len(result.runs) - result.measured
    print(table(result.runs))
    if skipped:
        print(f"{skipped} of {len(result.runs)} levels were already measured and skipped")
    print(f"results: {result.folder}")
    print(f"next: {shlex.join(['python', 'viz.py', '--exps', str(result.folder), '--use-normalized'])}")


if __name__ == "__main__":
    sys.exit(main())
