"""The settings of a command, each declared once as a field of a model.

A field has a type with its bounds, a default, a description and a group. These make the parser and the help (`parse`),
the flags in messages, the command line of given settings (`to_words`), and the page of all flags (docs/flags.md).
"""

from __future__ import annotations

import argparse
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from pdlab.core import defaults
from pdlab.core.arguments import (
    MAX_SEED,
    backends,
    checked_number,
    checked_whole_number,
    lengths,
    numbers,
)
from pdlab.core.commands import program
from pdlab.core.errors import UsageError
from pdlab.core.help_pages import Argument, HelpPage, parser_of
from pdlab.core.schema import Frozen, validate
from pdlab.core.text import choices

M = TypeVar("M", bound=BaseModel)


class Settings(Frozen):
    """Base of a command's settings.

    ``COMMAND``: its name for `python -m pdlab`. ``ABOUT`` and ``EXAMPLES``: the first and the last text of its help.
    ``GROUPS``: the order of the groups, if it is not that of the fields. ``EXCLUSIONS``: pairs of fields,
    also in parts, of which one must be None, off or empty, and the message if neither is, with {} for their flags.
    """

    COMMAND: ClassVar[str] = ""
    ABOUT: ClassVar[str] = ""
    EXAMPLES: ClassVar[str] = ""
    GROUPS: ClassVar[tuple[str, ...]] = ()
    EXCLUSIONS: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    def check(self) -> None:
        """Raises UsageError for settings that contradict each other. A command with such rules overrides this."""

    def passed_to(self, kind: type[M], **more: Any) -> M:
        """A value of ``kind``: the set fields that both have, and ``more``."""
        shared = self.model_fields_set & set(kind.model_fields)
        return kind(**{name: getattr(self, name) for name in shared} | more)

    def value_of(self, part: str, kind: type[M], data: Mapping[str, Any] | None = None, where: str = "the flags") -> M:
        """The part as a value of its model ``kind``; ``data``: its fields in place of those that flags give. Raises
        UsageError with the flag of a wrong field."""
        fields = getattr(self, part) if data is None else data
        return validate(kind, fields, where=where, names=flag_names(type(self), part))


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Noun:
    """The noun for a number in a message: ``a port``."""

    text: str


@dataclass(frozen=True)
class PerUnit:
    """Units of the flag per unit of the field: 1000 for a flag in ms and a field in s."""

    factor: float


@dataclass(frozen=True)
class Text:
    """How to read a value from a word, of a command line or a file, and write it as one, if it is no number, name or
    path.

    ``read`` raises argparse.ArgumentTypeError. ``none``: the word for None.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str] = str
    none: str | None = None

    def value(self, word: str) -> Any:
        """The value of a word. Raises argparse.ArgumentTypeError."""
        return None if word == self.none else self.read(word)

    def word(self, value: Any) -> str:
        """The word for a value, which may be a word of a file."""
        if value is None and self.none is not None:
            return self.none
        return value if isinstance(value, str) else self.write(value)

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Called by pydantic: reads a text in plain data as a word."""

        def of_text(value: Any) -> Any:
            try:
                return self.value(value) if isinstance(value, str) else value
            except argparse.ArgumentTypeError as error:
                raise ValueError(str(error)) from error

        return no_info_before_validator_function(of_text, handler(kind))


