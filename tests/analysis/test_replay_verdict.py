"""Which deployment is best for a replay, and why, from replays whose differences are planted."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
from support import records as made

from pdlab.analysis.replay_verdict import CAUSES, ReplayedDeployment, verdict
from pdlab.analysis.replays import ReplayFacts, replay_facts
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


def limit_of(finding: Finding) -> float:
    return float(finding.numbers["limit"])


# Two single starts with a standard deviation of TTFT of 8.49 % each, and four figures: exp(2.498 * 0.0849 * sqrt(2))
# is 1.350.
@pytest.mark.parametrize(("factor", "counts"), [(1.34, False), (1.36, True)])
def test_a_lead_within_what_single_starts_differ_by_is_none(factor: float, counts: bool) -> None:
    findings = verdict("w", [replayed("slow", ttft_s=0.5 * factor), replayed("fast")])
    figures = by_figure(findings)
    assert (figures["TTFT p50"].code == "replay_best_by") is counts and figures["TPOT p50"].code == "replay_figure_tie"
    assert limit_of(figures["TTFT p50"]) == pytest.approx(1.350, abs=6e-3)
    assert limit_of(figures["TPOT p50"]) == pytest.approx(1.194, abs=6e-3), "5.03 %"
    assert limit_of(figures["normalised interactivity at P90"]) == pytest.approx(1.350, abs=6e-3), "of E2EL"
    assert "assumed scatter of single replays" in figures["TTFT p50"].text
    assert findings[0].code == ("replay_best" if counts else "replay_tie")
    if counts:
        assert findings[0].numbers["best"] == "fast"


def test_figures_share_the_error() -> None:
    """A fifth figure is one more look: exp(2.576 * 0.0849 * sqrt(2)) is 1.363."""
    pair = [replayed(name, slos=[Slo(ttft_s=5.0)], ttft_s=ttft_s) for name, ttft_s in (("slow", 0.678), ("fast", 0.5))]
    assert by_figure(verdict("w", pair))["TTFT p50"].code == "replay_figure_tie"
    without = [replayed("slow", ttft_s=0.678), replayed("fast")]
    assert by_figure(verdict("w", without))["TTFT p50"].code == "replay_best_by"


def test_three_deployments_share_the_error() -> None:
    """Any two of three equal ones may differ by chance: exp(2.865 * 0.0849 * sqrt(2)) is 1.411."""
    pair = [replayed("slow", ttft_s=0.69), replayed("fast")]
    assert by_figure(verdict("w", pair))["TTFT p50"].code == "replay_best_by"
    three = by_figure(verdict("w", [*pair, replayed("slower", ttft_s=0.8)]))["TTFT p50"]
    assert (three.code, three.numbers["names"]) == ("replay_figure_tie", "fast and slow")
    assert limit_of(three) == pytest.approx(1.411, abs=6e-3)


def several(label: str, ttft_s: Sequence[float]) -> ReplayedDeployment:
    """A replay for each TTFT; TPOT is constant."""
    made = [replayed(label, ttft_s=each) for each in ttft_s]
    return made[0]._replace(replays=tuple(each.replays[0] for each in made))


def test_several_replays_have_their_measured_scatter() -> None:
    """Of three replays each: medians that scatter by a third are apart by 13 %, and others of 1 % by 8 %."""
    noisy = verdict("w", [several("a", (0.70, 1.0, 1.36)), several("b", (0.80, 1.1, 1.55))])
    assert noisy[0].code == "replay_tie"
    ttft = by_figure(noisy)["TTFT p50"]
    assert ttft.numbers["values"] == "a 1020 ms and b 1150 ms", "means over replays"
    # ln of the ratio: errors of 18.7 and 18.9 % of the means, t of 4 degrees of freedom at 0.9938 is 4.3.
    assert limit_of(ttft) == pytest.approx(math.exp(4.3 * math.hypot(0.187, 0.189)), rel=0.05)
    assert "measured scatter of the replays" in ttft.text
    quiet = verdict("w", [several("a", (0.99, 1.0, 1.01)), several("b", (1.07, 1.08, 1.09))])
    assert (quiet[0].code, quiet[0].numbers["best"]) == ("replay_best", "a")


def test_the_scatter_of_a_single_replay_beside_several_is_assumed() -> None:
    pair = [several("slow", (0.569, 0.57, 0.571)), replayed("fast")]
    tie = by_figure(verdict("w", pair))["TTFT p50"]
    assert tie.code == "replay_figure_tie" and "assumed scatter of single replays" in tie.text
    assert verdict("w", [pair[0], several("fast", (0.499, 0.5, 0.501))])[0].code == "replay_best"


def test_only_those_within_their_own_scatter_are_tied() -> None:
    """The worst one may be the best one, if its own replays differ that much."""
    three = [several("a", (0.99, 1.0, 1.01)), several("b", (1.29, 1.3, 1.31)), several("c", (0.4, 1.5, 2.3))]
    ttft = by_figure(verdict("w", three))["TTFT p50"]
    assert (ttft.code, ttft.numbers["names"]) == ("replay_figure_tie", "a and c")


def test_no_session_within_an_slo_is_worse_only_than_some_in_every_replay() -> None:
    slos = (Slo(ttft_s=0.7),)

    def within(label: str, *per_s: float) -> ReplayedDeployment:
        made = replayed(label, slos=slos)
        ((run, facts),) = made.replays
        each = [(run, facts._replace(within=(facts.within[0]._replace(per_s=value),))) for value in per_s]
        return made._replace(replays=tuple(each))

    def code(*per_s: float) -> str:
        findings = verdict("w", [within("none", 0.0, 0.0, 0.0), within("some", *per_s)])
        return by_figure(findings)["goodput of sessions (TTFT <= 700 ms)"].code

    assert code(1.0, 1.01, 0.99) == "replay_best_by" and code(0.0, 0.0, 0.3) == "replay_figure_tie"


@pytest.mark.parametrize(
    ("ours", "theirs", "replays", "counts"),
    [(48, 47, 2, False), (100, 99, 3, False), (100, 97, 1, False), (98, 20, 3, True)],
)
def test_equal_counts_of_sessions_are_not_certain(ours: int, theirs: int, replays: int, counts: bool) -> None:
    """Of 100 sessions, in each of the replays."""

    def within(label: str, sessions: int) -> ReplayedDeployment:
        made = replayed(label, slos=(Slo(ttft_s=0.7),))
        ((run, facts),) = made.replays
        some = facts.within[0]._replace(sessions=sessions, per_s=sessions / 600)
        return made._replace(replays=((run, facts._replace(within=(some,))),) * replays)

    goodput = by_figure(verdict("w", [within("a", ours), within("b", theirs)]))["goodput of sessions (TTFT <= 700 ms)"]
    assert (goodput.code == "replay_best_by") is counts


@pytest.mark.parametrize(
    ("count", "replays", "sd"), [(2, 1, 0.05), (3, 1, 0.05), (5, 1, 0.05), (2, 3, 0.3), (4, 3, 0.3)]
)
def test_equal_deployments_have_a_best_less_than_once_in_twenty(count: int, replays: int, sd: float) -> None:
    """Every figure scatters by itself, which gives the most leads by chance. 600 trials: at most 0.05 + 2 errors."""
    drawn = random.Random(count)
    ((run, facts),) = replayed("a").replays
    assert facts.every.ttft is not None and facts.every.tpot is not None
    ttft, tpot = facts.every.ttft, facts.every.tpot

    def of_chance() -> ReplayFacts:
        p50, p90, gap, speed = (math.exp(drawn.gauss(0, sd)) for _ in range(4))
        every = facts.every._replace(
            ttft=ttft.model_copy(update={"percentiles_s": {"p50": p50, "p90": 2 * p90}}),
            tpot=tpot.model_copy(update={"percentiles_s": {"p50": gap / 100}}),
        )
        return facts._replace(every=every, interactivity_p90=50 * speed)

    wrong = 0
    for _ in range(600):
        equal = [
            ReplayedDeployment(str(n), 2, "gpu", tuple((run, of_chance()) for _ in range(replays)), None)
            for n in range(count)
        ]
        wrong += verdict("w", equal)[0].code != "replay_tie"
    assert wrong / 600 < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 600)


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
