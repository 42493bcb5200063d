"""Where the time to the first token goes, from differences of the engines' sums and counts."""

from __future__ import annotations

import pytest

from pdlab import findings
from pdlab.analysis import curves
from pdlab.results import Distribution, EngineCounters, Experiment, Manifest, Run, Summary
from pdlab.spec import Deployment, parse_label
from pdlab.ttft_split import mean_split, split
from pdlab.workload import Closed, RunKey, Workload

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
    return Run(
        origin="measured",
        label="x",
        key=RunKey(kind="concurrency", value=4, repeat=repeat),
        workload=Workload(input_tokens=100, output_tokens=10),
        load=Closed(concurrency=4),
        num_requests=50,
        completed=50,
        failed=0,
        whole=summary,
        engines_before=before,
        engines_after=after,
    )


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


def test_prefill_decode() -> None:
    found = split(pd_run())
    assert found is not None
    assert found.parts == pytest.approx(
        {
            "queue": 0.05,
            "prefill": 0.2,
            "KV transfer": 0.06,
            "decode queue": 0.02,
            "first decode step": 0.01,
            "rest": 0.06,
        }
    )
    assert sum(found.parts.values()) == pytest.approx(found.ttft_s)


def test_collocated() -> None:
    after = grown(PREFILL, queue_s=2.5, queue_count=50, prefill_s=10.0, prefill_count=50)
    found = split(run({"collocated": PREFILL}, {"collocated": after}))
    assert found is not None
    assert found.parts == pytest.approx({"queue": 0.05, "prefill": 0.2, "rest": 0.15})
    fresh = split(run({}, {"collocated": after}))
    assert fresh is not None and fresh.prefill_s == pytest.approx(30 / 150), "engines that had served nothing before"


def test_unknown_is_none_and_never_zero() -> None:
    assert split(run({}, {})) is None
    assert split(run({"collocated": PREFILL}, {"collocated": PREFILL})) is None, "no request finished"
    restarted = EngineCounters(queue_s=1, queue_count=10, prefill_s=1, prefill_count=10)
    assert split(run({"collocated": PREFILL}, {"collocated": restarted})) is None
    only = split(run({}, {"prefill": PREFILL, "decode": EngineCounters()}))
    assert only is not None
    assert (only.kv_transfer_s, only.first_step_s, only.decode_wait_s) == (None, None, None)


def test_more_than_the_client_saw_is_shown_as_it_is() -> None:
    found = split(run({}, {"collocated": PREFILL}, ttft_s=0.1))
    assert found is not None and found.rest_s == pytest.approx(0.1 - 0.03 - 0.2)


def test_mean_over_repeats_and_table() -> None:
    one = split(pd_run())
    assert one is not None
    other = one.model_copy(update={"queue_s": 0.15, "first_step_s": None})
    mean = mean_split([one, other])
    assert (mean.queue_s, mean.first_step_s) == (pytest.approx(0.1), None)
    manifest = Manifest(
        origin="measured", label="x", deployment=Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1"))
    )
    shown = curves([Experiment(name="x", manifest=manifest, runs=(pd_run(), pd_run(1)))])
    text = findings.split_text(shown)
    assert text is not None
    assert text.splitlines()[-1].split() == [
        "P1xTP1", "D1xTP1", "pack", "4", "400.0", "50.0", "200.0", "60.0", "20.0", "10.0", "60.0",
    ]  # fmt: skip
    assert findings.split_text(curves([Experiment(name="x", manifest=manifest, runs=(run({}, {}),))])) is None
