"""A status line: overwritten on a terminal, otherwise printed at intervals."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

CLEAR = "\r\x1b[K"
EVERY_S = 15.0
COLUMNS = 80  # if the terminal's width is unknown


class StatusLine:
    """``every_s``: seconds between lines without a terminal. ``after_s``: seconds until the first line."""

    def __init__(self, stream: TextIO | None = None, every_s: float = EVERY_S, after_s: float = 0.0) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every_s = every_s
        self._next_s = time.monotonic() + after_s
        self._shown = False

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Replace the shown text by ``text``. ``at_once``: do not wait for the next interval."""
        now = time.monotonic()
        if now < self._next_s and not at_once:
            return
        if self._terminal:
            self._stream.write(f"{CLEAR}{text[: self._columns() - 1]}")
            self._stream.flush()
            self._shown = True
        else:
            print(text, file=self._stream, flush=True)
            self._next_s = now + self._every_s

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        if self._shown:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._shown = False

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or COLUMNS
        except (OSError, ValueError):
            return COLUMNS


def minutes(seconds: float) -> str:
    """``12:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
