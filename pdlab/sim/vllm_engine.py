"""The second fidelity: vLLM's own scheduler decides the content of each step, in the time of the simulator.

Arrivals, ingress, routing, links, and the times of steps and transfers are the simulator's (`pdlab.sim.simulator`).
vLLM's ``Scheduler`` (`pdlab.sim.vllm_scheduler`) has an engine's batches, KV blocks, prefix cache and preemptions, and
the requests that wait for KV from another engine. It is driven as vLLM's engine core drives it: with asynchronous
scheduling the next step is scheduled while one runs. Only the executor is simulated. As in vLLM's workers, reads of KV
begin when a step is launched, and their ends are detected at a launch. Times are in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Fluid, Pool
from pdlab.core.errors import UsageError
from pdlab.core.text import counted
from pdlab.core.workload import Level, Workload
from pdlab.guard import first_token
from pdlab.sim.engine import Engine, PrefixCache, most_sequences_of
from pdlab.sim.hand_over import hand_over_of
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import LinkKind
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import Prompts, System
from pdlab.sim.step_time import kv_capacity_tokens
from pdlab.sim.stepping import ENTERS, KV_ARRIVED, STEP_ENDS
from pdlab.sim.steps import steps_of
from pdlab.sim.vllm_scheduler import SchedulerParts, prompt_tokens, scheduler_parts
from pdlab.traffic.blocks import drawn_words
from pdlab.traffic.requests import TrafficRequest

MADE_UP = 1  # every token that is made up
WORDS = 50_000  # different tokens in prompts of a workload file
# As kv_transfer_params.
FETCHES, IS_FETCHED = {"do_remote_prefill": True}, {"do_remote_decode": True}
WITH_FIRST = FETCHES | {first_token.FIRST_TOKEN: MADE_UP}


def simulate_with_vllm(
    deployment: Deployment,
    levels: Sequence[Level],
    workload: Workload,
    hardware: Hardware,
    shape: ModelShape,
    *,
    seed: int = 0,
    prompts: Prompts = "fresh",
    prefix_hit_rate: float = 0.0,
    link: LinkKind | None = None,
    trace: Trace | None = None,
    scattered: bool | None = None,
    asynchronous: bool | None = None,
) -> list[SimulatedLevel]:
    """`pdlab.sim.simulator.simulate` with vLLM's scheduler in every engine, and the same arguments and result.

    A common prefix is in every engine's cache before the level. ``asynchronous``: the next step is scheduled while one
    runs, vLLM's default on GPUs (None: unless the hardware has one step in flight). Raises UsageError, also for fluid
    pools and without vLLM.
    """
    if not 0 <= prefix_hit_rate < 1:
        raise UsageError(f"prefix hit rate {prefix_hit_rate} must be from 0 to below 1")
    if isinstance(deployment.topology, Fluid):
        raise UsageError("vLLM's scheduler is not simulated in fluid pools; use --fidelity simulator")
    if deployment.kv_offload_gb is not None or deployment.kv_connectors:
        raise UsageError(
            "vLLM's scheduler is not simulated with KV cache in host memory (MultiConnector); use --fidelity simulator"
        )
    if asynchronous is None:
        asynchronous = hardware.steps_in_flight != 1
    system = VllmSystem(deployment, hardware, shape, seed, prompts, prefix_hit_rate, link, asynchronous=asynchronous)
    system.scattered = scattered
    return [system.run(level, workload, trace) for level in levels]


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One scheduled step, until its output is processed. ``output``: vLLM's scheduler output. ``sampled``: the requests
    that get a token. ``received``, ``sent``: the requests whose reads the workers saw as ended at the launch, on the
    side of decode and of prefill. ``starved``: a request waits for KV memory."""

    output: Any
    sampled: set[str]
    received: set[str]
    sent: set[str]
    starved: bool
    took_s: float = 0.0


