"""A replica dies in a level, which is set aside; the deployment is waited for, its canary sent, the level repeated."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import records as made
from support.validity import failing

from pdlab.bench import recovery, sweep
from pdlab.bench.progress import Progress
from pdlab.bench.recovery import await_whole, state
from pdlab.bench.sweep import SweepOptions
from pdlab.bench.target import Target
from pdlab.bench.watch import ReplicaHealth
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import DeploymentDied
from pdlab.core.findings import Finding, found
from pdlab.core.workload import Closed, Level, RunKey
from pdlab.deploy.canary import CanaryAnswer
from pdlab.deploy.endpoint import Running, load_running, next_attempt, save_running
from pdlab.results.schema import CanaryResult, Manifest, RequestRecord, Run, Validity
from pdlab.results.store import Store

URL = "http://127.0.0.1:8123"
POOLS = {"p0": "prefill", "p1": "prefill", "d0": "decode"}


def target() -> Target:
    deployment = Deployment(model="m", topology=parse_label("pd-spread-p2xtp1-d1xtp1"))
    manifest = Manifest(origin="measured", label=deployment.label, deployment=deployment)
    answer = CanaryAnswer(tokens=(1,), tops=({1: 0.0},))
    return Target(
        base_url=URL, model_id="m", tokenizer="t", name="x", manifest=manifest, metrics_urls=("http://h/metrics",),
        replicas=(*POOLS, "router"), pools=POOLS, answers=(answer,),
    )  # fmt: skip


def health(*replicas: str, dead: str = "") -> list[ReplicaHealth]:
    names = {"p": "Prefill:m", "d": "Decode:m", "r": "LLMRouter"}
    return [ReplicaHealth(name, names[name[0]], name != dead, 0.0, "pdlab") for name in replicas]


ALL = ("p0", "p1", "d0", "router")


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        (health(*ALL), None),
        (health(*ALL, dead="p1"), "healthy are 1 of 2 of Prefill:m"),
        (health(*ALL, "p7", dead="p1"), None),
        (health(*ALL, "p7"), "healthy are 3 of 2 of Prefill:m"),  # the page still shows the dead one
        (health("p0", "p1", "d0"), "healthy are 0 of 1 that hand requests on"),
        (
            [*health(*ALL, dead="d0"), ReplicaHealth("d9", "Decode:m", True, 0, "others")],
            "healthy are 0 of 1 of Decode:m",
        ),
        ([], None),
    ],
    ids=["whole", "dead", "replaced", "stale", "router", "another application's", "not exported"],
)
def test_what_is_whole(seen: list[ReplicaHealth], missing: str | None) -> None:
    assert state(target(), seen).missing == missing


class World:
    """A clock that sleeping moves, and the state of the pages, the server and the canary at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pages: list[tuple[float, list[ReplicaHealth]]] = []
        self.answers_from = 0.0
        self.canary: list[CanaryResult] = [CanaryResult(equal=True, compared=3, detail="3 of 3 prompts")]
        self.notes: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def health(self, _: object) -> list[ReplicaHealth]:
        return next(found for since, found in reversed(self.pages) if since <= self.now)

    def send_canary(self, *_: object) -> CanaryResult:
        return self.canary.pop(0) if len(self.canary) > 1 else self.canary[0]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    made = World()
    monkeypatch.setitem(os.environ, "PDLAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(recovery.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(recovery.time, "sleep", made.sleep)
    monkeypatch.setattr(recovery, "read_health", made.health)
    monkeypatch.setattr(recovery, "answers", lambda url: made.now >= made.answers_from)
    monkeypatch.setattr(recovery.canary, "ask_again", made.send_canary)
    save_running(Running(**{name: getattr(target(), name) for name in Running.model_fields}))
    yield made


def test_the_new_replica_is_published_and_taken_prompts_stay_taken(world: World) -> None:
    assert [next_attempt(URL, "prompts", 0) for _ in range(2)] == [0, 1]
    world.pages = [(0, health(*ALL, dead="p1")), (40, health(*ALL, "p7", dead="p1"))]
    found = await_whole(target(), "replica p1 died", 900, world.notes.append)
    assert found.replicas == ("d0", "p0", "p7", "router") and found.pools == {
        "p0": "prefill", "p7": "prefill", "d0": "decode",
    }  # fmt: skip
    running = load_running(URL)
    assert running and (running.replicas, running.pools) == (found.replicas, found.pools)
    assert next_attempt(URL, "prompts", 0) == 2, "they are in the caches of the replicas that lived"
    assert 40 <= world.now < 60
    assert world.notes[0] == "replica p1 died: waiting until the deployment is whole again, 900 s at most"
    assert any("healthy are 1 of 2 of Prefill:m" in note for note in world.notes[1:-1])
    assert world.notes[-1].startswith("whole again after 42 s; canary: 3 of 3")


def test_what_looks_whole_at_once_must_stay_so(world: World) -> None:
    """Ray Serve takes a while to notice a death."""
    world.pages = [(0, health(*ALL)), (11, health(*ALL, dead="d0")), (50, health(*ALL, "d5", dead="d0"))]
    found = await_whole(target(), "why", 900, world.notes.append)
    assert "d5" in found.replicas and world.now >= 50
    world.now, world.pages = 0.0, [(0, health(*ALL))]
    assert await_whole(target(), "why", 900, world.notes.append).replicas == tuple(sorted(ALL))
    assert recovery.HEALTH_LAG_S <= world.now < recovery.HEALTH_LAG_S + 10


def test_one_that_does_not_come_back_ends_with_why(world: World) -> None:
    world.pages = [(0, health(*ALL, dead="p1"))]
    with pytest.raises(
        DeploymentDied, match=r"^p1 died; not whole again within 100 s \(--recover-s\): healthy are 1 of"
    ):
        await_whole(target(), "p1 died", 100, world.notes.append)
    assert 100 <= world.now < 110


def test_one_that_its_launcher_took_down_is_not_waited_for(world: World) -> None:
    from pdlab.deploy.endpoint import clear_running

    clear_running(URL)
    with pytest.raises(DeploymentDied, match="its launcher has taken it down"):
        await_whole(target(), "why", 900, world.notes.append)
    assert world.now == 0


def test_a_server_or_a_canary_that_does_not_answer_yet_is_waited_for(world: World) -> None:
    world.pages, world.answers_from = [(0, health(*ALL, "p7", dead="p1"))], 30.0
    unanswered = CanaryResult(equal=None, detail="not compared: the canary got no answer")
    world.canary = [unanswered, unanswered, CanaryResult(equal=None, compared=3, detail="rounding")]
    await_whole(target(), "why", 900, world.notes.append)
    assert 34 <= world.now < 60 and len(world.canary) == 1


def test_wrong_answers_end_it(world: World) -> None:
    world.pages = [(0, health(*ALL, "p7", dead="p1"))]
    world.canary = [CanaryResult(equal=False, compared=3, detail="prompt 1 differs")]
    with pytest.raises(DeploymentDied, match="whole again and answers wrongly: prompt 1 differs"):
        await_whole(target(), "why", 900, world.notes.append)


class Driver:
    """Measures what is planned: an outcome per measurement."""

    timelines = ()

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.seeds, self.recovered = list(outcomes), [], []  # type: ignore[var-annotated]
        self.alive: str | None = None

    def measure(self, level: Level, *, once: bool = False) -> tuple[Run, tuple[RequestRecord, ...]]:
        self.seeds.append(level.seed)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        validity, records = outcome
        return self._run(level, validity), records

    def _run(self, level: Level, validity: Validity) -> Run:
        fields = {"num_requests": level.num_requests, "seed": level.seed, "validity": validity}
        return made.run((), level.load, key=level.key, **fields)

    def died_level(self, level: Level, died: Finding) -> tuple[Run, tuple[RequestRecord, ...]]:
        return self._run(level, Validity(findings=(died,))), (SLOW,)

    def require_alive(self) -> None:
        if self.alive:
            raise DeploymentDied(self.alive)

    def recover(self, why: str, limit_s: float, attempt: int) -> None:
        self.recovered.append((why, limit_s))
        self.alive = None


FAILED = RequestRecord(arrival_s=0, error="Internal Server Error", input_tokens=1, output_tokens=0)
SLOW = RequestRecord(arrival_s=0, error="too slow", input_tokens=1, output_tokens=0, timed_out=True)
FINE = (Validity(), ())
KEY = RunKey(kind="concurrency", value=2)


def measured(folder: Path, driver: Driver, recover_s: float = 900.0) -> Store:
    store = Store(folder)
    sweeper = sweep._Sweeper(
        driver,
        store,
        SweepOptions(recover_s=recover_s),
        Progress(io.StringIO()),
        0,  # type: ignore[arg-type]
    )
    sweeper._level(Level(load=Closed(concurrency=2), num_requests=4, seed=5))
    return store


def invalid(gate: str, *records: RequestRecord) -> tuple[Validity, tuple[RequestRecord, ...]]:
    return failing(f"{gate} failed", gate=gate), records


def test_a_level_in_which_a_replica_died_is_set_aside_and_measured_again(tmp_path: Path) -> None:
    driver = Driver(DeploymentDied("replica p1 died"), FINE)
    (run,) = measured(tmp_path, driver).runs()
    assert run.validity.valid and run.replaces and run.replaces.reasons == ("replica p1 died",)
    assert run.validity.notes[-1].code == "measured_after_recovery"
    assert driver.recovered == [("replica p1 died", 900.0)] and len(set(driver.seeds)) == 2
    (first,) = Store(tmp_path / "replaced").runs()
    assert (
        not first.validity.valid
        and first.seed == 5
        and tmp_path / run.replaces.file == Store(tmp_path / "replaced").path(first.key)
    )
    assert Store(tmp_path / "replaced").read_records(KEY) == (SLOW,), "what was sent until then"


@pytest.mark.parametrize("gate", ["failed_requests", "prefill_calls"])
def test_a_level_that_ended_keeps_its_requests_aside(tmp_path: Path, gate: str) -> None:
    driver = Driver(invalid(gate, FAILED), FINE)
    driver.alive = "replica p1 of Prefill:m died and is not replaced yet"
    (run,) = measured(tmp_path, driver).runs()
    assert run.validity.valid and run.replaces
    assert run.replaces.reasons == (f"{gate} failed", driver.recovered[0][0])
    assert Store(tmp_path / "replaced").read_records(KEY) == (FAILED,)


def test_failures_without_a_death_are_the_level_s_own(tmp_path: Path) -> None:
    (run,) = measured(tmp_path, driver := Driver(invalid("failed_requests", FAILED))).runs()
    assert not run.validity.valid and run.replaces is None and not driver.recovered


def test_requests_that_took_too_long_are_no_sign_of_a_death(tmp_path: Path) -> None:
    driver = Driver(invalid("failed_requests", SLOW))
    driver.alive = "checked for nothing, which takes 25 s"
    (run,) = measured(tmp_path, driver).runs()
    assert not run.validity.valid and not driver.recovered


def test_a_replica_that_was_replaced_meanwhile_spoils_the_level_too(tmp_path: Path) -> None:
    replaced = found("replica_replaced", replicas="p7").model_copy(update={"what": "in any words"})
    driver = Driver((Validity(findings=(replaced,)), ()), FINE)
    (run,) = measured(tmp_path, driver).runs()
    assert run.replaces and run.replaces.reasons == (replaced.text,)
    assert driver.recovered == [("in any words", 900.0)], "without what a person would have to do"


def test_what_a_person_would_have_to_do_is_left_out_where_the_sweep_does_it(tmp_path: Path) -> None:
    driver = Driver(DeploymentDied("replica p1 died", "; do this"), FINE)
    (run,) = measured(tmp_path, driver).runs()
    assert run.replaces and run.replaces.reasons == ("replica p1 died",)
    assert str(DeploymentDied("replica p1 died", "; do this")) == "replica p1 died; do this"


def test_a_second_death_ends_the_sweep_and_the_level_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(DeploymentDied, match="d0 died"):
        measured(tmp_path, Driver(DeploymentDied("p1 died"), DeploymentDied("d0 died")))
    assert list(Store(tmp_path).runs()) == [] and len(list(Store(tmp_path / "replaced").runs())) == 1


def test_without_patience_a_death_ends_the_sweep_at_once(tmp_path: Path) -> None:
    driver = Driver(DeploymentDied("p1 died"))
    with pytest.raises(DeploymentDied):
        measured(tmp_path, driver, recover_s=0)
    assert not driver.recovered and not (tmp_path / "replaced").exists()
