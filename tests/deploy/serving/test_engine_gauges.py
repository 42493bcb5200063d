"""vLLM's metrics are recorded without a check of their labels, and gauges only where they change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import engine_gauges
from pdlab.deploy.serving.engine_gauges import AGAIN_S, record_at_less_cost

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
    monkeypatch.setattr(engine_gauges, "time", SimpleNamespace(monotonic=lambda: now_s))
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
