"""``python -m pdlab chaos``: make faults in a running deployment under load, and check every request."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pdlab.core import defaults
from pdlab.core.command_lines import command_line
from pdlab.core.commands import PDLAB, typed
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import NOT_CLEAN, exit_code
from pdlab.core.settings import FlagsOf, Port, not_given, parse, setting, to_words
from pdlab.faults.plan import TO, WHAT, ChaosOptions, FaultPlan

EPILOG = f"""\
examples:
  {PDLAB} chaos short --dry-run
      print the faults for the deployment at port 8000, and their times
  {PDLAB} chaos --all
      every kind of fault that applies; a line names the other kinds
  {PDLAB} chaos soak --seed 7 --concurrency 8
      twenty minutes, a fault every 30 s
  {PDLAB} chaos my-plan.yaml --duration-s 600
  make chaos
      launch the deployments that this machine can serve; every fault, and a soak of twenty minutes, for each

A plan is a file, or the name of one in configs/faults/ (docs/faults.md). Exit code 3: an answer was wrong, a request
did not end, something was left, nothing was injected, or the deployment did not recover. The verdict names it.
"""


OWN, KEPT = "with deployments of its own", "what is kept"


class ChaosSettings(ChaosOptions):
    """Which faults to make, and in which deployment."""

    COMMAND = "chaos"
    ABOUT = "Inject faults into a running deployment under load, at seeded times, and compare every answer."
    EXAMPLES = EPILOG
    GROUPS = (WHAT, TO, OWN, KEPT)

    plan: str | None = setting(
        None, "plan of the faults: a YAML file, or a name in configs/faults/", WHAT, positional=True, value="FILE"
    )
    all: bool = setting(False, "the plan named all: every kind of fault that applies to the deployment", WHAT)
    changes: Annotated[dict[str, Any], FlagsOf(FaultPlan, over_file=True)] = Field(default_factory=dict)
    dry_run: bool = setting(False, "print the faults and their times; do nothing", WHAT)
    launch: bool = setting(False, "launch 1P1D, 2P2D and (as root) two hosts here in turn; break each", OWN)
    short: bool = setting(False, "with --launch: only 1P1D and the short plan", OWN, needs="launch")
    launch_flag: tuple[str, ...] = setting(
        (), "a flag for the launches, such as --launch-flag=--x", OWN, several="times", value="FLAG", needs="launch"
    )
    port: Port | None = setting(None, "port of the launches", OWN, needs="launch", otherwise=str(defaults.PORT))
    out: Path = setting(defaults.RESULTS, "results go to DIR/chaos-LABEL", KEPT, value="DIR")

    def check(self) -> None:
        if not self.launch:
            if self.all == (self.plan is not None):
                raise UsageError("give one of FILE and --all: which faults")
            return
        if self.plan is not None or self.all:
            raise UsageError("--launch chooses the plans itself: leave FILE and --all out")
        not_given(self, ("changes.duration_s", "dry_run", "base_url", "not_mine"), "--launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(parse(ChaosSettings, words), words))


def _run(settings: ChaosSettings, words: Sequence[str]) -> int:
    from pdlab.cluster import local_nodes, run_on_host
    from pdlab.cluster.namespaces import INSIDE
    from pdlab.core.files import replace
    from pdlab.faults import run as faults_run
    from pdlab.faults.node_restart import restarting_nodes
    from pdlab.faults.plan import load_plan
    from pdlab.results import chaos

    if settings.launch:
        from pdlab.faults.launched import launch_and_break

        passed_on = to_words(settings, only=("changes", "out"))
        return launch_and_break(passed_on, settings.launch_flag, settings.port or defaults.PORT, short=settings.short)
    name = "all" if settings.plan is None else Path(settings.plan).stem
    plan = load_plan(settings.plan or "all")
    changed = settings.changes | ({"rounds": 1} if "duration_s" in settings.changes else {})
    data = {**plan.model_dump(), **changed}
    plan = settings.value_of("changes", FaultPlan, data, where="the plan with these flags")
    order = settings.passed_to(faults_run.ChaosOrder, plan=plan, name=name, command=typed("chaos", *words))
    subject = faults_run.subject_of(order)
    folder = None
    if not settings.dry_run:
        folder = chaos.new_folder(settings.out, subject.manifest.label)
        order = order.model_copy(update={"folder": str(folder.resolve())})
    try:
        local = local_nodes.running() if subject.manifest.on_local_nodes else None
        if local is not None and local.two_hosts is not None and INSIDE not in os.environ:
            host = local.host(1)
            env = local_nodes.environment_on(host, local)
            with restarting_nodes(local):
                run_on_host.call(host.pid, "pdlab.faults.run", order.model_dump_json(), env)
        else:
            faults_run.execute(order)
    finally:
        if folder is not None and not any(folder.iterdir()):
            folder.rmdir()
    if folder is None:
        return 0
    from pdlab.report import chaos as report

    made = chaos.load(folder)
    text = report.text(made)
    replace(folder / "table.txt", f"{text}\n".encode())
    print(f"\n{text}\n\nKept in {folder}; plot: {command_line('viz', exps=(folder,))}")
    return 0 if report.well(made) else NOT_CLEAN


if __name__ == "__main__":
    sys.exit(main())
