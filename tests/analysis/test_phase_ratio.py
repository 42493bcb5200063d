"""Service rates of the phases and the ratio that they imply."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import records as made
from support.validity import failing

from pdlab.analysis import phase_ratio
from pdlab.cli import ratio
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.lengths import Uniform
from pdlab.core.workload import Closed, Workload, WorkloadMode
from pdlab.results.schema import Distribution, Experiment, Manifest, Run, Summary
from pdlab.results.store import Store

NO_CHANGE: Mapping[str, int] = {}


def run(
    mode: WorkloadMode,
    concurrency: int,
    rps: float,
    repeat: int = 0,
    valid: bool = True,
    window: bool = True,
    workload: Mapping[str, int] = NO_CHANGE,
) -> Run:
    """Its whole run serves half of the requests/s of its steady window."""
    tpot = Distribution(mean_s=0.01, percentiles_s={"p50": 0.01}) if mode != "prefill-only" else None
    figures = Summary(
        duration_s=10, completed=20, requests_per_s=rps, input_tokens_per_s=1, output_tokens_per_s=1, tpot=tpot,
        ttft=Distribution(mean_s=0.1, percentiles_s={"p50": 0.1}),
    )  # fmt: skip
    return made.run(
        (), Closed(concurrency=concurrency), repeat=repeat, count=20,
        workload=Workload.model_validate({"input_tokens": 100, "output_tokens": 10, "mode": mode, **workload}),
        steady=figures if window else None,
        whole=figures.model_copy(update={"requests_per_s": rps / 2}), validity=failing(*() if valid else ("x",)),
    )  # fmt: skip


def experiment(name: str, label: str, *runs: Run, **manifest: object) -> Experiment:
    deployment = Deployment(model="m", topology=parse_label(label))
    made = {"origin": "measured", "label": label, "deployment": deployment, **manifest}
    return Experiment(name=name, manifest=Manifest.model_validate(made), runs=runs)


UNIFORM = Uniform(low=0.8, high=1.0)
PREFILL = experiment("p", "collocated-1xtp2", run("prefill-only", 1, 4), run("prefill-only", 2, 6))
DECODE = experiment(
    "d", "collocated-2xtp1",
    run("decode-only", 1, 4), run("decode-only", 8, 24), run("decode-only", 8, 28, repeat=1),
    run("decode-only", 16, 99, valid=False),
)  # fmt: skip
PD = (
    experiment("one", "pd-pack-p1xtp2-d1xtp1", run("mixed", 4, 6)),
    experiment("two", "pd-pack-p2xtp2-d1xtp1", run("mixed", 4, 15), run("mixed", 8, 90, valid=False)),
    experiment("none", "collocated-2xtp1", run("mixed", 4, 60)),
)


def test_the_ratio_at_every_decode_level() -> None:
    best, rates, _ = phase_ratio.implied(PREFILL, DECODE)
    assert (best.value, best.per_replica_rps) == (2, 6)
    assert [item.decode.per_replica_rps for item in rates] == [2, 13], (
        "two replicas share the rate; repeats are averaged"
    )
    assert [item.decode.repeats for item in rates] == [1, 2]
    assert [item.prefill_per_decode for item in rates] == pytest.approx([2 / 6, 13 / 6])
    assert [item.ratio for item in rates] == [Fraction(1, 3), Fraction(7, 3)]
    # 1:3: three decode replicas of 2 requests/s match one prefill replica of 6, on 2 + 3 GPUs.
    assert rates[0].rps_per_gpu == pytest.approx(6 / 5)


def of(name: str, label: str) -> Experiment:
    """The decode phase with other pools of as many GPUs."""
    return DECODE.model_copy(update={"name": name, "manifest": experiment(name, label).manifest})


@pytest.mark.parametrize("label", ["collocated-1xdp2ep", "collocated-1xpp2", "collocated-1xtp2"])
def test_the_shape_of_a_replica_changes_no_figure_per_gpu(label: str) -> None:
    """Two GPUs serve what they serve, whether they are two replicas or one; only the numbers of replicas differ."""
    apart, joined = (phase_ratio.implied(PREFILL, each).levels for each in (DECODE, of("e", label)))
    assert [item.decode.per_replica_rps for item in joined] == [4, 26]
    for one, other in zip(apart, joined, strict=True):
        assert other.prefill_per_decode == pytest.approx(2 * one.prefill_per_decode)
    # 1:3 of two GPUs and one GPU each is 2:3 of two GPUs each: the same GPUs for the same rate.
    assert joined[0].ratio == Fraction(2, 3) and joined[0].rps_per_gpu == pytest.approx(12 / 10)
    assert joined[0].rps_per_gpu == pytest.approx(apart[0].rps_per_gpu)


def of_prefill(*rps: float, invalid: tuple[int, ...] = ()) -> Experiment:
    """Prefill-only levels at concurrency 1, 2, 4, ..."""
    levels = [2**i for i in range(len(rps))]
    made = [run("prefill-only", each, r, valid=each not in invalid) for each, r in zip(levels, rps, strict=True)]
    return experiment("p", "collocated-1xtp1", *made)


@pytest.mark.parametrize(
    ("prefill", "note"),
    [
        (of_prefill(2, 4, 5), "p serves the most at its highest valid level (concurrency 4, 25 % above concurrency 2)"),
        (of_prefill(2, 4, 3, invalid=(4,)), "p serves the most at its highest valid level (concurrency 2, 100 % abov"),
        (of_prefill(4), "p has one valid level (concurrency 1), and may serve more at a higher one: P per D is an upp"),
        (of_prefill(2, 5, 4), None),
        (of_prefill(2, 4, 4), None),
    ],
)
def test_a_prefill_rate_that_still_rises_bounds_the_ratio_from_above(prefill: Experiment, note: str | None) -> None:
    """What a prefill replica serves at most is known only if a higher load gives no more."""
    lines = phase_ratio.report(prefill, DECODE, ()).splitlines()
    assert [line.startswith(f"note: {note}") for line in lines if "upper bound" in line] == ([True] if note else [])
    (head,) = (line for line in lines if "nearest P:D" in line)
    assert head.endswith("requests/s per GPU, at most") is (note is None)


def test_higher_levels_change_no_ratio_of_a_lower_one_of_decode() -> None:
    """The rate of decode is that of a level's own TPOT."""
    fewer = DECODE.model_copy(update={"runs": DECODE.runs[:1]})
    assert phase_ratio.implied(PREFILL, fewer).levels == phase_ratio.implied(PREFILL, DECODE).levels[:1]


