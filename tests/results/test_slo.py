"""Whether requests meet an SLO, one by one and in columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pdlab.core.workload import Slo
from pdlab.results.level_data import LevelData
from pdlab.results.schema import RequestRecord, SloSearch
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
    times = {"arrival_s": 0, "first_token_s": 1, "finish_s": 1.5, "input_tokens": 1, "output_tokens": 6}
    return RequestRecord(**{**times, **changes})


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


def test_a_search_of_an_earlier_version_is_read_and_judged_as_it_was() -> None:
    """It knew no looks, no effective sample and no steady state, and its error was not shared."""
    old = {
        "schema_version": 2, "label": "x", "slo": {"ttft_s": 2.0, "quantile": 0.95}, "repeat": 0, "burstiness": 1.0,
        "confidence": 0.95, "resolution": 0.1, "low_rps": 4.0, "high_rps": 8.0, "best_rps": 4.0, "finished": True,
        "detail": "between 4 and 8 requests/s (95% confidence)",
        "points": [
            {"rate_rps": 4.0, "judged": 144, "met": 144, "share": 1.0, "low": 0.974, "high": 1.0, "verdict": "meets",
             "repeats": [0]},
            {"rate_rps": 8.0, "judged": 144, "met": 100, "share": 0.694, "low": 0.6, "high": 0.77, "verdict": "misses",
             "repeats": [0]},
        ],
    }  # fmt: skip
    search = SloSearch.model_validate(old)
    assert search.error_shares == 1 and search.points[0].served_rps is None
    assert bracket_at(search, 0.9) == (4.0, 8.0)
    now = search.points[0].model_copy(update={"effective": 144})
    assert bracket_at(search.model_copy(update={"points": (now, search.points[1])}), 0.9) == (None, 8.0)
