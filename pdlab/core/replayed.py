"""Lengths of a compiled workload (`pdlab.traffic`): each request once, as it stands there, and drawn from nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from pdlab.core.errors import UsageError
from pdlab.core.length_distribution import LengthsOfFile, Pair

COMPILED = "workload.jsonl"
"""The compiled workload, beside the results of its replay."""


class Replayed(LengthsOfFile):
    """What is known of the requests of a compiled workload, which results do not keep in here.

    ``name``: the file that it was compiled from; ``sha256``: of the compiled form, which alone makes two of them equal.
    Prompts are whole ones, with all that their sessions said before. ``groups``: sets of sessions that wait for each
    other. ``last_s``: the last moment that the file says; ``chained_s``: the last one if answers took no time, with the
    pauses of follow-ups. ``path``: where the file is on this machine.
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
        """The replay takes at least so long, answers aside."""
        return max(self.last_s, self.chained_s)

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        raise UsageError(
            f"{self.label}: its requests are replayed only at the times in the file; give the file to run_bm.sh "
            "--workload"
        )
