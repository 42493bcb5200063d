"""One level driven by a stand-in for the load generator: growing when it is saturated, counters around it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from pdlab.bench import measure
from pdlab.bench.client.protocol import ClientAnswer, ClientLevel
from pdlab.bench.measure import Driver
from pdlab.bench.progress import Progress
from pdlab.bench.target import Target
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import BenchError, DeploymentDied
from pdlab.core.findings import found
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.workload import Closed, Level, Open, Workload, title
from pdlab.deploy.engine_metrics import Snapshot, parse_snapshot
from pdlab.results.schema import Manifest, RequestRecord

WORKLOAD = Workload(input_tokens=10, output_tokens=2)


@pytest.fixture(autouse=True)
def _answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of these tests is not there; it refuses nothing."""
    monkeypatch.setattr(measure, "completion_error", lambda url, model: None)


class Client:
    """Answers every level at once; with too few processes it reports that it was saturated."""

    def __init__(self, enough: int = 1, fails: bool = False) -> None:
        self.processes = 1
        self.enough = enough
        self.fails = fails
        self.levels: list[ClientLevel] = []

    def run(self, level: ClientLevel, progress: Any = None) -> ClientAnswer:
        self.levels.append(level)
        records = [
            RequestRecord(
                arrival_s=0.1 * i, first_token_s=0.1 * i + 0.05, finish_s=None if self.fails else 0.1 * i + 0.06,
                input_tokens=10, output_tokens=2, itl_s=(0.01,), error="x" if self.fails else None,
                lateness_s=0.002,
            )
            for i in range(level.num_requests)
        ]  # fmt: skip
        share = 0.5 if self.processes >= self.enough else 0.97
        return ClientAnswer(
            name=level.name, records=tuple(records), cpu_share=share, loop_lag_s=0.001, clock_step_s=0.0,
            processes=self.processes, started_at="a", finished_at="b",
        )  # fmt: skip

    def grow(self, processes: int) -> None:
        self.processes = processes

    def wait_ready(self, waiting: Any = None) -> None:
        pass

    def stop(self) -> None:
        raise AssertionError("nothing died")


def made(
    client: Client,
    label: str = "collocated-1xtp1",
    urls: tuple[str, ...] = (),
    rehearsal: Rehearsal | None = None,
    **more: Any,
) -> Driver:
    deployment = Deployment(model="m", topology=parse_label(label))
    origin = "simulated" if rehearsal else "measured"
    manifest = Manifest(origin=origin, label=label, deployment=deployment, rehearsal=rehearsal)
    pools = {"r0": "collocated"} if label.startswith("c") else {"r0": "decode", "r1": "prefill"}
    aimed = Target(
        base_url="http://h", model_id="m", tokenizer="t", name="x", manifest=manifest, metrics_urls=urls,
        replicas=tuple(pools), pools=pools,
    )  # fmt: skip
    return Driver(client, aimed, WORKLOAD, Progress(io.StringIO()), request_timeout_s=1, **more)  # type: ignore[arg-type]


def level(concurrency: int = 4) -> Level:
    return Level(load=Closed(concurrency=concurrency), num_requests=40, seed=1)


def test_a_saturated_load_generator_grows_and_measures_again() -> None:
    client = Client(enough=4)
    run, _ = made(client, max_processes=8).measure(level(8))
    assert client.processes == 4 and run.client and run.client.processes == 4
    assert run.validity.valid
    assert run.client.lateness and run.client.lateness.percentiles_s["p99"] == pytest.approx(0.002)
    assert "sent late p50 2.0 p99 2.0 ms" in measure.describe(run)
    assert len({sent.seed for sent in client.levels}) == 3, "new prompts: the old ones are in the prefix cache"
    assert run.seed == client.levels[-1].seed
    note = run.validity.notes[0]
    assert (note.code, note.numbers["processes"], note.numbers["before"]) == ("measured_with_more_processes", 2, 1)


def test_it_grows_no_further_than_it_may() -> None:
    client = Client(enough=4)
    run, _ = made(client, max_processes=2).measure(level(8))
    assert client.processes == 2 and run.validity.failed_gates == ("client_saturation",)
    lonely = Client(enough=4)
    run, _ = made(lonely, max_processes=8).measure(level(1))
    assert lonely.processes == 1, "one request in flight is no load for two processes"


def test_what_is_measured_once_is_kept_though_the_load_generator_was_saturated() -> None:
    client = Client(enough=4)
    run, _ = made(client, max_processes=8).measure(level(8), once=True)
    assert client.processes == 1 and len(client.levels) == 1
    assert run.validity.failed_gates == ("client_saturation",) and not run.validity.notes


