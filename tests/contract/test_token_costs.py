"""What pdlab does at less cost for each token, beside what vLLM and Ray do: the same bytes."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import SERVE, quietly

from pdlab.deploy.serving import vllm_costs
from pdlab.deploy.serving.builders import _with_one_generator
from pdlab.deploy.serving.vllm_costs import CompletionChunk, CostsLess, read_prompts_at_less_cost, write_at_less_cost
from pdlab.deploy.serving.vllm_names import COMPLETION

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")

TEXTS = [
    "",
    "a",
    ' "quoted" \\ /',
    "\x00\x01\x08\x0b\x0c\n\r\t\x1f\x7f\u0080",
    "é漢😀\u2028\u2029\ufffd\ufeff</script>",
]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module of completions, put back after the test; ``own``: the models as vLLM has them."""
    module = quietly(COMPLETION)
    protocol = quietly("vllm.entrypoints.openai.completion.protocol")
    own = SimpleNamespace(chunk=protocol.CompletionStreamResponse, choice=protocol.CompletionResponseStreamChoice)
    for name, model in (("CompletionStreamResponse", own.chunk), ("CompletionResponseStreamChoice", own.choice)):
        monkeypatch.setattr(module, name, model)
    write_at_less_cost(module)
    return SimpleNamespace(module=module, own=own)


def chunk(chunks: Any, choices: Any, **choice: Any) -> Any:
    """As vLLM makes it."""
    plain = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None,
             "prompt_token_ids": None, "token_ids": None}  # fmt: skip
    return chunks(id="cmpl-1", object="text_completion", created=7, model="m", choices=[choices(**{**plain, **choice})])


def both(serving: Any, **choice: Any) -> tuple[Any, Any]:
    module, own = serving.module, serving.own
    return (
        chunk(module.CompletionStreamResponse, module.CompletionResponseStreamChoice, **choice),
        chunk(own.chunk, own.choice, **choice),
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("finish_reason", [None, "stop", "length", 'a"b'])
def test_the_chunk_of_a_token_is_vllms(serving: Any, text: str, finish_reason: str | None) -> None:
    ours, vllms = both(serving, text=text, finish_reason=finish_reason, index=3)
    assert type(ours) is CompletionChunk
    assert ours.model_dump_json(exclude_unset=True) == vllms.model_dump_json(exclude_unset=True)
    assert ours.model_dump_json() == vllms.model_dump_json()
    assert ours.choices == vllms.choices and ours.created == 7


def test_fields_that_vllm_sets_afterwards_are_written(serving: Any) -> None:
    ours, vllms = both(serving, finish_reason="stop")
    for each in (ours, vllms):
        each.system_fingerprint = "f"
    assert ours.model_dump_json(exclude_unset=True) == vllms.model_dump_json(exclude_unset=True)
    assert '"system_fingerprint":"f"' in ours.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("more", [{"stop_reason": 7}, {"stop_reason": "end"}, {"token_ids": [1]},
                                  {"prompt_token_ids": [1, 2], "token_ids": [3]}])  # fmt: skip
def test_what_has_more_than_a_text_is_vllms_own(serving: Any, more: dict[str, Any]) -> None:
    ours, vllms = both(serving, **more)
    assert type(ours) is serving.own.chunk and ours == vllms


def test_the_chunk_of_the_usage_is_vllms_own(serving: Any) -> None:
    made = serving.module.CompletionStreamResponse(id="i", created=1, model="m", choices=[], usage=None)
    assert type(made) is serving.own.chunk


def test_vllm_makes_its_chunks_by_these_names_with_these_fields() -> None:
    source = inspect.getsource(quietly(COMPLETION).OpenAIServingCompletion.completion_stream_generator)
    (made,) = [part for part in source.split("CompletionStreamResponse(")[1:] if "object=" in part]
    for name in (vllm_costs._CHUNK | vllm_costs._CHOICE) - {"choices"}:
        assert f" {name}=" in made
    assert "chunk.model_dump_json(exclude_unset=True)" in made


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1], "prompt": "x"},
                                    {"prompt": "x"}, "x", [1, 2]])  # fmt: skip
@pytest.mark.parametrize("encodes", [False, True])
def test_a_prompts_text_is_vllms(prompt: Any, encodes: bool) -> None:
    base = quietly(COMPLETION).OpenAIServingCompletion
    answering = base.__new__(base)
    answering.model_config = SimpleNamespace(is_encoder_decoder=encodes)
    before = answering._extract_prompt_text(prompt)
    read_prompts_at_less_cost(answering)
    assert answering._extract_prompt_text(prompt) == before


ITEMS: dict[str, list[Any]] = {
    "events": ["data: {1}\n\n", "data: {2}\n\n", "data: [DONE]\n\n"],
    "batched": [["data: {1}\n\n", "data: {2}\n\n"], ["data: [DONE]\n\n"]],
    "together": [["data: {1}\n\n", "data: [DONE]\n\n"]],
    "no end": ["data: {1}\n\n"],
    "the end in a text": ['data: {"text": "data: [DONE]"}\n\n'],
}


async def sent(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


@pytest.mark.parametrize("case", ITEMS)
def test_a_streamed_answer_is_rays(case: str) -> None:
    pd = quietly(f"{SERVE}.serving_patterns.prefill_decode.pd_server")
    rays = getattr(pd._pd_http_response, "of_ray", pd._pd_http_response)

    async def read(make: Any) -> Any:
        answer = await make(sent(ITEMS[case]))
        return answer.media_type, answer.status_code, [text async for text in answer.body_iterator]

    assert asyncio.run(read(_with_one_generator(rays))) == asyncio.run(read(rays))


def test_an_error_or_a_whole_answer_is_rays() -> None:
    pd = quietly(f"{SERVE}.serving_patterns.prefill_decode.pd_server")
    models = quietly(f"{SERVE}.core.configs.openai_api_models")
    rays = getattr(pd._pd_http_response, "of_ray", pd._pd_http_response)
    error = models.ErrorResponse(error=models.ErrorInfo(message="no", type="x", code=418))
    for items in ([error], [[error]]):
        answer = asyncio.run(_with_one_generator(rays)(sent(items)))
        assert answer.status_code == 418 and json.loads(answer.body)["error"]["message"] == "no"
    for method in ("_pd_chat", "_pd_completions"):
        assert f"async def {method}" in inspect.getsource(pd.PDOrchestratorMixin.__serve_build_asgi_app__)
    assert "_pd_http_response" in inspect.getsource(pd.PDOrchestratorMixin.__serve_build_asgi_app__)


def test_a_stream_that_holds_nothing_back_has_no_batcher(llm_server: Any) -> None:
    class Server(CostsLess, llm_server.LLMServer):  # type: ignore[misc]
        pass

    async def texts(interval_ms: float) -> list[Any]:
        server = Server.__new__(Server)
        server._llm_config = SimpleNamespace(experimental_configs={"stream_batching_interval_ms": interval_ms})
        return [item async for item in server._batch_output_stream(sent(["a", "b"]))]

    assert asyncio.run(texts(0.0)) == ["a", "b"] and asyncio.run(texts(20.0)) == [["a", "b"]]
    assert "self._batch_output_stream(" in inspect.getsource(llm_server.LLMServer._run_request)
