"""A program: load on a fluid deployment until it has grown, none until it has shrunk, requests all along; prints what
became of every request, and the numbers of engines.

``python -m tests.support.counts URL LEAST MOST SEED``. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pdlab.deploy.application import Application
from pdlab.deploy.roles import ask
from pdlab.faults.load import Load, LoadTarget, Prompt
from tests.support.flips import served

CONCURRENCY, SHORT_LOAD_S, LIMIT_S, LOOK_S = 6, 2.0, 240.0, 0.5


class Watch:
    """The engines' roles, each of their sets once, with when it was first seen (seconds)."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.seen: list[tuple[float, list[str]]] = []

    def roles(self) -> list[str]:
        roles = sorted(each["role"] for each in ask("look")["engines"].values())
        if not self.seen or self.seen[-1][1] != roles:
            self.seen.append((round(time.monotonic() - self.began_s, 1), roles))
        return roles

    def until(self, reached: Callable[[list[str]], bool], why: str) -> list[str]:
        deadline = time.monotonic() + LIMIT_S
        while not reached(roles := self.roles()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{why} within {LIMIT_S:g} s: {self.seen}, {ask('look')}")
            time.sleep(LOOK_S)
        return roles


def under_load(service: LoadTarget, prompts: list[Prompt], seed: int, work: Callable[[], object]) -> Counter[str]:
    """What became of the requests that ran while ``work`` did."""
    load = Load(service, prompts, CONCURRENCY, seed, lambda request: None)
    load.start()
    try:
        work()
        load.check()
    finally:
        load.stop()
    return Counter(str(each.outcome) for each in load.finished)


def running(app: Application) -> int:
    return sum(r.deployment.startswith("Fluid:") for r in app.state().replicas)


def main(url: str, least: int, most: int, seed: int) -> dict[str, Any]:
    with served(url, seed) as (app, service, prompts):
        watch = Watch()
        play = ("prefill", "decode", "draining")

        def grown() -> None:
            watch.until(lambda roles: len(roles) == most and set(roles) <= set(play), f"no {most} engines work")
            time.sleep(SHORT_LOAD_S)

        def short() -> None:
            end = time.monotonic() + SHORT_LOAD_S
            while time.monotonic() < end:
                watch.roles()
                time.sleep(LOOK_S)

        growing = under_load(service, prompts, seed, grown)
        watch.until(lambda roles: "leaving" in roles or len(roles) < most, "no engine leaves")
        leaving = under_load(service, prompts, seed + 1, short)
        watch.until(lambda roles: len(roles) == least and running(app) == least, f"more than {least} engines stay")
        after = under_load(service, prompts, seed + 2, short)
        reasons = [each["reason"] for each in ask("decisions")]
        return {
            "outcomes": {"growing": growing, "leaving": leaving, "after": after},
            "roles": watch.seen, "reasons": reasons,
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