@pytest.mark.parametrize("rehearsal", [None, Rehearsal(slow_down=5)])
def test_what_was_sent_until_a_death_is_there_for_the_level_that_is_set_aside(rehearsal: Rehearsal | None) -> None:
    class Stopped(Client):
        def run(self, level: ClientLevel, progress: Any = None) -> ClientAnswer:
            answer = super().run(level, progress)
            driver._watch._died = DeploymentDied("replica r0 died")
            return answer.model_copy(update={"records": answer.records[:15]})

    driver = made(Stopped(), rehearsal=rehearsal)
    with pytest.raises(DeploymentDied, match="r0 died"):
        driver.measure(level())
    run, records = driver.died_level(level(), found("replica_died", why="replica r0 died"))
    assert (len(records), run.completed, run.failed, run.whole.completed) == (15, 15, 25, 15)
    assert run.validity.failed_gates == ("restarts",) and run.whole.ttft
    assert (run.whole.itl is None) == (rehearsal is not None)

    class Dead(Client):
        def run(self, level: ClientLevel, progress: Any = None) -> ClientAnswer:
            driver._watch._died = DeploymentDied("replica r0 died")
            raise BenchError("the load generator ended with code -9")

    driver._client = Dead()  # type: ignore[assignment]
    with pytest.raises(DeploymentDied, match="r0 died"):
        driver.measure(level())
    run, records = driver.died_level(level(), found("replica_died", why="replica r0 died"))
    assert (records, run.completed) == ((), 0), "those of the level before are not this one's"


PAGE = """vllm:request_success_total{{engine="0",finished_reason="length",ReplicaId="{replica}"}} {requests}
vllm:generation_tokens_total{{engine="0",ReplicaId="{replica}"}} {requests}
vllm:prefix_cache_queries_total{{engine="0",ReplicaId="{replica}"}} 100
"""


def page(**requests: int) -> str:
    return "".join(PAGE.format(replica=replica, requests=count) for replica, count in requests.items())


def exports(
    monkeypatch: pytest.MonkeyPatch, pages: Iterable[str], every_s: float = 0.001, delayed: bool = False
) -> None:
    """One page after another where counters are read; ``delayed``: of an exporter that writes now and then."""
    reads = iter(pages)

    def read(urls: Any, replicas: Any, pools: Any) -> Snapshot:
        return parse_snapshot([next(reads)], replicas, pools).model_copy(update={"delayed": delayed})

    monkeypatch.setattr(measure, "read_snapshot", read)
    monkeypatch.setattr(measure, "SETTLE_POLL_S", every_s)


def counted(label: str = "collocated-1xtp1") -> Driver:
    """A driver that has read its engines' counters once, as the warm-up does."""
    driver = made(Client(), label, ("http://h/metrics",))
    driver._read_counters(0)
    return driver


def test_counters_of_a_level_are_read_when_every_pool_has_counted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = "".join(
        f'vllm:nixl_{name}{{{{ReplicaId="r0"}}}} {{0}}\n'
        for name in ("xfer_time_seconds_count", "bytes_transferred_sum")
    )
    pages = [page(r0=8, r1=8) + nixl.format(8)] * 3
    pages += [page(r0=20, r1=8) + nixl.format(30), page(r0=48, r1=20) + nixl.format(48)]
    pages += [page(r0=48, r1=48) + nixl.format(48)] * 2
    exports(monkeypatch, pages)
    run, _ = counted("pd-pack-p1xtp1-d1xtp1").measure(level())
    assert run.validity.valid, run.validity
    for pool in ("prefill", "decode"):
        before, after = run.engines_before[pool], run.engines_after[pool]
        assert (before.requests, after.requests) == (8, 48)
        assert after.preemptions == 0 and after.prefix_cache_hits == 0, "absent beside others is a true zero"
    assert set(run.validity.unchecked) == {"front_saturation", "prefill_calls"}


def test_what_others_had_finished_is_not_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of others before the level are not counted to it; those of others in it fail it."""
    exports(monkeypatch, [page(r0=count) for count in (8, 30, 30, 30, 80, *[90] * 21)], delayed=True)
    alone = made(Client(), urls=("http://h/metrics",))
    alone._export_s = 0.01
    alone._read_counters(0)
    run, _ = alone.measure(level())
    assert run.engines_before["collocated"].requests == 30 and run.engines_after["collocated"].requests == 90
    assert run.validity.reasons[0].startswith("the engines finished 60 requests during the level, but this client")


def test_requests_that_an_exporter_counts_late_are_those_of_their_own_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that is late when a level is judged: neither that level nor the next one is called strange."""
    moving = iter(range(9, 40))
    earlier = [8, 8]
    exports(monkeypatch, (page(r0=earlier.pop(0) if earlier else next(moving)) for _ in itertools.count()))
    monkeypatch.setattr(measure, "SETTLE_TIMEOUT_S", 0.005)
    late = counted()
    first, _ = late.measure(level())
    assert first.engines_after["collocated"].requests < 48
    assert first.validity.valid, first.validity
    assert {"other_requests", "preemptions", "prefix_cache"} <= set(first.validity.unchecked)
    earlier += [48, 48, *[88] * 20]
    second, _ = late.measure(level())
    assert second.engines_before["collocated"].requests == 48
    assert second.validity.valid and "other_requests" not in second.validity.unchecked, second.validity


