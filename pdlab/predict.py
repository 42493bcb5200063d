"""`plan.py --predict FILE`: a CSV of configurations and loads in, the same rows with predictions out.

Columns are described in docs/planning.md; unknown ones are kept and not looked at. Rows that differ in
the load alone are one sweep: they are simulated in ascending order on one deployment, caches carried
from level to level where prompts repeat.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pdlab.catalog import ModelShape, load_model
from pdlab.errors import UsageError
from pdlab.imports import parse_name
from pdlab.perf import Hardware, LinkKind
from pdlab.sim import Prompts, SimulatedLevel, simulate
from pdlab.simulated import figures
from pdlab.spec import Collocated, Deployment, Disaggregated, Pool, parse_label
from pdlab.workload import Closed, Level, Load, Open, Workload

SEEDS = (0, 1, 2, 3)
PUBLISHED_LADDER = (4, 8, 16, 32, 48, 64)
PUBLISHED_PROMPTS = 5  # per unit of concurrency

# Our name -> other names under which people write the column.
ALIASES: dict[str, tuple[str, ...]] = {
    "config": ("label", "configuration", "experiment", "name", "exp"),
    "mode": ("topology", "placement"),
    "num": ("replicas", "n", "c_num", "collocated_replicas", "num_replicas"),
    "tp": ("c_tp", "collocated_tp", "tensor_parallel"),
    "dp": ("c_dp",),
    "pp": ("c_pp",),
    "ep": ("c_ep", "expert_parallel", "enable_expert_parallel"),
    "p_num": ("p_replicas", "prefill_replicas", "num_prefill", "prefill_num", "p"),
    "p_tp": ("prefill_tp", "tp_p"),
    "p_dp": ("prefill_dp",),
    "p_pp": ("prefill_pp",),
    "p_ep": ("prefill_ep", "ep_p"),
    "d_num": ("d_replicas", "decode_replicas", "num_decode", "decode_num", "d"),
    "d_tp": ("decode_tp", "tp_d"),
    "d_dp": ("decode_dp",),
    "d_pp": ("decode_pp",),
    "d_ep": ("decode_ep", "ep_d"),
    "itl": ("isl", "input_tokens", "input_len", "input_length"),
    "otl": ("osl", "output_tokens", "output_len", "output_length"),
    "concurrency": ("max_concurrency", "conc"),
    "request_rate": ("rate", "rate_rps", "rps"),
    "num_prompts": ("prompts_per_level", "num_requests", "requests"),
    "prompts": ("reused_prompts", "reused_prompt_policy", "reuse_policy", "prompt_policy", "reuse"),
    "link": ("transport", "wire"),
    "model": (),
}
REPEATED = {"repeated", "reused", "as-measured", "as_measured", "published", "yes", "true", "1", "same-seed"}
FRESH = {"fresh", "distinct", "none", "no", "false", "0", "unique"}
LINKS: dict[str, LinkKind | None] = {
    "": None,
    "auto": None,
    "none": None,
    "-": None,
    "nvlink": "nvlink",
    "cuda_ipc": "nvlink",
    "srd": "srd",
    "efa": "srd",
    "efa/srd": "srd",
    "ucx": None,
    "tcp": "tcp",
}
COLUMNS = (
    "predicted_mean_tpot_ms",
    "predicted_median_tpot_ms",
    "predicted_mean_ttft_ms",
    "predicted_median_ttft_ms",
    "predicted_p99_ttft_ms",
    "predicted_requests_per_s",
    "predicted_output_tokens_per_s",
    "predicted_output_tokens_per_s_per_node",
    "predicted_mean_tpot_ms_low",
    "predicted_mean_tpot_ms_high",
    "predicted_mean_ttft_ms_low",
    "predicted_mean_ttft_ms_high",
    "predicted_requests_per_s_low",
    "predicted_requests_per_s_high",
)
# Median absolute error -> standard deviation of a normal one -> 90 % of cases.
TO_90 = 1.4826 * 1.6449


class Asked(NamedTuple):
    """One row, understood."""

    row: int
    deployment: Deployment
    workload: Workload
    load: Load
    num_requests: int
    prompts: Prompts
    link: LinkKind | None

    @property
    def sweep(self) -> tuple[str, ...]:
        """Rows of one sweep have the same."""
        text = self.deployment.model_dump_json()
        return (text, self.workload.model_dump_json(), self.prompts, str(self.link), self.load.kind)


def read(text: str, source: str) -> tuple[list[str], list[dict[str, str]], list[Asked]]:
    """(header, rows as they are, rows understood). Raises UsageError naming the row and the column."""
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")))
    header = [name for name in reader.fieldnames or []]
    if not header:
        raise UsageError(f"{source}: empty; the first line names the columns (docs/planning.md)")
    known = _known(header, source)
    rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
    if not rows:
        raise UsageError(f"{source}: has a header and no rows")
    asked = []
    for number, row in enumerate(rows, start=2):
        cells = {name: row[column].strip() for name, column in known.items()}
        asked.append(_understood(number, cells, f"{source}, line {number}"))
    return header, rows, asked


def _known(header: Sequence[str], source: str) -> dict[str, str]:
    """Our column name -> the file's."""
    plain = {name.strip().lower().replace("-", "_").replace(" ", "_"): name for name in header}
    known = {}
    for name, others in ALIASES.items():
        for candidate in (name, *others):
            if candidate in plain:
                known[name] = plain[candidate]
                break
    if "config" in known and known.get("mode") == known["config"]:
        del known["config"]
    if "mode" not in known and "config" not in known and "tp" not in known and "p_tp" not in known:
        raise UsageError(
            f"{source}: no column says the configuration; give mode with num and tp or p_num, p_tp, d_num, d_tp, "
            f"or config with labels such as pd-pack-p1xtp2-d1xtp4 (found: {', '.join(header)})"
        )
    if "concurrency" not in known and "request_rate" not in known:
        raise UsageError(f"{source}: no column concurrency or request_rate (found: {', '.join(header)})")
    return known


