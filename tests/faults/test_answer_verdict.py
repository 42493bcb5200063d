"""Right, a clean error, a hang, wrong, or left: by hand and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.deploy.canary import CanaryAnswer
from pdlab.faults.answer_verdict import ReceivedAnswer, judge
from pdlab.results.chaos import RequestOutcome

TOKENS = (5, 9, 2, 7)
# Far ahead of each second-best but at the last token, where two are alike.
TOPS = (*({token: -0.1, token + 100: -3.0} for token in TOKENS[:3]), {7: -0.7, 8: -0.8})
REFERENCE = CanaryAnswer(tokens=TOKENS, tops=TOPS)
WHOLE = ReceivedAnswer(status=200, tokens=TOKENS, tops=TOPS, done=True)


@pytest.mark.parametrize(
    ("change", "outcome", "detail"),
    [
        ({}, "right", None),
        ({"tops": ()}, "right", None),
        ({"tokens": (5, 9, 3, 7)}, "wrong", "token 3 is 3 in place of 2"),
        ({"tokens": (5, 9, 3, 7), "tops": ()}, "wrong", "token 3"),
        ({"tokens": (*TOKENS, 1), "tops": ()}, "wrong", "5 tokens in place of 4"),
        ({"tokens": TOKENS[:2], "tops": TOPS[:2]}, "wrong", "ended as if whole with 2 of 4"),
        ({"tokens": TOKENS[:2], "tops": TOPS[:2], "done": False}, "error", "closed after 2 of 4"),
        ({"tokens": TOKENS[:2], "tops": TOPS[:2], "error": "in the stream: gone"}, "error", "gone"),
        ({"tokens": (6,), "tops": (), "error": "in the stream: gone"}, "wrong", "token 1 is 6"),
        ({"tokens": (6,), "tops": (), "left": True}, "wrong", "token 1 is 6"),
        ({"tokens": (6,), "tops": (), "timed_out": True, "done": False}, "wrong", "token 1 is 6"),
        ({"tokens": (), "tops": (), "done": True}, "wrong", "0 of 4 tokens"),
        ({"tokens": (), "tops": (), "status": 500, "done": False}, "error", "HTTP 500"),
        (
            {"tokens": (), "tops": (), "status": 503, "done": False, "error": "HTTP 503: x\n y"},
            "error",
            "HTTP 503: x y",
        ),
        ({"tokens": (), "tops": (), "status": None, "done": False}, "error", "closed before"),
        ({"tokens": (), "tops": (), "status": None, "done": False, "timed_out": True}, "hang", "0 of 4"),
        ({"tokens": TOKENS[:1], "tops": TOPS[:1], "done": False, "timed_out": True}, "hang", "1 of 4"),
        ({"tokens": TOKENS[:1], "tops": TOPS[:1], "done": False, "left": True}, "left", None),
    ],
)
def test_by_hand(change: dict[str, Any], outcome: RequestOutcome, detail: str | None) -> None:
    verdict = judge(WHOLE._replace(**change), REFERENCE)
    assert verdict.outcome == outcome
    assert (verdict.detail is None) if detail is None else (detail in (verdict.detail or ""))


def test_two_candidates_that_are_alike_are_rounding() -> None:
    other = WHOLE._replace(tokens=(5, 9, 2, 8), tops=(*TOPS[:3], {8: -0.7, 7: -0.75}))
    verdict = judge(other, REFERENCE)
    assert (verdict.outcome, verdict.rounded) == ("right", True)
    assert judge(other._replace(tops=()), REFERENCE).outcome == "wrong", "without log-probabilities nothing excuses it"


def test_where_no_log_probabilities_were_requested_the_references_show_what_is_rounding() -> None:
    bare = WHOLE._replace(tokens=(5, 9, 2, 8), tops=(), bare=True)
    verdict = judge(bare, REFERENCE)
    assert (verdict.outcome, verdict.rounded) == ("right", True)
    assert judge(bare._replace(tokens=(5, 9, 2, 6)), REFERENCE).outcome == "wrong"
    assert judge(bare._replace(tokens=(5, 109, 2, 7)), REFERENCE).outcome == "wrong", "far behind"
    assert judge(bare._replace(tokens=TOKENS), REFERENCE).rounded is False


def test_a_long_complaint_is_cut() -> None:
    detail = judge(ReceivedAnswer(status=500, error="x" * 1000), REFERENCE).detail
    assert detail is not None and len(detail) < 200


received = st.builds(
    ReceivedAnswer,
    status=st.sampled_from([None, 200, 400, 500]),
    tokens=st.lists(st.sampled_from([*TOKENS, 1]), max_size=6).map(tuple),
    tops=st.just(()),
    done=st.booleans(),
    timed_out=st.booleans(),
    left=st.booleans(),
    error=st.sampled_from([None, "gone"]),
)


@pytest.mark.property
@given(received)
def test_only_what_is_whole_and_equal_is_right_and_no_wrong_token_is_excused(each: ReceivedAnswer) -> None:
    outcome = judge(each, REFERENCE).outcome
    if outcome == "right":
        assert each.tokens == TOKENS and each.done and each.status == 200 and each.error is None
        assert not each.left and not each.timed_out
    assert (outcome == "wrong") >= (each.tokens != TOKENS[: len(each.tokens)])
