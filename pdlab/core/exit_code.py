"""How the failure of a command becomes one line and an exit code."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from pdlab.core.commands import not_installed
from pdlab.core.errors import BenchError, PdlabError, WriteError
from pdlab.core.failure import failure_file, write_failure

if TYPE_CHECKING:
    from pdlab.core.settings import Settings

    S = TypeVar("S", bound=Settings)

INTERRUPTED = 130
READER_GONE = 141  # as a shell tells of SIGPIPE


class CommandLine(Protocol):
    """``argv`` None: the words of this process. Returns the exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def command(
    settings: type[S], codes: Mapping[type[PdlabError], int] | None = None
) -> Callable[[Callable[[S], int]], CommandLine]:
    """Make a function of these settings the main function of a command. ``codes``: as of `exit_code`."""

    def decorate(run: Callable[[S], int]) -> CommandLine:
        def main(argv: Sequence[str] | None = None) -> int:
            from pdlab.core.settings import parse  # pydantic takes a while, and some failures come before it

            words = sys.argv[1:] if argv is None else argv
            return exit_code(lambda: run(parse(settings, words)), codes)

        return main

    return decorate


def exit_code(
    run: Callable[[], int], codes: Mapping[type[PdlabError], int] | None = None, *, resume: str | None = None
) -> int:
    """What ``run`` returns. Expected failures are one line on standard error that begins with ``error: ``, and their
    own code or one of ``codes``. ``resume``: the command that goes on where this one was interrupted or could
    not go on. Where nobody reads standard output any more (``| head``), nothing is printed. A parent that named a
    file for it gets the failure there too (`pdlab.core.failure`)."""
    again = f". Go on with: {resume}" if resume else ""
    failure_file()  # before anything is started that would inherit the variable
    try:
        code = run()
        sys.stdout.flush()
        return code
    except PdlabError as error:
        # What is wrong on the command line stays wrong.
        text = f"{cut(str(error))}{again if isinstance(error, BenchError | WriteError) else ''}"
        return _failed(error, text, (codes or {}).get(type(error), error.exit_code))
    except ModuleNotFoundError as error:
        package = (error.name or "pdlab").partition(".")[0]
        if package == "pdlab" or package in sys.stdlib_module_names:
            write_failure(cut(f"{type(error).__name__}: {error}"), error)
            raise  # a fault of ours
        return _failed(error, not_installed(package), 1)
    except KeyboardInterrupt as error:
        text = f"interrupted; finished levels are kept{again}" if resume else "interrupted"
        print(text, file=sys.stderr)
        write_failure(text, error)
        return INTERRUPTED
    except BrokenPipeError:
        if not stdout_closed():
            raise  # a pipe or a connection of ours: a fault like any other
        return READER_GONE
    except OSError as error:
        if error.filename is None and not resume:
            write_failure(cut(f"{type(error).__name__}: {error}"), error)
            raise  # not a file that somebody named
        return _failed(error, cut(no_file(error)), 1)
    except Exception as error:
        write_failure(cut(f"{type(error).__name__}: {error}"), error)
        raise


def _failed(error: Exception, text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    write_failure(text, error)
    return code


def no_file(error: OSError) -> str:
    """The file and why it cannot be used."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)


def cut(text: str) -> str:
    """The text on one line, and words that are no words, such as a file given as a value, cut to a length that can be
    read."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return re.sub(r"\S{250,}", lambda match: f"{match[0][:100]}...", line)


def stdout_closed() -> bool:
    """Whether the reader of standard output is gone; the rest of its buffer is then dropped."""
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
