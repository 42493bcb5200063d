"""The side channel for the handshake: a rank gets its peer's NIXL metadata before the first transfer, as in vLLM.

One listener per side returns the registrations of its ranks, with one JSON line per request and answer. Sent to the
nodes by value; imports only the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Any

MAX_LINE = 64 << 20
# Variable with the address of a local node, as in pdlab/cluster/loopback.py; not set on a cluster's nodes.
LISTEN = "PDLAB_LISTEN"


@dataclass(frozen=True)
class Registration:
    """A rank's registration. ``bases``: addresses of its regions. ``agent``: NIXL's metadata. ``software``: must equal
    the peer's."""

    rank: int
    agent: bytes
    bases: tuple[int, ...]
    num_blocks: int
    page_bytes: int
    device: int
    software: dict[str, str]


class SideChannel:
    """The listener. It has a port that the kernel chooses, on all interfaces, or on a local node at its address."""

    def __init__(self, ranks: list[Registration]) -> None:
        self._answers = {rank.rank: _encode(rank) for rank in ranks}
        self._socket = socket.create_server((os.environ.get(LISTEN, ""), 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True, name="side-channel").start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            with peer, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                peer.settimeout(10)
                with peer.makefile("rwb") as stream:
                    requested_rank = json.loads(stream.readline(1024))["rank"]
                    stream.write(self._answers[requested_rank] + b"\n")

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def fetch_registration(host: str, port: int, rank: int, timeout_s: float) -> Registration:
    """The registration of rank ``rank`` of the peer.

    Raises OSError without an answer, ValueError for an invalid one.
    """
    with socket.create_connection((host, port), timeout_s) as peer, peer.makefile("rwb") as stream:
        stream.write(json.dumps({"rank": rank}).encode() + b"\n")
        stream.flush()
        line = stream.readline(MAX_LINE)
    if not line.endswith(b"\n"):
        raise ValueError(f"{host}:{port} answers, but is not a side channel of this test")
    return _decode(json.loads(line))


def _encode(rank: Registration) -> bytes:
    fields = asdict(rank) | {"agent": base64.b64encode(rank.agent).decode()}
    return json.dumps(fields).encode()


def _decode(fields: dict[str, Any]) -> Registration:
    bases = tuple(int(base) for base in fields["bases"])
    return Registration(**fields | {"agent": base64.b64decode(fields["agent"]), "bases": bases})
