"""Leases on a clock that the test moves."""

from __future__ import annotations

import pytest
from support.clock import Clock

from pdlab.guard import leases
from pdlab.guard.leases import EXPIRED, GRANTED, OLD, TAKEN, UNKNOWN, LeaseAnswer, LeaseBook

LEASE_S = 30.0


@pytest.fixture
def book(clock: Clock) -> LeaseBook:
    return LeaseBook("engine", clock)


def test_a_lease_names_its_time_and_length(book: LeaseBook) -> None:
    assert book.pin("r", 30) == {"granted_at": 1000.0, "lease_s": 30.0}
    assert book.pinned == 1


def test_a_pinned_lease_is_granted_for_what_is_left_of_it(book: LeaseBook, clock: Clock) -> None:
    book.pin("r", LEASE_S)
    clock.now += 10
    assert book.claim("r", "d") == LeaseAnswer(GRANTED, 20.0)
    clock.now += 25  # expired by the clock, and nobody has freed the blocks
    assert book.claim("r", "d") == LeaseAnswer(GRANTED, 0.0)


def test_nobody_gets_what_is_older_than_half_its_lease_and_prefill_frees_it(book: LeaseBook, clock: Clock) -> None:
    book.pin("r", LEASE_S)
    clock.now += 15.1
    assert book.claim("r", "d").verdict == OLD
    assert book.take_released() == {"r"} and book.take_released() == set()
    assert book.claim("r", "d").verdict == EXPIRED


def test_a_reader_that_has_claimed_in_time_may_claim_later(book: LeaseBook, clock: Clock) -> None:
    book.pin("r", LEASE_S)
    book.claim("r", "d")
    clock.now += 20
    assert book.claim("r", "d") == LeaseAnswer(GRANTED, 10.0)


def test_one_reader_per_lease(book: LeaseBook) -> None:
    book.pin("r", LEASE_S)
    assert book.claim("r", "first").verdict == GRANTED
    assert book.claim("r", "second").verdict == TAKEN
    book.end(["r"])
    assert book.claim("r", "second").verdict == TAKEN
    assert book.claim("r", "first").verdict == GRANTED


def test_blocks_that_were_freed_because_they_had_been_read_were_right(book: LeaseBook) -> None:
    book.pin("r", LEASE_S)
    book.end(["r"])
    assert book.pinned == 0
    assert book.claim("r", "d") == LeaseAnswer(GRANTED, leases.FOREVER_S)
    assert book.claim("r", "another").verdict == TAKEN


@pytest.mark.parametrize("order", ["lapse first", "end first"])
def test_blocks_of_an_expired_lease_are_nobodys(book: LeaseBook, order: str) -> None:
    book.pin("r", LEASE_S)
    book.claim("r", "d")
    if order == "lapse first":
        book.lapse(["r"])  # one worker's; the blocks are freed when all of them are done
        assert book.claim("r", "d").verdict == EXPIRED
        book.end(["r"])
    else:
        book.end(["r"])
        book.lapse(["r"])
    assert book.claim("r", "d").verdict == EXPIRED


def test_a_heartbeat_prolongs_and_never_shortens(book: LeaseBook, clock: Clock) -> None:
    book.pin("r", LEASE_S)
    book.claim("r", "d")
    book.renew(["r", "not known"], 15)
    assert book.claim("r", "d").covered_s == 30.0
    clock.now += 28
    book.renew(["r"], 15)
    assert book.claim("r", "d").covered_s == 15.0


def test_only_the_reader_gives_back(book: LeaseBook) -> None:
    book.pin("r", LEASE_S)
    book.claim("r", "d")
    book.release("r", "another")
    assert not book.take_released() and book.claim("r", "d").verdict == GRANTED
    book.release("r", "d")
    assert book.claim("r", "d").verdict == EXPIRED, "it may be freed at any moment"
    assert book.take_released() == {"r"}


def test_what_has_been_freed_is_not_freed_again(book: LeaseBook) -> None:
    book.pin("r", LEASE_S)
    book.release("r", "d")
    book.end(["r"])
    book.release("r", "d")
    assert not book.take_released()


def test_unknown_requests(book: LeaseBook, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert book.claim("r", "d").verdict == UNKNOWN
    monkeypatch.setattr(leases, "MAX_ENDED", 2)
    for name in "abc":
        book.pin(name, LEASE_S)
    book.end("abc")
    assert [book.claim(name, "d").verdict for name in "abc"] == [UNKNOWN, GRANTED, GRANTED]
