"""Of any workload: what is suggested has a place, and a looser SLO never makes a deployment worse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import HARDWARE, MODEL, SHAPE, nodes, scenario

from pdlab.analysis.regimes import ThroughputPoint, stretches, tpots_at
from pdlab.core.deployment import Deployment, PlacementKind, parse_label
from pdlab.core.workload import Slo, Workload
from pdlab.placement.place import place
from pdlab.plan.candidates import engine_shapes, shortlist
from pdlab.plan.planner import capacity, evaluate, sized_deployment
from pdlab.plan.rate_matching import RateMatcher

pytestmark = pytest.mark.property

LABELS = ("collocated-2xtp4", "pd-pack-p1xtp4-d1xtp4", "pd-pack-p1xtp2-d1xtp2", "pd-spread-p2xtp2-d1xtp8")


@settings(max_examples=25, deadline=None)
@given(
    gpus=st.integers(1, 24),
    placement=st.sampled_from([None, "pack", "spread"]),
    tpot_s=st.one_of(st.none(), st.floats(0.006, 0.05)),
    tokens=st.tuples(st.integers(10, 20000), st.integers(2, 2000)),
)
def test_what_is_suggested_has_a_place(
    gpus: int, placement: PlacementKind | None, tpot_s: float | None, tokens: tuple[int, int]
) -> None:
    workload = Workload(input_tokens=tokens[0], output_tokens=tokens[1])
    view = nodes(-(-gpus // 8))
    kinds = engine_shapes(HARDWARE, SHAPE, gpus, workload)
    matcher = RateMatcher(HARDWARE, SHAPE, workload, placement=placement)
    chosen, possible, unplaced, why, _ = shortlist(matcher, MODEL, view, gpus, kinds, tpot_s)
    assert 0 < len(chosen) <= possible - unplaced
    assert not why, "such nodes have CPUs for every engine"
    for sized in chosen:
        place(sized.deployment, view)
        assert sized.deployment.gpus * sized.copies <= gpus
        assert sized.deployment.mode in ("collocated", f"pd-{placement or 'pack'}", f"pd-{placement or 'spread'}")


@settings(max_examples=12, deadline=None)
@given(
    label=st.sampled_from(LABELS),
    tpot_s=st.floats(0.007, 0.02),
    ttft_s=st.floats(0.5, 4.0),
    looser=st.floats(1.0, 2.0),
    seed=st.integers(0, 3),
)
def test_a_looser_slo_never_lowers_what_is_served(
    label: str, tpot_s: float, ttft_s: float, looser: float, seed: int
) -> None:
    """On the same simulated loads."""
    bounded = scenario(seed=seed, tpot_s=tpot_s, ttft_s=ttft_s)
    candidate = evaluate(bounded, sized_deployment(bounded, Deployment(topology=parse_label(label))), 8)
    tight, loose = bounded.slo, Slo(tpot_s=tpot_s * looser, ttft_s=ttft_s * looser)
    outcomes = candidate.outcomes

    def served(slo: Slo) -> float:
        return max((o.requests_per_s for o in outcomes if slo.stress_of(o.columns) <= 1), default=0.0)

    assert served(loose) >= served(tight)
    assert capacity(outcomes, tight, 1 / looser, 1 / looser) >= capacity(outcomes, tight) * (1 - 1e-9)


points = st.lists(st.builds(ThroughputPoint, st.floats(1, 100), st.floats(0.001, 0.1)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(curves=st.dictionaries(st.sampled_from("abcd"), points.map(sorted), min_size=1), tolerance=st.floats(0, 0.2))
def test_a_regime_is_never_worse_than_the_error_allows(
    curves: dict[str, list[ThroughputPoint]], tolerance: float
) -> None:
    spans = stretches(curves, tolerance)
    assert spans[0].from_tokens_per_s == min(curve[0].tokens_per_s for curve in curves.values())
    assert spans[-1].to_tokens_per_s == max(curve[-1].tokens_per_s for curve in curves.values())
    for regime in spans:
        for x in (regime.from_tokens_per_s, regime.to_tokens_per_s):
            lowest = min(t for (t,) in tpots_at(list(curves.values()), [x]) if t is not None)
            ((own,),) = tpots_at([curves[regime.label]], [x])
            assert own is not None and own <= lowest * (1 + tolerance) * (1 + 1e-9)
