"""Rules that make a level invalid: each is a gate with a name, and yields findings. Pure.

Every rule, its limit and its source: docs/methodology.md. A gate whose data is missing is not
passed but *unchecked*, with the reason. New gates join `GATES`; what they find joins `pdlab.core.findings.CODES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Literal

from pydantic import Field, InstanceOf

from pdlab.core.errors import BenchError
from pdlab.core.findings import Finding, found
from pdlab.core.length_distribution import Pair
from pdlab.core.mixes import Mixes
from pdlab.core.schema import Frozen
from pdlab.core.workload import Closed, Open, Ramp, Replay, Workload
from pdlab.results import metrics
from pdlab.results.columns import by_parts, elements, sorted_known, taken
from pdlab.results.level_data import LevelData, ReplayedData
from pdlab.results.schema import CanaryResult, Run, Trend, Validity
from pdlab.results.texts import TextIndex, text_codes, text_of
from pdlab.results.timeline import DISORDER_S, RequestTimeline

if TYPE_CHECKING:
    from pdlab.results.level_data import Codes, Column, Mask

MAX_CPU_SHARE = 0.9
# At the 95th percentile a quarter of a median that is measured: the median itself is then off by far less. And the
# 50 ms after which Ray Serve LLM hands tokens on, for no latency is measured finer than that.
LATE_SHARE, LATE_FLOOR_S = 0.25, 0.05
# At the 99th percentile of an open loop: from there on a note states that the load generator is behind the schedule.
NOTED_LATE_S = 0.02
# Linux slews a clock by at most 500 ppm (adjtimex(2)): twice that, and a little, is a step.
CLOCK_PPM, CLOCK_SLACK_S = 1000e-6, 0.02
ORDER_SLACK_S = 1e-3  # a request's times are rounded one by one
CACHE_SLACK = 0.01
# Of a replay's prompt tokens: by how much the share of hits may differ from the forecast, whose cache is empty when the
# level begins and takes every request as it comes.
HITS_OFF = 0.02
LEAST_STEADY = 9  # from there on the 95 % interval of a median stays off the sample's extremes
MAX_CHANGE = 0.2
MAX_GROWTH = 0.05
# Answers may take longer at an open loop's end by so much of its length, or of what they took at its begin.
MAX_DELAY, MAX_LONGER = 0.05, 0.5
# Number in flight against rate x time in the system: the part of it that the edges of a window explain, in standard
# deviations, and what is let pass beside that.
LITTLE_SIGMA, LITTLE_SHARE = 4.0, 0.2
# Probabilities of Student's t, two-sided 0.1 % and, for the number in flight, 2 %: its size limits alone keep a lumpy
# level from being called a drift.
DRIFTS, GROWS = 0.9995, 0.99
# Of the requests of a replay whose replicas are named: with fewer, sessions that moved may be among the others.
NAMED_LEAST = 0.95
FILLED_LEAST = 0.99
# Of a rehearsal: by how much a client's mean may differ from the model's of the same requests, and how late events may
# be within TTFT.
PACE_TTFT, PACE_DECODE, PACE_LATE = 0.10, 0.03, 0.05
PACE_KNOWN = 0.95  # of the answers must be in the model's sums
# Ray Serve LLM hands tokens on every 50 ms, so a short answer may come in one piece. 64 tokens in 50 ms are 0.8 ms
# each: no engine decodes one request so fast. Chunks that arrive together are microseconds apart.
LEAST_STREAMED, AT_ONCE_S = 64, 1e-4
# Of the answers, where their servers send timelines.
TIMELINES_LEAST = 0.99
# The client takes its time when it has read the first chunk and parsed it; its clock is the server's or ticks as fast.
FRONT_LEAST_S = -1e-3


Settling = Literal["whole", "late", "short"]
"""How the counters of a level came to rest. ``whole``: they had counted its answers, and stood still. ``short``: they
stood still, and some of its answers are not in them. ``late``: they were still moving when the wait for them ended, so
what they lack is not known."""


LengthSetting = Literal["hold_s", "prompts_per_level", "soak_s"]
LENGTHENED: dict[LengthSetting, str] = {
    "hold_s": "hold the rate longer (--hold-s)",
    "prompts_per_level": "give more prompts per level (--prompts-per-level)",
    "soak_s": "hold the load longer (--soak)",
}


class Evidence(Frozen):
    """The data for gates: a level's ``run`` without a verdict, its requests, and data that a run does not store.

    ``kv_expected``: the deployment moves KV cache, and its counters can be read, or ``counters_error`` has the reason
    why not. ``settling``: state of the counters after the level. ``unpublished`` are replicas that the launch did not
    publish and that answered in the level, or appeared in it. ``ingress_replicas`` None: there are none; HAProxy calls
    a router. ``roles_changed``: for a ``fluid`` pool, whether somebody has set other roles than those of its launch.
    ``smoke``: short by intention. ``timelines``: the servers' timelines of requests; ``timelines_due``: they were
    requested of servers that pdlab launched. ``by_session``: pools whose requests go to the engine of their session.
    ``length_setting``: sets how long the level is (None: the one of its load)."""

    run: Run
    requests: InstanceOf[LevelData]
    kv_expected: bool = False
    unpublished: tuple[str, ...] = ()
    counters_error: str | None = None
    settling: Settling = "whole"
    ingress_replicas: int | None = Field(default=None, ge=1)
    fluid: bool = False
    roles_changed: bool | None = None
    smoke: bool = False
    timelines: InstanceOf[Sequence[RequestTimeline]] = ()
    timelines_due: bool = False
    by_session: tuple[str, ...] = ()
    length_setting: LengthSetting | None = None

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last answer."""
        import numpy as np

        requests = self.requests
        return float(np.where(np.isnan(requests.ended_s), requests.arrival_s, requests.ended_s).max(initial=0.0))

    @cached_property
    def answered(self) -> LevelData:
        return self.requests.answered

    @property
    def replays(self) -> bool:
        return isinstance(self.run.load, Replay)

    @property
    def decodes_only(self) -> bool:
        return self.run.workload.mode == "decode-only"

    @property
    def counts_lost(self) -> bool:
        """Whether an engine that is gone, or one that the launch did not publish, has counted."""
        return self.counters_reset or bool(self.unpublished)

    def delta(self, field: str) -> float | None:
        """The increase of a counter of the engines, all pools together; None: no pool exports it."""
        grown = [self.pool_delta(pool, field) for pool in self.run.engines_after]
        increases = [each for each in grown if each is not None]
        return sum(increases) if increases else None

    def pool_delta(self, pool: str, field: str) -> float | None:
        """The increase of a counter of one pool's engines; None: they do not export it."""
        after: float | None = getattr(self.run.engines_after[pool], field)
        before: float | None = getattr(self.run.engines_before.get(pool), field, None)
        return None if after is None else after - (before or 0.0)

    def transfer_delta(self, field: str) -> float | None:
        """The increase of a counter of the KV transfers; None: no page has it."""
        before, after = self.run.nixl_before, self.run.nixl_after
        value: float | None = getattr(after, field, None)
        return None if value is None else value - (getattr(before, field, None) or 0.0)

    @property
    def counters_reset(self) -> bool:
        """Whether a counter is lower than before, because it has started again from 0."""
        pairs: list[tuple[Frozen | None, Frozen | None]] = [(self.run.nixl_before, self.run.nixl_after)]
        pairs += [(self.run.engines_before.get(pool), after) for pool, after in self.run.engines_after.items()]
        for before, after in pairs:
            if before is None or after is None:
                continue
            for name in type(after).model_fields:
                old, new = getattr(before, name), getattr(after, name)
                if isinstance(old, float) and isinstance(new, float) and new < old:
                    return True
        return False


