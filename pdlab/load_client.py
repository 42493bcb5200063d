"""The parent's side of the load generator: start its process, hand it levels, never leave it behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from pdlab.errors import BenchError, UsageError
from pdlab.levels import ClientAnswer, ClientLevel
from pdlab.spec import validate

Progress = Callable[[int, int], None]
"""Called with (requests done, of them failed) about twice a second."""

CLOSE_S = 2.0


class LoadClient:
    """``python -m pdlab.bench_client`` in a process group of its own, for as long as the ``with`` block.

    ``start`` returns at once; the first `run` waits for the client's imports (about 10 s).
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        self._ready = False

    def __enter__(self) -> LoadClient:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process; does not wait until it is ready."""
        here = str(Path(__file__).resolve().parent.parent)
        env = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdlab.bench_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=env,
            start_new_session=True,
        )

    def run(self, level: ClientLevel, progress: Progress | None = None) -> ClientAnswer:
        """Drive one level to its end. Raises UsageError when the client refuses it before sending
        anything, BenchError when the client dies."""
        self.wait_ready()
        self._send(level.model_dump_json(exclude_defaults=True))
        while True:
            message = self._receive()
            if message["event"] == "progress" and progress:
                progress(message["done"], message["failed"])
            elif message["event"] == "refused":
                raise UsageError(message["message"])
            elif message["event"] == "done":
                return validate(ClientAnswer, message["answer"], where="load generator's answer")

    def wait_ready(self) -> None:
        """Wait for the client's imports. Raises UsageError without vLLM, BenchError when it dies."""
        while not self._ready:
            message = self._receive()
            if message["event"] == "refused":
                raise UsageError(message["message"])
            self._ready = message["event"] == "ready"

    def close(self) -> None:
        """End the client and whatever it started; safe to call twice."""
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
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        last = f": {lines[-1]}" if lines else ""
        return BenchError(f"the load generator ended with code {self._process.returncode}{last}")
