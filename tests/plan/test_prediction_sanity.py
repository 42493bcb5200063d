"""Predictions over a wide grid: finite, consistent with Little's law, and no better under more load."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.plan.csv_predictions import COLUMNS, NOTE, predict
from pdlab.plan.csv_rows import read
from pdlab.sim.hardware import load_hardware

pytestmark = pytest.mark.property


LADDER = (1, 4, 16, 64, 256)
LONGEST = 60_000  # tokens that the KV cache of every TP degree holds
DEGREES = st.sampled_from((1, 2, 4, 8))
NOISE = 0.1  # one simulation is chaotic
# The mean TTFT of a short prompt hangs on a few long waits: 294 to 439 ms by seed at 64 requests of 100:4000 on
# pd-spread-p2xtp4ep-d1xtp1.
NOISE_TTFT = 0.2
LINK = {"pd-pac": "nvlink", "pd-spr": "srd"}


@st.composite
def configurations(draw: st.DrawFn) -> str:
    ep = st.sampled_from(("", "ep"))
    if draw(st.booleans()):
        return f"collocated-{draw(st.integers(1, 8))}xtp{draw(DEGREES)}{draw(ep)}"
    p, d = draw(st.sampled_from([(1, n) for n in range(1, 5)] + [(n, 1) for n in range(2, 5)]))
    p_tp, d_tp = draw(DEGREES), draw(DEGREES)
    kind = "pack" if p * p_tp + d * d_tp <= 8 and draw(st.booleans()) else "spread"
    return f"pd-{kind}-p{p}xtp{p_tp}{draw(ep)}-d{d}xtp{d_tp}{draw(ep)}"


@settings(max_examples=60)
@given(
    configuration=configurations(),
    itl=st.sampled_from((100, 1000, 5000, 20_000, 50_000)),
    otl=st.sampled_from((1, 16, 250, 4000)),
    prompts=st.sampled_from(("fresh", "repeated")),
    link=st.sampled_from(("", "nvlink", "srd", "tcp")),
)
def test_no_figure_is_absurd(configuration: str, itl: int, otl: int, prompts: str, link: str) -> None:
    text = "".join(f"{configuration},{itl},{otl},{n},{prompts},{link}\n" for n in LADDER)
    rows = read(f"config,itl,otl,concurrency,prompts,link\n{text}", "grid")[2]
    hardware = load_hardware("h100-vllm-0.11")
    predictions = predict(rows, hardware, seeds=(0,))
    for concurrency, row in zip(LADDER, predictions, strict=True):
        unknown = {name for name in COLUMNS if row[name] == ""}
        extrapolated = "extrapolated: " in row[NOTE]
        assert extrapolated or (itl == 5000 and otl == 250 and "ep" not in configuration)
        assert unknown == {
            name
            for name in COLUMNS
            if (otl == 1 and "tpot" in name) or (extrapolated and name.endswith(("_low", "_high")))
        }
        assert all(0 < float(row[name]) < math.inf for name in COLUMNS if row[name] != "")
        tpot_ms = float(row["predicted_mean_tpot_ms"] or 0)
        ttft_ms, rps = float(row["predicted_mean_ttft_ms"]), float(row["predicted_requests_per_s"])
        stays_s = (ttft_ms + tpot_ms * (otl - 1)) / 1e3
        assert rps * stays_s <= 1.001 * concurrency, "Little's law"
        assert otl == 1 or tpot_ms > 4, "faster than any engine of this stack"
        assert ttft_ms > 30 and float(row["predicted_median_ttft_ms"]) <= float(row["predicted_p99_ttft_ms"])
    # Nothing need be monotonic where more load means more hits, nor over NVLink, where a KV pool that has wrapped
    # costs a stall per prompt: 13 % of the requests/s from concurrency 32 to 48 of the published 1xtp2-1xtp2.
    if prompts == "repeated" or (configuration.startswith("pd") and (link or LINK[configuration[:6]]) == "nvlink"):
        return
    if fallen := falls(predictions):  # by the chance of one seed, or in what is printed too?
        fallen = falls(predict(rows, hardware))
    assert not fallen


def falls(predictions: list[dict[str, Any]]) -> list[str]:
    """What gets better with more load."""
    kinds = (("requests_per_s", NOISE), ("mean_tpot_ms", NOISE), ("mean_ttft_ms", NOISE_TTFT))
    figures = {name: [float(row[f"predicted_{name}"] or 0) for row in predictions] for name, _ in kinds}
    return [
        f"{name} {less:g} to {more:g}"
        for name, noise in kinds
        for less, more in pairwise(figures[name])
        if more < (1 - noise) * less
    ]


def test_what_gets_better_with_more_load_is_seen() -> None:
    row = {"predicted_requests_per_s": "1", "predicted_mean_tpot_ms": "", "predicted_mean_ttft_ms": "100"}
    assert falls([row, {**row, "predicted_mean_ttft_ms": "81"}]) == []
    assert falls([row, {**row, "predicted_mean_ttft_ms": "79"}]) == ["mean_ttft_ms 100 to 79"]
    assert falls([row, {**row, "predicted_requests_per_s": "0.8"}]) == ["requests_per_s 1 to 0.8"]