def failed_requests(evidence: Evidence) -> Iterator[Finding]:
    """Any request without a complete answer."""
    import numpy as np

    total = evidence.run.num_requests
    requests = evidence.requests
    if len(requests) != total:
        yield found("requests_unrecorded", recorded=len(requests), requests=total)
    unsent = ~requests.replayed.sent
    failed = np.flatnonzero(~requests.ok & ~unsent)
    if len(failed):
        first = requests.error_texts[requests.errors[failed[0]]] or "no answer"
        yield found("requests_failed", failed=len(failed), requests=total, first=first)
    if unsent.any():
        yield found("follow_ups_unsent", unsent=int(unsent.sum()), requests=total)


def token_counts(evidence: Evidence) -> Iterator[Finding]:
    """An answered request whose token counts, by the server, differ from the requested ones."""
    workload = evidence.run.workload
    yield from _wrong_counts(evidence.answered, (workload.sent_input_tokens, workload.sent_output_tokens))


def _usage_missing(evidence: Evidence) -> Finding | None:
    if any(token_counts(evidence)):
        return None  # what is known suffices
    return _unreported(evidence.answered, evidence.run.workload.sent_output_tokens)


def _unreported(answered: LevelData, output_tokens: int) -> Finding | None:
    """Answers whose tokens the server did not report; None: there are none. ``output_tokens``: requested of every one
    that has no lengths of its own."""
    import numpy as np

    unreported = answered.part(~answered.usage) if not answered.usage.all() else None
    if unreported is None:
        return None
    own = unreported.requested_output
    others = unreported.output_tokens != np.where(np.isnan(own), output_tokens, own)
    return found("usage_unreported", unreported=len(unreported), answers=len(answered), others=int(others.sum()))


def _wrong_counts(answered: LevelData, nominal: Pair) -> Iterator[Finding]:
    """Of the answers whose tokens the server reported. ``nominal``: input and output tokens of every request that has
    no lengths of its own."""
    import numpy as np

    sides = {
        "input": (answered.input_tokens, answered.requested_input, nominal[0]),
        "output": (answered.output_tokens, answered.requested_output, nominal[1]),
    }
    for side, (counts, own, every) in sides.items():
        requested = np.where(np.isnan(own), every, own)
        wrong = np.flatnonzero((counts != requested) & answered.usage)
        if len(wrong):
            first = {"count": int(counts[wrong[0]]), "requested": int(requested[wrong[0]])}
            yield found("token_count_wrong", side=side, wrong=len(wrong), answers=len(answered), **first)


