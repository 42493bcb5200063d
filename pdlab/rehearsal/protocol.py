"""Requests and answers of vLLM's OpenAI server, with the fields that Ray Serve LLM and simulated engines use.

Fields have vLLM's names and defaults (a contract test checks this). Other fields of a client are kept.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


def _id() -> str:
    return uuid.uuid4().hex


class OpenAI(BaseModel):
    """Accepts additional fields, as OpenAI's protocol does."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)


class _Generates(OpenAI):
    model: str | None = None
    n: int = 1
    seed: int | None = None
    stream: bool | None = False
    stream_options: Any = None
    temperature: float | None = None
    logprobs: Any = None
    use_beam_search: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    request_id: str = Field(default_factory=_id)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionRequest(_Generates):
    prompt: Any = None
    max_tokens: int | None = 16
    echo: bool | None = False


class ChatCompletionRequest(_Generates):
    messages: list[Any] = Field(default_factory=list)
    logprobs: Any = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class PromptTokenUsageInfo(OpenAI):
    cached_tokens: int | None = None


class UsageInfo(OpenAI):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None


class CompletionResponseChoice(OpenAI):
    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(OpenAI):
    id: str = Field(default_factory=lambda: f"cmpl-{_id()}")
    object: str = "text_completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None


class ChatCompletionResponseChoice(OpenAI):
    index: int
    message: dict[str, Any]
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(OpenAI):
    id: str = Field(default_factory=lambda: f"chatcmpl-{_id()}")
    object: str = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class EmbeddingChatRequest(OpenAI):
    model: str | None = None


class EmbeddingCompletionRequest(OpenAI):
    model: str | None = None


class ScoreTextRequest(OpenAI):
    model: str | None = None


class TokenizeCompletionRequest(OpenAI):
    model: str | None = None
    prompt: Any = None


class TokenizeChatRequest(OpenAI):
    model: str | None = None
    messages: list[Any] = Field(default_factory=list)


class TokenizeResponse(OpenAI):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(OpenAI):
    model: str | None = None
    tokens: list[int] = Field(default_factory=list)


class DetokenizeResponse(OpenAI):
    prompt: str


class TranscriptionRequest(OpenAI):
    model: str | None = None


def _unused(name: str) -> type[OpenAI]:
    """A class that Ray Serve LLM imports and that simulated engines do not use."""
    return type(name, (OpenAI,), {"__module__": __name__})


CompletionStreamResponse = _unused("CompletionStreamResponse")
ChatCompletionStreamResponse = _unused("ChatCompletionStreamResponse")
EmbeddingResponse = _unused("EmbeddingResponse")
ScoreResponse = _unused("ScoreResponse")
TranscriptionResponse = _unused("TranscriptionResponse")
TranscriptionStreamResponse = _unused("TranscriptionStreamResponse")


class ErrorInfo(OpenAI):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(OpenAI):
    error: ErrorInfo


class BaseRenderer:
    """Tokenizes prompts. Ray wraps `tokenize_prompts_async` to add ``prompt_token_ids`` that prefill has made already
    (``pd_tokenize_once``)."""

    encode: ClassVar[Any] = None

    async def tokenize_prompts_async(self, prompts: Any, params: Any) -> list[dict[str, Any]]:
        """Prompts with their token ids."""
        encode: Any = type(self).encode
        return [
            prompt if "prompt_token_ids" in prompt else {**prompt, "prompt_token_ids": encode(prompt["prompt"])}
            for prompt in prompts
        ]
