"""``make demo``: pd-spread, pd-pack and collocated on this machine, a short sweep of each, one plot.

Runs the very commands that a person would type, and prints them. It looks at the machine first and continues after a
failure: a deployment that does not start is named with its error under the plot of the others, an invalid level
is measured once more and then shown hollow and crossed. Ctrl-C ends it with the plot of what was measured.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from pdlab.bench.levels import num_requests
from pdlab.bench.progress import minutes
from pdlab.cli.bench import CONCURRENCIES
from pdlab.cluster import local_nodes, machine
from pdlab.cluster.machine import Machine
from pdlab.core.arguments import INTERRUPTED, check_folder, exit_code
from pdlab.core.commands import python_words
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.files import ROOT, cache_dir
from pdlab.core.settings import Port, Positive, Settings, parse, setting
from pdlab.core.workload import Closed
from pdlab.results.schema import Run
from pdlab.results.store import Store

EPILOG = """\
examples:
  make demo
      the whole of it, in minutes
  python -m pdlab demo -c 1,4 --out out/demo
      two levels, kept in a folder of your own
  python -m pdlab demo --itl 1024 --otl 32
      longer prompts and shorter answers

It continues after a failure: a deployment that does not start is named under the plot of the others. Ctrl-C ends it
with the plot of what was measured.

Exit codes: 0 the plot has a valid level of each deployment; 3 there is a plot, but a deployment has none;
1 nothing could be measured or drawn; 2 bad input, or a machine on which the demo cannot run;
130 interrupted (the plot of what was measured is drawn all the same).
"""
PORT = 8000
NO_PLOT, INCOMPLETE = 1, 3
ENGINES = 2
LEVELS, FEWER_LEVELS = (1, 2, 4, 8, 16), (1, 2, 4, 8)
# Measured on 2 cores: the proportional set sizes of the demo's processes sum up to 6.6 GB at the peak. Part of that
# are pages of files, which give way; with less than 4 GB the engines do not fit beside each other.
MEMORY_PEAK_BYTES = 6.6e9
MEMORY_NEED_BYTES = 4e9
DISK_NEED_BYTES = 1e9
STOPPED = "the demo was interrupted"
REPORT_EVERY_S = 20.0
END_WAIT_S = 120.0
POLL_S = 0.5
# Measured on two idle cores; what finished steps really took corrects them.
LAUNCH_S, SWEEP_START_S, REQUEST_S = 25.0, 20.0, 0.1
ESTIMATED_CORES = 2.0


class Shown(NamedTuple):
    """A deployment of the demo: the folder of its results, and the launcher's flags."""

    name: str
    flags: tuple[str, ...]


# In this order a person sees PD work first; the collocated engines use as many CPUs as the pairs.
DEPLOYMENTS = (
    Shown("pd-spread-p1xtp1-d1xtp1", ("--pd-spread", "--p-num", "1", "--p-tp", "1", "--d-num", "1", "--d-tp", "1")),
    Shown("pd-pack-p1xtp1-d1xtp1", ("--pd-pack", "--p-num", "1", "--p-tp", "1", "--d-num", "1", "--d-tp", "1")),
    Shown("collocated-2xtp1", ("--collocated", "--num", "2", "--tp", "1")),
)
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
ON_THE_PLOT = (
    "Two small CPU engines per deployment, all on one machine: pack and spread differ by noise alone here, and nothing "
    "of this predicts GPUs."
)


class Choice(NamedTuple):
    """What the demo measures, and why, in sentences."""

    levels: tuple[int, ...]
    why: tuple[str, ...]


@dataclass
class DemoPart:
    """What became of one deployment: ``error`` says why it was not measured, or not completely."""

    name: str
    error: str | None = None
    runs: tuple[Run, ...] = ()

    @property
    def valid(self) -> int:
        return sum(run.validity.valid for run in self.runs)


MEASURED, WHERE = "what is measured", "where"


class DemoSettings(Settings):
    """What ``make demo`` measures, and where."""

    PROG = "python -m pdlab demo"
    ABOUT = "Serve three deployments of a tiny model on this machine, sweep each, and plot them (make demo)."
    EXAMPLES = EPILOG

    concurrency: Annotated[tuple[int, ...], CONCURRENCIES] | None = setting(
        None,
        "levels of each sweep",
        MEASURED,
        "-c",
        "--concurrency",
        value="N,N,...",
        otherwise=f"{','.join(map(str, LEVELS))}, or fewer on a small or busy machine",
    )
    itl: Positive = setting(256, "input tokens", MEASURED, value="TOKENS")
    otl: Positive = setting(64, "output tokens", MEASURED, value="TOKENS")
    out: Path | None = setting(
        None, "folder of the results", WHERE, value="DIR", otherwise="demo-DATE-TIME in bm_results/"
    )
    port: Port | None = setting(None, "port to serve on", WHERE, otherwise=f"{PORT}, or a free one if that is taken")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    return exit_code(lambda: _main(parse(DemoSettings, sys.argv[1:] if argv is None else argv)))


