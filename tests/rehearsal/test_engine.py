"""Simulated engines answer as vLLM's do, and what they answer shows which KV they were given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlab.deploy.canary import compare, read_answer

ROOT = Path(__file__).resolve().parents[2]
Answers = dict[str, Any]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("engines")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engines.py")), str(folder)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: Answers = json.loads(done.stdout.splitlines()[-1])
    return found


def tokens(answer: list[Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer[0]["choices"]]


def events(answer: list[str]) -> list[dict[str, Any]]:
    assert answer[-1] == "data: [DONE]\n\n"
    return [json.loads(text.removeprefix("data: ")) for text in answer[:-1]]


def test_the_canary_finds_both_ways_equal(answers: Answers) -> None:
    alone, both = read_answer(answers["alone"][0]), read_answer(answers["both"][0])
    assert compare([both], [alone], "alone").equal is True
    assert answers["both"][0]["usage"]["completion_tokens"] == 12
    assert answers["both"][0]["choices"][0]["finish_reason"] == "length"


def test_another_prompt_has_another_answer(answers: Answers) -> None:
    assert len({str(tokens(answers[name])) for name in ("both", "other", "ids")}) == 3


def test_the_canary_sees_the_kv_of_another_request(answers: Answers) -> None:
    mixed, right = read_answer(answers["mixed"][0]), read_answer(answers["both"][0])
    assert compare([mixed], [right], "alone").equal is False


def test_a_stream_has_three_chunks_and_the_usage(answers: Answers) -> None:
    *chunks, usage = events(answers["streamed"])
    assert len(chunks) == 3
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert [streamed] == tokens(answers["both"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answers["both"][0]["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert usage["choices"] == [] and usage["usage"] == answers["both"][0]["usage"]


def test_several_prompts_and_several_choices(answers: Answers) -> None:
    assert tokens(answers["two"])[0] == tokens(answers["ids"])[0] != tokens(answers["two"])[1]
    assert tokens(answers["choices"]) == tokens(answers["ids"]) * 2
    assert [choice["index"] for choice in answers["two"][0]["choices"]] == [0, 1]


def test_a_chat_is_answered_and_a_long_prompt_refused(answers: Answers) -> None:
    assert answers["chat"][0]["choices"][0]["message"]["content"]
    assert answers["chat"][0]["usage"]["completion_tokens"] == 5
    assert answers["long"][0]["error"]["code"] == 400


def test_what_was_fetched_or_left_is_held_no_longer(answers: Answers) -> None:
    assert answers["held"] == [0.0, 0.0]
    assert answers["leases"] == 0
    assert answers["gone"][0]["error"]["code"] == 500
    assert answers["burst"] == [1] * 40


def test_the_share_of_the_pool_in_use_is_reported(answers: Answers) -> None:
    for most, last in answers["use"].values():
        assert 0 < most < 1 and last == 0.0


def test_what_is_counted_adds_up(answers: Answers) -> None:
    prefill, decode = answers["sums"]["prefill"], answers["sums"]["decode"]
    # 5 to decode, 1 alone, 2 x 2 sequences, the one mixed up, a burst, the one that was not decoded
    assert prefill["vllm_request_success"] == 52
    assert decode["vllm_request_success"] == 46
    assert decode["vllm_nixl_xfer_time_seconds_count"] == 46
    assert "vllm_nixl_num_kv_expired_reqs" not in prefill
    assert decode["vllm_nixl_bytes_transferred_sum"] > 0
    assert prefill["vllm_prefix_cache_hits"] > 0
    assert answers["blocks"] * 16 == pytest.approx(2_900_000, rel=0.05)


def test_fluid_engines_prefill_for_each_other_at_once(answers: Answers) -> None:
    assert [tokens(one) for one in answers["fluid"]] == [tokens(one) for one in answers["fluid alone"]]
    # Of twelve tokens the first comes with the step in which the KV cache joins the batch.
    assert all(generated >= 4 * 11 for generated in answers["generated"]), "each decoded four of the answers"


def test_pools_are_scattered_once_they_have_wrapped_unless_blocks_are_assumed_to_merge(answers: Answers) -> None:
    assert answers["scattered"] == [None, False]


def test_cached_tokens_are_reported_where_enabled(answers: Answers) -> None:
    first, again = (answers[name][0]["usage"] for name in ("first", "again"))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    # The last token is computed, and with it its block.
    assert again["prompt_tokens_details"]["cached_tokens"] == (again["prompt_tokens"] - 1) // 16 * 16 > 0
    assert answers["both"][0]["usage"]["prompt_tokens_details"] is None, "as vLLM, which reports nothing by default"


def test_the_prompts_tokens_of_a_chat_stand_beside_the_choices(answers: Answers) -> None:
    first, *rest, usage = events(answers["chat streamed"])
    assert len(first["prompt_token_ids"]) == usage["usage"]["prompt_tokens"] > 0
    assert not any("prompt_token_ids" in each for each in (*rest, *first["choices"]))
