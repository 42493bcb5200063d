"""``python -m pdlab chaos``: faults on a running deployment under load, and what became of every request."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlab.core.arguments import OneLineParser, exit_code, not_for, port, positive, seconds, seed

HAS_FINDINGS, DEFAULT_PORT = 3, 8000
EPILOG = """\
examples:
  python -m pdlab chaos short --dry-run
      what would be done to the deployment at port 8000, and when
  python -m pdlab chaos --all
      every kind of fault that it can have; those that it cannot are named
  python -m pdlab chaos soak --seed 7 --concurrency 8
      twenty minutes, a fault every 30 s
  python -m pdlab chaos my-plan.yaml --duration-s 600
  make chaos
      launch what this machine can serve, break it in every way, a soak of twenty minutes for each

A plan is a file, or the name of one in configs/faults/ (docs/faults.md). Exit code 3: an answer was wrong, a request
did not end, or something was left.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = OneLineParser(
        prog="python -m pdlab chaos",
        description="Kill, stop and cut a running deployment at seeded times under load, and compare every answer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = flags.add_argument_group("what is done")
    which.add_argument("plan", nargs="?", metavar="FILE", help="a plan: a YAML file, or a name in configs/faults/")
    which.add_argument("--all", action="store_true", help="the plan all: every kind that the deployment can have")
    which.add_argument("--seed", type=seed, metavar="N", help="of times, order and targets")
    which.add_argument("--duration-s", type=seconds, metavar="S", help="draw faults for so long")
    which.add_argument("--concurrency", type=positive, metavar="N", help="requests in flight")
    which.add_argument("--dry-run", action="store_true", help="say what would be done and when; do nothing")
    where = flags.add_argument_group("to what")
    where.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s")
    where.add_argument(
        "--not-mine", action="store_true", help="also a deployment that no launcher of this machine has started"
    )
    launch_flags = flags.add_argument_group("with deployments of its own")
    launch_flags.add_argument(
        "--launch", action="store_true", help="launch 1P1D, 2P2D and (as root) two hosts here in turn, and break each"
    )
    launch_flags.add_argument("--short", action="store_true", help="with --launch: 1P1D and the short plan alone")
    launch_flags.add_argument(
        "--launch-flag", action="append", default=[], metavar="FLAG", help="for the launches, such as --launch-flag=--x"
    )
    launch_flags.add_argument("--port", type=port, metavar="N", help="of the launches (default 8000)")
    made = flags.add_argument_group("what is kept")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("bm_results"),
        metavar="DIR",
        help="where chaos-LABEL is made (default bm_results)",
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(parser().parse_args(words), words))


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    from pdlab.cluster import local_nodes, run_on_host
    from pdlab.cluster.namespaces import INSIDE
    from pdlab.core.errors import UsageError
    from pdlab.core.files import replace
    from pdlab.core.schema import validate
    from pdlab.faults import session
    from pdlab.faults.plan import FaultPlan, load_plan
    from pdlab.faults.warden import warden
    from pdlab.results import chaos

    if args.launch:
        return _launch(args)
    for name, option in (("--short", args.short), ("--launch-flag", args.launch_flag), ("--port", args.port)):
        if option:
            raise UsageError(f"{name} goes with --launch, which is not given")
    if args.all == (args.plan is not None):
        raise UsageError("give one of FILE and --all: which faults")
    name = "all" if args.all else Path(args.plan).stem
    plan = load_plan("all" if args.all else args.plan)
    changed: dict[str, Any] = {
        key: value
        for key, value in (("seed", args.seed), ("concurrency", args.concurrency), ("duration_s", args.duration_s))
        if value is not None
    }
    if args.duration_s is not None:
        changed["rounds"] = 1
    names = {"seed": "--seed", "concurrency": "--concurrency", "duration_s": "--duration-s"}
    plan = validate(FaultPlan, {**plan.model_dump(), **changed}, where="the plan with these flags", names=names)
    order = session.Order(
        plan=plan, name=name, base_url=args.base_url, not_mine=args.not_mine,
        command=shlex.join(["python", "-m", "pdlab", "chaos", *words]),
    )  # fmt: skip
    subject = session.subject_of(order)
    folder = None
    if not args.dry_run:
        folder = chaos.new_folder(args.out, subject.manifest.label)
        order = order.model_copy(update={"folder": str(folder.resolve())})
    try:
        local = local_nodes.running() if subject.manifest.on_local_nodes else None
        if local is not None and local.two_hosts is not None and INSIDE not in os.environ:
            host = local.host(1)
            env = local_nodes.environment_on(host, local)
            with warden(local):
                run_on_host.call(host.pid, "pdlab.faults.session", order.model_dump_json(), env)
        else:
            session.execute(order)
    finally:
        if folder is not None and not any(folder.iterdir()):
            folder.rmdir()
    if folder is None:
        return 0
    from pdlab.report import chaos as report

    made = chaos.load(folder)
    text = report.text(made)
    replace(folder / "table.txt", f"{text}\n".encode())
    print(f"\n{text}\n\nKept in {folder}; plot: {shlex.join(['python', 'viz.py', '--exps', str(folder)])}")
    return 0 if report.well(made) else HAS_FINDINGS


def _launch(args: argparse.Namespace) -> int:
    from pdlab.cli.chaos_launch import launch_and_break
    from pdlab.core.errors import UsageError

    if args.plan is not None or args.all:
        raise UsageError("--launch makes its own choice of plans: leave FILE and --all out")
    not_for(args, parser(), ["--duration-s", "--dry-run", "--base-url", "--not-mine"], "--launch")
    words = [word for flag, value in (("--seed", args.seed), ("--concurrency", args.concurrency), ("--out", args.out))
             if value is not None for word in (flag, str(value))]  # fmt: skip
    return launch_and_break(words, args.launch_flag, args.port or DEFAULT_PORT, short=args.short)


if __name__ == "__main__":
    sys.exit(main())
