"""Models and clusters of configs/: shapes with their sources, nodes, deployments by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from pdlab.core.deployment import LABEL_EXAMPLE, Deployment, is_label, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.files import CONFIGS
from pdlab.core.nodes import HOST_NAMES, NODE_NAME_LABEL, ClusterNode, ClusterView, GpuLink, LinkShape, Nic
from pdlab.core.schema import Frozen, load_yaml, parse_yaml
from pdlab.core.text import choices

LOCAL_NODE_CPUS = 4  # engine ranks that one node of `--local` takes

# Bytes per value, scales counted: OCP microscaling has one byte for 32 values of mxfp4, nvfp4 one byte for 16, AWQ and
# GPTQ a scale of two bytes and a zero point of half a byte for 128. A plain "fp4" or "int4" counts as the larger.
BYTES_PER_VALUE = {
    "mxfp4": 4.25 / 8,
    "nvfp4": 4.5 / 8,
    "fp4": 4.5 / 8,
    "int4": (4 + 20 / 128) / 8,
    "awq": (4 + 20 / 128) / 8,
    "gptq": (4 + 20 / 128) / 8,
    "fp8": 1.0,
    "int8": 1.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
}
DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


class ModelShape(Frozen):
    """Shape of one model; ``source`` says where the numbers are from.

    ``hf_id`` is the Hugging Face id, None for a model that pdlab builds itself. ``engine_kwargs``
    are vLLM engine arguments that this model wants everywhere, ``engine_kwargs_by_tp`` further ones for engines of
    that TP degree on GPUs. ``local`` models are built by
    pdlab in the user's cache folder. ``expert_intermediate`` is an expert's inner width (None: as
    ``hidden``), ``dense_layers`` the layers without experts (of ``dense_intermediate``),
    ``kv_latent`` the values per token and layer that latent attention keeps in place of K and V,
    ``kv_block_tokens`` vLLM's KV block size for it (16 on CUDA, 128 on CPUs).
    """

    name: str
    source: str
    hf_id: str | None = None
    local: bool = False
    architecture: str
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    experts: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    expert_intermediate: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    dense_intermediate: int | None = None
    kv_latent: int | None = None
    sliding_window: int | None = None
    full_attention_layers: int | None = None
    vocab: int = Field(ge=1)
    weight_dtype: str
    kv_dtype: str = "bfloat16"
    kv_block_tokens: int = Field(default=16, ge=1)
    max_context: int = Field(ge=1)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs_by_tp: dict[int, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("weight_dtype", "kv_dtype")
    @classmethod
    def _dtype_is_known(cls, name: str) -> str:
        plain = name.strip().lower()
        plain = DTYPE_SPELLINGS.get(plain, plain)
        if plain not in BYTES_PER_VALUE:
            raise ValueError(f"is not a known dtype; {choices(name, BYTES_PER_VALUE)}")
        return plain


class GpuType(Frozen):
    """What is known of a type of GPU. ``names``: Ray's accelerator types that mean it, and usual ones.

    ``memory_gb``: 1e9 bytes of one GPU, of every size that is sold under the name (none: not known). ``link``: how
    GPUs of one node reach each other (None: not known). ``source`` says where the numbers are from.
    """

    names: tuple[str, ...] = Field(min_length=1)
    memory_gb: tuple[float, ...] = ()
    link: GpuLink | None = None
    source: str


@cache
def known_gpus() -> dict[str, GpuType]:
    """The GPU types of configs/gpus/ by each of their names. Raises UsageError."""
    types = [load_yaml(path, GpuType) for path in sorted((CONFIGS / "gpus").glob("*.yaml"))]
    return {name: each for each in types for name in each.names}


def gpu_memory_gb(node: ClusterNode) -> float | None:
    """Memory of one GPU of the node in 1e9 bytes; None where neither the node nor its type's one size says it."""
    known = known_gpus().get(node.gpu_type or "")
    sizes = known.memory_gb if known else ()
    return node.gpu_memory_gb or (sizes[0] if len(sizes) == 1 else None)


def gpu_link(node: ClusterNode) -> GpuLink | None:
    """How the GPUs of the node reach each other; None: not known."""
    known = known_gpus().get(node.gpu_type or "")
    return node.gpu_link or (known.link if known else None)


def known_models() -> dict[str, Path]:
    """Names of configs/models/ with their files."""
    return {path.stem: path for path in sorted((CONFIGS / "models").glob("*.yaml"))}


def load_model(model: str) -> ModelShape | None:
    """Shape of a model named as in configs/models/, or by its Hugging Face id; None: not in the catalogue."""
    files = known_models()
    if model in files:
        return load_yaml(files[model], ModelShape)
    for path in files.values():
        shape = load_yaml(path, ModelShape)
        if model == shape.hf_id:
            return shape
    return None


class ResolvedModel(NamedTuple):
    """``shape`` None: the catalogue does not have the model. ``source``: a folder or a Hugging Face id; None: pdlab
    builds the model itself."""

    shape: ModelShape | None
    source: str | None


