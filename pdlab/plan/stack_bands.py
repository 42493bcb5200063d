"""The band of a prediction by tabulated steps: its errors, and the reasons for which there is none. Pure.

- **Constants of a fit** have the band of the fit, inside of the fit (`pdlab.plan.extrapolation`).
- **Tables with measured levels** have the errors of public stacks after as many levels. These errors include those of
  TP, lengths and loads that were not measured. They do not include another GPU, model, version, mode or network. An
  engine or a mode that no public stack has, such as P:D, has no band.
- **Tables without measured levels** have the errors of public stacks that were predicted by the other stacks. The band
  is wider for an engine version or a model that no public stack has. There is no band for a GPU that no public stack
  has; if bands of left-out models or versions held less than `NEAR`; if fewer than `LEAST_LIKE` stacks have that engine
  and mode; and outside of the points' range of lengths, loads, TP and formats of weights, or of closed loops.
- A band of tables needs at least `LEAST_STACKS` public stacks.
- **A format of weights that only the model's name has** gives wrong weights and steps: there is no band of tables.
- **Near saturation** prompts wait for KV memory, or nearly do, or prefill engines are busy nearly all the time. There a
  small error of the steps or of the memory is a large error of the TTFT, and there is no band.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.core.catalog import ModelShape, format_only_in_name
from pdlab.core.deployment import Deployment, Disaggregated
from pdlab.core.findings import Finding, found
from pdlab.core.workload import Closed, Load, Workload
from pdlab.plan.correction_fit import TPOT, TTFT
from pdlab.plan.error_catalog import NEAR, CoveredRange, ErrorCatalog, public_errors, stack_of, weights_of
from pdlab.plan.extrapolation import SLACK, OutsideFit, packs_over_nodes, unlike_gpu_link
from pdlab.plan.pd_catalog import PdCovered, public_pd
from pdlab.plan.precisions import is_precision
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


OTHER_WEIGHTS = "none of them has weights in a format that only the model's name has"


class StackBand(NamedTuple):
    """The errors of a band; None: there is no band. ``findings``: the reasons, or the extrapolated parts. ``unlike``:
    what public stacks are not like: every reason for which tables have no band."""

    error: FitError | None
    findings: tuple[Finding, ...] = ()
    unlike: tuple[str, ...] = ()


def band_of(
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment,
    workload: Workload,
    load: Load | None,
    in_flight_per_gpu: Sequence[float],
    outside: Sequence[OutsideFit],
    besides: Sequence[str] = (),
) -> StackBand:
    """The band of predictions of one deployment, workload and load (None: loads are not judged). ``outside``: the
    result of `pdlab.plan.extrapolation.outside_fit` for them. ``besides``: other reasons for which tables have no
    band."""
    if hardware.steps is None:
        return StackBand(None if outside else hardware.error)
    arguments = [each.text for each in outside if each.dimension == "engine arguments"]
    unlike = [*besides, *(f"none of them is known to have {each}" for each in arguments)]
    if packs_over_nodes(deployment, hardware):
        unlike.append(f"none of them packs {deployment.gpus} GPUs on a node of {hardware.gpus_per_node}")
    if (link := unlike_gpu_link(hardware, deployment)) is not None:
        unlike.append(f"none of them has {link.nodes} between GPUs that have {link.steps}")
    if format_only_in_name(shape):
        unlike.append(OTHER_WEIGHTS)
    of_prediction = (hardware, shape, deployment, workload, load, in_flight_per_gpu)
    if hardware.error is not None:
        if others := sorted({each.dimension for each in outside} - WITHIN - {"engine arguments"}):
            unlike.append(f"its levels are of another {' and '.join(others)}")
        unlike += _few(public_errors(), stack_of(hardware, shape, deployment), deployment.mode)
        unlike += _not_covered(public_errors(), *of_prediction)
        return _no_band(unlike) if unlike else StackBand(hardware.error)
    if hardware.steps.correction.fitted_levels:
        unlike.append("none stands for the measured levels of a file without errors")  # `outside` has the reason
    if isinstance(deployment.topology, Disaggregated) and hardware.direct is not None:
        unlike += _unlike_pd(*of_prediction)
        return _no_band(unlike) if unlike else _band_of_pd(stack_of(hardware, shape, deployment))
    catalog, stack = public_errors(), stack_of(hardware, shape, deployment)
    unseen = catalog.unseen(stack)
    unlike += _unlike_left_out(catalog, stack, deployment.mode, unseen)
    if hardware.speculation is not None:
        unlike.append("none of them guesses tokens")
    unlike += _not_covered(catalog, *of_prediction)
    if unlike:
        return _no_band(unlike)
    medians = {metric: _median(catalog, metric) for metric in catalog.components}
    error = catalog.error("public stacks, each predicted by the others", medians, catalog.components, unseen)
    words = ", ".join(_named(stack, each) for each in unseen)
    return StackBand(error, (found("band_of_public_stacks", stacks=len(catalog.stacks), unseen=words or "nothing"),))


def outside_bands(
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment | None,
    workload: Workload,
    load: Load | None,
    in_flight_per_gpu: Sequence[float],
    outside: Sequence[OutsideFit],
    cached_share: float,
) -> tuple[OutsideFit, ...]:
    """The dimensions in which a prediction is extrapolated, by the judgement of `band_of`. Tables with measured levels
    have the errors of public stacks, which include those of other TP, lengths and loads. They are extrapolated too if
    no such stack is like this one. ``outside``: the result of `pdlab.plan.extrapolation.outside_fit`. ``deployment``:
    None: deployments are not judged. ``cached_share``: of the prompt tokens that caches answer. The others are as of
    `band_of`."""
    if hardware.steps is None:
        return tuple(outside)
    left = tuple(each for each in outside if hardware.error is None or each.dimension not in WITHIN)
    without_errors = hardware.error is None and hardware.steps.correction.fitted_levels > 0
    if deployment is None or without_errors:
        return left
    cached = [why for why in [why_cached(cached_share)] if why]
    unlike = band_of(hardware, shape, deployment, workload, load, in_flight_per_gpu, (), cached).unlike
    if not unlike:
        return left
    return (*left, OutsideFit("errors", f"errors are known of public stacks, and {', and '.join(unlike)}"))


def _unlike_pd(
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment,
    workload: Workload,
    load: Load | None,
    in_flight_per_gpu: Sequence[float],
) -> list[str]:
    """In what P:D engines without Ray are not like the public stacks of P:D."""
    assert hardware.steps is not None
    catalog = public_pd()
    stack = stack_of(hardware, shape, deployment)
    like, covered, pools = catalog.served_as(stack.engine), catalog.covered, list(deployment.pools.values())
    largest, most = max(pool.gpus_per_replica for pool in pools), covered.largest_engine(stack.gpu)
    precisions = sorted({each.precision for each in catalog.stacks})
    weights = weights_of(hardware, shape)
    unlike = []
    if len(like) < LEAST_LIKE:
        unlike.append(f"{len(like) or 'none'} of P:D {'is' if len(like) == 1 else 'are'} of {stack.engine}")
    if hardware.beside:
        unlike.append("none of them has pools on GPUs of two types")
    if hardware.speculation is not None:
        unlike.append("none of them guesses tokens")
    if hardware.steps.mode != MEASURED:
        unlike.append(f"their step times are measured ones, not those of {hardware.steps.mode}")
    if load is not None and not isinstance(load, Closed):
        unlike.append("they are closed loops")
    if not any(is_precision(each, weights) for each in precisions):
        unlike.append(f"their weights are {', '.join(precisions)}, not {weights}")
    if largest > most:
        unlike.append(f"their engines on {stack.gpu} have at most {most} GPUs, not {largest}")
    if any(pool.pp > 1 for pool in pools):
        unlike.append("none of them has pipeline ranks")
    for kind in catalog.unseen(stack):
        shares = catalog.left_out.get(kind, {})
        this = f"{_named(stack, kind)} is one"
        if not shares:
            unlike.append(f"too few of P:D show what bands of a left-out {KINDS[kind]} hold, and {this}")
        elif (held := min(shares.values())) < NEAR[0]:
            unlike.append(f"bands of a left-out {KINDS[kind]} of P:D held {held:.0%}, and {this}")
    return [*unlike, *_outside(covered, workload, in_flight_per_gpu)]


def _band_of_pd(stack: Stack) -> StackBand:
    """The band of P:D engines without Ray, by the public stacks of P:D."""
    catalog = public_pd()
    without = catalog.unseen(stack)
    parts = {metric: part for metric, each in catalog.components.items() if (part := each.parts(without)) is not None}
    error = FitError(
        tpot_percent=catalog.median_percent[TPOT],
        ttft_percent=catalog.median_percent[TTFT],
        requests_per_s_percent=catalog.median_percent[TPOT],
        points=catalog.points,
        how="public stacks of P:D, each predicted by the others; requests/s as TPOT",
        parts={**parts, "requests/s": parts[TPOT]},
    )
    words = ", ".join(_named(stack, each) for each in without)
    return StackBand(error, (found("band_of_public_stacks", stacks=len(catalog.stacks), unseen=words or "nothing"),))


def unlike_public_stacks(hardware: Hardware, shape: ModelShape) -> tuple[Finding, ...]:
    """What of model, GPU and engine version no public stack has, for tables without measured levels."""
    if hardware.steps is None or hardware.steps.correction.fitted_levels:
        return ()
    stack = stack_of(hardware, shape)
    lacking = [_named(stack, kind) for kind in public_errors().unseen(stack)]
    return (found("unlike_public_stacks", unseen=", ".join(lacking)),) if lacking else ()


def _named(stack: Stack, kind: str) -> str:
    """The model, the GPU, or the engine with its version, by a kind of `pdlab.plan.stack_prior.SEEN_BY`."""
    return {"model": stack.model, "gpu": stack.gpu, "engine": f"{stack.engine} {stack.version}"}[kind]


def _few(catalog: ErrorCatalog, stack: Stack, mode: str) -> list[str]:
    served = len(catalog.served_as(stack))
    if served >= LEAST_LIKE:
        return []
    return [f"{served or 'none'} of them {'are' if served > 1 else 'is'} {mode} with {stack.engine}"]


def _unlike_left_out(catalog: ErrorCatalog, stack: Stack, mode: str, unseen: Sequence[str]) -> list[str]:
    """Why the errors of left-out stacks are no errors of this stack."""
    unlike = [f"none of them is on {stack.gpu}"] if "gpu" in unseen else []
    if few := _few(catalog, stack, mode):
        return [*few, *unlike]
    for kind in unseen:
        groups = {group_of(each.stack, kind) for each in catalog.served_as(stack)}
        shares = catalog.left_out.get(kind, {})
        if kind == "gpu":
            continue
        if len(groups) < LEAST_LIKE or not shares.keys() >= catalog.components.keys():
            unlike.append(
                f"too few show what bands of a left-out {KINDS[kind]} hold ({len(groups)} of them), and "
                f"{_named(stack, kind)} is one"
            )
        elif (held := min(shares.values())) < NEAR[0]:
            unlike.append(
                f"bands of a left-out {KINDS[kind]} held {held:.0%} ({len(groups)} of them), and "
                f"{_named(stack, kind)} is one"
            )
    return unlike


def why_cached(share: float) -> str:
    """Why predictions by tables have no band if caches answer that share of the prompt tokens; empty: they have one."""
    return f"none has prefix caches that answer {share:.0%} of the prompt tokens" if share > CACHED else ""


def _median(catalog: ErrorCatalog, metric: str) -> float:
    known = [each.errors_percent[metric] for each in catalog.stacks if metric in each.errors_percent]
    return round(statistics.median(known), 1)


def _no_band(unlike: Sequence[str]) -> StackBand:
    """No band, with the finding that gives the reasons."""
    return StackBand(None, (found("no_band", why=", and ".join(unlike)),), tuple(unlike))


def _not_covered(
    catalog: ErrorCatalog,
    hardware: Hardware,
    shape: ModelShape,
    deployment: Deployment,
    workload: Workload,
    load: Load | None,
    in_flight_per_gpu: Sequence[float],
) -> list[str]:
    """The differences of a prediction from the range of the public points."""
    covered = catalog.covered
    if len(catalog.stacks) < LEAST_STACKS:
        return [f"there are {len(catalog.stacks)}, and a band needs {LEAST_STACKS}"]
    unlike = []
    if weights_of(hardware, shape) not in covered.weights:
        unlike.append(f"their weights are {', '.join(covered.weights)}, not {weights_of(hardware, shape)}")
    pools = list(deployment.pools.values())
    mode = hardware.steps.mode if hardware.steps is not None else MEASURED
    if mode != MEASURED:
        unlike.append(f"their step times are measured ones, not those of {mode}")
    if load is not None and not isinstance(load, Closed):
        unlike.append("they are closed loops")
    if others := sorted({pool.tp for pool in pools} - set(covered.tp)):
        unlike.append(f"their TP is {', '.join(map(str, covered.tp))}, not {', '.join(map(str, others))}")
    if any(map(has_wide_experts, pools)):
        unlike.append("none of them spreads experts over more than one node")
    if any(pool.pp > 1 or pool.dp > 1 for pool in pools):
        unlike.append("none of them has pipeline or data parallel ranks")
    return [*unlike, *_outside(covered, workload, in_flight_per_gpu)]


def _outside(covered: CoveredRange | PdCovered, workload: Workload, in_flight_per_gpu: Sequence[float]) -> list[str]:
    """In what lengths and load a prediction is outside of the points' range. Of several loads the first counts."""
    sides = (
        ([workload.longest[0]], covered.input_tokens, "input tokens"),
        ([workload.longest[1]], covered.output_tokens, "output tokens"),
        (in_flight_per_gpu, covered.in_flight_per_gpu, "requests in flight per GPU"),
    )
    unlike = []
    for values, (low, high), what in sides:
        beyond = [each for each in values if not low * (1 - SLACK) <= each <= high * (1 + SLACK)]
        if beyond:
            given = f"{beyond[0]:.{0 if beyond[0] >= 100 else 2}f}"
            unlike.append(f"they have {low:g} to {high:g} {what}, not {given}")
    return unlike


def saturation(
    levels: Sequence[SimulatedLevel], hardware: Hardware, shape: ModelShape, deployment: Deployment
) -> Finding | None:
    """Whether prompts of these levels, one of each seed, wait for KV memory, or would if it held `TIGHT` of what it is
    predicted to hold. The latter only of engines that do both: of others it is not known which one holds a request.
    And whether engines that only prefill are busy for more than `TIGHT` of the time, until the last prompt is
    prefilled."""
    if isinstance(deployment.topology, Disaggregated):
        busy = statistics.fmean(
            each.busy["prefill"] * each.duration_s / max(each.prefill_end_s) for each in levels if each.duration_s
        )
        if busy > TIGHT:
            return found("prefill_near_saturation", share=min(busy, 1.0))
    full = statistics.fmean(each.kv_full for each in levels)
    if deployment.transport is None:
        tokens = sum(
            pool.replicas * pool.dp * kv_capacity_tokens(hardware, shape, pool)
            for pool in deployment.served_pools.values()
        )
        full = max(full, statistics.fmean(each.share_above(TIGHT * tokens) for each in levels))
    if full > FULL:
        return found("near_saturation", share=full)
    return None
