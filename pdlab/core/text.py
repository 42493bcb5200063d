"""Tables and numbers as text."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

# Sums of the same numbers in different orders differ by less than this.
ROUNDING = 1e-9

_SPACES = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"  # which Python counts among what cannot be printed

Row = Sequence[str]


LEAST_DECIMAL = 0.0005  # smaller values would be 0.000


def number(value: float | None) -> str:
    """The number with as many decimals as a measured figure justifies; ``-`` if it is unknown."""
    if value is None:
        return "-"
    size = abs(value)
    if 0 < size < LEAST_DECIMAL:
        return f"{value:.1g}"
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 1000 else 0}f}"


def aligned(rows: Sequence[Row], left: Container[int] = ()) -> list[str]:
    """One line per row, with the cells in columns; those in ``left`` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(head: Row, rows: Sequence[Row], left: Container[int] = ()) -> str:
    """`aligned` rows under a head and a rule."""
    rule = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(aligned([head, rule, *rows], left))


def percent(share: float, reference: float = 0.0) -> str:
    """Per cent, with the fewest decimals that distinguish it from ``reference``: a share above 0 never prints as 0."""
    if abs(share - reference) <= ROUNDING:
        return f"{100 * share:.0f}".replace("-0", "0")
    decimals = next(d for d in range(10) if round(100 * share, d) != round(100 * reference, d))
    return f"{100 * share:.{decimals}f}"


def rounded(value: float, digits: int) -> float:
    """``value`` with that many significant digits."""
    return float(f"{value:.{digits}g}")


def counted(number: float, noun: str, plural: str = "", form: str = ".12g") -> str:
    """``1 finding``, ``2 findings``, ``0.5 cores``. ``plural``: with a verb, as in ``1 engine stays`` and ``2 engines
    stay``; else the noun and an s. ``form``: format of the number."""
    return f"{number:{form}} {noun if number == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """``45 s``, ``6 minutes``."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def ms(seconds: float | None, specification: str = ".1f") -> str:
    """``12.3``, in milliseconds; ``-`` if it is unknown."""
    return "-" if seconds is None else format(1000 * seconds, specification)


def byte_size(count: float, digits: int = 3) -> str:
    """``1.57 MB``: bytes with that many significant digits, in the largest unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{rounded(count / factor, digits):.12g} {unit}"
    return f"{count:.0f} B"


def last_line(text: str) -> str:
    """The last line that is not blank, stripped; empty if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def version_numbers(version: str) -> tuple[int, int] | None:
    """Major and minor number: ``(0, 29)`` for ``v0.29.0+cpu``; None for text that does not begin with two numbers."""
    match = re.match(r"v?(\d+)\.(\d+)", version.strip())
    return (int(match[1]), int(match[2])) if match else None


def printable(text: str) -> str:
    """The text with escapes in place of ends of lines, control characters, and bytes of a file's name that are no
    UTF-8."""
    return "".join(char if char.isprintable() or char in _SPACES else repr(char)[1:-1] for char in text)


def plain(value: float) -> str:
    """``2,000``: a number with three significant digits, above 100,000 a whole one."""
    return f"{rounded(value, 3):,g}" if value < 1e5 else f"{value:,.0f}"


def listed(labels: Sequence[str]) -> str:
    """``a, b and c``; for more than four labels the first three and the number of others."""
    first, last = (labels[:-1], labels[-1:]) if len(labels) <= 4 else (labels[:3], [f"{len(labels) - 3} others"])
    return " and ".join(filter(None, [", ".join(first), *last]))


LEAST_BEGUN = 4  # from this many characters on, the beginning of a name suggests the name
LISTED = 8  # most names in a message


class Choices(NamedTuple):
    """Suggestions for an unknown word: the known names ``near`` it, else all ``known`` names.

    As text: ``did you mean pd-pack?``, ``known are a, b``, ``known are a, b, ... (28 in all)``.
    """

    near: tuple[str, ...]
    known: tuple[str, ...]

    def __str__(self) -> str:
        names = self.known
        if self.near:
            return f"did you mean {' or '.join(self.near)}?"
        if len(names) <= LISTED:
            return f"known are {', '.join(names)}" if names else "none are known"
        return f"known are {', '.join(names[:LISTED])}, ... ({len(names)} in all)"


def choices(word: str, known: Iterable[str], cutoff: float = 0.6) -> Choices:
    """Suggestions for ``word``. ``cutoff``: that of difflib; 1: only equal names."""
    import difflib  # here, because only misspelt names need it

    names = sorted(dict.fromkeys(known))
    by_case = {name.casefold(): name for name in names}
    begun = [by_case[name] for name in by_case if len(word) >= LEAST_BEGUN and name.startswith(word.casefold())]
    near = begun[:LISTED] or [
        by_case[name] for name in difflib.get_close_matches(word.casefold(), by_case, n=3, cutoff=cutoff)
    ]
    return Choices(tuple(near), tuple(names))
