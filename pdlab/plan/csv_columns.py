"""The columns of a CSV of configurations and loads (`pdlab.plan.csv_rows`), by whatever names people give them. Pure.

Other names of a column, empty cells, comments and other delimiters are accepted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdlab.core.errors import UsageError
from pdlab.core.text import counted
from pdlab.sim.argument_effects import NOT_SIMULATED

# Cells of a feature that is off. For the size of a group of ranks, 1 is off too.
OFF = {"0", "0.0", "1", "1.0", "false", "no", "off"}

# Columns with an engine argument that is not simulated; context parallel sizes are one column.
ARGUMENTS = tuple(name for name in NOT_SIMULATED if not name.endswith("_context_parallel_size"))


def _lengths(side: str) -> tuple[str, ...]:
    """Names of the number of tokens of a request on that side, as load generators write them."""
    units = ("tokens", "len", "length", "seq_len", "sequence_length")
    return tuple(f"{before}{side}_{unit}" for before in ("", "random_", "avg_", "mean_") for unit in units)


# Name of a column here -> other names that people give it.
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
    "itl": ("isl", *_lengths("input"), *_lengths("prompt")),
    "otl": ("osl", *_lengths("output"), *_lengths("generated")),
    "concurrency": ("max_concurrency", "conc", "num_concurrency", "concurrent_requests", "streams"),
    "request_rate": ("rate", "rate_rps", "rps", "qps"),
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
    "gpus": ("num_gpus", "total_gpus", "gpus_total", "gpu_count", "n_gpus", "accelerators", "num_accelerators"),
    "hardware": tuple(f"{chip}{what}" for chip in ("gpu", "accelerator") for what in ("", "_type", "_name", "_model")),
    "framework": ("engine", "inference_engine", "serving_engine"),
    "framework_version": ("engine_version", "vllm_version"),
    "precision": ("quantization", "quant", "weight_dtype"),
    "kv_precision": ("kv_dtype", "kv_cache_dtype", "kv_quantization"),
    "spec_decoding": ("speculative_decoding", "speculative", "spec", "spec_method", "mtp"),
    "dp_attention": ("attention_dp", "enable_dp_attention", "dpa"),
    "context_parallel": ("cp", "dcp", "pcp", "decode_context_parallel", "prefill_context_parallel"),
    "max_num_seqs": ("max_num_sequences", "max_running_requests"),
    "range_ratio": ("random_range_ratio",),
    "prefix_hit_rate": ("prefix_cache_hit_rate", "cache_hit_rate", "prefix_cache_hits"),
    "max_num_batched_tokens": ("chunked_prefill_size",),
    "gpu_memory_utilization": (),
    "async_scheduling": (),
    **{name: () for name in ARGUMENTS},
}
# If a row has several columns of one of these names, their cells may differ. The first column counts.
MAY_DIFFER = {"config", "mode", "num_prompts", "placement", "model"}
EMPTY = {"", "-", "nan", "none", "null", "na", "n/a"}


class NotSimulated(Exception):
    """A row has a cell whose meaning is not simulated. The message has the cell and the reason."""


class CsvTable(NamedTuple):
    """The cells of a CSV. ``header``: column names as they are written. ``lines``: for each row its line number in the
    file. ``rows``: for each row the cells by column name. ``columns``: name in `ALIASES` -> the column names of that
    meaning, the one that is the name itself first."""

    header: list[str]
    lines: list[int]
    rows: list[dict[str, str]]
    columns: dict[str, list[str]]

    def cells(self, row: Mapping[str, str]) -> dict[str, str]:
        """Name in `ALIASES` -> cell of a row, without empty cells. Raises NotSimulated if two columns of one meaning
        differ."""
        cells = {}
        for name, columns in self.columns.items():
            empty = {""} if name == "prompts" else EMPTY
            filled = {column: cell for column in columns if (cell := row[column].strip()).lower() not in empty}
            first = columns[0] if name in MAY_DIFFER else next(iter(filled), None)
            if first not in filled:
                continue
            cells[name] = filled[first]
            for column, cell in filled.items():
                if name not in MAY_DIFFER and not same_value(cell, filled[first]):
                    raise NotSimulated(f"{first} {filled[first]!r} and {column} {cell!r} have one meaning and differ")
        return cells

    @property
    def unread(self) -> list[str]:
        """Names of the columns that have cells and no meaning here."""
        read = {column for columns in self.columns.values() for column in columns}
        return [
            name for name in self.header if name and name not in read and any(row[name].strip() for row in self.rows)
        ]


def same_value(one: str, other: str) -> bool:
    """Whether two cells are the same text, the same number, or both `OFF`."""
    one, other = one.lower(), other.lower()
    if one == other or (one in OFF and other in OFF):
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def read_table(text: str, source: str) -> CsvTable:
    """The cells of a CSV. ``source``: its name in messages. Raises UsageError if it is no CSV, or has no row, no column
    of a configuration, or no column of a load."""
    numbered = _numbered_lines(text.lstrip("\ufeff"), source)
    if not numbered:
        raise UsageError(f"{source}: empty; the first line names the columns (docs/planning.md)")
    (_, names), *rest = numbered
    header = [name.strip() for name in names]
    columns = _columns(header, source)
    for line, cells in rest:
        if any(cell.strip() for cell in cells[len(header) :]):
            raise UsageError(
                f"{source}, line {line}: {counted(len(cells), 'cell')} for {counted(len(header), 'column')}; quote "
                "a cell that has a comma"
            )
    rows = [dict(zip(header, [*cells, *[""] * len(header)], strict=False)) for _, cells in rest]
    if not rows:
        raise UsageError(f"{source}: has a header and no rows")
    return CsvTable(header, [line for line, _ in rest], rows, columns)


def _numbered_lines(text: str, source: str) -> list[tuple[int, list[str]]]:
    """(line number, cells) of every line that is neither empty nor a comment."""
    head = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    reader = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
    try:
        numbered = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise UsageError(f"{source}, line {reader.line_num}: not a CSV ({error})") from error
    return [
        (line, cells)
        for line, cells in numbered
        if any(cell.strip() for cell in cells) and not cells[0].lstrip().startswith("#")
    ]


def _columns(header: Sequence[str], source: str) -> dict[str, list[str]]:
    """`CsvTable.columns` of a header. Raises UsageError."""
    plain: dict[str, str] = {}
    for name in header:
        key = name.strip().lower().replace("-", "_").replace(" ", "_")
        if key and key in plain:
            raise UsageError(f"{source}: column {name!r} occurs twice; keep one")
        plain[key] = name
    columns = {
        name: known
        for name, aliases in ALIASES.items()
        if (known := [plain[alias] for alias in (name, *aliases) if alias in plain])
    }
    if not {"mode", "config", "tp", "p_tp"} & set(columns):
        raise UsageError(
            f"{source}: no column has the configuration; give mode with num and tp or p_num, p_tp, d_num, d_tp, "
            f"or config with labels such as pd-pack-p1xtp2-d1xtp4 (its columns: {', '.join(header)})"
        )
    if "concurrency" not in columns and "request_rate" not in columns:
        raise UsageError(f"{source}: no column concurrency or request_rate (its columns: {', '.join(header)})")
    return columns
