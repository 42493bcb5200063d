"""The best engine settings of a baseline, by the levels of the search for them (``tune_baseline:`` of an experiment's
file).

Settings are compared only at loads that are valid with all of them. Otherwise one whose higher load is not valid would
lose to the higher load of another.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from pdlab.analysis.curves import Curve, curves
from pdlab.analysis.intervals import Comparison
from pdlab.analysis.loading import Loaded, load
from pdlab.analysis.ranking import LabelledEstimate, Ranked, bounds_rankings, rank
from pdlab.analysis.view import View
from pdlab.core.bounds import Bounds, parse_bounds
from pdlab.core.errors import StoreError
from pdlab.core.workload import title
from pdlab.results.schema import ExperimentRecord, TriedSettings, Tuning
from pdlab.results.store import Store, read_record
from pdlab.results.tuning_folders import candidate_name


def judged(tuning: Tuning, of: str, folder: Path, bounds: Bounds, record: ExperimentRecord | None) -> Tuning:
    """``tuning`` with what the levels in ``folder`` show: the tried settings by output tokens/s within the bounds, best
    first. Its ``settings`` stay.

    ``of``: the deployment that was tuned. ``record``: of the search. Settings without a valid level exclude no load.
    Raises StoreError.
    """
    errors = {visit.deployment: visit.error for visit in record.visits if visit.error} if record else {}
    names = {candidate_name(of, tried.settings): tried.settings for tried in tuning.tried}
    measured = [name for name in names if next(Store(folder / name).levels(), None) is not None]
    loaded = load([folder / name for name in measured], {})
    made = curves([each.experiment for each in loaded], [each.requests for each in loaded])
    named = [curve.model_copy(update={"label": name}) for curve, name in zip(made, measured, strict=True)]
    valid = {
        curve.label: loads
        for curve in named
        if (loads := {(point.kind, point.value) for point in curve.points if point.valid})
    }
    shared = set.intersection(*valid.values()) if valid else set()
    kept = [
        curve.model_copy(update={"points": tuple(p for p in curve.points if (p.kind, p.value) in shared)})
        for curve in named
        if curve.label in valid
    ]
    ranking = _ranking(kept, bounds)
    tried = {
        name: TriedSettings(
            settings=settings,
            tokens_per_s=ranking[name].estimate.value if name in ranking else None,
            error=None if name in valid else errors.get(name) or "no level is valid",
        )
        for name, settings in names.items()
    }
    order = [*ranking, *(name for name in tried if name not in ranking and name in valid)]
    order += [name for name in tried if name not in order]
    runs = sorted((run for each in loaded for run in each.experiment.runs), key=lambda run: run.key.value)
    words = {(run.key.kind, run.key.value): title(run.load) for run in runs}
    launched, second = ranking.get(candidate_name(of, {})), next(islice(ranking.values(), 1, None), None)
    return tuning.model_copy(
        update={
            "tried": tuple(tried[name] for name in order),
            "compared": tuple(each for at, each in words.items() if at in shared),
            "invalid": {
                each: tuple(names[name] for name in valid if at not in valid[name])
                for at, each in words.items()
                if at not in shared and valid
            },
            "over_launched": _interval(launched),
            "over_second": _interval(second),
            "resolved": launched is not None and not launched.tied,
        }
    )


def _ranking(kept: list[Curve], bounds: Bounds) -> dict[str, Ranked]:
    """By name. All have the same loads, so one that is within the bounds at its highest load is compared too."""
    view = View(normalized=False)
    found = [ranked for answer in bounds_rankings(kept, bounds, view) for ranked in answer.ranking]
    again = rank([LabelledEstimate(ranked.label, ranked.estimate) for ranked in found], view.confidence)
    return {ranked.label: ranked for ranked in again}


def _interval(ranked: Ranked | None) -> tuple[float, float, float] | None:
    ahead: Comparison | None = ranked.best_over_it if ranked else None
    return (ahead.ratio, ahead.low, ahead.high) if ahead and ahead.high < float("inf") else None


def judged_again(loaded: Loaded) -> Tuning | None:
    """The search for the settings of an experiment. If its manifest does not have the loads at which settings were
    compared, and all levels of the search are beside the experiment, it is what these levels show.
    """
    tuning = loaded.experiment.manifest.tuning
    if tuning is None or tuning.compared is not None:
        return tuning
    home = loaded.folder.resolve().parent
    folder = home.parent / tuning.folder
    try:
        record = read_record(home)
        if record is None or not folder.is_dir():
            return tuning
        name, file = loaded.folder.resolve().name, record.experiment
        of = next((each for each, its in record.folders.items() if name in its), None)
        at = (file.get("tune_baseline") or {}).get("at") or next(iter(file.get("at") or ()), None)
        if of is None or at is None or not _has_levels(tuning, of, folder):
            return tuning
        return judged(tuning, of, folder, parse_bounds(at, "p50"), read_record(folder))
    except StoreError:
        return tuning  # the levels of the search are no part of this experiment


def _has_levels(tuning: Tuning, of: str, folder: Path) -> bool:
    """Whether ``folder`` has levels of all settings that were measured. A partial copy has those of some."""
    return all(
        next(Store(folder / candidate_name(of, tried.settings)).levels(), None) is not None
        for tried in tuning.tried
        if tried.error is None
    )
