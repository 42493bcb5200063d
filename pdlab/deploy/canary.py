"""The canary: does a deployment with KV transfer say the same as the model without?

Fixed prompts at temperature 0 are answered by the deployment and by a reference; the token ids
must be equal. HTTP 200 proves nothing: blocks delivered to the wrong place give fluent nonsense.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pdlab.core import api_key
from pdlab.core.errors import CanaryError, UsageError
from pdlab.core.files import replace
from pdlab.core.schema import Frozen, load_yaml, to_yaml
from pdlab.results.schema import CanaryResult

MAX_TOKENS = 16
TIMEOUT_S = 120.0
# Where two of the reference's choices are closer than this (difference of log-probabilities), another
# batch shape or TP degree may tip the balance in bfloat16: taking the other one proves nothing.
NEAR_TIE = 0.25
TOP = 5
# Sizes in facts: a few KV blocks, many, and far beyond gpt-oss's window of 128 tokens.
FACTS = (6, 40, 160)
_ID = "token_id:"


class Answer(Frozen):
    """One greedy continuation: token ids, and per token the ids that were a near tie with the best one."""

    tokens: tuple[int, ...]
    near: tuple[tuple[int, ...], ...]


class Reference(Frozen):
    """Answers of the model served collocated, kept for later launches of PD deployments of it.

    ``asked`` is a hash of the requests: answers to other prompts are no reference.
    """

    model: str
    asked: str
    answers: tuple[Answer, ...]


class _Refused(CanaryError):
    """The server says that the request itself is wrong (HTTP 400)."""


def prompts() -> list[str]:
    """Lists of facts with a question about an early one: the answer needs KV of early tokens, across blocks."""
    texts = []
    for facts in FACTS:
        lines = [f"Item {i} has code {(i * 7919 + facts) % 9000 + 1000}." for i in range(1, facts + 1)]
        texts.append(" ".join(lines) + " Question: which code has item 2? Answer: item 2 has code")
    return texts


def requests(model_id: str) -> list[dict[str, Any]]:
    """The canary's OpenAI completion requests."""
    common = {"model": model_id, "max_tokens": MAX_TOKENS, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    # Ids, not texts: many tokens of a byte-level vocabulary have one and the same text alone.
    common |= {"logprobs": TOP, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return [{**common, "prompt": prompt} for prompt in prompts()]


def ask(base_url: str, model_id: str, key: str | None = None) -> list[Answer]:
    """The deployment's answers over HTTP, without the prompts that are too long for it. Raises CanaryError.

    ``key``: the endpoint's API key."""
    answers: list[Answer] = []
    for request in requests(model_id):
        try:
            answers.append(read_answer(_post(base_url, request, key)))
        except _Refused:
            if not answers:
                raise
            break  # a short one was fine, and the others are longer
    return answers


def ask_shapes(
    base_url: str, model_id: str, plain: Sequence[Answer], sequences: int, key: str | None = None
) -> dict[str, CanaryResult]:
    """Other shapes of the same requests, each compared with ``plain``, the deployment's answers one by one.

    A list of all the prompts, two choices for one, and a stream. Each shape is a path of its own
    through prefill and decode. ``sequences``: how many one request may ask for; shapes with more
    are left out. ``key``: the endpoint's API key. Raises CanaryError.
    """
    asked = requests(model_id)[: len(plain)]
    first, longest = asked[0], asked[-1]
    wanted: dict[str, tuple[dict[str, Any], list[Answer]]] = {
        "a list of prompts": ({**first, "prompt": [request["prompt"] for request in asked]}, list(plain)),
        # vLLM refuses several greedy choices; the best one of one candidate is the same.
        "n=2": ({**first, "n": 2, "temperature": 1.0, "top_k": 1}, [plain[0]] * 2),
    }
    found = {}
    for name, (request, right) in wanted.items():
        if len(right) <= sequences:
            choices = sorted(_choices(_post(base_url, request, key)), key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(len(right))):
                numbers = [choice["index"] for choice in choices]
                raise CanaryError(f"{name} is answered by choices {numbers} instead of 0 to {len(right) - 1}")
            got = [read_answer({"choices": [choice]}) for choice in choices]
            found[name] = compare(got, right, "each asked alone")
    streamed = read_answer({"choices": [_streamed(_stream(base_url, {**longest, "stream": True}, key))]})
    found["a stream"] = compare([streamed], [plain[-1]], "asked at once")
    return found


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


def read_answer(completion: dict[str, Any]) -> Answer:
    """Token ids and near ties of one completion with ``logprobs``. Raises CanaryError."""
    try:
        choice = completion["choices"][0]
        tokens = tuple(int(token) for token in choice["token_ids"])
        near = tuple(_near(top) for top in choice["logprobs"]["top_logprobs"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CanaryError(f"the canary's answer has no tokens ({str(completion)[:200]})") from error
    if not tokens or len(near) != len(tokens):
        raise CanaryError(f"the canary's answer has {len(tokens)} tokens and log-probabilities of {len(near)}")
    return Answer(tokens=tokens, near=near)


def compare(got: Sequence[Answer], reference: Sequence[Answer], source: str) -> CanaryResult:
    """Equal, different, or equal up to near ties; ``source`` names the reference for the person.

    Another token that the reference itself nearly took (see NEAR_TIE) is not counted; if no prompt
    is left that could tell, the result is "not compared" (``equal`` None).
    """
    compared, wrong = 0, []
    for number, (mine, theirs) in enumerate(zip(got, reference, strict=False), start=1):
        at = next(
            (i for i, pair in enumerate(zip(mine.tokens, theirs.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        if at is None and len(mine.tokens) == len(theirs.tokens):
            compared += 1
        elif at is None or mine.tokens[at] not in theirs.near[at]:
            compared += 1
            first = min(len(mine.tokens), len(theirs.tokens)) if at is None else at
            wrong.append(f"prompt {number} differs from token {first + 1} on")
    if not compared:
        return CanaryResult(equal=None, detail=f"not compared: every prompt ends in a near tie ({source})")
    if wrong:
        return CanaryResult(equal=False, compared=compared, detail=f"{'; '.join(wrong)} ({source})")
    return CanaryResult(
        equal=True, compared=compared, detail=f"{compared} of {len(got)} prompts give the same tokens ({source})"
    )


def save_reference(folder: Path, model: str, answers: Sequence[Answer]) -> None:
    """Keep the answers of a collocated launch under ``folder``."""
    replace(_path(folder, model), to_yaml(Reference(model=model, asked=_asked(), answers=tuple(answers))).encode())


def load_reference(folder: Path, model: str) -> tuple[Answer, ...] | None:
    """The stored answers of that model served collocated; None when no launch has stored any that can be used."""
    try:
        stored = load_yaml(_path(folder, model), Reference)
    except UsageError:  # none there, or one of an older pdlab
        return None
    return stored.answers if (stored.model, stored.asked) == (model, _asked()) else None


def _path(folder: Path, model: str) -> Path:
    return folder / "canary" / f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in model)}.yaml"


def _asked() -> str:
    return hashlib.sha256(json.dumps(requests("")).encode()).hexdigest()[:12]


def _near(top: dict[str, float]) -> tuple[int, ...]:
    best = max(top.values())
    return tuple(int(token.removeprefix(_ID)) for token, logprob in top.items() if best - logprob < NEAR_TIE)


def _post(base_url: str, request: dict[str, Any], key: str | None) -> dict[str, Any]:
    found: dict[str, Any] = _ask(base_url, request, key, json.loads)
    return found


def _stream(base_url: str, request: dict[str, Any], key: str | None) -> list[dict[str, Any]]:
    """The chunks of a stream of server-sent events."""

    def read(text: bytes) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in text.decode().splitlines() if line.startswith("data: ")]
        if not lines or lines[-1] != "[DONE]":
            raise CanaryError(f"the canary's stream does not end with [DONE] ({' '.join(lines)[-200:]})")
        return [json.loads(line) for line in lines[:-1]]

    found: list[dict[str, Any]] = _ask(base_url, request, key, read)
    return found


def _ask(base_url: str, request: dict[str, Any], key: str | None, read: Callable[[bytes], Any]) -> Any:
    body = json.dumps(request).encode()
    headers = {"content-type": "application/json", **api_key.header(key)}
    call = urllib.request.Request(f"{base_url}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
            return read(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = " ".join(error.read().decode(errors="replace").split())[:300]
        kind = _Refused if error.code == 400 else CanaryError
        raise kind(f"the canary got HTTP {error.code}: {said}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CanaryError(f"the canary got no answer from {base_url} ({error})") from error
