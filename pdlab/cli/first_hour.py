"""The first thing to run on booked nodes: from the doctor to a report, in under an hour; see --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pdlab.core import defaults
from pdlab.core.arguments import MODEL_HELP
from pdlab.core.catalog import known_models, load_cluster, resolve_model
from pdlab.core.commands import PDLAB, require_installed
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import NOT_CLEAN, command
from pdlab.core.files import ROOT, cache_dir, known_cache_dir
from pdlab.core.output_paths import check_folder
from pdlab.core.settings import Port, Settings, parse, serving_port, setting
from pdlab.core.text import duration
from pdlab.deploy.options import REHEARSED_CLUSTER, LaunchSettings, request_from
from pdlab.deploy.prepared import checked_model, prepared_launch
from pdlab.first_hour import archive
from pdlab.first_hour.run import FirstHourState, open_state, run
from pdlab.first_hour.steps import MOST_TOTAL_S, RunsOn, Step, plan, remaining_steps, total_s
from pdlab.remote.home import home_folder
from pdlab.steps.runner import RAN, as_typed

LENGTHS: dict[RunsOn, tuple[int, int]] = {"cluster": (5000, 250), "local": (256, 32), "rehearsal": (2000, 100)}

EPILOG = f"""\
examples:
  {PDLAB} first-hour --dry-run       every step with its command, estimate and limit; starts nothing
  {PDLAB} first-hour                 on the Ray cluster of this machine: two p5.48xlarge
  {PDLAB} first-hour --resume        continue after you fixed what failed; finished steps are kept
  {PDLAB} first-hour --local         the same steps on this machine's CPUs, as a test
  {PDLAB} first-hour --rehearse      the serving and measuring steps, on fake GPUs with simulated engines

