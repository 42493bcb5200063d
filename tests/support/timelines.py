"""Requests made up of durations: what a timeline's parts must come out as. Marks are sums of durations, in ms."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from support import folders

from pdlab.core.deployment import Deployment
from pdlab.results.store import Store
from pdlab.results.timeline import KvRead, RequestTimeline

# By what each duration ends with. What prefill itself says is no mark.
PD = ("call", "", "", "", "answer", "queued", "admitted", "posted", "seen", "reported", "usable", "scheduled", "first")
PD_MS: Mapping[str, float] = {
    "server": 2.0,
    "call": 3.0,
    "prefill_server": 4.0,
    "queue": 30.0,
    "prefill": 50.0,
    "submit": 1.0,
    "admission": 6.0,
    "post": 0.5,
    "transfer": 9.0,
    "step_lag": 12.0,
    "guard": 0.1,
    "wait": 0.2,
    "first_step": 12.0,
    "out": 1.5,
}
ALONE_MS: Mapping[str, float] = {"server": 2.0, "queue": 20.0, "prefill": 45.0, "out": 1.5}


def pd(number: int, arrival_s: float, ms: Mapping[str, float], front_ms: float = 5.0) -> RequestTimeline:
    """A request that was prefilled elsewhere; ``ms`` in the order of `PD_MS`."""
    ends = list(accumulate(ms.values()))
    t = {mark: at for mark, at in zip((*PD, "first_byte"), ends, strict=True) if mark}
    return RequestTimeline(
        id=f"r{number}",
        p_id=f"p{number}",
        path="pd",
        attempt=1,
        t=t,
        p={"total": sum(ms[name] for name in ("prefill_server", "queue", "prefill"))}
        | {name: ms[name] for name in ("queue", "prefill")},
        wire=(KvRead(0, t["posted"], t["seen"], 3000.0, 1_000_000),),
        arrival_s=arrival_s,
        ttft_s=(front_ms + ends[-1]) / 1e3,
    )


def alone(number: int, arrival_s: float, ms: Mapping[str, float], front_ms: float = 5.0) -> RequestTimeline:
    """A request of a collocated deployment."""
    t = dict(zip(("queued", "scheduled", "first", "first_byte"), accumulate(ms.values()), strict=True))
    ttft_s = (front_ms + t["first_byte"]) / 1e3
    return RequestTimeline(id=f"r{number}", path="collocated", t=t, arrival_s=arrival_s, ttft_s=ttft_s)


def drawn(chance: random.Random, means_ms: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
    """Durations around those means."""
    return {name: factor * mean * chance.gammavariate(4, 0.25) for name, mean in means_ms.items()}


def write(folder: Path, deployment: Deployment, *, loads: tuple[int, ...] = (4, 16), requests: int = 200) -> Path:
    """An experiment of `support.folders` whose levels have timelines: the queue grows with the load."""
    folders.write(folder, deployment, loads=loads, repeats=1)
    store, chance = Store(folder), random.Random(folder.name)
    for run in list(store.runs()):
        made = []
        for number in range(requests):
            is_pd = len(deployment.pools) > 1
            ms = drawn(chance, PD_MS if is_pd else ALONE_MS)
            ms["queue"] *= run.key.value / 4
            make = pd if is_pd else alone
            made.append(make(number, 0.01 * number, ms, 5 * chance.gammavariate(4, 0.25)))
        store.write(run, store.read_records(run.key), made, force=True)
    return folder
