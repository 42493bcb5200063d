"""Whether requests meet an SLO, one by one and in columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support import records as made

from pdlab.core.workload import Slo
from pdlab.results.level_data import LevelData
from pdlab.results.schema import RequestRecord, SloPoint, SloSearch
from pdlab.results.slo import bounds_text, bracket_at, stresses, within

SLO = Slo(ttft_s=1.0, tpot_s=0.1, e2el_s=2.0)


@pytest.mark.parametrize(
    ("slo", "times_s", "met"),
    [
        (SLO, (1.0, 0.1, 2.0), True),
        (SLO, (1.01, 0.1, 2.0), False),
        (SLO, (1.0, 0.11, 2.0), False),
        (SLO, (1.0, 0.1, 2.01), False),
        (SLO, (1.0, math.nan, 1.0), True),  # one output token
        (SLO, (math.nan, 0.1, 2.0), False),
        (Slo(), (9.0, 9.0, 9.0), True),
        (Slo(), (math.nan, math.nan, math.nan), False),  # not answered
        (Slo(tpot_s=0.1), (9.0, 0.1, 9.0), True),
    ],
)
def test_bounds_on_whole_answers(slo: Slo, times_s: tuple[float, float, float], met: bool) -> None:
    assert within(slo, *(np.array([time_s, time_s]) for time_s in times_s)).tolist() == [met, met]


def answer(**changes: Any) -> RequestRecord:
    """TTFT 1 s, TPOT 0.1 s, E2EL 1.5 s."""
    return made.record(ttft_s=1.0, tpot_s=0.1, tokens=6, **changes)


GAPS = (*[0.01] * 10, 0.5)  # their p99 is 0.451


@pytest.mark.parametrize(
    ("slo", "record", "worst"),
    [
        (SLO, answer(), 1.0),
        (Slo(tpot_s=0.05), answer(), 2.0),
        (Slo(e2el_s=0.5, ttft_s=1.0), answer(), 3.0),
        (Slo(tpot_s=0.001), answer(output_tokens=1, finish_s=1.0), 0.0),
        (Slo(), answer(error="closed"), math.inf),
        (Slo(), answer(first_token_s=None), math.inf),
        (Slo(stall_s=0.5), answer(itl_s=GAPS), 1.0),
        (Slo(stall_s=0.4), answer(itl_s=GAPS), 1.25),
        (Slo(itl_p99_s=0.451), answer(itl_s=GAPS), 1.0),
        (Slo(itl_p99_s=0.41, stall_s=1.0), answer(itl_s=GAPS), 1.1),
        (Slo(ttft_s=0.5, stall_s=1.0), answer(itl_s=GAPS), 2.0),
        (Slo(stall_s=0.1), answer(), 0.0),  # one chunk has no gap
        (Slo(stall_s=0.1), answer(itl_s=GAPS, error="x"), math.inf),
    ],
)
def test_the_worst_latency_over_its_bound(slo: Slo, record: RequestRecord, worst: float) -> None:
    others = [answer(arrival_s=-1.0, itl_s=(0.1, 0.2)), answer(arrival_s=9.0, itl_s=(0.3,))]
    stresses_of = stresses(LevelData.of([others[1], record, others[0]]), slo)
    assert stresses_of[1] == pytest.approx(worst), "whatever stands beside it"


def test_bounds_in_words_name_every_one() -> None:
    every = Slo(ttft_s=2.0, tpot_s=0.05, e2el_s=5.0, itl_p99_s=0.1, stall_s=0.25)
    assert bounds_text(every) == (
        "TTFT <= 2,000 ms and TPOT <= 50 ms and E2EL <= 5,000 ms and ITL p99 <= 100 ms and longest stall <= 250 ms "
        "for 95 % of requests"
    )


def point(rate_rps: float, share: float, **more: Any) -> SloPoint:
    return SloPoint(
        rate_rps=rate_rps, judged=144, met=round(144 * share), share=share, low=0, high=1, verdict="undecided",
        **{"steady": True, "effective": 144, **more},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("points", "ends"),
    [
        ((point(4, 1.0), point(8, 0.69)), (4, 8)),
        ((point(4, 1.0), point(8, 0.69, effective=2)), (4, None)),
        ((point(4, 1.0, effective=20), point(8, 0.69)), (None, 8)),  # too few independent ones to show 95 %
        ((point(4, 1.0, steady=None), point(8, 0.69)), (None, 8)),
        ((point(4, 1.0, latest=0.9), point(8, 0.69, latest=0.96)), (None, None)),
    ],
)
def test_the_ends_of_a_search_at_another_confidence(points: tuple[SloPoint, ...], ends: tuple[Any, Any]) -> None:
    search = SloSearch(
        label="x", slo=Slo(ttft_s=2.0), confidence=0.95, resolution=0.1, low_rps=None, high_rps=None, best_rps=None,
        points=points, finished=True, detail="", error_shares=1,
    )  # fmt: skip
    assert bracket_at(search, 0.9) == ends
