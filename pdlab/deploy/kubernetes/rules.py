"""What KubeRay and Kubernetes refuse in the manifests of a RayService because of a cluster's file or of its size.

The rules are those of KubeRay 1.7.0 (validation.go) and of Kubernetes (labels, sizes); each message names the value and
the rule. Tests check what only pdlab's code decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from pdlab.core.nodes import NODE_NAME_LABEL

NODE_GROUP_LABEL = "ray.io/node-group"  # KubeRay gives it to every Ray node: the name of its group
SELECTOR = "placement_group_bundle_label_selector"
# `kubectl apply` keeps a copy of the object in an annotation, which may be so large.
MOST_OBJECT_BYTES = 262_144
MOST_LABEL_CHARS = 63
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DNS = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# Labels with this prefix that KubeRay lets a group set.
_RAY_PREFIX = "ray.io/"
_OF_RAY = ("market-type", "accelerator-type", "availability-region", "availability-zone", "region")


def problems(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that would be refused, or would wait for ever; empty where there is nothing."""
    return [f"{each['kind']} {each['metadata']['name']}: {problem}" for each in documents for problem in _of(each)]


def _of(document: Mapping[str, Any]) -> Iterator[str]:
    if len(json.dumps(document)) > MOST_OBJECT_BYTES:
        yield f"is larger than the {MOST_OBJECT_BYTES} bytes that `kubectl apply` takes"
    if document["kind"] != "RayService":
        return
    workers = document["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    names = [group["groupName"] for group in workers]
    if len(set(names)) != len(names):
        yield f"two worker groups have one name: {', '.join(sorted(names))}"
    nodes = [name for group in workers if (name := (group.get("labels") or {}).get(NODE_NAME_LABEL))]
    if twice := sorted({name for name in nodes if nodes.count(name) > 1}):
        yield f"two worker groups have the label {NODE_NAME_LABEL}={twice[0]}: give each node a name of its own"
    given: dict[str, set[str]] = {NODE_GROUP_LABEL: set(names)}
    for group in workers:
        if len(group["groupName"]) > MOST_LABEL_CHARS:
            yield f"worker group {group['groupName']}: is a label, of at most {MOST_LABEL_CHARS} characters"
        for key, value in (group["template"]["spec"].get("nodeSelector") or {}).items():
            prefix, _, name = key.partition("/")
            if not (_DNS.fullmatch(prefix) and _LABEL_NAME.fullmatch(name) and _LABEL_NAME.fullmatch(value or "x")):
                yield (
                    f"{group['groupName']}: label {key}={value}: Kubernetes takes PREFIX/NAME with the prefix in lower "
                    "case, and letters, digits, - _ and . only, at most 63 characters; correct labels in the cluster's "
                    "file"
                )
        for key, value in (group.get("labels") or {}).items():
            given.setdefault(key, set()).add(str(value))
            where = f"{group['groupName']}: label {key}"
            if not _LABEL_NAME.fullmatch(key.rpartition("/")[2]) or not _LABEL_NAME.fullmatch(str(value)):
                yield f"{where}={value}: letters, digits, - _ and . only, at most 63 characters"
            if key.startswith(_RAY_PREFIX) and key.removeprefix(_RAY_PREFIX) not in _OF_RAY:
                yield f"{where}: KubeRay reserves it"
    for selector in selectors(yaml.safe_load(document["spec"]["serveConfigV2"])):
        for key, value in selector.items():
            wanted = set(value.removeprefix("in(").removesuffix(")").replace(" ", "").split(","))
            if missing := sorted(wanted - given.get(key, set())):
                yield f"the application needs nodes with {key}={', '.join(missing)}, but no worker group has that label"


def selectors(value: Any) -> Iterator[dict[str, str]]:
    """Every label selector of a bundle in a Serve config."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from each if key == SELECTOR else selectors(each)
    elif isinstance(value, list):
        for each in value:
            yield from selectors(each)
