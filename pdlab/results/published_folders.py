"""Result folders written by others -> ``Experiment``. The only place that reads meaning out of names.

The published format is one folder per experiment with the summary JSON of ``vllm bench serve``
per level (``conc8.json``, ``conc128_rr4.json``) and the configuration in the folder's name
(``gptoss_itl5000_otl250_mixed_1xtp2-1xtp2``). What such a file does not say is None here.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.core.deployment import Collocated, Deployment, Disaggregated, PlacementKind, Pool, parse_pool, unguarded
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.text import choices
from pdlab.core.workload import Closed, Load, Open, RunKey, Workload, WorkloadMode
from pdlab.results.schema import Distribution, Experiment, Manifest, Run, Summary, Validity
from pdlab.results.store import MANIFEST, Store, searched

# Above this, a request rate is how a client writes "all at once", not a load.
UNLIMITED_RPS = 1e5
# The published experiments ran on nodes of 8 GPUs: a PD group above that cannot be packed.
PUBLISHED_NODE_GPUS = 8

_POOL = r"\d+x(?:tp\d+)?(?:pp\d+)?(?:dp\d+)?(?:ep)?"
_TOPOLOGY = re.compile(
    rf"(?:^|[_-])p?(?P<first>{_POOL})(?:-d?(?P<second>{_POOL}))?(?P<tail>(?:[-_][a-z0-9.]+)*)$", re.IGNORECASE
)
_ANY_POOL = re.compile(r"(?<![a-z0-9])[pd]?\d+x(?:tp|pp|dp|ep)", re.IGNORECASE)
_LENGTHS = re.compile(r"itl(?P<input>\d+)_otl(?P<output>\d+)", re.IGNORECASE)
_MODE = re.compile(r"(?P<mode>mixed|prefill[-_]only|decode[-_]only)", re.IGNORECASE)
_LEVEL = re.compile(r"conc(?P<concurrency>\d+)(?:_rr(?P<rate>\d+(?:\.\d+)?))?(?:[-_]r\d+)?", re.IGNORECASE)
_PERCENTILE = re.compile(r"p(?P<number>\d+(?:\.\d+)?)_(?P<metric>ttft|tpot|itl|e2el)_ms")


class FolderName(NamedTuple):
    """What a folder's name says; None where it says nothing."""

    topology: Collocated | Disaggregated | None
    input_tokens: int | None
    output_tokens: int | None
    mode: WorkloadMode | None


def load_experiment(path: Path, gpus: int | None = None) -> Experiment:
    """Read one experiment folder: ours (with a manifest) or one of the published format.

    ``gpus`` states the number of GPUs of a folder that does not record it. Raises StoreError or
    UsageError, naming the folder and what to do.
    """
    require_folder(path)
    with searched(path):
        ours = (path / MANIFEST).is_file()
        listed = sorted(path.iterdir())
        files = [p for p in listed if p.suffix == ".json" and not p.name.startswith(".") and p.is_file()]
    if ours:
        return _own(path, gpus)
    if not files:
        raise StoreError(f"{path} holds no result files{_hint_at_subfolders(path)}")
    if _is_ours(files[0]):
        raise StoreError(f"{path}: {MANIFEST} is missing, without which its levels cannot be read; restore it")
    return _published(path, files, gpus)


def require_folder(path: Path) -> None:
    """Raises StoreError where ``path`` is no folder, with the nearest name beside it."""
    with searched(path):
        if path.is_dir():
            return
        exists = path.exists()
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = choices(path.name, (name for name in beside if not name.startswith(".")))
    if exists:
        raise StoreError(f"{path} is a file; give the folder of an experiment, for example bm_results/collocated-4xtp2")
    hint = (
        near if near.startswith("did") else "give the folder of an experiment, for example bm_results/collocated-4xtp2"
    )
    raise StoreError(f"{path} does not exist; {hint}")