@dataclass(frozen=True)
class OneOf:
    """The allowed names of a text, if they are known only when the program runs."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NamedValues:
    """How to read NAME=VALUE words of a repeatable flag as a mapping, and write a name and its value as a word.

    ``read`` takes the words and the flag, and raises UsageError.
    """

    read: Callable[[Sequence[str], str], dict[str, Any]]
    write: Callable[[str, Any], str] = "{}={}".format


@dataclass(frozen=True)
class FlagsOf:
    """A model whose fields are also flags of the command.

    The settings keep the given fields as a mapping, which overrides the values of a file. ``group``: group of its
    flags, in place of the fields' own. ``prefix``: prefix of each flag, such as ``p-``. ``leave_out``: fields without a
    flag in this command; ``only``: the fields with one (empty: all). ``otherwise``: this command's defaults in words.
    ``needs``: the command's field without which the flags have no effect. ``advanced``: fields whose flags
    only --help-all shows, beside those whose own declaration has it. ``over_file``: the flags replace values of a
    file, so the help names the file as their default.
    """

    model: type[BaseModel]
    group: str | None = None
    prefix: str = ""
    leave_out: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    otherwise: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    advanced: tuple[str, ...] = ()
    over_file: bool = False

    @property
    def fields(self) -> Iterator[Declared]:
        """The fields that have a flag in the command, as those of their model."""
        for each in _fields(self.model):
            if each.path[0] not in self.leave_out and (not self.only or each.path[0] in self.only):
                yield each


def written_numbers(values: Iterable[float]) -> str:
    """``1,2.5``: numbers as a flag's value."""
    return ",".join(f"{value:.12g}" for value in values)


Numbers = Annotated[tuple[int, ...], Text(numbers, written_numbers)]
LENGTHS = Text(lengths, lambda distribution: str(distribution.flag_value))
Backends = Annotated[tuple[str, ...], Text(backends, ",".join)]
Positive = Annotated[int, Ge(1)]
Port = Annotated[int, Ge(1), Le(65535), Noun("a port")]
Seed = Annotated[int, Ge(0), Le(MAX_SEED), Noun("a seed: a whole number")]
Processes = Annotated[int, Ge(1), Le(1024), Noun("a number of processes")]
LocalNodes = Annotated[int, Ge(1), Le(64), Noun("a number of nodes")]
Seconds = Annotated[float, Gt(0), Noun("a number of seconds")]
SecondsOrNone = Annotated[float, Ge(0), Noun("a number of seconds")]
Milliseconds = Annotated[float, Ge(0), Noun("a number of milliseconds"), PerUnit(1000)]
AboveZero = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Lt(1), Noun("a share: a number")]


@dataclass(frozen=True)
class Flag:
    """The flag of a field.

    ``names``: the flag and its other spellings (none: the field's name with dashes). ``value``: the value's placeholder
    in the help. ``bare``: the value of a flag without one. ``several``: the flag may be given several times, or takes
    several words. ``otherwise``: the default in words, for a default of None or empty. ``implies``: (flag without a
    value, the field's value, help) of other flags. ``needs``: the field without which this one has no effect.
    ``both_ways``: there is a flag --no-NAME although the default is off. ``one_of``: fields with the same word exclude
    each other. ``advanced``: only --help-all shows it.
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
    both_ways: bool = False
    one_of: str | None = None
    advanced: bool = False

    def __call__(self, schema: dict[str, Any]) -> None:
        """Called as ``json_schema_extra`` of a field: adds the group to the JSON schema."""
        schema["group"] = self.group


def setting(default: Any, description: str, group: str, *names: str, **options: Any) -> Any:
    """A field of a `Settings` model. ``default``: ``...`` if required. ``options``: the other fields of `Flag`."""
    return Field(default, description=description, json_schema_extra=Flag(group, names, **options))


serving_port = partial(setting, defaults.PORT, "port to serve on")


class Declared(NamedTuple):
    """A field with its flag. ``path``: the names of its parts, then its own. ``kind``: its type without None and
    without metadata."""

    path: tuple[str, ...]
    info: FieldInfo
    flag: Flag
    kind: Any
    metadata: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The field as one word, such as ``serving.prefill_timeout_s``."""
        return ".".join(self.path)

    @property
    def flags(self) -> tuple[str, ...]:
        if self.flag.positional:
            return (self.flag.value or self.name,)
        return self.flag.names or ("--" + self.path[-1].replace("_", "-"),)

    @property
    def long_flag(self) -> str:
        """The first spelling with two dashes, which messages use."""
        return next((name for name in self.flags if name.startswith("--")), self.flags[0])

    @property
    def short_flag(self) -> str:
        """The shortest spelling."""
        return min(self.flags, key=len)

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def required(self) -> bool:
        return self.info.is_required() and len(self.path) == 1

    def one(self, kind: type[Any]) -> Any:
        """The metadata of that type; None if there is none."""
        return next((each for each in self.metadata if isinstance(each, kind)), None)

    def in_part(self, name: str, part: FlagsOf) -> Declared:
        """The field as a flag of a command whose part ``name`` has the field's model."""
        prefixed = tuple(f"--{part.prefix}{flag.removeprefix('--')}" for flag in self.flags)
        changed = replace(
            self.flag,
            names=prefixed,
            otherwise=part.otherwise.get(self.name, "the file's" if part.over_file else self.flag.otherwise),
            group=part.group or self.flag.group,
            needs=part.needs if self.flag.needs is None else f"{name}.{self.flag.needs}",
            advanced=self.flag.advanced or self.name in part.advanced,
        )
        return self._replace(path=(name, *self.path), flag=changed)


