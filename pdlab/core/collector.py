"""Python's garbage collector: it waits while many objects are made, and hardly any cycles of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


@contextmanager
def waiting_collector() -> Iterator[None]:
    """The garbage collector is off. What is made meanwhile stays, so no later collection looks at it: neither the next
    one nor those at the end of the process."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def imported(name: str) -> ModuleType:
    """The module. The collector waits for its first import: 5 % of a dry run's time."""
    if name in sys.modules:
        return sys.modules[name]
    with waiting_collector():
        return import_module(name)
