"""Priors of stacks: against random stacks whose effects are known."""

from __future__ import annotations

import numpy as np
import pytest

from pdlab.core.catalog import known_gpus
from pdlab.plan.error_catalog import public_errors
from pdlab.plan.stack_prior import UNSTATED, EffectSds, Stack, StackFit, generation_of, prior_of, unseen, version_of

EFFECTS = (EffectSds(0.6, 0.2, 0.3, 0.2, 0.6),) * 4


def stack(model: str = "a fp8", gpu: str = "H100", version: str = "0.18") -> Stack:
    return Stack(model, gpu, "vllm", version, "collocated")


def fit(of: Stack, host_ms: float) -> StackFit:
    return StackFit(of, np.array([host_ms, 0.0, 0.0, 0.0]), np.diag(np.full(4, 0.05**2)))


def test_the_same_model_on_another_gpu_weighs_more_than_other_models() -> None:
    fits = [fit(stack("a fp8", "H200"), 2.0), fit(stack("b fp8", "H100"), 0.0), fit(stack("c", "B200"), 0.0)]
    known = prior_of(stack("a fp4"), fits, EFFECTS)
    strange = prior_of(stack("d"), fits, EFFECTS)
    assert known.mean[0] > 1.2 > strange.mean[0]
    assert known.covariance[0, 0] < strange.covariance[0, 0]


def test_a_stack_that_is_there_gets_what_its_levels_say() -> None:
    fits = [fit(stack(), 1.0), fit(stack("b", "B200", "0.11"), 0.0)]
    prior = prior_of(stack(), fits, EFFECTS)
    assert prior.mean[0] == pytest.approx(1.0, abs=0.05)
    assert prior.covariance[0, 0] < 0.1**2


def test_nothing_in_common_but_the_engine_is_as_uncertain_as_stacks_of_it_differ() -> None:
    prior = prior_of(stack("d", "B300", "0.30"), [fit(stack(), 1.0), fit(stack("b", "B200", "0.11"), 1.0)], EFFECTS)
    assert prior.covariance[0, 0] >= sum(each**2 for each in EFFECTS[0][:4])


def test_versions_that_nobody_stated_are_not_one_version() -> None:
    others = [stack("a", "H100", UNSTATED)]
    assert unseen(stack("a", "H100", UNSTATED), others) == ("engine",)
    assert unseen(stack("a", "H200", "0.18"), others) == ("gpu", "engine")


@pytest.mark.parametrize(("version", "of_it"), [("0.12", True), ("0.13.1", True), ("0.11", False), ("0.14", False)])
def test_versions_of_a_quarter_are_seen_in_rows_that_state_the_quarter(version: str, of_it: bool) -> None:
    rows = [stack("a", "H100", "2025-Q4")]
    assert unseen(stack("a", "H100", version), rows) == (() if of_it else ("engine",))
    assert unseen(stack("a", "H100", version)._replace(engine="trtllm"), rows) == ("engine",)


@pytest.mark.parametrize(
    ("engine", "version", "predicted"),
    [
        ("vllm", "2025-Q4", "0.12"),
        ("vllm", "0.18.1", "0.18"),
        ("vllm", "2026-Q2", None),
        ("trtllm", "2025-Q4", None),
        ("vllm", UNSTATED, None),
    ],
)
def test_rows_of_a_quarter_are_of_the_first_version_of_their_group(
    engine: str, version: str, predicted: str | None
) -> None:
    assert version_of(stack(version=version)._replace(engine=engine)) == predicted


def test_a_prior_is_the_textbook_prediction_of_all_parameters_at_once() -> None:
    """As the normal distribution of everything, given the fits, with means of which nothing is known before."""
    rng = np.random.default_rng(10)
    effects = [EffectSds(*each) for each in rng.uniform(0.2, 1.0, (4, 5))]
    fits = []
    for of in (stack("a", "H200"), stack("b"), stack("a", "B200", "0.11"), stack("c")._replace(engine="trtllm")):
        root = rng.normal(size=(4, 4))
        fits.append(StackFit(of, rng.normal(size=4), root @ root.T))
    target = stack("a", "H100", "0.18")
    stacks = [*(each.stack for each in fits), target]
    whole = np.zeros((20, 20))
    for i, one in enumerate(stacks):
        for j, other in enumerate(stacks):
            engine = one.engine == other.engine
            chip = (one.gpu == "B200") == (other.gpu == "B200")  # the others are of one generation
            version = engine and one.version == other.version
            gpus = (chip, chip, one.gpu == other.gpu, chip)  # by parameter
            versions = (version, version and chip, version and chip, version and chip)
            own = 1e6 * np.eye(4)
            for at, each in enumerate(effects):
                shared = np.array([one.model == other.model, gpus[at], versions[at], i == j, engine], dtype=float)
                own[at, at] += float(shared @ np.square(each))
            known = fits[i].covariance if i == j < 4 else np.zeros((4, 4))
            whole[4 * i : 4 * i + 4, 4 * j : 4 * j + 4] = own + known
    gain = whole[16:, :16] @ np.linalg.inv(whole[:16, :16])
    prior = prior_of(target, fits, effects)
    assert prior.mean == pytest.approx(gain @ np.concatenate([each.mean for each in fits]), abs=1e-3)
    assert prior.covariance == pytest.approx(whole[16:, 16:] - gain @ whole[:16, 16:], abs=1e-3)


