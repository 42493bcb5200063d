#!/usr/bin/env python3
"""Rehearsed levels beside those of the pure simulator, and beside published ones.

    python benchmarks/rehearsal.py bm_results/rehearsed-story/*
    python benchmarks/rehearsal.py bm_results/rehearsed-published/* --published ../shared/reference/measured-h100
    python benchmarks/rehearsal.py bm_results/fluid --within ttft_ms=2000,tpot_ms=12 --from-s 120

Prints a table of mean TTFT and TPOT. Simulated is the same deployment under the same levels in the order in which they
were rehearsed, on pools that were empty before the first: the mean over --seeds of what routers draw, with the least
and the most of them where they differ. A prefix that all prompts share is a share of each prompt that every engine has,
but for the first one. Published levels are those of the same topology, lengths and concurrency.
--within adds the share of requests that are within every bound, --from-s leaves earlier ones out (simulated seconds).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.deployment import Disaggregated  # noqa: E402
from pdlab.core.workload import Level, Slo, parse_slo  # noqa: E402
from pdlab.plan.accuracy import name_of  # noqa: E402
from pdlab.plan.fluid_pools import share_within  # noqa: E402
from pdlab.results.published_folders import load_experiment  # noqa: E402
from pdlab.results.schema import Experiment, Run  # noqa: E402
from pdlab.results.slo import stresses  # noqa: E402
from pdlab.results.store import MANIFEST, Store  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import SimulatedLevel, figures  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402


class Means(NamedTuple):
    """Of one level, in seconds."""

    ttft_s: float
    tpot_s: float


def means(run: Run) -> Means:
    """What a run has of them."""
    ttft, tpot = run.whole.ttft, run.whole.tpot
    assert ttft is not None and ttft.mean_s is not None and tpot is not None and tpot.mean_s is not None
    return Means(ttft.mean_s, tpot.mean_s)


def simulated(experiment: Experiment, seed: int) -> list[SimulatedLevel]:
    """Every level of a rehearsed experiment by the simulator."""
    manifest = experiment.manifest
    assert manifest.deployment is not None and manifest.rehearsal is not None
    shape = load_model(manifest.deployment.model)
    assert shape is not None
    workload = experiment.runs[0].workload
    levels = [Level(load=r.load, num_requests=r.num_requests, seed=r.seed or 0) for r in experiment.runs]
    share = workload.shared_prefix_tokens / workload.mean_tokens.input
    hardware = load_hardware(manifest.rehearsal.hardware)
    return simulate(
        manifest.deployment,
        levels,
        workload,
        hardware,
        shape,
        seed=seed,
        prefix_hit_rate=share,
        scattered=False if manifest.rehearsal.assume_merged else None,
    )


def means_of(level: SimulatedLevel) -> Means:
    """What a simulated level has of them."""
    found = figures(level)
    return Means(found.ttft_s, found.tpot_s or 0.0)


class Column(NamedTuple):
    """One source's figures of a level: the mean, the least and the most of its seeds."""

    mean: Means
    least: Means
    most: Means


def column(of_seeds: Sequence[Means]) -> Column:
    ttfts_s, tpots_s = zip(*of_seeds, strict=True)
    return Column(*(Means(each(ttfts_s), each(tpots_s)) for each in (fmean, min, max)))


def shares(folder: Path, run: Run, models: Sequence[SimulatedLevel], slo: Slo, from_s: float) -> str:
    """The requests within every bound, rehearsed and simulated: ``93.1 % / 92.9 %``."""
    requests = Store(folder).requests(run.key)
    met = fmean(stresses(requests, slo)[requests.arrival_s >= from_s] <= 1)
    return f"{100 * met:.1f} % / {100 * fmean(share_within(each, slo, from_s) for each in models):.1f} %"


