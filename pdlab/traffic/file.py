"""The workload file: a YAML description of requests. One of the keys ``random``, ``conversations``, ``agents`` and
``replay`` makes the requests; the other keys are options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pdlab.core.errors import UsageError
from pdlab.core.lengths import relative_to_folder
from pdlab.core.schema import Finite, load_yaml, validate
from pdlab.core.settings import AboveZero, Text, setting
from pdlab.core.workload import BURSTINESS, Burstiness, Workload
from pdlab.traffic.quantity import Varying, VaryingSeconds

WORKLOAD = "workload"  # title of a group of flags
SOURCES = ("random", "conversations", "agents", "replay")
MOST_SESSIONS = 1_000_000


class RandomRequests(Finite):
    """Requests that share only the workload's prefix, in an open loop: gaps are gamma-distributed around ``rate_rps``,
    ``burstiness`` is their shape.
    """

    rate_rps: float = Field(gt=0)
    requests: int = Field(ge=1, le=MOST_SESSIONS)
    burstiness: Burstiness = BURSTINESS
    workload: Workload = Workload()


class Conversations(Finite):
    """Chats: ``sessions`` conversations begin at ``rate_rps`` (Poisson). Every turn sends all earlier turns and
    answers, and ``user_tokens`` more, ``think_s`` after the answer. A conversation ends before a turn that would exceed
    ``most_tokens``, but its first turn is always sent.
    """

    rate_rps: float = Field(gt=0)
    sessions: int = Field(ge=1, le=MOST_SESSIONS)
    turns: Varying
    user_tokens: Varying
    answer_tokens: Varying
    think_s: VaryingSeconds
    system_tokens: int = Field(default=0, ge=0)
    most_tokens: int | None = Field(default=None, ge=2)


class Repository(Finite):
    """The repository that agents work on: one of ``count`` texts with that many tokens, chosen with equal chances,
    follows the tools in the prompt.
    """

    count: int = Field(ge=1)
    tokens: int = Field(ge=1)


class Agents(Finite):
    """Agents: ``sessions`` agent sessions begin at ``rate_rps`` (Poisson).

    The first prompt is the tools, the repository and ``task_tokens``. Each step sends everything before it and
    ``growth_tokens`` of tool results, ``tool_gap_s`` after the previous answer. With the probability ``parallel`` a
    step is followed by ``branches`` requests that all continue from it at once; the next step waits for them. A prompt
    above ``compact_at_tokens`` is replaced by tools, repository and ``summary_tokens``.
    """

    rate_rps: float = Field(gt=0)
    sessions: int = Field(ge=1, le=MOST_SESSIONS)
    steps: Varying
    tools_tokens: int = Field(ge=1)
    repository: Repository | None = None
    task_tokens: Varying = Field(default="200 lognormal:0.8", validate_default=True)
    growth_tokens: Varying
    answer_tokens: Varying
    tool_gap_s: VaryingSeconds
    parallel: float = Field(default=0.0, ge=0, le=1)
    branches: int = Field(default=2, ge=2, le=64)
    compact_at_tokens: int | None = Field(default=None, ge=1)
    summary_tokens: Varying = Field(default="1000 lognormal:0.5", validate_default=True)


class Tenant(Finite):
    """A share of the sessions, with one system prompt for all of them."""

    share: float = Field(gt=0)
    system_tokens: int = Field(default=0, ge=0)


def _window(text: str) -> tuple[float, float]:
    """``0-1200`` as two numbers."""
    begin, _, end = text.partition("-")
    try:
        return float(begin), float(end)
    except ValueError:
        raise argparse.ArgumentTypeError(f"from one second to another, such as 0-1200, got {text!r}") from None


class TrafficFile(Finite):
    """A workload file.

    ``replay``: the path of a trace; its first line determines the format. ``scale``: divides answers too. ``window``:
    if the source is generated, only sessions that begin within these seconds. ``spread_ticks``: arrivals in ticks are
    spread evenly over the ticks if these are found (auto), never, or over that many seconds. ``follow``: a follow-up
    waits for its parent's answer and contains it (causal), or is sent as recorded. ``rate_rps``: rate at which sessions
    of a source without times begin. ``think_s``: pause before a follow-up of a source without times. ``block_tokens``:
    tokens per block of a trace with block hashes, if it is not the default of its format. ``output_tokens``: for
    requests whose source has no length. ``tokenizer``: a folder whose tokenizer counts the tokens of text.
    """

    random: RandomRequests | None = None
    conversations: Conversations | None = None
    agents: Agents | None = None
    replay: str | None = None
    seed: int = Field(default=0, ge=0)
    speed: AboveZero = setting(1.0, "replay this many times as fast: divide the times by N", WORKLOAD)
    scale: AboveZero = setting(1.0, "divide lengths and blocks of tokens by N, for a small model", WORKLOAD)
    window: Annotated[tuple[float, float], Text(_window, "{0[0]:.12g}-{0[1]:.12g}".format)] | None = setting(
        None,
        "keep only the requests that come in these seconds of the trace, such as 0-1200",
        WORKLOAD,
        value="FROM-TO",
    )
    spread_ticks: Literal["auto", "never"] | float = "auto"
    follow: Literal["causal", "recorded"] = "causal"
    endpoint: Literal["completions", "chat"] = "completions"
    tenants: dict[str, Tenant] | None = Field(default=None, min_length=1)
    rate_rps: float | None = Field(default=None, gt=0)
    think_s: VaryingSeconds | None = None
    block_tokens: int | None = Field(default=None, ge=1)
    output_tokens: int | None = Field(default=None, ge=1)
    tokenizer: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TrafficFile:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none of them is there" if not given else f"{' and '.join(given)} are there"
            raise ValueError(f"needs one of {', '.join(SOURCES)}: {found}")
        if self.window is not None and not 0 <= self.window[0] < self.window[1]:
            raise ValueError("window: from an earlier second to a later one, such as 0-1200")
        if isinstance(self.spread_ticks, float) and self.spread_ticks <= 0:
            raise ValueError("spread_ticks: auto, never, or seconds above 0")
        of_replay = ("spread_ticks", "rate_rps", "think_s", "block_tokens", "output_tokens", "tokenizer")
        if self.replay is None:
            unused = [name for name in of_replay if name in self.model_fields_set]
            unused += ["follow"] if self.follow == "recorded" else []
            if unused:
                raise ValueError(f"{unused[0]} is of a replay, and {given[0]} is none; leave it out")
        if self.tenants is not None and self.conversations is None and self.agents is None:
            raise ValueError(f"tenants are of conversations and agents, not of {given[0]}; leave them out")
        if self.tenants is not None and self.conversations is not None and self.conversations.system_tokens:
            raise ValueError("conversations: system_tokens is of each tenant where there are tenants; leave it out")
        return self

    @property
    def source(self) -> str:
        """The key that makes the requests."""
        return next(name for name in SOURCES if getattr(self, name) is not None)


def load_file(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> TrafficFile:
    """A workload file with ``changes`` to its keys; paths in it are relative to its folder. Raises UsageError with the
    file, the key, the rule.
    """

    def prepare(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {**data, **changes}
        if isinstance(data.get("random"), dict):
            random = data["random"]
            data = {
                **data,
                "random": {**random, "workload": relative_to_folder(random.get("workload", {}), path.parent)},
            }
        for name in ("replay", "tokenizer"):
            if isinstance(data.get(name), str):
                data = {**data, name: str(path.parent / data[name])}
        return data

    return load_yaml(path, TrafficFile, prepare)


def is_traffic(data: object) -> bool:
    """Whether the plain data of a YAML file are a workload file, and not only the lengths of one `Workload`."""
    return isinstance(data, dict) and any(name in data for name in SOURCES)


def of_trace(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> TrafficFile:
    """The workload file that replays a trace with no other keys than ``changes``. Raises UsageError."""
    if not path.exists():
        raise UsageError(f"{path}: no such file; give a workload file or a trace")
    return validate(TrafficFile, {"replay": str(path), **changes}, where=str(path))
