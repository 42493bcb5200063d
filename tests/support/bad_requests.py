"""Bad requests to the application, a hundred kinds and more: what each sends, and whether the guard decides.

Each must be answered with a 4xx whose body says in one line what is wrong, on every serving path. What the guard
lets through is refused by vLLM or by Ray Serve LLM.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "tiny-gptoss"
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 2, "temperature": 0.0}
TALK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "ba"}], "max_tokens": 2}
JSON = "application/json"


class BadRequest(NamedTuple):
    """``guard``: whether the guard refuses it, before an engine sees it."""

    name: str
    route: str
    body: bytes
    guard: bool
    headers: dict[str, str]
    method: str = "POST"


def _of(
    name: str, route: str, body: Any, *, guard: bool = False, kind: str | None = JSON, method: str = "POST", **more: str
) -> BadRequest:
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    headers = ({"content-type": kind} if kind else {}) | {key.replace("_", "-"): value for key, value in more.items()}
    return BadRequest(name, route, data, guard, headers, method)


def _nested(levels: int) -> str:
    return "[" * levels + "1" + "]" * levels


_STEERING = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "made-up", "remote_request_id": "made-up",
    "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1,
}  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# Fields of a completion and a value that it cannot have -> whether the guard decides.
_FIELDS: list[tuple[str, dict[str, Any], bool]] = [
    ("prompt is null", {"prompt": None}, False),
    ("prompt is a number", {"prompt": 5}, False),
    ("prompt is a boolean", {"prompt": True}, False),
    ("prompt is an object", {"prompt": {"text": "ba"}}, False),
    ("prompt is an empty list", {"prompt": []}, False),
    ("prompt is a list of an empty list", {"prompt": [[]]}, False),
    ("prompt mixes text and ids", {"prompt": ["ba", 5]}, False),
    ("prompt mixes ids and lists", {"prompt": [5, [6]]}, False),
    ("prompt of negative ids", {"prompt": [-1, 5]}, False),
    ("prompt of fractions", {"prompt": [1.5, 2.5]}, False),
    ("prompt of ids beyond the vocabulary", {"prompt": [7, 10**7]}, False),
    ("prompt of ids of 100 digits", {"prompt": [10**100]}, False),
    ("prompt of lists in lists", {"prompt": [[[1]]]}, False),
    ("prompt longer than the context", {"prompt": [7] * 200_000}, False),
    ("65 prompts", {"prompt": ["ba"] * 65}, True),
    ("n = 65", {"n": 65, "temperature": 1.0}, True),
    ("n is 0", {"n": 0}, True),
    ("n is negative", {"n": -1}, True),
    ("n is a fraction", {"n": 1.5}, True),
    ("n is a word", {"n": "many"}, True),
    ("n is a list", {"n": [1]}, True),
    ("n is true", {"n": True}, True),
    ("n of 30 digits", {"n": 10**30}, True),
    ("n = 3, greedy", {"n": 3}, False),
    ("max_tokens is negative", {"max_tokens": -1}, True),
    ("max_tokens is a fraction", {"max_tokens": 2.5}, True),
    ("max_tokens is a word", {"max_tokens": "many"}, True),
    ("max_tokens is an object", {"max_tokens": {}}, True),
    ("max_tokens beyond the context", {"max_tokens": 10**6}, False),
    ("max_tokens beyond 32 bits", {"max_tokens": 2**31}, True),
    ("max_tokens of 30 digits", {"max_tokens": 10**30}, True),
    ("min_tokens above max_tokens", {"min_tokens": 50}, False),
    ("min_tokens is negative", {"min_tokens": -5}, False),
    ("temperature is negative", {"temperature": -1.0}, False),
    ("temperature of 1e300", {"temperature": 1e300}, False),
    ("temperature is a word", {"temperature": "hot"}, False),
    ("temperature is a list", {"temperature": [1.0]}, False),
    ("top_p is 0", {"top_p": 0.0, "temperature": 1.0}, False),
    ("top_p is 2", {"top_p": 2.0, "temperature": 1.0}, False),
    ("top_p is a word", {"top_p": "most"}, False),
    ("top_k is -5", {"top_k": -5, "temperature": 1.0}, False),
    ("top_k is a fraction", {"top_k": 1.5, "temperature": 1.0}, False),
    ("min_p is 2", {"min_p": 2.0, "temperature": 1.0}, False),
    ("presence_penalty is 10", {"presence_penalty": 10.0}, False),
    ("frequency_penalty is -10", {"frequency_penalty": -10.0}, False),
    ("repetition_penalty is 0", {"repetition_penalty": 0.0}, False),
    ("seed beyond 64 bits", {"seed": 2**70}, False),
    ("seed is a word", {"seed": "s"}, False),
    ("stop is a number", {"stop": 5}, False),
    ("stop is an empty text", {"stop": [""]}, False),
    ("stop is an object", {"stop": {"a": 1}}, False),
    ("stop_token_ids of words", {"stop_token_ids": ["a"]}, False),
    ("stream is a word", {"stream": "perhaps"}, False),
    ("stream_options without a stream", {"stream_options": {"include_usage": True}}, False),
    ("stream_options is a list", {"stream": True, "stream_options": [1]}, False),
    ("logprobs of 10,000", {"logprobs": 10_000}, False),
    ("logprobs is negative", {"logprobs": -5}, False),
    ("logprobs is a word", {"logprobs": "all"}, False),
    ("prompt_logprobs is negative", {"prompt_logprobs": -5}, False),
    ("prompt_logprobs of 10,000", {"prompt_logprobs": 10_000}, False),
    ("prompt_logprobs in a stream", {"prompt_logprobs": 1, "stream": True}, False),
    ("logit_bias of words", {"logit_bias": {"word": 1.0}}, False),
    ("logit_bias beyond the vocabulary", {"logit_bias": {"10000000": 1.0}}, False),
    ("logit_bias is a list", {"logit_bias": [1]}, False),
    ("bad_words of an empty text", {"bad_words": [""]}, False),
    ("allowed_token_ids is empty", {"allowed_token_ids": []}, False),
    ("allowed_token_ids beyond the vocabulary", {"allowed_token_ids": [10**7]}, False),
    ("truncate_prompt_tokens is -5", {"truncate_prompt_tokens": -5}, False),
    ("response_format of no kind", {"response_format": {"type": "poem"}}, False),
    ("response_format is a word", {"response_format": "json"}, False),
    ("structured_outputs of no kind", {"structured_outputs": {}}, False),
    ("structured_outputs of two kinds", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, False),
    ("structured_outputs of a broken regex", {"structured_outputs": {"regex": "(((("}}, False),
    ("structured_outputs of a broken grammar", {"structured_outputs": {"grammar": "root ::= ("}}, False),
    ("structured_outputs of a broken schema", {"structured_outputs": {"json": "{"}}, False),
    ("priority is a word", {"priority": "first"}, False),
    ("request_id is an object", {"request_id": {}}, False),
    ("cache_salt is empty", {"cache_salt": ""}, False),
    ("vllm_xargs is a list", {"vllm_xargs": [1]}, False),
    ("echo is an object", {"echo": {}}, False),
    ("prompt_embeds of nonsense", {"prompt_embeds": "AAAA"}, False),
    ("an unknown model", {"model": "gpt-17"}, False),
    ("model is a number", {"model": 5}, True),
    ("model is a list", {"model": [MODEL]}, True),
    ("model is empty", {"model": ""}, True),
    ("model is a path", {"model": "../../etc/passwd"}, False),
    ("transfer parameters", {"kv_transfer_params": _STEERING}, True),
    ("empty transfer parameters", {"kv_transfer_params": None}, True),
    ("transfer parameters in vllm_xargs", {"vllm_xargs": {"kv_transfer_params": "x"}}, True),
    ("encoder transfer parameters", {"ec_transfer_params": {"a": 1}}, True),
]

_MESSAGES: list[tuple[str, dict[str, Any], bool]] = [
    ("no messages", {"messages": None}, True),
    ("messages is empty", {"messages": []}, False),
    ("messages is a text", {"messages": "ba"}, True),
    ("messages is an object", {"messages": {"role": "user"}}, True),
    ("messages of texts", {"messages": ["ba"]}, True),
    ("a message without a role", {"messages": [{"content": "ba"}]}, False),
    ("a role that is a number", {"messages": [{"role": 5, "content": "ba"}]}, False),
    ("content is a number", {"messages": [{"role": "user", "content": 5}]}, False),
    ("content of an unknown part", {"messages": [{"role": "user", "content": [{"type": "smell", "smell": 1}]}]}, False),
    ("an image for a model of text", {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    }, False),
    ("tool_calls is a number", {"messages": [{"role": "assistant", "tool_calls": 5}]}, True),
    ("tools is a word", {"tools": "hammer"}, False),
    ("a tool without a function", {"tools": [{"type": "function"}]}, False),
    ("a chosen tool that is not there", {
        "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}
    }, False),
    ("OpenAI's old functions", {"functions": [_TOOL["function"]]}, True),
    ("tool_choice without tools", {"tool_choice": "required"}, False),
    ("max_completion_tokens is a word", {"max_completion_tokens": "many"}, True),
    ("max_completion_tokens is negative", {"max_completion_tokens": -1}, True),
    ("top_logprobs without logprobs", {"top_logprobs": 5}, False),
    ("transfer parameters in a message", {
        "messages": [{"role": "user", "content": [{"kv_transfer_params": _STEERING}]}]
    }, True),
]  # fmt: skip

_TEXT = json.dumps(PLAIN)
BAD_REQUESTS: list[BadRequest] = [
    *(_of(name, COMPLETIONS, {**PLAIN, **changes}, guard=guard) for name, changes, guard in _FIELDS),
    *(_of(f"chat: {name}", CHAT, {**TALK, **changes}, guard=guard) for name, changes, guard in _MESSAGES),
    _of("no prompt", COMPLETIONS, {"model": MODEL, "max_tokens": 2}),
    _of("an empty body", COMPLETIONS, b"", guard=True),
    _of("an empty body for chat", CHAT, b"", guard=True),
    _of("blanks", COMPLETIONS, b"  \n ", guard=True),
    _of("an empty object", COMPLETIONS, "{}"),
    _of("an empty object for chat", CHAT, "{}", guard=True),
    _of("null", COMPLETIONS, "null", guard=True),
    _of("a list", COMPLETIONS, [PLAIN], guard=True),
    _of("a text", COMPLETIONS, '"ba"', guard=True),
    _of("a number", CHAT, "5", guard=True),
    _of("a truncated object", COMPLETIONS, _TEXT[:-5], guard=True),
    _of("two objects", COMPLETIONS, _TEXT + _TEXT, guard=True),
    _of("a comma too many", COMPLETIONS, _TEXT[:-1] + ",}", guard=True),
    _of("single quotes", COMPLETIONS, _TEXT.replace('"', "'"), guard=True),
    _of("a key without quotes", COMPLETIONS, '{model: "x"}', guard=True),
    _of("NaN", COMPLETIONS, _TEXT.replace("0.0", "NaN"), guard=True),
    _of("Infinity", COMPLETIONS, _TEXT.replace("0.0", "Infinity"), guard=True),
    _of("-Infinity", COMPLETIONS, _TEXT.replace("0.0", "-Infinity"), guard=True),
    _of("1e999", COMPLETIONS, _TEXT.replace("0.0", "1e999"), guard=True),
    _of("an integer of 10,000 digits", COMPLETIONS, _TEXT.replace("0.0", "9" * 10_000), guard=True),
    _of("broken UTF-8", COMPLETIONS, _TEXT.encode().replace(b"tiny", b"\xc3\x28"), guard=True),
    _of("a byte that is never UTF-8", COMPLETIONS, _TEXT.encode().replace(b"tiny", b"\xff"), guard=True),
    _of("UTF-8 that is too long", COMPLETIONS, _TEXT.encode().replace(b"tiny", b"\xc0\xaf"), guard=True),
    _of("half of a surrogate pair", COMPLETIONS, _TEXT.replace("[7, 8, 9]", '"\\ud800"'), guard=True),
    _of("the other half, in chat", CHAT, json.dumps(TALK).replace('"ba"', '"x \\uDC00 y"'), guard=True),
    _of("a control character in a text", COMPLETIONS, _TEXT.replace("tiny", "ti\x01ny"), guard=True),
    _of("random bytes", COMPLETIONS, bytes(range(256)), guard=True),
    _of("gzip without saying so", COMPLETIONS, b"\x1f\x8b\x08\x00" + b"\0" * 40, guard=True),
    _of("gzip", COMPLETIONS, b"\x1f\x8b\x08\x00" + b"\0" * 40, guard=True, content_encoding="gzip"),
    _of("an unknown encoding", COMPLETIONS, _TEXT, guard=True, content_encoding="zip"),
    _of("lists 100 deep", COMPLETIONS, _TEXT[:-1] + f', "stop": {_nested(100)}}}', guard=True),
    _of("lists 100,000 deep", COMPLETIONS, _TEXT[:-1] + f', "stop": {_nested(100_000)}}}', guard=True),
    _of("objects 5,000 deep", CHAT, '{"a":' * 5000 + "1" + "}" * 5000, guard=True),
    _of("a body of 3 MB", COMPLETIONS, {**PLAIN, "prompt": "ba " * 1_000_000}, guard=True),
    _of("plain text", COMPLETIONS, _TEXT, guard=True, kind="text/plain"),
    _of("XML", CHAT, "<prompt>ba</prompt>", guard=True, kind="application/xml"),
    _of("a form", COMPLETIONS, "model=x&prompt=y", guard=True, kind="application/x-www-form-urlencoded"),
    _of("a form of parts", COMPLETIONS, "--x\r\n\r\n--x--", guard=True, kind="multipart/form-data; boundary=x"),
    _of("a content type of nonsense", COMPLETIONS, _TEXT, guard=True, kind=";;;=;"),
    _of("an escaped name of the transfer parameters", COMPLETIONS, '{"kv\\u005ftransfer_params": {}}', guard=True),
    _of("transfer parameters in UTF-16", COMPLETIONS, '{"kv_transfer_params": {}}'.encode("utf-16"), guard=True),
    _of("transfer parameters twice", COMPLETIONS, '{"kv_transfer_params": {}, "kv_transfer_params": 0}', guard=True),
    _of("a route of vLLM's own", "/inference/v1/generate", {"token_ids": [1]}, guard=True),
    _of("responses", "/v1/responses", {"model": MODEL, "input": "ba"}, guard=True),
    _of("messages", "/v1/messages", {"model": MODEL, "messages": []}, guard=True),
    _of("embeddings", "/v1/embeddings", {"model": MODEL, "input": "ba"}, guard=True),
    _of("loading an adapter", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}, guard=True),
    _of("a slash too many", "/v1/completions/", PLAIN, guard=True),
    _of("capitals", "/V1/Completions", PLAIN, guard=True),
    _of("a way up", "/v1/../admin", PLAIN, guard=True),
    _of("GET of completions", COMPLETIONS, b"", kind=None, method="GET"),
    _of("DELETE of completions", COMPLETIONS, PLAIN, method="DELETE"),
    _of("PUT of chat", CHAT, TALK, method="PUT"),
    _of("tokenize without a prompt", "/tokenize", {"model": MODEL}),
    _of("tokenize of a list", "/tokenize", "[]", guard=True),
    _of("a model that is not there", "/v1/models/gpt-17", b"", kind=None, method="GET"),
]
