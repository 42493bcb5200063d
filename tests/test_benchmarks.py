"""The benchmarks are not run by the tests: at least every name that they take from the package is there."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(path: Path) -> None:
    taken = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pdlab"
        for alias in node.names
    ]
    for module, name in taken:
        benchmark = import_module(module)
        if not hasattr(benchmark, name):
            import_module(f"{module}.{name}")


def test_there_are_benchmarks() -> None:
    assert len(BENCHMARKS) > 5