def _is_ours(file: Path) -> bool:
    """A level of the store's; a file that cannot be read is reported by the reader."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "schema_version" in content and "key" in content


def _own(path: Path, gpus: int | None) -> Experiment:
    experiment = Store(path).load()
    manifest = experiment.manifest
    stated = manifest.deployment.gpus if manifest.deployment else manifest.gpus
    if manifest.deployment and manifest.gpus not in (None, stated):
        raise StoreError(
            f"{path}: {MANIFEST} contradicts itself: gpus is {manifest.gpus}, but its deployment uses {stated}"
        )
    if gpus is not None and stated not in (None, gpus):
        raise UsageError(f"{path}: its {MANIFEST} says {stated} GPUs, --gpus says {gpus}; leave --gpus out for it")
    if stated is None and gpus is None:
        raise StoreError(
            f"{path}: {MANIFEST} does not record how many GPUs were used; add --gpus {_folder_name(path)}=N"
        )
    if not experiment.runs:
        raise StoreError(f"{path} has a {MANIFEST}, but no finished level yet; run the sweep again with --resume")
    return experiment.model_copy(update={"manifest": manifest.model_copy(update={"gpus": stated or gpus})})


def _published(path: Path, files: list[Path], gpus: int | None) -> Experiment:
    name = _folder_name(path)
    named = parse_name(name)
    topology = named.topology
    if gpus is not None and topology is not None and _gpus(topology) != gpus:
        topology = None
    total = gpus if gpus is not None else (_gpus(topology) if topology else None)
    if total is None:
        raise StoreError(
            f"{path}: the folder's name does not give the configuration (expected it to end in 4xtp2, or in "
            f"1xtp2-1xtp2 for prefill-decode), so nothing can be normalised; rename it, or add viz.py's --gpus {name}=N"
        )
    contents = [(file, _read(file)) for file in files]
    models = sorted({model for _, data in contents if (model := _text(data, "model_id"))})
    if len(models) > 1:
        raise StoreError(f"{path} holds runs of several models ({', '.join(models)}); one folder is one experiment")
    runs: list[Run] = []
    repeats: dict[tuple[str, float], int] = {}
    for file, data in contents:
        run = _run(file, data, name, named)
        repeat = repeats.get((run.key.kind, run.key.value), 0)
        repeats[run.key.kind, run.key.value] = repeat + 1
        runs.append(run.model_copy(update={"key": run.key.model_copy(update={"repeat": repeat})}))
    runs.sort(key=lambda run: (run.key.kind, run.key.value, run.key.repeat))
    deployment = None
    if topology is not None:
        deployment = Deployment(name=name, model=models[0] if models else "unknown", topology=unguarded(topology))
    manifest = Manifest(origin="imported", label=name, deployment=deployment, gpus=total, workload=runs[0].workload)
    return Experiment(name=name, manifest=manifest, runs=tuple(runs))


def parse_name(name: str) -> FolderName:
    """What a published folder's name says. Raises UsageError on a configuration that makes no sense.

    By the published convention the last part is the configuration, ``4xtp2`` (collocated) or
    ``1xtp2-1xtp2`` (prefill-decode), then free words. ``spread`` among these means spread; without
    it prefill and decode shared a node, unless they need more than one.
    """
    lengths, mode = _LENGTHS.search(name), _MODE.search(name)
    return FolderName(
        topology=_topology(name),
        input_tokens=int(lengths["input"]) if lengths else None,
        output_tokens=int(lengths["output"]) if lengths else None,
        mode=_as_mode(mode["mode"]) if mode else None,
    )


def _topology(name: str) -> Collocated | Disaggregated | None:
    match = _TOPOLOGY.search(name)
    if not match or len(_ANY_POOL.findall(name)) != (2 if match["second"] else 1):
        return None
    words = re.split(r"[-_]", match["tail"].lower())
    try:
        pools = [parse_pool(text.lower()) for text in (match["first"], match["second"]) if text]
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    if "ep" in words:
        pools = [pool.model_copy(update={"expert_parallel": True}) for pool in pools]
    if len(pools) == 1:
        return Collocated(pool=pools[0])
    return Disaggregated(prefill=pools[0], decode=pools[1], placement=_placement(name, pools))


def _placement(name: str, pools: list[Pool]) -> PlacementKind:
    words = re.split(r"[-_]", name.lower())
    if "spread" in words or ("pack" not in words and sum(pool.gpus for pool in pools) > PUBLISHED_NODE_GPUS):
        return "spread"
    return "pack"


def _as_mode(text: str) -> WorkloadMode:
    modes: dict[str, WorkloadMode] = {"prefill": "prefill-only", "decode": "decode-approx"}
    return modes.get(text.lower()[:-5], "mixed")


def _gpus(topology: Collocated | Disaggregated) -> int:
    if isinstance(topology, Collocated):
        return topology.pool.gpus
    return topology.prefill.gpus + topology.decode.gpus


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict) or "request_throughput" not in data:
        if isinstance(data, dict) and "schema_version" in data:
            raise StoreError(f"{file} was written by pdlab, but {file.parent} has no {MANIFEST}; copy the whole folder")
        raise StoreError(f"{file} is not a summary of `vllm bench serve` (no request_throughput); move it elsewhere")
    return data


def _run(file: Path, data: dict[str, Any], name: str, named: FolderName) -> Run:
    duration_s = _number(file, data, "duration")
    completed = int(_number(file, data, "completed"))
    input_tokens = _number(file, data, "total_input_tokens")
    output_tokens = _number(file, data, "total_output_tokens")
    num_requests = int(_number(file, data, "num_prompts")) if data.get("num_prompts") else completed
    if duration_s <= 0:
        raise StoreError(f"{file}: duration is {duration_s:g} s; no rate can be computed from it")
    failed = num_requests - completed
    load, contradictions = _load(file, data)
    reasons = list(contradictions)
    wrong = [key for key, value in data.items() if key.endswith("_ms") and _no_latency(value)]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        reasons.append(f"{wrong[0]} is {data[wrong[0]]!r}{more}: not a latency")
    if failed:
        reasons.append(f"{failed} of {num_requests} requests failed")
    workload, contradictions = _workload(named, completed, input_tokens, output_tokens)
    whole = Summary(
        duration_s=duration_s,
        completed=completed,
        requests_per_s=completed / duration_s,
        input_tokens_per_s=input_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft=_distribution(data, "ttft") if completed else None,
        tpot=_distribution(data, "tpot") if output_tokens > completed else None,
        itl=_distribution(data, "itl") if output_tokens > completed else None,
        e2el=_distribution(data, "e2el") if completed else None,
    )
    return Run(
        origin="imported",
        label=name,
        model=_text(data, "model_id"),
        key=RunKey(kind=load.kind, value=load.value),
        workload=workload,
        load=load,
        num_requests=num_requests,
        completed=completed,
        failed=failed,
        whole=whole,
        validity=Validity(reasons=(*reasons, *contradictions)),
    )


def published_load(file: Path, data: dict[str, Any]) -> Load:
    """The load of one file of the published format."""
    return _load(file, data)[0]


def _load(file: Path, data: dict[str, Any]) -> tuple[Load, list[str]]:
    """The load of one level, and where the file's name contradicts its content (the content counts).

    A request-rate run is a run at that rate, whatever max_concurrency it carries.
    """
    match = _LEVEL.fullmatch(file.stem)
    named_rate = float(match["rate"]) if match and match["rate"] else None
    named_concurrency = int(match["concurrency"]) if match else None
    rate = _finite(data.get("request_rate"))
    concurrency = _finite(data.get("max_concurrency"))
    if rate is not None and rate >= UNLIMITED_RPS:
        rate = None
    rate = named_rate if rate is None else rate
    if rate is not None and rate < 0:
        raise StoreError(f"{file}: request_rate is {rate:g}; expected a number above 0")
    if rate:
        reasons = _contradiction("request rate", named_rate, rate)
        return Open(rate_rps=rate, burstiness=_finite(data.get("burstiness")) or 1.0), reasons
    concurrency = named_concurrency if concurrency is None else concurrency
    if concurrency is not None and not concurrency >= 1:
        raise StoreError(f"{file}: max_concurrency is {concurrency:g}; expected a whole number from 1")
    if not concurrency:
        raise StoreError(f"{file}: neither a request rate nor max_concurrency; name it concN.json or concN_rrR.json")
    return Closed(concurrency=int(concurrency)), _contradiction("concurrency", named_concurrency, concurrency)


def _workload(
    named: FolderName, completed: int, input_tokens: float, output_tokens: float
) -> tuple[Workload, list[str]]:
    sent_input = max(1, round(input_tokens / completed)) if completed else (named.input_tokens or 1)
    sent_output = max(1, round(output_tokens / completed)) if completed else (named.output_tokens or 1)
    mode = named.mode
    if mode is None:
        mode = "prefill-only" if sent_output == 1 else "decode-approx" if sent_input == 1 else "mixed"
    workload = Workload(
        input_tokens=sent_input if named.input_tokens is None else max(1, named.input_tokens),
        output_tokens=sent_output if named.output_tokens is None else max(1, named.output_tokens),
        mode=mode,
    )
    # A tokenizer turns some random prompts back into a token more or fewer: 2 % is not a contradiction.
    reasons = [
        f"the folder's name says {expected} {side} tokens per request, the file has {actual}"
        for side, expected, actual in (
            ("input", workload.sent_input_tokens, sent_input),
            ("output", workload.sent_output_tokens, sent_output),
        )
        if abs(expected - actual) > max(1, 0.02 * expected)
    ]
    return workload, reasons


def _contradiction(name: str, named: float | None, actual: float) -> list[str]:
    if named is None or math.isclose(named, actual, rel_tol=1e-6):
        return []
    return [f"the file's name says {name} {named:g}, its content {actual:g}"]


def _distribution(data: dict[str, Any], metric: str) -> Distribution | None:
    mean_ms, median_ms = _finite(data.get(f"mean_{metric}_ms")), _finite(data.get(f"median_{metric}_ms"))
    if mean_ms is None or median_ms is None:
        return None
    percentiles = {"p50": median_ms / 1000}
    for key, value in data.items():
        match = _PERCENTILE.fullmatch(key)
        number = _finite(value)
        if match and match["metric"] == metric and number is not None:
            percentiles[f"p{float(match['number']):g}"] = number / 1000
    return Distribution(mean_s=mean_ms / 1000, percentiles_s=percentiles)


def _no_latency(value: Any) -> bool:
    """A number that is none, or below 0."""
    return isinstance(value, float | int) and not isinstance(value, bool) and not (math.isfinite(value) and value >= 0)


def _text(data: dict[str, Any], key: str) -> str | None:
    """The text of ``key``; None where the file has none there."""
    value = data.get(key)
    return value if isinstance(value, str) and value else None


def _number(file: Path, data: dict[str, Any], key: str) -> float:
    value = _finite(data.get(key))
    if value is None or value < 0:
        raise StoreError(f"{file}: {key} is {data.get(key)!r}; expected a number from `vllm bench serve`")
    return value


def _finite(value: Any) -> float | None:
    """The value as a finite float; None for anything else (clients write "inf" for no limit)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _hint_at_subfolders(path: Path) -> str:
    folders = sorted(p.name for p in path.iterdir() if p.is_dir() and any(p.glob("*.json")))
    if not folders:
        return "; run a sweep into it first (run_bm.sh), or give another folder"
    shown = ", ".join(folders[:3]) + (", ..." if len(folders) > 3 else "")
    return f" itself, but its subfolders do: give those ({shown})"


def _folder_name(path: Path) -> str:
    return path.resolve().name
