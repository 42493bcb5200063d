"""The manifests of a KubeRay RayService that serves a prepared deployment.

One worker group for each planned node, with one pod and the label ``pdlab/node``: the pod that replaces a lost one has
the label again, and the replica's placement finds it. Or one worker group for all nodes that have the same pools. Pure:
plain data in, plain data out. docs/kubernetes.md has the reason for each field.
"""

from __future__ import annotations

import base64
import copy
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from pdlab.core.api_key import DIGEST, serve_env
from pdlab.core.catalog import gpu_link
from pdlab.core.defaults import PORT
from pdlab.core.deployment import Fluid
from pdlab.core.errors import UsageError
from pdlab.core.nodes import NODE_ID_LABEL, NODE_NAME_LABEL, WIRE_OF_NIC, ClusterNode, ClusterView, Role
from pdlab.core.version import STACK, __version__, stack_text
from pdlab.deploy.export_options import MOST_NAME_CHARS, WEIGHTS_PATH, ExportOptions, RdmaDevices, quantity_bytes
from pdlab.deploy.exports import comments, node_env, without_bringing
from pdlab.deploy.kubernetes.code_zip import archive, code, digest, file_name
from pdlab.deploy.kubernetes.rules import NODE_GROUP_LABEL, SELECTOR, problems
from pdlab.deploy.prepared import Prepared
from pdlab.deploy.serve_config import engine_configs, host_copy_bytes, one_of, serve_config
from pdlab.deploy.serving_path import EVERYWHERE, refuse_port
from pdlab.deploy.wire_proof import planned_wires

# A volume hides the image's folder at its path: this one is no folder of deploy/Dockerfile.*.
CODE_PATH = "/opt/pdlab-code"
# Folders of images, and of Ray while it runs: a volume at one of them, above or below it is refused.
OF_IMAGE = (
    *("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr"),
    *("/home/ray", "/opt/amazon", "/opt/nvidia", "/opt/pdlab", CODE_PATH),
)
OWNER_LABEL = "pdlab/deployment"
# Labels with a domain are on nodes of Kubernetes, but those of Ray and of pdlab are on Ray's nodes.
OF_RAY = ("ray.io", OWNER_LABEL.partition("/")[0])
SYSTEM_SHARE = 6  # one CPU in so many is left to the node's own processes
# Replicas drain for 45 s (`pdlab.deploy.serve_config.SHUTDOWN_WINDOW_S`); Kubernetes would end a pod after 30 s.
GRACE_S = 120
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
AGENT_PORT = 52365  # of Ray's dashboard agent; it has no name in a pod's manifest


@dataclass(frozen=True)
class PodSize:
    """Resources of pods other than GPUs. ``shared_memory_bytes``: size of /dev/shm, with Ray's object store in it, but
    without the KV cache that engines keep in host memory."""

    head_cpu: str
    head_memory: str
    shared_memory_bytes: int
    object_store_bytes: int


GPU_PODS = PodSize("8", "16Gi", 64 * 2**30, 8 * 2**30)
CPU_PODS = PodSize("1", "4Gi", 4 * 2**30, 2**30)


@dataclass(frozen=True)
class WorkerGroup:
    """One worker group. ``nodes``: the planned, identical nodes that its pods represent."""

    name: str
    nodes: tuple[ClusterNode, ...]
    labels: dict[str, str]


def service_name(prepared: Prepared, options: ExportOptions) -> str:
    """The RayService's name: the one that is given, or made of the deployment's."""
    return options.k8s_name or re.sub(r"[^a-z0-9-]+", "-", prepared.deployment.label.lower())[:MOST_NAME_CHARS].strip(
        "-"
    )


