"""One fluid engine's choice for one prompt: here, on the engine that has its beginning, or on any."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import fluid
from pdlab.deploy.serving.builders import SplitsSequences
from pdlab.deploy.serving.engine_traffic import TrafficCounts, prompt_chunks
from pdlab.deploy.serving.fluid import SwitchesRoles
from pdlab.deploy.serving.prefill_call import Route
from pdlab.deploy.serving.ray_names import PD as RAYS_PD
from pdlab.roles.observed import size_class
from pdlab.roles.prefixes import CHUNK_TOKENS, LEAST_TOKENS, Prefixes
from pdlab.roles.spec import FluidSpec

HERE = "here"  # stands for the answer to a prompt that the engine itself computed
PD = SimpleNamespace(ErrorResponse=type("ErrorResponse", (), {}))


class Orchestrates:
    """Stands for `CallsPrefill` and for Ray's orchestration behind `SwitchesRoles`."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.to = ""  # to which engine prompts go, whoever has them
        self.fails = self.computes = False
        self.answered = asyncio.Event()
        self.answered.set()

    async def _pd_handle_request(self, request: Any, raw: Any = None) -> Any:
        answer = await self._prefilled(PD, None, "completions", request, raw)  # type: ignore[attr-defined]
        yield answer or HERE

    async def _prefilled(self, pd: Any, backend: Any, method: str, request: Any, raw: Any) -> Any:
        return None if self.computes else await self._call(pd, backend, method, request, raw, Route())

    async def _call(self, pd: Any, backend: Any, method: str, request: Any, raw: Any, route: Route) -> Any:
        self.routes.append(route)
        route.replica = self.to or max(route.cached, key=lambda name: route.cached[name], default="any")
        await self.answered.wait()
        return PD.ErrorResponse() if self.fails else "elsewhere"


class Board:
    """Stands for the board's actor."""

    def __init__(self, answer: Callable[[], Awaitable[dict[str, tuple[int, int]]]] | None = None) -> None:
        self.answer = answer
        self.kept: list[tuple[str, int, bool]] = []
        self.queries: list[tuple[str, int]] = []
        self.waiting: list[int] = []
        self.keeps = SimpleNamespace(remote=self._keeps)
        self.waits = SimpleNamespace(remote=lambda name, tokens: self.waiting.append(tokens))
        self.held = SimpleNamespace(remote=self._held)

    def _keeps(self, name: str, chunks: list[int], pool_tokens: int | None, pulled: bool, sparse: bool = False) -> None:
        assert pool_tokens is not None
        self.kept.append((name, len(chunks), pulled))

    def _held(self, name: str, chunks: list[int]) -> Awaitable[dict[str, tuple[int, int]]]:
        self.queries.append((name, len(chunks)))
        assert self.answer is not None
        return self.answer()


class Engine(SwitchesRoles, Orchestrates):
    def __init__(self, *, below: int | None = None, board: Board | None = None) -> None:
        Orchestrates.__init__(self)
        self._flow, self._answers, self._prefill_by = TrafficCounts(), {}, {}
        self._kept, self.board_spec = Prefixes(), FluidSpec(prefill_locally_below=below)
        self._affinity, self._board, self._name, self._local_below = board is not None, board, "me", below or 0
        self.kv_pool_tokens = 10_000

    def __del__(self) -> None:  # type: ignore[override]
        """Ray awaits the real one."""

    async def _engine_alone(self, method: str, request: Any, raw: Any) -> Any:
        async def stream() -> Any:
            yield SimpleNamespace(kv_transfer_params={})

        return stream()

    def decodes(self, request: Any) -> Any:
        async def whole() -> Any:
            return [item async for item in self._pd_handle_request(request)]

        return asyncio.run(whole())

    def prefills(self, request: Any) -> None:
        async def whole() -> None:
            async for _ in self._prefill("completions", request, None):
                pass

        asyncio.run(whole())


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(fluid, "count", names.append)
    return names


def prompt(tokens: int, first: int = 0) -> Any:
    return SimpleNamespace(model="m", cache_salt=None, prompt=list(range(first, first + tokens)))


async def on_a() -> dict[str, tuple[int, int]]:
    return {"a": (640, 0), "b": (64, 30), "c": (0, 900)}


async def _none() -> dict[str, tuple[int, int]]:
    return {}


def test_a_prompt_whose_uncached_part_is_short_is_prefilled_where_it_is_decoded(counted: list[str]) -> None:
    engine = Engine(below=2 * CHUNK_TOKENS)
    long = prompt(10 * CHUNK_TOKENS)
    assert engine.decodes(prompt(CHUNK_TOKENS, first=10_000)) == [HERE], "short as a whole"
    assert engine.decodes(long) == ["elsewhere"], "none of it is here yet"
    assert engine.decodes(prompt(11 * CHUNK_TOKENS)) == [HERE], "the next turn: 64 tokens are new"
    assert engine.decodes(prompt(14 * CHUNK_TOKENS)) == ["elsewhere"], "192 tokens are new"
    assert engine.decodes(prompt(11 * CHUNK_TOKENS, first=5)) == ["elsewhere"], "it begins otherwise"
    assert counted == ["short", "short"]


