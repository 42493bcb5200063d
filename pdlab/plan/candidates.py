"""Choose the deployments to simulate: enumeration, shortlist, copies. Pure.

A kind of engine is a way to fit the model: TP within a node. If no TP degree fits it, the kinds are PP over TP8, TP
over two nodes (for tables of step times), and DP with expert parallel over whole nodes. Every pair of a prefill kind
and a decode kind makes units of P:D replicas. P and D have no common factor, because 2:2 is two copies of 1:1. A unit
runs in as many copies as fit. Collocated pools fill a node, or all GPUs if these are no multiple of a node. Rate
matching (`pdlab.plan.rate_matching`) compares the units: by requests/s per planned GPU, or for a requested rate by
requests/s on the fewest GPUs that may serve it. The best ones are placed (`pdlab.placement.copies`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.gpu_count import DEFAULT_COUNT, Count
from pdlab.core.nodes import ClusterView
from pdlab.core.request_lengths import check_request_fits
from pdlab.core.text import counted
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Workload
from pdlab.placement.copies import copies_of
from pdlab.placement.place import fits, place, why_not
from pdlab.plan.rate_matching import RateMatcher, ReplicaUnit, UnitKind
from pdlab.sim.argument_effects import as_launched
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_time import kv_pool_bytes, why_not_held
from pdlab.sim.steps import steps_of

TP_DEGREES = (1, 2, 4, 8, 16)
MOST_REPLICAS = 16  # per pool of a unit
SLO_SHARES = (0.7, 0.85, 1.0)  # TPOT bounds at which units are compared, as shares of the SLO's bound
STEP_MULTIPLES = (1.15, 1.5, 2.0, 4.0)  # without an SLO on TPOT: multiples of the fastest decode step
PER_BOUND = 4  # units kept per TPOT bound
PER_SHAPES = 2  # units kept per TPOT bound and pair of kinds
PER_OTHERWISE = 3  # kinds of units kept that serve most if scattered KV blocks are copied in the other way
SERVES_ENOUGH = 2 / 3  # of what the best unit serves: rate matching is less wrong about two units
# With a requested rate. A deployment may serve so much more than rate matching says; sizes to look at are up to this
# many times the fewest GPUs, each a sixth above the one before; units kept per size and TPOT bound.
MAY_SERVE = 1.15
SIZES_TO, SIZE_STEPS, PER_SIZE = 2, 6, 2


@dataclass(frozen=True, slots=True)
class SizedDeployment:
    """A deployment, and the number of copies that fit. ``matched_rps``: requests/s of one copy by rate matching.
    ``in_flight``: its requests in flight at that rate, by Little's law. ``node_replicas``: a given rate may be served
    by pools of other numbers of its replicas, and so many of them fill a node; 0: it may not. ``replica_rps``:
    requests/s of one replica of a pool that fills a node, by rate matching; 0 if ``node_replicas`` is 0."""

    deployment: Deployment
    copies: int
    matched_rps: float
    in_flight: float
    node_replicas: int = 0
    replica_rps: float = 0.0


def engine_shapes(
    hardware: Hardware, shape: ModelShape, gpus: int, workload: Workload, *, whole_nodes: bool = False
) -> list[Pool]:
    """One replica of every kind of engine that holds at least one request. Raises UsageError.

    For hardware of two GPU types: the kinds on the first type, for prefill, then the kinds on the second.
    ``whole_nodes``: the kinds on at least a whole node of their type.
    """
    if hardware.beside:
        each = [(own, own.gpu_type) for own in (hardware.model_copy(update={"beside": ()}), *hardware.beside)]
        return [
            pool.model_copy(update={"gpu_type": gpu_type})
            for own, gpu_type in each
            for pool in engine_shapes(own, shape, gpus, workload, whole_nodes=whole_nodes)
        ]
    request = sum(workload.longest)
    check_request_fits(shape, request)
    node = hardware.gpus_per_node
    gpus = max(gpus, node) if whole_nodes else gpus
    within = [Pool(tp=tp) for tp in TP_DEGREES if tp <= node]
    if shape.experts > 1 and shape.kv_latent and hardware.steps is not None:
        # TP ranks of latent attention all have the whole KV cache. Data parallel ranks have a part each.
        within.append(Pool(dp=node, expert_parallel=True))
    across = [Pool(tp=node, pp=stages) for stages in range(2, 5)]
    if hardware.steps is not None:  # only tables have the time of an all-reduce over the network
        across += [Pool(tp=tp) for tp in TP_DEGREES if node < tp <= 2 * node]
    if shape.experts > 1:
        across += [Pool(dp=size, expert_parallel=True) for size in range(node, shape.experts + 1, node)]
    refused: UsageError | None = None
    tried: list[Pool] = []
    for layouts in (within, across):
        usable = []
        for pool in (as_launched(each, hardware, shape) for each in layouts):
            if pool.gpus > gpus or not _accepted(Collocated(pool=pool), shape):
                continue
            tried.append(pool)
            if not why_not_held(hardware, shape, pool, request):
                try:
                    steps_of(hardware, shape, pool)
                except UsageError as error:  # the tables lack this kind
                    refused = refused or error
                else:
                    usable.append(pool)
        if usable:
            return usable
        if refused is not None:
            raise refused
    names = ", ".join(dict.fromkeys(pool.degrees for pool in tried))
    roomiest = max(tried, key=lambda pool: kv_pool_bytes(hardware, shape, pool) / (pool.tp * pool.pp))
    raise UsageError(
        f"no engine within {counted(gpus, 'GPU')} of {hardware.gpu} holds {shape.name} with one request of "
        f"{counted(request, 'token')} (tried: {names}): at {roomiest.degrees} "
        f"{why_not_held(hardware, shape, roomiest, request, 'give more GPUs')}"
    )


def units(shapes: Sequence[Pool], gpus: int, hardware: Hardware, shape: ModelShape) -> Iterator[ReplicaUnit]:
    """Every unit that fits the GPUs and that vLLM accepts, collocated ones first. ``gpus``: the number of GPUs of each
    type in ``shapes``. With two types, prefill is on the first one, and all other pools are on the second one.
    Collocated pools fill a node of their type."""
    mixed = shapes[0].gpu_type != shapes[-1].gpu_type
    prefills_on = [pool for pool in shapes if pool.gpu_type == shapes[0].gpu_type]
    decodes_on = [pool for pool in shapes if pool.gpu_type == shapes[-1].gpu_type]
    for pool in decodes_on:
        node = hardware.typed(pool).gpus_per_node
        fill = node if gpus % node == 0 and pool.gpus <= node else gpus
        yield ReplicaUnit(pool, fill // pool.gpus, None, 0)
    for prefill in prefills_on:
        for decode in decodes_on:
            if not _accepted(Disaggregated(prefill=prefill, decode=decode, placement="spread"), shape):
                continue
            for prefills in range(1, min(gpus // prefill.gpus, MOST_REPLICAS) + 1):
                decode_gpus = gpus if mixed else gpus - prefills * prefill.gpus
                for decodes in range(1, min(decode_gpus // decode.gpus, MOST_REPLICAS) + 1):
                    if math.gcd(prefills, decodes) == 1:
                        yield ReplicaUnit(prefill, prefills, decode, decodes)


def gpus_of_type(unit: ReplicaUnit) -> int:
    """The GPUs of a unit, or of two types the larger number of one of them."""
    if unit.decode is None or unit.decode.gpu_type == unit.prefill.gpu_type:
        return unit.gpus
    return max(unit.prefill.gpus * unit.prefills, unit.decode.gpus * unit.decodes)


def most_copies(unit: ReplicaUnit, gpus: int) -> int:
    """The most copies of a unit on ``gpus`` GPUs of each of its types."""
    return gpus // gpus_of_type(unit)


def _counted_gpus(unit: ReplicaUnit, gpus: int, count: Count) -> float:
    return unit.gpus if count == "used" else gpus / most_copies(unit, gpus)


def fewest_copies(rate_rps: float, served_rps: float) -> int:
    """The fewest copies, or replicas, that may serve a rate. ``served_rps``: of one of them by rate matching; 0: one of
    them is worth a try."""
    return max(math.ceil(rate_rps / (MAY_SERVE * served_rps)), 1) if served_rps else 1


def _accepted(topology: Collocated | Disaggregated, shape: ModelShape) -> bool:
    try:
        check_divisibility(Deployment(topology=topology), shape)
    except UsageError:
        return False
    return True


def bounds(matcher: RateMatcher, shapes: Iterable[Pool], tpot_s: float | None) -> tuple[float, ...]:
    """The TPOT bounds at which units are compared, in seconds. They are shares of ``tpot_s``, the SLO's bound; or else
    multiples of the fastest decode step, and no bound."""
    if tpot_s is not None:
        return tuple(share * tpot_s for share in SLO_SHARES)
    fastest_s = min(matcher.step_s(pool, 1) for pool in shapes)
    return (*(factor * fastest_s for factor in STEP_MULTIPLES), math.inf)


class Shortlist(NamedTuple):
    """The deployments to simulate, and the number of units that fit the GPUs. ``unplaced``: units that would have been
    chosen, but do not fit the nodes. ``why_unplaced``: why a collocated pool does not; empty: there is none.
    ``sizes_to``: for a rate, the most GPUs of a unit of P:D that was looked at; 0: no rate limits them."""

    deployments: list[SizedDeployment]
    units: int
    unplaced: int = 0
    why_unplaced: str = ""
    sizes_to: int = 0


def shortlist(
    matcher: RateMatcher,
    model: str,
    view: ClusterView,
    gpus: int,
    shapes: Sequence[Pool],
    tpot_s: float | None,
    rate_rps: float | None = None,
    shapes_of_node: Sequence[Pool] = (),
    sizes_to: int = 0,
    otherwise: RateMatcher | None = None,
    count: Count = DEFAULT_COUNT,
) -> Shortlist:
    """The deployments to simulate. All of them fit the nodes of the view.

    They are all collocated units; for each TPOT bound of `bounds` the units with the most requests/s per GPU, at most
    `PER_SHAPES` of each pair of kinds; and the best unit of each pair of kinds that serves at least `SERVES_ENOUGH` of
    what the best unit serves. ``rate_rps``: the requested rate, over all GPUs; if they may serve it, the units of P:D
    are those with the most requests/s on the fewest GPUs that may, and on up to `SIZES_TO` times as many, or
    ``sizes_to``. ``shapes_of_node``: the kinds of engines if the planned GPUs were whole nodes (empty: ``shapes``).
    ``count``: the GPUs that divide the requests/s. Unless these are the used ones, they are all planned ones.
    ``otherwise``: rates if scattered KV blocks are copied in the other way. The best units by these are taken too,
    and the best one of those that serve more then.
    """
    node = matcher.hardware.gpus_per_node

    def holding(kinds: Sequence[Pool], most_gpus: int) -> list[ReplicaUnit]:
        return [
            unit
            for unit in units(kinds, most_gpus, matcher.hardware, matcher.shape)
            if unit.decode is None or ((matcher.placement != "pack" or unit.gpus <= node) and matcher.hold_apart(unit))
        ]

    every = holding(shapes, gpus)
    chosen: dict[ReplicaUnit, SizedDeployment] = {}
    refused: set[ReplicaUnit] = set()

    def take(unit: ReplicaUnit) -> bool:
        if unit not in chosen and unit not in refused:
            sized = _sized(matcher, model, view, gpus, unit, tpot_s)
            if sized is None:
                refused.add(unit)
            else:
                chosen[unit] = sized
        return unit in chosen

    for unit in every:
        if unit.decode is None:
            take(unit)
    kinds = shapes_of_node or shapes
    targets = bounds(matcher, shapes if rate_rps is None else kinds, tpot_s)
    sizes = [] if rate_rps is None else _sizes(matcher, every, gpus, targets[-1], rate_rps, sizes_to)
    if sizes:
        # Units larger than the planned GPUs count as kept: others in their place would be kept by a small plan alone.
        fitting = set(every)
        _take_best_of_sizes(
            matcher, holding(kinds, sizes[-1]), sizes, targets, lambda unit: unit not in fitting or take(unit)
        )
    else:
        _take_best(matcher, every, gpus, count, targets, take)
    if otherwise is not None:
        _take_best_otherwise(matcher, otherwise, every, gpus, count, targets[-1], take)
    if not chosen:
        place(_deployment(matcher, model, every[0]), view)  # raises the reason
    whole = (_deployment(matcher, model, unit) for unit in every if unit.decode is None)
    cannot = next((each for each in whole if not fits(each, view)), None)
    why = why_not(cannot, view) if cannot is not None else ""
    return Shortlist(list(chosen.values()), len(every), len(refused), why, sizes[-1] if sizes else 0)


def _take_best(
    matcher: RateMatcher,
    every: Sequence[ReplicaUnit],
    gpus: int,
    count: Count,
    targets: Sequence[float],
    take: Callable[[ReplicaUnit], bool],
) -> None:
    """Take the units of P:D that serve most per GPU at each TPOT bound of ``targets``. ``take``: whether a unit has a
    place."""
    for bound_s in targets:
        last_bound = bound_s == targets[-1]
        order: list[tuple[float, int, int, ReplicaUnit]] = []
        for unit in every:
            if unit.decode is not None:
                rps = matcher.serves(unit, bound_s).rps
                order.append((-rps / _counted_gpus(unit, gpus, count), unit.gpus, len(order), unit))
        order.sort()
        kept_per_kind: dict[UnitKind, int] = {}
        for value, _, _, unit in order:
            if value == 0 and kept_per_kind:
                break
            already = kept_per_kind.get(unit.kind, 0)
            among_best = sum(kept_per_kind.values()) < PER_BOUND and already < PER_SHAPES
            best_of_kind = last_bound and not already and value <= order[0][0] * SERVES_ENOUGH
            if (among_best or best_of_kind) and take(unit):
                kept_per_kind[unit.kind] = already + 1


def _take_best_otherwise(
    matcher: RateMatcher,
    otherwise: RateMatcher,
    every: Sequence[ReplicaUnit],
    gpus: int,
    count: Count,
    bound_s: float,
    take: Callable[[ReplicaUnit], bool],
) -> None:
    """Take the units of P:D of `PER_OTHERWISE` kinds that serve most per GPU by ``otherwise``, and of those that serve
    less by ``matcher`` the one that serves most. ``take``: whether a unit has a place."""
    order = []
    for number, unit in enumerate(every):
        if unit.decode is not None:
            rps = otherwise.serves(unit, bound_s).rps
            more = rps > matcher.serves(unit, bound_s).rps
            order.append((-rps / _counted_gpus(unit, gpus, count), unit.gpus, number, more))
    order.sort()
    for some, most in ((order, PER_OTHERWISE), ([each for each in order if each[-1]], 1)):
        kept: set[UnitKind] = set()
        for _, _, number, _ in some:
            if len(kept) < most and every[number].kind not in kept and take(every[number]):
                kept.add(every[number].kind)


def _sizes(
    matcher: RateMatcher, every: Sequence[ReplicaUnit], gpus: int, bound_s: float, rate_rps: float, sizes_to: int
) -> list[int]:
    """Numbers of GPUs, of each type, at which to look for units of P:D that serve the rate, in ascending order. The
    first is the fewest GPUs that may serve it at the TPOT bound. ``sizes_to``: the last one at least. Empty: all GPUs
    do not serve it."""
    fewest = gpus + 1
    for unit in every:
        if unit.decode is not None and (rps := matcher.serves(unit, bound_s).rps):
            fewest = min(fewest, fewest_copies(rate_rps, rps) * gpus_of_type(unit))
    if fewest > gpus:
        return []
    sizes, last = [fewest], max(SIZES_TO * fewest, sizes_to)
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] + max(sizes[-1] // SIZE_STEPS, 1), last))
    return sizes


def _take_best_of_sizes(
    matcher: RateMatcher,
    every: Sequence[ReplicaUnit],
    sizes: Sequence[int],
    targets: Sequence[float],
    take: Callable[[ReplicaUnit], bool],
) -> None:
    """Take the units of P:D that serve most on each number of GPUs at each TPOT bound of ``targets``: `PER_SIZE` of
    different kinds. They do not depend on how many GPUs are planned beyond these. ``take``: whether a unit has a
    place."""
    for bound_s in targets:
        served = [
            (rps, unit) for unit in every if unit.decode is not None and (rps := matcher.serves(unit, bound_s).rps)
        ]
        for size in sizes:
            order = sorted(
                (-rps * copies, unit.gpus, number)
                for number, (rps, unit) in enumerate(served)
                if (copies := most_copies(unit, size))
            )
            kept: set[UnitKind] = set()
            for _, _, number in order:
                unit = served[number][1]
                if unit.kind not in kept and take(unit):
                    kept.add(unit.kind)
                if len(kept) == PER_SIZE:
                    break


def on_two_types(deployment: Deployment, hardware: Hardware) -> Deployment | None:
    """The deployment with prefill on the first GPU type of the hardware, and decode on the second. None for a
    deployment that is not PD, or is packed: the nodes of the two types are different ones."""
    topology = deployment.topology
    if not isinstance(topology, Disaggregated) or topology.placement == "pack":
        return None
    pools = {
        "prefill": topology.prefill.model_copy(update={"gpu_type": hardware.gpu_type}),
        "decode": topology.decode.model_copy(update={"gpu_type": hardware.beside[0].gpu_type}),
    }
    return deployment.with_topology(**pools)


def view_gpus(view: ClusterView, gpus: int) -> int:
    """GPUs of all types together, with ``gpus`` of each type."""
    return gpus * len({node.gpu_type for node in view.engine_nodes})


def _sized(
    matcher: RateMatcher,
    model: str,
    view: ClusterView,
    gpus: int,
    unit: ReplicaUnit,
    tpot_s: float | None,
) -> SizedDeployment | None:
    """The unit as a deployment, a collocated one with as many replicas as can be placed; None if it cannot be
    placed."""
    fewest = unit.prefills if unit.decode is not None else 1
    for replicas in range(unit.prefills, fewest - 1, -1):
        placed = unit._replace(prefills=replicas)
        deployment = _deployment(matcher, model, placed)
        if copies := min(copies_of(deployment, view, view_gpus(view, gpus)), most_copies(placed, gpus)):
            rps, in_flight = matcher.serves(placed, tpot_s or math.inf)
            if unit.decode is not None:
                return SizedDeployment(deployment, copies, rps, in_flight)
            fills = max(matcher.hardware.typed(unit.prefill).gpus_per_node // unit.prefill.gpus, 1)
            of_node_rps = matcher.serves(unit._replace(prefills=fills), tpot_s or math.inf).rps
            return SizedDeployment(deployment, copies, rps, in_flight, fills, of_node_rps / fills)
    return None


def _deployment(matcher: RateMatcher, model: str, unit: ReplicaUnit) -> Deployment:
    prefill = unit.prefill.model_copy(update={"replicas": unit.prefills})
    topology: Collocated | Disaggregated
    if unit.decode is None:
        topology = Collocated(pool=prefill)
    else:
        decode = unit.decode.model_copy(update={"replicas": unit.decodes})
        topology = Disaggregated(prefill=prefill, decode=decode, placement=matcher.placement_of(unit))
    return Deployment(model=model, topology=topology)
