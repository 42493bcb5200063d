"""The CSV that `plan.py --predict` reads: configurations and loads, one per row -> `RequestedRow`. Pure.

Columns and their meaning: docs/planning.md. People write such tables in many ways, so other names of a column,
empty cells, comments and other delimiters are accepted; a row whose TP degree or number of replicas would have to
be guessed is refused with its line.

A table of somebody's measurements has rows that are not simulated here: of other engines, with speculative decoding,
with context parallel. Such a row becomes a `RefusedRow` with the reason, and the others are read.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdlab.core import defaults
from pdlab.core.deployment import (
    Collocated,
    Deployment,
    Disaggregated,
    Fluid,
    PlacementKind,
    Pool,
    Topology,
    parse_label,
)
from pdlab.core.errors import UsageError
from pdlab.core.schema import validate
from pdlab.core.workload import Closed, Load, Open, Workload
from pdlab.results.published_names import PUBLISHED_NODE_GPUS, parse_name
from pdlab.sim.kv_transfer import LinkKind
from pdlab.sim.simulator import Prompts

PUBLISHED_PROMPTS = 5  # per unit of concurrency
MOST_REQUESTS = 2_000_000  # of one level: about a minute of simulation

# Arguments of vLLM's engines that change a prediction. They are simulated with vLLM's defaults.
ENGINE_SETTINGS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "gpu_memory_utilization",
    "block_size",
    "enforce_eager",
    "kv_offloading_size",
    "cpu_offload_gb",
    "attention_backend",
    "moe_backend",
    "stream_interval",
)
# Our name -> other names under which people write the column.
ALIASES: dict[str, tuple[str, ...]] = {
    "config": ("label", "configuration", "experiment", "name", "exp"),
    "mode": ("topology", "kind", "deployment_mode", "serving_mode"),
    "placement": ("strategy", "placement_strategy"),
    "num": ("replicas", "n", "c_num", "collocated_replicas", "num_replicas", "c_replicas", "collocated_num"),
    "tp": ("c_tp", "collocated_tp", "tensor_parallel", "tp_size", "tensor_parallel_size"),
    "dp": ("c_dp", "collocated_dp"),
    "pp": ("c_pp", "collocated_pp"),
    "ep": ("c_ep", "collocated_ep", "expert_parallel", "enable_expert_parallel", "moe_ep", "ep_size"),
    **{
        f"{p}_{field}": tuple(
            pattern.format(p=p, role=role)
            for pattern in ("{role}_" + field, field + "_{p}", field + "_{role}", "{p}" + field, *more_patterns)
        )
        for p, role in (("p", "prefill"), ("d", "decode"))
        for field, more_patterns in {
            "num": (
                "{p}_replicas",
                "{role}_replicas",
                "{role}_num_replicas",
                "num_{role}_replicas",
                "replicas_{p}",
                "n_{p}",
                "n{p}",
                "{p}",
                "{p}_workers",
                "{role}_workers",
                "{role}_num_workers",
                "num_{role}_workers",
            ),
            "tp": ("{p}_tp_size", "{role}_tensor_parallel", "{p}_tensor_parallel"),
            "dp": (),
            "pp": (),
            "ep": ("{role}_expert_parallel", "{p}_expert_parallel", "{p}_moe_ep", "{role}_moe_ep"),
            "gpus": ("{role}_gpu", "num_{role}_gpus", "num_{role}_gpu", "{role}_num_gpus", "{p}_num_gpus"),
            "dp_attention": ("{role}_attention_dp", "{p}_attention_dp"),
        }.items()
    },
    "itl": ("isl", "input_tokens", "input_len", "input_length"),
    "otl": ("osl", "output_tokens", "output_len", "output_length"),
    "concurrency": ("max_concurrency", "conc"),
    "request_rate": ("rate", "rate_rps", "rps"),
    "num_prompts": ("prompts_per_level", "num_requests", "requests"),
    "prompts": (
        "reused_prompts",
        "reused_prompt_policy",
        "reused_prompts_policy",
        "reuse_policy",
        "reuse_prompts",
        "prompt_policy",
        "prompt_reuse",
        "reuse",
    ),
    "link": ("transport", "wire", "kv_link"),
    "model": ("model_name", "model_id"),
    "lengths": ("length_distribution",),
    "burstiness": (),
    "disaggregated": ("disagg", "is_disaggregated"),
    "gpus": ("num_gpus", "total_gpus", "gpus_total", "gpu_count", "n_gpus"),
    "hardware": ("gpu", "gpu_type", "gpu_name", "accelerator"),
    "framework": ("engine", "inference_engine", "serving_engine"),
    "framework_version": ("engine_version", "vllm_version"),
    "precision": ("quantization", "quant", "weight_dtype"),
    "kv_precision": ("kv_dtype", "kv_cache_dtype", "kv_quantization"),
    "spec_decoding": ("speculative_decoding", "speculative", "spec", "spec_method", "mtp"),
    "dp_attention": ("attention_dp", "enable_dp_attention", "dpa"),
    "context_parallel": ("cp", "dcp", "pcp", "decode_context_parallel", "prefill_context_parallel"),
    "range_ratio": ("random_range_ratio",),
    "prefix_hit_rate": ("prefix_cache_hit_rate", "cache_hit_rate", "prefix_cache_hits"),
    **{name: () for name in ENGINE_SETTINGS},
}
# A row may have several columns of these, which need not say the same.
SEVERAL = {"config", "mode", "num_prompts", "placement", "model"}
# Columns of features that are simulated only when they are off.
OFF_ALONE = {
    "spec_decoding": "speculative decoding is not simulated",
    "context_parallel": "context parallel is not simulated",
    "range_ratio": "what a ratio means differs between clients; give lengths, such as uniform:0.8-1.0",
    "prefix_hit_rate": "of cached prompts only those that levels repeat are simulated here: give prompts; or rank with "
    "--prefix-hit-rate",
}
ATTENTION_RANKS = ("dp_attention", "p_dp_attention", "d_dp_attention")  # how many, each of tp GPUs; 1 is none
COUNTS = {f"{prefix}{field}" for prefix in ("", "p_", "d_") for field in ("num", "tp", "dp", "pp")}
EMPTY = {"", "-", "nan", "none", "null", "na", "n/a"}
MODES = {
    "collocated": ("collocated", "colocated", "co-located", "collocate", "aggregated", "agg"),
    "pd": ("pd", "p-d", "disaggregated", "disagg", "pd-disaggregated", "prefill-decode"),
    "pd-pack": ("pd-pack", "pack"),
    "pd-spread": ("pd-spread", "spread"),
}
# A number is a size: 1 is none.
YES, NO = {"true", "yes", "ep", "on"}, {"0", "0.0", "1", "1.0", "false", "no", "off"}
SHARES = {"prefix_hit_rate"}  # of these 1 is all
REPEATED = {
    *("repeated", "repeat", "reused", "reuse", "shared", "same", "same-seed", "as-measured", "published"),
    *("yes", "true", "1", "1.0"),
}
FRESH = {"fresh", "distinct", "unique", "new", "none", "no", "false", "0", "0.0"}
LINKS: dict[str, LinkKind | None] = {
    "": None,
    "auto": None,
    "ucx": None,
    "nvlink": "nvlink",
    "cuda-ipc": "nvlink",
    "srd": "srd",
    "efa": "srd",
    "efa/srd": "srd",
    "efa-srd": "srd",
    "tcp": "tcp",
}


# Precisions that people write for weights of these dtypes; a dtype says its own name too.
PRECISIONS = {
    "mxfp4": {"fp4", "w4a16", "w4a8"},
    "nvfp4": {"fp4"},
    "fp4": {"nvfp4", "mxfp4"},
    "int4": {"w4a16", "awq", "gptq"},
    "awq": {"int4", "w4a16"},
    "gptq": {"int4", "w4a16"},
    "fp8": {"fp8_e4m3", "e4m3", "w8a8"},
    "bfloat16": {"bf16"},
    "float16": {"fp16"},
    "float32": {"fp32"},
}


def is_precision(word: str, dtype: str) -> bool:
    """Whether people write that word for weights of the dtype."""
    return word.lower() in {dtype, *PRECISIONS.get(dtype, ())}


class StatedStack(NamedTuple):
    """What a row says of the hardware and the engine that it is of, as it is written; empty: nothing."""

    hardware: str = ""
    framework: str = ""
    version: str = ""
    precision: str = ""
    kv_precision: str = ""


class RefusedRow(NamedTuple):
    """A row that is not predicted, and why. ``line`` is its line number in the file."""

    line: int
    reason: str


class _NotPredicted(Exception):
    """The row says something that is not simulated; the message says what."""


class RequestedRow(NamedTuple):
    """One parsed row. ``line`` is its line number in the file."""

    line: int
    deployment: Deployment
    workload: Workload
    load: Load
    num_requests: int
    prompts: Prompts
    link: LinkKind | None
    stated: StatedStack = StatedStack()

    @property
    def sweep(self) -> tuple[str, ...]:
        """Key of the sweep: equal for rows that differ only in the load."""
        text = self.deployment.model_dump_json()
        return (text, self.workload.model_dump_json(), self.prompts, str(self.link), self.load.kind, *self.stated)


class CsvFile(NamedTuple):
    """A file of requests: its column names, its rows as they are written, what each asks for, and the columns with a
    cell that no prediction looks at."""

    header: list[str]
    rows: list[dict[str, str]]
    requested: list[RequestedRow | RefusedRow]
    unread: list[str]


def read(text: str, source: str, model: str = defaults.MODEL, *, refuse_rows: bool = False) -> CsvFile:
    """Raises UsageError naming the line and the column. ``refuse_rows``: a row with a wrong cell is refused alone, for
    tables that nobody can correct."""
    numbered = _lines(text.lstrip("\ufeff"), source)
    if not numbered:
        raise UsageError(f"{source}: empty; the first line names the columns (docs/planning.md)")
    header = [name.strip() for name in numbered[0][1]]
    column_of = _column_names(header, source)
    rows: list[dict[str, str]] = []
    requested: list[RequestedRow | RefusedRow] = []
    for line, cells in numbered[1:]:
        where = f"{source}, line {line}"
        if any(cell.strip() for cell in cells[len(header) :]):
            raise UsageError(f"{where}: {len(cells)} cells for {len(header)} columns; quote a cell that has a comma")
        row = dict(zip(header, [*cells, *[""] * len(header)], strict=False))
        rows.append(row)
        try:
            requested.append(_parsed_row(line, {"model": model} | _cells(row, column_of), where))
        except _NotPredicted as error:
            requested.append(RefusedRow(line, str(error)))
        except UsageError as error:
            if not refuse_rows:
                raise
            requested.append(RefusedRow(line, str(error).removeprefix(f"{where}: ")))
    if not rows:
        raise UsageError(f"{source}: has a header and no rows")
    looked_at = {name for names in column_of.values() for name in names}
    unread = [name for name in header if name and name not in looked_at and any(row[name].strip() for row in rows)]
    return CsvFile(header, rows, requested, unread)


def _lines(text: str, source: str) -> list[tuple[int, list[str]]]:
    """(line number, cells) of every line that is neither empty nor a comment."""
    head = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    reader = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
    try:
        numbered = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise UsageError(f"{source}, line {reader.line_num}: not a CSV ({error})") from error
    return [
        (n, cells) for n, cells in numbered if any(c.strip() for c in cells) and not cells[0].lstrip().startswith("#")
    ]


def _column_names(header: Sequence[str], source: str) -> dict[str, list[str]]:
    """Our column name -> the file's, that of our own name first."""
    plain: dict[str, str] = {}
    for name in header:
        key = name.strip().lower().replace("-", "_").replace(" ", "_")
        if key and key in plain:
            raise UsageError(f"{source}: column {name!r} occurs twice; keep one")
        plain[key] = name
    column_of = {}
    for name, aliases in ALIASES.items():
        columns = [plain[candidate] for candidate in (name, *aliases) if candidate in plain]
        if columns:
            column_of[name] = columns
    if not {"mode", "config", "tp", "p_tp"} & set(column_of):
        raise UsageError(
            f"{source}: no column has the configuration; give mode with num and tp or p_num, p_tp, d_num, d_tp, "
            f"or config with labels such as pd-pack-p1xtp2-d1xtp4 (its columns: {', '.join(header)})"
        )
    if "concurrency" not in column_of and "request_rate" not in column_of:
        raise UsageError(f"{source}: no column concurrency or request_rate (its columns: {', '.join(header)})")
    return column_of


