"""What a status line writes on a terminal and elsewhere, by a made-up clock."""

from __future__ import annotations

import io

import pytest

from pdlab.core import status_line
from pdlab.core.status_line import CLEAR, StatusLine


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (io.StringIO(), "second\nat once\na note\nlast\n"),
        (Screen(), f"{CLEAR}second{CLEAR}third{CLEAR}at once{CLEAR}a note\n{CLEAR}{'last':<4}{CLEAR}"),
    ],
    ids=["plain", "terminal"],
)
def test_what_is_written(stream: io.StringIO, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(status_line.time, "monotonic", lambda: now[0])
    line = StatusLine(stream, every_s=10.0, after_s=2.0)
    for at_s, shown in ((1.0, "first"), (2.0, "second"), (11.0, "third")):
        now[0] = at_s
        line.show(shown)
    line.show("at once", at_once=True)
    line.note("a note")
    now[0] = 21.0
    line.show("last")
    line.clear()
    line.clear()
    assert stream.getvalue() == text


def test_a_line_is_cut_to_the_terminal() -> None:
    screen = Screen()
    StatusLine(screen).show("x" * 200)
    assert screen.getvalue() == CLEAR + "x" * (status_line.COLUMNS - 1)
