"""Ray's and vLLM's imports take about 10 s and warn about themselves: once per session, their warnings aside."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVE = "ray.llm._internal.serve"
# Builds each application, plain exports first; prints where pdlab is once these are built (null: not imported) and in
# the end, and of each application what it is and its deployments, if they are pdlab's, which can all be pickled.
BUILD = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
import yaml
import ray, ray.runtime_context
ray.runtime_context.RuntimeContext.runtime_env = property(lambda self: {})  # asked of a driver, it would start a Ray
made, where = {}, []
plain = int(sys.argv[1])
for number, file in enumerate(sys.argv[2:]):
    if number == plain:
        where.append(getattr(sys.modules.get("pdlab"), "__file__", None))
    app = yaml.safe_load(open(file))["applications"][0]
    module, _, name = app["import_path"].partition(":")
    made[file] = getattr(importlib.import_module(module), name)(app["args"])
names = {file: [] for file in made}
from pdlab.deploy.serving.builders import _applications
for file, built in [*made.items()][plain:]:
    for each in _applications(built):
        ray.cloudpickle.dumps(each._bound_deployment.func_or_class)
        names[file].append(each._bound_deployment.name)
of = {file: [type(built).__name__, names[file]] for file, built in made.items()}
print(json.dumps([*where, sys.modules["pdlab"].__file__, of]))
"""


def quietly(module: str) -> ModuleType:
    # setuptools, which torch imports, refuses to take the place of a distutils that another test has loaded.
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SETUPTOOLS_USE_DISTUTILS", "stdlib")
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def printed(
    program: str, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | str | None = None,
    sent: bytes = b"",
) -> list[str]:  # fmt: skip
    """Lines that a Python process prints of its own program, and nothing failed in it.

    ``env``: instead of this process's; ``sent``: its standard input.
    """
    words = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(words, input=sent, env=env, cwd=cwd, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode().splitlines()


def printed_without_pdlab(program: str, *arguments: object, cwd: Path | str = "/", sent: bytes = b"") -> list[str]:
    """As `printed`, where an import of pdlab fails as on a node that has none of it."""
    return printed(f"import sys\nsys.modules['pdlab'] = None\n{program}", *arguments, cwd=cwd, sent=sent)


def by_value(what: object, *modules: str) -> bytes:
    """The object pickled with those modules' code in it, as for nodes without pdlab."""
    cloudpickle: Any = quietly("ray.cloudpickle")
    new = {quietly(name) for name in modules if name not in cloudpickle.list_registry_pickle_by_value()}
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(what)
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def built(plain: Sequence[Path], files: Sequence[Path], cwd: Path, pythonpath: Path) -> Any:
    """What `BUILD` prints of those exports, in one process of its own: its imports take 12 s of CPU."""
    env = {**os.environ, "RAY_ENABLE_AUTO_CONNECT": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(pythonpath)}
    return json.loads(printed(BUILD, len(plain), *plain, *files, cwd=cwd, env=env)[-1])


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture(scope="session")
def ray_llm() -> ModuleType:
    """Ray Serve LLM's public module, with the builders' own imports already done."""
    quietly("ray.llm._internal.serve.serving_patterns.prefill_decode.builder")
    quietly("ray.llm._internal.serve.engines.vllm.vllm_models")
    return quietly("ray.serve.llm")


@pytest.fixture
def no_cluster(ray_llm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builders ask for the driver's runtime environment, and asking would start a Ray on this machine."""
    import ray

    class Driver:
        def __init__(self) -> None:
            self.runtime_env: dict[str, Any] = {}

    monkeypatch.setattr(ray, "get_runtime_context", Driver)


@pytest.fixture(scope="session")
def vllm_scheduling() -> None:
    """What vLLM's scheduler takes to be made, imported."""
    for module in ("vllm.engine.arg_utils", "vllm.v1.core.sched.scheduler", "vllm.v1.structured_output"):
        quietly(module)


@pytest.fixture
def import_warnings_aside() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def pd_server() -> ModuleType:
    return quietly(f"{SERVE}.serving_patterns.prefill_decode.pd_server")


@pytest.fixture
def llm_server() -> ModuleType:
    return quietly(f"{SERVE}.core.server.llm_server")


@pytest.fixture
def vllm_models() -> ModuleType:
    return quietly(f"{SERVE}.engines.vllm.vllm_models")
