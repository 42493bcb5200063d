"""Rate matching: the requests/s of prefill and decode replicas without queues, from step times. Pure.

- **Prefill**: a step has as many prompts as the token budget holds; longer prompts have chunks of the budget. With a
  TTFT bound, prefill runs at the share of that rate at which nine of ten requests meet the bound:
  wait(p90) = ln 10 x W, W = s rho^(sqrt(2(c+1)) - 1) / (2 c (1 - rho)). W is the mean wait of M/D/c (Sakasegawa's
  approximation of M/M/c, halved for constant service), of c engines with the service time s and the load rho.
- **Decode**: B is the largest batch whose step is within the TPOT bound, and that KV memory holds. With n output tokens
  per request, requests finish (n - 1) step(B) / B apart.
- **Collocated**: prefill delays decode. A request costs its prefill p and its share of decode steps,
  p + (n - 1) step(B) / B, and by Little's law its TPOT is step(B) + B p / (n - 1).

The planner chooses the deployments to simulate by rate matching, and prints it as a check of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Fluid, Pool
from pdlab.core.workload import Workload
from pdlab.sim.hardware import Hardware
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
    of each prompt that is in the prefix cache. ``ttft_s``: the bound on TTFT (None: none).
    ``longest_tokens``: of one request, prompt and answer, where it is longer than those of the workload."""

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        workload: Workload,
        prefix_hit_rate: float = 0.0,
        ttft_s: float | None = None,
        longest_tokens: float = 0,
    ) -> None:
        self.hardware, self.shape, self.ttft_s = hardware, shape, ttft_s
        apart = hardware.of_pd()
        # Engines that only prefill or only decode may have other step times.
        self.of_pd = (
            self if apart == hardware else RateMatcher(apart, shape, workload, prefix_hit_rate, ttft_s, longest_tokens)
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

    def _costs(self, pool: Pool) -> StepSource:
        return steps_of(self.hardware, self.shape, pool)

    def _holds(self, pool: Pool) -> bool:
        """Whether the KV cache of the longest request fits one engine."""
        return not why_not_held(self.hardware, self.shape, pool, self.longest)

    def hold_apart(self, unit: ReplicaUnit) -> bool:
        """Whether the longest request fits the engines of a P:D unit, which may keep more of it than collocated ones:
        `pdlab.core.hybrid_kv`."""
        return all(self.of_pd.holds(pool) for pool in (unit.prefill, unit.decode) if pool is not None)

    def room(self, pool: Pool) -> int:
        """The number of requests whose KV cache fits one engine."""
        return int(kv_capacity_tokens(self.hardware, self.shape, pool) // (self.tokens + self.outputs))

    def step_s(self, pool: Pool, batch: int) -> float:
        """Seconds of one decode step of one engine, when half of each answer is there."""
        return self.costs(pool).step_s(batch, 0, self.tokens + self.outputs / 2)

    def _prefill_s(self, pool: Pool) -> float:
        """Seconds of one prompt on an otherwise idle engine."""
        budget = self.hardware.of(pool).step_tokens
        chunks = [budget] * (self.computed // budget) + [self.computed % budget]
        before = self.tokens - self.computed
        total_s = 0.0
        for chunk in chunks:
            if chunk:
                total_s += self.costs(pool).step_s(0, chunk, before + chunk / 2)
                before += chunk
        return total_s

    def _prefill(self, pool: Pool) -> float:
        """Requests/s of one replica that only prefills and is never idle."""
        prompts_per_step = max(self.hardware.of(pool).step_tokens // self.computed, 1)
        prompt_s = self.prefill_s(pool)
        if prompts_per_step > 1:
            context = self.tokens - self.computed / 2
            prompt_s = self.costs(pool).step_s(0, prompts_per_step * self.computed, context) / prompts_per_step
        return pool.engines_per_replica / prompt_s

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

    def _decode(self, pool: Pool, tpot_s: float) -> tuple[float, int]:
        """(requests/s of one replica within the bound, batch of one engine); (0, 0) if a batch of one misses it."""
        batch = self._largest(pool, lambda b: self.step_s(pool, b), tpot_s)
        if batch == 0:
            return 0.0, 0
        stays_s = max(self.outputs - 1, 1) * self.step_s(pool, batch)
        return pool.engines_per_replica * batch / stays_s, batch

    def _collocated(self, pool: Pool, tpot_s: float) -> tuple[float, int]:
        """(requests/s of one replica within the bound, batch of one engine)."""
        steps = max(self.outputs - 1, 1)
        context = self.tokens + self.outputs / 2
        costs, prefill_s = self.costs(pool), self.prefill_s(pool)
        # A chunk joins a step that runs anyway.
        chunks = -(-self.computed // self.hardware.of(pool).step_tokens)
        adds_s = max(prefill_s - chunks * costs.step_s(0, 0, context), 0.0)
        batch = self._largest(pool, lambda b: self.step_s(pool, b) + b * adds_s / steps, tpot_s)
        if batch == 0:
            return 0.0, 0
        takes_s = adds_s + steps * self.step_s(pool, batch) / batch
        return pool.engines_per_replica / takes_s, batch

    def _largest(self, pool: Pool, tpot_of: Callable[[int], float], bound_s: float) -> int:
        """The largest batch of one engine whose TPOT is within the bound; 0 if there is none."""
        low, high = 0, max(int(min(self.room(pool), self.costs(pool).limits.batch)), 1)
        while low < high:  # TPOT grows with the batch
            middle = (low + high + 1) // 2
            if tpot_of(middle) <= bound_s:
                low = middle
            else:
                high = middle - 1
        return low

    def rates(self, prefill: Pool, decode: Pool, tpot_s: float) -> Rates:
        """The rates of one replica of each role."""
        decode_rps, _ = self.of_pd.decode(decode, tpot_s)
        return Rates(self.of_pd.prefill(prefill), decode_rps)

    def serves(self, unit: ReplicaUnit, tpot_s: float) -> UnitRate:
        """Requests/s of one copy of the unit within the bounds, and its requests in flight."""
        if unit.decode is not None and self.of_pd is not self:
            return self.of_pd.serves(unit, tpot_s)
        prefill_s = self.prefill_s(unit.prefill)
        if unit.decode is None:
            replica_rps, batch = self.collocated(unit.prefill, tpot_s)
            limit = self.prefill(unit.prefill) * self.share(unit.prefill, unit.prefills)
            rps = unit.prefills * min(replica_rps, limit)
            engines = unit.prefills * unit.prefill.engines_per_replica
            return UnitRate(rps, batch * engines + rps * prefill_s if rps else 0.0)
        replica_rps, batch = self.decode(unit.decode, tpot_s)
        supply = unit.prefills * self.prefill(unit.prefill) * self.share(unit.prefill, unit.prefills)
        rps = min(supply, unit.decodes * replica_rps)
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
