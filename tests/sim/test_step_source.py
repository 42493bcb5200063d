"""Step times from tables: interpolation, limits, and the host's share as a term of its own."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pdlab.sim.step_source import BilinearTable, Corrected, Correction, Limits, LinearTable, OutsideTables, Tabulated


def shared_s(tokens: float) -> float:
    return 2e-3 + 1e-5 * tokens


def decode_s(batch: float, context: float) -> float:
    return 3e-3 + 1e-5 * batch + 1e-9 * batch * context


def attention_s(batch: float, context: float) -> float:
    return 2e-9 * batch * context


def chunk_s(tokens: float, prefix: float) -> float:
    return 1e-7 * tokens + 1e-10 * tokens * prefix


def plane(xs: tuple[float, ...], ys: tuple[float, ...], at: object) -> BilinearTable:
    assert callable(at)
    return BilinearTable(xs=xs, ys=ys, z=tuple(tuple(at(x, y) for y in ys) for x in xs))


BATCHES, CONTEXTS, TOKENS = (1.0, 8.0, 64.0), (1.0, 1000.0, 8000.0), (2.0, 100.0, 4000.0)
TABLES = Tabulated(
    shared=LinearTable(xs=TOKENS, ys=tuple(map(shared_s, TOKENS))),
    decode=plane(BATCHES, CONTEXTS, decode_s),
    generation_attention=plane(BATCHES, CONTEXTS, attention_s),
    context_attention=plane((16.0, 1024.0, 2048.0), (0.0, 4000.0), chunk_s),
    limits=Limits(tokens=4000, batch=64, context=8000, prefill_tokens=2048, prefix=4000),
    provenance="made by hand",
)


def test_bilinear_functions_come_back_between_the_points_of_the_grid() -> None:
    assert TABLES.step_s(5, 0, 700) == pytest.approx(decode_s(5, 700))
    assert TABLES.step_s(64, 0, 8000) == pytest.approx(decode_s(64, 8000))
    # A chunk of 1,000 tokens behind 2,000 others: their mean context is 2,500.
    expected = shared_s(1003) + attention_s(3, 500) + chunk_s(1000, 2000)
    assert TABLES.step_s(3, 1000, 500, 2500) == pytest.approx(expected)


def test_several_prompts_in_one_step_attend_to_themselves_only() -> None:
    # Mean context 256 of 2,048 tokens: four prompts of 512.
    assert TABLES.step_s(0, 2048, 256) == pytest.approx(shared_s(2048) + 4 * chunk_s(512, 0))


def test_below_the_grid_its_first_value_counts() -> None:
    assert TABLES.step_s(0.5, 0, 0) == pytest.approx(decode_s(1, 1))


@pytest.mark.parametrize(
    ("inside", "beyond", "far"),
    [
        ((64, 0, 100), (128, 0, 100), (257, 0, 100)),
        ((1, 0, 8000), (1, 0, 16_000), (1, 0, 32_001)),
        ((0, 2048, 2000), (0, 4096, 2048), (0, 8193, 4097)),
        ((0, 100, 0, 4050), (0, 100, 0, 8050), (0, 100, 0, 16_051)),
    ],
)
def test_beyond_its_limits_it_goes_on_in_a_straight_line_and_says_how_far(
    inside: tuple[float, ...], beyond: tuple[float, ...], far: tuple[float, ...]
) -> None:
    steps = Corrected(TABLES, Correction())
    steps.step_s(*inside)
    assert steps.beyond == 1
    steps.step_s(*beyond)
    assert steps.beyond == 2
    steps.step_s(*inside)
    assert steps.beyond == 2, "the farthest counts"
    with pytest.raises(OutsideTables, match="made by hand"):
        steps.step_s(*far)
    assert Corrected(TABLES, Correction()).step_s(128, 0, 16_000) == pytest.approx(decode_s(128, 16_000))


def test_limits_lie_within_the_grid() -> None:
    with pytest.raises(ValidationError, match="batch 65"):
        Tabulated(**{**dict(TABLES), "limits": TABLES.limits.model_copy(update={"batch": 65})})


def test_the_host_is_a_term_and_factors_are_of_the_gpu() -> None:
    steps = Corrected(TABLES, Correction(host_ms=2, factor=1.5, prefill_factor=3))
    assert steps.step_s(8, 0, 1000) == pytest.approx(2e-3 + 1.5 * decode_s(8, 1000))
    adds = shared_s(108) + attention_s(8, 1000) + chunk_s(100, 0) - decode_s(8, 1000)
    assert steps.step_s(8, 100, 1000, 50) == pytest.approx(2e-3 + 1.5 * decode_s(8, 1000) + 3 * adds)
    assert steps.step_s(0, 0, 0) == pytest.approx(2e-3)
    assert steps.limits is TABLES.limits
    assert steps.admit_s == TABLES.admit_s


def test_ranks_wait_for_each_other_in_every_layer_and_step() -> None:
    alone, eight = (Corrected(TABLES, Correction(host_ms=1, sync_us=5), doublings) for doublings in (0, 36 * 3))
    for step in ((8, 0, 1000), (8, 100, 1000, 50), (0, 100, 50)):
        assert eight.step_s(*step) - alone.step_s(*step) == pytest.approx(5e-6 * 36 * 3)


def test_every_decoding_sequence_is_sampled_in_every_step() -> None:
    none, some = (Corrected(TABLES, Correction(host_ms=1, factor=2, sequence_us=each)) for each in (0, 5))
    for step in ((8, 0, 1000), (8, 100, 1000, 50), (0, 100, 50)):
        assert some.step_s(*step) - none.step_s(*step) == pytest.approx(5e-6 * step[0], abs=1e-12)


def test_tables_survive_json() -> None:
    assert Tabulated.model_validate_json(TABLES.model_dump_json()) == TABLES


def test_a_variance_is_not_below_nothing() -> None:
    with pytest.raises(ValueError, match="variance"):
        Correction(covariance=tuple((-1.0,) * 4 for _ in range(4)))
