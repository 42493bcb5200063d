"""The settings of a command, each declared once as a field of a model.

A field has a type with its bounds, a default, a description and a group. From the fields come the parser of the
command line and its help (`parse`), the name of a flag in a message, the command line that gives the same settings
(`to_words`), and the reference page (`reference`).
"""

from __future__ import annotations

import argparse
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pdlab.core.arguments import (
    MAX_SEED,
    OneLineParser,
    backends,
    checked_number,
    checked_whole_number,
    lengths,
    numbers,
)
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen, validate


class Settings(Frozen):
    """Base of a command's settings.

    ``PROG``, ``ABOUT`` and ``EXAMPLES`` are what its help begins and ends with; ``GROUPS``: the order of the groups,
    if it is not that of the fields.
    """

    PROG: ClassVar[str] = ""
    ABOUT: ClassVar[str] = ""
    EXAMPLES: ClassVar[str] = ""
    GROUPS: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raises UsageError for settings that contradict each other. A command with such rules overrides this."""


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Noun:
    """What a number is, for a message: ``a port``."""

    text: str


@dataclass(frozen=True)
class PerUnit:
    """How many of the flag's units are one unit of the field: 1000 for a flag in ms and a field in s."""

    factor: float


@dataclass(frozen=True)
class Text:
    """How a value that is no number, name or path is read from a word and written as one.

    ``read`` raises argparse.ArgumentTypeError.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


Numbers = Annotated[tuple[int, ...], Text(numbers, lambda values: ",".join(map(str, values)))]
LENGTHS = Text(lengths, lambda distribution: str(distribution.flag_value))
Backends = Annotated[tuple[str, ...], Text(backends, ",".join)]
Positive = Annotated[int, Ge(1)]
Port = Annotated[int, Ge(1), Le(65535), Noun("a port")]
Seed = Annotated[int, Ge(0), Le(MAX_SEED), Noun("a seed: a whole number")]
Processes = Annotated[int, Ge(1), Le(1024), Noun("a number of processes")]
Seconds = Annotated[float, Gt(0), Noun("a number of seconds")]
SecondsOrNone = Annotated[float, Ge(0), Noun("a number of seconds")]
Milliseconds = Annotated[float, Ge(0), Noun("a number of milliseconds"), PerUnit(1000)]
AboveZero = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Lt(1), Noun("a share: a number")]


@dataclass(frozen=True)
class Flag:
    """How a field stands on a command line and in its help.

    ``names``: the flag and its other spellings; none: the field's name with dashes. ``value``: the placeholder of the
    value in the help. ``bare``: the value of a flag that is given without one. ``several``: the flag is given several
    times, or takes several words. ``otherwise``: the default in words, for a field whose default is None or empty.
    ``implies``: flags without a value that set the field to a value, each with its help. ``needs``: the field without
    which this one changes nothing. ``advanced``: only --help-all shows it.
    """

    group: str
    names: tuple[str, ...] = ()
    value: str | None = None
    positional: bool = False
    bare: Any = None
    several: Literal["times", "words"] | None = None
    otherwise: str | None = None
    implies: tuple[tuple[str, Any, str], ...] = ()
    needs: str | None = None
    advanced: bool = False

    def __call__(self, schema: dict[str, Any]) -> None:
        """As ``json_schema_extra`` of a field: the JSON schema names the group."""
        schema["group"] = self.group


def setting(
    default: Any,
    description: str,
    group: str,
    *names: str,
    value: str | None = None,
    positional: bool = False,
    bare: Any = None,
    several: Literal["times", "words"] | None = None,
    otherwise: str | None = None,
    implies: Sequence[tuple[str, Any, str]] = (),
    needs: str | None = None,
    advanced: bool = False,
) -> Any:
    """A field of a `Settings` model; the arguments are those of `Flag`. ``default`` ... is a required one."""
    flag = Flag(group, names, value, positional, bare, several, otherwise, tuple(implies), needs, advanced)
    return Field(default, description=description, json_schema_extra=flag)


class Declared(NamedTuple):
    """A field with its flag. ``kind`` is its type without None and without what is said of it, ``said`` that."""

    name: str
    field: FieldInfo
    flag: Flag
    kind: Any
    said: tuple[Any, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        if self.flag.positional:
            return (self.flag.value or self.name,)
        return self.flag.names or ("--" + self.name.replace("_", "-"),)

    @property
    def long_flag(self) -> str:
        """The first spelling with two dashes: the name of the field in a message."""
        return next((name for name in self.flags if name.startswith("--")), self.flags[0])

    @property
    def required(self) -> bool:
        return self.field.default is PydanticUndefined

    def one(self, kind: type[Any]) -> Any:
        """What is said of the field of that kind; None: nothing."""
        return next((each for each in self.said if isinstance(each, kind)), None)


def declared(kind: type[Settings]) -> Iterator[Declared]:
    """The fields of a command's settings that have a flag, in the order of the help."""
    found = [(name, field, flag) for name, field in kind.model_fields.items() if (flag := _flag(field)) is not None]
    rank = {group: number for number, group in enumerate(kind.GROUPS)}
    for name, field, flag in sorted(found, key=lambda each: rank.get(each[2].group, len(rank))):
        inner, said = _unwrapped(field.annotation)
        yield Declared(name, field, flag, inner, (*said, *field.metadata))


