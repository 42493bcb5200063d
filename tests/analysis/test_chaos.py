"""Recovery, outcomes around a fault, what healthy replicas could serve, throughput, memory: by hand and by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chaos import example, fault, request, run

from pdlab.analysis import chaos as analysis
from pdlab.results.chaos import REQUEST_OUTCOMES, Chaos, ChaosRequest, ChaosSample, InjectedFault, RequestOutcome

EXAMPLE = example()


def made(requests: list[ChaosRequest], faults: list[InjectedFault], loaded_s: float = 40.0) -> Chaos:
    return EXAMPLE._replace(requests=tuple(requests), faults=tuple(faults), samples=(), run=run(loaded_s=loaded_s))


class TestRecovery:
    def test_first_of_the_right_ones_in_a_row(self) -> None:
        requests = [request(0, 11, 12), request(1, 12, 13, "error"), *(request(i, 12 + i, 12.5 + i) for i in (2, 3, 4))]
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 3) == pytest.approx(4.5)
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 1) == pytest.approx(2.0)
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 4) is None

    def test_a_hang_that_ends_late_breaks_the_row_where_it_was_sent(self) -> None:
        requests = [request(0, 10.5, 70.5, "hang"), *(request(i, 11 + i, 11.5 + i) for i in range(1, 4))]
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 3) == pytest.approx(2.5)
        requests[0] = request(0, 13.5, 73.5, "hang")
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 3) is None

    def test_what_is_answered_while_the_fault_goes_on_is_no_recovery(self) -> None:
        """A raylet was killed, and its engine answered for a second before it noticed."""
        requests = [request(i, 10 + i * 0.1, 10.1 + i * 0.1) for i in range(5)]
        requests += [request(5 + i, 12 + i, 12.5 + i, "error") for i in range(4)]
        requests += [request(9 + i, 20 + i, 20.5 + i) for i in range(3)]
        assert analysis.recovery_s(fault(1, "kill_raylet", 10, 18), requests, 3) == pytest.approx(10.5)

    def test_in_flight_at_the_fault_and_leaving_clients_do_not_count(self) -> None:
        requests = [request(0, 9.0, 11.0), request(1, 11, 12), request(2, 11.5, 11.8, "left"), request(3, 12, 13)]
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 2) == pytest.approx(2.0)
        assert analysis.recovery_s(fault(1, "k", 10, 10), requests, 3) is None


class TestOutcomes:
    def test_by_hand(self) -> None:
        first, second = analysis.fault_outcomes(EXAMPLE)
        assert first.outcomes == {"right": 1, "error": 2, "hang": 0, "wrong": 1, "left": 0}
        assert first.recovery_s == pytest.approx(6.3)
        assert first.slowest_error_s == pytest.approx(0.6), "from when it was sent, which was after the fault"
        assert second.outcomes["hang"] == 1 and second.outcomes["left"] == 1 and second.requests == 2
        assert second.recovery_s == pytest.approx(5.9)

    def test_skipped_ones_are_not_counted(self) -> None:
        assert [each.fault.kind for each in analysis.fault_outcomes(EXAMPLE)] == [
            "kill_prefill_before_read",
            "stop_prefill_engine",
        ]

    def test_one_that_never_recovers_ends_where_the_next_begins(self) -> None:
        requests = [request(i, 10 + i, 10.5 + i, "error") for i in range(20)]
        first, second = analysis.fault_outcomes(made(requests, [fault(1, "a", 10, 10), fault(2, "b", 15, 15)]))
        assert first.outcomes["error"] == 5 and second.outcomes["error"] == 15
        assert first.recovery_s is None and second.recovery_s is None

    def test_what_comes_after_the_next_fault_is_no_recovery_from_the_one_before(self) -> None:
        requests = [request(i, 10 + i, 10.5 + i, "error") for i in range(50)]
        requests += [request(i, 10 + i, 10.5 + i) for i in range(50, 60)]
        faults = [fault(1, "a", 10, 10), fault(2, "b", 40, 40)]
        first, second = analysis.fault_outcomes(made(requests, faults))
        assert (first.recovery_s, first.overtaken, first.never) == (None, True, False)
        assert (second.recovery_s, second.overtaken, second.never) == (pytest.approx(20.5), False, False)
        assert first.over_s == pytest.approx(60.5), "it may be what broke requests until then"
        kinds = analysis.by_kind([first, second])
        assert [(kind.overtaken, kind.never, kind.recoveries_s) for kind in kinds] == [
            (1, 0, ()),
            (0, 0, (pytest.approx(20.5),)),
        ]

    @pytest.mark.parametrize(("acts", "overtaken"), [(("40.00 s stop",), True), ((), False)])
    def test_a_fault_that_failed_halfway_is_the_next_one(self, acts: tuple[str, ...], overtaken: bool) -> None:
        requests = [request(i, 10 + i, 10.5 + i, "error" if i < 50 else "right") for i in range(60)]
        failed = fault(2, "b", 40, 40).model_copy(update={"outcome": "failed" if acts else "skipped", "acts": acts})
        (first,) = analysis.fault_outcomes(made(requests, [fault(1, "a", 10, 10), failed]))
        assert first.overtaken is overtaken and (first.recovery_s is None) is overtaken

    @pytest.mark.parametrize(("right", "dead"), [((), True), ((3,), True), ((17,), False), ((19,), False)])
    def test_dead_at_the_end(self, right: tuple[int, ...], dead: bool) -> None:
        requests = [request(i, i, 0.5 + i, "right" if i in right else "error") for i in range(20)]
        requests += [request(20 + i, 20 + i, 21 + i, "left") for i in range(5)]
        assert analysis.dead_at_end(made(requests, [])) is dead, "the last three count, without those that left"

    def test_kinds(self) -> None:
        kinds = analysis.by_kind(analysis.fault_outcomes(EXAMPLE))
        assert [kind.kind for kind in kinds] == ["kill_prefill_before_read", "stop_prefill_engine"]
        assert [kind.never for kind in kinds] == [0, 0]
        assert analysis.faulted(EXAMPLE) == 6


outcomes = st.sampled_from(REQUEST_OUTCOMES)
requests_drawn = st.lists(st.tuples(st.floats(0, 60), st.floats(0, 30), outcomes), max_size=60).map(
    lambda rows: [request(i, round(a, 3), round(a + b, 3), outcome) for i, (a, b, outcome) in enumerate(rows)]
)
faults_drawn = st.lists(st.tuples(st.floats(0, 60), st.floats(0, 10), st.booleans()), max_size=6).map(
    lambda rows: [fault(i, f"k{i % 2}", round(a, 3), round(a + b, 3), spared=s) for i, (a, b, s) in enumerate(rows)]
)


@pytest.mark.property
@given(requests_drawn, faults_drawn)
def test_no_request_is_invented_or_lost(requests: list[ChaosRequest], faults: list[InjectedFault]) -> None:
    chaos = made(requests, faults)
    counted = [r for r in requests if r.outcome != "left"]
    assert sum(analysis.total(requests).values()) == len(requests)
    assert analysis.faulted(chaos) <= len(counted)
    assert analysis.faulted(chaos) <= sum(each.requests for each in analysis.fault_outcomes(chaos))
    served = analysis.served_by_healthy(chaos)
    if served is not None:
        assert 0 <= served.right <= served.requests <= len(counted)
    for each in analysis.fault_outcomes(chaos):
        assert each.recovery_s is None or each.recovery_s >= 0
        assert each.slowest_error_s is None or each.slowest_error_s >= 0


@pytest.mark.property
@given(requests_drawn)
def test_throughput_counts_every_request_once(requests: list[ChaosRequest]) -> None:
    buckets = analysis.throughput(made(requests, []))
    for outcome in REQUEST_OUTCOMES:
        counted = sum(bucket.per_s[outcome] * (bucket.ends_s - bucket.begins_s) for bucket in buckets)
        assert counted == pytest.approx(sum(r.outcome == outcome for r in requests))


@pytest.mark.property
@given(requests_drawn, st.integers(1, 5))
def test_what_has_more_answers_in_a_row_has_fewer_too(requests: list[ChaosRequest], answers: int) -> None:
    one = fault(1, "k", 10, 10)
    fewer, more = (analysis.recovery_s(one, requests, count) for count in (answers, answers + 1))
    assert fewer is not None or more is None


class TestServedByHealthy:
    def test_only_what_was_sent_while_a_spared_fault_lasted(self) -> None:
        outcomes_in_turn: list[RequestOutcome] = ["right", "error", "right", "right", "right"]
        requests = [request(0, 9.5, 12, "error")]
        requests += [request(i + 1, 10 + i, 10.5 + i, outcome) for i, outcome in enumerate(outcomes_in_turn)]
        served = analysis.served_by_healthy(made(requests, [fault(1, "k", 10, 10, spared=True)]))
        assert served == (2, 3), "in flight before it: not counted; sent after the recovery at 12.5 s: neither"

    @pytest.mark.parametrize(("acts", "counted"), [(("10.00 s kill",), 4), (("10.00 s stop", "10.01 s continue"), 5)])
    def test_a_kill_counts_from_when_it_was_done(self, acts: tuple[str, ...], counted: int) -> None:
        """What was sent before the signal was delivered may have been at the process that died."""
        requests = [request(i, sent_s, sent_s + 0.5) for i, sent_s in enumerate((10.01, 10.05, 10.06, 10.07, 10.08))]
        killed = fault(1, "k", 10, 10.04, spared=True).model_copy(update={"acts": acts})
        assert analysis.served_by_healthy(made(requests, [killed])) == (counted, counted)

    def test_the_survivors_serve_until_all_replicas_run_again(self) -> None:
        requests = [request(i, 10 + i, 10.5 + i, "error" if i in (0, 19) else "right") for i in range(30)]
        running = ((5, 2), (10.2, 2), (15, 1), (18, 1), (24, 2), (28, 1))  # at 10.2 s nobody has noticed
        samples = tuple(ChaosSample(at_s=at_s, running={"decode": count, "prefill": 2}) for at_s, count in running)
        chaos = made(requests, [fault(1, "k", 10, 10, spared=True)])._replace(samples=samples)
        assert analysis.whole_s(samples, 10.0) == 24
        assert analysis.served_by_healthy(chaos) == (13, 14)
        assert analysis.whole_s(samples, 25.0) is None, "never again"
        assert analysis.whole_s(samples[:2], 5.0) is None, "none was missed"

    def test_nothing_where_no_pool_kept_a_replica(self) -> None:
        assert analysis.served_by_healthy(EXAMPLE) is None

    def test_not_while_another_fault_spares_none(self) -> None:
        requests = [request(i, 10 + i, 10.5 + i, "error") for i in range(10)]
        faults = [fault(1, "a", 10, 12), fault(2, "b", 11, 12, spared=True)]
        assert analysis.served_by_healthy(made(requests, faults)) is None, "the first never recovered"


class TestMemory:
    @pytest.mark.parametrize(
        ("first", "last", "flat"), [(1000, 1020, True), (1000, 900, True), (1000, 1200, False), (100, 125, True)]
    )
    def test_flat(self, first: float, last: float, flat: bool) -> None:
        values = [first] * 3 + [(first + last) / 2] * 3 + [last] * 3
        samples = [ChaosSample(at_s=i, rss_mib={"a": value / 2, "b": value / 2}) for i, value in enumerate(values)]
        change = analysis.memory_change(samples)
        assert change is not None and change.flat is flat
        assert change == (first, last)

    def test_an_engine_that_is_down_at_one_sample_changes_nothing(self) -> None:
        samples = [ChaosSample(at_s=i, rss_mib={"a": 500.0, **({"b": 500.0} if i != 8 else {})}) for i in range(9)]
        assert analysis.memory_change(samples) == (1000.0, 1000.0)

    def test_too_few(self) -> None:
        assert analysis.memory_change([ChaosSample(at_s=i, rss_mib={"a": 1.0}) for i in range(5)]) is None
