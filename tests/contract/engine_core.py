"""vLLM's own engine core around a scheduler with the guard, in virtual time: only the executor is a stand-in.

A GPU whose every step takes as long, and workers that post reads of KV and poll for their ends when a step is launched,
as vLLM's do (`test_vllm_scheduler.py` checks that). Times in seconds of a clock that nothing but waiting moves.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from contract.conftest import quietly
from contract.test_kv_guard import Engine

from pdlab.guard import read_ends
from pdlab.marks.engine_marks import FIRST_TOKEN

CORE = "vllm.v1.engine.core"
LOAD = "load"  # the request that keeps the engine busy
PROMPT = 320
OUTPUT = 2  # tokens of the others


@dataclass
class Clock:
    now_s: float = 0.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Output:
    """A step's output, which is there at some moment: whoever asks before waits."""

    clock: Clock
    there_s: float
    value: Any

    def result(self) -> Any:
        self.clock.now_s = max(self.clock.now_s, self.there_s)
        return self.value


@dataclass
class Executor:
    """``posted``, ``ended`` and ``seen``: moments of every read, by request. ``tell_at``: where the ends of reads are
    reported between steps, at each poll."""

    clock: Clock
    step_s: float
    wire_s: float
    reads: dict[str, float] = field(default_factory=dict)
    posted: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    gpu_free_s: float = 0.0
    launched: Any = None
    tell_at: Any = None

    poll_s = 0.0

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Output:
        transfers, now_s = self._look(scheduled), self.clock.now_s
        output = self._output(scheduled, transfers)
        if not scheduled.total_num_scheduled_tokens:
            return Output(self.clock, now_s, output)
        self.gpu_free_s = max(now_s, self.gpu_free_s) + self.step_s
        self.launched = Output(self.clock, self.gpu_free_s, output)
        return Output(self.clock, now_s, None)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self.launched if non_block else self.launched.result()

    def _look(self, scheduled: Any) -> Any:
        now_s = self.clock.now_s
        done = {name for name, ends_s in self.reads.items() if ends_s <= now_s}
        for name in done:
            self.ended[name] = self.reads.pop(name)
            self.seen.setdefault(name, now_s)
        for name in scheduled.kv_connector_metadata.reqs_to_recv:
            self.posted[name], self.reads[name] = now_s, now_s + self.wire_s
        return quietly("vllm.v1.outputs").KVConnectorOutput(finished_recving=done or None)

    def poll(self) -> None:
        """As `pdlab.guard.worker.GuardWorker` between two steps."""
        now_s = self.clock.now_s
        done = [name for name, ends_s in self.reads.items() if ends_s <= now_s and name not in self.seen]
        self.seen |= dict.fromkeys(done, now_s)
        read_ends.report_ends(self.tell_at, 1, done)

    def poll_if_due(self) -> bool:
        raise NotImplementedError

    def _output(self, scheduled: Any, transfers: Any) -> Any:
        names = list(scheduled.num_scheduled_tokens)
        return quietly("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=transfers,
        )


@dataclass
class Moments:
    """Of one request that was prefilled elsewhere, in seconds, and its tokens."""

    arrived_s: float
    posted_s: float
    ended_s: float
    seen_s: float
    first_s: float
    second_s: float
    tokens: tuple[int, ...]


class VirtualCore:
    """``EngineCore`` without its process: ``_process_engine_step`` and everything that it calls are vLLM's."""

    def __init__(
        self,
        vllm_config: Any,
        module: Any,
        *,
        asynchronous: bool,
        step_s: float,
        wire_s: float,
        polls: bool,
        first: int | None,
    ) -> None:
        self.clock = Clock()
        self._first = {} if first is None else {FIRST_TOKEN: first}
        self.engine = Engine(vllm_config, module, asynchronous=asynchronous, blocks=400)
        self.executor = Executor(self.clock, step_s, wire_s)
        self.polls = polls
        if polls:
            self.engine.scheduler._read_ends = self.engine.side.read_ends = read_ends.ReadEndReceiver(workers=1)
            self.executor.tell_at = self.engine.side.read_ends.address
        process = quietly(CORE).EngineCoreProc
        self.core = core = process.__new__(process)
        core.vllm_config, core.scheduler, core.model_executor = vllm_config, self.engine.scheduler, self.executor
        core.batch_queue_size = vllm_config.max_concurrent_batches
        core.batch_queue = deque(maxlen=core.batch_queue_size) if core.batch_queue_size > 1 else None
        core.step_fn = core.step if core.batch_queue is None else core.step_with_batch_queue
        core.async_scheduling, core.check_for_draft_tokens = asynchronous, False
        core.is_ec_consumer, core.is_pooling_model, core.log_stats = True, False, False
        core.aborts_queue, core.output_queue = queue.Queue(), queue.SimpleQueue()
        self._hashes = self.engine._hasher

    def add(self, name: str, output_tokens: int, params: Mapping[str, Any] | None = None) -> None:
        number = sum(map(ord, name))
        sampling = quietly("vllm").SamplingParams(
            max_tokens=output_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
        )
        prompt = [(number * 37 + at * (number % 11 + 1)) % 900 + 10 for at in range(PROMPT)]
        request = quietly("vllm.v1.request").Request(name, prompt, sampling, None, block_hasher=self._hashes)
        self.core.scheduler.add_request(request)

    def serve(self, arrivals_s: Sequence[float], *, busy: bool) -> list[Moments]:
        """Requests with KV elsewhere that arrive then, two output tokens each. ``busy``: beside one that decodes all
        the time."""
        with self._virtual_time():
            return self._serve(dict(enumerate(arrivals_s)), busy=busy)

    def _serve(self, arrivals_s: dict[int, float], *, busy: bool) -> list[Moments]:
        core, clock = self.core, self.clock
        if busy:
            self.add(LOAD, 3000)
        made: dict[str, list[tuple[float, int]]] = {f"r{number}": [] for number in arrivals_s}
        coming = sorted(arrivals_s.items(), key=lambda each: each[1])
        while any(len(tokens) < OUTPUT for tokens in made.values()):
            while coming and coming[0][1] <= clock.now_s:
                number, _ = coming.pop(0)
                self.engine.prefill.now = 1000.0 + clock.now_s
                self.add(f"r{number}", OUTPUT, self.engine.params(f"remote-{number}") | self._first)
            if not core.scheduler.has_requests() and not core.batch_queue:
                clock.now_s = coming[0][1]
                continue
            self.engine.prefill.now = 1000.0 + clock.now_s
            core._process_engine_step()
            while not core.output_queue.empty():
                _, outputs = core.output_queue.get()
                for output in outputs.outputs:
                    if output.request_id != LOAD:
                        made[output.request_id] += [(clock.now_s, token) for token in output.new_token_ids]
        ran, moments = self.executor, list[Moments]()
        for (name, tokens), arrived_s in zip(made.items(), arrivals_s.values(), strict=True):
            (first_s, one), (second_s, other) = tokens
            seen = (ran.posted[name], ran.ended[name], ran.seen[name])
            moments.append(Moments(arrived_s, *seen, first_s, second_s, (one, other)))
        return moments

    @contextmanager
    def _virtual_time(self) -> Iterator[None]:
        clock = SimpleNamespace(
            sleep=self.clock.wait, monotonic=lambda: self.clock.now_s, time=lambda: self.clock.now_s
        )
        worker = self.executor if self.polls else None
        with patch.object(quietly(CORE), "time", clock), patch.object(read_ends._thread, "worker", worker):
            yield
        if self.polls:
            self.engine.side.read_ends.close()
