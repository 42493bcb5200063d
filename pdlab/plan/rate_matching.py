"""Rate matching: the requests/s of prefill and decode replicas without queues, from step times. Pure.

- **Prefill**: prompts are split, so each step has as many tokens as the token budget. With a TTFT bound, prefill runs
  at the share of that rate at which nine of ten requests meet the bound:
  wait(p90) = ln 10 x W, W = s rho^(sqrt(2(c+1)) - 1) / (2 c (1 - rho)). W is the mean wait of M/D/c (Sakasegawa's
  approximation of M/M/c, halved for constant service), of c engines with the service time s and the load rho.
- **Decode**: B is the largest batch that is within the TPOT bound, and that KV memory holds. A request that joins it
  costs a time p, in which no sequence decodes: that of its block tables and of posting its KV transfer. With n output
  tokens per request, requests finish p + (n - 1) step(B) / B apart. By Little's law TPOT is step(B) + B p / (n - 1).
- **KV transfer**: the bytes per second of the links limit the requests/s.
- **Collocated**: the same, where p is the time by which the prompt's prefill delays decode.

The planner chooses the deployments to simulate by rate matching, and prints it as a check of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, PlacementKind, Pool
from pdlab.core.workload import Workload
from pdlab.sim.engine import most_sequences_of
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import LinkKind, TransferCosts, transfer_costs
from pdlab.sim.step_source import StepSource
from pdlab.sim.step_time import kv_capacity_tokens, why_not_held
from pdlab.sim.steps import steps_of


class Rates(NamedTuple):
    """Requests/s of one prefill replica, and of one decode replica within the TPOT bound."""

    prefill_rps: float
    decode_rps: float

    @property
    def matched(self) -> str:
        """The P:D ratio at which neither waits for the other."""
        if self.decode_rps <= 0:
            return "none: decode misses the SLO"
        ratio = self.decode_rps / self.prefill_rps
        return f"{ratio:.1f}:1" if ratio >= 1 else f"1:{1 / ratio:.1f}"


class ReplicaUnit(NamedTuple):
    """``prefills`` replicas of the kind ``prefill`` and ``decodes`` replicas of the kind ``decode``. A kind is a pool
    of one replica. ``decode`` None: a collocated pool."""

    prefill: Pool
    prefills: int
    decode: Pool | None
    decodes: int

    @property
    def gpus(self) -> int:
        return self.prefill.gpus * self.prefills + (self.decode.gpus * self.decodes if self.decode else 0)

    @property
    def kind(self) -> UnitKind:
        return UnitKind(self.prefill, self.decode)


class UnitKind(NamedTuple):
    """The kinds of engines of a unit, whatever their number."""

    prefill: Pool
    decode: Pool | None


class UnitRate(NamedTuple):
    """Requests/s of one copy of a unit, and its requests in flight; both 0 if a bound cannot be met."""

    rps: float
    in_flight: float


class RateMatcher:
    """Rates of engine shapes for one model, GPU and workload; every figure is computed once. ``prefix_hit_rate``: share
    of each prompt that is in the prefix cache. ``ttft_s``: the bound on TTFT (None: none). ``longest_tokens``: of one
    request, prompt and answer, where it is longer than those of the workload. ``placement``: of units of P:D (None:
    pack if the unit fits a node). ``scattered``: KV blocks do not merge with their neighbours."""

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        workload: Workload,
        prefix_hit_rate: float = 0.0,
        ttft_s: float | None = None,
        longest_tokens: float = 0,
        placement: PlacementKind | None = None,
        scattered: bool = True,
    ) -> None:
        self.hardware, self.shape, self.ttft_s = hardware, shape, ttft_s
        self.placement, self.scattered = placement, scattered
        apart = hardware.of_pd()
        # Engines that only prefill or only decode may have other step times.
        self.of_pd = (
            self
            if apart == hardware
            else RateMatcher(apart, shape, workload, prefix_hit_rate, ttft_s, longest_tokens, placement, scattered)
        )
        self.tokens, self.outputs = workload.typical
        self.longest = max(sum(workload.longest), int(longest_tokens))
        hit = int(self.tokens * prefix_hit_rate) // hardware.block_tokens * hardware.block_tokens
        self.computed = max(self.tokens - hit, 1)
        self.costs = lru_cache(maxsize=None)(self._costs)
        self.prefill_s = lru_cache(maxsize=None)(self._prefill_s)
        self.share = lru_cache(maxsize=None)(self._share)
        self.prefill = lru_cache(maxsize=None)(self._prefill)
        self.decode = lru_cache(maxsize=None)(self._decode)
        self.collocated = lru_cache(maxsize=None)(self._collocated)
        self.holds = lru_cache(maxsize=None)(self._holds)
        self.transfers = lru_cache(maxsize=None)(self._transfers)

    def _costs(self, pool: Pool) -> StepSource:
        return steps_of(self.hardware, self.shape, pool)

    def _holds(self, pool: Pool) -> bool:
        """Whether the KV cache of the longest request fits one engine."""
        return not why_not_held(self.hardware, self.shape, pool, self.longest)

    def hold_apart(self, unit: ReplicaUnit) -> bool:
        """Whether the longest request fits the engines of a P:D unit, which may keep more of it than collocated ones:
        `pdlab.core.hybrid_kv`."""
        return all(self.of_pd.holds(pool) for pool in (unit.prefill, unit.decode) if pool is not None)

    def placement_of(self, unit: ReplicaUnit) -> PlacementKind:
        """The placement of a unit of P:D. The nodes of two GPU types are different ones."""
        fits = unit.gpus <= self.hardware.gpus_per_node and not self.hardware.beside
        return self.placement or ("pack" if fits else "spread")

    def _transfers(self, kind: UnitKind, link: LinkKind) -> TransferCosts:
        assert kind.decode is not None
        pair = Disaggregated(prefill=kind.prefill, decode=kind.decode, placement="spread")
        return transfer_costs(self.hardware, self.shape, pair, link)

    def joins_s(self, kind: UnitKind, link: LinkKind) -> float:
        """Seconds that a request of P:D takes from a decode engine before it decodes."""
        assert kind.decode is not None
        costs = self.transfers(kind, link)
        apart = costs.always_fragmented or self.scattered
        posts_s = self.computed * (costs.stall_s_per_token if apart else costs.post_s_per_token)
        return posts_s + self.costs(kind.decode).admit_s * self.tokens

    def moved_rps(self, unit: ReplicaUnit, link: LinkKind) -> float:
        """Requests/s whose KV the links of a unit of P:D move."""
        assert unit.decode is not None
        costs = self.transfers(unit.kind, link)
        size = self.computed * costs.bytes_per_token
        if costs.shared or not size:
            return costs.prefill_bytes_per_s / size if size else math.inf
        sends = unit.prefills * unit.prefill.engines_per_replica * costs.prefill_bytes_per_s
        return min(sends, unit.decodes * unit.decode.engines_per_replica * costs.decode_bytes_per_s) / size

    def room(self, pool: Pool) -> int:
        """The number of requests whose KV cache fits one engine, when half of each answer is there."""
        return int(kv_capacity_tokens(self.hardware, self.shape, pool) // (self.tokens + self.outputs / 2))

    def step_s(self, pool: Pool, batch: int) -> float:
        """Seconds of one decode step of one engine, when half of each answer is there."""
        return self.costs(pool).step_s(batch, 0, self.tokens + self.outputs / 2)

    def _prefill_s(self, pool: Pool) -> float:
        """Seconds of one prompt on an otherwise idle engine."""
        budget = self.hardware.of(pool).step_tokens
        chunks = [budget] * (self.computed // budget) + [self.computed % budget]
        before = self.tokens - self.computed
        total_s = self.costs(pool).admit_s * self.tokens
        for chunk in chunks:
            if chunk:
                total_s += self.costs(pool).step_s(0, chunk, before + chunk / 2)
                before += chunk
        return total_s

    def _prefill(self, pool: Pool) -> float:
        """Requests/s of one replica that only prefills and is never idle: prompts fill each of its steps."""
        budget, costs = self.hardware.of(pool).step_tokens, self.costs(pool)
        step_s = costs.step_s(0, budget, self.tokens - self.computed / 2)
        return pool.engines_per_replica / (step_s * self.computed / budget + costs.admit_s * self.tokens)

    def _share(self, pool: Pool, replicas: int) -> float:
        """Share of `prefill` at which p90 of TTFT is within its bound; 0 if TTFT misses it without queues."""
        if self.ttft_s is None:
            return 1.0
        service_s = self.prefill_s(pool)
        spare_s = self.ttft_s - service_s
        if spare_s <= 0:
            return 0.0
        servers = replicas * pool.engines_per_replica

        def waits_s(load: float) -> float:
            mean_s: float = service_s * load ** (math.sqrt(2 * (servers + 1)) - 1) / (2 * servers * (1 - load))
            return math.log(10) * mean_s

        low, high = 0.0, 0.999
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if waits_s(middle) <= spare_s else (low, middle)
        return low

    def _decode(self, pool: Pool, tpot_s: float, adds_s: float) -> tuple[float, int]:
        """(requests/s of one replica within the bound, batch of one engine); (0, 0) if a batch of one misses it.
        ``adds_s``: the seconds that a request takes from the others, see `joins_s`."""
        steps = max(self.outputs - 1, 1)
        bound_s = tpot_s if self.outputs > 1 else math.inf  # a single token has no TPOT
        batch = self._largest(pool, lambda b: self.step_s(pool, b) + b * adds_s / steps, bound_s)
        if batch == 0:
            return 0.0, 0
        return pool.engines_per_replica / (adds_s + steps * self.step_s(pool, batch) / batch), batch

    def _collocated(self, pool: Pool, tpot_s: float) -> tuple[float, int]:
        """(requests/s of one replica within the bound, batch of one engine)."""
        context = self.tokens + self.outputs / 2
        costs, prefill_s = self.costs(pool), self.prefill_s(pool)
        # A chunk joins a step that runs anyway.
        chunks = -(-self.computed // self.hardware.of(pool).step_tokens)
        return self.decode(pool, tpot_s, max(prefill_s - chunks * costs.step_s(0, 0, context), 0.0))

    def _largest(self, pool: Pool, tpot_of: Callable[[int], float], bound_s: float) -> int:
        """The largest batch of one engine whose TPOT is within the bound; 0 if there is none."""
        most = min(self.room(pool), self.costs(pool).limits.batch, most_sequences_of(pool))
        low, high = 0, max(int(most), 1)
        while low < high:  # TPOT grows with the batch
            middle = (low + high + 1) // 2
            if tpot_of(middle) <= bound_s:
                low = middle
            else:
                high = middle - 1
        return low

    def rates(self, prefill: Pool, decode: Pool, tpot_s: float, link: LinkKind) -> Rates:
        """The rates of one replica of each role."""
        apart = self.of_pd
        decode_rps, _ = apart.decode(decode, tpot_s, apart.joins_s(UnitKind(prefill, decode), link))
        return Rates(apart.prefill(prefill), decode_rps)

    def serves(self, unit: ReplicaUnit, tpot_s: float, link: LinkKind | None = None) -> UnitRate:
        """Requests/s of one copy of the unit within the bounds, and its requests in flight. ``link``: None: that of its
        placement."""
        if unit.decode is not None and self.of_pd is not self:
            return self.of_pd.serves(unit, tpot_s, link)
        prefill_s = self.prefill_s(unit.prefill)
        if unit.decode is None:
            replica_rps, batch = self.collocated(unit.prefill, tpot_s)
            limit = self.prefill(unit.prefill) * self.share(unit.prefill, unit.prefills)
            rps = unit.prefills * min(replica_rps, limit)
            engines = unit.prefills * unit.prefill.engines_per_replica
            return UnitRate(rps, batch * engines + rps * prefill_s if rps else 0.0)
        link = link or ("nvlink" if self.placement_of(unit) == "pack" else "srd")
        replica_rps, batch = self.decode(unit.decode, tpot_s, self.joins_s(unit.kind, link))
        supply = unit.prefills * self.prefill(unit.prefill) * self.share(unit.prefill, unit.prefills)
        rps = min(supply, unit.decodes * replica_rps, self.moved_rps(unit, link))
        engines = unit.decodes * unit.decode.engines_per_replica
        busy = rps / (unit.decodes * replica_rps) if replica_rps else 0.0
        waits_s = 2 * prefill_s if self.ttft_s is None else min(2 * prefill_s, self.ttft_s)
        return UnitRate(rps, busy * batch * engines + rps * waits_s)


def unit_of(deployment: Deployment) -> ReplicaUnit:
    """The unit of a deployment. The unit of a fluid pool is its fixed split, or else two halves."""
    pools, topology = deployment.pools, deployment.topology
    if isinstance(topology, Fluid):
        prefills, decodes = topology.split or (topology.pool.replicas // 2, -(-topology.pool.replicas // 2))
        return ReplicaUnit(topology.pool.one_replica, prefills, topology.pool.one_replica, decodes)
    first_pool = pools.get("prefill") or pools["collocated"]
    decode = pools.get("decode")
    return ReplicaUnit(
        first_pool.one_replica,
        first_pool.replicas,
        decode.one_replica if decode else None,
        decode.replicas if decode else 0,
    )
