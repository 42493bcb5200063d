"""What KubeRay and Kubernetes refuse in the manifests of a RayService, beyond the schema of its definition.

The launcher checks what a user decides (`pdlab.deploy.kubernetes.rules`); here is the rest. The rules are those of
KubeRay 1.7.0 (validation.go, service.go) and of Kubernetes (names, quantities); each message names the value and the
rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from pdlab.deploy.export_options import DNS_LABEL, DNS_NAME, MOST_NAME_CHARS

_QUANTITY = re.compile(r"[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?")
_REACHED = ("0.0.0.0", "::")
_UPGRADES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")


def problems(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that would be refused, or would wait for ever; empty where there is nothing."""
    return [f"{each['kind']} {_name(each)}: {problem}" for each in documents for problem in _of(each, documents)]


def _name(document: Mapping[str, Any]) -> str:
    return str(document.get("metadata", {}).get("name"))


def _of(document: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not DNS_NAME.fullmatch(_name(document)):
        yield "metadata.name is a to z, 0 to 9, dashes and dots"
    if document["kind"] == "RayService":
        yield from _service(document, documents)


def _service(document: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    name, spec = _name(document), document["spec"]
    if len(name) > MOST_NAME_CHARS or not DNS_LABEL.fullmatch(name):
        yield f"metadata.name is a DNS label of at most {MOST_NAME_CHARS} characters"
    upgrade = (spec.get("upgradeStrategy") or {}).get("type")
    if upgrade not in (None, *_UPGRADES):
        yield f"spec.upgradeStrategy.type {upgrade!r}: is one of {', '.join(_UPGRADES)}"
    cluster = spec["rayClusterConfig"]
    if (cluster.get("authOptions") or {}).get("mode") == "token" and not cluster.get("rayVersion"):
        yield "authOptions.mode token needs rayVersion"
    head, workers = cluster["headGroupSpec"], cluster.get("workerGroupSpecs", [])
    ports = [port.get("name") for port in head["template"]["spec"]["containers"][0].get("ports", [])]
    if "serve" not in ports:
        yield "the head's container has no port with the name serve: KubeRay makes no Service"
    names = [group["groupName"] for group in workers]
    for group_name, group in (("head", head), *zip(names, workers, strict=True)):
        for problem in (*_group(group, worker=group is not head), *_pod(group["template"]["spec"], documents)):
            yield f"{group_name}: {problem}"
    host = (yaml.safe_load(spec["serveConfigV2"]).get("http_options") or {}).get("host")
    if host not in _REACHED:
        yield f"http_options.host {host}: neither the Service nor KubeRay reach it; give 0.0.0.0"


def _group(group: Mapping[str, Any], *, worker: bool) -> Iterator[str]:
    start = group.get("rayStartParams") or {}
    if "labels" in start:
        yield "rayStartParams.labels: KubeRay 1.5 and later refuse it; use labels"
    for key, value in start.items():
        if not isinstance(value, str):
            yield f"rayStartParams.{key} {value!r}: is a string"
    if not worker:
        return
    if not DNS_LABEL.fullmatch(group["groupName"]):
        yield "groupName is a DNS label: it is a part of the names of pods"
    counts = [group.get(key) for key in ("minReplicas", "replicas", "maxReplicas")]
    if any(not isinstance(count, int) for count in counts) or counts != sorted(counts, key=lambda count: count or 0):
        yield f"minReplicas, replicas and maxReplicas {counts}: are three whole numbers that do not fall"
    if "pdlab/node" in (group.get("labels") or {}) and group.get("maxReplicas") != 1:
        yield "a group with the label pdlab/node has one pod: two nodes would have one name"


def _pod(pod: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    maps = {_name(each) for each in documents if each["kind"] == "ConfigMap"}
    templates = {_name(each) for each in documents if each["kind"] == "ResourceClaimTemplate"}
    claims = {claim["name"]: claim for claim in pod.get("resourceClaims", [])}
    for volume in volumes.values():
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            yield f"volume {volume['name']}: there is no ConfigMap {volume['configMap']['name']} in the file"
    for claim in claims.values():
        if claim.get("resourceClaimTemplateName") not in templates:
            yield f"resource claim {claim['name']}: its template is not in the file"
    for key, value in (pod.get("nodeSelector") or {}).items():
        if not isinstance(value, str):
            yield f"nodeSelector {key} {value!r}: is a string"
    for container in pod["containers"]:
        if "readinessProbe" in container:
            yield "a readinessProbe replaces KubeRay's: the Service would send requests to pods without a proxy"
        names = [variable["name"] for variable in container.get("env", [])]
        for variable in container.get("env", []):
            if names.count(variable["name"]) > 1:
                yield f"variable {variable['name']} is there twice"
            if "valueFrom" not in variable and not isinstance(variable.get("value"), str):
                yield f"variable {variable['name']} {variable.get('value')!r}: is a string"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"mount {mount['mountPath']}: there is no volume {mount['name']}"
        yield from _resources(container.get("resources") or {}, claims)


def _resources(resources: Mapping[str, Any], claims: Mapping[str, Any]) -> Iterator[str]:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for key, value in (*requests.items(), *limits.items()):
        if not _QUANTITY.fullmatch(str(value)):
            yield f"{key} {value!r}: is no quantity"
    for key in {*requests, *limits}:
        # Devices and huge pages are not overcommitted.
        if ("/" in key or key.startswith("hugepages-")) and requests.get(key, limits.get(key)) != limits.get(key):
            yield f"{key}: the request is the limit"
    for claim in resources.get("claims", []):
        if claim["name"] not in claims:
            yield f"resource claim {claim['name']}: the pod has none of that name"