def test_what_was_prefilled_for_others_is_here_too() -> None:
    engine = Engine(below=2 * CHUNK_TOKENS)
    engine.prefills(prompt(10 * CHUNK_TOKENS))
    assert engine.decodes(prompt(10 * CHUNK_TOKENS)) == [HERE]


def test_a_small_pool_does_not_hold_what_came_long_ago() -> None:
    engine = Engine(below=2 * CHUNK_TOKENS)
    engine.decodes(prompt(10 * CHUNK_TOKENS))
    engine.kv_pool_tokens = 12 * CHUNK_TOKENS
    engine.decodes(prompt(10 * CHUNK_TOKENS, first=10_000))
    assert engine.decodes(prompt(10 * CHUNK_TOKENS)) == ["elsewhere"]


def test_the_board_is_asked_who_has_a_prompts_beginning(counted: list[str]) -> None:
    board = Board(on_a)
    engine = Engine(board=board)
    assert engine.decodes(prompt(20 * CHUNK_TOKENS)) == ["elsewhere"]
    (route,) = engine.routes
    assert route.cached == {"a": 640, "b": 64} and route.tokens == 20 * CHUNK_TOKENS
    assert route.waiting == {"a": 0, "b": 30, "c": 900}
    assert board.queries == [("me", 20)] and counted == ["cached"]
    engine.prefills(prompt(3 * CHUNK_TOKENS, first=10_000))
    assert board.kept == [("me", 20, True), ("me", 3, False)]
    assert board.waiting == [192, 0]


def test_only_prompts_that_another_engine_prefilled_have_a_hand_off() -> None:
    engine = Engine(below=2 * CHUNK_TOKENS)
    engine.decodes(prompt(CHUNK_TOKENS))
    assert engine._flow.take().handoff_s == [], "it stays"
    engine.computes = True
    engine.decodes(prompt(10 * CHUNK_TOKENS, first=10_000))
    assert engine._flow.take().handoff_s == [], "prefill failed, and decode computes it"
    engine.computes = False
    engine.decodes(prompt(10 * CHUNK_TOKENS, first=20_000))
    assert len(engine._flow.take().handoff_s) == 1


def test_nothing_is_kept_before_it_is_there() -> None:
    """Two sequences of one prompt, at once on an engine that has nothing of it."""
    engine = Engine(below=2 * CHUNK_TOKENS)
    engine.answered.clear()

    async def twice() -> list[Any]:
        async def one() -> list[Any]:
            return [item async for item in engine._pd_handle_request(prompt(20 * CHUNK_TOKENS))]

        both = asyncio.gather(one(), one())
        await asyncio.sleep(0)
        engine.answered.set()
        return await both

    assert asyncio.run(twice()) == [["elsewhere"], ["elsewhere"]]


def test_what_failed_is_not_kept() -> None:
    engine = Engine(below=2 * CHUNK_TOKENS)
    engine.fails = True
    (error,) = engine.decodes(prompt(20 * CHUNK_TOKENS))
    assert isinstance(error, PD.ErrorResponse)
    engine.fails = False
    assert engine.decodes(prompt(20 * CHUNK_TOKENS)) == ["elsewhere"]
    assert engine.decodes(prompt(20 * CHUNK_TOKENS)) == [HERE]


def test_an_engine_without_a_prefix_cache_has_nothing() -> None:
    engine = Engine(below=2 * CHUNK_TOKENS, board=Board())
    engine.caches_prefixes = False
    for _ in range(2):
        assert engine.decodes(prompt(10 * CHUNK_TOKENS)) == ["elsewhere"]


def test_a_chat_is_as_long_as_what_is_cached_of_it(counted: list[str]) -> None:
    engine = Engine(below=0, board=Board(_none))
    for question in ("первый", "второй"):
        messages = [{"role": "system", "content": "ж" * 4000}, {"role": "user", "content": question * 100}]
        assert engine.decodes(SimpleNamespace(model="m", messages=messages)) == ["elsewhere"]
    assert counted == []


def test_the_controller_hears_of_what_is_to_be_computed() -> None:
    """Prompts that come, that wait and that were prefilled, all without what is cached: else rates and work would not
    be those of the same tokens."""
    engine = Engine(board=Board(on_a))
    engine.decodes(prompt(20 * CHUNK_TOKENS))
    engine.prefills(prompt(24 * CHUNK_TOKENS))
    counts = engine._flow.take()
    assert [tokens for _, tokens in counts.prompts.values()] == [20 * CHUNK_TOKENS - 640]
    assert counts.prefilled_tokens == counts.computed_tokens == LEAST_TOKENS, "256 of 1,536 tokens are new"
    assert counts.waiting_prompt_tokens == 0
    engine.to = "another"
    engine.decodes(prompt(20 * CHUNK_TOKENS, first=5))
    assert [tokens for _, tokens in engine._flow.take().prompts.values()] == [20 * CHUNK_TOKENS]
    whole = Engine(below=1)
    whole.prefills(prompt(20 * CHUNK_TOKENS))
    whole.prefills(prompt(28 * CHUNK_TOKENS))
    counts = whole._flow.take()
    assert counts.prefilled_tokens == 48 * CHUNK_TOKENS, "who sends it knows of no cache"
    assert counts.computed_tokens == 28 * CHUNK_TOKENS


