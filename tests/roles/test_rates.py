"""Rates learnt on line against those that made the observations."""

from __future__ import annotations

import pytest

from pdlab.roles.observed import EngineLoad, RequestCount, Role
from pdlab.roles.rates import ANSWERS_HALF_LIFE_S, AnswerTokens, DecayingSum, DecodeStep, PrefillRate


def prefilling(tokens: int, busy_s: float, running: int = 0, role: Role = "prefill") -> EngineLoad:
    return EngineLoad("p", role, 0, running, prefilled_tokens=tokens, prefill_busy_s=busy_s)


def decoding(batch: int, step_s: float, seconds: float = 0.5, **more: float) -> EngineLoad:
    tokens = round(batch * seconds / step_s)
    return EngineLoad("d", "decode", 0, batch, generated_tokens=tokens, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("looks", "tokens_per_s", "within"),
    [
        ([], None, 0),
        ([prefilling(4000, 0.1)] * 10, 40_000, 1e-6),  # idle for the rest of the look
        ([prefilling(0, 0.5)], None, 0),  # a prompt that takes longer than a look
        ([prefilling(0, 0.5), prefilling(8000, 0.3)], 10_000, 0.05),
        ([prefilling(20_000, 0.5)] * 200 + [prefilling(5000, 0.5)] * 200, 10_000, 0.05),
        ([prefilling(20_000, 0.5)] + [prefilling(0, 0.0)] * 1000, 40_000, 1e-6),
    ],
    ids=["nothing", "busy time", "no rate yet", "long prompt", "a new rate", "time without prompts"],
)
def test_the_prefill_rate(looks: list[EngineLoad], tokens_per_s: float | None, within: float) -> None:
    rate = PrefillRate()
    for look in looks:
        rate.learn([look])
    assert rate.tokens_per_s == (tokens_per_s and pytest.approx(tokens_per_s, rel=within))


def test_prompts_beside_decoding_requests_teach_no_prefill_rate() -> None:
    rate = PrefillRate()
    rate.learn([prefilling(100, 5.0, running=3), prefilling(100, 5.0, role="decode"), prefilling(8000, 0.2)])
    assert rate.tokens_per_s == pytest.approx(40_000)


def test_the_decode_step_is_a_line_over_the_batch() -> None:
    step = DecodeStep()
    assert step.line is None and step.batch_within(0.01) is None
    for batch in (10, 20, 30, 40) * 10:
        step.learn([decoding(batch, 0.006 + 0.0002 * batch)], {"d": batch}, 0.5)
    assert step.line == pytest.approx((0.006, 0.0002), rel=0.05)
    assert step.batch_within(0.012) == pytest.approx(30, rel=0.03)
    assert step.batch_within(0.001) == 1.0


def test_of_one_batch_half_of_the_step_is_taken_to_grow_with_it() -> None:
    step = DecodeStep()
    for _ in range(20):
        step.learn([decoding(20, 0.010)], {"d": 20}, 0.5)
    assert step.batch_within(0.010) == pytest.approx(20)
    assert step.batch_within(0.015) == pytest.approx(40)


@pytest.mark.parametrize(
    "load",
    [
        decoding(20, 0.1, prefill_busy_s=0.4),
        EngineLoad("d", "prefill", 0, 20, generated_tokens=1000),
        EngineLoad("d", "decode", 0, 60, generated_tokens=1000),  # of 20 a moment ago
        EngineLoad("d", "decode", 0, 20, generated_tokens=0),
    ],
)
def test_what_is_no_decode_step_teaches_none(load: EngineLoad) -> None:
    step = DecodeStep()
    for _ in range(20):
        step.learn([load], {"d": 20}, 0.5)
    assert step.line is None


def test_answers_are_learnt_by_the_size_of_their_prompts() -> None:
    answers = AnswerTokens()
    assert answers.mean(10) is None
    answers.learn({10: RequestCount(4, 400), 13: RequestCount(1, 50), 11: RequestCount(0, 0)}, 0.5)
    assert (answers.mean(10), answers.mean(13), answers.mean(11)) == (100, 50, None)
    answers.learn({13: RequestCount(9, 4500)}, ANSWERS_HALF_LIFE_S)
    assert answers.mean(13) == pytest.approx((25 + 4500) / 9.5)
    assert answers.mean(10) == 100


def test_a_sum_falls_by_half_with_each_half_life() -> None:
    total = DecayingSum(2.0)
    total.add(8.0, 1.0)
    total.add(1.0, 4.0)
    assert total.total == 3.0