def pod_nodes(view: ClusterView) -> ClusterView:
    """The nodes as Ray sees them in their pods: each has the name that its worker group gives it. Labels with ids of
    another Ray cluster are gone."""
    return view.model_copy(
        update={
            "nodes": tuple(
                node.model_copy(
                    update={
                        "labels": {
                            **{key: value for key, value in node.labels.items() if key != NODE_ID_LABEL},
                            NODE_NAME_LABEL: node.labels.get(NODE_NAME_LABEL, node.id),
                        }
                    }
                )
                for node in view.nodes
            )
        }
    )


def manifests(
    prepared: Prepared, options: ExportOptions, *, port: int, path_env: Mapping[str, str], wants_key: bool
) -> list[dict[str, Any]]:
    """The ConfigMap with pdlab's code, the template of RDMA claims where they are asked for, and the RayService.

    Raises UsageError for what the pods of this cluster cannot have, and for a manifest that would be refused.
    """
    name = service_name(prepared, options)
    files = code()
    code_map = f"pdlab-code-{digest(files)}"
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": code_map},
            "immutable": True,
            "binaryData": {file_name(files): base64.b64encode(archive(files)).decode()},
        }
    ]
    _check_weights(prepared, options)
    _check_port(port)
    _check_whole_nodes(prepared)
    groups = _groups(prepared, options)
    rdma = _rdma(prepared, options)
    if rdma is not None and rdma.kind == "dra":
        documents.append(_claim_template(name, rdma))
    env: dict[str, Any] = {**path_env, "PYTHONPATH": f"{CODE_PATH}/{file_name(files)}"}
    if wants_key:
        env |= serve_env("") | {DIGEST: _from_secret(options.key_secret or f"{name}-api-key", "sha256")}
    pods = _Pods(prepared, options, name, code_map, env, rdma, port)
    documents.append(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayService",
            "metadata": {"name": name, "labels": {OWNER_LABEL: name}},
            "spec": {
                "upgradeStrategy": {"type": "None"},
                "serveConfigV2": yaml.dump(
                    _serve_config(prepared, options, groups, port), Dumper=_Dumper, sort_keys=False
                ),
                "rayClusterConfig": {
                    "rayVersion": STACK["ray"],
                    "authOptions": {"mode": "token"},
                    "headGroupSpec": pods.head(),
                    "workerGroupSpecs": [pods.workers(group) for group in groups],
                },
            },
        }
    )
    if found := problems(documents):
        raise UsageError(f"--export-k8s: {found[0]}")
    return documents


def notes(prepared: Prepared, options: ExportOptions, *, wants_key: bool, port: int) -> list[str]:
    """What the Kubernetes cluster must have, and how the file is applied."""
    name = service_name(prepared, options)
    secret = options.key_secret or f"{name}-api-key"
    found = [
        f"pdlab {__version__}: {prepared.deployment.label} on {prepared.view.name}. Read docs/kubernetes.md first.",
        f"The image {options.image} has {stack_text()}, bash and wget.",
        "The cluster has KubeRay 1.5.1 or later, and the plugins of the devices that the pods request.",
    ]
    if wants_key:
        found.append(
            f"No pod starts without the secret {secret}:\nkubectl create secret generic {secret} "
            "--from-literal=sha256=$(printf %s \"$PDLAB_API_KEY\" | sha256sum | cut -d' ' -f1)"
        )
    if options.hf_secret is not None:
        found.append(
            f"No pod starts without the secret {options.hf_secret}:\nkubectl create secret generic {options.hf_secret} "
            "--from-literal=token=$HF_TOKEN"
        )
    if names := prepared.deployment.secrets:
        found.append(f"The pods need {' and '.join(names)} too, which no file holds: add them from a secret to `env`.")
    if options.weights_pvc is None:
        found.append("Without --weights-pvc every pod downloads the weights, and again when it is replaced.")
    if isinstance(prepared.deployment.topology, Fluid):
        found.append(
            "A fluid pool has one router, on the head: worker pods stay unready, because KubeRay requires a proxy on "
            "each (ray-project/kuberay issue 4994). The Service sends requests to the head."
        )
    if prepared.view.device == "gpu" and options.hugepages is None and node_env(prepared):
        found.append("With --hugepages libfabric has huge pages, where `kubectl describe node` shows some.")
    found += [
        f"To deploy and to wait:\nkubectl apply -f FILE\n"
        f"kubectl wait --for=condition=Ready rayservice/{name} --timeout=60m",
        f"To reach the model at http://127.0.0.1:{port}/v1:\nkubectl port-forward svc/{name}-serve-svc {port}",
    ]
    return found


