#!/usr/bin/env python3
"""As launch_gptoss.py, with servers that keep no marks and count no parts while the file of the first word is there.

For `ttft_pairs.py timeline --launch`. A script of its own: what it defines goes to the replicas by value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.deploy.serving.step_watch import connector_stats
from pdlab.deploy.serving.timeline import SENDING, SendsTimeline, TimelineMiddleware, TimingBook
from pdlab.marks.engine_marks import CORE, WIRE


def switch_by(off: Callable[[], bool]) -> None:
    """Change the classes that an application is built of. ``off``: whether nothing is to be marked now."""
    call, timed, take = TimelineMiddleware.__call__, SendsTimeline._timed, TimingBook.take

    async def call_or_not(self: TimelineMiddleware, scope: Any, receive: Any, send: Any) -> None:
        if off():  # pieces of a stream pass the other middlewares all the same
            await self.app({**scope, SENDING: SimpleNamespace(past=send)}, receive, send)
        else:
            await call(self, scope, receive, send)

    async def timed_or_not(self: Any, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        if off():
            answers: AsyncIterator[Any] = await getattr(super(SendsTimeline, self), method)(request, raw)
            return answers
        return await timed(self, method, request, raw)

    def take_or_not(self: TimingBook, outputs: Sequence[Any]) -> None:
        if not off():
            take(self, outputs)
            return
        for stats in connector_stats(outputs):
            stats.pop(CORE, None)
            stats.pop(WIRE, None)

    TimelineMiddleware.__call__ = call_or_not  # type: ignore[method-assign]
    SendsTimeline._timed = timed_or_not  # type: ignore[method-assign]
    TimingBook.take = take_or_not  # type: ignore[method-assign]


if __name__ == "__main__":
    from pdlab.__main__ import script

    path = sys.argv.pop(1)
    switch_by(lambda: os.path.exists(path))  # noqa: PTH110
    script("launch")
