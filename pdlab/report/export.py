"""Levels in other tools' formats: AIPerf's JSON, InferenceX's rows, llm-d's benchmark report; and as a table.

The clients' formats have the figures of the whole run, as those clients do. They cannot express why a level is invalid,
nor a ramp, so such levels are left out. The table, CSV or Parquet, has every level. `pdlab.results.readers` reads all
of them.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.analysis.curves import gpus_of
from pdlab.core.deployment import Collocated, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.files import replace
from pdlab.core.mixes import Mixes
from pdlab.core.output_paths import check_folder, check_output
from pdlab.core.text import counted, listed
from pdlab.core.version import __version__
from pdlab.core.workload import Closed, Open, Ramp, Replay
from pdlab.report.load import Results, Row
from pdlab.results.readers import aiperf
from pdlab.results.readers.statistics import METRICS
from pdlab.results.schema import Distribution, Experiment, Run, Summary
from pdlab.results.stated_platform import GPU, engine_of, engine_version, gpu_types

AIPERF_SCHEMA, LLMD_SCHEMA = "1.4", "0.2"
# The readers' names of latencies, by metric.
AIPERF_NAMES, LLMD_NAMES = ({ours: theirs for theirs, ours in names.items()} for names in (aiperf.METRICS, METRICS))


class ExportedLevel(NamedTuple):
    """A level to write. ``name``: of its curve, as in the tables."""

    name: str
    experiment: Experiment
    run: Run

    @property
    def gpus(self) -> int:
        return gpus_of(self.experiment).total

    @property
    def platform(self) -> dict[str, str | None]:
        """What the engines ran on, as far as it is recorded or stated."""
        manifest = self.experiment.manifest
        types = listed(sorted(gpu_types(manifest))) or manifest.hardware.get(GPU)
        return {
            "device": gpus_of(self.experiment).device,
            "gpu_type": str(types) if types else None,
            "engine": engine_of(self.experiment),
            "engine_version": engine_version(self.experiment),
        }

    @property
    def pools(self) -> tuple[Pool | None, Pool | None]:
        """Of prefill and of decode; a collocated deployment has only the second."""
        topology = self.experiment.manifest.deployment and self.experiment.manifest.deployment.topology
        if isinstance(topology, Disaggregated):
            return topology.prefill, topology.decode
        return None, topology.pool if isinstance(topology, Collocated) else None

    @property
    def origin(self) -> dict[str, Any]:
        """What the formats have no field for."""
        deployment = self.experiment.manifest.deployment
        return {
            "version": __version__,
            "experiment": self.name,
            "deployment": deployment.label if deployment else None,
            "gpus": self.gpus,
            **self.platform,
            "repeat": self.run.key.repeat,
        }


class WrittenExport(NamedTuple):
    """The path of one written format, and the line that reports it."""

    path: Path
    line: str


def check_exports(exports: Mapping[str, Path], read: Sequence[Path]) -> None:
    """Raises UsageError if a file cannot be written or would be among the results of ``read``, folders or files, or if
    a library is missing."""
    for name, path in exports.items():
        if name in PER_LEVEL:
            check_folder(path, "--export")
        else:
            check_output(path, "--export")
        for source in read:
            if path.resolve().is_relative_to(source.resolve()):
                raise UsageError(f"--export {path}: {source} is read, and its results stay as they are; choose another")
    if "parquet" in exports:
        _parquet()


def write_exports(results: Results, exports: Mapping[str, Path]) -> list[WrittenExport]:
    """Write the levels in these formats, whose paths `check_exports` accepted. Raises UsageError if no level can be
    written in a format."""
    levels = [
        ExportedLevel(label, each.experiment, run) for label, each in results.labelled for run in each.experiment.runs
    ]
    written = []
    for name, path in exports.items():
        if name in TABLES:
            rows = [_with_platform(row, level) for row, level in zip(results.levels(), levels, strict=True)]
            TABLES[name](rows, path)
            written.append(WrittenExport(path, f"Export: {path} ({counted(len(rows), 'level')})"))
            continue
        reasons = [(level, _left_out(level.run, name)) for level in levels]
        kept = [level for level, reason in reasons if reason is None]
        if not kept:
            raise UsageError(f"--export {name}={path}: no level can be written ({_counts(reasons)}); use csv")
        if name == "inferencex":
            replace(path, _json([_inferencex(level) for level in kept]))
        else:
            file, make = PER_LEVEL[name]
            for level, folder in zip(kept, _folders(kept), strict=True):
                (path / folder).mkdir(parents=True, exist_ok=True)
                replace(path / folder / file, _json(make(level)))
        left = f"; left out: {_counts(reasons)}" if len(kept) < len(levels) else ""
        written.append(WrittenExport(path, f"Export: {path} ({counted(len(kept), 'level')}{left})"))
    return written


def _with_platform(row: Row, level: ExportedLevel) -> Row:
    """The row with its platform behind the number of GPUs."""
    names = list(row)
    place = names.index("gpus") + 1
    return {name: row[name] for name in names[:place]} | level.platform | {name: row[name] for name in names[place:]}


def _left_out(run: Run, name: str) -> str | None:
    """Why a level cannot be written in a client's format; None if it can."""
    if not run.validity.valid:
        return "not valid"
    if isinstance(run.load, Ramp | Replay):
        return "a ramp" if isinstance(run.load, Ramp) else "a replay"
    if isinstance(run.workload.lengths, Mixes) and not run.workload.lengths.constant_rate:
        return "a rate that changes with time"
    if name == "inferencex" and not isinstance(run.load, Closed):
        return "no closed loop"
    if name == "llmd" and isinstance(run.load, Open) and run.load.burstiness != 1:
        return "arrivals other than Poisson's"
    return None if run.completed else "no request was answered"


