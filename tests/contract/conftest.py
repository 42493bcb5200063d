"""Ray's and vLLM's imports take about 10 s and warn about themselves: once per session, their warnings aside."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVE = "ray.llm._internal.serve"


def quietly(module: str) -> ModuleType:
    # setuptools, which torch imports, refuses to take the place of a distutils that another test has loaded.
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SETUPTOOLS_USE_DISTUTILS", "stdlib")
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


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
