"""Reads the config.json of a model from a folder, from the Hugging Face cache, or from the hub."""

from __future__ import annotations

import contextlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.core.errors import UsageError

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"
TRUE = {"1", "true", "yes", "on"}  # as huggingface_hub reads a variable
HUB_TIMEOUT_S = 5


class ModelFiles(NamedTuple):
    """The config.json of a model and its hf_quant_config.json.

    ``modelopt`` is None for a model without hf_quant_config.json. ``where`` is the place of the files for a message.
    """

    config: dict[str, Any]
    modelopt: dict[str, Any] | None
    where: str


class BrokenModelFile(UsageError):
    """A file of a model exists and cannot be read."""


def config_of_folder(folder: Path, what: str) -> ModelFiles:
    """The files in ``folder``. A message begins with ``what``. Raises UsageError for a file that cannot be read."""
    config = _json(folder / CONFIG, what)
    if config is None:
        raise UsageError(f"{what}: has no {CONFIG}; give the folder that holds the model's files")
    return ModelFiles(config, _json(folder / MODELOPT, what), f"{CONFIG} of {folder}")


def config_of_file(path: Path) -> ModelFiles:
    """The config.json at ``path``. Raises UsageError for a file that cannot be read."""
    config = _json(path, f"model {path}")
    if config is None:
        raise UsageError(f"model {path}: there is no such file; give the path of the model's {CONFIG}")
    modelopt = _json(path.with_name(MODELOPT), f"model {path}") if path.name == CONFIG else None
    return ModelFiles(config, modelopt, str(path))


def config_of_id(model: str) -> ModelFiles | str:
    """The files of a Hugging Face id, from the cache or else from the hub. A text: why the files are not had.

    Raises UsageError for a damaged file.
    """
    folder = _snapshot(model)
    if folder is not None and (folder / CONFIG).is_file():
        return config_of_folder(folder, f"model {model} in {folder}")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE:
        return f"the Hugging Face cache has no {CONFIG} of {model}, and HF_HUB_OFFLINE is set; {_advice(model)}"
    return _of_hub(model)


_FOLDER = f"give --model the folder that holds {CONFIG}"


def _advice(model: str) -> str:
    return f"download it (hf download {model} {CONFIG}), or {_FOLDER}"


@cache
def _of_hub(model: str) -> ModelFiles | str:
    """The files from the hub, or why they are not had. Kept for the process: a hub that fails costs seconds."""
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError:
        return (
            f"huggingface_hub is not installed to fetch {CONFIG} of {model}; pip install huggingface_hub, or {_FOLDER}"
        )
    if reason := _why_unreached(constants.ENDPOINT):
        return f"the Hugging Face hub is not reached for {CONFIG} of {model} ({reason}); {_advice(model)}"
    try:
        config = Path(hf_hub_download(model, CONFIG, etag_timeout=HUB_TIMEOUT_S))
        with contextlib.suppress(EntryNotFoundError):
            hf_hub_download(model, MODELOPT, etag_timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        hint = "set HF_TOKEN for a gated model" if code in (401, 403) else "check the id"
        return f"the Hugging Face hub answers HTTP {code} for {CONFIG} of {model}; {hint}, or {_advice(model)}"
    except Exception as error:  # connections fail with classes of httpx, urllib3 and huggingface_hub
        return f"the Hugging Face hub is not reached for {CONFIG} of {model} ({type(error).__name__}); {_advice(model)}"
    return config_of_folder(config.parent, f"model {model} in {config.parent}")


def _why_unreached(endpoint: str) -> str:
    """Why the hub does not answer. Empty: the hub answers. Without this test huggingface_hub tries for 30 s."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def _snapshot(model: str) -> Path | None:
    """The folder of the main branch in the Hugging Face cache. None: the cache has no main branch of ``model``."""
    env = os.environ
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    hub = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = hub / f"models--{model.replace('/', '--')}"
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def _json(path: Path, what: str) -> dict[str, Any] | None:
    """The object in the file at ``path``. None: there is no such file. Raises UsageError for a damaged file."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModelFile(f"{what}: {path.name} cannot be read ({error}); download it again") from error
    if not isinstance(data, dict):
        raise BrokenModelFile(f"{what}: {path.name} holds no JSON object; download it again")
    return data
