"""The timeline of one request: its time to first token in parts that follow one another without a gap.

The server that answers the client records moments of its machine's monotonic clock (marks) and sends them with the
answer. No two clocks are compared. Events in processes of other machines (prefill's server and engine) arrive as
durations, which lie between two marks of this machine. The rest of the client's own TTFT is the network and the front.
docs/timeline.md explains every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, FiniteFloat

from pdlab.marks.request_parts import after_early, chain, seconds_of
from pdlab.results.stored_rows import Row

# Every part in the order of time, and its meaning.
PARTS: Mapping[str, str] = {
    "front": "network, proxy and ingress, both ways, and the client",
    "server": "the server's own work before prefill is called, or before the engine is given the request",
    "failed_calls": "calls of prefill that failed",
    "call": "the way to prefill's server and back",
    "prefill_server": "prefill's server: tokenising, and making the answer",
    "queue": "waiting in the engine that prefills, until it takes the prompt up",
    "prefill": "the prompt is computed, until its first token",
    "submit": "decode's server, from the end of the last call of prefill until its engine is given the request",
    "admission": "waiting in the decode engine for room and for a step to end",
    "post": "from admission until the first read of KV cache is posted",
    "transfer": "from the first read's posting until a poll sees the last one ended",
    "step_lag": "from that poll until the engine's scheduler gets the news",
    "guard": "until the KV guard has confirmed that the KV cache belongs to the request",
    "lost_read": "the KV cache did not arrive, or prefill did not confirm it: until decode gives it up",
    "wait": "until the decode engine takes the request up, from usable KV cache or from giving it up",
    "recompute": "decode computes the prompt, because the KV cache did not arrive",
    "first_step": "the decode step that makes the first token",
    "out": "from the engine's token until the server has sent it",
}
# Marks of 0.1.0, and their names of today. A reader that ignored one would put its part into the next.
RENAMED_MARKS: Mapping[str, str] = {"told": "reported"}
Path = Literal["pd", "local", "collocated", "cached", "recomputed"]
# Tolerated disorder: two processes of a machine may read their clock at nearly the same time.
DISORDER_S = 0.0002


class TimePart(NamedTuple):
    """A part of a time, with a name in `PARTS`."""

    name: str
    seconds: float


class KvRead(NamedTuple):
    """The reads of a request's KV cache by one rank of decode. ``posted_ms``: posting of the first read; ``seen_ms``:
    end of the last one; both on the timeline's clock. ``nixl_us``: NIXL's duration of the longest read, which ends at
    the poll that sees the end. ``bytes``: of all ``reads``."""

    rank: int
    posted_ms: FiniteFloat
    seen_ms: FiniteFloat
    nixl_us: FiniteFloat
    bytes: int
    reads: int = 1


class RequestTimeline(Row):
    """One request as its server saw it. Times in ms.

    ``t``: marks (`pdlab.marks.request_parts.MARKS`) since the request reached the answering server; others end no
    part. ``p``: durations in the prefill replica: ``total`` of its server, ``queue`` and ``prefill`` of its engine.
    ``wire``: the reads.
    ``id``: the client's id of the request; ``p_id`` and ``d_id``: the engines' ids. ``role_p`` and ``role_d``: the
    replicas that prefilled and answered. ``boot``: the boot id of the machine whose clock the marks are of.
    ``attempt``: calls of prefill made (``try`` in files). ``err``: why a mark is missing. ``early``: the first token
    is prefill's and was sent before the KV cache had moved.

    ``path``: *pd* (prefill on another engine, KV cache read), *cached* (decode had all of it and read nothing),
    *recomputed* (the KV cache was refused or did not arrive), *local* (decode computed the prompt in a deployment with
    prefill), *collocated*.

    ``arrival_s`` and ``ttft_s`` are the client's, in seconds as in its `RequestRecord`; None: not joined.
    """

    model_config = ConfigDict(populate_by_name=True)

    v: Literal[1] = 1
    id: str
    p_id: str | None = None
    d_id: str | None = None
    role_p: str | None = None
    role_d: str | None = None
    boot: str | None = None
    attempt: int = Field(default=0, alias="try")
    path: Path
    t: dict[str, FiniteFloat]
    p: dict[str, FiniteFloat] = Field(default_factory=dict)
    wire: tuple[KvRead, ...] = ()
    err: str | None = None
    early: bool = False
    arrival_s: float | None = None
    ttft_s: float | None = None

    def line(self) -> str:
        """See `Row`."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def shifted(self, by_s: float) -> RequestTimeline:
        """The same request on a client clock that began ``by_s`` earlier; see `RequestRecord.shifted`."""
        if self.arrival_s is None or by_s <= 0:
            return self
        return self.model_copy(update={"arrival_s": round(self.arrival_s + by_s, 6)})

    @property
    def whole(self) -> bool:
        """Whether every mark and duration of its path is there, so that no part contains another one's time."""
        lacks_durations = self.path in _PREFILLED and not self.p.keys() >= _DURATIONS
        return self.err is None and not lacks_durations and not (_needed(self) - self.t.keys())

    def parts(self) -> tuple[TimePart, ...]:
        """The parts of the client's TTFT, or of the server's time until the first byte if that TTFT is unknown.

        In the order of `PARTS`, each at least 0. Their sum is that time even if marks are missing: the time of a
        missing mark's part is in the next part. Raises ValueError if the first byte is not marked.
        """
        if "first_byte" not in self.t:
            raise ValueError(f"request {self.id}: no first byte is marked")
        served_ms = self.t["first_byte"]
        if self.ttft_s is None:
            return _ordered(seconds_of(self._marks, served_ms))
        front_s = max(0.0, self.ttft_s - served_ms / 1e3)
        return (TimePart("front", front_s), *_ordered(seconds_of(self._marks, min(served_ms, self.ttft_s * 1e3))))

    def parts_of_second(self) -> tuple[TimePart, ...]:
        """From sending the first byte until the second token's, if the first token was sent early. These parts would
        otherwise be in `parts`. Empty if the first token was not early, or there was no second."""
        if not self.early or "second_byte" not in self.t:
            return ()
        first_ms = self.t["first_byte"]
        return _ordered(seconds_of(after_early(self._marks), max(first_ms, self.t["second_byte"]), first_ms))

    @property
    def _marks(self) -> dict[str, Any]:
        """As `pdlab.marks.request_parts` takes it."""
        return {"path": self.path, "early": self.early, "t": self.t, "p": self.p}

    @property
    def disorder_s(self) -> float:
        """The largest contradiction between marks or durations and their order, in seconds; 0: in order."""
        worst_ms, at_ms = 0.0, 0.0
        for mark in chain(self._marks):
            worst_ms = max(worst_ms, at_ms - self.t[mark])
            at_ms = self.t[mark]
        if self.p and "answer" in self.t and (called := self.t.get("failed", self.t.get("call"))) is not None:
            total_ms = self.p.get("total", 0.0)
            worst_ms = max(worst_ms, total_ms - (self.t["answer"] - called))
            worst_ms = max(worst_ms, self.p.get("queue", 0.0) + self.p.get("prefill", 0.0) - total_ms)
        return worst_ms / 1e3

    @property
    def front_s(self) -> float | None:
        """The measured part of the client's TTFT outside the server; negative if the clocks contradict each other."""
        if self.ttft_s is None or "first_byte" not in self.t:
            return None
        return self.ttft_s - self.t["first_byte"] / 1e3


_PD = frozenset({"call", "answer", "queued", "admitted", "posted", "seen", "reported", "usable", "scheduled", "first"})
# Paths with an answer of a prefill replica, and the durations that it reports.
_PREFILLED = ("pd", "cached", "recomputed")
_DURATIONS = frozenset({"total", "queue", "prefill"})
_ENGINE = frozenset({"queued", "scheduled", "first", "first_byte"})


def _needed(timeline: RequestTimeline) -> frozenset[str]:
    return {
        "pd": _PD | {"first_byte"},
        "cached": frozenset({"call", "answer", "admitted"}) | _ENGINE,
        "recomputed": frozenset({"call", "answer", "admitted", "given_up"}) | _ENGINE,
        "local": _ENGINE,
        "collocated": _ENGINE,
    }[timeline.path]


def _ordered(seconds: Mapping[str, float]) -> tuple[TimePart, ...]:
    return tuple(TimePart(name, seconds[name]) for name in PARTS if name in seconds)
