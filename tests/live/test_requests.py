"""Requests of every shape, and of every ill will, against real engines: collocated behind an ingress, then PD
with direct streaming, so that two deployments cover both serving paths. The tests build on one another."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import chat_model
import pytest
import request_shapes
from support import timed
from support.processes import title
from support.web import fetch

from tests.live.conftest import ROOT, Stack

SHAPES: list[Any] = []
CHATS: dict[str, Any] = {}
DETAILS = ("--engine-arg", "enable_prompt_tokens_details=true")
KV_BLOCK_TOKENS = 32  # of CPU engines
ALONE: dict[str, Any] = {}
GENERATE = {"model": "tiny-gptoss", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}


def post(url: str, route: str, body: dict[str, Any] | bytes, timeout_s: float = 60) -> tuple[int, str]:
    return fetch(f"{url}{route}", body, timeout_s=timeout_s)


def status_of(url: str, route: str) -> int:
    return fetch(f"{url}{route}")[0]


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    """A stranger's listener that an engine might be told to fetch KV cache from."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1.0)
        yield listener


def check_guard(url: str, peer: socket.socket) -> None:
    """What no client may do, on either serving path; afterwards the engines answer as before."""
    prompt = [7] * 40
    plain = {"model": "tiny-gptoss", "prompt": prompt, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    before = post(url, "/v1/completions", plain)
    assert before[0] == 200
    remote = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "made-up",
        "remote_request_id": "made-up",
        "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1",
        "remote_port": peer.getsockname()[1],
        "tp_size": 1,
    }
    transfer_params: list[dict[str, Any]] = [{"do_remote_prefill": True}, remote, {"do_remote_decode": True}]
    chat = {"model": "tiny-gptoss", "messages": [{"role": "user", "content": "ba"}], "max_tokens": 2}
    for params in transfer_params:
        for route, body in (("/v1/completions", plain), ("/v1/chat/completions", chat)):
            for hidden in ({"kv_transfer_params": params}, {"vllm_xargs": {"kv_transfer_params": "x"}}):
                status, text = post(url, route, {**body, **hidden})
                assert status == 400 and "kv_transfer_params is set by the deployment itself" in text
        # Routes of vLLM's own, where the parameter reached the engine core and ended it.
        for route in ("/inference/v1/generate", "/v1/responses", "/v1/messages"):
            status, text = post(url, route, {**GENERATE, "input": "ba", "kv_transfer_params": params}, timeout_s=20)
            assert status == 404 and "is not served here" in text
            assert "engine_id" not in text
    with pytest.raises(TimeoutError):
        peer.accept()
    for route in ("/docs", "/openapi.json", "/v1/load_lora_adapter", "/version", "/server_info"):
        assert status_of(url, route) == 404
    assert status_of(url, "/v1/models") == 200
    assert status_of(url, "/v1/models/tiny-gptoss") == 200
    status, text = post(url, "/v1/completions", {**plain, "prompt": "ba " * (4_000_000 // 3)})
    assert status == 413 and "the limit is 2097152" in text
    status, text = post(url, "/v1/completions", {**plain, "prompt": ["ba"] * 65})
    assert status == 400 and "the limit is 64" in text
    status, text = post(url, "/v1/completions", {**plain, "max_tokens": 10**6})
    assert status == 400
    after = post(url, "/v1/completions", plain)
    assert json.loads(after[1])["choices"] == json.loads(before[1])["choices"]


def check_cached(url: str, *, one_by_one: bool) -> None:
    """What no engine computed for a request is what its usage calls cached.

    ``one_by_one``: every sequence is a request of its own. In one request of one engine, the second sequence finds the
    blocks of the first in the prefix cache, and vLLM reports these.
    """
    rng = random.Random(23)

    def cached(prompt: Any, **more: Any) -> Any:
        body = {"model": "tiny-gptoss", "prompt": prompt, "max_tokens": 3, "ignore_eos": True, **more}
        status, text = post(url, "/v1/completions", body)
        assert status == 200, text
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event] if "stream" in more else [text]
        answers = [json.loads(event) for event in events if event != "[DONE]"]
        (usage,) = [answer["usage"] for answer in answers if answer.get("usage")]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def fresh(tokens: int = 300) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(tokens)]

    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, streamed):
        prompt = fresh()
        assert cached(prompt, **more) == 0
        again = cached(prompt, **more)
        assert 0 < again < len(prompt) and again % KV_BLOCK_TOKENS == 0
        if one_by_one:
            assert cached(fresh(), n=2, temperature=1.0, **more) == 0


