"""What command lines share: types of their arguments, and how a failure becomes a line and an exit code."""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pdlab.core.commands import not_installed
from pdlab.core.errors import BenchError, PdlabError, UsageError, WriteError
from pdlab.core.failure import failure_file, write_failure
from pdlab.core.text import choices
from pdlab.core.transports import no_backend, no_transport

if TYPE_CHECKING:
    from pdlab.core.length_distribution import LengthDistribution

INTERRUPTED = 130
READER_GONE = 141  # as a shell tells of SIGPIPE
PICTURES = (".png", ".svg", ".pdf")
MAX_SEED = 2**63 - 1
MAX_TOKENS = 100_000_000  # of a request: more than any model takes
MAX_REPEATS = 1000
MAX_HOLD_S = 86_400  # of one request rate: a day
MAX_REQUESTS = 1_000_000  # of a level: their prompts are drawn before it
MIN_RATE_RPS = 1e-4  # a request in three hours
MAX_LOAD = 100_000  # requests in flight, or per second: far beyond what one load generator makes
LENGTHS_HELP = (
    "how lengths vary from request to request: fixed (default), uniform:0.8-1.0 (shares of the nominal length), "
    "lognormal:SIGMA[,median][,max=TOKENS], or in place of nominal lengths file:PAIRS.csv or "
    "mixes:INPUT:OUTPUT,...,every=S (docs/methodology.md)"
)


class OneLineParser(argparse.ArgumentParser):
    """Complaints are UsageErrors in plain words: one line, no usage block, and the nearest name of a misspelt one.

    A flag that takes one value and is given twice is refused, and so are --NAME and --no-NAME together: argparse
    would silently keep the last. An empty value is refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.options_by_dest: dict[str, str] = {}
        self._unknown: list[str] = []
        for name in (None, "store"):
            self.register("action", name, _Once)
        self.register("action", argparse.BooleanOptionalAction, _OneWay)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.options_by_dest = {}
        words = sys.argv[1:] if args is None else list(args)
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        self._unknown = [name for name in names if name not in self._option_string_actions]
        for word in words:
            if match := re.fullmatch(r"(--?[a-z][\w-]*)=--", word):  # argparse takes it for no value at all
                raise UsageError(f"{match[1]} needs a value, got '--'")
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string.strip():  # such as a shell's variable that is not set; Path would make it this folder
            flags = [name for name in action.option_strings if name.startswith("--")] or action.option_strings
            name = flags[0] if flags else action.metavar or action.dest
            raise UsageError(f"{name} needs a value, got {arg_string!r}")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        raise UsageError(self._reworded(message))

    def _reworded(self, message: str) -> str:
        """argparse's complaint in the words of every other one."""
        flag, rest = "", message
        if match := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
            names = match[1].split("/")
            flag, rest = next((name for name in names if name.startswith("--")), names[0]), match[2]
        help_text = f"(all flags: {self.prog} --help)"
        if match := re.fullmatch(r"unrecognized arguments: (.*)", rest, re.DOTALL):
            word = match[1].split(" ")[0].partition("=")[0]
            if not word.startswith("-"):
                return f"{word!r} stands where no word is expected: a flag's value follows its flag {help_text}"
            suggested = choices(word, self._option_string_actions, cutoff=0.75)
            return f"{word} is not a flag{f'; {suggested}' if suggested.near else ''} {help_text}"
        if match := re.fullmatch(r"invalid choice: (.+?) \(choose from (.*)\)", rest, re.DOTALL):
            known = [name.strip("' ") for name in match[2].split(",")]
            suggested = choices(match[1].strip("'"), known, cutoff=0.81)
            both = f"{suggested} " if suggested.near else ""
            named = f"{flag} " if flag.startswith("-") else ""  # a word on its own has no flag before it
            return f"{named}{match[1]}: {both}choose from {', '.join(known)}"
        if match := re.fullmatch(r"invalid (\w+) value: (.*)", rest, re.DOTALL):
            number_text = {"int": "a whole number", "float": "a number"}.get(match[1], f"a {match[1]}")
            return f"{flag}: {match[2]} is not {number_text}"
        if match := re.fullmatch(r"not allowed with argument (.*)", rest):
            return f"{flag} and {match[1].rpartition('/')[2]} exclude each other: leave one out"
        if re.fullmatch(r"expected (one|at least one) arguments?", rest):
            return f"{flag} needs a value"
        if match := re.fullmatch(r"ignored explicit argument (.*)", rest):
            return f"{flag} takes no value, got {match[1]}"
        if match := re.fullmatch(r"the following arguments are required: (.*)", rest):
            for name in self._unknown:
                suggested = choices(name, self._option_string_actions, cutoff=0.75)
                if suggested.near:
                    return f"{name} is not a flag; {suggested} {help_text}"
            return f"{match[1]} {'are' if ',' in match[1] else 'is'} needed {help_text}"
        return f"{flag}: {rest}" if flag else f"{rest} {help_text}"


class _Once(argparse.Action):
    """Keep the value of a flag; a second one is an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None and isinstance(parser, OneLineParser):
            before = parser.options_by_dest.get(self.dest)
            if before is not None:
                metavar = self.metavar if isinstance(self.metavar, str) else ""
                several = ", its values with commas between" if "," in metavar else ""
                problem = f"{option} is given twice" if before == option else f"{before} and {option} are the same flag"
                raise UsageError(f"{problem}: give it once{several}")
            parser.options_by_dest[self.dest] = option
        setattr(namespace, self.dest, values)


class _OneWay(argparse.BooleanOptionalAction):
    """--NAME or --no-NAME; both are an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None and isinstance(parser, OneLineParser):
            before = parser.options_by_dest.setdefault(self.dest, option)
            if before.startswith("--no-") != option.startswith("--no-"):
                raise UsageError(f"{before} and {option} exclude each other: leave one out")
        super().__call__(parser, namespace, values, option)


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


