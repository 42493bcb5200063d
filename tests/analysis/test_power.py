"""Which difference is seen how often, over seeded trials; how looks share the error."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from pdlab.analysis.intervals import compare, of_repeats
from pdlab.analysis.power import CPU_SD, POWER, LookSchedule, detectable, of_slo, repeats_for, single_repeat_sd
from pdlab.core.bounds import METRICS
from pdlab.core.defaults import HARDWARE
from pdlab.core.workload import Slo
from pdlab.results.store import Store
from pdlab.sim.hardware import load_hardware

SHIPPED = Path(__file__).parents[2] / "bm_results"
REPEATED = ("local-pack-vs-spread", "local-pack-vs-spread-network")


@pytest.mark.parametrize(
    ("figure", "metric"), [("ttft", "mean TTFT"), ("tpot", "TPOT"), ("throughput", "requests/s"), ("itl", "TPOT")]
)
def test_the_scatter_on_gpus_gives_the_published_difference_of_two_days(figure: str, metric: str) -> None:
    """Two starts drawn with it differ by the median that the hardware file states, which predictions use."""
    error = load_hardware(HARDWARE).error
    assert error
    draws = np.random.default_rng(7).normal(0, single_repeat_sd("gpu", figure), (100_000, 2))  # type: ignore[arg-type]
    assert 100 * np.median(abs(np.diff(draws))) == pytest.approx(error.percent(metric).days, rel=0.02)


@pytest.mark.parametrize("ttft_share", [0.0, 0.3, 1.0])
def test_the_end_of_an_answer_scatters_by_no_more_than_its_parts(ttft_share: float) -> None:
    """E2EL is TTFT and the later tokens' time; both may be long in one start."""
    ttft, tpot, e2el = (single_repeat_sd("gpu", figure) for figure in ("ttft", "tpot", "e2el"))
    assert ttft_share * ttft + (1 - ttft_share) * tpot <= e2el <= max(ttft, tpot)
    assert single_repeat_sd("gpu", "ttft", "tpot") == ttft > tpot


def test_the_scatter_on_cpus_is_that_of_the_shipped_repeats() -> None:
    """Of valid levels, within each, pooled over all."""
    squares, dofs = dict.fromkeys(CPU_SD, 0.0), dict.fromkeys(CPU_SD, 0)
    for experiment in sorted(path for name in REPEATED for path in (SHIPPED / name).iterdir() if path.is_dir()):
        runs = [run for run in Store(experiment).runs() if run.validity.valid]
        for value in {run.key.value for run in runs}:
            windows = [run.steady or run.whole for run in runs if run.key.value == value]
            values: dict[str, list[float]] = {
                "throughput": [window.output_tokens_per_s for window in windows],
                **{metric: [window.latencies[metric].percentiles_s["p50"] for window in windows] for metric in METRICS},
            }
            for figure in CPU_SD:
                logs = np.log(values[figure])
                squares[figure] += float(np.sum((logs - logs.mean()) ** 2))
                dofs[figure] += len(logs) - 1
    assert set(dofs.values()) == {47}
    for figure, sd in CPU_SD.items():
        assert sd == pytest.approx(math.sqrt(squares[figure] / dofs[figure]), abs=0.006), figure


def test_the_page_on_metrics_has_the_assumed_scatter() -> None:
    text = (SHIPPED.parent / "docs/metrics.md").read_text().split("### Assumed scatter")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) %.*\| ([\d.]+) %", text, re.MULTILINE)
    assert [name.lower() for name, *_ in rows] == ["throughput", "ttft", "tpot", "itl", "e2el"]
    for name, gpu, cpu in rows:
        for device, percent in (("gpu", gpu), ("cpu", cpu)):
            sd = single_repeat_sd(device, name.lower())  # type: ignore[arg-type]
            assert 100 * sd == pytest.approx(float(percent), abs=0.05), name


def test_an_slo_scatters_as_the_latencies_that_it_bounds() -> None:
    assert of_slo(Slo(ttft_s=1.0, e2el_s=9.0)) == ("ttft", "e2el")
    assert of_slo(Slo(tpot_s=0.1, stall_s=1.0)) == ("tpot", "itl")


@pytest.mark.parametrize("repeats", [3, 5, 12])
@pytest.mark.parametrize("comparisons", [1, 4])
def test_a_detectable_difference_is_detected_that_often(repeats: int, comparisons: int) -> None:
    sd, trials = 0.05, 1000
    ratio = detectable(sd, repeats, 0.95, comparisons)
    rng = np.random.default_rng([51, repeats, comparisons])
    detected = 0
    for first, second in zip(
        ratio * np.exp(rng.normal(0, sd, (trials, repeats))), np.exp(rng.normal(0, sd, (trials, repeats))), strict=True
    ):
        comparison = compare(of_repeats(first.tolist()), of_repeats(second.tolist()), 0.95, comparisons)
        assert comparison
        detected += comparison.verdict == "better"
    assert POWER - 0.04 <= detected / trials <= POWER + 0.04


def test_more_repeats_see_less_and_more_comparisons_see_more() -> None:
    ratios = [detectable(0.05, n, 0.95) for n in (2, 3, 5, 12, 40)]
    assert ratios == sorted(ratios, reverse=True)
    assert detectable(0.05, 3, 0.95, 8) > detectable(0.05, 3, 0.95)
    # One repeat has an assumed scatter: (1.96 + 0.84) * 0.05 * sqrt(2).
    assert detectable(0.05, 1, 0.95) == pytest.approx(math.exp(2.8016 * 0.05 * math.sqrt(2)), rel=1e-4)


def test_the_repeats_for_a_difference_are_the_fewest_that_see_it() -> None:
    needed = repeats_for(1.05, 0.05, 0.95)
    assert needed is not None
    assert detectable(0.05, needed, 0.95) <= 1.05 < detectable(0.05, needed - 1, 0.95)
    assert repeats_for(1.0001, 0.15, 0.95) is None


def test_looks_share_the_error() -> None:
    looks = LookSchedule(first=3, cap=12)
    assert looks.count == 10 and looks.level(0.95) == pytest.approx(0.995)
    assert LookSchedule(first=3, cap=3).level(0.95) == pytest.approx(0.95)
