"""Names of another library that a module gives on, each imported when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """How ``module`` reads a name that it does not have. ``names``: name -> the module that defines it.

    That module is imported when the name is read. The function raises AttributeError for another name, and ImportError
    where the library is not installed.
    """

    def read(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module} has no name {name}")
        return getattr(importlib.import_module(names[name]), name)

    return read
