"""The launcher's settings, and how they and a configuration file become a Deployment."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from pdlab.core import defaults
from pdlab.core.catalog import gpu_name, known_models, load_cluster, load_deployment, local_cluster, two_hosts_cluster
from pdlab.core.commands import RUN_LAUNCH, typed
from pdlab.core.deployment import (
    ENGINE,
    ENVIRONMENT,
    FLAG_PREFIX,
    HOW,
    LABEL_EXAMPLE,
    MODEL,
    REQUESTS,
    ROLES,
    SERVING,
    TRANSPORT,
    Collocated,
    Deployment,
    Disaggregated,
    Fluid,
    Mode,
    Pool,
    Topology,
    Transport,
)
from pdlab.core.environment import with_values
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterView, LinkShape
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.request_lengths import ARGUMENT, configured_length, length_flag, length_for, short_pools
from pdlab.core.served_model import served_model
from pdlab.core.settings import (
    FlagsOf,
    LocalNodes,
    Port,
    Seconds,
    Settings,
    Text,
    flag_names,
    given_flags,
    not_given,
    serving_port,
    setting,
)
from pdlab.core.text import counted
from pdlab.core.workload import Workload, workload_of_flags
from pdlab.deploy import serving_path
from pdlab.deploy.engine_arguments import check_engine_arguments
from pdlab.deploy.export_options import EXPORT, KUBERNETES, ExportOptions
from pdlab.deploy.pool_agreement import speculation

FROM_STDIN = "--request-from-stdin"
REHEARSED_CLUSTER = "p5.48xlarge-x2"
CLUSTER_TP, LOCAL_TP = 4, 1
FLUID_REPLICAS = 2
# A CPU engine answers it in reasonable time.
LOCAL_WORKLOAD = Workload(input_tokens=512, output_tokens=64)
DEFAULT_WORKLOAD = Workload()
# Titles of groups of flags.
WHAT, WHERE = "what to serve (one is required, or --config)", "where"
WORKLOAD = "workload that the engines must hold (sets --max-model-len)"

_MADE_UP = "{} and {} exclude each other: engines are simulated, on nodes of its own"
_EXAMPLES = f"""examples:
  {RUN_LAUNCH} --pd-spread --p-tp 4 --d-tp 4 --cluster p5.48xlarge-x2 --dry-run
      print the placement on two p5.48xlarge; needs no cluster, no Ray and no GPU
  {RUN_LAUNCH} --pd-pack --p-num 2 --p-tp 1 --d-tp 4
      serve on the Ray cluster that this machine belongs to
  {RUN_LAUNCH} --collocated --num 2 --local
      two Ray nodes on this machine, a tiny gpt-oss that the launch builds, no GPU
  sudo {RUN_LAUNCH} --pd-spread --local --two-hosts --link-rate 1gbit
      prefill and decode on two hosts made on this machine, with a link of 1 Gbit/s between them
  {RUN_LAUNCH} --pd-fluid --num 8 --tp 2
      eight engines; a controller decides by the load how many of them prefill
  {RUN_LAUNCH} --pd-fluid --num 4 --min 2 --max 8 --tp 2
      four engines at first; then the load decides on a number from two to eight
  {RUN_LAUNCH} --config pd-spread-p1xtp4-d1xtp4 --d-num 2 --export app.yaml
      a file of configs/deployments/ with one number changed, as a Serve config for serve deploy
  {RUN_LAUNCH} --shutdown
      stop the running deployment, and the Ray nodes that --local started

models of configs/models/: {", ".join(known_models())}
"""


def _host(text: str) -> str:
    """An address or a name of RFC 1123; whether it is this machine's shows when it is bound."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
        name = re.fullmatch(rf"{label}(\.{label})*", text) and len(text) < 254
        if not name or re.fullmatch(r"[0-9.]+", text):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not an address or a host's name; for example 127.0.0.1 or 0.0.0.0"
            ) from None
    return text


_TP = {"tp": f"{CLUSTER_TP}, with --local {LOCAL_TP}"}
# The engine arguments of one pool are advanced; those of every pool are common.
_of_pd = partial(FlagsOf, Pool, otherwise=_TP, advanced=("engine_kwargs",))