def test_what_was_late_before_a_level_is_not_called_another_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    exports(monkeypatch, [page(r0=count) for count in (8, 8, *range(9, 24), *[95] * 200)], every_s=0.002)
    monkeypatch.setattr(measure, "SETTLE_TIMEOUT_S", 0.004)
    late = counted()
    late.measure(level())
    second, _ = late.measure(level())
    assert second.validity.valid and "other_requests" in second.validity.unchecked, second.validity


def test_an_unpublished_replica_that_does_the_work_fails_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that Ray Serve put in the place of a published one, before the level began."""
    exports(monkeypatch, [page(r0=8, r9=8), page(r0=8, r9=8), *[page(r0=8, r9=48)] * 20])
    monkeypatch.setattr(measure, "SHORT_STILL_S", 0.01)
    replaced = counted()
    run, _ = replaced.measure(level())
    assert run.validity.failed_gates == ("restarts",), run.validity
    assert run.validity.reasons[0].startswith("a replica was replaced: r9 answers")


def test_another_applications_replica_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    exports(monkeypatch, [page(r0=8, r9=8), page(r0=8, r9=8), *[page(r0=48, r9=60)] * 20])
    beside = counted()
    run, _ = beside.measure(level())
    assert run.validity.valid, run.validity


@pytest.mark.parametrize("refused", [0, 1, 2, 3])
def test_a_server_that_answers_no_completion_is_known_before_the_load_generator(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["answered with HTTP 500"] * refused + [None] * 9)
    monkeypatch.setattr(measure, "completion_error", lambda url, model: next(answers))
    monkeypatch.setattr(measure, "require_answering", lambda url: None)
    monkeypatch.setattr(measure, "PROBE_PAUSE_S", 0.0)
    client = Client()
    if refused < 3:
        made(client).warm_up(0)
        assert [level.name for level in client.levels] == ["warm-up"]
    else:
        with pytest.raises(BenchError, match=r"^answered with HTTP 500 \(3 of 3 times, before the warm-up\)$"):
            made(client).warm_up(0)
        assert client.levels == []


def test_a_warm_up_without_an_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "require_answering", lambda url: None)
    with pytest.raises(BenchError, match=r"no warm-up request was answered \(first: x\)"):
        made(Client(fails=True)).warm_up(0)


def test_without_metrics_what_needs_them_is_unchecked() -> None:
    quiet = made(Client())
    quiet.warm_up(0)
    run, _ = quiet.measure(level())
    blind = {"front_saturation", "restarts", "other_requests", "preemptions", "prefix_cache"}
    assert run.validity.valid and set(run.validity.unchecked) == blind


@pytest.mark.parametrize(
    ("load", "words"), [(Closed(concurrency=3), "concurrency 3"), (Open(rate_rps=2.5), "2.5 requests/s")]
)
def test_loads_in_words(load: Any, words: str) -> None:
    assert title(load) == words


def test_another_replica_is_seen() -> None:
    known = parse_snapshot([page(r0=1, r9=5)], ("r0",), {"r0": "collocated"})
    assert set(known.replicas) == {"r0", "r9"}
    assert known.engines["collocated"].requests == 1, "of the deployment's own replicas alone"


def test_a_rehearsal_is_sent_in_slow_time_and_kept_in_simulated_time() -> None:
    plain, slow = Client(), Client()
    usual = made(plain)
    rehearsal = made(slow, rehearsal=Rehearsal(slow_down=5))
    open_loop = Level(load=Open(rate_rps=10), num_requests=40, seed=1)
    for load in (level(), open_loop):
        real, _ = usual.measure(load)
        rehearsed, records = rehearsal.measure(load)
        assert (real.origin, real.rehearsal) == ("measured", None)
        assert (rehearsed.origin, rehearsed.rehearsal) == ("simulated", Rehearsal(slow_down=5))
        assert rehearsed.whole.ttft and real.whole.ttft
        assert rehearsed.whole.ttft.mean_s == pytest.approx(real.whole.ttft.mean_s / 5)
        assert rehearsed.whole.requests_per_s == pytest.approx(5 * real.whole.requests_per_s)
        assert rehearsed.whole.itl is None and real.whole.itl is not None
        assert records[1].arrival_s == pytest.approx(0.02)
        assert "rehearsed_pace" in rehearsed.validity.unchecked and "rehearsed_pace" not in real.validity.unchecked
    assert [sent.stamped for sent in (*plain.levels, *slow.levels)] == [False, False, True, True]
    assert slow.levels[1].load == Open(rate_rps=2) and slow.levels[1].request_timeout_s == 5


@pytest.mark.parametrize("rehearsal", [None, Rehearsal(slow_down=5)])
def test_a_spoiled_level_has_the_origin_of_others(rehearsal: Rehearsal | None) -> None:
    driver = made(Client(), rehearsal=rehearsal)
    died_level, _ = driver.died_level(level(), found("replica_died", why="a replica died"))
    whole, _ = driver.measure(level())
    assert (died_level.origin, died_level.rehearsal) == (whole.origin, whole.rehearsal)
    assert (died_level.completed, died_level.failed) == (0, 40) and not died_level.validity.valid
