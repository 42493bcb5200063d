"""What every Python process of pdlab's own Ray nodes loads first."""

from __future__ import annotations

import ast
from pathlib import Path

from pdlab.cluster import local_nodes

SITE = Path(local_nodes.__file__).parent / "site"


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))}


def at_import(path: Path) -> set[str]:
    """What the module imports as soon as it is imported, not in a function and not for a type checker."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {ast.unparse(node) for node in body if isinstance(node, (ast.Import, ast.ImportFrom))}


def test_it_imports_next_to_nothing() -> None:
    assert [path.name for path in SITE.glob("*.py")] == ["sitecustomize.py"]
    assert imported(SITE / "sitecustomize.py") <= {
        "import gc",
        "import importlib",
        "import os",
        "from pdlab.cluster import fast_start, loopback",
    }
    assert not imported(SITE.parent / "__init__.py"), "it would be loaded by every process"
    assert at_import(SITE.parents[1] / "__init__.py") <= {
        "from __future__ import annotations",
        "from importlib import import_module",
        "from typing import TYPE_CHECKING, Any",
        "from pdlab.core.version import __version__",
    }
    for light in ("__init__.py", "version.py"):
        assert not imported(SITE.parents[1] / "core" / light)


def test_it_is_on_the_path_of_the_nodes() -> None:
    first, second, *_ = local_nodes.environment("id", "/nowhere")["PYTHONPATH"].split(":")
    assert Path(first) == SITE
    assert (Path(second) / "pdlab" / "cluster" / "local_nodes.py").exists()
