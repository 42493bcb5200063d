"""The state of a fluid pool between events: roles of engines, routing of requests, decisions of the controller.

The controller is the real one (`pdlab.roles.policy`). It decides twice a second. Roles take effect at once, and
requests end where they are. Routing is that of `pdlab.deploy.serving.fluid_router`. Each of several routers has the
loads of all engines, at most a quarter of a second old, and its own requests since then. With prefix affinity it has
the current queues. The real record (`pdlab.roles.prefixes`) gives the engines that have the beginning of a prompt.
Times are in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdlab.core.deployment import Fluid
from pdlab.results.roles_log import RoleChange
from pdlab.roles.assign import assign
from pdlab.roles.local import locally_below
from pdlab.roles.observed import EngineLoad, ObservedPool, ObservedWindow, RequestCount, Role, size_class
from pdlab.roles.policy import Policy, RoleDecision
from pdlab.roles.prefixes import Prefixes, to_compute
from pdlab.roles.rates import CACHED_HALF_LIFE_S, DecayingSum
from pdlab.roles.spec import FluidSpec
from pdlab.sim.engine import Engine
from pdlab.sim.router import of_session

REPORT_EVERY_S = 0.25
REPORTS_PER_DECISION = 2


class Controller(Protocol):
    """Decides on the number of engines that prefill: `pdlab.roles.policy.Policy`, or a policy to compare it with."""

    def decide(self, observed: ObservedPool) -> RoleDecision: ...


@dataclass(slots=True, eq=False)
class PoolMember:
    """One engine of the pool. Present values: ``prompts`` in its queue with their ``waiting_tokens``, the requests that
    it decodes (``running``) and will decode (``coming``). ``reported``: the prompt tokens and requests in its last
    report to the routers. The other values count since the last decision."""

    index: int
    name: str
    engine: Engine
    node: int
    role: Role = "decode"
    reported: tuple[int, int] = (0, 0)
    running: int = 0
    coming: int = 0
    prompts: int = 0
    waiting_tokens: int = 0
    prefilled_tokens: int = 0
    busy_since_s: float = 0.0
    busy_s: float = 0.0
    generated_before: float = 0.0

    def load(self, now_s: float) -> EngineLoad:
        """The engine's load for the controller. The counters begin at 0 again."""
        engine = self.engine
        generated = float(engine.generated)
        if engine.busy:
            passed = min(int((now_s - engine.began_s) / engine.step_s + 1e-9), engine.steps)
            generated += passed * len(engine.running)
        if self.prompts:
            self.busy_s += now_s - self.busy_since_s
            self.busy_since_s = now_s
        load = EngineLoad(
            engine=self.name,
            role=self.role,
            waiting_prompt_tokens=self.waiting_tokens,
            running=self.running,
            prefilled_tokens=self.prefilled_tokens,
            prefill_busy_s=self.busy_s,
            generated_tokens=round(generated - self.generated_before),
            kv_used_share=engine.held_tokens / engine.capacity,
        )
        self.generated_before, self.prefilled_tokens, self.busy_s = generated, 0, 0.0
        return load


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """The route of a prompt of ``tokens``, to one engine or two. ``waits``: its tokens that count as waiting at the
    prefilling engine. ``computed``: its tokens that are not cached there, as far as is known. ``chunks``: its chunks,
    if prefix caches are looked up."""

    prefiller: PoolMember
    decoder: PoolMember
    tokens: int
    waits: int
    computed: int
    chunks: Sequence[int]

    @property
    def local(self) -> bool:
        """Whether the same engine prefills and decodes it."""
        return self.prefiller is self.decoder


