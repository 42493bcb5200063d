"""Command lines of pdlab, written from settings: no child command and no printed command spells a flag by hand."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pdlab.core.commands import module_of, python_words, typed
from pdlab.core.settings import Settings, flag_names, settings_of, words_of

# Command -> the module of its settings, if that is not the command's own: it loads faster.
_SETTINGS = {
    "bench": "pdlab.bench.options",
    "check-transfer": "pdlab.transfer.options",
    "launch": "pdlab.deploy.options",
}


def flag_words(command: str, /, **fields: Any) -> tuple[str, ...]:
    """The words after the command for these fields of its settings, in their order: `pdlab.core.settings.words_of`.

    Raises ValidationError for an unknown field or a wrong value.
    """
    return tuple(words_of(_settings(command), fields))


def command_line(command: str, /, **fields: Any) -> str:
    """The command line with these fields of the command's settings, for a shell."""
    return typed(command, *flag_words(command, **fields))


def is_folder_word(model: str) -> bool:
    """Whether the word of --model is a folder, and not a Hugging Face id."""
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def how_to_fetch(model: str, *, here: bool) -> str:
    """How the weights of a model (a Hugging Face id or a folder) come to the nodes. ``here``: to this machine only."""
    if is_folder_word(model):
        return f"copy the model's files to {model} on the node"
    return command_line("weights", model=model, here=here, fetch=True)


def child_words(command: str, /, **fields: Any) -> tuple[str, ...]:
    """The arguments of the interpreter for these fields of the command's settings."""
    return (*python_words(command), *flag_words(command, **fields))


def resumed(command: str, words: Sequence[str]) -> str:
    """The command line that goes on with what ``words`` began, for a shell."""
    flags = flag_names(_settings(command))
    dropped = {flags[name] for name in ("resume", "force") if name in flags}
    return typed(command, *(word for word in words if word not in dropped), flags["resume"])


def _settings(command: str) -> type[Settings]:
    import_module(_SETTINGS.get(command) or module_of(command))
    return settings_of(command)
