"""The rows of the CSV that `plan.py --predict` reads: a configuration and a load each. Pure.

Columns and their meaning: docs/planning.md. A row is refused if its TP degree or its number of replicas would have to
be guessed.

A table of somebody's measurements has rows that are not simulated here: of other engines, with speculative decoding,
with context parallel. Such a row becomes a `RefusedRow` with the reason, and the other rows are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from pdlab.core import defaults
from pdlab.core.deployment import (
    Collocated,
    Deployment,
    Disaggregated,
    Fluid,
    PlacementKind,
    Pool,
    is_label,
    parse_label,
)
from pdlab.core.errors import UsageError
from pdlab.core.schema import one_line
from pdlab.core.workload import Closed, Load, Open, Workload
from pdlab.plan.csv_columns import ARGUMENTS, OFF, NotSimulated, read_table, same_value
from pdlab.plan.extrapolation import major_minor
from pdlab.results.published_names import PUBLISHED_NODE_GPUS, configuration_in, is_load, parse_name
from pdlab.sim.argument_effects import NOT_SIMULATED, ON, is_own
from pdlab.sim.argument_effects import OFF as OFF_WORDS
from pdlab.sim.kv_transfer import LinkKind
from pdlab.sim.simulator import Prompts

PUBLISHED_PROMPTS = 5  # per unit of concurrency
OPEN_LOOP_S, LEAST_OPEN_LOOP = 64, 64  # duration of an open loop in seconds, its least number of requests
MOST_REQUESTS = 2_000_000  # of one level: about a minute of simulation

# Columns of features that are simulated only when they are off, with the reason.
SIMULATED_WHEN_OFF = {
    "spec_decoding": "speculative decoding is simulated for all rows or none: leave the column out, and give "
    "--acceptance-length with your measured tokens per step",
    "context_parallel": "context parallel is not simulated",
    "range_ratio": "the meaning of a ratio differs between clients; give lengths, such as uniform:0.8-1.0",
    "prefix_hit_rate": "only the cached prompts that levels repeat are simulated here: give prompts; or rank with "
    "--prefix-hit-rate",
}
MODES = {
    "collocated": ("collocated", "colocated", "co-located", "collocate", "aggregated", "agg"),
    "pd": ("pd", "p-d", "disaggregated", "disagg", "pd-disaggregated", "prefill-decode"),
    "pd-pack": ("pd-pack", "pack"),
    "pd-spread": ("pd-spread", "spread"),
}
PD_MODES = {word for mode, words in MODES.items() if mode != "collocated" for word in words}
_GPUS = re.compile(r"(\d{1,4})gpus?")  # a word of a name
_EDITION = re.compile(r"v\d{1,2}|final|new|old")  # words that tell one's own files apart
YES, ONE, ZERO = {"true", "yes", "ep", "on"}, {"1", "1.0"}, {"0", "0.0"}
REPEATED = {
    *("repeated", "repeat", "reused", "reuse", "shared", "same", "same-seed", "as-measured", "published"),
    *("yes", "true", "nan", *ONE),
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
POOL_COLUMNS = ("num", "tp", "dp", "pp")
# Words beside a GPU's type that do not name another GPU: H100 SXM5 80GB HBM3. PCIe and NVL name another one.
SAME_GPU = re.compile(r"and|nvidia|sxm\d*|hbm\d*e?|\d+ ?(gb|gib)?|gb")
WHOLE_NUMBER = re.compile(r"\d+(\.0*)?")

Cells = Mapping[str, str]  # name in `pdlab.plan.csv_columns.ALIASES` -> cell; empty cells are left out
Split = Collocated | Disaggregated


class StatedStack(NamedTuple):
    """The hardware and the engine of a row, as they are written; empty: not given."""

    hardware: str = ""
    framework: str = ""
    version: str = ""
    precision: str = ""
    kv_precision: str = ""

    @property
    def engine(self) -> str | None:
        """The name of the engine, without a version; None: not given."""
        return re.split(r"[\s:=@v-]*\d", self.framework.lower().strip(), maxsplit=1)[0].strip() or None

    @property
    def engine_version(self) -> str | None:
        """Major and minor version of the engine, also from a framework such as ``vLLM 0.11.0``; None: not given."""
        inline = re.search(r"\d+\.\d.*", self.framework)
        return major_minor(self.version or (inline[0] if inline else ""))

    def is_gpus(self, gpu_types: Sequence[str | None]) -> bool:
        """Whether the hardware is those GPU types, in their order, and no other. "h100_sxm" and "NVIDIA H100 80GB HBM3"
        are H100."""
        words = [word for word in re.split(r"[^a-z0-9]+", self.hardware.lower()) if word]
        types = [each.lower() for each in gpu_types if each is not None]
        named = list(dict.fromkeys(word for word in words if word in types or not SAME_GPU.fullmatch(word)))
        return bool(types) and named == types


class RefusedRow(NamedTuple):
    """A row that is not predicted, and why. ``line`` is its line number in the file."""

    line: int
    reason: str


class RequestedRow(NamedTuple):
    """One parsed row. ``line`` is its line number in the file. ``words``: of the configuration's name, which no column
    explains."""

    line: int
    deployment: Deployment
    workload: Workload
    load: Load
    num_requests: int
    prompts: Prompts
    link: LinkKind | None
    stated: StatedStack = StatedStack()
    words: tuple[str, ...] = ()

    @property
    def sweep(self) -> tuple[str, ...]:
        """Key of the sweep: equal for rows that differ only in the load."""
        text = self.deployment.model_dump_json()
        return (text, self.workload.model_dump_json(), self.prompts, str(self.link), self.load.kind, *self.stated)


class CsvFile(NamedTuple):
    """A file of requested predictions. ``header``: its column names. ``rows``: cells by column name, as they are
    written. ``requested``: the meaning of each row. ``unread``: the columns that have cells, and on which no prediction
    depends. ``assumed``: which of itl and otl some row lacks, so that the defaults are predicted."""

    header: list[str]
    rows: list[dict[str, str]]
    requested: list[RequestedRow | RefusedRow]
    unread: list[str]
    assumed: tuple[str, ...] = ()


def read(text: str, source: str, model: str = defaults.MODEL, *, refuse_rows: bool = False) -> CsvFile:
    """The rows of a CSV. ``source``: the name of the file in messages. ``model``: the model of rows that name none.
    ``refuse_rows``: a wrong cell refuses only its row, for tables that nobody can correct. Raises UsageError with the
    line and the column."""
    table = read_table(text, source)
    requested: list[RequestedRow | RefusedRow] = []
    assumed: set[str] = set()
    for line, row in zip(table.lines, table.rows, strict=True):
        try:
            cells = {"model": model} | table.cells(row)
            requested.append(_requested_row(line, cells))
            assumed |= {"itl", "otl"} - cells.keys()
        except NotSimulated as error:
            requested.append(RefusedRow(line, str(error)))
        except UsageError as error:
            if not refuse_rows:
                raise UsageError(f"{source}, line {line}: {error}") from error
            requested.append(RefusedRow(line, str(error)))
    return CsvFile(table.header, table.rows, requested, table.unread, tuple(sorted(assumed)))


# The functions below raise NotSimulated, and UsageError for a wrong cell. `read` adds the line.


def _requested_row(line: int, cells: Cells) -> RequestedRow:
    _refuse_features(cells)
    cells = _with_attention_ranks(cells)
    deployment = Deployment(model=cells["model"], topology=_topology(cells), engine_kwargs=_engine_arguments(cells))
    _check_gpus(cells, deployment)
    workload = _workload(cells)
    load, requests = _load(cells)
    if requests > MOST_REQUESTS:
        raise UsageError(f"num_prompts {requests} is too many to simulate; use at most {MOST_REQUESTS}")
    prompts = _word(cells, "prompts", "repeated")
    if prompts not in REPEATED | FRESH:
        raise UsageError(f"prompts {cells['prompts']!r} is not known; use repeated or fresh")
    link = _word(cells, "link")
    if link not in LINKS:
        raise UsageError(f"link {cells['link']!r} is not known; use nvlink, srd, tcp, or leave it empty")
    stated = ("hardware", "framework", "framework_version", "precision", "kv_precision")
    return RequestedRow(
        line=line,
        deployment=deployment,
        workload=workload,
        load=load,
        num_requests=requests,
        prompts="fresh" if prompts in FRESH else "repeated",
        link=LINKS[link],
        stated=StatedStack(*(cells.get(name, "") for name in stated)),
        words=_unexplained(cells, deployment, workload, load),
    )


def _unexplained(cells: Cells, deployment: Deployment, workload: Workload, load: Load) -> tuple[str, ...]:
    """The words in the name of the configuration that the row's columns do not explain."""
    name = cells.get("config", "")
    try:
        named = None if is_label(name) else configuration_in(name)
    except UsageError:
        return ()  # `_topology` refused it, or the columns give the configuration
    if named is None:
        return ()
    said = parse_name(name)
    words = [
        f"{what}{tokens}"
        for what, tokens, own in (
            ("itl", said.input_tokens, workload.longest[0]),
            ("otl", said.output_tokens, workload.longest[1]),
        )
        if tokens not in (None, own)
    ]
    if said.mode not in (None, "mixed"):
        words.append(str(said.mode))
    model = re.sub(r"[^a-z0-9]", "", deployment.model.lower())
    stated = {_word(cells, column) for column in ("link", "hardware", "framework", "precision", "kv_precision")}
    for word in named.others:
        of_model = len(word) > 2 and word in model
        gpus = _GPUS.fullmatch(word)
        of_size = gpus is not None and int(gpus[1]) == deployment.gpus
        of_transport = word == "nixl" and deployment.transport is not None
        agrees = of_model or of_size or of_transport or word in stated
        if not (agrees or _EDITION.fullmatch(word) or is_load(word, load.value)):
            words.append(word)
    return tuple(words)