@cache
def declared(kind: type[BaseModel]) -> tuple[Declared, ...]:
    """The flags of a command's settings and their parts, in the order of the help."""
    groups = kind.GROUPS if issubclass(kind, Settings) else ()
    rank = {group: number for number, group in enumerate(groups)}

    def place(each: Declared) -> tuple[int, bool]:
        return rank.get(each.flag.group, len(rank)), each.flag.group in rank and not each.flag.positional

    return tuple(sorted(_fields(kind), key=place))


def _fields(kind: type[BaseModel]) -> Iterator[Declared]:
    for name, info in kind.model_fields.items():
        inner, metadata = _unwrapped(info.annotation)
        metadata = (*metadata, *info.metadata)
        if isinstance(info.json_schema_extra, Flag):
            yield Declared((name,), info, info.json_schema_extra, inner, metadata)
            continue
        part = next((each for each in metadata if isinstance(each, FlagsOf)), None)
        if part is None and isinstance(inner, type) and issubclass(inner, Frozen):
            part = FlagsOf(inner)
        if part is not None:
            yield from (each.in_part(name, part) for each in part.fields)


def from_flag_keys(part: FlagsOf, data: Mapping[str, Any], others: Sequence[str] = ()) -> dict[str, Any]:
    """Field -> value, also in parts, of a mapping in a file whose keys are the flags without dashes before
    them and with underscores for dashes in them. Raises ValueError. ``others``: known keys that are no flags."""
    fields = {each.long_flag.removeprefix("--").replace("-", "_"): each for each in part.fields}
    given: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            raise ValueError(f"{key} is not a known key; {choices(str(key), [*others, *fields])}")
        each = fields[key]
        of_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            _put(given, each.path, _reader(each)(str(value)) if of_number else value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{key}: {error}") from error
    return given


def flags_in_part(name: str, part: FlagsOf, data: Any, others: Sequence[str]) -> Any:
    """The data of a model with its part ``name`` in place of the keys that are the part's flags. Data that is no
    mapping, or has the part, stays as it is. ``others``: the model's other keys. Raises ValueError."""
    if not isinstance(data, dict) or name in data:
        return data
    own = {key: value for key, value in data.items() if key in others}
    flags = {key: value for key, value in data.items() if key not in own}
    return {**own, name: from_flag_keys(part, flags, others)}


def _put(given: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parts, last = path
    for part in parts:
        given = given.setdefault(part, {})
    given[last] = value


def settings_of(command: str) -> type[Settings]:
    """The settings of a command whose module is loaded."""
    kinds: list[type[Settings]] = [Settings]
    for kind in kinds:  # grows as it is walked
        if command == kind.COMMAND:
            return kind
        kinds += kind.__subclasses__()
    raise LookupError(f"no settings have the command {command!r}")


def flag_names(kind: type[BaseModel], part: str = "") -> dict[str, str]:
    """Field (of ``part``, if given) -> its flag, for messages."""
    start = f"{part}." if part else ""
    return {each.name.removeprefix(start): each.long_flag for each in declared(kind) if each.name.startswith(start)}


def _unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without None and without its metadata, and the metadata."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        kind, more = _unwrapped(inner)
        bounds = (rule for each in metadata if isinstance(each, FieldInfo) for rule in each.metadata)
        return kind, (*metadata, *bounds, *more)
    if origin in (Union, types.UnionType):
        kinds = [part for part in get_args(annotation) if part is not type(None)]
        if len(kinds) == 1:
            return _unwrapped(kinds[0])
    return annotation, ()


def parse(kind: type[S], argv: Sequence[str]) -> S:
    """The settings of a command line. Raises UsageError; prints the help and exits for --help and --help-all."""
    flags = {each.name: each for each in declared(kind)}
    words, rest = list(argv), []
    trailing = next((each for each in flags.values() if each.flag.positional and each.flag.several), None)
    if trailing is not None and "--" in words:
        # After a flag, argparse gives no words to a positional argument of several words.
        cut = words.index("--")
        words, rest = words[:cut], words[cut + 1 :]
    namespace = vars(parser_of(help_page(kind)).parse_args(words))
    if trailing is not None and rest:
        namespace[trailing.name] = [*namespace.get(trailing.name, []), *rest]
    given: dict[str, Any] = {}
    for name, value in namespace.items():
        if name not in flags:
            continue
        pairs: NamedValues | None = flags[name].one(NamedValues)
        _put(given, flags[name].path, pairs.read(value, flags[name].long_flag) if pairs else value)
    names = flag_names(kind)
    settings = validate(kind, given, where="the command line", names=names)
    named, first = given_flags(settings), dict[str, str]()
    for each in (flags[name] for name in named):
        needs = each.flag.needs
        if needs is not None and not _value_at(settings, needs.split("."))[1]:
            needed = names[needs]
            raise UsageError(f"{each.long_flag} is for {needed}, which is not given: add {needed}, or leave it out")
        if each.flag.one_of is not None:
            other = first.setdefault(each.flag.one_of, each.long_flag)
            if other != each.long_flag:
                raise UsageError(f"{each.long_flag} and {other} exclude each other: leave one out")
    for *fields, message in kind.EXCLUSIONS:
        if all(_value_at(settings, name.split("."))[1] for name in fields):
            raise UsageError(message.format(*(names[name] for name in fields)))
    settings.check()
    return settings


def help_page(kind: type[Settings]) -> HelpPage:
    """The arguments and the help of a command."""
    fields = declared(kind)
    words = [each.flags[0] if each.required else f"[{each.flags[0]}]" for each in fields if each.flag.positional]
    name = program(kind.COMMAND)
    usage = " ".join([name, "[flags]", *words])
    arguments = [argument for each in fields for argument in _arguments(each)]
    return HelpPage(name, usage, kind.ABOUT, kind.EXAMPLES, arguments)


def _arguments(each: Declared) -> Iterator[Argument]:
    """The arguments of argparse for one field: its flag, and the flags that imply a value."""
    flag, kind = each.flag, each.kind
    one_of = each.name if flag.implies else None
    for name, value, text in flag.implies:
        options = {"dest": each.name, "action": "store_const", "const": value, "help": text}
        yield Argument(flag.group, (name,), options, one_of, flag.advanced)
    names = (each.name,) if flag.positional else each.flags
    more: dict[str, Any] = {"help": _help(each).replace("%", "%%")}
    if not flag.positional:
        more |= {"dest": each.name} | ({"required": True} if each.required else {})
    if kind is bool:
        one_way = each.default is False and not flag.both_ways
        more["action"] = "store_true" if one_way else "either_way"
    else:
        more |= _value_options(each)
    yield Argument(flag.group, names, more, one_of, flag.advanced)


def _value_options(each: Declared) -> dict[str, Any]:
    """The options of argparse for the values of a field."""
    flag, kind = each.flag, each.kind
    known: OneOf | None = each.one(OneOf)
    more: dict[str, Any]
    if get_origin(kind) is Literal or known is not None:
        more = {"choices": known.names if known is not None else get_args(kind), "metavar": flag.value}
    else:
        more = {"type": _reader(each), "metavar": flag.value or ("N" if kind in (int, float) else None)}
    if flag.several == "words":
        more |= {"nargs": "*" if flag.positional else "+", "default": argparse.SUPPRESS}
    elif each.one(NamedValues) is not None:
        more |= {"action": "extend", "nargs": "+"}
    elif flag.several == "times":
        more["action"] = "append"
    elif flag.bare is not None or (flag.positional and not each.required):
        more |= {"nargs": "?"} | ({"const": flag.bare} if flag.bare is not None else {})
    if flag.positional and "type" in more:
        more["type"] = partial(_unless_absent, more["type"])
    return more


def _unless_absent(reader: Callable[[str], Any], text: str) -> Any:
    """argparse of Python 3.11 reads the default of an optional word too, which is `argparse.SUPPRESS`."""
    return text if text is argparse.SUPPRESS else reader(text)


def _help(each: Declared) -> str:
    """The description, then the default."""
    text = default_text(each)
    description = each.info.description or ""
    if each.required:
        return description if each.flag.positional else f"{description} ({text})"
    return f"{description} (default {text})" if text else description


def default_text(each: Declared) -> str:
    """The default in words, ``required`` if there is none; empty if it is None, off or empty."""
    if each.required:
        return "required"
    if each.flag.otherwise is not None:
        return each.flag.otherwise
    default = None if each.info.is_required() else each.default
    if default is None or default is False or default in ((), {}, []):
        return ""
    return "on" if default is True else written(each, default)


def _reader(each: Declared) -> Callable[[str], Any]:
    text: Text | None = each.one(Text)
    if text is not None:
        return text.value
    kind = get_args(each.kind)[0] if each.flag.several else each.kind
    if kind is int:
        return _whole_number_reader(each)
    if kind is float:
        return _number_reader(each)
    return Path if kind is Path else str


def _whole_number_reader(each: Declared) -> Callable[[str], int]:
    low = bound.ge if (bound := each.one(Ge)) else 0
    high = bound.le if (bound := each.one(Le)) else None
    noun = own.text if (own := each.one(Noun)) else "a whole number"
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return partial(
        checked_whole_number, low=low, high=10**18 - 1 if high is None else high, expected=f"{noun} {limits}"
    )


def _number_reader(each: Declared) -> Callable[[str], float]:
    """Reads a number in the unit of the flag, within the bounds of the field."""
    noun = own.text if (own := each.one(Noun)) else "a number"
    factor = per.factor if (per := each.one(PerUnit)) else 1
    above, least, below, most = (each.one(bound) for bound in (Gt, Ge, Lt, Le))
    rules = [("above", operator.gt, above.gt)] if above else [("from", operator.ge, least.ge)] if least else []
    rules += [("below", operator.lt, below.lt)] if below else []
    rules += [("at most", operator.le, most.le)] if most else []
    words = [f"{word} {factor * bound:.12g}" for word, _, bound in rules]
    limits = f"{words[0]} to {factor * most.le:.12g}" if least and most and not above else " and ".join(words)

    def accepts(value: float) -> bool:
        return math.isfinite(value) and all(holds(value, factor * bound) for _, holds, bound in rules)

    return lambda text: checked_number(text, accepts, f"{noun} {limits}".rstrip()) / factor


def written(each: Declared, value: Any) -> str:
    """A value as a word for the flag."""
    text: Text | None = each.one(Text)
    if text is not None:
        return text.word(value)
    if isinstance(value, float):
        return f"{value * (per.factor if (per := each.one(PerUnit)) else 1):.12g}"
    return str(value)


def given_flags(settings: Settings) -> dict[str, str]:
    """Field -> its flag (--no-FLAG for False), for the fields that were set, also in parts."""
    given: dict[str, str] = {}
    for each in declared(type(settings)):
        if each.path[0] not in settings.model_fields_set:
            continue
        holder, value = _value_at(settings, each.path)
        if each.path[-1] in (holder.model_fields_set if isinstance(holder, BaseModel) else holder or ()):
            given[each.name] = each.long_flag if value is not False else _negated(each.long_flag)
    return given


def _negated(flag: str) -> str:
    """The flag that sets False."""
    return flag.replace("--", "--no-", 1)


def given_of(settings: Settings, names: Sequence[str]) -> list[str]:
    """The flags of those of the fields, or of the parts, that were set."""
    given = given_flags(settings).items()
    return [flag for name, flag in given if name in names or name.partition(".")[0] in names]


def not_given(settings: Settings, names: Sequence[str], what: str) -> None:
    """Raises UsageError if one of the fields, also in parts, was set, because it has no effect with ``what``."""
    for flag in given_of(settings, names):
        raise UsageError(f"{flag} does nothing with {what}; leave it out")


def to_words(settings: BaseModel, only: Sequence[str] | None = None) -> list[str]:
    """The words of the command line for these settings, without the command and without defaults.

    ``only``: the fields (None: all).
    """
    return _words(settings, [each for each in declared(type(settings)) if only is None or each.path[0] in only], ())


def part_words(value: BaseModel, part: FlagsOf, always: Sequence[str] = ()) -> list[str]:
    """The flags for ``value`` in a command that has its model as ``part``, without defaults except those of fields in
    ``always``."""
    return _words({"": value}, [each.in_part("", part) for each in part.fields], always)


def words_of(kind: type[Settings], fields: Mapping[str, Any]) -> list[str]:
    """The words for these fields of a command, in their order, defaults too, in short spellings.

    A field that is None, off or empty has no words. A part is a mapping. Raises ValidationError for an unknown field or
    a wrong value, and LookupError for an unknown field of a part.
    """
    given = {
        name: value for name, value in fields.items() if not (value is None or value is False or value in ((), {}))
    }
    settings = kind(**given)
    order = {name: place for place, name in enumerate(given)}
    chosen = sorted((each for each in declared(kind) if each.path[0] in given), key=lambda each: order[each.path[0]])
    for name, value in given.items():
        known = {each.path[1] for each in chosen if each.path[0] == name and len(each.path) > 1}
        if isinstance(value, Mapping) and known and (unknown := sorted(value.keys() - known)):
            raise LookupError(f"{name} of {kind.__name__} has no field {unknown[0]!r} with a flag")
    return _words(settings, chosen, tuple(given), short=True)


def _words(settings: Any, fields: Sequence[Declared], always: Sequence[str], *, short: bool = False) -> list[str]:
    words: list[str] = []
    first: list[str] = []
    last: list[str] = []
    trailing = any(each.flag.positional and each.flag.several for each in fields)  # a bare flag would take its words
    for each in fields:
        holder, value = _value_at(settings, each.path)
        default = None if each.info.is_required() else each.default
        # A mapping has only given fields. They are kept: the command's default may differ from the model's.
        given = each.path[-1] in always or (isinstance(holder, Mapping) and len(each.path) > 1)
        reader: Text | None = each.one(Text)
        none_given = (
            value is None and each.path[-1] in (holder or ()) and reader is not None and reader.none is not None
        )
        if (value is None and not none_given) or (value == default and not given):
            continue
        flag = each.short_flag if short else each.long_flag
        pairs: NamedValues | None = each.one(NamedValues)
        if pairs is not None:
            if not isinstance(value, Mapping):
                raise UsageError(f"{flag} {value}: write its values as NAME: VALUE")
            texts = [pairs.write(name, part) for name, part in value.items()]
        else:
            texts = [written(each, part) for part in (value if each.flag.several else [value])]
        if each.flag.positional and each.flag.several:
            last += texts
        elif each.flag.positional:
            first += texts
        elif each.kind is bool:
            words.append(each.long_flag if value else _negated(each.long_flag))
        elif short and each.flag.bare is not None and value == each.flag.bare and not trailing:
            words.append(flag)
        elif each.flag.several == "words":
            words += [flag, *texts]
        elif implied := next((name for name, implies, _ in each.flag.implies if implies == value), None):
            words.append(implied)
        else:
            for text in texts:
                words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    if any(word.startswith("-") for word in last) or (first and words and last):
        last = ["--", *last]
    if any(word.startswith("-") for word in first):
        return [*words, "--", *first]
    return [*first, *words, *last]


def _value_at(settings: Any, path: Sequence[str]) -> tuple[Any, Any]:
    """The holder of a field, which may be a part, and the field's value; None if a part lacks it."""
    holder, value = None, settings
    for name in path:
        holder = value
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        if value is None:
            break
    return holder, value
