"""The strict base model of all values from files and command lines, and its YAML form."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from pdlab.core.errors import StoreError, UsageError, reason_of
from pdlab.core.text import choices, printable

OneLine = Annotated[str, AfterValidator(printable)]
"""A name from a file, a folder or a flag, as it can be printed in a table."""


class Frozen(BaseModel):
    """Base of every value type. It is immutable, and unknown keys are an error."""

    # Validators are built at their first use, because --help needs none and most commands need few.
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")


class Finite(Frozen):
    """Base of models whose numbers are finite: neither infinite nor NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


class Incidental:
    """Marks a field that fingerprints and --resume ignore."""


@dataclass(frozen=True)
class InLabel:
    """Marks a field of its model's label. A number follows ``word``, as in tp4; a switch adds only ``word``."""

    word: str


def incidental(kind: type[BaseModel]) -> set[str]:
    """Names of the fields that are marked as `Incidental`."""
    return {name for name, info in kind.model_fields.items() if Incidental in info.metadata}


def label_words(kind: type[BaseModel]) -> dict[str, str]:
    """Field -> its word, for the fields of the model's label, in order."""
    words = {
        name: next((each.word for each in info.metadata if isinstance(each, InLabel)), None)
        for name, info in kind.model_fields.items()
    }
    return {name: word for name, word in words.items() if word is not None}


T = TypeVar("T", bound=BaseModel)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that refuses a key given twice. YAML itself would keep the last one."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    names = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        name = loader.construct_object(key, deep=True)
        if isinstance(name, Hashable) and name in names:
            raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is there twice", key.start_mark)
        names.add(name if isinstance(name, Hashable) else None)
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's writes the same text in a tenth of the time


def yaml_text(data: Any, *, default_flow_style: bool | None = False, width: int = 80) -> str:
    """YAML of plain data, in its order; the arguments are those of `yaml.dump`."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=default_flow_style, width=width)
    return text


def parse_yaml(text: str) -> Any:
    """Plain data of YAML text. Raises yaml.YAMLError, for a key that is there twice too."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deep") from error


def is_yaml_path(text: str) -> bool:
    """Whether a value is the path of a YAML file, and no name."""
    return text.endswith((".yaml", ".yml"))


def yaml_fault(error: yaml.YAMLError) -> str:
    """The error in YAML text and its place, on one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def load_yaml(path: Path, kind: type[T], prepare: Callable[[Any], Any] = lambda data: data) -> T:
    """Read a YAML file into ``kind``. ``prepare`` may change its plain data first. Raises UsageError with the file, the
    key and the rule."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({reason_of(error)}); give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML ({yaml_fault(error)})") from error
    return validate(kind, prepare(data), where=str(path))


def validate(kind: type[T], data: Any, where: str, names: Mapping[str, str] | None = None) -> T:
    """Build ``kind`` from plain data. Raises UsageError with pydantic's first error in one line, with the key.

    ``where``: the origin of the data. ``names``: key -> its name there, such as a flag.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected a mapping of keys for {kind.__name__}, found {_kind_of(data)}")
    if key := _boolean_for_number(kind, data):
        raise UsageError(
            f"{where}: {key}: must be a number; YAML takes yes, no, on, off, true and false for other values"
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        complaint = one_line(error, kind, names)
        flagged = names is not None and complaint.startswith("--")
        raise UsageError(complaint if flagged else f"{where}: {complaint}") from error


CONVERT = "python benchmarks/convert_results.py"


def read_model(path: Path, kind: type[T]) -> T:
    """Read a JSON file that pdlab wrote. Raises StoreError with the file and the rule in one line."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({reason_of(error)})") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        pass  # the slow way below makes the message
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    try:
        return validate(kind, data, where=str(path))
    except UsageError as error:
        raise StoreError(f"{error}; if an earlier pdlab wrote it: {CONVERT} {path.parent}") from error


