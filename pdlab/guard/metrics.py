"""Counters of the guard's actions, on the engine's metrics page beside vLLM's NIXL metrics as ``pdlab_guard_*``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdlab.guard.receives import ACTIONS
from pdlab.guard.vllm_names import NixlKVConnectorStats, NixlPromMetrics, create_metric_per_engine
from pdlab.marks.engine_marks import CORE, WIRE

PREFIX = "pdlab_guard_"
_OWN = (*(f"{PREFIX}{action}" for action in ACTIONS), CORE, WIRE)


class GuardStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's statistics of a step with a list of counts per action, and with the marks of `pdlab.guard.marks`.

    Workers and the scheduler use this class.
    """

    def reset(self) -> None:
        super().reset()
        self.data |= {key: [] for key in _OWN}

    def record(self, counts: Mapping[str, int]) -> None:
        """Add counts by action."""
        for action, count in counts.items():
            self.data[f"{PREFIX}{action}"].append(count)

    def is_empty(self) -> bool:
        # Statistics with only marks must reach the replica, which removes the marks.
        return bool(super().is_empty()) and not any(map(self.data.get, _OWN))


class GuardPromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """vLLM's NIXL metrics with one more counter per action."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._guard_counters = {
            f"{PREFIX}{action}": create_metric_per_engine(
                self._counter_cls(name=f"{PREFIX}{action}", documentation=documentation, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for action, documentation in ACTIONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for key, counters in self._guard_counters.items():
            for count in transfer_stats_data.get(key, ()):
                counters[engine_idx].inc(count)
