"""Service rates of the phases and the ratio that they imply."""

from __future__ import annotations

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


def run(mode: WorkloadMode, concurrency: int, rps: float, repeat: int = 0, valid: bool = True) -> Run:
    tpot = Distribution(mean_s=0.01, percentiles_s={"p50": 0.01}) if mode != "prefill-only" else None
    figures = Summary(
        duration_s=10, completed=20, requests_per_s=rps, input_tokens_per_s=1, output_tokens_per_s=1, tpot=tpot,
        ttft=Distribution(mean_s=0.1, percentiles_s={"p50": 0.1}),
    )  # fmt: skip
    return made.run(
        (), Closed(concurrency=concurrency), repeat=repeat, count=20,
        workload=Workload(input_tokens=100, output_tokens=10, mode=mode), steady=figures,
        whole=figures.model_copy(update={"requests_per_s": rps / 2}), validity=failing(*() if valid else ("x",)),
    )  # fmt: skip


def experiment(name: str, label: str, *runs: Run) -> Experiment:
    deployment = Deployment(model="m", topology=parse_label(label))
    return Experiment(name=name, manifest=Manifest(origin="measured", label=label, deployment=deployment), runs=runs)


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
    best, rates = phase_ratio.implied(PREFILL, DECODE)
    assert (best.value, best.per_replica_rps) == (2, 6)
    assert [item.decode.per_replica_rps for item in rates] == [2, 13], (
        "two replicas share the rate; repeats are averaged"
    )
    assert [item.decode.repeats for item in rates] == [1, 2]
    assert [item.prefill_per_decode for item in rates] == pytest.approx([2 / 6, 13 / 6])
    assert [item.ratio for item in rates] == [Fraction(1, 3), Fraction(7, 3)]
    # 1:3: three decode replicas of 2 requests/s match one prefill replica of 6, on 2 + 3 GPUs.
    assert rates[0].rps_per_gpu == pytest.approx(6 / 5)


def test_what_was_measured_stands_beside_it() -> None:
    ranked = phase_ratio.measured(PD)
    assert [(one.name, one.prefill, one.decode) for one in ranked] == [("two", 2, 1), ("one", 1, 1)]
    assert ranked[0].best_rps_per_gpu == pytest.approx(15 / 5)
    text = phase_ratio.report(PREFILL, DECODE, PD)
    assert "prefill only (p): 6.00 requests/s per replica" in text
    assert "  2:1                3.00  concurrency4" in text and "KV transfer" in text


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
    with pytest.raises(UsageError, match="q has 7 input tokens, d 100: the phases must be of the same workload"):
        phase_ratio.implied(other.model_copy(update={"runs": (longer,)}), DECODE)
    varied = longer.model_copy(update={"workload": PREFILL.runs[0].workload.model_copy(update={"lengths": UNIFORM})})
    with pytest.raises(UsageError, match=r"q has lengths uniform:0.8-1.0, d fixed: the phases must be of the same"):
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
