"""Models, GPU types, clusters and deployments of configs/, by name."""

from __future__ import annotations

import math
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
from pdlab.core.schema import Frozen, is_yaml_path, load_yaml, parse_yaml, validate
from pdlab.core.text import choices, counted, listed

LOCAL_NODE_CPUS = 4  # engine ranks on one node of `--local`

# Bytes per value, with scales. mxfp4 (OCP microscaling) has a scale of one byte for 32 values, nvfp4 one for 16. AWQ
# and GPTQ have a scale of two bytes and a zero point of half a byte for 128. "fp4" and "int4" count as the larger ones.
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


# In a model with experts, only the experts have these formats, unless the model's file has another format for the rest.
ONLY_EXPERTS = {"mxfp4", "nvfp4", "fp4"}
# Bounds of a model that may exist: hundreds of times the largest one.
MOST_PARAMETERS, MOST_CONTEXT = 10**15, 10**9


class ModelNumbers(Frozen):
    """The numbers of `ModelShape` that give a model's matrices. Two models with the same numbers are one model for
    step times, whatever their names are. A part that the model does not have is 0, and no matter how its config.json
    writes it."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    attention_layers: int
    full_attention_layers: int
    sliding_window: int = 0
    kv_latent: int = 0
    rope_dim: int = 0
    q_latent: int = 0
    experts: int = 1
    experts_per_token: int = 1
    expert_intermediate: int = 0
    shared_experts: float = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    feed_forward_matrices: int = 3
    other_parameters: float = 0
    vocab: int


class ModelShape(Frozen):
    """Shape of one model. ``source``: the origin of the numbers.

    A file of configs/models/ has ``config``, the keys of the model's config.json; its other keys override these. A
    model from its own config.json gets ``engine_kwargs`` from the file of configs/models/ with the same numbers.

    ``hf_id``: Hugging Face id (None: pdlab builds the model). ``same_config``: ids of models with the same numbers.
    ``local``: pdlab builds the model from ``config`` in the user's cache folder. ``read_from``: the folder, file or id
    whose config.json was read (None: a name of configs/models/).

    ``expert_intermediate``: inner width of an expert (None: ``hidden``). ``shared_experts``: width of the shared
    experts, over that of one expert. ``dense_layers``: layers without experts, of inner width ``dense_intermediate``.
    ``feed_forward_matrices``: of a dense layer or an expert, 3 with a gate and 2 without.
    ``attention_layers``: layers with the attention of ``heads`` and ``head_dim`` (None: all). ``other_parameters``: the
    rest. ``value_dim``: width of a head's V (None: ``head_dim``). ``kv_latent``: values per token and layer that latent
    attention keeps in place of K and V, ``rope_dim`` of them with positions. ``q_latent``: its rank for queries (0:
    none; the default is DeepSeek-V3's). ``attention_dtype``, ``feed_forward_dtype``: of matrices outside the experts
    (None: by the rule of ONLY_EXPERTS).

    ``kv_block_tokens``: vLLM's KV block size (16 on CUDA, 128 on CPUs). ``kv_unknown``, ``weights_unknown``: parts of
    the KV cache and of the weights that these numbers cannot describe. ``not_counted``: keys of config.json about
    encoders beside the language model; no number here has their weights. ``engine_kwargs``: vLLM engine arguments for
    this model. ``engine_kwargs_by_tp``: more of them, by TP degree on GPUs.
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
    feed_forward_matrices: int = Field(default=3, ge=2, le=3)
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
    not_counted: tuple[str, ...] = ()
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs_by_tp: dict[int, dict[str, Any]] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    read_from: str | None = None

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
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the {counted(self.experts, 'expert')}"
            )
        return self

    @model_validator(mode="after")
    def _a_model_may_have_its_size(self) -> ModelShape:
        if self.max_context > MOST_CONTEXT:
            raise ValueError(
                f"max_context 1e{math.log10(self.max_context):.0f} is more than {MOST_CONTEXT:,} tokens: correct it"
            )
        for name in ("shared_experts", "other_parameters"):
            if not 0 <= getattr(self, name) <= MOST_PARAMETERS:
                raise ValueError(f"{name} {getattr(self, name):g} is not between 0 and 1e15: correct it")
        widths = {
            "heads x head_dim": self.heads * self.head_dim,
            "heads x value_dim": self.heads * (self.value_dim or 0),
            "kv_heads x head_dim": self.kv_heads * self.head_dim,
            "kv_latent": self.kv_latent or 0,
            "q_latent": self.q_latent,
            "dense_intermediate": self.dense_intermediate or 0,
            "experts x expert_intermediate": self.experts * (self.expert_intermediate or 0),
            "experts x hidden": self.experts * self.hidden,
        }
        widest = max(widths, key=lambda name: widths[name])
        sizes = {f"layers x hidden x {widest}": self.layers * self.hidden * widths[widest]}
        sizes["vocab x hidden"] = self.vocab * self.hidden
        for name, size in sizes.items():
            if size > MOST_PARAMETERS:
                raise ValueError(
                    f"{name} is 1e{math.log10(size):.0f}, more than the 1e15 parameters of any model: "
                    "correct these sizes"
                )
        return self

    @property
    def word(self) -> str:
        """The model as a value of --model."""
        return self.read_from or self.name

    @property
    def numbers(self) -> ModelNumbers:
        """The identity of the model, without the formats of its weights."""
        windowed = self.full_attention_layers is not None and self.full_attention_layers < self.layers
        return ModelNumbers(
            architecture=self.architecture,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            attention_layers=self.layers if self.attention_layers is None else self.attention_layers,
            full_attention_layers=self.full_attention_layers or 0 if windowed else self.layers,
            sliding_window=self.sliding_window or 0 if windowed else 0,
            kv_latent=self.kv_latent or 0,
            rope_dim=self.rope_dim if self.kv_latent else 0,
            q_latent=self.q_latent if self.kv_latent else 0,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            expert_intermediate=(self.expert_intermediate or self.hidden) if self.experts > 1 else 0,
            shared_experts=self.shared_experts if self.experts > 1 else 0,
            dense_layers=self.dense_layers,
            dense_intermediate=(self.dense_intermediate or 0) if self.dense_layers else 0,
            feed_forward_matrices=self.feed_forward_matrices,
            other_parameters=self.other_parameters,
            vocab=self.vocab,
        )

    @property
    def dense_dtype(self) -> str:
        """The format of matrices outside the experts for which the shape has no other one."""
        return "bfloat16" if self.experts > 1 and self.weight_dtype in ONLY_EXPERTS else self.weight_dtype

    @property
    def formats(self) -> tuple[str, str, str, str]:
        """The formats of experts, of attention, of other feed-forward matrices, and of the KV cache."""
        attention, feed_forward = (each or self.dense_dtype for each in (self.attention_dtype, self.feed_forward_dtype))
        return self.weight_dtype, attention, feed_forward, self.kv_dtype

    def is_same(self, other: ModelShape) -> bool:
        """Whether both are one model in the same formats, whatever their names are."""
        return (self.numbers, self.formats) == (other.numbers, other.formats)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts of the model that a shape cannot describe."""
        return tuple(dict.fromkeys((*self.weights_unknown, *self.kv_unknown)))


class GpuType(Frozen):
    """A type of GPU. ``names``: Ray's accelerator types and other usual names. ``source``: the origin of the numbers.

    ``generation``: of NVIDIA's chips; engines have kernels for each of them (None: not known here).
    ``memory_gb``: 1e9 bytes of one GPU, for each size with this name (empty: unknown). ``link``: link between the GPUs
    of a node (None: unknown). ``step_tables``: the GPU's name in the performance database of `pdlab.sim.aic` (None: not
    in it). ``gpus_per_node``: of the nodes in that database. ``host_gb_per_s``: highest rate of one GPU's PCIe
    in one direction, in 1e9 bytes per second: from host memory, and between GPUs with no other link (None: unknown).
    """

    names: tuple[str, ...] = Field(min_length=1)
    generation: str | None = None
    memory_gb: tuple[float, ...] = ()
    link: GpuLink | None = None
    step_tables: str | None = None
    gpus_per_node: int = Field(default=8, ge=1)
    host_gb_per_s: float | None = Field(default=None, gt=0)
    source: str


@cache
def known_gpus() -> dict[str, GpuType]:
    """The GPU types of configs/gpus/ by each of their names. Raises UsageError."""
    types = map(_gpu_in, _files("gpus").values())
    return {name: each for each in types for name in each.names}


@cache
def _gpu_in(file: Path) -> GpuType:
    return load_yaml(file, GpuType)


def why_no_tables(word: str) -> str:
    """Why there are no step times of the GPU type ``word``, with the types that have them; empty if there are, or if it
    is no GPU type, or one that is sold under several names with tables."""
    name, types = gpu_name(word), known_gpus()
    tabulated = sorted(each for each, known in types.items() if known.step_tables)
    if name not in types or any(each == name or each.startswith(f"{name}-") for each in tabulated):
        return ""
    return f"GPU type {name}: there are no step times of it, only of {', '.join(tabulated)}"


def _files(kind: str) -> dict[str, Path]:
    """The files of that folder of configs/, by their names without the suffix."""
    return {path.stem: path for path in sorted((CONFIGS / kind).glob("*.yaml"))}


def gpu_type_of(name: str) -> str | None:
    """The type of a GPU from the driver's name, such as H100 for ``NVIDIA H100 80GB HBM3``; None: unknown."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    found = [each for each in known_gpus() if set(each.upper().split("-")) <= words]
    return max(found, key=len, default=None)


