"""The schema of a RayService, if it is at hand, as a strict check: a field that it does not have is an error.

The definition is KubeRay's own file, which this project does not carry: a checkout of it may lie beside the project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

DEFINITION = Path(__file__).resolve().parents[2].parent / "shared" / "reference" / "kuberay" / "rayservice-crd.yaml"
_FREE = "x-kubernetes-preserve-unknown-fields"
# Not a part of JSON schema, or with another meaning there.
_DROPPED = ("format", "default", "nullable")


def definition() -> dict[str, Any]:
    """The schema as KubeRay ships it."""
    document: dict[str, Any] = yaml.load(DEFINITION.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    schema: dict[str, Any] = document["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object", _FREE: True}
    return schema


def errors(schema: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """What the API server refuses, and warns of: unknown fields and list items with one key included."""
    from jsonschema import Draft202012Validator

    found = Draft202012Validator(_strict(schema)).iter_errors(document)
    messages = [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]
    return messages + list(_twice(schema, document, ""))


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items() if key not in ("properties", *_DROPPED)}
    if node.get("x-kubernetes-int-or-string"):
        pattern = {"pattern": made.pop("pattern")} if "pattern" in made else {}
        made["anyOf"] = [{"type": "integer"}, {"type": "string", **pattern}]
    if "properties" in node:
        made["properties"] = {name: _strict(value) for name, value in node["properties"].items()}
        if not node.get(_FREE):
            made.setdefault("additionalProperties", False)
    return made


def _twice(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for key, each in value.items():
            inner = schema.get("properties", {}).get(key, others if isinstance(others, dict) else {})
            yield from _twice(inner, each, f"{path}.{key}")
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        named = [tuple(str(each.get(key)) for key in keys) for each in value] if keys else []
        yield from (f"{path}: {name} is there twice" for name in sorted(set(named)) if named.count(name) > 1)
        for number, each in enumerate(value):
            yield from _twice(schema.get("items", {}), each, f"{path}[{number}]")
