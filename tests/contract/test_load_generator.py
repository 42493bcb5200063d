"""vLLM's benchmark loads without what the load generator leaves out, and takes no more from there than we put there."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from contract.conftest import printed

from pdlab.bench.client.protocol import SESSION_HEADER
from pdlab.bench.client.vllm_names import ENGINES_OWN

LOADS = """
import json, sys
from pathlib import Path
from pdlab.bench.client import worker
from pdlab.bench.client.worker import import_benchmark
import_benchmark()
from vllm.benchmarks.datasets import RandomDataset
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncOutput
from vllm.benchmarks.serve import TaskType, benchmark
print("LOADED", sorted({"torch._inductor.lowering", "vllm.lora.layers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the programs of this file print, in one process: vLLM's import takes 10 s of CPU."""
    return printed(LOADS + PROMPTS + IN_A_ROW, tmp_path_factory.mktemp("loads"))


def test_it_loads_without_compiler_and_lora_layers(lines: list[str]) -> None:
    assert [line for line in lines if line.startswith("LOADED ")] == ["LOADED []"]


def test_it_takes_what_the_stubs_have() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    taken: dict[str, set[str]] = {name: set() for name in ENGINES_OWN}
    files = sorted((Path(spec.submodule_search_locations[0]) / "benchmarks").rglob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in taken:
                taken[node.module] |= {alias.name for alias in node.names}
    assert taken == {name: set(attributes) for name, attributes in ENGINES_OWN.items()}


# Prompts as they are drawn, counted as a server counts them: its tokenizer puts a token of its own before each.
PROMPTS = """
from pdlab.bench.client.worker import _samples
from pdlab.bench.client.protocol import ClientLevel
from pdlab.core.workload import Closed, Open
from pdlab.deploy.cpu_engine.tiny_model import build_tokenizer
folder = Path(sys.argv[1]) / "own"
folder.mkdir()
build_tokenizer(folder, 4096)
(folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
from tokenizers import Tokenizer, processors
own = Tokenizer.from_file(str(folder / "tokenizer.json"))
own.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
own.save(str(folder / "tokenizer.json"))
from vllm.tokenizers import get_tokenizer
tokenizer = get_tokenizer(str(folder))
lengths = [(9, 1), (400, 30), (2, 7), (64, 3), (33, 12)]
level = ClientLevel(name="x", base_url="http://h", model="m", tokenizer="t", input_tokens=50, output_tokens=5, seed=3,
                    num_requests=5, load=Open(rate_rps=1.0), lengths=lengths)
for part, parts in ((0, 1), (1, 2)):
    samples = _samples(level.model_copy(update={"part": part, "parts": parts}), tokenizer)
    print("ASKED", json.dumps([(len(own.encode(s.prompt).ids), s.expected_output_len) for s in samples]))
"""


def test_prompts_have_the_lengths_that_are_asked_one_by_one(lines: list[str]) -> None:
    drawn = [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("ASKED ")]
    assert drawn == [[[9, 1], [400, 30], [2, 7], [64, 3], [33, 12]], [[400, 30], [64, 3]]]


# The same prompts with and without the short way; one tokenizer splits at spaces, the other has a token of two words.
IN_A_ROW = """
level = ClientLevel(name="x", base_url="http://h", model="m", tokenizer="t", input_tokens=200, output_tokens=5, seed=3,
                    num_requests=5, load=Closed(concurrency=1), prefix_tokens=20)
texts_in_a_row, found = worker._texts_in_a_row, []
for name in ("split", "merged"):
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    build_tokenizer(folder, 1024)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    if name == "merged":  # no split before merges, and one more merge: of two words that are tokens
        data = json.loads((folder / "tokenizer.json").read_text())
        data["pre_tokenizer"]["use_regex"] = False
        words = [token for token in data["model"]["vocab"] if token[0] == "\u0120" and token[1:].isalpha()]
        first, second = words[-2:]
        data["model"]["vocab"][first + second] = len(data["model"]["vocab"])
        data["model"]["merges"].append([first, second])
        (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = get_tokenizer(str(folder))
    drawn = []
    for short in (True, False):
        worker._texts_in_a_row = lambda *of: found.append(texts_in_a_row(*of) if short else None) or found[-1]
        drawn.append([sample.prompt for sample in worker._samples(level, tokenizer)])
    lengths = {len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in drawn[0]}
    print("DRAWN", name, found[-2] is not None, drawn[0] == drawn[1], lengths)
"""


def test_prompts_of_words_are_as_long_without_being_encoded(lines: list[str]) -> None:
    drawn = [line for line in lines if line.startswith("DRAWN ")]
    assert drawn == ["DRAWN split True True {200}", "DRAWN merged False True {200}"]


def _source(module: str) -> str:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / f"{module}.py").read_text(encoding="utf-8")


def test_a_replay_reads_what_vllms_functions_read() -> None:
    """`pdlab.bench.client.replay` puts its own handler of streams in the place of theirs, and drops chunks there."""
    source = _source("benchmarks/lib/endpoint_request_func")
    completions = source[source.index("async def async_request_openai_completions") :]
    completions = completions[: completions.index("\ndef ")]
    chat = source[source.index("async def async_request_openai_chat_completions") :]
    chat = chat[: chat.index("async def async_request_openai_audio")]
    for function in (completions, chat):
        assert "handler = StreamedResponseHandler()" in function and "handler.add_chunk(chunk_bytes)" in function
        assert 'chunk = message.removeprefix("data: ")' in function and 'if chunk != "[DONE]"' in function
        assert "output.latency = most_recent_timestamp - st" in function, "the last token's arrival"
    assert "request_func_input.chat_messages" in chat
    assert (
        "return await request_func(\n                request_func_input=request_func_input, session=session"
        in _source("benchmarks/serve")
    )


def test_engines_tell_the_ids_of_an_answers_tokens() -> None:
    protocol = _source("entrypoints/openai/completion/protocol")
    stream = protocol[protocol.index("class CompletionResponseStreamChoice") :]
    assert "    return_token_ids: bool | None" in protocol and "    token_ids: list[int] | None" in stream
    chat = _source("entrypoints/openai/chat_completion/protocol")
    chunk = chat[chat.index("class ChatCompletionStreamResponse(") :]
    choice = chat[chat.index("class ChatCompletionResponseStreamChoice(") :]
    assert "    prompt_token_ids: list[int] | None" in chunk[: chunk.index("\nclass ")], "of the first chunk"
    assert "    token_ids: list[int] | None" in choice[: choice.index("\nclass ")]
    assert "cached_tokens" in _source("entrypoints/serve/engine/protocol")


def test_rays_header_of_a_session_is_the_one_that_is_sent() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.submodule_search_locations
    constants = Path(spec.submodule_search_locations[0]) / "serve" / "_private" / "constants.py"
    declared = f'SERVE_SESSION_ID = get_env_str("RAY_SERVE_SESSION_ID_HEADER_KEY", "{SESSION_HEADER}")'
    assert declared in constants.read_text(encoding="utf-8")
