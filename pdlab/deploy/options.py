"""The launcher's flags, and how flags and a configuration file become a Deployment."""

from __future__ import annotations

import argparse
import ipaddress
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from pdlab.cluster.two_hosts import parse_shape
from pdlab.core.arguments import (
    LENGTHS_HELP,
    OneLineParser,
    backends,
    lengths,
    milliseconds,
    port,
    positive,
    seconds,
    ucx_transports,
    whole,
)
from pdlab.core.catalog import known_models, load_cluster, load_deployment, local_cluster, two_hosts_cluster
from pdlab.core.deployment import (
    AUTO,
    DOWN_AFTER_S,
    RESERVED_ENGINE_KWARGS,
    Collocated,
    Deployment,
    Disaggregated,
    Fluid,
    Mode,
    Pool,
    PrefillStep,
    RequestLimits,
    Serving,
    Topology,
    Transport,
    parse_split,
)
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterView, LinkShape
from pdlab.core.rehearsal import DEFAULT_HARDWARE, Rehearsal
from pdlab.core.schema import parse_yaml, validate, yaml_fault
from pdlab.core.workload import Workload, workload_of_flags
from pdlab.deploy import serving_path
from pdlab.deploy.engine_arguments import check_engine_arguments

FROM_STDIN = "--request-from-stdin"
LOCAL_MODEL = "tiny-gptoss"
REHEARSED_CLUSTER = "p5.48xlarge-x2"
MAX_LOCAL_NODES = 64
# Fields of a deployment -> the flags that set them.
FLAGS = {
    "model": "--model",
    "model_id": "--model-id",
    "ingress_replicas": "--ingress-replicas",
    "max_model_len": "--max-model-len",
    "backends": "--kv-backend",
    "ucx_tls": "--ucx-tls",
    "ucx_env": "--ucx-env",
    "roles": "--roles",
    "p_min": "--p-min",
    "d_min": "--d-min",
    "slo_ttft_s": "--slo-ttft-ms",
    "slo_tpot_s": "--slo-tpot-ms",
    "prefill_locally_below": "--prefill-locally-below",
    "prefix_affinity": "--prefix-affinity",
    "min_replicas": "--min",
    "max_replicas": "--max",
    "down_after_s": "--down-after-s",
    "kv_deadline_s": "--kv-deadline-s",
    "serving.stream_batching_ms": "--stream-batching-ms",
    "serving.prefill_timeout_s": "--prefill-timeout-s",
    "serving.prefill_absent_s": "--prefill-absent-s",
    "serving.on_prefill_failure": "--on-prefill-failure",
    "serving.requests.expose": "--expose",
    "serving.requests.max_body_bytes": "--max-body-bytes",
    "serving.requests.max_prompts": "--max-prompts",
    "serving.requests.max_tokens": "--max-tokens",
}
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,2}")
CLUSTER_TP, LOCAL_TP = 4, 1
FLUID_REPLICAS = 2
ROLE_FLAGS = (
    *("roles", "p_min", "d_min", "slo_ttft_ms", "slo_tpot_ms", "prefill_locally_below", "prefix_affinity"),
    *("min", "max", "down_after_s"),
)
# A CPU engine answers it in reasonable time.
LOCAL_WORKLOAD = Workload(input_tokens=512, output_tokens=64)
DEFAULT_WORKLOAD = Workload()
# The canary's longest prompt and the request that proves the wire have some thousand tokens.
LEAST_MODEL_LEN, LENGTH_STEP = 8192, 1024

_EXAMPLES = f"""examples:
  python launch_gptoss.py --pd-spread --p-tp 4 --d-tp 4 --cluster p5.48xlarge-x2 --dry-run
      what would go where on two p5.48xlarge; needs no cluster, no Ray and no GPU
  python launch_gptoss.py --pd-pack --p-num 2 --p-tp 1 --d-tp 4
      serve on the Ray cluster that this machine belongs to
  python launch_gptoss.py --collocated --num 2 --local
      two Ray nodes on this machine, a tiny gpt-oss built on the spot, no GPU
  sudo python launch_gptoss.py --pd-spread --local --two-hosts --link-rate 1gbit
      prefill and decode on two hosts made on this machine, with a link of 1 Gbit/s between them
  python launch_gptoss.py --pd-fluid --num 8 --tp 2
      eight engines, of which as many prefill as the load wants
  python launch_gptoss.py --pd-fluid --num 4 --min 2 --max 8 --tp 2
      four engines to begin with, and from two to eight of them as the load wants
  python launch_gptoss.py --config pd-spread-p1xtp4-d1xtp4 --d-num 2 --export app.yaml
      a file of configs/deployments/ with one number changed, as a Serve config for serve deploy
  python launch_gptoss.py --shutdown
      stop what is being served, and the Ray nodes that --local started

models of configs/models/: {", ".join(known_models())}
"""


