"""Where the time to the first token goes, from the engines' sums, counts and buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import records as made

from pdlab.analysis.curves import curves
from pdlab.analysis.ttft_breakdown import PARTS, MeanRange, TtftSplit, mean_split, split
from pdlab.core.deployment import Deployment, Serving, parse_label
from pdlab.core.workload import Closed, Workload
from pdlab.report import sections
from pdlab.results.schema import Distribution, EngineCounters, Experiment, Manifest, Run, Summary

PREFILL = EngineCounters(queue_s=3.0, queue_count=100, prefill_s=20.0, prefill_count=100)
DECODE = EngineCounters(
    queue_s=6.0, queue_count=100, prefill_s=2.0, prefill_count=100, kv_transfer_s=4.0, kv_transfers=100
)


def grown(start: EngineCounters, **more: float) -> EngineCounters:
    return start.model_copy(update={name: (getattr(start, name) or 0.0) + value for name, value in more.items()})


def run(
    before: dict[str, EngineCounters], after: dict[str, EngineCounters], repeat: int = 0, ttft_s: float = 0.4
) -> Run:
    ttft = Distribution(mean_s=ttft_s, percentiles_s={"p50": ttft_s})
    summary = Summary(
        duration_s=10,
        completed=50,
        requests_per_s=5,
        input_tokens_per_s=500,
        output_tokens_per_s=50,
        ttft=ttft,
        tpot=ttft,
    )
    return made.run(
        (), Closed(concurrency=4), repeat=repeat, count=50, whole=summary, engines_before=before, engines_after=after,
        workload=Workload(input_tokens=100, output_tokens=10),
    )  # fmt: skip


def pd_run(repeat: int = 0) -> Run:
    return run(
        {"prefill": PREFILL, "decode": DECODE},
        {
            "prefill": grown(PREFILL, queue_s=2.5, queue_count=50, prefill_s=10.0, prefill_count=50),
            "decode": grown(
                DECODE, queue_s=4.0, queue_count=50, prefill_s=0.5, prefill_count=50, kv_transfer_s=3.0, kv_transfers=50
            ),
        },
        repeat,
    )


def parts(breakdown: TtftSplit | None) -> dict[str, MeanRange]:
    assert breakdown is not None
    return {name: part for name in PARTS if (part := getattr(breakdown, name)) is not None}


def exact(breakdown: TtftSplit | None) -> dict[str, float]:
    """Parts that are points."""
    known = parts(breakdown)
    assert all(part.low_s == part.high_s for part in known.values())
    return {name: part.low_s for name, part in known.items()}


def test_prefill_decode() -> None:
    breakdown = split(pd_run())
    assert exact(breakdown) == pytest.approx(
        {"queue": 0.05, "prefill": 0.2, "kv_transfer": 0.06, "decode_wait": 0.02, "first_step": 0.01}
    )
    assert breakdown is not None and breakdown.rest_low_s == breakdown.rest_high_s == pytest.approx(0.06)


def test_of_early_tokens_the_time_outside_the_engines_is_unknown() -> None:
    """The client's TTFT of 300 ms ends before decode's 90 ms: outside the engines it has 50 ms, and not -40 ms."""
    level = pd_run().model_copy(update={"whole": run({}, {}, ttft_s=0.3).whole})
    breakdown = split(level, early=True)
    assert breakdown is not None and (breakdown.rest_low_s, breakdown.rest_high_s) == (None, None)
    mean = mean_split([breakdown, breakdown])
    assert (mean.rest_low_s, mean.rest_high_s) == (None, None)
    assert exact(breakdown) == exact(mean) == exact(split(level)), "the engines' own figures stay"


@pytest.mark.parametrize(
    ("label", "more", "unknown"),
    [
        ("pd-pack-p1xtp1-d1xtp1", {}, True),
        ("pd-pack-p1xtp1-d1xtp1", {"origin": "simulated"}, False),
        ("collocated-1xtp1", {}, False),
    ],
)
def test_the_manifest_says_whether_first_tokens_were_early(label: str, more: dict[str, str], unknown: bool) -> None:
    deployment = Deployment(topology=parse_label(label), serving=Serving(early_token=True))
    level = pd_run() if label.startswith("pd") else run({}, {"collocated": PREFILL})
    manifest = Manifest.model_validate(
        {"origin": "measured", "label": label, "deployment": deployment, "gpus": 2, **more}
    )
    (curve,) = curves([Experiment(name="x", manifest=manifest, runs=(level,))])
    assert [each.rest_high_s is None for each in curve.splits.values()] == [unknown]
    section = sections.split_section([curve])
    assert section is not None and ("unknown with --early-token" in section.title) == unknown


def test_an_engine_s_own_time_to_first_token_is_the_whole_of_its_part() -> None:
    level = pd_run()
    after = level.engines_after
    counters = {
        "prefill": grown(after["prefill"], ttft_s=14.0, ttft_count=50),
        "decode": grown(after["decode"], ttft_s=5.0, ttft_count=50),
    }
    breakdown = split(level.model_copy(update={"engines_after": counters}))
    assert (exact(breakdown)["engine"], exact(breakdown)["decode_engine"]) == pytest.approx((0.28, 0.1))
    assert breakdown is not None and breakdown.rest_high_s == pytest.approx(0.4 - 0.28 - 0.1)


def test_collocated() -> None:
    after = grown(PREFILL, queue_s=2.5, queue_count=50, prefill_s=10.0, prefill_count=50)
    breakdown = split(run({"collocated": PREFILL}, {"collocated": after}))
    assert exact(breakdown) == pytest.approx({"queue": 0.05, "prefill": 0.2})
    assert breakdown is not None and breakdown.rest_low_s == pytest.approx(0.15)
    fresh = split(run({}, {"collocated": after}))
    assert exact(fresh)["prefill"] == pytest.approx(30 / 150), "engines that had served nothing before"


BEFORE = {"0.3": 10.0, "0.5": 12.0, "+Inf": 12.0}


@pytest.mark.parametrize(
    ("after", "low_s", "high_s"),
    [
        ({"0.3": 20.0, "0.5": 22.0, "+Inf": 22.0}, 0.0, 0.3),
        ({"0.3": 15.0, "0.5": 22.0, "+Inf": 22.0}, 0.15, 0.4),
        ({"0.3": 10.0, "0.5": 21.0, "+Inf": 22.0}, (9 * 0.3 + 0.5) / 10, None),
    ],
)
def test_a_mean_from_buckets_is_a_range(after: dict[str, float], low_s: float, high_s: float | None) -> None:
    level = run(
        {"collocated": EngineCounters(queue_count=12, buckets={"queue": BEFORE})},
        {"collocated": EngineCounters(queue_count=22, buckets={"queue": after})},
    )
    queue = parts(split(level))["queue"]
    assert queue.low_s == pytest.approx(low_s)
    assert queue.high_s == (None if high_s is None else pytest.approx(high_s))


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=50))
def test_the_mean_is_within_its_range(seconds: list[float]) -> None:
    ends = [0.01, 0.1, 0.3, 1.0, 10.0]
    counts = {f"{end:g}": float(sum(value <= end for value in seconds)) for end in ends} | {"+Inf": float(len(seconds))}
    level = run({}, {"collocated": EngineCounters(buckets={"prefill": counts})})
    prefill = parts(split(level))["prefill"]
    mean_s = sum(seconds) / len(seconds)
    assert prefill.high_s is not None and prefill.low_s - 1e-9 <= mean_s <= prefill.high_s + 1e-9


def test_the_transfer_is_taken_out_of_decode_s_queue_range_by_range() -> None:
    assert MeanRange(low_s=0.25, high_s=0.5).beyond(MeanRange(low_s=0.0, high_s=0.125)) == MeanRange(
        low_s=0.125, high_s=0.5
    )
    assert MeanRange(low_s=0.0, high_s=0.3).beyond(MeanRange(low_s=0.4, high_s=0.5)) == MeanRange(low_s=0.0, high_s=0.0)
    assert MeanRange(low_s=0.2, high_s=None).beyond(MeanRange(low_s=0.1, high_s=None)) == MeanRange(
        low_s=0.0, high_s=None
    )


def test_unknown_is_none_and_never_zero() -> None:
    assert split(run({}, {})) is None
    assert split(run({"collocated": PREFILL}, {"collocated": PREFILL})) is None, "no request finished"
    restarted = EngineCounters(queue_s=1, queue_count=10, prefill_s=1, prefill_count=10, buckets={"queue": {"+Inf": 3}})
    began = PREFILL.model_copy(update={"buckets": {"queue": BEFORE}})
    assert split(run({"collocated": began}, {"collocated": restarted})) is None
    only = split(run({}, {"prefill": PREFILL, "decode": EngineCounters()}))
    assert only is not None
    assert (only.kv_transfer, only.first_step, only.decode_wait) == (None, None, None)


def test_more_than_the_client_saw_is_shown_as_it_is() -> None:
    breakdown = split(run({}, {"collocated": PREFILL}, ttft_s=0.1))
    assert breakdown is not None and breakdown.rest_high_s == pytest.approx(0.1 - 0.03 - 0.2)


def test_mean_over_repeats_and_table() -> None:
    one = split(pd_run())
    assert one is not None
    other = one.model_copy(update={"queue": MeanRange(low_s=0.15, high_s=0.25), "first_step": None})
    mean = mean_split([one, other])
    assert (
        mean.queue and (mean.queue.low_s, mean.queue.high_s) == pytest.approx((0.1, 0.15)) and mean.first_step is None
    )
    manifest = Manifest(
        origin="measured", label="x", deployment=Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1"))
    )
    shown = curves([Experiment(name="x", manifest=manifest, runs=(pd_run(), pd_run(1)))])
    section = sections.split_section(shown)
    assert section is not None
    assert section.body.splitlines()[-1].split() == [
        "P1xTP1", "D1xTP1", "pack", "4", "400.0", "-", "50.0", "200.0", "-", "60.0", "20.0", "10.0", "60.0",
    ]  # fmt: skip
    wide = {
        "collocated": EngineCounters(buckets={"queue": {"0.3": 5.0, "+Inf": 5.0}, "ttft": {"0.3": 0.0, "+Inf": 5.0}})
    }
    section = sections.split_section(curves([Experiment(name="x", manifest=manifest, runs=(run({}, wide),))]))
    assert section is not None and section.body.splitlines()[-1].split()[3:] == [
        "4", "400.0", ">", "300.0", "<", "300.0", "-", "-", "-", "-", "-", "<", "100.0",
    ]  # fmt: skip
    assert sections.split_section(curves([Experiment(name="x", manifest=manifest, runs=(run({}, {}),))])) is None
