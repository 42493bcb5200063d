"""The host of an engine: its times in a step by version, its scheduling, and how requests find its ranks without Ray.
Files of configs/engines/."""

from __future__ import annotations

import math
import re
import statistics
from functools import cache
from typing import Literal

from pydantic import Field

from pdlab.core.files import CONFIGS
from pdlab.core.schema import Frozen, load_yaml
from pdlab.sim.step_source import SEQUENCE_US

ASYNCHRONOUS_SINCE = (0, 14)  # vLLM schedules asynchronously by default; its release notes of 0.14.0


def is_asynchronous(version: str) -> bool:
    """Whether that version of vLLM (major and minor) schedules asynchronously by default."""
    return tuple(map(int, version.split("."))) >= ASYNCHRONOUS_SINCE


RankRule = Literal["random", "in-turn", "least-loaded"]


class DirectRouting(Frozen):
    """How requests find an engine without Ray: replicas get them in turn, whatever their queues. ``prefill``,
    ``decode``: which data parallel rank of a replica gets it, by the engine's own rule."""

    prefill: RankRule = "least-loaded"
    decode: RankRule = "least-loaded"
    source: str


class HostTime(Frozen):
    """The milliseconds per step that the host of one engine version adds to the time of the GPU: the mean over the
    fitted stacks, and the standard deviation between models or GPUs."""

    step_ms: float = Field(ge=0)
    sd_ms: float = Field(ge=0)
    source: str


class SequenceTime(Frozen):
    """The microseconds that each decoding sequence adds to a step."""

    us: float = Field(ge=0)
    source: str


class EngineHost(Frozen):
    """An engine's host times, by major and minor version. ``synchronous``: the time of a sequence in versions that
    schedule one step at a time (None: there is none). ``direct``: how requests find its ranks without Ray."""

    engine: str
    versions: dict[str, HostTime]
    synchronous: SequenceTime | None = None
    direct: DirectRouting

    def sequence_us(self, version: str, asynchronous: bool | None = None) -> float:
        """Microseconds that a decoding sequence adds to a step of that version. ``asynchronous``: the next step is
        scheduled while one runs (None: as the version does by default)."""
        if self.synchronous is None:
            return SEQUENCE_US
        ahead = is_asynchronous(version) if asynchronous is None else asynchronous
        return SEQUENCE_US if ahead else self.synchronous.us

    @property
    def spread_ms(self) -> float:
        """The standard deviation of the host's time between versions."""
        times = [each.step_ms for each in self.versions.values()]
        return statistics.stdev(times) if len(times) > 1 else UNSEEN_SD_MS

    def of(self, version: str) -> HostTime:
        """The host time of one version. For an unknown version, it is that of the nearest version, with the standard
        deviation between versions."""
        if version in self.versions:
            return self.versions[version]
        if not self.versions:
            return HostTime(step_ms=0.0, sd_ms=UNSEEN_SD_MS, source=f"no version of {self.engine} was measured")
        nearest = min(self.versions, key=lambda each: abs(_number(each) - _number(version)))
        sd_ms = math.hypot(self.spread_ms, self.versions[nearest].sd_ms)
        return HostTime(
            step_ms=self.versions[nearest].step_ms,
            sd_ms=sd_ms,
            source=f"{self.engine} {version} was not measured: as of {nearest}, as uncertain as versions differ",
        )


def _number(version: str) -> int:
    """The version as a number of minor versions: 11 for ``0.11``."""
    major, minor = (int(re.sub(r"\D.*", "", part) or 0) for part in (*version.split("."), "0")[:2])
    return 1000 * major + minor


UNSEEN_SD_MS = 1.0  # between the versions of vLLM, roughly: for an engine with at most one measured version


@cache
def host_of(engine: str) -> EngineHost:
    """The file of configs/engines/. Raises UsageError."""
    return load_yaml(CONFIGS / "engines" / f"{engine}.yaml", EngineHost)