def build_parser(prog: str = "launch_gptoss.py") -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description="Serve gpt-oss with Ray Serve LLM: collocated, or with prefill and decode disaggregated (PD).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_pools(parser)
    _add_where(parser)
    _add_serving(parser)
    _add_requests(parser)
    _add_transport(parser)
    _add_engine(parser)
    _add_how(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to serve (one is required, or --config)").add_mutually_exclusive_group()
    group.add_argument(
        "--collocated",
        dest="mode",
        action="store_const",
        const="collocated",
        help="every engine does prefill and decode",
    )
    group.add_argument(
        "--pd-pack",
        dest="mode",
        action="store_const",
        const="pd-pack",
        help="PD, every prefill and decode replica on one node: KV cache moves over NVLink",
    )
    group.add_argument(
        "--pd-spread",
        dest="mode",
        action="store_const",
        const="pd-spread",
        help="PD, prefill and decode on different nodes: KV cache crosses the network",
    )
    group.add_argument(
        "--pd-fluid",
        dest="mode",
        action="store_const",
        const="pd-fluid",
        help="PD with identical engines whose roles move: a controller, or you, says how many prefill (docs/fluid.md)",
    )
    group.add_argument("--mode", dest="mode", choices=get_args(Mode), help="the same as one word")
    more = parser.add_argument_group("model")
    more.add_argument("--model", metavar="NAME|PATH", help="configs/models/ name or file, Hugging Face id, or folder")
    more.add_argument("--model-id", metavar="ID", help="the name that clients use (default: the model's own)")
    more.add_argument(
        "--config", metavar="FILE", help="a deployment in YAML, or a name of configs/deployments/; flags win"
    )


def _add_pools(parser: argparse.ArgumentParser) -> None:
    default = f"default {CLUSTER_TP}, with --local {LOCAL_TP}"
    replicas = {"": f"replicas (default 1, with --pd-fluid {FLUID_REPLICAS})"}
    for title, prefix in (("collocated and fluid pool", ""), ("prefill pool", "p-"), ("decode pool", "d-")):
        group = parser.add_argument_group(title)
        group.add_argument(
            f"--{prefix}num", type=positive, metavar="N", help=replicas.get(prefix, "replicas (default 1)")
        )
        group.add_argument(f"--{prefix}tp", type=positive, metavar="N", help=f"tensor parallel size ({default})")
        group.add_argument(
            f"--{prefix}dp", type=positive, metavar="N", help="data parallel ranks per replica (default 1)"
        )
        group.add_argument(f"--{prefix}pp", type=positive, metavar="N", help="pipeline stages per replica (default 1)")
        group.add_argument(
            f"--{prefix}ep",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="expert parallel: experts are divided over all tp x dp ranks of a replica",
        )
    _add_roles(parser)


def _add_roles(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("roles (--pd-fluid)")
    group.add_argument(
        "--roles",
        type=split,
        metavar="auto|P:D",
        help="auto (default): the controller follows the load; or so many engines prefill and so many decode, such as "
        "3:5 (python -m pdlab roles changes it while it serves)",
    )
    group.add_argument("--p-min", type=positive, metavar="N", help="engines that prefill at least (default 1)")
    group.add_argument("--d-min", type=positive, metavar="N", help="engines that decode at least (default 1)")
    group.add_argument(
        "--slo-ttft-ms", type=milliseconds, metavar="MS", help="TTFT that the controller stays below (default: 2000)"
    )
    group.add_argument(
        "--slo-tpot-ms",
        type=milliseconds,
        metavar="MS",
        help="TPOT that the controller stays below (default: twice that of an almost empty engine)",
    )
    group.add_argument(
        "--prefill-locally-below",
        type=local_tokens,
        metavar="TOKENS|auto",
        help="prefill a prompt where it is decoded, without a transfer, if fewer of its tokens are to be computed "
        "there, its prefix cache's taken off; auto: fewer than what the learnt rates say (default: never)",
    )
    group.add_argument(
        "--prefix-affinity",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="prefill a prompt where its beginning is in the prefix cache, if that ends earlier (default: where least "
        "is to be done)",
    )
    group.add_argument(
        "--min",
        type=positive,
        metavar="N",
        help="engines at least, where their number follows the load (default: --num)",
    )
    group.add_argument(
        "--max", type=positive, metavar="N", help="engines at most, for which there must be room (default: --num)"
    )
    group.add_argument(
        "--down-after-s",
        type=seconds,
        metavar="S",
        help=f"one engine fewer once fewer would have done for so long (default {DOWN_AFTER_S:g})",
    )


def split(text: str) -> str:
    """``auto`` or ``3:5``."""
    if text != AUTO:
        try:
            parse_split(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


def local_tokens(text: str) -> int | str:
    """A number of tokens, or ``auto``."""
    return AUTO if text == AUTO else positive(text)


def _add_where(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument(
        "--cluster",
        metavar="auto|FILE",
        help="auto (default): the running Ray; or a cluster in YAML, or a name of configs/clusters/",
    )
    group.add_argument(
        "--local",
        nargs="?",
        type=whole(1, MAX_LOCAL_NODES, "a number of nodes"),
        const=2,
        metavar="N",
        help=f"N Ray nodes (default 2) on this machine, CPU engines, and {LOCAL_MODEL} unless --model is given",
    )
    group.add_argument(
        "--two-hosts",
        action="store_true",
        help="with --local: its two nodes on two hosts made of namespaces, so that pd-spread crosses a real link "
        "(Linux, root; docs/two-hosts.md)",
    )
    group.add_argument("--link-rate", metavar="RATE", help="of that link, for example 1gbit or 20mbit (default: none)")
    group.add_argument("--link-delay-ms", type=milliseconds, metavar="MS", help="of that link, one way (default 0)")
    group.add_argument(
        "--rehearse",
        action="store_true",
        help=f"on Ray nodes of this machine that are made up to be those of --cluster (default {REHEARSED_CLUSTER}), "
        "with simulated engines (docs/rehearsal.md)",
    )
    group.add_argument(
        "--slow-down",
        type=seconds,
        metavar="K",
        help="with --rehearse: seconds that a simulated one takes (default: by requests/s, GPUs and this machine's "
        "cores)",
    )
    group.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"with --rehearse: calibrated step times, as plan.py takes them (default {DEFAULT_HARDWARE})",
    )
    group.add_argument(
        "--chunk-per-token",
        action="store_true",
        default=None,
        help="with --rehearse: answers come in a chunk per token, as real ones do, and not in three: to see what "
        "that costs on their way, with a larger --slow-down",
    )
    group.add_argument(
        "--assume-merged",
        action="store_true",
        default=None,
        help="with --rehearse: scattered KV blocks of a pool that has wrapped cost no more than blocks in a row, as "
        "with plan.py --assume-merged (default: they are copied one by one within a node, as seen with vLLM 0.11)",
    )
    group.add_argument(
        "--host",
        type=_host,
        default=DEFAULT_HOST,
        metavar="ADDRESS",
        help="address to serve on (default %(default)s: this machine alone)",
    )
    group.add_argument("--port", type=port, default=DEFAULT_PORT, help="default %(default)s")
    group.add_argument(
        "--api-key",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="clients must send a key: the one of --api-key-file or of the variable PDLAB_API_KEY, else one made once "
        "and kept in the cache folder (default: on, unless --host is this machine alone)",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key, in a file that only you can read")
    group.add_argument(
        "--accept-open-cluster",
        action="store_true",
        help="serve on a Ray cluster without token authentication, on which whoever reaches its ports can run code",
    )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving path (what each costs: docs/serving-path.md)")
    group.add_argument(
        "--ingress-replicas",
        type=positive,
        metavar="N",
        help="HTTP ingress replicas, where there is no direct streaming (default: one per GPU of the pool that answers "
        f"clients, {serving_path.LEAST_INGRESS} to {serving_path.MOST_INGRESS})",
    )
    group.add_argument(
        "--direct-streaming",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="HAProxy hands requests to the engine replicas, without an ingress replica (alpha in Ray 2.60; default "
        f"with --local and with --host {serving_path.EVERYWHERE}, where every node can be reached)",
    )
    group.add_argument(
        "--tokenize-once",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="PD: decode takes the prompt's token ids from prefill (default)",
    )
    group.add_argument(
        "--stream-batching-ms",
        type=milliseconds,
        metavar="MS",
        help="hold output chunks that long and send them together (default 0; Ray's own is 50)",
    )
    default = Serving()
    group.add_argument(
        "--prefill-timeout-s",
        type=seconds,
        metavar="S",
        help="PD: decode gives up a call of prefill after S seconds, queueing included (default "
        f"{default.prefill_timeout_s:g})",
    )
    group.add_argument(
        "--prefill-absent-s",
        type=seconds,
        metavar="S",
        help="PD: decode gives up a call that no prefill replica has taken after S seconds, as where all of them have "
        f"died and new ones are not up yet (default {default.prefill_absent_s:g})",
    )
    group.add_argument(
        "--on-prefill-failure",
        type=prefill_steps,
        metavar="STEP[,STEP]",
        help="PD: what decode tries in this order when prefill fails or takes longer: retry (once, on another prefill "
        "replica), local (decode computes the prompt), fail (HTTP 503, as behind the last step; default "
        f"{','.join(default.on_prefill_failure)})",
    )


def prefill_steps(text: str) -> tuple[str, ...]:
    """``retry,local`` as names; which may follow which is the deployment's rule."""
    steps = tuple(step.strip() for step in text.split(","))
    unknown = [step for step in steps if step not in get_args(PrefillStep)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no step: give some of retry, local, fail, with commas")
    return steps


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests (what is let through to the engines: docs/requests.md)")
    default = RequestLimits()
    group.add_argument(
        "--expose",
        action="append",
        default=[],
        metavar="ROUTE",
        help="serve this route of vLLM too, for example /detokenize (repeatable)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=positive,
        metavar="N",
        help=f"longest body of a request, else HTTP 413 (default {default.max_body_bytes})",
    )
    group.add_argument(
        "--max-prompts",
        type=positive,
        metavar="N",
        help=f"sequences of one request, prompts times n, else HTTP 400 (default {default.max_prompts})",
    )
    group.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="generated tokens per sequence, else HTTP 400 (default: what the context leaves)",
    )


def _add_transport(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV transfer (PD)")
    backend = group.add_mutually_exclusive_group()
    backend.add_argument("--kv-backend", type=backends, metavar="NAME[,NAME...]", help="NIXL backends (default UCX)")
    backend.add_argument("--use-ucx", dest="kv_backend", action="store_const", const=("UCX",), help="--kv-backend UCX")
    backend.add_argument(
        "--use-libfabric", dest="kv_backend", action="store_const", const=("LIBFABRIC",), help="--kv-backend LIBFABRIC"
    )
    group.add_argument(
        "--ucx-tls",
        type=ucx_transports,
        metavar="LIST",
        help="UCX_TLS of the engines, for example tcp (default: UCX chooses)",
    )
    group.add_argument(
        "--ucx-env",
        action="append",
        default=[],
        metavar="UCX_NAME=VALUE",
        help="another variable of UCX for the engines (repeatable); UCX_MAX_RMA_RAILS follows the nodes' EFA devices",
    )
    group.add_argument(
        "--kv-guard",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute on decode what prefill's KV cache cannot be trusted for: failed, late and unconfirmed receives "
        "(default; vLLM alone answers some of them with wrong tokens)",
    )
    group.add_argument(
        "--kv-deadline-s",
        type=seconds,
        metavar="S",
        help=f"how long a receive may take until then (default {Transport().kv_deadline_s:g})",
    )
    group.add_argument(
        "--accept-wire",
        choices=("tcp", "efa", "rdma", "unknown"),
        help="serve pd-spread although one long request at the launch shows that KV cache takes this wire, and not the "
        "one that the plan names (default: refuse)",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="protocol logs of UCX and NIXL: shows the transport really used, costs 5 to 10 times in transfer speed",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vLLM engine arguments (repeatable; the value is read as YAML)")
    group.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="for every pool")
    group.add_argument("--p-engine-arg", action="append", default=[], metavar="KEY=VALUE", help="for prefill alone")
    group.add_argument("--d-engine-arg", action="append", default=[], metavar="KEY=VALUE", help="for decode alone")
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="longest prompt + answer; vLLM reserves KV cache for one (default: that of --itl, --otl "
        "and --lengths, else of the model's file)",
    )
    group = parser.add_argument_group("workload that the engines are to hold")
    default = f"default {DEFAULT_WORKLOAD.input_tokens}, with --local {LOCAL_WORKLOAD.input_tokens}"
    group.add_argument("--itl", "--isl", "--input-len", dest="itl", type=positive, metavar="TOKENS",
                       help=f"input tokens of a request ({default})")  # fmt: skip
    default = f"default {DEFAULT_WORKLOAD.output_tokens}, with --local {LOCAL_WORKLOAD.output_tokens}"
    group.add_argument("--otl", "--osl", "--output-len", dest="otl", type=positive, metavar="TOKENS",
                       help=f"output tokens of a request ({default})")  # fmt: skip
    group.add_argument("--lengths", type=lengths, metavar="KIND", help=LENGTHS_HELP)


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument(
        "--decode-bench",
        action="store_true",
        help="collocated engines fill a prompt's KV cache with random values instead of computing it, so that decode "
        "alone is measured at its real context length (run_bm.sh --mode decode-only); answers mean nothing",
    )
    group.add_argument("--dry-run", action="store_true", help="print placement, links and arguments; start nothing")
    group.add_argument(
        "--export", metavar="FILE", help="write a Serve config for serve deploy (- is stdout); start nothing"
    )
    group.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until the deployment is ready and checked (default); --no-wait leaves it starting, as with --detach",
    )
    group.add_argument("--detach", action="store_true", help="leave it running when the launcher ends")
    group.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="give up a start after S seconds (default 1800, longer for models of more bytes on more nodes)",
    )
    group.add_argument("--shutdown", action="store_true", help="stop what is being served and leave nothing behind")
    group.add_argument(
        FROM_STDIN,
        action="store_true",
        help="launch what standard input describes: a launch request in JSON, as an experiment hands it over; takes no "
        "other flag",
    )


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


def engine_args(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """``KEY=VALUE`` texts as engine arguments. Raises UsageError."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            raise UsageError(f"{flag} {pair!r}: expected KEY=VALUE, for example {flag} gpu_memory_utilization=0.85")
        if key in RESERVED_ENGINE_KWARGS:
            raise UsageError(f"{flag} {key}: pdlab sets it; use {RESERVED_ENGINE_KWARGS[key]} instead")
        try:
            value = _number(text) if _EXPONENT.fullmatch(text.strip()) else parse_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{flag} {pair!r}: the value is not valid YAML ({yaml_fault(error)})") from error
        if key in arguments and arguments[key] != value:
            raise UsageError(f"{flag} {key} is given twice, as {arguments[key]!r} and {value!r}: keep one")
        arguments[key] = value
    return arguments


def _number(text: str) -> int | float:
    """``4e9``: a number to everybody but YAML 1.1, which wants a point and a sign in it; whole ones are integers."""
    value = float(text)
    return int(value) if value.is_integer() else value


def deployment_from(args: argparse.Namespace) -> Deployment:
    """The deployment that the flags ask for, over the one of --config where it is given. Raises UsageError."""
    base = load_deployment(args.config) if args.config else None
    mode: Mode | None = args.mode or (base.mode if base else None)
    if mode is None:
        raise UsageError("say what to serve: --collocated, --pd-pack, --pd-spread or --pd-fluid (or --config FILE)")
    _refuse_flags_of_other_modes(args, mode)
    data = base.model_dump(exclude={"topology"}) if base else {}
    data["topology"] = _topology(args, mode, base)
    if base and data["topology"].label != base.label:
        data["name"] = None  # it was the file's name for something else
    data["engine_kwargs"] = {**data.get("engine_kwargs", {}), **engine_args(args.engine_arg, "--engine-arg")}
    # A configuration names the model of its cluster; this machine's CPUs serve the tiny one.
    model = args.model or (LOCAL_MODEL if args.local else None)
    flags = {"model": model, "model_id": args.model_id, "ingress_replicas": args.ingress_replicas}
    flags |= {"max_model_len": _max_model_len(args, base), "decode_bench": args.decode_bench or None}
    data |= {key: value for key, value in flags.items() if value is not None}
    data["serving"] = _serving(args, data["topology"], base)
    if args.ingress_replicas is None and (base is None or "ingress_replicas" not in base.model_fields_set):
        direct = data["serving"]["direct_streaming"]
        data["ingress_replicas"] = 1 if direct else serving_path.ingress_replicas(data["topology"])
    if data.get("decode_bench") and mode != "collocated":
        raise UsageError(f"--decode-bench measures decode in collocated engines, not in {mode}: use --collocated")
    deployment = validate(Deployment, data, where="the flags", names=FLAGS)
    check_engine_arguments(deployment)
    return deployment


def workload_from(args: argparse.Namespace) -> Workload:
    """The requests that the engines are to hold."""
    default = LOCAL_WORKLOAD if args.local else DEFAULT_WORKLOAD
    return workload_of_flags(args.itl, args.otl, args.lengths, default)


def _max_model_len(args: argparse.Namespace, base: Deployment | None) -> int | None:
    """What is given, else what a workload that is given needs; None: as the model's file says. Raises UsageError."""
    max_model_len: int | None = args.max_model_len or (base.max_model_len if base else None)
    if args.itl is None and args.otl is None and args.lengths is None:
        return max_model_len
    workload = workload_from(args)
    needed = sum(workload.longest)
    if max_model_len is not None and needed > max_model_len:
        tokens_text = f"--itl {workload.input_tokens} and --otl {workload.output_tokens} are {needed} tokens"
        if workload.varied:
            tokens_text = f"the longest request of {workload.label} has {needed} tokens"
        raise UsageError(
            f"{tokens_text}, max_model_len is {max_model_len}: give a larger --max-model-len, or leave it out to "
            "follow the workload"
        )
    return max_model_len or max(LEAST_MODEL_LEN, -(-needed // LENGTH_STEP) * LENGTH_STEP)


def chooses_backend(args: argparse.Namespace) -> bool:
    """Whether neither the flags nor the file of --config say which NIXL backend moves the KV cache."""
    base = load_deployment(args.config).topology if args.config else None
    transport = None if base is None or isinstance(base, Collocated) else base.transport
    named = transport is not None and "backends" in transport.model_fields_set
    return args.kv_backend is None and not named


def _serving(args: argparse.Namespace, topology: Topology, base: Deployment | None) -> dict[str, Any]:
    """What the flags say, else the file of --config, else what suits --host. Raises UsageError."""
    local = args.local is not None
    serving_flags = (
        "direct_streaming",
        "tokenize_once",
        "stream_batching_ms",
        "prefill_timeout_s",
        "prefill_absent_s",
        "on_prefill_failure",
    )
    flags = {name: getattr(args, name) for name in serving_flags if getattr(args, name) is not None}
    limits = ("max_body_bytes", "max_prompts", "max_tokens")
    requests = {name: getattr(args, name) for name in limits if getattr(args, name) is not None}
    requests |= {"expose": tuple(args.expose)} if args.expose else {}
    before = base.serving.model_dump(exclude_unset=True) if base else {}
    serving = {**serving_path.defaults(topology, args.host, local=local), **before, **flags}
    # Made-up nodes are on this machine, but what is the default is so on the cluster that is rehearsed.
    serving_path.refuse_unreachable(serving, args.host, local=local or args.rehearse)
    return {**serving, "requests": {**before.get("requests", {}), **requests}}


def _topology(args: argparse.Namespace, mode: Mode, base: Deployment | None) -> Topology:
    if mode == "collocated":
        before = base.topology.pool if base and isinstance(base.topology, Collocated) else None
        return Collocated(pool=_pool(args, "", before))
    if mode == "pd-fluid":
        return _fluid(args, base.topology if base and isinstance(base.topology, Fluid) else None)
    pd = base.topology if base and isinstance(base.topology, Disaggregated) else None
    return Disaggregated(
        prefill=_pool(args, "p_", pd.prefill if pd else None),
        decode=_pool(args, "d_", pd.decode if pd else None),
        placement="pack" if mode == "pd-pack" else "spread",
        transport=_transport(args, pd.transport if pd else Transport()),
    )


def _fluid(args: argparse.Namespace, before: Fluid | None) -> Fluid:
    names = ("roles", "p_min", "d_min", "prefill_locally_below", "prefix_affinity", "down_after_s")
    data = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    data |= {f"{name}_replicas": n for name in ("min", "max") if (n := getattr(args, name)) is not None}
    for field in ("slo_ttft", "slo_tpot"):
        if (ms := getattr(args, f"{field}_ms")) is not None:
            data[f"{field}_s"] = ms / 1000
    if args.num is None and before is None:
        args.num = max(FLUID_REPLICAS, args.min or 0)
    base = before.model_dump(exclude={"pool", "transport"}) if before else {}
    base |= {"pool": _pool(args, "", before.pool if before else None)}
    base |= {"transport": _transport(args, before.transport if before else Transport())}
    return validate(Fluid, base | data, where="the flags", names=FLAGS)


def _pool(args: argparse.Namespace, prefix: str, before: Pool | None) -> Pool:
    data: dict[str, Any] = before.model_dump() if before else {"tp": LOCAL_TP if args.local else CLUSTER_TP}
    fields = {"replicas": "num", "tp": "tp", "dp": "dp", "pp": "pp", "expert_parallel": "ep"}
    pool_flags = {field: getattr(args, prefix + flag) for field, flag in fields.items()}
    data |= {field: value for field, value in pool_flags.items() if value is not None}
    if prefix:
        own = engine_args(getattr(args, f"{prefix}engine_arg"), f"--{prefix[0]}-engine-arg")
        data["engine_kwargs"] = {**data.get("engine_kwargs", {}), **own}
    flags = {field: f"--{prefix.replace('_', '-')}{flag}" for field, flag in fields.items()}
    return validate(Pool, data, where="the flags", names=flags)


def _transport(args: argparse.Namespace, before: Transport) -> Transport:
    transport_flags = {"backends": args.kv_backend, "ucx_tls": args.ucx_tls, "verbose": args.verbose or None}
    transport_flags |= {"kv_guard": args.kv_guard, "kv_deadline_s": args.kv_deadline_s}
    data = before.model_dump() | {key: value for key, value in transport_flags.items() if value is not None}
    data["ucx_env"] = {**before.ucx_env, **_variables(args.ucx_env)}
    if args.kv_deadline_s is not None and not data["kv_guard"]:
        raise UsageError("--kv-deadline-s is the KV guard's: leave out --no-kv-guard, or the deadline")
    if data.get("ucx_tls") and "UCX" not in data["backends"]:
        raise UsageError(
            f"--ucx-tls {data['ucx_tls']} is for the NIXL backend UCX, but the KV transfer uses "
            f"{' and '.join(data['backends'])}: leave one of the two out"
        )
    return validate(Transport, data, where="the flags", names=FLAGS)


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not value:
            raise UsageError(f"--ucx-env {pair!r}: expected UCX_NAME=VALUE, for example UCX_MAX_RMA_RAILS=4")
        variables[name] = value
    return variables


def _refuse_flags_of_other_modes(args: argparse.Namespace, mode: Mode) -> None:
    names = ("num", "tp", "dp", "pp", "ep")
    pd_only = [f"{p}_{name}" for p in ("p", "d") for name in (*names, "engine_arg")]
    pd_only += ["kv_backend", "ucx_tls", "ucx_env", "kv_guard", "kv_deadline_s", "accept_wire"]
    pd_only += ["prefill_timeout_s", "prefill_absent_s", "on_prefill_failure"]
    two_pools = pd_only[: 2 * len(names) + 2]
    wrong, hint = (
        (pd_only, "it is for --pd-pack, --pd-spread and --pd-fluid")
        if mode == "collocated"
        else (two_pools, "its engines are alike: use --num, --tp, --pp and --engine-arg")
        if mode == "pd-fluid"
        else (list(names), "use --p-... for prefill and --d-... for decode")
    )
    if mode != "pd-fluid":
        for name in ROLE_FLAGS:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} does not apply to {mode}: it is for --pd-fluid")
    for name in wrong:
        if getattr(args, name) not in (None, []):
            raise UsageError(f"--{name.replace('_', '-')} does not apply to {mode}: {hint}")


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class LaunchRequest:
    """Serve ``deployment``.

    ``cluster`` is the cluster of a file, or None: the running Ray (or, where ``local_nodes`` is
    given, that many Ray nodes started on this machine, with ``two_hosts`` on two hosts made of
    namespaces; ``link``: what the link between them shall be, None: as it is, or unshaped).
    ``wait``: return when the deployment is ready and checked, else at once. ``detach``: leave it
    running when the launcher ends. ``timeout_s``: seconds until a start counts as failed (None: as
    long as such a model may take).
    ``command`` is the command line, for the manifest. ``api_key``: whether clients must send a key (None: only where
    other machines reach ``host``), ``api_key_file``: the file with it; the command line chooses the file before
    anything is launched, after which None means that nobody is asked for a key. ``accept_open_cluster``: serve on a
    Ray cluster that requires no token. ``choose_backend``: nobody named a NIXL backend, so that the nodes may decide.
    ``accept_wire``: serve although KV cache takes this wire and not the planned one. ``workload``: what an engine must
    hold. ``rehearsal``: with simulated engines, on nodes made up to be those of ``cluster``.
    """

    deployment: Deployment
    cluster: ClusterView | None = None
    local_nodes: int | None = None
    two_hosts: bool = False
    link: LinkShape | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    wait: bool = True
    detach: bool = False
    timeout_s: float | None = None
    api_key: bool | None = None
    api_key_file: str | None = None
    accept_open_cluster: bool = False
    choose_backend: bool = False
    accept_wire: str | None = None
    workload: Workload = DEFAULT_WORKLOAD
    rehearsal: Rehearsal | None = None
    command: tuple[str, ...] = ()

    @property
    def node_count(self) -> int | None:
        """Ray nodes that this launch starts on this machine; None: it starts none."""
        return len(self.cluster.nodes) if self.rehearsal and self.cluster else self.local_nodes

    @property
    def serving_path(self) -> str:
        """The way from ``host`` to the engines, and why."""
        made_up = self.rehearsal is not None and self.deployment.serving.direct_streaming
        return serving_path.describe(self.deployment, self.host, local=self.local_nodes is not None or made_up)

    def known_view(self) -> ClusterView | None:
        """The nodes as the cluster's file or ``local_nodes`` say; None: the running Ray has to be asked."""
        if self.two_hosts:
            return two_hosts_cluster(self.link or LinkShape())
        return local_cluster(self.local_nodes) if self.local_nodes else self.cluster


def request_from(args: argparse.Namespace, words: Sequence[str]) -> LaunchRequest:
    """The launch that the flags ask for; ``words`` are those flags as they were typed. Raises UsageError."""
    if args.local and args.cluster:
        raise UsageError("--local and --cluster exclude each other: --local starts its own Ray nodes on this machine")
    return LaunchRequest(
        link=_link(args),
        deployment=deployment_from(args),
        rehearsal=_rehearsal(args),
        cluster=_cluster(args),
        local_nodes=args.local,
        two_hosts=args.two_hosts,
        host=args.host,
        port=args.port,
        wait=args.wait,
        detach=args.detach or not args.wait,
        timeout_s=args.timeout_s,
        api_key=args.api_key,
        api_key_file=None if args.api_key_file is None else str(args.api_key_file),
        accept_open_cluster=args.accept_open_cluster,
        choose_backend=chooses_backend(args),
        accept_wire=args.accept_wire,
        workload=workload_from(args),
        command=(command_line(words),),
    )


def _cluster(args: argparse.Namespace) -> ClusterView | None:
    """The cluster of --cluster; None: the running Ray. Raises UsageError."""
    name = args.cluster or (REHEARSED_CLUSTER if args.rehearse else "auto")
    view = None if name == "auto" else load_cluster(name)
    if args.rehearse and (view is None or view.device != "gpu"):
        raise UsageError(f"--rehearse makes up the GPUs of a cluster's file; --cluster {name} has none: give another")
    return view


def _rehearsal(args: argparse.Namespace) -> Rehearsal | None:
    """Raises UsageError for flags that contradict it."""
    if not args.rehearse:
        for flag in ("slow_down", "hardware", "chunk_per_token", "assume_merged"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} is for --rehearse: give both or none")
        return None
    if args.local or args.decode_bench:
        other = "--local" if args.local else "--decode-bench"
        raise UsageError(f"--rehearse and {other} exclude each other: engines are simulated, on nodes of its own")
    data = {
        "hardware": args.hardware or DEFAULT_HARDWARE,
        "slow_down": args.slow_down,
        "chunk_per_token": bool(args.chunk_per_token),
        "assume_merged": bool(args.assume_merged),
    }
    return validate(Rehearsal, data, where="the flags", names={"slow_down": "--slow-down", "hardware": "--hardware"})


def command_line(words: Sequence[str]) -> str:
    """The launcher's command line with those flags, to paste into a shell."""
    return shlex.join(["python", "launch_gptoss.py", *words])


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


def _link(args: argparse.Namespace) -> LinkShape | None:
    """What the link of --two-hosts shall be; None: nothing is said of it. Raises UsageError."""
    shaped = args.link_rate is not None or args.link_delay_ms is not None
    if shaped and not args.two_hosts:
        raise UsageError("--link-rate and --link-delay-ms are for the link of --local --two-hosts")
    if args.two_hosts and args.local != 2:
        where_text = f"--local {args.local}" if args.local else f"--cluster {args.cluster or 'auto'}"
        raise UsageError(f"--two-hosts goes with --local, whose two nodes it puts on two hosts, not with {where_text}")
    return parse_shape(args.link_rate, args.link_delay_ms) if shaped else None
