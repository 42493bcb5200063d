#!/usr/bin/env python3
"""Predict which P:D ratio, TP degrees and placement to run, before GPUs are booked; see --help."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field

from pdlab.core import defaults
from pdlab.core.arguments import (
    MAX_LOAD,
    MIN_RATE_RPS,
    MODEL_HELP,
    above_zero,
    checked_whole_number,
    numbers,
)
from pdlab.core.collector import waiting_collector
from pdlab.core.commands import BENCH, INSTALL_TABLES, LAUNCH, PDLAB, RUN_PLAN, VIZ
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command, no_file
from pdlab.core.files import write_output
from pdlab.core.gpu_count import COUNT_HELP, DEFAULT_COUNT, Count
from pdlab.core.hybrid_kv import OFFLOADING
from pdlab.core.output_paths import check_folder, check_picture, check_writable, distinct
from pdlab.core.settings import (
    AboveZero,
    FlagsOf,
    NamedValues,
    Positive,
    Seed,
    Settings,
    Text,
    given_of,
    not_given,
    setting,
    to_words,
    written_numbers,
)
from pdlab.core.status_line import StatusLine
from pdlab.core.text import choices, counted
from pdlab.core.workload import Open, Slo, Workload, workload_of_flags

if TYPE_CHECKING:
    from pdlab.analysis.goodput_map import RateSweep
    from pdlab.core.catalog import ModelShape
    from pdlab.plan.pictures import PredictedCurve
    from pdlab.plan.planner import Plan
    from pdlab.plan.scenario import Scenario
    from pdlab.results.schema import Experiment
    from pdlab.sim.hardware import Hardware
    from pdlab.sim.level import Trace


FORMATTED = ("gemm", "moe", "kvcache", "fmha")
MAX_GPUS = 1024  # the best deployment on more GPUs is copies of a smaller one
MAX_IN_FLIGHT = 20_000
MOST_UNREAD = 12  # columns that a note names
SHOWN_AFTER_S, SHOWN_EVERY_S = 2.0, 5.0

EPILOG = f"""\
examples:
  {RUN_PLAN} --gpus 16 --itl 5000 --otl 250 --slo-ttft-ms 2000 --slo-tpot-ms 12
      rank what fits 16 H100 for prompts of 5000 tokens and answers of 250
  {RUN_PLAN} --gpus 8 --slo-ttft-ms 2000 --slo-tpot-ms 12 --placement pack --out planned/
      write the best ones as files for {LAUNCH} --config
  {RUN_PLAN} --explain pd-pack-p1xtp2-d1xtp2 --concurrency 8,32
      print where the time of a request goes
  {RUN_PLAN} --gpus 32 --fluid --lengths mixes:5000:250,1000:1000,every=60 --slo-ttft-ms 2000 --slo-tpot-ms 12
      compare roles that follow changing lengths with every fixed split
  {RUN_PLAN} --compare bm_results/pd-pack-p1xtp2-d1xtp2
      print measured and predicted figures, with the error
  {RUN_PLAN} --predict configurations.csv --out predicted.csv
      predictions for your own list; the columns are in docs/planning.md

