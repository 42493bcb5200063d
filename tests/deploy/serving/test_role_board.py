"""The board of the roles by itself: who plays what after reports, settings, silences and a new beginning."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.clock import Clock
from support.role_boards import Quiet, report, roles

from pdlab.deploy.serving.engine_traffic import TrafficCounts
from pdlab.deploy.serving.role_board import SETTLE_S, SILENT_S, RoleBoard, pace
from pdlab.roles.assign import first_split
from pdlab.roles.messages import RoleNews
from pdlab.roles.observed import ObservedPool
from pdlab.roles.policy import Policy, RoleDecision
from pdlab.roles.prefixes import CHUNK_TOKENS, chunks_of
from pdlab.roles.spec import FluidSpec


def board(clock: Clock, **spec: Any) -> Quiet:
    return Quiet(FluidSpec(**spec), clock)


def played(clock: Clock, split: str, engines: str) -> Quiet:
    """A board that has given roles to those engines."""
    of = board(clock, roles=split)
    report(of, *engines)
    of.decide()
    return of


def counts(of: RoleBoard) -> tuple[int, int]:
    plays = list(roles(of).values())
    return plays.count("prefill"), plays.count("decode")


@pytest.mark.parametrize("launched", ["auto", "1:3"])
def test_a_split_that_is_not_the_launch_s_shows_in_the_metrics(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, launched: str
) -> None:
    pytest.importorskip("ray", exc_type=ImportError)
    shown: dict[str, float] = {}

    class Gauge:
        def __init__(self, name: str, description: str) -> None:
            assert name not in shown and description
            self.name = name

        def set(self, value: float) -> None:
            shown[self.name] = value

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    of = played(clock, launched, "abcd")
    changed = []
    for split in (launched, "2:2", "auto", "1:3", launched):
        asyncio.run(of.set_split(split))
        of._show()
        changed.append(shown["pdlab_roles_changed"])
    assert changed == [0, 1, launched != "auto", launched != "1:3", 0]
    assert shown["pdlab_roles_prefill"] + shown["pdlab_roles_decode"] == 4


def test_a_fixed_split_is_played_and_set_by_hand(clock: Clock) -> None:
    of = played(clock, "1:3", "abcd")
    assert counts(of) == (1, 3)
    before = roles(of)
    asyncio.run(of.set_split("2:2"))
    assert counts(of) == (2, 2)
    kept = [name for name, role in before.items() if role == "prefill"]
    assert all(roles(of)[name] == "prefill" for name in kept), "who prefills goes on"
    assert [(e["prefill"], e["decode"]) for e in asyncio.run(of.decisions())] == [(1, 3), (2, 2)]
    assert "set by hand to 2:2" in asyncio.run(of.decisions())[-1]["reason"]


@pytest.mark.parametrize("text", ["3:2", "0:4", "four", "4:", "1:3:2"])
def test_no_split_of_the_engines_that_there_are(clock: Clock, text: str) -> None:
    of = played(clock, "1:3", "abcd")
    with pytest.raises(ValueError, match=text.split(":", 1)[0]):
        asyncio.run(of.set_split(text))
    assert counts(of) == (1, 3)


def test_exact_roles_stay_until_another_split_is_set(clock: Clock) -> None:
    of = played(clock, "1:3", "abcd")
    wanted = {"a": "decode", "b": "prefill", "c": "prefill", "d": "decode"}
    asyncio.run(of.set_roles(wanted))
    of.decide()
    assert roles(of) == wanted


def test_a_silent_engine_loses_its_role_and_gets_one_again(clock: Clock) -> None:
    of = played(clock, "1:3", "abcd")
    (gone,) = [name for name, role in roles(of).items() if role == "prefill"]
    clock.now += SILENT_S + 0.1
    report(of, *({*"abcd"} - {gone}))
    of.decide()
    assert gone not in roles(of)
    assert counts(of) == (1, 2), "one of the others prefills"
    clock.now += SETTLE_S
    report(of, gone)
    assert counts(of) == (1, 3)
    for _ in range(3):
        of.decide()
    assert len(asyncio.run(of.decisions())) == 3, "what does not change is not logged again"


def test_where_all_are_silent_the_board_has_stood_still(clock: Clock) -> None:
    of = played(clock, "1:3", "abcd")
    clock.now += 10 * SILENT_S
    of.decide()
    assert counts(of) == (1, 3)


def test_one_engine_left_decodes(clock: Clock) -> None:
    of = played(clock, "2:1", "a")
    assert roles(of) == {"a": "decode"}


def test_a_new_board_takes_over_the_roles_that_stand(clock: Clock) -> None:
    old = played(clock, "1:3", "abcd")
    asyncio.run(old.set_split("2:2"))
    known = old._state()
    new = board(clock, roles="1:3")
    asyncio.run(asyncio.wait_for(new.follow(known.fields, "router"), 5))
    report(new, *"abcd")
    new.decide()
    assert roles(new) == roles(old)
    assert asyncio.run(new.look())["by"] == "2:2"
    assert new._state().version > known.version, "routers take it for newer"
    assert "the roles that stood" in asyncio.run(new.decisions())[0]["reason"]


STOOD = {**dict.fromkeys("abcd", "prefill"), **dict.fromkeys("efgh", "decode")}


def restarted(clock: Clock, by: str = "auto", **spec: Any) -> Quiet:
    """A new board, to which a router has sent the roles that stand."""
    of = board(clock, **spec)
    asyncio.run(asyncio.wait_for(of.follow(RoleNews(version=5, roles=STOOD, by=by).fields, "router"), 5))
    return of


@pytest.mark.parametrize("first", ["ef", "e", "a", "abcdefg"])
@pytest.mark.parametrize(("launched", "by"), [("auto", "auto"), ("4:4", "4:4"), ("auto", "4:4")])
def test_engines_that_report_late_to_a_new_board_keep_their_roles(
    clock: Clock, first: str, launched: str, by: str
) -> None:
    of = restarted(clock, by, roles=launched)
    report(of, *first)
    clock.now += SETTLE_S
    of.decide()
    assert of._state().roles == STOOD, "routers send to engines that have not reported yet"
    clock.now += SILENT_S / 2
    report(of, *STOOD)
    of.decide()
    assert roles(of) == STOOD
    assert [entry["prefill"] for entry in asyncio.run(of.decisions())] == [4]


def test_an_engine_that_a_new_board_never_hears_of_loses_its_role(clock: Clock) -> None:
    of = restarted(clock)
    late = [name for name in STOOD if name not in "ab"]
    report(of, *late)
    clock.now += SETTLE_S
    of.decide()
    clock.now += SILENT_S
    report(of, *late)
    of.decide()
    assert of._state().roles == {name: STOOD[name] for name in late}
    report(of, "a")
    assert of._state().roles == {name: STOOD[name] for name in ["a", *late]}, "it comes back as what it was"


def test_a_new_engine_decodes_while_a_new_board_waits_for_the_others(clock: Clock) -> None:
    of = restarted(clock)
    clock.now += SETTLE_S
    report(of, "new", "a")
    assert of._state().roles == {**STOOD, "new": "decode"}


def test_a_split_set_by_hand_does_not_wait_for_engines_of_an_earlier_board(clock: Clock) -> None:
    of = restarted(clock)
    report(of, *"abef")
    asyncio.run(of.set_split("1:3"))
    assert counts(of) == (1, 3) and asyncio.run(of.look())["by"] == "1:3"
    of.decide()
    assert counts(of) == (1, 3)


@pytest.mark.parametrize("order", ["abcdefgh", "hgfedcba", "dhcgbfae"])
def test_half_of_a_pool_whose_engines_start_one_after_the_other_prefills(clock: Clock, order: str) -> None:
    of = board(clock, engines=8)
    clock.now += SETTLE_S
    for here in range(1, 9):
        report(of, *order[:here])
        of.decide()
        assert counts(of) == (here // 2, here - here // 2)
        clock.now += 2.0
        report(of, *order[:here])
    assert counts(of) == first_split(8, 1, 1) == (4, 4)


def test_a_split_set_by_hand_stays_as_the_pool_grows(clock: Clock) -> None:
    of = played(clock, "auto", "abcd")
    asyncio.run(of.set_split("1:3"))
    asyncio.run(of.set_split("auto"))
    clock.now += SETTLE_S
    report(of, "e")
    assert counts(of) == (1, 4), "nothing more is known, but somebody knew something"


@pytest.mark.parametrize("silent", ["a", "b", "ab"])
def test_an_engine_that_was_silent_comes_back_as_what_it_was(clock: Clock, silent: str) -> None:
    of = played(clock, "auto", "abcd")
    asyncio.run(of.set_split("2:2"))
    asyncio.run(of.set_split("auto"))
    before = roles(of)
    clock.now += SILENT_S + 0.1
    report(of, *({*"abcd"} - {*silent}))
    of.decide()
    away = roles(of)
    report(of, *silent)
    assert {name: role for name, role in roles(of).items() if name in silent} == {name: before[name] for name in silent}
    assert {name: role for name, role in roles(of).items() if name not in silent} == away


def test_a_follower_hears_of_a_change_at_once(clock: Clock) -> None:
    async def scenario() -> tuple[dict[str, Any], bool]:
        of = board(clock, roles="1:1")
        for name in "ab":
            await of.report(name, "node", TrafficCounts().take().fields)
        of.decide()
        known = await of.follow(RoleNews().fields, "router")
        waiting = asyncio.create_task(of.follow(known, "router"))
        await asyncio.sleep(0)
        early = waiting.done()
        flipped = {name: "decode" if role == "prefill" else "prefill" for name, role in known["roles"].items()}
        await of.set_roles(flipped)
        heard = await asyncio.wait_for(waiting, 5)
        assert heard["roles"] == flipped
        clock.now += 0.02
        again = asyncio.create_task(of.follow(heard, "router"))
        await asyncio.sleep(0)
        again.cancel()
        assert (await of.look())["reach_ms"] == (1, 20.0, 20.0, 20.0), "what was there before it asked did not reach it"
        return heard, early

    heard, early = asyncio.run(scenario())
    assert not early
    assert set(heard["loads"]) == {"a", "b"}


def test_routers_hear_of_what_is_still_prefilled_elsewhere(clock: Clock) -> None:
    of = board(clock, roles="1:1")
    report(of, "a", "b", coming=3, running=2, waiting_prompt_tokens=70)
    of.decide()
    assert of._state().loads == {"a": (70, 5), "b": (70, 5)}


@pytest.mark.parametrize(("slow_down", "times"), [(0.5, 1.0), (1.0, 1.0), (12.0, 12.0), (100.0, 16.0)])
def test_loads_of_slow_engines_are_as_old_as_those_of_fast_ones(clock: Clock, slow_down: float, times: float) -> None:
    assert pace(slow_down) == times
    of = board(clock, roles="1:1", slow_down=slow_down)
    report(of, "a", "b", "c")
    of.decide()
    clock.now += SILENT_S * times - 0.1
    report(of, "a", "b")
    of.decide()
    assert set(roles(of)) == {"a", "b", "c"}
    clock.now += 0.2
    report(of, "a", "b")
    of.decide()
    assert set(roles(of)) == {"a", "b"}, "it is silent for longer than slow engines are"


def test_times_are_the_engines(clock: Clock) -> None:
    seen: list[Any] = []
    of = board(clock, slow_down=10.0)
    decide = of._policy.decide

    class Watching(Policy):
        def decide(self, observed: ObservedPool) -> RoleDecision:
            seen.append(observed)
            return decide(observed)

    of._policy = Watching(of.spec)
    of._learn_local_below = lambda: None  # type: ignore[method-assign]
    report(of, "a", "b")
    of.decide()
    assert not seen, "of nothing that is known there is nothing to decide"
    report(of, "a", "b", ttft_s=[20.0], prefill_busy_s=5.0, prefilled_tokens=100)
    clock.now += 10.0
    report(of, "a", "b")
    of.decide()
    (observed,) = seen
    assert observed.window.ttft_s == (2.0, 2.0)
    assert [each.prefill_busy_s for each in observed.engines] == [0.5, 0.5]
    assert observed.window.seconds == pytest.approx(1.0)


def test_the_threshold_is_learnt_in_tokens_that_are_computed(clock: Clock) -> None:
    """Half of what prefill answers comes from its caches: it seems to compute twice as fast as it does."""

    def learnt(computed: int) -> int:
        of = board(clock, roles="1:1", prefill_locally_below="auto")
        for _ in range(4):
            clock.now += SETTLE_S
            busy = {"prefilled_tokens": 8000, "computed_tokens": computed, "prefill_busy_s": 0.8}
            report(of, "a", "b", **busy, waiting_prompt_tokens=1000, handoff_s=[0.05])
            of.decide()
        assert of._policy.prefill_rate.tokens_per_s == pytest.approx(10_000)
        return of._local_below

    assert learnt(8000) == pytest.approx(1500, abs=1)
    assert learnt(4000) == pytest.approx(750, abs=1)


def test_the_policy_hears_of_prompts_that_stay(clock: Clock) -> None:
    of = board(clock, roles="1:1")
    seen: list[ObservedPool] = []
    choose = of._choose

    def chosen(observed: ObservedPool) -> tuple[dict[str, str], str]:
        seen.append(observed)
        return choose(observed)

    of._choose = chosen  # type: ignore[method-assign]
    report(of, "a", "b", local={9: 2})
    report(of, "a", local={9: 1, 4: 1})
    of.decide()
    assert seen[-1].window.local == {9: 5, 4: 1}
    of.decide()
    assert seen[-1].window.local == {}


def test_a_threshold_that_is_given_is_told_to_engines(clock: Clock) -> None:
    of = board(clock, roles="1:1", prefill_locally_below=300)
    report(of, "a", "b")
    of.decide()
    assert asyncio.run(of.report("a", "node", TrafficCounts().take().fields)) == {"local_below": 300, "warm": []}


def test_the_board_knows_who_has_the_beginning_of_a_prompt(clock: Clock) -> None:
    of = played(clock, "2:2", "abcd")
    first, second, *decoding = [*sorted(n for n, r in roles(of).items() if r == "prefill"), *"abcd"]
    decoding = sorted({*"abcd"} - {first, second})
    chunks = chunks_of([7] * 4 * CHUNK_TOKENS)

    def held(engine: str) -> dict[str, int]:
        return {name: tokens for name, (tokens, _) in asyncio.run(of.held(engine, chunks)).items() if tokens}

    asyncio.run(of.keeps(decoding[0], chunks, None, True))
    assert held(decoding[1]) == {}, "who decodes it prefills nothing"
    asyncio.run(of.keeps(first, chunks[:3], None, False))
    asyncio.run(of.keeps(second, chunks, 2 * CHUNK_TOKENS, False))
    assert held(decoding[0]) == {first: 3 * CHUNK_TOKENS, second: 2 * CHUNK_TOKENS}, "a pool holds no more than it does"
    assert held(first) == {second: 2 * CHUNK_TOKENS}, "never the engine that asks"
    asyncio.run(of.waits(second, 700))
    asyncio.run(of.waits("nobody", 700))
    assert {name: waiting for name, (_, waiting) in asyncio.run(of.held(decoding[0], chunks)).items()} == {
        first: 0,
        second: 700,
    }
    asyncio.run(of.set_roles({**dict.fromkeys("abcd", "decode"), decoding[0]: "prefill"}))
    assert held(first) == {decoding[0]: 4 * CHUNK_TOKENS}, "what it decoded before its role changed"
    clock.now += SILENT_S + 0.1
    report(of, *({*"abcd"} - {decoding[0]}))
    of.decide()
    clock.now += SETTLE_S
    report(of, decoding[0])
    asyncio.run(of.set_roles({**dict.fromkeys("abcd", "decode"), decoding[0]: "prefill"}))
    assert held(first) == {}, "an engine that was away may have begun anew"