def resolve_model(model: str) -> ResolvedModel:
    """Shape and source of a deployment's model: a catalogue name, a shape file, a folder or a Hugging Face id.

    Raises UsageError for a path that does not exist and for a misspelt name.
    """
    path = Path(model).expanduser()
    if path.suffix in (".yaml", ".yml"):
        shape: ModelShape | None = load_yaml(path, ModelShape)
    else:
        shape = load_model(model)
    if shape is not None:
        return ResolvedModel(shape, None if shape.local else shape.hf_id or shape.name)
    try:
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False  # not a path
    if folder:
        _require_config(path, model)
        return ResolvedModel(None, str(path.resolve()))
    if model.startswith((".", "~", "/")):
        raise UsageError(f"model {model}: no such folder; give a folder, a Hugging Face id or {_names()}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model, re.ASCII):
        raise UsageError(
            f"model {model!r} is not known; {choices(model, known_models())} "
            "(or give a folder, or a Hugging Face id such as org/name)"
        )
    return ResolvedModel(None, model)


def _require_config(folder: Path, model: str) -> None:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"model folder {model}: has no config.json; give the folder that holds the model's files"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"model folder {model}: config.json cannot be read ({error}); download it again") from error
    if not isinstance(config, dict):
        raise UsageError(f"model folder {model}: config.json holds no JSON object; download it again")


def _names() -> str:
    return " or ".join(known_models())


def local_cluster(nodes: int) -> ClusterView:
    """Small Ray nodes on this machine, alike, the first one the head; configs/clusters/local-2.yaml is two of them."""
    small = ClusterNode(id="local", cpus=LOCAL_NODE_CPUS, nic=Nic(kind="loopback"), host="localhost")
    members = []
    for number in range(1, nodes + 1):
        name = f"local-{number}"
        members.append(small.model_copy(update={"id": name, "head": number == 1, "labels": {NODE_NAME_LABEL: name}}))
    return ClusterView(name=f"local-{nodes}", nodes=tuple(members))


def two_hosts_cluster(link: LinkShape) -> ClusterView:
    """The two nodes of `--local --two-hosts`: as `local_cluster`, each on a host with a NIC of the link's rate."""
    nic = Nic(kind="ethernet", gbit_per_s=link.gbit_per_s)
    nodes = zip(local_cluster(2).nodes, HOST_NAMES, strict=True)
    return ClusterView(
        name="two-hosts", nodes=tuple(node.model_copy(update={"nic": nic, "host": host}) for node, host in nodes)
    )


def node_types() -> dict[str, Path]:
    """The types of node of configs/clusters/ with their files: clusters of one node that is counted."""
    return {path.stem: path for path in sorted((CONFIGS / "clusters").glob("*.yaml")) if _counts_one(path)}


def _counts_one(path: Path) -> bool:
    nodes = parse_yaml(path.read_text(encoding="utf-8"))["nodes"]
    return len(nodes) == 1 and nodes[0].get("count") == 1


def load_cluster(name_or_path: str) -> ClusterView:
    """A cluster named as in configs/clusters/, TYPE-xN for N nodes of a type there, or a YAML file.

    Raises UsageError.
    """
    match = re.fullmatch(r"(.+)-x([1-9]\d{0,5})", name_or_path)
    file = node_types().get(match[1]) if match else None
    if match is None or file is None:
        examples = {"TYPE-xN of a type there": [f"{name}-x2" for name in node_types()]}
        return load_yaml(find_config("clusters", name_or_path, "cluster", examples), ClusterView)

    def counted(data: Any) -> Any:
        return data | {"name": name_or_path, "nodes": [data["nodes"][0] | {"count": int(match[2])}]}

    return load_yaml(file, ClusterView, counted)


def load_deployment(name_or_path: str) -> Deployment:
    """A deployment named as in configs/deployments/, by its label, or of a YAML file. Raises UsageError."""
    file = CONFIGS / "deployments" / f"{name_or_path}.yaml"
    if is_label(name_or_path) and not file.is_file():
        return Deployment(topology=parse_label(name_or_path))
    examples = {f"a label such as {LABEL_EXAMPLE}": [LABEL_EXAMPLE]}
    return load_yaml(find_config("deployments", name_or_path, "deployment", examples), Deployment)


def find_config(
    folder: str, name_or_path: str, kind: str, computed: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Path:
    """The file of configs/``folder``/ of that name, else the path itself.

    Raises UsageError, with the nearest names, if it is neither a name there nor a path. ``computed``: forms of
    names that need no file, each with examples.
    """
    names = {path.stem: path for path in (CONFIGS / folder).glob("*.yaml")}
    path = Path(name_or_path)
    if name_or_path in names:
        return names[name_or_path]
    if path.suffix in (".yaml", ".yml") or "/" in name_or_path:
        return path
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if not exists:
        forms = " nor ".join([f"neither a name of configs/{folder}/", *computed, "a file"])
        known = [*names, *(name for examples in computed.values() for name in examples)]
        raise UsageError(f"{kind} {name_or_path!r}: {forms}; {choices(name_or_path, known)}")
    return path
