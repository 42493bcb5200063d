"""vLLM's metrics in Ray, recorded at less cost: several for every step of an engine, and one for every token.

Ray's Python layer checks all labels of a metric each time, and merges them with defaults. Labels of vLLM's metrics stay
the same, so that the first time is enough. A gauge that is set to its own value again within `AGAIN_S` is left as it
is. Runs in Ray Serve's replicas, sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

from pdlab.deploy.serving.vllm_names import RAY_METRICS

# Ray drops a gauge that nobody has set for two exports, the shortest of which are a second apart.
AGAIN_S = 0.25
_GAUGE, _COUNTER, _HISTOGRAM = (
    ("RayGaugeWrapper", "set"),
    ("RayCounterWrapper", "inc"),
    ("RayHistogramWrapper", "observe"),
)
_KEPT = "pdlab_kept"


class RecordsAtLessCost:
    """Mixed into Ray's engine servers."""

    async def start(self) -> None:
        try:
            record_at_less_cost(importlib.import_module(RAY_METRICS))
        except (ImportError, AttributeError) as error:  # another vLLM: records as before
            logging.getLogger("ray.serve").warning("vLLM's metrics are recorded as Ray does it: %r", error)
        await super().start()  # type: ignore[misc]


def record_at_less_cost(wrappers: Any) -> None:
    """Change the classes of vLLM's module that stand for Prometheus's. Raises AttributeError for another version."""
    changed = [
        (getattr(wrappers, kind), name, make(getattr(getattr(wrappers, kind), name)))
        for (kind, name), make in ((_GAUGE, _setting), (_COUNTER, _counting), (_HISTOGRAM, _observing))
    ]
    for kind, name, method in changed:
        setattr(kind, name, method)


def _observing(checked: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
    def observe(self: Any, value: float) -> None:
        kept = self.__dict__.get(_KEPT)
        if kept is None:
            checked(self, value)
            _keep(self)
        else:
            kept[0](value, tags=kept[1])

    return observe


def _counting(checked: Callable[[Any, float], None]) -> Callable[..., None]:
    def inc(self: Any, value: float = 1.0) -> None:
        kept = self.__dict__.get(_KEPT)
        if kept is None or value <= 0:
            checked(self, value)
            if value:
                _keep(self)
        else:
            kept[0](value, tags=kept[1])

    return inc


def _setting(checked: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
    def set_to(self: Any, value: float) -> None:
        now = time.monotonic()
        kept = self.__dict__.get(_KEPT)
        if kept is None:
            checked(self, value)
            kept = _keep(self)
        elif value == kept[2] and now - kept[3] < AGAIN_S:
            return
        else:
            kept[0](value, tags=kept[1])
        if kept is not None:
            kept[2:] = [value, now]

    return set_to


def _keep(wrapper: Any) -> list[Any] | None:
    """How a metric with these labels is recorded without a look at them, and the last value and its time. None: it has
    no labels yet, or Ray records nothing of it."""
    metric = wrapper.metric
    if not wrapper._is_labeled or metric._metric is None:
        return None
    kept = [metric._metric.record, {**metric._default_tags, **wrapper._tags}, None, 0.0]
    wrapper.__dict__[_KEPT] = kept
    return kept
