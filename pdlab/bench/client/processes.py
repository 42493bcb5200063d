"""The parent's side of the load generator: start its processes, give them levels, and always end them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pdlab.bench.client.protocol import STOP, ClientAnswer, ClientLevel, CollectedRequests, EndedPart, merged
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.files import python_path
from pdlab.core.schema import validate
from pdlab.core.text import last_line

Progress = Callable[[int, int], None]
"""Called with (requests done, of them failed) about twice a second."""

CLOSE_S = 2.0
STOP_S = 60.0  # it writes what it has: millions of gaps between tokens take a while
HEAD_START_S = 0.2
BEAT_S = 1.0


class LoadClient:
    """One or several processes ``python -m pdlab.bench.client.worker``, which live as long as the ``with`` block.

    ``start`` returns at once; the first `run` waits for the client's imports (about 10 s). `grow`
    adds processes, which then share every level.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = [_Process() for _ in range(processes)]

    def __enter__(self) -> LoadClient:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the first one."""
        return self._processes[0].pid

    @property
    def processes(self) -> int:
        return len(self._processes)

    def start(self) -> None:
        """Start the processes; does not wait until they are ready."""
        for process in self._processes:
            process.start()

    def grow(self, processes: int) -> None:
        """Use that many processes from the next level on."""
        for _ in range(processes - len(self._processes)):
            self._processes.append(_Process())
            self._processes[-1].start()

    def run(self, level: ClientLevel, progress: Progress | None = None) -> ClientAnswer:
        """Drive one level to its end, shared by all processes that it has load for. Raises UsageError when
        a client refuses it before sending anything, BenchError when one dies."""
        parts = min(self.processes, level.most_parts)
        if parts == 1:
            return self._processes[0].run(level, progress)
        return self._run_shared(level, parts, progress)

    def wait_ready(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for the imports; ``waiting`` is called every `BEAT_S` meanwhile. Raises UsageError without vLLM,
        BenchError when a process dies.
        """
        for process in self._processes:
            process.wait_ready(waiting)

    def stop(self) -> None:
        """Call it from another thread to end a `run` in progress. The run returns the requests sent until now, or
        raises BenchError if there are none or a process does not answer within `STOP_S`. `close` must still be
        called.
        """
        processes = list(self._processes)
        for process in processes:
            process.stop()
        deadline = time.monotonic() + STOP_S
        while any(process.alive for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            process.abort()

    def close(self) -> None:
        """End all processes and whatever they started; safe to call twice."""
        for process in self._processes:
            process.close()

    def restart(self) -> None:
        """Start the same number of new processes after a stop; does not wait until they are ready."""
        self.close()
        self._processes = [_Process() for _ in self._processes]
        self.start()

    def _run_shared(self, level: ClientLevel, parts: int, progress: Progress | None) -> ClientAnswer:
        self.wait_ready()
        prepared = threading.Barrier(parts)
        begins: list[float] = []
        counts = [(0, 0)] * parts
        answers: list[ClientAnswer | None] = [None] * parts
        errors: list[Exception] = []

        def together() -> float:
            if prepared.wait() == 0:
                begins.append(time.perf_counter() + HEAD_START_S)
            prepared.wait()
            return begins[0]

        def drive(part: int) -> None:
            def count(done: int, failed: int) -> None:
                counts[part] = (done, failed)

            own = level.model_copy(update={"part": part, "parts": parts})
            try:
                answers[part] = self._processes[part].run(own, count, together)
            except threading.BrokenBarrierError:
                pass  # another one has the reason
            except Exception as error:
                errors.append(error)
                prepared.abort()

        threads = [threading.Thread(target=drive, args=(part,), daemon=True) for part in range(parts)]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not errors:
                threads[0].join(0.25)
                time.sleep(0.05)
                if progress:
                    progress(sum(done for done, _ in counts), sum(failed for _, failed in counts))
            if errors:
                raise errors[0]
        except BaseException:
            self.close()  # the others are in the middle of the level
            for thread in threads:
                thread.join(CLOSE_S)
            raise
        return merged([answer for answer in answers if answer is not None])


class _Process:
    """One ``python -m pdlab.bench.client.worker`` in a process group of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        self._ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        env = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        env["PYTHONPATH"] = python_path()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdlab.bench.client.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=env,
            start_new_session=True,
        )

    def run(
        self, level: ClientLevel, progress: Progress | None, together: Callable[[], float] | None = None
    ) -> ClientAnswer:
        """Drive one level, or one part of it: ``together`` then waits for the others and returns the start time."""
        self.wait_ready()
        self._send(level.model_dump_json(exclude_defaults=True))
        requests = CollectedRequests()
        while True:
            message = self._receive()
            if message["event"] == "progress" and progress:
                progress(message["done"], message["failed"])
            elif message["event"] == "prepared" and together:
                self._send(repr(together()))
            elif message["event"] == "refused":
                raise UsageError(message["message"])
            elif message["event"] == "ended":
                part = validate(EndedPart, message["part"], where="load generator's answer")
                requests.add(part.records, part.timelines, part.prompts)
            elif message["event"] == "done":
                answer = validate(ClientAnswer, message["answer"], where="load generator's answer")
                return requests.of(answer)

    def wait_ready(self, waiting: Callable[[], None] = lambda: None) -> None:
        while not self._ready:
            stdout = self._process.stdout if self._process else None
            while stdout and not select.select([stdout], [], [], BEAT_S)[0]:
                waiting()
            message = self._receive()
            if message["event"] == "refused":
                raise UsageError(message["message"])
            self._ready = message["event"] == "ready"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Request the results until now, and the end of the process."""
        with contextlib.suppress(BenchError):
            self._send(STOP)

    def abort(self) -> None:
        if self.alive and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        self._log.close()

    def _send(self, line: str) -> None:
        assert self._process and self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None

    def _receive(self) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise BenchError("the load generator is not running")
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._died()
        message: dict[str, Any] = json.loads(line)
        return message

    def _died(self) -> BenchError:
        if self._process is None:
            return BenchError("the load generator was stopped")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._log.seek(0)
        last = last_line(self._log.read())
        return BenchError(f"the load generator ended with code {self._process.returncode}{last and f': {last}'}")
