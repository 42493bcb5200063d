"""Goodput over a grid of bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import folders
from support import records as made
from support.validity import failing

from pdlab.analysis import goodput_map, loading
from pdlab.analysis.goodput_map import Cell, RateLevel, RateSweep, cell, measured
from pdlab.core.findings import found
from pdlab.core.workload import Open, Slo, Workload
from pdlab.report import goodput_map as picture
from pdlab.results.schema import Validity
from pdlab.results.store import Store


def level(rate_rps: float, ttft_s: float, tpot_s: float, within: float = 1.0, failed: int = 0) -> RateLevel:
    """100 requests, of which that share has those latencies and the rest ten times as much."""
    slow = np.arange(100) >= round(100 * within)
    factor = np.where(slow, 10.0, 1.0)
    return RateLevel(rate_rps, ttft_s * factor, tpot_s * factor, failed)


def served(*levels: RateLevel, gpus: int = 2, label: str = "a", origin: str = "measured") -> RateSweep:
    return RateSweep(label, origin, gpus, 250.0, levels)  # type: ignore[arg-type]


SLO = Slo(ttft_s=1.0, tpot_s=0.02, quantile=0.9)


def test_it_is_where_the_share_crosses_the_quantile_per_gpu() -> None:
    curve = served(level(4, 0.5, 0.01), level(8, 0.5, 0.01, within=0.8), level(16, 5.0, 0.01))
    assert cell(curve, SLO) == Cell(pytest.approx(3.0)), "half-way between a share of 1 and of 0.8: 6 of 2 GPUs"
    assert cell(served(*reversed(curve.levels)), SLO) == cell(curve, SLO), "in any order"
    assert cell(curve, Slo(ttft_s=1.0, tpot_s=0.005, quantile=0.9)) == Cell(0.0)
    assert cell(served(level(4, 0.5, 0.01)), SLO) == Cell(2.0, more=True)
    assert cell(served(), SLO) == Cell(0.0)


def test_a_rate_that_meets_above_one_that_misses_does_not_count() -> None:
    assert cell(served(level(4, 0.5, 0.01), level(8, 5.0, 0.01), level(16, 0.5, 0.01)), SLO).goodput < 4


def test_a_queue_that_grows_bounds_goodput_by_what_is_served() -> None:
    """A short level of too many requests is within loose bounds only because it ends."""
    short = replace(level(16, 0.5, 0.01), behind_rps=9.0)
    assert cell(served(level(4, 0.5, 0.01), short), SLO) == Cell(4.5), "9 of 2 GPUs, and there is no more"
    later = replace(level(32, 0.5, 0.01), behind_rps=7.0)
    assert cell(served(level(4, 0.5, 0.01), short, later), SLO) == Cell(4.5)
    # Half-way to a level with a share of 0.8 are 10 requests/s, of which 9 are served.
    mixed = replace(level(16, 0.5, 0.01, within=0.8), behind_rps=9.0)
    assert cell(served(level(4, 0.5, 0.01), mixed), SLO) == Cell(4.5)
    assert cell(served(level(4, 5.0, 0.01), short), SLO) == Cell(0.0)


def test_what_keeps_up_within_the_bounds_counts_whatever_another_level_served() -> None:
    short = replace(level(8, 0.5, 0.01), behind_rps=5.0)
    assert cell(served(level(4, 0.5, 0.01), level(10, 0.5, 0.01), short), SLO) == Cell(5.0), "10 of 2 GPUs"
    assert cell(served(level(4, 0.5, 0.01), level(10, 5.0, 0.01), short), SLO) == Cell(2.5), "5 of 2 GPUs"


def test_who_failed_is_within_nothing_and_one_token_has_no_tpot() -> None:
    assert level(4, 0.5, 0.01, failed=25).share(SLO) == 0.8
    one = RateLevel(4, np.full(10, 0.5), np.full(10, np.nan))
    assert one.share(SLO) == 1.0


def test_cost_of_a_million_tokens() -> None:
    # 2 requests/s of 250 tokens for 3.6 per GPU hour: 0.001 per second over 500 tokens.
    assert Cell(2.0).cost(3.6, 250.0) == pytest.approx(2.0)
    assert Cell(0.0).cost(3.6, 250.0) is None


def test_a_map_shows_who_has_most_and_who_is_as_good() -> None:
    fast = served(level(4, 0.2, 0.03), level(4.001, 9.0, 9.0), label="fast")
    smooth = served(level(2, 1.5, 0.01), level(2.001, 9.0, 9.0), label="smooth")
    near = served(level(4.1, 0.2, 0.03), label="near")
    mapped = goodput_map.goodput_map([fast, smooth, near], (0.5, 2.0), (0.015, 0.04), 0.9)
    assert [[mapped.winners(row, column) for column in range(2)] for row in range(2)] == [
        [(), (1,)],
        [(2, 0), (2, 0)],
    ]
    assert mapped.cells[2][0][1] == Cell(0.0) and mapped.cells[2][1][0] == Cell(2.05, more=True)


def test_who_may_have_more_may_have_most() -> None:
    """Its highest rate meets the bounds; at tight ones it does not."""
    most = served(level(4, 0.2, 0.01), level(4.001, 9.0, 9.0), label="most")
    open_ended = served(level(1, 0.4, 0.01), label="open")
    mapped = goodput_map.goodput_map([open_ended, most], (0.3, 1.0), (0.02,), 0.9)
    assert [mapped.winners(0, column) for column in range(2)] == [(1,), (1, 0)]
    tiles = picture.figure(mapped, title="").rows[0][0]
    assert [block.text for block in tiles.blocks] == ["B", "B ≥A"] and "≥ those that may have more" in tiles.title


def test_a_measured_rate_above_the_capacity_limits_goodput(tmp_path: Path) -> None:
    """It is not valid, but it shows what no rate exceeds."""
    deployment = folders.deployments(1)[0]
    folder = folders.write(tmp_path / "x", deployment)
    grows = Validity(findings=(found("in_flight_grows", growth=20.0, arrivals=90),))
    client = Validity(findings=(found("sent_late", late_ms=60.0, when="", limit="50 ms"),))
    workload = Workload(input_tokens=512, output_tokens=64)
    for rate, validity in ((5, Validity()), (10, grows), (20, client)):
        records = [made.record(0.2 * i, 0.1, 0.05, 9) for i in range(300)]
        fields = {"label": deployment.label, "workload": workload, "validity": validity}
        run = made.run(records, Open(rate_rps=rate), window=True, **fields)
        Store(folder).write(run, records)
    (loaded,) = loading.load([folder], {}, every_request=True)
    sweep = measured(loaded)
    assert sweep is not None and [each.behind_rps is None for each in sweep.levels] == [True, False]
    assert sweep.levels[1].behind_rps == pytest.approx(5, rel=0.003), "without the time in which the last ones end"
    bound = cell(sweep, Slo(ttft_s=0.2, tpot_s=0.06, quantile=0.9))
    assert not bound.more and bound.goodput == pytest.approx(5, rel=0.05)


def test_looser_bounds_never_serve_less() -> None:
    rng = np.random.default_rng(3)
    levels = [RateLevel(r, rng.exponential(0.1 * r, 200), rng.exponential(0.002 * r, 200)) for r in (1.0, 2, 4, 8)]
    bounds = (0.1, 0.3, 1.0, 3.0)
    shares = np.array(
        [[cell(served(*levels), Slo(ttft_s=t, tpot_s=p / 50, quantile=0.9)).goodput for t in bounds] for p in bounds]
    )
    assert (np.diff(shares, axis=0) >= 0).all() and (np.diff(shares, axis=1) >= 0).all() and shares.max() > 0


def test_measured_levels_at_request_rates_alone_are_taken(tmp_path: Path) -> None:
    deployment = folders.deployments(1)[0]
    folder = folders.write(tmp_path / "x", deployment)
    (closed,) = loading.load([folder], {}, every_request=True)
    assert measured(closed) is None, "a closed loop's capacity is another figure"
    store, load = Store(folder), Open(rate_rps=5)
    for repeat, reasons in ((0, ()), (1, ("planted",))):
        records = [made.record(0.2 * i, 0.1, 0.05, 9) for i in range(300)]
        workload = Workload(input_tokens=512, output_tokens=64)
        fields = {"label": deployment.label, "workload": workload, "validity": failing(*reasons)}
        run = made.run(records, load, repeat=repeat, window=True, **fields)
        store.write(run, records)
    (loaded,) = loading.load([folder], {}, every_request=True)
    mapped = measured(loaded)
    assert mapped is not None and (mapped.label, mapped.origin, mapped.gpus) == (deployment.label, "measured", 1)
    (only,) = mapped.levels
    assert only.rate_rps == pytest.approx(5, rel=0.05) and only.share(Slo(ttft_s=0.2, tpot_s=0.06)) == 1