All figures are simulated, from step times fitted to measured runs. docs/model.md has the errors of
predictions for runs outside the fit. Check the winner with {BENCH} before you buy.
"""


def _gpus(text: str) -> int:
    try:
        return checked_whole_number(text, 1, MAX_GPUS, f"a number of GPUs from 1 to {MAX_GPUS}")
    except argparse.ArgumentTypeError as error:
        more = f" ({MAX_GPUS} take minutes to search; more are copies of what is best there)" if text.isdigit() else ""
        raise argparse.ArgumentTypeError(f"{error}{more}") from error


def _node_name(text: str) -> str:
    """A node type or a file; of TYPE-xN, as launches name a cluster, the type: the GPUs are those of --gpus."""
    from pdlab.core.catalog import node_types

    of_type = (name for name in node_types() if text.startswith(f"{name}-x") and text[len(name) + 2 :].isdigit())
    return next(of_type, text)


def _rate(text: str) -> float:
    value = above_zero(text)
    if not MIN_RATE_RPS <= value <= MAX_LOAD:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from {MIN_RATE_RPS:g} to {MAX_LOAD} requests/s")
    return value


def _engine_version(text: str) -> str:
    if patch := re.match(r"v?(\d+\.\d+)\.\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} has more than a major and a minor version; give {patch[1]}")
    if not re.fullmatch(r"\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a major and a minor version, such as 0.29")
    return text


def _formats(words: Sequence[str], flag: str) -> dict[str, str]:
    """PART=FORMAT words as a mapping. Raises UsageError."""
    from pdlab.sim.aic import FORMATS

    parts = dict(word.partition("=")[::2] for word in words)
    for part, value in parts.items():
        if part not in FORMATTED or not value:
            raise UsageError(
                f"{flag} {part}={value}: give PART=FORMAT with a part of the model; {choices(part, FORMATTED)}"
            )
        if value not in FORMATS[part]:
            raise UsageError(f"{flag} {part}={value}: no format of this part; known are {', '.join(FORMATS[part])}")
    return parts


def _in_flight(text: str) -> tuple[int, ...]:
    counts = numbers(text)
    if counts[-1] > MAX_IN_FLIGHT:
        raise argparse.ArgumentTypeError(
            f"{counts[-1]} requests in flight are too many to simulate, at most {MAX_IN_FLIGHT}"
        )
    return counts


WHAT, WORKLOAD, HOW, INSTEAD = "what to serve, on what", "workload", "how", "instead of a ranking"
SLO = "SLO: what a request must meet to count as goodput (unbounded if it is not given)"
HARDWARE_FIELDS = (
    *("hardware", "p_hardware", "d_hardware", "engine", "engine_version", "table_mode", "quant", "without_ray"),
    *("acceptance_length", "draft_tokens"),
)  # step times depend on these fields
ANSWER = "answer"  # group of the fields that replace the ranking


class PlanSettings(Settings):
    """What to simulate, under which load, and what to print and write."""

    COMMAND = "plan"
    ABOUT = "Predict throughput and latency of collocated and PD deployments, and rank them for an SLO."
    EXAMPLES = EPILOG
    EXCLUSIONS = (("blocks", "assume_merged", "{} measured what {} guesses: leave --assume-merged out"),)
    GROUPS = (WHAT, WORKLOAD, SLO, HOW, INSTEAD)

    model: str | None = setting(
        None,
        MODEL_HELP,
        WHAT,
        value="NAME|PATH",
        otherwise=f"{defaults.MODEL}; with --compare the one that was measured",
    )
    hardware: str = setting(
        defaults.HARDWARE,
        "calibrated step times: a name in configs/catalog/, or a file that pdlab calibrate wrote; or a GPU type such "
        f"as H200, with step times from tables ({INSTALL_TABLES})",
        WHAT,
        value="NAME|FILE|GPU",
    )
    p_hardware: str | None = setting(
        None,
        "GPU type of the prefill pool, if it differs from decode's; in place of --hardware",
        WHAT,
        value="GPU",
        needs="d_hardware",
        advanced=True,
    )
    d_hardware: str | None = setting(
        None,
        "GPU type of the decode pool and of collocated pools; --gpus is then the number of GPUs of each type",
        WHAT,
        value="GPU",
        needs="p_hardware",
        advanced=True,
    )
    engine: Literal["vllm", "sglang", "trtllm"] | None = setting(
        None, "with a GPU type as --hardware: the engine", WHAT, otherwise="vllm"
    )
    engine_version: Annotated[str, Text(_engine_version)] | None = setting(
        None,
        "with a GPU type as --hardware: the engine's version, such as 0.29",
        WHAT,
        value="X.Y",
        otherwise="the version of the tables",
    )
    table_mode: Literal["SILICON", "HYBRID", "EMPIRICAL", "SOL"] = setting(
        "SILICON",
        "SILICON: measured tables only; HYBRID: fill gaps from similar GPUs and formats; EMPIRICAL and SOL: calculate "
        "all step times",
        WHAT,
        advanced=True,
    )
    quant: Annotated[dict[str, str], NamedValues(_formats)] = setting(
        {},
        "number format of one part of the model: gemm, moe, kvcache or fmha, with the tables' name, such as gemm=fp8",
        WHAT,
        several="times",
        value="PART=FORMAT",
        advanced=True,
    )
    without_ray: bool = setting(
        False,
        "engines have their own HTTP server: leave out the time of Ray Serve's path",
        WHAT,
        advanced=True,
    )
    acceptance_length: Annotated[float, Ge(1)] | None = setting(
        None,
        "speculative decoding: your measured mean number of tokens per sequence and step",
        WHAT,
        value="TOKENS",
        otherwise="no speculative decoding",
        advanced=True,
    )
    draft_tokens: Positive | None = setting(
        None,
        "speculative decoding: guessed tokens per step",
        WHAT,
        value="N",
        otherwise="the smallest number that --acceptance-length allows",
        needs="acceptance_length",
        advanced=True,
    )
    node: Annotated[str, Text(_node_name)] = setting(
        "p5.48xlarge",
        "node type in configs/clusters/ (TYPE-xN too, without its number), or a cluster's YAML file (nodes of "
        "one type are of one size)",
        WHAT,
        "--node",
        "--cluster",
        value="NAME|FILE",
    )
    gpus: Annotated[int, Text(_gpus)] = setting(8, "GPUs to plan for", WHAT, value="N")
    requests: Annotated[
        dict[str, Any], FlagsOf(Workload, WORKLOAD, only=("input_tokens", "output_tokens", "lengths"))
    ] = Field(default_factory=dict)
    workload: str | None = setting(
        None,
        "YAML file with lengths, in place of --itl, --otl and --lengths; or a workload file or a trace, which also "
        "sets the load (docs/traffic.md)",
        WORKLOAD,
        value="FILE",
    )
    kv_offload_gb: Annotated[float, Gt(0), Le(100_000)] | None = setting(
        None,
        f"host memory for KV cache, in units of 1e9 bytes, of each engine that prefills ({LAUNCH} "
        "--kv-offload-gb); for a --workload whose prompts share text",
        WORKLOAD,
        value="GB",
        otherwise="none",
        needs="workload",
        advanced=True,
    )
    rate: Annotated[float, Text(_rate)] | None = setting(
        None, "plan for this request rate over all GPUs", WORKLOAD, value="RPS", one_of="load"
    )
    arrivals: Annotated[
        dict[str, Any], FlagsOf(Open, WORKLOAD, only=("burstiness",), needs="rate", advanced=("burstiness",))
    ] = Field(default_factory=dict)
    concurrency: Annotated[tuple[int, ...], Text(_in_flight, written_numbers)] | None = setting(
        None,
        "plan for these numbers of requests in flight over all GPUs",
        WORKLOAD,
        value="N[,N...]",
        otherwise="a series of numbers per GPU",
        one_of="load",
    )
    prefix_hit_rate: float = setting(
        0.0,
        "share of each prompt that is in the prefix cache, from 0 to below 1",
        WORKLOAD,
        value="SHARE",
        advanced=True,
    )
    slo: Annotated[dict[str, Any], FlagsOf(Slo, SLO, "slo-", leave_out=("itl_p99_s", "stall_s"))] = Field(
        default_factory=dict
    )
    placement: Literal["pack", "spread", "any"] = setting(
        "any", "placement of PD deployments; any: pack if the deployment fits one node, else spread", HOW
    )
    assume_merged: bool = setting(
        False, "assume scattered KV blocks transfer as fast as contiguous ones", HOW, advanced=True
    )
    blocks: Path | None = setting(
        None,
        "use the cost of KV blocks that was measured on your nodes: the --json file of test_nixl_connector_ray.py "
        "--strategy pack --compare-blocks",
        HOW,
        value="FILE",
        advanced=True,
    )
    count_gpus: Count = setting(DEFAULT_COUNT, COUNT_HELP, HOW)
    top: Positive = setting(3, "number of configurations to print commands for, and to write with --out", HOW)
    fidelity: Literal["simulator", "vllm"] = setting(
        "simulator",
        "vllm: simulate the --top configurations once more with vLLM's own scheduler in every engine; needs vLLM, and "
        "takes up to a minute each",
        HOW,
        advanced=True,
    )
    seed: Seed = setting(0, "seed of the simulation", HOW, advanced=True)
    out: Path | None = setting(
        None,
        "folder for configuration files; with --predict: a CSV; with --compare: a folder for simulated replays, for "
        f"{VIZ} --simulated",
        HOW,
        value="PATH",
    )
    plot: Path | None = setting(None, "draw the predicted curves (png, svg or pdf)", HOW, value="FILE")
    goodput_map: Path | None = setting(
        None,
        "draw goodput per GPU under Poisson arrivals over bounds on TTFT and TPOT (png, svg or pdf)",
        HOW,
        value="FILE",
        advanced=True,
    )
    measured: tuple[Path, ...] = setting(
        (),
        "with --goodput-map: measured experiments at request rates, in place of their simulation",
        HOW,
        several="words",
        value="DIR",
        advanced=True,
    )
    price_per_gpu_hour: AboveZero | None = setting(
        None,
        "with --goodput-map: price of one GPU hour in any currency; adds the cost of a million output tokens",
        HOW,
        value="PRICE",
        advanced=True,
    )
    explain: str | None = setting(
        None,
        "print where a request's time goes in one deployment, such as pd-pack-p1xtp2-d1xtp2",
        INSTEAD,
        value="LABEL",
        one_of=ANSWER,
    )
    compare: tuple[Path, ...] = setting(
        (), "compare measured experiments with predictions", INSTEAD, several="words", value="DIR", one_of=ANSWER
    )
    fluid: bool = setting(
        False,
        f"compare roles that follow the load ({LAUNCH} --pd-fluid) with every fixed P:D split",
        INSTEAD,
        one_of=ANSWER,
    )
    predict: Path | None = setting(
        None, "predict every row of a CSV (columns: docs/planning.md)", INSTEAD, value="CSV", one_of=ANSWER
    )
    prompts: Literal["fresh", "repeated"] | None = setting(
        None,
        "with --compare: whether levels repeat the prompts of earlier levels",
        INSTEAD,
        otherwise="repeated for published runs, fresh for pdlab's",
        advanced=True,
    )

    @property
    def model_name(self) -> str:
        """The model to plan for."""
        return self.model or defaults.MODEL

    def check(self) -> None:
        """Raises UsageError for flags that would have no effect."""
        load = ("requests", "workload", "rate", "arrivals", "concurrency", "prefix_hit_rate", "kv_offload_gb", "slo")
        cluster = ("gpus", "placement", "top", "fidelity")
        goodput_map = ("goodput_map", "measured", "price_per_gpu_hour")
        blocks = ("assume_merged", "blocks")
        if self.predict:
            columns = ("requests", "rate", "arrivals", "concurrency", "prompts")
            not_given(self, columns, "--predict, whose file has columns for it")
            unused = ("plot", "seed", *cluster, *load, *blocks, *goodput_map, "count_gpus")
            not_given(self, unused, "--predict, which predicts each row of a file as it is")
        elif self.compare:
            measured = "--compare, which predicts measured runs"
            not_given(self, ("node", *cluster, *load, *blocks, *goodput_map), measured)
        elif self.explain:
            not_given(self, ("plot", "out", "prompts", *cluster, *goodput_map, "count_gpus"), "--explain")
        elif self.fluid:
            ranking = ("plot", "out", "prompts", "top", "fidelity", "placement", "rate", "arrivals", "concurrency")
            not_given(self, (*ranking, *goodput_map, "count_gpus"), "--fluid")
            not_given(self, ("kv_offload_gb",), "--fluid: engines that also decode keep no KV cache in host memory")
        else:
            not_given(self, ("prompts",), "a ranking: it is for --compare")
            if self.goodput_map is None:
                not_given(self, goodput_map, "a plan without --goodput-map")
        if self.p_hardware:
            not_given(self, ("hardware", "compare", "fluid"), "--p-hardware and --d-hardware")
            if self.placement == "pack" or self.count_gpus != DEFAULT_COUNT:
                raise UsageError(
                    "--p-hardware and --d-hardware put prefill and decode on different nodes, and count GPUs used: "
                    "leave --placement pack and --count-gpus out"
                )
        if not 0 <= self.prefix_hit_rate < 1:
            raise UsageError(f"--prefix-hit-rate {self.prefix_hit_rate:g} must be from 0 to below 1")
        if self.slo.keys() == {"quantile"}:
            raise UsageError(
                "--slo-quantile is the share within --slo-ttft-ms, --slo-tpot-ms or --slo-e2el-ms: give one"
            )


def _hardware(settings: PlanSettings) -> Hardware:
    """The hardware of the flags, with its engine and speculative decoding. Raises UsageError."""
    from pdlab.core.catalog import why_no_tables
    from pdlab.core.schema import validate
    from pdlab.plan.planned_nodes import node_gpus, nodes_of
    from pdlab.sim.computed_hardware import beside, computed_gpus, hardware_of, is_gpu
    from pdlab.sim.hardware import Speculation
    from pdlab.sim.kv_transfer import on_nodes

    node = settings.node if "node" in settings.model_fields_set else None

    def named(word: str) -> Hardware:
        if why := why_no_tables(word):
            raise UsageError(f"{why}; measure runs on it, and give the file that {PDLAB} calibrate fits to them")
        return hardware_of(
            word,
            settings.model_name,
            settings.engine,
            settings.engine_version,
            quant=settings.quant,
            mode=settings.table_mode,
            bare=settings.without_ray,
            gpus_per_node=node_gpus(node, word) if node is not None else None,
        )

    if settings.p_hardware and settings.d_hardware:
        for flag, word in (("--p-hardware", settings.p_hardware), ("--d-hardware", settings.d_hardware)):
            if not is_gpu(word):
                raise UsageError(
                    f"{flag} {word}: no GPU type of configs/gpus/; {choices(word.upper(), computed_gpus())}"
                )
        hardware = beside(named(settings.p_hardware), named(settings.d_hardware))
    else:
        hardware = named(settings.hardware)
    if "node" in settings.model_fields_set and not hardware.cpu:
        hardware = on_nodes(hardware, nodes_of(settings.node))
    if settings.acceptance_length is None:
        return hardware
    draft_tokens = settings.draft_tokens or max(math.ceil(settings.acceptance_length) - 1, 1)
    given = {"acceptance_length": settings.acceptance_length, "draft_tokens": draft_tokens}
    return hardware.with_speculation(validate(Speculation, given, where="--acceptance-length"))


def _node(settings: PlanSettings, hardware: Hardware) -> str | None:
    """The node type or cluster file to plan for; None: nodes as the tables of step times, or the calibrated file,
    describe them."""
    described = hardware.steps is not None or hardware.wires is not None
    return settings.node if "node" in settings.model_fields_set or not described else None


def _network(settings: PlanSettings, hardware: Hardware, gpus: int = 1, *, spread: bool = False) -> str | None:
    """The network of --node's nodes; None: they are not given. ``gpus``, ``spread``: see `planned_nodes`. Raises
    UsageError for nodes that the hardware does not describe."""
    from pdlab.core.nodes import common_network
    from pdlab.plan.planned_nodes import nodes_of, planned_nodes, without_network
    from pdlab.sim.kv_transfer import networked

    _refuse_node_of_cpus(settings, hardware)
    if "node" not in settings.model_fields_set:
        return None
    planned_nodes(hardware, gpus, settings.node, spread=spread)
    if note := without_network(settings.node):
        print(f"note: --node {settings.node}: {note}", file=sys.stderr)
    return common_network(networked(hardware, nodes_of(settings.node)))


def _refuse_node_of_cpus(settings: PlanSettings, hardware: Hardware) -> None:
    if hardware.cpu:
        not_given(settings, ("node",), f"--hardware {settings.hardware}, which is CPUs of this machine")


@command(PlanSettings)
@waiting_collector()  # else it takes 7 % of a plan's time
def main(settings: PlanSettings) -> int:
    """Predict, compare, explain or rank."""
    from pdlab.core.catalog import require_shape
    from pdlab.sim.computed_hardware import as_served

    hardware = _hardware(settings)
    if settings.predict:
        return _predict(settings, settings.predict, hardware)
    if settings.compare:
        return _compare(settings, hardware)
    shape = as_served(require_shape(settings.model_name), hardware)
    if hardware.steps is not None or hardware.beside:  # fitted constants need no prior of stacks
        from pdlab.plan.error_catalog import with_stack_prior

        hardware = with_stack_prior(hardware, shape)
    if settings.explain:
        return _explain(settings, settings.explain, hardware, shape)
    if settings.fluid:
        return _fluid(settings, hardware, shape)
    return _rank(settings, hardware, shape)


def _slo(settings: PlanSettings) -> Slo:
    return settings.value_of("slo", Slo, where="the SLO")


def _workload(settings: PlanSettings) -> Workload:
    from pdlab.core.lengths import relative_to_folder
    from pdlab.core.schema import load_yaml

    if settings.workload:
        if settings.requests:
            raise UsageError("--workload replaces --itl, --otl and --lengths; give one or the other")
        path = Path(settings.workload)
        return load_yaml(path, Workload, lambda data: relative_to_folder(data, path.parent))
    return workload_of_flags(settings.requests)


def _trace(settings: PlanSettings) -> Trace | None:
    """The requests of --workload, if its file has their lengths and times; else None. Raises UsageError."""
    if settings.workload is None:
        return None
    from pdlab.plan.traffic import has_requests, trace_of_file

    if not has_requests(Path(settings.workload)):
        return None
    for flag in given_of(settings, ("rate", "concurrency", "requests", "arrivals")):
        raise UsageError(f"--workload {settings.workload} sets the lengths and times of its requests; leave {flag} out")
    trace = trace_of_file(Path(settings.workload))
    if trace.requests and "prefix_hit_rate" in settings.model_fields_set:
        raise UsageError(f"--workload {settings.workload} sets the shared text of prompts; leave --prefix-hit-rate out")
    return trace


def _scenario(settings: PlanSettings, hardware: Hardware, shape: ModelShape) -> Scenario:
    """The scenario of the flags. Raises UsageError."""
    from pdlab.plan.scenario import Scenario
    from pdlab.sim.kv_transfer import with_scattered_blocks

    if hardware.engine != "vllm":
        not_given(
            settings, ("assume_merged", "blocks", "fidelity"), f"a plan of {hardware.engine}: it is of vLLM alone"
        )
    trace, hit_rate = _trace(settings), settings.prefix_hit_rate
    if settings.kv_offload_gb and not (trace and trace.requests):
        raise UsageError(
            f"--kv-offload-gb {settings.kv_offload_gb:g}: no prompt of --workload {settings.workload} shares text "
            "with another, so nothing is read back from host memory; leave --kv-offload-gb out"
        )
    if settings.kv_offload_gb and settings.fidelity == "vllm":
        raise UsageError("--fidelity vllm does not simulate --kv-offload-gb: leave one of them out")
    if trace is None:
        workload = _workload(settings)
    else:
        from pdlab.plan.traffic import assumed_hit_share, mean_workload

        workload = mean_workload(trace)
        hit_rate = hit_rate or assumed_hit_share(trace, hardware, shape)
    blocks = None
    if settings.blocks is not None:
        from pdlab.plan.scattered_blocks import read

        blocks = read(
            settings.blocks,
            shape,
            workload.sent_input_tokens,
            cpu=hardware.cpu,
            hybrid=hardware.of_pd().hybrid_kv,
        )
        hardware = with_scattered_blocks(hardware, shape, blocks.extra_s_per_token)
    elif hardware.engine != "vllm":  # copies of single blocks were seen with vLLM alone
        hardware = with_scattered_blocks(hardware, shape, 0.0)
    if settings.kv_offload_gb:
        hardware = hardware.beside_connectors((OFFLOADING,))
    return Scenario(
        hardware=hardware,
        shape=shape,
        workload=workload,
        slo=_slo(settings),
        prefix_hit_rate=hit_rate,
        seed=settings.seed,
        **settings.arrivals,
        trace=trace,
        scattered=not settings.assume_merged,
        blocks=blocks,
        count=settings.count_gpus,
        kv_offload_gb=settings.kv_offload_gb,
        gaps=settings.plot is not None,
    )


def _rank(settings: PlanSettings, hardware: Hardware, shape: ModelShape) -> int:
    from dataclasses import replace

    from pdlab.core.mixes import Mixes
    from pdlab.core.nodes import common_network
    from pdlab.plan.facts import ranking_text
    from pdlab.plan.next_steps import commands
    from pdlab.plan.planned_nodes import nodes_of, not_of_the_file, planned_nodes, without_network
    from pdlab.plan.planner import plan
    from pdlab.sim.kv_transfer import networked

    if settings.plot:
        check_picture(settings.plot, "--plot")
    if settings.goodput_map:
        check_picture(settings.goodput_map, "--goodput-map")
    if settings.out:
        check_folder(settings.out, "--out")
    if hardware.engine != "vllm":
        not_given(settings, ("out",), f"a plan of {hardware.engine}: it writes files for {LAUNCH}, which launches vLLM")
    _refuse_node_of_cpus(settings, hardware)
    scenario = _scenario(settings, hardware, shape)
    if settings.goodput_map and scenario.trace is not None:
        raise UsageError(
            f"--goodput-map has Poisson arrivals at growing rates, but --workload {settings.workload} sets the "
            "times of requests; give only lengths"
        )
    if isinstance(scenario.workload.lengths, Mixes):
        raise UsageError(
            f"--lengths {scenario.workload.lengths.flag_value}: a ranking looks at closed loops, in which a mix cannot "
            "move with time; add --fluid, or rank for each mix by itself"
        )
    if settings.fidelity == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UsageError("--fidelity vllm runs vLLM's own code, which is not installed here; leave it out")
    measured = _measured_sweeps(settings, scenario.workload)
    node = _node(settings, hardware)
    view = planned_nodes(hardware, settings.gpus, node, spread=settings.placement == "spread")
    if node is not None:
        network = None if hardware.cpu else common_network(networked(hardware, nodes_of(node)))
        scenario = replace(scenario, network=network)
        for note in filter(None, (without_network(node), *not_of_the_file(node, view))):
            print(f"note: --node {node}: {note}", file=sys.stderr)
    progress = _PlanProgress()
    ranked_plan = plan(
        scenario,
        settings.model_name,
        view,
        settings.gpus,
        placement=None if settings.placement == "any" else settings.placement,
        concurrencies=settings.concurrency,
        rate_rps=scenario.trace.rate_rps if scenario.trace else settings.rate,
        on_progress=progress,
    )
    progress.end()
    print(ranking_text(ranked_plan, scenario, view))
    best = [candidate for candidate in ranked_plan.candidates if candidate.best][: settings.top]
    print()
    if settings.fidelity == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from pdlab.plan.second_fidelity import comparison_with_vllm

        print(comparison_with_vllm(scenario, best) + "\n")
    print(
        commands(
            best,
            scenario,
            node,
            settings.out,
            ranked_plan.best_candidate(collocated=True),
            to_words(settings, only=("model", *HARDWARE_FIELDS)),
            {"count": settings.count_gpus} if settings.count_gpus != DEFAULT_COUNT else None,
        )
    )
    if settings.plot:
        from pdlab.plan.pictures import candidate_curve, drawn_candidates

        curves = [candidate_curve(each, scenario) for each in drawn_candidates(ranked_plan, scenario, settings.top)]
        _plot(settings.plot, curves, [], hardware, settings.count_gpus, selected=True)
        print(f"Plot (simulated): {settings.plot}")
    if settings.goodput_map:
        _draw_map(settings, settings.goodput_map, scenario, ranked_plan, measured)
    return 0


def _measured_sweeps(settings: PlanSettings, workload: Workload) -> list[RateSweep]:
    """The experiments of --measured. Raises UsageError if one is of another workload, or has no request rates."""
    if not settings.measured:
        return []
    from dataclasses import replace

    from pdlab.analysis import goodput_map, loading
    from pdlab.analysis.curves import gpus_of
    from pdlab.report.whole_nodes import counted_gpus
    from pdlab.results.store import experiment_folders

    sweeps = []
    for loaded in loading.load(experiment_folders(settings.measured), {}, every_request=True):
        manifest = loaded.experiment.manifest
        if manifest.workload is not None and manifest.workload.label != workload.label:
            raise UsageError(
                f"--measured {loaded.folder}: is of {manifest.workload.label} tokens, the plan of {workload.label}; "
                "give --itl, --otl and --lengths as measured"
            )
        sweep = goodput_map.measured(loaded)
        if sweep is None:
            raise UsageError(
                f"--measured {loaded.folder}: no valid level at a request rate whose requests were kept; measure some "
                f"with {BENCH} -t request-rate"
            )
        gpus = counted_gpus(gpus_of(loaded.experiment), manifest.deployment)
        sweeps.append(replace(sweep, gpus=gpus.counted(settings.count_gpus)))
    return sweeps


def _draw_map(
    settings: PlanSettings, path: Path, scenario: Scenario, ranked_plan: Plan, measured: Sequence[RateSweep]
) -> None:
    from pdlab.plan.pictures import map_over_bounds, map_title, simulated_sweeps
    from pdlab.report import goodput_map as picture
    from pdlab.report import paper

    simulated = simulated_sweeps(ranked_plan, scenario, {sweep.label for sweep in measured})
    price = settings.price_per_gpu_hour
    goodputs = map_over_bounds([*measured, *simulated], scenario.slo)
    collocated = ranked_plan.best_candidate(collocated=True)
    always = {collocated.deployment.label} if collocated is not None else set()
    title = map_title(scenario, price)
    paper.draw(picture.figure(goodputs, title=title, price_per_gpu_hour=price, always=always), path)
    print(f"Goodput map ({'measured and simulated' if measured else 'simulated'}): {path}")


class _PlanProgress:
    """A status line on standard error with the deployment that is simulated, if a plan takes long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._line = StatusLine(every_s=SHOWN_EVERY_S, after_s=SHOWN_AFTER_S)

    def __call__(self, done: int, of: int, label: str) -> None:
        self._line.show(f"simulating {label} ({done + 1} of {of}, {time.monotonic() - self._began:.0f} s)")

    def end(self) -> None:
        self._line.clear()


