"""Queries over real sockets, answered by a listener that reads messages as vLLM's does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from pdlab.guard.lease_queries import CLAIM, GET_META_MSG, RELEASE, AnswerTable, Peer, Reply, SideChannelClient
from pdlab.guard.leases import GRANTED, UNKNOWN, LeaseAnswer, LeaseBook

METADATA = {(0, 0): b"rank 0", (0, 1): b"rank 1"}
LONG_S = 60.0


def make(ctx: Any, path: str, socket_type: Any, bind: bool) -> Any:
    socket = ctx.socket(socket_type)
    socket.connect(path)
    return socket


class Listener:
    """As `NixlBaseConnectorScheduler._nixl_handshake_listener`."""

    def __init__(self, table: AnswerTable) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.socket.setsockopt(zmq.RCVTIMEO, 100)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(table,))
        self.thread.start()

    def _run(self, table: AnswerTable) -> None:
        while not self.stop.is_set():
            try:
                identity, _, message = self.socket.recv_multipart()
            except zmq.Again:
                continue
            _, first, second = msgspec.msgpack.decode(message)
            clock = msgspec.msgpack.encode(12.5)
            self.socket.send_multipart((identity, b"", table[(first, second)], clock))

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.context.destroy(linger=0)


@pytest.fixture
def leases() -> LeaseBook:
    return LeaseBook("engine")


@pytest.fixture
def listener(leases: LeaseBook) -> Iterator[Listener]:
    listener = Listener(AnswerTable(METADATA, leases))
    yield listener
    listener.close()


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    client = SideChannelClient(make)
    yield client
    client.close()


def replies(client: SideChannelClient, count: int) -> list[Reply]:
    got: list[Reply] = []
    until = time.monotonic() + LONG_S
    while len(got) < count:
        assert time.monotonic() < until, f"{len(got)} of {count} replies"
        got += client.replies()
        time.sleep(0.001)
    return got


def test_claims_are_answered_in_order(listener: Listener, client: SideChannelClient, leases: LeaseBook) -> None:
    leases.pin("r", 1000)
    peer = Peer("127.0.0.1", listener.port, "engine")
    assert list(client.replies()) == []
    for query_id, name in ((1, "r"), (2, "another")):
        assert client.send(query_id, CLAIM, peer, name, "d")
    first, second = replies(client, 2)
    assert (first.query_id, first.answer.verdict, first.clock_s) == (1, GRANTED, 12.5)
    assert 900 < first.answer.covered_s <= 1000
    assert second == Reply(2, LeaseAnswer(UNKNOWN), 12.5)


def test_another_engine_at_the_same_address_has_no_lease(
    listener: Listener, client: SideChannelClient, leases: LeaseBook
) -> None:
    leases.pin("r", 1000)
    client.send(1, CLAIM, Peer("127.0.0.1", listener.port, "the one before"), "r", "d")
    assert replies(client, 1)[0].answer == LeaseAnswer(UNKNOWN)


def test_a_release_reaches_the_book(listener: Listener, client: SideChannelClient, leases: LeaseBook) -> None:
    leases.pin("r", 1000)
    client.send(0, RELEASE, Peer("127.0.0.1", listener.port, "engine"), "r", "d")
    replies(client, 1)
    assert leases.take_released() == {"r"}


def test_nobody_at_the_address(client: SideChannelClient) -> None:
    assert client.send(1, CLAIM, Peer("127.0.0.1", 9, "engine"), "r", "d"), "it is not known yet that nobody answers"
    assert list(client.replies()) == []


@pytest.mark.parametrize("host", ["no such host", "no such\nhost"])
def test_an_address_that_is_none(host: str, client: SideChannelClient) -> None:
    assert not client.send(1, CLAIM, Peer(host, 9, "engine"), "r", "d")


def test_connections_are_bounded(client: SideChannelClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlab.guard.lease_queries.MAX_PEERS", 2)
    for port in (9, 10, 11):
        client.send(1, CLAIM, Peer("127.0.0.1", port, "engine"), "r", "d")
    assert [port for _, port in client._sockets] == [10, 11]


class TestTable:
    def test_metadata_is_found(self, leases: LeaseBook) -> None:
        assert AnswerTable(METADATA, leases)[(0, 1)] == b"rank 1"

    @pytest.mark.parametrize(
        "key",
        [(0, 7), (None, None), ("pdlab-guard", None), ("pdlab-guard", [1, 2]), ([1], [2]), ("x",)],
        ids=str,
    )
    def test_nothing_ends_the_listener(self, key: Any, leases: LeaseBook) -> None:
        assert AnswerTable(METADATA, leases)[key] == b""


def test_an_answer_that_is_none_is_passed_over(client: SideChannelClient) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        peer = Peer("127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"), "engine")
        client.send(1, CLAIM, peer, "r", "d")
        identity, _, message = router.recv_multipart()
        assert msgspec.msgpack.decode(message)[0] == GET_META_MSG
        clock = msgspec.msgpack.encode(1.0)
        for payload in (b"", b"\xff", msgspec.msgpack.encode(3), msgspec.msgpack.encode((1, "granted", 2.0))):
            router.send_multipart((identity, b"", payload, clock))
        assert replies(client, 1) == [Reply(1, LeaseAnswer("granted", 2.0), 1.0)]
    finally:
        context.destroy(linger=0)
