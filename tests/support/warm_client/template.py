"""``python template.py SOCKET TOKENIZER``: a load generator that has imported vLLM and waits to be forked.

Each start that `sitecustomize` hands over gets a process of its own with the environment, the folder and the standard
streams of who started it. It ends when that one does, and the template when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from pdlab.bench.client import worker


def main(path: str, tokenizer: str) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints while it is imported
    worker.import_benchmark()
    from vllm.tokenizers import get_tokenizer

    get_tokenizer(tokenizer)  # imports what transformers puts off
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", file=answers, flush=True)
        while True:
            ready, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in ready:
                return 0
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _keep(connection)
            connection.close()


def _keep(connection: socket.socket) -> None:
    """Fork the load generator, end it with the one who started it, and say how it ended. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, fds, _, _ = socket.recv_fds(connection, 4, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += connection.recv(1 << 16)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _work(json.loads(text), fds)
    for fd in fds:
        os.close(fd)

    def end_it() -> None:
        connection.recv(1)  # nothing is sent: it returns when the other end is closed
        with contextlib.suppress(ProcessLookupError):  # it ended at the same time
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=end_it, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _work(start: dict[str, Any], fds: list[int]) -> None:
    code = 1
    try:
        for fd, standard in zip(fds, (0, 1, 2), strict=True):
            os.dup2(fd, standard)
            os.close(fd)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # the template's has read ahead
        os.chdir(start["cwd"])
        os.environ.clear()
        os.environ.update(start["env"])
        os.setsid()
        code = worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
