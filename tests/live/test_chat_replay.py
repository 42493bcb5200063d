"""Conversations replayed by chat on real engines, collocated and PD: the model's template in the prompts, answers of
the length that is asked, every follow-up behind its answer, and hits as the oracle foresees of the prompts that the
engines had. Of a model with a template of its own, and of one that answers in Harmony (benchmarks/chat_model.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_model
import pytest

from pdlab.core.workload import RunKey
from pdlab.results.store import Store
from pdlab.traffic.requests import TrafficRequest, read_requests
from tests.live.conftest import BUSY_MACHINE, ROOT, Stack

SESSIONS, TURNS, SYSTEM, USER, ANSWER = 10, 4, 160, 40, 12
WORKLOAD = f"""
seed: 3
endpoint: chat
conversations: {{rate_rps: 2.0, sessions: {SESSIONS}, turns: {TURNS}, user_tokens: {USER} lognormal:0.5,
                 answer_tokens: {ANSWER}, think_s: 0.3}}
tenants: {{a: {{share: 1.0, system_tokens: {SYSTEM}}}}}
"""
# Tokens of its own before and after each message, so that a prompt without the template is found.
TEMPLATE = "{% for message in messages %}ba{{ message.content }} ufo{% endfor %} wan"
DETAILS = ("--engine-arg", "enable_prompt_tokens_details=true")
BLOCK_TOKENS = 32  # of CPU engines
HITS_OFF = 0.02
DEPLOYED = {"collocated": ("--collocated",), "pd": ("--pd-spread",)}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def harmony(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with OpenAI's vocabulary whose answers are Harmony, however long. Nodes that are up have the environment
    of the launch that started them: the next launch starts them anew."""
    vocabulary = chat_model.vocabulary()
    if vocabulary is None:
        pytest.skip(f"{chat_model.VOCABULARY} does not name OpenAI's file o200k_base.tiktoken")
    stack.shutdown()  # exits with 1 if nothing is up
    folder, shape_of = tmp_path_factory.mktemp("harmony"), ROOT / "configs" / "models" / "gpt-oss-20b.yaml"
    return chat_model.build(vocabulary, folder, shape_of, chat_model.ENDLESS)


def replayed(stack: Stack, out: Path) -> dict[str, tuple[TrafficRequest, Any]]:
    """Every request of the workload and its record, by its id; what holds of any deployment is checked."""
    out.mkdir()
    file = out / "workload.yaml"
    file.write_text(WORKLOAD)
    assert stack.run("-m", "pdlab", "workload", str(file), "-o", str(out / "plan.jsonl")).code == 0
    words = ("-u", stack.url, "--out", str(out), "--workload", str(out / "plan.jsonl"))
    assert stack.run("-m", "pdlab", "bench", *words).code in (0, 3), "3 where the machine is busy"
    folder = out / stack.running().manifest.label
    run = json.loads((folder / "replay1.json").read_text())
    assert run["completed"] == SESSIONS * TURNS and set(run["validity"]["failed_gates"]) <= BUSY_MACHINE
    assert not {"token_counts", "dependencies", "cache_hits"} & run["validity"]["unchecked"].keys()
    by_id = {each.replayed.id: each for each in Store(folder).read_records(RunKey(kind="replay", value=1.0))}
    found = {request.id: (request, by_id[request.id]) for request in read_requests(out / "plan.jsonl")}
    for request, record in found.values():
        assert record.ok and record.output_tokens == request.out
        # Chunks of one token each: neither the role nor the end is one.
        assert len(record.itl_s) <= record.output_tokens - 1
        if request.parent is not None:
            parent = found[request.parent][1]
            assert parent.finish_s is not None and record.arrival_s >= parent.finish_s
            # A follow-up finds its parent's prompt.
            assert record.replayed.cached_tokens >= parent.input_tokens // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
    prompts = sum(record.input_tokens for _, record in found.values())
    counted, foreseen = (
        sum(getattr(record.replayed, name) for _, record in found.values())
        for name in ("cached_tokens", "foreseen_tokens")
    )
    assert foreseen > 0.3 * prompts, "conversations hit"
    assert abs(counted - foreseen) <= HITS_OFF * prompts, (counted, foreseen, prompts)
    print(json.dumps({"prompt tokens": prompts, "cached": counted, "foreseen": foreseen}))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", DEPLOYED)
def test_conversations_with_a_template(name: str, stack: Stack, template: Path, tmp_path: Path) -> None:
    flags = (*DEPLOYED[name], "--model", "tiny-llama", "--engine-arg", f"chat_template={template}", *DETAILS)
    assert stack.launch(*flags).code == 0
    (folder,) = {path.parent for path in (stack.folder / "cache").rglob("tokenizer_config.json")}
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    before, between, after = (len(encode(text, add_special_tokens=False).ids) for text in ("ba", " ufo", " wan"))
    for request, record in replayed(stack, tmp_path / "out").values():
        if request.parent is None:
            assert record.input_tokens == before + request.new_tokens + between + after


@pytest.mark.long
@pytest.mark.parametrize("name", DEPLOYED)
def test_conversations_in_harmony(name: str, stack: Stack, harmony: Any, tmp_path: Path) -> None:
    assert stack.launch(*DEPLOYED[name], "--model", str(harmony.shape), *DETAILS, env=harmony.env).code == 0
    found = replayed(stack, tmp_path / "out")
    # Only what the model said is in the history: the system's message and the frames of all are the same in each.
    frames = {record.input_tokens - request.new_tokens for request, record in found.values() if request.parent is None}
    assert len(frames) == 1 and min(frames) > 20
