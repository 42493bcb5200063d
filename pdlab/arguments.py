"""What command lines share: types of their arguments, and how a failure becomes a line and an exit code."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from pdlab.errors import PdlabError, UsageError

INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """Complaints are UsageErrors: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: {self.prog} --help)")


def exit_code(run: Callable[[], int], codes: Mapping[type[PdlabError], int] | None = None) -> int:
    """What ``run`` returns. Expected failures are one line on standard error and their own code or one of ``codes``."""
    try:
        return run()
    except PdlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return (codes or {}).get(type(error), error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def positive(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError, as all of these do."""
    if not re.fullmatch(r"\s*\d+\s*", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, each once, in ascending order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        return above_zero(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0") from error


def backends(text: str) -> tuple[str, ...]:
    """Names of NIXL backends with commas between, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(re.fullmatch(r"[A-Z0-9_]+", name) for name in names):
        raise argparse.ArgumentTypeError(
            f"{text!r}: NIXL backends are names in capitals, for example UCX or UCX,LIBFABRIC"
        )
    return names
