"""Callers of a ZeroMQ socket that should hear strangers no word: what each of them got."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

WAIT_MS = 60_000
GARBAGE = (
    b"garbage" * 100,
    b"GET / HTTP/1.0\r\n\r\n",
    b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(500),
    b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(500),
)


def stranger(endpoint: str, message: bytes, **options: Any) -> str:
    """How the handshake of a socket with those options ends, or ``answered``."""
    with zmq.Context() as context, context.socket(zmq.REQ) as caller:
        caller.linger = 0
        for name, value in options.items():
            caller.setsockopt(getattr(zmq, name), value)
        with caller.get_monitor_socket() as monitor:
            caller.connect(endpoint)
            caller.send(message)
            event = handshake(monitor)
            caller.disable_monitor()
        if event == "HANDSHAKE_SUCCEEDED" and caller.poll(WAIT_MS):
            return "answered"
        return event


def handshake(monitor: Any) -> str:
    """How the next handshake of a socket ends, from its monitor."""
    event = ""
    while "HANDSHAKE" not in event:
        assert monitor.poll(WAIT_MS), "the connection neither opens nor fails"
        event = recv_monitor_message(monitor)["event"].name
    return event


def throw(endpoint: str, data: bytes) -> bytes:
    """What a TCP connection that sends those bytes reads until it is closed."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    read = b""
    with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), WAIT_MS / 1000) as thrown:
        thrown.sendall(data)
        while more := thrown.recv(4096):
            read += more
    return read


@contextlib.contextmanager
def in_thread(target: Any, *args: Any) -> Iterator[None]:
    """Runs ``target(stop, *args)`` until the block ends; it has to return once ``stop`` is set."""
    stop = threading.Event()
    thread = threading.Thread(target=target, args=(stop, *args))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