class VllmEngine(Engine):
    """An engine whose batches vLLM's scheduler chooses. Requests are named by their numbers."""

    def __init__(self, parts: SchedulerParts, costs: Any, capacity: float, step_tokens: int, **kwargs: Any) -> None:
        super().__init__(costs, capacity, step_tokens, PrefixCache(capacity), **kwargs)
        self.parts = parts
        self.scheduler = parts.make()
        self.launched: deque[ScheduledStep] = deque()
        self.free_s = 0.0  # end of the last step in flight
        self.news = False  # a new schedule may have more requests than the last one
        self.received: set[str] = set()  # reads that have ended, and that the workers have not seen yet
        self.sent: set[str] = set()
        self.answered: set[int] = set()  # requests that have their first token
        self.firsts: list[int] = []  # requests that have just taken the first token of prefill
        self.with_firsts: set[int] = set()  # requests with that token, and without a second one

    @property
    def decoding(self) -> int:
        return len(self.scheduler.running)

    def add(self, request: int, prompt: list[int], output_tokens: int, params: dict[str, Any] | None) -> None:
        self.scheduler.add_request(self.parts.request(str(request), prompt, output_tokens, params and dict(params)))
        self.news = True

    def schedule(self) -> ScheduledStep:
        """vLLM's next step. Its duration is not known yet."""
        if not self.hand_over.known and self.hand_over.first:
            self._hear()
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        sampled = {name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk}
        starved = (
            bool(self.scheduler.waiting)
            and output.total_num_scheduled_tokens < self.step_tokens
            and len(self.scheduler.running) < self.most_sequences
        )
        step = ScheduledStep(output, sampled, self.received if self.hand_over.known else set(), self.sent, starved)
        self.news = bool(output.total_num_scheduled_tokens or self.received or step.sent)
        self.received, self.sent = self.received - step.received, set()
        return step

    def _hear(self) -> None:
        """The scheduler learns between steps of KV that has arrived, as with `pdlab.guard.scheduler`."""
        from pdlab.sim.vllm_names import KVConnectorOutput

        names, self.received = self.received, set()
        if names:
            self.news = True
            self._take_firsts(names)
            self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=names))

    def _take_firsts(self, names: set[str]) -> None:
        for name in names if not self.hand_over.first else ():
            if first_token.take(self.scheduler, self.scheduler.requests[name]) is not None:
                self.firsts.append(int(name))
                self.with_firsts.add(int(name))

    def take(self, step: ScheduledStep) -> list[Any]:
        """Pass the step's simulated output to vLLM. Returns vLLM's outputs, one per request with a token."""
        from pdlab.sim.vllm_names import KVConnectorOutput, ModelRunnerOutput

        if not self.hand_over.known:
            self._hear()
        self._take_firsts(step.received)
        names = list(step.output.num_scheduled_tokens)
        transfers = KVConnectorOutput(finished_sending=step.sent or None, finished_recving=step.received or None)
        made_up = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[MADE_UP] if name in step.sampled else [] for name in names],
            kv_connector_output=None if transfers.is_empty() else transfers,
        )
        self.news = self.news or bool(names or step.received or step.sent)
        return [
            one for each in self.scheduler.update_from_output(step.output, made_up).values() for one in each.outputs
        ]

    def fill_cache(self, prompt: list[int]) -> None:
        """Compute a prompt in no time, so that its blocks are cached."""
        self.add(-1, prompt, 1, None)
        while self.scheduler.has_requests():
            self.take(self.schedule())


