"""vLLM in the process that answers requests: labels are checked once, gauges are recorded where they change, variables
are kept from the start of the engine on, and what vLLM keeps for its log does not grow with the requests."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import vllm_costs
from pdlab.deploy.serving.vllm_costs import AGAIN_S, CostsLess, EmptiesStats, empty, record_at_less_cost
from pdlab.deploy.serving.vllm_names import COMPLETION, ENVIRONMENT, RAY_METRICS

Recorded = list[tuple[float, dict[str, str]]]


class Ray:
    """One of Ray's metrics: what it checked, and what it recorded."""

    def __init__(self, recorded: Recorded) -> None:
        self.checked = 0
        self._default_tags = {"ReplicaId": "", "node": "n"}
        self._metric = SimpleNamespace(record=lambda value, tags: recorded.append((value, tags)))

    def check(self, value: float, tags: dict[str, str]) -> None:
        self.checked += 1
        self._metric.record(value, {**self._default_tags, **tags})


def wrappers() -> Any:
    """As vLLM's module has them."""

    class Wrapper:
        def __init__(self, metric: Ray, *, labeled: bool = True) -> None:
            self.metric, self._is_labeled, self._tags = metric, labeled, {"ReplicaId": "r"}

    class Gauge(Wrapper):
        def set(self, value: float) -> None:
            self.metric.check(value, self._tags)

    class Counter(Wrapper):
        def inc(self, value: float = 1.0) -> None:
            if value:
                self.metric.check(value, self._tags)

    class Histogram(Wrapper):
        def observe(self, value: float) -> None:
            self.metric.check(value, self._tags)

    return SimpleNamespace(RayGaugeWrapper=Gauge, RayCounterWrapper=Counter, RayHistogramWrapper=Histogram)


@pytest.fixture
def recorded() -> Recorded:
    return []


def test_labels_are_checked_once(recorded: Recorded) -> None:
    module = wrappers()
    record_at_less_cost(module)
    metric = Ray(recorded)
    histogram = module.RayHistogramWrapper(metric)
    for value in (1.0, 2.0, 2.0):
        histogram.observe(value)
    assert metric.checked == 1
    assert recorded == [(value, {"ReplicaId": "r", "node": "n"}) for value in (1.0, 2.0, 2.0)]


def test_without_labels_each_call_is_checked(recorded: Recorded) -> None:
    module = wrappers()
    record_at_less_cost(module)
    metric = Ray(recorded)
    for _ in range(2):
        module.RayHistogramWrapper(metric, labeled=False).observe(1.0)
    assert metric.checked == 2


def test_a_counter_counts_what_it_counted(recorded: Recorded) -> None:
    module = wrappers()
    record_at_less_cost(module)
    counter = module.RayCounterWrapper(Ray(recorded))
    for value in (0, 3, 0, 4):
        counter.inc(value)
    counter.inc()
    assert [value for value, _ in recorded] == [3, 4, 1.0]
    assert counter.metric.checked == 1, "the first that counts"


def test_a_gauge_is_set_where_it_changes_and_again_before_ray_drops_it(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = wrappers()
    record_at_less_cost(module)
    gauge = module.RayGaugeWrapper(Ray(recorded))
    now_s = 5.0
    monkeypatch.setattr(vllm_costs, "time", SimpleNamespace(monotonic=lambda: now_s))
    for passed_s, value in ((0.0, 7), (0.1, 7), (0.1, 8), (0.0, 7), (AGAIN_S / 2, 7), (AGAIN_S, 7)):
        now_s += passed_s
        gauge.set(value)
    assert [value for value, _ in recorded] == [7, 8, 7, 7]


def test_another_vllm_is_left_as_it_is() -> None:
    module = wrappers()
    own = module.RayGaugeWrapper.set
    del module.RayHistogramWrapper
    with pytest.raises(AttributeError):
        record_at_less_cost(module)
    assert module.RayGaugeWrapper.set is own


class KeepsServer:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def start(self) -> None:
        self.events.append("engine")


class Keeps(CostsLess, KeepsServer): ...


def kept(monkeypatch: pytest.MonkeyPatch, **environment: Any) -> list[str]:
    events: list[str] = []
    own = {name: lambda value=value: events.append(value) for name, value in environment.items()}
    monkeypatch.setitem(sys.modules, RAY_METRICS, wrappers())
    monkeypatch.setitem(sys.modules, ENVIRONMENT, SimpleNamespace(**own))  # type: ignore[arg-type]
    asyncio.run(Keeps(events).start())
    return events


def test_variables_are_kept_once_the_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, enable_envs_cache="kept") == ["engine", "kept"]


def test_another_vllm_reads_them_as_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert kept(monkeypatch) == ["engine"]
    assert "read again and again" in caplog.text


class Completes(Keeps):
    """Of an engine that answers completions."""

    async def start(self) -> None:
        self.engine = SimpleNamespace(_oai_serving_completion=SimpleNamespace())
        await super().start()


def test_of_an_engine_without_completions_vllms_module_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, COMPLETION, None)
    assert kept(monkeypatch, enable_envs_cache="kept") == ["engine", "kept"] and not caplog.text
    asyncio.run(Completes([]).start())
    assert "streamed as vLLM does it" in caplog.text


class Client:
    """vLLM's client: what it keeps, and how often it was told to log."""

    log_stats = True

    def __init__(self, *, fails: int = 0) -> None:
        self.kept, self.logged, self.errored, self.fails = 0, 0, False, fails

    async def do_log_stats(self) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("no log")
        self.kept, self.logged = 0, self.logged + 1
        self.errored = self.logged == 3


def test_it_is_emptied_until_the_engine_is_dead() -> None:
    client = Client()
    asyncio.run(asyncio.wait_for(empty(client, 0.001), 10))
    assert client.logged == 3


def test_after_a_log_that_failed_it_is_emptied_again(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(fails=2)
    asyncio.run(asyncio.wait_for(empty(client, 0.001), 10))
    assert client.logged == 3 and client.kept == 0
    assert len([each for each in caplog.records if "not logged" in each.message]) <= 1


class Server:
    def __init__(self, client: Any) -> None:
        self.engine = SimpleNamespace(_engine_client=client)

    async def start(self) -> None: ...


class Empties(EmptiesStats, Server): ...


def test_an_engine_server_empties_what_its_client_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_costs.empty, "__defaults__", (0.001,))
    client = Client()

    async def run() -> None:
        await Empties(client).start()
        while client.logged < 2:
            client.kept += 1
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert client.kept < 100
    quiet = Client()
    quiet.log_stats = False
    assert asyncio.run(started(Empties(quiet))) is None and asyncio.run(started(Empties(None))) is None


async def started(server: Any) -> Any:
    await server.start()
    return server._emptying