def _refuse_features(cells: Cells) -> None:
    for name, why in SIMULATED_WHEN_OFF.items():
        off = OFF - ONE if name == "prefix_hit_rate" else OFF  # a share of 1 is not off
        if (cell := cells.get(name, "")) and cell.lower() not in off:
            raise NotSimulated(f"{name} {cell!r}: {why}")
    # SGLang's client draws from one token at 0, and other clients fix the lengths.
    if cells.get("range_ratio", "") in ZERO and "sglang" in cells.get("framework", "").lower():
        raise NotSimulated(f"range_ratio {cells['range_ratio']!r}: {SIMULATED_WHEN_OFF['range_ratio']}")
    for name in ARGUMENTS:
        if name == "enable_eplb" and cells.get(name, "").lower() in ON:
            continue  # `pdlab.core.vllm_limits.with_redundant_experts`
        if (cell := cells.get(name, "")) and not is_own(name, cell):
            own = NOT_SIMULATED[name]
            value = f" ({own[0]})" if own else ""
            raise NotSimulated(
                f"{name} {cell!r}: engines are simulated with vLLM's own value{value}; leave the cell empty"
            )


def _engine_arguments(cells: Cells) -> dict[str, Any]:
    """The arguments of vLLM's engines that are simulated. Other values than numbers, such as -1 for prompts in one
    step, are not simulated."""
    found: dict[str, Any] = {"max_num_seqs": _whole_number(cells, "max_num_seqs", 1)} if "max_num_seqs" in cells else {}
    if cell := cells.get("max_num_batched_tokens"):
        if not WHOLE_NUMBER.fullmatch(cell) or not float(cell):
            raise NotSimulated(f"max_num_batched_tokens {cell!r}: the most tokens of a step are a number above 0")
        found["max_num_batched_tokens"] = int(float(cell))
    if cell := cells.get("gpu_memory_utilization"):
        try:
            share = float(cell)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise NotSimulated(f"gpu_memory_utilization {cell!r}: a share of the memory is above 0 and at most 1")
        found["gpu_memory_utilization"] = share
    if cell := _word(cells, "async_scheduling"):
        if cell not in (*ON, *OFF_WORDS):
            raise NotSimulated(f"async_scheduling {cell!r} is neither true nor false")
        found["async_scheduling"] = cell in ON
    if cell := _word(cells, "enable_eplb"):
        found["enable_eplb"] = cell in ON
    return found