def judge_warm_up(requests: LevelData, workload: Workload) -> Iterator[str]:
    """Check the warm-up's answers, whose requests have typical lengths. Returns notes on the coming levels.

    Raises BenchError if every level would be invalid or meaningless: wrong token counts, no streaming.
    """
    import numpy as np

    answered = requests.answered
    wrong = list(_wrong_counts(answered, workload.typical))
    if wrong:
        raise BenchError(
            f"warm-up: {'; '.join(each.text for each in wrong)}: every level would be invalid; is --tokenizer the "
            "model's own, and does the server count tokens as OpenAI's usage does?"
        )
    tokens = workload.typical[1]
    if (unreported := _unreported(answered, tokens)) is not None:
        yield f"warm-up: {unreported.text}"
    belongs = np.repeat(np.arange(len(answered)), answered.gap_counts)
    spread_s = np.bincount(belongs, answered.gaps_s, minlength=len(answered))  # from the first chunk to the last
    if tokens > 1 and len(answered) and np.median(spread_s) < AT_ONCE_S * (tokens - 1):
        text = (
            f"warm-up: the {tokens} tokens of an answer arrive at once: TTFT is the time of the whole answer then, and "
            "TPOT means nothing"
        )
        if tokens >= LEAST_STREAMED:
            raise BenchError(f"{text}; the server, or a proxy before it, does not stream")
        yield f"{text}; the answers are too short to show whether the server streams"


def kv_transfers(evidence: Evidence) -> Iterator[Finding]:
    """A KV transfer failed or expired, or a PD deployment has no visible transfers."""
    if evidence.run.nixl_after is None or evidence.counts_lost:
        return  # see `restarts`
    yield from _counted(
        evidence,
        failed_transfers="kv_transfers_failed",
        failed_notifications="kv_notifications_failed",
        kv_expired_requests="kv_expired",
    )
    if evidence.kv_expected and len(evidence.answered) and not evidence.transfer_delta("bytes_transferred"):
        yield found("kv_nothing_transferred")


def _counted(evidence: Evidence, **codes: str) -> Iterator[Finding]:
    """The code of each counter of the KV transfers that has grown."""
    for name, code in codes.items():
        if (count := evidence.transfer_delta(name) or 0.0) > 0:
            yield found(code, count=count)


def prefill_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call of prefill failed or was late, and its prompt was prefilled elsewhere: the figures are not those of the
    measured deployment.
    """
    names = {
        "prefill_retries": "sent to another prefill replica",
        "prefill_local": "computed on decode",
        "prefill_failures": "answered with an error",
    }
    counts = {name: evidence.delta(name) or 0.0 for name in names}
    if any(count > 0 for count in counts.values()):
        late = evidence.delta("prefill_timeouts") or 0.0
        done = ", ".join(f"{count:g} {names[name]}" for name, count in counts.items() if count > 0)
        yield found("prefill_calls_failed", late=late, done=done, **counts)


def guard_recomputed(evidence: Evidence) -> Iterator[Finding]:
    """The KV guard made decode compute prompts: the answers are right, but the figures are not only those of PD."""
    count = evidence.transfer_delta("guard_recomputed") or 0.0
    if count > 0:
        yield found("guard_recomputed", count=count, receives=evidence.transfer_delta("guard_receives") or 0.0)


def guard_deadline(evidence: Evidence) -> Iterator[Finding]:
    """KV receives did not end in time, and the KV guard went on without them."""
    yield from _counted(evidence, guard_deadlines="guard_gave_up", guard_errors="guard_no_room")


def kv_connections(evidence: Evidence) -> Iterator[Finding]:
    """A connection between a prefill and a decode engine failed in the level."""
    names = {
        "failed_transfers": "KV reads failed",
        "guard_failed_reads": "prompts were computed on decode because of failed reads",
        "guard_handshakes_renewed": "connections were replaced",
    }
    counts = {name: evidence.transfer_delta(name) or 0.0 for name in names}
    if counts["guard_failed_reads"] > 0 or counts["guard_handshakes_renewed"] > 0:
        done = ", ".join(f"{count:g} {names[name]}" for name, count in counts.items())
        yield found("kv_connection_failed", done=done, **counts)


def restarts(evidence: Evidence) -> Iterator[Finding]:
    """A replica was replaced, or an engine was restarted: its caches and connections were cold."""
    if evidence.unpublished:
        yield found("replica_replaced", replicas=", ".join(evidence.unpublished))
    elif evidence.counters_reset:
        yield found("engine_restarted")


def roles(evidence: Evidence) -> Iterator[Finding]:
    """The roles of a fluid pool were set by hand: the label names another curve."""
    if evidence.roles_changed:
        yield found("roles_set_by_hand", label=evidence.run.label)


def other_requests(evidence: Evidence) -> Iterator[Finding]:
    """Engines finished requests of other clients too: the deployment had another load than the level's."""
    for pool, finished in _finished(evidence).items():
        most, least = evidence.run.num_requests, len(evidence.answered)
        where = "" if pool == "collocated" else f" {pool}"
        if finished > most:
            yield found("other_requests_more", pool=where, finished=finished, sent=most)
        elif finished < least and pool != "prefill":
            yield found("other_requests_fewer", pool=where, finished=finished, answered=least)


def _finished(evidence: Evidence) -> dict[str, float]:
    """Requests that each pool's engines finished during the level, of the pools that count them."""
    grown = {pool: evidence.pool_delta(pool, "requests") for pool in evidence.run.engines_after}
    return {pool: count for pool, count in grown.items() if count is not None}


def preemptions(evidence: Evidence) -> Iterator[Finding]:
    """The KV cache was full: requests lost theirs and were computed again."""
    count = evidence.delta("preemptions")
    if count and count > 0:
        yield found("preempted", count=count)


