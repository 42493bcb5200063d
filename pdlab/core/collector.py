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
    """The garbage collector is off."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def imported(name: str) -> ModuleType:
    """The module. What its first import makes stays, so no later collection looks at it: 5 % of a dry run's time."""
    if name in sys.modules:
        return sys.modules[name]
    with waiting_collector():
        module = import_module(name)
        gc.freeze()
    return module
