"""The progress of a sweep, or of a whole experiment."""

from __future__ import annotations

import time
from typing import TextIO

from pdlab.core.status_line import StatusLine, minutes
from pdlab.core.text import counted


class Progress:
    """Requests answered of those of a sweep, with elapsed and remaining time, on ``stream``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._line = StatusLine(stream)
        self._title = ""
        self._total = self._finished = self._level_total = self._done = 0
        self._levels = self._level = 0
        self._began = time.monotonic()
        self._loaded: tuple[float, int] | None = None  # when the first level began, and requests done before

    def extend(self, requests: int, levels: int = 1) -> None:
        """One more level (or ``levels``), with ``requests`` requests, is in the plan."""
        self._total += requests
        self._levels += levels

    def level(self, title: str, requests: int, *, counts: bool = True) -> None:
        """A level begins (``counts`` False: the warm-up)."""
        self._level += counts
        if counts and self._loaded is None:
            self._loaded = (time.monotonic(), self._finished)
        self._level_total, self._done = requests, 0
        self._title = self._titled(title, counts)
        self._show(counted(requests, "request"), at_once=True)

    def update(self, done: int, failed: int) -> None:
        """``done`` requests of the running level are answered, ``failed`` of them with an error."""
        self._done = done
        self._show(f"{done}/{counted(self._level_total, 'request')}" + (f", {failed} failed" if failed else ""))

    def level_done(self, text: str) -> None:
        """The running level has ended; ``text``: its result."""
        self._finished, self._done = self._finished + self._level_total, 0
        self.note(f"{self._title}: {text}")

    def note(self, text: str) -> None:
        """Print a separate line."""
        self._line.note(text)

    def close(self) -> None:
        self._line.clear()

    @property
    def left_s(self) -> float | None:
        """Seconds to go, by the requests; None before any is answered."""
        moment = time.monotonic()
        began, before = self._loaded or (moment, self._finished)
        done = self._finished + self._done
        return (moment - began) * (self._total - done) / (done - before) if done > before else None

    def _titled(self, title: str, counts: bool) -> str:
        return f"[{self._level}/{self._levels}] {title}" if counts else title

    def _show(self, text: str, *, at_once: bool = False) -> None:
        left_s = self.left_s
        to_go = "" if left_s is None else f", about {minutes(left_s)} to go"
        clock = f"elapsed {minutes(time.monotonic() - self._began)}{to_go}"
        self._line.show(f"{self._title}: {text} ({clock})", at_once=at_once)


class ExperimentProgress(Progress):
    """The same for the visits of an experiment.

    The remaining time is the plan's estimate for the remaining visits, times the ratio of actual to estimated time of
    the finished visits.
    """

    def __init__(self, estimates_s: list[float], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._estimates_s = estimates_s
        self._visit = 0
        self._prefix = ""
        self._visit_began = self._began
        self._spent_s = self._planned_s = 0.0

    def visit(self, number: int, words: str) -> None:
        """Visit ``number`` (from 0) begins."""
        self._visit, self._visit_began = number, time.monotonic()
        self._total = self._finished = self._done = 0
        self._title = self._prefix = f"[{number + 1}/{len(self._estimates_s)}] {words}"
        self._show("launching", at_once=True)

    def visit_done(self, text: str, *, measured: bool) -> None:
        if measured:
            self._spent_s += time.monotonic() - self._visit_began
            self._planned_s += self._estimates_s[self._visit]
        self._estimates_s[self._visit] = 0.0
        self.note(f"{self._prefix}: {text}")

    def waiting(self, text: str) -> None:
        """Show the launcher's line ``text``."""
        self._show(text)

    @property
    def left_s(self) -> float:
        """Remaining seconds, by the estimates and their accuracy until now."""
        share = (self._finished + self._done) / max(1, self._total)
        ahead = sum(self._estimates_s[self._visit :]) - self._estimates_s[self._visit] * share
        return ahead * (self._spent_s / self._planned_s if self._planned_s else 1.0)

    def _titled(self, title: str, counts: bool) -> str:
        return f"{self._prefix}: {title}"
