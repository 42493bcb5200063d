"""How far a sweep is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

PLAIN_EVERY_S = 15.0


class Progress:
    """Requests done of all requests of a sweep, with elapsed and remaining time, on ``stream``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._title = ""
        self._total = self._finished = self._level_total = 0
        self._levels = self._level = 0
        self._began = self._last_line_s = time.monotonic()
        self._loaded: tuple[float, int] | None = None  # when the first level began, and requests done before

    def begin(self, total: int, levels: int) -> None:
        """``total`` requests in ``levels`` levels are to come."""
        self._total, self._levels = total, levels
        self._began = time.monotonic()
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="req", file=self._stream, dynamic_ncols=True, leave=False)

    def extend(self, requests: int, levels: int = 1) -> None:
        """One more level (or ``levels``) of so many requests is to come, that could not be foreseen."""
        self._total += requests
        self._levels += levels
        if self._bar is not None:
            self._bar.total = self._total

    def level(self, title: str, requests: int, *, counts: bool = True) -> None:
        """A level begins (``counts`` False: the warm-up)."""
        self._level += counts
        if counts and self._loaded is None:
            self._loaded = (time.monotonic(), self._finished)
        self._level_total = requests
        self._title = f"[{self._level}/{self._levels}] {title}" if counts else title
        self._last_line_s = time.monotonic()
        if self._bar is not None:
            self._bar.set_description(self._title)
        else:
            self._print(f"{self._title}: {requests} requests{self._clock()}")

    def update(self, done: int, failed: int) -> None:
        """``done`` requests of the running level are answered, ``failed`` of them with an error."""
        if self._bar is not None:
            if failed:
                self._bar.set_postfix_str(f"{failed} failed", refresh=False)
            self._bar.n = self._finished + done
            self._bar.refresh()
        elif time.monotonic() - self._last_line_s >= PLAIN_EVERY_S:
            self._last_line_s = time.monotonic()
            words = f", {failed} failed" if failed else ""
            self._print(f"{self._title}: {done}/{self._level_total} requests{words}{self._clock(done)}")

    def level_done(self, text: str) -> None:
        """The running level has ended; ``text`` says how."""
        self._finished += self._level_total
        if self._bar is not None:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.n = self._finished
        self.note(f"{self._title}: {text}")

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _clock(self, done: int = 0) -> str:
        moment = time.monotonic()
        elapsed = f"elapsed {minutes(moment - self._began)}"
        began, before = self._loaded or (moment, self._finished)
        measured = self._finished + done - before
        if not measured:
            return f" ({elapsed})"
        remaining_s = (moment - began) * (self._total - self._finished - done) / measured
        return f" ({elapsed}, about {minutes(remaining_s)} to go)"


def minutes(seconds: float) -> str:
    """``12:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class ExperimentProgress(Progress):
    """One line for the whole experiment: which visit, which level, and the time left.

    The time left is the plan's estimate of what is to come, times how long finished visits really
    took against their estimates.
    """

    def __init__(self, estimates_s: list[float], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._estimates_s = estimates_s
        self._visit = 0
        self._words = ""
        self._visit_began = self._began
        self._spent_s = self._planned_s = 0.0
        self._share = 0.0
        self._requests = self._answered = 0
        self._shown = 0

    def visit(self, number: int, words: str) -> None:
        """Visit ``number`` (from 0) begins."""
        self._visit, self._words, self._share = number, words, 0.0
        self._visit_began = time.monotonic()
        self._requests = self._answered = 0
        self._line("launching", now_=True)

    def visit_done(self, text: str, *, measured: bool) -> None:
        if measured:
            self._spent_s += time.monotonic() - self._visit_began
            self._planned_s += self._estimates_s[self._visit]
        self._estimates_s[self._visit] = 0.0
        self.note(f"{self._prefix()}: {text}")

    def waiting(self, text: str) -> None:
        """The launcher says ``text``."""
        self._line(text)

    def begin(self, total: int, levels: int) -> None:
        self._requests += total

    def extend(self, requests: int, levels: int = 1) -> None:
        self._requests += requests

    def level(self, title: str, requests: int, *, counts: bool = True) -> None:
        self._title, self._level_total = title, requests
        self._line(title, now_=True)

    def update(self, done: int, failed: int) -> None:
        self._share = (self._answered + done) / max(1, self._requests)
        self._line(f"{self._title}: {done}/{self._level_total} requests" + (f", {failed} failed" if failed else ""))

    def level_done(self, text: str) -> None:
        self._answered += self._level_total
        self._share = self._answered / max(1, self._requests)
        self.note(f"{self._prefix()}: {self._title}: {text}")

    def note(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._clear()

    @property
    def left_s(self) -> float:
        """Seconds to go, by the estimates and how true they have been."""
        ahead = sum(self._estimates_s[self._visit :]) - self._estimates_s[self._visit] * self._share
        return ahead * (self._spent_s / self._planned_s if self._planned_s else 1.0)

    def _prefix(self) -> str:
        return f"[{self._visit + 1}/{len(self._estimates_s)}] {self._words}"

    def _line(self, text: str, *, now_: bool = False) -> None:
        moment = time.monotonic()
        clock = f"elapsed {minutes(moment - self._began)}, about {minutes(self.left_s)} to go"
        line = f"{self._prefix()}: {text} ({clock})"
        if self._stream.isatty():
            width = os.get_terminal_size(self._stream.fileno()).columns - 1
            self._stream.write(f"\r\x1b[K{line[:width]}")
            self._stream.flush()
            self._shown = 1
        elif now_ or moment - self._last_line_s >= 15.0:
            self._last_line_s = moment
            print(line, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._shown = 0
