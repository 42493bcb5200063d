"""Connections that fail, and the row of them after which a replica is unhealthy."""

from __future__ import annotations

import pytest

from pdlab.guard.peers import UNHEALED_AFTER, PeerBook
from pdlab.guard.receives import ACTIONS


@pytest.fixture
def book() -> PeerBook:
    return PeerBook()


def fail_once(book: PeerBook, peer: str = "p1") -> None:
    """A connection over which a read fails, and that is made anew."""
    book.read_failed(peer)
    assert book.to_forget(busy=(), known={peer}) == [peer]
    assert book.to_forget(busy=(), known={peer}) == [], "each once"


def test_a_peer_is_forgotten_when_its_reads_have_ended(book: PeerBook) -> None:
    assert not book.active
    book.read_failed("p1")
    book.read_failed("p1")
    assert book.active
    assert book.to_forget(busy={"p1"}, known={"p1", "p2"}) == []
    assert book.to_forget(busy={"p2"}, known={"p1", "p2"}) == ["p1"]
    assert book.to_forget(busy=(), known={"p2"}) == [] and not book.counts
    assert book.to_forget(busy=(), known={"p1", "p2"}) == []
    assert book.counts == {"handshakes_renewed": 1}


def test_a_good_read_ends_the_row(book: PeerBook) -> None:
    for _ in range(3):
        for _ in range(UNHEALED_AFTER - 1):
            fail_once(book)
        book.read_ended_well("p1")
    assert book.counts.keys() == {"handshakes_renewed"}
    book.counts.clear()
    assert not book.active


def test_connections_that_all_fail_are_counted_once_and_a_good_read_takes_it_back(book: PeerBook) -> None:
    for _ in range(UNHEALED_AFTER + 2):
        fail_once(book)
    assert (book.counts["unhealed"], book.counts["healed"]) == (1, 0)
    fail_once(book, "p2")
    book.read_ended_well("p2")
    assert book.counts["healed"] == 0, "another engine's reads are no evidence of this one"
    book.read_ended_well("p1")
    book.read_ended_well("p1")
    assert (book.counts["unhealed"], book.counts["healed"]) == (1, 1)


def test_one_failed_round_of_many_reads_counts_once(book: PeerBook) -> None:
    for _ in range(16):
        book.read_failed("p1")
    book.read_ended_well("p1")  # of the same connection, before it failed: it is given up all the same
    assert book.to_forget((), {"p1"}) == ["p1"]
    book.to_forget((), {"p1"})
    assert book.counts == {"handshakes_renewed": 1}


def test_a_peer_that_answers_no_handshake_is_not_the_connections_fault(book: PeerBook) -> None:
    """Prefill was killed, or the link is down: decode must not be replaced for that."""
    for _ in range(3 * UNHEALED_AFTER):
        fail_once(book)
        book.handshake_failed("p1")
        book.to_forget((), ())
    assert "unhealed" not in book.counts
    for _ in range(UNHEALED_AFTER):
        fail_once(book)
    book.handshake_failed("p1")
    book.to_forget((), ())
    assert (book.counts["unhealed"], book.counts["healed"]) == (1, 1), "the replica is not unhealthy any more"


def test_its_counts_are_exported(book: PeerBook) -> None:
    for _ in range(UNHEALED_AFTER):
        fail_once(book)
    book.read_ended_well("p1")
    assert set(book.counts) == {"handshakes_renewed", "unhealed", "healed"} and set(book.counts) <= ACTIONS.keys()
