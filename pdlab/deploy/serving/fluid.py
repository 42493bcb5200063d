"""An engine that prefills for other engines or decodes for clients, by its role. A field of each request states which
of the two it is.

Runs in Ray Serve's replicas, sent there by value: imports the standard library, `pdlab.roles` by way of the board, and
Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from pdlab.deploy.serving.elastic import WARM_S
from pdlab.deploy.serving.engine_traffic import EngineAnswer, TrafficCounts, prompt_chunks, prompt_tokens
from pdlab.deploy.serving.prefill_call import Route, count
from pdlab.deploy.serving.ray_names import MODELS, PD
from pdlab.deploy.serving.role_board import REPORT_S, board, pace
from pdlab.roles.messages import EngineOrders, EngineReport
from pdlab.roles.prefixes import Prefixes, to_compute
from pdlab.roles.spec import FluidSpec

BOARD_ANSWER_S = 5.0
# Longer than that a prompt does not wait to know who has its beginning.
HELD_S = 0.25
WARM_PROMPT, WARM_TOKENS = tuple(range(1, 65)), 2
# An idle engine reports only every so many turns.
ALIVE_EVERY = 4


class SwitchesRoles:
    """Mixed into a server that orchestrates prefill and decode, in front of all other classes. Its prefill deployment
    is its own deployment, and it prefills for other engines.

    ``board_name`` and ``board_spec``: of `pdlab.deploy.serving.role_board.board`.
    """

    board_name: str
    board_spec: FluidSpec
    _own: Any = None
    _reporting: Any = None
    _generated = 0
    _local_below = 0
    _board: Any = None
    _name = ""
    kv_pool_tokens: int | None = None
    caches_prefixes = True
    keeps_ends_alone = False

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._flow = TrafficCounts()
        # By the id of the request's object, which lives as long.
        self._answers: dict[int, EngineAnswer] = {}
        self._prefill_by: dict[int, str] = {}
        self._warmed: dict[str, str] = {}
        self._warming: set[asyncio.Task[None]] = set()
        self._affinity = self.board_spec.prefix_affinity
        self._kept = Prefixes()
        await super().__init__(*args, **kwargs)  # type: ignore[misc]
        pd: Any = importlib.import_module(PD)
        wanted = self._llm_config.experimental_configs.get("pd_tokenize_once")  # type: ignore[attr-defined]
        self._pd_tokenize_once = bool(wanted) and pd._install_tokenize_once()
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def __del__(self) -> None:
        for task in (self._reporting, *self._warming):
            if task is not None:
                task.cancel()
        await super().__del__()  # type: ignore[misc]

    @property
    def _prefill_handle(self) -> Any:
        if self._own is None:
            serve: Any = importlib.import_module("ray.serve")
            context = serve.get_replica_context()
            self._own = serve.get_deployment_handle(context.deployment, context.app_name).options(stream=True)
        return self._own

    # --- prefill for others --------------------------------------------------------------------

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._either("completions", request, raw_request_info)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._either("chat", request, raw_request_info)

    async def _either(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        # A client's request has no such field: `pdlab.deploy.serving.guard` refuses it.
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            return self._prefill(method, request, raw)
        decoded: AsyncIterator[Any] = await getattr(super(), method)(request, raw)
        return decoded

    async def _prefill(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        tokens, computed = self._to_compute(request)
        answered = False
        self._flow.prefill_began(tokens)
        self._publish_waiting()
        try:
            async for item in await self._engine_alone(method, request, raw):
                answered = getattr(item, "kv_transfer_params", None) is not None
                yield item
        finally:
            if answered:
                count("answered")
            self._flow.prefill_ended(tokens, answered=answered, computed=computed)
            self._publish_waiting()

    def _publish_waiting(self) -> None:
        """For engines that request the holder of a prompt's beginning from the board (`_held`): prompts come
        and go in less time than passes between two reports."""
        self._advise("waits", self._flow.waiting_prompt_tokens)

    def _advise(self, method: str, *advice: Any) -> None:
        """To the board, for routes by prefixes."""
        if self._affinity and self._board is not None:
            with contextlib.suppress(Exception):  # no request may fail for it
                getattr(self._board, method).remote(self._name, *advice)

    def _to_compute(self, request: Any) -> tuple[int, int]:
        """Tokens of the request's prompt that it is sent here for, and those that this engine is to compute; from now
        on it has all of it. Whoever sends prompts without knowing of caches sends whole ones."""
        tokens = prompt_tokens(request)
        if not self._knows:
            return tokens, tokens
        chunks = prompt_chunks(request)
        computed = to_compute(tokens, self._kept.tokens("", chunks))
        self._keeps(chunks, pulled=False)
        return computed if self._affinity else tokens, computed

    @property
    def _knows(self) -> bool:
        """Whether this engine has a prefix cache that others may read about."""
        return (self._affinity or self.board_spec.prefill_locally_below is not None) and self.caches_prefixes

    def _keeps(self, chunks: list[int], *, pulled: bool) -> None:
        """From now on this engine has a prompt with these chunks in its cache."""
        sparse = self.keeps_ends_alone
        self._kept.keep("", chunks, self.kv_pool_tokens, pulled=pulled, sparse=sparse)
        if chunks:
            self._advise("keeps", chunks, self.kv_pool_tokens, pulled, sparse)

    async def _engine_alone(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        pd: Any = importlib.import_module(PD)
        stream: AsyncIterator[Any] = await getattr(super(pd.PDOrchestratorMixin, self), method)(request, raw)
        return stream

    # --- decode for clients --------------------------------------------------------------------

    def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return self._counted(request, super()._pd_handle_request(request, raw_request_info))  # type: ignore[misc]

    async def _answer_whole(self, method: str, request: Any, raw: Any) -> AsyncIterator[Any]:
        """Of a request that no other engine prefills (`pdlab.deploy.serving.sequences.for_one_engine`)."""
        stream = await super()._answer_whole(method, request, raw)  # type: ignore[misc]
        return self._counted(request, stream, alone=True)

    async def _counted(self, request: Any, stream: AsyncIterator[Any], *, alone: bool = False) -> AsyncIterator[Any]:
        """The answer, counted for the controller. ``alone``: this engine computes the prompt and needs no other."""
        answer = self._answers[id(request)] = self._flow.arrived(prompt_tokens(request))
        whole = False
        try:
            if self._knows:
                answer.chunks = prompt_chunks(request)
                answer.cached_tokens = min(self._kept.tokens("", answer.chunks), answer.prompt_tokens)
            if alone:
                self._flow.stays(answer)
                self._flow.prefilled(answer, moves=False)
            async for item in stream:
                if answer.chunks and answer.first_s is None and answer.prefilled_s is not None:
                    self._keeps(answer.chunks, pulled=answer.requested_tokens > 0)
                self._flow.sent(answer, item)
                yield item
            whole = True
        finally:
            del self._answers[id(request)]
            self._flow.ended(answer, whole=whole)
            if hasattr(stream, "aclose"):
                with contextlib.suppress(Exception):
                    await stream.aclose()

    async def _prefilled(self, pd: Any, backend: Any, method: str, request: Any, raw: Any) -> Any:
        answer = self._answers[id(request)]
        if answer.prompt_tokens - answer.cached_tokens < self._local_below and id(request) not in self._prefill_by:
            count("short")
            self._flow.stays(answer)
            prefilled = None
        else:
            prefilled = await super()._prefilled(pd, backend, method, request, raw)  # type: ignore[misc]
        if prefilled is None and (engine := self._prefill_by.get(id(request))):
            raise RuntimeError(f"{engine} did not prefill the prompt for this engine")
        if not isinstance(prefilled, pd.ErrorResponse):
            self._flow.prefilled(answer, moves=prefilled is not None)
        return prefilled

    async def _call(self, pd: Any, backend: Any, method: str, request: Any, raw: Any, route: Route) -> Any:
        answer = self._answers[id(request)]
        route.tokens, route.only = answer.prompt_tokens, self._prefill_by.get(id(request))
        held = await self._held(answer.chunks) if route.only is None else {}
        route.cached = {engine: cached for engine, (cached, _) in held.items() if cached}
        route.waiting = {engine: waiting for engine, (_, waiting) in held.items()}
        work = {engine: to_compute(route.tokens, cached) for engine, cached in route.cached.items()}
        self._flow.prompted(answer, min(work.values(), default=route.tokens))
        prefilled = await super()._call(pd, backend, method, request, raw, route)  # type: ignore[misc]
        if route.replica in work:
            count("cached")
        self._flow.prompted(answer, work.get(route.replica or "", route.tokens))
        return prefilled

    async def _held(self, chunks: list[int]) -> dict[str, tuple[int, int]]:
        """How many tokens of a prompt with these chunks each other engine has that prefills, and how many tokens of
        prompts wait there, as the board knows; empty where the board does not answer in time."""
        if not self._affinity or self._board is None or not chunks:
            return {}
        try:
            query = self._board.held.remote(self._name, chunks)
            held: dict[str, tuple[int, int]] = await asyncio.wait_for(query, HELD_S)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logging.getLogger("ray.serve").debug("who has the beginning of a prompt is not known: %r", error)
            return {}
        return held

    # --- what the launcher calls ----------------------------------------------------------------

    async def alone(self, request: Any) -> Any:
        """One whole completion by this engine, without a KV transfer."""
        async for answer in await self._engine_alone("completions", request, None):
            return answer
        return None

    async def answers_from(self, pairs: dict[str, list[str]], request: Any) -> tuple[str, dict[str, Any]]:
        """This engine, and the completion that it decodes after each of the engines that ``pairs`` has for it (unique
        ids of replicas, this one left out) has prefilled. Every prompt is computed again: none finds blocks of another
        or of an earlier call in a prefix cache. Raises RuntimeError if an engine did not prefill.
        """
        serve: Any = importlib.import_module("ray.serve")
        own = serve.get_replica_context().replica_id.unique_id
        answers = {}
        for engine in pairs.get(own, ()):
            if engine == own:
                continue
            pair = f"{engine}-{own}-{uuid.uuid4().hex[:8]}"
            salted = request.model_copy(update={"cache_salt": pair, "request_id": f"pair-{pair}"}, deep=True)
            self._prefill_by[id(salted)] = engine
            try:
                async for answer in self._pd_handle_request(salted):
                    answers[engine] = answer
            finally:
                del self._prefill_by[id(salted)]
        return own, answers

    # --- the board -----------------------------------------------------------------------------

    def _warm(self, own: str, engine: str) -> None:
        """Take a first transfer of a tiny prompt from that engine, and report the result to the board."""

        async def warm() -> None:
            models: Any = importlib.import_module(MODELS)
            request = models.CompletionRequest(
                model=self._llm_config.model_id,  # type: ignore[attr-defined]
                prompt=list(WARM_PROMPT), max_tokens=WARM_TOKENS, temperature=0.0, ignore_eos=True,
            )  # fmt: skip
            try:
                _, answers = await asyncio.wait_for(self.answers_from({own: [engine]}, request), WARM_S)
                answered = hasattr(answers.get(engine), "choices")
                self._warmed[engine] = "" if answered else f"it answers {answers.get(engine)!r}"
            except Exception as error:
                self._warmed[engine] = repr(error)

        task = asyncio.get_running_loop().create_task(warm())
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    def _flow_report(self) -> EngineReport:
        counts = self._flow.take()
        generated = getattr(self.engine, "generated_tokens", None)  # type: ignore[attr-defined]
        if generated is not None:  # of an engine whose answers come in few pieces
            total = generated()
            counts.generated_tokens = max(total - self._generated, 0)
            self._generated = max(total, self._generated)
        return counts

    async def _report(self) -> None:
        ray: Any = importlib.import_module("ray")
        serve: Any = importlib.import_module("ray.serve")
        context = serve.get_replica_context()
        name = self._name = context.replica_id.unique_id
        spec = replace(self.board_spec, app=context.app_name, deployment=context.deployment)
        node = ray.get_runtime_context().get_node_id()
        pause_s = REPORT_S * pace(spec.slow_down)
        idle = -1  # so that an idle engine reports at once when it begins
        while True:
            idle = idle + 1 if self._flow.idle else 0
            if idle % ALIVE_EVERY and not self._warmed:
                await asyncio.sleep(pause_s)
                continue
            try:
                if self._board is None:
                    self._board = await asyncio.to_thread(board, self.board_name, spec)
                counts = replace(self._flow_report(), warmed=dict(self._warmed))
                answer = await asyncio.wait_for(self._board.report.remote(name, node, counts.fields), BOARD_ANSWER_S)
                self._warmed = {engine: how for engine, how in self._warmed.items() if engine not in counts.warmed}
                orders = EngineOrders(**answer)
                self._local_below = orders.local_below
                for engine in orders.warm:
                    self._warm(name, engine)
            except Exception as error:
                if self._board is not None:
                    logging.getLogger("ray.serve").warning("the board of the roles does not answer: %r", error)
                self._board = None
            await asyncio.sleep(pause_s)
