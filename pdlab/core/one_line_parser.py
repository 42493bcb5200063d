"""The parser of every command line, with one-line error messages."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from pdlab.core.errors import UsageError
from pdlab.core.text import choices


class OneLineParser(argparse.ArgumentParser):
    """Raises UsageError with one line, without a usage block, and with the nearest name of a misspelt flag.

    It refuses a flag with one value that is given twice, and --NAME with --no-NAME: argparse would keep the last one
    without a message. It also refuses an empty value.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.options_by_dest: dict[str, str] = {}
        self._unknown: list[str] = []
        for name in (None, "store"):
            self.register("action", name, _Once)
        self.register("action", "either_way", _EitherWay)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.options_by_dest = {}
        words = sys.argv[1:] if args is None else list(args)
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        self._unknown = [name for name in names if name not in self._option_string_actions]
        for word in words:
            if match := re.fullmatch(r"(--?[a-z][\w-]*)=--", word):  # argparse would see no value here
                raise UsageError(f"{match[1]} needs a value, got '--'")
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string.strip():  # such as an unset shell variable; Path("") is the current folder
            flags = [name for name in action.option_strings if name.startswith("--")] or action.option_strings
            name = flags[0] if flags else action.metavar or action.dest
            raise UsageError(f"{name} needs a value, got {arg_string!r}")
        return super()._get_value(action, arg_string)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse drops what a full disk does not take

    def error(self, message: str) -> NoReturn:
        raise UsageError(self._reworded(message))

    def _reworded(self, message: str) -> str:
        """argparse's message in pdlab's words."""
        flag, rest = "", message
        if match := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
            names = match[1].split("/")
            flag, rest = next((name for name in names if name.startswith("--")), names[0]), match[2]
        help_text = f"(all flags: {self.prog} --help)"
        if match := re.fullmatch(r"unrecognized arguments: (.*)", rest, re.DOTALL):
            word = match[1].split(" ")[0].partition("=")[0]
            if not word.startswith("-"):
                return f"unexpected argument {word!r}: a flag's value follows its flag {help_text}"
            suggested = choices(word, self._option_string_actions, cutoff=0.75)
            return f"{word} is not a flag{f'; {suggested}' if suggested.near else ''} {help_text}"
        if match := re.fullmatch(r"invalid choice: (.+?) \(choose from (.*)\)", rest, re.DOTALL):
            known = [name.strip("' ") for name in match[2].split(",")]
            suggested = choices(match[1].strip("'"), known, cutoff=0.81)
            both = f"{suggested} " if suggested.near else ""
            named = f"{flag} " if flag.startswith("-") else ""  # a positional argument has no flag
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
    """Stores the value of a flag. A second value is an error."""

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


class _EitherWay(argparse.BooleanOptionalAction):
    """--NAME or --no-NAME. Both together are an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None and isinstance(parser, OneLineParser):
            before = parser.options_by_dest.setdefault(self.dest, option)
            if before.startswith("--no-") != option.startswith("--no-"):
                raise UsageError(f"{before} and {option} exclude each other: leave one out")
        super().__call__(parser, namespace, values, option)
