"""What pdlab's servers report to Ray's metrics, kept in memory."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any


class Metrics:
    """Stands for `ray.util.metrics`: what was counted and observed, by name and tags."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
        self.observed: list[tuple[str, float]] = []
        self.calls = 0

    def Counter(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> Any:
        def inc(value: float, tags: dict[str, str]) -> None:
            if value <= 0:
                raise ValueError(f"value must be >0, got {value}")  # as Ray's
            assert set(tags) == set(tag_keys)
            self.calls += 1
            self.counted[name, frozenset(tags.items())] += value

        return SimpleNamespace(inc=inc)

    def Histogram(self, name: str, *, description: str, tag_keys: tuple[str, ...], boundaries: list[float]) -> Any:
        assert boundaries == sorted(boundaries) and boundaries[0] > 0

        def observe(value: float, tags: dict[str, str]) -> None:
            assert value > 0 and set(tags) == set(tag_keys)
            self.observed.append((tags["part"], value))

        return SimpleNamespace(observe=observe)

    def of(self, name: str, **tags: str) -> float:
        wanted = set(tags.items())
        return sum(value for (each, those), value in self.counted.items() if each == name and wanted <= those)
