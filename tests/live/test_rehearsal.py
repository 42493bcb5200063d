"""A short rehearsal: deployments on two made-up nodes, launched, checked, measured, held against the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.long import LONG

from pdlab.core.catalog import load_cluster, require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.replayed import COMPILED
from pdlab.core.workload import Level
from pdlab.placement.place import place
from pdlab.plan.traffic import trace_of_file
from pdlab.results.store import Store
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.traffic.requests import read_requests
from tests.live.conftest import BUSY_MACHINE, Stack, own_stack

CLUSTER = "p5.48xlarge-x2"
SLOW_DOWN = 6.0
DETAILS = ("--engine-arg", "enable_prompt_tokens_details=true")
# The smoke test is a pack, whose figures are compared with the simulator's.
CASES = {
    "collocated-2xtp4": ("--collocated", "--num", "2", "--tp", "4", "--direct-streaming"),
    "pd-pack-p1xtp4-d1xtp4": ("--pd-pack", "--p-tp", "4", "--d-tp", "4"),
    "pd-spread-p2xtp2-d2xtp4": ("--pd-spread", "--p-num", "2", "--p-tp", "2", "--d-num", "2", "--d-tp", "4"),
    "pd-fluid-4xtp2": ("--pd-fluid", "--num", "4", "--tp", "2"),
}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with own_stack(tmp_path_factory.mktemp("rehearsal")) as made:
        yield made


SMOKE = "pd-pack-p1xtp4-d1xtp4"


WORKLOAD = """
seed: 2
conversations: {rate_rps: 5, sessions: 8, turns: 2, system_tokens: 512, user_tokens: 500 uniform:0.5-1.5,
                answer_tokens: 30, think_s: 0.1}
