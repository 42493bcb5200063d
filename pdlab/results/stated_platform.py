"""The platform of an experiment as far as it is recorded: GPU types, the engine and its version.

For pdlab's own runs the nodes of the engines are recorded. Files of others state some of it in words. What they do not
state is unknown: a version of an image is not that of the engine in it, unless the image is the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdlab.core.catalog import gpu_type_of

if TYPE_CHECKING:
    from pdlab.results.schema import Experiment, Manifest

GPU, CPU = "gpu", "cpu"  # the key of `Manifest.hardware` for what a file states, and its value for engines on CPUs
# Keys under which files of others have a GPU type. The last two may also have a machine.
_GPU_KEYS = tuple(f"{chip}{what}" for chip in ("gpu", "accelerator") for what in ("", "_type", "_name", "_model"))
_MACHINE_KEYS = ("hw", "hardware")
_COUNT = re.compile(r"^\s*\d+\s*x\s*|\s*x\s*\d+\s*$", re.IGNORECASE)  # 8x H100
_NAMES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm|trt|tensorrt[-_]?llm"}
# Repositories of images whose tag is the engine's version.
_OWN_IMAGES = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang", "trtllm": "nvidia/tensorrt-llm/release"}
_NUMBERS = r"v?(?P<version>\d+\.\d+[^\s/_]*)"


def stated_gpu(data: Mapping[str, Any]) -> str | None:
    """The GPU in the keys of a file, as it is written, or `CPU` for engines on CPUs; None: not stated."""
    for key in (*_GPU_KEYS, *_MACHINE_KEYS):
        text = data.get(key)
        if isinstance(text, str) and text.strip() and (key in _GPU_KEYS or _types_in(text)):
            return CPU if text.strip().lower() == CPU else text.strip()
    return CPU if data.get("device") == CPU else None


def stated_version(data: Mapping[str, Any], engine: str | None) -> str | None:
    """The version of the engine in the keys of a file; None: not stated.

    It may be in the name of the framework (``vLLM 0.11.0``), by itself, or in the name of an image. A framework around
    the engine, such as Dynamo, has versions of its own.
    """
    if engine is None:
        return None
    framework = str(data.get("framework") or engine).lower()
    of_engine = data.get("engine_version") or data.get(f"{engine}_version")
    if isinstance(of_engine, str) and (match := re.match(_NUMBERS, of_engine)):
        return match["version"]
    texts = [] if "dynamo" in framework else [framework]
    if isinstance(text := data.get("framework_version"), str):
        texts.append(text.lower())
    for text in texts:
        beside = "[-_=@ ]*" if "/" in text else "[-_=@: ]*"  # the tag of an image is of the image
        if match := re.search(rf"(?:{_NAMES[engine]}){beside}{_NUMBERS}", text):
            return match["version"]
    if len(texts) < 2 or not re.fullmatch(_NAMES[engine], framework):
        return None
    repository, _, tag = texts[1].rpartition(":")
    own = not repository or repository.replace("#", "/").endswith(_OWN_IMAGES[engine])
    match = re.match(_NUMBERS, tag) if own else None
    return match["version"] if match else None


def gpu_types(manifest: Manifest) -> frozenset[str]:
    """The types of the GPUs that the engines ran on, as Ray names them; empty: unknown, or engines on CPUs."""
    if manifest.cluster is None:
        return _types_in(str(manifest.hardware.get(GPU) or ""))
    used = manifest.placement.used_slots if manifest.placement else None
    nodes = [node for node in manifest.cluster.engine_nodes if used is None or node.id in used]
    return frozenset(node.gpu_type for node in nodes if node.gpu_type is not None)


def engine_of(experiment: Experiment) -> str | None:
    """The engine of the runs; None: unknown. pdlab serves vLLM."""
    stated = next((run.engine for run in experiment.runs if run.engine), None)
    return stated or (None if experiment.manifest.origin == "imported" else "vllm")


def engine_version(experiment: Experiment) -> str | None:
    """The version of that engine; None: unknown."""
    return experiment.manifest.versions.get(engine_of(experiment) or "")


def _types_in(text: str) -> frozenset[str]:
    parts = (_COUNT.sub("", part) for part in re.split(r"[,;+]|\band\b", text))
    return frozenset(found for part in parts if (found := gpu_type_of(part)) is not None)
