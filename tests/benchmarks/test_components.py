"""Effects and error components of stacks: against random stacks whose parts are known."""

from __future__ import annotations

import numpy as np
import pytest
from stack_scores.components import (
    BELIEVED_ERRORS,
    StackError,
    effects_of,
    error_components,
    errors_loss,
    hierarchical_quantile,
    hold_outs,
    is_represented,
)

from pdlab.plan.correction_fit import LevelSetting
from pdlab.plan.stack_prior import LEAST_STACKS, SEEN_BY, Stack, StackFit


def stack(model: str = "a fp8", gpu: str = "H100", version: str = "0.18") -> Stack:
    return Stack(model, gpu, "vllm", version, "collocated")


def fit(of: Stack, host_ms: float) -> StackFit:
    return StackFit(of, np.array([host_ms, 0.0, 0.0, 0.0]), np.diag(np.full(4, 0.05**2)))


def test_effects_are_found_where_models_differ_and_nothing_else_does() -> None:
    fits = [
        fit(stack(model, gpu, version), host_ms)
        for host_ms, model in ((0.0, "a"), (2.0, "b"), (4.0, "c"), (1.0, "d"))
        for gpu, version in (("H100", "0.18"), ("H200", "0.19"), ("B200", "0.17"))
    ]
    host = effects_of(fits)[0]
    assert host.model > 3 * max(host.gpu, host.engine, host.alone)


def drawn(rng: np.random.Generator, stacks: int) -> list[StackError]:
    """Stacks of 5 % with levels of 3 %, 4 % in common where TP is the same."""
    errors = []
    for number in range(stacks):
        common = rng.normal(0, 0.05)
        of_tp = rng.normal(0, 0.04, 3)
        for tp in range(3):
            for load in range(4):
                setting = LevelSetting(str(tp), "1:1", str(load))
                errors.append(StackError(stack(str(number)), setting, (), common + of_tp[tp] + rng.normal(0, 0.03)))
    return errors


def test_bands_from_some_stacks_hold_nine_in_ten_of_the_levels_of_others() -> None:
    rng = np.random.default_rng(3)
    components = error_components("TPOT", drawn(rng, 30))
    half = components.half_width(())
    held = np.mean([abs(each.error) <= half for each in drawn(rng, 300)])
    assert 0.86 <= held <= 0.94, components


def test_a_band_is_wider_for_a_gpu_that_no_stack_had() -> None:
    components = error_components("TPOT", drawn(np.random.default_rng(4), 8))
    assert components.sd(unseen=("gpu",)) > components.sd(unseen=())


def test_times_that_do_not_grow_with_the_figure_widen_bands_of_short_ones() -> None:
    """Levels of 50 ms are off by 20 ms more, those of 2 s by as much."""
    rng = np.random.default_rng(11)
    errors = []
    for number, each in enumerate(drawn(rng, 30)):
        predicted_s = (0.05, 2.0)[number % 2]
        errors.append(each._replace(error=each.error + rng.normal(0, 0.02 / predicted_s), predicted_s=predicted_s))
    components = error_components("mean TTFT", errors)
    assert components.fixed_ms == pytest.approx(20, rel=0.4)
    for predicted_s in (0.05, 2.0):
        some = [each for each in errors if each.predicted_s == predicted_s]
        held = np.mean([abs(each.error) <= components.half_width((), predicted_s) for each in some])
        assert 0.85 <= held <= 0.97, predicted_s


def test_one_broken_level_does_not_widen_every_band() -> None:
    errors = drawn(np.random.default_rng(5), 10)
    broken = [*errors[1:], errors[0]._replace(error=20.0)]
    assert error_components("TPOT", broken).sd(unseen=()) < 1.3 * error_components("TPOT", errors).sd(unseen=())


def test_each_stack_weighs_the_same_however_many_levels_it_has() -> None:
    """Nineteen stacks of one level at 1, and one of a hundred at 5: a twentieth of the weight is beyond 1."""
    assert hierarchical_quantile([[1.0]] * 19 + [[5.0] * 100]) == 1.0
    assert hierarchical_quantile([[1.0]] * 17 + [[5.0] * 100] * 3) == 5.0


def test_stacks_whose_levels_are_off_together_are_held_too() -> None:
    """Nine in ten new stacks, over 9 to 20 known ones: without half of the new stack it were 87 %."""
    rng = np.random.default_rng(10)
    held = []
    for count in range(LEAST_STACKS, 21):
        for _ in range(200):
            reach = hierarchical_quantile([[score] for score in rng.uniform(size=count)])
            held.append(reach)  # the share of new ones, which are uniform too
    assert np.mean([each for each in held if each is not None]) == pytest.approx(0.905, abs=0.01)