@pytest.mark.long
def test_collocated_behind_an_ingress(stack: Stack, peer: socket.socket) -> None:
    done = stack.launch("--collocated", "--no-direct-streaming", "--expose", "/detokenize", *DETAILS)
    assert done.code == 0
    check_cached(stack.url, one_by_one=False)
    assert "canary: a list of prompts" in done.text and "n=2" in done.text
    check_guard(stack.url, peer)
    timed.check([timed.ask(stack.url, stream=stream) for stream in (True, False) * 10], "collocated")
    # The guard lets it through; whether the ingress can serve it is its own affair.
    assert post(stack.url, "/detokenize", {"model": "tiny-gptoss", "tokens": [300, 301]})[0] != 404
    SHAPES.extend(request_shapes.shapes(request_shapes.decisive(stack.url)))
    ALONE.update({shape.name: request_shapes.ask(stack.url, shape) for shape in SHAPES})
    assert not {name: answer.content for name, answer in ALONE.items() if answer.status >= 500}
    # A chat request of gpt-oss loads Harmony's vocabulary, which a machine without internet lacks.
    chat = ALONE["chat"]
    assert chat.status == 200 or (chat.status == 400 and "o200k_base.tiktoken" in chat.content)
    answered = [name for name, reply in ALONE.items() if reply.status == 200]
    assert len(answered) > 30, "shapes that are refused prove nothing"


@pytest.mark.long
def test_pd_refuses_what_steers_transfers(stack: Stack, peer: socket.socket) -> None:
    done = stack.launch("--pd-spread", *DETAILS)
    assert done.code == 0
    check_cached(stack.url, one_by_one=True)
    assert "canary: a list of prompts" in done.text and "n=2" in done.text
    engines = engine_pids(stack)
    check_guard(stack.url, peer)
    assert status_of(stack.url, "/health") == 200 and status_of(stack.url, "/metrics") == 200
    assert post(stack.url, "/detokenize", {"model": "tiny-gptoss", "tokens": [300]})[0] == 404
    assert engine_pids(stack) == engines, "a replica was started anew"


@pytest.mark.long
def test_every_shape_is_answered_as_by_one_engine_alone(stack: Stack) -> None:
    assert ALONE, "the collocated launch did not answer"
    wrong = {}
    for shape in SHAPES:
        mine = request_shapes.ask(stack.url, shape)
        if shape.route == "/tokenize":  # Ray's ingress, which the other deployment has, does not serve it
            text = {"model": "tiny-gptoss", "prompt": shape.body["prompt"], "return_token_ids": True, "max_tokens": 1}
            answer = json.loads(post(stack.url, "/v1/completions", text)[1])
            how = None if mine.content == answer["choices"][0]["prompt_token_ids"] else f"{mine} instead of {answer}"
        else:
            how = request_shapes.differs(mine, ALONE[shape.name])
        if how:
            wrong[shape.name] = how
    assert not wrong