def to_text(documents: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> str:
    """One YAML file, the lines as comments on top."""
    return comments(lines) + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10**9, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    """Writes equal parts out, not as aliases, and text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# Other readers of YAML take a plain y for true and a plain 1e3 for a number; PyYAML writes both without quotes.
_AMBIGUOUS = re.compile(r"[-+.]?[0-9].*|y|n|yes|no|on|off|true|false|null|none|~|[-+]?\.(inf|nan)", re.IGNORECASE)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _groups(prepared: Prepared, options: ExportOptions) -> list[WorkerGroup]:
    roles: dict[str, list[Role]] = {}
    for replica in prepared.placement.replicas:
        for node_id in replica.nodes:
            found = roles.setdefault(node_id, [])
            if replica.role not in found:
                found.append(replica.role)
    view = prepared.view
    if options.k8s_groups == "node":
        return [
            WorkerGroup(_dns(node_id), (node,), {NODE_NAME_LABEL: node.labels[NODE_NAME_LABEL]})
            for node_id in roles
            for node in [view.node(node_id)]
        ]
    by_roles: dict[tuple[Role, ...], list[ClusterNode]] = {}
    for node_id, found in roles.items():
        by_roles.setdefault(tuple(found), []).append(view.node(node_id))
    for names, nodes in by_roles.items():
        kinds = {
            (node.gpu_type, _gpu_resource(node), node.gpus, node.cpus, node.nic.kind, node.nic.count) for node in nodes
        }
        selectors = {tuple(sorted(_selector(node).items())): node for node in nodes}
        if len(selectors) > 1:
            (one, other), *_ = zip(selectors, list(selectors)[1:], strict=False)
            keys = sorted({key for key, _ in {*one} ^ {*other}})
            raise UsageError(
                f"--k8s-groups pool: the nodes of {' and '.join(names)} ({', '.join(node.id for node in nodes)}) "
                f"differ in {', '.join(keys)}, and pods of one group have one node selector; give --k8s-groups node"
            )
        if len(kinds) > 1:
            raise UsageError(
                f"--k8s-groups pool: the nodes of {' and '.join(names)} are not alike "
                f"({', '.join(node.id for node in nodes)}), and pods of one group are; give --k8s-groups node"
            )
    return [WorkerGroup("-".join(names), tuple(nodes), {}) for names, nodes in by_roles.items()]


def _selector(node: ClusterNode) -> dict[str, str]:
    """The labels of the node that Kubernetes knows."""
    return {key: value for key, value in node.labels.items() if "/" in key and key.partition("/")[0] not in OF_RAY}


def _gpu_resource(node: ClusterNode) -> str:
    return "amd.com/gpu" if gpu_link(node) == "xgmi" else "nvidia.com/gpu"


def _dns(text: str) -> str:
    plain = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    return plain if plain[:1].isalpha() else f"node-{plain}"


def _serve_config(
    prepared: Prepared, options: ExportOptions, groups: Sequence[WorkerGroup], port: int
) -> dict[str, Any]:
    """The application; every pod imports pdlab's code, and with a proxy on each node KubeRay finds all pods ready."""
    app = without_bringing(prepared.app)
    if options.k8s_groups == "pool":
        app = app.model_copy(update={"args": copy.deepcopy(app.args)})
        for role, config in zip(prepared.placement.roles, engine_configs(app.args), strict=True):
            names = [group.name for group in groups if role in group.name.split("-")]
            bundles = config["deployment_config"][SELECTOR]
            config["deployment_config"][SELECTOR] = [{NODE_GROUP_LABEL: one_of(names)} for _ in bundles]
    location = "HeadOnly" if isinstance(prepared.deployment.topology, Fluid) else "EveryNode"
    return serve_config(app, host="0.0.0.0", port=port, proxy_location=location)


def _check_weights(prepared: Prepared, options: ExportOptions) -> None:
    """Raises UsageError for a folder that no pod has, and for a volume that hides folders of the image."""
    if options.weights_pvc is not None:
        path = PurePosixPath(posixpath.normpath(options.weights_pvc.path))
        hidden = [each for each in OF_IMAGE if path.is_relative_to(each) or PurePosixPath(each).is_relative_to(path)]
        if hidden:
            raise UsageError(
                f"--weights-pvc {options.weights_pvc}: a volume at {path} would hide {hidden[0]} or lie in it, which "
                f"the image and Ray need; give another folder, for example {options.weights_pvc.claim}:{WEIGHTS_PATH}"
            )
    source = prepared.model_source
    if not source.startswith("/"):
        return
    claim = options.weights_pvc
    if claim is None or not f"{source}/".startswith(f"{claim.path}/"):
        raise UsageError(
            f"--model {source}: no pod has that folder; give the volume claim that holds it (--weights-pvc CLAIM:PATH) "
            "and --model PATH/FOLDER as the pods see it"
        )


def _check_port(port: int) -> None:
    """Raises UsageError for a port that another process of the pod takes."""
    refuse_port(port, EVERYWHERE)
    if port in (*PORTS.values(), AGENT_PORT):
        raise UsageError(f"--port {port}: Ray takes that port of every pod; give another, such as {PORT}")


def _check_whole_nodes(prepared: Prepared) -> None:
    """Raises UsageError for a node whose GPUs are taken in part: its pod requests all, and would stay Pending."""
    for node in (prepared.view.node(node_id) for node_id in prepared.placement.used_slots):
        if len(node.slots) < node.gpus:
            raise UsageError(
                f"{node.id} of {prepared.view.name} has {len(node.slots)} of {node.gpus} GPUs in free_gpus, and a pod "
                "takes all; empty the node and remove free_gpus from the cluster's file, or leave the node out"
            )


def _rdma(prepared: Prepared, options: ExportOptions) -> RdmaDevices | None:
    """The devices of a pod. Raises UsageError where KV cache crosses RDMA devices whose name nobody knows."""
    nodes = [prepared.view.node(node_id) for node_id in prepared.placement.used_slots]
    counts = {node.nic.count for node in nodes if node.nic.kind == "efa"}
    if options.rdma is not None and options.rdma.kind != "efa":
        return options.rdma
    if options.rdma is not None and not counts:
        raise UsageError(
            f"--rdma efa: the nodes of {prepared.view.name} have no EFA; set nic in the cluster's file, or leave "
            "--rdma out"
        )
    if counts:
        return RdmaDevices(kind="efa")
    if "rdma" in planned_wires(prepared.deployment, prepared.placement, prepared.view):
        raise UsageError(
            f"the KV cache crosses the {nodes[0].nic.kind} NICs of {prepared.view.name}, and each site names them in "
            "its own way: give --rdma RESOURCE=N as `kubectl describe node` shows it, or --rdma dra:CLASS=N"
        )
    return None


def _claim_template(name: str, rdma: RdmaDevices) -> dict[str, Any]:
    exactly = {"deviceClassName": rdma.name, "allocationMode": "ExactCount", "count": rdma.count}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": f"{name}-rdma"},
        "spec": {"spec": {"devices": {"requests": [{"name": "rdma", "exactly": exactly}]}}},
    }


