"""Names of another library that a module re-exports, each imported at its first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` for ``module``. ``names``: name -> the module that defines it, imported at its first use.

    It raises AttributeError for another name, and ImportError if the library is not installed.
    """

    def read(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module} has no name {name}")
        return getattr(importlib.import_module(names[name]), name)

    return read
