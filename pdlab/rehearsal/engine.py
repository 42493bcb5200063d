"""The engine class of a rehearsal, which Ray Serve LLM's servers run instead of vLLM's (RAYLLM_VLLM_ENGINE_CLS).

`pdlab.rehearsal.realtime` simulates the times of tokens. This module has the OpenAI protocol, the KV-transfer
parameters, and the notification from an engine that fetched KV to the engine that held it. The notification uses a
socket, as NIXL's do. Imports Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve

from pdlab.core.deployment import Collocated
from pdlab.core.rehearsal import SENT_HEADER
from pdlab.deploy.serving.events import DONE_EVENT, event
from pdlab.deploy.serving.sequences import GREEDY, join, split
from pdlab.deploy.serving.timeline import IDS_KEY, packed
from pdlab.rehearsal.clock import SlowClock
from pdlab.rehearsal.metrics import EngineMetrics
from pdlab.rehearsal.protocol import (
    BaseRenderer,
    ChatCompletionResponseChoice,
    CompletionResponseChoice,
    PromptTokenUsageInfo,
    UsageInfo,
)
from pdlab.rehearsal.ray_names import LLMEngine, openai
from pdlab.rehearsal.realtime import RealTime, SimulatedRequest, Source
from pdlab.rehearsal.shared_state import RehearsalFolder, SharedLinks
from pdlab.rehearsal.spec import read_spec
from pdlab.rehearsal.stand_ins import RENDERER
from pdlab.rehearsal.tokens import Vocabulary, answer, digest, likeliest
from pdlab.sim.ingress import Ingress
from pdlab.sim.kv_transfer import LinkKind, link_of, transfer_costs
from pdlab.sim.simulator import engine_of
from pdlab.sim.step_time import engine_cache
from pdlab.traffic.oracle import HitOracle, oracle_of
from pdlab.traffic.prompts import token_keys

FRESH_S = 10.0  # simulated seconds for which the published use of a front end is valid: its engine may have ended
NOTICE_TRIES, NOTICE_AGAIN_S = 200, 0.02
BODY = "rehearsal"
_log = logging.getLogger("ray.serve")


class SimulatedEngine(LLMEngine):  # type: ignore[misc]
    """One replica's engine: a DP rank, with its pipeline stages."""

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self.llm_config = llm_config
        self.spec = spec = read_spec()
        self._pool = spec.deployment.served_pools[spec.role]
        stages = [engine_of(spec.hardware, spec.shape, self._pool, prefills_only=False) for _ in range(self._pool.pp)]
        self.clock = SlowClock(spec.slow_down)
        self.core = RealTime(stages, self.clock, self._empty_cache, every_token=spec.rehearsal.chunk_per_token)
        self.core.scattered = False if spec.rehearsal.assume_merged else None
        self.core.changed = self._publish
        self._topology = spec.deployment.topology
        self._moves_kv = spec.deployment.transport is not None
        for stage in stages:
            stage.receives = self._moves_kv
        self._reports_cached = bool(self._pool.engine_kwargs.get("enable_prompt_tokens_details"))
        self._ingress = Ingress.of(spec.hardware, moves_kv=self._moves_kv)
        self._front = SimpleNamespace(frontend_free_s=0.0)
        self._folder = RehearsalFolder(Path(spec.folder))
        self._vocabulary = Vocabulary(Path(spec.tokenizer))
        self._renderer: Any = importlib.import_module(RENDERER).BaseRenderer()
        BaseRenderer.encode = self._vocabulary.encode
        self._links: dict[str, SharedLinks] = {}
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._socket: socket.socket | None = None
        # pdlab's servers read the size of the KV pool here (pdlab/deploy/serving/kv_pool.py).
        blocks = int(sum(stage.capacity for stage in stages) // spec.hardware.block_tokens)
        cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=spec.hardware.block_tokens)
        self._engine_client = SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=cache),
            # pdlab's servers report here that nobody will read prefill's KV (pdlab/deploy/serving/prefill_call.py).
            notify_kv_transfer_request_rejected=self._rejected,
        )

    def _empty_cache(self) -> HitOracle:
        """An empty prefix cache, as in the simulator (`pdlab.sim.simulator`) and in the manifest."""
        spec = self.spec
        return oracle_of(engine_cache(spec.deployment, self._pool, spec.hardware, spec.shape))

    async def start(self) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        self.name = replica
        self.node = ray.get_runtime_context().get_node_id()
        self.metrics = EngineMetrics(replica)
        self.llm_config.setup_engine_backend()  # Ray's own: the side channel's port, the engine's id
        self._streams = self._folder.numbers(f"streaming-{self.spec.role}-{replica}")
        if self.spec.role in ("prefill", "fluid"):
            self._end = self._folder.end(f"end-{replica}")
            self._listen()

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def resolve_lora(self, lora_model: Any) -> None:
        raise NotImplementedError("a rehearsal has no LoRA adapters")

    async def reset_prefix_cache(self) -> None:
        self.core.forget_prompts()

    async def check_health(self) -> None:
        return None

    def generated_tokens(self) -> int:
        """Number of tokens decoded so far, for `pdlab.deploy.serving.fluid`: answers have only three chunks."""
        now_s, total = self.clock.now_s(), 0
        for engine in self.core.engines:
            total += engine.generated
            if engine.busy:
                total += min(int((now_s - engine.began_s) / engine.step_s), engine.steps) * len(engine.running)
        return total

    async def shutdown(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            Path(self._address).unlink(missing_ok=True)

    # --- OpenAI -------------------------------------------------------------------------------

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        parts = [request] if self._is_part(request) else split(request, request.request_id)
        if len(parts) == 1:
            async for item in self._one(parts[0], raw_request_info, chat=False):
                yield item
            return
        if request.temperature is not None and request.temperature < GREEDY and (request.n or 1) > 1:
            yield _error(400, f"n={request.n} must be 1 with greedy sampling")
            return
        streams = [self._one(part, raw_request_info, chat=False) for part in parts]
        async for item in join(streams, request.n or 1, _is_error, request.request_id):
            yield item

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        async for item in self._one(request, raw_request_info, chat=True):
            yield item

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield _error(400, "a rehearsal has no embeddings")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield _error(400, "a rehearsal has no transcriptions")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield _error(400, "a rehearsal has no scores")

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        ids = await self._token_ids(_prompt_of(request, chat=hasattr(request, "messages")))
        yield openai.TokenizeResponse(count=len(ids), max_model_len=self.spec.max_model_len, tokens=ids)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield openai.DetokenizeResponse(prompt=self._vocabulary.decode(request.tokens))

    async def build_asgi_app(self) -> Any:
        """The HTTP server of this engine."""
        from pdlab.rehearsal.http import build_app

        return build_app(self)

    # --- one sequence -------------------------------------------------------------------------

    def _is_part(self, request: Any) -> bool:
        return bool(request.kv_transfer_params)

    async def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            ids: list[int] = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
            return ids
        rendered = await self._renderer.tokenize_prompts_async([{"prompt": prompt}], None)
        token_ids: list[int] = rendered[0]["prompt_token_ids"]
        return token_ids

    async def _one(self, request: Any, raw: Any, *, chat: bool) -> AsyncIterator[Any]:
        sent_s, stamped = self._sent(raw)
        ids = await self._token_ids(_prompt_of(request, chat=chat))
        requested_tokens = request.max_tokens if not chat else request.max_completion_tokens or request.max_tokens
        room = self.spec.max_model_len - len(ids)
        output_tokens = min(requested_tokens if requested_tokens is not None else room, max(room, 0))
        if not ids or room < 1 or (requested_tokens or 0) > room:
            yield _error(
                400,
                f"This model's maximum context length is {self.spec.max_model_len} tokens. However, you requested "
                f"{requested_tokens or 0} output tokens and your prompt contains {len(ids)} input tokens",
            )
            return
        params = request.kv_transfer_params or {}
        shared = params.get(BODY) or {}
        moves_on, fetches = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
        # Decode's answer depends on the KV that it got, so that the KV of another prompt gives a wrong answer.
        prompt_digest = shared["digest"] if fetches else digest(ids)
        tokens = [] if moves_on else answer(prompt_digest, max(output_tokens, 1), self._vocabulary.size)
        made: asyncio.Queue[tuple[float, int]] = asyncio.Queue()
        served = SimulatedRequest(
            input_tokens=len(ids),
            output_tokens=1 if moves_on else max(output_tokens, 1),
            blocks=token_keys([*ids, *tokens], self.core.block_tokens),
            on_tokens=lambda moment_s, tokens: made.put_nowait((moment_s, tokens)),
            moves_on=moves_on,
        )
        if fetches:
            if not self._is_there(shared["socket"]):
                self.metrics.count("vllm_nixl_num_failed_transfers")
                yield _error(500, f"KV load failed: {shared['engine']} does not answer")
                return
            served.source = self._source(shared)
            moment_s = shared["prefilled_s"]
        else:
            moment_s = self._ingress.pass_on(self._front, len(ids), self._streaming(), sent_s)
        times: list[Any] = []
        on_tokens = served.on_tokens

        def report_and_time(moment_s: float, tokens: int) -> None:
            if moves_on or tokens == served.output_tokens:
                times.append(self.core.times(number[0]))
            on_tokens(moment_s, tokens)

        served.on_tokens = report_and_time
        number = [0]
        number[0] = self.core.submit(served, moment_s)
        complete = False
        try:
            if moves_on:
                prefilled_s, _ = await made.get()
                self._lease(number[0])
                complete = True
                self.metrics.ended(times[0], len(ids), 1, fetched=False)
                reply = _Answer(self, request, ids, answer(prompt_digest, 1, self._vocabulary.size), chat=chat)
                reply.cached_tokens = self._cached_tokens(times[0])
                yield self._prefill_answer(request, reply, number[0], prefilled_s, prompt_digest)
                return
            reply = _Answer(self, request, ids, tokens, chat=chat)
            sent = 0
            while sent < served.output_tokens:
                _, upto = await made.get()
                if request.stream:
                    yield reply.chunk(sent, upto)
                sent = upto
            complete = True
            self._ended(times[0], len(ids), served, fetches, sent_s if stamped else None)
            reply.cached_tokens = self._cached_tokens(times[0])
            if not request.stream:
                yield reply.whole()
                return
            if (usage := reply.usage_chunk()) is not None:
                yield usage
            yield DONE_EVENT
        finally:
            if not complete:
                self.core.abort(number[0])

    def _sent(self, raw: Any) -> tuple[float, bool]:
        """(moment when the client sent the request, True); (now, False) without the client's header."""
        text = (getattr(raw, "headers", None) or {}).get(SENT_HEADER)
        if text is not None:
            with contextlib.suppress(ValueError):
                return min(self.clock.from_wall(float(text)), self.clock.now_s()), True
        return self.clock.now_s(), False

    def _ended(
        self, times: Any, input_tokens: int, served: SimulatedRequest, fetched: bool, sent_s: float | None
    ) -> None:
        self.metrics.ended(times, input_tokens, served.output_tokens, fetched=fetched)
        if fetched:
            self.metrics.observe("vllm_nixl_xfer_time_seconds", served_transfer_s(times))
            self.metrics.observe("vllm_nixl_bytes_transferred", served_bytes(served, times))
        if sent_s is not None:
            self.metrics.count("pdlab_rehearsal_requests")
            self.metrics.count("pdlab_rehearsal_ttft_seconds", times.first_token_s - sent_s)
            self.metrics.count("pdlab_rehearsal_decode_seconds", times.finish_s - times.first_token_s)

    def _cached_tokens(self, times: Any) -> int | None:
        """Cached prompt tokens for the usage; None unless the engine's arguments enable them, as in vLLM."""
        return round(times.hit_tokens) if self._reports_cached else None

    def _publish(self) -> None:
        """Publish the use of the front end and the metrics, after every event."""
        streaming = sum(self._ingress.streaming(engine) for engine in self.core.engines)
        self._streams.write(streaming, self.clock.now_s())
        self.metrics.total("vllm_num_preemptions", sum(engine.preemptions for engine in self.core.engines))
        self.metrics.total("pdlab_rehearsal_late_seconds", self.core.late_s)
        engines = self.core.engines
        self.metrics.kv_use(sum(each.held_tokens for each in engines) / sum(each.capacity for each in engines))

    def _streaming(self) -> float:
        """Share of its time for which the front end of a random engine streams answers to clients."""
        role = "decode" if self.spec.role == "prefill" else self.spec.role
        names = self._folder.names(f"streaming-{role}-")
        if not names:
            return 0.0
        share, published_s = self._folder.numbers(random.choice(names)).read()
        return share if self.clock.now_s() - published_s < FRESH_S else 0.0

    # --- KV transfer --------------------------------------------------------------------------

    def _prefill_answer(self, request: Any, reply: _Answer, number: int, prefilled_s: float, prompt_digest: str) -> Any:
        engine = self.core.engines[0]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.llm_config.engine_kwargs["kv_transfer_config"].get("engine_id"),
            "remote_host": os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST"),
            "remote_port": os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT"),
            "remote_block_ids": [],
            "tp_size": self._pool.tp,
            BODY: {
                "engine": self.name,
                "node": self.node,
                "socket": self._address,
                "number": number,
                "digest": prompt_digest,
                "prefilled_s": prefilled_s,
                "capacity": engine.capacity,
                "allocated": engine.allocated,
            },
        }
        if (request.kv_transfer_params or {}).get(IDS_KEY):  # a real engine's server adds them itself
            params[IDS_KEY] = (packed(reply.ids), packed(reply.tokens))
        return reply.whole(kv_transfer_params=params)

    def _source(self, shared: dict[str, Any]) -> Source:
        sender = self._folder.end(f"end-{shared['engine']}", shared["capacity"], shared["allocated"])
        number, address = shared["number"], shared["socket"]

        def release(moment_s: float) -> None:
            self._notify(address, {"number": number, "moment_s": moment_s})

        return Source(self._links_from(shared["node"]), sender, release)

    async def _rejected(self, name: str, kv_parameters: dict[str, Any]) -> None:
        shared = kv_parameters[BODY]
        self._notify(shared["socket"], {"number": shared["number"], "moment_s": self.clock.now_s()})

    def _links_from(self, node: str) -> SharedLinks:
        """The links from that node to this one, by the real placement of both engines."""
        if node not in self._links:
            assert not isinstance(self._topology, Collocated)
            planned = link_of(self.spec.deployment)
            kind: LinkKind = "tcp" if planned == "tcp" else "nvlink" if node == self.node else "srd"
            costs = transfer_costs(self.spec.hardware, self.spec.shape, self._topology, kind)
            self._links[node] = SharedLinks(costs, self._folder, (node, self.node))
        return self._links[node]

    def _listen(self) -> None:
        self._address = str(self._folder.path / f"kv-{self.name}")
        Path(self._address).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._address)
        asyncio.get_running_loop().add_reader(self._socket, self._received)

    def _received(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                message = json.loads(self._socket.recv(4096))
                if "number" in message:
                    lease = self._leases.pop(message["number"], None)
                    if lease is not None:
                        lease.cancel()
                        self.core.release_prefilled(message["number"], message["moment_s"])

    def _send(self, address: str, message: dict[str, Any]) -> bool:
        """Send a message; returns whether an engine is at that address. Raises BlockingIOError if its queue is full."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(json.dumps(message).encode(), address)
            except BlockingIOError:
                raise
            except OSError:
                return False
        return True

    def _notify(self, address: str, message: dict[str, Any], tries: int = NOTICE_TRIES) -> None:
        """Send a message to the engine at that address, if it still exists.

        Linux queues ten messages for a socket, so some messages of a burst are sent again.
        """
        try:
            self._send(address, message)
        except BlockingIOError:
            if tries:
                loop = asyncio.get_running_loop()
                loop.call_later(NOTICE_AGAIN_S, self._notify, address, message, tries - 1)
            else:
                _log.warning("the engine at %s reads no messages: its KV waits for its lease to end", address)

    def _is_there(self, address: str) -> bool:
        try:
            return self._send(address, {"alive": True})
        except BlockingIOError:  # its queue is full
            return True

    def _lease(self, number: int) -> None:
        def expire() -> None:
            del self._leases[number]
            self.metrics.count("vllm_nixl_num_kv_expired_reqs")
            self.core.release_prefilled(number, self.clock.now_s())

        wait_s = self.spec.lease_s * self.spec.slow_down
        self._leases[number] = asyncio.get_running_loop().call_later(wait_s, expire)


class _Answer:
    """The OpenAI answer to one sequence. ``cached_tokens``: of its prompt; None: not in the usage."""

    def __init__(self, engine: SimulatedEngine, request: Any, ids: Sequence[int], tokens: list[int], *, chat: bool):
        self._vocabulary = engine._vocabulary
        self._request, self.ids, self.tokens, self._chat = request, ids, tokens, chat
        self.cached_tokens: int | None = None
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request.request_id}"
        self._model = engine.llm_config.model_id
        self._created = int(time.time())

    @property
    def _usage(self) -> UsageInfo:
        prompt, completion = len(self.ids), len(self.tokens)
        reported = self.cached_tokens is not None
        return UsageInfo(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=self.cached_tokens) if reported else None,
        )

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if self._request.logprobs is None or self._chat:
            return None
        tops = [likeliest(token, self._vocabulary.size) for token in tokens]
        by_id = bool(self._request.return_tokens_as_token_ids)

        def name(token: int) -> str:
            return f"token_id:{token}" if by_id else self._vocabulary.decode([token])

        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [top[token] for token, top in zip(tokens, tops, strict=True)],
            "top_logprobs": [{name(token): value for token, value in top.items()} for top in tops],
            "text_offset": [0] * len(tokens),
        }

    def whole(self, kv_transfer_params: dict[str, Any] | None = None) -> Any:
        with_ids = bool(self._request.return_token_ids)
        text = self._vocabulary.decode(self.tokens)
        more: dict[str, Any] = {"id": self._id, "model": self._model, "usage": self._usage, "created": self._created}
        more["kv_transfer_params"] = kv_transfer_params
        common: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if with_ids:
            common["token_ids"] = list(self.tokens)
        if self._chat:
            message = {"role": "assistant", "content": text}
            if with_ids:
                more["prompt_token_ids"] = list(self.ids)
            chat_choice = ChatCompletionResponseChoice(message=message, **common)
            return openai.ChatCompletionResponse(choices=[chat_choice], **more)
        if with_ids:
            common["prompt_token_ids"] = list(self.ids)
        choice = CompletionResponseChoice(text=text, logprobs=self._logprobs(self.tokens), **common)
        return openai.CompletionResponse(choices=[choice], **more)

    def chunk(self, sent: int, upto: int) -> str:
        tokens = self.tokens[sent:upto]
        text = self._vocabulary.decode(tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if upto == len(self.tokens) else None}
        more: dict[str, Any] = {}
        if self._chat:
            choice["delta"] = {"role": "assistant", "content": text} if sent == 0 else {"content": text}
        else:
            choice |= {"text": text, "logprobs": self._logprobs(tokens)}
        if self._request.return_token_ids:
            choice["token_ids"] = tokens
            if sent == 0:  # for chat vLLM has them outside the choices
                (more if self._chat else choice)["prompt_token_ids"] = list(self.ids)
        return self._event([choice], **more)

    def usage_chunk(self) -> str | None:
        options = self._request.stream_options
        include = options.get("include_usage") if isinstance(options, dict) else getattr(options, "include_usage", None)
        return self._event([], usage=self._usage.model_dump()) if include else None

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        return event(body | more)


def served_transfer_s(times: Any) -> float:
    """Simulated seconds from the request's arrival at decode until the arrival of its KV."""
    return max(0.0, float(times.kv_arrived_s - times.queued_s)) if times.queued_s else 0.0


def served_bytes(served: SimulatedRequest, times: Any) -> float:
    """Bytes of KV that the request's transfer moved."""
    assert served.source is not None
    return float((served.input_tokens - times.hit_tokens) * served.source.links.costs.bytes_per_token)


def _prompt_of(request: Any, *, chat: bool) -> Any:
    if not chat:
        return request.prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in request.messages)


def _error(code: int, message: str) -> Any:
    kind = "BadRequestError" if code == 400 else "InternalServerError"
    return openai.ErrorResponse(error=openai.ErrorInfo(message=message, type=kind, code=code))


def _is_error(item: Any) -> bool:
    return isinstance(item, openai.ErrorResponse)
