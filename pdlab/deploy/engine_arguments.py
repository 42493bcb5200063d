"""Names, types and ranges of vLLM's engine arguments: a misspelt or impossible one is refused before anything starts.

The table beside this module is read out of vLLM's own definitions, without importing them, by
tests/contract/test_engine_arguments.py, which also compares it with the installed vLLM.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pdlab.core.deployment import FLAG_PREFIX, Deployment
from pdlab.core.errors import UsageError
from pdlab.core.named_values import engine_arg
from pdlab.core.request_lengths import ARGUMENT, configured_length, length_flag
from pdlab.core.text import choices

TABLE = Path(__file__).parent / "assets" / "vllm_arguments.json"
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "None": "null",
}
MOST_LISTED = 160  # characters
LARGEST = 2**53  # of a whole number: larger ones are none that engines count
# Argument of vLLM that turns its engines' statistics off.
NO_STATISTICS = "disable_log_stats"
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@cache
def known_arguments() -> dict[str, dict[str, Any]]:
    """Argument -> ``types`` (null: anything), ``choices``, and those of the bounds in `LIMITS` that it has."""
    arguments: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["arguments"]
    return arguments


def check_engine_arguments(deployment: Deployment) -> None:
    """Raises UsageError for an engine argument that vLLM does not have, whose value it refuses, or that contradicts a
    flag."""
    check(deployment.engine_kwargs, "--engine-arg")
    for role, pool in deployment.pools.items():
        flag = f"--{FLAG_PREFIX[role]}engine-arg"
        check(pool.engine_kwargs, flag)
        both = deployment.engine_kwargs_of(pool)
        if both.get(NO_STATISTICS):
            given = flag if NO_STATISTICS in pool.engine_kwargs else "--engine-arg"
            raise UsageError(
                f"{given} {engine_arg(NO_STATISTICS, both[NO_STATISTICS])}: must be false, because the timelines of "
                "requests and the engines' metrics are made of these statistics: leave it out"
            )
        tokens, sequences = both.get("max_num_batched_tokens"), both.get("max_num_seqs")
        if tokens is not None and sequences is not None and int(tokens) < int(sequences):
            raise UsageError(
                f"{flag} max_num_batched_tokens={tokens}: must be at least max_num_seqs ({sequences}): every "
                "running sequence takes one token of a step"
            )
    if deployment.max_model_len is not None and all(
        ARGUMENT in deployment.engine_kwargs_of(pool) for pool in deployment.pools.values()
    ):
        role = next(iter(deployment.pools))
        own = configured_length(deployment, deployment.pools[role], None, cpu=False)
        raise UsageError(
            f"--max-model-len {deployment.max_model_len} and {length_flag(deployment, role)}{own} set the same length: "
            "leave one of them out"
        )


def check(arguments: Mapping[str, Any], flag: str) -> None:
    """As `check_engine_arguments`, for those of one flag."""
    for name, value in arguments.items():
        rule = known_arguments().get(name)
        if rule is None:
            raise UsageError(f"{flag} {name}: vLLM has no such engine argument; {choices(name, known_arguments())}")
        if reason := _refused(value, rule):
            raise UsageError(f"{flag} {name}={value}: {reason}")
    tokenizer = arguments.get("tokenizer")
    if isinstance(tokenizer, str) and tokenizer.startswith((".", "~", "/")) and not _is_folder(tokenizer):
        raise UsageError(f"{flag} tokenizer={tokenizer}: no such folder; give one, or a Hugging Face id")


def reads_tool_calls(arguments: Mapping[str, Any]) -> bool:
    """Whether an engine with these arguments finds tool calls in what the model writes: vLLM takes the parser only
    together with the automatic choice, for required and named tools too."""
    return bool(arguments.get("enable_auto_tool_choice")) and bool(arguments.get("tool_call_parser"))


def _is_folder(path: str) -> bool:
    try:
        return Path(path).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, of a user who is not there
        return False


def _refused(value: Any, rule: Mapping[str, Any]) -> str | None:
    """Why vLLM does not take the value; None where it does."""
    named = rule.get("choices")
    if named is not None:
        every = [*named, *([] if "None" not in rule["types"] else [None])]
        if value not in every or isinstance(value, bool):
            listed = ", ".join(map(str, named))
            if len(listed) > MOST_LISTED:
                return f"is none of vLLM's values; {choices(str(value), filter(None, map(str, named)))}"
            return f"must be one of {listed}"
        return None
    types = rule["types"]
    if types is not None and not any(_is(value, kind) for kind in types):
        return f"must be {' or '.join(KINDS[kind] for kind in types if kind != 'None' or len(types) == 1)}"
    number = _number(value)
    if number is None:
        return None
    bounds = {name: rule[name] for name in LIMITS if name in rule}
    if types is not None and "float" not in types and abs(number) > LARGEST:
        return f"must be at most {LARGEST}" if number > 0 else f"must be at least {-LARGEST}"
    keeps = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
    broken = any(not keeps[name](number, limit) for name, limit in bounds.items())
    return f"must be {' and '.join(f'{LIMITS[name]} {limit:g}' for name, limit in bounds.items())}" if broken else None


def _is(value: Any, kind: str) -> bool:
    if kind == "None":
        return value is None
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool) or value in (0, 1)
    if kind == "list":
        return isinstance(value, list | tuple)
    if kind == "dict":
        return isinstance(value, dict)
    number = _number(value)
    return number is not None and (kind == "float" or number == int(number))


def _number(value: Any) -> float | None:
    """The finite number that vLLM reads in the value, which may be text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