def test_what_was_measured_stands_beside_it() -> None:
    ranked, left_out = phase_ratio.measured(PD)
    assert [(one.name, one.prefill, one.decode) for one in ranked] == [("two", 2, 1), ("one", 1, 1)]
    assert left_out == {"not a recorded deployment with prefill and decode apart": ["none"]}
    assert ranked[0].best_rps_per_gpu == pytest.approx(15 / 5)
    text = phase_ratio.report(PREFILL, DECODE, PD)
    assert "prefill only (p): 6.00 requests/s per replica" in text
    assert "  2:1                3.00  concurrency 4        1" in text and "KV transfer" in text
    assert "note: left out, not a recorded deployment with prefill and decode apart: none" in text.splitlines()


def test_a_deployment_counts_with_the_mean_of_a_level_not_with_its_luckiest_repeat() -> None:
    steady = experiment("steady", "pd-pack-p1xtp2-d1xtp2", run("mixed", 4, 20), run("mixed", 4, 20, repeat=1))
    lucky = experiment("lucky", "pd-pack-p1xtp2-d1xtp2", run("mixed", 4, 24), run("mixed", 4, 12, repeat=1))
    ranked = phase_ratio.measured([lucky, steady]).deployments
    assert [(one.name, one.best_rps_per_gpu, one.repeats) for one in ranked] == [("steady", 5.0, 2), ("lucky", 4.5, 2)]


def test_the_repeats_of_a_level_share_one_window() -> None:
    """12 requests/s of a steady window and 6 of the whole run are two windows of one level, not two repeats."""
    mixed = [run("mixed", 4, 12), run("mixed", 4, 12, repeat=1, window=False)]
    (one,) = phase_ratio.measured([experiment("pd", "pd-pack-p1xtp1-d1xtp1", *mixed)]).deployments
    assert (one.best_rps_per_gpu, one.whole) == (3.0, True)
    phase = experiment("d", "collocated-1xtp1", run("decode-only", 1, 4), run("decode-only", 1, 4, 1, window=False))
    assert [level.per_replica_rps for level in phase_ratio.rates(phase, "decode-only")] == [2]
    assert "whole run, ramp-up and drain included: d at concurrency 1" in phase_ratio.report(PREFILL, phase, ())


LOCAL = {"local": True}
LONGER, LONGER_ANSWERS, SHARED = {"input_tokens": 120}, {"output_tokens": 12}, {"shared_prefix_tokens": 20}


