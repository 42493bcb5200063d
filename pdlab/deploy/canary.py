"""The canary: does a deployment with KV transfer give the same answers as the model without?

Fixed prompts at temperature 0 are answered by the deployment and by a reference. Tokens and their log-probabilities
must be equal, up to the rounding of bfloat16 (`compare`). HTTP 200 proves nothing: blocks delivered to the wrong place
give fluent nonsense.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pdlab.core.errors import CanaryError, UsageError
from pdlab.core.files import replace
from pdlab.core.schema import Frozen, load_yaml, to_yaml
from pdlab.core.text import counted
from pdlab.deploy import http_client
from pdlab.results.schema import CanaryResult

MAX_TOKENS = 16
TIMEOUT_S = 120.0
# Logits are bfloat16, in steps of 0.125 from 16 to 32. Another batch shape moves each of two candidates by a step or
# two, sums over other shards (unequal TP) by more: candidates that close in log-probability may change places.
ROUNDING, ROUNDING_UNEQUAL_TP = 0.5, 1.0
# Damaged KV cache shows at once, and has had no tokens to add up over: there half of it is granted.
EARLY_TOKENS = 4
MOST_EARLY = 1  # prompts
LEAST_SHARED = 1 / 3  # of the tokens
SLACK = 1e-6  # a difference of exactly so many steps is within
TOP = 5
# Sizes in facts: a few KV blocks, many, and far beyond gpt-oss's window of 128 tokens.
FACTS = (6, 40, 160)
_ID = "token_id:"


class CanaryAnswer(Frozen):
    """One greedy continuation: token ids, and per token the log-probabilities of the likeliest, by id."""

    tokens: tuple[int, ...]
    tops: tuple[dict[int, float], ...]


class Reference(Frozen):
    """Answers of the model served collocated, stored for later PD launches of the same model.

    ``requests_hash`` is a hash of the requests: answers to other prompts are no reference.
    """

    model: str
    requests_hash: str
    answers: tuple[CanaryAnswer, ...]


class _RefusedByServer(CanaryError):
    """The server refuses the request itself (HTTP 400)."""


def prompts() -> list[str]:
    """Prompts with a list of facts and a question about an early fact. The answer needs KV cache of early tokens,
    across blocks.
    """
    texts = []
    for facts in FACTS:
        lines = [f"Item {i} has code {(i * 7919 + facts) % 9000 + 1000}." for i in range(1, facts + 1)]
        texts.append(" ".join(lines) + " Question: which code has item 2? Answer: item 2 has code")
    return texts


def requests(model_id: str) -> list[dict[str, Any]]:
    """The canary's OpenAI completion requests."""
    return [{**greedy(model_id, MAX_TOKENS), "prompt": prompt} for prompt in prompts()]


