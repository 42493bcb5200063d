"""Check a model's weights on this node in the places that vLLM searches, and download them before a launch.

Sent by value to nodes without pdlab: imports only the standard library.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# Other formats of the same weights, which vLLM does not load.
NOT_NEEDED = ("original/*", "metal/*", "*.bin", "*.pth")
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
FETCH = """
import json, sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], ignore_patterns=json.loads(sys.argv[2])))
"""
# Harmony downloads the vocabulary of chat requests at the first one and caches it.
VOCABULARY = "import openai_harmony; openai_harmony.load_harmony_encoding('HarmonyGptOss')"


def local_weights(model: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Facts of a model (a Hugging Face id or a folder) on this node.

    ``model``: as given. ``folder``: None if the node has no file of it. ``bytes``: of the weights. ``missing``: absent
    files. ``broken``: file that no engine can load -> reason.
    """
    named = {"host": socket.gethostname(), "model": model}
    folder = (
        Path(model) if model.startswith(("/", ".", "~")) else _snapshot(model, {**os.environ, **(environment or {})})
    )
    if folder is None or not folder.is_dir():
        return {**named, "folder": None, "bytes": 0, "missing": ["everything"], "broken": {}}
    absent = [] if (folder / "config.json").exists() else ["config.json"]
    if not any((folder / name).exists() for name in TOKENIZERS):
        absent.append("a tokenizer")
    files = _weights(folder)
    absent += [name for name in files if not (folder / name).exists()] or ([] if files else ["*.safetensors"])
    there = [name for name in files if (folder / name).exists()]
    size = sum((folder / name).stat().st_size for name in there)
    reasons = {name: _why_broken(folder / name) for name in there}
    if (folder / "config.json").exists():
        reasons["config.json"] = _why_no_config(folder / "config.json")
    broken = {name: why for name, why in reasons.items() if why}
    return {**named, "folder": str(folder), "bytes": size, "missing": absent, "broken": broken}


def fetch(model: str, timeout_s: float, harmony: bool = False) -> dict[str, Any]:
    """Download the model into this node's cache; returns `local_weights` with ``error``, the downloader's last line.

    ``harmony``: download also the vocabulary of chat requests. ``timeout_s``: of the download.
    """
    error = None
    command = [sys.executable, "-c", FETCH, model, json.dumps(NOT_NEEDED)]
    try:
        download = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if download.returncode:
            error = last_line(download.stderr) or f"exit code {download.returncode}"
        if harmony and not error:
            vocabulary = subprocess.run([sys.executable, "-c", VOCABULARY], capture_output=True, text=True, timeout=300)
            if vocabulary.returncode:
                why = last_line(vocabulary.stderr)
                error = f"chat requests will download Harmony's vocabulary from the internet: {why}"
    except subprocess.TimeoutExpired:
        error = f"the download did not end within {timeout_s:g} s"
    return {**local_weights(model), "error": error}


def _snapshot(model: str, env: dict[str, str]) -> Path | None:
    """Folder of the main branch's snapshot in Hugging Face's cache, found as in huggingface_hub; None without one."""
    try:
        home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
        hub = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub").expanduser()
        folder = hub / f"models--{model.replace('/', '--')}"
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, RuntimeError):  # RuntimeError: the home folder is not known
        return None


def _weights(folder: Path) -> list[str]:
    """Names of the weights' files, from the index if there is one, else from the folder."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError):
        return sorted(path.name for path in folder.glob("*.safetensors"))


def _why_broken(path: Path) -> str | None:
    """Why a file is not safetensors of the size in its header; None if it is.

    The format: 8 bytes with the length of the header (little-endian), the header (JSON with the begin and end of each
    tensor's bytes), the bytes.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                return "a pointer of Git LFS, not the weights"
            if len(start) < 8 or length > MOST_HEADER_BYTES:
                return "not a safetensors file: it has no header"
            text = file.read(length)
        size = path.stat().st_size
        if len(text) < length:
            return f"truncated: {size} bytes, but the header already takes {8 + length}"
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "not a safetensors file: its header is no list of tensors"
    if size == expected:
        return None
    return f"{'truncated' if size < expected else 'too long'}: {size} bytes, {expected} by its header"


def _why_no_config(path: Path) -> str | None:
    """Why no engine can read the model's configuration; None if one can."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError:
        return "empty" if not path.stat().st_size else "not JSON"
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("architectures")):
        return "names neither model_type nor architectures"
    return None


def last_line(text: str) -> str:
    """The last line that is not blank, at most 200 characters; empty without one.

    Copies `pdlab.core.text.last_line`, because nodes do not have pdlab.
    """
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "")