@pytest.mark.long
def test_a_list_of_prompts_is_answered_in_its_order(stack: Stack) -> None:
    """Not against another deployment: each prompt of the list against the same prompt asked by itself."""
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 1000) for _ in range(length)] for length in (300, 33, 600, 5)]
    alone = [stack.complete(prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    body = {"model": "tiny-gptoss", "prompt": prompts, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    status, text = post(stack.url, "/v1/completions", {**body, "return_token_ids": True})
    assert status == 200
    answer = json.loads(text)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == alone
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 64


@pytest.mark.long
@pytest.mark.parametrize("wait_s", [0.0, 0.03, 0.15], ids=["at once", "in prefill", "in decode"])
@pytest.mark.parametrize("shape", ["one", "stream", "list"])
def test_a_client_that_goes_away_leaves_no_blocks(stack: Stack, wait_s: float, shape: str) -> None:
    assert stack.complete([5, 6, 7], tokens=1), "nothing is served"
    rng = random.Random(wait_s)
    prompt = [rng.randrange(10, 1000) for _ in range(3000)]
    body = {"model": "tiny-gptoss", "prompt": prompt, "max_tokens": 2000, "ignore_eos": True}
    body |= {"stream": True} if shape == "stream" else {"prompt": [prompt, prompt[::-1]]} if shape == "list" else {}
    data = json.dumps(body).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", stack.port), timeout=30) as client:
            head = ("POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json")
            client.sendall("\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data)
            if shape == "stream" and wait_s > 0.1:
                assert b"200" in client.recv(64)  # the first tokens have been sent
            time.sleep(wait_s)


@pytest.mark.long
def test_nothing_is_held_after_them(stack: Stack) -> None:
    """Blocks whose client went away between prefill and decode stay until prefill's lease of 30 s has ended; with no
    request no engine steps, and none would notice. Ray's pages show a gauge for one moment after it was set."""
    deadline = time.monotonic() + 400
    held: dict[str, float] = {}
    while len(held) < 6 or any(held.values()):
        assert time.monotonic() < deadline, held
        stack.complete([5, 6, 7], tokens=2)
        for _ in range(10):
            time.sleep(0.2)
            held |= gauges(stack)


@pytest.fixture(scope="module")
def chat(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with OpenAI's vocabulary, with the engine arguments of the catalogue's gpt-oss-20b.

    Nodes that are up have the environment of the launch that started them: the next launch starts them anew.
    """
    vocabulary = chat_model.vocabulary()
    if vocabulary is None:
        pytest.skip(f"{chat_model.VOCABULARY} does not name OpenAI's file o200k_base.tiktoken")
    folder = tmp_path_factory.mktemp("chat")
    stack.shutdown()  # exits with 1 if nothing is up
    return chat_model.build(vocabulary, folder, ROOT / "configs" / "models" / "gpt-oss-20b.yaml")


HELLO, THOUGHT, PARIS = "Hello world", "Think first", '{"city":"Paris"}'
THOUGHT_TOKENS = 2
CALL = ["get_weather", {"city": "Paris"}]


def check_chat(url: str, model: Any) -> None:
    """Every shape of chat has the parts that its name says, and no others."""
    wrong = {}
    for shape in request_shapes.chat_shapes(model):
        CHATS.setdefault(shape.name, []).append(answer := request_shapes.ask(url, shape))
        if how := fault_of_chat(shape, answer):
            wrong[shape.name] = how
    assert not wrong, json.dumps(wrong, indent=1)


REFUSED = ("ignore_eos", "functions", "a role that is none", "broken schema")


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def fault_of_chat(shape: Any, answer: Any) -> str | None:
    name, body = shape.name, shape.body
    if any(word in name for word in REFUSED):
        if answer.status == 200 and body.get("stream"):  # it had begun
            return None if answer.content["error"]["code"] == 400 else f"{answer}"
        return None if answer.status == 400 else f"{answer}"
    if answer.status != 200 or not isinstance(answer.content, dict):
        return f"{answer}"
    choices, usage = answer.content["choices"], answer.content["usage"]
    called, thought = (
        ("call" in name and "null" not in name) or "required" in name or "named" in name,
        "reasoning" in name,
    )
    text = "" if called else PARIS if "json_schema" in name else HELLO
    end = "tool_calls" if called and "named" not in name else "stop"
    for choice in choices:
        calls = [[function, parsed(arguments)] for function, arguments in choice["calls"]]
        found = (choice["text"], choice["reasoning"], calls, choice["end"])
        if found != (text, THOUGHT if thought else "", [CALL] if called else [], end):
            return f"{found}"
    if len(choices) != body.get("n", 1) or (usage is None and "usage" in name):
        return f"{len(choices)} choices, usage {usage}"
    reasoning = len(choices) * THOUGHT_TOKENS if thought else 0
    if usage is not None and usage["completion_tokens_details"] != {"reasoning_tokens": reasoning}:
        return f"{usage}"
    return None


@pytest.mark.long
def test_chat_collocated(stack: Stack, chat: Any) -> None:
    assert stack.launch("--collocated", "--model", str(chat.shape), env=chat.env).code == 0
    check_chat(stack.url, chat)


def test_chat_on_pd(stack: Stack, chat: Any) -> None:
    assert stack.launch("--pd-spread", "--model", str(chat.shape), env=chat.env).code == 0
    engines = engine_pids(stack)
    check_chat(stack.url, chat)
    assert engine_pids(stack) == engines, "a replica was started anew"
    # Against one engine alone, if that was launched before.
    both_answered = {name: both for name, both in CHATS.items() if len(both) == 2}
    assert len(both_answered) > 20 or all(len(both) == 1 for both in CHATS.values())
    different = {name: request_shapes.differs(both[1], both[0]) for name, both in both_answered.items()}
    assert not {name: how for name, how in different.items() if how}


@pytest.mark.long
def test_tools_that_no_parser_reads_are_refused(stack: Stack, chat: Any) -> None:
    flags = ("--engine-arg", "enable_auto_tool_choice=false")
    assert stack.launch("--collocated", "--model", str(chat.shape), *flags, env=chat.env).code == 0
    answers = {shape.name: request_shapes.ask(stack.url, shape) for shape in request_shapes.chat_shapes(chat)}
    tools = {name: answer.status for name, answer in answers.items() if "tools," in name}
    assert len(tools) > 10 and {name for name, status in tools.items() if status == 200} == {"chat, tools, none"}
    assert answers["chat"].status == 200


def gauges(stack: Stack) -> dict[str, float]:
    """Per engine: requests that run and wait, and the share of KV blocks in use."""
    from pdlab.deploy.metrics_page import read_pages, samples

    running = stack.running()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    values = {}
    for page in read_pages(running.metrics_urls):
        for sample in samples(page):
            replica = sample.replica
            if sample.name in names and replica in running.replicas:
                values[f"{running.pools[replica]} {sample.name}"] = sample.value
    return values


def engine_pids(stack: Stack) -> set[int]:
    pids = {pid for pid in stack.pids() if "ServeReplica" in title(pid)}
    assert pids
    return pids
