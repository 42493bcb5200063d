"""Every gate: silent on a clean level, loud on its own fault, alone; and unchecked where its data is missing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support import records as made

from pdlab.bench import gates
from pdlab.bench.gates import GATES, Evidence, validate_level
from pdlab.core.errors import BenchError
from pdlab.core.findings import found
from pdlab.core.lengths import parse_lengths
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.workload import Closed, Load, Open, Ramp, Replay, Workload
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import (
    CanaryResult,
    ClientLoad,
    EngineCounters,
    NixlCounters,
    ReplayedRequest,
    RequestRecord,
    Validity,
)
from pdlab.results.timeline import RequestTimeline

WORKLOAD = Workload(input_tokens=100, output_tokens=5)
NAMES = [gate.name for gate in GATES]


def request(arrival_s: float, ttft_s: float = 1.0, gaps: tuple[float, ...] = (0.25,) * 4, **more: Any) -> RequestRecord:
    usual = {"finish_s": arrival_s + ttft_s + sum(gaps), "itl_s": gaps, "lateness_s": 0.001}
    return made.record(arrival_s, ttft_s, tokens=1 + len(gaps), **usual | more)


def waves(count: int = 12, **more: Any) -> tuple[RequestRecord, ...]:
    """``count`` waves of two requests of 2 s."""
    return tuple(request(2.0 * wave, **more) for wave in range(count) for _ in range(2))


def changed(**changes: Any) -> tuple[RequestRecord, ...]:
    return (*waves()[:-1], request(22.0, **changes))


def engines(**counts: float) -> dict[str, EngineCounters]:
    clean = {"requests": 24.0, "prefix_cache_hits": 0.0, "preemptions": 0.0, "external_cache_hits": 2376.0}
    clean |= {"prefill_calls": 24.0, "prefill_retries": 3.0, "prefill_local": 0.0, "prefill_failures": 0.0}
    return {"decode": EngineCounters(**{**clean, **counts})}


def evidence(**changes: Any) -> Evidence:
    """A clean level of a PD deployment, and its changes."""
    clean: dict[str, Any] = {
        "records": waves(),
        "workload": WORKLOAD,
        "load": Closed(concurrency=2),
        "num_requests": 24,
        "kv_expected": True,
        "nixl_before": NixlCounters(bytes_transferred=10, transfers=1, failed_transfers=2, kv_expired_requests=1),
        "nixl_after": NixlCounters(bytes_transferred=90, transfers=25, failed_transfers=2, kv_expired_requests=1),
        "engines_before": engines(requests=0, external_cache_hits=0),
        "engines_after": engines(requests=changes.get("num_requests", 24)),
        "client": ClientLoad(cpu_share=0.3, loop_lag_s=0.002, clock_step_s=0.0001),
        "front_cores": {"ingress": 0.5, "proxy": 0.3},
        "ingress_replicas": 1,
    }
    fields = {**clean, **changes}
    requests = LevelData.of(fields.pop("records"))
    fields.setdefault("steady", metrics.steady(requests, fields["load"]))
    fields.setdefault("steady_window_s", metrics.steady_window(requests, fields["load"]))
    fields.setdefault("trend", metrics.trend(requests, fields["load"]))
    beside = {name: fields.pop(name) for name in Evidence.model_fields if name in fields}
    answered = len(requests.answered)
    more = {"completed": answered, "failed": fields["num_requests"] - answered, "whole": metrics.whole(requests)}
    run = made.run((), fields.pop("load"), label="pd-pack-p1xtp1-d1xtp1", **more | fields)
    return Evidence(run=run, requests=requests, **beside)


def test_a_clean_level_passes_every_gate() -> None:
    for workload in (WORKLOAD, WORKLOAD.model_copy(update={"mode": "decode-only"})):
        validity = validate_level(evidence(workload=workload))
        assert validity.valid and validity.failed_gates == () and validity.unchecked == {}, validity


NIXL = {"bytes_transferred": 90.0, "transfers": 25.0, "failed_transfers": 2.0, "kv_expired_requests": 1.0}
CLIENT = {"cpu_share": 0.3, "loop_lag_s": 0.002, "clock_step_s": 0.0}


def nixl(**changes: float | None) -> dict[str, Any]:
    return {"nixl_after": NixlCounters(**{**NIXL, **changes})}


GUARD = {"guard_receives": 1.0, "guard_recomputed": 2.0, "guard_deadlines": 0.0, "guard_errors": 0.0}


def guarded(**changes: float) -> dict[str, Any]:
    """Served with the KV guard, which did some things before the level."""
    before = {"bytes_transferred": 10, "transfers": 1, "failed_transfers": 2, "kv_expired_requests": 1}
    return {
        "nixl_before": NixlCounters(**before, **GUARD),
        "nixl_after": NixlCounters(**{**NIXL, **GUARD, "guard_receives": 25, **changes}),
    }


def client(**changes: float) -> dict[str, Any]:
    return {"client": ClientLoad(**{**CLIENT, **changes})}


def rehearsed(**sums: float) -> dict[str, Any]:
    """A rehearsal's level: 24 requests with TTFT of 1 s and 1 s of decode, by the model too; and its changes."""
    clean = {"modelled_requests": 24.0, "modelled_ttft_s": 24.0, "modelled_decode_s": 24.0, "modelled_late_s": 0.1}
    before = dict.fromkeys(clean, 0.0)
    return {
        "rehearsal": Rehearsal(slow_down=5),
        "engines_before": engines(requests=0, external_cache_hits=0, **before),
        "engines_after": engines(**{**clean, **sums}),
    }