def _cells(row: Mapping[str, str], column_of: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Our name -> cell, empty cells left out. Raises _NotPredicted where two columns of one meaning differ."""
    cells = {}
    for name, columns in column_of.items():
        blank = {""} if name == "prompts" else EMPTY
        said = {column: cell for column in columns if (cell := row[column].strip()).lower() not in blank}
        first = columns[0] if name in SEVERAL else next(iter(said), None)
        if first not in said:
            continue
        cells[name] = said[first]
        for column, cell in said.items():
            if name not in SEVERAL and not _alike(cell, said[first]):
                raise _NotPredicted(f"{first} {said[first]!r} and {column} {cell!r} have one meaning and differ")
    return cells


def _alike(one: str, other: str) -> bool:
    """Whether two cells say the same: as text, as a number, or both that something is off."""
    one, other = one.lower(), other.lower()
    if one == other or (one in NO and other in NO):
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def _parsed_row(line: int, cells: Mapping[str, str], where: str) -> RequestedRow:
    _refuse_other_ways(cells)
    cells = _with_attention_ranks(cells)
    topology = _topology(cells, where)
    _check_gpus(cells, topology)
    workload = _workload(cells, where)
    load: Load
    if "concurrency" in cells:
        load = Closed(concurrency=_integer(cells, "concurrency", where, 1))
        requests = _integer(cells, "num_prompts", where, PUBLISHED_PROMPTS * load.concurrency)
    elif "request_rate" in cells:
        rate = _positive_number(cells, "request_rate", where)
        load = Open(
            rate_rps=rate,
            burstiness=_positive_number(cells, "burstiness", where) if "burstiness" in cells else 1.0,
        )
        requests = _integer(cells, "num_prompts", where, max(round(64 * rate), 64))
    else:
        raise UsageError(f"{where}: concurrency and request_rate are both empty; give one of them")
    if requests > MOST_REQUESTS:
        raise UsageError(f"{where}: num_prompts {requests} is too many to simulate; use at most {MOST_REQUESTS}")
    policy = _word(cells, "prompts", "repeated")
    if policy not in {*REPEATED, *FRESH, "nan"}:
        raise UsageError(f"{where}: prompts {cells['prompts']!r} is not known; use repeated or fresh")
    wire = _word(cells, "link")
    if wire not in LINKS:
        raise UsageError(f"{where}: link {cells['link']!r} is not known; use nvlink, srd, tcp, or leave it empty")
    return RequestedRow(
        line=line,
        deployment=Deployment(model=cells["model"], topology=topology),
        workload=workload,
        load=load,
        num_requests=requests,
        prompts="fresh" if policy in FRESH else "repeated",
        link=LINKS[wire],
        stated=StatedStack(
            cells.get("hardware", ""),
            cells.get("framework", ""),
            cells.get("framework_version", ""),
            cells.get("precision", ""),
            cells.get("kv_precision", ""),
        ),
    )


def _workload(cells: Mapping[str, str], where: str) -> Workload:
    lengths = cells.get("lengths", "")
    data: dict[str, object] = {"lengths": lengths} if lengths else {}
    if not lengths.startswith(("file:", "mixes:")):
        data["input_tokens"] = _integer(cells, "itl", where, 5000)
        data["output_tokens"] = _integer(cells, "otl", where, 250)
    return validate(Workload, data, where=where)


def _refuse_other_ways(cells: Mapping[str, str]) -> None:
    """Raises _NotPredicted for a cell that says something else than what is simulated."""
    for name, why in OFF_ALONE.items():
        off = NO - {"1", "1.0"} if name in SHARES else NO
        if (cell := cells.get(name, "")) and cell.lower() not in off:
            raise _NotPredicted(f"{name} {cell!r}: {why}")
    for name in ENGINE_SETTINGS:
        if cell := cells.get(name, ""):
            raise _NotPredicted(f"{name} {cell!r}: engines are simulated with vLLM's own value; leave the cell empty")


def _check_gpus(cells: Mapping[str, str], topology: Collocated | Disaggregated) -> None:
    """Raises _NotPredicted where a row counts other GPUs than its configuration has."""
    counts = {"gpus": sum(pool.gpus for pool in _pools(topology))}
    if isinstance(topology, Disaggregated):
        counts |= {"p_gpus": topology.prefill.gpus, "d_gpus": topology.decode.gpus}
    for name in ("gpus", "p_gpus", "d_gpus"):
        cell = _count(cells, name)
        if not cell:
            continue
        if name not in counts:
            raise _NotPredicted(f"{name} {cell!r}: the row has prefill and decode pools, but is marked as collocated")
        try:
            same = float(cell) == counts[name]
        except ValueError:
            same = False
        if not same:
            raise _NotPredicted(f"{name} {cell!r}: its configuration has {counts[name]} GPUs")


def _pools(topology: Collocated | Disaggregated) -> tuple[Pool, ...]:
    return (topology.pool,) if isinstance(topology, Collocated) else (topology.prefill, topology.decode)


def _word(cells: Mapping[str, str], name: str, default: str = "") -> str:
    return cells.get(name, default).lower().replace("_", "-").replace(" ", "-")


def _topology(cells: Mapping[str, str], where: str) -> Collocated | Disaggregated:
    config_name = cells.get("config", "")
    cells = _with_roles(cells)
    sized = any(_count(cells, name) for name in COUNTS)
    mode = _mode(cells, where)
    labelled = cells.get("mode", "") if _looks_like_label(cells.get("mode", "")) else ""
    labelled_topology = None if sized else _from_label(config_name or labelled, where)
    if isinstance(labelled_topology, Collocated):
        if mode not in ("", "collocated"):
            raise UsageError(f"{where}: mode {mode} contradicts the configuration {config_name!r}, which is collocated")
        return labelled_topology
    if not mode:
        split = labelled_topology is not None or any(
            _count(cells, f"{p}_{field}") for p in "pd" for field in ("num", "tp")
        )
        mode = "pd" if split else "collocated"
    if mode == "collocated":
        if labelled_topology is not None:
            raise UsageError(f"{where}: mode collocated contradicts the configuration {config_name!r}, which is PD")
        pool = _shared_pool(cells, where)
        _check_agreement(config_name, (pool,), where)
        return Collocated(pool=pool)
    pools = (
        (labelled_topology.prefill, labelled_topology.decode)
        if labelled_topology
        else (_pool(cells, "p_", where), _pool(cells, "d_", where))
    )
    _check_agreement(config_name, pools, where)
    placement = _placement(cells, mode, config_name, sum(pool.gpus for pool in pools), where, labelled_topology)
    return Disaggregated(prefill=pools[0], decode=pools[1], placement=placement)


def _with_attention_ranks(cells: Mapping[str, str]) -> Mapping[str, str]:
    """The cells with the number of attention's data parallel ranks as ``dp``: each has ``tp`` GPUs, as the GPUs of the
    row prove. Raises _NotPredicted where nothing proves it, for others count all GPUs of an engine as its ``tp``."""
    ranks = {}
    for name in ATTENTION_RANKS:
        cell = cells.get(name, "")
        if not cell or cell.lower() in NO:
            continue
        field = name.removesuffix("_attention")
        if not re.fullmatch(r"\d+(\.0*)?", cell) or not any(_count(cells, f"{p}gpus") for p in ("", field[:-2])):
            raise _NotPredicted(
                f"{name} {cell!r}: attention over data parallel ranks is read as a number, each of tp GPUs, in a row "
                f"that counts its gpus; or give {field}"
            )
        if (given := _count(cells, field)) and not _alike(given, cell):
            raise _NotPredicted(f"{name} {cell!r} and {field} {given!r}: both count data parallel ranks")
        ranks[field] = cell
    return {**cells, **ranks}


def _with_roles(cells: Mapping[str, str]) -> Mapping[str, str]:
    """The cells with the mode that a column ``disaggregated`` says, and replicas from the GPUs of each role.

    Raises _NotPredicted where TP of prefill and decode are not both given: a single TP is that of one of them.
    """
    stated = cells.get("disaggregated", "").lower()
    if stated and stated not in YES | NO | {"1", "1.0"}:
        raise _NotPredicted(f"disaggregated {cells['disaggregated']!r} is neither true nor false")
    split = stated in YES | {"1", "1.0"}
    mode = _word(cells, "mode")
    if not split:
        if stated and (mode in MODES["pd"] or mode in MODES["pd-pack"] or mode in MODES["pd-spread"]):
            raise _NotPredicted(f"mode {cells['mode']!r} contradicts disaggregated {cells['disaggregated']!r}")
        return {**cells, "mode": "collocated"} if stated and not mode and not cells.get("config") else cells
    if mode in MODES["collocated"]:
        raise _NotPredicted(f"mode {cells['mode']!r} contradicts disaggregated {cells['disaggregated']!r}")
    filled = {**cells, "mode": cells.get("mode") or "pd"}
    if cells.get("config"):
        return filled
    for role in ("p", "d"):
        if not _count(cells, f"{role}_tp"):
            raise _NotPredicted(
                "disaggregated, but prefill and decode are not both described: give p_tp and d_tp with p_num and d_num "
                "(or the GPUs of each); one TP degree may be that of either"
            )
        if not _count(cells, f"{role}_num") and (gpus := _count(cells, f"{role}_gpus")):
            filled[f"{role}_num"] = _replicas(cells, role, gpus)
        if not filled.get(f"{role}_num"):
            raise _NotPredicted(f"disaggregated, but neither {role}_num nor {role}_gpus is given")
    return filled


def _replicas(cells: Mapping[str, str], role: str, gpus: str) -> str:
    """How many engines hold those GPUs. Raises _NotPredicted where it is no whole number."""
    try:
        each = math.prod(float(_count(cells, f"{role}_{field}") or 1) for field in ("tp", "pp", "dp"))
        replicas = float(gpus) / each
    except (ValueError, ZeroDivisionError):
        replicas = math.nan
    if not (replicas >= 1 and replicas == int(replicas)):
        raise _NotPredicted(f"{role}_gpus {gpus!r} is no multiple of the GPUs of one engine")
    return str(int(replicas))


def _check_agreement(config_name: str, pools: tuple[Pool, ...], where: str) -> None:
    """Raises UsageError if the name is a configuration and the columns give another one."""
    try:
        labelled_topology = _from_label(config_name, where)
    except UsageError:
        return  # a name like any other
    labelled_pools = (
        (labelled_topology.pool,)
        if isinstance(labelled_topology, Collocated)
        else (labelled_topology.prefill, labelled_topology.decode)
    )
    sizes = [[(p.replicas, p.tp, p.pp, p.dp) for p in side_pools] for side_pools in (labelled_pools, pools)]
    if sizes[0] != sizes[1]:
        column_label = "-".join(pool.label for pool in pools)
        raise UsageError(
            f"{where}: the configuration {config_name!r} contradicts the columns, which give {column_label}"
        )


def _mode(cells: Mapping[str, str], where: str) -> str:
    """One of MODES, or empty if the row does not state it."""
    word = _word(cells, "mode")
    mode = next((mode for mode, words in MODES.items() if word in words), None)
    if mode is None and word and _looks_like_label(cells["mode"]):
        return ""
    if mode is None and word:
        raise UsageError(f"{where}: mode {cells['mode']!r} is not known; use collocated, pd-pack or pd-spread")
    return mode or ""


def _looks_like_label(text: str) -> bool:
    try:
        parse_label(text)
    except UsageError:
        return False
    return True


def _placement(
    cells: Mapping[str, str],
    mode: str,
    config_name: str,
    gpus: int,
    where: str,
    labelled_topology: Disaggregated | None,
) -> PlacementKind:
    """Placement by the mode, the column placement, the configuration's name or the link, in this order, or by size."""
    word = _word(cells, "placement").removeprefix("pd-")
    if word not in ("", "any", "pack", "spread", "collocated"):
        raise UsageError(f"{where}: placement {cells['placement']!r} is not known; use pack or spread")
    placements = [kind for kind in ("pack", "spread") if kind in (mode.removeprefix("pd-"), word)]
    if len(placements) > 1:
        raise UsageError(f"{where}: mode {mode} contradicts placement {word}")
    for kind in placements or [kind for kind in ("pack", "spread") if kind in config_name.lower()]:
        return "pack" if kind == "pack" else "spread"
    if labelled_topology is not None:
        return labelled_topology.placement
    if LINKS.get(_word(cells, "link")) is not None:
        return "pack" if LINKS[_word(cells, "link")] == "nvlink" else "spread"
    return "pack" if gpus <= PUBLISHED_NODE_GPUS else "spread"


def _from_label(label: str, where: str) -> Collocated | Disaggregated:
    if not label:
        raise UsageError(f"{where}: no TP degree is given; give tp, or p_tp and d_tp, or a configuration in config")
    topology: Topology | None
    try:
        topology = parse_label(label)
    except UsageError as error:
        try:
            topology = parse_name(label).topology
        except UsageError as nonsense:
            raise UsageError(f"{where}: {nonsense}") from nonsense
        if topology is None:
            raise UsageError(f"{where}: {error}") from error
    if isinstance(topology, Fluid):
        raise UsageError(f"{where}: {label}: engines whose roles move are not predicted row by row")
    return topology


def _count(cells: Mapping[str, str], name: str) -> str:
    """The cell of a number of replicas or ranks; empty for a zero, which a row has for pools of the other mode."""
    cell = cells.get(name, "")
    return "" if cell.strip("0.") == "" else cell


def _shared_pool(cells: Mapping[str, str], where: str) -> Pool:
    """The pool of a collocated row: from num and tp, or from the columns of P or D if there are no others."""
    merged: dict[str, str] = {}
    for field in ("num", "tp", "dp", "pp", "ep"):
        cell_of = cells.get if field == "ep" else lambda name: _count(cells, name)
        shared_cell = cell_of(field)
        role_cells = {cell for p in "pd" if (cell := cell_of(f"{p}_{field}"))}
        if not shared_cell and len(role_cells) > 1:
            raise UsageError(
                f"{where}: collocated, but p_{field} is {cell_of('p_' + field)} and d_{field} {cell_of('d_' + field)}; "
                f"give {field}, or leave one of them empty"
            )
        if value := shared_cell or next(iter(role_cells), None):
            merged[field] = value
    return _pool(merged, "", where)


def _pool(cells: Mapping[str, str], prefix: str, where: str) -> Pool:
    pool_cells = {
        field: cell
        for field in ("num", "tp", "dp", "pp", "ep")
        if (cell := cells.get(f"{prefix}{field}") or ("" if field == "num" else cells.get(field)))
    }
    if not {"tp", "dp", "pp"} & set(pool_cells):
        raise UsageError(f"{where}: no TP degree is given; give {prefix}tp")
    number = {
        field: _integer(pool_cells, field, where, 1, column=f"{prefix}{field}") for field in ("num", "tp", "dp", "pp")
    }
    expert_parallel = _expert_parallel(pool_cells.get("ep", "0").lower(), number["tp"] * number["dp"], prefix, where)
    return Pool(
        replicas=number["num"], tp=number["tp"], dp=number["dp"], pp=number["pp"], expert_parallel=expert_parallel
    )


def _expert_parallel(cell: str, ranks: int, prefix: str, where: str) -> bool:
    """Yes or no, or the size of the group: 0 and 1 are off, and vLLM's group has every TP and DP rank of an engine.

    Raises _NotPredicted for a group of another size.
    """
    if cell in YES | NO:
        return cell in YES
    if not re.fullmatch(r"\d+(\.0*)?", cell):
        raise UsageError(f"{where}: {prefix}ep {cell!r} is not a flag; use yes or no, or the number of its ranks")
    if int(float(cell)) != ranks:
        raise _NotPredicted(f"{prefix}ep {cell}: vLLM spreads experts over all {ranks} TP and DP ranks of an engine")
    return True


def _integer(cells: Mapping[str, str], name: str, where: str, default: int, column: str | None = None) -> int:
    if name not in cells:
        return default
    value = _positive_number(cells, name, where, column)
    if value != int(value):
        raise UsageError(f"{where}: {column or name} {cells[name]!r} must be a whole number")
    return int(value)


def _positive_number(cells: Mapping[str, str], name: str, where: str, column: str | None = None) -> float:
    try:
        value = float(cells[name])
    except ValueError as error:
        raise UsageError(f"{where}: {column or name} {cells[name]!r} is not a number") from error
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{where}: {column or name} {cells[name]!r} must be above 0")
    return value
