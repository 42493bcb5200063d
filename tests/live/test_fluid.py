"""Fluid engines for real: identical engines whose roles flip under load, killed too, and every answer compared with
that of one engine alone."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from typing import Any

import pytest
from support import timed
from support.processes import replica_process

from pdlab.deploy.metrics_page import read_pages, samples
from pdlab.results.store import Store
from pdlab.roles.prefixes import CHUNK_TOKENS
from tests.live.conftest import BUSY_MACHINE, Stack
from tests.support.long import LONG

# The long form is the promise: 1,000 requests, 200 flips.
REQUESTS, FLIPS, SEED = (1000, 200, 17) if LONG else (150, 30, 17)
ENGINES = 3 if LONG else 2
EFFECT_MS = 100.0
SETTLED_S = 120.0  # after a kill, on a machine that has other things to do
# Of what nothing answers any more while it is replaced, some requests end with an error; none may end wrongly.
WRONG = {"wrong", "hang"}


def flips(stack: Stack, *words: object) -> dict[str, Any]:
    done = stack.run("-m", "tests.support.flips", stack.url, *map(str, words))
    assert done.code == 0, done.text
    (line,) = [line for line in done.text.splitlines() if line.startswith('{"outcomes"')]
    made: dict[str, Any] = json.loads(line)
    return made


@pytest.fixture(scope="module")
def fluid(stack: Stack) -> Stack:
    done = stack.launch("--pd-fluid", "--num", str(ENGINES), "--roles", f"1:{ENGINES - 1}")
    assert done.code == 0, done.text
    pairs = ENGINES * (ENGINES - 1)
    assert f"canary: {pairs} ordered pairs of engines, each with a KV transfer of its own" in done.text
    assert re.search(r"KV transfers: \d+ done, about [\d.]+ MB, 0 failed", done.text)
    assert "wire: shared memory, as planned" in done.text
    return stack


def test_the_launch_leaves_what_it_found(fluid: Stack) -> None:
    manifest = fluid.running().manifest
    assert manifest.label == f"pd-fluid-{ENGINES}xtp1-p1d{ENGINES - 1}"
    assert manifest.canary.equal is True
    assert manifest.wire.proven is True
    assert len(manifest.placement.of("fluid")) == ENGINES
    assert set(fluid.running().pools.values()) == {"fluid"}


@pytest.mark.long
def test_roles_are_told_and_set_by_hand(fluid: Stack) -> None:
    done = fluid.run("-m", "pdlab", "roles", "--base-url", fluid.url)
    assert done.code == 0 and f"1:{ENGINES - 1} (prefill:decode), set to 1:{ENGINES - 1}" in done.text
    done = fluid.run("-m", "pdlab", "roles", f"2:{ENGINES}", "--base-url", fluid.url)
    assert done.code == 2 and f"2:{ENGINES} is {ENGINES + 2} engines" in done.text
    done = fluid.run("-m", "pdlab", "roles", "auto", "--base-url", fluid.url)
    assert done.code == 0 and "a controller follows the load" in done.text
    done = fluid.run("-m", "pdlab", "roles", f"1:{ENGINES - 1}", "--base-url", fluid.url)
    assert done.code == 0 and "set by hand" in done.text


@pytest.mark.long
def test_roles_flip_under_load_and_every_answer_is_right(fluid: Stack) -> None:
    made = flips(fluid, REQUESTS, FLIPS, SEED)
    assert made["flips"] == FLIPS
    assert set(made["outcomes"]) == {"right"} and made["outcomes"]["right"] >= REQUESTS, made["not_right"]
    if LONG:  # how long it takes on a machine that has other things to do is no promise
        count, _, most_ms, _ = made["reach_ms"]
        assert count > FLIPS and most_ms < EFFECT_MS


@pytest.mark.long
def test_short_sweep_is_valid(fluid: Stack) -> None:
    out = fluid.folder / "results"
    words = ("-t", "concurrency", "-c", "2", "--itl", "128", "--otl", "32", "--out", str(out))
    done = fluid.run("-m", "pdlab", "bench", *words, "-u", fluid.url)
    assert done.code in (0, 3), done.text
    label = f"pd-fluid-{ENGINES}xtp1-p1d{ENGINES - 1}"
    run = json.loads((out / label / "concurrency2.json").read_text())
    assert run["failed"] == 0
    assert "other_requests" not in run["validity"]["failed_gates"], run["validity"]
    assert "kv_transfers" not in run["validity"]["failed_gates"], run["validity"]
    assert "roles" not in run["validity"]["unchecked"], "the board's word on the split is on Ray's pages"


@pytest.mark.long
def test_every_request_of_the_sweep_says_where_its_time_went(fluid: Stack) -> None:
    store = Store(fluid.folder / "results" / fluid.running().manifest.label)
    (run,) = store.runs()
    answered = {record.arrival_s: record for record in store.read_records(run.key) if record.ok}
    timelines = store.read_timelines(run.key)
    assert len(answered) == run.completed > 0 and {each.arrival_s for each in timelines} == set(answered)
    for each in timelines:
        assert each.path == "pd" and timed.exact(each, answered[each.arrival_s].ttft_s), each
        assert each.role_p != each.role_d and {each.role_p, each.role_d} <= set(fluid.running().replicas)
    assert not [note for note in run.validity.notes if note.code.startswith("timelines_")]


@pytest.mark.long
def test_the_board_dies_under_flips(fluid: Stack) -> None:
    made = flips(fluid, REQUESTS // 2, FLIPS // 2, SEED + 1, "board")
    assert any("killed board" in note for note in made["notes"]), made["notes"]
    assert set(made["outcomes"]) == {"right"}, "roles stand while nobody tells them"
    deadline = time.monotonic() + SETTLED_S
    while not _all_told(fluid.run("-m", "pdlab", "roles", "--base-url", fluid.url).text):
        assert time.monotonic() < deadline, "the board that Ray has started again does not know every engine"


def _all_told(text: str) -> bool:
    """Whether a board knows every engine's role, and holds the split: whichever stood when the last one died."""
    split = re.search(r"^(\d+):(\d+) \(prefill:decode\), set to \1:\2$", text, re.MULTILINE)
    return split is not None and int(split[1]) + int(split[2]) == ENGINES


