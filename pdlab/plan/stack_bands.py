"""Which band a prediction by tabulated steps has, what of it is extrapolated, and where there is none. Pure.

- **Constants of a fit** have the band of the fit, inside of it (`pdlab.plan.extrapolation`).
- **Tables with measured levels** have what public stacks were off by after as many levels. TP, lengths and loads that
  were not measured are in those errors; another GPU, model, version, mode or network is not. An engine or a mode that
  no public stack has, such as P:D, has no band here either.
- **Tables alone** have the errors of public stacks that the others predicted, wider for an engine version or a model
  that none of them has. There is none for a GPU that none of them has, where bands of left-out models or versions held
  less than `NEAR`, where fewer than `LEAST_LIKE` stacks have that engine and mode, and outside of what the points
  cover: lengths, loads, TP, formats of weights, closed loops.
- Either has one only by at least `LEAST_STACKS` stacks: fewer say nothing about the tenth of a new one's errors.
- **Near saturation**, where prompts wait for KV memory or nearly do, a small error of the steps or of the memory is a
  large one of the TTFT: there is no band.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.findings import Finding, found
from pdlab.core.workload import Closed, Load, Workload
from pdlab.plan.error_catalog import NEAR, ErrorCatalog, parts_of, public_errors, stack_of, weights_of
from pdlab.plan.extrapolation import SLACK, OutsideFit
from pdlab.plan.stack_prior import KINDS, LEAST_LIKE, LEAST_STACKS, Stack, group_of
from pdlab.sim.hardware import FitError, Hardware
from pdlab.sim.level import SimulatedLevel
from pdlab.sim.step_time import kv_capacity_tokens
from pdlab.sim.steps import has_wide_experts

WITHIN = {"TP", "input length", "output length", "load"}  # that the errors of stacks with measured levels cover
MEASURED = "SILICON"  # `pdlab.sim.hardware.TableMode` of the public stacks
CACHED = 0.05  # share of prompt tokens: public benchmarks draw every prompt anew
FULL = 0.05  # share of the time in which KV memory is full: beyond, a level is near saturation
# Of the KV memory's predicted tokens. Public engines held 79 to 110 % of these when prompts waited, one of them 125 %
# before they did. So a level that needs more may wait or not: its TTFT differs by a factor of 2 to 15.
TIGHT = 0.85


class StackBand(NamedTuple):
    """``error`` None: an estimate without a band. ``findings``: why, or what of it is extrapolated."""

    error: FitError | None
    findings: tuple[Finding, ...] = ()


def band_of(
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment,
    workload: Workload,
    load: Load,
    in_flight_per_gpu: Sequence[float],
    outside: Sequence[OutsideFit],
) -> StackBand:
    """``outside``: what `pdlab.plan.extrapolation.outside_fit` says."""
    if hardware.steps is None:
        return StackBand(None if outside else hardware.error)
    catalog = public_errors()
    if hardware.error is not None:
        others = sorted({each.dimension for each in outside} - WITHIN)
        reason = (
            f"its levels are of another {' and '.join(others)}"
            if others
            else why_without(hardware, shape, deployment, workload, load, in_flight_per_gpu)
        )
        return _without(reason) if reason else StackBand(hardware.error)
    reason = _not_covered(catalog, hardware, shape, deployment, workload, load, in_flight_per_gpu)
    stack = stack_of(hardware, shape, deployment)
    unseen = catalog.unseen(stack)
    names = {"model": stack.model, "gpu": stack.gpu, "engine": f"{stack.engine} {stack.version}"}
    words = ", ".join(names[each] for each in unseen)
    if hardware.speculation is not None:
        reason = "none of them guesses tokens"
    reason = reason or _untold(catalog, stack, deployment.mode, unseen)
    if reason:
        return _without(reason)
    medians = {metric: _median(catalog, metric) for metric in catalog.components}
    error = FitError(
        tpot_percent=medians["TPOT"],
        ttft_percent=medians["mean TTFT"],
        requests_per_s_percent=medians["TPOT"],
        points=sum(each.points for each in catalog.stacks),
        how="public stacks, each predicted by the others; requests/s as TPOT",
        parts=parts_of(catalog.components, unseen),
    )
    said = found("band_of_public_stacks", stacks=len(catalog.stacks), unseen=words or "nothing")
    return StackBand(error, (said,))


def why_without(
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment,
    workload: Workload,
    load: Load | None = None,
    in_flight_per_gpu: Sequence[float] = (),
) -> str:
    """Why tables with measured levels have no band, because the public points are not like this; empty: they are.
    ``load`` None: it is not judged."""
    catalog = public_errors()
    few = _few(catalog, stack_of(hardware, shape, deployment), deployment.mode)
    return few or _not_covered(catalog, hardware, shape, deployment, workload, load, in_flight_per_gpu)


def _few(catalog: ErrorCatalog, stack: Stack, mode: str) -> str:
    served = len(catalog.served_as(stack))
    if served >= LEAST_LIKE:
        return ""
    return f"{served or 'none'} of them {'are' if served > 1 else 'is'} {mode} with {stack.engine}"


def _untold(catalog: ErrorCatalog, stack: Stack, mode: str, unseen: Sequence[str]) -> str:
    """Why no stacks that were left out say how far a prediction of this one is off; empty: they do."""
    if few := _few(catalog, stack, mode):
        return few
    if "gpu" in unseen:
        return f"none of them is on {stack.gpu}"
    for kind in unseen:
        groups = {group_of(each.stack, kind) for each in catalog.served_as(stack)}
        shares = catalog.left_out.get(kind, {})
        if len(groups) < LEAST_LIKE or not shares.keys() >= catalog.components.keys():
            return f"too few say what bands of a left-out {KINDS[kind]} hold ({len(groups)} of them)"
        if (held := min(shares.values())) < NEAR[0]:
            return f"bands of a left-out {KINDS[kind]} held {held:.0%} ({len(groups)} of them)"
    return ""


def why_cached(share: float) -> str:
    """Why a load whose caches answer that share of the prompt tokens has no band on tables; empty: it is small."""
    return f"none has prefix caches that answer {share:.0%} of the prompt tokens" if share > CACHED else ""


def _median(catalog: ErrorCatalog, metric: str) -> float:
    known = [each.errors_percent[metric] for each in catalog.stacks if metric in each.errors_percent]
    return round(statistics.median(known), 1)


def _without(reason: str) -> StackBand:
    return StackBand(None, (found("no_band", why=reason),))


def _not_covered(
    catalog: ErrorCatalog,
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment,
    workload: Workload,
    load: Load | None,
    in_flight_per_gpu: Sequence[float],
) -> str:
    """What the public points are not of; empty: nothing."""
    covered = catalog.covered
    if len(catalog.stacks) < LEAST_STACKS:
        return f"there are {len(catalog.stacks)}, and a band needs {LEAST_STACKS}"
    if weights_of(hardware, shape) not in covered.weights:
        return f"their weights are {', '.join(covered.weights)}"
    pools = list(deployment.pools.values())
    mode = hardware.steps.mode if hardware.steps is not None else MEASURED
    if mode != MEASURED:
        return f"their step times are measured ones, not those of {mode}"
    if load is not None and not isinstance(load, Closed):
        return "they are closed loops"
    if any(pool.tp not in covered.tp for pool in pools):
        return f"their TP is {', '.join(map(str, covered.tp))}"
    if any(map(has_wide_experts, pools)):
        return "none of them spreads experts over more than one node"
    if any(pool.pp > 1 or pool.dp > 1 for pool in pools):
        return "none of them has pipeline or data parallel ranks"
    sides = (
        (workload.longest[0], covered.input_tokens, "input tokens"),
        (workload.longest[1], covered.output_tokens, "output tokens"),
        *((each, covered.in_flight_per_gpu, "requests in flight per GPU") for each in in_flight_per_gpu),
    )
    for value, (low, high), what in sides:
        if not low * (1 - SLACK) <= value <= high * (1 + SLACK):
            return f"they have {low:g} to {high:g} {what}"
    return ""


def saturation(
    levels: Sequence[SimulatedLevel], hardware: Hardware, shape: ModelShape, deployment: Deployment
) -> Finding | None:
    """Whether prompts of these levels, one of each seed, wait for KV memory, or would if it held `TIGHT` of what it is
    predicted to hold. The latter only of engines that do both: of others it is not known which one holds a request."""
    full = statistics.fmean(each.kv_full for each in levels)
    if deployment.transport is None:
        tokens = sum(
            pool.replicas * pool.dp * kv_capacity_tokens(hardware, shape, pool) for pool in deployment.pools.values()
        )
        full = max(full, statistics.fmean(each.share_above(TIGHT * tokens) for each in levels))
    if full > FULL:
        return found("near_saturation", share=full)
    return None