def _with_attention_ranks(cells: Cells) -> Cells:
    """The cells with the number of attention's data parallel ranks as ``dp``. Each of these ranks has ``tp`` GPUs only
    if the row's number of GPUs proves it: other people count all GPUs of an engine as its ``tp``."""
    ranks = {}
    for prefix in ("", "p_", "d_"):
        name, field = f"{prefix}dp_attention", f"{prefix}dp"
        cell = cells.get(name, "")
        if not cell or cell.lower() in OFF:
            continue
        counted = _nonzero(cells, "gpus") or _nonzero(cells, f"{prefix}gpus")
        if not WHOLE_NUMBER.fullmatch(cell) or not counted:
            raise NotSimulated(
                f"{name} {cell!r}: attention over data parallel ranks is read as a number, each of tp GPUs, in a row "
                f"that counts its gpus; or give {field}"
            )
        if (given := _nonzero(cells, field)) and not same_value(given, cell):
            raise NotSimulated(f"{name} {cell!r} and {field} {given!r}: both count data parallel ranks")
        ranks[field] = cell
    return {**cells, **ranks}


def _check_gpus(cells: Cells, deployment: Deployment) -> None:
    """Refuse a row whose numbers of GPUs differ from those of its configuration."""
    counts = {"gpus": deployment.gpus}
    if isinstance(deployment.topology, Disaggregated):
        counts |= {"p_gpus": deployment.topology.prefill.gpus, "d_gpus": deployment.topology.decode.gpus}
    for name in ("gpus", "p_gpus", "d_gpus"):
        cell = _nonzero(cells, name)
        if cell and name not in counts:
            raise NotSimulated(f"{name} {cell!r}: the row has prefill and decode pools, but is marked as collocated")
        if cell and not same_value(cell, str(counts[name])):
            raise NotSimulated(f"{name} {cell!r}: its configuration has {counts[name]} GPUs")


