"""Run an experiment: launch and measure one configuration after another, continue after failures, and stop everything
at the end.

The launcher starts each deployment in a separate process, which gets the launch request on its standard input. So this
process imports neither Ray nor vLLM, and a dying start does not end it. Local Ray nodes stay up from one deployment to
the next and are stopped at the end.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field

from pdlab.bench.experiment.file import started
from pdlab.bench.experiment.schedule import (
    Part,
    PlannedVisit,
    Schedule,
    earlier_record,
    settings_of,
    unfinished_work,
    visit_s,
)
from pdlab.bench.options import LevelOptions, SweepFlags
from pdlab.bench.progress import ExperimentProgress, Progress
from pdlab.bench.sweep import SweepOptions, SweepResult, all_answered, run_sweep
from pdlab.core import defaults
from pdlab.core.command_lines import flag_words
from pdlab.core.commands import python_words
from pdlab.core.errors import DeploymentDied, PdlabError, WriteError
from pdlab.core.files import ROOT
from pdlab.core.schema import Frozen
from pdlab.core.settings import FlagsOf, Port, Settings, serving_port, setting, to_words
from pdlab.core.workload import Load, Workload
from pdlab.deploy.endpoint import reach
from pdlab.deploy.options import FROM_STDIN, LaunchRequest, command_line, request_to_json
from pdlab.results.provenance import now
from pdlab.results.schema import ExperimentRecord, Run, SloSearch, VisitRecord
from pdlab.results.store import Store, write_record
from pdlab.steps.runner import ChildStep, StepEnd, StepRunner, as_typed

LAUNCHER = [str(ROOT / word) if word.endswith(".py") else word for word in python_words("launch")]
STOP_TIMEOUT_S = 120.0


EXPERIMENT, WHERE = "experiment", "where"  # titles of groups of flags


class RunOptions(Settings):
    """How to run a plan. ``command``: the exact command line."""

    resume: bool = setting(False, "measure only levels without a result; launch failed deployments again", EXPERIMENT)
    out: Path = setting(defaults.RESULTS, "results go to DIR/NAME", WHERE, value="DIR")
    port: Port = serving_port(WHERE)
    sweep: Annotated[dict[str, Any], FlagsOf(SweepFlags, WHERE, only=("client_processes",))] = Field(
        default_factory=dict
    )
    command: str = "pdlab.bench.experiment.run.run(...)"


class RunResult(Frozen):
    """``record`` has the outcome of every visit; ``runs`` and ``searches`` are all current results of the experiment,
    by folder, ``loads`` the requested ones.
    """

    folder: Path
    record: ExperimentRecord
    runs: dict[str, tuple[Run, ...]]
    searches: dict[str, tuple[SloSearch, ...]]
    loads: dict[str, tuple[Load, ...]]

    @property
    def valid(self) -> bool:
        """No visit failed, and each folder `all_answered`."""
        return not self.failed and all(
            all_answered(runs, self.searches[name], self.loads[name]) for name, runs in self.runs.items()
        )

    @property
    def failed(self) -> tuple[VisitRecord, ...]:
        return tuple(visit for visit in self.record.visits if visit.status == "failed")


class LaunchFailed(PdlabError):
    """A configuration did not start; the message is the launcher's own error."""


def run(
    plan: Schedule, options: RunOptions, stream: TextIO | None = None, enough: Callable[[int], str | None] | None = None
) -> RunResult:
    """Measure the levels of ``plan`` that have no result yet. If ``enough`` returns a reason after some repeats, the
    remaining repeats are left out of the record, which keeps the reason.

    A configuration that does not start is marked with its error, not tried again in this run, and the others go on.
    Raises StoreError when the folder holds another experiment, this one without ``resume`` or with damaged levels, or
    cannot be written; UsageError when another run writes it. KeyboardInterrupt passes through, after everything was
    stopped; all finished levels are kept.
    """
    folder = options.out / plan.file.name
    with Store(folder).held():
        return _run_held(plan, options, folder, stream, enough or (lambda repeats: None))