class VllmSystem(System):
    """The state of the deployment between events; its engines are vLLM's schedulers."""

    def __init__(
        self,
        deployment: Deployment,
        hardware: Hardware,
        shape: ModelShape,
        seed: int,
        prompts: Prompts,
        prefix_hit_rate: float,
        link: LinkKind | None,
        *,
        asynchronous: bool,
    ) -> None:
        self.asynchronous = asynchronous
        super().__init__(deployment, hardware, shape, seed, prompts, prefix_hit_rate, link)

    def _engines(self, pool: Pool, role: str) -> list[Engine]:
        parts = scheduler_parts(
            self.hardware,
            self.shape,
            pool,
            role={"prefill": "kv_producer", "decode": "kv_consumer"}.get(role),  # type: ignore[arg-type]
            asynchronous=self.asynchronous,
            retention_tokens=self.deployment.retention_tokens(pool),
        )
        costs = steps_of(self.hardware, self.shape, pool)
        capacity = kv_capacity_tokens(self.hardware, self.shape, pool)
        waits = hand_over_of(self.deployment.transport)
        made = partial(
            VllmEngine,
            parts,
            costs,
            capacity,
            self.hardware.of(pool).step_tokens,
            hand_over=waits,
            most_sequences=most_sequences_of(pool),
        )
        return [made(prefills_only=role == "prefill") for _ in range(pool.ranks)]

    def _begin(self, level: Level, workload: Workload, trace: Trace | None) -> None:
        super()._begin(level, workload, trace)
        self.traffic_prompts: dict[str, list[int]] = {}
        self.answers: dict[str, int] = {}
        common = self._common(max(self.log.input_tokens, default=0))
        for engine in self.all_engines:
            assert isinstance(engine, VllmEngine)
            engine.free_s = 0.0
            engine.answered.clear()
            engine.with_firsts.clear()
            if common:
                engine.fill_cache(prompt_tokens(0, common + 1, common))

    def _finish(self) -> SimulatedLevel:
        left = self.log.finish_s.count(0.0)
        if left:
            raise UsageError(
                f"vLLM never had KV memory for {left} of {counted(self.count, 'request')}; use a larger TP"
            )
        return super()._finish()

    def _common(self, input_tokens: int) -> int:
        return int(self.hit_rate * input_tokens)

    # --- events -------------------------------------------------------------------------------

    def happens(self, kind: int, engine: Engine, number: int, now_s: float) -> None:
        assert isinstance(engine, VllmEngine)
        if kind == ENTERS:
            self.log.queued_s[number] = now_s
            self._add(engine, number, IS_FETCHED if engine.prefills_only else None)
        elif kind == KV_ARRIVED:
            self.log.kv_arrived_s[number] = now_s
            engine.received.add(str(number))
            engine.news = True
            sender = self.target[number][0]
            assert isinstance(sender, VllmEngine)
            sender.sent.add(str(number))
            sender.news = True
            self._launch(sender, now_s)
        self._launch(engine, now_s)

    def fetch(self, decoder: Engine, now_s: float) -> None:
        """Decode's scheduler gets the requests that were prefilled for it."""
        assert isinstance(decoder, VllmEngine)
        while decoder.inbound:
            self._add(decoder, decoder.inbound.popleft(), FETCHES if decoder.hand_over.first else WITH_FIRST)
        self._launch(decoder, now_s)

    def _add(self, engine: VllmEngine, request: int, params: dict[str, Any] | None) -> None:
        if self.requests:
            prompt = self._traffic_prompt(self.requests[request])
        else:
            tokens = self.log.input_tokens[request]
            prompt = prompt_tokens(self.prompt[request], tokens, self._common(tokens))
        engine.add(request, prompt, 1 if engine.prefills_only else self.log.output_tokens[request], params)

    def _traffic_prompt(self, request: TrafficRequest) -> list[int]:
        """The token ids of a prompt: those of the request that it continues, the answer to that, and its own blocks."""
        known = self.traffic_prompts.get(request.id)
        if known is None:
            before = request.continues
            known = [*self.traffic_prompts[before], *[MADE_UP] * self.answers[before]] if before else []
            for key, tokens in request.blocks:
                known += (MADE_UP + 1 + drawn_words(self.seed, key, tokens, WORDS)).tolist()
            self.traffic_prompts[request.id] = known
            self.answers[request.id] = request.out
        return known

    def _launch(self, engine: VllmEngine, now_s: float) -> None:
        """Schedule steps as vLLM's engine core does: up to ``steps_at_once``, and while there is work."""
        steps = engine.launched
        while len(steps) < engine.parts.steps_at_once and engine.news and engine.scheduler.has_requests():
            step = engine.schedule()
            stall_s = self._read(engine, step, now_s)
            begins_s = max(now_s, engine.free_s)
            if step.output.total_num_scheduled_tokens:
                step.took_s = self._step_s(engine, step.output, begins_s) + stall_s
                engine.step_s, engine.busy = step.took_s, True
            engine.free_s = begins_s + step.took_s
            steps.append(step)
            self.push(engine.free_s, STEP_ENDS, engine, 0)

    def step_ends(self, engine: Engine, version: int, now_s: float) -> float | None:
        assert isinstance(engine, VllmEngine)
        self._ends(engine, now_s)
        self._launch(engine, now_s)
        return None

    def _ends(self, engine: VllmEngine, now_s: float) -> None:
        log, step = self.log, engine.launched.popleft()
        engine.busy = any(each.took_s for each in engine.launched)
        engine.busy_s += step.took_s
        if step.starved:
            engine.full_s += step.took_s
        further, outputs = 0, engine.take(step)
        for request in engine.firsts:
            engine.answered.add(request)
            self._first(engine, request, now_s)
            engine.generated += 1
        engine.firsts.clear()
        for output in outputs:
            request = int(output.request_id)
            if request in engine.with_firsts:
                engine.with_firsts.discard(request)
                log.gap_s.append(now_s - log.first_token_s[request])
                log.gap_tokens.append(1)
            elif request not in engine.answered:
                engine.answered.add(request)
                self._first(engine, request, now_s)
            else:
                further += 1
            engine.generated += 1
            if output.finish_reason is not None:
                self._finished(engine, request, now_s)
        if further:
            log.gap_s.append(step.took_s)
            log.gap_tokens.append(further)

    def _first(self, engine: VllmEngine, request: int, now_s: float) -> None:
        if engine.prefills_only or not self.links:
            self.log.prefill_end_s[request] = now_s
        if not engine.prefills_only:
            self.log.first_token_s[request] = now_s

    def _finished(self, engine: VllmEngine, request: int, now_s: float) -> None:
        if engine.prefills_only:
            self.hand_over(engine, request, now_s)
            return
        self.log.finish_s[request] = now_s
        engine.allocated += self.log.output_tokens[request]
        self.ended(engine, request, now_s)

    # --- the executor -------------------------------------------------------------------------

    def _step_s(self, engine: VllmEngine, output: Any, begins_s: float) -> float:
        """The seconds of a step, by the costs of the simulator's engine. Counts its computed tokens and preemptions."""
        requests = engine.scheduler.requests
        joining = {each.req_id for each in output.scheduled_new_reqs}
        joining |= set(output.scheduled_cached_reqs.resumed_req_ids)
        prefill = prefill_context = context = 0.0
        decoding = admitted = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = requests[name]
            after = request.num_computed_tokens  # schedule() has counted this step's tokens already
            if name in joining:
                admitted += request.num_tokens
                engine.preemptions += request.num_preemptions > 0
            if tokens == 1:
                decoding += 1
                context += after
                continue
            prefill += tokens
            prefill_context += tokens * (after - tokens / 2)
            number = int(name)
            if name in joining and not self.log.prefill_start_s[number]:
                self.log.prefill_start_s[number] = begins_s
            self.log.computed_tokens[number] += tokens
            engine.allocated += tokens
        step_s = engine.costs.step_s(
            decoding,
            prefill,
            context / decoding if decoding else 0.0,
            prefill_context / prefill if prefill else 0.0,
        )
        step_s += engine.costs.admit_s * admitted
        return step_s * self.pace(engine) if self.contention else step_s

    def _read(self, engine: VllmEngine, step: ScheduledStep, now_s: float) -> float:
        """Start the reads of KV that vLLM ordered with the step. Returns the seconds for which posting them stops the
        engine."""
        reads = step.output.kv_connector_metadata
        stalls_s = 0.0
        for name, tokens in reads.tokens.items() if reads else ():
            request = int(name)
            arrives_s, stall_s = self.carry(engine, request, tokens, now_s)
            stalls_s += stall_s
            self.push(arrives_s, KV_ARRIVED, engine, request)
        return stalls_s
