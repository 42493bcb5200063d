"""Launch, measure and stop each deployment of the demo, then draw the results.

It runs the commands that a person would type, and prints them.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlab.bench.levels import num_requests
from pdlab.cluster.machine import Machine
from pdlab.core import defaults
from pdlab.core.command_lines import child_words, flag_words
from pdlab.core.commands import python_words
from pdlab.core.deployment import parse_label, topology_words
from pdlab.core.errors import StoreError
from pdlab.core.exit_code import INTERRUPTED, NOT_CLEAN
from pdlab.core.files import ROOT
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Workload
from pdlab.demo.choice import ENGINES, conditions, nodes_are_up, slower_by
from pdlab.demo.clock import DemoClock
from pdlab.results.schema import Run
from pdlab.results.store import Store
from pdlab.steps.runner import RAN, ChildStep, StepEnd, StepRunner, StepVerdict, as_typed

NO_PLOT = 1
STOPPED = "the demo was interrupted"
REPORT_EVERY_S = 20.0
# Measured on two idle cores. `DemoClock` corrects them.
LAUNCH_S, SWEEP_START_S, REQUEST_S = 25.0, 20.0, 0.1
LAUNCH_CODES: dict[int, StepVerdict] = {0: "ok"}
SWEEP_CODES: dict[int, StepVerdict] = {0: "ok", NOT_CLEAN: "finding"}


# PD comes first, because it is what people want to see. The collocated engines use as many CPUs as the pairs.
DEPLOYMENTS = ("pd-spread-p1xtp1-d1xtp1", "pd-pack-p1xtp1-d1xtp1", "collocated-2xtp1")
REAL = """
What the plot shows: real deployments of one tiny model on this machine. The engines are vLLM on the CPU; in PD
(pd-spread, pd-pack) NIXL transfers the KV cache of each request from the prefill engine to the decode engine."""
PACK_AND_SPREAD = """\
- PD spread against PD pack: both Ray nodes are this machine, and the KV cache takes the same path (shared memory).
  A difference between these two curves is noise here."""
PD_AND_COLLOCATED = """\
- PD against collocated: at the same TPOT (time per output token), the higher curve serves more tokens per second. The
  TTFT panels show what PD adds to the time to first token."""
NO_H100 = "Small engines on shared cores do not predict H100s. The same commands without --local measure those."


@dataclass
class DemoPart:
    """The results of one deployment. ``error``: why not all of its levels were measured."""

    name: str
    error: str | None = None
    runs: tuple[Run, ...] = ()

    @property
    def valid(self) -> int:
        return sum(run.validity.valid for run in self.runs)


class Demo:
    """One run of the demo. After a signal to stop, it still shuts the deployment down and draws the plot."""

    def __init__(self, out: Path, port: int, levels: Sequence[int], workload: Workload, host: Machine) -> None:
        slower = slower_by(host)
        self._conditions = conditions(host)
        self._out = out
        self._port = port
        self._levels = levels
        load = {"type": "concurrency", "concurrency": tuple(levels), **workload.bench_fields, "retry_invalid": True}
        self._load = {**load, "base_url": defaults.base_url(port), "out": _shown_path(out)}
        sweep_s = SWEEP_START_S + REQUEST_S * sum(num_requests(Closed(concurrency=level), workload) for level in levels)
        steps = [("launch", LAUNCH_S * slower), ("sweep", sweep_s * slower)]
        self._clock = DemoClock(steps * len(DEPLOYMENTS))
        self._parts: list[DemoPart] = []
        self._runner = StepRunner(lambda: self._print("stopping; the plot of what was measured follows"))
        self._mute = False

    def run(self) -> int:
        """Measure all deployments, draw the plot, print the tables and what they mean. Returns the exit code."""
        about = math.ceil(self._clock.left_s() / 60)
        self._print(f"- it takes about {counted(about, 'minute')}; Ctrl-C ends it with a plot of what was measured")
        with self._runner.listening():
            try:
                for number, label in enumerate(DEPLOYMENTS):
                    part = DemoPart(label)
                    self._parts.append(part)
                    self._measure(part, number)
            finally:
                self._stop()
            for part in self._parts:
                part.runs = measured_levels(self._out / part.name)
            plot = self._draw()
        if plot:
            self._print(meaning([part.name for part in self._parts if part.runs]))
        self._print(self._summary())
        self._print(f"\nplot: {plot or 'none: nothing could be drawn'}\nlogs: {self._out / 'logs'}")
        self._print(f"took {self._clock.elapsed_s / 60:.1f} minutes")
        if self._runner.interrupted:
            return INTERRUPTED
        if plot is None:
            return NO_PLOT
        return 0 if all(part.valid for part in self._parts) else NOT_CLEAN

    def _measure(self, part: DemoPart, number: int) -> None:
        name = part.name
        where = flag_words("launch", local=defaults.LOCAL_NODES, detach=True, port=self._port)
        launch = (*python_words("launch"), *topology_words(parse_label(name)), *where)
        sweep = child_words("bench", name=name, **self._load)
        for step, (kind, argv, codes) in enumerate((("launch", launch, LAUNCH_CODES), ("sweep", sweep, SWEEP_CODES))):
            if self._runner.interrupted:
                part.error = STOPPED
                return
            self._clock.begin(2 * number + step)
            self._print(f"\n[{self._clock.step + 1} of {self._clock.steps}; {self._clock}] {kind} of {name}")
            log = self._out / "logs" / f"{kind}-{name}.log"
            end = self._command(ChildStep(argv, log=log, codes=codes))
            if end.verdict in RAN:
                self._clock.end()
            elif self._runner.interrupted:
                part.error = STOPPED
                return
            else:
                failed = "did not start" if kind == "launch" else "its sweep failed"
                reason = end.reason or f"it ended with code {end.exit_code} and printed nothing"
                kept = [_shown_path(path) for path in (log, self._keep_logs(end, name)) if path]
                part.error = f"{failed}: {reason}; logs: {', '.join(kept)}"
                self._print(f"\n{name} {part.error}\nthe demo continues without it")
                self._stop()  # its leftovers must not disturb the next deployment
                return

    def _keep_logs(self, end: StepEnd, name: str) -> Path | None:
        """Copy the engines' logs, because the launcher's next failure replaces them. Returns where they are."""
        path = end.failure.logs if end.failure else None
        if path is None or not path.is_dir():
            return None
        own = self._out / "logs" / f"engines-{name}"
        try:
            shutil.copytree(path, own, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        except OSError:
            return path
        return own

    def _stop(self) -> None:
        """Shut down the deployment and the local nodes, if there are any."""
        if nodes_are_up():
            argv = child_words("launch", shutdown=True, port=self._port)
            self._command(ChildStep(argv, log=self._out / "logs/stop.log", always=True))

    def _draw(self) -> Path | None:
        """Draw the plot and print the tables. Returns the plot's path; None if nothing could be drawn."""
        drawn = [part for part in self._parts if part.runs]
        if not drawn:
            return None
        shortfalls = [self._note(part) for part in self._parts if part.error]
        plot = self._out / "demo.png"
        folders = tuple(_shown_path(self._out / part.name) for part in drawn)
        view = {"normalized": True, "gpus_per_node": ENGINES}
        notes = (*shortfalls, *self._conditions)
        argv = child_words("viz", exps=folders, view=view, note=notes, plot_path=_shown_path(plot))
        # An interrupted demo still draws its plot.
        end = self._command(ChildStep(argv, log=self._out / "logs/viz.log", always=self._runner.interrupted))
        return plot if end.verdict in RAN else None

    def _note(self, part: DemoPart) -> str:
        if not part.runs:
            return f"Not measured: {part.name}: {part.error}"
        return f"{len(part.runs)} of {counted(len(self._levels), 'level')} measured: {part.name}: {part.error}"

    def _summary(self) -> str:
        """One line per deployment."""
        lines = []
        for part in self._parts:
            text = f"{part.name}: {part.valid} of {counted(len(self._levels), 'level')} valid"
            bad = [run for run in part.runs if not run.validity.valid]
            text += f", {len(bad)} not valid (hollow and crossed in the plot)" if bad else ""
            twice = [run.key.stem for run in part.runs if run.replaces]
            text += f", measured twice: {', '.join(twice)}" if twice else ""
            lines.append(f"\n{text}" + (f"\n  {part.error}" if part.error else ""))
            lines += [f"\n  {run.key.stem}: {'; '.join(run.validity.reasons)}" for run in bad]
        return "".join(lines)

    def _command(self, step: ChildStep) -> StepEnd:
        """Run a step. Show and log its output."""
        self._print(f"\n$ {as_typed(step.argv)}")
        return self._runner.run(step, self._print, self._report, REPORT_EVERY_S)

    def _report(self, elapsed_s: float, last_line: str | None) -> None:
        if not self._runner.interrupted:
            self._print(f"-- demo: step {self._clock.step + 1} of {self._clock.steps}, {self._clock}")

    def _print(self, text: str) -> None:
        """Print. If nobody reads the output any more, stop the demo cleanly."""
        if self._mute:
            return
        try:
            print(text, flush=True)
        except OSError:
            self._mute = True
            with Path(os.devnull).open("wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
            self._runner.interrupt()


def meaning(names: Sequence[str]) -> str:
    """What the plot of these deployments shows, and what it does not."""
    pd = [name for name in names if name.startswith("pd-")]
    lines = [REAL]
    lines += [PACK_AND_SPREAD] if len(pd) > 1 else []
    lines += [PD_AND_COLLOCATED] if pd and len(names) > len(pd) else []
    return "\n".join([*lines, NO_H100])


def measured_levels(folder: Path) -> tuple[Run, ...]:
    """The measured levels of a folder; empty if they cannot be read."""
    try:
        return tuple(Store(folder).runs())
    except StoreError:
        return ()


def _shown_path(path: Path) -> str:
    """The path; relative to the project's folder if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
