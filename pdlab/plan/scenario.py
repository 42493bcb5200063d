"""Simulate one load on one copy of a deployment, and judge it by the SLO. Pure.

Loads are judged without their filling and draining (`judged`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.findings import Finding
from pdlab.core.gpu_count import DEFAULT_COUNT, Count
from pdlab.core.workload import Closed, Level, Open, Slo, Workload
from pdlab.placement.copies import whole_node_gpus
from pdlab.plan.extrapolation import OutsideFit, Platform, in_flight_per_gpu, outside_fit
from pdlab.plan.scattered_blocks import ScatteredBlocks
from pdlab.plan.step_findings import launched_stack, step_findings
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import depends_on_age
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import simulate

WAVES, LATER_WAVES, FIRST_REQUESTS, LEAST_REQUESTS = 6, 3, 96, 48
LONG_WAVES, MOST_LONG = 60, 2000  # of a given closed loop: its first requests start at once, and run in step for long
STAYS, LEAST_OPEN, MOST_OPEN = 12.0, 1200, 3000  # of an open loop: duration in E2EL; least and most requests
# An open loop that lasts less than this many E2EL is not full when it is judged. It has more requests then, up to this
# number, unless it has nearly enough.
LEAST_STAYS, FAR_OPEN, ENOUGH_MORE = 4.0, 30_000, 1.1
# The least and the largest share of the requests of an open loop that are left out at the beginning and at the end.
FILLING, MOST_FILLING, DRAINING, MOST_DRAINING = 0.2, 0.5, 0.1, 0.25
FILLED_STAYS = 2.0  # an open loop has filled after this many times the p95 of E2EL
OF_A_TRACE = 0.1  # share of recorded requests that is left out at the beginning
# Rate matching takes the hits of one cache of so many blocks: what never evicts would remember every request.
ASSUMED_CACHE_BLOCKS = 2**18
FEWEST_ENDED = 12  # requests whose ends within a window give a rate
GROWTH, DEVIATIONS = 0.05, 3.0  # a queue grows if more than this share, and these standard deviations, remain


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The figures of one copy under one load. Latencies are means of the judged requests. ``good_share``: share of
    these requests within every bound. ``keeps_up``: no queue grows. ``meets``: it keeps up, and the share is at least
    the SLO's quantile. ``stress``: the SLO's quantile of the worst latency over its bound. ``bottleneck``: see
    `bottleneck`."""

    load: Closed | Open
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    good_share: float
    keeps_up: bool
    meets: bool
    stress: float
    bottleneck: str
    level: SimulatedLevel
    columns: tuple[Any, ...] = field(compare=False, repr=False)
    """TTFT, TPOT and E2EL of every judged request in seconds, as numpy arrays."""

    @property
    def goodput_rps(self) -> float:
        return self.requests_per_s * self.good_share


class Simulates(Protocol):
    """The type of `pdlab.sim.simulator.simulate` and its replacements."""

    def __call__(
        self,
        deployment: Deployment,
        levels: Sequence[Level],
        workload: Workload,
        hardware: Hardware,
        shape: ModelShape,
        *,
        seed: int,
        prefix_hit_rate: float,
        trace: Trace | None,
        scattered: bool | None,
    ) -> list[SimulatedLevel]: ...


