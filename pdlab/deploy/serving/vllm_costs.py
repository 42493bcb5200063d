"""vLLM at less cost in the process that answers requests: less CPU for each token and step, and no growing memory.

- vLLM looks up an environment variable for every token that it sends, and parses it each time. Its engine core keeps
  the variables from its start on (`vllm.envs.enable_envs_cache`); the process that answers requests does not.
- vLLM records several metrics for every step of an engine, and one for every token. Ray's Python layer checks all
  labels of a metric each time, and merges them with defaults. The labels stay the same: the first time is enough. A
  gauge that is set to its own value again within `AGAIN_S` is left as it is.
- vLLM makes two pydantic models for every token of a completion, and writes them as JSON. pydantic checks what vLLM has
  just written itself. `CompletionChunk` writes the same JSON. vLLM also takes the prompt apart for every token.
- Ray passes on the pieces of a stream through a batcher, also where it holds none back.
- vLLM's logger keeps the KV connector's figures of every transfer until they are logged. vLLM's own HTTP server logs
  them while it runs (`vllm.entrypoints.launchers.utils.server_utils.lifespan`). An engine that Ray calls through a
  handle has no such server: it would keep 580 bytes for each request at TP 4, for ever.

Runs in Ray Serve's replicas, sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from pdlab.deploy.serving.vllm_names import COMPLETION, ENVIRONMENT, RAY_METRICS

LOG_EVERY_S = 10.0  # vLLM's own VLLM_LOG_STATS_INTERVAL
# Ray drops a gauge that nobody has set for two exports, the shortest of which are a second apart.
AGAIN_S = 0.25
_KEPT = "pdlab_kept"


class CostsLess:
    """Mixed into Ray's engine servers. From the start of the engine on, changed variables have no effect."""

    async def start(self) -> None:
        try:
            record_at_less_cost(importlib.import_module(RAY_METRICS))
        except (ImportError, AttributeError) as error:  # another vLLM: records as before
            logging.getLogger("ray.serve").warning("vLLM's metrics are recorded as Ray does it: %r", error)
        await super().start()  # type: ignore[misc]
        # Engines that answer no completions, and simulated ones, have none: vLLM's module is not imported for them.
        if (serving := getattr(getattr(self, "engine", None), "_oai_serving_completion", None)) is not None:
            try:
                write_at_less_cost(importlib.import_module(COMPLETION))
                read_prompts_at_less_cost(serving)
            except (ImportError, AttributeError) as error:  # another vLLM: streams as before
                logging.getLogger("ray.serve").warning("completions are streamed as vLLM does it: %r", error)
        try:
            environment: Any = importlib.import_module(ENVIRONMENT)
            environment.enable_envs_cache()
        except (ImportError, AttributeError) as error:  # another vLLM: reads them as before
            logging.getLogger("ray.serve").warning("vLLM's variables are read again and again: %r", error)

    def _batch_output_stream(self, generator: Any) -> Any:
        if self._get_batch_interval_ms() == 0:  # type: ignore[attr-defined]
            return generator
        return super()._batch_output_stream(generator)  # type: ignore[misc]


class EmptiesStats:
    """Mixed into Ray's engine servers."""

    _emptying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        client = getattr(self.engine, "_engine_client", None)  # type: ignore[attr-defined]
        if getattr(client, "log_stats", False) and hasattr(client, "do_log_stats"):
            self._emptying = asyncio.get_running_loop().create_task(empty(client))


async def empty(client: Any, every_s: float = LOG_EVERY_S) -> None:
    """Make vLLM's client log its statistics, and so drop them, until the task is cancelled or the engine is dead.

    If a logger fails, the next call may succeed; without it the memory would grow for ever. The failure is logged
    once."""
    failed = False
    while not getattr(client, "errored", False):
        await asyncio.sleep(every_s)
        try:
            await client.do_log_stats()
        except Exception as error:
            if not failed:
                logging.getLogger("ray.serve").warning("vLLM's statistics are not logged: %r", error)
            failed = True


def write_at_less_cost(serving: Any) -> None:
    """Change the names by which vLLM's module of completions makes the chunks of a stream. Raises AttributeError for
    another version."""
    chunk, choice = serving.CompletionStreamResponse, serving.CompletionResponseStreamChoice
    if getattr(chunk, "pdlab", False):
        return

    def choices_of(**given: Any) -> Any:
        return given if given.keys() == _CHOICE else choice(**given)

    def chunk_of(**given: Any) -> Any:
        (one, *more) = given["choices"] or (None,)
        if given.keys() == _CHUNK and not more and type(one) is dict and _is_plain(one):
            return CompletionChunk(given, lambda: chunk(**{**given, "choices": [choice(**one)]}))
        made = [choice(**each) if type(each) is dict else each for each in given["choices"]]
        return chunk(**{**given, "choices": made})

    chunk_of.pdlab = True  # type: ignore[attr-defined]
    serving.CompletionStreamResponse, serving.CompletionResponseStreamChoice = chunk_of, choices_of


