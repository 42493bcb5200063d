"""The first thing to run on booked nodes: from the doctor to a report, in under an hour; see --help."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pdlab.core.arguments import OneLineParser, check_folder, exit_code, port
from pdlab.core.catalog import known_models
from pdlab.core.errors import UsageError
from pdlab.core.files import ROOT, cache_dir
from pdlab.core.text import choices, duration
from pdlab.first_hour import archive
from pdlab.first_hour.run import State, open_state, run
from pdlab.first_hour.steps import MOST_TOTAL_S, RAN, Step, Where, plan, total_s

INCOMPLETE = 3
LENGTHS: dict[Where, tuple[int, int]] = {"cluster": (5000, 250), "local": (256, 32), "rehearsal": (2000, 100)}
LOCAL_MODEL, MODEL = "tiny-gptoss", "gpt-oss-120b"

EPILOG = f"""\
examples:
  python -m pdlab first-hour --dry-run       every step with its command, estimate and limit; starts nothing
  python -m pdlab first-hour                 on the Ray cluster of this machine: two p5.48xlarge
  python -m pdlab first-hour --resume        go on after what failed was mended; what ended well is kept
  python -m pdlab first-hour --local         the same steps on this machine's CPUs, as a test
  python -m pdlab first-hour --rehearse      what is served and measured, on made-up GPUs with simulated engines

A step that fails stops those alone that need it. Whatever happens, it ends with one archive (logs, logs of failed
replicas, the doctor's facts, manifests, verdicts) from which tokens, keys and passwords are removed.

exit code: 0 every step ended well, 3 some did not, 2 bad command line, 130 interrupted (the archive is there)
models of configs/models/: {", ".join(known_models())}
"""


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(
        prog="python -m pdlab first-hour",
        description="The first thing to run on booked nodes: from the doctor to a report, in under an hour.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = p.add_argument_group("what is run, and where")
    what.add_argument("--local", action="store_true", help="on CPU engines of this machine, without a cluster")
    what.add_argument("--rehearse", action="store_true",
                   help="on made-up nodes of this machine, engines simulated (docs/rehearsal.md)")  # fmt: skip
    what.add_argument(
        "--model", metavar="NAME", help=f"a name of configs/models/ (default {MODEL}; with --local {LOCAL_MODEL})"
    )
    what.add_argument("--out", type=Path, default=ROOT / "bm_results" / "first-hour", metavar="DIR",
                   help="everything goes there (default bm_results/first-hour)")  # fmt: skip
    what.add_argument("--port", type=port, default=8000, metavar="N", help="to serve on (default %(default)s)")
    how = p.add_argument_group("how")
    how.add_argument("--resume", action="store_true", help="go on with the run in --out")
    how.add_argument("--dry-run", action="store_true", help="print the steps; start nothing")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.local and args.rehearse:
        raise UsageError("--local and --rehearse exclude each other: real engines on CPUs, or simulated ones on GPUs")
    if args.local and args.model not in (None, LOCAL_MODEL):
        raise UsageError(f"--model {args.model}: --local serves {LOCAL_MODEL}; leave one of the two out")
    model = args.model or (LOCAL_MODEL if args.local else MODEL)
    if model not in known_models():
        raise UsageError(f"--model {model}: not in configs/models/; {choices(model, known_models())}")
    check_folder(args.out, "--out")
    out = args.out.absolute()
    where: Where = "local" if args.local else "rehearsal" if args.rehearse else "cluster"
    steps = plan(out, where=where, model=model, port=args.port, lengths=LENGTHS[where])
    settings = {"model": model, "local": args.local, "port": args.port} | ({"rehearse": True} if args.rehearse else {})
    state = open_state(out, settings, resume=args.resume)
    if args.dry_run:
        print(describe(steps, state))
        return 0
    print(describe(steps, state), file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    try:
        state = run(steps, out, state, lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        secrets = archive.known_secrets(os.environ, archive.secret_files(Path.home(), cache_dir()))
        made = archive.write(out, secrets)
        print(f"archive, to send to whoever helps: {made}", file=sys.stderr)
    print(verdicts(steps, state))
    return 0 if all(outcome.verdict == "ok" for outcome in state.outcomes.values()) else INCOMPLETE


def describe(steps: Sequence[Step], state: State | None = None) -> str:
    """Every step with its estimate, its limit and its command, and the estimate of all."""
    lines = []
    for number, step in enumerate(steps, start=1):
        before = state.outcomes.get(step.name) if state else None
        done = " (done)" if before and before.verdict in RAN and not step.always else ""
        needs = f"; needs {', '.join(step.needs)}" if step.needs else ""
        needs += f"; needs one of {', '.join(step.any_of)}" if step.any_of else ""
        lines.append(f"{number:2d} {step.name}: {step.title}{done}")
        lines.append(f"     about {duration(step.estimate_s)}, ended after {duration(step.limit_s)}{needs}")
        lines.append(f"     {shlex.join(['python', '-m', 'pdlab', *step.command])}")
    total = total_s(tuple(steps))
    lines.append(f"estimate: {duration(total)} in all (of at most {duration(MOST_TOTAL_S)})")
    return "\n".join(lines)


def verdicts(steps: Sequence[Step], state: State) -> str:
    """One line per step, and what to do about those that did not end well."""
    lines = []
    for step in steps:
        outcome = state.outcomes.get(step.name)
        if outcome is None:
            continue
        lines.append(f"{outcome.verdict.upper():11} {step.name}: {outcome.detail}")
        if outcome.next_action:
            lines.append(f"{'':11} next: {outcome.next_action}")
    return "\n".join(lines)
