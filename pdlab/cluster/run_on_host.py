"""Run a module of pdlab on a host made of namespaces like a function that raises its errors here.

A Ray driver must be in the namespaces of its node: Ray watches it by its process number and shares memory with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pdlab.cluster.namespaces import spawn_in
from pdlab.core import errors
from pdlab.core.errors import PdlabError
from pdlab.core.exit_code import INTERRUPTED, forget_interrupts
from pdlab.core.failure import attach_logs, attached_logs

# Both sides block these signals until they can handle them. A child that is interrupted during its imports would end
# without a message and would look like a failure.
HELD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
POLL_S = 0.05


def call(pid: int, module: str, text: str, env: Mapping[str, str]) -> None:
    """Run ``python -m MODULE`` on the host with PID 1 ``pid`` and with ``text`` as standard input.

    Raises the PdlabError that `answering` caught there, and KeyboardInterrupt if the child was interrupted. An
    interrupt of this process is passed on to the child, and this waits for its end. The child ends with this process.
    """
    theirs, ours = os.pipe()
    with open(theirs) as answers, contextlib.ExitStack() as writing, _holding() as release:  # noqa: PTH123
        writing.callback(os.close, ours)
        child = spawn_in(
            pid, [sys.executable, "-m", module, str(ours)], dies_with_parent=True, env=dict(env),
            stdin=subprocess.PIPE, pass_fds=(ours,), start_new_session=True,
        )  # fmt: skip
        writing.close()
        code = _wait(child, text, release)
        error = answers.read()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if error:
        kind, message, logs = json.loads(error)
        raised: PdlabError = getattr(errors, kind)(message)
        attach_logs(raised, Path(logs) if logs else None)
        raise raised
    if code != 0:
        raise PdlabError(f"{module} on the first of the two hosts ended with exit code {code}")


def answering(work: Callable[[str], None]) -> int:
    """The child's side of `call`: call ``work`` with the text of standard input; returns the exit code."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        work(sys.stdin.read())
    except PdlabError as error:
        with os.fdopen(channel, "w") as out:
            logs = attached_logs(error)
            json.dump([type(error).__name__, str(error), str(logs) if logs else None], out)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        forget_interrupts()
    return 0


@contextlib.contextmanager
def _holding() -> Iterator[Callable[[], None]]:
    """Block the signals HELD in the block and in processes that it starts.

    Yields a function that ends this and raises KeyboardInterrupt if a signal came. The child inherits the mask. In this
    process another thread may take a signal, and Python then raises in this thread. So the handlers only record it.
    """
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in HELD}

    def release() -> None:
        while handlers:
            number, handler = handlers.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            came.clear()
            raise KeyboardInterrupt

    try:
        yield release
    finally:
        release()


def _wait(child: subprocess.Popen[bytes], text: str, release: Callable[[], None]) -> int:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(text.encode())
    while True:
        try:
            release()
            # Poll, because a signal that another thread takes does not end a wait in this thread.
            while child.poll() is None:
                time.sleep(POLL_S)
            return int(child.returncode)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
