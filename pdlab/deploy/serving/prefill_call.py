"""Decode's call of prefill. The call has a time limit, is repeated once on another replica, and if prefill fails,
decode computes the prompt.

Ray's own orchestration waits for prefill without a limit and passes on whatever it raises. If a client leaves between
prefill's answer and decode's admission, Ray does not free the KV blocks that prefill holds for decode: they would stay
until their lease ends. Runs in Ray Serve's decode replicas, sent there by value: imports the standard library and its
neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pdlab.deploy.serving.early_token import (
    DropsSentText,
    EarlyToken,
    SentTextMismatch,
    counted,
    early_token,
    first_token,
    going_on,
)
from pdlab.deploy.serving.ray_names import MODELS, PD
from pdlab.deploy.serving.timeline import IDS_KEY, TIMES_KEY, current, unpacked
from pdlab.deploy.serving.usage import cached_in_prefill
from pdlab.marks.engine_marks import FIRST_TOKEN

# The keyword by which a call's route reaches its router.
ROUTE = "pdlab_route"
# Counters in Ray's metrics, per decode replica; `calls` is counted for every request, so that beside it the absence
# of another one is a true zero.
COUNTERS = {
    "calls": "Requests that called a prefill replica.",
    "timeouts": "Calls of prefill that got no answer in time.",
    "retries": "Requests that called a second prefill replica, because the first one failed.",
    "local": "Requests whose prompt decode computed itself, because prefill failed.",
    "failures": "Requests that got HTTP 503, because prefill failed.",
    "short": "Requests whose prompt decode computed itself, because it was short.",
    "answered": "Prompts that a fluid engine prefilled for another.",
    "cached": "Requests whose prompt went to an engine that has its beginning.",
    "early": "Requests whose first token was prefill's, sent before its KV cache had moved.",
    "early_again": "Early tokens after which decode got a new request, because it had chosen another first token.",
    "released": "Prefills whose client left before decode began: prefill got a message to free their KV blocks.",
}
_SERVER_ERRORS = 500
_Reused = TypeVar("_Reused")


@dataclass(frozen=True)
class PrefillRules:
    """``timeout_s``: how long prefill may take to answer. ``absent_s``: how long a call may wait for a prefill
    replica that takes it; Ray waits for one without a limit. ``on_failure``: what is tried after a failed or late
    call, in this order: ``retry`` (once, on another prefill replica), ``local`` (decode computes the prompt),
    ``fail``. After the last step the request fails with HTTP 503. If the answer stays the same
    (`pdlab.deploy.serving.early_token`), prefill's first token goes to the client at once (``early_token``), and to
    decode's engine (``reuse_first_token``).
    """

    timeout_s: float
    absent_s: float
    on_failure: Sequence[str]
    early_token: bool
    reuse_first_token: bool


class Route:
    """Which replicas (by their unique ids) a call must avoid, and which one it went to. Stays in decode's process,
    where the router of the call takes it out of what is sent to the replica (`of`).

    For `pdlab.deploy.serving.fluid_router`: ``tokens``: tokens of the prompt; ``cached``: replica -> how many of them
    it has cached; ``waiting``: replica -> prompt tokens that wait there now (missing: unknown); ``only``: the one
    replica that may prefill."""

    def __init__(self, avoid: frozenset[str] = frozenset()) -> None:
        self.avoid = avoid
        self.tokens = 0
        self.cached: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.only: str | None = None
        self.replica: str | None = None
        self.no_other = False

    @staticmethod
    def of(pending_request: Any) -> Any:
        """The route of a call that a router of Ray places; None: the call has none. After a replica has refused, Ray
        calls again with the same object."""
        route = pending_request.kwargs.pop(ROUTE, None) or getattr(pending_request, ROUTE, None)
        setattr(pending_request, ROUTE, route)
        if route is not None:
            route.replica = None  # of a choice before: that replica had died, or refused
        return route

    def refuse(self) -> NoReturn:
        """Raises LookupError, because there is no other replica, and keeps that for the caller."""
        self.no_other = True
        raise LookupError("there is no other replica")


class PrefillFailed(Exception):
    """A call of prefill gave no answer; the message has the reason."""


class NoReplica(PrefillFailed):
    """No prefill replica took the call."""


class CallsPrefill:
    """Mixed into Ray's decode server; replaces its own call of prefill."""

    prefill_rules: PrefillRules
    _pd_tokenize_once: bool  # Ray's

    async def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        pd: Any = importlib.import_module(PD)
        backend: Any = self._get_connector_backend()  # type: ignore[attr-defined]
        if backend.requires_peer_binding or backend.concurrent_handoff:
            async for item in super()._pd_handle_request(request, raw_request_info):  # type: ignore[misc]
                yield item
            return
        method = "chat" if isinstance(request, pd.ChatCompletionRequest) else "completions"
        timing = current()
        if timing is not None:
            timing.orchestrated = True
        answer = await self._prefilled(pd, backend, method, request, raw_request_info)
        if isinstance(answer, pd.ErrorResponse):
            yield answer
            return
        kv_parameters = getattr(answer, "kv_transfer_params", None)
        times = kv_parameters.pop(TIMES_KEY, None) if kv_parameters else None
        packed_ids = kv_parameters.pop(IDS_KEY, None) if kv_parameters else None
        prompt_ids, first_ids = map(unpacked, packed_ids or (b"", b""))
        if timing is not None and answer is not None:
            timing.answered(times)
        began = False
        stream: Any = None
        early: EarlyToken | None = None
        reused: int | None = None
        if answer is not None:
            of_answer = (request, answer, prompt_ids, first_ids)
            if self.prefill_rules.early_token and method == "completions":
                early = self._where_exact(early_token, *of_answer)
            if self.prefill_rules.reuse_first_token:
                reused = self._where_exact(first_token, *of_answer)
        try:
            decode_request = request
            if answer is not None:
                decode_request = backend.prepare_decode_request(request=request, peer=None, prefill_response=answer)
                if reused is not None and decode_request.kv_transfer_params:
                    decode_request.kv_transfer_params[FIRST_TOKEN] = reused
            with pd._reuse_prompt_token_ids(prompt_ids):
                stream = await getattr(super(pd.PDOrchestratorMixin, self), method)(decode_request, raw_request_info)
                # From here on vLLM itself notifies prefill of a request that ends early; behind an early token later.
                began = early is None
                if early is not None:
                    begun: Any = super(pd.PDOrchestratorMixin, self)
                    anew = going_on(decode_request, early)
                    stream = self._after_early(early, stream, lambda: begun.completions(anew, raw_request_info))
                async for item in stream:
                    yield item if answer is None else cached_in_prefill(item, answer)
                    began = True
        finally:
            if not began and kv_parameters:
                _in_background(self._release(kv_parameters))
            if hasattr(stream, "aclose"):
                with contextlib.suppress(Exception):
                    await stream.aclose()

    def _where_exact(
        self, reused: Callable[..., _Reused], request: Any, answer: Any, prompt_ids: list[int], first_ids: list[int]
    ) -> _Reused | None:
        """What `first_token` or `early_token` (``reused``) returns; None where prefill's first token may not be used.
        Never a reason for a request to fail."""
        try:
            engine: Any = self.engine  # type: ignore[attr-defined]
            model = engine._engine_client.model_config
            if model.has_inner_state:  # as Mamba's: vLLM has prefill leave out the prompt's last token
                return None
            return reused(request, answer, int(model.max_model_len), prompt_ids, first_ids)
        except Exception as error:  # another vLLM, whose requests and answers have other fields
            logging.getLogger("ray.serve").warning("prefill's first token is not used: %s", _in_words(error))
            return None

    async def _after_early(
        self, early: EarlyToken, stream: Any, anew: Callable[[], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        """The early token, and what decode's stream has behind it; where that begins otherwise, the stream ``anew``."""
        rest = DropsSentText(early.text)
        again: Any = None
        try:
            count("early")
            if (timing := current()) is not None:
                timing.early = True
            # Before decode begins: its admission takes this process's CPU for longer than writing a chunk does.
            yield [early.chunk]
            async for item in stream:
                if (kept := rest.rest(item)) is not None:
                    yield kept
        except SentTextMismatch:
            count("early_again")
            if (timing := current()) is not None:
                timing.second_request = True
            await stream.aclose()
            again = await anew()
            async for item in again:
                yield counted(item)
        finally:
            for each in (stream, again):
                if hasattr(each, "aclose"):
                    with contextlib.suppress(Exception):
                        await each.aclose()

    async def _prefilled(self, pd: Any, backend: Any, method: str, request: Any, raw: Any) -> Any:
        """Prefill's answer, or the error that is the client's answer; None: decode is to compute the prompt."""
        count("calls")
        avoid: frozenset[str] = frozenset()
        reasons: list[str] = []
        absent = False
        for step in ("call", *self.prefill_rules.on_failure, "fail"):
            if step == "local":
                count("local")
                logging.getLogger("ray.serve").warning("decode computes the prompt itself: %s", "; ".join(reasons))
                return None
            if step == "retry" and absent:
                continue  # the call before found no replica, and this one would wait as long again
            if step == "fail":
                count("failures")
                return _unavailable(reasons)
            route = Route(avoid)
            try:
                answer = await self._call(pd, backend, method, request, raw, route)
            except PrefillFailed as error:
                if (timing := current()) is not None:
                    timing.failed(made=not route.no_other)
                if route.no_other:
                    reasons.append("there is no other prefill replica")
                    continue
                absent = isinstance(error, NoReplica)
                if step == "retry":
                    count("retries")
                reasons.append(f"prefill replica {route.replica or '(none was reached)'}: {error}")
                logging.getLogger("ray.serve").warning("a call of prefill failed: %s", reasons[-1])
                avoid |= {route.replica} if route.replica else set()
                continue
            if step == "retry":
                count("retries")
            return answer
        raise AssertionError("the last step is fail")

    async def _call(self, pd: Any, backend: Any, method: str, request: Any, raw: Any, route: Route) -> Any:
        """Prefill's first answer: a completion, or an error of the client's. Raises PrefillFailed."""
        exceptions: Any = importlib.import_module("ray.exceptions")
        prefill_request = backend.prepare_prefill_request(request=request, peer=None)
        # Ray's own request for ids gets a list of integers in the answer. A prompt of ids decode has itself.
        uses_first = self.prefill_rules.early_token or self.prefill_rules.reuse_first_token
        if self._pd_tokenize_once and (uses_first or not _of_ids(request)):
            prefill_request.kv_transfer_params[IDS_KEY] = True
        if (timing := current()) is not None:
            timing.called()
        try:
            call = getattr(self._prefill_of(pd, raw), method).remote(prefill_request, raw, **{ROUTE: route})
        except Exception as error:
            raise PrefillFailed(_in_words(error)) from error
        first = asyncio.ensure_future(call.__anext__())
        first.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # nobody may be left to look at it
        try:
            rules = self.prefill_rules
            waited_s, done = 0.0, set[Any]()
            while not done and waited_s < rules.timeout_s and (waited_s == 0 or route.replica is not None):
                turn_s = min(rules.absent_s, rules.timeout_s - waited_s)
                done, _ = await asyncio.wait({first}, timeout=turn_s)
                waited_s += turn_s
        except asyncio.CancelledError:
            # Ray cancels the call with the request; an answer that was on its way is still an answer to prefill.
            _in_background(self._release_late(first))
            raise
        if not done:
            call.cancel()
            first.cancel()
            if route.replica is None:
                raise NoReplica(f"none has the prompt after {waited_s:g} s")
            count("timeouts")
            raise PrefillFailed(f"no answer within {self.prefill_rules.timeout_s:g} s")
        try:
            answer = first.result()
        except exceptions.TaskCancelledError:
            raise  # with the client's request
        except StopAsyncIteration as error:
            raise PrefillFailed("it ended without an answer") from error
        except Exception as error:
            raise PrefillFailed(_in_words(error)) from error
        if isinstance(answer, pd.ErrorResponse) and (answer.error.code or 0) >= _SERVER_ERRORS:
            raise PrefillFailed(f"HTTP {answer.error.code}, {answer.error.message}")
        return answer

    def _prefill_of(self, pd: Any, raw: Any) -> Any:
        """The handle of prefill, with the model's adapter and the client's session where there are."""
        handle: Any = self._prefill_handle  # type: ignore[attr-defined]
        adapter = pd.serve.get_multiplexed_model_id()
        if adapter:
            handle = handle.options(multiplexed_model_id=adapter)
        session = pd.session_id_from_headers(raw.headers) if raw is not None else None
        return handle.options(session_id=session) if session else handle

    async def _release_late(self, first: asyncio.Future[Any]) -> None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            answer = await asyncio.wait_for(first, self.prefill_rules.timeout_s)
            if kv_parameters := getattr(answer, "kv_transfer_params", None):
                await self._release(kv_parameters)

    async def _release(self, kv_parameters: dict[str, Any]) -> None:
        """Have decode's engine notify prefill that nobody will read what it keeps for these transfer parameters."""
        engine: Any = self.engine  # type: ignore[attr-defined]
        name = f"gone-{kv_parameters.get('remote_request_id')}"
        try:
            await engine._engine_client.notify_kv_transfer_request_rejected(name, kv_parameters)
            count("released")
        except Exception as error:
            logging.getLogger("ray.serve").warning(
                "prefill did not get the message that its KV blocks are not needed; their lease will end: %s",
                _in_words(error),
            )


_tasks: set[Any] = set()
_counters: dict[str, Any] = {}


def _in_background(work: Any) -> None:
    """Run ``work`` beside the request that is being cancelled; the event loop itself keeps tasks weakly."""
    task = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def count(name: str) -> None:
    """Increase one of `COUNTERS`. Never makes a request fail."""
    try:
        if name not in _counters:
            metrics: Any = importlib.import_module("ray.util.metrics")
            serve: Any = importlib.import_module("ray.serve")
            counter = metrics.Counter(f"pdlab_prefill_{name}", description=COUNTERS[name], tag_keys=("ReplicaId",))
            _counters[name] = (counter, {"ReplicaId": serve.get_replica_context().replica_id.unique_id})
        counter, tags = _counters[name]
        counter.inc(1, tags=tags)
    except Exception as error:
        logging.getLogger("ray.serve").warning("prefill calls are not counted: %r", error)


def _unavailable(reasons: list[str]) -> Any:
    models: Any = importlib.import_module(MODELS)
    message = f"prefill is not available ({'; '.join(reasons)}): send the request again"
    return models.ErrorResponse(error=models.ErrorInfo(message=message, type="ServiceUnavailableError", code=503))


def _of_ids(request: Any) -> bool:
    """Whether the prompt is token ids, and not a text or messages."""
    prompt = getattr(request, "prompt", None)
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _in_words(error: BaseException) -> str:
    """The error's kind and its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{f' ({lines[0][:300]})' if lines else ''}"