def _counts(reasons: list[tuple[ExportedLevel, str | None]]) -> str:
    return ", ".join(f"{count} {why}" for why, count in Counter(why for _, why in reasons if why).items())


def _folders(levels: list[ExportedLevel]) -> list[str]:
    """A folder per level, each with another name."""
    found: Counter[str] = Counter()
    names = []
    for level in levels:
        curve = re.sub(r"[^A-Za-z0-9.]+", "-", level.name).strip("-.").lower() or "curve"
        name = f"{curve}/{level.run.key.stem}"
        found[name] += 1
        names.append(name if found[name] == 1 else f"{curve}-{found[name]}/{level.run.key.stem}")
    return names


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


class _RequestTokens(NamedTuple):
    """Mean input and output tokens of a request."""

    input: float
    output: float


def _mean_tokens(whole: Summary) -> _RequestTokens:
    return _RequestTokens(
        whole.input_tokens_per_s * whole.duration_s / whole.completed,
        whole.output_tokens_per_s * whole.duration_s / whole.completed,
    )


def _in_ms(latency: Distribution) -> dict[str, float]:
    return {"avg" if name == "mean" else name: value * 1000.0 for name, value in latency.statistics_s.items()}


def _aiperf(level: ExportedLevel) -> dict[str, Any]:
    """``profile_export_aiperf.json``."""
    run, whole = level.run, level.run.whole
    lengths = _mean_tokens(whole)

    def figure(unit: str, value: float, **more: float) -> dict[str, Any]:
        return {"unit": unit, "avg": value, **more}

    if isinstance(run.load, Closed):
        phase: dict[str, Any] = {"type": "concurrency", "concurrency": run.load.concurrency}
    else:
        assert isinstance(run.load, Open)
        rate_rps = run.workload.mean_rps(run.load)
        phase = {"type": "gamma", "rate": rate_rps, "smoothness": run.load.burstiness}
        if run.load.burstiness == 1:
            phase = {"type": "poisson", "rate": rate_rps}
    return {
        "schema_version": AIPERF_SCHEMA,
        "pdlab": level.origin,
        "request_throughput": figure("requests/sec", whole.requests_per_s),
        "request_count": figure("requests", whole.completed),
        "error_request_count": figure("requests", run.failed),
        "benchmark_duration": figure("sec", whole.duration_s),
        **{AIPERF_NAMES[each]: {"unit": "ms", **_in_ms(value)} for each, value in whole.latencies.items()},
        "input_sequence_length": figure("tokens", lengths.input, sum=lengths.input * whole.completed),
        "output_sequence_length": figure("tokens", lengths.output, sum=lengths.output * whole.completed),
        "output_token_throughput": figure("tokens/sec", whole.output_tokens_per_s),
        "total_token_throughput": figure("tokens/sec", whole.total_tokens_per_s),
        "input_config": {
            "models": {"items": [{"name": level.experiment.model}] if level.experiment.model else []},
            "phases": [{"name": "profiling", "kind": "profiling", "requests": run.num_requests, **phase}],
        },
        "start_time": run.started_at,
        "end_time": run.finished_at,
    }