def greedy(model_id: str, max_tokens: int) -> dict[str, Any]:
    """A completion request without a prompt, whose answers can be compared by tokens and log-probabilities."""
    request = {"model": model_id, "max_tokens": max_tokens, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    # Ids, not texts: by themselves many tokens of a byte-level vocabulary have the same text.
    return request | {"logprobs": TOP, "return_token_ids": True, "return_tokens_as_token_ids": True}


def ask(base_url: str, model_id: str, key: str | None = None) -> list[CanaryAnswer]:
    """The deployment's answers over HTTP. Prompts that are too long for it are left out. Raises CanaryError.

    ``key``: the endpoint's API key."""
    answers: list[CanaryAnswer] = []
    for request in requests(model_id):
        try:
            answers.append(read_answer(_post(base_url, request, key)))
        except _RefusedByServer:
            if not answers:
                raise
            break  # a short one was fine, and the others are longer
    return answers


def ask_shapes(
    base_url: str, model_id: str, plain: Sequence[CanaryAnswer], sequences: int, key: str | None = None
) -> dict[str, CanaryResult]:
    """Other shapes of the same requests, each compared with ``plain``, the deployment's answers one by one.

    A list of all the prompts, two choices for one, and a stream. Each shape is a path of its own through prefill and
    decode. ``sequences``: the largest number of one request; shapes with more are left out. ``key``: the endpoint's API
    key. Raises CanaryError.
    """
    single_requests = requests(model_id)[: len(plain)]
    first, longest = single_requests[0], single_requests[-1]
    shapes: dict[str, tuple[dict[str, Any], list[CanaryAnswer]]] = {
        "a list of prompts": ({**first, "prompt": [request["prompt"] for request in single_requests]}, list(plain)),
        # vLLM refuses several greedy choices; the best one of one candidate is the same.
        "n=2": ({**first, "n": 2, "temperature": 1.0, "top_k": 1}, [plain[0]] * 2),
    }
    results = {}
    for name, (request, right) in shapes.items():
        if len(right) <= sequences:
            choices = sorted(_choices(_post(base_url, request, key)), key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(len(right))):
                numbers = [choice["index"] for choice in choices]
                raise CanaryError(f"{name} is answered by choices {numbers} instead of 0 to {len(right) - 1}")
            answers = [read_answer({"choices": [choice]}) for choice in choices]
            results[name] = compare(answers, right, "each sent by itself", bounded=False)
    streamed = read_answer({"choices": [_streamed(_stream(base_url, {**longest, "stream": True}, key))]})
    results["a stream"] = compare([streamed], [plain[-1]], "sent at once", bounded=False)
    return results


def _choices(completion: dict[str, Any]) -> list[dict[str, Any]]:
    choices = completion.get("choices")
    if not isinstance(choices, list) or not all(isinstance(c, dict) and "index" in c for c in choices):
        raise CanaryError(f"the canary's answer has no numbered choices ({str(completion)[:200]})")
    return choices


def _streamed(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One choice, as it would be without streaming."""
    ids: list[int] = []
    tops: list[Any] = []
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            ids += choice.get("token_ids") or []
            tops += (choice.get("logprobs") or {}).get("top_logprobs") or []
    return {"index": 0, "token_ids": ids, "logprobs": {"top_logprobs": tops}}


def read_answer(completion: dict[str, Any]) -> CanaryAnswer:
    """Token ids and log-probabilities of one completion with ``logprobs``. Raises CanaryError."""
    try:
        choice = completion["choices"][0]
        tokens = tuple(int(token) for token in choice["token_ids"])
        tops = tuple(tops_by_id(top) for top in choice["logprobs"]["top_logprobs"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CanaryError(f"the canary's answer has no tokens ({str(completion)[:200]})") from error
    if not tokens or len(tops) != len(tokens):
        raise CanaryError(
            f"the canary's answer has {counted(len(tokens), 'token')} and log-probabilities of {len(tops)}"
        )
    return CanaryAnswer(tokens=tokens, tops=tops)


def compare(
    answers: Sequence[CanaryAnswer],
    reference: Sequence[CanaryAnswer],
    source: str,
    *,
    rounding: float = ROUNDING,
    bounded: bool = True,
) -> CanaryResult:
    """Equal, different, or equal up to rounding; ``source`` names the reference for the person.

    ``rounding``: the largest difference in log-probability of two candidates that may swap places. If the tokens of a
    prompt differ, the prompt counts as rounded if two rules hold, else as wrong. First, each side has the other's token
    among its likeliest, within ``rounding`` of its best (within half of it among the first EARLY_TOKENS). Second, the
    log-probabilities of the common tokens before differ by at most ``rounding`` on average; this rule also holds for
    prompts with equal tokens. ``bounded``: at most MOST_EARLY prompts may be rounded among their first EARLY_TOKENS; if
    most prompts are rounded, LEAST_SHARED of all tokens must come before the rounding. If no prompt gives the same
    tokens, the result is "not compared" (``equal`` None).
    """
    wrong, rounded = [], []
    same = early = shared = total = 0
    for number, (mine, theirs) in enumerate(zip(answers, reference, strict=False), start=1):
        at = _divergence(mine, theirs)
        fault = _fault(mine, theirs, at, rounding)
        total += len(theirs.tokens)
        if fault:
            wrong.append(f"prompt {number} {fault}")
        elif at is None:
            same += 1
            shared += len(theirs.tokens)
        else:
            early += at < EARLY_TOKENS
            shared += at
            gap = max(_logprob_gap(theirs.tops[at], mine.tokens[at]), _logprob_gap(mine.tops[at], theirs.tokens[at]))
            rounded.append(f"prompt {number} takes another token at {at + 1}, {gap:.3g} from the best")
    compared = same + len(rounded) + len(wrong)
    if bounded and not wrong and early > MOST_EARLY:
        wrong.append(f"{early} of {compared} prompts differ among their first {EARLY_TOKENS} tokens")
    if bounded and not wrong and 2 * len(rounded) > compared > 1 and shared < LEAST_SHARED * total:
        wrong.append(f"only {shared} of {total} tokens agree")
    remarks = [f"{'; '.join(rounded)}: {'more than ' if wrong else ''}rounding"] if rounded else []
    equal = False if wrong else True if same else None
    head = (
        f"{same} of {counted(len(answers), 'prompt gives', 'prompts give')} the same tokens"
        if same
        else "not compared: no prompt gives the same tokens"
    )
    detail = "; ".join([*(wrong or [head]), *remarks])
    return CanaryResult(equal=equal, compared=compared, rounded=len(rounded), detail=f"{detail} ({source})")


def _divergence(mine: CanaryAnswer, theirs: CanaryAnswer) -> int | None:
    """The first position whose tokens differ; None where one side's tokens are the beginning of the other's."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def _fault(mine: CanaryAnswer, theirs: CanaryAnswer, at: int | None, rounding: float) -> str | None:
    """Why the answers differ by more than rounding; None where they do not."""
    shared = min(len(mine.tokens), len(theirs.tokens)) if at is None else at
    apart = [abs(mine.tops[i][token] - theirs.tops[i][token]) for i, token in enumerate(theirs.tokens[:shared])
             if token in mine.tops[i] and token in theirs.tops[i]]  # fmt: skip
    mean = sum(apart) / len(apart) if apart else 0.0
    if mean > rounding + SLACK:
        return f"has other log-probabilities (by {mean:.2g} on average over {counted(len(apart), 'token')})"
    if at is None:
        return None if len(mine.tokens) == len(theirs.tokens) else f"differs from token {shared + 1} on"
    sides = (theirs.tops[at], mine.tokens[at]), (mine.tops[at], theirs.tokens[at])
    near = all(nearly_as_likely(top, token, at, rounding) for top, token in sides)
    return None if near else f"differs from token {at + 1} on"


def nearly_as_likely(top: dict[int, float], token: int, at: int, rounding: float) -> bool:
    """Whether the token at that place could be the best one with other rounding (`compare`)."""
    return _logprob_gap(top, token) <= (rounding / 2 if at < EARLY_TOKENS else rounding) + SLACK


def _logprob_gap(top: dict[int, float], token: int) -> float:
    """How far the token's log-probability is behind the best; infinite where it is not among the likeliest."""
    return max(top.values()) - top[token] if token in top else math.inf


def ask_again(base_url: str, model_id: str, before: Sequence[CanaryAnswer], key: str | None = None) -> CanaryResult:
    """Send the same prompts once more, and compare with the deployment's earlier answers. Without an answer the result
    is "not compared", with the reason.
    """
    try:
        answers = ask(base_url, model_id, key)
    except CanaryError as error:
        return CanaryResult(equal=None, detail=f"not compared: {error}")
    return compare(answers, before, "the answers at the launch", bounded=False)


def save_reference(folder: Path, model: str, answers: Sequence[CanaryAnswer]) -> None:
    """Keep the answers of a collocated launch under ``folder``."""
    replace(
        _path(folder, model),
        to_yaml(Reference(model=model, requests_hash=_requests_hash(), answers=tuple(answers))).encode(),
    )


def load_reference(folder: Path, model: str) -> tuple[CanaryAnswer, ...] | None:
    """The stored answers of that model served collocated; None: no launch has stored usable ones."""
    try:
        stored = load_yaml(_path(folder, model), Reference)
    except UsageError:  # none there, or one of an older pdlab
        return None
    return stored.answers if (stored.model, stored.requests_hash) == (model, _requests_hash()) else None


def _path(folder: Path, model: str) -> Path:
    return folder / "canary" / f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in model)}.yaml"


def _requests_hash() -> str:
    return hashlib.sha256(json.dumps(requests("")).encode()).hexdigest()[:12]


def tops_by_id(top: dict[str, float]) -> dict[int, float]:
    """Log-probabilities by token id. Raises ValueError."""
    logprobs = {int(token.removeprefix(_ID)): float(logprob) for token, logprob in top.items()}
    if not logprobs:
        raise ValueError("no log-probabilities")
    return logprobs


def _post(base_url: str, request: dict[str, Any], key: str | None) -> dict[str, Any]:
    with _canary_errors():
        completion: dict[str, Any] = http_client.complete(base_url, request, key, TIMEOUT_S)
        return completion


def _stream(base_url: str, request: dict[str, Any], key: str | None) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    with _canary_errors(), http_client.streamed(base_url, request, key, TIMEOUT_S) as stream:
        events = list(stream)
    if not events or events[-1] is not None:
        raise CanaryError(f"the canary's stream does not end with [DONE] ({str(events[-1:])[:200]})")
    return events[:-1]


@contextlib.contextmanager
def _canary_errors() -> Iterator[None]:
    try:
        yield
    except http_client.NoAnswer as error:
        raise (_RefusedByServer if error.code == 400 else CanaryError)(f"the canary {error}") from error
