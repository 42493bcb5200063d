"""One simulated engine: vLLM's scheduler in steps, and its prefix cache. Times are in seconds.

Steps in which nothing changes are one event: a decode batch runs until a sequence ends, KV memory is full, or a request
arrives. So a simulation costs time per request and not per token.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from pdlab.core.deployment import Pool
from pdlab.sim.hand_over import VLLMS, HandOver
from pdlab.sim.router import ReportedLoad
from pdlab.sim.step_source import StepSource

MAX_SEQUENCES = 1024  # vLLM's max_num_seqs for its API server on a data-centre GPU


def most_sequences_of(pool: Pool) -> int:
    """Sequences that one engine of the pool runs at once: its engine argument ``max_num_seqs``, else `MAX_SEQUENCES`.
    Each stage of a pipeline has a batch of its own, and an equal share of them."""
    given = pool.engine_kwargs.get("max_num_seqs")
    return MAX_SEQUENCES if given is None else max(int(given) // pool.pp, 1)


class PrefixCache:
    """The prompts whose KV an engine still holds, least recently used first; sizes are in tokens. vLLM frees the blocks
    of a finished request from its end, so the end of a prompt is evicted first."""

    __slots__ = ("_cached_tokens", "capacity", "used")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = 0.0
        # Not a dict: a search for its first key passes all earlier keys that were deleted.
        self._cached_tokens: OrderedDict[int, float] = OrderedDict()

    def hit(self, prompt: int, tokens: float) -> float:
        """The cached tokens of a prompt of ``tokens``, which need not be computed."""
        cached_tokens = self._cached_tokens.get(prompt, 0.0)
        return cached_tokens if cached_tokens < tokens else tokens

    def keep(self, prompt: int, tokens: float, besides: float = 0.0) -> None:
        """Cache ``tokens`` of the prompt as the last used ones. The oldest other prompts are evicted for them.
        ``besides``: tokens of blocks in use that are not cached."""
        cached = self._cached_tokens
        self.used += tokens - cached.pop(prompt, 0.0)
        cached[prompt] = tokens
        capacity = self.capacity - besides
        while self.used > capacity:
            oldest = next(iter(cached))
            if oldest == prompt:
                return
            over = self.used - capacity
            size = cached[oldest]
            if size > over:
                cached[oldest] = size - over
                self.used -= over
            else:
                del cached[oldest]
                self.used -= size


@dataclass(slots=True)
class Preempted:
    """The blocks of a preempted request: they are free, but stay cached until other requests take them, last first.
    ``safe_until``: until `Engine.generated` is larger, others take blocks that were free before."""

    cached: float  # tokens
    safe_until: float

    def kept(self, engine: Engine) -> float:
        """Tokens whose blocks no other request has taken. With windows in groups of their own vLLM finds nothing: it
        has freed the windows at whose ends a prompt could continue."""
        if engine.window_tokens:
            return 0.0
        return max(self.cached - max(engine.generated - self.safe_until, 0.0), 0.0)


@dataclass(slots=True)
class PendingPrefill:
    """A request that is not, or not wholly, prefilled. ``tokens_left``: the tokens to compute; None: the cache was not
    looked up yet. ``held``: tokens of its blocks when a part of it is prefilled."""

    request: int
    tokens: float  # context to build: the prompt, and what was generated before a preemption
    tokens_left: float | None = None
    held: float = 0.0
    preempted: Preempted | None = None


_admission = itemgetter(2)  # of a running request


@dataclass(slots=True, eq=False)
class Engine:
    """One engine (DP rank): a waiting queue, a running batch, a step in progress.

    ``running`` is a heap of (step in which the request ends, request, ``generated`` at its first token): all sequences
    advance together.

    KV memory is held in blocks, as by vLLM's ``KVCacheManager``. ``held_tokens`` has the tokens of sequences that
    decode, and of other requests all tokens of their blocks. In the next step every sequence needs blocks for its whole
    context. ``window``: tokens of the sliding window of layers that are in a group of their own; 0: all layers keep all
    tokens. Every request then also holds the blocks of a window. A prompt holds as many as it computes tokens in a
    step, until that step has ended.

    ``most_sequences``: the most that run at once. In a full batch no further KV is fetched. What has arrived waits
    until a sequence ends (vLLM's ``Scheduler.schedule``).

    ``steps_in_flight``: the number of steps that vLLM's engine core has launched at once. It is 1 if a step is
    scheduled when the last one has ended, and 2 with asynchronous scheduling. Workers post reads of KV and look for
    their ends when a step is launched. The scheduler gets this information when that step has ended
    (`pdlab.sim.stepping`). With two steps in flight a new request joins the step after the next. 0: reads begin at
    once, and arrived KV joins the next step. ``hand_over``: the waits of this hand-over, and the source of the first
    token.
    """

    costs: StepSource
    capacity: float
    step_tokens: int
    cache: PrefixCache
    prefills_only: bool = False
    receives: bool = False  # KV of other engines
    block_tokens: int = 1
    window: int = 0
    most_sequences: int = MAX_SEQUENCES
    waiting: deque[PendingPrefill] = field(default_factory=deque)
    running: list[tuple[int, int, int]] = field(default_factory=list)
    inbound: deque[int] = field(default_factory=deque)  # prefilled requests without room here yet for their KV
    steps_in_flight: int = 0
    hand_over: HandOver = VLLMS
    coming: int = 0  # requests whose KV has arrived: those in ``arrived``, ``seen``, ``known`` and ``joining``
    arrived: list[int] = field(default_factory=list)  # KV has arrived, and no launch of a step has looked since
    # Arrived KV that the launch of each unfinished step has seen; empty: none has seen any.
    seen: deque[list[int]] = field(default_factory=deque)
    known: list[int] = field(default_factory=list)  # the scheduler knows their KV, but has scheduled the next step
    unscheduled: int = 0  # the last ones of ``waiting``, without which the next step is scheduled
    joining: list[int] = field(default_factory=list)  # requests that can decode in the next step
    joined: list[int] = field(default_factory=list)  # requests that joined the running step
    prefilled: list[PendingPrefill] = field(default_factory=list)  # prefill completes at the end of this step
    step: int = 0
    held_tokens: float = 0.0  # tokens of KV of requests that run, or wait for decode to fetch them
    # Tokens of blocks that become free when the next step is scheduled already: those of requests that ended with the
    # last step, if two are in flight, and those outside of windows.
    late: float = 0.0
    outside: float = 0.0  # tokens outside of windows of what the last step computed
    outside_before: float = 0.0  # of the step before, if it was in flight when the next step was scheduled
    context: float = 0.0  # sum of the running sequences' contexts, tokens
    stall_s: float = 0.0
    allocated: float = 0.0
    load: int = 0
    reported_loads: dict[int, ReportedLoad] = field(default_factory=dict)  # by router
    frontend_free_s: float = 0.0
    link_free_s: float = 0.0
    link_busy_s: float = 0.0
    host_free_s: float = 0.0  # end of the last load from host memory
    began_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    late_s: float = 0.0  # the last of the steps takes this much longer than the others
    pace: float = 1.0  # the running step takes this many times its time on an otherwise idle machine
    version: int = 0
    busy: bool = False
    starved: bool = False
    busy_s: float = 0.0
    full_s: float = 0.0
    generated: int = 0  # generated tokens at the end of the last step
    preemptions: int = 0
    usable: float = field(init=False)  # tokens of the blocks for requests; vLLM keeps one block for itself
    window_tokens: int = field(init=False)  # of the blocks that a request holds of its window
    most_windowed: int = field(init=False)  # tokens of the blocks for windows that a prompt may need at once

    def __post_init__(self) -> None:
        block = self.block_tokens
        self.usable = (self.capacity // block - 1) * block
        steps = max(self.steps_in_flight, 1)
        if not self.window:
            self.window_tokens = self.most_windowed = 0
            return
        # vllm/v1/kv_cache_interface.py, SlidingWindowSpec.max_admission_blocks_per_request: a window begins in a block.
        self.window_tokens = (-(-(self.window - 1) // block) + 1) * block
        self.most_windowed = (-(-(self.window - 1 + steps * self.step_tokens) // block) + 1) * block

    @property
    def kept_window(self) -> int:
        """Tokens of the blocks of windowed layers that stay cached at the end of a prompt."""
        return self.window_tokens - self.block_tokens

    @property
    def uncached(self) -> float:
        """Tokens of blocks that windows use, and that stay uncached."""
        return self.window_tokens * len(self.running) + self.outside + self.outside_before if self.window else 0.0

    def kv_tokens(self, tokens: float) -> float:
        """Tokens of the blocks of a request that has KV of ``tokens``."""
        return tokens + -tokens % self.block_tokens + self.window_tokens

    @property
    def promised(self) -> float:
        """Tokens of the blocks that a request will need for the rest of its prompt."""
        head = self.waiting[0] if self.waiting else None
        return self.kv_tokens(head.tokens) - head.held if head and head.held else 0.0

    def has_room(self, tokens: float, system: EngineSurroundings) -> bool:
        """Whether blocks of ``tokens`` are free when every sequence has those of its next token."""
        room = self.usable - self.held_tokens - self.late - tokens
        if room < 0:
            return False
        return room >= self.block_tokens * len(self.running) or room >= self._padding(system)

    def _padding(self, system: EngineSurroundings) -> float:
        """Free tokens in the last blocks of the sequences, less those of blocks that windows have just left."""
        block, step, window = self.block_tokens, self.step, self.window
        contexts = [system.context(request, ends - step) for ends, request, _ in self.running]
        padding = sum([-context % block for context in contexts])
        if not window or self.steps_in_flight > 1:
            return padding
        left = sum([(context + -context % block) - (context - window) // block * block for context in contexts])
        return padding + left - self.window_tokens * len(contexts)

    @property
    def decoding(self) -> int:
        """The number of sequences in the decode phase, whose tokens are streamed."""
        return len(self.running)

    def plan(self, now_s: float, system: EngineSurroundings) -> float | None:
        """Choose the next step, as vLLM does: running sequences first, then prefill within the token budget. Returns
        when the step ends; None if nothing can run."""
        running, costs = self.running, self.costs
        batch = len(running)
        room = self.usable - self.held_tokens - self.block_tokens * batch
        # The first two branches are most steps. The last one would give the same.
        if batch and room >= 0 and not (self.late or self.waiting):
            # No prompt waits, and nothing is full.
            self.starved, self.unscheduled = batch < self.most_sequences and len(self.inbound) > 0, 0
            joined, comes, stall_s, mean = 0, False, self.stall_s, self.context / batch
            if self.coming:
                comes = self._learn(now_s, system)
                if self.joining or self.known:
                    joined = self._join(batch)
            if joined or comes or stall_s:
                steps = 1
                tokens_in = system.joining_tokens(self.joined) if joined else 0.0
                step_s = costs.step_s(batch + joined, 0.0, mean, 0.0) + (stall_s + costs.admit_s * tokens_in)
                self.stall_s = 0.0
            else:
                steps = running[0][0] - self.step
                if room < steps * batch:
                    steps = self._steps_with_room(steps, system)
                step_s = costs.step_s(batch, 0.0, mean + steps / 2 if steps > 1 else mean, 0.0)
        elif not (batch or self.coming or self.late or self.stall_s):
            # At most prompts, as in every engine that only prefills.
            if self.steps_in_flight < 2 or not self._scheduled_ahead():
                self.unscheduled = 0
            self.starved = bool(self.inbound)
            prefill = context_sum = tokens_in = 0.0
            if self.waiting:
                prefill, context_sum, tokens_in = self._prefill(self.step_tokens, system, now_s)
            self.unscheduled = 0
            if not prefill:
                self.busy = False
                return None
            steps = 1
            step_s = costs.step_s(0, prefill, 0.0, context_sum / prefill) + costs.admit_s * tokens_in
        else:
            comes = self._learn(now_s, system)
            preempts = frees = False
            if self.late:
                if not (batch or self.joining or self.promised):
                    self.late = self.outside = self.outside_before = 0.0  # the next step was not scheduled before
                preempts = batch > 0 and room < self.late and self._make_room(system)
                frees = self._windows_move() and len(self.waiting) > 0
            elif room < 0 and batch:
                preempts = self._make_room(system)
                frees = self.late > 0
            self.starved = preempts or (bool(self.inbound) and batch < self.most_sequences)
            prefill = context_sum = tokens_in = 0.0
            joined = 0
            if preempts:  # vLLM then admits no request in this step
                comes = comes or (bool(self.joining) and batch < self.most_sequences)
                batch, self.joining, self.known = len(running), self.joining + self.known, []
            else:
                if self.waiting:
                    prefill, context_sum, tokens_in = self._prefill(self.step_tokens - batch, system, now_s)
                if self.joining or self.known:
                    joined = self._join(batch)
            between_steps = frees or (self.steps_in_flight and (comes or self.unscheduled))
            self.unscheduled = 0
            if self.late:
                self.late = self.outside + self.outside_before
            stall_s, mean = self.stall_s, self.context / batch if batch else 0.0
            if prefill or joined or stall_s or (batch and between_steps):
                steps = 1
                step_s = costs.step_s(batch + joined, prefill, mean, context_sum / prefill if prefill else 0.0)
                if joined:
                    tokens_in += system.joining_tokens(self.joined)
                step_s += stall_s + costs.admit_s * tokens_in
                self.stall_s = 0.0
            elif batch:
                steps = running[0][0] - self.step
                if self.usable - self.held_tokens < self.late + (steps + self.block_tokens) * batch:
                    steps = self._steps_with_room(steps, system)
                step_s = costs.step_s(batch, 0.0, mean + steps / 2 if steps > 1 else mean, 0.0)
            else:
                self.busy = False
                if frees:
                    self.late = self.outside_before = 0.0
                    return self.plan(now_s, system)
                if self.joining or self.seen:
                    # Empty steps follow one another until the workers have reported all KV that they saw.
                    known = [request for each in self.seen for request in each]
                    self._know(known, system, now_s)
                    self.joining += known
                    self.seen.clear()
                    return self.plan(now_s, system)
                return None
        if system.contention:
            self.pace = system.pace(self)
            step_s *= self.pace
        self.began_s, self.step_s, self.steps = now_s, step_s, steps
        self.busy, self.late_s = True, 0.0
        self.version += 1
        return now_s + steps * step_s

    def _steps_with_room(self, steps: int, system: EngineSurroundings) -> int:
        """The number of steps, up to ``steps``, until KV memory is full. Contexts grow by a token in each step."""
        block, batch = self.block_tokens, len(self.running)
        if batch == 1:
            return steps
        padding = sorted([-system.context(request, ends - self.step) % block for ends, request, _ in self.running])
        free = self.usable - self.held_tokens - self.late - sum(padding)
        if free < 0:
            return 1
        # Every sequence takes a block in each ``block`` steps, after the free tokens of its last one.
        rounds, more = divmod(int(free) // block, batch)
        return min(steps, 1 + rounds * block + int(padding[more]))

    def _learn(self, now_s: float, system: EngineSurroundings) -> bool:
        """A step is launched: its workers see which KV has arrived. The scheduler may learn what earlier ones saw.
        Returns whether it learns of some too late for this step."""
        in_flight, seen = self.steps_in_flight, self.seen
        if self.arrived or seen:
            seen.append(self.arrived)
            self.arrived = []
            if len(seen) > self.hand_over.known * in_flight:
                known = seen.popleft()
                if known:
                    self._know(known, system, now_s)
                    self.known += known
                    if not any(seen):
                        seen.clear()  # no launch need look before more arrives
        if in_flight < 2 or not self._scheduled_ahead():
            self.unscheduled = 0
            if self.known:
                self.joining += self.known
                self.known = []
        return len(seen) > 0 or len(self.known) > 0

    def _join(self, batch: int) -> int:
        """Requests that can decode join a step of ``batch`` sequences. The others, and those of which the scheduler
        learned too late, can join the next one. Returns the number of those that join."""
        joining, most = self.joining, self.most_sequences
        joined = len(joining)
        if batch + joined > most:
            joined = max(most - batch, 0)
            joining, self.known = joining[:joined], joining[joined:] + self.known
        self.joined, self.joining, self.known = joining, self.known, []
        self.coming -= joined
        return joined

    def _know(self, requests: list[int], system: EngineSurroundings, now_s: float) -> None:
        """The scheduler learns that the KV of these requests has arrived."""
        if not self.hand_over.first:
            for request in requests:
                system.takes_first(self, request, now_s)

    def _scheduled_ahead(self) -> bool:
        """Whether this step, the second in flight, was scheduled when the last one was launched."""
        return bool(self.running or self.joining or len(self.waiting) > self.unscheduled)

    def _prefill(self, budget: int, system: EngineSurroundings, now_s: float) -> tuple[float, float, float]:
        """Fill the step with waiting prompts, in order. Returns the prefill tokens, the sum of their contexts, and the
        tokens of the prompts that begin."""
        total = context_sum = entered_tokens = 0.0
        waiting, prefilled, batch = self.waiting, self.prefilled, len(self.running)
        room, block, window_tokens = self.most_sequences - batch, self.block_tokens, self.window_tokens
        most_held = self.usable - self.late - block * batch
        while len(waiting) > self.unscheduled and budget > 0 and room > 0:
            head = waiting[0]
            tokens, left = head.tokens, head.tokens_left
            held = tokens + -tokens % block + window_tokens
            if left is None:
                most = held if not window_tokens else self._most(tokens)
                if self.held_tokens + most > most_held and self.held_tokens > 0 and not self.has_room(most, system):
                    self.starved = True
                    break
                left = system.to_compute(self, head)
                if head.preempted:
                    head.preempted = None
                    self._takes(left)
                entered_tokens += tokens
                if system.loads(self, head, now_s):
                    head.tokens_left, head.held = left, held
                    self.held_tokens += held
                    waiting.popleft()
                    continue
                system.prefill_begins(head.request, now_s)
            elif (
                window_tokens or self.held_tokens + held - head.held > most_held  # else the whole prompt fits
            ) and not self._continues(head, min(left, budget), system):
                self.starved = True
                break
            take = left
            if left > budget:
                take = float(budget)
                held = self.kv_tokens(tokens - left + take)
                head.tokens_left = left - take
            context_sum += take * (tokens - left + take / 2)
            self.held_tokens += held - head.held
            if window_tokens:
                outside = self._outside(tokens - left + take, take)
                self.outside += outside
                self.late += outside
                most_held -= outside
            total += take
            budget -= int(take)
            if take < left:
                head.held = held
                break
            room -= 1
            prefilled.append(waiting.popleft())
        return total, context_sum, entered_tokens

    def _takes(self, tokens: float) -> None:
        """The first waiting request takes blocks of ``tokens``: preempted ones behind it lose theirs sooner."""
        for other in islice(self.waiting, 1, None):
            if other.preempted is None:
                return
            other.preempted.safe_until -= tokens

    def _most(self, tokens: float) -> float:
        """Tokens of the blocks that a prompt of ``tokens`` may need at once, with those of windowed layers."""
        whole = tokens + -tokens % self.block_tokens
        return whole + min(whole, self.most_windowed)

    def _outside(self, done: float, take: float) -> float:
        """Tokens of the blocks of windowed layers, besides a window, of a step that computes the last ``take`` of
        ``done`` tokens."""
        tokens = min(done, take + self.window)
        return max(tokens + -tokens % self.block_tokens - self.window_tokens, 0.0)

    def _continues(self, head: PendingPrefill, take: float, system: EngineSurroundings) -> bool:
        """Whether there are blocks for the next part of a prompt. If not, it is preempted."""
        assert head.tokens_left is not None
        done = head.tokens - head.tokens_left + take
        more = self.kv_tokens(done) - head.held + (self._outside(done, take) if self.window else 0.0)
        if more <= 0 or self.has_room(more, system):
            return True
        self._stop(head, system)
        return False

    def _stop(self, head: PendingPrefill, system: EngineSurroundings) -> None:
        """Preempt a request in the middle of its prompt."""
        assert head.tokens_left is not None
        self.preemptions += 1
        system.stopped(self, head)
        head.preempted = self._keeps(head.tokens - head.tokens_left, system)
        self._leave(head.held)
        head.held, head.tokens_left = 0.0, None

    def _windows_move(self) -> bool:
        """A step is scheduled: blocks become free that were outside of windows when the last known step ended. Returns
        whether others become free later."""
        if self.steps_in_flight > 1:
            self.late -= self.outside_before
            self.outside_before = self.outside
        else:
            self.late -= self.outside
        self.outside = 0.0
        return self.late > 0

    def _leave(self, held: float) -> None:
        """The newest request is preempted, and with it what the last step computed."""
        self.held_tokens -= held
        outside = min(self.outside, held)
        self.outside -= outside
        self.late -= outside

    def _keeps(self, cached: float, system: EngineSurroundings) -> Preempted:
        """A request is preempted, and its blocks have not become free yet. Others first take the blocks before them."""
        free = self.usable - self.held_tokens - self._padding(system)
        return Preempted(cached, self.generated + max(free, 0.0))

    def _make_room(self, system: EngineSurroundings) -> bool:
        """Preempt the newest requests until every other sequence has room for its next token. Returns whether it
        preempted any."""
        if self.has_room(0.0, system):
            return False
        before = self.preemptions
        frees_late = self.receives and self.steps_in_flight > 1
        stay = self._with_room(system) if frees_late else 1
        if self.promised:
            self._stop(self.waiting[0], system)
        while len(self.running) > stay and (frees_late or not self.has_room(0.0, system)):
            newest = max(self.running, key=_admission)
            self.preemptions += 1
            context = system.context(newest[1], newest[0] - self.step)
            preempted = PendingPrefill(newest[1], context, preempted=self._keeps(context - 1, system))
            self.running.remove(newest)
            held = context + self.window_tokens
            self._leave(held)
            if frees_late:
                self.late += held
            self.context -= context
            self.waiting.appendleft(preempted)
        heapq.heapify(self.running)
        return self.preemptions > before

    def _with_room(self, system: EngineSurroundings) -> int:
        """The number of sequences, oldest first, that get their next block. Where KV arrives from other engines, a
        preempted sequence frees its blocks after the step in flight. So vLLM preempts until it comes to the sequence
        that needs one (vllm/v1/core/sched/scheduler.py, deferred frees)."""
        block, step = self.block_tokens, self.step
        oldest = sorted(self.running, key=_admission)
        needs = [system.context(request, ends - step) % block == 1 for ends, request, _ in oldest]
        room = self.usable - self.held_tokens - self.late
        blocks = (room - self._padding(system)) // block + sum(needs)
        for index, need in enumerate(needs):
            blocks -= need
            if need and blocks < 0:
                return index
        return len(needs)

    def interrupt(self, now_s: float) -> float | None:
        """A request arrived during a run of equal steps: the run ends with the present step. Returns the new end."""
        if self.steps <= 1 or self.late_s:
            return None
        began_s, step_s = self.began_s, self.step_s
        passed = math.ceil((now_s - began_s) / step_s - 1e-9)
        if passed >= self.steps:
            return None
        if passed < 1:
            passed = 1
        self.steps = passed
        self.version += 1
        return began_s + passed * step_s

    def change_pace(self, now_s: float, pace: float) -> float:
        """The running step continues at another speed, and a run of equal steps ends with it. Returns its end."""
        self.interrupt(now_s)
        left_s = self.began_s + self.steps * self.step_s + self.late_s - now_s
        self.late_s += left_s * (pace / self.pace - 1)
        self.pace = pace
        self.version += 1
        return self.began_s + self.steps * self.step_s + self.late_s


class EngineSurroundings:
    """The parts of the system around an engine that the engine needs. ``contention``: every other busy engine makes an
    engine slower by this share. It is 0 if each engine has its own device, and above 0 if engines share the cores of
    one machine."""

    __slots__ = ()

    contention = 0.0

    def beside(self, engine: Engine) -> Iterable[Engine]:
        """The other engines of the machine."""
        raise NotImplementedError

    def pace(self, engine: Engine) -> float:
        """The time of a step now, over its time on a machine without other busy engines."""
        return 1 + self.contention * sum(other.busy for other in self.beside(engine))

    def to_compute(self, engine: Engine, waiting: PendingPrefill) -> float:
        """Prompt tokens that are not in the engine's cache (at least one block)."""
        raise NotImplementedError

    def loads(self, engine: Engine, waiting: PendingPrefill, now_s: float) -> bool:
        """Whether the prompt waits until its blocks are loaded from host memory. It then returns by itself."""
        return False

    def joining_tokens(self, requests: list[int]) -> float:
        """Prompt tokens of requests whose KV has arrived."""
        raise NotImplementedError

    def takes_first(self, engine: Engine, request: int, now_s: float) -> None:
        """The request's first token is prefill's; the step that it joins computes the second."""
        raise NotImplementedError

    def prefill_begins(self, request: int, now_s: float) -> None:
        raise NotImplementedError

    def context(self, request: int, steps_left: int) -> float:
        """Tokens of the context of a sequence that ends after that many steps."""
        raise NotImplementedError

    def stopped(self, engine: Engine, waiting: PendingPrefill) -> None:
        """A request was preempted in the middle of its prompt."""
        raise NotImplementedError