def _run_held(
    plan: Schedule, options: RunOptions, folder: Path, stream: TextIO | None, enough: Callable[[int], str | None]
) -> RunResult:
    writer = _RecordWriter(folder, plan, options)
    stores = {name: Store(folder / name) for name in plan.parts}
    for store in stores.values():
        for kept in store.runs():
            store.check_records(kept)
    estimates_s = [visit_s(plan, visit, folder) for visit in plan.visits]
    progress = ExperimentProgress(estimates_s, stream)
    launcher = _Launcher(plan, options, progress)
    try:
        for number, visit in enumerate(plan.visits):
            begins = number > 0 and visit.repeat != plan.visits[number - 1].repeat
            if begins and (reason := enough(visit.repeat)):
                progress.note(f"no more repeats: {reason}")
                writer.stop(number, reason)
                break
            if not estimates_s[number]:
                writer.done_before(number)
                continue
            progress.visit(number, f"{visit.configuration.name}, repeat {visit.repeat}")
            _visit(number, visit, plan, options, writer, launcher, progress)
    finally:
        progress.close()
        launcher.stop()
    runs = {name: tuple(store.runs()) for name, store in stores.items()}
    searches = {name: tuple(store.searches()) for name, store in stores.items()}
    loads = {name: part.loads for name, part in plan.parts.items()}
    return RunResult(folder=folder, record=writer.finish(), runs=runs, searches=searches, loads=loads)


def _visit(
    number: int,
    visit: PlannedVisit,
    plan: Schedule,
    options: RunOptions,
    writer: _RecordWriter,
    launcher: _Launcher,
    progress: ExperimentProgress,
) -> None:
    """Launch and measure one configuration. The visit keeps whatever goes wrong with it."""
    name = visit.configuration.name
    measured = False
    writer.update(number, started_at=now(), status="interrupted", command=launcher.typed_command(visit), error=None)
    try:
        began = time.monotonic()
        launcher.launch(visit)
        writer.update(number, launch_s=round(time.monotonic() - began, 1))
        for part in visit.parts:
            loads, searches = unfinished_work(part, visit.repeat, options.out / plan.file.name)
            if loads or searches:
                with reach(defaults.base_url(options.port)):
                    _sweep(part, visit, plan, options, progress)
        measured = True
    except LaunchFailed as error:
        launcher.failed_configurations.setdefault(name, str(error))
        writer.update(number, status="failed", error=str(error), finished_at=now())
        progress.visit_done(f"DID NOT START: {error}", measured=False)
    except WriteError:
        raise  # nothing more can be kept
    except DeploymentDied as error:
        # Nothing of it is left for the next deployment to stumble over.
        launcher.stop()
        writer.update(number, status="failed", error=str(error), finished_at=now())
        progress.visit_done(f"FAILED: {error}", measured=False)
    except PdlabError as error:
        writer.update(number, status="failed", error=str(error), finished_at=now())
        progress.visit_done(f"FAILED: {error}", measured=False)
    else:
        writer.update(number, status="done", finished_at=now())
        progress.visit_done("done", measured=measured)


def _sweep(part: Part, visit: PlannedVisit, plan: Schedule, options: RunOptions, progress: Progress) -> SweepResult:
    file = plan.file
    workload: Workload = part.workload.workload(file.seed)
    return run_sweep(
        SweepOptions(
            loads=part.loads,
            searches=part.searches,
            workload=workload,
            base_url=defaults.base_url(options.port),
            name=part.folder,
            only_repeat=visit.repeat,
            shuffle=f"{file.seed} {part.folder} {visit.repeat}",
            **{name: getattr(file, name) for name in LevelOptions.model_fields},
            resume=True,
            out=options.out / file.name,
            **options.sweep,
            tuning=plan.tuned.get(visit.configuration.name),
            retry_invalid=plan.tunes is not None,  # settings are compared only at loads that are valid with all
            command=f"{options.command}  # {part.folder}, repeat {visit.repeat}",
        ),
        progress,
    )


