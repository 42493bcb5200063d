"""NIXL's Python without torch, where no tensor is moved. Runs on the nodes too, sent by value.

NIXL imports torch for two things alone: the CUDA version that torch was built for, which says which of NIXL's wheels to
load, and the class Tensor, to tell tensors from other descriptions of memory. Importing torch takes longer than
everything else that a rank does before its first transfer.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = ("torch", "torch.version")


def nixl_api(tensors: bool) -> Any:
    """NIXL's module ``_api``, the very file that it is with torch. ``tensors``: GPU memory, which needs torch itself.

    Raises ImportError as NIXL's own import does.
    """
    if not tensors and "torch" not in sys.modules and "nixl" not in sys.modules:
        version = _torch_version()
        if version is not None:
            with _in_place_of_torch(version):
                return importlib.import_module("nixl._api")
    return importlib.import_module("nixl._api")


def _torch_version() -> ModuleType | None:
    """torch/version.py of the installed torch, a file of constants; None without torch."""
    torch = importlib.util.find_spec("torch")
    path = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    if path is None or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("torch.version", path)
    assert spec is not None and spec.loader is not None
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    return version


@contextmanager
def _in_place_of_torch(version: ModuleType) -> Iterator[None]:
    """While it lasts, ``import torch`` gives a module with a version and a class of which nothing is an instance."""
    torch = ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    torch.version = version  # type: ignore[attr-defined]
    sys.modules.update(zip(NAMES, (torch, version), strict=True))
    try:
        yield
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
