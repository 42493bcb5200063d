#!/usr/bin/env python3
"""Every shape of request, PD against one engine alone: the same weights, the same requests, the answers side by side.

Serves collocated, keeps the answers, serves PD on the same nodes, and compares: status, texts, token
ids, finish reasons, numbering of choices, usage and log-probabilities. With --doc the table replaces
the one in docs/requests.md. Needs no GPU: the tiny model on this machine. Where PDLAB_HARMONY_VOCAB names OpenAI's
file o200k_base.tiktoken, chat is asked of a model with that vocabulary (benchmarks/chat_model.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

sys.path.insert(0, str(ROOT / "benchmarks"))

import chat_model  # noqa: E402

from pdlab.cluster.local_nodes import hold_port  # noqa: E402

MODEL = "tiny-gptoss"
TIMEOUT_S = 120
# bfloat16 rounds otherwise in another batch shape; a wrong position is off by whole units.
LOGPROB_TOLERANCE = 0.1
# What the canary calls a near tie, in log-probability.
MARGIN = 0.25
TOKENS = 12
TRIES = 400
BEGIN, END = "<!-- shapes -->", "<!-- end of shapes -->"


class Shape(NamedTuple):
    """One request: what it is called, its route and its body."""

    name: str
    body: dict[str, Any]
    route: str = "/v1/completions"


class Answer(NamedTuple):
    """An answer without what differs from run to run: ids, times, log-probabilities apart."""

    status: int
    content: Any
    logprobs: tuple[float, ...] = ()


class Prompts(NamedTuple):
    """Token ids: one within a KV block, several blocks, and far beyond the sliding window; and two texts."""

    short: list[int]
    middle: list[int]
    long: list[int]
    text: str
    other: str


NONE = Prompts([], [], [], "", "")  # for the names of shapes


def decisive(url: str) -> Prompts:
    """Prompts at whose every generated token the best candidate leads by MARGIN, so that other batches, and decode
    in place of prefill, round to the same tokens on every processor. Raises RuntimeError when none is found."""
    rng = random.Random(11)
    syllables = [a + b for a in "bdfklmnprst" for b in ("a", "e", "i", "o", "u", "an", "el")]

    def find(make: Callable[[], Any]) -> Any:
        for _ in range(TRIES):
            prompt = make()
            if _margin(url, prompt) >= MARGIN:
                return prompt
        raise RuntimeError(f"{url}: {TRIES} prompts, and each has a token that another one nearly replaced")

    def ids(length: int) -> Callable[[], list[int]]:
        return lambda: [rng.randrange(10, 1000) for _ in range(length)]

    def words(count: int, times: int) -> Callable[[], str]:
        return lambda: f"{' '.join(rng.sample(syllables, count))} " * times

    return Prompts(find(ids(20)), find(ids(150)), find(ids(700)), find(words(4, 12)), find(words(5, 20)))


def _margin(url: str, prompt: list[int] | str) -> float:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    body |= {"logprobs": 2, "return_tokens_as_token_ids": True}  # by text, several tokens may be one
    status, answer = post(url, Shape("margin", body))
    if status != 200:
        raise RuntimeError(f"{url}: HTTP {status}: {answer[:300]!r}")
    tops = [sorted(top.values()) for top in json.loads(answer)["choices"][0]["logprobs"]["top_logprobs"]]
    return float(min(top[-1] - top[-2] for top in tops))


def shapes(prompts: Prompts, *, chat: bool = True) -> list[Shape]:
    """The shapes of the table in docs/requests.md that the tiny model answers. ``chat``: those of chat too, which are
    errors without a vocabulary."""
    short, middle, long, text, other = prompts
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    # vLLM refuses several greedy choices; with one candidate every choice is the best one.
    best = {"temperature": 1.0, "top_k": 1}
    bodies: dict[str, dict[str, Any]] = {
        "one text": {"prompt": text},
        "token ids": {"prompt": long},
        "list of one text": {"prompt": [text]},
        "list of texts": {"prompt": [text, other, "bo"]},
        "list of token ids": {"prompt": [short, long, middle]},
        "list of texts, n=2": {"prompt": [text, other], "n": 2, **best},
        "n=3": {"prompt": middle, "n": 3, **best},
        "n=3, greedy": {"prompt": middle, "n": 3},
        "n=3, sampled, seeded": {"prompt": middle, "n": 3, "temperature": 0.7, "seed": 7},
        "sampled, seeded": {"prompt": middle, "temperature": 0.7, "seed": 7},
        "best_of=2": {"prompt": text, "best_of": 2},
        "beam search": {"prompt": text, "use_beam_search": True, "n": 2, "ignore_eos": False, "max_tokens": 6},
        "echo": {"prompt": text, "echo": True},
        "echo, max_tokens=0": {"prompt": text, "echo": True, "max_tokens": 0},
        "echo, logprobs": {"prompt": text, "echo": True, "logprobs": 2},
        "logprobs": {"prompt": long, "logprobs": 3},
        "logprobs, list of token ids": {"prompt": [short, middle], "logprobs": 3},
        "prompt_logprobs": {"prompt": middle, "prompt_logprobs": 2},
        "stop": {"prompt": middle, "stop": ["o", "i"], "ignore_eos": False},
        "stop_token_ids": {"prompt": middle, "stop_token_ids": list(range(300, 700)), "ignore_eos": False},
        "min_tokens": {"prompt": middle, "min_tokens": 8, "ignore_eos": False},
        "max_tokens=1": {"prompt": long, "max_tokens": 1},
        "penalties, logit_bias": {"prompt": middle, "presence_penalty": 1.0, "logit_bias": {"300": 5.0}},
        "truncate_prompt_tokens": {"prompt": long, "truncate_prompt_tokens": 64},
        "structured_outputs, choice": {"prompt": text, "structured_outputs": {"choice": ["ba", "bo"]}},
        "structured_outputs, json": {"prompt": text, "structured_outputs": {"json": schema}},
        "structured_outputs, list": {"prompt": [text, other], "structured_outputs": {"regex": "(ba|bo)+x"}},
        "guided_json (vLLM's old name)": {"prompt": text, "guided_json": schema},
        "response_format, json_object": {"prompt": text, "response_format": {"type": "json_object"}},
        "stream": {"prompt": long, "stream": True},
        "stream, usage": {"prompt": middle, "stream": True},
        "stream, list of texts, usage": {"prompt": [text, other], "stream": True},
        "stream, n=2, usage": {"prompt": middle, "n": 2, "stream": True, **best},
        "stream, list of token ids, logprobs": {"prompt": [short, long], "stream": True, "logprobs": 2},
        "stream, echo": {"prompt": text, "stream": True, "echo": True},
        "suffix": {"prompt": text, "suffix": "x"},
        "empty prompt": {"prompt": ""},
        "empty list": {"prompt": []},
        "prompt of numbers and texts": {"prompt": [1, "ba"]},
        "token id outside the vocabulary": {"prompt": [5, 10_000_000]},
        "prompt too long for the context": {"prompt": [7] * 9000},
        "list with one prompt too long": {"prompt": [short, [7] * 9000]},
        "stream, list with one prompt too long": {"prompt": [short, [7] * 9000], "stream": True},
        "max_tokens beyond the context": {"prompt": short, "max_tokens": 1_000_000},
        "max_tokens=0": {"prompt": short, "max_tokens": 0},
        "n=0": {"prompt": short, "n": 0},
        "unknown model": {"prompt": short, "model": "nobody"},
    }  # fmt: skip
    for name, body in bodies.items():
        if name.startswith(("structured", "response")):
            body["ignore_eos"] = False
        if name.startswith("stream") and name.endswith("usage"):
            body["stream_options"] = {"include_usage": True}
    common = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    all_shapes = [Shape(name, {**common, **body}) for name, body in bodies.items()]
    for shape in all_shapes:
        if shape.body.get("echo"):  # vLLM leaves the echoed text out where token ids are asked for
            shape.body.pop("return_token_ids")
    talk = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0.0, "messages": [{"role": "user", "content": text}]}
    chats: dict[str, dict[str, Any]] = {
        "chat": {},
        "chat, n=2": {"n": 2, **best},
        "chat, stream, n=2": {"stream": True, "n": 2, **best},
    }
    for name, body in chats.items() if chat else ():
        all_shapes.append(Shape(name, {**talk, "ignore_eos": True, **body}, "/v1/chat/completions"))
    all_shapes += [Shape("tokenize", {"model": MODEL, "prompt": text}, "/tokenize")]
    return all_shapes


def chat_shapes(model: chat_model.ChatModel) -> list[Shape]:
    """Chat with a vocabulary: reasoning, tools and structured outputs of benchmarks/chat_model.py."""
    schema = chat_model.WEATHER["function"]["parameters"]
    tools = {"tools": [chat_model.WEATHER]}
    named = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    as_json = {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}}
    call = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    user = {"role": "user", "content": "What is the weather in Paris?"}
    turns = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "call-1", "content": "It is sunny."}]
    best = {"temperature": 1.0, "top_k": 1}
    two, streamed = {"n": 2, **best}, {"stream": True, "stream_options": {"include_usage": True}}
    calls, reasons, both = model.calls(), model.reasons(), model.reasons_and_calls()
    bodies: dict[str, dict[str, Any]] = {
        "chat": {},
        "chat, n=2": two,
        "chat, logprobs": {"logprobs": True, "top_logprobs": 2},
        "chat, stream, usage": streamed,
        "chat, stream, n=2": {**two, **streamed},
        "chat, reasoning": reasons,
        "chat, reasoning, n=2": {**reasons, **two},
        "chat, reasoning, stream, usage": {**reasons, **streamed},
        "chat, reasoning, stream, n=2, usage": {**reasons, **two, **streamed},
        "chat, tools, auto, an answer": tools,
        "chat, tools, auto, a call": {**tools, **calls},
        "chat, tools, auto, a call, n=2": {**tools, **calls, **two},
        "chat, tools, auto, a call, stream": {**tools, **calls, **streamed},
        "chat, tools, auto, a call, stream, n=2": {**tools, **calls, **two, **streamed},
        "chat, tools, auto, reasoning and a call": {**tools, **both},
        "chat, tools, auto, reasoning and a call, stream": {**tools, **both, **streamed},
        "chat, tools, required": {**tools, **calls, "tool_choice": "required"},
        "chat, tools, required, stream": {**tools, **calls, "tool_choice": "required", **streamed},
        "chat, tools, required, n=2": {**tools, **calls, "tool_choice": "required", **two},
        "chat, tools, named": {**tools, **calls, **named},
        "chat, tools, named, stream": {**tools, **calls, **named, **streamed},
        "chat, tools, none": {**tools, "tool_choice": "none"},
        "chat, a tool's result": {**tools, "messages": turns},
        "chat, tool_calls null": {"messages": [user, {"role": "assistant", "content": "A", "tool_calls": None}, user]},
        "chat, response_format, json_schema": as_json,
        "chat, response_format, json_schema, reasoning": {**reasons, **as_json},
        "chat, response_format, json_schema, stream": {**as_json, **streamed},
        "chat, structured_outputs, choice": {"structured_outputs": {"choice": ["Hello world", "Good night"]}},
        "chat, ignore_eos": {"ignore_eos": True},
        "chat, ignore_eos, stream": {"ignore_eos": True, **streamed},
        "chat, functions (OpenAI's old name)": {"functions": [chat_model.WEATHER["function"]]},
        "chat, a role that is none": {"messages": [{"role": "king", "content": "x"}]},
        "chat, tools, required, with a broken schema": {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no type"}}}],
        },
    }
    common = {"model": chat_model.NAME, "max_tokens": 48, "temperature": 0.0, "messages": [user]}
    return [Shape(name, {**common, **body}, "/v1/chat/completions") for name, body in bodies.items()]


def post(url: str, shape: Shape) -> tuple[int, bytes]:
    """Status and body of the answer. Raises OSError when there is none."""
    data = json.dumps(shape.body).encode()
    call = urllib.request.Request(f"{url}{shape.route}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(url: str, shape: Shape) -> Answer:
    """The answer to one shape, in the form in which it is compared."""
    status, body = post(url, shape)
    if status != 200:
        return Answer(status, body.decode(errors="replace"))
    if shape.route == "/tokenize":
        return Answer(status, json.loads(body)["tokens"])
    chunks = _chunks(body) if shape.body.get("stream") else [json.loads(body)]
    return _answer_of(status, chunks)


def _chunks(body: bytes) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1, events[-2:]
    return [json.loads(event) for event in events[:-1]]


def _answer_of(status: int, chunks: list[dict[str, Any]]) -> Answer:
    error = next((chunk["error"] for chunk in chunks if "error" in chunk), None)
    chunks = [chunk for chunk in chunks if "error" not in chunk]
    choices: dict[int, dict[str, Any]] = {}
    numbers: list[tuple[int, float]] = []
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            kept = choices.setdefault(
                choice["index"],
                {"text": "", "reasoning": "", "calls": [], "ids": [], "end": None, "prompt": None, "tokens": []},
            )
            message = choice.get("message") or choice.get("delta") or choice
            kept["text"] += message.get("text") or message.get("content") or ""
            kept["reasoning"] += message.get("reasoning") or ""
            for position, call in enumerate(message.get("tool_calls") or ()):
                number = call.get("index", position)
                kept["calls"] += [["", ""]] * (number + 1 - len(kept["calls"]))
                name, arguments = kept["calls"][number]
                function = call["function"]
                kept["calls"][number] = [name + (function.get("name") or ""), arguments + function["arguments"]]
            kept["ids"] += choice.get("token_ids") or []
            kept["end"] = choice.get("finish_reason") or kept["end"]
            kept["prompt"] = choice.get("prompt_token_ids") or kept["prompt"]
            tokens, values = _logprobs(choice)
            kept["tokens"] += tokens
            numbers += [(choice["index"], value) for value in values]
    numbers.sort(key=lambda pair: pair[0])
    if usage:
        # What was cached depends on what was asked before.
        compared = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
        usage = {key: usage.get(key) for key in compared}
    ids = {chunk["id"] for chunk in chunks}
    assert len(ids) == 1 or error is not None, ids
    content = {"choices": [choices[i] for i in sorted(choices)], "usage": usage, "error": error}
    return Answer(status, content, tuple(value for _, value in numbers))


def _logprobs(choice: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """Which tokens log-probabilities are given for, and the values of the chosen ones."""
    tokens: list[Any] = []
    values: list[float] = []
    logprobs = choice.get("logprobs") or {}
    for token, value in zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True):
        tokens.append(token)
        values.append(0.0 if value is None else value)
    for item in logprobs.get("content") or ():
        tokens.append(item["token"])
        values.append(item["logprob"])
    for position in choice.get("prompt_logprobs") or ():
        tokens.append(None if position is None else len(position))
        values += [] if position is None else [max(item["logprob"] for item in position.values())]
    return tokens, values


def differs(mine: Answer, alone: Answer) -> str | None:
    """How an answer differs from the one of an engine alone; None when it does not."""
    if mine.status != alone.status:
        return f"HTTP {mine.status} instead of {alone.status}: {str(mine.content)[:300]} / {str(alone.content)[:300]}"
    if mine.status != 200:
        return None
    if mine.content != alone.content:
        return f"{str(mine.content)[:600]} instead of {str(alone.content)[:600]}"
    if len(mine.logprobs) != len(alone.logprobs):
        return f"{len(mine.logprobs)} log-probabilities instead of {len(alone.logprobs)}"
    off = max((abs(a - b) for a, b in zip(mine.logprobs, alone.logprobs, strict=True)), default=0.0)
    return f"log-probabilities are off by up to {off:.2f}" if off > LOGPROB_TOLERANCE else None


def describe(answer: Answer) -> str:
    """One cell of the table."""
    if answer.status != 200:
        try:
            error = json.loads(answer.content)
            message = error.get("error", error).get("message", answer.content)
        except (ValueError, AttributeError):
            message = answer.content
        return f"{answer.status}: {' '.join(str(message).split())[:110]}".replace("|", "\\|")
    if isinstance(answer.content, list):
        return f"{len(answer.content)} tokens"
    if answer.content["error"] is not None:
        return f"{answer.status}, then an error event with {answer.content['error']['code']}"
    choices = answer.content["choices"]
    calls, reasons = (any(choice[what] for choice in choices) for what in ("calls", "reasoning"))
    more = f"{', reasoning' if reasons else ''}{', a tool call' if calls else ''}"
    ends = ", ".join(str(choice["end"]) for choice in choices)
    return f"{len(choices)} choice{'s' if len(choices) > 1 else ''}{more}, ends: {ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--doc", action="store_true", help="write the table into docs/requests.md")
    parser.add_argument("--keep", metavar="FILE", help="keep the answers there, as JSON")
    parser.add_argument("--only", metavar="TEXT", default="", help="shapes whose name has this text")
    parser.add_argument("--flags", default="", help="more flags of the launches, for example --no-direct-streaming")
    args = parser.parse_args()
    held, number = hold_port()  # nobody else is given it meanwhile
    port = str(number)
    launch = [sys.executable, str(ROOT / "launch_gptoss.py"), "--port", port]
    url = f"http://127.0.0.1:{port}"
    sent: list[Shape] = []
    answers: dict[str, list[Answer]] = {"--collocated": [], "--pd-spread": []}
    vocabulary = chat_model.vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny = not args.only or any(args.only in shape.name for shape in shapes(NONE, chat=vocabulary is None))
            for mode, kept in answers.items() if tiny else ():
                subprocess.run([*launch, mode, "--local", "--detach", *args.flags.split()], check=True)
                if not sent:
                    wanted = shapes(decisive(url), chat=vocabulary is None)
                    sent = [shape for shape in wanted if args.only in shape.name]
                kept += [ask(url, shape) for shape in sent]
            if vocabulary is not None:
                model = chat_model.build(vocabulary, Path(folder), ROOT / "configs" / "models" / "gpt-oss-20b.yaml")
                chats = [shape for shape in chat_shapes(model) if args.only in shape.name]
                sent += chats
                for mode, kept in answers.items():
                    words = [mode, "--local", "--detach", "--model", str(model.shape), *args.flags.split()]
                    subprocess.run([*launch, "--shutdown"], check=bool(tiny or mode != "--collocated"))
                    subprocess.run([*launch, *words], check=True, env={**os.environ, **model.env})
                    kept += [ask(url, shape) for shape in chats]
        finally:
            subprocess.run([*launch, "--shutdown"], check=True)
            held.close()
    if args.keep:
        Path(args.keep).write_text(json.dumps(answers, indent=1))
    rows = ["| request | PD | one engine alone | the same |", "|---|---|---|---|"]
    wrong = 0
    for shape, alone, mine in zip(sent, answers["--collocated"], answers["--pd-spread"], strict=True):
        difference = differs(mine, alone)
        wrong += difference is not None
        same = "yes" if difference is None else "NO"
        rows.append(f"| {shape.name} | {describe(mine)} | {describe(alone)} | {same} |")
        if difference:
            print(f"{shape.name}: {difference}", file=sys.stderr)
    table = "\n".join(rows)
    print(table)
    if args.doc:
        path = ROOT / "docs" / "requests.md"
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
