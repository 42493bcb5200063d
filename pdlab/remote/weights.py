"""Whether a model's weights are whole and on this node where vLLM looks for them, and their download ahead of a launch.

Sent to the nodes by value: imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# What vLLM does not load: other formats of the same weights.
NOT_NEEDED = ("original/*", "metal/*", "*.bin", "*.pth")
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
FETCH = """
import json, sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], ignore_patterns=json.loads(sys.argv[2])))
"""
# Harmony takes the vocabulary of chat requests from the internet at the first one, and keeps it.
VOCABULARY = "import openai_harmony; openai_harmony.load_harmony_encoding('HarmonyGptOss')"


def local_weights(model: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Where this node has the model (a Hugging Face id or a folder), how many bytes, the missing files, and those
    that no engine can load, each with the reason.

    ``folder`` None: the node has no file of it.
    """
    folder = (
        Path(model) if model.startswith(("/", ".", "~")) else _snapshot(model, {**os.environ, **(environment or {})})
    )
    if folder is None or not folder.is_dir():
        return {"host": socket.gethostname(), "folder": None, "bytes": 0, "missing": ["everything"], "broken": {}}
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
    return {"host": socket.gethostname(), "folder": str(folder), "bytes": size, "missing": absent, "broken": broken}


def fetch(model: str, timeout_s: float, harmony: bool = False) -> dict[str, Any]:
    """Download the model into this node's cache, then `local_weights`; ``error`` has the downloader's last line.

    ``harmony``: the vocabulary of chat requests too; its failure is reported and not fatal.
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
    """The snapshot of the main branch in Hugging Face's cache, as huggingface_hub finds it."""
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    hub = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = hub / f"models--{model.replace('/', '--')}"
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None


def _weights(folder: Path) -> list[str]:
    """The weights' files as the index names them, else those that are there."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError):
        return sorted(path.name for path in folder.glob("*.safetensors"))


def _why_broken(path: Path) -> str | None:
    """Why a file is not safetensors of the size that its header states; None if it is.

    The format: the header's length in 8 bytes, little-endian, the header (JSON: where each tensor's bytes begin and
    end), the bytes.
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
    """Why no engine can read what the model is; None if one can."""
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
    """The last line that is not blank, at most 200 characters; empty where there is none. (As `pdlab.core.text` has it,
    which nodes do not have.)"""
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "")
