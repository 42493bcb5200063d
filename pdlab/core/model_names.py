"""Whether two names are of one model or tokenizer, as files and servers write them."""

from __future__ import annotations


def model_name(model: str) -> str:
    """A model's name without folders of one machine: ``org/model`` of a hub's cache, the last part of another path."""
    parts = [part for part in model.split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    if cached is not None:
        return "/".join(cached.split("--")[1:])
    is_path = model.startswith(("/", ".", "~")) or len(parts) > 2
    return parts[-1] if is_path and parts else model


def same_model(first: str, second: str) -> bool:
    """Whether two names may be of one model: they are equal, or one has no organisation and the rest is equal."""
    one, other = model_name(first).casefold(), model_name(second).casefold()
    bare = "/" not in one or "/" not in other
    return one == other or (bare and one.rpartition("/")[2] == other.rpartition("/")[2])