def _inferencex(level: ExportedLevel) -> dict[str, Any]:
    """A row of the aggregated JSON: latencies in s, throughput per GPU. Of PD the input rate is per prefill GPU and the
    output rate per decode GPU."""
    run, whole = level.run, level.run.whole
    assert isinstance(run.load, Closed)
    prefill, decode = level.pools
    lengths, platform = _mean_tokens(whole), level.platform
    counted = (prefill.gpus, decode.gpus) if prefill and decode else (level.gpus, level.gpus)
    row: dict[str, Any] = {
        "pdlab": level.origin,
        "hw": platform["gpu_type"],
        "model": level.experiment.model,
        "framework": platform["engine"],
        "framework_version": platform["engine_version"],
        "isl": lengths.input,
        "osl": lengths.output,
        "conc": run.load.concurrency,
        "num_gpus": level.gpus,
        "tp": decode.tp if decode else None,
        "disagg": prefill is not None,
        "tput_per_gpu": whole.total_tokens_per_s / level.gpus,
        "input_tput_per_gpu": whole.input_tokens_per_s / counted[0],
        "output_tput_per_gpu": whole.output_tokens_per_s / counted[1],
    }
    if prefill is not None and decode is not None:
        for role, pool in (("prefill", prefill), ("decode", decode)):
            row[f"{role}_tp"], row[f"{role}_num_workers"] = pool.tp, pool.replicas
            row[f"num_{role}_gpu"] = pool.gpus
    for metric, latency in whole.latencies.items():
        for name, value in latency.statistics_s.items():
            row[f"{'median' if name == 'p50' else name}_{metric}"] = value
    return {name: value for name, value in row.items() if value is not None}


def _llmd(level: ExportedLevel) -> dict[str, Any]:
    """Benchmark report 0.2. A component of the stack is one replica."""
    run, whole = level.run, level.run.whole
    lengths, platform = _mean_tokens(whole), level.platform
    if isinstance(run.load, Closed):
        load: dict[str, Any] = {"concurrency": run.load.concurrency}
    else:
        assert isinstance(run.load, Open)
        load = {"rate_qps": run.workload.mean_rps(run.load)}
    latencies = {
        LLMD_NAMES[each]: {"units": "s/token" if each in ("tpot", "itl") else "s", **value.statistics_s}
        for each, value in whole.latencies.items()
    }
    prefill, decode = level.pools
    roles = [("prefill", prefill), ("decode" if prefill else "replica", decode)]
    stack = [
        {
            "metadata": {"label": f"{role}-{number}"},
            "standardized": {
                "kind": "inference_engine",
                "tool": platform["engine"],
                "tool_version": platform["engine_version"],
                "role": role,
                "replicas": 1,
                "model": {"name": level.experiment.model},
                "accelerator": {
                    "model": platform["gpu_type"],
                    "count": pool.gpus // pool.replicas,
                    "parallelism": {"tp": pool.tp},
                },
            },
        }
        for role, pool in roles
        if pool is not None
        for number in range(pool.replicas)
    ]
    return {
        "version": LLMD_SCHEMA,
        "run": {
            "uid": f"{level.name}/{run.key.stem}",
            "time": {"start": run.started_at, "end": run.finished_at, "duration": f"PT{whole.duration_s}S"},
        },
        "pdlab": level.origin,
        "scenario": {
            "stack": stack,
            "load": {
                "standardized": {
                    "tool": "vllm-benchmark",
                    "input_seq_len": {"distribution": "other", "value": lengths.input},
                    "output_seq_len": {"distribution": "other", "value": lengths.output},
                    **load,
                }
            },
        },
        "results": {
            "request_performance": {
                "aggregate": {
                    "requests": {
                        "total": run.num_requests,
                        "failures": run.failed,
                        "input_length": {"units": "count", "mean": lengths.input},
                        "output_length": {"units": "count", "mean": lengths.output},
                    },
                    "latency": latencies,
                    "throughput": {
                        "request_rate": {"units": "queries/s", "mean": whole.requests_per_s},
                        "input_token_rate": {"units": "tokens/s", "mean": whole.input_tokens_per_s},
                        "output_token_rate": {"units": "tokens/s", "mean": whole.output_tokens_per_s},
                        "total_token_rate": {"units": "tokens/s", "mean": whole.total_tokens_per_s},
                    },
                }
            }
        },
    }


def _csv(rows: list[dict[str, Any]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace(path, text.getvalue().encode())


def _parquet() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("--export parquet=FILE needs pyarrow, which is not installed: pip install pyarrow") from error
    return pyarrow


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    pyarrow = _parquet()
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    replace(path, sink.getvalue())


# Formats with a file per level: its name, and what makes it.
PER_LEVEL: dict[str, tuple[str, Callable[[ExportedLevel], dict[str, Any]]]] = {
    "aiperf": ("profile_export_aiperf.json", _aiperf),
    "llmd": ("benchmark_report.json", _llmd),
}
TABLES: dict[str, Callable[[list[dict[str, Any]], Path], None]] = {"csv": _csv, "parquet": _write_parquet}
