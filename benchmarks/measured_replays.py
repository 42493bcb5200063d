"""Replays on this machine's CPUs, for the benchmarks that compare deployments by them: an experiment made of plain
data, run or gone on with, and its levels."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.analysis.replays import ReplayFacts, replay_facts  # noqa: E402
from pdlab.bench.experiment.schedule import make_schedule  # noqa: E402
from pdlab.results.level_data import LevelData  # noqa: E402
from pdlab.results.schema import Run  # noqa: E402
from pdlab.results.store import Store  # noqa: E402
from pdlab.steps.runner import StepRunner  # noqa: E402

# Servers say how many tokens of each prompt were cached.
TOLD = {"enable_prompt_tokens_details": True}


class Replayed(NamedTuple):
    """One level. ``predicted``: least and most of the share of prompt tokens that was cached by vLLM's rules (None:
    nobody can follow them)."""

    configuration: str
    workload: str
    run: Run
    facts: ReplayFacts
    predicted: tuple[float, float] | None


def measured(name: str, deployments: Sequence[Mapping[str, Any]], workloads: Mapping[str, Any], out: Path) -> int:
    """Write the workload files and the experiment into ``out``, and run what is not measured yet; its exit code."""
    out.mkdir(parents=True, exist_ok=True)
    for each, content in workloads.items():
        (out / f"{each}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    experiment = {
        "name": name,
        "where": {"local": 2},
        "deployments": [{**each, "engine_arg": {**TOLD, **each.get("engine_arg", {})}} for each in deployments],
        "workloads": [{"name": each, "file": f"{each}.yaml"} for each in workloads],
        "repeats": 1,
        "launch_timeout_s": 300,
    }
    file = out / f"{name}.experiment.yaml"
    file.write_text(yaml.safe_dump(experiment, sort_keys=False), encoding="utf-8")
    return StepRunner().run_shown("-m", "pdlab", "experiment", str(file), "--out", str(out), "--resume")


def levels(name: str, out: Path) -> Iterator[Replayed]:
    """What is measured of an experiment, by its configurations in the file's order, then by workload."""
    plan = make_schedule(str(out / f"{name}.experiment.yaml"))
    order = [configuration.name for configuration in plan.configurations]
    visits = sorted(plan.visits, key=lambda visit: (visit.repeat, order.index(visit.configuration.name)))
    for visit in visits:
        for part in visit.parts:
            store = Store(out / name / part.folder)
            for run in store.runs():
                if run.key.repeat != visit.repeat:
                    continue
                requests = store.requests(run.key)
                facts = replay_facts(requests)
                if facts is not None:
                    yield Replayed(visit.configuration.name, part.workload.name, run, facts, _predicted(requests))


def _predicted(requests: LevelData) -> tuple[float, float] | None:
    answered, own = requests.ok & requests.replayed.known, requests.replayed
    tokens = own.foreseen_tokens[answered]
    prompts = requests.input_tokens[answered].sum()
    least, most = (
        np.where(np.isnan(tokens), bounds[answered], tokens).sum() / prompts
        for bounds in (own.foreseen_least, own.foreseen_most)
    )
    return None if not prompts or math.isnan(least) else (float(least), float(most))


def predicted(row: Replayed) -> str:
    """One share, or both bounds."""
    if row.predicted is None:
        return "unknown"
    least, most = row.predicted
    return percent(least) if least == most else f"{100 * least:.1f} to {percent(most)}"


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def milliseconds(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{digits}f}"


def print_table(columns: Mapping[str, Callable[[Replayed], str]], rows: Iterator[Replayed]) -> None:
    """Markdown. A level that failed gates is followed by their names."""
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        failed = ", ".join(sorted(row.run.validity.failed_gates))
        print(f"| {' | '.join(cell(row) for cell in columns.values())} |{f' invalid: {failed}' if failed else ''}")


def main(
    about: str,
    name: str,
    deployments: Sequence[Mapping[str, Any]],
    workloads: Mapping[str, Any],
    columns: Mapping[str, Callable[[Replayed], str]],
) -> int:
    """The command line of a benchmark: run, or go on, and print the table of what is there."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder; what it has is not measured again")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of what is there")
    args = parser.parse_args()
    code = 0 if args.table else measured(name, deployments, workloads, args.out)
    print_table(columns, levels(name, args.out))
    return code
