"""Numbers that the engines of a rehearsal share: when a link is free again, and how busy a front end is.

The engines are processes of one machine. Each pair of numbers is a file in their folder, which they map.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from pdlab.sim.kv_transfer import LinkEnd, Links, TransferCosts

_TWO = struct.Struct("dd")


class SharedNumbers:
    """Two numbers in a file; 0 until the first write."""

    def __init__(self, file: Path) -> None:
        self.file = file
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < _TWO.size:
                os.ftruncate(descriptor, _TWO.size)
            self._map = mmap.mmap(descriptor, _TWO.size)
        finally:
            os.close(descriptor)

    def read(self) -> tuple[float, float]:
        first, second = _TWO.unpack_from(self._map)
        return first, second

    def write(self, first: float, second: float) -> None:
        _TWO.pack_into(self._map, 0, first, second)


class SharedEnd:
    """One side of a link (`pdlab.sim.kv_transfer.Sender`) that several processes use: the engine with the KV, or a
    node's network. ``capacity``, ``allocated``: tokens of that engine's KV pool."""

    def __init__(self, numbers: SharedNumbers, capacity: float = 0.0, allocated: float = 0.0) -> None:
        self._numbers = numbers
        self.capacity, self.allocated = capacity, allocated

    @property
    def link_free_s(self) -> float:
        return self._numbers.read()[0]

    @link_free_s.setter
    def link_free_s(self, moment_s: float) -> None:
        self._numbers.write(moment_s, self._numbers.read()[1])

    @property
    def link_busy_s(self) -> float:
        return self._numbers.read()[1]

    @link_busy_s.setter
    def link_busy_s(self, seconds: float) -> None:
        self._numbers.write(self._numbers.read()[0], seconds)


class SharedLinks(Links):
    """The links between two nodes. If engines share the wire, a transfer begins when both nodes' networks are free."""

    def __init__(self, costs: TransferCosts, folder: RehearsalFolder, nodes: tuple[str, str]) -> None:
        self._folder = folder
        self._wires = [folder.end(f"wire-{node}") for node in dict.fromkeys(nodes)] if costs.shared else []
        super().__init__(costs)

    @property
    def free_s(self) -> float:
        return max((wire.link_free_s for wire in self._wires), default=0.0)

    @free_s.setter
    def free_s(self, moment_s: float) -> None:
        for wire in self._wires:
            wire.link_free_s = max(wire.link_free_s, moment_s)

    def carry(self, sender: LinkEnd, receiver: LinkEnd, size: float, now_s: float) -> float:
        with self._folder.locked():
            return super().carry(sender, receiver, size, now_s)


class RehearsalFolder:
    """The folder of one rehearsal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._numbers: dict[str, SharedNumbers] = {}

    def numbers(self, name: str) -> SharedNumbers:
        if name not in self._numbers:
            self._numbers[name] = SharedNumbers(self.path / name)
        return self._numbers[name]

    def end(self, name: str, capacity: float = 0.0, allocated: float = 0.0) -> SharedEnd:
        return SharedEnd(self.numbers(name), capacity, allocated)

    def names(self, prefix: str) -> list[str]:
        """Sorted names of numbers with that prefix."""
        return sorted(path.name for path in self.path.glob(f"{prefix}*"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock for a block; the kernel releases it at the end of the process."""
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
