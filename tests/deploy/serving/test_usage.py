"""Usage of an answer from several sequences or two engines: what each knows, and nothing that none knows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from pdlab.deploy.serving.sequences import JoinedAnswer, events
from pdlab.deploy.serving.usage import cached_in_prefill, summed


class PromptDetails(BaseModel):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class CompletionDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Choice(BaseModel):
    index: int = 0


class Whole(BaseModel):
    id: str = "id"
    choices: list[Choice] = [Choice()]
    usage: Usage
    metrics: dict[str, float] | None = None


def of(prompt: int, completion: int, **details: Any) -> dict[str, Any]:
    reasoning = details.pop("reasoning", None)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}
    usage |= {"prompt_tokens_details": details} if details else {}
    return usage | ({} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}})


@pytest.mark.parametrize(
    ("usages", "n", "prompt_details", "reasoning"),
    [
        ([of(9, 5, reasoning=3), of(9, 6, reasoning=4)], 2, None, 7),
        ([of(9, 5, reasoning=0), of(9, 6, reasoning=4)], 2, None, 4),
        ([of(9, 5, reasoning=3), of(9, 6)], 2, None, None),
        ([of(9, 5), of(9, 6)], 2, None, None),
        # One prompt, whose second sequence found what the first had left: nothing was there before the request.
        ([of(300, 1, cached_tokens=0), of(300, 1, cached_tokens=256)], 2, {"cached_tokens": 0}, None),
        ([of(300, 1, cached_tokens=256), of(300, 1, cached_tokens=0)], 2, {"cached_tokens": 0}, None),
        ([of(300, 1, cached_tokens=64), of(300, 1, cached_tokens=64)], 2, {"cached_tokens": 64}, None),
        # Two prompts: each has its own.
        ([of(300, 1, cached_tokens=64), of(200, 1, cached_tokens=32)], 1, {"cached_tokens": 96}, None),
        ([of(300, 1, cached_tokens=64), of(200, 1, cached_tokens=None)], 1, None, None),
        ([of(300, 1, cached_tokens=64), of(200, 1)], 1, None, None),
        (
            [of(300, 1, cached_tokens=0, created_cache_tokens=300), of(300, 1, cached_tokens=256,
             created_cache_tokens=44)], 2, {"cached_tokens": 0, "created_cache_tokens": 300}, None,
        ),
        (
            [of(300, 1, cached_tokens=None, multimodal_tokens={"image": 5}),
             of(200, 1, cached_tokens=None, multimodal_tokens={"image": 1, "audio": 2})],
            1, {"multimodal_tokens": {"image": 6, "audio": 2}}, None,
        ),
    ],
)  # fmt: skip
def test_sums(usages: list[dict[str, Any]], n: int, prompt_details: Any, reasoning: int | None) -> None:
    whole = summed(usages, n)
    assert whole["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages[::n])
    assert whole["completion_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert whole.get("prompt_tokens_details") == prompt_details
    assert whole.get("completion_tokens_details") == (None if reasoning is None else {"reasoning_tokens": reasoning})


def test_a_whole_answer_has_the_usage_of_all_its_choices() -> None:
    answer = JoinedAnswer(2, "id")
    for number, (cached, reasoning) in enumerate([(0, 10), (256, 7)]):
        details = {"prompt_tokens_details": PromptDetails(cached_tokens=cached)}
        usage = Usage(prompt_tokens=300, completion_tokens=25, completion_tokens_details=CompletionDetails(
            reasoning_tokens=reasoning), **details)  # fmt: skip
        assert answer.take(number, Whole(id=f"id-{number}", usage=usage, metrics={"ttft": 1.0})) is None
    whole = answer.finish()
    assert whole.usage == Usage(
        prompt_tokens=300, completion_tokens=50, total_tokens=350, prompt_tokens_details=PromptDetails(cached_tokens=0),
        completion_tokens_details=CompletionDetails(reasoning_tokens=17),
    )  # fmt: skip
    assert whole.metrics is None, "those of one choice"
    assert json.loads(whole.model_dump_json())["usage"]["completion_tokens_details"] == {"reasoning_tokens": 17}


PREFILLED = {
    "fresh": (PromptDetails(cached_tokens=0, created_cache_tokens=300), 0),
    "half of it": (PromptDetails(cached_tokens=160), 160),
    "no details": (None, None),
    "nothing known": (PromptDetails(), None),
}


@pytest.mark.parametrize("case", PREFILLED)
def test_what_was_transferred_is_not_cached(case: str) -> None:
    details, cached = PREFILLED[case]
    prefilled = Whole(usage=Usage(prompt_tokens=300, completion_tokens=1, prompt_tokens_details=details))
    decoded = Usage(prompt_tokens=300, completion_tokens=9, prompt_tokens_details=PromptDetails(cached_tokens=300))
    whole = cached_in_prefill(Whole(usage=decoded), prefilled)
    assert whole.usage.prompt_tokens_details.cached_tokens == cached
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (300, 9)
    assert decoded.prompt_tokens_details == PromptDetails(cached_tokens=300), "the engine's own object is as it was"
    chunk = {"choices": [], "usage": {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 300}}}
    text = f'data: {{"choices": [{{"text": "a"}}]}}\n\ndata: {json.dumps(chunk)}\n\n'
    for item, texts in (
        (cached_in_prefill(text, prefilled), None),
        (cached_in_prefill([text, "data: [DONE]\n\n"], prefilled), 2),
    ):
        sent = item if isinstance(item, list) else [item]
        assert len(sent) == (texts or 1) and all(piece.endswith("\n\n") for piece in sent)
        usage = [json.loads(event) for event in events(sent) if "usage" in event]
        assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in usage] == [cached]
        assert events(sent)[0] == '{"choices": [{"text": "a"}]}'


@pytest.mark.parametrize(
    "item",
    [
        "data: [DONE]\n\n",
        'data: {"choices": [{"text": "prompt_tokens_details"}]}\n\n',
        'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n',
        Whole(usage=Usage(prompt_tokens=3)),
        object(),
        ['data: {"error": {"message": "gone"}}\n\n'],
    ],
)
def test_what_says_nothing_of_a_cache_stays_as_it_is(item: Any) -> None:
    prefilled = Whole(usage=Usage(prompt_tokens_details=PromptDetails(cached_tokens=1)))
    assert cached_in_prefill(item, prefilled) == item


@pytest.mark.parametrize("item", ["data: {1}\n\n", ["data: {1}\n\n"]])
def test_the_event_of_a_token_is_passed_on_itself(item: Any) -> None:
    assert cached_in_prefill(item, None) is item