@pytest.mark.long
@pytest.mark.parametrize(("part", "seed"), [("router", SEED + 2), ("engine", SEED + 3)])
def test_a_router_or_an_engine_dies_under_flips(part: str, seed: int, fluid: Stack) -> None:
    made = flips(fluid, REQUESTS // 2, FLIPS // 2, seed, part)
    assert any(f"killed {part}" in note for note in made["notes"]), made["notes"]
    assert not WRONG & set(made["outcomes"]), made["not_right"]
    assert made["outcomes"]["right"] > 0


def test_nothing_is_left(fluid: Stack) -> None:
    done = fluid.shutdown()
    assert done.code == 0
    assert fluid.nodes() is None


@pytest.mark.long
def test_the_number_of_engines_follows_the_load(stack: Stack) -> None:
    # Prompts take longer than this bound, so that the load of this test is too much for two.
    bounds = ("--min", "2", "--max", "3", "--slo-ttft-ms", "10", "--down-after-s", "30")
    done = stack.launch("--pd-fluid", "--num", "2", *bounds)
    assert done.code == 0, done.text
    assert stack.running().manifest.label == "pd-fluid-2xtp1-n2to3"
    done = stack.run("-m", "tests.support.counts", stack.url, "2", "3", str(SEED))
    assert done.code == 0, done.text
    (line,) = [line for line in done.text.splitlines() if line.startswith('{"outcomes"')]
    made = json.loads(line)
    for when, outcomes in made["outcomes"].items():
        assert set(outcomes) == {"right"}, (when, outcomes)
    seen = [roles for _, roles in made["roles"]]
    assert ["decode", "leaving", "prefill"] in seen, "one that is to stop takes no work any more"
    assert len(seen[0]) == len(seen[-1]) == 2
    assert any(reason.startswith("2 -> 3 engines: 2 are loaded") for reason in made["reasons"])
    assert any("has made its first transfers" in reason for reason in made["reasons"])
    assert any(reason.startswith("3 -> 2 engines: 2 would be loaded") for reason in made["reasons"])
    done = stack.shutdown()
    assert done.code == 0 and stack.nodes() is None


CONVERSATIONS, TURNS, FIRST_TOKENS, NEW_TOKENS = 6, 4, 512, 256
SETTLE_S = 0.6  # between requests, so that the loads that routers know are those of now


def conversation(seed: int, tokens: int) -> list[int]:
    """The first tokens of that conversation: the prompts of its turns."""
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(tokens)]


