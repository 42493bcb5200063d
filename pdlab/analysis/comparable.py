"""Which experiments may be compared: those of one model, one workload and one kind of device. Only declared here.

Headlines, frontiers, rankings within bounds, crossovers and the P:D ratio all use this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from pdlab.analysis.curves import UNKNOWN_LENGTHS, Curve, Point, rankable, workloads_name
from pdlab.analysis.view import View
from pdlab.core.model_names import model_name, same_model
from pdlab.core.text import counted, listed
from pdlab.core.workload import LoadKind, Workload

LENGTH_TOLERANCE = 0.1
"""Mean lengths that differ by no more than this share are one workload.

Means of some hundred requests drawn from one set of conversations, whose lengths scatter about as much as they are
long, differ by 5 to 10 % by chance; so do answers that end at their end-of-sequence token. A workload that is meant to
be another one differs by more. Rates and latencies may differ by about the same share, so the difference is printed.
"""
# Kinds of load whose levels are compared, each only within its kind. A ramp is left out: its figures are means over
# several rates, and a deployment keeps up with some of them. A replay is the same requests at the same moments.
COMPARED_LOADS: tuple[LoadKind, ...] = ("concurrency", "rate", "replay")
HAVE = "the experiments have "
Obstacle = Literal["model", "workload", "rehearsal", "device", "size"]
# What two experiments must have alike, in words; in the order in which reasons are given.
PROPERTIES: dict[Obstacle, str] = {
    "model": "model",
    "workload": "workload",
    "rehearsal": "kind of engine",
    "device": "kind of device",
    "size": "size",
}
OBSTACLES: tuple[Obstacle, ...] = tuple(PROPERTIES)


class Group(NamedTuple):
    """Curves of which every two may be compared. ``name`` distinguishes them from other groups; None for a single
    group."""

    curves: tuple[Curve, ...]
    name: str | None


def same_workload(first: Iterable[Workload], second: Iterable[Workload]) -> bool:
    """Whether the requests of two sweeps are alike.

    Mode, kind of lengths and shared prefix must be equal. The ranges of mean lengths must be within `LENGTH_TOLERANCE`.
    """
    return _workload_key(first).like(_workload_key(second))


class WorkloadKey(NamedTuple):
    """The compared properties of the workloads of a sweep. ``means``: (fewest, most) mean tokens of the input and of
    the output."""

    kinds: frozenset[tuple[str, str, int]]
    means: tuple[tuple[float, float], ...]

    def like(self, other: WorkloadKey) -> bool:
        return self.kinds == other.kinds and all(map(_ranges_near, self.means, other.means))


def _workload_key(workloads: Iterable[Workload]) -> WorkloadKey:
    every = list(workloads)
    sides = zip(*(each.mean_tokens for each in every), strict=True)
    return WorkloadKey(frozenset(map(_kind, every)), tuple((min(side), max(side)) for side in sides))


class ComparisonKey(NamedTuple):
    """Decides with which other curves a curve may be compared. ``workloads``: None if no level has a workload. A curve
    of unknown lengths has no answers, so that no comparison uses it."""

    model: str | None
    workloads: WorkloadKey | None
    workload: str
    rehearsed: bool
    device: str
    size: int | None

    def obstacles(self, other: ComparisonKey) -> list[Obstacle]:
        """What prevents a comparison with the other one; empty if they may be compared."""
        if self == other:
            return []
        found: dict[Obstacle, bool] = {
            "model": not one_model(self.model, other.model),
            "workload": (
                not self.workloads.like(other.workloads)
                if self.workloads is not None and other.workloads is not None
                else self.workload != other.workload and UNKNOWN_LENGTHS not in (self.workload, other.workload)
            ),
            "rehearsal": self.rehearsed != other.rehearsed,
            "device": self.device != other.device,
            "size": self.size != other.size,
        }
        return [obstacle for obstacle in OBSTACLES if found[obstacle]]

    @property
    def order(self) -> tuple[object, ...]:
        """Its place among others: short lengths first. Equal only for keys with which the same may be compared."""
        means = () if self.workloads is None else self.workloads.means
        kinds = () if self.workloads is None else tuple(sorted(self.workloads.kinds))
        model = () if self.model is None else (model_name(self.model).casefold(),)
        return means, kinds, self.workload, model, self.rehearsed, self.device, self.size or 0


def nature(curve: Curve, view: View) -> ComparisonKey:
    """The key of a curve; compute it once per curve. The size counts only if the view does not normalise."""
    workloads = workloads_of(curve)
    return ComparisonKey(
        model=curve.model,
        workloads=_workload_key(workloads) if workloads else None,
        workload=curve.workload,
        rehearsed=curve.rehearsed,
        device=curve.gpus.device,
        size=None if view.normalized else curve.gpus.total,
    )


def _kind(workload: Workload) -> tuple[str, str, int]:
    return workload.mode, workload.lengths.label, workload.shared_prefix_tokens


def near(first: float, second: float) -> bool:
    """Whether two mean lengths are within `LENGTH_TOLERANCE`."""
    return max(first, second) <= (1 + LENGTH_TOLERANCE) * min(first, second)


def _ranges_near(first: tuple[float, float], second: tuple[float, float]) -> bool:
    low, high = max(first[0], second[0]), min(first[1], second[1])
    return low <= high or near(low, high)


def alike_at(first: Point, second: Point) -> bool:
    """Whether the requests of two levels are alike; True if a level has no workload."""
    return not first.workloads or not second.workloads or same_workload(first.workloads, second.workloads)


def one_model(first: str | None, second: str | None) -> bool:
    """Whether two experiments are of one model. Two unknown models count as one."""
    if first is None or second is None:
        return first is second
    return same_model(first, second)


def phase_obstacles(first: Curve, second: Curve) -> list[Obstacle]:
    """What prevents one P:D ratio over both; empty if nothing does.

    The modes differ, because a phase is measured apart. Output lengths count unless one of the two is prefill-only,
    whose answers have one token.
    """
    prompts_only = any(each.mode == "prefill-only" for curve in (first, second) for each in workloads_of(curve))
    return _whole_service(first, prompts_only).obstacles(_whole_service(second, prompts_only))


def _whole_service(curve: Curve, prompts_only: bool) -> ComparisonKey:
    """The key of the requests that the levels would be with both phases."""
    key = _workload_key(each.model_copy(update={"mode": "mixed"}) for each in workloads_of(curve))
    workloads = key._replace(means=key.means[:1]) if prompts_only else key
    return nature(curve, View())._replace(workloads=workloads, workload="")


def property_words(curve: Curve, obstacle: Obstacle) -> str:
    """That property of a curve in words: ``5000:250``, ``on GPUs``."""
    return _words([curve], obstacle)


def workloads_of(curve: Curve) -> tuple[Workload, ...]:
    return tuple(dict.fromkeys(workload for point in curve.points for workload in point.workloads))


def groups(curves: Sequence[Curve], view: View) -> list[Group]:
    """The curves that may be ranked, in groups of which every two members may be compared; in the order given.

    Who is in a group does not depend on that order. A curve is in one group, even if it fits several: from the shortest
    lengths up, it is in the first of which it may be compared with all (`length_notes` names it).
    """
    members = _members(rankable(curves), view)
    if len(members) == 1:
        return [Group(tuple(members[0]), None)]
    apart = _between(members, view)
    return [Group(tuple(each), ", ".join(_name(each, obstacle) for obstacle in apart)) for each in members]


def _members(curves: Sequence[Curve], view: View) -> list[list[Curve]]:
    natures = [nature(curve, view) for curve in curves]
    together: list[list[ComparisonKey]] = []
    for key in sorted(dict.fromkeys(natures), key=lambda key: key.order):
        fitting = (each for each in together if not any(key.obstacles(other) for other in each))
        found = next(fitting, None)
        if found is None:
            together.append([key])
        else:
            found.append(key)
    number = {key: i for i, keys in enumerate(together) for key in keys}
    members: dict[int, list[Curve]] = {}
    for curve, key in zip(curves, natures, strict=True):
        members.setdefault(number[key], []).append(curve)
    return list(members.values())


def _name(curves: Sequence[Curve], obstacle: Obstacle) -> str:
    return _words(curves, obstacle) + (" input:output tokens" if obstacle == "workload" else "")


def _between(members: Sequence[Sequence[Curve]], view: View) -> list[Obstacle]:
    # Many curves share few keys.
    natures = dict.fromkeys(frozenset(nature(curve, view) for curve in each) for each in members)
    found = {
        obstacle
        for group, another in combinations(natures, 2)
        for one in group
        for other in another
        for obstacle in one.obstacles(other)
    }
    return [obstacle for obstacle in OBSTACLES if obstacle in found]


def incomparable(curves: Sequence[Curve], view: View) -> str | None:
    """Why these experiments may not all be compared with each other; None if they may."""
    apart = _between([[curve] for curve in rankable(curves)], view)
    reasons = [_reason(curves, view, obstacle) for obstacle in apart]
    return (
        " and ".join(
            predicate if number else f"{subject}{predicate}" for number, (subject, predicate) in enumerate(reasons)
        )
        or None
    )


def _reason(curves: Sequence[Curve], view: View, obstacle: Obstacle) -> tuple[str, str]:
    """Subject and predicate of a clause; a repeated subject is left out."""
    if obstacle == "rehearsal":
        return "", "some experiments were rehearsed with simulated engines and some were not"
    if obstacle == "device":
        return "", "some experiments ran on GPUs and some on CPU engine ranks"
    # Lengths that differ within a group are one workload: they are compared.
    alike = _members(rankable(curves), view) if obstacle == "workload" else [[curve] for curve in rankable(curves)]
    names = listed(list(dict.fromkeys(_words(each, obstacle) for each in alike)))
    if obstacle == "size":
        return "", f"the deployments have different sizes ({names}); normalise them"
    if obstacle == "model":
        return HAVE, f"different models ({names})"
    return HAVE, f"different workloads ({names}; input:output tokens)"


def _words(curves: Sequence[Curve], obstacle: Obstacle) -> str:
    """The common property of the curves of one group, in words."""
    first = curves[0]
    if obstacle == "model":
        return models_text(curves)
    if obstacle == "workload":
        return workloads_text(curves)
    if obstacle == "size":
        return counted(first.gpus.total, first.gpus.unit)
    if obstacle == "rehearsal":
        return "simulated engines (rehearsed)" if first.rehearsed else "real engines"
    return "on CPU engine ranks" if first.gpus.device == "cpu" else "on GPUs"


def models_text(curves: Sequence[Curve]) -> str:
    """The models of these curves, each once."""
    names = dict.fromkeys("unknown model" if curve.model is None else model_name(curve.model) for curve in curves)
    return listed(list(names))


def workloads_text(curves: Sequence[Curve]) -> str:
    """The workloads of these curves as one, if they are known."""
    known = [workload for curve in curves for workload in workloads_of(curve)]
    return workloads_name(known) if known else listed(list(dict.fromkeys(curve.workload for curve in curves)))


def length_notes(curves: Sequence[Curve], view: View) -> list[str]:
    """One line on each group whose mean lengths differ within the tolerance, and on each two groups of which some
    curves may be compared."""
    lines = []
    found = groups(curves, view)
    for group in found:
        means = [workload.mean_tokens for curve in group.curves for workload in workloads_of(curve)]
        apart = max((max(side) / min(side) - 1 for side in zip(*means, strict=True)), default=0.0)
        if apart > 0:
            names = listed([_with_workload(curve) for curve in group.curves])
            lines.append(
                f"Mean lengths differ by up to {100 * apart:.2g} % (input:output tokens: {names}); levels that "
                f"differ by up to {100 * LENGTH_TOLERANCE:g} % are compared."
            )
    return lines + _overlaps(found, view)


def _overlaps(found: Sequence[Group], view: View) -> list[str]:
    natures = [[(nature(curve, view), curve) for curve in group.curves] for group in found]
    lines = []
    for group, another in combinations(natures, 2):
        alike = [(one, other) for key, one in group for its, other in another if not key.obstacles(its)]
        if alike:
            sides = [list(dict.fromkeys(_with_workload(curve) for curve in side)) for side in zip(*alike, strict=True)]
            lines.append(
                f"{listed(sides[0])} may be compared with {listed(sides[1])}, but others of their groups may not: they "
                "are compared as pairs and ranked apart."
            )
    return lines


def _with_workload(curve: Curve) -> str:
    return curve.label if curve.workload in curve.label else f"{curve.label} {curve.workload}"
