"""The check's own side channel: where it listens, and that it outlives callers that are no ranks."""

from __future__ import annotations

import contextlib
import socket

import pytest

from pdlab.cluster import loopback
from pdlab.transfer.rank import side_channel
from pdlab.transfer.rank.side_channel import Registration, SideChannel, fetch_registration

RANK = Registration(1, b"agent", (1000, 2000), 8, 64, 0, {"vllm": "x"})


@pytest.mark.parametrize(
    "line", [b"\n", b"GET / HTTP/1.0\r\n", b'["rank"]\n', b"7\n", b'{"rank": [1]}\n', b'{"rank": 9}\n']
)
def test_it_answers_after_garbage(line: bytes) -> None:
    channel = SideChannel([RANK])
    try:
        with socket.create_connection(("127.0.0.1", channel.port), 60) as caller, contextlib.suppress(ConnectionError):
            caller.sendall(line)
            assert caller.recv(100) == b""
        assert fetch_registration("127.0.0.1", channel.port, 1, 60) == RANK
    finally:
        channel.close()


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_on_local_nodes_it_listens_at_their_address(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert side_channel.LISTEN == loopback.LISTEN
    monkeypatch.delenv(loopback.LISTEN, raising=False)
    if address:
        monkeypatch.setenv(loopback.LISTEN, address)
    channel = SideChannel([RANK])
    try:
        assert channel._socket.getsockname()[0] == (address or "0.0.0.0")
    finally:
        channel.close()
