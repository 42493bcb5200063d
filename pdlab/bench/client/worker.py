"""The load generator's process: vLLM's own ``bench serve`` code, all levels of a sweep in one start.

``python -m pdlab.bench.client.worker`` reads one ``ClientLevel`` per line on standard input and answers on standard
output with JSON lines: ``{"event": "ready"}`` after its imports, then per level any number of ``{"event": "progress",
"name", "done", "failed", "total"}``, when it is over of ``{"event": "ended", "name", "part": EndedPart}`` with its
requests, and one of ``{"event": "done", "answer": ClientAnswer}`` with the rest or ``{"event": "refused", "name",
"message"}`` (nothing was sent). One of several processes writes ``{"event": "prepared", "name"}`` when its prompts are
drawn and begins at the monotonic time on the next line, so that all begin together. A line ``stop`` ends a level: the
process returns the sent requests, those in flight as failed ones, and ends. vLLM's output goes to standard error. The
process ends at once when standard input ends, also in the middle of a level: the load must not outlive the sweep.

Requests are made and timed by ``vllm.benchmarks.serve.benchmark``, those of a compiled workload only by its request
functions (`pdlab.bench.client.replay`). Its command line is not used, because it starts again for each level (10 s of
imports) and fails in the CPU package, where no distribution is named "vllm". pdlab draws the prompts (`_dataset`),
varying lengths, and the due times of an open loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import types
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any, TextIO

from pydantic import ValidationError

from pdlab.bench.client.ended import EndedRequest, EndedRequests
from pdlab.bench.client.protocol import STOP, ClientAnswer, ClientLevel, ComputedTokens
from pdlab.bench.client.replay import SessionSender, WordTexts, own_requests, tee_answers
from pdlab.bench.client.timeline_tap import TappedSession
from pdlab.bench.client.vllm_names import BENCHMARK, ENGINES_OWN
from pdlab.core.errors import UsageError
from pdlab.core.rehearsal import SENT_HEADER
from pdlab.core.text import counted
from pdlab.deploy.endpoint import key_of
from pdlab.deploy.serving.timeline import HEADER

PROGRESS_EVERY_S = 0.5
LAG_PROBE_S = 0.05
MAX_DRAWS = 50
MIN_WORDS = 400
REQUEST_MOST_S = 6 * 3600.0
PR_SET_PDEATHSIG = 1

RequestFunc = Callable[..., Awaitable[Any]]


def import_benchmark() -> None:
    """Import ``vllm.benchmarks.serve`` without the modules that only engines need. Raises ImportError."""
    for name, taken in ENGINES_OWN.items():
        stub = types.ModuleType(name)
        for attribute in taken:
            setattr(stub, attribute, None)
        sys.modules.setdefault(name, stub)
    importlib.import_module(BENCHMARK)


def main() -> int:
    """Serve levels until standard input ends."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the end of standard input has to do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    levels: queue.Queue[str] = queue.Queue()
    driven = _RunningLevel()
    threading.Thread(target=_read_levels, args=(levels, driven), daemon=True).start()
    try:
        import_benchmark()
    except ImportError as error:
        _send(answers, event="refused", name="", message=f"vLLM cannot be imported ({error}); install requirements.txt")
        return 1
    _send(answers, event="ready")
    while True:
        line = levels.get()
        name = ""
        try:
            level = ClientLevel.model_validate_json(line)
            name = level.name
            tokenizer = _tokenizer(level.tokenizer)
            make: Callable[..., SessionSender | list[Any]] = _replay if level.replay else _samples
            load = make(level, tokenizer)
            if level.parts > 1:
                _send(answers, event="prepared", name=name)
                time.sleep(max(0.0, float(levels.get()) - time.perf_counter()))
            answer = asyncio.run(_drive(level, load, tokenizer, answers, driven))
        except (ValidationError, UsageError) as error:
            _send(answers, event="refused", name=name, message=" ".join(str(error).split()))
        else:
            _send(answers, event="done", answer=answer.model_dump(mode="json", exclude_defaults=True))
            driven.answered()


class _RunningLevel:
    """The running level, for the thread that may have to stop it."""

    def __init__(self) -> None:
        self.stopped = False
        self._task: asyncio.Future[Any] | None = None

    async def result(self, benchmark: Awaitable[Any]) -> Any:
        """The result of vLLM's ``benchmark``; None: it was stopped, and nothing of it runs any more."""
        self._task = asyncio.ensure_future(benchmark)
        try:
            return await self._task
        except asyncio.CancelledError:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            return None

    def answered(self) -> None:
        """The level is over."""
        if self.stopped:
            os._exit(0)
        self._task = None

    def stop(self) -> None:
        """From another thread. Ends the process where no request was sent yet."""
        task, self.stopped = self._task, True
        if task is None:
            os._exit(0)
        with contextlib.suppress(RuntimeError):  # the level has ended, and is about to be answered
            task.get_loop().call_soon_threadsafe(task.cancel)


