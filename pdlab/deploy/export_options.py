"""The launcher's settings for exports: files that another tool deploys. A part of `pdlab.deploy.options`."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Annotated, Literal

from pdlab.core.commands import PDLAB
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.core.settings import Settings, Text, declared, setting

# Titles of groups of flags.
EXPORT, KUBERNETES = "export (nothing is started)", "Kubernetes (with --export-k8s)"
WEIGHTS_PATH = "/weights"
HUGE_PAGES = "5120Mi"  # of 2 MiB; what AWS gives a p5 for libfabric
EFA_RESOURCE = "vpc.amazonaws.com/efa"
# A Kubernetes object's name that is a DNS label, and the longest name that KubeRay takes for a RayService.
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
MOST_NAME_CHARS = 47
QUANTITY = re.compile(r"[1-9][0-9]*(Mi|Gi|Ti)")
RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
CODE_URL = re.compile(r"(https|s3|gs|file)://[^\s\"']+\.(zip|whl)")
IMAGE = re.compile(r"[\w.-]+(:[0-9]+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)


class WeightsClaim(Frozen):
    """A volume claim with weights, and where the pods have it."""

    claim: str
    path: str = WEIGHTS_PATH

    def __str__(self) -> str:
        return self.claim if self.path == WEIGHTS_PATH else f"{self.claim}:{self.path}"


class RdmaDevices(Frozen):
    """The RDMA devices of a pod. ``kind``: EFA with as many as the cluster's file has, a named resource, or a device
    class of dynamic resource allocation (DRA), both with ``count``."""

    kind: Literal["efa", "resource", "dra"]
    name: str = EFA_RESOURCE
    count: int | None = None

    def __str__(self) -> str:
        return "efa" if self.kind == "efa" else f"{'dra:' if self.kind == 'dra' else ''}{self.name}={self.count}"


def read_weights_claim(text: str) -> WeightsClaim:
    """Raises argparse.ArgumentTypeError."""
    claim, colon, path = text.partition(":")
    if not DNS_NAME.fullmatch(claim) or (colon and not re.fullmatch(r"(/[\w.-]+)+", path)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not CLAIM or CLAIM:/PATH, the name of a volume claim and an absolute path; "
            f"for example weights:{WEIGHTS_PATH}"
        )
    return WeightsClaim(claim=claim, path=path or WEIGHTS_PATH)


def read_rdma_devices(text: str) -> RdmaDevices:
    """Raises argparse.ArgumentTypeError."""
    if text == "efa":
        return RdmaDevices(kind="efa")
    kind: Literal["resource", "dra"] = "dra" if text.startswith("dra:") else "resource"
    name, _, count = text.removeprefix("dra:").partition("=")
    pattern = DNS_NAME if kind == "dra" else RESOURCE
    if not pattern.fullmatch(name) or not re.fullmatch(r"[1-9][0-9]{0,3}", count):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not efa, RESOURCE=N or dra:CLASS=N; for example rdma/ib=1 or dra:mrdma.google.com=8"
        )
    return RdmaDevices(kind=kind, name=name, count=int(count))


def named(pattern: re.Pattern[str], expected: str, most_chars: int | None = None) -> Text:
    """A word of at most ``most_chars`` characters that the pattern matches; ``expected``: its form, for the error."""

    def read(text: str) -> str:
        if not pattern.fullmatch(text) or len(text) > (most_chars or len(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return text

    return Text(read)


def quantity_bytes(quantity: str) -> int:
    """Bytes of what `QUANTITY` matches."""
    return int(quantity[:-2]) * {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[quantity[-2:]]


Quantity = Annotated[str, named(QUANTITY, "a whole number of Mi, Gi or Ti; for example 1600Gi")]
ServiceName = Annotated[
    str,
    named(
        DNS_LABEL,
        f"the name of a RayService: a to z, 0 to 9 and dashes, a letter first, at most {MOST_NAME_CHARS} characters",
        MOST_NAME_CHARS,
    ),
]
SecretName = Annotated[str, named(DNS_NAME, "the name of a Kubernetes object: a to z, 0 to 9, - and .", 253)]
CodeUrl = Annotated[str, named(CODE_URL, "https://, s3://, gs:// or file:// with a file that ends in .zip or .whl")]
ImageName = Annotated[str, named(IMAGE, "the name of an image; for example HOST/pdlab-gpu:2.60.0")]


# Every setting of a manifest is for --export-k8s, and every file excludes the others.
in_manifest = partial(setting, group=KUBERNETES, needs="export_k8s", advanced=True)
exported = partial(setting, group=EXPORT, value="FILE", one_of="export")


class ExportOptions(Settings):
    """What is exported, and how."""

    export: str | None = exported(None, "write a Serve config for serve deploy (- is stdout); start nothing")
    export_plain: str | None = exported(
        None,
        "write a Serve config for Ray's public builders, without pdlab's code and its protections (- is stdout)",
        advanced=True,
    )
    export_k8s: str | None = exported(
        None,
        "write the manifests of a KubeRay RayService for the nodes of --cluster FILE (- is stdout; docs/kubernetes.md)",
        advanced=True,
    )
    export_env: str | None = setting(
        None,
        "with --export or --export-plain: write the environment for `ray start` on every node, as a file to source",
        EXPORT,
        value="FILE",
        advanced=True,
    )
    code_url: CodeUrl | None = setting(
        None,
        f"with --export: Ray fetches pdlab's code from this URL (`{PDLAB} code-zip` makes the file), so that "
        "nodes need no installed pdlab",
        EXPORT,
        value="URL",
        needs="export",
        advanced=True,
    )
    image: ImageName | None = in_manifest(None, "image of all pods; --export-k8s needs it", value="IMAGE")
    k8s_name: ServiceName | None = in_manifest(
        None, "name of the RayService", value="NAME", otherwise="the deployment's name"
    )
    k8s_groups: Literal["node", "pool"] = in_manifest(
        "node", "one worker group for each planned node, or one for all nodes of a pool"
    )
    weights_pvc: Annotated[WeightsClaim, Text(read_weights_claim)] | None = in_manifest(
        None,
        f"volume claim with the weights, mounted at PATH (default {WEIGHTS_PATH}) in all pods; HF_HOME is PATH/hf",
        value="CLAIM[:PATH]",
    )
    hf_secret: SecretName | None = in_manifest(None, "secret whose key `token` is the Hugging Face token", value="NAME")
    key_secret: SecretName | None = in_manifest(
        None,
        "secret whose key `sha256` is the SHA-256 of the API key",
        value="NAME",
        otherwise="the RayService's name followed by -api-key",
    )
    rdma: Annotated[RdmaDevices, Text(read_rdma_devices)] | None = in_manifest(
        None,
        "RDMA devices of a worker pod",
        value="efa|RESOURCE=N|dra:CLASS=N",
        otherwise="efa where the cluster's nodes have EFA",
    )
    hugepages: Quantity | None = in_manifest(
        None,
        f"huge pages of 2 MiB of a worker pod ({HUGE_PAGES} without a number)",
        value="SIZE",
        bare=HUGE_PAGES,
        otherwise="none",
    )
    pod_memory: Quantity | None = in_manifest(
        None, "memory of a worker pod, requested and as its limit", value="SIZE", otherwise="no request and no limit"
    )

    @property
    def target(self) -> tuple[str, str] | None:
        """The flag of the export that is given, and its file; None: no export."""
        files = [(each.long_flag, getattr(self, each.name)) for each in declared(ExportOptions) if each.flag.one_of]
        return next(((flag, file) for flag, file in files if file is not None), None)

    def check(self) -> None:
        if self.export_env is not None and self.export is None and self.export_plain is None:
            raise UsageError("--export-env is for --export and --export-plain: add one of them, or leave it out")
        if self.export_k8s is not None and self.image is None:
            raise UsageError("--export-k8s needs the image of the pods: give --image IMAGE (docs/kubernetes.md)")
