"""Models and clusters of configs/: shapes with their sources, nodes, deployments by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from pdlab.core.deployment import LABEL_EXAMPLE, Deployment, is_label, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.files import CONFIGS
from pdlab.core.model_config import shape_fields
from pdlab.core.model_files import CONFIG, BrokenModelFile, ModelFiles, config_of_file, config_of_folder, config_of_id
from pdlab.core.nodes import HOST_NAMES, NODE_NAME_LABEL, ClusterNode, ClusterView, GpuLink, LinkShape, Nic
from pdlab.core.schema import Frozen, load_yaml, parse_yaml, validate
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


# In a model with experts these formats hold only the experts, unless the model says otherwise.
ONLY_EXPERTS = {"mxfp4", "nvfp4", "fp4"}
# Two models of which all these fields are the same have the same matrices.
SAME_MODEL = (
    *("architecture", "layers", "hidden", "heads", "kv_heads", "head_dim", "kv_latent", "q_latent", "experts"),
    *("experts_per_token", "expert_intermediate", "shared_experts", "dense_layers", "dense_intermediate", "vocab"),
    *("sliding_window", "full_attention_layers", "other_parameters"),
)


class ModelShape(Frozen):
    """Shape of one model; ``source`` says where the numbers are from.

    A file of configs/models/ gives the shape as ``config``, the keys of the model's config.json; its other keys win
    over them. A model read from its own config.json takes ``engine_kwargs`` from the file whose numbers it shares.

    ``hf_id`` is the Hugging Face id, None for a model that pdlab builds itself; ``same_config`` are ids of other models
    with the same numbers. ``engine_kwargs``
    are vLLM engine arguments that this model wants everywhere, ``engine_kwargs_by_tp`` further ones for engines of
    that TP degree on GPUs. ``local`` models are built by
    pdlab in the user's cache folder from ``config``. ``expert_intermediate`` is an expert's inner width (None: as
    ``hidden``), ``shared_experts`` the width of what every token passes beside the routed experts, over an expert's;
    ``dense_layers`` the layers without experts (of ``dense_intermediate``); ``attention_layers`` those with the
    attention that heads and head_dim describe (None: all), and ``other_parameters`` what is in neither.
    ``value_dim`` is the width of a head's V (None: ``head_dim``).
    ``kv_latent`` the values per token and layer that latent attention keeps in place of K and V, ``rope_dim`` of them
    with positions; ``q_latent`` its rank for queries (0: none; the default is DeepSeek-V3's).
    ``attention_dtype`` and ``feed_forward_dtype`` are those of the matrices outside the experts (None: by the rule of
    ONLY_EXPERTS). ``kv_block_tokens`` vLLM's KV block size for it (16 on CUDA, 128 on CPUs).
    ``asked_for``: the folder, file or id whose config.json was read; None: a name of configs/models/.
    ``kv_unknown``: what makes the KV cache another than these numbers say; ``weights_unknown``: the same of weights.
    """

    name: str
    source: str
    hf_id: str | None = None
    same_config: tuple[str, ...] = ()
    local: bool = False
    architecture: str
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_dim: int | None = Field(default=None, ge=1)
    experts: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    expert_intermediate: int | None = None
    shared_experts: float = 0
    dense_layers: int = 0
    dense_intermediate: int | None = None
    attention_layers: int | None = None
    other_parameters: float = 0
    kv_latent: int | None = None
    rope_dim: int = 64
    q_latent: int = 1536
    sliding_window: int | None = None
    full_attention_layers: int | None = None
    vocab: int = Field(ge=1)
    tied_embeddings: bool = False
    weight_dtype: str
    attention_dtype: str | None = None
    feed_forward_dtype: str | None = None
    kv_dtype: str = "bfloat16"
    kv_block_tokens: int = Field(default=16, ge=1)
    max_context: int = Field(ge=1)
    kv_unknown: tuple[str, ...] = ()
    weights_unknown: tuple[str, ...] = ()
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs_by_tp: dict[int, dict[str, Any]] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    asked_for: str | None = None

    @field_validator("weight_dtype", "kv_dtype", "attention_dtype", "feed_forward_dtype")
    @classmethod
    def _dtype_is_known(cls, name: str | None) -> str | None:
        if name is None:
            return None
        plain = name.strip().lower()
        plain = DTYPE_SPELLINGS.get(plain, plain)
        if plain not in BYTES_PER_VALUE:
            raise ValueError(f"is not a known dtype; {choices(name, BYTES_PER_VALUE)}")
        return plain

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelShape:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than the {self.experts} experts")
        return self

    @property
    def word(self) -> str:
        """What --model takes for it."""
        return self.asked_for or self.name

    @property
    def unknown(self) -> tuple[str, ...]:
        """What a shape cannot say of this model; empty: everything that depends on the shape is known."""
        return tuple(dict.fromkeys((*self.weights_unknown, *self.kv_unknown)))


class GpuType(Frozen):
    """What is known of a type of GPU. ``names``: Ray's accelerator types that mean it, and usual ones.

    ``memory_gb``: 1e9 bytes of one GPU, of every size that is sold under the name (none: not known). ``link``: how
    GPUs of one node reach each other (None: not known). ``step_tables``: what the performance database of
    `pdlab.sim.aic` calls the GPU (None: it has no measurements of it), ``gpus_per_node``: of the nodes on which it
    measured. ``host_gb_per_s``: 1e9 bytes per second from host memory to one GPU, at most (None: not known).
    ``source`` says where the numbers are from.
    """

    names: tuple[str, ...] = Field(min_length=1)
    memory_gb: tuple[float, ...] = ()
    link: GpuLink | None = None
    step_tables: str | None = None
    gpus_per_node: int = Field(default=8, ge=1)
    host_gb_per_s: float | None = Field(default=None, gt=0)
    source: str


@cache
def known_gpus() -> dict[str, GpuType]:
    """The GPU types of configs/gpus/ by each of their names. Raises UsageError."""
    types = [load_yaml(path, GpuType) for path in sorted((CONFIGS / "gpus").glob("*.yaml"))]
    return {name: each for each in types for name in each.names}


def gpu_type_of(name: str) -> str | None:
    """The type of GPU that a driver calls ``name``, such as H100 for ``NVIDIA H100 80GB HBM3``; None: not known."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    found = [each for each in known_gpus() if set(each.upper().split("-")) <= words]
    return max(found, key=len, default=None)


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


def load_shape(path: Path) -> ModelShape:
    """The shape in a file of the form of configs/models/, below the keys of the file what its ``config`` gives.

    ``config``: the keys of the model's config.json, or its path; the engines load the folder of that path, if there is
    no ``hf_id``. Raises UsageError.
    """

    def with_config(data: Any) -> Any:
        config = data.get("config") if isinstance(data, dict) else None
        if isinstance(config, str):
            file = path.parent / Path(config).expanduser()
            files = config_of_file(file)
            below, data = {"hf_id": str(file.resolve().parent)}, {**data, "config": {}}
        elif isinstance(config, dict):
            files, below = ModelFiles(config, None, f"{path}: config"), {}
        else:
            return data
        return {**_fields(files), **below, **data}

    return load_yaml(path, ModelShape, with_config)


@cache
def catalogue() -> tuple[ModelShape, ...]:
    """The models of configs/models/."""
    return tuple(load_shape(path) for path in known_models().values())


def load_model(model: str) -> ModelShape | None:
    """The catalogue's shape of a name of configs/models/ or of a Hugging Face id; None: it is not there."""
    for shape in catalogue():
        if model in (shape.name, shape.hf_id):
            return shape
        if model in shape.same_config:
            return shape.model_copy(update={"name": model, "hf_id": model})
    return None


class ResolvedModel(NamedTuple):
    """``shape`` None: it is not known (`why_no_shape`). ``source``: a folder or a Hugging Face id; None: pdlab builds
    the model itself."""

    shape: ModelShape | None
    source: str | None


def resolve_model(model: str) -> ResolvedModel:
    """Shape and source of a model: a name of configs/models/, a shape file, a folder, a config.json or a Hugging Face
    id.

    The shape of a folder is that of its config.json. An id that configs/models/ does not have is looked up in the
    Hugging Face cache, then on the hub. Raises UsageError for a path that does not exist and for a misspelt name.
    """
    found, source = _resolve(model)
    return ResolvedModel(None if isinstance(found, str) else found, source)


def found_model(model: str) -> ResolvedModel:
    """`resolve_model` for what examines or fetches a model's files: without a shape where one of them is broken. Raises
    UsageError for a path that does not exist and for a misspelt name."""
    try:
        return resolve_model(model)
    except BrokenModelFile:
        path = Path(model).expanduser()
        folder = path.parent if path.is_file() else path
        return ResolvedModel(None, str(folder.resolve()) if folder.is_dir() else model)


def why_no_shape(model: str) -> str:
    """Why `resolve_model` finds no shape, and what to do; empty where it finds one. Raises UsageError."""
    found, _ = _resolve(model)
    return found if isinstance(found, str) else ""


def _resolve(model: str) -> tuple[ModelShape | str, str | None]:
    """The shape, or why it is not known, and the source."""
    path = Path(model).expanduser()
    shape = load_model(model)
    if shape is None and path.suffix in (".yaml", ".yml"):
        shape = load_shape(path)
    if shape is not None:
        return shape, None if shape.local else shape.hf_id or shape.name
    try:
        folder, file = path.is_dir(), path.suffix == ".json" and path.is_file()
    except (OSError, ValueError):
        folder = file = False  # not a path
    if file:
        # A config.json says enough to plan; its folder is what an engine would load.
        name = path.resolve().parent.name if path.name == CONFIG else path.stem.removesuffix("_config")
        return _shape_of(config_of_file(path), name.replace("--", "/"), str(path)), str(path.resolve().parent)
    if folder:
        files = config_of_folder(path, f"model folder {model}")
        return _shape_of(files, path.resolve().name, str(path.resolve())), str(path.resolve())
    if model.startswith((".", "~", "/")):
        raise UsageError(f"model {model}: no such folder; give a folder, a Hugging Face id or {_names()}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model, re.ASCII):
        raise UsageError(
            f"model {model!r} is not known; {choices(model, known_models())} "
            "(or give a folder, or a Hugging Face id such as org/name)"
        )
    of_id = config_of_id(model)
    return of_id if isinstance(of_id, str) else _shape_of(of_id, model, model), model


def whole_shape(model: str) -> ModelShape | str:
    """The shape of a model, for what cannot be done without one; text: why it is not known, or not in every part."""
    try:
        shape, _ = _resolve(model)
    except UsageError as error:
        return str(error)
    if isinstance(shape, ModelShape) and shape.unknown:
        parts = ", ".join(shape.unknown)
        return f"pdlab cannot represent {parts} of {shape.architecture}, so it predicts nothing of it"
    return shape


def require_shape(model: str) -> ModelShape:
    """`whole_shape`. Raises UsageError where it is not known."""
    shape = whole_shape(model)
    if isinstance(shape, str):
        raise UsageError(f"--model {model}: {shape}")
    return shape


def config_of(shape: ModelShape) -> ModelFiles | None:
    """The config.json that the shape was read from; None: its file gives no keys of one. Raises UsageError."""
    if shape.config:
        return ModelFiles(shape.config, None, f"config of {shape.name}")
    word = shape.asked_for or shape.hf_id
    if word is None:
        return None
    path = Path(word).expanduser()
    if path.is_file():
        return config_of_file(path)
    if path.is_dir():
        return config_of_folder(path, f"model folder {word}")
    found = config_of_id(word)
    if isinstance(found, str):
        raise UsageError(f"{shape.name}: {found}")
    return found


def _shape_of(files: ModelFiles, name: str, word: str) -> ModelShape | str:
    """The shape of a config.json, with the engine arguments of the catalogue's model that has the same numbers."""
    try:
        fields = _fields(files)
        shape = validate(ModelShape, {**fields, "name": name, "asked_for": word, "source": files.where}, files.where)
    except UsageError as error:
        return str(error)
    for known in catalogue():
        if all(getattr(known, field) == getattr(shape, field) for field in SAME_MODEL):
            facts: dict[str, Any] = {"engine_kwargs": known.engine_kwargs}
            if known.weight_dtype == shape.weight_dtype:  # measured with weights of that size
                facts["engine_kwargs_by_tp"] = known.engine_kwargs_by_tp
            shape = shape.model_copy(update={**facts, "source": f"{files.where}, the numbers of {known.name}"})
    return shape


def _fields(files: ModelFiles) -> dict[str, Any]:
    """`shape_fields`. Raises UsageError."""
    try:
        return shape_fields(files.config, files.modelopt)
    except ValueError as error:
        raise UsageError(f"{files.where} {error}") from error
    except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(f"{files.where} has a value that is not understood ({error})") from error


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
