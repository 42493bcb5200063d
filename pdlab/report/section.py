"""A table or a list with its title, as it is printed and as the page has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pdlab.core.rendering import macro

ASSETS = Path(__file__).parent / "assets"
WORDS = ASSETS / "words.txt"


class Section(NamedTuple):
    """``title`` is one line; ``body`` may be empty."""

    title: str
    body: str = ""

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.body}" if self.body else self.title


def of_macro(name: str, *facts: Any) -> Section:
    """The section that a macro of ``sections.txt`` writes: its title, then its body."""
    title, _, body = macro(ASSETS / "sections.txt", name, *facts).partition("\n")
    return Section(title, body)