def test_errors_that_are_not_normal_are_held_all_the_same() -> None:
    """Students of 2.5 degrees of freedom for each stack: a normal band of the likeliest deviations holds too few."""
    rng = np.random.default_rng(6)

    def heavy(stacks: int) -> list[list[float]]:
        return [list(abs(rng.standard_t(2.5) + rng.normal(0, 0.3, 12))) for _ in range(stacks)]

    held = [
        np.mean([np.mean([score <= reach for score in group]) for group in heavy(200)])
        for reach in (hierarchical_quantile(heavy(16)) for _ in range(60))
        if reach is not None
    ]
    assert 0.84 <= np.mean(held) <= 0.94


def test_too_few_stacks_have_no_band() -> None:
    rng = np.random.default_rng(7)
    few, enough = (error_components("TPOT", drawn(rng, count)) for count in (LEAST_STACKS - 1, LEAST_STACKS))
    assert few.reach is None and few.parts() is None and few.half_width(()) == float("inf")
    assert enough.parts() is not None and 0 < enough.half_width(()) < enough.half_width(("engine",))


def test_a_stack_is_left_out_alone_and_with_all_that_shares_something() -> None:
    fits = [fit(stack(*each), 0.0) for each in (("a", "H100", "0.18"), ("a", "H200", "0.19"), ("b", "H100", "0.19"))]
    ways = hold_outs(fits[0].stack, fits)
    assert list(ways) == [("engine",), ("model", "engine"), ("gpu", "engine")]
    assert [[each.stack for each in rest] for rest in ways.values()] == [
        [fits[1].stack, fits[2].stack],
        [fits[2].stack],
        [fits[1].stack],
    ]


def dense_loss(stacks: list[dict[tuple[str, ...], list[StackError]]], sds: list[float]) -> float:
    """As `errors_loss`, with every covariance written out."""
    total = 0.0
    for ways in stacks:
        for without, members in ways.items():
            values = np.array([100 * each.error for each in members])
            common = sds[0] ** 2 + sum(sds[1 + SEEN_BY.index(kind)] ** 2 for kind in without)
            fixed = [(sds[8] / 10 / each.predicted_s) ** 2 for each in members]
            covariance = np.full((len(values), len(values)), common) + sds[7] ** 2 * np.eye(len(values))
            covariance += np.diag(fixed)
            for i, one in enumerate(members):
                for j, other in enumerate(members):
                    pairs = zip(sds[4:7], one.setting, other.setting, strict=True)
                    covariance[i, j] += sum(sd**2 for sd, mine, theirs in pairs if mine == theirs)
            unlikely = np.linalg.slogdet(covariance)[1] + values @ np.linalg.solve(covariance, values)
            total += unlikely / len(ways)
    return float(total)


def test_the_likelihood_is_that_of_the_covariances_written_out() -> None:
    rng = np.random.default_rng(8)
    errors = drawn(rng, 3)
    stacks = []
    for number, kinds in enumerate([((),), (("engine",), ("model", "engine")), ((), ("gpu",), ("model",))]):
        members = [each for each in errors if each.stack == stack(str(number))][: 12 - 3 * number]
        stacks.append(
            {
                without: [
                    each._replace(error=each.error + rng.normal(0, 0.05), predicted_s=0.02 * 1.5**place)
                    for place, each in enumerate(members)
                ]
                for without in kinds
            }
        )
    loss = errors_loss(stacks)
    for sds in (list(BELIEVED_ERRORS["mean TTFT"]), [2.0, 5.0, 1.0, 7.0, 3.0, 0.5, 4.0, 2.0, 20.0]):
        assert loss(sds) == pytest.approx(dense_loss(stacks, sds))


def of_models(count: int) -> list[StackError]:
    """Stacks alone and, with 20 % more, with their model left out; each model on three GPUs."""
    rng = np.random.default_rng(9)
    found = []
    for model in range(count):
        unlike = rng.normal(0, 0.2)
        for gpu in ("H100", "H200", "B200"):
            for each in drawn(rng, 1):
                alone = each._replace(stack=stack(str(model), gpu))
                found += [alone, alone._replace(unseen=("model",), error=each.error + unlike)]
    return found


def test_bands_hold_for_models_that_are_unseen_and_for_those_that_are_not() -> None:
    errors = of_models(30)
    components = error_components("TPOT", errors)
    assert components.model == pytest.approx(20, rel=0.5)
    assert components.stack < 10, "what an unseen model adds is no part of stacks as such"
    for without in ((), ("model",)):
        half = components.half_width(without)
        assert 0.86 <= np.mean([abs(each.error) <= half for each in errors if each.unseen == without]) <= 0.94
    assert 0.88 <= np.mean([abs(each.error) <= components.half_width(each.unseen) for each in errors]) <= 0.92


def test_a_band_takes_three_groups_of_what_is_unseen() -> None:
    seen = [stack("a"), stack("b", "H200", "0.19"), stack("c", "B200", "0.20")]
    assert is_represented(stack("d"), seen)
    assert not is_represented(stack("d"), [*seen[:2], seen[1]._replace(gpu="B200")]), "two models are no rule"
    assert not is_represented(stack("a")._replace(engine="sglang"), seen)
    assert not is_represented(stack("a")._replace(mode="pd"), seen)
