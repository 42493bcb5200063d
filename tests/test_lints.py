"""What ruff and mypy do not check: one name, one class; docstrings name what exists; nothing newer than Python 3.10."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PDLAB = ROOT / "pdlab"

# Class names that several modules define, and in how many. Rename a class, then correct its row: the list only shrinks.
SHARED_NAMES = {
    "Answer": 3,
    "Observed": 2,
    "Rules": 2,
    "Served": 4,
    "Window": 2,
    "_Engine": 2,
}
# Words in ``...`` that are no names of their module: examples, and names of vLLM, Ray, UCX and files.
WORDS: dict[str, set[str]] = {
    "pdlab/analysis/intervals.py": {"p50", "p95"},
    "pdlab/core/notation.py": {"dp8ep", "tp4"},
    "pdlab/core/vllm_limits.py": {"all_gatherv"},
    "pdlab/core/workload.py": {"concurrency8"},
    "pdlab/deploy/serving/elastic.py": {"external_scaler_enabled"},
    "pdlab/deploy/serving/sequences.py": {"j"},
    "pdlab/guard/questions.py": {"perf_counter"},
    "pdlab/rehearsal/protocol.py": {"pd_tokenize_once"},
    "pdlab/rehearsal/spec.py": {"kv_lease_duration"},
    "pdlab/results/schema.py": {"p90"},
    "pdlab/sim/hardware.py": {"common", "level"},
    "pdlab/transfer/rank/messages.py": {"y"},
    "pdlab/transfer/ucx_log.py": {"uct_ib_efa"},
}
# Module -> what Python 3.11 or later added to it.
NEWER: dict[str, set[str]] = {
    "typing": {
        "LiteralString", "Never", "NotRequired", "ReadOnly", "Required", "Self", "TypeAliasType", "TypeIs",
        "TypeVarTuple", "Unpack", "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type",
    },
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "datetime": {"UTC"},
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout", "timeout_at"},
    "contextlib": {"chdir"},
    "itertools": {"batched"},
    "hashlib": {"file_digest"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "operator": {"call"},
    "inspect": {"getmembers_static"},
}  # fmt: skip
NEWER_MODULES = {"tomllib"}


@cache
def trees() -> dict[str, ast.Module]:
    """Path below the checkout -> its syntax tree."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PDLAB.rglob("*.py"))
    }


def class_homes() -> dict[str, list[str]]:
    homes = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return homes


def test_a_class_name_means_one_thing() -> None:
    shared = {name: homes for name, homes in class_homes().items() if len(homes) > 1}
    new = {name: homes for name, homes in shared.items() if len(homes) > SHARED_NAMES.get(name, 1)}
    assert not new, "give one of them another name"
    assert {name: len(homes) for name, homes in shared.items()} == SHARED_NAMES, "fewer now: shorten the list"


def names_in(tree: ast.AST) -> set[str]:
    """Every name, attribute, parameter, keyword and whole string of the code, docstrings left out."""
    names: set[str] = set()
    docs = {id(doc) for doc in (docstring_node(node) for node in ast.walk(tree)) if doc is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.update((node.asname or node.name).split("."))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            names.update(re.findall(r"\w+", node.value))
    return names


def docstring_node(node: ast.AST) -> ast.Constant | None:
    body = getattr(node, "body", None)
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
        return None
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def unknown_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, class or function, and a name in its docstring that its module does not have. A name that the docstring
    of a class defines (``x``: ...) has to be one of the class, or a value, which is a string somewhere."""
    known = names_in(tree)
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            names = set(re.findall(r"``([a-z_][a-z_0-9]*)``", text)) - known
            if isinstance(node, ast.ClassDef):
                names |= set(re.findall(r"``([a-z_][a-z_0-9]*)``:", text)) - names_in(node) - values
            yield from ((node.lineno, node.name, name) for name in sorted(names))


def test_docstrings_name_what_their_module_has() -> None:
    found = {path: list(unknown_names(tree)) for path, tree in trees().items()}
    unknown = {path: [each for each in names if each[2] not in WORDS.get(path, ())] for path, names in found.items()}
    assert {path: names for path, names in unknown.items() if names} == {}
    used = {path: {name for _, _, name in names} for path, names in found.items()}
    assert {path: words - used[path] for path, words in WORDS.items() if words - used[path]} == {}, (
        "no docstring has these words any more: shorten the list"
    )


def newer(tree: ast.Module) -> Iterator[str]:
    typing_only = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inside in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in NEWER.get(node.module or "", ()))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NEWER_MODULES)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NEWER.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.TryStar):
            yield "except*"


def test_nothing_is_newer_than_the_oldest_python() -> None:
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text(), "then correct NEWER"
    assert {path: found for path, tree in trees().items() if (found := sorted(newer(tree)))} == {}


def test_the_lints_find_what_they_are_for() -> None:
    stale = 'def f(planned):\n    """Those of ``wanted``."""\n    return planned\n'
    assert list(unknown_names(ast.parse(stale))) == [(1, "f", "wanted")]
    assert list(unknown_names(ast.parse(stale.replace("wanted", "planned")))) == []
    field = 'class A:\n    """``roles``: of it."""\n    name: str\n\nroles = 1\n'
    assert list(unknown_names(ast.parse(field))) == [(1, "A", "roles")]
    assert list(unknown_names(ast.parse(field.replace("name:", "roles:")))) == []
    assert list(newer(ast.parse("from typing import Self\nimport tomllib\nasyncio.timeout(1)"))) == [
        "typing.Self", "tomllib", "asyncio.timeout",
    ]  # fmt: skip
    assert list(newer(ast.parse("if TYPE_CHECKING:\n    from typing import Self"))) == []
