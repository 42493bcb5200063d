"""A program: load on a fluid deployment while its roles flip at seeded times; prints what became of every request.

``python -m tests.support.flips URL REQUESTS FLIPS SEED [kill ...]``, with what is killed (kill -9) in turn, at seeded
times too: ``engine``, ``board``, ``router``. The last line printed is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pdlab.cluster import local_nodes
from pdlab.cluster.connection import Cluster, prepare
from pdlab.core.errors import PdlabError
from pdlab.deploy import canary, serving_path
from pdlab.deploy.application import Application
from pdlab.deploy.endpoint import load_running
from pdlab.deploy.roles import ask
from pdlab.faults.kinds import FaultTarget, Part, Role
from pdlab.faults.load import Load, LoadTarget, Prompt, request_of, token_prompts
from pdlab.faults.run import ROLE_OF
from pdlab.faults.targets import NodeActors, choose, classify

LENGTHS = (40, 90, 200, 400, 700)
CONCURRENCY, MAX_TOKENS, LIMIT_S = 6, 16, 60.0
VICTIMS: dict[str, tuple[Part, Role | None]] = {
    "engine": ("engine", "fluid"), "board": ("board", None), "router": ("router", None),
}  # fmt: skip


def flipped(roles: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Other roles of the same engines, at least one of each kind."""
    names = sorted(roles)
    while True:
        drawn = {name: rng.choice(("prefill", "decode")) for name in names}
        if drawn != roles and len(set(drawn.values())) > 1:
            return drawn


def current() -> dict[str, str]:
    looked = ask("look")
    return {name: engine["role"] for name, engine in looked["engines"].items()}


def kill(app: Application, node_actors: NodeActors, victim: str, rng: random.Random) -> str:
    from ray._private import state as ray_state

    part, role = VICTIMS[victim]
    roles: dict[str, Any] = {name: ROLE_OF.get(name.partition(":")[0]) for name in app.state().deployments}
    engines = {name: each for name, each in roles.items() if each}
    actors = list(ray_state.actors().values())
    members = classify(node_actors.survey(), app.state().replicas, engines, actors, ray_state.jobs())
    member = choose(members, FaultTarget(part, role), rng.random())
    if member is None:
        return f"there is no {victim}"
    os.kill(member.pid, signal.SIGKILL)
    return f"killed {member.part} {member.pid}"


@contextlib.contextmanager
def served(url: str, seed: int) -> Iterator[tuple[Application, LoadTarget, list[Prompt]]]:
    """What is served there on local nodes, with prompts by seed and what an engine alone answers to each."""
    running = load_running(url)
    local = local_nodes.running()
    assert running is not None and local is not None
    assert running.manifest.deployment is not None
    env = serving_path.environment(running.manifest.deployment, "127.0.0.1")
    loading = prepare(local, env)
    with Cluster(local, env) as cluster:
        loading.result()
        app = Application(cluster)
        service = LoadTarget(url, running.model_id, MAX_TOKENS, LIMIT_S)
        ids = token_prompts(15, LENGTHS, seed)
        alone = app.ask_alone("fluid", service.model_id, [request_of(service, i, None, stream=False) for i in ids])
        yield app, service, [Prompt(tuple(i), canary.read_answer(a)) for i, a in zip(ids, alone, strict=True)]


def main(url: str, requests: int, flips: int, seed: int, victims: list[str]) -> dict[str, Any]:
    rng = random.Random(f"flips {seed}")
    with served(url, seed) as (app, service, prompts):
        assert app.cluster.local is not None
        node_actors = NodeActors(app.cluster, f"{local_nodes.MARKER}={app.cluster.local.id}")
        load = Load(service, prompts, CONCURRENCY, seed, lambda request: None)
        done, notes, by_prefill = 0, [], Counter[int]()
        kills = [(flips * (number + 1) // (len(victims) + 1), victim) for number, victim in enumerate(victims)]
        load.start()
        try:
            roles = current()
            while len(load.finished) < requests or done < flips:
                load.check()
                # As many flips as are due by then, spread over the requests with a seeded jitter.
                due = min(flips, int(flips * (len(load.finished) + 1) / requests + rng.random()))
                if done < due:
                    if kills and done >= kills[0][0]:
                        notes.append(f"{kill(app, node_actors, kills.pop(0)[1], rng)} at {len(load.finished)} requests")
                    try:
                        known = current()
                        roles = flipped(known, rng) if len(known) > 1 else known
                        ask("set_roles", roles)
                        by_prefill[list(roles.values()).count("prefill")] += 1
                        done += 1
                    except PdlabError as error:  # the board was killed a moment ago
                        notes.append(str(error))
                        time.sleep(0.5)
                time.sleep(rng.uniform(0.01, 0.06))
        finally:
            load.stop()
            node_actors.close()
        outcomes = Counter(str(each.outcome) for each in load.finished)
        wrong = [each.model_dump(mode="json") for each in load.finished if each.outcome != "right"][:5]
        reach_ms = None
        try:
            reach_ms = ask("look")["reach_ms"]
        except PdlabError as error:
            notes.append(str(error))
        return {
            "outcomes": outcomes, "flips": done, "reach_ms": reach_ms, "engines_that_prefill": by_prefill,
            "notes": notes, "not_right": wrong,
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])))