def _main(settings: DemoSettings) -> int:
    from pdlab.core.catalog import load_model
    from pdlab.deploy.options import LOCAL_MODEL

    out = (settings.out or ROOT / "bm_results" / f"demo-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    shape = load_model(LOCAL_MODEL)
    if shape is not None and settings.itl + settings.otl > shape.max_context:
        raise UsageError(
            f"--itl {settings.itl} and --otl {settings.otl}: {LOCAL_MODEL} has a context of {shape.max_context} "
            "tokens; shorten one"
        )
    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty; choose another folder")
    with _port(settings.port) as chosen:
        host = machine.look()
        refuse_if_too_small(host, (out, cache_dir(), Path(tempfile.gettempdir())))
        if _nodes_are_up():
            raise UsageError(
                "a deployment on local Ray nodes is up, and the demo would take its place; "
                "stop it first: python launch_gptoss.py --shutdown"
            )
        choice = choose(host, settings.concurrency)
        print(f"This machine: {describe(host, out)}")
        for line in choice.why:
            print(f"- {line}")
        print(
            f"- {settings.itl} tokens in, {settings.otl} out: short requests, so that a level takes seconds on a CPU",
            flush=True,
        )
        (out / "logs").mkdir(parents=True, exist_ok=True)
        return _Demo(out, chosen, choice.levels, str(settings.itl), str(settings.otl), host).run()


def refuse_if_too_small(host: Machine, folders: Sequence[Path]) -> None:
    """Raises UsageError where the demo cannot work: too little memory or disk."""
    free = host.memory_free_bytes
    if free is not None and free < MEMORY_NEED_BYTES:
        raise UsageError(
            f"{free / 1e9:.1f} GB of memory are free, the demo needs {MEMORY_NEED_BYTES / 1e9:.0f} GB at least "
            f"for Ray, {ENGINES} engines and the load generator; end other programs, or raise the "
            "container's memory limit"
        )
    for folder in folders:
        left = machine.disk_free_bytes(folder)
        if left is not None and left < DISK_NEED_BYTES:
            raise UsageError(
                f"{left / 1e9:.1f} GB of disk are free for {folder}, the demo needs {DISK_NEED_BYTES / 1e9:.0f} GB; "
                "free some, or choose other folders with --out, $PDLAB_CACHE_DIR, $TMPDIR"
            )


def choose(host: Machine, requested: tuple[int, ...] | None) -> Choice:
    """Levels and engines for this machine."""
    why = [
        f"{ENGINES} engines per deployment: the fewest that PD can have (1 prefill, 1 decode), and as many collocated "
        "ones to compare with; more would share the same cores"
        if host.cores < 8
        else f"{ENGINES} engines per deployment: the fewest that PD can have (1 prefill, 1 decode), and as many "
        "collocated ones to compare with; the demo stays short"
    ]
    if requested is not None:
        levels, reason = requested, "as asked"
    elif host.cores < 2:
        levels, reason = FEWER_LEVELS, f"without {LEVELS[-1]}, because {_cores(host.cores)} for all processes is few"
    elif host.idle_cores is not None and host.idle_cores < 1:
        levels = FEWER_LEVELS
        reason = f"without {LEVELS[-1]}, because other programs leave {host.idle_cores:.1f} of {_cores(host.cores)}"
    else:
        levels, reason = LEVELS, "from an idle deployment to one that queues"
    why.append(f"concurrency {', '.join(map(str, levels))} ({reason})")
    if host.busy:
        names = ", ".join(f"{each.name} (pid {each.pid}) {each.cores:.1f}" for each in host.busy[:3])
        why.append(
            f"other programs use cores: {names}; figures measured beside them are worse, and levels may be invalid: "
            "those are measured once more"
        )
    if host.memory_free_bytes is not None and host.memory_free_bytes < MEMORY_PEAK_BYTES:
        why.append(
            f"memory is scarce: {host.memory_free_bytes / 1e9:.1f} GB are free, and the demo used up to "
            f"{MEMORY_PEAK_BYTES / 1e9:.1f} GB where it was measured; an engine may be killed"
        )
    return Choice(levels, tuple(why))


def conditions(host: Machine) -> list[str]:
    """What whoever sees the plot alone must know."""
    notes = [ON_THE_PLOT]
    if host.busy and host.idle_cores is not None:
        notes.append(
            f"Other programs were running: {host.idle_cores:.1f} of {_cores(host.cores)} were idle at the beginning."
        )
    return notes


def slower_by(host: Machine) -> float:
    """Factor on the times of two idle cores, for the first estimate."""
    idle = host.cores if host.idle_cores is None else host.idle_cores
    return max(1.0, ESTIMATED_CORES / max(0.5, idle))


def describe(host: Machine, out: Path) -> str:
    """One line: cores, memory, disk, load."""
    parts = [_cores(host.cores)]
    if host.idle_cores is not None:
        parts[0] += f" ({host.idle_cores:.1f} idle)"
    if host.memory_free_bytes is not None and host.memory_bytes is not None:
        parts.append(f"{host.memory_free_bytes / 1e9:.1f} of {host.memory_bytes / 1e9:.1f} GB memory free")
    disk = machine.disk_free_bytes(out)
    if disk is not None:
        parts.append(f"{disk / 1e9:.0f} GB disk free")
    if host.load_average is not None:
        parts.append(f"load average {host.load_average:.1f}")
    return ", ".join(parts)


def _cores(count: float) -> str:
    return f"{count:g} core" + ("" if count == 1 else "s")


@contextlib.contextmanager
def _port(requested: int | None) -> Iterator[int]:
    """The port to serve on, kept from other programs during the block where it is a free one of the kernel's choice.

    Raises UsageError where the one that was asked for is taken.
    """
    if requested is not None and not 0 < requested < 65536:
        raise UsageError(f"--port {requested}: a port is 1 to 65535")
    port = PORT if requested is None else requested
    with contextlib.ExitStack() as stack:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if requested is not None:
                    raise UsageError(f"--port {port} cannot be used ({error.strerror}); choose another") from error
                held, port = local_nodes.hold_port()
                stack.enter_context(held)
                print(f"port {PORT} is taken by another program: serving on {port}")
        yield port


def _nodes_are_up() -> bool:
    try:
        return local_nodes.running() is not None
    except UsageError:  # another launch is starting them, or their record is damaged
        return True


class DemoClock:
    """How long the steps of the demo take: estimates, corrected by what finished steps of that kind took."""

    def __init__(self, estimates_s: Sequence[tuple[str, float]], now: Callable[[], float] = time.monotonic) -> None:
        self._estimates = list(estimates_s)
        self._now = now
        self._began = self._step_began = now()
        self._took: dict[int, float] = {}
        self.step = -1

    @property
    def steps(self) -> int:
        return len(self._estimates)

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._began

    def begin(self, step: int) -> None:
        """Step ``step`` (from 0) begins; steps before it that never began are left out."""
        self.step, self._step_began = step, self._now()

    def end(self) -> None:
        self._took[self.step] = self._now() - self._step_began

    def left_s(self) -> float:
        """Seconds to go, the running step's rest included."""
        left = 0.0
        for step, (kind, estimate_s) in enumerate(self._estimates):
            expected_s = estimate_s * self._correction(kind)
            if step == self.step and step not in self._took:
                spent_s = self._now() - self._step_began
                left += max(expected_s - spent_s, 0.1 * spent_s)  # overdue: somewhat longer
            elif step > self.step:
                left += expected_s
        return left

    def _correction(self, kind: str) -> float:
        same = [step for step in self._took if self._estimates[step][0] == kind] or list(self._took)
        return sum(self._took[s] for s in same) / sum(self._estimates[s][1] for s in same) if same else 1.0

    def __str__(self) -> str:
        return f"{minutes(self.elapsed_s)} elapsed, about {minutes(self.left_s())} left"


class _Demo:
    """One run of the demo. A signal to stop reaches the running command once, and the commands after it not at all."""

    def __init__(self, out: Path, port: int, levels: Sequence[int], itl: str, otl: str, host: Machine) -> None:
        slower = slower_by(host)
        self._conditions = conditions(host)
        self._out = out
        self._port = port
        self._levels = levels
        load = ["-t", "concurrency", "-c", ",".join(map(str, levels)), "--itl", itl, "--otl", otl]
        self._load = [*load, "--retry-invalid", "-u", f"http://127.0.0.1:{port}", "--out", _shown_path(out)]
        sweep_s = SWEEP_START_S + REQUEST_S * sum(num_requests(Closed(concurrency=level)) for level in levels)
        steps = [("launch", LAUNCH_S * slower), ("sweep", sweep_s * slower)]
        self._clock = DemoClock(steps * len(DEPLOYMENTS))
        self._parts: list[DemoPart] = []
        self._stopping = self._stopping_printed = False
        self._to_interrupt: list[subprocess.Popen[bytes]] = []
        self._mute = False

    def run(self) -> int:
        """All deployments, the plot, the tables, what they mean; returns the exit code."""
        about = math.ceil(self._clock.left_s() / 60)
        self._print(f"- it takes about {about} minutes; Ctrl-C ends it with a plot of what was measured")
        with self._signals():
            try:
                for number, shown in enumerate(DEPLOYMENTS):
                    part = DemoPart(shown.name)
                    self._parts.append(part)
                    self._measure(shown, part, number)
            finally:
                self._stop()
            for part in self._parts:
                part.runs = kept(self._out / part.name)
            plot = self._draw()
        if plot:
            self._print(meaning([part.name for part in self._parts if part.runs]))
        self._print(self._summary())
        self._print(f"\nplot: {plot or 'none: nothing could be drawn'}\nlogs: {self._out / 'logs'}")
        self._print(f"took {self._clock.elapsed_s / 60:.1f} minutes")
        if self._stopping:
            return INTERRUPTED
        if plot is None:
            return NO_PLOT
        return 0 if all(part.valid for part in self._parts) else INCOMPLETE

    def _measure(self, shown: Shown, part: DemoPart, number: int) -> None:
        launch = [*python_words("launch"), *shown.flags, "--local", "--detach", "--port", str(self._port)]
        sweep = ["-m", "pdlab", "bench", "-e", shown.name, *self._load]
        for step, (kind, words, fine) in enumerate((("launch", launch, (0,)), ("sweep", sweep, (0, INCOMPLETE)))):
            if self._stopping:
                part.error = STOPPED
                return
            self._clock.begin(2 * number + step)
            self._print(f"\n[{self._clock.step + 1} of {self._clock.steps}; {self._clock}] {kind} of {shown.name}")
            log = self._out / "logs" / f"{kind}-{shown.name}.log"
            code, lines = self._command(words, log)
            if code in fine:
                self._clock.end()
            elif self._stopping:
                part.error = STOPPED
                return
            else:
                failed = "did not start" if kind == "launch" else "its sweep failed"
                where = [_shown_path(path) for path in (log, self._keep_logs(lines, shown.name)) if path]
                part.error = f"{failed}: {complaint(lines, code)}; logs: {', '.join(where)}"
                self._print(f"\n{shown.name} {part.error}\nthe demo continues without it")
                self._stop()  # what is left of it must not spoil the next one
                return

    def _keep_logs(self, lines: Sequence[str], name: str) -> Path | None:
        """The engines' logs that the launcher kept, moved from where its next failure would replace them."""
        path = next((Path(line.split("logs kept in ", 1)[1]) for line in lines if "logs kept in " in line), None)
        if path is None or not path.is_dir():
            return None
        own = self._out / "logs" / f"engines-{name}"
        try:
            shutil.copytree(path, own, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        except OSError:
            return path
        return own

    def _stop(self) -> None:
        """Take down whatever is up."""
        if _nodes_are_up():
            words = [*python_words("launch"), "--shutdown", "--port", str(self._port)]
            self._command(words, self._out / "logs/stop.log", to_its_end=True)

    def _draw(self) -> Path | None:
        """The plot and the tables of what was measured; None where nothing could be drawn."""
        drawn = [part for part in self._parts if part.runs]
        if not drawn:
            return None
        shortfalls = [self._note(part) for part in self._parts if part.error]
        notes = [word for text in [*shortfalls, *self._conditions] for word in ("--note", text)]
        plot = self._out / "demo.png"
        folders = [_shown_path(self._out / part.name) for part in drawn]
        words = [*python_words("viz"), "--exps", *folders, "--use-normalized", "--gpus-per-node", str(ENGINES), *notes]
        self._to_interrupt.clear()
        code, _ = self._command([*words, "--plot-path", _shown_path(plot)], self._out / "logs/viz.log")
        return plot if code == 0 else None

    def _note(self, part: DemoPart) -> str:
        if not part.runs:
            return f"Not measured: {part.name}: {part.error}"
        return f"{len(part.runs)} of {len(self._levels)} levels measured: {part.name}: {part.error}"

    def _summary(self) -> str:
        """One line per deployment."""
        lines = []
        for part in self._parts:
            text = f"{part.name}: {part.valid} of {len(self._levels)} levels valid"
            bad = [run for run in part.runs if not run.validity.valid]
            text += f", {len(bad)} not valid (hollow and crossed in the plot)" if bad else ""
            twice = [run.key.stem for run in part.runs if run.replaces]
            text += f", measured twice: {', '.join(twice)}" if twice else ""
            lines.append(f"\n{text}" + (f"\n  {part.error}" if part.error else ""))
            lines += [f"\n  {run.key.stem}: {'; '.join(run.validity.reasons)}" for run in bad]
        return "".join(lines)

    def _command(self, words: Sequence[str], log: Path, *, to_its_end: bool = False) -> tuple[int, list[str]]:
        """Run ``python`` with these words, show and log what it prints; returns its exit code and its lines.

        ``to_its_end``: whoever wants to stop the demo waits for it.
        """
        self._print(f"\n$ {shlex.join(['python', *words])}")
        with log.open("ab") as file:
            # A session of its own: Ctrl-C in a terminal reaches this process alone, which passes it on once.
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            lines: list[str] = []
            # Once the demo is stopping, what it still runs is what it stops with.
            if not to_its_end and not self._stopping:
                self._to_interrupt.append(process)
                if self._stopping:
                    self._pass_on()
            try:
                self._follow(process, file.write, lines)
            finally:
                self._to_interrupt.clear()
                _end(process)
        return process.returncode, lines

    def _follow(self, process: subprocess.Popen[bytes], write: Callable[[bytes], object], lines: list[str]) -> None:
        """Show the output of a command until it has ended."""
        assert process.stdout
        number, rest, ended = process.stdout.fileno(), b"", False
        last_report = time.monotonic()
        stopping_since: float | None = None
        while True:
            # Its end is what counts, not the end of its output: what it leaves behind may hold that open.
            over = process.poll() is not None
            ready = [] if ended else select.select([number], [], [], 0 if over else POLL_S)[0]
            data = os.read(number, 1 << 16) if ready else b""
            ended = ended or bool(ready and not data)
            write(data)
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                lines.append(line.decode(errors="replace"))
                self._print(lines[-1])
            if over and not data:
                if rest:
                    lines.append(rest.decode(errors="replace"))
                    self._print(lines[-1])
                return
            if ended:
                time.sleep(POLL_S / 5)
            now = time.monotonic()
            if now - last_report >= REPORT_EVERY_S and not self._stopping:
                last_report = now
                self._print(f"-- demo: step {self._clock.step + 1} of {self._clock.steps}, {self._clock}")
            if self._stopping:
                if stopping_since is None:
                    stopping_since = now
                    self._print_stopping()
                if now - stopping_since > END_WAIT_S:
                    return

    def _print_stopping(self) -> None:
        if not self._stopping_printed:
            self._stopping_printed = True
            self._print("stopping; the plot of what was measured follows")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and a closed terminal: stop measuring, then draw."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: self._interrupt()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self) -> None:
        self._stopping = True  # nothing is printed here: a handler may interrupt a print
        self._pass_on()

    def _pass_on(self) -> None:
        # pop is atomic: a command that got the signal twice would not end cleanly.
        with contextlib.suppress(IndexError):
            self._to_interrupt.pop().send_signal(signal.SIGINT)

    def _print(self, text: str) -> None:
        """Print; without a reader continue to the clean end."""
        if self._mute:
            return
        try:
            print(text, flush=True)
        except OSError:
            self._mute = True
            with Path(os.devnull).open("wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
            self._stopping = True
            self._pass_on()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a command has ended."""
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def complaint(lines: Sequence[str], code: int) -> str:
    """Why a command failed, in one line: its own error line, else the last one it printed."""
    errors = [line.split("error: ", 1)[1] for line in lines if line.startswith("error: ")]
    last = errors or [line.strip() for line in lines if line.strip()]
    return last[-1] if last else f"it ended with code {code} and printed nothing"


def meaning(names: Sequence[str]) -> str:
    """What the plot of these deployments shows, and what not."""
    pd = [name for name in names if name.startswith("pd-")]
    lines = [REAL]
    lines += [PACK_AND_SPREAD] if len(pd) > 1 else []
    lines += [PD_AND_COLLOCATED] if pd and len(names) > len(pd) else []
    return "\n".join([*lines, NO_H100])


def kept(folder: Path) -> tuple[Run, ...]:
    """The levels that were measured, as far as they can be read."""
    try:
        return tuple(Store(folder).runs())
    except StoreError:
        return ()


def _shown_path(path: Path) -> str:
    """Relative to the project's folder, where it lies in it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def run(command: list[str]) -> int:
    """Show a command, run it in the project's folder; returns its exit code."""
    shown = ["python" if word == sys.executable else word for word in command]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    return subprocess.run(command, cwd=ROOT).returncode
