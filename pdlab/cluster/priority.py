"""On local nodes, processes that answer requests run before the engine cores, which compute without a break.

Otherwise each hop of a request waits until an engine core on the same CPU has used its time slice. The kernel lets only
root, or a process with CAP_SYS_NICE, take a niceness below 0 (setpriority(2)); others keep 0. Imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# 2.4 times the weight of niceness 0 (sched_prio_to_weight of the kernel).
ANSWERING = -4
COMPUTING = 0  # and not above: other programs of the machine would starve the engines


def set_niceness(niceness: int, pid: int | str = "self") -> None:
    """Of all threads of this process, or of process ``pid``; their later threads and children inherit it. Does nothing
    where the kernel forbids it.
    """
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended, or the kernel forbids it
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
