"""A link with a delay between two network namespaces: ``link_relay.py FD NAME DELAY_S [FOLDER]``. Needs no netem.

Makes a TAP device NAME in its own network namespace and another one in the namespace of the open file FD. Prints
``ready``, then forwards each frame DELAY_S seconds after its arrival. The kernel does the segmentation, so frames are
large, and one Python process forwards several Gbit/s. With FOLDER it drops a share of the frames: at SIGHUP it reads
the share from the file `DROP_FILE` of that folder. Imports nothing of pdlab.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time

# <linux/if_tun.h>
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 1 << 17
BURST = 64  # frames to read before due frames are written
DROP_FILE = "link.drop"


class FrameLoss:
    """Drops a share of the frames, with a fixed seed."""

    def __init__(self, folder: str | None) -> None:
        self.share = 0.0
        self._folder = folder
        self._rng = random.Random(0)

    def read(self, *_: object) -> None:
        """Read the share from the folder's file; 0 if the file has none. Is the handler of SIGHUP."""
        try:
            with open(os.path.join(self._folder or "", DROP_FILE), encoding="utf-8") as file:  # noqa: PTH118, PTH123
                self.share = min(1.0, max(0.0, float(file.read())))
        except (OSError, ValueError):
            self.share = 0.0

    def lost(self) -> bool:
        """Whether to drop the next frame."""
        return self.share > 0 and self._rng.random() < self.share


def tap(name: str) -> int:
    """File descriptor of a new TAP device in this thread's network namespace; the device exists while it is open."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return file


def carry(ends: tuple[int, int], delay_s: float, losses: FrameLoss) -> None:
    """Forward frames between the two devices until one of them is removed, which raises OSError."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    # All frames wait equally long, so one queue in order of arrival holds both directions.
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(ends, [], [], pause_s)[0]:
            for _ in range(BURST):
                try:
                    frame = os.read(source, FRAME_BYTES)
                except BlockingIOError:
                    break
                if not losses.lost():
                    waiting.append((time.monotonic() + delay_s, other[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            try:
                os.write(target, frame)
            except OSError as error:
                # A full queue, or an interface that is not up: the frame is lost, as on any wire.
                if error.errno not in (errno.EAGAIN, errno.EIO):
                    raise


def main() -> None:
    far, name, delay_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    near = tap(name)
    if ctypes.CDLL(None, use_errno=True).setns(far, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    ends = (near, tap(name))
    losses = FrameLoss(sys.argv[4] if len(sys.argv) > 4 else None)
    signal.signal(signal.SIGHUP, losses.read)
    print("ready", flush=True)
    carry(ends, delay_s, losses)


if __name__ == "__main__":
    main()