def _from_secret(name: str, key: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": name, "key": key}}


class _Pods:
    """The pods of one RayService."""

    def __init__(
        self,
        prepared: Prepared,
        options: ExportOptions,
        name: str,
        code_map: str,
        env: Mapping[str, Any],
        rdma: RdmaDevices | None,
        port: int,
    ) -> None:
        self.prepared, self.options, self.name = prepared, options, name
        self.rdma, self.port = rdma, port
        self.gpu = prepared.view.device == "gpu"
        self.size = GPU_PODS if self.gpu else CPU_PODS
        # Where no node has RDMA devices in the cluster's file, those of --rdma are all nodes'.
        self.some_have = any(
            prepared.view.node(node_id).nic.kind in WIRE_OF_NIC for node_id in prepared.placement.used_slots
        )
        self.env = dict(env)
        self.volumes: list[dict[str, Any]] = [{"name": "pdlab", "configMap": {"name": code_map}}]
        self.mounts: list[dict[str, Any]] = [{"name": "pdlab", "mountPath": CODE_PATH, "readOnly": True}]
        if (weights := options.weights_pvc) is not None:
            self.env["HF_HOME"] = f"{weights.path}/hf"
            self.volumes.append({"name": "weights", "persistentVolumeClaim": {"claimName": weights.claim}})
            self.mounts.append({"name": "weights", "mountPath": weights.path})
        if options.hf_secret is not None:
            self.env["HF_TOKEN"] = _from_secret(options.hf_secret, "token")

    def head(self) -> dict[str, Any]:
        """The head: Ray Serve's controller, HAProxy and routers, and no engine."""
        memory = {"memory": self.size.head_memory}
        container = {
            "name": "ray-head",
            "image": self.options.image,
            "ports": [{"name": name, "containerPort": port} for name, port in {**PORTS, "serve": self.port}.items()],
            "env": _variables(self.env),
            "resources": {"requests": {"cpu": self.size.head_cpu, **memory}, "limits": memory},
            "volumeMounts": self.mounts,
        }
        return {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0"},
            "template": self._template({"containers": [container], "volumes": self.volumes}),
        }

    def workers(self, group: WorkerGroup) -> dict[str, Any]:
        """A worker group, one pod for each of its nodes."""
        node, count = group.nodes[0], len(group.nodes)
        # As many CPUs as the placement counts on. Without the number, Ray takes the request, which is smaller.
        start = {"object-store-memory": str(self.size.object_store_bytes), "num-cpus": str(int(node.available_cpus))}
        spec: dict[str, Any] = {
            "groupName": group.name,
            "replicas": count,
            "minReplicas": count,
            "maxReplicas": count,
        }
        if group.labels:
            spec["labels"] = group.labels
        return {**spec, "rayStartParams": start, "template": self._template(self._worker(group))}

    def _worker(self, group: WorkerGroup) -> dict[str, Any]:
        node, rdma = group.nodes[0], self._rdma_of(group.nodes[0])
        copies = self._copy_bytes(group)
        resources = self._resources(node, copies)
        container: dict[str, Any] = {
            "name": "ray-worker",
            "image": self.options.image,
            "ports": [{"name": "serve", "containerPort": self.port}],
        }
        if rdma is not None:
            # An added capability has no effect for another user than root.
            container["securityContext"] = {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}}
        container |= {
            "env": _variables({**self.env, **(node_env(self.prepared) if node.nic.kind == "efa" else {})}),
            "resources": resources,
            # The first process of the container is a shell, which hands no signal on to Ray.
            "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "ray stop"]}}},
            "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}, *self.mounts],
        }
        shared = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": self._shared_memory(copies)}}
        pod: dict[str, Any] = {"terminationGracePeriodSeconds": GRACE_S}
        if selector := _selector(node):
            pod["nodeSelector"] = selector
        if self.gpu:
            pod["tolerations"] = [{"key": _gpu_resource(node), "operator": "Exists", "effect": "NoSchedule"}]
        if node.nic.kind in WIRE_OF_NIC:
            pod["affinity"] = {"podAffinity": self._one_zone(node)}
        if rdma is not None and rdma.kind == "dra":
            pod["resourceClaims"] = [{"name": "rdma", "resourceClaimTemplateName": f"{self.name}-rdma"}]
        return {**pod, "containers": [container], "volumes": [shared, *self.volumes]}

    def _rdma_of(self, node: ClusterNode) -> RdmaDevices | None:
        """The RDMA devices of that node's pod: a pod that requests what its node lacks stays Pending."""
        return self.rdma if not self.some_have or node.nic.kind in WIRE_OF_NIC else None

    def _copy_bytes(self, group: WorkerGroup) -> int:
        """Bytes of KV cache that the engines of a pod of the group keep in host memory; pods of a group are alike."""
        held = host_copy_bytes(self.prepared.deployment, self.prepared.placement)
        return max(held[node.id] for node in group.nodes)

    def _shared_memory(self, copies: int) -> str:
        """The size of /dev/shm. On GPU nodes vLLM maps there what engines keep in host memory. Raises UsageError for
        a --pod-memory that does not hold it: the pages are written at the start."""
        size_bytes = self.size.shared_memory_bytes + (copies if self.gpu else 0)
        memory = self.options.pod_memory
        if copies and memory is not None and quantity_bytes(memory) < self.size.shared_memory_bytes + copies:
            raise UsageError(
                f"--pod-memory {memory}: a pod needs {_quantity(copies)} for KV cache in host memory and "
                f"{_quantity(self.size.shared_memory_bytes)} for the rest of /dev/shm; give more, or leave "
                "--pod-memory out"
            )
        return _quantity(size_bytes)

    def _resources(self, node: ClusterNode, copies: int) -> dict[str, Any]:
        """All GPUs and NICs of the node: NVLink does not work between pods, and which NIC is near which GPU shows only
        in a pod that has them all. No limit of CPUs, which would throttle. ``copies``: bytes of KV cache in host
        memory, which are requested where no --pod-memory is."""
        cpus, rdma = int(node.available_cpus), self._rdma_of(node)
        both: dict[str, str] = {_gpu_resource(node): str(node.gpus)} if node.gpus else {}
        if rdma is not None and rdma.kind != "dra":
            both[rdma.name] = str(rdma.count or node.nic.count)
        if self.options.hugepages is not None:
            both["hugepages-2Mi"] = self.options.hugepages
        if self.options.pod_memory is not None:
            both["memory"] = self.options.pod_memory
        requests = {"cpu": str(max(1, cpus - math.ceil(cpus / SYSTEM_SHARE))), **both}
        if copies:
            requests.setdefault("memory", _quantity(copies))
        resources: dict[str, Any] = {"requests": requests}
        if both:
            resources["limits"] = both
        if rdma is not None and rdma.kind == "dra":
            resources["claims"] = [{"name": "rdma"}]
        return resources

    def _one_zone(self, node: ClusterNode) -> dict[str, Any]:
        """All workers in one zone, whichever it is. EFA does not leave a zone. Nodes of bare metal often have no label
        of a zone, and would never take a pod that requires one."""
        labels = {OWNER_LABEL: self.name, "ray.io/node-type": "worker"}
        term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "topology.kubernetes.io/zone"}
        if node.nic.kind == "efa":
            return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}

    def _template(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        # Karpenter would move pods to fewer nodes, and end engines.
        metadata = {"labels": {OWNER_LABEL: self.name}, "annotations": {"karpenter.sh/do-not-disrupt": "true"}}
        return {"metadata": metadata, "spec": dict(spec)}


def _quantity(size_bytes: int) -> str:
    """At least so many bytes, as Kubernetes writes them."""
    return f"{size_bytes // 2**30}Gi" if size_bytes % 2**30 == 0 else f"{math.ceil(size_bytes / 2**20)}Mi"


def _variables(env: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in env.items()
    ]
