"""The zip holds what a cluster imports and no more, and every module in it can be imported from it."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.values import strings

from pdlab.cli import code_zip as command
from pdlab.core import api_key
from pdlab.core.catalog import load_cluster, load_deployment, resolve_model
from pdlab.core.deployment import Fluid
from pdlab.core.files import PACKAGE
from pdlab.deploy.kubernetes.code_zip import NOTE, PATTERNS, archive, code, digest, file_name
from pdlab.deploy.serve_config import render
from pdlab.placement.place import place
from tests.support.deployments import SHAPES

# `kubectl apply` keeps a copy of an object in an annotation, which may have so many bytes.
MOST_BYTES = 262_144


def module_path(name: str) -> Path | None:
    """The file of the longest beginning of a dotted name that is a module of pdlab."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        base = PACKAGE.parent.joinpath(*words[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def named_by_exports() -> set[str]:
    """Every name of pdlab's that an application has in its arguments, on GPUs and on CPUs, with every protection."""
    names = set(strings(api_key.serve_env("a key that nobody guesses")))
    for label, cluster in SHAPES.items():
        deployment, view = load_deployment(label), load_cluster(cluster)
        if not isinstance(deployment.topology, Fluid):
            deployment = deployment.model_copy(update={"kv_offload_gb": 1.0})
        shape, source = resolve_model(deployment.model)
        app = render(deployment, place(deployment, view), view, shape, source or "/models/tiny")
        names |= {app.import_path, *strings(app.args)}
    return {name.replace(":", ".") for name in names if re.fullmatch(r"pdlab(\.\w+)+(:\w+)?", name)}


def imports(path: Path) -> set[str]:
    """Names of pdlab's that a file imports or has in its text, as those that Ray and vLLM import by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if re.fullmatch(r"pdlab(\.\w+)+", node.value) else set()
    return {name for name in found if name.split(".")[0] == "pdlab"}


def closure(names: set[str]) -> set[str]:
    """The files that these names need, with those of the packages above, as paths inside the zip."""
    waiting, files = set(names), set()
    while waiting:
        path = module_path(waiting.pop())
        if path is None or path in files:
            continue
        files.add(path)
        folder = path.parent
        while folder != PACKAGE.parent:
            waiting.add(".".join(folder.relative_to(PACKAGE.parent).parts))
            folder = folder.parent
        # The top package loads its interface for programs when one is asked for, and a replica asks for none.
        waiting |= imports(path) if path != PACKAGE / "__init__.py" else {"pdlab.core.version"}
    return {path.relative_to(PACKAGE.parent).as_posix() for path in files}


def test_the_list_is_what_the_cluster_imports() -> None:
    names = named_by_exports()
    assert len(names) > 5 and "pdlab.guard.scheduler.GuardScheduler" in names
    assert not (missing := closure(names) - set(code())), f"add them to PATTERNS: {missing}"


def test_nothing_is_listed_that_the_cluster_does_not_import() -> None:
    needed = closure(named_by_exports())
    for pattern in PATTERNS:
        listed = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.glob(pattern)}
        assert listed & needed, f"{pattern} gives nothing that is needed"
        if "*" not in pattern:
            assert listed <= needed, pattern
    assert len(archive(code())) * 4 / 3 < MOST_BYTES * 0.75, "it must leave room for growth"


def test_the_same_code_is_the_same_file(tmp_path: Path) -> None:
    one = archive(code())
    copy = tmp_path / "pdlab"
    for name, content in code().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1, 1))
    assert archive(code(copy)) == one and digest(code(copy)) == digest(code())
    (copy / "guard" / "leases.py").write_text("changed = True\n")
    assert digest(code(copy)) != digest(code()) and archive(code(copy)) != one


IMPORT = """
import importlib, json, sys
names = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
import importlib.resources as resources, pdlab
import pdlab.deploy.serving.guard_sources as guard_sources
print(json.dumps([pdlab.__file__, sorted(guard_sources.sources(resources.files("pdlab")))]))
"""


def test_python_imports_from_the_zip_and_the_guard_travels_from_it(tmp_path: Path) -> None:
    """Read with `Path.glob`, the guard inside a zip was empty, and nobody noticed."""
    zipped = tmp_path / file_name(code())
    zipped.write_bytes(archive(code()))
    light = ["pdlab.core.api_key", "pdlab.deploy.serving.guard", "pdlab.roles.policy", "pdlab.guard.leases"]
    env = {"PYTHONPATH": str(zipped), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", IMPORT, json.dumps(light)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    file, guard = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(zipped))
    assert {"pdlab/__init__.py", "pdlab/guard/connector.py", "pdlab/guard/scheduler.py"} < set(guard)


def test_a_folder_without_the_guard_is_refused(tmp_path: Path) -> None:
    from pdlab.deploy.serving.guard_sources import sources

    (tmp_path / "other.py").touch()
    with pytest.raises(RuntimeError, match=r"has no guard/connector\.py"):
        sources(tmp_path)


def test_the_command_names_the_zip_by_its_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / file_name(code())
    assert zipfile.ZipFile(io.BytesIO(path.read_bytes())).namelist()[0] == NOTE
    assert command.main([str(tmp_path / "own.zip")]) == 0 and (tmp_path / "own.zip").read_bytes() == path.read_bytes()
    assert command.main([str(tmp_path / "own.whl")]) == 2
    assert command.main([str(tmp_path / "nowhere" / "own.zip")]) == 2