def _understood(number: int, cells: Mapping[str, str], where: str) -> Asked:
    topology = _topology(cells, where)
    workload = Workload(input_tokens=_whole(cells, "itl", where, 5000), output_tokens=_whole(cells, "otl", where, 250))
    load: Load
    if cells.get("concurrency"):
        load = Closed(concurrency=_whole(cells, "concurrency", where, 1))
        requests = _whole(cells, "num_prompts", where, PUBLISHED_PROMPTS * load.concurrency)
    elif cells.get("request_rate"):
        rate = _real(cells, "request_rate", where)
        load = Open(rate_rps=rate)
        requests = _whole(cells, "num_prompts", where, max(round(64 * rate), 64))
    else:
        raise UsageError(f"{where}: neither concurrency nor request_rate is given")
    policy = (cells.get("prompts") or "repeated").lower()
    if policy not in REPEATED | FRESH:
        raise UsageError(f"{where}: prompts {policy!r} is not known; use repeated or fresh")
    wire = (cells.get("link") or "").lower()
    if wire not in LINKS:
        raise UsageError(f"{where}: link {wire!r} is not known; use nvlink, srd, tcp, or leave it empty")
    return Asked(
        row=number,
        deployment=Deployment(model=cells.get("model") or "gpt-oss-120b", topology=topology),
        workload=workload,
        load=load,
        num_requests=requests,
        prompts="repeated" if policy in REPEATED else "fresh",
        link=LINKS[wire],
    )


def _topology(cells: Mapping[str, str], where: str) -> Collocated | Disaggregated:
    mode = cells.get("mode", "").lower().replace("_", "-")
    named = cells.get("config", "")
    decoding = any(cells.get(name) for name in ("p_tp", "p_num", "d_tp", "d_num"))
    if not (mode or decoding or cells.get("tp")):
        return _from_label(named, where)
    if mode in ("", "pd", "disaggregated"):
        mode = "pd-pack" if decoding or mode else "collocated"
        if "spread" in named.lower() or cells.get("link", "").lower() in ("srd", "efa", "tcp"):
            mode = mode.replace("pack", "spread")
    mode = {"pack": "pd-pack", "spread": "pd-spread", "colocated": "collocated", "aggregated": "collocated"}.get(
        mode, mode
    )
    if mode == "collocated":
        return Collocated(pool=_pool(cells, "", where))
    if mode not in ("pd-pack", "pd-spread"):
        raise UsageError(f"{where}: mode {mode!r} is not known; use collocated, pd-pack or pd-spread")
    return Disaggregated(
        prefill=_pool(cells, "p_", where),
        decode=_pool(cells, "d_", where),
        placement="pack" if mode == "pd-pack" else "spread",
    )


def _from_label(label: str, where: str) -> Collocated | Disaggregated:
    try:
        return parse_label(label)
    except UsageError as error:
        topology = parse_name(label).topology
        if topology is None:
            raise UsageError(f"{where}: {error}") from error
        return topology


def _pool(cells: Mapping[str, str], prefix: str, where: str) -> Pool:
    flag = (cells.get(f"{prefix}ep") or cells.get("ep") or "0").lower()
    if flag not in ("0", "1", "true", "false", "yes", "no", "ep", "-"):
        raise UsageError(f"{where}: {prefix}ep {flag!r} is not a flag; use 0 or 1")
    return Pool(
        replicas=_whole(cells, f"{prefix}num", where, 1),
        tp=_whole(cells, f"{prefix}tp", where, 1),
        dp=_whole(cells, f"{prefix}dp", where, 1),
        pp=_whole(cells, f"{prefix}pp", where, 1),
        expert_parallel=flag in ("1", "true", "yes", "ep"),
    )


def _whole(cells: Mapping[str, str], name: str, where: str, default: int) -> int:
    text = cells.get(name, "")
    if not text:
        return default
    value = _real(cells, name, where)
    if value != int(value):
        raise UsageError(f"{where}: {name} {text!r} must be a whole number")
    return int(value)