def _workload(cells: Cells) -> Workload:
    lengths = cells.get("lengths", "")
    data: dict[str, object] = {"lengths": lengths} if lengths else {}
    if not lengths.startswith(("file:", "mixes:")):
        data["input_tokens"] = _whole_number(cells, "itl", 5000)
        data["output_tokens"] = _whole_number(cells, "otl", 250)
    try:
        return Workload.model_validate(data)
    except ValidationError as error:
        raise UsageError(one_line(error, Workload, {"input_tokens": "itl", "output_tokens": "otl"})) from error


def _load(cells: Cells) -> tuple[Load, int]:
    """The load of a row, and its number of requests."""
    if "concurrency" in cells:
        concurrency = _whole_number(cells, "concurrency", 1)
        return Closed(concurrency=concurrency), _whole_number(cells, "num_prompts", PUBLISHED_PROMPTS * concurrency)
    if "request_rate" not in cells:
        raise UsageError("concurrency and request_rate are both empty; give one of them")
    rate_rps = _positive_number(cells, "request_rate")
    burstiness = _positive_number(cells, "burstiness") if "burstiness" in cells else 1.0
    requests = _whole_number(cells, "num_prompts", max(round(OPEN_LOOP_S * rate_rps), LEAST_OPEN_LOOP))
    return Open(rate_rps=rate_rps, burstiness=burstiness), requests


def _topology(cells: Cells) -> Split:
    """The configuration by its label, its name, or the columns of its pools."""
    name = cells.get("config", "")
    cells = _with_label(_with_disaggregated(cells), name)
    mode = _mode(cells)
    named: Split | None = None
    if not any(_nonzero(cells, f"{prefix}{field}") for prefix in ("", "p_", "d_") for field in POOL_COLUMNS):
        mode_label = cells.get("mode", "")
        named = _named_topology(name or (mode_label if is_label(mode_label) else ""))
    if isinstance(named, Collocated):
        if mode not in ("", "collocated"):
            raise UsageError(f"mode {mode} contradicts the configuration {name!r}, which is collocated")
        return named
    roles_given = any(_nonzero(cells, f"{p}_{field}") for p in "pd" for field in ("num", "tp"))
    if mode == "collocated" or not (mode or named or roles_given):
        if named is not None:
            raise UsageError(f"mode collocated contradicts the configuration {name!r}, which is PD")
        collocated = Collocated(pool=_shared_pool(cells))
        _check_name(name, collocated)
        return collocated
    prefill, decode = (named.prefill, named.decode) if named else (_pool(cells, "p_"), _pool(cells, "d_"))
    placement = _placement(cells, mode, name, prefill.gpus + decode.gpus, named)
    split = Disaggregated(prefill=prefill, decode=decode, placement=placement)
    _check_name(name, split)
    return split