A step that fails stops only the steps that need it. It always ends with one archive (logs, logs of failed
replicas, the doctor's facts, manifests, verdicts) from which tokens, keys and passwords are removed.

exit code: 0 every step ended well, 3 some did not, 2 bad command line, 130 interrupted (the archive is there)
models of configs/models/: {", ".join(known_models())}
"""


WHAT, HOW = "what is run, and where", "how"


class FirstHourSettings(Settings):
    """What to run in the first hour, and where."""

    COMMAND = "first-hour"
    ABOUT = "Run all steps on newly booked nodes, from the doctor to a report, in under an hour."
    EXAMPLES = EPILOG
    EXCLUSIONS = (
        (
            "local",
            "rehearse",
            "{} and {} exclude each other: real engines on CPUs, or simulated ones on GPUs",
        ),
    )

    local: bool = setting(False, "use CPU engines on this machine; needs no cluster", WHAT)
    rehearse: bool = setting(False, "use fake nodes on this machine, with simulated engines (docs/rehearsal.md)", WHAT)
    model: str | None = setting(
        None,
        MODEL_HELP,
        WHAT,
        value="NAME|PATH",
        otherwise=f"{defaults.MODEL}; with --local {defaults.LOCAL_MODEL}",
    )
    out: Path | None = setting(None, "folder of the results", WHAT, value="DIR", otherwise="first-hour in bm_results/")
    port: Port = serving_port(WHAT)
    resume: bool = setting(False, "continue the run in --out", HOW)
    dry_run: bool = setting(False, "print the steps; start nothing", HOW)

    def check(self) -> None:
        if self.local and self.model not in (None, defaults.LOCAL_MODEL):
            raise UsageError(f"--model {self.model}: --local serves {defaults.LOCAL_MODEL}; leave one of the two out")


@command(FirstHourSettings)
def main(settings: FirstHourSettings) -> int:
    """Run the steps."""
    local, rehearse, port = settings.local, settings.rehearse, settings.port
    model = settings.model or (defaults.LOCAL_MODEL if local else defaults.MODEL)
    try:
        resolve_model(model)
    except UsageError as error:
        raise UsageError(f"--model {model}: {error}") from error
    out = settings.out or ROOT / defaults.RESULTS / "first-hour"
    check_folder(out, "--out", written=not settings.dry_run)
    out = out.absolute()
    where: RunsOn = "local" if local else "rehearsal" if rehearse else "cluster"
    steps = plan(out, where=where, model=model, port=port, lengths=LENGTHS[where])
    left_out = refused_checks(steps)
    steps = tuple(step for step in steps if step.name not in left_out)
    for name, reason in left_out.items():
        print(f"warning: step {name} is left out: {reason}", file=sys.stderr)
    for warning in refused_launches(steps, model):
        print(f"warning: {warning}", file=sys.stderr)
    run_as = {"model": model, "local": local, "port": port} | ({"rehearse": True} if rehearse else {})
    state = open_state(out, run_as, resume=settings.resume)
    if settings.dry_run:
        print(describe(steps, state))
        return 0
    if remaining_steps(steps, {name: outcome.verdict for name, outcome in state.outcomes.items()}):
        require_installed("ray")
        cache_dir()  # launches need it
    print(describe(steps, state), file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    try:
        state = run(steps, out, state, lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        secrets = archive.known_secrets(os.environ, archive.secret_files(home_folder(), known_cache_dir(), os.environ))
        made = archive.write(out, secrets)
        print(f"archive, to send to whoever helps: {made}", file=sys.stderr)
    print(verdicts(steps, state))
    return 0 if all(outcome.verdict == "ok" for outcome in state.outcomes.values()) else NOT_CLEAN


def refused_checks(steps: Sequence[Step]) -> dict[str, str]:
    """KV-transfer step -> why the check cannot move the model's KV cache."""
    from pdlab.transfer.options import CheckTransferSettings, plan_from

    reasons = {}
    for step in steps:
        command, *words = step.command
        if command == CheckTransferSettings.COMMAND:
            try:
                plan_from(parse(CheckTransferSettings, words))
            except UsageError as error:
                reasons[step.name] = str(error)
    return reasons


def refused_launches(steps: Sequence[Step], model: str) -> list[str]:
    """The launches that will be refused, with the reasons. Of nodes that are not known before the run, what those of
    the rehearsal would refuse is among them. Raises UsageError if no launch can be made."""
    certain, likely, launches = [], [], [step for step in steps if step.serves]
    for step in launches:
        words = step.command[1:]
        try:
            request = request_from(parse(LaunchSettings, words), words)
            checked, view = checked_model(request), request.known_view()
            if view is not None:
                prepared_launch(request, checked, view)
        except UsageError as error:
            certain.append(f"step {step.name} will be refused: {error}")
            continue
        if view is None:
            try:
                prepared_launch(request, checked, load_cluster(REHEARSED_CLUSTER))
            except UsageError as error:
                likely.append(f"step {step.name} would be refused on {REHEARSED_CLUSTER}: {error}")
    if launches and len(certain) == len(launches):
        raise UsageError(
            f"--model {model}: every launch of the first hour will be refused; the first, {certain[0]}; take another "
            f"model, or list deployments for {PDLAB} experiment (docs/experiment.md)"
        )
    return [*certain, *likely]


def describe(steps: Sequence[Step], state: FirstHourState | None = None) -> str:
    """The steps with their estimates, time limits and commands, and the total estimate."""
    lines = []
    for number, step in enumerate(steps, start=1):
        before = state.outcomes.get(step.name) if state else None
        done = " (done)" if before and before.verdict in RAN and not step.always else ""
        needs = f"; needs {', '.join(step.needs)}" if step.needs else ""
        needs += f"; needs one of {', '.join(step.any_of)}" if step.any_of else ""
        lines.append(f"{number:2d} {step.name}: {step.title}{done}")
        lines.append(f"     about {duration(step.estimate_s)}, ended after {duration(step.limit_s)}{needs}")
        lines.append(f"     {as_typed(['-m', 'pdlab', *step.command])}")
    total = total_s(tuple(steps))
    lines.append(f"estimate: {duration(total)} in all (of at most {duration(MOST_TOTAL_S)})")
    return "\n".join(lines)


def verdicts(steps: Sequence[Step], state: FirstHourState) -> str:
    """One line per step, and what to do after a step that did not end ok."""
    lines = []
    for step in steps:
        outcome = state.outcomes.get(step.name)
        if outcome is None:
            continue
        lines.append(f"{outcome.verdict.upper():11} {step.name}: {outcome.detail}")
        if outcome.next_action:
            lines.append(f"{'':11} next: {outcome.next_action}")
    return "\n".join(lines)