def test_the_controller_hears_of_prompts_that_stay() -> None:
    engine = Engine(below=10_000)
    engine.decodes(prompt(300))
    counts = engine._flow.take()
    assert counts.local == {size_class(300): 1} and counts.prompts == {}


async def _late() -> dict[str, tuple[int, int]]:
    await asyncio.sleep(60)
    raise AssertionError("nobody waited")


async def _dead() -> dict[str, tuple[int, int]]:
    raise RuntimeError("the actor died")


@pytest.mark.parametrize("answer", [_late, _dead, _none])
def test_a_board_that_does_not_know_costs_no_request(
    answer: Callable[[], Awaitable[dict[str, tuple[int, int]]]], counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fluid, "HELD_S", 0.01)
    engine = Engine(board=Board(answer))
    assert engine.decodes(prompt(20 * CHUNK_TOKENS)) == ["elsewhere"]
    assert engine.routes[0].cached == {} and counted == []


def test_without_the_flags_nothing_is_asked_or_kept() -> None:
    engine = Engine()
    engine._board = board = Board()
    assert engine.decodes(prompt(20 * CHUNK_TOKENS)) == ["elsewhere"]
    engine.prefills(prompt(20 * CHUNK_TOKENS))
    assert board.queries == board.kept == board.waiting == []


def test_a_prompt_too_short_for_a_chunk_is_not_asked_for() -> None:
    board = Board()
    engine = Engine(board=board)
    assert engine.decodes(prompt(CHUNK_TOKENS - 1)) == ["elsewhere"] and not board.queries


def test_the_launchers_pairs_are_not_led_elsewhere() -> None:
    """Each ordered pair is to make a transfer, whoever has what."""
    board = Board()
    engine = Engine(board=board)
    request = prompt(20 * CHUNK_TOKENS)
    engine._prefill_by[id(request)] = "b"
    assert engine.decodes(request) == ["elsewhere"]
    assert engine.routes[0].only == "b" and not board.queries


class RaysMixin:
    """Stands for Ray's class that orchestrates: what one engine answers whole goes past it."""


class RaysServer:
    """Stands for Ray's server of an engine: two events, with `going` between them."""

    def __init__(self) -> None:
        self.going = asyncio.Event()

    async def completions(self, request: Any, raw: Any = None) -> Any:
        async def events() -> Any:
            yield 'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
            await self.going.wait()
            yield 'data: {"choices": [{"text": "y", "finish_reason": "length"}]}\n\n'

        return events()

    chat = completions


class WholeEngine(SwitchesRoles, SplitsSequences, RaysMixin, RaysServer):
    def __init__(self) -> None:
        RaysServer.__init__(self)
        self._flow, self._answers, self._prefill_by = TrafficCounts(), {}, {}
        self._kept, self.board_spec, self._affinity = Prefixes(), FluidSpec(prefill_locally_below=1), False
        self.kv_pool_tokens = 10_000

    def __del__(self) -> None:  # type: ignore[override]
        """Ray awaits the real one."""


WHOLE = {
    "beams": {"use_beam_search": True},
    "prompt log-probabilities": {"prompt_logprobs": 1},
    "no answer": {"max_tokens": 0},
    "echo": {"echo": True, "logprobs": 1},
    "several greedy choices": {"n": 2, "temperature": 0.0},
}


@pytest.mark.parametrize("method", ["completions", "chat"])
@pytest.mark.parametrize("asked", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("leaves", [False, True])
def test_the_controller_hears_of_requests_that_one_engine_answers_whole(
    method: str, asked: dict[str, Any], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router would take the engine for idle, and an engine that leaves would be stopped with them."""
    monkeypatch.setitem(sys.modules, RAYS_PD, SimpleNamespace(PDOrchestratorMixin=RaysMixin))
    plain = {"prompt_logprobs": None, "use_beam_search": False, "n": 1, "temperature": 1.0, "max_tokens": 9}
    request = prompt(20 * CHUNK_TOKENS)
    vars(request).update({**plain, "kv_transfer_params": None, "logprobs": None, **asked})

    async def run() -> None:
        engine = WholeEngine()
        stream = await getattr(engine, method)(request)
        await anext(stream)
        counts = engine._flow.take()
        assert (counts.running, counts.coming, counts.generated_tokens) == (1, 0, 1)
        assert counts.local == {size_class(20 * CHUNK_TOKENS): 1} and counts.prompts == {}
        assert engine._kept.tokens("", prompt_chunks(request)) == 20 * CHUNK_TOKENS, "its cache has the prompt"
        if leaves:
            await stream.aclose()
        else:
            engine.going.set()
            assert len([item async for item in stream]) == 1
        counts = engine._flow.take()
        assert (counts.running, counts.coming) == (0, 0)
        assert counts.answers == ({} if leaves else {size_class(20 * CHUNK_TOKENS): (1, 2)})
        assert engine._flow.idle

    asyncio.run(run())
