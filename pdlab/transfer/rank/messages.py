"""Messages between the driver and the ranks of a KV-transfer check. Sent to the nodes by value."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdlab.transfer.rank.layout import KvShape


class RankError(Exception):
    """An expected failure; ``kind`` is its name: plugin, backend, memory, side-channel, software, peer, timeout."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options that all ranks of a check share. ``num_blocks``: of the cache. ``fault``: to plant, one of
    `pdlab.transfer.rank.faults.FAULTS`."""

    shape: KvShape
    num_blocks: int
    prefill_tp: int = 1
    decode_tp: int = 1
    direction: str = "read"
    ucx_tls: str | None = None
    timeout_s: float = 60.0
    fault: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankOptions(CheckOptions):
    """Options of one rank. ``requests``: of the whole run. ``vram``: GPU memory, else DRAM.

    ``proto_info``: UCX_PROTO_INFO. ``used``: the protocols in use, from UCX 1.21 on. ``y``: all candidates.
    """

    side: str
    rank: int
    requests: int
    backend: str = "UCX"
    vram: bool = False
    proto_info: str = "used"

    @property
    def initiator(self) -> bool:
        """Decode pulls (READ); prefill pushes (WRITE)."""
        return (self.side == "decode") == (self.direction == "read")

    @property
    def tp(self) -> int:
        return self.prefill_tp if self.side == "prefill" else self.decode_tp

    @property
    def name(self) -> str:
        return f"{self.side} rank {self.rank}"


@dataclass(frozen=True)
class TransferTimes:
    """Times and sizes of a rank's transfer. ``begin_s``, ``end_s``: readings of the host's monotonic clock.

    ``request_s``: per request, from its start to its last descriptor. ``post_s``: NIXL's posting time of all handles.
    ``descriptors``: requested ones; ``merged``: after NIXL merged neighbours. ``traffic``: interface -> bytes
    (received, sent).
    """

    begin_s: float
    end_s: float
    request_s: tuple[float, ...]
    post_s: float
    bytes: int
    descriptors: int
    merged: int
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
