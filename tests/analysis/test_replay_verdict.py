"""Which deployment is best for a replay, and why, from replays whose differences are planted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
from support import records as made

from pdlab.analysis.replay_verdict import CAUSES, ReplayedDeployment, verdict
from pdlab.analysis.replays import replay_facts
from pdlab.analysis.ttft_parts import PartsAround, TtftParts
from pdlab.core.findings import Finding
from pdlab.core.workload import Replay, Slo
from pdlab.results.level_data import LevelData
from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.results.timeline import PARTS

TOKENS = 11


def replayed(
    label: str,
    *,
    ttft_s: float = 0.5,
    gap_s: float = 0.02,
    stall_s: float = 0.0,
    cached: int = 0,
    parts: Mapping[str, float] = MappingProxyType({}),
    slos: Sequence[Slo] = (),
    gpus: int = 2,
    repeats: int = 1,
    timed: bool = True,
) -> ReplayedDeployment:
    """A hundred sessions of one request of 100 prompt tokens; each answer has ten gaps, the last one with a stall."""
    records = [
        RequestRecord(
            arrival_s=float(n),
            first_token_s=n + ttft_s,
            finish_s=n + ttft_s + 10 * gap_s + stall_s,
            input_tokens=100,
            output_tokens=TOKENS,
            itl_s=(gap_s,) * 9 + (gap_s + stall_s,),
            replayed=ReplayedRequest(id=f"r{n}", session=f"r{n}", cached_tokens=cached),
        )
        for n in range(100)
    ]
    run = made.run(records, Replay(), label=label)
    facts = replay_facts(LevelData.of(records), slos)
    assert facts is not None
    around = [PartsAround(name, 5, ttft_s, dict(parts)) for name in ("mean", "p50", "p90")]
    of_ttft = TtftParts(label, "replay", 1.0, 100, 0, around[0], tuple(around[1:]), (), {}) if timed else None
    return ReplayedDeployment(label, gpus, "gpu", ((run, facts),) * repeats, of_ttft)


def by_figure(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {
        str(each.numbers["figure"]): each for each in findings if each.code in ("replay_best_by", "replay_figure_tie")
    }


def test_every_part_of_ttft_is_of_one_cause() -> None:
    every = [name for parts in CAUSES.values() for name in parts]
    assert sorted(every) == sorted(PARTS)


# Two single starts with a standard deviation of TTFT of 8.49 % each: exp(1.96 * 0.0849 * sqrt(2)) is 1.265.
@pytest.mark.parametrize(("factor", "timed"), [(1.25, False), (1.28, True)])
def test_a_lead_within_what_single_starts_differ_by_is_none(factor: float, timed: bool) -> None:
    findings = verdict("w", [replayed("slow", ttft_s=0.5 * factor), replayed("fast")])
    figures = by_figure(findings)
    assert (figures["TTFT p50"].code == "replay_best_by") is timed and figures["TPOT p50"].code == "replay_figure_tie"
    assert figures["TTFT p50"].numbers["limit"] == pytest.approx(1.2654, abs=1e-3)
    assert figures["TPOT p50"].numbers["limit"] == pytest.approx(1.1497, abs=1e-3), "5.03 %"
    assert figures["normalised interactivity at P90"].numbers["limit"] == pytest.approx(1.2654, abs=1e-3), "of E2EL"
    assert findings[0].code == ("replay_best" if timed else "replay_tie")
    if timed:
        assert findings[0].numbers["best"] == "fast"


def test_three_deployments_share_the_error() -> None:
    """The best of three equal ones leads by chance more often: exp(2.241 * 0.0849 * sqrt(2)) is 1.309."""
    pair = [replayed("slow", ttft_s=0.64), replayed("fast")]
    assert by_figure(verdict("w", pair))["TTFT p50"].code == "replay_best_by"
    three = by_figure(verdict("w", [*pair, replayed("slower", ttft_s=0.8)]))["TTFT p50"]
    assert (three.code, three.numbers["names"]) == ("replay_figure_tie", "fast and slow")
    assert three.numbers["limit"] == pytest.approx(1.3088, abs=1e-3)


def test_repeats_make_a_smaller_lead_significant() -> None:
    pair = [replayed(name, ttft_s=ttft_s, repeats=4) for name, ttft_s in (("slow", 0.58), ("fast", 0.5))]
    assert verdict("w", pair)[0].code == "replay_best"
    assert verdict("w", [pair[0], replayed("fast")])[0].code == "replay_tie", "the fewest count"


@pytest.mark.parametrize(
    ("ours", "theirs", "cached", "code"),
    [
        ({"prefill": 0.4, "queue": 0.1}, {"prefill": 0.5, "queue": 0.5}, (0, 0), "replay_by_queue"),
        ({"prefill": 0.4, "front": 0.1}, {"prefill": 0.3, "transfer": 0.4, "call": 0.3}, (0, 0), "replay_by_transfer"),
        ({"prefill": 0.5}, {"prefill": 1.0}, (50, 0), "replay_by_hits"),
        ({"prefill": 0.5}, {"prefill": 1.0}, (10, 0), "replay_by_prefill"),
        ({"prefill": 0.5}, {"prefill": 1.0}, (0, 50), "replay_by_prefill"),
        ({"first_step": 0.1, "prefill": 0.4}, {"first_step": 0.6, "prefill": 0.4}, (0, 0), "replay_by_first_step"),
        ({"server": 0.1, "prefill": 0.4}, {"server": 0.6, "prefill": 0.4}, (0, 0), "replay_by_servers"),
    ],
)
def test_the_largest_differing_part_is_why(
    ours: dict[str, float], theirs: dict[str, float], cached: tuple[int, int], code: str
) -> None:
    findings = verdict(
        "w",
        [
            replayed("slow", ttft_s=1.0, parts=theirs, cached=cached[1]),
            replayed("fast", ttft_s=0.5, parts=ours, cached=cached[0]),
        ],
    )
    causes = [each for each in findings if each.code in (*CAUSES, "replay_by_hits")]
    assert [each.code for each in causes] == [code, code] and causes[0].numbers["best"] == "fast"
    assert causes[0].numbers["gap_ms"] == pytest.approx(500)


def test_why_is_unknown_without_timelines() -> None:
    findings = verdict("w", [replayed("slow", ttft_s=1.0, timed=False), replayed("fast")])
    assert [each.code for each in findings].count("replay_parts_unknown") == 2


@pytest.mark.parametrize(
    ("slower", "code"), [({"gap_s": 0.03}, "replay_by_steps"), ({"stall_s": 0.1}, "replay_by_stalls")]
)
def test_tpot_differs_by_steps_or_by_stalls(slower: dict[str, float], code: str) -> None:
    findings = verdict("w", [replayed("fast"), replayed("slow", **slower)])  # type: ignore[arg-type]
    assert code in [each.code for each in findings] and by_figure(findings)["TPOT p50"].numbers["best"] == "fast"


@pytest.mark.parametrize(
    ("slower", "code"), [({"ttft_s": 1.0}, "replay_by_first_token"), ({"gap_s": 0.1}, "replay_by_later_tokens")]
)
def test_slow_requests_wait_before_or_after_the_first_token(slower: dict[str, float], code: str) -> None:
    findings = verdict("w", [replayed("fast"), replayed("slow", **slower)])  # type: ignore[arg-type]
    assert code in [each.code for each in findings]


def test_goodput_differs_by_the_bound_that_was_missed() -> None:
    slos = (Slo(ttft_s=0.7, tpot_s=0.1),)
    findings = verdict("w", [replayed("slow", ttft_s=1.0, slos=slos), replayed("fast", slos=slos)])
    (why,) = (each for each in findings if each.code == "replay_by_bound")
    assert why.numbers == {"bound": "TTFT <= 700 ms", "best": "fast", "other": "slow", "ours": 0, "theirs": 100}
    assert (
        by_figure(findings)["goodput of sessions (TTFT <= 700 ms and TPOT <= 100 ms)"].numbers["lead"]
        == "without limit"
    )


def test_different_winners_are_reported_as_such() -> None:
    findings = verdict("w", [replayed("first", ttft_s=0.1, gap_s=0.05), replayed("later", ttft_s=0.5, gap_s=0.02)])
    assert findings[0].code == "replay_none_best"
    assert "first by TTFT p50" in findings[0].text and "later by TPOT p50" in findings[0].text


def test_of_three_two_may_be_best() -> None:
    three = [replayed("a"), replayed("b", ttft_s=0.52), replayed("c", ttft_s=2.0, gpus=4)]
    findings = verdict("w", three)
    assert (findings[0].code, findings[0].numbers["names"]) == ("replay_best_of_several", "a and b")
    clear = verdict("w", [*three[:1], replayed("b", ttft_s=0.8), three[2]])
    assert (clear[0].code, clear[0].numbers["best"], clear[1].code) == ("replay_best", "a", "replay_sizes_differ")


def test_what_failed_its_checks_is_not_compared() -> None:
    bad = replayed("bad")._replace(replays=(), failed=1)
    assert verdict("w", [bad, replayed("one")]) == []
    findings = verdict("w", [bad, replayed("one"), replayed("two")])
    assert [each.numbers["label"] for each in findings if each.code == "replay_not_compared"] == ["bad"]
