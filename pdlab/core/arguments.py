"""What command lines share: types of their arguments, and how a failure becomes a line and an exit code."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pdlab.core.errors import PdlabError, UsageError

INTERRUPTED = 130
READER_GONE = 141  # as a shell tells of SIGPIPE


class OneLineParser(argparse.ArgumentParser):
    """Complaints are UsageErrors: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: {self.prog} --help)")


def exit_code(
    run: Callable[[], int], codes: Mapping[type[PdlabError], int] | None = None, *, prog: str | None = None
) -> int:
    """What ``run`` returns. Expected failures are one line on standard error, led by ``prog`` where it is given, and
    their own code or one of ``codes``. Where nobody reads standard output any more (``| head``), not a word."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except PdlabError as error:
        print(f"{prog}: error: {error}" if prog else f"error: {error}", file=sys.stderr)
        return (codes or {}).get(type(error), error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not stdout_closed():
            raise  # a pipe or a connection of ours: a fault like any other
        return READER_GONE


def stdout_closed() -> bool:
    """Whether nobody reads standard output any more; what is still in its buffer is then dropped."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # no file: a test's
        return False
    poll = select.poll()
    poll.register(number, 0)  # POLLERR is told in any case
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), number)
    return True


def check_writable(path: Path, flag: str) -> None:
    """Said before the work, not after it. Raises UsageError where a file cannot be made at ``path``."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {path}: no folder {folder}; make it, or choose another")
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; give a file in it")
    there = path.exists()
    try:
        path.open("ab").close()  # permissions alone do not tell of a read-only file system, nor root of anything
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written ({error.strerror}); choose another") from error


def not_for(args: argparse.Namespace, parser: argparse.ArgumentParser, flags: Sequence[str], what: str) -> None:
    """Flags that would change nothing are refused: raises UsageError where one differs from its default."""
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        if getattr(args, name) != parser.get_default(name):
            raise UsageError(f"{flag} does nothing with {what}; leave it out")


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
