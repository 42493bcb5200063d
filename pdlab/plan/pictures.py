"""What the pictures of a plan show: predicted experiments with bands and notes, and goodput over bounds."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pdlab.analysis.goodput_map import GoodputMap, RateSweep, goodput_map
from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.rendering import rendered
from pdlab.core.workload import Slo, Workload
from pdlab.plan import TEMPLATES
from pdlab.plan.extrapolation import OutsideFit
from pdlab.plan.facts import has_regime_map, regime_map
from pdlab.plan.open_loop import under_rates
from pdlab.plan.planner import Candidate, Plan, outside
from pdlab.plan.scenario import LoadResult, Scenario
from pdlab.plan.step_findings import step_findings
from pdlab.sim.hardware import Hardware
from pdlab.sim.level import SimulatedLevel, to_run

if TYPE_CHECKING:
    from pdlab.plan.accuracy import MeasuredSweep
    from pdlab.results.schema import Experiment, Run, Summary

PREDICTED = "predicted"
LEAST_DRAWN = 5  # candidates
# The bounds of a map of goodput, as shares of the SLO's bounds; without such a bound, of the seconds beside them.
TTFT_SHARES, DEFAULT_TTFT_S = (0.25, 0.5, 1.0, 2.0, 4.0), 1.0
TPOT_SHARES, DEFAULT_TPOT_S = (0.5, 0.75, 1.0, 1.5, 2.0), 0.016


class PredictedCurve(NamedTuple):
    """A predicted experiment. ``outside``: in what it is extrapolated; a curve has a band only if this is empty."""

    experiment: Experiment
    outside: tuple[OutsideFit, ...]


def drawn_candidates(plan: Plan, scenario: Scenario, top: int) -> list[Candidate]:
    """The first ``top`` candidates, at least `LEAST_DRAWN`, the best collocated one, and those of the `regime_map`."""
    first, collocated = plan.candidates[: max(top, LEAST_DRAWN)], plan.best_candidate(collocated=True)
    regimes = regime_map(plan, scenario).regimes if has_regime_map(plan, scenario) else ()
    labels = {regime.label for regime in regimes}
    others = [each for each in (*plan.candidates, *plan.screened) if each.deployment.label in labels]
    # By identity: equal candidates have equal arrays, which have no single truth.
    drawn = {id(each): each for each in (*first, collocated, *others) if each is not None}
    return list(drawn.values())


def candidate_curve(candidate: Candidate, scenario: Scenario) -> PredictedCurve:
    """The loads of a candidate as an experiment of simulated runs, with the figures of the ranking."""
    deployment, levels = candidate.deployment, [outcome.level for outcome in candidate.outcomes]
    experiment = _experiment(deployment.label, deployment, scenario.workload, levels)
    runs = tuple(
        run.model_copy(update={"steady": _ranked(outcome, run)})
        for run, outcome in zip(experiment.runs, candidate.outcomes, strict=True)
    )
    return PredictedCurve(experiment.model_copy(update={"runs": runs}), outside(candidate, scenario))


def _ranked(outcome: LoadResult, run: Run) -> Summary:
    """The figures by which a load is ranked, in the place of those of a measured run's steady window."""
    from pdlab.results.metrics import distribution

    ttft_s, tpot_s, e2el_s = outcome.columns
    tokens_per_s = outcome.requests_per_s * run.whole.input_tokens_per_s / run.whole.requests_per_s
    return run.whole.model_copy(
        update={
            "completed": len(e2el_s),
            "judged": len(e2el_s),
            "requests_per_s": outcome.requests_per_s,
            "input_tokens_per_s": tokens_per_s,
            "output_tokens_per_s": outcome.output_tokens_per_s,
            "ttft": distribution(ttft_s),
            "tpot": distribution(tpot_s) if run.whole.tpot is not None else None,
            "e2el": distribution(e2el_s),
        }
    )


def simulated_as_measured(
    sweep: MeasuredSweep, hardware: Hardware, shape: ModelShape, seed: int, *, steady: bool
) -> Experiment:
    """The levels of a measured experiment, simulated as they were measured. ``steady``: the runs have a steady window,
    if they are long enough for one."""
    levels = sweep.simulated(hardware, shape, seed=seed)
    predicted = _experiment(sweep.name, sweep.deployment, sweep.workload, levels)
    if steady:
        return predicted
    runs = tuple(run.model_copy(update={"steady": None}) for run in predicted.runs)
    return predicted.model_copy(update={"runs": runs})


def _experiment(name: str, deployment: Deployment, workload: Workload, levels: Iterable[SimulatedLevel]) -> Experiment:
    from pdlab.results.schema import Experiment, Manifest

    label = deployment.label
    return Experiment(
        name=f"{name} {PREDICTED}",
        manifest=Manifest(
            origin="simulated", label=label, deployment=deployment, gpus=deployment.gpus, workload=workload
        ),
        runs=tuple(to_run(level, label, workload) for level in levels),
    )


def curve_notes(curves: Sequence[PredictedCurve], hardware: Hardware) -> list[str]:
    """The lines below a picture: the source of the step times, the bands, and the curves without a band."""
    without_band: dict[tuple[OutsideFit, ...], list[str]] = {}
    for curve in curves:
        if curve.outside:
            without_band.setdefault(curve.outside, []).append(curve.experiment.name)
    return rendered(
        TEMPLATES / "curves.txt",
        hardware=hardware,
        findings=step_findings(hardware),
        # A curve of one level has no area.
        banded=hardware.error is not None
        and any(len(curve.experiment.runs) > 1 and not curve.outside for curve in curves),
        extrapolated=without_band,
    ).splitlines()


def simulated_sweeps(plan: Plan, scenario: Scenario, measured: Collection[str]) -> list[RateSweep]:
    """The ranked candidates under growing request rates: what is best at other bounds may have a low rank at those of
    the SLO. ``measured``: labels of deployments that are left out."""
    sweeps = []
    for candidate in plan.candidates:
        if candidate.deployment.label not in measured:
            most = max(candidate.outcomes, key=lambda outcome: outcome.requests_per_s)
            stays_s = statistics.fmean(most.columns[2].tolist())
            gpus = candidate.total_gpus / candidate.copies
            sweeps.append(
                under_rates(scenario, candidate.deployment, most.requests_per_s, gpus, stays_s, candidate.rates)
            )
    return sweeps


def map_over_bounds(sweeps: Sequence[RateSweep], slo: Slo) -> GoodputMap:
    """The goodput of every sweep over bounds on TTFT and TPOT around those of the SLO."""
    return goodput_map(
        sweeps,
        [share * (slo.ttft_s or DEFAULT_TTFT_S) for share in TTFT_SHARES],
        [share * (slo.tpot_s or DEFAULT_TPOT_S) for share in TPOT_SHARES],
        slo.quantile,
    )


def map_title(scenario: Scenario, price_per_gpu_hour: float | None) -> str:
    """The title of a map of goodput. ``price_per_gpu_hour``: the map has costs too, in this currency (None: not)."""
    return rendered(TEMPLATES / "goodput_map.txt", scenario=scenario, price=price_per_gpu_hour)