def prefix_cache(evidence: Evidence) -> Iterator[Finding]:
    """More of the prompts came from the prefix cache than the workload declares. With PD both engines of a request look
    up its prompt, each in its own cache. Prefill gets tokens through a connector only from a store of KV cache, such as
    host memory; decode gets what prefill has just computed.
    """
    input_tokens = float(evidence.answered.input_tokens.sum())
    if not input_tokens:
        return
    declared = evidence.run.workload.shared_prefix_tokens * len(evidence.answered) / input_tokens
    hits = {pool: evidence.pool_delta(pool, "prefix_cache_hits") for pool in evidence.run.engines_after}
    if "prefill" in hits and (stored := evidence.pool_delta("prefill", "external_cache_hits")):
        hits["prefill"] = (hits["prefill"] or 0.0) + stored
    lookups = 2 if "fluid" in hits else 1
    share = max((count for count in hits.values() if count is not None), default=0.0) / (lookups * input_tokens)
    if share > declared + CACHE_SLACK:
        yield found("prefix_cache_hits", share=share, declared=declared)


def cache_hits(evidence: Evidence) -> Iterator[Finding]:
    """The engine answered another share of a replay's prompts from its prefix cache than its rules foresee."""
    import numpy as np

    share, bounds = _hit_share(evidence), _hit_bounds(evidence)
    if share is None:
        return
    if bounds is not None:
        least, most = bounds
        if not least - HITS_OFF <= share <= most + HITS_OFF:
            yield found("hits_out_of_bounds", share=share, least=least, most=most)
        return
    answered = evidence.answered
    expected = float(np.nansum(answered.replayed.foreseen_tokens) / answered.input_tokens.sum())
    if abs(share - expected) > HITS_OFF:
        yield found("hits_not_as_computed", share=share, foreseen=expected)


def _hit_share(evidence: Evidence) -> float | None:
    """The share of a replay's prompt tokens that came from a prefix cache; None: not known."""
    tokens, hits = float(evidence.answered.input_tokens.sum()), _replay_hits(evidence)
    return hits / tokens if hits is not None and tokens else None


def _hit_bounds(evidence: Evidence) -> tuple[float, float] | None:
    """The least and the most that `_hit_share` may be; None: the forecast is exact, or there is none."""
    import numpy as np

    replayed, tokens = evidence.answered.replayed, float(evidence.answered.input_tokens.sum())
    if np.isnan(replayed.foreseen_most).all() or not tokens:
        return None
    return float(np.nansum(replayed.foreseen_least)) / tokens, float(np.nansum(replayed.foreseen_most)) / tokens


def _replay_hits(evidence: Evidence) -> float | None:
    """Prompt tokens that the engines which compute prompts had in their caches; None: not known.

    Hits of a decode engine do not count: they save a transfer, and no prefill. A fluid pool's counters contain both
    kinds, so its hits are those that the servers reported of each request.
    """
    if evidence.fluid:
        replayed = evidence.answered.replayed
        reported = replayed.cached_tokens[replayed.known]
        # One that is not reported makes the sum NaN.
        return float(reported.sum()) if len(reported) and reported.sum() >= 0 else None
    pools = evidence.run.engines_after
    computing = ["prefill"] if "prefill" in pools else list(pools)
    hits = [each for pool in computing if (each := evidence.pool_delta(pool, "prefix_cache_hits")) is not None]
    # What they get from a connector comes from memory of the host.
    stored = [evidence.pool_delta(pool, "external_cache_hits") or 0.0 for pool in computing if pool != "decode"]
    return sum(hits) + sum(stored) if hits else None