def test_what_a_fit_cannot_tell_apart_is_not_added_up() -> None:
    """Levels say that host and factor together take as long as the tables, and not which of them does."""
    mean, along = np.array([-0.6, 0.6, 0.0, 0.0]), np.array([1.0, -1.0, 0.0, 0.0])
    torn = StackFit(stack("a", "H200"), mean, np.outer(along, along) * 0.5**2 + np.eye(4) * 0.01**2)
    plain = fit(stack("b"), 0.0)._replace(covariance=np.eye(4) * 0.01**2)
    prior = prior_of(stack("a"), [torn, plain], EFFECTS)
    assert prior.mean[0] + prior.mean[1] == pytest.approx(0, abs=0.01)
    assert prior.covariance[0, 1] < -0.05


def test_another_engine_weighs_less_than_a_stacks_own() -> None:
    others = [stack("b", "B200", "0.11"), stack("c", "H200", "0.12")]
    fits = [fit(others[0], 0.0), fit(others[1], 0.0)]
    own, other = (
        prior_of(stack("a"), [*fits, fit(stack("a")._replace(engine=name), 2.0)], EFFECTS).mean[0]
        for name in ("vllm", "trtllm")
    )
    assert own > 1.3 * other > 0


def test_an_unstated_version_differs_from_a_new_one_as_much_as_a_stated_one_does() -> None:
    """Versions differ much here: of two stacks neither says more of a third one."""
    versions = (EffectSds(0.2, 0.2, 2.0, 0.2, 0.2),) * 4
    fits = [fit(stack("a", "H100", "0.18"), 0.0), fit(stack("b", "B200", UNSTATED), 2.0)]
    assert prior_of(stack("d", "L40S", "0.30"), fits, versions).mean[0] == pytest.approx(1.0)


def test_the_same_chip_with_other_memory_weighs_more_than_another_generation() -> None:
    fits = [fit(stack("a", "H200"), 2.0), fit(stack("a", "B200"), 0.0)]
    prior = prior_of(stack("a", "H100"), fits, EFFECTS)
    assert prior.mean[0] > 1.05
    spread = (EffectSds(0.2, 2.0, 0.2, 0.2, 0.2),) * 4
    two = [each._replace(mean=np.full(4, each.mean[0])) for each in fits]
    mean = prior_of(stack("a", "H100"), two, spread).mean
    assert mean[0] > 1.8 and mean[3] > 1.8
    assert mean[2] == pytest.approx(1.0, abs=0.2), "prefill: tables of each GPU differ"


def test_every_gpu_with_tables_has_a_generation() -> None:
    assert {generation_of(each) for each in ("H100", "H200")} == {"Hopper"}
    assert all(each.generation for each in known_gpus().values() if each.step_tables)
    assert generation_of("no such GPU") == "no such GPU"


def test_an_installation_of_a_public_stack_has_its_mean_and_may_differ_from_it_as_single_stacks_do() -> None:
    """Without levels it is predicted as the public one; its own levels count as those of a stack that was left out."""
    catalog = public_errors()
    effects = [EffectSds(*each) for each in catalog.effects]
    fits = [each.fit for each in catalog.stacks]
    ratios = []
    for known in (each.stack for each in fits):
        prior = catalog.prior(known)
        assert prior.mean == pytest.approx(prior_of(known, fits, effects).mean)
        left_out = prior_of(known, [each for each in fits if each.stack != known], effects)
        ratios.append(np.sqrt(np.diag(prior.covariance) / np.diag(left_out.covariance)))
    assert np.min(ratios) > 0.5, "of standard deviations"
    assert np.all(np.mean(ratios, axis=0)[[0, 1, 3]] > 0.85) and np.max(ratios) < 1.15
    other = catalog.stacks[0].stack._replace(version="0.99")
    assert catalog.prior(other).covariance == pytest.approx(prior_of(other, fits, effects).covariance)
