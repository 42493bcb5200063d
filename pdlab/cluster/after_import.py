"""Change modules of other packages right after their import. Imports only the standard library."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Changes = Mapping[str, Callable[[Any], None]]


def change_after_import(changes: Changes) -> None:
    """Call each change with its module: now if the module is loaded, else right after its import."""
    sys.meta_path.insert(0, _AfterImport(changes))
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules as Python does and changes each module after its execution."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.get(fullname)
        spec = change and importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if not change or not spec or not spec.loader:
            return None
        execute: Any = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
