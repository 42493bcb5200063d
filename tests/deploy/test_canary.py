"""The canary: what counts as the same answer, what proves nothing, and what a broken server gives."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.web import body_of, reply, web_server

from pdlab.core.errors import CanaryError
from pdlab.deploy import canary
from pdlab.deploy.canary import CanaryAnswer, ask, compare, load_reference, read_answer, save_reference


def answer(*tokens: int, near: dict[int, dict[int, float]] | None = None, best: float = -0.1) -> CanaryAnswer:
    """Tokens with a log-probability of ``best``; ``near``: at which position which others are behind it by how much."""
    others = near or {}
    tops = [{token: best} | {o: best - gap for o, gap in others.get(i, {}).items()} for i, token in enumerate(tokens)]
    return CanaryAnswer(tokens=tokens, tops=tuple(tops))


def completion(*tokens: int, second: int = 900, gap: float = 3.0) -> dict[str, Any]:
    """As vLLM answers: per token the log-probabilities of the best and of another one."""
    tops = [{f"token_id:{token}": -0.1, f"token_id:{second}": -0.1 - gap} for token in tokens]
    return {"choices": [{"token_ids": list(tokens), "logprobs": {"top_logprobs": tops}}]}


def turned(at: int, mine: float, theirs: float) -> tuple[CanaryAnswer, CanaryAnswer]:
    """Two answers of eight tokens: at ``at`` one takes 50, the other 60, each with the other's so far behind."""
    one = [1, 2, 3, 4, 5, 6, 7, 8]
    other = list(one)
    one[at], other[at] = 50, 60
    return answer(*one, near={at: {60: mine}}), answer(*other, near={at: {50: theirs}})


SURE = answer(7, 8, 9)