def alike(one: Experiment, run: Run, other: Experiment, theirs: Run) -> bool:
    """Whether two runs are of one configuration, whatever their prompts share."""
    mine, its = one.manifest.deployment, other.manifest.deployment
    if mine is None or its is None or mine.label != its.label or run.load != theirs.load:
        return False
    tokens = (run.workload.input_tokens, run.workload.output_tokens, run.workload.mode)
    return tokens == (theirs.workload.input_tokens, theirs.workload.output_tokens, theirs.workload.mode)


def rehearsed(folders: Sequence[Path]) -> list[tuple[Path, Experiment]]:
    """Those of the folders that hold a rehearsal's levels, in the order in which these were rehearsed."""
    loaded = [(folder, load_experiment(folder)) for folder in folders if (folder / MANIFEST).is_file()]
    return [
        (folder, each.model_copy(update={"runs": tuple(sorted(each.runs, key=lambda run: run.started_at or ""))}))
        for folder, each in loaded
        if each.manifest.rehearsal is not None and each.runs
    ]


def row(name: str, level: str, columns: Sequence[Column | None]) -> str:
    """One line: TTFT, then TPOT, each with how far the first column is off the others."""

    def cell(figure: int, digits: int) -> str:
        first = columns[0]
        assert first is not None
        words = []
        for each in columns:
            if each is None:
                words.append("-")
                continue
            mean, least, most = (f"{1e3 * of[figure]:.{digits}f}" for of in each)
            off = "" if each is first else f"{100 * (first.mean[figure] / each.mean[figure] - 1):+.0f} %"
            words.append(f"{mean} ({off}{'' if least == most else f'; {least} to {most}'})" if off else mean)
        return " / ".join(words)

    return f"| {name} | {level} | {cell(0, 0)} | {cell(1, 2)} |"


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folders", nargs="+", type=Path, help="of rehearsed runs")
    flags.add_argument("--published", type=Path, metavar="DIR", help="folders of published runs")
    flags.add_argument("--within", metavar="BOUNDS", help="as run_bm.sh --slo has them")
    flags.add_argument("--from-s", type=float, default=0.0, metavar="S")
    flags.add_argument("--seeds", type=int, default=8, metavar="N", help="of the simulator (default %(default)s)")
    args = flags.parse_args()
    slo = parse_slo(args.within, 0.95) if args.within else None
    published = (
        [load_experiment(each) for each in sorted(args.published.iterdir()) if each.is_dir()] if args.published else []
    )
    beside = "rehearsed / simulated" + (" / published" if published else "")
    more = f" {args.within}: rehearsed / simulated |" if slo else ""
    print(
        f"| deployment | level | TTFT mean, ms: {beside} | TPOT mean, ms |{more}\n|---|---|---|---|{'---|' * bool(slo)}"
    )
    for folder, experiment in rehearsed(args.folders):
        deployment, rehearsal = experiment.manifest.deployment, experiment.manifest.rehearsal
        assert deployment is not None and rehearsal is not None
        tcp = isinstance(deployment.topology, Disaggregated) and "tcp" in (deployment.topology.transport.ucx_tls or "")
        way = (", direct streaming" if deployment.serving.direct_streaming else "") + (", TCP" if tcp else "")
        of_seeds = [simulated(experiment, seed) for seed in range(args.seeds)]
        for run, models in zip(experiment.runs, zip(*of_seeds, strict=True), strict=True):
            columns: list[Column | None] = [column([means(run)]), column([means_of(each) for each in models])]
            if published:
                pairs = [(each, theirs) for each in published for theirs in each.runs]
                found = [means(theirs) for each, theirs in pairs if alike(experiment, run, each, theirs)]
                columns.append(column(found[:1]) if found else None)
            level = name_of(run.load) + ("" if run.validity.valid else ", invalid")
            within = f" {shares(folder, run, models, slo, args.from_s)} |" if slo else ""
            print(row(f"{deployment.label}{way}, K {rehearsal.slow_down:g}", level, columns) + within)
    return 0


if __name__ == "__main__":
    sys.exit(main())