def _with_label(cells: Cells, name: str) -> Cells:
    """The cells with the columns of pools that a row lacks, from its configuration: a row that has some of them, and no
    TP degree."""
    columns = {f"{prefix}{field}" for prefix in ("", "p_", "d_") for field in POOL_COLUMNS}
    given = {column for column in columns if _nonzero(cells, column)}
    given |= {column for column in ("ep", "p_ep", "d_ep") if _word(cells, column) not in {"", *OFF - ONE}}
    if not given or any(column.endswith("tp") for column in given):
        return cells
    try:
        topology = _named_topology(name)
    except UsageError:
        return cells  # the name is no configuration
    pools = {"": topology.pool} if isinstance(topology, Collocated) else {"p_": topology.prefill, "d_": topology.decode}
    filled = dict(cells)
    for prefix, pool in pools.items():
        of_label = {"num": pool.replicas, "tp": pool.tp, "dp": pool.dp, "pp": pool.pp, "ep": int(pool.expert_parallel)}
        for field, value in of_label.items():
            others = {"num": ()}.get(field, ("",) if prefix else ("p_", "d_"))  # columns that stand for this one
            if not any(_nonzero(cells, f"{each}{field}") for each in (prefix, *others)):
                filled[f"{prefix}{field}"] = "yes" if field == "ep" and value else str(value)
    return filled


def _with_disaggregated(cells: Cells) -> Cells:
    """The cells with the mode of the column ``disaggregated``, and with replicas from the GPUs of each role. A row with
    a single TP degree is refused: it is that of prefill, or that of decode."""
    cell, mode = cells.get("disaggregated", ""), _word(cells, "mode")
    if not cell:
        return cells
    if cell.lower() not in YES | OFF:
        raise NotSimulated(f"disaggregated {cell!r} is neither true nor false")
    split = cell.lower() in YES | ONE
    if mode in (MODES["collocated"] if split else PD_MODES):
        raise NotSimulated(f"mode {cells['mode']!r} contradicts disaggregated {cell!r}")
    if not split:
        return cells if mode or cells.get("config") else {**cells, "mode": "collocated"}
    filled = {**cells, "mode": cells.get("mode") or "pd"}
    if cells.get("config"):
        return filled
    for role in ("p", "d"):
        if not _nonzero(cells, f"{role}_tp"):
            raise NotSimulated(
                "disaggregated, but prefill and decode are not both described: give p_tp and d_tp with p_num and d_num "
                "(or the GPUs of each); one TP degree may be that of either"
            )
        if not _nonzero(cells, f"{role}_num") and (gpus := _nonzero(cells, f"{role}_gpus")):
            filled[f"{role}_num"] = _replicas_on(cells, role, gpus)
        if not filled.get(f"{role}_num"):
            raise NotSimulated(f"disaggregated, but neither {role}_num nor {role}_gpus is given")
    return filled


def _replicas_on(cells: Cells, role: str, gpus: str) -> str:
    """The number of engines on that many GPUs."""
    try:
        each = math.prod(float(_nonzero(cells, f"{role}_{field}") or 1) for field in ("tp", "pp", "dp"))
        replicas = float(gpus) / each
    except (ValueError, ZeroDivisionError):
        replicas = math.nan
    if not (replicas >= 1 and replicas == int(replicas)):
        raise NotSimulated(f"{role}_gpus {gpus!r} is no multiple of the GPUs of one engine")
    return str(int(replicas))


def _check_name(name: str, topology: Split) -> None:
    """Raises UsageError if the name is that of another configuration than the columns give."""
    try:
        named = _named_topology(name)
    except UsageError:
        return  # the name is no configuration
    sizes, named_sizes = (
        [(pool.replicas, pool.tp, pool.pp, pool.dp) for pool in Deployment(topology=each).pools.values()]
        for each in (topology, named)
    )
    if sizes != named_sizes:
        label = "-".join(pool.label for pool in Deployment(topology=topology).pools.values())
        raise UsageError(f"the configuration {name!r} contradicts the columns, which give {label}")


def _mode(cells: Cells) -> str:
    """One of `MODES`; empty if the row does not give it, or gives a label in its place."""
    word = _word(cells, "mode")
    mode = next((mode for mode, words in MODES.items() if word in words), "")
    if word and not mode and not is_label(cells["mode"]):
        raise UsageError(f"mode {cells['mode']!r} is not known; use collocated, pd-pack or pd-spread")
    return mode


