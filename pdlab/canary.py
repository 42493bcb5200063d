"""The canary: does a deployment with KV transfer say the same as the model without?

Fixed prompts at temperature 0 are answered by the deployment and by a reference; the token ids
must be equal. HTTP 200 proves nothing: blocks delivered to the wrong place give fluent nonsense.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlab.errors import CanaryError
from pdlab.results import CanaryResult
from pdlab.spec import Frozen, load_yaml, to_yaml

MAX_TOKENS = 16
TIMEOUT_S = 120.0
# Where the reference's own first two choices are closer than this (difference of log-probabilities),
# another batch shape or TP degree may tip the balance in bfloat16: such a difference proves nothing.
NEAR_TIE = 0.25
# Sizes in facts: below a KV block, over several blocks, and far beyond gpt-oss's window of 128 tokens.
FACTS = (6, 40, 160)


class Answer(Frozen):
    """One greedy continuation: token ids, and per token the log-probability gap to the second choice."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Reference(Frozen):
    """Answers of the model served collocated, kept for later launches of PD deployments of it."""

    model: str
    answers: tuple[Answer, ...]


def prompts() -> list[str]:
    """Lists of facts with a question about an early one: the answer needs KV of early tokens, across blocks."""
    texts = []
    for facts in FACTS:
        lines = [f"Item {i} has code {(i * 7919 + facts) % 9000 + 1000}." for i in range(1, facts + 1)]
        texts.append(" ".join(lines) + " Question: which code has item 2? Answer: item 2 has code")
    return texts


def requests(model_id: str) -> list[dict[str, Any]]:
    """The canary's OpenAI completion requests."""
    common = {"model": model_id, "max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 2, "seed": 0}
    return [{**common, "prompt": prompt, "return_token_ids": True, "ignore_eos": True} for prompt in prompts()]


def ask(base_url: str, model_id: str) -> list[Answer]:
    """The deployment's answers over HTTP. Raises CanaryError."""
    return [read_answer(_post(base_url, request)) for request in requests(model_id)]


def read_answer(completion: dict[str, Any]) -> Answer:
    """Token ids and gaps of one completion with ``logprobs``. Raises CanaryError."""
    try:
        choice = completion["choices"][0]
        tokens = tuple(choice["token_ids"])
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CanaryError(f"the canary's answer has no tokens ({str(completion)[:200]})") from error
    return Answer(tokens=tokens, gaps=tuple(top[0] - top[1] if len(top) > 1 else 0.0 for top in tops))


def compare(got: Sequence[Answer], reference: Sequence[Answer], source: str) -> CanaryResult:
    """Equal, different, or equal up to near ties; ``source`` names the reference for the person.

    A difference where the reference hesitates (see NEAR_TIE) is not counted; if no prompt is
    left that could tell, the result is "not compared" (``equal`` None).
    """
    compared, wrong = 0, []
    for number, (mine, theirs) in enumerate(zip(got, reference, strict=True), start=1):
        at = next(
            (i for i, pair in enumerate(zip(mine.tokens, theirs.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        if at is None and len(mine.tokens) == len(theirs.tokens):
            compared += 1
        elif at is None or theirs.gaps[at] >= NEAR_TIE:
            compared += 1
            wrong.append(f"prompt {number} differs from token {at if at is not None else len(mine.tokens)} on")
    if not compared:
        return CanaryResult(equal=None, detail=f"not compared: every prompt ends in a near tie ({source})")
    if wrong:
        return CanaryResult(equal=False, compared=compared, detail=f"{'; '.join(wrong)} ({source})")
    return CanaryResult(
        equal=True, compared=compared, detail=f"{compared} of {len(got)} prompts give the same tokens ({source})"
    )


def save_reference(folder: Path, model: str, answers: Sequence[Answer]) -> None:
    """Keep the answers of a collocated launch under ``folder``."""
    path = _path(folder, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(Reference(model=model, answers=tuple(answers))), encoding="utf-8")


def load_reference(folder: Path, model: str) -> tuple[Answer, ...] | None:
    """The stored answers of that model served collocated; None when no launch has stored any."""
    path = _path(folder, model)
    return load_yaml(path, Reference).answers if path.exists() else None


def _path(folder: Path, model: str) -> Path:
    return folder / "canary" / f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in model)}.yaml"


def _post(base_url: str, request: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(request).encode()
    call = urllib.request.Request(f"{base_url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise CanaryError(f"the canary got HTTP {error.code}: {error.read().decode(errors='replace')[:300]}") from error
    except (OSError, ValueError) as error:
        raise CanaryError(f"the canary got no answer from {base_url} ({error})") from error