@cache
def gpu_name(word: str) -> str:
    """The name of configs/gpus/ that the word is in any case (such as H200 for h200), else the word.

    Raises UsageError.
    """
    own_first = sorted(_files("gpus").values(), key=lambda file: file.stem != word.lower())  # others only if needed
    names = (name for each in map(_gpu_in, own_first) for name in each.names)
    return next((name for name in names if name.lower() == word.lower()), word)


@cache
def known_gpu(name: str | None) -> GpuType | None:
    """The type of configs/gpus/ with that name; None: there is none. Raises UsageError."""
    if name is None:
        return None
    own_first = sorted(_files("gpus").values(), key=lambda file: file.stem != name.lower())  # others only if needed
    return next((each for each in map(_gpu_in, own_first) if gpu_name(name) in each.names), None)


def has_gpu(node: ClusterNode, name: str) -> bool:
    """Whether the node has GPUs of the type with that name. A100 with 85.9 GB is A100-80G: one name for several sizes,
    and the name of one of them."""
    if node.gpu_type is None or name == node.gpu_type:
        return name == node.gpu_type
    known, wanted, own_gb = known_gpu(node.gpu_type), known_gpu(name), node.gpu_memory_gb
    if known is None or wanted is None or own_gb is None or not name.startswith(f"{node.gpu_type}-"):
        return False
    nearest_gb = min(known.memory_gb, key=lambda size_gb: abs(size_gb - own_gb), default=None)
    return len(known.memory_gb) > 1 and nearest_gb in wanted.memory_gb