class TestCompare:
    def test_equal(self) -> None:
        result = compare([answer(1, 2), answer(3)], [answer(1, 2), answer(3)], "the reference")
        assert (result.equal, result.compared, result.rounded) == (True, 2, 0)
        assert result.detail == "2 of 2 prompts give the same tokens (the reference)"

    def test_different(self) -> None:
        result = compare([answer(1, 2, 3), answer(7)], [answer(1, 9, 3), answer(7)], "the reference")
        assert (result.equal, result.compared) == (False, 2)
        assert result.detail == "prompt 1 differs from token 2 on (the reference)"

    def test_every_different_prompt_is_named(self) -> None:
        detail = compare([answer(1), answer(2)], [answer(3), answer(4)], "r").detail
        assert "prompt 1" in detail and "prompt 2" in detail

    @pytest.mark.parametrize(
        ("at", "mine", "theirs", "rounding", "equal"),
        [
            (5, 0.125, 0.125, 0.5, True),
            (5, 0.5, 0.5, 0.5, True),  # inclusive: bfloat16 has exactly these steps
            (5, 0.625, 0.125, 0.5, False),
            (5, 0.125, 0.625, 0.5, False),
            (5, 0.625, 0.625, 1.0, True),
            (4, 0.5, 0.5, 0.5, True),
            (3, 0.5, 0.5, 0.5, False),
            (3, 0.25, 0.25, 0.5, True),
            (0, 0.125, 0.125, 0.5, True),
            (0, 0.375, 0.125, 0.5, False),
        ],
    )
    def test_two_candidates_that_change_places(
        self, at: int, mine: float, theirs: float, rounding: float, equal: bool
    ) -> None:
        """Both sides must have them close, and closer where there was nothing yet to add up."""
        one, other = turned(at, mine, theirs)
        result = compare([one, SURE], [other, SURE], "r", rounding=rounding)
        assert (result.equal, result.rounded) == (equal, int(equal))
        if equal:
            assert result.detail.startswith("1 of 2 prompts give the same tokens; prompt 1 takes another token at")

    def test_a_token_that_the_reference_did_not_consider_is_a_difference(self) -> None:
        one, other = turned(6, 0.1, 0.1)
        foreign = one.model_copy(update={"tokens": (*one.tokens[:6], 99, 8)})
        assert compare([foreign, SURE], [other, SURE], "r").equal is False

    def test_what_the_deployment_itself_was_sure_of_is_no_rounding(self) -> None:
        """Damaged KV cache fails not only where the reference is sure of itself."""
        one, other = turned(6, 0.1, 0.1)
        sure = one.model_copy(update={"tops": (*one.tops[:6], {50: -0.1}, one.tops[7])})
        assert compare([sure, SURE], [other, SURE], "r").equal is False

    def test_equal_tokens_of_other_log_probabilities_are_a_difference(self) -> None:
        """Greedy tokens may survive damage that the distribution shows."""
        shifted = answer(7, 8, 9, best=-0.9)
        result = compare([shifted, SURE], [SURE, SURE], "r")
        assert result.equal is False
        assert result.detail == "prompt 1 has other log-probabilities (by 0.8 on average over 3 tokens) (r)"
        assert compare([answer(7, 8, 9, best=-0.4), SURE], [SURE, SURE], "r").equal is True
        assert compare([shifted, SURE], [SURE, SURE], "r", rounding=1.0).equal is True

    def test_a_near_tie_behind_other_log_probabilities_is_no_rounding(self) -> None:
        one, other = turned(5, 0.1, 0.1)
        tops = tuple({token: value - 0.8 for token, value in top.items()} for top in one.tops)
        assert compare([one.model_copy(update={"tops": tops}), SURE], [other, SURE], "r").equal is False

    def test_more_than_one_early_difference_is_no_rounding(self) -> None:
        one, other = turned(1, 0.1, 0.1)
        assert compare([one, SURE, SURE], [other, SURE, SURE], "r").equal is True
        result = compare([one, one, SURE], [other, other, SURE], "r")
        assert result.equal is False
        assert result.detail.startswith("2 of 3 prompts differ among their first 4 tokens; prompt 1 takes")
        assert compare([one, one], [other, other], "r", bounded=False).equal is None

    def test_where_most_are_rounded_a_third_of_the_tokens_must_agree(self) -> None:
        late, other_late = turned(7, 0.1, 0.1)
        assert compare([late, late, SURE], [other_late, other_late, SURE], "r").equal is True
        long = tuple(range(100, 120))
        one, other = (
            CanaryAnswer(tokens=(*a.tokens[:5], *long), tops=(*a.tops[:5], *({token: -0.1} for token in long)))
            for a in turned(4, 0.1, 0.1)
        )
        result = compare([one, one, SURE], [other, other, SURE], "r")
        assert result.equal is False and result.detail.startswith("only 11 of 53 tokens agree; ")

    def test_only_near_ties_is_not_compared(self) -> None:
        one, other = turned(5, 0.1, 0.1)
        for count in (1, 3):
            result = compare([one] * count, [other] * count, "r")
            assert (result.equal, result.rounded) == (None, count)
            assert result.detail.startswith("not compared")

    @pytest.mark.parametrize(("tokens", "reference"), [((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 2))])
    def test_another_length_is_a_difference(self, tokens: tuple[int, ...], reference: tuple[int, ...]) -> None:
        result = compare([answer(*tokens)], [answer(*reference)], "r")
        assert result.equal is False
        assert "differs from token 3 on" in result.detail

    def test_prompts_that_one_side_could_not_take_are_left_out(self) -> None:
        result = compare([answer(1)], [answer(1), answer(2)], "r")
        assert (result.equal, result.compared) == (True, 1)

    def test_nothing_at_all_is_not_compared(self) -> None:
        assert compare([], [], "r").equal is None


SURE_SHARE = 0.9
VOCABULARY, TRIALS = 100, 30


def greedy(prompt: int, noise: np.random.Generator, sigma: float, damage: float = 0.0) -> CanaryAnswer:
    """A model whose logits depend on everything before, computed with an error of ``sigma`` a logit and kept in steps
    of 0.125 as bfloat16 does; ``damage``: standard deviation of what a wrong KV cache adds."""
    tokens: list[int] = []
    tops = []
    for _ in range(canary.MAX_TOKENS):
        exact = np.random.default_rng([prompt, *tokens])
        logits = exact.normal(20, 3, VOCABULARY) + noise.normal(0, np.hypot(sigma, damage), VOCABULARY)
        if exact.random() < SURE_SHARE:  # as a trained model on a list of facts
            logits[exact.integers(VOCABULARY)] += 20
        logits = np.round(logits * 8) / 8
        best = [int(token) for token in np.argsort(-logits, kind="stable")[: canary.TOP]]
        whole = logits[best[0]] + np.log(np.exp(logits - logits[best[0]]).sum())
        tokens.append(best[0])
        tops.append({token: float(logits[token] - whole) for token in best})
    return CanaryAnswer(tokens=tuple(tokens), tops=tuple(tops))