def _real(cells: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(cells[name])
    except ValueError as error:
        raise UsageError(f"{where}: {name} {cells[name]!r} is not a number") from error
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{where}: {name} {cells[name]!r} must be above 0")
    return value


def predict(asked: Sequence[Asked], hardware: Hardware, seeds: Sequence[int] = SEEDS) -> dict[int, dict[str, Any]]:
    """Row number -> the columns of `COLUMNS`; means over the seeds."""
    sweeps: dict[tuple[str, ...], list[Asked]] = {}
    for row in asked:
        sweeps.setdefault(row.sweep, []).append(row)
    found: dict[int, dict[str, Any]] = {}
    shapes: dict[str, ModelShape] = {}
    for rows in sweeps.values():
        first = rows[0]
        model = first.deployment.model
        if model not in shapes:
            shape = load_model(model)
            if shape is None:
                raise UsageError(f"line {first.row}: model {model!r} has no shape in configs/models/; add a file there")
            shapes[model] = shape
        levels = _levels(rows)
        trials = []
        for seed in seeds:
            try:
                trials.append(
                    simulate(
                        first.deployment,
                        levels,
                        first.workload,
                        hardware,
                        shapes[model],
                        seed=seed,
                        prompts=first.prompts,
                        link=first.link if isinstance(first.deployment.topology, Disaggregated) else None,
                    )
                )
            except UsageError as error:
                raise UsageError(f"line {first.row}, {first.deployment.label}: {error}") from error
        for row in rows:
            at = levels.index(_level(row))
            found[row.row] = _columns([trial[at] for trial in trials], row.deployment, hardware)
    return found


def _level(row: Asked) -> Level:
    return Level(load=row.load, num_requests=row.num_requests, seed=row.workload.seed)


def _levels(rows: Iterable[Asked]) -> list[Level]:
    """The sweep's levels in ascending order; with repeated prompts the published ladder's lower ones too,
    since their prompts were served before (five per unit of concurrency)."""
    levels = {_level(row) for row in rows}
    asked = [level for level in levels if isinstance(level.load, Closed)]
    first = next(iter(rows))
    published = all(level.num_requests == PUBLISHED_PROMPTS * level.load.value for level in asked)
    if asked and first.prompts == "repeated" and published:
        highest = max(level.load.value for level in asked)
        levels |= {
            Level(load=Closed(concurrency=step), num_requests=PUBLISHED_PROMPTS * step, seed=first.workload.seed)
            for step in PUBLISHED_LADDER
            if step < highest
        }
    return sorted(levels, key=lambda level: (level.load.value, level.num_requests))


def _columns(levels: Sequence[SimulatedLevel], deployment: Deployment, hardware: Hardware) -> dict[str, Any]:
    means = [figures(level) for level in levels]
    tpots = [tpot for tpot, _, _ in means if tpot is not None]
    ttfts = [_ttft_ms(level) for level in levels]
    medians = [
        statistics.median(
            (e - f) / (n - 1) * 1e3
            for e, f, n in zip(level.finish_s, level.first_token_s, level.output_tokens, strict=True)
        )
        for level in levels
        if level.output_tokens[0] > 1
    ]
    rps = statistics.fmean(rps for _, _, rps in means)
    out = rps * levels[0].output_tokens[0]
    tpot_ms = 1e3 * statistics.fmean(tpots) if tpots else None
    ttft_ms = 1e3 * statistics.fmean(ttft for _, ttft, _ in means)
    error = hardware.error
    values: tuple[float | None, ...] = (
        tpot_ms,
        statistics.fmean(medians) if medians else None,
        ttft_ms,
        statistics.fmean(values[len(values) // 2] for values in ttfts),
        statistics.fmean(values[min(int(0.99 * len(values)), len(values) - 1)] for values in ttfts),
        rps,
        out,
        out * hardware.gpus_per_node / deployment.gpus,
        *_interval(tpot_ms, error.tpot_percent if error else None),
        *_interval(ttft_ms, error.ttft_percent if error else None),
        *_interval(rps, error.requests_per_s_percent if error else None),
    )
    return {name: "" if value is None else f"{value:.5g}" for name, value in zip(COLUMNS, values, strict=True)}


def _interval(value: float | None, percent: float | None) -> tuple[float | None, float | None]:
    """Where 90 % of measured values are expected, from the held-out median error; unknown stays unknown."""
    if value is None or percent is None:
        return None, None
    factor = math.exp(TO_90 * percent / 100)
    return value / factor, value * factor


def _ttft_ms(level: SimulatedLevel) -> list[float]:
    return sorted(1e3 * (f - a) for f, a in zip(level.first_token_s, level.arrival_s, strict=True))


def render(header: Sequence[str], rows: Sequence[Mapping[str, str]], found: Mapping[int, Mapping[str, Any]]) -> str:
    """The rows as they came, in their order, with the predictions behind them."""
    kept = [name for name in header if name not in COLUMNS]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*kept, *COLUMNS], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for number, row in enumerate(rows, start=2):
        writer.writerow({**row, **found[number]})
    return out.getvalue()
