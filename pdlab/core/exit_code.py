"""How the failure of a command becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from pdlab.core.commands import not_installed
from pdlab.core.errors import BenchError, PdlabError, UsageError, WriteError
from pdlab.core.failure import failure_file, write_failure
from pdlab.core.text import printable

if TYPE_CHECKING:
    from pdlab.core.settings import Settings

    S = TypeVar("S", bound=Settings)

NOT_CLEAN = 3  # the command did its work and has findings: an invalid level, a failed step, a difference
INTERRUPTED = 130
READER_GONE = 141  # a shell's code for an end by SIGPIPE
_NO_HOME = "Could not determine home directory"  # of pathlib: HOME is not set, and passwd has no such user
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CommandLine(Protocol):
    """The main function of a command. ``argv``: None for the words of this process. Returns the exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def command(
    settings: type[S], codes: Mapping[type[PdlabError], int] | None = None
) -> Callable[[Callable[[S], int]], CommandLine]:
    """Decorator: make a function of these settings the main function of a command. ``codes``: see `exit_code`."""

    def decorate(run: Callable[[S], int]) -> CommandLine:
        def main(argv: Sequence[str] | None = None) -> int:
            from pdlab.core.settings import parse  # here, because pydantic loads slowly

            words = sys.argv[1:] if argv is None else argv
            return exit_code(lambda: run(parse(settings, words)), codes)

        return main

    return decorate


def exit_code(
    run: Callable[[], int], codes: Mapping[type[PdlabError], int] | None = None, *, resume: str | None = None
) -> int:
    """Run ``run``. Returns its exit code, or that of its failure.

    An expected failure prints one line that begins with ``error: `` on standard error. Its exit code is its own, or
    that of ``codes``. If the command was started with a failure file, the failure is also written there
    (`pdlab.core.failure`). ``resume``: the command that continues after an interruption. If nobody reads standard
    output any more (``| head``), nothing is printed.
    """
    again = f". Go on with: {resume}" if resume else ""
    failure_file()  # first, so that no child process inherits the variable
    _prepare_streams()
    try:
        with no_interrupt_lost():
            code = run()
        sys.stdout.flush()
        return code
    except PdlabError as error:
        # To continue does not help after an error on the command line.
        text = f"{cut(str(error))}{again if isinstance(error, BenchError | WriteError) else ''}"
        return _failed(error, text, (codes or {}).get(type(error), error.exit_code))
    except ModuleNotFoundError as error:
        package = (error.name or "pdlab").partition(".")[0]
        if package == "pdlab" or package in sys.stdlib_module_names:
            write_failure(cut(f"{type(error).__name__}: {error}"), error)
            raise  # a fault of pdlab
        return _failed(error, not_installed(package), 1)
    except KeyboardInterrupt as error:
        text = f"interrupted; finished levels are kept{again}" if resume else "interrupted"
        print(text, file=sys.stderr)
        write_failure(text, error)
        return INTERRUPTED
    except BrokenPipeError:
        if not stdout_closed():
            raise  # another pipe or connection: a fault of pdlab
        return READER_GONE
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            return _failed(error, f"no output can be written ({error.strerror}): free disk space{again}", 1)
        if error.filename is None and not resume:
            write_failure(cut(f"{type(error).__name__}: {error}"), error)
            raise  # not about a file
        return _failed(error, cut(no_file(error)), 1)
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith(_NO_HOME):
            text = "the home folder of this user, or of a ~USER, is not known: set HOME, or leave ~ out"
            return _failed(error, text, UsageError.exit_code)
        write_failure(cut(f"{type(error).__name__}: {error}"), error)
        raise
    finally:
        forget_interrupts()


def _failed(error: Exception, text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    write_failure(text, error)
    try:
        sys.stdout.flush()
    except OSError:  # Python would fail again at its end, and exit with 120
        _drop(sys.stdout.fileno())
    return code


def _prepare_streams() -> None:
    """Open the null device for each standard stream that the caller closed (``>&-``): else the next file would get its
    number, and a child process would print into that file. A character that the locale does not have is printed as an
    escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def no_file(error: OSError) -> str:
    """The file of the error, and why it cannot be used."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)


def cut(text: str) -> str:
    """The text on one line, with very long words cut, such as a file's content that was given as a value."""
    return re.sub(r"\S{250,}", lambda match: f"{match[0][:100]}...", printable(text))


def stop_by_signals() -> None:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt, even if a shell started this as a background job, which ignores
    SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def forget_interrupts() -> None:
    """Let this process end with its own exit code after it has handled a KeyboardInterrupt.

    CPython notes a KeyboardInterrupt that leaves a text run by ``exec``, and dataclasses are made of such texts. With
    that note ``python -m`` ends by SIGINT, whatever its exit code (CPython 3.11, Py_RunMain). Each text that is run
    clears the note (run_eval_code_obj there).
    """
    exec("")


@contextlib.contextmanager
def no_interrupt_lost() -> Iterator[None]:
    """Python only reports an exception that a finalizer raises: a Ctrl-C that arrives during one has no effect. In the
    block such a Ctrl-C is delivered again after the finalizer."""
    others = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if not issubclass(raised.exc_type, KeyboardInterrupt):
            others(raised)
            return
        # A signal here would be handled in the finalizer again.
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = others


def stdout_closed() -> bool:
    """Whether the reader of standard output is gone. If so, the rest of the output is dropped."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # no file, as in a test
        return False
    poll = select.poll()
    poll.register(number, 0)  # poll always reports POLLERR
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    _drop(number)
    return True


def _drop(number: int) -> None:
    """Whatever is written to this file descriptor from now on is dropped."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), number)
