"""Lengths of a compiled workload (`pdlab.traffic`): each request once, and none is drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from pdlab.core.commands import BENCH
from pdlab.core.errors import UsageError
from pdlab.core.length_distribution import LengthsOfFile, Pair

COMPILED = "workload.jsonl"
"""File name of the compiled workload, in the folder of its replay's results."""


class Replayed(LengthsOfFile):
    """Facts about the requests of a compiled workload; the requests themselves are in another file.

    ``name``: the file that was compiled. ``sha256``: hash of the compiled form; workloads with equal hashes are equal.
    Prompts are whole: they have all earlier turns of their session. ``groups``: sets of sessions that wait for each
    other. ``last_s``: the latest time in the file. ``chained_s``: the latest time with the pauses of follow-ups, if
    answers took no time. ``path``: the file on this machine.
    """

    kind: Literal["replay"] = "replay"
    sessions: int = Field(ge=1)
    groups: int = Field(ge=1)
    endpoint: Literal["completions", "chat"] = "completions"
    speed: float = Field(default=1.0, gt=0)
    last_s: float = Field(ge=0)
    chained_s: float = Field(default=0.0, ge=0)

    @property
    def label(self) -> str:
        return f"replay {self.name} {self.sha256[:8]}"

    @property
    def flag_value(self) -> str:
        return self.path or self.name

    @property
    def identity(self) -> str:
        return f"replay {self.sha256}"

    @property
    def least_s(self) -> float:
        """The shortest duration of the replay, without the time of answers."""
        return max(self.last_s, self.chained_s)

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        raise UsageError(
            f"{self.label}: its requests are replayed only at the times in the file; give the file to {BENCH} "
            "--workload"
        )