def affinity(evidence: Evidence) -> Iterator[Finding]:
    """A session's requests went to several engines of a pool that keeps sessions together."""
    import numpy as np

    replayed = evidence.answered.replayed
    for pool in evidence.by_session:
        replicas = _served_by(replayed, pool)
        named = replicas >= 0
        sessions = text_codes(taken(replayed.sessions, named.nonzero()[0]))
        count = int(replicas.max(initial=0)) + 1
        homes = np.bincount(np.unique(sessions * count + replicas[named]) // count)
        moved = int((homes > 1).sum())
        if moved:
            yield found("sessions_moved", moved=moved, sessions=len(homes), pool=pool)


def _served_by(replayed: ReplayedData, pool: str) -> Codes:
    return replayed.prefill_replicas if pool == "prefill" else replayed.replicas


def decode_context(evidence: Evidence) -> Iterator[Finding]:
    """decode-only: the engines computed prompts instead of filling their KV cache."""
    import numpy as np

    filled = evidence.delta("external_cache_hits")
    own = evidence.answered.requested_input
    context = np.where(np.isnan(own), evidence.run.workload.sent_input_tokens, own) - 1
    requested_tokens = int(context.sum())
    if filled is not None and requested_tokens and filled < FILLED_LEAST * requested_tokens:
        yield found("context_computed", filled=filled, tokens=requested_tokens)


def client_saturation(evidence: Evidence) -> Iterator[Finding]:
    """The load generator was the bottleneck: its timestamps then measure the load generator."""
    client = evidence.run.client
    if client is None:
        return
    if client.cpu_share is not None and client.cpu_share > MAX_CPU_SHARE:
        yield found("client_cpu", cores=client.cpu_share, limit=MAX_CPU_SHARE)
    answered = evidence.answered
    # A late timestamp is part of the TTFT at the first token, of the decode time at the first and the last.
    spans = {
        "median TTFT": _median(answered.ttft_s),
        "median decode time": _median((answered.e2el_s - answered.ttft_s)[answered.output_tokens > 1]),
    }
    limit_s, why = _late_limit(spans)
    if client.loop_lag_s is not None and client.loop_lag_s > limit_s:
        yield found("client_lag", late_ms=1000 * client.loop_lag_s, limit=why)


_FRONT_CURES = {
    "ingress": "; give --ingress-replicas, or --direct-streaming where every node can be reached",
    "proxy": "; serve at --host 0.0.0.0, where HAProxy takes its place",
    "router": "; give --no-direct-streaming, whose ingress replicas share the work",
}


def front_saturation(evidence: Evidence) -> Iterator[Finding]:
    """The front end (ingress, proxy or router) was the bottleneck: the figures then measure it, and not the engines."""
    for name, cores in evidence.run.front_cores.items():
        share = cores / (evidence.ingress_replicas or 1 if name == "ingress" else 1)
        if share > MAX_CPU_SHARE:
            yield found("front_cpu", name=name, cores=share, limit=MAX_CPU_SHARE, cure=_FRONT_CURES.get(name, ""))


def lateness(evidence: Evidence) -> Iterator[Finding]:
    """Requests were sent later than they were due. In an open loop their wait is in no latency (coordinated omission);
    in a closed loop fewer were in flight than the level's number.
    """
    late_s = _known_lateness_s(evidence)
    if not len(late_s):
        return
    if evidence.replays:
        p99_s = metrics.percentile(late_s, 99)
        if p99_s >= LATE_FLOOR_S:
            yield found("replay_late", late_ms=1000 * p99_s, limit_ms=1000 * LATE_FLOOR_S)
        return
    if isinstance(evidence.run.load, Closed):
        limit_s, why = _late_limit({"median E2EL": _median(evidence.answered.e2el_s)})
        when = "after another one had left its place"
    else:
        limit_s, why = _late_limit({"median TTFT": _median(evidence.answered.ttft_s)})
        when = "after they were due"
    p95_s = float(late_s[math.ceil(0.95 * len(late_s)) - 1])
    if p95_s > limit_s:
        yield found("sent_late", late_ms=1000 * p95_s, when=when, limit=why)


def dependencies(evidence: Evidence) -> Iterator[Finding]:
    """Requests of a replay were sent before the last token of what they wait for: their prompts cannot hold its
    answer, and the engines got another load than the sessions make."""
    requests, replayed = evidence.requests, evidence.requests.replayed
    places, others = TextIndex(replayed.ids), iter(replayed.after)
    waiting, violated, first = 0, 0, ""
    columns = (requests.arrival_s, replayed.sent, replayed.after_counts)
    for number, (arrival_s, sent, count) in enumerate(zip(*map(elements, columns), strict=True)):
        if not count:
            continue
        ended_s = [requests.finish_s[at] for other in islice(others, count) if (at := places.of(other)) is not None]
        if not sent:
            continue
        waiting += 1
        # Where nothing is known of an end, nothing can have waited for it.
        if len(ended_s) < count or not all(arrival_s >= end_s - ORDER_SLACK_S for end_s in ended_s):
            first = first or text_of(replayed.ids[number])
            violated += 1
    if violated:
        yield found("dependency_violated", violated=violated, waiting=waiting, first=first)


def _late_limit(spans: dict[str, float | None]) -> tuple[float, str]:
    """How late, in seconds, the load generator may be when it measures these ``spans``, and the rule in words."""
    known = {name: span_s for name, span_s in spans.items() if span_s is not None}
    name = min(known, key=lambda name: known[name], default=None)
    if name is None or LATE_SHARE * known[name] <= LATE_FLOOR_S:
        return LATE_FLOOR_S, f"{1000 * LATE_FLOOR_S:.0f} ms"
    limit_s = LATE_SHARE * known[name]
    return limit_s, f"{1000 * limit_s:.0f} ms, {LATE_SHARE:.0%} of the {name}"


def _known_lateness_s(evidence: Evidence) -> Column:
    """The known lateness of all requests, sorted, in seconds."""
    return sorted_known(evidence.requests.lateness_s)


def _median(values_s: Column) -> float | None:
    import numpy as np

    return float(np.median(values_s)) if len(values_s) else None


def clock(evidence: Evidence) -> Iterator[Finding]:
    """The client's clock was set during the level, or times are in an impossible order."""
    import numpy as np

    def disordered(*times_s: Column) -> Mask:
        so_far_s = np.fmax.accumulate(times_s)  # a moment that never came is passed over
        wrong: Mask = np.any(np.stack(times_s)[1:] < so_far_s[:-1] - ORDER_SLACK_S, axis=0)
        return wrong

    requests = evidence.requests
    columns = (requests.arrival_s, requests.first_token_s, requests.ended_s)
    wrong = by_parts(disordered, *columns, kind="?").nonzero()[0]
    if len(wrong):
        times_s = [column[wrong[0]] for column in columns]
        yield found("clock_backwards", times=", ".join(f"{t:g}" for t in times_s if not math.isnan(t)))
    step_s = evidence.run.client.clock_step_s if evidence.run.client else None
    if step_s is not None and abs(step_s) > CLOCK_SLACK_S + CLOCK_PPM * evidence.duration_s:
        yield found("clock_set", step_s=step_s)


def few_requests(evidence: Evidence) -> Iterator[Finding]:
    """Too few requests finish in the steady window."""
    load, steady = evidence.run.load, evidence.run.steady
    needed = max(LEAST_STEADY, 2 * load.concurrency) if isinstance(load, Closed) else LEAST_STEADY
    completed = steady.completed if steady else 0
    if completed < needed:
        window_text = f"{completed} requests finish in it" if steady else "there is none"
        more = LENGTHENED[evidence.length_setting or ("prompts_per_level" if isinstance(load, Closed) else "hold_s")]
        yield found("few_requests", needed=needed, finished=completed, window=window_text, more=more)


def steady_state(evidence: Evidence) -> Iterator[Finding]:
    """Throughput or the number in flight drifts inside the window that is called steady."""
    drift = evidence.run.trend
    if behind := list(_falls_behind(evidence)):
        yield from behind
        return
    if drift is None or _alternating_mixes(evidence.run.workload):
        return
    limit = partial(metrics.student_t, dof=drift.slices - 2)
    if isinstance(evidence.run.load, Closed):
        if abs(drift.throughput_change) > MAX_CHANGE and abs(drift.throughput_t) > limit(DRIFTS):
            yield found("throughput_drifts", change=drift.throughput_change)
        return
    least = max(MAX_GROWTH * drift.arrivals, 3 * (2 * drift.in_flight_mean) ** 0.5)
    if drift.in_flight_growth > least and drift.in_flight_t > limit(GROWS):
        yield found("in_flight_grows", growth=drift.in_flight_growth, arrivals=drift.arrivals)
    yield from _littles_law(evidence, drift)


def _falls_behind(evidence: Evidence) -> Iterator[Finding]:
    """The answers of an open loop take ever longer. If mixes take turns, the requests of each mix are compared."""
    if not isinstance(evidence.run.load, Open):
        return
    moments = evidence.requests.arrival_s
    turns = _alternating_mixes(evidence.run.workload)
    for which, requests in _by_mix(evidence.requests, turns) if turns else [("", evidence.requests)]:
        delays = metrics.first_and_last_e2el(requests)
        if delays is None:
            continue
        first_s, last_s, lasted_s = *delays, float(moments[-1] - moments[0])
        if last_s - first_s > max(MAX_DELAY * lasted_s, MAX_LONGER * first_s):
            yield found("answers_take_longer", which=which, first_s=first_s, last_s=last_s, lasted_s=lasted_s)
            return


def _alternating_mixes(workload: Workload) -> Mixes | None:
    """The mixes that take turns without drift, so that throughput and the number in flight change with each turn."""
    mixes = workload.lengths
    return mixes if isinstance(mixes, Mixes) and len(mixes.mixes) > 1 and not mixes.drift else None


def _by_mix(requests: LevelData, mixes: Mixes) -> Iterator[tuple[str, LevelData]]:
    """For each mix " to INPUT:OUTPUT" and the requests that arrived during its turns."""
    numbers = (requests.arrival_s // mixes.every_s).astype(int) % len(mixes.mixes)
    for number, mix in enumerate(mixes.mixes):
        yield f" to {mix.input_tokens}:{mix.output_tokens}", requests.part(numbers == number)


def _littles_law(evidence: Evidence, drift: Trend) -> Iterator[Finding]:
    """The number in flight is not rate x time in the system."""
    by_rate = drift.in_flight_by_rate
    if by_rate is None or drift.in_flight_error is None:
        return
    if abs(drift.in_flight_mean - by_rate) > LITTLE_SHARE * by_rate + LITTLE_SIGMA * drift.in_flight_error:
        yield found("in_flight_is_not_rate_times_time", in_flight=drift.in_flight_mean, by_rate=by_rate)


def rehearsed_pace(evidence: Evidence) -> Iterator[Finding]:
    """In a rehearsal this machine was too slow: the client's times differ from those of the simulated engines for the
    same requests.
    """
    requests = evidence.delta("modelled_requests") or 0.0
    answered = evidence.answered
    if not len(answered) or requests < PACE_KNOWN * len(answered):
        return
    spans = {
        "TTFT": ("modelled_ttft_s", PACE_TTFT, answered.ttft_s),
        "decode time": ("modelled_decode_s", PACE_DECODE, answered.e2el_s - answered.ttft_s),
    }
    for name, (field, limit, client_s) in spans.items():
        modelled_s, client_mean_s = (evidence.delta(field) or 0.0) / requests, float(client_s.mean())
        if modelled_s > 0 and abs(client_mean_s - modelled_s) > limit * modelled_s:
            means_ms = {"client_ms": 1000 * client_mean_s, "modelled_ms": 1000 * modelled_s}
            yield found("pace_differs", name=name, limit=limit, **means_ms)
    late_s, ttft_s = evidence.delta("modelled_late_s") or 0.0, evidence.delta("modelled_ttft_s") or 0.0
    if late_s > PACE_LATE * ttft_s:
        yield found("pace_late", late_ms=1000 * late_s / requests, limit=PACE_LATE)


Judge = Callable[[Evidence], Iterator[Finding]]
Missing = Callable[[Evidence], Finding | None]


@dataclass(frozen=True)
class Gate:
    """One rule. ``missing`` returns why it cannot judge a level, or None; ``applies``: whether the rule applies to the
    level. ``counted``: it reads the engines' counters, so it passes no level if these were late.
    """

    name: str
    judge: Judge
    missing: Missing = lambda evidence: None
    applies: Callable[[Evidence], bool] = lambda evidence: True
    counted: bool = False


def _unless(known: Callable[[Evidence], object], code: str) -> Missing:
    """The finding of that code, unless the data for a gate is there."""
    return lambda evidence: None if known(evidence) else found(code)


def _unreadable(evidence: Evidence) -> Finding | None:
    return found("metrics_unreadable", error=evidence.counters_error) if evidence.counters_error else None


def _needs(*fields: str) -> Missing:
    exported = _unless(
        lambda evidence: all(evidence.delta(field) is not None for field in fields), "counter_not_exported"
    )
    return lambda evidence: _unreadable(evidence) or exported(evidence)


def _context_missing(evidence: Evidence) -> Finding | None:
    return _needs("external_cache_hits")(evidence) or (found("counters_late") if evidence.settling == "late" else None)


def _pace_missing(evidence: Evidence) -> Finding | None:
    missing = _needs("modelled_requests", "modelled_ttft_s")(evidence)
    known = evidence.delta("modelled_requests") or 0.0
    if missing is None and known < PACE_KNOWN * len(evidence.answered):
        return found("sending_times_unknown", known=known, answers=len(evidence.answered))
    return missing


def _kv_missing(evidence: Evidence) -> Finding | None:
    if evidence.counters_error:
        return found("kv_counters_unreadable", error=evidence.counters_error)
    return None if evidence.kv_expected else found("kv_counters_unknown")


_guard_missing = _unless(lambda evidence: not evidence.counts_lost, "guard_counts_lost")


def _has_guard(evidence: Evidence) -> bool:
    return evidence.run.nixl_after is not None and evidence.run.nixl_after.guard_receives is not None


def _restarts_missing(evidence: Evidence) -> Finding | None:
    has_metrics = bool(evidence.run.engines_after) or (
        evidence.run.nixl_after is not None and evidence.run.nixl_after.transfers is not None
    )
    return _unreadable(evidence) or (None if has_metrics else found("metrics_unknown"))


def _other_requests_missing(evidence: Evidence) -> Finding | None:
    if (unreadable := _unreadable(evidence)) is not None:
        return unreadable
    if evidence.counts_lost:
        return found("engine_counts_lost")
    if evidence.settling == "late":
        return found("counters_late")
    if not _finished(evidence):
        return found("requests_not_counted")
    if not evidence.run.engines_before:
        return found("metrics_unread_before")
    if evidence.kv_expected and "collocated" in evidence.run.engines_after:
        return found("pools_unknown")
    return None


def _client_measured(evidence: Evidence) -> bool:
    client = evidence.run.client
    return client is not None and not (client.cpu_share is None and client.loop_lag_s is None)


def _clocks_compared(evidence: Evidence) -> bool:
    return evidence.run.client is not None and evidence.run.client.clock_step_s is not None


def _hits_missing(evidence: Evidence) -> Finding | None:
    import numpy as np

    share, bounds = _hit_share(evidence), _hit_bounds(evidence)
    if bounds is None and np.isnan(evidence.answered.replayed.foreseen_tokens).all():
        return found("hits_incomputable")
    if evidence.fluid:
        missing = found("hits_unreported") if share is None else None
    else:
        missing = _needs("prefix_cache_hits")(evidence)
    if missing is not None or bounds is None or share is None or any(cache_hits(evidence)):
        return missing
    least, most = bounds
    return found("hits_bounded", share=share, least=least, most=most)


def _affinity_missing(evidence: Evidence) -> Finding | None:
    if evidence.fluid:
        return found("roles_move_sessions")
    replayed = evidence.answered.replayed
    requests = int(replayed.known.sum())
    if any(affinity(evidence)):
        return None  # what is known suffices
    for pool in evidence.by_session:
        named = int((_served_by(replayed, pool) >= 0).sum())
        if not named or named < NAMED_LEAST * requests:
            return found("replicas_unnamed", named=named, requests=requests, pool=pool)
    return None


def _short(evidence: Evidence) -> Finding | None:
    if evidence.smoke:
        return found("smoke_test")
    if evidence.replays:
        return found("replay_load")
    return found("ramp_load") if isinstance(evidence.run.load, Ramp) else None


def _trend_missing(evidence: Evidence) -> Finding | None:
    if evidence.run.trend or any(_falls_behind(evidence)):
        return _short(evidence)
    return _short(evidence) or found("too_few_for_trend")


GATES: tuple[Gate, ...] = (
    Gate("failed_requests", failed_requests),
    Gate("token_counts", token_counts, _usage_missing),
    Gate("kv_transfers", kv_transfers, _kv_missing, counted=True),
    Gate(
        "prefill_calls",
        prefill_calls,
        _needs("prefill_calls"),
        applies=lambda evidence: evidence.kv_expected and not evidence.counters_reset,  # else see `restarts`
        counted=True,
    ),
    Gate("guard_recomputed", guard_recomputed, _guard_missing, applies=_has_guard, counted=True),
    Gate("kv_connections", kv_connections, _guard_missing, applies=_has_guard, counted=True),
    Gate("guard_deadline", guard_deadline, _guard_missing, applies=_has_guard, counted=True),
    Gate("restarts", restarts, _restarts_missing),
    Gate(
        "roles",
        roles,
        _unless(lambda evidence: evidence.roles_changed is not None, "role_board_unreachable"),
        applies=lambda evidence: evidence.fluid,
    ),
    Gate("other_requests", other_requests, _other_requests_missing),
    Gate("preemptions", preemptions, _needs("preemptions"), counted=True),
    Gate(
        "prefix_cache",
        prefix_cache,
        _needs("prefix_cache_hits"),
        # decode-only is served without a prefix cache; no share states what a replay may find there
        applies=lambda evidence: not (evidence.decodes_only or evidence.replays),
        counted=True,
    ),
    Gate("cache_hits", cache_hits, _hits_missing, applies=lambda evidence: evidence.replays, counted=True),
    Gate("affinity", affinity, _affinity_missing, applies=lambda each: bool(each.by_session) and each.replays),
    Gate("decode_context", decode_context, _context_missing, applies=lambda evidence: evidence.decodes_only),
    Gate("client_saturation", client_saturation, _unless(_client_measured, "client_unmeasured")),
    Gate(
        "front_saturation",
        front_saturation,
        _unless(lambda evidence: evidence.run.front_cores, "front_unrecorded"),
        # With direct streaming what Ray exports is the router's, and a level ends before it is seen without a loss:
        # it hands on requests and no tokens.
        applies=lambda evidence: evidence.ingress_replicas is not None or bool(evidence.run.front_cores),
    ),
    Gate("lateness", lateness, _unless(lambda each: len(_known_lateness_s(each)), "due_times_unrecorded")),
    Gate(
        "dependencies",
        dependencies,
        _unless(lambda evidence: len(evidence.requests.replayed.after), "replay_recorded"),
        applies=lambda evidence: evidence.replays,
    ),
    Gate("clock", clock, _unless(_clocks_compared, "clocks_uncompared")),
    Gate("rehearsed_pace", rehearsed_pace, _pace_missing, applies=lambda each: each.run.rehearsal is not None),
    Gate("few_requests", few_requests, _short),
    Gate("steady_state", steady_state, _trend_missing),
)


CANARY = "canary"  # sent once, behind all levels of a sweep


def after_canary(validity: Validity, result: CanaryResult) -> Validity:
    """A level's validity with the canary's result after the sweep. It is unknown when answers became wrong, so a
    failed canary fails every level."""
    if result.equal is None:
        return validity.model_copy(
            update={"unchecked": {**validity.unchecked, CANARY: found("canary_not_compared", detail=result.detail)}}
        )
    if result.equal:
        return validity
    return validity.failing(found("answers_wrong", detail=result.detail))


TIMING_GATES = {"few_requests", "steady_state"}
"""Gates that need nothing but when requests came and went."""


def validate_level(
    evidence: Evidence, notes: tuple[Finding, ...] = (), *, moves_kv: bool = True, only: Collection[str] | None = None
) -> Validity:
    """Judge a level by every gate, or ``only`` some. ``moves_kv`` False: the deployment has no KV transfers.

    If KV transfers must be proven and the metrics cannot be read, ``kv_transfers`` fails: HTTP 200 does not prove a
    transfer.
    """
    findings: list[Finding] = []
    unchecked: dict[str, Finding] = {}
    for gate in GATES:
        if not gate.applies(evidence) or (gate.name == "kv_transfers" and not moves_kv):
            continue
        if only is not None and gate.name not in only:
            continue
        missing = gate.missing(evidence)
        if missing and gate.name == "kv_transfers" and evidence.kv_expected:
            findings.append(found("kv_transfers_unseen", why=missing.text))
        elif missing:
            unchecked[gate.name] = missing
        else:
            judged = list(gate.judge(evidence))
            if not judged and gate.counted and evidence.settling == "late":
                unchecked[gate.name] = found("counters_late")
            findings += judged
    notes = (*notes, *_behind_schedule(evidence), *_timelines(evidence))
    return Validity(findings=tuple(findings), unchecked=unchecked, notes=notes)


def _timelines(evidence: Evidence) -> Iterator[Finding]:
    """Timelines that lack, and contradictions in those that the servers sent. Where none are due, none is no
    finding."""
    timelines, answers = evidence.timelines, len(evidence.answered)
    if not answers or not (timelines or evidence.timelines_due):
        return
    whole = wrong = reads = 0
    worst_s = 0.0
    for timeline in timelines:
        whole += timeline.whole
        reads += sum(read.reads for read in timeline.wire)
        if timeline.err is not None:
            continue
        disorder_s, front_s = timeline.disorder_s, timeline.front_s or 0.0
        if disorder_s > DISORDER_S or front_s < FRONT_LEAST_S:
            wrong += 1
            worst_s = max(worst_s, disorder_s, -front_s)
    if whole < TIMELINES_LEAST * answers:
        yield found("timelines_lacking", whole=whole, answers=answers)
    if wrong:
        yield found("timelines_disordered", wrong=wrong, timelines=len(timelines), worst_ms=1e3 * worst_s)
    counted = evidence.transfer_delta("transfers")
    if counted is None or whole < answers or evidence.settling != "whole" or evidence.counters_reset:
        return
    if reads != counted:
        yield found("timelines_miss_reads", reads=reads, counted=counted)


def _behind_schedule(evidence: Evidence) -> Iterator[Finding]:
    """Notes on a load generator that was late, but not late enough to fail a gate."""
    load = evidence.run.load
    late_s = _known_lateness_s(evidence)
    if not isinstance(load, Open | Ramp) or not len(late_s):
        return
    p99_s = metrics.percentile(late_s, 99)
    if p99_s > NOTED_LATE_S:
        rate_rps = load.rate_rps if isinstance(load, Open) else max(load.start_rps, load.end_rps)
        yield found("behind_schedule", rate=rate_rps, late_ms=1000 * p99_s, limit_ms=1000 * NOTED_LATE_S)