def gpu_memory_gb(node: ClusterNode) -> float | None:
    """Memory of one GPU of the node in 1e9 bytes, else that of its type, if the type has one size; None: unknown."""
    known = known_gpu(node.gpu_type)
    sizes = known.memory_gb if known else ()
    return node.gpu_memory_gb or (sizes[0] if len(sizes) == 1 else None)


def gpu_link(node: ClusterNode) -> GpuLink | None:
    """The link between the GPUs of the node; None: unknown."""
    known = known_gpu(node.gpu_type)
    return node.gpu_link or (known.link if known else None)


def known_models() -> dict[str, Path]:
    """Names of configs/models/ -> their files."""
    return _files("models")


def load_shape(path: Path) -> ModelShape:
    """The shape in a file of the form of configs/models/. Raises UsageError.

    Its ``config`` has the keys of the model's config.json, or the path of that file. The file's other keys override the
    values of ``config``. With a path and without ``hf_id``, the engines load the folder of the path.
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
def _model_in(file: Path) -> ModelShape:
    return load_shape(file)


def catalogue() -> tuple[ModelShape, ...]:
    """The models of configs/models/."""
    return tuple(map(_model_in, known_models().values()))


def load_model(model: str) -> ModelShape | None:
    """The shape in configs/models/ of a name there or of a Hugging Face id; None if there is none."""
    own_first = sorted(known_models().values(), key=lambda file: file.stem != model)  # the others are read if needed
    for shape in map(_model_in, own_first):
        if model in (shape.name, shape.hf_id):
            return shape
        if model in shape.same_config:
            return shape.model_copy(update={"name": model, "hf_id": model})
    return None


class ResolvedModel(NamedTuple):
    """``shape``: None if unknown (`why_no_shape`). ``source``: a folder or a Hugging Face id; None: pdlab builds it."""

    shape: ModelShape | None
    source: str | None


def resolve_model(model: str) -> ResolvedModel:
    """Shape and source of a model: a name of configs/models/, a shape file, a folder, a config.json or a Hugging Face
    id.

    An id that is not in configs/models/ is read from the Hugging Face cache, else from the hub. Raises UsageError for a
    path that does not exist, and for an unknown name.
    """
    found, source = _resolve(model)
    return ResolvedModel(None if isinstance(found, str) else found, source)


def found_model(model: str) -> ResolvedModel:
    """`resolve_model` for commands that check or download files: a broken file gives no shape, and no error."""
    try:
        return resolve_model(model)
    except BrokenModelFile:
        path = Path(model).expanduser()
        folder = path.parent if path.is_file() else path
        return ResolvedModel(None, str(folder.resolve()) if folder.is_dir() else model)


def why_no_shape(model: str) -> str:
    """Why `resolve_model` finds no shape, and the fix; empty if it finds one. Raises UsageError."""
    found, _ = _resolve(model)
    return found if isinstance(found, str) else ""


def _resolve(model: str) -> tuple[ModelShape | str, str | None]:
    """The shape, or why it is unknown, and the source."""
    path = Path(model).expanduser()
    shape = load_model(model)
    if shape is None and is_yaml_path(model):
        shape = load_shape(path)
    if shape is not None:
        return shape, None if shape.local else shape.hf_id or shape.name
    try:
        folder, file = path.is_dir(), path.suffix == ".json" and path.is_file()
    except (OSError, ValueError):
        folder = file = False  # not a path
    if file:
        # A config.json is enough for a plan. An engine would load its folder.
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
    """The shape of a model, or text: why it is unknown, or unknown in some part."""
    try:
        shape, _ = _resolve(model)
    except UsageError as error:
        return str(error)
    if isinstance(shape, ModelShape) and shape.unknown:
        what = f"{', '.join(shape.unknown)} of {shape.architecture}"
        return f"pdlab cannot represent {what}, so it predicts nothing of it: launch and measure it"
    return shape


def require_shape(model: str) -> ModelShape:
    """`whole_shape`. Raises UsageError if it is unknown."""
    shape = whole_shape(model)
    if isinstance(shape, str):
        raise UsageError(f"--model {model}: {shape}")
    return shape


# Words of names of checkpoints that mean a format of weights with less than 16 bits.
FORMATS_IN_NAMES = ("NVFP4", "MXFP4", "FP4", "FP8", "INT4", "INT8", "AWQ", "GPTQ", "W4A16", "W4A8", "W8A8", "W8A16")
UNQUANTISED = ("bfloat16", "float16", "float32")


def format_only_in_name(shape: ModelShape) -> str:
    """One line about weights that the model's files have as 16 or 32 bits, although its name has another format; empty
    if name and files agree. The size of these weights is then too large in every figure."""
    words = re.split(r"[^A-Z0-9]+", shape.name.upper())
    named = [word for word in words if word in FORMATS_IN_NAMES]
    if not named or shape.weight_dtype not in UNQUANTISED or shape.weights_unknown:
        return ""
    return (
        f"the name {shape.name} has {' '.join(named)}, and its {CONFIG} has weights of {shape.weight_dtype} and no "
        f"quantization_config: put hf_quant_config.json beside {CONFIG} and give their folder, or set weight_dtype in "
        "a model file (docs/your-model.md)"
    )


def encoder_not_counted(shape: ModelShape) -> str:
    """One line about encoders of images or audio, whose weights no figure has; empty if config.json has none."""
    if not shape.not_counted:
        return ""
    return (
        f"the weights of {shape.name} are without its encoder ({listed(shape.not_counted)} of {CONFIG}): an engine "
        "takes more memory for weights than the figures have"
    )


def config_of(shape: ModelShape) -> ModelFiles | None:
    """The config.json of the shape; None if there is none. Raises UsageError."""
    if shape.config:
        return ModelFiles(shape.config, None, f"config of {shape.name}")
    word = shape.read_from or shape.hf_id
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
    """The shape of a config.json, with the engine arguments of the model of configs/models/ with the same numbers."""
    try:
        fields = _fields(files)
        shape = validate(ModelShape, {**fields, "name": name, "read_from": word, "source": files.where}, files.where)
    except UsageError as error:
        return str(error)
    for known in catalogue():
        if known.numbers == shape.numbers:
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
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{files.where} has a value of a form that pdlab does not read ({what})") from error


def _names() -> str:
    return " or ".join(known_models())


def local_cluster(nodes: int) -> ClusterView:
    """Equal small Ray nodes on this machine; the first is the head. configs/clusters/local-2.yaml has two of them."""
    small = ClusterNode(id="local", cpus=LOCAL_NODE_CPUS, nic=Nic(kind="loopback"), host="localhost")
    members = []
    for number in range(1, nodes + 1):
        name = f"local-{number}"
        members.append(small.model_copy(update={"id": name, "head": number == 1, "labels": {NODE_NAME_LABEL: name}}))
    return ClusterView(name=f"local-{nodes}", nodes=tuple(members))


def two_hosts_cluster(link: LinkShape) -> ClusterView:
    """The two nodes of `--local --two-hosts`: those of `local_cluster`, on two hosts with a NIC of the link's rate."""
    nic = Nic(kind="ethernet", gbit_per_s=link.gbit_per_s)
    nodes = zip(local_cluster(2).nodes, HOST_NAMES, strict=True)
    return ClusterView(
        name="two-hosts", nodes=tuple(node.model_copy(update={"nic": nic, "host": host}) for node, host in nodes)
    )


