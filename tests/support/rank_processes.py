"""Ranks as plain processes of this machine: the code that Ray's actors run, without Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from pdlab.transfer.rank.messages import RankOptions
from pdlab.transfer.rank.rank import Rank


def serve(pipe: Connection, options: RankOptions, env: dict[str, str]) -> None:
    """The child: answer until the pipe ends."""
    os.environ.update(env)
    rank = Rank(options)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, args = pipe.recv()
            pipe.send(rank.call(method, *args))


class ProcessRanks:
    """A context manager: started on entry, and none of them left on exit, whatever state they are in."""

    def __init__(self, options: Sequence[RankOptions]) -> None:
        self.options = list(options)
        self.busy: set[int] = set()

    def __enter__(self) -> ProcessRanks:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for options in self.options:
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, options, {"NIXL_LOG_LEVEL": "WARN"}), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()

    def call(self, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        for rank, words in zip(ranks, args, strict=True):
            if rank not in self.busy:
                with contextlib.suppress(OSError):
                    self.pipes[rank].send((method, words))
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank in ranks:
            name = self.options[rank].name
            try:
                if rank not in self.busy and self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    answers.append(self.pipes[rank].recv())
                else:
                    self.busy.add(rank)
                    answers.append(("timeout", f"{name} does not answer within {timeout_s:g} s"))
            except (EOFError, OSError):
                answers.append(("peer", f"{name} died"))
        return answers

    def ips(self) -> list[str]:
        return ["127.0.0.1"] * len(self.options)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
