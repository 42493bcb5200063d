"""A whole session on a made-up deployment: refusals, references, faults, what is kept, what is left."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults.test_inject import FakeNodeActors
from faults.test_load import TOKENS, Fake, choice
from faults.test_targets import SURVEYS, found
from support.launched import running
from support.web import reply, web_server

from pdlab.analysis.chaos import fault_outcomes, whole_s
from pdlab.cluster.connection import Cluster
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import CanaryError, ClusterError, DeployError, UsageError
from pdlab.core.rehearsal import Rehearsal
from pdlab.deploy.application import AppState
from pdlab.deploy.endpoint import save_running
from pdlab.faults import inject, run
from pdlab.faults.plan import FaultPlan
from pdlab.faults.run import ChaosOrder, DeploymentUnderTest, added_since, guarded, subject_of
from pdlab.results import chaos
from pdlab.results.chaos import ChaosSample
from pdlab.results.schema import Manifest

PLAN = FaultPlan(
    faults=("kill_decode_engine", "link_down"), concurrency=2, warm_s=0.2, every_s=1, recover_s=20, hold_s=0.1,
    lease_s=0.5, limit_s=5, answers=2, max_tokens=4, prompt_tokens=(3,), prompts=2,
)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PDLAB_API_KEY", raising=False)
    return tmp_path


def order(url: str, folder: Path | None = None, **more: Any) -> ChaosOrder:
    return ChaosOrder(plan=PLAN, name="mine", base_url=url, folder=None if folder is None else str(folder), **more)


def test_what_was_not_launched_here_is_refused(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"no launcher of this machine.*give --not-mine"):
        subject_of(order("http://127.0.0.1:8000"))
    assert subject_of(order("http://127.0.0.1:8000", not_mine=True)).manifest.label == "unknown"


@pytest.mark.parametrize("of", [{"local": True}, {"rehearsal": Rehearsal(slow_down=4)}], ids=["local", "rehearsed"])
def test_what_was_launched_here_is_known(of: dict[str, Any], cache: Path) -> None:
    served = running(label="pd-spread-p1xtp1-d1xtp1", **of)
    save_running(served)
    subject = subject_of(order(served.base_url))
    assert (subject.model_id, subject.manifest, subject.key) == ("m", served.manifest, None)
    with pytest.raises(UsageError, match=r"the local Ray nodes that .* was on are gone"):
        run.execute(order(served.base_url))


def test_more_than_before() -> None:
    assert added_since(Counter(a=3, b=1, IDLE=9, c=1), Counter(a=1, b=2)) == {"a": 2, "c": 1}


@pytest.mark.parametrize(("label", "value"), [("pd-spread-p1xtp1-d1xtp1", True), ("pd-spread-p1xtp1-d1xtp1", False),
                                              ("collocated-1xtp1", None)])  # fmt: skip
def test_whether_there_is_a_guard(label: str, value: bool | None) -> None:
    topology = parse_label(label)
    if value is not None:
        transport = topology.transport.model_copy(update={"kv_guard": value})  # type: ignore[union-attr]
        topology = topology.model_copy(update={"transport": transport})
    manifest = Manifest(origin="measured", label=label, started_at="2026-01-01T00:00:00Z")
    assert guarded(manifest) is None
    assert guarded(manifest.model_copy(update={"deployment": Deployment(topology=topology)})) is value


class Whole(Fake):
    """Also answers without a stream, as references and the requests at the end are."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["content-length"])
        body = json.loads(handler.rfile.peek(length)[:length])  # type: ignore[attr-defined]
        if body.get("stream"):
            super().answer(handler)
            return
        tokens = (11, 12, 99, 14) if self.mode == "wrong" and "cache_salt" in body else TOKENS
        top = [choice(token)["logprobs"]["top_logprobs"][0] for token in tokens]
        choices = [{"index": 0, "token_ids": list(tokens), "logprobs": {"top_logprobs": top}}]
        text = json.dumps({"choices": choices}).encode()
        handler.rfile.read(length)
        reply(handler, text, content_length=len(text))