def turns(foreseen: int | None = 0, **of_last: Any) -> dict[str, Any]:
    """A replay of two sessions of twelve requests, each of which is sent when the one before has ended; and what is
    changed of the last one."""
    records = []
    for wave in range(12):
        for session in "ab":
            parent = f"{session}{wave - 1}" if wave else None
            own = ReplayedRequest(
                id=f"{session}{wave}", session=session, turn=wave + 1, parent=parent, foreseen_tokens=foreseen,
                replica="r1",
            )  # fmt: skip
            records.append(request(2.0 * wave, replayed=own))
    last = records[-1].model_copy(update=of_last)
    return {"records": (*records[:-1], last), "load": Replay()}


UNSENT = ReplayedRequest(id="b11", session="b", turn=12, parent="b10", sent=False)


def replayed(record: RequestRecord, **changes: Any) -> RequestRecord:
    """With what is changed of its replay."""
    assert record.replayed
    return record.model_copy(update={"replayed": record.replayed.model_copy(update=changes)})


def replica_of(name: str, replica: str) -> ReplayedRequest:
    return ReplayedRequest(id=name, session=name[0], turn=12, parent=f"{name[0]}10", foreseen_tokens=0, replica=replica)


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("failed_requests", {"records": changed(error="HTTP 500", finish_s=None)}, "1 of 24 requests failed (first: HTTP"),
    ("failed_requests", {"records": changed(finish_s=None)}, "1 of 24 requests failed (first: no answer)"),
    ("failed_requests", {"num_requests": 25}, "24 of 25 requests were recorded"),
    (
        "failed_requests",
        turns(replayed=UNSENT, error="not sent: b10 failed", finish_s=None, first_token_s=None),
        "1 of 24 requests were not sent, because the requests before them have no answer",
    ),
    (
        "cache_hits",
        turns(replayed=ReplayedRequest(id="b11", session="b", turn=12, parent="b10", foreseen_bounds=(2400, 2400))),
        "0.0% of the prompt tokens came from the prefix cache; by vLLM's rules it is 100.0% to 100.0%",
    ),
    (
        "affinity",
        {**turns(replayed=replica_of("b11", "r2")), "by_session": ("decode",)},
        "several decode engines served 1 of 2 sessions",
    ),
    (
        "dependencies",
        turns(arrival_s=21.5, first_token_s=23.0, finish_s=24.0),
        "1 of 22 requests were sent before the answers that they wait for had ended (first: b11)",
    ),
    (
        "lateness",
        turns(lateness_s=0.4),
        "load generator late: requests of the replay were sent 308 ms late (p99, limit",
    ),
    ("token_counts", {"records": changed(input_tokens=99)}, "1 of 24 answers have a wrong input token count (99, not"),
    ("token_counts", {"records": changed(output_tokens=6)}, "1 of 24 answers have a wrong output token count (6, not"),
    ("kv_transfers", nixl(failed_transfers=5), "3 KV transfers failed"),
    ("kv_transfers", nixl(failed_notifications=1), "1 KV-transfer notifications failed"),
    ("kv_transfers", nixl(kv_expired_requests=2), "the KV blocks of 1 request expired before decode read them"),
    ("kv_transfers", nixl(bytes_transferred=10), "no KV bytes were transferred, by vLLM's counters"),
    ("kv_transfers", nixl(bytes_transferred=None), "no KV bytes were transferred, by vLLM's counters"),
    (
        "prefill_calls",
        {"engines_after": engines(prefill_retries=5)},
        "calls of prefill failed (0 had no",
    ),
    ("prefill_calls", {"engines_after": engines(prefill_local=4)}, "calls of prefill failed (0 had no"),
    ("prefill_calls", {"engines_after": engines(prefill_failures=1)}, "calls of prefill failed (0 had no"),
    (
        "guard_recomputed",
        guarded(guard_recomputed=5),
        "decode recomputed 3 prompts, because their KV cache did not arrive or the KV guard could not confirm it "
        "(24 receives)",
    ),
    (
        "kv_connections",
        guarded(guard_handshakes_renewed=2),
        "a connection between prefill and decode failed: 0 KV reads failed, 0 prompts were computed on decode because",
    ),
    ("kv_connections", guarded(guard_failed_reads=1), "a connection between prefill and decode failed: 0 KV reads fa"),
    ("guard_deadline", guarded(guard_deadlines=2), "the KV guard ended 2 KV receives at their deadline"),
    ("guard_deadline", guarded(guard_errors=1), "1 request failed, because late KV receives held the memory"),
    ("restarts", nixl(transfers=0), "an engine was restarted during the level: its counters decreased"),
    ("restarts", {"engines_before": engines(requests=30)}, "an engine was restarted during the level"),
    (
        "restarts",
        {"unpublished": ("r9",)},
        "a replica was replaced: r9 answers, but the launch neither started nor verified it",
    ),
    # What the published engines did not do, another did: no word of KV bytes.
    ("restarts", {"unpublished": ("r9",), **nixl(bytes_transferred=10)}, "a replica was replaced: r9 answers"),
    (
        "roles",
        {"fluid": True, "roles_changed": True},
        "the roles of the fluid pool were set by hand, so the label pd-pack-p1xtp1",
    ),
    ("other_requests", {"engines_after": engines(requests=60)}, "the decode engines finished 60 requests during"),
    ("other_requests", {"engines_after": engines(requests=25)}, "the decode engines finished 25 requests during"),
    ("other_requests", {"engines_after": engines(requests=9)}, "the decode engines finished 9 requests during the l"),
    (
        "other_requests",
        {"engines_after": {**engines(), "prefill": EngineCounters(requests=30)}},
        "the prefill engines finished 30 requests during the level, but this client sent 24",
    ),
    ("preemptions", {"engines_after": engines(preemptions=3)}, "engines preempted requests 3 times"),
    (
        "prefix_cache",
        {"engines_after": engines(prefix_cache_hits=240)},
        "10% of the prompt tokens came from the prefix",
    ),
    ("client_saturation", client(cpu_share=0.95), "load generator saturated: 0.95 of one core (limit 0.9)"),
    ("client_saturation", client(loop_lag_s=0.6), "load generator saturated: event loop late by 600 ms (p95, limit 2"),
    (
        "client_saturation",
        {**client(loop_lag_s=0.06), "records": waves(ttft_s=0.2)},
        "load generator saturated: event loop late by 60 ms (p95, limit 50 ms)",
    ),
    ("front_saturation", {"front_cores": {"ingress": 0.97}}, "ingress saturated: 0.97 of one core (limit 0.9); give"),
    ("front_saturation", {"front_cores": {"ingress": 1.9}, "ingress_replicas": 2}, "ingress saturated: 0.95 of one"),
    ("front_saturation", {"front_cores": {"ingress": 0.5, "proxy": 1.1}}, "proxy saturated: 1.10 of one core"),
    (
        "front_saturation",
        {"front_cores": {"router": 0.95}, "ingress_replicas": None},
        "router saturated: 0.95 of one core (limit 0.9); give --no-direct-streaming",
    ),
    (
        "lateness",
        {"records": waves(lateness_s=0.6)},
        "load generator late: requests were sent 600 ms after another one had left its place (p95, limit 500 ms, 25%",
    ),
    (
        "lateness",
        {"records": waves(40, lateness_s=0.3), "num_requests": 80, "load": Open(rate_rps=1.0)},
        "load generator late: requests were sent 300 ms after they were due (p95, limit 250 ms, 25% of the median TTFT",
    ),
    ("clock", client(clock_step_s=-0.2), "clock: the wall clock moved -0.200 s"),
    (
        "clock",
        {"records": changed(first_token_s=21.0)},
        "clock: the times of a request are not in order (22, 21, 24 s)",
    ),
    (
        "few_requests",
        {"records": waves(4), "num_requests": 8},
        "too few requests for a steady window: 9 must finish in",
    ),
    ("few_requests", {"load": Closed(concurrency=14)}, "too few requests for a steady window: 28 must finish in it"),
    (
        "rehearsed_pace",
        rehearsed(modelled_ttft_s=21.0),
        "this machine is too slow for the rehearsal: mean TTFT is 1e+03 ms at the client and 875 ms in the "
        "model (limit 10%)",
    ),
    (
        "rehearsed_pace",
        rehearsed(modelled_decode_s=23.0),
        "this machine is too slow for the rehearsal: mean decode time is 1e+03 ms at",
    ),
    (
        "rehearsed_pace",
        rehearsed(modelled_late_s=2.4),
        "this machine is too slow for the rehearsal: requests reached simulated engines",
    ),
]


