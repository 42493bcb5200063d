"""Import NIXL without torch if no tensor is moved. Sent to the nodes by value.

NIXL uses torch for two things: torch's CUDA version, which selects one of NIXL's wheels, and the class Tensor, which it
distinguishes from other descriptions of memory. The import of torch takes longer than the rest of a rank's start-up.
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
    """NIXL's module ``_api``, the same file as with torch. ``tensors``: for GPU memory, which needs torch.

    Raises ImportError as NIXL's own import.
    """
    if not tensors and "torch" not in sys.modules and "nixl" not in sys.modules:
        version = _torch_version()
        if version is not None:
            with _in_place_of_torch(version):
                return importlib.import_module("nixl._api")
    return importlib.import_module("nixl._api")


def _torch_version() -> ModuleType | None:
    """The installed torch/version.py, which has only constants; None without torch."""
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
    """Let ``import torch`` return a module with only the version and a class Tensor without instances, for a block."""
    torch = ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    torch.version = version  # type: ignore[attr-defined]
    sys.modules.update(zip(NAMES, (torch, version), strict=True))
    try:
        yield
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