def counted(stack: Stack) -> dict[tuple[str, str], float]:
    """By name and engine: what counters of prefix caches and of choices show, once they have been exported."""
    running = stack.running()
    names = ("prefix_cache_hits", "prefill_cached", "prefill_short", "prefill_answered")
    time.sleep(3)
    return {
        (sample.name, sample.replica): sample.value
        for page in read_pages(running.metrics_urls)
        for sample in samples(page)
        if sample.name in names and sample.replica in running.replicas
    }


def conversed(stack: Stack, *flags: str) -> tuple[float, list[list[int]], dict[str, float]]:
    """Conversations on three engines of which two prefill: the share of what could have come from the prefix caches of
    those that did, the answers, and how often each choice was made."""
    done = stack.launch("--pd-fluid", "--num", "3", "--roles", "2:1", *flags)
    assert done.code == 0, done.text
    before = counted(stack)
    answers = []
    for turn in range(TURNS):
        for seed in range(CONVERSATIONS):
            answers.append(stack.complete(conversation(seed, FIRST_TOKENS + turn * NEW_TOKENS), 8))
            time.sleep(SETTLE_S)
    more = {key: value - before.get(key, 0.0) for key, value in counted(stack).items()}
    prefilled = {engine for (name, engine), value in more.items() if name == "prefill_answered" and value}
    hits = sum(more.get(("prefix_cache_hits", engine), 0.0) for engine in prefilled)
    # A turn begins with all of the turn before.
    possible = CONVERSATIONS * sum(FIRST_TOKENS + turn * NEW_TOKENS for turn in range(TURNS - 1))
    made = {
        name: sum(value for (sample, _), value in more.items() if sample == name)
        for name in ("prefill_cached", "prefill_short")
    }
    return hits / possible, answers, made