@pytest.mark.parametrize(
    ("gate", "changes", "reason"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_gate_fires_on_its_fault_alone(gate: str, changes: dict[str, Any], reason: str) -> None:
    validity = validate_level(evidence(**changes))
    assert validity.failed_gates == (gate,), validity
    assert len(validity.reasons) == 1 and validity.reasons[0].startswith(reason), validity.reasons


@pytest.mark.parametrize(
    ("ttft_s", "gaps", "valid"),
    [(5.0, (1.5,) * 4, True), (0.2, (1.5,) * 4, False), (5.0, (0.05,) * 4, False), (5.0, (), True)],
    ids=["long", "short TTFT", "short decode", "one token"],
)
def test_lag_is_judged_by_what_it_is_measured_beside(ttft_s: float, gaps: tuple[float, ...], valid: bool) -> None:
    """100 ms spoil a TTFT of 200 ms and not one of 5 s."""
    workload = WORKLOAD.model_copy(update={"output_tokens": 1 + len(gaps)})
    slow = evidence(records=waves(ttft_s=ttft_s, gaps=gaps), workload=workload, **client(loop_lag_s=0.1))
    failed = validate_level(slow).failed_gates
    assert ("client_saturation" not in failed) == valid


def test_roles_that_cannot_be_read_are_unchecked_and_of_fluid_pools_alone() -> None:
    assert validate_level(evidence(fluid=True, roles_changed=False)) == validate_level(evidence())
    assert validate_level(evidence(fluid=True)).unchecked == {"roles": found("role_board_unreachable")}


def test_a_few_late_requests_are_in_the_figures_and_fail_no_level() -> None:
    late = (*waves()[:-1], request(22.0, lateness_s=5.0))
    assert validate_level(evidence(records=late)).valid


def test_a_replay_is_sent_less_than_50_ms_late() -> None:
    def fails(late_s: float) -> bool:
        records = tuple(each.model_copy(update={"lateness_s": late_s}) for each in turns()["records"])
        return "lateness" in validate_level(evidence(**{**turns(), "records": records})).failed_gates

    assert [fails(late_s) for late_s in (0.0, 0.049, 0.05, 0.06)] == [False, False, True, True]


def test_a_schedule_that_is_not_kept_is_noted() -> None:
    def notes(p99_s: float, load: Any) -> list[tuple[str, Any]]:
        late = [request(0.5 * i, lateness_s=p99_s if i % 50 < 2 else 0.001) for i in range(100)]
        judged = validate_level(evidence(records=tuple(late), load=load, num_requests=100))
        assert "lateness" not in judged.failed_gates
        return [(note.code, note.numbers["rate"]) for note in judged.notes]

    assert notes(0.03, Open(rate_rps=200)) == [("behind_schedule", 200)]
    assert notes(0.019, Open(rate_rps=200)) == [] == notes(0.03, Closed(concurrency=2))
    assert notes(0.03, Ramp(start_rps=1, end_rps=8)) == [("behind_schedule", 8)]


def test_a_replay_has_no_steady_state_and_no_share_of_cached_tokens_by_itself() -> None:
    validity = validate_level(evidence(**turns(foreseen=None), engines_after=engines(prefix_cache_hits=2000)))
    assert validity.valid
    assert {name: each.code for name, each in validity.unchecked.items()} == {
        "cache_hits": "hits_incomputable",
        "few_requests": "replay_load",
        "steady_state": "replay_load",
    }


def test_hits_may_differ_from_the_forecast_by_two_points() -> None:
    """Of 2,400 prompt tokens 600 are foreseen."""
    for hits, failed in ((600, ()), (645, ()), (555, ()), (650, ("cache_hits",)), (550, ("cache_hits",))):
        level = evidence(**turns(foreseen=25), engines_after=engines(prefix_cache_hits=hits))
        assert validate_level(level).failed_gates == failed


def test_hits_within_bounds_are_reported_and_not_judged() -> None:
    """Of each prompt of 100 tokens between 20 and 60 were cached."""

    def judged(hits: int) -> Any:
        records = [replayed(record, foreseen_bounds=(20, 60)) for record in turns(foreseen=None)["records"]]
        after = engines(prefix_cache_hits=hits)
        return validate_level(evidence(records=records, load=Replay(), engines_after=after))

    for hits in (480, 960, 1440):
        within = judged(hits)
        assert within.valid
        assert within.unchecked["cache_hits"] == found("hits_bounded", share=hits / 2400, least=0.2, most=0.6)
    assert within.unchecked["cache_hits"].text.endswith("; by vLLM's rules it is 20.0% to 60.0%")
    for hits in (400, 1500):
        assert judged(hits).failed_gates == ("cache_hits",)
        assert "cache_hits" not in judged(hits).unchecked


def test_what_comes_from_memory_of_the_host_is_a_hit_of_who_computes_prompts() -> None:
    def failed(pool: str) -> tuple[str, ...]:
        counted = {pool: EngineCounters(requests=24.0, prefix_cache_hits=250.0, external_cache_hits=350.0)}
        return validate_level(evidence(**turns(foreseen=25), engines_after=counted, engines_before={})).failed_gates

    assert "cache_hits" not in failed("prefill") and "cache_hits" not in failed("collocated")
    assert "cache_hits" in failed("decode"), "what decode gets from a connector was just computed"


def test_hits_of_a_fluid_pool_are_those_that_servers_reported() -> None:
    """Its counters are of prefill and decode together."""

    def level(*cached: int | None) -> Any:
        sent = turns(foreseen=25)["records"]
        records = [replayed(record, cached_tokens=cached[at % len(cached)]) for at, record in enumerate(sent)]
        return validate_level(
            evidence(records=records, load=Replay(), fluid=True, engines_after=engines(prefix_cache_hits=2000))
        )

    assert level(25).failed_gates == level(26, 24).failed_gates == () and "cache_hits" not in level(25).unchecked
    assert level(50, 25).failed_gates == ("cache_hits",)
    assert level(25, None).unchecked["cache_hits"] == found("hits_unreported")


def test_sessions_of_pools_that_do_not_keep_them_may_move() -> None:
    moved = turns(replayed=replica_of("b11", "r2"))
    assert validate_level(evidence(**moved)).valid
    prefill = validate_level(evidence(**moved, by_session=("prefill",)))
    assert prefill.valid and prefill.unchecked["affinity"] == found(
        "replicas_unnamed", named=0, requests=24, pool="prefill"
    )
    fluid = validate_level(evidence(**moved, by_session=("decode",), fluid=True))
    assert fluid.unchecked["affinity"] == found("roles_move_sessions")
    assert "affinity" not in fluid.failed_gates, "a session moves when its engine stops to decode"


@pytest.mark.parametrize(("unnamed", "judged"), [(1, True), (2, False)])
def test_sessions_stuck_if_nearly_all_replicas_are_named(unnamed: int, judged: bool) -> None:
    """Of 24 requests 95 % are 22.8: one may be without, two may not."""
    level = turns()
    records = list(level["records"])
    for index in range(unnamed):
        records[index] = replayed(records[index], replica=None)
    validity = validate_level(evidence(**{**level, "records": tuple(records)}, by_session=("decode",)))
    assert validity.valid and ("affinity" not in validity.unchecked) is judged
    if not judged:
        assert validity.unchecked["affinity"].numbers == {"named": 22, "requests": 24, "pool": "decode"}
    records[-1] = records[-1].model_copy(update={"replayed": replica_of("b11", "r2")})
    moved = validate_level(evidence(**{**level, "records": tuple(records)}, by_session=("decode",)))
    assert moved.failed_gates == ("affinity",), "a session that moved is one, however few are named"


def test_a_failed_request_and_what_follows_it_fail_one_gate() -> None:
    records = list(turns()["records"])
    records[-3] = records[-3].model_copy(update={"error": "HTTP 500", "finish_s": None})
    gone = {"replayed": UNSENT, "error": "not sent: b10 failed", "finish_s": None, "first_token_s": None}
    records[-1] = records[-1].model_copy(update=gone)
    validity = validate_level(evidence(records=tuple(records), load=Replay()))
    assert validity.failed_gates == ("failed_requests",)
    assert [each.code for each in validity.findings] == ["requests_failed", "follow_ups_unsent"]
    assert validity.findings[0].numbers == {"failed": 1, "requests": 24, "first": "HTTP 500"}


def test_a_recorded_replay_has_nothing_that_waits() -> None:
    records = tuple(each.model_copy(update={"replayed": None}) for each in turns()["records"])
    unchecked = validate_level(evidence(records=records, load=Replay())).unchecked
    assert unchecked["dependencies"] == found("replay_recorded")


def test_every_gate_is_in_the_list_of_faults() -> None:
    tested = {gate for gate, _, _ in FAULTS} | {"decode_context", "steady_state"}
    assert tested == set(NAMES)


def test_a_rehearsal_is_judged_by_the_model_alone_where_it_has_the_requests() -> None:
    assert validate_level(evidence(**rehearsed())) == validate_level(evidence())
    unstamped = validate_level(evidence(**rehearsed(modelled_requests=3.0)))
    assert unstamped.valid
    assert unstamped.unchecked == {"rehearsed_pace": found("sending_times_unknown", known=3.0, answers=24)}
    silent = evidence(**{**rehearsed(), "engines_after": engines(), "engines_before": engines(requests=0)})
    assert set(validate_level(silent).unchecked) == {"rehearsed_pace"}


def test_decode_only_must_have_filled_its_context() -> None:
    decode = WORKLOAD.model_copy(update={"mode": "decode-only"})
    computed = evidence(workload=decode, engines_after=engines(external_cache_hits=1000))
    assert validate_level(computed).reasons == (
        "only 1000 of 2376 context tokens were filled; the engines computed the others",
    )
    assert validate_level(evidence(engines_after=engines(external_cache_hits=1000))).valid


def test_a_declared_prefix_may_come_from_the_cache() -> None:
    cached = engines(prefix_cache_hits=0.5 * 2400)
    declared = WORKLOAD.model_copy(update={"shared_prefix_tokens": 50})
    assert validate_level(evidence(engines_after=cached, workload=declared)).valid
    less = WORKLOAD.model_copy(update={"shared_prefix_tokens": 40})
    assert validate_level(evidence(engines_after=cached, workload=less)).failed_gates == ("prefix_cache",)


@pytest.mark.parametrize(
    ("hits", "external", "shares"),
    [
        ({"prefill": 1200, "decode": 1200}, {}, []),
        ({"prefill": 1500, "decode": 1200}, {}, [0.625]),
        ({"fluid": 2400}, {}, []),
        ({"fluid": 2640}, {}, [0.55]),
        # What prefill loads from a store is cached; what decode pulls is not.
        ({"prefill": 1200, "decode": 1200}, {"prefill": 300, "decode": 1200}, [0.625]),
    ],
)
def test_both_engines_of_a_request_find_a_declared_prefix(
    hits: dict[str, float], external: dict[str, float], shares: list[float]
) -> None:
    declared = WORKLOAD.model_copy(update={"shared_prefix_tokens": 50})
    after = {
        pool: EngineCounters(prefix_cache_hits=n, external_cache_hits=external.get(pool)) for pool, n in hits.items()
    }
    level = evidence(engines_before={}, engines_after=after, workload=declared)
    assert [each.numbers for each in gates.prefix_cache(level)] == [{"share": n, "declared": 0.5} for n in shares]


def test_counts_that_the_server_does_not_report_are_not_checked() -> None:
    """Those of the client are its own, so equal ones prove nothing and others are no fault."""
    silent = tuple(each.model_copy(update={"usage": False}) for each in waves())
    for records, others in ((silent, 0), ((*silent[:-1], silent[-1].model_copy(update={"output_tokens": 4})), 1)):
        validity = validate_level(evidence(records=records))
        assert validity.valid, validity.reasons
        reason = validity.unchecked["token_counts"]
        assert reason.numbers == {"unreported": 24, "answers": 24, "others": others}
    told = changed(output_tokens=6)
    for records in (told, (silent[0], *told[1:])):  # what is known suffices
        validity = validate_level(evidence(records=records))
        assert validity.failed_gates == ("token_counts",) and "token_counts" not in validity.unchecked


@pytest.mark.parametrize(
    ("flag", "load", "words"),
    [
        (None, Closed(concurrency=14), "give more prompts per level (--prompts-per-level)"),
        (None, Open(rate_rps=1), "hold the rate longer (--hold-s)"),
        ("prompts_per_level", Open(rate_rps=1), "give more prompts per level (--prompts-per-level)"),
        ("soak_s", Closed(concurrency=14), "hold the load longer (--soak)"),
    ],
)
def test_a_level_that_is_too_short_names_the_flag_in_use(flag: Any, load: Any, words: str) -> None:
    (reason,) = gates.few_requests(evidence(load=load, length_setting=flag, steady=None))
    assert reason.text.endswith(f"; {words}")


class TestVariedLengths:
    """Each request is judged against its own lengths, not against the nominal lengths."""

    WORKLOAD = WORKLOAD.model_copy(update={"lengths": parse_lengths("uniform:0.5-1.5")})

    def test_answers_as_long_as_requested_are_right(self) -> None:
        short = request(22.0, gaps=(0.5, 0.5), input_tokens=60, requested=(60, 3))
        records = (*waves(requested=(100, 5))[:-1], short)
        assert validate_level(evidence(records=records, workload=self.WORKLOAD)).valid

    def test_the_nominal_length_is_wrong_where_another_was_requested(self) -> None:
        records = (*waves(requested=(100, 5))[:-1], request(22.0, requested=(101, 4)))
        judged = validate_level(evidence(records=records, workload=self.WORKLOAD))
        assert judged.failed_gates == ("token_counts",)
        assert judged.reasons == (
            "1 of 24 answers have a wrong input token count (100, not 101)",
            "1 of 24 answers have a wrong output token count (5, not 4)",
        )

    def test_context_and_prefix_are_those_of_the_requests(self) -> None:
        records = tuple(r.model_copy(update={"input_tokens": 50, "requested": (50, 5)}) for r in waves())
        decode = self.WORKLOAD.model_copy(update={"mode": "decode-only"})
        filled = engines(external_cache_hits=24 * 49)
        assert validate_level(evidence(records=records, workload=decode, engines_after=filled)).valid
        less = engines(external_cache_hits=24 * 40)
        assert validate_level(evidence(records=records, workload=decode, engines_after=less)).reasons == (
            "only 960 of 1176 context tokens were filled; the engines computed the others",
        )
        shared = self.WORKLOAD.model_copy(update={"shared_prefix_tokens": 40})
        cached = engines(prefix_cache_hits=24 * 40)
        assert validate_level(evidence(records=records, workload=shared, engines_after=cached)).valid
        assert validate_level(evidence(records=waves(), workload=shared, engines_after=cached)).valid
        more = engines(prefix_cache_hits=24 * 45)
        assert validate_level(evidence(records=records, workload=shared, engines_after=more)).failed_gates == (
            "prefix_cache",
        )

    def test_a_warm_up_is_of_typical_length(self) -> None:
        workload = WORKLOAD.model_copy(update={"lengths": parse_lengths("uniform:0.5-1.0")})
        assert workload.typical == (75, 4)
        right = [request(0.0, gaps=(0.25,) * 3, input_tokens=75)]
        assert list(gates.judge_warm_up(LevelData.of(right), workload)) == []
        with pytest.raises(BenchError, match="wrong input token count \\(100, not 75\\)"):
            list(gates.judge_warm_up(LevelData.of([request(0.0, gaps=(0.25,) * 3)]), workload))


def test_what_cannot_be_judged_is_unchecked_not_passed() -> None:
    blind = evidence(
        records=waves(lateness_s=None),
        kv_expected=False,
        nixl_before=None,
        nixl_after=None,
        engines_before={},
        engines_after={},
        client=None,
    )
    validity = validate_level(blind)
    assert validity.valid
    counted = {"kv_transfers", "restarts", "other_requests", "preemptions", "prefix_cache"}
    gates = counted | {"client_saturation", "lateness", "clock"}
    assert set(validity.unchecked) == gates
    assert "kv_transfers" not in validate_level(blind, moves_kv=False).unchecked


def test_how_calls_of_prefill_failed_is_reported() -> None:
    after = engines(prefill_timeouts=1, prefill_retries=5, prefill_local=1)
    (reason,) = validate_level(evidence(engines_after=after)).reasons
    assert "(1 had no answer within --prefill-timeout-s)" in reason
    assert "their prompts were 2 sent to another prefill replica, 1 computed on decode;" in reason


def test_unreadable_counters_where_kv_must_move_are_a_failure() -> None:
    validity = validate_level(evidence(counters_error="gone"))
    assert validity.reasons == ("KV-transfer counters could not be read (gone)",)
    assert set(validity.unchecked) == {"prefill_calls", "restarts", "other_requests", "preemptions", "prefix_cache"}


def test_requests_that_the_client_gave_up_on_may_or_may_not_finish() -> None:
    gave_up = changed(error="no complete answer within 2 s", finish_s=None)
    for finished in (23, 24):
        judged = validate_level(evidence(records=gave_up, engines_after=engines(requests=finished)))
        assert judged.failed_gates == ("failed_requests",)


def test_late_counters_pass_nothing_and_accuse_nobody() -> None:
    few = {"engines_after": engines(requests=20), "workload": WORKLOAD.model_copy(update={"mode": "decode-only"})}
    counted = {"kv_transfers", "prefill_calls", "other_requests", "preemptions", "decode_context"}
    late = validate_level(evidence(**few, settling="late"))
    assert late.valid and set(late.unchecked) == counted, late
    assert validate_level(evidence(**few, settling="short")).failed_gates == ("other_requests",)
    found = validate_level(evidence(**nixl(failed_transfers=5), settling="late"))
    assert found.failed_gates == ("kv_transfers",), "what was counted was counted"
    assert "prefix_cache" in found.unchecked


def test_prefill_engines_may_have_nothing_to_do() -> None:
    """Where decode has the prompt in its cache, or computes it."""
    both = {**engines(), "prefill": EngineCounters(requests=0)}
    assert validate_level(evidence(engines_after=both)).valid


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engines_after": {"decode": EngineCounters(preemptions=0.0)}}, "requests_not_counted"),
        ({"engines_before": {}, "nixl_before": None}, "metrics_unread_before"),
        ({"engines_after": {"collocated": EngineCounters(requests=60.0)}}, "pools_unknown"),
    ],
)
def test_requests_of_others_that_cannot_be_counted(changes: dict[str, Any], why: str) -> None:
    validity = validate_level(evidence(**changes))
    assert "other_requests" not in validity.failed_gates and validity.unchecked["other_requests"].code == why


