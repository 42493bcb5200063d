"""The strict base model of every value that comes from a file or a command line, and its YAML form."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from pdlab.core.errors import UsageError


class Frozen(BaseModel):
    """Base of every value type: immutable, unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


T = TypeVar("T", bound=BaseModel)


def load_yaml(path: Path, kind: type[T]) -> T:
    """Read one YAML file into ``kind``. Raises UsageError with the file, the key and the rule."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read ({reason}); give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    return validate(kind, data, where=str(path))


def validate(kind: type[T], data: Any, where: str) -> T:
    """Build ``kind`` from plain data; pydantic's complaint becomes one line that names the key."""
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected a mapping of keys for {kind.__name__}, found {type(data).__name__}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{where}: {one_line(error)}") from error


def one_line(error: ValidationError) -> str:
    """First complaint of a pydantic error as ``key: message (got value)``, with a count of the others."""
    first, *others = error.errors()
    key = ".".join(str(part) for part in first["loc"]) or "value"
    message = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    got = "" if isinstance(value, dict) or value is None else f" (got {value!r})"
    return f"{key}: {message}{got}" + (f" (and {len(others)} more)" if others else "")


def to_yaml(value: BaseModel) -> str:
    """YAML of the fields that differ from their defaults; reads back equal through `load_yaml`."""
    data = value.model_dump(mode="json", exclude_defaults=True)
    topology = getattr(value, "topology", None)
    if topology is not None:
        data["topology"]["kind"] = topology.kind
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=False)