@pytest.mark.long
def test_prompts_go_where_their_beginning_is_cached(stack: Stack) -> None:
    by_load, answers, made = conversed(stack)
    assert made == {"prefill_cached": 0, "prefill_short": 0}
    done = stack.shutdown()
    assert done.code == 0
    below = 2 * CHUNK_TOKENS
    share, again, made = conversed(stack, "--prefix-affinity", "--prefill-locally-below", str(below))
    print(f"of what prefix caches could have had they had {by_load:.0%} by load, {share:.0%} by affinity")
    assert made == {"prefill_cached": CONVERSATIONS * (TURNS - 1), "prefill_short": 0}
    assert share > 0.9 and share > by_load + 0.1
    assert again == answers
    # A turn with few new tokens is prefilled where the last one was decoded; a prompt that begins otherwise is not.
    whole = FIRST_TOKENS + (TURNS - 1) * NEW_TOKENS
    before = counted(stack)
    asked = [
        timed.ask(stack.url, stream=True, prompt=conversation(seed, whole + below // 2), max_tokens=8)
        for seed in range(CONVERSATIONS)
    ]
    timed.check(asked, "local")
    for each in asked:
        assert each.attempt == 0 and {"queue", "prefill"} < timed.seconds(each).keys()
        assert not {"call", "prefill_server", "transfer"} & timed.seconds(each).keys()
    first = timed.ask(stack.url, stream=True, prompt=conversation(CONVERSATIONS, whole), max_tokens=8)
    timed.check([first], "pd")
    more = {key: value - before.get(key, 0.0) for key, value in counted(stack).items()}
    totals = {
        name: sum(value for (sample, _), value in more.items() if sample == name) for name in {name for name, _ in more}
    }
    assert totals["prefill_short"] == CONVERSATIONS and totals["prefill_answered"] == 1
    # The next turn finds its beginning in the cache of the engine that prefilled the last one.
    turns = [conversation(CONVERSATIONS, whole + turn * NEW_TOKENS) for turn in (1, 2)]
    hit = timed.ask(stack.url, stream=True, prompt=turns[0], max_tokens=8)
    timed.check([hit], "pd")
    assert hit.role_p == first.role_p
    lost = replica_process(stack.nodes(), "Fluid", hit.role_p)
    retried = timed.killed_in_its_call(stack.url, lost, prompt=turns[1], max_tokens=8)
    timed.check_retried(retried, hit.role_p)
    done = stack.shutdown()
    assert done.code == 0 and stack.nodes() is None


CHAT = """
seed: 5
conversations: {rate_rps: 1.5, sessions: 32, turns: 4, user_tokens: 250 uniform:0.5-1.5, answer_tokens: 16,
                think_s: 0.5}
tenants: {a: {share: 0.7, system_tokens: 512}, b: {share: 0.3, system_tokens: 256}}
"""


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gptoss"])
def test_hits_lie_within_their_bounds_while_roles_flip(stack: Stack, model: str) -> None:
    """Those of every request. Of a model with full attention the lower bound is close to what was hit."""
    details = ("--engine-arg", "enable_prompt_tokens_details=true")
    done = stack.launch("--pd-fluid", "--num", "3", "--roles", "1:2", "--model", model, *details)
    assert done.code == 0, done.text
    file, out = stack.folder / "chat.yaml", stack.folder / f"replays-{model}"
    file.write_text(CHAT)
    words = ("-m", "pdlab", "bench", "-u", stack.url, "--workload", str(file), "--out", str(out))
    replay = stack.start(*words, until=r"replay: \d+ requests")
    splits = itertools.cycle(("2:1", "1:2"))
    while replay.process.poll() is None:
        assert stack.run("-m", "pdlab", "roles", next(splits), "--base-url", stack.url).code == 0
        time.sleep(1)
    ended = replay.end()
    store = Store(out / stack.running().manifest.label)
    (run,) = store.runs()
    assert run.completed == 128, ended.text
    assert set(run.validity.failed_gates) <= BUSY_MACHINE | {"roles"}, "roles were set by hand"
    assert run.validity.unchecked["cache_hits"].code == "hits_bounded"
    records = [record for record in store.read_records(run.key) if record.replayed]
    by_role = [{getattr(record.replayed, role) for record in records} for role in ("prefill_replica", "replica")]
    assert by_role[0] & by_role[1], "engines that prefill and decode"
    prompt_tokens = sum(record.input_tokens for record in records)
    cached = [record.replayed.cached_tokens for record in records]
    bounds = [record.replayed.foreseen_bounds for record in records]
    assert all(least <= hit <= most for hit, (least, most) in zip(cached, bounds, strict=True))
    least, most = (sum(each) for each in zip(*bounds, strict=True))
    print(
        json.dumps(
            {"model": model, "prompt tokens": prompt_tokens, "least": least, "cached": sum(cached), "most": most}
        )
    )
    assert most < 0.95 * prompt_tokens
    if model == "tiny-llama":
        assert least > 0.9 * sum(cached)
    done = stack.shutdown()
    assert done.code == 0 and stack.nodes() is None
