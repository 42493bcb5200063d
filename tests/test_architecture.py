"""The rules of docs/architecture.md: what a package may import, no cycles, tests where the code is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PDLAB = ROOT / "pdlab"
# Package -> the packages that it may import, beside itself.
MAY_IMPORT = {
    "core": ["remote", "roles"],
    "remote": [],
    "results": ["core", "marks", "traffic"],
    "placement": ["core"],
    "cluster": ["core", "remote"],
    "marks": [],
    "roles": [],
    "traffic": ["core"],
    "sim": ["core", "results", "roles", "traffic", "guard"],
    "analysis": ["core", "results"],
    "transfer": ["core", "remote", "cluster"],
    "plan": ["core", "results", "roles", "traffic", "placement", "sim", "analysis"],
    "guard": ["marks"],
    "deploy": ["core", "remote", "results", "marks", "roles", "placement", "cluster", "transfer"],
    "bench": ["core", "results", "traffic", "placement", "deploy", "steps"],
    "report": ["core", "results", "placement", "analysis", "transfer"],
    "steps": ["core"],
    "demo": ["core", "results", "cluster", "bench", "steps"],
    "first_hour": ["core", "remote", "steps"],
    "faults": ["core", "remote", "results", "analysis", "cluster", "deploy", "steps"],
    "rehearsal": ["core", "results", "cluster", "sim", "deploy", "traffic"],
    "cli": [
        "core",
        "remote",
        "results",
        "marks",
        "roles",
        "placement",
        "cluster",
        "traffic",
        "sim",
        "analysis",
        "transfer",
        "plan",
        "deploy",
        "bench",
        "report",
        "steps",
        "demo",
        "first_hour",
        "faults",
        "rehearsal",
    ],
}
# Runs where pdlab is not installed.
SEALED = {
    "pdlab.remote": ("pdlab.remote",),
    "pdlab.transfer.rank": ("pdlab.transfer.rank", "pdlab.remote"),
    "pdlab.deploy.serving": ("pdlab.deploy.serving", "pdlab.marks", "pdlab.roles"),
    "pdlab.guard": ("pdlab.guard", "pdlab.marks"),
    "pdlab.marks": ("pdlab.marks",),
    "pdlab.roles": ("pdlab.roles",),
    "pdlab.faults.on_node": ("pdlab.faults.on_node", "pdlab.remote"),
}
OTHER_TESTS = {"benchmarks", "contract", "live", "support", "data"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in sorted(PDLAB.rglob("*.py")) if "site" not in path.parts}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, which several tests look at."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[str]:
    """The modules of pdlab that a file imports, inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pdlab")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole path"
            if (node.module or "").split(".")[0] == "pdlab":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield whole if whole in modules() else str(node.module)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_walk_sees_imports() -> None:
    assert len(modules()) > 50
    assert "pdlab.core.errors" in set(imports(modules()["pdlab.placement.place"]))


def test_pdlab_itself_holds_packages_only() -> None:
    assert {path.name for path in PDLAB.glob("*.py")} == {"__init__.py", "__main__.py"}
    folders = {path.parent for path in modules().values()}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_every_package_has_a_rule() -> None:
    packages = {name.split(".")[1] for name in modules() if name.count(".") >= 1} - {"__main__"}
    assert packages == set(MAY_IMPORT), "MAY_IMPORT has one row per package"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_what_it_may(package: str) -> None:
    allowed = tuple(f"pdlab.{name}" for name in (package, *MAY_IMPORT[package]))
    for module, path in modules().items():
        if not within(module, (f"pdlab.{package}",)):
            continue
        for other in imports(path):
            assert other == "pdlab" or within(other, allowed), (
                f"{module} imports {other}; {package} may import {', '.join(MAY_IMPORT[package]) or 'nothing'}: "
                "move the definition to a package that both may import"
            )


@pytest.mark.parametrize("package", SEALED)
def test_what_runs_on_nodes_without_pdlab_imports_nothing_of_it(package: str) -> None:
    for module, path in modules().items():
        if within(module, (package,)):
            outside = [other for other in imports(path) if not within(other, SEALED[package])]
            assert not outside, f"{module} is sent to nodes that have no pdlab and imports {outside}"


def test_there_is_no_cycle() -> None:
    graph = {module: set(imports(path)) - {module} for module, path in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_the_picture_is_drawn_from_the_imports() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "draw_architecture.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_way_of_a_request_names_every_module_on_it() -> None:
    """The numbered steps are true only if no module is missing, and each module that they name exists."""
    package = PDLAB / "deploy" / "serving"
    steps = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = set(re.findall(r"`([\w.]+)`", steps))
    here = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert {name for name in named if "." not in name} == here
    assert {name for name in named if "." in name} <= set(modules())


def test_nobody_searches_the_output_of_a_command() -> None:
    """A command hands its failure over (`pdlab.core.failure`): no code looks for words that another part printed."""
    written = ("error: ", "logs kept in ", "not tried again: ")
    for module, path in modules().items():
        in_text = {part for node in nodes(path) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes(path):
            if isinstance(node, ast.Constant) and node not in in_text and isinstance(node.value, str):
                assert node.value not in written, f"{module}, line {node.lineno}: {node.value!r} is searched for"


def test_tests_mirror_pdlab() -> None:
    """A test file lies in the folder of the package that it tests; a module's name is its module's test."""
    homes: dict[str, set[str]] = {}
    for path in modules().values():
        homes.setdefault(path.stem, set()).add(path.parent.relative_to(PDLAB).as_posix())
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = path.parent.relative_to(ROOT / "tests").as_posix()
        if folder == "." or folder.split("/")[0] in OTHER_TESTS:
            continue
        assert (PDLAB / folder / "__init__.py").exists(), f"{path.relative_to(ROOT)}: pdlab has no package {folder}"
        home = homes.get(path.stem.removeprefix("test_"))
        assert home is None or folder in home, f"{path.relative_to(ROOT)}: that module is in {sorted(home or ())}"


# Package -> the module of it that may name what is private to Ray, or to vLLM, of which every module is. Another module
# takes the name from that one. Whether the names exist is tested in tests/contract/test_private_names.py.
PRIVATE = {
    "ray": re.compile(
        r"ray\.(_private|llm\._internal|serve\._private|_raylet|dashboard\.\w|experimental\.internal_kv)|"
        "_bound_deployment|_internal_kv_"
    ),
    "vllm": re.compile(r"(?<![\w./])vllm(\.(?!pdlab\b)\w+)+"),  # vllm.pdlab is the guard's logger
}
PRIVATE_HOMES = {
    "ray": {
        "cluster": {"ray_names.py"},
        "deploy": {"application.py"},
        "deploy/serving": {"ray_names.py"},
        "faults": {"run.py"},
        "rehearsal": {"ray_names.py"},
    },
    "vllm": {
        "bench/client": {"vllm_names.py"},
        "cluster": {"vllm_names.py"},
        "deploy/serving": {"vllm_names.py"},
        "guard": {"vllm_names.py"},
        "rehearsal": {"stand_ins.py"},
        "sim": {"vllm_names.py"},
    },
}


def code_strings_and_imports(path: Path) -> Iterator[str]:
    """Modules that are imported, attributes and string constants that are no docstring."""
    docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("library", PRIVATE)
def test_what_is_private_is_named_in_one_module_per_package(library: str) -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(PDLAB.rglob("*.py")):
        if any(PRIVATE[library].search(text) for text in code_strings_and_imports(path)):
            found.setdefault(path.parent.relative_to(PDLAB).as_posix(), set()).add(path.name)
    assert found == PRIVATE_HOMES[library]
