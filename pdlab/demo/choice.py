"""Choose what the demo measures on this machine, and refuse machines that are too small."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pdlab.cluster import local_nodes, machine
from pdlab.cluster.machine import Machine
from pdlab.core import defaults
from pdlab.core.errors import UsageError, reason_of
from pdlab.core.text import byte_size, counted

PORT = defaults.PORT
ENGINES = 2
LEVELS, FEWER_LEVELS = (1, 2, 4, 8, 16), (1, 2, 4, 8)
# Measured on 2 cores: the proportional set sizes of the demo's processes add up to 6.6 GB at the peak. The kernel can
# drop the pages of files among them, but two engines do not fit in less than 4 GB.
MEMORY_PEAK_BYTES = 6.6e9
MEMORY_NEED_BYTES = 4e9
DISK_NEED_BYTES = 1e9
ESTIMATED_CORES = 2.0  # the machine on which the times of the steps were measured had 2 cores
ON_THE_PLOT = (
    "Two small CPU engines per deployment, all on one machine: pack and spread differ only by noise here, and nothing "
    "of this predicts GPUs."
)


class Choice(NamedTuple):
    """The concurrency levels of the demo, and the reasons for its choices, one sentence each."""

    levels: tuple[int, ...]
    why: tuple[str, ...]


def refuse_if_too_small(host: Machine, folders: Sequence[Path]) -> None:
    """Raises UsageError if memory or disk space is too small for the demo."""
    free = host.memory_free_bytes
    if free is not None and free < MEMORY_NEED_BYTES:
        raise UsageError(
            f"{byte_size(free)} of memory are free, but the demo needs at least {MEMORY_NEED_BYTES / 1e9:.0f} GB "
            f"for Ray, {ENGINES} engines and the load generator; end other programs, or raise the "
            "container's memory limit"
        )
    for folder in folders:
        left = machine.disk_free_bytes(folder)
        if left is not None and left < DISK_NEED_BYTES:
            raise UsageError(
                f"{byte_size(left)} of disk are free for {folder}, but the demo needs {DISK_NEED_BYTES / 1e9:.0f} GB; "
                "free some, or choose other folders with --out, $PDLAB_CACHE_DIR, $TMPDIR"
            )


def choose(host: Machine, requested: tuple[int, ...] | None) -> Choice:
    """The levels for this machine; ``requested`` replaces them."""
    cores = counted(host.cores, "core")
    fewest = "more would share the same cores" if host.cores < 8 else "the demo stays short"
    why = [
        f"{ENGINES} engines per deployment: the fewest that PD can have (1 prefill, 1 decode), and as many collocated "
        f"ones to compare with; {fewest}"
    ]
    if requested is not None:
        levels, reason = requested, "as requested"
    elif host.cores < 2:
        levels, reason = (
            FEWER_LEVELS,
            f"without {LEVELS[-1]}, because {cores} for all processes is few",
        )
    elif host.idle_cores is not None and host.idle_cores < 1:
        levels = FEWER_LEVELS
        reason = f"without {LEVELS[-1]}, because other programs leave {host.idle_cores:.1f} of {cores}"
    else:
        levels, reason = LEVELS, "from an idle deployment to one that queues"
    why.append(f"concurrency {', '.join(map(str, levels))} ({reason})")
    if host.busy:
        names = ", ".join(f"{each.name} (pid {each.pid}) {each.cores:.1f}" for each in host.busy[:3])
        why.append(
            f"other programs use cores: {names}; they make the measured figures worse, and levels may be invalid: "
            "the demo measures invalid levels once more"
        )
    if host.memory_free_bytes is not None and host.memory_free_bytes < MEMORY_PEAK_BYTES:
        why.append(
            f"memory is scarce: {byte_size(host.memory_free_bytes)} are free, and the demo used up to "
            f"{byte_size(MEMORY_PEAK_BYTES)} on another machine; the kernel may kill an engine"
        )
    return Choice(levels, tuple(why))


def conditions(host: Machine) -> list[str]:
    """Notes for the reader of the plot."""
    notes = [ON_THE_PLOT]
    if host.busy and host.idle_cores is not None:
        notes.append(
            f"Other programs were running: {host.idle_cores:.1f} of {counted(host.cores, 'core')} were idle at the "
            "beginning."
        )
    return notes


def slower_by(host: Machine) -> float:
    """Factor by which this machine is slower than two idle cores, for the first estimate."""
    idle = host.cores if host.idle_cores is None else host.idle_cores
    return max(1.0, ESTIMATED_CORES / max(0.5, idle))


def describe(host: Machine, out: Path) -> str:
    """The machine in one line: cores, memory, disk, load."""
    parts = [counted(host.cores, "core")]
    if host.idle_cores is not None:
        parts[0] += f" ({host.idle_cores:.1f} idle)"
    if host.memory_free_bytes is not None and host.memory_bytes is not None:
        parts.append(f"{byte_size(host.memory_free_bytes)} of {byte_size(host.memory_bytes)} memory free")
    disk = machine.disk_free_bytes(out)
    if disk is not None:
        parts.append(f"{disk / 1e9:.0f} GB disk free")
    if host.load_average is not None:
        parts.append(f"load average {host.load_average:.1f}")
    return ", ".join(parts)


@contextlib.contextmanager
def held_port(requested: int | None) -> Iterator[int]:
    """The port to serve on: ``requested``, else PORT, else a free port that is held for the demo during the block.

    Raises UsageError if ``requested`` is taken or no port.
    """
    if requested is not None and not 0 < requested < 65536:
        raise UsageError(f"--port {requested}: a port is 1 to 65535")
    port = PORT if requested is None else requested
    with contextlib.ExitStack() as stack:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if requested is not None:
                    raise UsageError(f"--port {port} cannot be used ({reason_of(error)}); choose another") from error
                held, port = local_nodes.hold_port()
                stack.enter_context(held)
                print(f"port {PORT} is taken by another program: serving on {port}")
        yield port


def nodes_are_up() -> bool:
    try:
        return local_nodes.running() is not None
    except UsageError:  # another launch is starting nodes, or their record is damaged
        return True