def _flag(field: FieldInfo) -> Flag | None:
    return field.json_schema_extra if isinstance(field.json_schema_extra, Flag) else None


def _unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without None and without its metadata, and the metadata."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *said = get_args(annotation)
        kind, more = _unwrapped(inner)
        return kind, (*said, *more)
    if origin in (Union, types.UnionType):
        kinds = [part for part in get_args(annotation) if part is not type(None)]
        if len(kinds) == 1:
            return _unwrapped(kinds[0])
    return annotation, ()


def parse(kind: type[S], argv: Sequence[str]) -> S:
    """The settings of a command line. Raises UsageError; prints the help and exits for --help and --help-all."""
    namespace = vars(build_parser(kind).parse_args(argv))
    names = {each.name: each.long_flag for each in declared(kind)}
    given = {name: value for name, value in namespace.items() if name in names}
    settings = validate(kind, given, where="the command line", names=names)
    for each in declared(kind):
        needs = each.flag.needs
        if needs is not None and each.name in settings.model_fields_set and not getattr(settings, needs):
            needed = names[needs]
            raise UsageError(f"{each.long_flag} is for {needed}, which is not given: add {needed}, or leave it out")
    settings.check()
    return settings


def build_parser(kind: type[Settings], *, everything: bool = False) -> OneLineParser:
    """The parser of a command. ``everything``: its help has the advanced flags too."""
    parser = OneLineParser(
        prog=kind.PROG,
        description=kind.ABOUT,
        epilog=kind.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    fields = list(declared(kind))
    if any(each.flag.advanced for each in fields):
        parser.add_argument(
            "--help-all", action=_HelpAll, nargs=0, kind=kind, help="show the advanced flags too, and exit"
        )
    groups: dict[str, Any] = {}
    for each in fields:
        title = each.flag.group
        group = groups.setdefault(title, None) or parser.add_argument_group(title)
        groups[title] = group
        _add(group, each, shown=everything or not each.flag.advanced)
    return parser


class _HelpAll(argparse.Action):
    def __init__(self, *args: Any, kind: type[Settings], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind = kind

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        build_parser(self.kind, everything=True).print_help()
        parser.exit()


def _add(group: Any, each: Declared, *, shown: bool) -> None:
    """Add one field to a group of argparse."""
    flag, kind = each.flag, each.kind
    names = [each.name] if flag.positional else each.flags
    more: dict[str, Any] = {"help": _help(each).replace("%", "%%") if shown else argparse.SUPPRESS}
    if not flag.positional:
        more |= {"dest": each.name} | ({"required": True} if each.required else {})
    if flag.implies:
        group = group.add_mutually_exclusive_group()
    for name, value, text in flag.implies:
        help_text = text if shown else argparse.SUPPRESS
        group.add_argument(name, dest=each.name, action="store_const", const=value, help=help_text)
    if kind is bool:
        group.add_argument(
            *names, **more, action="store_true" if each.field.default is False else argparse.BooleanOptionalAction
        )
        return
    if get_origin(kind) is Literal:
        more |= {"choices": get_args(kind), "metavar": flag.value}
    else:
        more |= {"type": _reader(each), "metavar": flag.value or ("N" if kind in (int, float) else None)}
    if flag.several == "words":
        more |= {"nargs": "*", "default": argparse.SUPPRESS}
    elif flag.several == "times":
        more["action"] = "append"
    elif flag.bare is not None or (flag.positional and not each.required):
        more |= {"nargs": "?"} | ({"const": flag.bare} if flag.bare is not None else {})
    group.add_argument(*names, **more)


def _help(each: Declared) -> str:
    """The description, with the default behind it."""
    text = default_text(each)
    description = each.field.description or ""
    return f"{description} (default {text})" if text else description


def default_text(each: Declared) -> str:
    """The default in words, empty where there is nothing to say."""
    if each.flag.otherwise is not None:
        return each.flag.otherwise
    default = each.field.default
    if each.required or default is None or default is False or default == () or default == []:
        return ""
    return "on" if default is True else written(each, default)


def _reader(each: Declared) -> Callable[[str], Any]:
    text: Text | None = each.one(Text)
    if text is not None:
        return text.read
    kind = get_args(each.kind)[0] if each.flag.several else each.kind
    if kind is int:
        return _whole_number_reader(each)
    if kind is float:
        return _number_reader(each)
    return Path if kind is Path else str


def _whole_number_reader(each: Declared) -> Callable[[str], int]:
    low = bound.ge if (bound := each.one(Ge)) else 0
    high = bound.le if (bound := each.one(Le)) else None
    noun = said.text if (said := each.one(Noun)) else "a whole number"
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return partial(
        checked_whole_number, low=low, high=10**18 - 1 if high is None else high, expected=f"{noun} {limits}"
    )


def _number_reader(each: Declared) -> Callable[[str], float]:
    low, from_low = each.one(Gt), each.one(Ge)
    below = each.one(Lt)
    noun = said.text if (said := each.one(Noun)) else "a number"
    words = [f"above {low.gt:g}"] if low else [f"from {from_low.ge:g}"] if from_low else []
    words += [f"below {below.lt:g}"] if below else []

    def accepts(value: float) -> bool:
        over = value > low.gt if low else value >= from_low.ge if from_low else value > -math.inf
        return bool(over and value < (below.lt if below else math.inf))

    factor = per.factor if (per := each.one(PerUnit)) else 1
    expected = f"{noun} {' and '.join(words)}".rstrip()
    return lambda text: checked_number(text, accepts, expected) / factor


def written(each: Declared, value: Any) -> str:
    """A value as the word that the flag takes."""
    text: Text | None = each.one(Text)
    if text is not None:
        return text.write(value)
    if isinstance(value, float):
        return f"{value * (per.factor if (per := each.one(PerUnit)) else 1):.12g}"
    return str(value)


def not_given(settings: Settings, names: Sequence[str], what: str) -> None:
    """Raises UsageError if one of the fields was set: it would change nothing."""
    for each in declared(type(settings)):
        if each.name in names and each.name in settings.model_fields_set:
            raise UsageError(f"{each.long_flag} does nothing with {what}; leave it out")


def to_words(settings: Settings, only: Sequence[str] | None = None) -> list[str]:
    """The command line, without the command, that gives these settings (of the fields in ``only``, if it is given).

    Fields at their default are left out.
    """
    words: list[str] = []
    last: list[str] = []
    for each in declared(type(settings)):
        value = getattr(settings, each.name)
        if value == each.field.default or value is None or (only is not None and each.name not in only):
            continue
        texts = [written(each, part) for part in (value if each.flag.several else [value])]
        if each.flag.positional:
            last += texts
        elif each.kind is bool:
            words.append(each.long_flag if value else each.long_flag.replace("--", "--no-", 1))
        elif each.flag.several == "words":
            words += [each.long_flag, *texts]
        else:
            words += [f"{each.long_flag}={text}" for text in texts]
    return words + (["--", *last] if any(word.startswith("-") for word in last) else last)


def reference(kind: type[Settings]) -> str:
    """The flags of a command as a table in Markdown."""
    lines = [f"## `{kind.PROG}`", "", kind.ABOUT]
    group = None
    for each in declared(kind):
        if each.flag.group != group:
            group = each.flag.group
            lines += ["", f"**{group}**", "", "| flag | what | default |", "|---|---|---|"]
        names = ", ".join(f"`{name}`" for name in (*each.flags, *(name for name, _, _ in each.flag.implies)))
        value = "" if each.kind is bool or each.flag.positional else f" `{_placeholder(each)}`"
        advanced = " (advanced)" if each.flag.advanced else ""
        cells = [f"{names}{value}", f"{each.field.description}{advanced}", default_text(each)]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _placeholder(each: Declared) -> str:
    if get_origin(each.kind) is Literal:
        return ",".join(map(str, get_args(each.kind)))
    return each.flag.value or ("N" if each.kind in (int, float) else each.name.upper())