class LaunchOptions(Settings):
    """Settings of a launch besides the deployment: the same on the command line and in a `LaunchRequest`."""

    two_hosts: bool = setting(
        False,
        "with --local: put the two nodes on two hosts made of Linux namespaces, so that pd-spread crosses a real link "
        "(needs root; docs/two-hosts.md)",
        WHERE,
        advanced=True,
    )
    host: Annotated[str, Text(_host)] = setting(
        "127.0.0.1", "address to serve on; only this machine can reach the default", WHERE, value="ADDRESS"
    )
    port: Port = serving_port(WHERE)
    api_key: bool | None = setting(
        None,
        "clients must send an API key: that of --api-key-file; else that of the variable PDLAB_API_KEY; else one that "
        "pdlab makes once and keeps in its cache folder",
        WHERE,
        otherwise="on, unless only this machine can reach --host",
        advanced=True,
    )
    api_key_file: Path | None = setting(
        None, "file with the API key, which only you can read", WHERE, value="FILE", advanced=True
    )
    accept_open_cluster: bool = setting(
        False,
        "serve on a Ray cluster without token authentication: anyone who can reach its ports can run code on it",
        WHERE,
        advanced=True,
    )
    accept_wire: Literal["tcp", "efa", "rdma", "unknown"] | None = setting(
        None,
        "serve pd-spread although the KV cache of the launch's long test request took this wire, not the planned one",
        TRANSPORT,
        otherwise="the launch fails",
        advanced=True,
    )
    wait: bool = setting(
        True,
        "wait until the deployment is ready and checked; --no-wait returns during the start, and implies --detach",
        HOW,
        advanced=True,
    )
    detach: bool = setting(False, "leave the deployment running when the launcher ends", HOW)
    timeout_s: Seconds | None = setting(
        None,
        "end a start that is not ready after S seconds",
        HOW,
        value="S",
        otherwise="1800; more for large models and many nodes",
        advanced=True,
    )


