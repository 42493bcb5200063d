"""The usage of an answer that two engines or several sequences made.

With KV transfer vLLM's decode engine counts transferred tokens as cached tokens of a prompt. Prefill's answer has the
number of tokens that no engine computed for the request. Works on answers of Ray Serve LLM by their public fields; runs
in its replicas, sent there by value: imports only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pdlab.deploy.serving.events import END, data_of, event, split_events

PROMPT, COMPLETION = "prompt_tokens_details", "completion_tokens_details"
# Fields of a prompt's details that speak of the prefix cache.
_CACHE = ("cached_tokens", "created_cache_tokens")


def with_usage(item: Any, mark: str, edit: Callable[[dict[str, Any]], None]) -> Any:
    """An item of an answer's stream after ``edit`` of the usage in its events. An item is a text of events, or a list
    of such texts; others stay as they are. Events without the text ``mark`` have no usage to edit: they are not parsed.
    """
    if isinstance(item, list):
        return [with_usage(text, mark, edit) for text in item]
    if not isinstance(item, str) or mark not in item:
        return item
    return "".join(_edited(text, mark, edit) for text in split_events(item))


def _edited(text: str, mark: str, edit: Callable[[dict[str, Any]], None]) -> str:
    if mark not in text or (data := data_of(text)) is None:
        return f"{text}{END}"
    chunk = json.loads(data)
    usage = chunk.get("usage")
    if not isinstance(usage, dict):  # the name is in a text that the model wrote
        return f"{text}{END}"
    edit(usage)
    return event(chunk)


def summed(usages: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    """Usage of one request from those of its sequences, in the order of its choices, ``n`` for every prompt.

    A prompt counts once, for any number of sequences. Its cached tokens are the smallest number that one of its
    sequences found, because the first one cannot find tokens of the others. A detail that one sequence lacks is left
    out.
    """
    prompts = [usages[at : at + n] for at in range(0, len(usages), n)]
    prompt = sum(sequences[0]["prompt_tokens"] for sequences in prompts)
    completion = sum(usage.get("completion_tokens") or 0 for usage in usages)
    whole = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    of_prompts = [_of_prompt([usage.get(PROMPT) or {} for usage in sequences]) for sequences in prompts]
    details = {PROMPT: _added(of_prompts), COMPLETION: _added([usage.get(COMPLETION) or {} for usage in usages])}
    return whole | {name: values for name, values in details.items() if values}


def _of_prompt(details: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one prompt's sequences."""
    cached = [each.get("cached_tokens") for each in details]
    if None in cached:
        return {name: value for name, value in details[0].items() if name not in _CACHE}
    return min(details, key=lambda each: int(each["cached_tokens"]))


def _added(details: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums of those fields that all of them have; of a mapping, key by key."""
    sums: dict[str, Any] = {}
    for name in details[0]:
        values: list[Any] = [each.get(name) for each in details]
        if None in values:
            continue
        if isinstance(values[0], dict):
            keys = dict.fromkeys(key for value in values for key in value)
            sums[name] = {key: sum(value.get(key, 0) for value in values) for key in keys}
        else:
            sums[name] = sum(values)
    return sums


def cached_in_prefill(item: Any, prefilled: Any) -> Any:
    """An item of decode's answer with the cached tokens of prefill's answer in its usage; without the detail if
    prefill's answer lacks it. Items are whole answers, errors, texts of server-sent events, and lists of such texts.
    """
    # The event of a token, as Ray batches it or by itself: no more is done for each.
    if isinstance(item, list) and len(item) == 1 and isinstance(item[0], str):
        if PROMPT not in item[0]:
            return item
    elif isinstance(item, str) and PROMPT not in item:
        return item
    known = getattr(getattr(prefilled, "usage", None), PROMPT, None)
    cache = {name: getattr(known, name, None) for name in _CACHE}

    def edit(usage: dict[str, Any]) -> None:
        details = usage.get(PROMPT) or {}
        details |= {name: value for name, value in cache.items() if name in details}

    if isinstance(item, (str, list)):
        return with_usage(item, PROMPT, edit)
    usage: Any = getattr(item, "usage", None)
    details = getattr(usage, PROMPT, None)
    if details is None:
        return item
    has = {name: value for name, value in cache.items() if hasattr(details, name)}
    changed = usage.model_copy(update={PROMPT: details.model_copy(update=has)})
    return item.model_copy(update={"usage": changed})