def _read_levels(levels: queue.Queue[str], driven: _RunningLevel) -> None:
    for line in sys.stdin:
        if line.strip() == STOP:
            driven.stop()
        elif line.strip():
            levels.put(line)
    os._exit(0)


def _send(answers: TextIO, **message: object) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def _drive(
    level: ClientLevel, load: SessionSender | list[Any], tokenizer: Any, answers: TextIO, driven: _RunningLevel
) -> ClientAnswer:
    """Run one level, or this process's share of it; sends its requests to the parent, and returns the rest."""
    from pdlab.bench.client.vllm_names import freeze_gc_heap

    meter = Meter(level, answers, tokenizer)
    send: RequestFunc = partial(meter.request, _request_func(level))
    tee_answers()
    freeze_gc_heap()
    base_url = level.base_url or level.decode_url or ""
    if base_url and (key := key_of(base_url)):
        os.environ["OPENAI_API_KEY"] = key  # vLLM's request functions send it as the bearer token
    probe = asyncio.create_task(meter.probe())
    started_at = _now()
    clocks = time.time(), time.perf_counter()
    if isinstance(load, SessionSender):
        meter.total = len(load.planned.order)
        await driven.result(_replayed(level, load, base_url, send, meter))
    else:
        await driven.result(_benchmarked(level, load, base_url, tokenizer, send, meter))
    clock_step_s = (time.time() - clocks[0]) - (time.perf_counter() - clocks[1])
    finished_at = _now()
    probe.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await probe
    ended = meter.ended
    if not ended.count:  # stopped
        os._exit(0)
    for part in ended.parts():
        _send(answers, event="ended", name=level.name, part=part.model_dump(mode="json", exclude_defaults=True))
    return ClientAnswer(
        name=level.name,
        cpu_share=meter.cpu_share,
        loop_lag_s=meter.loop_lag_s,
        clock_step_s=round(clock_step_s, 6),
        origin_s=ended.origin_s,
        schedule_s=ended.schedule_s,
        started_at=started_at,
        finished_at=finished_at,
    )


async def _replayed(level: ClientLevel, load: SessionSender, base_url: str, send: RequestFunc, meter: Meter) -> None:
    """Requests of a compiled workload, over connections as vLLM's benchmark has them."""
    import aiohttp

    from pdlab.bench.client.vllm_names import RequestFuncInput

    make_input = partial(
        RequestFuncInput,
        api_url=f"{base_url}/v1/{'chat/completions' if load.chat else 'completions'}",
        model=level.model,
        model_name=level.model,
        ignore_eos=True,
        extra_body={"temperature": 0.0, "return_token_ids": True},
    )
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=60, enable_cleanup_closed=True)
    timeout = aiohttp.ClientTimeout(total=REQUEST_MOST_S)
    async with aiohttp.ClientSession(connector=connector, trust_env=True, timeout=timeout) as session:
        await load.run(make_input, send, meter.keep, session)


async def _benchmarked(
    level: ClientLevel, samples: list[Any], base_url: str, tokenizer: Any, send: RequestFunc, meter: Meter
) -> None:
    """Requests through vLLM's ``benchmark``. It keeps all outputs, so it gets one and the same for every request."""
    import numpy as np

    from pdlab.bench.client.vllm_names import ASYNC_REQUEST_FUNCS, RequestFuncOutput, TaskType, benchmark

    names = [sample.request_id for sample in samples]
    due_s = {sample.request_id: sample.timestamp for sample in samples} if level.scheduled else {}
    lengths = dict(zip(names, _own_lengths(level) or (), strict=False))
    placeholder = RequestFuncOutput(success=True, output_tokens=1)

    async def send_and_keep(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        output, name = await send(request_func_input, session, pbar), request_func_input.request_id
        meter.keep(name, output, due_s=due_s.get(name), requested=lengths.get(name))
        return placeholder

    ASYNC_REQUEST_FUNCS["pdlab"] = send_and_keep
    random.seed(level.seed)
    np.random.seed(level.seed)  # vLLM draws the gaps between arrivals from numpy's global state
    await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="pdlab",
        api_url=f"{base_url}/v1/completions",
        base_url=base_url,
        model_id=level.model,
        model_name=level.model,
        tokenizer=tokenizer,
        input_requests=samples,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
        selected_percentiles=[50.0, 90.0, 95.0, 99.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=level.own_concurrency,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0.0},
        ready_check_timeout_sec=0,
        self_timed=level.scheduled,
    )


