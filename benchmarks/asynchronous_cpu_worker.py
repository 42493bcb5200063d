"""In the worker of an engine with asynchronous scheduling on CPUs (`asynchronous_cpu.py`): streams and events of CUDA
that wait for nothing.

vLLM's model runner, of which the one for CPUs is made, copies a step's result on a stream of its own and waits for an
event before it is read. On CPUs the result is there when the model returns.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.deploy.cpu_engine.worker import WorkerExtension


class Extension(WorkerExtension):
    """Named as ``worker_extension_cls``."""


class NoStream:
    """Takes the place of a stream: everything before it is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the stream of CUDA takes."""

    def wait_stream(self, stream: Any) -> None: ...


class NoEvent:
    """Takes the place of an event: it has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the event of CUDA takes."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def wait_for_nothing() -> None:
    cuda: Any = importlib.import_module("torch.cuda")
    cuda.Event, cuda.Stream = NoEvent, NoStream
    cuda.current_stream = lambda device=None: NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()


wait_for_nothing()