def test_smoke_and_ramp_need_no_steady_state() -> None:
    smoke = validate_level(evidence(records=waves(4), num_requests=8, smoke=True))
    ramp = validate_level(evidence(load=Ramp(start_rps=1, end_rps=4)))
    for validity in (smoke, ramp):
        assert validity.valid and set(validity.unchecked) == {"few_requests", "steady_state"}


def in_turns(longer: float, rounds: int) -> Evidence:
    """Turns of 60 s at 2 requests/s: answers of 3 s, and then of 12 s; at the end ``longer`` seconds more."""
    workload = WORKLOAD.model_copy(update={"lengths": parse_lengths("mixes:1000:50,200:200,every=60")})
    moments = [0.5 * number for number in range(rounds * 240)]
    lengths = {0: (1000, 50), 1: (200, 200)}
    records = []
    for arrival_s in moments:
        prompt, answer = lengths[int(arrival_s // 60) % 2]
        tpot_s = 0.06 + longer * arrival_s / moments[-1] / answer
        records.append(
            request(
                arrival_s, gaps=(tpot_s,) * (answer - 1), input_tokens=prompt, requested=(prompt, answer), ttft_s=0.1
            )
        )
    return evidence(records=tuple(records), load=Open(rate_rps=2), num_requests=len(moments), workload=workload)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_mixes_that_take_turns_are_compared_each_with_itself(rounds: int) -> None:
    """What is in flight, and how long answers take, follows the mix."""
    assert list(gates.steady_state(in_turns(0.0, rounds))) == []
    (piled,) = gates.steady_state(in_turns(60.0 * rounds, rounds))
    assert (piled.code, piled.numbers["which"]) == ("answers_take_longer", " to 1000:50")


def closed_loop(
    rng: random.Random, concurrency: int, requests: int, drift: float, spread: float
) -> list[RequestRecord]:
    """A closed loop of gamma-distributed service times whose mean grows by ``drift`` over the run."""
    free = [0.0] * concurrency
    records = []
    for number in range(requests):
        slot = min(range(concurrency), key=free.__getitem__)
        shape = 1 / spread**2
        service_s = rng.gammavariate(shape, 1 / shape) * (1 + drift * number / requests)
        records.append(request(free[slot], ttft_s=0.2 * service_s, gaps=(0.2 * service_s,) * 4))
        free[slot] += service_s
    return records


def drifts(records: list[RequestRecord], load: Load) -> bool:
    judged = evidence(records=tuple(records), load=load, num_requests=len(records), steady=None)
    assert judged.run.trend is not None or isinstance(load, Open)
    return bool(list(gates.steady_state(judged)))


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_steady_closed_loops_are_not_called_drifting(concurrency: int, spread: float) -> None:
    load, requests = Closed(concurrency=concurrency), 10 * concurrency + 20
    loops = [closed_loop(random.Random(seed), concurrency, requests, 0.0, spread) for seed in range(60)]
    assert sum(drifts(records, load) for records in loops) <= 1


@pytest.mark.parametrize("concurrency", [2, 8])
def test_drifting_closed_loops_are_found(concurrency: int) -> None:
    load = Closed(concurrency=concurrency)
    loops = [closed_loop(random.Random(seed), concurrency, 20 * concurrency, 1.5, 0.1) for seed in range(20)]
    assert sum(drifts(records, load) for records in loops) >= 19


def queue(rng: random.Random, rate: float, served: float, requests: int) -> list[RequestRecord]:
    """Poisson arrivals at ``rate`` before ``servers`` that together serve ``served`` requests/s."""
    servers = 8
    free = [0.0] * servers
    clock = 0.0
    records = []
    for _ in range(requests):
        clock += rng.expovariate(rate)
        slot = min(range(servers), key=free.__getitem__)
        begins = max(clock, free[slot])
        service_s = servers / served
        free[slot] = begins + service_s
        records.append(request(clock, ttft_s=begins - clock + 0.2 * service_s, gaps=(0.2 * service_s,) * 4))
    return records


def test_sustained_open_loops_are_not_called_drifting_and_overload_is() -> None:
    load = Open(rate_rps=10)
    steady = [queue(random.Random(seed), 10, 14, 200) for seed in range(60)]
    overload = [queue(random.Random(seed), 10, 7, 200) for seed in range(20)]
    assert sum(drifts(records, load) for records in steady) <= 1
    assert sum(drifts(records, load) for records in overload) >= 19
    busy = [queue(random.Random(seed), 10, 11, 600) for seed in range(40)]
    slightly = [queue(random.Random(seed), 10, 9, 600) for seed in range(40)]
    assert sum(drifts(records, load) for records in busy) <= 1, "a minute at 91 % of what is served"
    assert sum(drifts(records, load) for records in slightly) >= 26, "a minute at 111 %"


def test_long_answers_are_no_overload() -> None:
    """A server without any limit, whose answers take long against the level."""
    for e2el_s, seconds in ((0.4, 20), (4.0, 20), (8.0, 20), (19.0, 20)):
        for seed in range(10):
            rng, clock, records = random.Random(seed), 0.0, []
            while (clock := clock + rng.expovariate(10)) < seconds:
                records.append(request(clock, ttft_s=0.2 * e2el_s, gaps=(0.2 * e2el_s,) * 4))
            assert not drifts(records, Open(rate_rps=10))
            steady = metrics.steady(LevelData.of(records), Open(rate_rps=10))
            assert (steady is None) == (e2el_s > 6)
            assert steady is None or 7 < steady.requests_per_s < 13


def test_a_rate_without_a_window_must_be_held_longer_or_is_too_high() -> None:
    load = Open(rate_rps=10)
    far = validate_level(evidence(records=tuple(queue(random.Random(1), 10, 4, 200)), load=load, num_requests=200))
    assert far.failed_gates == ("few_requests", "steady_state")
    assert "hold the rate longer (--hold-s)" in far.reasons[0] and "the rate is above the capacity" in far.reasons[1]


def test_a_number_in_flight_that_is_not_rate_times_time_in_the_system() -> None:
    records = [request(0.5 * i) for i in range(200)]
    load = Open(rate_rps=2)
    trend = metrics.trend(LevelData.of(records), load)
    assert trend is not None
    clean = evidence(records=tuple(records), load=load, num_requests=200)
    assert validate_level(clean).valid
    wrong = trend.model_copy(update={"in_flight_mean": 8.0})
    judged = validate_level(evidence(records=tuple(records), load=load, num_requests=200, trend=wrong))
    assert judged.failed_gates == ("steady_state",) and judged.reasons[0].endswith("is 4.0 (Little's law)")


def test_clock_steps_within_what_ntp_slews_are_fine() -> None:
    slewed = evidence(**client(clock_step_s=gates.CLOCK_SLACK_S))
    assert validate_level(slewed).valid


def test_two_ingress_replicas_may_use_a_core_each_and_what_was_not_seen_is_unchecked() -> None:
    assert validate_level(evidence(front_cores={"ingress": 1.7}, ingress_replicas=2)).valid
    assert "front_saturation" in validate_level(evidence(front_cores={})).unchecked
    assert validate_level(evidence(front_cores={}, ingress_replicas=None)).unchecked == {}, "direct streaming"


class TestAfterCanary:
    """What is sent once behind a sweep judges each of its levels."""

    CLEAN = Validity(notes=(found("decode_approximated"),))

    def test_wrong_ones_fail_the_level(self) -> None:
        judged = gates.after_canary(self.CLEAN, CanaryResult(equal=False, compared=3, detail="prompt 1 differs"))
        assert (judged.valid, judged.failed_gates, judged.notes) == (False, ("canary",), self.CLEAN.notes)
        assert judged.reasons == ("the deployment gave wrong answers after the sweep: prompt 1 differs",)

    def test_none_are_no_proof(self) -> None:
        judged = gates.after_canary(self.CLEAN, CanaryResult(equal=None, detail="no answer"))
        assert judged.valid and judged.unchecked == {"canary": found("canary_not_compared", detail="no answer")}
        assert gates.after_canary(self.CLEAN, CanaryResult(equal=True, compared=3, detail="3 of 3")) == self.CLEAN


def test_the_guards_gates_apply_where_there_is_a_guard() -> None:
    names = {"guard_recomputed", "guard_deadline", "kv_connections"}
    assert validate_level(evidence(**guarded())).valid
    restarted = {**guarded(), "engines_before": engines(requests=30)}
    assert names <= set(validate_level(evidence(**restarted)).unchecked)
    without = {"engines_before": engines(requests=30)}
    assert not names & set(validate_level(evidence(**without)).unchecked)


def timeline(number: int = 0, **changes: Any) -> RequestTimeline:
    """Of a request whose KV cache was read once."""
    order = ("call", "answer", "queued", "admitted", "posted", "seen", "reported", "usable", "scheduled", "first")
    marks = {mark: float(at) for at, mark in enumerate((*order, "first_byte"))}
    prefill = {"total": 0.8, "queue": 0.1, "prefill": 0.5}
    fields = {"id": str(number), "path": "pd", "t": marks, "p": prefill, "wire": [(0, 4, 5, 900.0, 64)]}
    return RequestTimeline.model_validate({**fields, "ttft_s": 0.02, **changes})


@pytest.mark.parametrize(
    ("timelines", "codes"),
    [
        ([], []),
        ([timeline(number) for number in range(24)], []),
        ([timeline(number) for number in range(23)], ["timelines_lacking"]),
        ([timeline(number, err="no") for number in range(24)], ["timelines_lacking"]),
        ([timeline(number, wire=[]) for number in range(24)], ["timelines_miss_reads"]),
        (
            [*(timeline(number) for number in range(23)), timeline(t={**timeline().t, "seen": 3.5})],
            ["timelines_disordered"],
        ),
        ([*(timeline(number) for number in range(23)), timeline(ttft_s=0.0085)], ["timelines_disordered"]),
    ],
    ids=["none", "whole", "one lacks", "all lack a mark", "no reads", "out of order", "longer than the client's"],
)
def test_timelines_that_contradict_something_are_noted(timelines: list[RequestTimeline], codes: list[str]) -> None:
    validity = validate_level(evidence(timelines=tuple(timelines)))
    assert validity.valid and [note.code for note in validity.notes] == codes


@pytest.mark.parametrize(("due", "codes"), [(True, ["timelines_lacking"]), (False, [])])
def test_no_timelines_at_all_are_noted_where_they_are_due(due: bool, codes: list[str]) -> None:
    validity = validate_level(evidence(timelines_due=due))
    assert validity.valid and [note.code for note in validity.notes] == codes
    assert all(note.text.startswith("0 of 24 answered requests") for note in validity.notes)
    nobody_answered = evidence(timelines_due=due, records=tuple(request(2.0 * at, error="x") for at in range(24)))
    assert not validate_level(nobody_answered).notes