class Meter:
    """Counts the results of vLLM's request function, and the CPU time and lag of this process."""

    def __init__(self, level: ClientLevel, answers: TextIO, tokenizer: Any = None) -> None:
        self.level = level
        self.answers = answers
        self.ended = EndedRequests()
        self.timed_out: set[str] = set()
        self.timelines: dict[str, str] = {}
        """Timelines, as their servers wrote them, of requests that are not kept yet."""
        self.waited_s: dict[str, float] = {}
        """Closed loop: how long the place of each of these had been free when it was sent."""
        self.total = len(level.own_requests)
        self._tokenizer = tokenizer
        self._sent = 0
        self._freed: deque[float] = deque()
        self._began: tuple[float, float] | None = None
        self._over: tuple[float, float] | None = None
        self._lags = array("d")

    async def request(self, func: RequestFunc, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """Pass one request to vLLM's function under a time limit and keep its output."""
        start = time.perf_counter()
        self._began = self._began or (start, time.process_time())
        # The first ones are due together; after them each takes the place of the one that ended longest ago.
        first = self._sent < (self.level.own_concurrency or self._sent + 1)
        free_since = self._began[0] if first or not self._freed else self._freed.popleft()
        self._sent += 1
        if self.level.stamped:
            more = {**(request_func_input.extra_headers or {}), SENT_HEADER: repr(time.monotonic())}
            request_func_input = replace(request_func_input, extra_headers=more)
        if self.level.timeline:
            request_id = request_func_input.request_id
            more = {**(request_func_input.extra_headers or {}), HEADER: "1"}
            request_func_input = replace(request_func_input, extra_headers=more)
            session = TappedSession(session, lambda timeline: self.timelines.update({request_id: timeline}))
        try:
            output = await asyncio.wait_for(func(request_func_input, session, pbar), self.level.request_timeout_s)
        except (asyncio.TimeoutError, asyncio.CancelledError) as error:
            from pdlab.bench.client.vllm_names import RequestFuncOutput

            cut = isinstance(error, asyncio.CancelledError)
            if not cut:
                self.timed_out.add(request_func_input.request_id)
            why = "in flight when the level was stopped" if cut else "no complete answer within {:g} s"
            output = RequestFuncOutput(
                error=why.format(self.level.request_timeout_s),
                prompt_len=request_func_input.prompt_len,
                start_time=start,
            )
        self._over = (time.perf_counter(), time.process_time())
        if self.level.concurrency is not None:
            self._freed.append(self._over[0])
        self.waited_s[request_func_input.request_id] = output.start_time - free_since
        return output

    def keep(
        self,
        name: str,
        output: Any,
        *,
        due_s: float | None = None,
        waited: bool = False,
        lateness_s: float | None = None,
        prompt: ComputedTokens | None = None,
        **facts: Any,
    ) -> None:
        """Store an ended request with vLLM's output. ``due_s``: since the start of the schedule; a request that
        ``waited`` for others has its lateness in ``lateness_s``. ``facts``: fields of its record.
        """
        tokens = output.output_tokens or 0
        if output.success and not tokens:  # of a server that does not report them, as vLLM's benchmark counts
            facts["usage"] = False
            tokens = len(self._tokenizer(output.generated_text, add_special_tokens=False).input_ids)
        place_free_s = self.waited_s.pop(name, None)
        if name in self.timed_out:
            self.timed_out.remove(name)
            facts["timed_out"] = True
        self.ended.add(
            EndedRequest(
                start_s=output.start_time,
                ttft_s=output.ttft,
                latency_s=output.latency,
                ok=output.success,
                input_tokens=output.prompt_len,
                output_tokens=tokens,
                itl_s=output.itl,
                error=output.error or "",
                due_s=due_s,
                by_schedule=due_s is not None and not waited,
                lateness_s=lateness_s if due_s is not None else place_free_s,
                facts=facts,
                timeline=self.timelines.pop(name, None),
                prompt=prompt,
            )
        )

    async def probe(self) -> None:
        """Measure the event loop's lag and report progress, until cancelled."""
        began = time.perf_counter()
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(LAG_PROBE_S)
            now = time.perf_counter()
            if self._began:
                self._lags.append(now - slept - LAG_PROBE_S)
            if now - began >= PROGRESS_EVERY_S:
                began = now
                counts = {"done": self.ended.count, "failed": self.ended.failed, "total": self.total}
                _send(self.answers, event="progress", name=self.level.name, **counts)

    @property
    def cpu_share(self) -> float | None:
        """CPU time over wall time from the first request's start to the last answer."""
        if not self._began or not self._over or self._over[0] <= self._began[0]:
            return None
        return round((self._over[1] - self._began[1]) / (self._over[0] - self._began[0]), 4)

    @property
    def loop_lag_s(self) -> float | None:
        """95th percentile (nearest rank) of the lag; None for a level too short for it."""
        return round(sorted(self._lags)[int(0.95 * (len(self._lags) - 1))], 6) if self._lags else None


def _own_lengths(level: ClientLevel) -> list[tuple[int, int]] | None:
    """Lengths of this process's requests, in order; None where all are the level's."""
    return None if level.lengths is None else [level.lengths[number] for number in level.own_requests]


def _request_func(level: ClientLevel) -> RequestFunc:
    from pdlab.bench.client.vllm_names import ASYNC_REQUEST_FUNCS

    if level.prefill_url and level.decode_url:
        ASYNC_REQUEST_FUNCS["pd-bare"] = partial(_pd_bare, level.prefill_url, level.decode_url)
    chat = level.replay is not None and level.replay.endpoint == "chat"
    func: RequestFunc = ASYNC_REQUEST_FUNCS["openai-chat" if chat else level.backend]
    return func


async def _pd_bare(prefill_url: str, decode_url: str, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
    """One request through two bare vLLM servers: prefill posts, then decode streams with the
    transfer parameters that prefill answered. Timing starts before the prefill post."""
    from pdlab.bench.client.vllm_names import RequestFuncOutput, async_request_openai_completions

    start = time.perf_counter()
    body = {
        "model": request_func_input.model_name or request_func_input.model,
        "prompt": request_func_input.prompt,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
        **(request_func_input.extra_body or {}),
    }
    headers = {"x-request-id": request_func_input.request_id}
    try:
        async with session.post(f"{prefill_url}/v1/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            transfer = (await response.json())["kv_transfer_params"]
    except Exception as error:  # as vLLM's own functions: whatever goes wrong is that request's failure
        failed = RequestFuncOutput(prompt_len=request_func_input.prompt_len, start_time=start)
        failed.error = f"prefill: {type(error).__name__}: {error}"
        return failed
    output = await async_request_openai_completions(
        replace(
            request_func_input,
            api_url=f"{decode_url}/v1/completions",
            extra_body={**(request_func_input.extra_body or {}), "kv_transfer_params": transfer},
        ),
        session,
        pbar,
    )
    prefill_s = output.start_time - start
    output.start_time = start
    if output.ttft:
        output.ttft += prefill_s
    if output.success:
        output.latency += prefill_s
    return output


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    from pdlab.bench.client.vllm_names import get_tokenizer

    try:
        return get_tokenizer(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"tokenizer {name!r} cannot be loaded ({reason}); give its folder or Hugging Face id with --tokenizer"
        ) from error


def _replay(level: ClientLevel, tokenizer: Any) -> SessionSender:
    """What this process replays of the level's compiled workload. Raises UsageError."""
    import numpy as np

    special = set(tokenizer.all_special_ids)
    tokens = _whole_tokens(
        tokenizer, np.array([token for token in range(tokenizer.vocab_size) if token not in special])
    )
    texts = tokenizer.batch_decode([[int(token)] for token in tokens])
    words = WordTexts(tokens.tolist(), texts, level.seed, partial(tokenizer.encode, add_special_tokens=False))
    return SessionSender(level, own_requests(level), words)


def _samples(level: ClientLevel, tokenizer: Any) -> list[Any]:
    """This process's requests: distinct prompts of exactly the requested tokens, in an open loop with the time at which
    each is due."""
    own, lengths = level.own_requests, _own_lengths(level)
    seed = level.seed if level.parts == 1 else (level.seed + 0x9E3779B9 * (level.part + 1)) % 2**32
    inputs = None if lengths is None else [tokens for tokens, _ in lengths]
    samples: list[Any] = _dataset(seed, level.prefix_tokens, level.prefix_seed, inputs).sample(
        tokenizer,
        len(own),
        request_id_prefix=f"{level.name}-{seed:08x}-",
        input_len=max(inputs) if inputs else level.input_tokens,
        output_len=level.output_tokens,
    )
    if lengths is not None:
        for sample, (_, output_tokens) in zip(samples, lengths, strict=True):
            sample.expected_output_len = output_tokens
    if level.scheduled:
        due = level.schedule_s()
        for sample, number in zip(samples, own, strict=True):
            sample.timestamp = due[number]
    return samples


def _dataset(seed: int, prefix_tokens: int, prefix_seed: int, inputs: list[int] | None) -> Any:
    """vLLM's random dataset with another way to draw a prompt, of ``inputs`` tokens each where that is given (to be
    called with the longest of them).

    vLLM takes consecutive token ids from a random start, so there are only as many prompts as
    the vocabulary has entries and they repeat within a sweep; and after decoding and encoding
    again some have a token too many. Here every token is drawn, and a prompt is drawn anew until
    it has exactly the requested length and has not been drawn before in the level.
    """
    import numpy as np

    from pdlab.bench.client.vllm_names import RandomDataset, gen_prompt_decode_to_target_len

    longest = max(inputs, default=0) if inputs is not None else 0

    class DistinctRandomDataset(RandomDataset):  # type: ignore[misc]
        drawn: set[str]
        prefix: Any
        words: Any = None
        texts: Any = None

        def generate_token_sequence(
            self, *, tokenizer: Any, input_len: int, allowed_tokens: Any, index: int, **_: Any
        ) -> tuple[str, int, int]:
            if inputs is not None:  # vLLM has left room for the tokenizer's special tokens in the longest one
                input_len -= longest - inputs[index]
                if input_len < 1:
                    raise UsageError(
                        f"a request of {counted(inputs[index], 'input token')} has none of its own beside the "
                        "tokenizer's special ones; give longer ones"
                    )
            if self.words is None:
                self.drawn = set()
                self.words = _whole_tokens(tokenizer, allowed_tokens)
                self.texts = _texts_in_a_row(tokenizer, self.words)
                self.prefix = np.random.default_rng(prefix_seed).integers(0, len(self.words), size=prefix_tokens)
            own = input_len - prefix_tokens
            for draw in range(MAX_DRAWS):
                row = np.concatenate([self.prefix, self._rng.integers(0, len(self.words), size=own)])
                if self.texts is not None:
                    prompt, tokens, mismatch = "".join(self.texts[row]), row, 0
                else:
                    ids = self.words[row].tolist()
                    prompt, tokens, mismatch = gen_prompt_decode_to_target_len(tokenizer, ids, input_len, rng=self._rng)
                few = len(self.words) ** min(own, 4) < 10 * (len(self.drawn) + 1)
                if mismatch == 0 and (prompt not in self.drawn or (few and draw == MAX_DRAWS - 1)):
                    self.drawn.add(prompt)
                    return prompt, len(tokens), 0
            raise UsageError(
                f"no prompt of exactly {counted(input_len, 'token')} was found in {MAX_DRAWS} draws; is the tokenizer "
                "the model's own?"
            )

    return DistinctRandomDataset(random_seed=seed)


def _whole_tokens(tokenizer: Any, allowed_tokens: Any) -> Any:
    """Tokens to draw from: whole words with their leading space that encode to themselves, so that
    a row of them nearly always comes back as it went in; in a vocabulary with few of those, every
    token that is text by itself (a piece of a UTF-8 character comes back as other tokens)."""
    texts = tokenizer.batch_decode([[int(token)] for token in allowed_tokens])
    words = [(i, text) for i, text in enumerate(texts) if text[:1] == " " and text[1:].isalpha()]
    if len(words) >= MIN_WORDS:
        back = tokenizer([text for _, text in words], add_special_tokens=False)["input_ids"]
        same = [i for (i, _), ids in zip(words, back, strict=True) if ids == [int(allowed_tokens[i])]]
        if len(same) >= MIN_WORDS:
            return allowed_tokens[same]
    whole = [bool(text) and "\ufffd" not in text for text in texts]
    return allowed_tokens[whole] if any(whole) else allowed_tokens


def _texts_in_a_row(tokenizer: Any, tokens: Any) -> Any:
    """Texts of tokens any row of which encodes to itself, so that the length of a prompt follows without encoding it;
    None where that is not so.

    Each is a word that is itself when it is encoded alone (`_whole_tokens`), and the tokenizer splits a text into words
    before it looks for tokens, so none of them reaches over two.
    """
    import numpy as np

    texts = np.array(tokenizer.batch_decode([[int(token)] for token in tokens]), dtype=object)
    splits = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    if splits is None or not all(text[:1] == " " and text[1:].isalpha() for text in texts):
        return None
    row = np.random.default_rng(0).permutation(len(tokens))
    text, ends = "".join(texts[row]), np.cumsum([len(text) for text in texts[row]]).tolist()
    alone = [end for _, (_, end) in splits.pre_tokenize_str(text)] == ends
    return texts if alone and tokenizer.encode(text, add_special_tokens=False) == tokens[row].tolist() else None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main())