def _kind_of(data: Any) -> str:
    """The type of a YAML value in words."""
    kinds = {type(None): "nothing", str: "text", list: "a list", bool: "true or false", int: "a number"}
    return kinds.get(type(data), "a single value")


def _boolean_for_number(kind: type[BaseModel], data: Mapping[str, Any]) -> str | None:
    """The key of a number whose value is true or false, which pydantic would read as 1 or 0; None if there is none."""
    for name, field in kind.model_fields.items():
        value = data.get(name)
        if (
            isinstance(value, bool)
            and {int, float} & {*_flat(field.annotation)}
            and bool not in _flat(field.annotation)
        ):
            return name
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, dict):
                continue
            inner = [_boolean_for_number(model, each) for model in _models_of(field.annotation)]
            if inner and all(inner):  # of a union, every one
                return f"{name}.{inner[0]}"
    return None


def _flat(annotation: Any) -> list[Any]:
    """The types of a union, or the type itself."""
    return [annotation, *get_args(annotation)]


def one_line(
    error: ValidationError, kind: type[BaseModel] | None = None, names: Mapping[str, str] | None = None
) -> str:
    """The first error of pydantic in plain words, with its key (or its name in ``names``), the value, and the number of
    other errors."""
    # A misspelt key comes first, because it is often the missing one.
    first, *others = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    key = (names or {}).get(key, key)
    value = first.get("input")
    # For a missing key or a contradiction, pydantic's input is the whole mapping, which is too long to show.
    value_text = (
        ""
        if first["type"] in ("missing", "extra_forbidden", "unexpected_keyword_argument")
        or isinstance(value, dict | BaseModel)
        else _shown(value)
    )
    complaint = f"{rule(first, kind)}{value_text}"
    more = f" (and {len(others)} more)" if others else ""
    return f"{key}: {complaint}{more}" if key else f"{complaint}{more}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f", got {text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + '...'}"


SHOWN_CHARS = 80
# pydantic's type of error -> the rule in words, with the names of its context in braces.
RULES = {
    "missing": "is missing",
    "unexpected_keyword_argument": "is not a known key",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a mapping of keys",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}, got {tag!r}",
    "union_tag_not_found": "{discriminator} is missing",
}


def rule(error: Any, kind: type[BaseModel] | None = None) -> str:
    """The broken rule of one of pydantic's error details, in plain words."""
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        fields = _fields_at(kind, error["loc"][:-1])
        return f"is not a known key; {choices(str(error['loc'][-1]), fields)}" if fields else "is not a known key"
    if error["type"] == "too_short":
        return f"must have at least {context['min_length']} of them"
    if error["type"] == "string_pattern_mismatch":
        return "must be a name for a folder: letters, digits and . _ + = -, at most 64, a letter or digit first"
    words = RULES.get(error["type"])
    if words is None:
        return str(error["msg"]).removeprefix("Value error, ")
    return words.format(**{name: f"{v:g}" if isinstance(v, float) else v for name, v in context.items()})


def _fields_at(kind: Any, path: Sequence[Any]) -> tuple[str, ...]:
    """Names of the fields of the model at ``path``; empty if there is none."""
    models = _models_of(kind)
    for part in path:
        inner = [_models_of(model.model_fields[part].annotation) for model in models if part in model.model_fields]
        tagged = [model for model in models if any(field.default == part for field in model.model_fields.values())]
        # A part that is no field is an index of a list, which changes nothing, or the tag of a union.
        models = [model for each in inner for model in each] or tagged or models
    return tuple(name for model in models for name in model.model_fields)


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type, which may be a model, a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_of(part)]


def to_yaml(value: BaseModel) -> str:
    """YAML of the fields that differ from their defaults; `load_yaml` reads it back equal."""
    data = value.model_dump(mode="json", exclude_defaults=True)
    topology = getattr(value, "topology", None)
    if topology is not None:
        data["topology"]["kind"] = topology.kind
    return yaml_text(data)