def _placement(cells: Cells, mode: str, name: str, gpus: int, named: Disaggregated | None) -> PlacementKind:
    """Placement by the mode, the column placement, the configuration's name or the link, in this order, or by size."""
    word = _word(cells, "placement").removeprefix("pd-")
    if word not in ("", "any", "pack", "spread", "collocated"):
        raise UsageError(f"placement {cells['placement']!r} is not known; use pack or spread")
    kinds: tuple[PlacementKind, ...] = ("pack", "spread")
    given = [kind for kind in kinds if kind in (mode.removeprefix("pd-"), word)]
    if len(given) > 1:
        raise UsageError(f"mode {mode} contradicts placement {word}")
    if given := given or [kind for kind in kinds if kind in name.lower()]:
        return given[0]
    if named is not None:
        return named.placement
    link = LINKS.get(_word(cells, "link"))
    packs = link == "nvlink" if link is not None else gpus <= PUBLISHED_NODE_GPUS
    return "pack" if packs else "spread"


def _named_topology(name: str) -> Split:
    """The configuration of a label or of a published name."""
    if not name:
        raise UsageError("no TP degree is given; give tp, or p_tp and d_tp, or a configuration in config")
    named = None if is_label(name) else configuration_in(name)
    topology = named.topology if named else parse_label(name)
    if isinstance(topology, Fluid):
        raise UsageError(f"{name}: engines whose roles move are not predicted row by row")
    return topology


def _shared_pool(cells: Cells) -> Pool:
    """The pool of a collocated row: from num and tp, or from the columns of P or D if there are no others."""
    merged: dict[str, str] = {}
    for field in (*POOL_COLUMNS, "ep"):
        cell_of = cells.get if field == "ep" else lambda name: _nonzero(cells, name)
        shared_cell = cell_of(field)
        role_cells = {cell for p in "pd" if (cell := cell_of(f"{p}_{field}"))}
        if not shared_cell and len(role_cells) > 1:
            raise UsageError(
                f"collocated, but p_{field} is {cell_of('p_' + field)} and d_{field} {cell_of('d_' + field)}; "
                f"give {field}, or leave one of them empty"
            )
        if value := shared_cell or next(iter(role_cells), None):
            merged[field] = value
    return _pool(merged, "")


def _pool(cells: Cells, prefix: str) -> Pool:
    """The pool of the columns with a prefix. All of them but the number of replicas may lack the prefix."""
    pool_cells = {
        field: cell
        for field in (*POOL_COLUMNS, "ep")
        if (cell := cells.get(f"{prefix}{field}") or ("" if field == "num" else cells.get(field)))
    }
    if not {"tp", "dp", "pp"} & set(pool_cells):
        raise UsageError(f"no TP degree is given; give {prefix}tp")
    num, tp, dp, pp = (_whole_number(pool_cells, field, 1, column=f"{prefix}{field}") for field in POOL_COLUMNS)
    expert_parallel = _expert_parallel(pool_cells.get("ep", "0").lower(), tp * dp, f"{prefix}ep")
    return Pool(replicas=num, tp=tp, dp=dp, pp=pp, expert_parallel=expert_parallel)


def _expert_parallel(cell: str, ranks: int, column: str) -> bool:
    """Yes or no, or the size of the group: 0 and 1 are off, and vLLM's group has every TP and DP rank of an engine."""
    if cell in YES | OFF:
        return cell in YES
    if not WHOLE_NUMBER.fullmatch(cell):
        raise UsageError(f"{column} {cell!r} is not a flag; use yes or no, or the number of its ranks")
    if int(float(cell)) != ranks:
        raise NotSimulated(f"{column} {cell}: vLLM spreads experts over all {ranks} TP and DP ranks of an engine")
    return True


def _word(cells: Cells, name: str, default: str = "") -> str:
    """The cell in lower case, with hyphens for underscores and spaces."""
    return cells.get(name, default).lower().replace("_", "-").replace(" ", "-")


def _nonzero(cells: Cells, name: str) -> str:
    """The cell of a number; empty for a zero, which a row has for the pools of the other mode."""
    cell = cells.get(name, "")
    return "" if cell.strip("0.") == "" else cell


def _whole_number(cells: Cells, name: str, default: int, column: str | None = None) -> int:
    """``column``: the name of the column in messages, if it is not ``name``."""
    if name not in cells:
        return default
    value = _positive_number(cells, name, column)
    if value != int(value):
        raise UsageError(f"{column or name} {cells[name]!r} must be a whole number")
    return int(value)


def _positive_number(cells: Cells, name: str, column: str | None = None) -> float:
    try:
        value = float(cells[name])
    except ValueError as error:
        raise UsageError(f"{column or name} {cells[name]!r} is not a number") from error
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{column or name} {cells[name]!r} must be above 0")
    return value
