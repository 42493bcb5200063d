"""``Deployment`` and its parts, with their YAML form and their label.

A deployment is a frozen value. It rejects unknown keys, and is validated without I/O. Prefill and decode are two values
of the type ``Pool``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le
from pydantic import Field, field_validator, model_validator

from pdlab.core import defaults
from pdlab.core.arguments import MODEL_HELP, positive, ucx_transports
from pdlab.core.commands import BENCH, PDLAB
from pdlab.core.environment import Environment
from pdlab.core.errors import UsageError
from pdlab.core.named_values import NOT_PASSED_ON, RESERVED_ENGINE_KWARGS, engine_arg, engine_args, kv_connector
from pdlab.core.nodes import Role
from pdlab.core.schema import Frozen, Incidental, InLabel, incidental, label_words, validate
from pdlab.core.settings import (
    Backends,
    FlagsOf,
    Milliseconds,
    NamedValues,
    Noun,
    Positive,
    Seconds,
    Text,
    part_words,
    setting,
)
from pdlab.core.text import choices, counted
from pdlab.roles.spec import AUTO, TTFT_S, FluidSpec, counts_of

PlacementKind = Literal["pack", "spread"]
Mode = Literal["collocated", "pd-pack", "pd-spread", "pd-fluid"]
PrefillStep = Literal["retry", "local", "fail"]

# gRPC, or HTTP with a path. No password and no query, because pdlab shows and stores the endpoint.
_HOST = r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)"
OTLP_ENDPOINT = re.compile(rf"grpc://{_HOST}:[1-9]\d{{0,4}}|https?://{_HOST}(:[1-9]\d{{0,4}})?(/[\w.~-]+)+/?", re.ASCII)
MOST = 10_000  # replicas, or ranks of a kind: more than any cluster has
# Titles of groups of flags.
POOL, ROLES, TRANSPORT = "pool", "roles (--pd-fluid)", "KV transfer (PD)"
SERVING = "serving path (what each costs: docs/serving-path.md)"
REQUESTS = "requests (which ones reach the engines: docs/requests.md)"
MODEL, HOW = "model", "how"
# Role -> the beginning of the flags of its pool.
FLAG_PREFIX = {"collocated": "", "fluid": "", "prefill": "p-", "decode": "d-"}
ENGINE = "vLLM engine arguments (repeatable; the value is read as YAML)"
ENVIRONMENT = "environment of the engines (repeatable; NAME without a value takes the launcher's value)"
Count = Annotated[int, Ge(1), Le(MOST)]
Bound = Annotated[Milliseconds, Field(gt=0, le=86400)]
KvConnectors = Annotated[tuple[dict[str, Any], ...], Text(kv_connector, json.dumps)]
# vLLM 0.29's connectors that store KV cache outside of the engine: they may be used beside NIXL. The others move KV
# cache between engines, as NIXL does, or wrap several connectors.
KV_STORES = (
    *("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1", "LMCacheMPConnector"),
    *("MooncakeStoreConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "ExampleConnector"),
)
EngineArguments = Annotated[dict[str, Any], NamedValues(engine_args, engine_arg)]


def _split_word(text: str) -> str:
    """``auto`` or ``3:5``."""
    if text != AUTO:
        try:
            counts_of(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


Split = Annotated[str, Text(_split_word)]


def _local_tokens(text: str) -> int | str:
    """A number of tokens, or ``auto``."""
    return AUTO if text == AUTO else positive(text)


def _prefill_steps(text: str) -> tuple[str, ...]:
    """The steps of ``retry,local``. `Serving` checks their order."""
    steps = tuple(step.strip() for step in text.split(","))
    unknown = [step for step in steps if step not in get_args(PrefillStep)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no step: give some of retry, local, fail, with commas")
    return steps


def _otlp_endpoint(text: str) -> str:
    if not OTLP_ENDPOINT.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no endpoint of OTLP: give grpc://HOST:PORT or http(s)://HOST:PORT/PATH; for example "
            "grpc://collector:4317 or http://collector:4318/v1/traces"
        )
    return text


def _refused_with_reason(data: Any) -> Any:
    """Raises ValueError for a setting of Ray Serve LLM that pdlab does not pass on."""
    for name, why in NOT_PASSED_ON.items():
        if isinstance(data, dict) and name in data:
            raise ValueError(f"{name}: {why}")
    return data


Routing = Literal["power-of-two", "round-robin", "session"]


class Pool(Frozen):
    """Engine replicas of one kind. A replica has ``dp`` ranks of ``pp`` stages of ``tp`` GPUs.

    ``engine_kwargs`` (vLLM engine arguments) and ``env`` override those of the deployment. ``gpu_type``: the pool runs
    only on nodes with this GPU (None: any).
    """

    replicas: Count = setting(1, "replicas", POOL, "--num")
    tp: Annotated[Count, InLabel("tp")] = setting(1, "tensor parallel size", POOL)
    pp: Annotated[Count, InLabel("pp")] = setting(1, "pipeline stages per replica", POOL, advanced=True)
    dp: Annotated[Count, InLabel("dp")] = setting(1, "data parallel ranks per replica", POOL, advanced=True)
    expert_parallel: Annotated[bool, InLabel("ep")] = setting(
        False,
        "expert parallel: experts are divided over all tp x dp ranks of a replica",
        POOL,
        "--ep",
        both_ways=True,
        advanced=True,
    )
    gpu_type: str | None = setting(
        None, "nodes with this GPU only, such as H100", POOL, "--gpu", value="TYPE", otherwise="any", advanced=True
    )
    routing: Routing = setting(
        "power-of-two",
        "which replica gets a request: power-of-two: the less busy of two random replicas; round-robin: each replica "
        "in turn; session: the replica that got the earlier requests with this x-session-id header",
        POOL,
        value="POLICY",
        advanced=True,
    )
    engine_kwargs: EngineArguments = setting(
        {}, "a vLLM engine argument of this pool", ENGINE, "--engine-arg", several="times", value="KEY=VALUE"
    )
    env: Environment = setting(
        {}, "a variable of this pool's engines", ENVIRONMENT, several="times", value="NAME[=VALUE]", advanced=True
    )

    @model_validator(mode="before")
    @classmethod
    def _not_passed_on(cls, data: Any) -> Any:
        return _refused_with_reason(data)

    @model_validator(mode="after")
    def _routed_by_ray(self) -> Pool:
        if self.dp > 1 and self.routing != "power-of-two":
            raise ValueError(
                f"routing {self.routing}: the ranks of dp {self.dp} are chosen by power-of-two; leave it out"
            )
        return self

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica: tp * pp * dp."""
        return self.tp * self.pp * self.dp

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool."""
        return self.replicas * self.gpus_per_replica

    @property
    def ranks(self) -> int:
        """Data parallel ranks of the whole pool: replicas * dp. Each rank is a server."""
        return self.replicas * self.dp

    @property
    def engines_per_replica(self) -> int:
        """Engines of one replica, each with its own batch: DP ranks x pipeline stages."""
        return self.dp * self.pp

    @property
    def one_replica(self) -> Pool:
        """The same pool with one replica."""
        return self.model_copy(update={"replicas": 1})

    def __hash__(self) -> int:
        # Without engine_kwargs and env, which cannot be hashed. Equal pools still have equal hashes.
        return hash((self.replicas, self.tp, self.pp, self.dp, self.expert_parallel, self.gpu_type, self.routing))

    @property
    def tp_groups(self) -> int:
        """Number of TP groups in the pool: replicas * pp * dp, each of ``tp`` GPUs."""
        return self.replicas * self.pp * self.dp

    @property
    def label(self) -> str:
        """Short form: ``1xtp4``, ``2xtp8pp2``, ``1xdp32ep`` (without tp1 if dp or pp is above 1)."""
        return f"{self.replicas}x{self.degrees}"

    @property
    def degrees(self) -> str:
        """The label of one replica: that of the pool without the number of replicas."""
        degrees = ""
        for name, word in _DEGREES.items():
            value = getattr(self, name)
            if value is True or (value > 1 and value is not False):
                degrees += word if value is True else f"{word}{value}"
        return degrees if self.gpus_per_replica > 1 else f"tp1{degrees}"


# The pattern of a pool's label, and the same without names of groups for use in a longer pattern.
_DEGREES = label_words(Pool)
_POOL = re.compile(
    r"(?P<replicas>\d+)x"
    + "".join(
        f"(?P<{name}>{word})?" if Pool.model_fields[name].annotation is bool else rf"(?:{word}(?P<{name}>\d+))?"
        for name, word in _DEGREES.items()
    )
)
POOL_TEXT = re.sub(r"[?]P<[a-z_]+>", "?:", _POOL.pattern)
_LABEL = re.compile(
    rf"collocated-(?P<pool>{POOL_TEXT})"
    rf"|pd-(?P<placement>pack|spread)-p(?P<prefill>{POOL_TEXT})-d(?P<decode>{POOL_TEXT})"
    rf"|pd-fluid-(?P<fluid>{POOL_TEXT})(?:-p(?P<p>\d+)d(?P<d>\d+))?(?:-n(?P<least>\d+)to(?P<most>\d+))?"
)


class Transport(Frozen):
    """How KV cache moves from prefill to decode. The fields have their help texts.

    ``backends``: in order of preference. ``kv_guard``: docs/decisions/016-kv-guard.md. ``kv_poll_s``: 0 looks for
    arrived KV cache only when a step is launched.
    """

    connector: Literal["NixlConnector"] = "NixlConnector"
    backends: Backends = setting(
        ("UCX",),
        "NIXL backends",
        TRANSPORT,
        "--kv-backend",
        value="NAME[,NAME...]",
        implies=(
            ("--use-ucx", ("UCX",), "the same as --kv-backend UCX"),
            ("--use-libfabric", ("LIBFABRIC",), "the same as --kv-backend LIBFABRIC"),
        ),
        advanced=True,
    )
    ucx_tls: Annotated[str, Text(ucx_transports)] | None = setting(
        None,
        "UCX_TLS of the engines, for example tcp",
        TRANSPORT,
        value="LIST",
        otherwise="UCX chooses",
        advanced=True,
    )
    verbose: bool = setting(
        False,
        "debug logs of NIXL and UCX in the engines: makes transfers 5 to 10 times slower",
        TRANSPORT,
        advanced=True,
    )
    kv_guard: bool = setting(
        True,
        "decode recomputes KV cache whose receive failed, was late or was not confirmed; without the guard vLLM "
        "answers some of these requests with wrong tokens",
        TRANSPORT,
        advanced=True,
    )
    kv_deadline_s: Annotated[Seconds, Le(3600)] = setting(
        10.0, "with --kv-guard: a receive is late after S seconds", TRANSPORT, value="S", advanced=True
    )
    kv_poll_s: Annotated[Milliseconds, Le(0.1)] = setting(
        0.0,
        "decode checks for arrived KV cache every MS milliseconds, so that the next step can use it; 0: only once per "
        "step",
        TRANSPORT,
        "--kv-poll-ms",
        value="MS",
        advanced=True,
    )
    reuse_first_token: bool = setting(
        False,
        "decode takes the first token from prefill and computes the second, if the answer stays the same "
        "(docs/timeline.md)",
        TRANSPORT,
        both_ways=True,
        advanced=True,
    )

    @field_validator("backends")
    @classmethod
    def _some_backend(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(not re.fullmatch(r"[A-Z0-9_]+", b) for b in value):
            raise ValueError("needs at least one NIXL backend name in capitals, for example UCX or LIBFABRIC")
        return value


class Collocated(Frozen):
    """Prefill and decode in the same engines."""

    kind: Literal["collocated"] = "collocated"
    pool: Pool

    @property
    def label(self) -> str:
        return f"collocated-{self.pool.label}"


class Disaggregated(Frozen):
    """Prefill and decode in different engines, with KV cache transfers between them.

    ``pack``: all prefill and decode replicas on one node. ``spread``: prefill and decode on disjoint sets of nodes. Ray
    Serve LLM pairs any prefill with any decode replica, so a pack on several nodes would send KV cache over the
    network: it is refused.
    """

    kind: Literal["disaggregated"] = "disaggregated"
    prefill: Pool
    decode: Pool
    placement: PlacementKind
    transport: Transport = Transport()

    @property
    def label(self) -> str:
        return f"pd-{self.placement}-p{self.prefill.label}-d{self.decode.label}"


class Fluid(Frozen):
    """Identical engines that each prefill or decode, by their present role. KV cache moves between any two.

    The fields have their help texts. ``pool.replicas`` engines start. Then their number follows the load from
    ``min_replicas`` to ``max_replicas`` (None: ``pool.replicas``).
    """

    kind: Literal["fluid"] = "fluid"
    pool: Pool
    transport: Transport = Transport()
    roles: Split = setting(
        FluidSpec.roles,
        "auto: a controller follows the load; P:D: fixed numbers of engines that prefill and that decode, such as 3:5 "
        f"({PDLAB} roles changes them during serving)",
        ROLES,
        value="auto|P:D",
        advanced=True,
    )
    p_min: Count = setting(FluidSpec.p_min, "minimum number of engines that prefill", ROLES, advanced=True)
    d_min: Count = setting(FluidSpec.d_min, "minimum number of engines that decode", ROLES, advanced=True)
    slo_ttft_s: Bound | None = setting(
        FluidSpec.slo_ttft_s,
        "TTFT limit of the controller",
        ROLES,
        "--slo-ttft-ms",
        value="MS",
        otherwise=f"{1000 * TTFT_S:g}",
        advanced=True,
    )
    slo_tpot_s: Bound | None = setting(
        FluidSpec.slo_tpot_s,
        "TPOT limit of the controller",
        ROLES,
        "--slo-tpot-ms",
        value="MS",
        otherwise="twice that of an almost empty engine",
        advanced=True,
    )
    prefill_locally_below: Annotated[int | Literal["auto"], Text(_local_tokens)] | None = setting(
        FluidSpec.prefill_locally_below,
        "skip the transfer and prefill on the decode engine if fewer than TOKENS remain after prefix-cache hits; auto: "
        "threshold from measured rates",
        ROLES,
        value="TOKENS|auto",
        otherwise="never",
        advanced=True,
    )
    prefix_affinity: bool = setting(
        FluidSpec.prefix_affinity,
        "route a prompt to the engine that has its prefix cached, if it finishes there no later; without it to the "
        "least loaded engine",
        ROLES,
        both_ways=True,
        advanced=True,
    )
    min_replicas: Count | None = setting(
        None,
        "minimum number of engines; with --min or --max the number follows the load",
        ROLES,
        "--min",
        otherwise="--num",
        advanced=True,
    )
    max_replicas: Count | None = setting(
        None, "maximum number of engines (must fit in the cluster)", ROLES, "--max", otherwise="--num", advanced=True
    )
    down_after_s: Annotated[Seconds, Le(86400)] = setting(
        FluidSpec.down_after_s,
        "stop one engine after S seconds in which fewer were enough",
        ROLES,
        value="S",
        advanced=True,
    )

    @field_validator("prefill_locally_below")
    @classmethod
    def _tokens(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and not 1 <= value <= 2**31:
            raise ValueError("is a number of tokens from 1, or auto")
        return value

    @model_validator(mode="after")
    def _can_be_split(self) -> Fluid:
        replicas = self.pool.replicas
        if self.pool.routing == "round-robin":
            raise ValueError("routing round-robin: roles and loads decide which engine takes a request; give session")
        if self.pool.dp > 1:
            raise ValueError(f"data parallel engines (dp {self.pool.dp}) take requests as one: roles need dp 1, use tp")
        if self.p_min + self.d_min > replicas:
            raise ValueError(
                f"{self.p_min} to prefill and {self.d_min} to decode at least are more than "
                f"{counted(replicas, 'replica')}: give more of them"
            )
        prefill, decode = self.split or (self.p_min, replicas - self.p_min)
        if prefill + decode != replicas:
            raise ValueError(
                f"roles {self.roles} are {counted(prefill + decode, 'engine')}, there are "
                f"{counted(replicas, 'replica')}"
            )
        if prefill < self.p_min or decode < self.d_min:
            raise ValueError(f"roles {self.roles} are fewer than p_min {self.p_min} or d_min {self.d_min}")
        return self

    @model_validator(mode="after")
    def _can_be_counted(self) -> Fluid:
        replicas, least, most = self.pool.replicas, self.least, self.most
        if not least <= replicas <= most:
            raise ValueError(
                f"{replicas} replicas are not between --min {least} and --max {most}: give a --num from {least} to "
                f"{most}"
                if least <= most
                else f"--min {least} is more than --max {most} (each by default --num)"
            )
        if self.p_min + self.d_min > least:
            raise ValueError(
                f"{self.p_min} to prefill and {self.d_min} to decode at least are more than --min {least}: give more"
            )
        if self.moves and self.split is not None:
            raise ValueError(
                f"roles {self.roles} are a split of one number of engines, --min {least} and --max {most} are several: "
                "leave one of the two out"
            )
        if not self.moves and self.down_after_s != FluidSpec.down_after_s:
            raise ValueError("--down-after-s is of a number that moves: give --min or --max too")
        return self

    @property
    def least(self) -> int:
        """The minimum number of engines."""
        return self.pool.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """The maximum number of engines."""
        return self.pool.replicas if self.max_replicas is None else self.max_replicas

    @property
    def moves(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.least < self.most

    @property
    def split(self) -> tuple[int, int] | None:
        """Numbers of engines that prefill and that decode; None: the controller chooses them."""
        return None if self.roles == AUTO else counts_of(self.roles)

    @property
    def label(self) -> str:
        fixed = "" if self.split is None else "-p{}d{}".format(*self.split)
        counts = f"-n{self.least}to{self.most}" if self.moves else ""
        return f"pd-fluid-{self.pool.label}{fixed}{counts}"


class RequestLimits(Frozen):
    """Which requests clients may send (docs/requests.md). The bounds leave room for the canary's requests.

    ``max_tokens``: None allows as many as the model's context.
    """

    expose: tuple[str, ...] = setting(
        (),
        "serve this route of vLLM too, for example /detokenize (repeatable)",
        REQUESTS,
        several="times",
        value="ROUTE",
        advanced=True,
    )
    max_body_bytes: Annotated[int, Field(ge=2**16)] = setting(
        2 * 2**20, "longest body of a request, else HTTP 413", REQUESTS, advanced=True
    )
    max_prompts: Positive = setting(
        64, "sequences of one request, prompts times n, else HTTP 400", REQUESTS, advanced=True
    )
    max_tokens: Annotated[int, Field(ge=16)] | None = setting(
        None,
        "generated tokens per sequence, else HTTP 400",
        REQUESTS,
        otherwise="what the context leaves",
        advanced=True,
    )

    @field_validator("expose")
    @classmethod
    def _paths(cls, expose: tuple[str, ...]) -> tuple[str, ...]:
        for path in expose:
            if not re.fullmatch(r"/[\w./-]*\w", path):
                raise ValueError(f"{path!r} is not the path of a route, for example /detokenize")
        return expose


class Serving(Frozen):
    """The path between the client and the engines; docs/serving-path.md has the cost of each option.

    The fields have their help texts. ``stream_batching_ms``: None is Ray's default of 50 ms, 0 sends every token at
    once. ``prefill_absent_s``: if all prefill replicas have died, none accepts a call until a new one is up.
    ``early_token``: only for greedy streamed completions.
    """

    direct_streaming: bool = setting(
        False,
        "HAProxy hands requests to the engine replicas, without an ingress replica (alpha in Ray 2.60)",
        SERVING,
        both_ways=True,
        advanced=True,
    )
    tokenize_once: bool = setting(
        False, "PD: decode takes the prompt's token ids from prefill", SERVING, both_ways=True, advanced=True
    )
    stream_batching_ms: Annotated[float, Ge(0), Noun("a number of milliseconds")] | None = setting(
        None,
        "collect output chunks for MS milliseconds and send them together (Ray's own default is 50)",
        SERVING,
        value="MS",
        otherwise="0",
        advanced=True,
    )
    requests: RequestLimits = RequestLimits()
    prefill_timeout_s: Annotated[Seconds, Le(86400)] = setting(
        120.0,
        "PD: decode stops waiting for a prefill call after S seconds, queueing included",
        SERVING,
        value="S",
        advanced=True,
    )
    prefill_absent_s: Annotated[Seconds, Le(86400)] = setting(
        5.0,
        "PD: decode stops waiting for a prefill call that no prefill replica accepts within S seconds",
        SERVING,
        value="S",
        advanced=True,
    )
    early_token: bool = setting(
        False,
        "PD: send prefill's first token to the client before the KV cache has moved, if the answer stays the same "
        "(docs/timeline.md)",
        SERVING,
        both_ways=True,
        advanced=True,
    )
    otlp_endpoint: Annotated[str, Text(_otlp_endpoint)] | None = setting(
        None,
        "send OpenTelemetry spans of requests to this endpoint: grpc://HOST:PORT or http(s)://HOST:PORT/PATH "
        "(docs/timeline.md)",
        SERVING,
        value="URL",
        otherwise="none are made",
        advanced=True,
    )
    otlp_sample: Annotated[float, Ge(0), Le(1), Noun("a share: a number")] = setting(
        0.01, "share of the requests that get spans, chosen by request id", SERVING, value="SHARE", advanced=True
    )
    on_prefill_failure: Annotated[tuple[PrefillStep, ...], Text(_prefill_steps, ",".join)] = setting(
        ("retry", "local"),
        "PD: steps of decode, in this order, if a prefill call fails or times out; retry: once, on another prefill "
        "replica; local: decode computes the prompt; fail: HTTP 503, also after the last step",
        SERVING,
        value="STEP[,STEP]",
        advanced=True,
    )

    @field_validator("on_prefill_failure")
    @classmethod
    def _steps(cls, steps: tuple[PrefillStep, ...]) -> tuple[PrefillStep, ...]:
        if not steps or len(set(steps)) < len(steps):
            raise ValueError("names each step once: retry, local, fail, for example retry,local or fail")
        ends = [step for step in steps[:-1] if step != "retry"]
        if ends:
            raise ValueError(f"nothing is tried after {ends[0]}: name it last, for example retry,{ends[0]}")
        return steps


Topology = Collocated | Disaggregated | Fluid


class Deployment(Frozen):
    """A model, a topology, and the settings that all pools share. The fields have their help texts."""

    name: Annotated[str | None, Incidental] = None
    model: str = setting(defaults.MODEL, MODEL_HELP, MODEL, value="NAME|PATH")
    model_id: str | None = setting(
        None, "the name that clients use", MODEL, value="ID", otherwise="the model's own", advanced=True
    )
    topology: Topology = Field(discriminator="kind")
    ingress_replicas: Positive = setting(1, "HTTP ingress replicas, without direct streaming", SERVING, advanced=True)
    serving: Serving = Serving()
    max_model_len: Positive | None = setting(
        None,
        "longest prompt plus answer; the KV pool must have room for one such request",
        ENGINE,
        value="TOKENS",
        otherwise="from --itl, --otl and --lengths, else from the model's file",
        advanced=True,
    )
    engine_kwargs: EngineArguments = setting(
        {}, "a vLLM engine argument of every pool", ENGINE, "--engine-arg", several="times", value="KEY=VALUE"
    )
    env: Environment = setting(
        {},
        "a variable of every engine; without a value here, UCX_MAX_RMA_RAILS follows the nodes' EFA devices",
        ENVIRONMENT,
        "--env",
        "--ucx-env",
        several="times",
        value="NAME[=VALUE]",
        advanced=True,
    )
    kv_offload_gb: Annotated[float, Gt(0), Le(100_000)] | None = setting(
        None,
        "host memory of each engine that prefills, in units of 1e9 bytes, for KV cache that does not fit on its GPUs "
        "(vLLM's OffloadingConnector)",
        TRANSPORT,
        value="GB",
        otherwise="none",
        advanced=True,
    )
    kv_connectors: KvConnectors = setting(
        (),
        "a second KV connector, after NIXL, of the engines that prefill: a name such as LMCacheConnectorV1, or a YAML "
        "mapping with its kv_connector_extra_config (repeatable)",
        TRANSPORT,
        "--kv-connector",
        several="times",
        value="YAML",
        advanced=True,
    )
    decode_bench: bool = setting(
        False,
        f"for {BENCH} --mode decode-only: collocated engines fill a prompt's KV cache with random values and compute "
        "only decode, at the real context length; the answers mean nothing",
        HOW,
        advanced=True,
    )

    @property
    def label(self) -> str:
        """The topology as text, for example ``pd-spread-p1xtp4-d1xtp4``; see `parse_label`."""
        return self.topology.label

    @property
    def mode(self) -> Mode:
        return mode_of(self.topology)

    @property
    def transport(self) -> Transport | None:
        """How KV cache moves; None: prefill and decode are in the same engines."""
        return None if isinstance(self.topology, Collocated) else self.topology.transport

    @property
    def pools(self) -> dict[Role, Pool]:
        """Role -> pool: ``{"collocated": ...}``, ``{"prefill": ..., "decode": ...}`` or ``{"fluid": ...}``."""
        if isinstance(self.topology, Collocated):
            return {"collocated": self.topology.pool}
        if isinstance(self.topology, Fluid):
            return {"fluid": self.topology.pool}
        return {"prefill": self.topology.prefill, "decode": self.topology.decode}

    @property
    def most_pools(self) -> dict[Role, Pool]:
        """`pools` with their maximum numbers of replicas, for which room is planned."""
        if isinstance(self.topology, Fluid):
            return {"fluid": self.topology.pool.model_copy(update={"replicas": self.topology.most})}
        return self.pools

    @property
    def gpus(self) -> int:
        """GPUs in use, all pools together; for a number of replicas that follows the load, at the start."""
        return sum(pool.gpus for pool in self.pools.values())

    def retention_tokens(self, pool: Pool) -> int | None:
        """vLLM's engine argument ``prefix_cache_retention_interval`` of a pool; 0 by default."""
        kept: int | None = self.engine_kwargs_of(pool).get("prefix_cache_retention_interval", 0)
        return kept

    def engine_kwargs_of(self, pool: Pool) -> dict[str, Any]:
        """The engine arguments of a pool: its own override the deployment's."""
        return {**self.engine_kwargs, **pool.engine_kwargs}

    def with_engine_kwargs(self, defaults: Mapping[str, Any]) -> Deployment:
        """The deployment with all engine arguments in its pools: the pool's override the deployment's, and these
        ``defaults``."""

        def changed(pool: Pool) -> Pool:
            return pool.model_copy(update={"engine_kwargs": {**defaults, **self.engine_kwargs_of(pool)}})

        return self.with_pools(changed)

    @property
    def served_pools(self) -> dict[Role, Pool]:
        """The pools with all engine arguments of their engines, by role."""
        return self.with_engine_kwargs({}).pools if self.engine_kwargs else self.pools

    def with_pools(self, change: Callable[[Pool], Pool]) -> Deployment:
        """The deployment with ``change`` of every pool."""
        pools = {
            name: change(pool)
            for name in ("pool", "prefill", "decode")
            if (pool := getattr(self.topology, name, None)) is not None
        }
        return self.with_topology(**pools)

    def with_topology(self, **fields: Any) -> Deployment:
        """The deployment with other values of these fields of its topology."""
        return self.model_copy(update={"topology": self.topology.model_copy(update=fields)})

    @model_validator(mode="after")
    def _no_reserved_engine_kwargs(self) -> Deployment:
        for role, pool in self.pools.items():
            for key in self.engine_kwargs_of(pool):
                if key in NOT_PASSED_ON:
                    raise ValueError(f"engine argument {key!r} ({role}): {NOT_PASSED_ON[key]}")
                if key in RESERVED_ENGINE_KWARGS:
                    raise ValueError(
                        f"engine argument {key!r} ({role}) is set by pdlab: use {RESERVED_ENGINE_KWARGS[key]} instead"
                    )
        return self

    @model_validator(mode="after")
    def _decode_bench_is_collocated(self) -> Deployment:
        if self.decode_bench and not isinstance(self.topology, Collocated):
            raise ValueError("decode_bench measures decode in collocated engines: there is no prefill to transfer from")
        return self

    @field_validator("kv_connectors")
    @classmethod
    def _stores(cls, connectors: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for connector in connectors:
            name = connector.get("kv_connector")
            if name not in KV_STORES and not connector.get("kv_connector_module_path"):
                hint = "pdlab puts NIXL first by itself" if "Nixl" in str(name) else choices(str(name), KV_STORES)
                raise ValueError(f"{name!r} is no KV connector that keeps KV cache beside NIXL: {hint}")
            extra = connector.get("kv_connector_extra_config", {})
            if not isinstance(extra, dict):
                raise ValueError(
                    f"{name}: kv_connector_extra_config is {extra!r}, which is no mapping: give one, or leave it out"
                )
            if "engine_id" in connector:
                raise ValueError(f"{name}: engine_id is the engine's own; leave it out")
        return connectors

    @model_validator(mode="after")
    def _connectors_have_an_engine_that_prefills(self) -> Deployment:
        if self.kv_offload_gb is None and not self.kv_connectors:
            return self
        named = "kv_offload_gb (--kv-offload-gb)" if self.kv_offload_gb else "kv_connectors (--kv-connector)"
        if isinstance(self.topology, Fluid):
            raise ValueError(f"{named} is for engines that only prefill, or collocated ones: leave it out of pd-fluid")
        if self.decode_bench:
            raise ValueError(f"{named} and decode_bench exclude each other: decode_bench fills the KV cache")
        names = [each.get("kv_connector") for each in self.kv_connectors]
        if self.kv_offload_gb and "OffloadingConnector" in names:
            raise ValueError(f"{named} is the OffloadingConnector: leave it out of kv_connectors (--kv-connector)")
        return self

    @model_validator(mode="after")
    def _the_guard_has_its_own_scheduler(self) -> Deployment:
        if self.transport is not None and self.transport.kv_guard:
            for role, pool in self.pools.items():
                if "scheduler_cls" in self.engine_kwargs_of(pool):
                    raise ValueError(
                        f"engine argument 'scheduler_cls' ({role}) is set by the KV guard: use --no-kv-guard to give it"
                    )
        return self

    @model_validator(mode="after")
    def _the_guard_hands_over_the_first_token(self) -> Deployment:
        if self.transport is not None and self.transport.reuse_first_token:
            if not self.transport.kv_guard:
                raise ValueError("reuse_first_token (--reuse-first-token) needs the KV guard: leave out --no-kv-guard")
            if isinstance(self.topology, Fluid):
                raise ValueError("reuse_first_token (--reuse-first-token) is for pd-pack and pd-spread, not pd-fluid")
        return self

    @model_validator(mode="after")
    def _affinity_needs_a_cache(self) -> Deployment:
        affine = isinstance(self.topology, Fluid) and self.topology.prefix_affinity
        for pool in self.pools.values() if affine else ():
            if self.engine_kwargs_of(pool).get("enable_prefix_caching") is False:
                raise ValueError(
                    "prefix_affinity (--prefix-affinity) sends prompts where they are cached, engine argument "
                    "enable_prefix_caching=false has nothing cached: leave one of them out"
                )
        return self

    def env_of(self, role: Role) -> dict[str, str | None]:
        """The variables of a pool's engines. Secrets have no value."""
        return {**self.env, **self.pools[role].env}

    @property
    def secrets(self) -> list[str]:
        """Names of the variables, of all pools, whose values come from the launcher's environment."""
        every = [name for role in self.pools for name, value in self.env_of(role).items() if value is None]
        return list(dict.fromkeys(every))

    @model_validator(mode="before")
    @classmethod
    def _not_passed_on(cls, data: Any) -> Any:
        return _refused_with_reason(data)

    @property
    def fingerprint(self) -> str:
        """12 hex digits of the SHA-256 of the JSON, without fields marked as `pdlab.core.schema.Incidental`."""
        text = json.dumps(self.model_dump(mode="json", exclude=incidental(type(self))), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def unguarded(topology: Topology) -> Topology:
    """The topology without pdlab's KV guard."""
    if isinstance(topology, Collocated):
        return topology
    transport = topology.transport.model_copy(update={"kv_guard": False})
    return topology.model_copy(update={"transport": transport})


def parse_pool(text: str) -> Pool:
    """Inverse of `Pool.label`. Raises UsageError."""
    match = _POOL.fullmatch(text)
    sizes = {name: word for name, word in _DEGREES.items() if Pool.model_fields[name].annotation is not bool}
    if not match or not any(match[name] for name in sizes):
        raise UsageError(f"pool {text!r}: expected REPLICASxtpN[ppN][dpN][ep], for example 2xtp4 or 1xdp32ep")
    number = {name: int(match[name] or 1) for name in ("replicas", *sizes)}
    if not 1 <= min(number.values()) <= max(number.values()) <= MOST:
        raise UsageError(f"pool {text!r}: replicas, tp, pp and dp are from 1 to {MOST}")
    switches = {name: bool(match[name]) for name in _DEGREES if name not in sizes}
    return Pool(**number, **switches)


LABEL_EXAMPLE = "pd-pack-p1xtp4-d1xtp4"


def is_label(text: str) -> bool:
    """Whether the text has the form of a label. `parse_label` may still refuse its numbers."""
    return _LABEL.fullmatch(text) is not None


def parse_label(label: str) -> Topology:
    """Inverse of `Deployment.label`, which has only the topology. Raises UsageError."""
    match = _LABEL.fullmatch(label)
    if not match:
        raise UsageError(
            f"label {label!r}: expected collocated-4xtp2, pd-spread-p1xtp4-d1xtp4 (pack|spread, p POOL, d POOL) or "
            "pd-fluid-8xtp2 (with fixed roles pd-fluid-8xtp2-p3d5, of a number that moves pd-fluid-8xtp2-n4to12)"
        )
    if match["pool"]:
        return Collocated(pool=parse_pool(match["pool"]))
    if match["fluid"]:
        data: dict[str, Any] = {"pool": parse_pool(match["fluid"])}
        data |= {"roles": f"{match['p']}:{match['d']}" if match["p"] else AUTO}
        if match["least"]:
            data |= {"min_replicas": int(match["least"]), "max_replicas": int(match["most"])}
        return validate(Fluid, data, where=f"label {label!r}")
    return Disaggregated(
        prefill=parse_pool(match["prefill"]), decode=parse_pool(match["decode"]), placement=match["placement"]
    )


def mode_of(topology: Topology) -> Mode:
    """The mode of a topology."""
    if isinstance(topology, Collocated):
        return "collocated"
    if isinstance(topology, Fluid):
        return "pd-fluid"
    return "pd-pack" if topology.placement == "pack" else "pd-spread"


def launch_words(deployment: Deployment) -> tuple[str, ...]:
    """The flags of launch_gptoss.py for this deployment."""
    part = FlagsOf(Deployment, leave_out=("name", "topology"))
    return (*topology_words(deployment.topology), *part_words(deployment, part))


def topology_words(topology: Topology) -> tuple[str, ...]:
    """The flags of launch_gptoss.py for this mode, its pools and its transport."""
    size, mode = ("replicas", "tp"), f"--{mode_of(topology)}"
    if isinstance(topology, Collocated):
        return (mode, *part_words(topology.pool, FlagsOf(Pool), size))
    transport = part_words(topology.transport, FlagsOf(Transport))
    if isinstance(topology, Fluid):
        roles = part_words(topology, FlagsOf(Fluid, leave_out=("pool", "transport")))
        return (mode, *part_words(topology.pool, FlagsOf(Pool), size), *roles, *transport)
    pools = (
        *part_words(topology.prefill, FlagsOf(Pool, prefix=FLAG_PREFIX["prefill"]), size),
        *part_words(topology.decode, FlagsOf(Pool, prefix=FLAG_PREFIX["decode"]), size),
    )
    return (mode, *pools, *transport)