def trials(damage: float, sigma: float, count: int = TRIALS) -> list[bool | None]:
    """What the canary says of ``count`` deployments of three prompts each."""
    verdicts = []
    for number in range(count):
        mine, theirs = (np.random.default_rng([side, number]) for side in (1, 2))
        prompts = range(3 * number, 3 * number + 3)
        answers = [greedy(prompt, mine, sigma, damage) for prompt in prompts]
        reference = [greedy(prompt, theirs, sigma) for prompt in prompts]
        verdicts.append(compare(answers, reference, "r").equal)
    return verdicts


def test_rounding_is_told_from_damage_on_a_model_whose_truth_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model is not sure, its best two are an exponential's gap apart: some prompts end in near ties."""
    assert trials(damage=0.0, sigma=0.0) == [True] * TRIALS
    rounded = trials(damage=0.0, sigma=0.05)
    assert rounded.count(True) >= TRIALS - 1, "rounding is no corruption"
    monkeypatch.setattr(sys.modules[__name__], "SURE_SHARE", 0.0)  # as random weights: near ties in every prompt
    assert trials(damage=0.0, sigma=0.03).count(False) <= TRIALS // 10
    assert trials(damage=0.5, sigma=0.03) == [False] * TRIALS
    monkeypatch.undo()
    for damage in (4.0, 8.0):
        assert trials(damage, sigma=0.05) == [False] * TRIALS, "a cache that arrives damaged is"