class FluidPool:
    """The engines of a level, on nodes of ``engines_per_node``, behind ``routers`` routers. ``controller``: None: that
    of the topology. ``pool_tokens``: the tokens of an engine's KV pool (None: unknown). ``sparse``: engines keep only
    the ends of prompts (`pdlab.roles.prefixes.Prefixes.keep`)."""

    def __init__(
        self,
        topology: Fluid,
        engines: Sequence[Engine],
        engines_per_node: int,
        routers: int,
        rng: random.Random,
        controller: Controller | None,
        *,
        pool_tokens: int | None = None,
        sparse: bool = False,
    ) -> None:
        digits = len(str(len(engines) - 1))
        self.members = [
            PoolMember(index, f"engine-{index:0{digits}}", engine, index // engines_per_node)
            for index, engine in enumerate(engines)
        ]
        self.random = rng
        self.requests_sent = [
            [0] * len(engines) for _ in range(routers)
        ]  # since the last reports, by the ingress' routers
        self.tokens_sent = [[0] * len(engines) for _ in engines]  # and by those of the engines
        self.reports = 0
        self.by_engine = {member.engine: member for member in self.members}
        spec = FluidSpec.of(topology)
        self.controller = controller
        if controller is None and topology.split is None:
            self.controller = Policy(spec)
        self.by_session = topology.pool.routing == "session"
        self.affinity = topology.prefix_affinity
        self.prefixes, self.pool_tokens, self.sparse = Prefixes(), pool_tokens, sparse
        self.prompt_tokens, self.computed_tokens = DecayingSum(CACHED_HALF_LIFE_S), DecayingSum(CACHED_HALF_LIFE_S)
        self.locally_below = topology.prefill_locally_below
        self.below_tokens = self.locally_below if isinstance(self.locally_below, int) else 0
        self.splits: list[RoleChange] = []
        self._take(assign([member.load(0.0) for member in self.members], spec.first(len(engines))[0]))
        self._log(0.0, "given" if topology.split else "the first split, nothing is known yet")
        self._begin(0.0)

    def _begin(self, now_s: float) -> None:
        self._decided_s = now_s
        self._prompts: dict[int, RequestCount] = {}
        self._answers: dict[int, RequestCount] = {}
        self._local: dict[int, int] = {}
        self._prefilled_tokens = self._computed_tokens = 0
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []

    def _take(self, roles: dict[str, Role]) -> None:
        for member in self.members:
            member.role = roles[member.name]
        self.prefilling = [member for member in self.members if member.role == "prefill"]
        self.decoding = [member for member in self.members if member.role == "decode"]

    def _log(self, now_s: float, reason: str) -> None:
        prefill = sum(member.role != "decode" for member in self.members)
        self.splits.append(RoleChange(now_s, prefill, len(self.members) - prefill, reason))

    def to_decode(self, session: str | None = None) -> PoolMember:
        """The engine that will decode the next request. It is, of two random engines, the one with fewer requests in
        its router's data; or the engine of its session."""
        if self.by_session and session is not None:
            return self.members[of_session((member.index for member in self.decoding), session)]
        sent = self.requests_sent[int(self.random.random() * len(self.requests_sent))]
        chosen = self._lighter(self.decoding, lambda member: member.reported[1] + sent[member.index])
        sent[chosen.index] += 1
        return chosen

    def to_prefill(self, decoder: PoolMember, tokens: int, chunks: Sequence[int] = ()) -> tuple[PoolMember, int]:
        """The engine that will prefill a prompt, never the decoding engine itself, and the tokens to compute there.

        It is, of two random engines, the one with fewer prompt tokens. It is an engine on the node of the decoding
        engine instead, if that one has at most this prompt more to do. With prefix affinity, which uses the current
        queues, it is an engine with most of the prompt cached, chosen in the same way, if that one finishes no later.
        """
        others = [member for member in self.prefilling if member is not decoder]
        looks_up = self.affinity and bool(chunks)
        held = {member: self.prefixes.tokens(member.name, chunks) for member in others} if looks_up else {}
        others = others or [member for member in self.members if member is not decoder]
        sent = self.tokens_sent[decoder.index]

        def load(member: PoolMember) -> int:
            return member.waiting_tokens if held else member.reported[0] + sent[member.index]

        chosen = self._lighter_or_near(others, decoder, tokens, load)
        if most := max(held.values(), default=0):
            holders = [member for member in others if held[member] == most]
            left = to_compute(tokens, most)
            holder = self._lighter_or_near(holders, decoder, left, load)
            if load(holder) + left <= load(chosen) + to_compute(tokens, held[chosen]):
                chosen = holder
        computed = to_compute(tokens, held.get(chosen, 0))
        sent[chosen.index] += computed
        return chosen, computed

    def _lighter_or_near(
        self, members: Sequence[PoolMember], decoder: PoolMember, tokens: int, load: Callable[[PoolMember], int]
    ) -> PoolMember:
        chosen = self._lighter(members, load)
        near = [member for member in members if member.node == decoder.node]
        if near and chosen.node != decoder.node:
            nearest = self._lighter(near, load)
            if load(nearest) <= load(chosen) + tokens:
                return nearest
        return chosen

    def _lighter(self, members: Sequence[PoolMember], load: Callable[[PoolMember], int]) -> PoolMember:
        """Of two random members, the one with the lower load."""
        if len(members) == 1:
            return members[0]
        first, second = self.random.sample(members, 2)
        return first if load(first) <= load(second) else second

    # --- events -------------------------------------------------------------------------------

    @property
    def looks_up_prefixes(self) -> bool:
        """Whether prefix caches of engines are looked up."""
        return self.affinity or self.locally_below is not None

    def arrives(self, tokens: int, session: str | None = None, chunks: Sequence[int] = ()) -> SentPrompt:
        """Route a prompt with these chunks to engines for prefill and decode."""
        chunks = chunks if self.looks_up_prefixes else ()
        decoder = self.to_decode(session)
        cached = min(self.prefixes.tokens(decoder.name, chunks), tokens)
        if tokens - cached < self.below_tokens:
            decoder.running += 1
            size = size_class(tokens)
            self._local[size] = self._local.get(size, 0) + 1
            return SentPrompt(decoder, decoder, tokens, 0, tokens - cached, chunks)
        prefiller, expected = self.to_prefill(decoder, tokens, chunks)
        decoder.coming += 1
        computed = to_compute(tokens, self.prefixes.tokens(prefiller.name, chunks))
        sent = SentPrompt(prefiller, decoder, tokens, computed if self.affinity else tokens, computed, chunks)
        prefiller.waiting_tokens += sent.waits
        self._keep(prefiller, chunks, pulled=False)
        _count(self._prompts, tokens, expected)
        return sent

    def _keep(self, member: PoolMember, chunks: Sequence[int], *, pulled: bool) -> None:
        if chunks:
            self.prefixes.keep(member.name, chunks, self.pool_tokens, pulled=pulled, sparse=self.sparse)

    def moves(self, sent: SentPrompt) -> None:
        """The KV of a prompt is on its way."""
        sent.decoder.coming -= 1
        sent.decoder.running += 1

    def enters(self, sent: SentPrompt, now_s: float) -> None:
        """A prompt is in its engine's queue. Only prompts for other engines are counted as prefill: what a local prompt
        costs is in the decode steps of its engine."""
        if sent.local:
            return
        member = sent.prefiller
        if not member.prompts:
            member.busy_since_s = now_s
        member.prompts += 1

    def prefilled(self, sent: SentPrompt, now_s: float) -> None:
        if sent.local:
            return
        member = sent.prefiller
        member.prompts -= 1
        member.waiting_tokens -= sent.waits
        member.prefilled_tokens += sent.waits
        self._prefilled_tokens += sent.waits
        self._computed_tokens += sent.computed
        if not member.prompts:
            member.busy_s += now_s - member.busy_since_s

    def first_token(self, sent: SentPrompt, ttft_s: float) -> None:
        self._ttft_s.append(ttft_s)
        self._keep(sent.decoder, sent.chunks, pulled=not sent.local)

    def ended(self, engine: Engine, prompt_tokens: int, answer_tokens: int, tpot_s: float) -> None:
        self.by_engine[engine].running -= 1
        _count(self._answers, prompt_tokens, answer_tokens)
        self._tpot_s.append(tpot_s)

    # --- reports and decisions ----------------------------------------------------------------

    def report(self, now_s: float, transfer_s: float) -> None:
        """Every engine reports its load. At every second call the controller decides. ``transfer_s``: the approximate
        transfer time of a moving request."""
        self.reports += 1
        if self.controller is not None and self.reports % REPORTS_PER_DECISION == 0:
            self._decide(self.controller, now_s, transfer_s)
        for member in self.members:
            member.reported = member.waiting_tokens, member.running + member.coming
        for sent in (*self.requests_sent, *self.tokens_sent):
            sent[:] = [0] * len(sent)

    @property
    def is_between_decisions(self) -> bool:
        """Whether the controller has not yet seen the last reports."""
        return self.reports % REPORTS_PER_DECISION != 0

    def _decide(self, controller: Controller, now_s: float, transfer_s: float) -> None:
        loads = tuple(member.load(now_s) for member in self.members)
        window = ObservedWindow(
            seconds=now_s - self._decided_s,
            prompts=self._prompts,
            answers=self._answers,
            ttft_s=tuple(self._ttft_s),
            tpot_s=tuple(self._tpot_s),
            local=self._local,
        )
        self.prompt_tokens.add(self._prefilled_tokens, window.seconds)
        self.computed_tokens.add(self._computed_tokens, window.seconds)
        decision = controller.decide(ObservedPool(now_s, loads, window))
        self._take(decision.roles)
        if decision.changed:
            self._log(now_s, decision.reason)
        if self.locally_below == "auto" and isinstance(controller, Policy):
            rate = controller.prefill_rate.tokens_per_s
            if rate is not None:
                running = sum(member.running for member in self.decoding) / len(self.decoding)
                waiting_tokens = sum(member.waiting_tokens for member in self.prefilling) / len(self.prefilling)
                # The bound applies to the tokens that must be computed, but the rate may be one of whole prompts.
                whole, computed = self.prompt_tokens.total, self.computed_tokens.total
                computed_rate = rate * computed / whole if whole else rate
                self.below_tokens = locally_below(computed_rate, running, waiting_tokens / rate, transfer_s)
        self._begin(now_s)


def _count(counts: dict[int, RequestCount], prompt_tokens: int, tokens: int) -> None:
    size = size_class(prompt_tokens)
    before = counts.get(size, RequestCount(0, 0))
    counts[size] = RequestCount(before.requests + 1, before.tokens + tokens)