def _fluid(settings: PlanSettings, hardware: Hardware, shape: ModelShape) -> int:
    from dataclasses import replace

    from pdlab.plan.facts import fluid_text
    from pdlab.plan.fluid_pools import fluid_plan

    network = _network(settings, hardware, settings.gpus)
    scenario, progress = replace(_scenario(settings, hardware, shape), network=network), _PlanProgress()
    made = fluid_plan(scenario, settings.model_name, settings.gpus, progress)
    progress.end()
    print(fluid_text(made, scenario, settings.workload))
    return 0


def _explain(settings: PlanSettings, label: str, hardware: Hardware, shape: ModelShape) -> int:
    from dataclasses import replace

    from pdlab.core.deployment import Deployment, parse_label
    from pdlab.core.vllm_limits import check_divisibility, with_redundant_experts
    from pdlab.plan.candidates import on_two_types
    from pdlab.plan.facts import explanation_text
    from pdlab.plan.planner import evaluate, ladder, sized_deployment
    from pdlab.sim.argument_effects import with_added

    deployment = Deployment(model=settings.model_name, topology=parse_label(label))
    if deployment.gpus > MAX_GPUS:
        raise UsageError(
            f"--explain {label}: has {counted(deployment.gpus, 'GPU')}, at most {MAX_GPUS} can be simulated"
        )
    if hardware.beside:
        on_types = on_two_types(deployment, hardware)
        if on_types is None:
            raise UsageError(f"--explain {label}: two GPU types are for pd-spread; leave --p-hardware out")
        deployment = on_types
    deployment = with_redundant_experts(deployment, shape)
    check_divisibility(deployment, shape, by_flags=False)
    of_type = max(pool.gpus for pool in deployment.pools.values()) if hardware.beside else deployment.gpus
    network = _network(settings, hardware, of_type, spread=deployment.mode == "pd-spread")
    scenario = replace(_scenario(settings, hardware, shape), network=network)
    deployment = with_added(scenario.with_offload(deployment), hardware, shape)
    sized = sized_deployment(scenario, deployment)
    rate_rps = scenario.trace.rate_rps if scenario.trace else settings.rate
    loads = settings.concurrency
    if rate_rps is None and not loads:  # the search has short levels
        loads = tuple(int(outcome.load.value) for outcome in ladder(scenario, sized))
    candidate = evaluate(scenario, sized, None, concurrencies=loads, rate_rps=rate_rps)
    print(explanation_text(candidate, scenario))
    return 0


