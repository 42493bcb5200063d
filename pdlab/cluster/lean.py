"""Loaded into every Python process of the local nodes: nothing that is not used is imported.

- pandas, which ``ray.serve`` imports in each of its processes to encode data frames, is not there for it;
- torch, which Ray Serve LLM's helpers import in the router too, is imported when it is first used.

Imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from pdlab.cluster.after_import import change_after_import

LATER = "torch"


def install() -> None:
    """Change this process."""
    modules: Any = sys.modules  # None: importing it raises ImportError, as if it were not installed
    modules.setdefault("pandas", None)
    change_after_import({"ray.llm._internal.common.utils.import_utils": _import_later})


def _import_later(module: Any) -> None:
    at_once = module.try_import

    def try_import(name: str, error: bool = False) -> Any:
        if name != LATER or name in sys.modules or importlib.util.find_spec(name) is None:
            return at_once(name, error)
        return _Later(name)

    module.try_import = try_import


class _Later(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