class LaunchSettings(ExportOptions, LaunchOptions):
    """The command line of the launcher. The flags of a deployment are those of `pdlab.core.deployment`."""

    COMMAND = "launch"
    ABOUT = "Serve gpt-oss with Ray Serve LLM: collocated, or with prefill and decode disaggregated (PD)."
    EXAMPLES = _EXAMPLES
    EXCLUSIONS = (
        ("local", "cluster", "{} and {} exclude each other: --local starts its own Ray nodes on this machine"),
        ("rehearse", "local", _MADE_UP),
        ("rehearse", "deployment.decode_bench", _MADE_UP),
    )
    GROUPS = (
        *(WHAT, MODEL, "collocated and fluid pool", "prefill pool", "decode pool", ROLES, WHERE, SERVING, REQUESTS),
        *(TRANSPORT, ENGINE, ENVIRONMENT, WORKLOAD, HOW, EXPORT, KUBERNETES),
    )

    mode: Mode | None = setting(
        None,
        "the mode as one word, in place of the flags above",
        WHAT,
        "--mode",
        implies=(
            ("--collocated", "collocated", "every engine does prefill and decode"),
            (
                "--pd-pack",
                "pd-pack",
                "PD, every prefill and decode replica on one node: KV cache moves over NVLink",
            ),
            (
                "--pd-spread",
                "pd-spread",
                "PD, prefill and decode on different nodes: KV cache crosses the network",
            ),
            (
                "--pd-fluid",
                "pd-fluid",
                "PD with identical engines that can change their role: a controller, or you, sets how many of them "
                "prefill (docs/fluid.md)",
            ),
        ),
    )
    config: str | None = setting(
        None,
        f"the deployment: a YAML file, a name in configs/deployments/, or a label such as {LABEL_EXAMPLE}; other flags "
        "override it",
        MODEL,
        value="FILE",
    )
    deployment: Annotated[
        dict[str, Any],
        FlagsOf(
            Deployment,
            leave_out=("name", "topology"),
            otherwise={
                "model": f"{defaults.MODEL}, with --local {defaults.LOCAL_MODEL}",
                "ingress_replicas": "one per GPU of the pool that answers clients, "
                f"{serving_path.LEAST_INGRESS} to {serving_path.MOST_INGRESS}",
                "serving.direct_streaming": f"on with --local and with --host {serving_path.EVERYWHERE}, else off",
                "serving.tokenize_once": "on",
            },
        ),
    ] = Field(default_factory=dict)
    pool: Annotated[
        dict[str, Any],
        FlagsOf(
            Pool,
            "collocated and fluid pool",
            leave_out=("engine_kwargs", "env"),
            otherwise={"replicas": f"1, with --pd-fluid {FLUID_REPLICAS}"} | _TP,
        ),
    ] = Field(default_factory=dict)
    prefill: Annotated[dict[str, Any], _of_pd("prefill pool", FLAG_PREFIX["prefill"])] = Field(default_factory=dict)
    decode: Annotated[dict[str, Any], _of_pd("decode pool", FLAG_PREFIX["decode"])] = Field(default_factory=dict)
    fluid: Annotated[dict[str, Any], FlagsOf(Fluid, leave_out=("pool", "transport"))] = Field(default_factory=dict)
    transport: Annotated[dict[str, Any], FlagsOf(Transport)] = Field(default_factory=dict)
    cluster: str | None = setting(
        None,
        "auto: the running Ray cluster; else a YAML file, a name in configs/clusters/, or TYPE-xN for N nodes of a "
        "type in that folder, such as p5.48xlarge-x13",
        WHERE,
        value="auto|FILE",
        otherwise="auto",
    )
    local: LocalNodes | None = setting(
        None,
        f"start N Ray nodes ({defaults.LOCAL_NODES} without a number) on this machine, with CPU engines; the default "
        f"model is {defaults.LOCAL_MODEL}",
        WHERE,
        bare=defaults.LOCAL_NODES,
    )
    link: Annotated[dict[str, Any], FlagsOf(LinkShape, WHERE, prefix="link-", advanced=("gbit_per_s", "delay_s"))] = (
        Field(default_factory=dict)
    )
    rehearse: bool = setting(
        False,
        f"run the application of --cluster (default {REHEARSED_CLUSTER}) on this machine: fake nodes and GPUs, "
        "simulated engines (docs/rehearsal.md)",
        WHERE,
        advanced=True,
    )
    rehearsal: Annotated[dict[str, Any], FlagsOf(Rehearsal, WHERE, leave_out=("caches",), needs="rehearse")] = Field(
        default_factory=dict
    )
    workload: Annotated[
        dict[str, Any],
        FlagsOf(
            Workload,
            WORKLOAD,
            only=("input_tokens", "output_tokens", "lengths"),
            otherwise={
                "input_tokens": f"{DEFAULT_WORKLOAD.input_tokens}, with --local {LOCAL_WORKLOAD.input_tokens}",
                "output_tokens": f"{DEFAULT_WORKLOAD.output_tokens}, with --local {LOCAL_WORKLOAD.output_tokens}",
            },
            advanced=("lengths",),
        ),
    ] = Field(default_factory=dict)
    dry_run: bool = setting(False, "print placement, links and arguments; start nothing", HOW)
    shutdown: bool = setting(False, "stop the running deployment and all processes of its launch", HOW)
    request_from_stdin: bool = setting(
        False,
        "read the launch request as JSON from standard input (experiments use this); takes no other flag",
        HOW,
        advanced=True,
    )

    def check(self) -> None:
        super().check()
        if self.target is not None:
            not_given(self, _OF_A_START, f"{self.target[0]}, which starts nothing")


# Settings of a start that are in no export.
_OF_A_START = (
    *("rehearse", "rehearsal", "two_hosts", "link"),
    *("accept_open_cluster", "accept_wire", "wait", "detach", "timeout_s"),
)
# Which flags belong to which modes: the part (or the field) of the settings, and what the error in another mode has.
_PD_FIELDS = (
    "accept_wire",
    "deployment.serving.prefill_timeout_s",
    "deployment.serving.prefill_absent_s",
    "deployment.serving.on_prefill_failure",
    "deployment.serving.early_token",
)
_OTHER_MODES: Mapping[Mode, tuple[tuple[tuple[str, ...], str], ...]] = {
    "collocated": (
        (("prefill", "decode", "transport", *_PD_FIELDS), "it is for --pd-pack, --pd-spread and --pd-fluid"),
    ),
    "pd-pack": ((("pool",), "use --p-... for prefill and --d-... for decode"),),
    "pd-spread": ((("pool",), "use --p-... for prefill and --d-... for decode"),),
    "pd-fluid": ((("prefill", "decode"), "its engines are identical: use --num, --tp, --pp and --engine-arg"),),
}