def _compare(settings: PlanSettings, hardware: Hardware) -> int:
    from pdlab.deploy.serve_config import cpu_engine_kwargs
    from pdlab.plan.calibration import assumed_prompts
    from pdlab.plan.comparison import compared_experiment, comparison_text
    from pdlab.plan.pictures import PredictedCurve, simulated_as_measured
    from pdlab.plan.replay_accuracy import write_simulated
    from pdlab.results.store import experiment_folders

    if settings.plot:
        check_picture(settings.plot, "--plot")
    if settings.out:
        check_folder(settings.out, "--out")
    experiments = []
    written: dict[str, Path] = {}
    for folder in distinct(experiment_folders(settings.compare), "--compare"):
        each = compared_experiment(folder, hardware, settings.model, settings.prompts, cpu_engine_kwargs())
        for note in each.notes:
            print(f"note: {note}", file=sys.stderr)
        if settings.out and each.sweep.trace is not None:
            name = each.experiment.name
            if name in written:
                raise UsageError(f"--out {settings.out}: two experiments are called {name}; rename one")
            written[name] = write_simulated(settings.out, each.experiment, each.replays)
        experiments.append(each)
    if prompts := assumed_prompts([each.sweep for each in experiments]):
        print(f"note: {prompts}", file=sys.stderr)
    print(comparison_text(experiments, hardware))
    if settings.out and not written:
        raise UsageError(f"--out {settings.out}: none of these experiments is a replay; leave --out out")
    for folder in written.values():
        print(f"Simulated replay: {folder}")
    if settings.plot:
        curves = []
        for each in experiments:
            steady = any(run.steady is not None for run in each.experiment.runs)
            predicted = simulated_as_measured(each.sweep, each.hardware, each.shape, settings.seed, steady=steady)
            curves.append(PredictedCurve(predicted, each.outside))
        _plot(settings.plot, curves, [each.experiment for each in experiments], hardware, settings.count_gpus)
        print(f"Plot (measured and simulated): {settings.plot}")
    return 0


