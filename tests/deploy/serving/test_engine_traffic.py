"""What one engine's server counts for the controller of the roles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.clock import Clock

from pdlab.deploy.serving.engine_traffic import TrafficCounts, prompt_chunks, prompt_tokens, tokens_after
from pdlab.roles.observed import size_class


def event(usage: int | None = None) -> str:
    choices = '[{"index": 0, "text": "x", "finish_reason": null}]' if usage is None else "[]"
    return (
        f'data: {{"choices": {choices}, "usage": {f"""{{"completion_tokens": {usage}}}""" if usage else "null"}}}\n\n'
    )


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


def test_prefill_is_busy_while_one_prompt_is_there(clock: Clock) -> None:
    flow = TrafficCounts(clock)
    flow.prefill_began(100)
    clock.now = 1.0
    flow.prefill_began(50)
    clock.now = 1.5
    flow.prefill_ended(100, answered=True)
    assert flow.take().prefill_busy_s == 1.5
    clock.now = 2.0
    flow.prefill_ended(50, answered=False)
    clock.now = 9.0
    counts = flow.take()
    assert (counts.prefill_busy_s, counts.prefilled_tokens, counts.waiting_prompt_tokens) == (0.5, 0, 0)


def test_an_answer_is_timed_from_its_arrival(clock: Clock) -> None:
    flow = TrafficCounts(clock)
    answer = flow.arrived(100)
    assert (flow.running, flow.coming) == (0, 1), "its prompt is elsewhere"
    clock.now = 0.2
    flow.prefilled(answer, moves=True)
    assert flow.take().running == 1
    clock.now = 0.3
    flow.sent(answer, event())
    clock.now = 0.4
    flow.sent(answer, event())
    assert flow.take().generated_tokens == 2
    clock.now = 0.7
    flow.sent(answer, event(usage=5))
    flow.ended(answer, whole=True)
    counts = flow.take()
    assert counts.generated_tokens == 3, "events may have several tokens: the usage at the end says how many"
    assert counts.answers == {size_class(100): (1, 5)}
    assert counts.tpot_s == [pytest.approx(0.1)]
    assert counts.running == 0


@pytest.mark.parametrize(
    ("stays", "item", "handoff_s", "ttft_s"),
    [
        (False, event(), [0.25], [0.75]),
        (False, [event(), event()], [0.25], [0.75]),
        (True, event(), [], [0.75]),
        (False, SimpleNamespace(usage=SimpleNamespace(completion_tokens=50)), [], []),
        (None, event(), [], [0.75]),
        (None, SimpleNamespace(error="no prefill"), [], []),
        (None, [SimpleNamespace(error="no prefill")], [], []),
    ],
)
def test_only_the_way_of_kv_from_another_engine_is_a_hand_off(
    clock: Clock, stays: bool | None, item: object, handoff_s: list[float], ttft_s: list[float]
) -> None:
    """Not a prompt that this engine computes, an answer that comes as a whole, or an error (``stays`` None)."""
    flow = TrafficCounts(clock)
    answer = flow.arrived(100)
    clock.now = 0.5
    if stays is not None:
        flow.prefilled(answer, moves=not stays)
    clock.now = 0.75
    flow.sent(answer, item)
    counts = flow.take()
    assert (counts.handoff_s, counts.ttft_s) == (handoff_s, ttft_s)


def test_what_is_given_up_is_no_answer(clock: Clock) -> None:
    flow = TrafficCounts(clock)
    flow.ended(flow.arrived(10), whole=False)
    sent = flow.arrived(10)
    flow.prompted(sent, 10)
    flow.sent(sent, event())
    flow.ended(sent, whole=False)
    counts = flow.take()
    assert (counts.answers, counts.coming, counts.running) == ({}, 0, 0)
    assert counts.prompts == {size_class(10): (1, 10)}


def test_idle_is_nothing_to_tell(clock: Clock) -> None:
    flow = TrafficCounts(clock)
    assert flow.idle
    answer = flow.arrived(10)
    flow.prompted(answer, 10)
    assert not flow.idle
    flow.take()
    flow.sent(answer, event())
    flow.take()
    assert not flow.idle, "it is decoded"
    flow.ended(answer, whole=True)
    assert not flow.idle, "its end was not told"
    flow.take()
    assert flow.idle


def test_a_prompt_has_about_so_many_tokens() -> None:
    assert prompt_tokens(SimpleNamespace(prompt=[1, 2, 3])) == 3
    assert prompt_tokens(SimpleNamespace(prompt=[[1, 2, 3, 4]])) == 4
    assert prompt_tokens(SimpleNamespace(prompt="x" * 400)) == 100
    assert prompt_tokens(SimpleNamespace(prompt=["x" * 400])) == 100
    assert prompt_tokens(SimpleNamespace(messages=[{"role": "user", "content": "x" * 400}])) == 101
    called = {"role": "assistant", "content": None, "tool_calls": [{"arguments": "x" * 400}]}
    assert prompt_tokens(SimpleNamespace(messages=[called])) > 100


def test_tokens_of_an_answer() -> None:
    whole = SimpleNamespace(usage=SimpleNamespace(completion_tokens=7))
    assert tokens_after(whole, 0) == 7
    assert tokens_after([event(), event()], 3) == 5
    assert tokens_after("data: [DONE]\n\n", 5) == 5
    said = 'data: {"choices": [{"text": "\\"usage\\": {\\"completion_tokens\\": 99}", "finish_reason": null}]}\n\n'
    assert tokens_after(said, 1) == 2, "what the model says is no usage"


def test_a_prompt_that_is_asked_for_again_counts_once(clock: Clock) -> None:
    flow = TrafficCounts(clock)
    answer = flow.arrived(1000)
    flow.prompted(answer, 400)
    flow.prompted(answer, 300)
    assert flow.take().prompts == {size_class(1000): (1, 400)}
    flow.prompted(answer, 1000)
    assert flow.take().prompts == {size_class(1000): (0, 600)}, "it went where less was cached"


def test_a_prompt_that_stays_is_told_apart(clock: Clock) -> None:
    flow = TrafficCounts(clock)
    flow.stays(flow.arrived(1000))
    flow.stays(flow.arrived(1001))
    counts = flow.take()
    assert counts.local == {size_class(1000): 2} and counts.prompts == {}


def request(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{"model": "m", "cache_salt": None, **fields})


def test_prompts_that_a_cache_takes_for_one_have_the_same_chunks() -> None:
    text, ids = "word " * 200, list(range(300))
    assert len(prompt_chunks(request(prompt=text))) == 1000 // 256
    assert prompt_chunks(request(prompt=[ids])) == prompt_chunks(request(prompt=ids)) != []
    different = [
        request(prompt=text),
        request(prompt=text, cache_salt="s"),
        request(prompt=text, model="an adapter"),
        request(messages=[{"role": "user", "content": text}]),
        request(messages=[{"role": "system", "content": text}]),
        request(messages=[{"role": "user", "content": text}], tools=[{"name": "t"}]),
        request(messages=[{"role": "user", "content": text}], reasoning_effort="high"),
    ]
    assert len({prompt_chunks(each)[0] for each in different}) == len(different)


def test_the_next_turn_of_a_conversation_begins_like_the_last() -> None:
    first = [{"role": "system", "content": "s" * 700}, {"role": "user", "content": "u" * 700}]
    more = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v" * 700}]
    one, next_ = prompt_chunks(request(messages=first)), prompt_chunks(request(messages=more))
    assert len(one) == 5 and next_[: len(one)] == one and len(next_) > len(one)


@pytest.mark.parametrize("letter", ["x", "ж", "\n", '"'])
def test_no_prompt_has_more_tokens_in_chunks_than_it_has(letter: str) -> None:
    system = {"role": "system", "content": letter * 3000}
    turns = [{"role": "user", "content": letter}] * 80
    for messages in ([system], turns, [system, *turns]):
        made = request(messages=messages)
        assert prompt_tokens(made) // 64 == len(prompt_chunks(made))


def test_a_request_without_a_prompt_has_no_chunks() -> None:
    assert (
        prompt_chunks(SimpleNamespace()) == prompt_chunks(request(prompt=[])) == prompt_chunks(request(prompt="")) == []
    )