class TestReadAnswer:
    def test_tokens_and_log_probabilities(self) -> None:
        assert read_answer(completion(4, 5)) == answer(4, 5, near={0: {900: 3.0}, 1: {900: 3.0}})

    def test_one_candidate_only(self) -> None:
        body = {"choices": [{"token_ids": [4], "logprobs": {"top_logprobs": [{"token_id:4": 0.0}]}}]}
        assert read_answer(body) == answer(4, best=0.0)

    @pytest.mark.parametrize(
        "broken",
        [
            {},
            {"error": {"message": "no"}},
            {"choices": []},
            {"choices": None},
            {"choices": ["text"]},
            {"choices": [{"text": "no ids"}]},
            {"choices": [{"token_ids": None, "logprobs": {"top_logprobs": []}}]},
            {"choices": [{"token_ids": [1], "logprobs": None}]},
            {"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [None]}}]},
            {"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [{}]}}]},
            {"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [{"token_id:1": None, "x": 1.0}]}}]},
            {"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [{"text": -0.1}]}}]},
            {"choices": [{"token_ids": ["one"], "logprobs": {"top_logprobs": [{"token_id:1": 0.0}]}}]},
            {"choices": [{"token_ids": [1, 2], "logprobs": {"top_logprobs": [{"token_id:1": 0.0}]}}]},
            {"choices": [{"token_ids": [], "logprobs": {"top_logprobs": []}}]},
            [],
        ],
        ids=str,
    )
    def test_malformed(self, broken: Any) -> None:
        with pytest.raises(CanaryError, match="the canary's answer has") as caught:
            read_answer(broken)
        assert "\n" not in str(caught.value)


class TestPrompts:
    def test_are_the_same_every_time(self) -> None:
        assert canary.prompts() == canary.prompts()
        assert canary.requests("m") == canary.requests("m")

    def test_grow(self) -> None:
        sizes = [len(prompt) for prompt in canary.prompts()]
        assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes) >= 3

    def test_share_no_beginning_that_a_prefix_cache_could_answer(self) -> None:
        beginnings = {prompt[:30] for prompt in canary.prompts()}
        assert len(beginnings) == len(canary.prompts())

    def test_requests_are_greedy_and_of_one_length(self) -> None:
        for request in canary.requests("m"):
            assert request["model"] == "m"
            assert (request["temperature"], request["ignore_eos"]) == (0.0, True)
            assert request["max_tokens"] == canary.MAX_TOKENS
            assert not request.get("stream")


class TestReference:
    def test_round_trip(self, tmp_path: Path) -> None:
        kept = [answer(1, 2, near={0: {5: 0.1}}), answer(3)]
        save_reference(tmp_path, "org/model", kept)
        assert load_reference(tmp_path, "org/model") == tuple(kept)
        assert [path.suffix for path in (tmp_path / "canary").iterdir()] == [".yaml"]

    def test_the_last_one_counts(self, tmp_path: Path) -> None:
        save_reference(tmp_path, "m", [answer(1)])
        save_reference(tmp_path, "m", [answer(2)])
        assert load_reference(tmp_path, "m") == (answer(2),)

    def test_none(self, tmp_path: Path) -> None:
        assert load_reference(tmp_path, "m") is None

    def test_a_model_whose_file_has_the_same_name(self, tmp_path: Path) -> None:
        save_reference(tmp_path, "org/model", [answer(1)])
        assert load_reference(tmp_path, "org_model") is None

    def test_answers_to_other_prompts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_reference(tmp_path, "m", [answer(1)])
        monkeypatch.setattr(canary, "FACTS", (5, 6))
        assert load_reference(tmp_path, "m") is None

    @pytest.mark.parametrize("text", ["", "model: m\n", "model: [", "\x00"], ids=["empty", "old", "broken", "binary"])
    def test_an_unusable_file_is_no_reference(self, text: str, tmp_path: Path) -> None:
        save_reference(tmp_path, "m", [answer(1)])
        (tmp_path / "canary" / "m.yaml").write_text(text)
        assert load_reference(tmp_path, "m") is None


Reply = Callable[[dict[str, Any]], tuple[int, bytes]]


@contextmanager
def server(complete: Reply) -> Iterator[str]:
    """A server of completions that ``complete`` makes of the requests."""

    def answer(call: BaseHTTPRequestHandler) -> None:
        assert (call.command, call.path) == ("POST", "/v1/completions")
        request = body_of(call)
        status, body = complete(request)
        kind = "text/event-stream" if request.get("stream") else "application/json"
        length = len(body) + (100 if status == 299 else 0)  # a status of 299 stands for an answer that breaks off
        with suppress(BrokenPipeError):  # a client that gave up
            reply(call, body, status, content_type=kind, content_length=length)

    with web_server(answer) as url:
        yield url


class TestAsk:
    def test_asks_every_prompt(self) -> None:
        paths: list[str] = []

        def reply(request: dict[str, Any]) -> tuple[int, bytes]:
            paths.append(request["prompt"])
            return 200, json.dumps(completion(len(paths))).encode()

        with server(reply) as url:
            assert ask(url, "m") == [read_answer(completion(i + 1)) for i in range(len(paths))]
        assert paths == canary.prompts()

    def test_prompts_too_long_for_the_deployment_are_left_out(self) -> None:
        def reply(request: dict[str, Any]) -> tuple[int, bytes]:
            if len(request["prompt"]) > len(canary.prompts()[0]):
                return 400, b'{"error": {"message": "maximum context length"}}'
            return 200, json.dumps(completion(1)).encode()

        with server(reply) as url:
            assert ask(url, "m") == [read_answer(completion(1))]

    @pytest.mark.parametrize(
        ("status", "body", "message"),
        [
            (400, b'{"error":\n {"message": "no such\nfield"}}', "HTTP 400: .*no such field"),
            (404, b'{"error": {"message": "no model"}}', "HTTP 404: .*no model"),
            (500, b"<html>\nInternal error", "HTTP 500: <html> Internal error"),
            (503, b"", "HTTP 503"),
            (200, b"no JSON", "no answer"),
            (200, b"", "no answer"),
            (299, b'{"choices"', "no answer"),
            (200, b"\xff\xfe", "no answer"),
            (200, b'{"error": "busy"}', "no tokens .*busy"),
            (200, b"[]", "no tokens"),
        ],
    )
    def test_bad_answers_are_one_line(self, status: int, body: bytes, message: str) -> None:
        with server(lambda _: (status, body)) as url, pytest.raises(CanaryError, match=message) as caught:
            ask(url, "m")
        assert "\n" not in str(caught.value)

    def test_an_error_after_a_good_answer_is_an_error(self) -> None:
        replies = iter([(200, json.dumps(completion(1)).encode()), (500, b"dead")])
        with server(lambda _: next(replies)) as url, pytest.raises(CanaryError, match="HTTP 500: dead"):
            ask(url, "m")

    def test_an_answer_that_never_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(canary, "TIMEOUT_S", 0.2)
        leave = threading.Event()

        def hang(_: dict[str, Any]) -> tuple[int, bytes]:
            leave.wait(10)
            return 503, b""

        with server(hang) as url:
            try:
                with pytest.raises(CanaryError, match="timed out"):
                    ask(url, "m")
            finally:
                leave.set()


class TestShapes:
    """A server that answers a prompt's length, as any shape of request asks for it."""

    PLAIN = tuple(answer(len(prompt), 7) for prompt in canary.prompts())

    @staticmethod
    def reply(request: dict[str, Any], wrong: str = "") -> tuple[int, bytes]:
        prompt = request["prompt"]
        prompts = prompt if isinstance(prompt, list) else [prompt]
        repeated = [p for p in prompts for _ in range(request.get("n", 1))]
        kind = "stream" if request.get("stream") else "list" if isinstance(prompt, list) else "n"
        if wrong == kind:
            repeated[-1] = "xx"  # the last one of a list is answered from another's blocks
        choices = []
        for index, text in enumerate(repeated):
            (choice,) = completion(len(text), 7)["choices"]
            choices.append({**choice, "index": index})
        choices.reverse()
        if wrong == "numbers":
            choices[0]["index"] = 0
        if kind != "stream":
            return 200, json.dumps({"choices": choices}).encode()
        (choice,) = choices
        tops = choice["logprobs"]["top_logprobs"]
        chunks = [
            {"choices": [{"index": 0, "token_ids": [token], "logprobs": {"top_logprobs": [top]}}]}
            for token, top in zip(choice["token_ids"], tops, strict=True)
        ]
        lines = [json.dumps(chunk) for chunk in [*chunks, {"choices": []}]] + ([] if wrong == "cut" else ["[DONE]"])
        return 200, "".join(f"data: {line}\n\n" for line in lines).encode()

    @classmethod
    def results_of(cls, wrong: str = "", sequences: int = 64, count: int = 3) -> dict[str, Any]:
        with server(lambda request: cls.reply(request, wrong)) as url:
            return canary.ask_shapes(url, "m", cls.PLAIN[:count], sequences)

    def test_equal(self) -> None:
        assert {name: result.equal for name, result in self.results_of().items()} == {
            "a list of prompts": True,
            "n=2": True,
            "a stream": True,
        }

    @pytest.mark.parametrize(("wrong", "name"), [("list", "a list of prompts"), ("n", "n=2"), ("stream", "a stream")])
    def test_a_wrong_shape_is_named(self, wrong: str, name: str) -> None:
        results = self.results_of(wrong)
        assert [shape for shape, result in results.items() if result.equal is False] == [name]

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ("numbers", r"a list of prompts is answered by choices \[0, 0, 1\] instead of 0 to 2"),
            ("cut", r"does not end with \[DONE\]"),
        ],
    )
    def test_an_answer_without_its_form_is_an_error(self, wrong: str, words: str) -> None:
        with pytest.raises(CanaryError, match=words):
            self.results_of(wrong)

    @pytest.mark.parametrize(("sequences", "names"), [(1, {"a stream"}), (2, {"n=2", "a stream"})])
    def test_what_the_deployment_does_not_let_through_is_not_asked(self, sequences: int, names: set[str]) -> None:
        assert set(self.results_of(sequences=sequences)) == names

    def test_only_the_prompts_that_fit(self) -> None:
        assert self.results_of(count=1)["a list of prompts"].compared == 1
