"""Receives with a prefill that answers at the test's call, on a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from support.lease_answers import LEASE_S, Prefill

from pdlab.guard.lease_queries import CLAIM, Peer
from pdlab.guard.leases import EXPIRED, LEASE_KEY, OLD
from pdlab.guard.receives import ACTIONS, AVOID_PEER_S, QUERY_TIMEOUT_S, Admission, Outcome, ReceiveBook

DEADLINE_S = 10.0
OFFSET_S = 500.0  # of prefill's clock
PEER = Peer("10.0.0.1", 5600, "p1")


@pytest.fixture
def prefill() -> Prefill:
    return Prefill(offset_s=OFFSET_S, rtt_s=0.01)


@pytest.fixture
def book(prefill: Prefill) -> ReceiveBook:
    return ReceiveBook(prefill, reader="d1", deadline_s=DEADLINE_S, clock=prefill)


def params(prefill: Prefill, name: str = "remote", age_s: float = 0.1) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": PEER.engine_id,
        "remote_request_id": name,
        "remote_host": PEER.host,
        "remote_port": PEER.port,
        LEASE_KEY: {"granted_at": prefill.now + OFFSET_S - age_s, "lease_s": LEASE_S},
    }


def reading(book: ReceiveBook, prefill: Prefill, name: str = "r", **answer: Any) -> None:
    """A request whose claim is granted and whose read has begun."""
    book.arrived(name, params(prefill, f"remote-{name}"))
    prefill.answer(**answer)
    assert book.admission(name) is Admission.READ
    book.admitted(name)


def counted(book: ReceiveBook) -> dict[str, int]:
    return dict(book.counts)


def test_a_request_in_order_is_claimed_once_and_waits_for_nothing(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill)
    prefill.now += 1
    assert book.read_ended("r") is Outcome.USE
    assert prefill.queries == [(1, CLAIM, PEER, "remote-r", "d1/r")]
    assert counted(book) == {"receives": 1} and not book.active


def test_the_first_request_of_a_prefill_engine_waits_for_its_answer(book: ReceiveBook, prefill: Prefill) -> None:
    book.arrived("r", params(prefill))
    assert book.admission("r") is Admission.WAIT
    prefill.answer()
    assert book.admission("r") is Admission.READ


def test_later_ones_do_not_for_its_clock_is_known(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, "first")
    book.arrived("r", params(prefill))
    assert book.admission("r") is Admission.READ
    book.admitted("r")
    assert len(prefill.claims()) == 2, "no second claim before the first is answered"
    assert book.read_ended("r") is Outcome.WAIT, "the read was faster than the answer"
    assert list(book.settled()) == [] and book.waiting() == ("r",)
    prefill.answer()
    assert list(book.settled()) == [("r", Outcome.USE)]
    assert "recomputed" not in book.counts


def test_where_they_may_be_old_prefills_answer_is_awaited(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, "first")
    book.arrived("r", params(prefill, age_s=LEASE_S / 2 + 0.1))
    assert book.admission("r") is Admission.WAIT
    prefill.answer(OLD, 0.0)
    assert book.admission("r") is Admission.REFUSE
    assert book.counts["refused"] == book.counts["recomputed"] == 1
    assert not prefill.released(), "prefill has it released already"
    assert book.admission("r") is Admission.READ, "the receive is over: what is left is an ordinary request"


def test_a_clock_that_was_measured_long_ago_is_not_used(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, "first")
    prefill.now += 61
    book.arrived("r", params(prefill))
    assert book.admission("r") is Admission.WAIT


def test_a_slow_answer_never_makes_parameters_young(book: ReceiveBook, prefill: Prefill) -> None:
    """The offset of prefill's clock is an upper bound, so its ages are too."""
    prefill.rtt_s = 9.0
    reading(book, prefill, "first")
    book.arrived("r", params(prefill, age_s=LEASE_S / 2 + 0.001))
    assert book.admission("r") is Admission.WAIT


def test_without_an_answer_the_request_is_refused_at_the_deadline(book: ReceiveBook, prefill: Prefill) -> None:
    book.arrived("r", params(prefill))
    prefill.now += DEADLINE_S - 0.01
    assert book.admission("r") is Admission.WAIT
    prefill.now += 0.02
    assert book.admission("r") is Admission.REFUSE
    assert prefill.released() == ["remote"]


@pytest.mark.parametrize(
    "change",
    [
        {LEASE_KEY: None},
        {LEASE_KEY: "soon"},
        {LEASE_KEY: {"granted_at": "x", "lease_s": 30}},
        {"remote_port": None},
        {"remote_port": "http"},
    ],
    ids=str,
)
def test_parameters_that_cannot_be_confirmed_are_refused(
    change: dict[str, Any], book: ReceiveBook, prefill: Prefill
) -> None:
    book.arrived("r", {**params(prefill), **change})
    assert book.admission("r") is Admission.REFUSE
    assert prefill.queries == [] and book.counts["refused"] == 1


def test_blocks_that_were_another_requests_are_not_used(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, "first")
    book.arrived("r", params(prefill))
    book.admission("r")
    book.admitted("r")
    prefill.answer(EXPIRED, 0.0)
    assert book.read_ended("r") is Outcome.RECOMPUTE
    assert book.counts["stale"] == book.counts["recomputed"] == 1


def test_a_read_that_ends_after_what_was_promised_is_confirmed_again(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, covered_s=2.0)
    assert len(prefill.claims()) == 2, "less than the deadline was promised"
    prefill.answer(covered_s=3.0)
    list(book.settled())
    prefill.now += 5
    assert book.read_ended("r") is Outcome.WAIT
    assert len(prefill.claims()) == 3
    prefill.answer(covered_s=0.0)
    assert list(book.settled()) == [("r", Outcome.USE)], "claimed after the read, and still prefill's"


