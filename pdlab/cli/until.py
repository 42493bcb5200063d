"""``--until lead=5%`` of an experiment: which differences it can detect, when it may stop, and its result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdlab.analysis.power import CONFIDENCE, POWER, LookSchedule, detectable, repeats_for, single_repeat_sd
from pdlab.bench.experiment.file import ExperimentFile
from pdlab.bench.experiment.schedule import Schedule
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.core.text import counted, listed
from pdlab.core.workload import Closed

if TYPE_CHECKING:
    from pdlab.analysis.headline import Figure, Headline
    from pdlab.analysis.sequential import LookVerdict

DEFAULT_CAP = 12
LEAST_LOOK = 2  # repeats; one repeat shows no scatter
NAMES: dict[str, Figure] = {"lead": "throughput", "ttft": "ttft", "tpot": "tpot"}
SHOWN = {"throughput": "output tokens/s", "ttft": "TTFT p50", "tpot": "TPOT p50"}
OUTCOME_TEXT = {
    "lead": "resolved",
    "alike": "no difference of that size",
    "unresolvable": "not resolved, and further repeats would not resolve it",
    "open": "not resolved yet",
}


class StopTargets(Frozen):
    """``targets``: figure -> the smallest share of difference between two deployments that matters."""

    text: str
    targets: dict[str, float]
    looks: LookSchedule


def parse_until(text: str, file: ExperimentFile, cap: int | None) -> StopTargets:
    """``lead=5%`` or ``lead=5%,ttft=20%,tpot=5%`` with at most ``cap`` repeats. Raises UsageError."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(lead|ttft|tpot)\s*=\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", part)
        if not match or not 0 < float(match[2]) <= 100:
            raise UsageError(
                f"--until {text}: {part.strip()!r} is no difference to resolve; expected lead=5% (of output tokens/s), "
                "ttft=20% or tpot=5%, above 0 % and at most 100 %"
            )
        if NAMES[match[1]] in targets:
            raise UsageError(f"--until {text}: {match[1]} is there twice; keep one")
        targets[NAMES[match[1]]] = float(match[2]) / 100
    first = max(LEAST_LOOK, file.repeats)
    most = max(DEFAULT_CAP, first) if cap is None else cap
    if most < first:
        raise UsageError(
            f"--max-repeats {most}: the first look is after {counted(first, 'repeat')}; give at least as many"
        )
    return StopTargets(text=text, targets=targets, looks=LookSchedule(first=first, cap=most))


def check(until: StopTargets, plan: Schedule) -> None:
    """Raises UsageError if the experiment has nothing to compare, or no closed loop for ``lead``."""
    if not comparisons(plan):
        raise UsageError(f"--until {until.text}: no workload runs on two deployments; there is nothing to compare")
    closed = any(isinstance(load, Closed) for part in plan.parts.values() for load in part.loads)
    if "throughput" in until.targets and not closed:
        raise UsageError(
            f"--until {until.text}: lead is of output tokens/s in closed loops, and this experiment has none; "
            "give ttft=20% or tpot=5%"
        )


def comparisons(plan: Schedule) -> int:
    """The number of comparisons of a deployment with its reference, over all workloads."""
    pairs = {(part.workload.name, visit.configuration.name) for visit in plan.visits for part in visit.parts}
    workloads = {workload for workload, _ in pairs}
    return sum(sum(workload == name for name, _ in pairs) - 1 for workload in workloads)


class Stopping:
    """Judges the results of ``plan`` in ``folder`` after each repeat. ``last``: the verdicts of the last look."""

    def __init__(self, until: StopTargets, plan: Schedule, folder: Path) -> None:
        self._until, self._plan, self._folder = until, plan, folder
        self.last: tuple[LookVerdict, ...] = ()
        self.repeats = 0

    def __call__(self, repeats: int) -> str | None:
        """After that many repeats: why no more are needed; None if more are needed."""
        from pdlab.analysis.sequential import judge

        looks = self._until.looks
        if repeats < looks.first:
            return None
        targets = {figure: self._until.targets[figure] for figure in NAMES.values() if figure in self._until.targets}
        self.last = judge(headlines_of(self._plan, self._folder), targets, looks, repeats, CONFIDENCE)
        self.repeats = repeats
        if not self.last or any(each.outcome == "open" for each in self.last):
            return None
        return f"--until {self._until.text}, after {repeats} of at most {counted(looks.cap, 'repeat')}"

    def text(self) -> str:
        """The verdicts of the last look."""
        from pdlab.report.verdicts import ratio_text

        looks = self._until.looks
        lines = [
            f"--until {self._until.text}: {counted(self.repeats, 'repeat')}; {100 * CONFIDENCE:g} % for all "
            f"comparisons and all {counted(looks.count, 'look')} together"
        ]
        for each in self.last:
            ratio = f" {ratio_text(each.comparison)}" if each.comparison else ""
            lines.append(
                f"  {each.label} over {each.reference}, {SHOWN[each.figure]}{ratio}: {OUTCOME_TEXT[each.outcome]}"
            )
        return "\n".join(lines) if self.last else f"--until {self._until.text}: nothing can be compared yet"