class _RecordWriter:
    """The experiment's record on disk, written at every change."""

    def __init__(self, folder: Path, plan: Schedule, options: RunOptions) -> None:
        """Raises StoreError, see `run`."""
        self._folder = folder
        earlier = earlier_record(folder, plan.file, resume=options.resume)
        before = {(visit.deployment, visit.repeat): visit for visit in earlier.visits} if earlier else {}
        visits = [
            before.get((v.configuration.name, v.repeat))
            or VisitRecord(deployment=v.configuration.name, repeat=v.repeat, status="planned")
            for v in plan.visits
        ]
        self._record = ExperimentRecord(
            name=plan.file.name,
            file=str(plan.path),
            experiment=settings_of(plan.file),
            folders={v.configuration.name: tuple(part.folder for part in v.parts) for v in plan.visits},
            visits=tuple(visits),
            tuned=plan.tuned,
            tunes=plan.tunes,
            commands=(*(earlier.commands if earlier else ()), options.command),
            started_at=earlier.started_at if earlier else now(),
        )
        self._write()

    def update(self, number: int, **changes: object) -> None:
        visits = list(self._record.visits)
        visits[number] = visits[number].model_copy(update=changes)
        self._write(visits=tuple(visits))

    def stop(self, number: int, reason: str) -> None:
        """The visits from that one on are not needed; what an earlier run measured of them stays."""
        kept = [v for i, v in enumerate(self._record.visits) if i < number or v.status != "planned"]
        self._write(visits=tuple(kept), stopped=reason)

    def done_before(self, number: int) -> None:
        if self._record.visits[number].status != "done":
            self.update(number, status="done", error=None)

    def finish(self) -> ExperimentRecord:
        self._write(finished_at=now())
        return self._record

    def _write(self, **changes: object) -> None:
        self._record = self._record.model_copy(update=changes)
        write_record(self._folder, self._record)


class _Launcher:
    """The launcher's process, as often as there are visits; and its end."""

    def __init__(self, plan: Schedule, options: RunOptions, progress: ExperimentProgress) -> None:
        self._plan = plan
        self._options = options
        self._progress = progress
        self._hosts: object = None
        self._up = False
        self._runner = StepRunner()
        self.failed_configurations: dict[str, str] = {}

    def typed_command(self, visit: PlannedVisit) -> str:
        """The command as a person would type it."""
        return command_line(to_words(started(self._plan.file, visit.configuration.settings, self._options.port)))

    def request(self, visit: PlannedVisit) -> LaunchRequest:
        """The launch request of that command."""
        return visit.configuration.request.model_copy(
            update={"port": self._options.port, "command": (self.typed_command(visit),)}
        )

    def launch(self, visit: PlannedVisit) -> None:
        """Returns when it is ready and checked. Raises LaunchFailed."""
        name = visit.configuration.name
        if name in self.failed_configurations:
            raise LaunchFailed(f"not tried again: {self.failed_configurations[name]}")
        hosts = visit.configuration.request.two_hosts
        if self._up and self._hosts not in (None, hosts):
            self.stop()  # other nodes
        self._hosts, self._up = hosts, True
        end = self._run(FROM_STDIN, stdin=request_to_json(self.request(visit)), on_wait=self._launching)
        if self._runner.interrupted:
            raise KeyboardInterrupt
        if end.exit_code:
            message = end.failure.message if end.failure else None
            raise LaunchFailed(message or f"exit code {end.exit_code}: {end.last_line or 'it printed nothing'}")

    def stop(self) -> None:
        """Stop the deployment and the local nodes. A second Ctrl-C does not interrupt this."""
        if not self._up:
            return
        self._up, self._hosts = False, None
        words = flag_words("launch", shutdown=True, port=self._options.port)
        end = self._run(*words, limit_s=STOP_TIMEOUT_S, always=True)
        if end.verdict == "timed out":
            command = as_typed([*LAUNCHER, *words])
            self._progress.note(f"the shutdown took more than {STOP_TIMEOUT_S:g} s: {command}")
        elif end.exit_code:
            self._progress.note(f"the shutdown ended with code {end.exit_code}: {end.reason or 'it printed nothing'}")

    def _run(
        self,
        *words: str,
        stdin: str = "",
        limit_s: float = math.inf,
        always: bool = False,
        on_wait: Callable[[float, str | None], None] | None = None,
    ) -> StepEnd:
        """Run the launcher to its end."""
        with tempfile.TemporaryDirectory(prefix="pdlab-launch-") as folder:
            argv, log = (*LAUNCHER, *words), Path(folder) / "log"
            here = Path.cwd()  # a request may name files from there
            step = ChildStep(argv, log=log, stdin=stdin, limit_s=limit_s, always=always, cwd=here)
            return self._runner.run(step, on_wait=on_wait)

    def _launching(self, elapsed_s: float, last_line: str | None) -> None:
        if last_line:
            self._progress.waiting(f"launching: {last_line}")
