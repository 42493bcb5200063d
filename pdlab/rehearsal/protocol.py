"""Requests and answers as vLLM's OpenAI server has them, as far as Ray Serve LLM and simulated engines look at them.

Fields have vLLM's names and defaults (a contract test holds that); others that a client sends are kept as they are.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


def _id() -> str:
    return uuid.uuid4().hex


class OpenAI(BaseModel):
    """Takes further fields, as OpenAI's protocol does."""

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


class CompletionStreamResponse(OpenAI):
    pass


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


class ChatCompletionStreamResponse(OpenAI):
    pass


class EmbeddingChatRequest(OpenAI):
    model: str | None = None


class EmbeddingCompletionRequest(OpenAI):
    model: str | None = None


class EmbeddingResponse(OpenAI):
    pass


class ScoreTextRequest(OpenAI):
    model: str | None = None


class ScoreResponse(OpenAI):
    pass


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


class TranscriptionResponse(OpenAI):
    pass


class TranscriptionStreamResponse(OpenAI):
    pass


class ErrorInfo(OpenAI):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(OpenAI):
    error: ErrorInfo


class BaseRenderer:
    """Where Ray puts the prompt's token ids that prefill has made already (``pd_tokenize_once``): it wraps
    `tokenize_prompts_async` and adds ``prompt_token_ids`` to the prompt."""

    encode: ClassVar[Any] = None

    async def tokenize_prompts_async(self, prompts: Any, params: Any) -> list[dict[str, Any]]:
        """Prompts with their token ids."""
        encode: Any = type(self).encode
        return [
            prompt if "prompt_token_ids" in prompt else {**prompt, "prompt_token_ids": encode(prompt["prompt"])}
            for prompt in prompts
        ]