def headlines_of(plan: Schedule, folder: Path) -> list[Headline]:
    """The headlines of every workload, from the levels measured so far."""
    from pdlab.analysis.curves import curves
    from pdlab.analysis.headline import headlines
    from pdlab.analysis.loading import load
    from pdlab.analysis.view import View
    from pdlab.report.whole_nodes import counted as on_whole_nodes
    from pdlab.results.store import Store

    parts = {name: part.workload.name for name, part in plan.parts.items()}
    compared: list[Headline] = []
    for workload in dict.fromkeys(parts.values()):
        folders = [folder / name for name, its in parts.items() if its == workload]
        measured = [path for path in folders if path.is_dir() and next(Store(path).levels(), None) is not None]
        loaded = load(measured, {})
        its_curves = curves([each.experiment for each in loaded], [each.requests for each in loaded])
        compared += headlines([on_whole_nodes(curve) for curve in its_curves], View(confidence=CONFIDENCE))
    return compared


class KnownScatter(NamedTuple):
    """Figure -> standard deviation between starts of its logarithm, and where these are from."""

    log_sds: dict[Figure, float]
    source: str


def sight(plan: Schedule, folder: Path, until: StopTargets | None) -> list[str]:
    """Which differences the experiment can detect, from the scatter between starts."""
    count = comparisons(plan)
    if not count:
        return []
    sds, source = _scatter(plan, folder)
    among = f", {counted(count, 'comparison')} sharing the error" if count > 1 else ""

    def differences(repeats: int, level: float) -> str:
        ratios = {figure: detectable(sd, repeats, level, count) for figure, sd in sds.items()}
        return listed(
            [f"{float(f'{100 * (ratio - 1):.2g}'):,g} % in {SHOWN[figure]}" for figure, ratio in ratios.items()]
        )

    sure = f"{100 * POWER:g} % of cases at {100 * CONFIDENCE:g} % confidence{among}"
    scatters = f"if starts scatter by {listed([f'{100 * sd:.2g} %' for sd in sds.values()])} ({source})"
    if until is None:
        repeats = counted(plan.file.repeats, "repeat")
        return [
            f"detectable: with {repeats} a difference of {differences(plan.file.repeats, CONFIDENCE)} between two "
            f"deployments over all loads, in {sure}, {scatters}"
        ]
    level = until.looks.level(CONFIDENCE)
    lines = [
        f"detectable: a difference of {differences(until.looks.first, level)} between two deployments over all loads "
        f"after {until.looks.first} repeats, {differences(until.looks.cap, level)} after {until.looks.cap}, in {sure}, "
        f"shared by {counted(until.looks.count, 'look')}, {scatters}"
    ]
    for figure, target in until.targets.items():
        needed = repeats_for(1 + target, sds[figure], level, count) if figure in sds else None
        takes = "more than 1,000 repeats" if needed is None else f"about {counted(needed, 'repeat')}"
        if needed is None or needed > until.looks.cap:
            lines.append(f"  a difference of {100 * target:g} % in {SHOWN[figure]} would take {takes}: --max-repeats")
    return lines


def _scatter(plan: Schedule, folder: Path) -> KnownScatter:
    """Measured in the folder for every figure, or assumed for every one."""
    from pdlab.results.store import read_record

    figures = _figures(plan)
    if read_record(folder) is not None:
        from pdlab.analysis.sequential import scatter

        headlines = headlines_of(plan, folder)
        measured = {figure: found for figure in figures if (found := scatter(headlines, figure)) and found.log_sd}
        if len(measured) == len(figures):
            dof = counted(min(each.dof for each in measured.values()), "degree") + " of freedom"
            sds = {figure: each.log_sd for figure, each in measured.items()}
            return KnownScatter(sds, f"measured in {folder}, {dof}")
    local = plan.file.where.local is not None
    where = "this machine" if local else "this cluster"
    known = "levels measured on CPUs" if local else "published H100 runs on different days"
    return KnownScatter(
        {figure: single_repeat_sd("cpu" if local else "gpu", figure) for figure in figures},
        f"assumed from {known}; the scatter of {where} was not measured",
    )


def _figures(plan: Schedule) -> tuple[Figure, ...]:
    """Those that tell deployments apart: output tokens/s of closed loops, TPOT of answers of two tokens or more."""
    parts = plan.parts.values()
    closed = any(isinstance(load, Closed) for part in parts for load in part.loads)
    later = any(part.workload.workload(plan.file.seed).mean_tokens[1] > 1 for part in parts)
    of_plan = {"throughput": closed, "ttft": True, "tpot": later}
    return tuple(figure for figure in NAMES.values() if of_plan[figure])
