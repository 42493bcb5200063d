"""Stand-ins for the modules of vLLM that Ray Serve LLM imports, in processes with simulated engines.

vLLM and torch take half a gigabyte and ten seconds in every process; a replica with stand-ins takes an eighth of that.
pandas and pyarrow, which Ray imports without need, take 70 MB and a fifth of the remaining time.
`pdlab/cluster/site/sitecustomize.py` calls `at_start` before the import of Ray, if PDLAB_AT_START names this module.
A stand-in is made at the first import of its original. Imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

NOT_HERE = ("torch", "transformers", "sglang", "pandas")
STOOD_IN_FOR = ("vllm", "pyarrow")
# Otherwise every worker of Ray registers pyarrow's tables with its serializer.
WITHOUT_ARROW = {
    "RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1",
    "RAY_DISABLE_CUSTOM_ARROW_JSON_OPTIONS_SERIALIZATION": "1",
}
ARGUMENTS = Path(__file__).resolve().parents[1] / "deploy" / "assets" / "vllm_arguments.json"
_PROTOCOL = "pdlab.rehearsal.protocol"
RENDERER = "vllm.renderers.base"
# Module of vLLM -> its classes, from `pdlab.rehearsal.protocol`.
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "vllm.entrypoints.openai.chat_completion.protocol": (
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        "ChatCompletionStreamResponse",
    ),
    "vllm.entrypoints.openai.completion.protocol": (
        "CompletionRequest",
        "CompletionResponse",
        "CompletionStreamResponse",
    ),
    "vllm.entrypoints.pooling.embed.protocol": (
        "EmbeddingChatRequest",
        "EmbeddingCompletionRequest",
        "EmbeddingResponse",
    ),
    "vllm.entrypoints.pooling.scoring.protocol": ("ScoreResponse", "ScoreTextRequest"),
    "vllm.entrypoints.serve.engine.protocol": ("ErrorInfo", "ErrorResponse"),
    "vllm.entrypoints.serve.tokenize.protocol": (
        "DetokenizeRequest",
        "DetokenizeResponse",
        "TokenizeChatRequest",
        "TokenizeCompletionRequest",
        "TokenizeResponse",
    ),
    "vllm.entrypoints.speech_to_text.transcription.protocol": (
        "TranscriptionRequest",
        "TranscriptionResponse",
        "TranscriptionStreamResponse",
    ),
    RENDERER: ("BaseRenderer",),
}


def at_start() -> None:
    """Replace the modules of vLLM by stand-ins in all imports from now on."""
    if any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        return
    modules: Any = sys.modules  # None: importing it raises ImportError, as if it were not installed
    for name in NOT_HERE:
        modules.setdefault(name, None)
    sys.meta_path.insert(0, _StandIns())


def _engine_arguments(module: Any) -> None:
    """A dataclass with every argument of vLLM's engines; Ray Serve LLM sorts arguments by its fields."""
    names = json.loads(ARGUMENTS.read_text(encoding="utf-8"))["arguments"]
    module.AsyncEngineArgs = dataclasses.make_dataclass("AsyncEngineArgs", [(name, Any, None) for name in names])


def _frontend_arguments(module: Any) -> None:
    module.FrontendArgs = dataclasses.make_dataclass("FrontendArgs", [("host", Any, None)])


def _envs(module: Any) -> None:
    """vLLM's environment variables: only the two of NIXL's side channel, which Ray sets per replica."""
    names = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
    module.environment_variables = {name: lambda name=name: os.environ.get(name) for name in names}
    module.is_set = lambda name: name in os.environ

    def read(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"simulated engines have no {name}")
        value = os.environ.get(name)
        return int(value) if value is not None and name.endswith("PORT") else value

    module.__getattr__ = read


def _errors(*names: str) -> Callable[[Any], None]:
    def fill(module: Any) -> None:
        for name in names:
            setattr(module, name, type(name, (Exception,), {"__module__": module.__name__}))

    return fill


def _file_systems(module: Any) -> None:
    """Make any class that an annotation names. A rehearsal downloads no models."""

    def named(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": module.__name__})

    module.__getattr__ = named


MADE: dict[str, Callable[[Any], None]] = {
    "pyarrow.fs": _file_systems,
    "vllm.engine.arg_utils": _engine_arguments,
    "vllm.entrypoints.launchers.cli_args": _frontend_arguments,
    "vllm.envs": _envs,
    "vllm.exceptions": _errors("VLLMClientError"),
    "vllm.v1.engine.exceptions": _errors("EngineDeadError"),
}


def _from_protocol(module: Any) -> None:
    protocol = importlib.import_module(_PROTOCOL)
    for name in PROTOCOLS[module.__name__]:
        setattr(module, name, getattr(protocol, name))


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds only stand-ins and their packages, for modules of `STOOD_IN_FOR`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STOOD_IN_FOR:
            return None
        inside = any(name.startswith(f"{fullname}.") for name in (*PROTOCOLS, *MADE))
        if not inside and fullname not in PROTOCOLS and fullname not in MADE:
            raise ModuleNotFoundError(f"No module named {fullname!r} beside simulated engines", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=inside)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: Any) -> None:
        if module.__name__ in PROTOCOLS:
            _from_protocol(module)
        elif module.__name__ in MADE:
            MADE[module.__name__](module)