@pytest.fixture
def server() -> Iterator[tuple[Whole, str]]:
    whole = Whole()
    with web_server(whole.answer) as url:
        yield whole, url
        whole.release.set()


class FakeApp:
    status = "RUNNING"

    def state(self) -> AppState:
        return AppState(status=self.status)

    def ask_alone(self, role: str, model_id: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert (role, model_id) == ("prefill", "m") and not any("cache_salt" in request for request in requests)
        top = [choice(token)["logprobs"]["top_logprobs"][0] for token in TOKENS]
        answer = {"choices": [{"token_ids": list(TOKENS), "logprobs": {"top_logprobs": top}}]}
        return [answer for _ in requests]


class Made(run._FaultRun):
    """On made-up processes; ``use`` is the share of KV blocks in use, ``extra`` what is left at the end."""

    use: dict[str, float]
    inventories: list[dict[str, int]]
    dead = 0

    def look(self, *, ports: bool = False) -> Any:
        """``dead``: looks during which decode's engine core is missing, after the fault."""
        missing = self.node_actors.sent and self.dead > 0  # type: ignore[attr-defined]
        self.dead -= bool(missing)
        return SURVEYS, [each for each in found() if not (missing and each.part == "engine" and each.role == "decode")]

    def _replicas(self) -> Any:
        return {"prefill": 1, "decode": 1}

    def _engines(self) -> Any:
        return {"p1": "prefill", "d1": "decode"}

    def prefilled(self) -> float | None:
        return 1.0

    def kv_use(self) -> dict[str, float]:
        return self.use

    def _pool_tokens(self) -> float | None:
        return None

    def count(self) -> None:
        self._counts["guard_recomputed", "a"] = self._counts.get(("guard_recomputed", "a"), 6.0) + 1
        if len(self._counts) == 1 and self._counts["guard_recomputed", "a"] > 8:
            self._counts["guard_recomputed", "of an engine that came later"] = 5.0

    def _inventory(self, surveys: Any, found: Any) -> Any:
        counts = self.inventories.pop(0) if len(self.inventories) > 1 else self.inventories[0]
        return Counter(counts), Counter(), Counter()


def made(url: str, folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Made, FakeNodeActors]:
    for name, value in (("LEFT_POLL_S", 0.05), ("SETTLE_S", 0.5), ("LAST_RECOVERY_S", 2.0), ("SAMPLE_S", 0.2),
                        ("LEFT_GRACE_S", 0.5)):  # fmt: skip
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(inject, "PREPARATION_S", 0.01)
    cluster = Cluster()
    monkeypatch.setattr(cluster, "names", lambda: {"n1": "local-1", "n2": "local-2"})
    label = "pd-spread-p1xtp1-d1xtp1"
    manifest = Manifest(origin="measured", label=label, deployment=Deployment(topology=parse_label(label)))
    subject = DeploymentUnderTest(url, "m", manifest, None)
    one = Made(order(url, folder, command="python -m pdlab chaos mine"), subject, cluster, None)
    node_actors = FakeNodeActors()
    one.node_actors, one.app = node_actors, FakeApp()  # type: ignore[assignment]
    one.use, one.inventories = {"p1": 0.0, "d1": 0.0}, [{"raylet": 2}]
    return one, node_actors


def test_a_dry_run_does_nothing(
    server: tuple[Whole, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, url = server
    one, node_actors = made(url, None, monkeypatch)
    one.run()
    out = capsys.readouterr().out
    assert f"pd-spread-p1xtp1-d1xtp1 at {url}: 1 prefill, 1 decode" in out
    assert "kill_decode_engine: kill -9 decode engine core" in out and "link_down: there is no link" in out
    assert not whole.bodies and not node_actors.sent


class LosesReplica(Made):
    """Decode's replica is missing from the fault on."""

    def _engines(self) -> Any:
        return {"p1": "prefill"} if self.node_actors.sent else super()._engines()  # type: ignore[attr-defined]


def test_the_first_sample_has_all_replicas(
    server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run whose first sample comes after the fault has no moment at which all replicas run again."""
    _, url = server
    folder = chaos.new_folder(tmp_path, "x")
    one, _ = made(url, folder, monkeypatch)
    one.__class__ = LosesReplica
    monkeypatch.setattr(run, "SAMPLE_S", 1e6)
    one.run()
    (first,) = chaos.load(folder).samples
    assert (first.at_s, first.running) == (0.0, {"prefill": 1, "decode": 1})
    back = [ChaosSample(at_s=9.0, running={"prefill": 1}), ChaosSample(at_s=12.0, running=first.running)]
    assert whole_s([first, *back], 1.0) == 12.0


def test_sampling_goes_on_after_ray_serve_did_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = made("http://127.0.0.1:1", None, monkeypatch)
    monkeypatch.setattr(run, "SAMPLE_S", 0.01)
    samples: list[ChaosSample] = []
    enough, calls = threading.Event(), itertools.count()

    def engines() -> Any:
        if next(calls) == 1:
            raise ClusterError("Ray Serve's controller does not answer")
        return {"p1": "prefill", "d1": "decode"}

    def append(folder: Path, items: list[ChaosSample]) -> None:
        samples.extend(items)
        if len(samples) == 3:
            enough.set()

    monkeypatch.setattr(one, "_engines", engines)
    monkeypatch.setattr(run, "append", append)
    with one._sampled(tmp_path, SimpleNamespace(now_s=lambda: 1.0)):  # type: ignore[arg-type]
        assert enough.wait(20), f"{len(samples)} samples, and then none"


def test_a_whole_session(server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, url = server
    folder = chaos.new_folder(tmp_path, "x")
    one, node_actors = made(url, folder, monkeypatch)
    one.run()
    kept = chaos.load(folder)
    assert node_actors.signals() == [(22, 9)]
    assert [(fault.kind, fault.outcome) for fault in kept.faults] == [("kill_decode_engine", "injected")]
    assert kept.faults[0].began_s >= 0.2 and set(kept.run.impossible) == {"link_down"}
    assert len(kept.requests) > 4 and {request.outcome for request in kept.requests} == {"right"}
    assert max(request.end_s for request in kept.requests) <= kept.run.loaded_s + 5
    left = kept.run.leftovers
    assert left is not None and left.nothing and left.kv_use == {"decode d1": 0.0, "prefill p1": 0.0}
    assert kept.run.plan == "mine" and not kept.run.interrupted and kept.run.command == "python -m pdlab chaos mine"
    assert set(kept.run.counters) == {"guard_recomputed"} and kept.run.counters["guard_recomputed"] >= 1
    assert kept.samples and kept.samples[0].rss_mib["prefill engine core"] == 1500


@pytest.mark.parametrize(
    ("use", "inventories", "free", "processes"),
    [
        ({"p1": 0.0, "d1": 0.25}, [{"raylet": 2}], False, {}),
        ({"p1": 0.0}, [{"raylet": 2}], False, {}),
        ({"p1": 0.0, "d1": 0.0}, [{"raylet": 2}, {"raylet": 2, "haproxy": 1}], True, {"haproxy": 1}),
        ({"p1": 0.0, "d1": 0.0}, [{"raylet": 2}, {"raylet": 3}, {"raylet": 2}], True, {}),
    ],
    ids=["blocks in use", "an engine without a gauge", "a process more", "a process that was ending"],
)
def test_what_is_left(
    use: dict[str, float], inventories: list[dict[str, int]], free: bool, processes: dict[str, int],
    server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "SETTLE_S", 3.0)
    folder = chaos.new_folder(tmp_path, "x")
    one, _ = made(server[1], folder, monkeypatch)
    if len(inventories) == 3:
        monkeypatch.setattr(run, "SETTLE_S", 30.0)
    one.use, one.inventories = use, list(inventories)
    one.run()
    left = chaos.load(folder).run.leftovers
    assert left is not None
    assert (left.kv_free_after_s is not None) is free
    assert left.processes == processes and left.kv_limit_s == pytest.approx(1.0)


@pytest.mark.parametrize(("looks", "missing"), [(3, {}), (10_000, {"decode engine core": 1})])
def test_a_replica_that_does_not_come_back_is_missing(
    looks: int, missing: dict[str, int], server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replicas answer right, and Ray Serve still calls all of them running."""
    folder = chaos.new_folder(tmp_path, "x")
    one, _ = made(server[1], folder, monkeypatch)
    monkeypatch.setattr(run, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(run, "LAST_RECOVERY_S", 30.0 if looks < 10 else 2.0)
    one.dead = looks
    one.run()
    left = chaos.load(folder).run.leftovers
    assert left is not None and left.missing == missing


def test_a_replica_that_is_still_starting_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = made("http://127.0.0.1:9", tmp_path, monkeypatch)
    whole = one._present(found())
    monkeypatch.setattr(Made, "_engines", lambda _: {"p1": "prefill"})
    assert whole - one._present(found()) == {"decode replica": 1}


def test_the_recovery_is_awaited_also_behind_a_fault_that_was_skipped(
    server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill under which requests fail for a while; then one whose target is still missing."""
    whole, url = server
    folder = chaos.new_folder(tmp_path, "x")
    one, _ = made(url, folder, monkeypatch)
    monkeypatch.setattr(run, "LAST_RECOVERY_S", 30.0)
    one.plan = PLAN.model_copy(update={"faults": ("kill_decode_engine", "kill_prefill_engine"), "recover_s": 0.0})
    inject_now = inject.Injector.inject

    def injected(self: inject.Injector, due: Any) -> Any:
        if due.number == 1:
            whole.mode = "500"
            return inject_now(self, due)
        threading.Timer(1.0, setattr, (whole, "mode", "right")).start()
        at_s = self.load.now_s()
        return chaos.InjectedFault(
            number=2, kind=due.kind.name, planned_s=at_s, began_s=at_s, ended_s=at_s, outcome="skipped"
        )

    monkeypatch.setattr(inject.Injector, "inject", injected)
    one.run()
    assert [each.never for each in fault_outcomes(chaos.load(folder))] == [False]


def test_an_interrupt_keeps_what_there_is_and_leaves_nothing_stopped(
    server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chaos.new_folder(tmp_path, "x")
    one, _ = made(server[1], folder, monkeypatch)
    undone: list[bool] = []

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(inject.Injector, "inject", interrupted)
    monkeypatch.setattr(inject.Injector, "undo", lambda _: undone.append(True))
    with pytest.raises(KeyboardInterrupt):
        one.run()
    kept = chaos.load(folder)
    assert kept.run.interrupted and kept.run.leftovers is None and kept.requests and undone


def test_wrong_before_any_fault_is_no_ground_for_one(
    server: tuple[Whole, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, url = server
    whole.mode = "wrong"
    one, node_actors = made(url, tmp_path, monkeypatch)
    with pytest.raises(CanaryError, match="wrong answer before any fault"):
        one.run()
    assert not node_actors.sent


@pytest.mark.parametrize(
    ("status", "fault", "error", "message"),
    [
        ("RUNNING", "all", DeployError, "a request before any fault got no answer"),
        ("DEPLOYING", "all", ClusterError, "is DEPLOYING; faults need"),
        ("RUNNING", "link_down", UsageError, "none of the plan's faults applies"),
    ],
)
def test_what_cannot_begin(
    status: str, fault: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = made("http://127.0.0.1:9", tmp_path, monkeypatch)
    monkeypatch.setattr(FakeApp, "status", status)
    one.plan = one.plan if fault == "all" else FaultPlan(faults=(fault,))
    with pytest.raises(error, match=message):
        one.run()