def node_types() -> dict[str, Path]:
    """The types of node in configs/clusters/ -> their files, which have one node with ``count: 1``."""
    return {path.stem: path for path in sorted((CONFIGS / "clusters").glob("*.yaml")) if _counts_one(path)}


def _counts_one(path: Path) -> bool:
    nodes = parse_yaml(path.read_text(encoding="utf-8"))["nodes"]
    return len(nodes) == 1 and nodes[0].get("count") == 1


def load_cluster(name_or_path: str) -> ClusterView:
    """A cluster by its name in configs/clusters/, as TYPE-xN (N nodes of a type there), or by its YAML file.

    Raises UsageError.
    """
    match = re.fullmatch(r"(.+)-x([1-9]\d{0,5})", name_or_path)
    file = node_types().get(match[1]) if match else None
    if match is None or file is None:
        examples = {"TYPE-xN of a type there": [f"{name}-x2" for name in node_types()]}
        path = find_config("clusters", name_or_path, "cluster", examples)
        view = load_yaml(path, ClusterView)
        view = view.model_copy(update={"nodes": tuple(map(_with_gpu_name, view.nodes))})
        if bare := [node.id for node in view.nodes if node.gpus and not node.cpus]:
            raise UsageError(
                f"{path}: no cpus of {listed(bare)}: an engine of TP n takes n + 1 of them; add cpus, such as cpus: 96"
            )
        return view

    def counted(data: Any) -> Any:
        return data | {"name": name_or_path, "nodes": [data["nodes"][0] | {"count": int(match[2])}]}

    return load_yaml(file, ClusterView, counted)


def _with_gpu_name(node: ClusterNode) -> ClusterNode:
    return node if node.gpu_type is None else node.model_copy(update={"gpu_type": gpu_name(node.gpu_type)})


def load_deployment(name_or_path: str) -> Deployment:
    """A deployment by its name in configs/deployments/, its label, or its YAML file. Raises UsageError."""
    file = CONFIGS / "deployments" / f"{name_or_path}.yaml"
    if is_label(name_or_path) and not file.is_file():
        return Deployment(topology=parse_label(name_or_path))
    examples = {f"a label such as {LABEL_EXAMPLE}": [LABEL_EXAMPLE]}
    return load_yaml(find_config("deployments", name_or_path, "deployment", examples), Deployment)


def find_config(
    folder: str, name_or_path: str, kind: str, computed: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Path:
    """The file of that name in configs/``folder``/, else the path itself.

    ``computed``: forms of names that need no file -> examples. Raises UsageError with the nearest names if
    ``name_or_path`` is neither a name nor a path.
    """
    names = {path.stem: path for path in (CONFIGS / folder).glob("*.yaml")}
    path = Path(name_or_path)
    if name_or_path in names:
        return names[name_or_path]
    if is_yaml_path(name_or_path) or "/" in name_or_path:
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
