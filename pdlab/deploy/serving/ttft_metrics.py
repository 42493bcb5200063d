"""The parts of the time to the first token, in Ray's metrics, for every request, with or without a timeline.

Counters hold the seconds of each part, and the number of requests. Ray's exporter keeps counters exactly and loses the
sums of histograms, so a rate of seconds over a rate of requests is an exact mean. Counters are reported once a second.
The parts that users watch at a percentile also have histograms, of the requests that spent time in the part. Runs in
Ray Serve's replicas, sent there by value: imports the standard library and `pdlab.marks`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from pdlab.marks.request_parts import after_early, seconds_of

SECONDS, REQUESTS = "pdlab_ttft_seconds", "pdlab_ttft_requests"
PART_SECONDS = "pdlab_ttft_part_seconds"
READ_BYTES, READS = "pdlab_kv_read_bytes", "pdlab_kv_reads"
COUNTERS: Mapping[str, str] = {
    SECONDS: "Seconds of the time to the first token in the server, by part.",
    REQUESTS: "Requests whose time to the first token is in the seconds.",
    READ_BYTES: "Bytes of KV cache that this decode engine read from prefill for requests that were answered.",
    READS: "Reads of KV cache by this decode engine's ranks for requests that were answered.",
}
HISTOGRAMS: Mapping[str, str] = {
    PART_SECONDS: "Parts of the time to the first token in the server (of an early token: to the second one); total: "
    "all of the time to the first."
}
TOTAL = "total"
WATCHED = (
    *(TOTAL, "queue", "prefill", "admission", "transfer"),
    *("step_lag", "lost_read", "wait", "recompute", "first_step"),
)
ENDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
EVERY_S = 1.0


class CountsParts:
    """Adds up the parts of a replica's requests and reports them to Ray. Never makes a request fail."""

    def __init__(self, replica: str, later: Callable[[Callable[[], None]], Any] | None = None) -> None:
        self._replica = replica
        self._later = later or _in_a_second
        self._sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self._metrics: dict[str, Any] = {}
        self._due = False

    def add(self, record: Mapping[str, Any], *, streamed: bool = True) -> None:
        """A request has been answered: its timeline as the server sends it. An answer that is not ``streamed`` counts
        until the engine's first token, because its first byte comes after the last token.
        """
        try:
            self._add(record, None if streamed else record["t"]["first"])
        except Exception as error:
            logging.getLogger("ray.serve").warning("the parts of a request are not counted: %r", error)

    def _add(self, record: Mapping[str, Any], ends_ms: float | None) -> None:
        parts, path = seconds_of(record, ends_ms), ("path", record["path"])
        for name, seconds in parts.items():
            self._sums[SECONDS, (("part", name), path)] += seconds
        self._sums[REQUESTS, (path,)] += 1
        for _, _, _, _, size, reads in record.get("wire", ()):
            self._sums[READ_BYTES, ()] += size
            self._sums[READS, ()] += reads
        parts[TOTAL] = sum(parts.values())
        if record.get("early") and "second_byte" in record["t"]:
            marks = record["t"]
            # The first token did not wait for them, but decode spent the time all the same.
            parts |= seconds_of(after_early(record), marks["second_byte"], marks["first_byte"])
        histogram = self._metric(PART_SECONDS, "Histogram")
        for name in WATCHED:
            if parts.get(name, 0) > 0:  # an observation costs CPU
                histogram.observe(parts[name], tags={"part": name, "ReplicaId": self._replica})
        if not self._due:
            self._later(self.publish)
            self._due = True

    def publish(self) -> None:
        """Report to Ray what was added since the last call."""
        sums, self._sums, self._due = self._sums, defaultdict(float), False
        try:
            for (name, tags), value in sums.items():
                if value > 0:  # Ray refuses to count nothing
                    self._metric(name, "Counter").inc(value, tags={**dict(tags), "ReplicaId": self._replica})
        except Exception as error:
            logging.getLogger("ray.serve").warning("the parts of requests are not counted: %r", error)

    def _metric(self, name: str, kind: str) -> Any:
        if name not in self._metrics:
            metrics: Any = importlib.import_module("ray.util.metrics")
            more = {"boundaries": list(ENDS_S)} if kind == "Histogram" else {}
            keys = {SECONDS: ("part", "path"), REQUESTS: ("path",), PART_SECONDS: ("part",)}.get(name, ())
            self._metrics[name] = getattr(metrics, kind)(
                name, description={**COUNTERS, **HISTOGRAMS}[name], tag_keys=(*keys, "ReplicaId"), **more
            )
        return self._metrics[name]


def _in_a_second(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(EVERY_S, call)