# What vLLM gives of a token's chunk, and of its choice.
_CHUNK = {"id", "object", "created", "model", "choices"}
_CHOICE = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
_EXCLUDES_UNSET = {"exclude_unset": True}


def _is_plain(choice: dict[str, Any]) -> bool:
    """Whether it has no more than a text, and why it ended by itself."""
    return (
        choice["logprobs"] is choice["stop_reason"] is choice["prompt_token_ids"] is choice["token_ids"] is None
        and type(choice["text"]) is str
        and (choice["finish_reason"] is None or type(choice["finish_reason"]) is str)
    )


class CompletionChunk:
    """The chunk of a token: writes the JSON that vLLM's model writes of the same fields. ``model`` makes vLLM's model,
    for all else that is done with it."""

    def __init__(self, given: dict[str, Any], model: Callable[[], Any]) -> None:
        self.__dict__.update(given=given, model=model, made=None)

    def _model(self) -> Any:
        if self.__dict__["made"] is None:
            self.__dict__["made"] = self.__dict__["model"]()
        return self.__dict__["made"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model(), name, value)

    def model_dump_json(self, **how: Any) -> str:
        own = self.__dict__
        if own["made"] is not None or how != _EXCLUDES_UNSET:
            return str(self._model().model_dump_json(**how))
        given = own["given"]
        (choice,) = given["choices"]
        ended = choice["finish_reason"]
        return (
            f'{{"id":{encode_basestring(given["id"])},"object":{encode_basestring(given["object"])},'
            f'"created":{given["created"]},"model":{encode_basestring(given["model"])},"choices":[{{"index":'
            f'{choice["index"]},"text":{encode_basestring(choice["text"])},"logprobs":null,"finish_reason":'
            f'{"null" if ended is None else encode_basestring(ended)},"stop_reason":null,"prompt_token_ids":null,'
            '"token_ids":null}]}'
        )


def read_prompts_at_less_cost(serving: Any) -> None:
    """Have vLLM's object that answers completions take the text of a prompt of one decoder without a look at the rest
    of it. Raises AttributeError for another version."""
    looks = serving._extract_prompt_text

    def text_of(prompt: Any) -> Any:
        if type(prompt) is dict and "prompt_token_ids" in prompt and "encoder_prompt" not in prompt:
            return prompt.get("prompt")
        return looks(prompt)

    serving._extract_prompt_text = text_of


def record_at_less_cost(wrappers: Any) -> None:
    """Change the classes of vLLM's module that stand for Prometheus's. Raises AttributeError for another version."""
    changed = []
    for kind, name, make in (
        (wrappers.RayGaugeWrapper, "set", _setting),
        (wrappers.RayCounterWrapper, "inc", _counting),
        (wrappers.RayHistogramWrapper, "observe", _adding),
    ):
        changed.append((kind, name, make(getattr(kind, name))))
    for kind, name, method in changed:
        setattr(kind, name, method)


def _counting(checked: Callable[[Any, float], None]) -> Callable[..., None]:
    """Of a counter, which ignores 0: most of those that vLLM counts in a step are 0."""
    add = _adding(checked)

    def count(self: Any, value: float = 1.0) -> None:
        if value:
            add(self, value)

    return count


def _adding(checked: Callable[[Any, float], None]) -> Callable[..., None]:
    """Of a counter or a histogram. A counter refuses values below 0: ``checked`` takes those."""

    def add(self: Any, value: float = 1.0) -> None:
        kept = self.__dict__.get(_KEPT)
        if kept is None or value <= 0:
            checked(self, value)
            if value:
                _keep(self)
        else:
            kept[0](value, tags=kept[1])

    return add


def _setting(checked: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
    def set_to(self: Any, value: float) -> None:
        now = time.monotonic()
        kept = self.__dict__.get(_KEPT)
        if kept is None:
            checked(self, value)
            kept = _keep(self)
        elif value == kept[2] and now - kept[3] < AGAIN_S:
            return
        else:
            kept[0](value, tags=kept[1])
        if kept is not None:
            kept[2:] = [value, now]

    return set_to


def _keep(wrapper: Any) -> list[Any] | None:
    """How a metric with these labels is recorded without a look at them, and the last value and its time. None: it has
    no labels yet, or Ray records nothing of it."""
    metric = wrapper.metric
    if not wrapper._is_labeled or metric._metric is None:
        return None
    kept = [metric._metric.record, {**metric._default_tags, **wrapper._tags}, None, 0.0]
    wrapper.__dict__[_KEPT] = kept
    return kept