def test_an_answer_from_before_the_end_of_the_read_is_not_enough(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, covered_s=0.0)
    prefill.now += 1
    assert book.read_ended("r") is Outcome.WAIT
    prefill.answer(covered_s=0.0)  # to the claim of the read's begin
    assert list(book.settled()) == [] and len(prefill.claims()) == 3
    prefill.answer(EXPIRED, 0.0)
    assert list(book.settled()) == [("r", Outcome.RECOMPUTE)]


def test_what_is_not_confirmed_in_time_is_computed(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, "first")
    book.arrived("r", params(prefill))
    book.admission("r")
    book.admitted("r")
    assert book.read_ended("r") is Outcome.WAIT
    prefill.now += DEADLINE_S + 0.01
    assert list(book.settled()) == [("r", Outcome.RECOMPUTE)]
    assert book.counts["unconfirmed"] == book.counts["recomputed"] == 1
    assert prefill.released() == ["remote"]


def test_a_failed_read_is_computed_and_its_blocks_are_released(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill)
    book.failed.add("r")
    assert book.read_ended("r") is Outcome.RECOMPUTE
    assert prefill.released() == ["remote-r"] and book.counts["failed_reads"] == 1
    assert not book.failed and not list(book.overdue())


def test_a_failed_read_that_nobody_announced(book: ReceiveBook) -> None:
    book.failed.add("r")
    assert book.read_ended("r") is Outcome.RECOMPUTE
    assert book.read_ended("r") is Outcome.USE


def test_reads_past_the_deadline_are_named_once_in_order(book: ReceiveBook, prefill: Prefill) -> None:
    for name in "abc":
        reading(book, prefill, name)
        prefill.now += 1
    book.read_ended("b")
    prefill.now += DEADLINE_S - 2.5
    assert list(book.overdue()) == ["a"]
    prefill.now += 5
    assert list(book.overdue()) == ["c"] and list(book.overdue()) == []
    assert book.counts["deadlines"] == 2 and not book.active


def test_an_engine_from_which_a_read_hangs_is_not_read_from_until_it_has_ended(
    book: ReceiveBook, prefill: Prefill
) -> None:
    """Each further read would keep its blocks too, and its request wait for the deadline."""
    for name in ("a", "b"):
        reading(book, prefill, name)
    prefill.now += DEADLINE_S + 0.1
    assert list(book.overdue()) == ["a", "b"]
    for number in range(3):
        book.arrived(f"r{number}", params(prefill, f"remote-r{number}"))
        prefill.answer()
        assert book.admission(f"r{number}") is Admission.REFUSE
        assert prefill.released()[-1] == f"remote-r{number}"
    assert book.counts["refused"] == 3 and book.counts["recomputed"] == 5
    book.late_read_ended("a")
    book.arrived("still", params(prefill))
    assert book.admission("still") is Admission.REFUSE
    book.late_read_ended("b")
    reading(book, prefill, "again")


def test_one_request_tries_again_where_a_read_hangs_for_long(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill, "a")
    prefill.now += DEADLINE_S + 0.1
    assert list(book.overdue()) == ["a"]
    prefill.now += AVOID_PEER_S
    for name, admission in (("tries", Admission.READ), ("waits not", Admission.REFUSE)):
        book.arrived(name, params(prefill, name))
        prefill.answer()
        assert book.admission(name) is admission


def test_an_engine_that_does_not_answer_is_waited_for_once(book: ReceiveBook, prefill: Prefill) -> None:
    book.arrived("first", params(prefill))
    assert book.admission("first") is Admission.WAIT
    prefill.now += DEADLINE_S + 0.1
    assert book.admission("first") is Admission.REFUSE
    book.arrived("second", params(prefill))
    assert book.admission("second") is Admission.REFUSE, "at once"
    book.arrived("third", params(prefill))
    prefill.answer()
    assert book.admission("third") is Admission.REFUSE, "it came before the answer"
    book.arrived("fourth", params(prefill))
    prefill.answer()
    assert book.admission("fourth") is Admission.READ


def test_a_cancel_releases_the_blocks(book: ReceiveBook, prefill: Prefill) -> None:
    book.arrived("r", params(prefill))
    book.cancelled("r", params(prefill))
    book.cancelled("never seen", params(prefill, "of its own"))
    assert prefill.released() == ["remote", "of its own"] and book.counts["cancels_reported"] == 2
    prefill.answer()
    list(book.settled())
    assert not book.active


def test_a_cancelled_request_without_a_lease_releases_nothing(book: ReceiveBook, prefill: Prefill) -> None:
    book.cancelled("r", {"do_remote_prefill": True})
    assert prefill.queries == [] and not book.counts


def test_queries_without_an_answer_are_forgotten(book: ReceiveBook, prefill: Prefill) -> None:
    book.arrived("r", params(prefill))
    book.drop("r")
    assert book.active
    prefill.now += QUERY_TIMEOUT_S + 1
    list(book.settled())
    assert not book.active


def test_a_query_that_cannot_be_sent_is_not_waited_for_longer(book: ReceiveBook, prefill: Prefill) -> None:
    prefill.reachable = False
    book.arrived("r", params(prefill))
    assert book.admission("r") is Admission.WAIT
    prefill.now += DEADLINE_S
    assert book.admission("r") is Admission.REFUSE and not book.active


def test_every_count_is_exported(book: ReceiveBook, prefill: Prefill) -> None:
    reading(book, prefill)
    book.failed.add("r")
    book.read_ended("r")
    assert set(book.counts) <= set(ACTIONS)
    book.close()
    assert prefill.closed
