"""Errors of a request that vLLM's front end raises: the client gets the status that vLLM itself gives such an error.

vLLM answers a wrong type, a chat template's complaint and the like with a 4xx where it serves HTTP itself. Ray's engine
passes on only some of them, so that the others become a 500, and on PD a failure of prefill that is tried again. An
error of openai_harmony is a 500 everywhere. The mixin corrects this where the engine's objects are created. Runs in Ray
Serve's replicas, sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from pdlab.deploy.serving.guard import NO_VOCABULARY, REASONS
from pdlab.deploy.serving.vllm_names import HARMONY, HARMONY_UTILS

# vLLM's objects that answer requests, as Ray's engine names them, and the method of each.
_SERVINGS = {"_oai_serving_chat": "create_chat_completion", "_oai_serving_completion": "create_completion"}
_SERVER_ERRORS = 500
_ANALYSIS = "analysis"


class ExplainsErrors:
    """Mixed into Ray's engine servers."""

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        for name, method in _SERVINGS.items():
            if (serving := getattr(self.engine, name, None)) is not None:  # type: ignore[attr-defined]
                explain(serving, method)
                count_reasoning_of(serving)


def explain(serving: Any, method: str) -> None:
    """Make vLLM's object answer with an error response if it would raise an error that is not the server's fault."""
    create, answer = serving.create_error_response, getattr(serving, method)

    def create_error_response(message: Any, *rest: Any, **more: Any) -> Any:
        why = harmonys(message)
        return create(message, *rest, **more) if why is None else create(why)

    @functools.wraps(answer)
    async def answered(*arguments: Any, **more: Any) -> Any:
        try:
            return await answer(*arguments, **more)
        except Exception as error:
            response = create_error_response(error)
            if response.error.code >= _SERVER_ERRORS:
                raise
            return response

    serving.create_error_response = create_error_response
    setattr(serving, method, answered)


def harmonys(error: Any) -> str | None:
    """The message for the client about an error of openai_harmony; None: it is another error."""
    if not _is_harmonys(error):
        return None
    if NO_VOCABULARY in str(error):
        return REASONS[NO_VOCABULARY]
    return (
        f"the model's answer is not in gpt-oss's chat format ({error}): leave out the parameters that make the model "
        "go on after the end of its answer (ignore_eos, min_tokens), or use /v1/completions"
    )


def _is_harmonys(error: Any) -> bool:
    return any(kind.__name__ == "HarmonyError" for kind in type(error).__mro__)


def count_reasoning_of(serving: Any) -> None:
    """vLLM's parser of gpt-oss's answers counts no reasoning tokens for chat, and the usage then has 0."""
    parser = getattr(serving, "parser_cls", None)
    if parser is None or parser.__module__ != HARMONY or "count_reasoning_tokens" in vars(parser):
        return
    parser.count_reasoning_tokens = reasoning_tokens


def reasoning_tokens(parser: Any, token_ids: Sequence[int]) -> int:
    """Tokens of the reasoning in an answer, without those of the format. vLLM calls this after each piece of a stream,
    with all tokens so far; tokens of the last call are not read again.
    """
    counted = vars(parser).get("_pdlab_reasoning")
    if counted is None or counted.read > len(token_ids):
        counted = vars(parser)["_pdlab_reasoning"] = _Reasoning()
    return int(counted.more(token_ids))


class _Reasoning:
    def __init__(self) -> None:
        harmony: Any = importlib.import_module(HARMONY_UTILS)
        self._reads = harmony.get_streamable_parser_for_assistant()
        self.read = self._tokens = 0

    def more(self, token_ids: Sequence[int]) -> int:
        # An answer that is no Harmony is an error of its own.
        with contextlib.suppress(RuntimeError):
            for token in token_ids[self.read :]:
                before = self._reads.current_channel
                self._reads.process(token)
                self._tokens += before == _ANALYSIS == self._reads.current_channel
        self.read = len(token_ids)
        return self._tokens
