"""A fluid pool between events: which engines prefill and decode, what a controller sees of them, and what it decides.

The controller is the real one (`pdlab.roles.policy`); it looks twice a second. Roles take effect at once, requests end
where they are. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdlab.core.deployment import Fluid
from pdlab.roles.assign import assign, first_split
from pdlab.roles.local import locally_below
from pdlab.roles.observed import Count, EngineLoad, Observed, Role, Window, size_class
from pdlab.roles.policy import Decision, Policy, Rules
from pdlab.sim.engine import Engine
from pdlab.sim.level import Split
from pdlab.sim.router import ReportedLoad

LOOK_EVERY_S = 0.5


class Controller(Protocol):
    """Decides how many engines prefill: `pdlab.roles.policy.Policy`, or what it is compared with."""

    def decide(self, observed: Observed) -> Decision: ...


@dataclass(slots=True, eq=False)
class Queue:
    """The requests of one kind at an engine, as a router sees them (`pdlab.sim.router.Replica`)."""

    engine: Engine
    load: int = 0
    reported_loads: dict[int, ReportedLoad] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Member:
    """One engine of the pool. Counters are since the last look, but for the present ``prompts`` and their tokens."""

    name: str
    engine: Engine
    node: int
    prefill: Queue
    decode: Queue
    role: Role = "decode"
    prompts: int = 0
    waiting_tokens: int = 0
    prefilled_tokens: int = 0
    busy_since_s: float = 0.0
    busy_s: float = 0.0
    generated_before: float = 0.0

    def load(self, now_s: float) -> EngineLoad:
        """What the controller sees of it; the counters begin anew."""
        engine = self.engine
        generated = float(engine.generated)
        if engine.busy:
            passed = min(int((now_s - engine.began_s) / engine.step_s + 1e-9), engine.steps)
            generated += passed * len(engine.running)
        if self.prompts:
            self.busy_s += now_s - self.busy_since_s
            self.busy_since_s = now_s
        seen = EngineLoad(
            engine=self.name,
            role=self.role,
            waiting_prompt_tokens=self.waiting_tokens,
            running=self.decode.load,
            prefilled_tokens=self.prefilled_tokens,
            prefill_busy_s=self.busy_s,
            generated_tokens=round(generated - self.generated_before),
            kv_used_share=engine.held_tokens / engine.capacity,
        )
        self.generated_before, self.prefilled_tokens, self.busy_s = generated, 0, 0.0
        return seen


class FluidPool:
    """The engines of a level, on nodes of so many; ``controller`` None: the topology's own."""

    def __init__(
        self, topology: Fluid, engines: Sequence[Engine], engines_per_node: int, controller: Controller | None
    ) -> None:
        digits = len(str(len(engines) - 1))
        self.members = [
            Member(f"engine-{index:0{digits}}", engine, index // engines_per_node, Queue(engine), Queue(engine))
            for index, engine in enumerate(engines)
        ]
        self.by_engine = {member.engine: member for member in self.members}
        self.controller = controller
        if controller is None and topology.split is None:
            rules = Rules(
                p_min=topology.p_min,
                d_min=topology.d_min,
                slo_ttft_s=topology.slo_ttft_s,
                slo_tpot_s=topology.slo_tpot_s,
            )
            self.controller = Policy(rules)
        self.locally_below = topology.prefill_locally_below
        self.below_tokens = self.locally_below if isinstance(self.locally_below, int) else 0
        self.splits: list[Split] = []
        count = len(engines)
        first = topology.split or first_split(count, topology.p_min, topology.d_min)
        self._take(assign([member.load(0.0) for member in self.members], first[0]))
        self._log(0.0, "given" if topology.split else "the first split, nothing is known yet")
        self._begin(0.0)

    def _begin(self, now_s: float) -> None:
        self._looked_s = now_s
        self._prompts: dict[int, Count] = {}
        self._answers: dict[int, Count] = {}
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []

    def _take(self, roles: dict[str, Role]) -> None:
        for member in self.members:
            member.role = roles[member.name]
        self.front = [member.prefill for member in self.members if member.role == "prefill"]
        self.back = [member.decode for member in self.members if member.role == "decode"]

    def _log(self, now_s: float, reason: str) -> None:
        prefill = sum(member.role != "decode" for member in self.members)
        self.splits.append(Split(now_s, prefill, len(self.members) - prefill, reason))

    def elsewhere(self, engine: Engine) -> list[Queue]:
        """Where what was prefilled by the engine can be decoded: never there."""
        others = [queue for queue in self.back if queue.engine is not engine]
        return others or [member.decode for member in self.members if member.engine is not engine]

    # --- what happens -------------------------------------------------------------------------

    def arrives(self, engine: Engine, tokens: int, *, local: bool) -> None:
        """A prompt was given to the engine; ``local``: to prefill it where it is decoded."""
        if not local:
            _count(self._prompts, tokens, tokens)
            self.by_engine[engine].waiting_tokens += tokens

    def enters(self, engine: Engine, now_s: float) -> None:
        """A prompt is in the engine's queue."""
        member = self.by_engine[engine]
        if not member.prompts:
            member.busy_since_s = now_s
        member.prompts += 1

    def prefilled(self, engine: Engine, tokens: int, now_s: float, *, local: bool) -> None:
        member = self.by_engine[engine]
        member.prompts -= 1
        member.prefilled_tokens += tokens
        if not local:
            member.waiting_tokens -= tokens
        if not member.prompts:
            member.busy_s += now_s - member.busy_since_s

    def first_token(self, ttft_s: float) -> None:
        self._ttft_s.append(ttft_s)

    def ended(self, prompt_tokens: int, answer_tokens: int, tpot_s: float) -> None:
        _count(self._answers, prompt_tokens, answer_tokens)
        self._tpot_s.append(tpot_s)

    # --- looks --------------------------------------------------------------------------------

    def look(self, now_s: float, transfer_s: float) -> None:
        """Have the controller decide. ``transfer_s``: what a request that moves waits for that, about."""
        assert self.controller is not None
        seen = tuple(member.load(now_s) for member in self.members)
        window = Window(
            seconds=now_s - self._looked_s,
            prompts=self._prompts,
            answers=self._answers,
            ttft_s=tuple(self._ttft_s),
            tpot_s=tuple(self._tpot_s),
        )
        decision = self.controller.decide(Observed(now_s, seen, window))
        self._take(decision.roles)
        if decision.changed:
            self._log(now_s, decision.reason)
        if self.locally_below == "auto" and isinstance(self.controller, Policy):
            rate = self.controller.prefill_rate.tokens_per_s
            if rate is not None:
                running = sum(queue.load for queue in self.back) / max(len(self.back), 1)
                waiting_tokens = sum(each.waiting_prompt_tokens for each in seen)
                self.below_tokens = locally_below(rate, running, waiting_tokens / rate / len(self.front), transfer_s)
        self._begin(now_s)


def _count(counts: dict[int, Count], prompt_tokens: int, tokens: int) -> None:
    size = size_class(prompt_tokens)
    before = counts.get(size, Count(0, 0))
    counts[size] = Count(before.requests + 1, before.tokens + tokens)