def _predict(settings: PlanSettings, file: Path, hardware: Hardware) -> int:
    from pdlab.plan import csv_predictions, csv_rows

    if settings.out is not None:
        check_writable(settings.out, "--out")
        if settings.out.exists() and file.exists() and settings.out.samefile(file):
            raise UsageError(
                f"--out {settings.out} is the CSV that --predict reads, which would be lost: choose another"
            )
    network = _network(settings, hardware)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--predict {no_file(error)}; give a CSV") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--predict {file}: cannot be read as a text file; give a CSV") from error
    table = csv_rows.read(text, str(file), settings.model_name)
    try:
        predictions = csv_predictions.predict(table.requested, hardware, network=network)
    except UsageError as error:
        raise UsageError(f"{file}, {error}") from error
    if table.unread:
        more = f" and {len(table.unread) - MOST_UNREAD} more" if len(table.unread) > MOST_UNREAD else ""
        columns = f"{', '.join(table.unread[:MOST_UNREAD])}{more}"
        print(f"note: {file}: predictions do not depend on these columns: {columns}", file=sys.stderr)
    if table.assumed:
        lengths = f"{Workload().input_tokens} input and {Workload().output_tokens} output tokens"
        print(
            f"note: {file}: rows without {' or '.join(table.assumed)} are predicted with the defaults, {lengths}",
            file=sys.stderr,
        )
    for line in csv_predictions.refused(table.requested, predictions):
        print(f"{file}, {line}", file=sys.stderr)
    out = csv_predictions.render(table.header, table.rows, predictions)
    if settings.out is None:
        print(out, end="")
        return 0
    write_output(settings.out, out, "--out")
    print(f"wrote {settings.out}: {counted(len(table.rows), 'row')}", file=sys.stderr)
    return 0


