"""Fill every engine's KV pool once before the first level. A pool that was never full hands out contiguous blocks.
After it was full it hands out scattered blocks, and their copies may cost more (docs/model.md).

The prompts are never sent again, and each requests one output token: with PD it leaves its blocks in a prefill and in a
decode engine. A first part measures the time that this takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

from pdlab.bench import levels
from pdlab.core.commands import LAUNCH
from pdlab.core.errors import UsageError
from pdlab.core.text import counted, duration
from pdlab.core.workload import Workload

FillCache = Literal["auto", "yes", "no"]
AUTO_S = 180.0
PER_ENGINE = 4  # prompts in flight, at least FEWEST: enough that the engines that prefill never wait
FEWEST = 8
PROBE = 2  # of those numbers are in the first part
SPARE = 1.05  # more than is missing, for requests are not spread evenly
MOST = 20_000  # of a part: prompts are drawn before they are sent
MOST_PARTS = 8
FOR_SOAK = "not filled first, because a soak shows the changes while they fill (--fill-cache yes fills them)"
ON_CPUS = "not filled on CPUs of this machine (--fill-cache yes, or fill_cache: yes in an experiment, fills them)"


class FillTarget(Protocol):
    """What is filled: `pdlab.bench.measure.Driver`."""

    @property
    def local(self) -> bool: ...
    @property
    def to_fill(self) -> float | None: ...
    @property
    def engines(self) -> int: ...
    def fill(self, requests: int, seed: int, concurrency: int) -> float | None: ...


def _why_not(mode: FillCache, *, local: bool, soak: bool) -> str | None:
    """Why no pool will be filled; None if the pools decide."""
    if mode == "no":
        return "not filled (--fill-cache no)"
    if mode == "auto" and soak:
        return FOR_SOAK
    return ON_CPUS if mode == "auto" and local else None


def planned(
    mode: FillCache, workload: Workload, *, smoke: bool = False, local: bool = False, soak: bool = False
) -> str:
    """What `fill` will do, in words."""
    prompts = f"prompts of {counted(levels.fill_tokens(workload), 'token')}, one token each"
    if smoke:
        return "not filled: a smoke test is short"
    if (reason := _why_not(mode, local=local, soak=soak)) is not None:
        return reason
    if mode == "yes":
        return f"filled once before the first level ({prompts}), however long that takes"
    return (
        f"filled once before the first level ({prompts}) where that takes at most {duration(AUTO_S)} by the pace of "
        "the first ones, and not on CPUs of this machine"
    )


def fill(
    driver: FillTarget,
    workload: Workload,
    mode: FillCache,
    attempt: int,
    print_line: Callable[[str], None] = lambda text: None,
    *,
    soak: bool = False,
) -> str:
    """Fill the KV pools by ``mode``. Returns what was done, and the reason, in words. ``auto``: only if it takes at
    most AUTO_S by the pace of the first part, not on CPUs of this machine, where it takes minutes for every start, and
    not before a ``soak``. ``print_line`` gets the estimated time.

    Raises UsageError if they must be filled and the size of one is unknown.
    """
    if (reason := _why_not(mode, local=driver.local, soak=soak)) is not None:
        return reason
    left = driver.to_fill
    if left is None:
        if mode == "yes":
            raise UsageError(
                "--fill-cache yes: the engines' metrics do not report the size of their KV pools; launch with "
                f"{LAUNCH}, or leave --fill-cache out"
            )
        return "not filled, because the engines' metrics do not report the size of the pools"
    if left <= 0:
        return "filled before, every engine has been given more tokens than its pool holds"
    tokens = levels.fill_tokens(workload)
    in_flight = max(FEWEST, PER_ENGINE * driver.engines)
    needed, pace_rps, parts = _requests(left, tokens), None, 0
    while left > 0 and parts < MOST_PARTS:
        requests = min(needed, PROBE * in_flight if pace_rps is None else MOST)
        pace_rps = driver.fill(requests, levels.fill_seed(workload, parts, attempt=attempt), in_flight)
        parts += 1
        left = driver.to_fill
        if left is None:
            return "filling not verified: the engines' metrics no longer report the size of the pools"
        needed = _requests(left, tokens)
        if pace_rps is None:
            return "not filled, because prompts that fill them failed"
        if mode == "auto" and needed / pace_rps > AUTO_S:
            return (
                f"not filled, because that takes about {duration(needed / pace_rps)}, {counted(needed, 'prompt')} of "
                f"{tokens} tokens (filled by themselves up to {duration(AUTO_S)}; --fill-cache yes fills them)"
            )
        if parts == 1 and left > 0:
            print_line(
                f"filling KV pools takes about {duration(needed / pace_rps)}, {counted(needed, 'prompt')} of "
                f"{counted(tokens, 'token')}"
            )
    if left > 0:
        return f"not all filled: an engine gets few of the requests, and {left:.0f} tokens are missing"
    return "filled once, to the state that they have after some minutes of serving"


def _requests(tokens: float, each: int) -> int:
    return max(FEWEST, math.ceil(SPARE * tokens / each))
