"""Compare a client's answer with the reference: right, a clean error, a hang, wrong, or the client left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdlab.core.text import counted
from pdlab.deploy import canary
from pdlab.deploy.canary import CanaryAnswer
from pdlab.results.chaos import RequestOutcome

SHOWN_CHARS = 160


class ReceivedAnswer(NamedTuple):
    """A client's answer to one request.

    ``status``: of HTTP; None if no answer began. ``tops``: per token, token id -> log-probability of the likeliest
    tokens. ``done``: the stream ended properly. ``timed_out``: it did not end within the limit. ``left``: the client
    closed the connection on purpose. ``error``: message of the server or the connection. ``bare``: the request had no
    log-probabilities, so only the reference's log-probabilities show whether a difference is rounding.
    """

    status: int | None = None
    tokens: tuple[int, ...] = ()
    tops: tuple[dict[int, float], ...] = ()
    done: bool = False
    timed_out: bool = False
    left: bool = False
    error: str | None = None
    bare: bool = False


class AnswerVerdict(NamedTuple):
    outcome: RequestOutcome
    detail: str | None = None
    rounded: bool = False


def judge(received: ReceivedAnswer, reference: CanaryAnswer, rounding: float = canary.ROUNDING) -> AnswerVerdict:
    """The request's outcome. Wrong tokens are wrong also if an error, the client's leave or a hang follows them."""
    tokens = received.tokens
    unlike = _unlike(received, reference, rounding) if tokens else None
    if unlike is not None:
        return AnswerVerdict("wrong", unlike)
    if received.left:
        return AnswerVerdict("left")
    if received.timed_out:
        return AnswerVerdict("hang", f"{len(tokens)} of {counted(len(reference.tokens), 'token')} within the limit")
    if received.error is not None:
        return AnswerVerdict("error", _short(received.error))
    if received.status is None:
        return AnswerVerdict("error", "closed before an answer began")
    if received.status != 200:
        return AnswerVerdict("error", f"HTTP {received.status}")
    if not received.done:
        return AnswerVerdict("error", f"closed after {len(tokens)} of {counted(len(reference.tokens), 'token')}")
    if len(tokens) != len(reference.tokens):
        return AnswerVerdict(
            "wrong", f"ended as if whole with {len(tokens)} of {counted(len(reference.tokens), 'token')}"
        )
    return AnswerVerdict("right", rounded=tokens != reference.tokens)


def _unlike(received: ReceivedAnswer, reference: CanaryAnswer, rounding: float) -> str | None:
    """The difference between the tokens so far and the reference's beginning; None: equal, or equal within rounding."""
    count = len(received.tokens)
    if count > len(reference.tokens):
        return f"{counted(count, 'token')} in place of {len(reference.tokens)}"
    if received.tokens == reference.tokens[:count]:
        return None
    if len(received.tops) == count:
        beginning = CanaryAnswer(tokens=reference.tokens[:count], tops=reference.tops[:count])
        mine = CanaryAnswer(tokens=received.tokens, tops=received.tops)
        result = canary.compare([mine], [beginning], "reference", rounding=rounding, bounded=False)
        if result.equal is not False:
            return None
    at = _divergence(received.tokens, reference.tokens)
    if received.bare and canary.nearly_as_likely(reference.tops[at], received.tokens[at], at, rounding):
        return None
    return f"token {at + 1} is {received.tokens[at]} in place of {reference.tokens[at]}"


def _divergence(mine: Sequence[int], theirs: Sequence[int]) -> int:
    return next(at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."