@pytest.mark.parametrize(
    ("workload", "manifest", "reason"),
    [
        (LONGER, {}, "not of the workload of the phases: pd (120:10)"),
        (LONGER_ANSWERS, {}, "not of the workload of the phases: pd (100:12)"),
        (SHARED, {}, "not of the workload of the phases: pd (100:10 shared prefix 20)"),
        ({}, LOCAL, "not of the kind of device of the phases: pd (on CPU engine ranks)"),
        ({"output_tokens": 11}, {}, None),
    ],
)
def test_only_what_may_be_compared_stands_beside_the_phases(
    workload: Mapping[str, int], manifest: Mapping[str, object], reason: str | None
) -> None:
    pd = experiment("pd", "pd-pack-p1xtp1-d1xtp1", run("mixed", 4, 6, workload=workload), **manifest)
    lines = phase_ratio.report(PREFILL, DECODE, [pd]).splitlines()
    assert ("measured" in lines) is (reason is None)
    assert [line for line in lines if "left out" in line] == ([f"note: left out, {reason}"] if reason else [])


def test_a_deployment_without_a_valid_level_is_named() -> None:
    pd = experiment("pd", "pd-pack-p1xtp1-d1xtp1", run("mixed", 4, 6, valid=False))
    assert "note: left out, without a valid level of mode mixed: pd" in phase_ratio.report(PREFILL, DECODE, [pd])


@pytest.mark.parametrize(
    ("workload", "manifest", "refused"),
    [
        (SHARED, {}, "q (100:1 prefill-only shared prefix 20) and d (100:10 decode-only): the phases must be of one "),
        ({}, LOCAL, "q (on CPU engine ranks) and d (on GPUs): the phases must be of one kind of device; measure both"),
        (LONGER_ANSWERS, {}, None),
    ],
)
def test_the_phases_may_be_compared(
    workload: Mapping[str, int], manifest: Mapping[str, object], refused: str | None
) -> None:
    """The answers of a prefill-only level have one token, whatever the workload asks for."""
    phase = experiment("q", "collocated-1xtp2", run("prefill-only", 2, 6, workload=workload), **manifest)
    if refused is None:
        assert phase_ratio.implied(phase, DECODE).levels == phase_ratio.implied(PREFILL, DECODE).levels
        return
    with pytest.raises(UsageError) as error:
        phase_ratio.implied(phase, DECODE)
    assert str(error.value).startswith(refused)


@given(st.floats(0.05, 20))
def test_the_nearest_ratio_is_the_nearest(value: float) -> None:
    best = phase_ratio.nearest(value)
    assert 1 <= best.numerator <= 8 and 1 <= best.denominator <= 8

    def off(ratio: Fraction) -> float:
        return max(value / float(ratio), float(ratio) / value)

    assert all(off(best) <= off(Fraction(p, d)) + 1e-9 for p in range(1, 9) for d in range(1, 9))


def test_phases_must_be_phases_of_one_workload() -> None:
    other = experiment("q", "collocated-1xtp1", run("prefill-only", 1, 4))
    longer = other.runs[0].model_copy(update={"workload": Workload(input_tokens=7, mode="prefill-only")})
    with pytest.raises(
        UsageError, match=r"q \(7:1 prefill-only\) and d \(100:10 decode-only\): the phases must be of one w"
    ):
        phase_ratio.implied(other.model_copy(update={"runs": (longer,)}), DECODE)
    varied = longer.model_copy(update={"workload": PREFILL.runs[0].workload.model_copy(update={"lengths": UNIFORM})})
    with pytest.raises(UsageError, match=r"q \(100:1 uniform 0.8-1.0 prefill-only\) and d \(100:10 decode-only\): the"):
        phase_ratio.implied(other.model_copy(update={"runs": (varied,)}), DECODE)
    with pytest.raises(UsageError, match="d: no valid closed-loop level of mode prefill-only"):
        phase_ratio.implied(DECODE, DECODE)
    with pytest.raises(UsageError, match="need a recorded collocated deployment"):
        phase_ratio.rates(PD[0], "mixed")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for experiment in (PREFILL, DECODE, *PD):
        store = Store(tmp_path / experiment.name)
        store.write_manifest(experiment.manifest)
        for one in experiment.runs:
            store.write(one, [])
    names = {"--prefill": "p", "--decode": "d"}
    words = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]
    measured = [str(tmp_path / experiment.name) for experiment in PD]
    assert ratio.main([*words, "--measured", *measured]) == 0
    assert "decode only (d), and the rate-matched ratio" in capsys.readouterr().out
    assert ratio.main(["--prefill", str(tmp_path / "p")]) == 2
    assert ratio.main([*words[:2], "--decode", str(tmp_path / "gone")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "--decode" in errors[0] and "does not exist" in errors[1]