def topology_settings(topology: Topology) -> dict[str, Any]:
    """The fields of `LaunchSettings` that ask for this mode, these pools and this transport."""

    def given(value: Pool | Fluid | Transport, *leave_out: str) -> dict[str, Any]:
        return value.model_dump(exclude=set(leave_out), exclude_defaults=True)

    if isinstance(topology, Collocated):
        return {"mode": "collocated", "pool": _sized(topology.pool)}
    transport = given(topology.transport)
    if isinstance(topology, Fluid):
        roles = given(topology, "kind", "pool", "transport")
        return {"mode": "pd-fluid", "pool": _sized(topology.pool), "fluid": roles, "transport": transport}
    pools = {"prefill": _sized(topology.prefill), "decode": _sized(topology.decode)}
    return {"mode": f"pd-{topology.placement}", **pools, "transport": transport}


def _sized(pool: Pool) -> dict[str, Any]:
    return {"replicas": pool.replicas, "tp": pool.tp, **pool.model_dump(exclude_defaults=True)}


def laid_over(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``more``, also within its mappings."""
    both = {name: laid_over(base[name], value) for name, value in more.items() if isinstance(base.get(name), dict)}
    return {**base, **more, **both}


def deployment_from(settings: LaunchSettings) -> Deployment:
    """The deployment that the flags ask for, over the one of --config if it is given. Raises UsageError."""
    base = load_deployment(settings.config) if settings.config else None
    mode: Mode | None = settings.mode or (base.mode if base else None)
    if mode is None:
        raise UsageError("nothing to serve: give --collocated, --pd-pack, --pd-spread or --pd-fluid (or --config FILE)")
    _refuse_flags_of_other_modes(settings, mode)
    given = settings.deployment
    data = base.model_dump(exclude={"topology"}) if base else {}
    data["topology"] = _topology(settings, mode, base)
    if base and data["topology"].label != base.label:
        data["name"] = None  # it was the file's name for something else
    if settings.local:
        data["model"] = defaults.LOCAL_MODEL  # a configuration names the model of its cluster; CPUs serve the tiny one
    data |= {name: value for name, value in given.items() if name not in ("engine_kwargs", "env", "serving")}
    data["engine_kwargs"] = {**data.get("engine_kwargs", {}), **given.get("engine_kwargs", {})}
    data["env"] = with_values({**data.get("env", {}), **given.get("env", {})}, os.environ, "--env")
    data["serving"] = _serving(settings, data["topology"], base)
    if "ingress_replicas" not in given and (base is None or "ingress_replicas" not in base.model_fields_set):
        direct = data["serving"]["direct_streaming"]
        data["ingress_replicas"] = 1 if direct else serving_path.ingress_replicas(data["topology"])
    if data.get("decode_bench") and mode != "collocated":
        raise UsageError(f"--decode-bench measures decode in collocated engines, not in {mode}: use --collocated")
    data |= _one_length(settings, data)
    deployment = settings.value_of("deployment", Deployment, data)
    check_engine_arguments(deployment)
    _refuse_first_token(deployment)
    return _holding(deployment, workload_from(settings)) if settings.workload else deployment


def _one_length(settings: LaunchSettings, data: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a deployment that change because a flag for the length of requests overrides the other form of it in
    the file of --config: --max-model-len, or the engine argument."""
    given = settings.deployment
    if ARGUMENT in given.get("engine_kwargs", {}):
        return {} if ARGUMENT in given else {ARGUMENT: None}
    if ARGUMENT not in given:
        return {}
    topology = data["topology"]
    pools = {part: getattr(topology, part) for part in ("pool", "prefill", "decode") if hasattr(topology, part)}
    kept = {
        part: pool.model_copy(update={"engine_kwargs": _without_length(pool.engine_kwargs)})
        for part, pool in pools.items()
        if ARGUMENT not in getattr(settings, part).get("engine_kwargs", {})
    }
    return {
        "engine_kwargs": _without_length(data["engine_kwargs"]),
        "topology": topology.model_copy(update=kept),
    }


def _without_length(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != ARGUMENT}


def _refuse_first_token(deployment: Deployment) -> None:
    """Where decode could not take prefill's first token, or would never be given one; and where the time of decode's
    own first token is needed."""
    topology = deployment.topology
    if isinstance(topology, Fluid) and deployment.serving.early_token:
        raise UsageError(
            "--early-token does not apply to pd-fluid: its engines' roles follow how long decode takes to its first "
            "token, which is then sent before; use --pd-pack or --pd-spread, or give --no-early-token"
        )
    if not isinstance(topology, Disaggregated) or not topology.transport.reuse_first_token:
        return
    if not deployment.serving.tokenize_once:
        raise UsageError(
            "--reuse-first-token needs --tokenize-once, which sends the token to decode: leave out "
            "--no-tokenize-once or --reuse-first-token"
        )
    if speculation(deployment.engine_kwargs_of(topology.decode)):
        raise UsageError(
            "--reuse-first-token and speculative decoding exclude each other, because guesses begin with decode's "
            "own first token: leave one of the two out"
        )


def workload_from(settings: LaunchSettings) -> Workload:
    """The requests that the engines are to hold."""
    default = LOCAL_WORKLOAD if settings.local else DEFAULT_WORKLOAD
    return workload_of_flags(settings.workload, default)


def _holding(deployment: Deployment, workload: Workload) -> Deployment:
    """The deployment whose engines hold requests of the workload: with its length, unless another is given. Raises
    UsageError for one that is too short."""
    # The pool that needs most comes first: the length that the message proposes then serves the others too.
    short = sorted(short_pools(deployment, None, workload, cpu=False), key=lambda each: -each[2])
    for role, length, needed in short:
        outputs = "one of the answer" if role == "prefill" else f"--otl {workload.output_tokens}"
        tokens_text = f"--itl {workload.input_tokens} and {outputs} are {counted(needed, 'token')}"
        if workload.varied:
            tokens_text = f"the longest request of {workload.label} has {counted(needed, 'token')}"
        flag = length_flag(deployment, role).rstrip("= ")
        raise UsageError(
            f"{tokens_text}, max_model_len is {length}: give a larger {flag}, or leave it out to follow the workload"
        )
    given = [configured_length(deployment, pool, None, cpu=False) for pool in deployment.pools.values()]
    if None not in given:
        return deployment
    shape = None
    with contextlib.suppress(UsageError):  # a wrong model has its own message, which comes later
        shape = served_model(deployment).shape
    return deployment.model_copy(update={"max_model_len": length_for(workload, shape)})


def chooses_backend(settings: LaunchSettings) -> bool:
    """Whether neither the flags nor the file of --config name a NIXL backend."""
    base = load_deployment(settings.config).topology if settings.config else None
    transport = None if base is None or isinstance(base, Collocated) else base.transport
    named = transport is not None and "backends" in transport.model_fields_set
    return "backends" not in settings.transport and not named


def _serving(settings: LaunchSettings, topology: Topology, base: Deployment | None) -> dict[str, Any]:
    """What the flags give, else the file of --config, else what suits --host. Raises UsageError."""
    local = settings.local is not None
    given: dict[str, Any] = settings.deployment.get("serving", {})
    before = base.serving.model_dump(exclude_unset=True) if base else {}
    serving = {**serving_path.defaults(topology, settings.host, local=local), **before, **given}
    # Made-up nodes are on this machine, but what is the default is so on the cluster that is rehearsed.
    if "otlp_sample" in given and serving.get("otlp_endpoint") is None:
        raise UsageError("--otlp-sample needs --otlp-endpoint URL: give both, or neither")
    serving_path.refuse_unreachable(serving, settings.host, local=local or settings.rehearse)
    return {**serving, "requests": {**before.get("requests", {}), **given.get("requests", {})}}


def _topology(settings: LaunchSettings, mode: Mode, base: Deployment | None) -> Topology:
    if mode == "collocated":
        before = base.topology.pool if base and isinstance(base.topology, Collocated) else None
        return Collocated(pool=_pool(settings, "pool", before))
    if mode == "pd-fluid":
        return _fluid(settings, base.topology if base and isinstance(base.topology, Fluid) else None)
    pd = base.topology if base and isinstance(base.topology, Disaggregated) else None
    return Disaggregated(
        prefill=_pool(settings, "prefill", pd.prefill if pd else None),
        decode=_pool(settings, "decode", pd.decode if pd else None),
        placement="pack" if mode == "pd-pack" else "spread",
        transport=_transport(settings, pd.transport if pd else Transport()),
    )


def _fluid(settings: LaunchSettings, before: Fluid | None) -> Fluid:
    data: dict[str, Any] = before.model_dump(exclude={"pool", "transport"}) if before else {}
    replicas = None if before else max(FLUID_REPLICAS, settings.fluid.get("min_replicas", 0))
    data |= settings.fluid
    data |= {"pool": _pool(settings, "pool", before.pool if before else None, replicas)}
    data |= {"transport": _transport(settings, before.transport if before else Transport())}
    return settings.value_of("fluid", Fluid, data)


def _pool(settings: LaunchSettings, part: str, before: Pool | None, replicas: int | None = None) -> Pool:
    data: dict[str, Any] = before.model_dump() if before else {"tp": LOCAL_TP if settings.local else CLUSTER_TP}
    data |= {} if replicas is None else {"replicas": replicas}
    given: dict[str, Any] = getattr(settings, part)
    arguments = {**data.get("engine_kwargs", {}), **given.get("engine_kwargs", {})}
    flag = flag_names(LaunchSettings, part).get("env", "--env")
    env = with_values({**data.get("env", {}), **given.get("env", {})}, os.environ, flag)
    gpu = given.get("gpu_type", data.get("gpu_type"))
    named = {"gpu_type": gpu if gpu is None else gpu_name(gpu)}
    return settings.value_of(part, Pool, {**data, **given, **named, "engine_kwargs": arguments, "env": env})


def _transport(settings: LaunchSettings, before: Transport) -> Transport:
    given = settings.transport
    data = {**before.model_dump(), **given}
    if "kv_deadline_s" in given and not data["kv_guard"]:
        raise UsageError("--kv-deadline-s is a setting of the KV guard: leave out --no-kv-guard or --kv-deadline-s")
    if given.get("kv_poll_s") and not data["kv_guard"]:
        raise UsageError("--kv-poll-ms is a setting of the KV guard: leave out --no-kv-guard or --kv-poll-ms")
    if data.get("ucx_tls") and "UCX" not in data["backends"]:
        raise UsageError(
            f"--ucx-tls {data['ucx_tls']} is for the NIXL backend UCX, but the KV transfer uses "
            f"{' and '.join(data['backends'])}: leave one of the two out"
        )
    return settings.value_of("transport", Transport, data)


def _refuse_flags_of_other_modes(settings: LaunchSettings, mode: Mode) -> None:
    given = given_flags(settings)
    rules = list(_OTHER_MODES[mode])
    if mode != "pd-fluid":
        rules.insert(0, (("fluid",), "it is for --pd-fluid"))
    for places, hint in rules:
        for name, flag in given.items():
            if name in places or name.partition(".")[0] in places:
                raise UsageError(f"{flag} does not apply to {mode}: {hint}")


class LaunchRequest(LaunchOptions):
    """Serve ``deployment``; the fields of `LaunchOptions` are as the flags.

    ``cluster`` is the cluster of a file, or None: the running Ray (or, with ``local_nodes``, that many Ray nodes
    started on this machine, with ``two_hosts`` on two hosts made of namespaces; ``link``: the rate and delay of the
    link between them, None: as it is, or without a limit). The command line chooses ``api_key_file`` before anything is
    launched; after that None means that clients need no key. ``choose_backend``: no NIXL backend was named, so the
    launch chooses one by the nodes. ``workload``: what an engine must hold. ``rehearsal``: with simulated engines, on
    fake nodes of ``cluster``. ``command`` is the command line, for the manifest.
    """

    deployment: Deployment
    cluster: ClusterView | None = None
    local_nodes: int | None = None
    link: LinkShape | None = None
    choose_backend: bool = False
    workload: Workload = DEFAULT_WORKLOAD
    rehearsal: Rehearsal | None = None
    command: tuple[str, ...] = ()

    @property
    def node_count(self) -> int | None:
        """Ray nodes that this launch starts on this machine; None: it starts none."""
        return len(self.cluster.nodes) if self.rehearsal and self.cluster else self.local_nodes

    @property
    def base_url(self) -> str:
        """The URL at which a client on this machine reaches the deployment."""
        return defaults.base_url(self.port, self.host)

    @property
    def serving_path(self) -> str:
        """The path from ``host`` to the engines, and its reason, in words."""
        made_up = self.rehearsal is not None and self.deployment.serving.direct_streaming
        return serving_path.describe(self.deployment, self.host, local=self.local_nodes is not None or made_up)

    def known_view(self) -> ClusterView | None:
        """The nodes of the cluster's file or of ``local_nodes``; None: the launch must read them from the running
        Ray.
        """
        if self.two_hosts:
            return two_hosts_cluster(self.link or LinkShape())
        return local_cluster(self.local_nodes) if self.local_nodes else self.cluster


def request_from(settings: LaunchSettings, words: Sequence[str]) -> LaunchRequest:
    """The launch that the settings ask for; ``words``: the flags as they were typed, or that give these settings.
    Raises UsageError."""
    deployment = deployment_from(settings)
    if settings.local is None and not settings.rehearse:  # whose nodes have free ports, not Ray's own
        serving_path.refuse_port(settings.port, settings.host)
    return settings.passed_to(
        LaunchRequest,
        link=_link(settings),
        deployment=deployment,
        rehearsal=_rehearsal(settings, deployment),
        cluster=_cluster(settings),
        local_nodes=settings.local,
        detach=settings.detach or not settings.wait,
        choose_backend=chooses_backend(settings),
        workload=workload_from(settings),
        command=(command_line(words),),
    )


def _cluster(settings: LaunchSettings) -> ClusterView | None:
    """The cluster of --cluster; None: the running Ray. Raises UsageError."""
    name = settings.cluster or (REHEARSED_CLUSTER if settings.rehearse else "auto")
    view = None if name == "auto" else load_cluster(name)
    if settings.rehearse and (view is None or view.device != "gpu"):
        raise UsageError(f"--rehearse makes up the GPUs of a cluster's file; --cluster {name} has none: give another")
    return view


def _rehearsal(settings: LaunchSettings, deployment: Deployment) -> Rehearsal | None:
    """Raises UsageError for flags that contradict it."""
    if not settings.rehearse:
        return None
    if deployment.kv_offload_gb is not None or deployment.kv_connectors:
        other = "--kv-offload-gb" if deployment.kv_offload_gb is not None else "--kv-connector"
        raise UsageError(f"--rehearse and {other} exclude each other: simulated engines keep no KV cache beside theirs")
    if deployment.serving.otlp_endpoint is not None:
        raise UsageError("--rehearse and --otlp-endpoint exclude each other: simulated engines make no spans")
    return settings.value_of("rehearsal", Rehearsal)


def command_line(words: Sequence[str]) -> str:
    """The launcher's command line with those flags, to paste into a shell."""
    return typed("launch", *words)


def request_to_json(request: LaunchRequest) -> str:
    """The text that `request_from_json` reads back equal. Raises UsageError where there is none."""
    try:
        text = TypeAdapter(LaunchRequest).dump_json(request).decode()
        if request_from_json(text) == request:
            return text
    except PydanticSerializationError:
        pass
    raise UsageError(
        "an engine argument has a value that JSON cannot carry (a date, an infinite number, a key that is not text): "
        "write it as text"
    )


def request_from_json(text: str | bytes) -> LaunchRequest:
    """Raises UsageError for what is no launch request."""
    try:
        return TypeAdapter(LaunchRequest).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"standard input is no launch request in JSON: {f'{where}: ' if where else ''}{first['msg']}"
        ) from error


def _link(settings: LaunchSettings) -> LinkShape | None:
    """The rate and delay of the link of --two-hosts; None: as it is. Raises UsageError."""
    if settings.link and not settings.two_hosts:
        raise UsageError("--link-rate and --link-delay-ms are for the link of --local --two-hosts")
    if settings.two_hosts and settings.local != 2:
        where_text = f"--local {settings.local}" if settings.local else f"--cluster {settings.cluster or 'auto'}"
        raise UsageError(f"--two-hosts needs --local with two nodes, not {where_text}")
    return settings.value_of("link", LinkShape) if settings.link else None