@dataclass(frozen=True, slots=True)
class Scenario:
    """The common settings of all simulations of a plan.

    ``trace``: the requests of the load, at their own rate; ``workload`` then has their mean lengths. If the prompts of
    the trace share text, prefix caches are simulated, and ``prefix_hit_rate`` is only for rate matching.
    ``scattered``: scattered blocks of a wrapped KV pool are copied one by one; False: they merge. ``blocks``: the
    measured cost of scattered blocks, which ``hardware`` then has (None: not measured). ``count``: the GPUs that divide
    throughput. ``network``: of the nodes, see `Platform` (None: not known). ``kv_offload_gb``: host memory of each
    engine that prefills (`Deployment.kv_offload_gb`). ``gaps``: levels have the gaps between tokens, which only
    pictures and files need.
    """

    hardware: Hardware
    shape: ModelShape
    workload: Workload
    slo: Slo
    prefix_hit_rate: float = 0.0
    seed: int = 0
    burstiness: float = 1.0
    trace: Trace | None = None
    scattered: bool = True
    blocks: ScatteredBlocks | None = None
    count: Count = DEFAULT_COUNT
    network: str | None = None
    kv_offload_gb: float | None = None
    gaps: bool = True

    def with_offload(self, deployment: Deployment) -> Deployment:
        """The deployment with the scenario's ``kv_offload_gb``."""
        return deployment.model_copy(update={"kv_offload_gb": self.kv_offload_gb})

    def counted_gpus(self, deployment: Deployment, copies: int, gpus: int | None, *, filled: bool = True) -> float:
        """The GPUs by which the throughput of all copies is divided. They are the GPUs that the copies use, or the GPUs
        of their whole nodes (`whole_node_gpus`), at most those of the planned nodes. ``gpus``: the number of planned
        GPUs (None: those of the copies). ``filled``: further copies fill the nodes. Of two GPU types
        the used GPUs count."""
        used = copies * deployment.gpus
        if self.count == "used" or self.hardware.cpu or self.hardware.beside:
            return used
        node = self.hardware.gpus_per_node
        whole = copies * whole_node_gpus(deployment, node)
        if not filled:
            whole = math.ceil(whole / node) * node
        return max(used, whole if gpus is None else min(whole, -(-gpus // node) * node))

    @property
    def throughput_gpus(self) -> int:
        """The GPUs for which throughput in tokens/s is given: those of a node, or one if nodes differ in size."""
        return self.hardware.common_node_gpus or 1

    @property
    def throughput_unit(self) -> str:
        """The name of `throughput_gpus`."""
        return "node" if self.hardware.common_node_gpus else "GPU"

    def planned_gpus(self, gpus: int) -> int:
        """GPUs of all types together, with ``gpus`` of each type."""
        return gpus * (1 + len(self.hardware.beside))

    @property
    def assumed_cache_blocks(self) -> int:
        """Blocks of the prefix cache whose hits are ``prefix_hit_rate`` if the trace's prompts share text."""
        return ASSUMED_CACHE_BLOCKS

    @property
    def longest(self) -> Workload:
        """A workload whose longest request must fit each engine."""
        if self.trace is None:
            return self.workload
        return Workload(input_tokens=self.trace.longest[0], output_tokens=self.trace.longest[1])

    def outside(self, deployment: Deployment | None = None, result: LoadResult | None = None) -> tuple[OutsideFit, ...]:
        """The dimensions in which this plan, one deployment, or one load on the deployment is extrapolated. The
        judgement is that of `--predict` (`pdlab.plan.stack_bands.outside_bands`)."""
        loads = [] if deployment is None or result is None else [in_flight(result, deployment)]
        found = outside_fit(
            self.hardware,
            self.shape,
            deployment,
            (self.workload, self.longest),
            ran_on=Platform(network=self.network),
            in_flight_per_gpu=loads,
            kv_dtype=self.shape.kv_dtype,
        )
        if self.hardware.steps is None:
            return found
        from pdlab.plan.stack_bands import outside_bands

        load = result.load if result is not None else None
        return outside_bands(
            self.hardware, self.shape, deployment, self.longest, load, loads, found, self.prefix_hit_rate
        )

    def step_findings(
        self, deployments: Sequence[Deployment] = (), results: Sequence[LoadResult] = ()
    ) -> tuple[Finding, ...]:
        """The findings of `pdlab.plan.step_findings` for deployments and their levels. Raises UsageError."""
        findings = step_findings(self.hardware, self.shape, deployments, [each.level for each in results])
        if self.hardware.steps is not None:
            from pdlab.plan.stack_bands import unlike_public_stacks

            findings = (*findings, *unlike_public_stacks(self.hardware, self.shape))
        return (*findings, *launched_stack(self.hardware)) if deployments else findings

    def depends(self, deployment: Deployment) -> bool:
        """Whether scattered blocks that are copied one by one change this deployment's figures."""
        return self.blocks is None and depends_on_age(deployment, self.hardware, self.shape)

    def at_rate(self, rate_rps: float) -> Open:
        """The load of that rate, with the burstiness of the plan."""
        return Open(rate_rps=rate_rps, burstiness=self.burstiness)

    def outcome(
        self, deployment: Deployment, load: Closed | Open, stays_s: float = 0.0, *, long: bool = False
    ) -> LoadResult:
        """Simulate one copy under one load. ``stays_s``: approximate E2EL of a request, for the duration of an open
        loop. ``long``: a closed loop lasts until its synchronous start hardly counts. Raises UsageError if a request
        does not fit.

        While an open loop fills, fewer requests end than arrive. Latencies grow until it is full. So a loop that was
        too short, with latencies within the SLO, is simulated again with more requests."""
        trace = self._trace(load)
        if trace is not None:
            count = len(trace.arrival_s)
        elif isinstance(load, Closed):
            n = load.concurrency
            count = max(min(WAVES * n, LATER_WAVES * n + FIRST_REQUESTS), LEAST_REQUESTS)
            if long:
                count = max(min(LONG_WAVES * n, MOST_LONG), count)
        else:
            count = min(max(round(STAYS * stays_s * load.rate_rps), LEAST_OPEN), MOST_OPEN)
            count = max(count, _least_requests(load, stays_s))

        def of_requests(number: int) -> LoadResult:
            level = Level(load=load, num_requests=number, seed=self.seed)
            return self._simulated(self._simulate, deployment, level, trace)

        result = of_requests(count)
        if isinstance(load, Open) and trace is None:
            while result.good_share >= self.slo.quantile:
                least = _least_requests(load, statistics.fmean(result.columns[2].tolist()))
                if least <= ENOUGH_MORE * count:
                    break
                result, count = of_requests(least), least
        return result

    def replayed(self, deployment: Deployment, rate_rps: float) -> LoadResult:
        """Simulate the requests of the trace on one copy, at another mean rate (`Trace.at_rate`). Raises UsageError if
        a request does not fit."""
        assert self.trace is not None
        trace = self.trace.at_rate(rate_rps)
        level = Level(load=self.at_rate(rate_rps), num_requests=len(trace.arrival_s), seed=self.seed)
        return self._simulated(self._simulate, deployment, level, trace)

    @property
    def _simulate(self) -> Simulates:
        return partial(simulate, gaps=self.gaps)

    def again(self, simulates: Simulates, deployment: Deployment, result: LoadResult) -> LoadResult:
        """Simulate the requests of ``result`` with another simulator. Raises the UsageError of ``simulates``."""
        return self._simulated(simulates, deployment, result.level.level, self._trace(result.load))

    def _trace(self, load: Closed | Open) -> Trace | None:
        """The part of the trace that one copy gets at that rate."""
        if self.trace is None or not isinstance(load, Open):
            return None
        return self.trace.part(max(round(self.trace.rate_rps / load.rate_rps), 1))

    def _simulated(self, simulates: Simulates, deployment: Deployment, level: Level, trace: Trace | None) -> LoadResult:
        load = level.load
        assert isinstance(load, Closed | Open)
        import numpy as np

        simulated = simulates(
            deployment,
            [level],
            self.workload,
            self.hardware,
            self.shape,
            seed=self.seed,
            prefix_hit_rate=0.0 if trace is not None and trace.requests else self.prefix_hit_rate,
            trace=trace,
            scattered=self.scattered,
        )[0]
        if trace is not None and trace.requests:
            simulated = simulated.by_arrival()
        simulated = simulated.packed()
        part = judged(simulated, recorded=trace is not None)
        arrival_s, first_s, finish_s = (
            np.asarray(each, dtype=np.float64)[part]
            for each in (simulated.arrival_s, simulated.first_token_s, simulated.finish_s)
        )
        tokens = np.array(simulated.output_tokens[part])
        ttft_s, tpot_s, e2el_s = (
            first_s - arrival_s,
            (finish_s - first_s) / np.maximum(tokens - 1, 1),
            finish_s - arrival_s,
        )
        # An answer of one token has no TPOT.
        tpots_s = tpot_s[tokens > 1].tolist()
        stresses = self.slo.stress(ttft_s, tpot_s, e2el_s)
        good_share = float((stresses <= 1).mean())
        per_s, keeps_up = served(simulated, part, waits=trace is not None and bool(trace.requests))
        return LoadResult(
            load=load,
            requests_per_s=per_s,
            output_tokens_per_s=per_s * self.workload.mean_tokens.output,
            ttft_s=sum(ttft_s.tolist()) / len(ttft_s),
            tpot_s=statistics.fmean(tpots_s) if tpots_s else 0.0,
            good_share=good_share,
            keeps_up=keeps_up,
            meets=keeps_up and good_share >= self.slo.quantile,
            stress=self.slo.at_quantile(stresses),
            bottleneck=bottleneck(simulated),
            level=simulated,
            columns=(ttft_s, tpot_s, e2el_s),
        )


def _least_requests(load: Open, stays_s: float) -> int:
    """The requests of an open loop that is judged when it is full. ``stays_s``: E2EL."""
    return min(round(LEAST_STAYS * stays_s * load.rate_rps), FAR_OPEN)


def in_flight(result: LoadResult, deployment: Deployment) -> float:
    """Requests in flight per GPU of the deployment."""
    e2el_s = statistics.fmean(result.columns[2].tolist())
    return in_flight_per_gpu(result.load, deployment.gpus, result.requests_per_s, e2el_s)


def crossing_share(low: float, high: float) -> float:
    """The share of the way from one load to the next at which stress passes 1, linear in its logarithm."""
    low = max(low, 1e-9)
    return -math.log(low) / math.log(high / low)


def judged(simulated: SimulatedLevel, *, recorded: bool = False) -> slice:
    """The requests that are judged: without those that fill an empty system, and those that drain it.

    A closed loop, of three waves at least, loses its first wave and its last: while it drains, fewer requests share the
    engines. It also loses, but for the last quarter of a wave, what came before all clients had begun.

    An open loop begins after twice the 95th percentile of E2EL, and ends one median of E2EL before the last arrival. It
    loses at least a fifth and at most a half of its requests at the beginning. At the end it loses at least a tenth and
    at most a quarter. ``recorded`` requests lose their first tenth.
    """
    import numpy as np

    load, count = simulated.level.load, len(simulated.arrival_s)
    arrival_s = np.asarray(simulated.arrival_s, dtype=np.float64)
    if isinstance(load, Closed):
        end = count - load.concurrency
        filling = int((arrival_s <= arrival_s[load.concurrency - 1]).sum())
        return slice(max(load.concurrency, min(filling, end - max(load.concurrency // 4, 1))), end)
    if recorded:
        return slice(int(OF_A_TRACE * count), count)
    e2el_s = np.sort(np.asarray(simulated.finish_s, dtype=np.float64) - arrival_s)
    filled_s = arrival_s[0] + FILLED_STAYS * e2el_s[int(0.95 * count)]
    drains_s = arrival_s[-1] - e2el_s[count // 2]
    before = int((arrival_s < filled_s).sum())
    after = int((arrival_s > drains_s).sum())
    begin = min(max(before, int(FILLING * count)), int(MOST_FILLING * count))
    return slice(begin, count - min(max(after, int(DRAINING * count)), int(MOST_DRAINING * count)))


class Served(NamedTuple):
    """Requests/s, and whether no queue grows."""

    rps: float
    keeps_up: bool


def served(simulated: SimulatedLevel, part: slice, *, waits: bool = False) -> Served:
    """The served requests/s, and whether no queue grows.

    A closed loop serves its mean requests in flight over the mean E2EL of the judged requests, by Little's law: a count
    of completions depends on where in a wave its window ends. In an open loop, requests/s are the requested rate times
    the share of arrivals that finished, because the arrival rate of a short window differs from the requested rate by
    chance. If hardly any finished while others arrived, they are what the deployment completed in all. If requests wait
    for others (``waits``), it is their own arrival rate times that share.
    """
    import numpy as np

    load = simulated.level.load
    finish_s, arrival_s = (np.asarray(each, dtype=np.float64) for each in (simulated.finish_s, simulated.arrival_s))
    stays_s = statistics.fmean((finish_s[part] - arrival_s[part]).tolist())
    opens_s, closes_s = float(arrival_s[part.start]), float(arrival_s[part.stop - 1])
    if isinstance(load, Closed):
        held = load.concurrency
        if closes_s <= opens_s or opens_s > arrival_s[held - 1]:
            return Served(held / stays_s, True)
        here_s = np.clip(finish_s, opens_s, closes_s) - np.clip(arrival_s, opens_s, closes_s)
        return Served(min(float(here_s.sum()) / (closes_s - opens_s), held) / stays_s, True)
    if closes_s <= opens_s:
        return Served(len(finish_s) / simulated.duration_s, True)
    inside = int(((opens_s < finish_s) & (finish_s <= closes_s)).sum())
    arrived = part.stop - part.start
    # Under a load far above what is served, Little's law counts more requests than have come.
    in_flight = min(arrived / (closes_s - opens_s) * stays_s, len(finish_s))
    piles_up = arrived - inside > max(GROWTH * arrived, DEVIATIONS * math.sqrt(2 * in_flight))
    if piles_up and inside < FEWEST_ENDED:  # too few ended while others came: all of them, over the whole level
        return Served(len(finish_s) / simulated.duration_s, False)
    came_per_s = arrived / (closes_s - opens_s) if waits else load.value
    return Served(came_per_s * min(inside / arrived, 1.0), not piles_up)


def bottleneck(level: SimulatedLevel) -> str:
    """The bottleneck of a level by shares of its time: KV memory, the link, prefill or decode."""
    if level.kv_full > 0.05:
        return "KV memory"
    if level.link_busy > 0.8:
        return "link"
    if "collocated" in level.busy:
        computing = sum(level.prefill_end_s) - sum(level.prefill_start_s)
        living = sum(level.finish_s) - sum(level.arrival_s)
        return "prefill" if computing > 0.5 * living else "decode"
    if "fluid" in level.busy:  # its engines prefill and decode: the share of the queue in TTFT decides
        waiting = sum(level.prefill_start_s) - sum(level.queued_s)
        return "prefill" if waiting > 0.5 * (sum(level.first_token_s) - sum(level.arrival_s)) else "decode"
    return "prefill" if level.busy["prefill"] > 0.85 else "decode"