"""


def replay(rehearsal: Stack, label: str) -> None:
    """The same file that real engines and plan.py take, in slow time: every follow-up behind its answer and with it,
    hits as foreseen where one engine computes prompts, and hits and times as the simulator has them for the same
    requests."""
    file, out = rehearsal.folder / "chat.yaml", rehearsal.folder / "replays"
    file.write_text(WORKLOAD)
    words = ("--workload", str(file), "--out", str(out), "--fill-cache", "no")
    replayed = rehearsal.run("-m", "pdlab", "bench", "-u", rehearsal.url, *words, env={"PYTHONPATH": "."})
    store = Store(out / label)
    (run,) = store.runs()
    assert set(run.validity.failed_gates) <= BUSY_MACHINE | {"rehearsed_pace"}, replayed.text
    assert not {"dependencies", "token_counts", "rehearsed_pace"} & run.validity.unchecked.keys()
    computing = next(iter(Deployment(topology=parse_label(label)).pools.values()))
    if computing.replicas == 1:
        assert "cache_hits" not in run.validity.unchecked
    else:  # which of them computed a prompt only timelines would tell
        assert run.validity.unchecked["cache_hits"].code == "hits_bounded"
    assert run.origin == "simulated" and run.key.stem == "replay1" and run.completed == 16
    assert run.rehearsal == rehearsal.running().manifest.rehearsal
    records = {record.replayed.id: record for record in store.read_records(run.key) if record.replayed}
    plan = [*read_requests(store.folder / COMPILED)]
    assert [request.id for request in plan if request.parent] == [f"c{number}t1" for number in range(8)]
    whole: dict[str, int] = {}
    for request in plan:
        record, parent = records[request.id], records.get(request.parent or "")
        tokens = request.new_tokens + whole.get(request.parent or "", 0)
        whole[request.id] = tokens + request.out
        assert (record.input_tokens, record.output_tokens, len(record.itl_s)) == (tokens, request.out, 2)
        if parent is not None:
            assert parent.finish_s is not None and record.arrival_s >= parent.finish_s + request.gap_s - 1e-3
    own = [record.replayed for record in records.values() if record.replayed]
    cached = [each.cached_tokens for each in own if each.cached_tokens is not None]
    foreseen = [each.foreseen_tokens for each in own if each.foreseen_tokens is not None]
    prompt_tokens = sum(record.input_tokens for record in records.values())
    assert (len(cached), len(foreseen)) == (16, 16 if computing.replicas == 1 else 0)
    if foreseen and "rehearsed_pace" not in run.validity.failed_gates:
        assert sum(foreseen) / prompt_tokens == pytest.approx(sum(cached) / prompt_tokens, abs=0.01)
        assert sum(cached) / prompt_tokens > 0.3, "system prompts and earlier turns"
    if "rehearsed_pace" in run.validity.failed_gates or label != SMOKE:
        return
    shape, hardware = require_shape("gpt-oss-120b"), load_hardware("h100-vllm-0.11")
    deployment, level = Deployment(topology=parse_label(label)), Level(load=run.load, num_requests=16, seed=0)
    trace = trace_of_file(store.folder / COMPILED)
    (simulated,) = simulate(deployment, [level], run.workload, hardware, shape, trace=trace, scattered=False)
    means = figures(simulated)
    assert sum(cached) / prompt_tokens == pytest.approx(simulated.hit_share, abs=0.02)
    assert run.whole.ttft is not None and run.whole.tpot is not None and means.tpot_s is not None
    assert run.whole.tpot.mean_s == pytest.approx(means.tpot_s, rel=0.05)
    assert run.whole.ttft.mean_s == pytest.approx(means.ttft_s, rel=0.15)


def closed_loop(rehearsal: Stack, label: str) -> None:
    """Eight users, in the time that the simulator takes for them."""
    out = rehearsal.folder / "results"
    words = ("-c", "8", "--itl", "1000", "--otl", "60", "--prompts-per-level", "48", "--fill-cache", "no")
    swept = rehearsal.run(
        "-m", "pdlab", "bench", "-u", rehearsal.url, *words, "--out", str(out), env={"PYTHONPATH": "."}
    )
    store = Store(out / label)
    (run,) = store.runs()
    # A machine that is too busy for that pace has to say so itself.
    assert set(run.validity.failed_gates) <= BUSY_MACHINE | {"rehearsed_pace"}, swept.text
    assert "rehearsed_pace" not in run.validity.unchecked
    assert run.origin == "simulated" and run.rehearsal == rehearsal.running().manifest.rehearsal
    assert run.completed == 48
    assert run.whole.ttft is not None and run.whole.tpot is not None
    in_pace = "rehearsed_pace" not in run.validity.failed_gates
    if in_pace and label == SMOKE:  # of several replicas Ray's routers choose, and draw other ones
        shape, hardware = require_shape("gpt-oss-120b"), load_hardware("h100-vllm-0.11")
        deployment = Deployment(topology=parse_label(label))
        level = Level(load=run.load, num_requests=run.num_requests, seed=run.seed or 0)
        means = figures(simulate(deployment, [level], run.workload, hardware, shape, scattered=False)[0])
        assert means.tpot_s is not None
        assert run.whole.tpot.mean_s == pytest.approx(means.tpot_s, rel=0.03)
        assert run.whole.ttft.mean_s == pytest.approx(means.ttft_s, rel=0.10)
    chunks = [len(record.itl_s) for record in store.read_records(run.key)]
    assert set(chunks) == {2}


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=() if label == SMOKE else pytest.mark.long) for label in CASES]
)
def test_a_deployment_of_a_cluster_is_rehearsed(rehearsal: Stack, label: str) -> None:
    flags = ("--rehearse", "--cluster", CLUSTER, "--slow-down", f"{SLOW_DOWN:g}", "--detach", "--timeout-s", "600")
    launched = rehearsal.run("launch_gptoss.py", *CASES[label], *flags, *DETAILS, "--port", str(rehearsal.port))
    assert launched.code == 0, launched.text
    assert "6 times slower (as requested)" in launched.text

    running = rehearsal.running()
    manifest = running.manifest
    deployment = Deployment(topology=parse_label(label))
    planned = place(deployment, load_cluster(CLUSTER))
    for role in dict.fromkeys(replica.role for replica in planned.replicas):
        assert set(manifest.placement.nodes_of(role)) == set(planned.nodes_of(role))
        assert len(manifest.placement.of(role)) == deployment.pools[role].replicas
    assert manifest.cluster.name == CLUSTER
    assert manifest.origin == "simulated" and manifest.rehearsal.slow_down == SLOW_DOWN
    assert manifest.wire is None
    if deployment.transport is not None:
        assert manifest.canary.equal is True
        assert "0 failed" in launched.text

    if LONG:
        closed_loop(rehearsal, label)
    replay(rehearsal, label)


def test_nothing_is_left(rehearsal: Stack) -> None:
    done = rehearsal.shutdown()
    assert done.code == 0
    assert rehearsal.running() is None and rehearsal.nodes() is None
    assert not list(Path(rehearsal.folder / "cache").glob("local.yaml"))