def check_writable(path: Path, flag: str) -> None:
    """Said before the work, not after it. Raises UsageError where a file cannot be made at ``path``."""
    try:
        file = path.resolve()  # the probe must not remove a link
        if not file.parent.is_dir():
            raise UsageError(f"{flag} {path}: no folder {file.parent}; make it, or choose another")
        if file.is_dir():
            raise UsageError(f"{flag} {path}: is a folder; give a file in it")
        existed = file.exists()
        file.open("ab").close()  # permissions alone do not tell of a read-only file system, nor root of anything
        if not existed:
            file.unlink()
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{flag} {path}: cannot be written ({_reason(error)}); choose another") from error


def check_folder(path: Path, flag: str) -> None:
    """Said before the work: raises UsageError where ``path`` cannot be a folder that files are written to."""
    try:
        folder = path.resolve()
        broken = [part for part in (path, *path.parents) if part.is_symlink() and not part.exists()]
        if broken:
            raise UsageError(f"{flag} {path}: {broken[0]} is a link to nothing; give a folder")
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise UsageError(f"{flag} {path}: {folder} is a file; give a folder")
        probe = folder / f".pdlab-{os.getpid()}"
        probe.open("xb").close()
        probe.unlink()
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{flag} {path}: cannot be written ({_reason(error)}); choose another") from error


def check_picture(path: Path, flag: str, *, make_folder: bool = False) -> None:
    """Raises UsageError where no picture can be written there: by its suffix, or where no file can be made.

    ``make_folder``: its folder is made where it is missing.
    """
    if path.suffix.lower() not in PICTURES:
        problem = f"{path.suffix} is no format for pictures" if path.suffix else "the suffix selects the format"
        raise UsageError(f"{flag} {path}: {problem}; use {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    check_output(path, flag) if make_folder else check_writable(path, flag)


def check_output(path: Path, flag: str) -> None:
    """As `check_writable`, for a file whose folder is made where it is missing."""
    try:
        missing = not path.resolve().parent.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{flag} {path}: cannot be written ({_reason(error)}); choose another") from error
    check_folder(path.parent, flag) if missing else check_writable(path, flag)


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError):  # of Path.resolve, before Python 3.13
        return "a loop of links"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def distinct(paths: list[Path], flag: str) -> list[Path]:
    """The paths. Raises UsageError where one is named twice."""
    resolved_paths: set[Path] = set()
    for path in paths:
        try:
            real = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"{flag} {path}: cannot be read ({_reason(error)}); give another") from error
        if real in resolved_paths:
            raise UsageError(f"{flag} names {path} twice; name each folder once")
        resolved_paths.add(real)
    return paths


def positive(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError, as all of these do."""
    return checked_whole_number(text, 1, 10**18 - 1, "a whole number of at least 1")


def whole(low: int, high: int, what: str = "a whole number") -> Callable[[str], int]:
    """A type for whole numbers within bounds."""

    def parse(text: str) -> int:
        return checked_whole_number(text, low, high, f"{what} from {low} to {high}")

    return parse


def seed(text: str) -> int:
    """A seed of random numbers: a whole number from 0."""
    return checked_whole_number(text, 0, MAX_SEED, f"a seed: a whole number from 0 to {MAX_SEED}")


def checked_whole_number(text: str, low: int, high: int, expected: str) -> int:
    """A whole number within bounds. Raises argparse.ArgumentTypeError with what is expected, as all of these do."""
    if not re.fullmatch(r"\s*[0-9]{1,20}\s*", text) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return int(text)


port = whole(1, 65535, "a port")
client_processes = whole(1, 1024, "a number of processes")


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, each once, in ascending order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def above_zero(text: str) -> float:
    """A number above 0."""
    return checked_number(text, lambda value: 0 < value < math.inf, "a number above 0")


def share(text: str) -> float:
    """A number above 0 and below 1."""
    return checked_number(text, lambda value: 0 < value < 1, "a share: a number above 0 and below 1, such as 0.95")


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    return checked_number(text, lambda value: 0 < value < math.inf, "a number of seconds above 0")


def lengths(text: str) -> LengthDistribution:
    """A distribution of lengths, with the pairs of its file."""
    from pdlab.core.lengths import parse_lengths

    try:
        return parse_lengths(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def milliseconds(text: str) -> float:
    """A number of milliseconds, 0 too."""
    return checked_number(text, lambda value: 0 <= value < math.inf, "a number of milliseconds from 0")


def seconds_or_none(text: str) -> float:
    """A number of seconds, 0 too."""
    return checked_number(text, lambda value: 0 <= value < math.inf, "a number of seconds from 0")


def checked_number(text: str, accepts: Callable[[float], bool], expected: str) -> float:
    """A number that ``accepts`` takes. Raises argparse.ArgumentTypeError with what is expected."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def backends(text: str) -> tuple[str, ...]:
    """Names of NIXL backends with commas between, each once."""
    names = tuple(part.strip() for part in text.split(","))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise argparse.ArgumentTypeError(f"{text!r}: {twice} is there twice; keep one")
    if reason := no_backend(names):
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
    return names


def ucx_transports(text: str) -> str:
    """A value of UCX_TLS."""
    if reason := no_transport(text):
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
    return text
