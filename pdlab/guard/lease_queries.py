"""Queries of leases over the side channel of vLLM's NIXL connector, and their answers.

The side channel answers a message ``(GET_META_MSG, pp_rank, tp_rank)`` with the entry of a table for the two ranks, and
with its clock. A query is such a message with `QUERY_RANK` as the first rank. `AnswerTable` replaces the table and
answers it. Decode's scheduler thread sends queries and never waits: ZeroMQ sends and receives in its own thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import zmq

from pdlab.guard import vllm_names
from pdlab.guard.leases import UNKNOWN, LeaseAnswer, LeaseBook

logger = logging.getLogger("vllm.pdlab.guard")

QUERY_RANK = "pdlab-guard"
CLAIM, RELEASE = "claim", "back"
# Equal to vLLM's constant of that name (a contract test compares them).
GET_META_MSG = b"get_meta_msg"
# Most peers with an open connection.
MAX_PEERS = 256
RECONNECT_MS = 5000
# A connection is closed after this long without an acknowledgement, for example over a cut link. TCP's own retries have
# growing pauses of up to two minutes, which would delay messages after the link is back. Also the connect timeout.
ACK_TIMEOUT_MS = 10_000


class Peer(NamedTuple):
    """Address of a prefill engine's side channel, and the engine's id."""

    host: str
    port: int
    engine_id: str


class Reply(NamedTuple):
    """An answer to the query ``query_id``. ``clock_s``: prefill's ``perf_counter`` at the answer."""

    query_id: int
    answer: LeaseAnswer
    clock_s: float


def encode_query(query_id: int, kind: str, peer: Peer, remote_request_id: str, reader: str) -> bytes:
    """The message of a query to the side channel."""
    query = (query_id, kind, peer.engine_id, remote_request_id, reader)
    return msgspec.msgpack.encode((GET_META_MSG, QUERY_RANK, query))


class AnswerTable(dict[Any, bytes]):
    """The side channel's table of metadata, which also answers queries from a book of leases.

    Never raises, because an exception would end the side channel's thread, and all later handshakes would fail.
    """

    def __init__(self, metadata: Mapping[Any, bytes], leases: LeaseBook) -> None:
        super().__init__(metadata)
        self._leases = leases

    def __getitem__(self, key: Any) -> bytes:
        try:
            first, second = key
            if first == QUERY_RANK:
                return self._answer(second)
            return super().__getitem__(key)
        except Exception as error:
            logger.warning("side channel: a message without an answer (%s: %s)", type(error).__name__, error)
            return b""

    def _answer(self, query: Any) -> bytes:
        query_id, kind, engine_id, request_id, reader = query
        answer = LeaseAnswer(UNKNOWN)
        if engine_id == self._leases.engine_id:
            if kind == RELEASE:
                self._leases.release(request_id, reader)
            else:
                answer = self._leases.claim(request_id, reader)
        return msgspec.msgpack.encode((query_id, answer.verdict, answer.covered_s))


class SideChannelClient:
    """Sends queries to side channels; for one thread. ``make``: replaces vLLM's ``make_zmq_socket``."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        self._make = make
        self._context: Any = None
        self._sockets: dict[tuple[str, int], Any] = {}

    def send(self, query_id: int, kind: str, peer: Peer, remote_request_id: str, reader: str) -> bool:
        """Send a query without waiting. False: it could not be sent, and there will be no answer."""
        try:
            socket = self._socket(peer.host, peer.port)
            socket.send_multipart([b"", encode_query(query_id, kind, peer, remote_request_id, reader)], zmq.NOBLOCK)
        except (zmq.ZMQError, OverflowError, TypeError, ValueError) as error:
            logger.warning("no query could be sent to %s:%s (%s)", peer.host, peer.port, error)
            return False
        return True

    def replies(self) -> Iterator[Reply]:
        """The answers that have arrived."""
        for socket in list(self._sockets.values()):
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.ZMQError:
                    break
                with contextlib.suppress(msgspec.MsgspecError, TypeError, ValueError):
                    _, payload, clock = frames
                    query_id, verdict, covered_s = msgspec.msgpack.decode(payload)
                    yield Reply(query_id, LeaseAnswer(verdict, covered_s), msgspec.msgpack.decode(clock))

    def close(self) -> None:
        """Close the connections and drop unsent messages."""
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _socket(self, host: str, port: int) -> Any:
        key = (host, port)
        socket = self._sockets.pop(key, None)
        if socket is None:
            if self._context is None:
                self._context = zmq.Context()
                self._context.setsockopt(zmq.LINGER, 0)
                self._context.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
                self._context.setsockopt(zmq.TCP_MAXRT, ACK_TIMEOUT_MS)
                self._context.setsockopt(zmq.CONNECT_TIMEOUT, ACK_TIMEOUT_MS)
            while len(self._sockets) >= MAX_PEERS:
                self._sockets.pop(next(iter(self._sockets))).close(linger=0)
            name = f"[{host}]" if ":" in host else host
            # With vLLM's own function, so that a change of it (pdlab/cluster/loopback.py) applies to both ends.
            make = self._make or vllm_names.make_zmq_socket
            socket = make(ctx=self._context, path=f"tcp://{name}:{port}", socket_type=zmq.DEALER, bind=False)
        self._sockets[key] = socket  # last in the order: the least recently used socket is closed first
        return socket