def _plot(
    path: Path,
    predicted: Sequence[PredictedCurve],
    measured: Sequence[Experiment],
    hardware: Hardware,
    count: Count,
    *,
    selected: bool = False,
) -> None:
    """Draw measured and predicted curves in one picture, predicted ones with bands. ``selected``: see `curve_figure`.
    Raises StoreError."""
    from pdlab.analysis.curves import curves
    from pdlab.analysis.view import View
    from pdlab.plan.pictures import PREDICTED, curve_notes
    from pdlab.plan.prediction_intervals import factors_90
    from pdlab.report.curve_figure import Band, curve_figure
    from pdlab.report.plots import draw
    from pdlab.report.whole_nodes import counted

    bands = {}
    if hardware.error is not None:
        band = Band(*(factor - 1 for factor in factors_90(hardware.error)))
        bands = {curve.experiment.name: band for curve in predicted if not curve.outside}
    # Measured and predicted curves have the same labels: a word tells them apart.
    drawn = [
        curve if curve.rehearsed else curve.model_copy(update={"label": f"{curve.label}, {word}"})
        for word, group in (("measured", measured), (PREDICTED, [curve.experiment for curve in predicted]))
        for curve in map(counted, curves(group))
    ]
    notes = curve_notes(predicted, hardware)
    view = View(count=count, gpus_per_node=hardware.common_node_gpus or 1)
    draw(curve_figure(drawn, view, bands=bands, notes=notes, selected=selected), path)
