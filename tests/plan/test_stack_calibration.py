"""A correction from two to four levels of one's own stack: the constants of a made-up stack are found."""

from __future__ import annotations

import math
import shutil
import statistics
from functools import partial
from pathlib import Path

import pytest
from support.folders import run_on, write
from support.model_folders import GPT_OSS_20B, GPT_OSS_120B, model_folder

from pdlab.cli import calibrate as cli_calibrate
from pdlab.cli import plan as cli_plan
from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterNode, ClusterView, Nic
from pdlab.core.schema import to_yaml
from pdlab.core.workload import Closed, Level, Workload
from pdlab.first_hour import steps
from pdlab.plan.accuracy import MeasuredSweep
from pdlab.plan.calibration import measured_sweep, predict
from pdlab.plan.comparison import compared_experiment
from pdlab.plan.error_catalog import error_after, public_errors, stack_of, with_stack_prior
from pdlab.plan.extrapolation import outside_fit
from pdlab.plan.stack_calibration import calibrated, calibration_text
from pdlab.results.published_folders import load_experiment
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, load_hardware, signed
from pdlab.sim.step_source import SEQUENCE_US, Correction

pytestmark = pytest.mark.usefixtures("tabulated")
SHAPE = require_shape("gpt-oss-20b")
TRUTH = Correction(host_ms=1.2, factor=1.05, prefill_factor=1.6, sync_us=6.0, sequence_us=SEQUENCE_US)


def start() -> Hardware:
    return with_stack_prior(computed("H200", "vllm", "0.29"), SHAPE)


def sweep(
    label: str,
    lengths: tuple[int, int],
    loads: tuple[int, ...],
    truth: Hardware | None = None,
    shape: ModelShape = SHAPE,
) -> MeasuredSweep:
    """As a stack would measure it. ``truth``: None: one with the true correction."""
    levels = tuple(Level(load=Closed(concurrency=n), num_requests=4 * n, seed=0) for n in loads)
    made = MeasuredSweep(
        name=f"{label} {lengths[0]}",
        deployment=Deployment(model=shape.name, topology=parse_label(label)),
        workload=Workload(input_tokens=lengths[0], output_tokens=lengths[1]),
        levels=levels,
        values=(),
        prompts="fresh",
    )
    values = predict(truth or start().with_correction(TRUTH), shape, made, (0,))
    return made.model_copy(update={"values": tuple(values)})


SPREAD = [
    ("collocated-1xtp1", (1024, 256), (4,)),
    ("collocated-1xtp4", (8192, 256), (8,)),
    ("collocated-1xtp2", (4096, 512), (32,)),
]


def test_three_levels_predict_a_level_that_none_of_them_is_like() -> None:
    found = calibrated(start(), SHAPE, [sweep(*each) for each in SPREAD])
    other = sweep("collocated-1xtp8", (2048, 1024), (16,))
    for hardware, least, most in ((start(), 0.05, 1.0), (start().with_correction(found.correction), 0.0, 0.06)):
        (predicted,) = predict(hardware, SHAPE, other, (0,))
        assert predicted.tpot_s is not None and other.values[0].tpot_s is not None
        assert least <= abs(predicted.tpot_s / other.values[0].tpot_s - 1) <= most
    assert found.correction.fitted_levels == 3
    assert found.correction.prefill_factor == pytest.approx(TRUTH.prefill_factor, rel=0.15)


@pytest.mark.parametrize(("model", "version"), [("gpt-oss-120b", "0.18"), ("gpt-oss-120b", "0.99")])
def test_a_host_that_takes_longer_is_found_whether_or_not_public_levels_have_the_stack(
    model: str, version: str
) -> None:
    """They are of another installation."""
    shape = require_shape(model)
    prior = with_stack_prior(computed("H200", "vllm", version), shape)
    assert prior.steps is not None
    is_public = any(each.stack == stack_of(prior, shape) for each in public_errors().stacks)
    assert is_public == (version == "0.18")
    slow = prior.steps.correction.model_copy(update={"host_ms": prior.steps.correction.host_ms + 1.0})
    found = calibrated(prior, shape, [sweep(*each, prior.with_correction(slow), shape) for each in SPREAD])
    other = sweep("collocated-1xtp8", (2048, 1024), (16,), prior.with_correction(slow), shape)
    before, after = (
        abs(math.log(each.tpot_s / other.values[0].tpot_s))
        for hardware in (prior, prior.with_correction(found.correction))
        for each in predict(hardware, shape, other, (0,))
        if each.tpot_s is not None and other.values[0].tpot_s is not None
    )
    assert after < 0.5 * before
    assert not found.contradicting and not found.outside


def test_levels_that_are_all_outside_of_their_bands_are_named() -> None:
    """Each alone contradicts nothing. The correction cannot follow a host so slow: three levels are few."""
    shape = require_shape("gpt-oss-120b")
    prior = with_stack_prior(computed("H200", "vllm", "0.18"), shape)
    assert prior.steps is not None
    slow = prior.steps.correction.model_copy(update={"host_ms": prior.steps.correction.host_ms + 5.0})
    measured = [sweep(*each, prior.with_correction(slow), shape) for each in SPREAD]
    found = calibrated(prior, shape, measured)
    own = [each for made in measured for each in predict(prior.with_correction(found.correction), shape, made, (0,))]
    error = statistics.median(
        each.tpot_s / made.values[0].tpot_s - 1
        for each, made in zip(own, measured, strict=True)
        if each.tpot_s is not None and made.values[0].tpot_s is not None
    )
    (outside,) = (each for each in found.outside if each.metric == "TPOT")
    assert (outside.outside, outside.levels) == (3, 3) and outside.error == pytest.approx(error, abs=0.01)
    assert "3 of 3 levels outside of the band" in calibration_text(found)


def test_how_much_each_level_helped_and_what_is_left() -> None:
    found = calibrated(start(), SHAPE, [sweep(*each) for each in SPREAD])
    assert [each.sweep for each in found.helped] == [f"{label} {lengths[0]}" for label, lengths, _ in SPREAD]
    assert all(0 < each.share < 1 for each in found.helped)
    before, after = found.spread
    left = 1.0
    for each in found.helped:
        left *= 1 - each.share
    assert after < before
    assert (after / before) ** 2 == pytest.approx(left, rel=0.2)
    assert len(calibration_text(found).splitlines()) == 4 + 3 + 1


def test_what_to_measure_next_is_none_of_what_was_measured_and_helps_less_the_more_there_is() -> None:
    one = calibrated(start(), SHAPE, [sweep(*SPREAD[0])]).next_level
    three = calibrated(start(), SHAPE, [sweep(*each) for each in SPREAD]).next_level
    assert one is not None and three is not None
    assert (one.label, one.input_tokens) != ("collocated-1xtp1", 1024) or one.concurrency != 4
    assert one.share > three.share > 0


def test_measured_levels_are_a_prior_of_later_ones() -> None:
    first = calibrated(start(), SHAPE, [sweep(*SPREAD[0])])
    later = calibrated(start().with_correction(first.correction), SHAPE, [sweep(*SPREAD[1])])
    assert later.correction.fitted_levels == 2
    assert later.spread[0] == pytest.approx(first.spread[1], rel=0.3)


def test_levels_that_are_given_again_bring_nothing() -> None:
    """Under another name too, in one call and in a later one."""
    one, two = sweep(*SPREAD[0]), sweep(*SPREAD[1])
    copy = one.model_copy(update={"name": "a copy"})
    first = calibrated(start(), SHAPE, [one])
    assert calibrated(start(), SHAPE, [one, copy]).correction == first.correction
    corrected = start().with_correction(first.correction)
    again = calibrated(corrected, SHAPE, [copy])
    assert again.correction == first.correction and again.helped == () == again.contradicting
    assert calibrated(corrected, SHAPE, [copy, two, one]).correction == calibrated(corrected, SHAPE, [two]).correction


def test_a_setting_counts_once_however_its_levels_are_given() -> None:
    """Two loads of one deployment and one length are one setting, in one call and in two."""
    label, lengths, _ = SPREAD[0]
    low, high, both = (sweep(label, lengths, loads) for loads in ((4,), (16,), (4, 16)))
    first = calibrated(start(), SHAPE, [low])
    later = calibrated(start().with_correction(first.correction), SHAPE, [high]).correction
    together = calibrated(start(), SHAPE, [both]).correction
    for found in (later, together):
        assert (found.fitted_levels, found.fitted_settings, len(found.levels)) == (2, 1, 2)
    other = calibrated(start().with_correction(later), SHAPE, [sweep(*SPREAD[1])]).correction
    assert (other.fitted_levels, other.fitted_settings) == (3, 2)


def test_engines_of_one_parallelism_are_one_setting_whatever_their_number() -> None:
    """And whatever the file was when a level came: a record of another number of replicas is of the same engines."""
    alike = [sweep(f"collocated-{n}xtp4", (1024, 256), (8 * n,)) for n in (1, 2, 4)]
    apart = [sweep(f"collocated-1xtp{n}", (1024, 256), (8,)) for n in (1, 2, 4)]
    one, three = (calibrated(start(), SHAPE, each) for each in (alike, apart))
    assert (one.correction.fitted_levels, one.correction.fitted_settings) == (3, 1) and one.error == error_after(1)
    assert three.correction.fitted_settings == 3 and three.error == error_after(3)
    second, third = (each.share for each in one.helped[1:])
    assert second < three.helped[1].share and third < 0.5 * three.helped[2].share, "errors in common"
    first = calibrated(start(), SHAPE, alike[:1]).correction
    assert calibrated(start().with_correction(first), SHAPE, alike[1:]).correction.fitted_settings == 1
    assert one.next_level is not None and one.next_level.label != "collocated-1xtp4"


def test_levels_of_pd_narrow_no_band_of_collocated_engines() -> None:
    """The errors after levels are those of public stacks with collocated engines."""
    given = [sweep(*SPREAD[0]), *(sweep(f"pd-{each}", (1024, 256), (4,)) for each in ("pack-p1xtp2-d1xtp2",
             "spread-p1xtp4-d1xtp4"))]  # fmt: skip
    found = calibrated(start(), SHAPE, given)
    assert (found.correction.fitted_levels, found.correction.fitted_settings) == (3, 1)
    assert found.error == error_after(1)
    without = calibrated(start(), SHAPE, given[1:])
    assert without.correction.fitted_settings == 0
    assert cli_calibrate._why_no_band(without, doubtful=False).startswith("no level is of collocated engines")


def test_a_repeat_is_a_level_of_its_own() -> None:
    one = sweep(*SPREAD[0])
    tpot_s, *rest = one.values[0]
    assert tpot_s is not None
    repeat = one.model_copy(update={"values": ((1.01 * tpot_s, *rest),)})
    found = calibrated(start(), SHAPE, [one, repeat]).correction
    assert (found.fitted_levels, found.fitted_settings) == (2, 1)


def test_a_file_that_does_not_record_its_levels_gets_no_further_settings() -> None:
    """They may be among those that it has."""
    first = calibrated(start(), SHAPE, [sweep(*SPREAD[0])]).correction
    unrecorded = first.model_copy(update={"levels": (), "fitted_levels": 2, "fitted_settings": 2})
    later = calibrated(start().with_correction(unrecorded), SHAPE, [sweep(*SPREAD[0])]).correction
    assert (later.fitted_levels, later.fitted_settings, len(later.levels)) == (3, 2, 1)


def test_constants_of_a_fit_have_no_correction() -> None:
    with pytest.raises(UsageError, match="constants of a fit"):
        calibrated(load_hardware("h100-vllm-0.11"), SHAPE, [])


def test_hardware_of_measured_levels_keeps_its_correction() -> None:
    measured = start().with_correction(TRUTH.model_copy(update={"fitted_levels": 2}))
    assert with_stack_prior(measured, SHAPE) == measured
    home = load_hardware("h100-vllm-0.11")
    assert with_stack_prior(home, SHAPE) is home


def test_more_measured_levels_leave_smaller_errors() -> None:
    one, four = error_after(1), error_after(4)
    assert four.tpot_percent <= one.tpot_percent
    assert error_after(9) == four
    assert set(four.parts) == {"TPOT", "mean TTFT", "requests/s"}
    assert public_errors().after[1].components["TPOT"].stack > 0


run = partial(run_on, model="gpt-oss-20b", loads=(2, 4), faster=2.0, ttft_s=0.11)


def test_runs_that_differ_in_what_is_not_simulated_correct_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, eager = tmp_path / "mine.yaml", {"enforce_eager": True}
    runs = [run(tmp_path / "eager", arguments=eager), run(tmp_path / "plain", label="collocated-1xtp2")]
    assert cli_calibrate.main(["--runs", *runs, "--start", "H200", "--out", str(out)]) == 2
    assert "enforce_eager=true" in capsys.readouterr().err and not out.exists()
    assert cli_calibrate.main(["--runs", runs[0], "--start", "H200", "--out", str(out)]) == 0
    made = load_hardware(str(out))
    assert made.fit is not None and made.fit.engine_arguments == ("enforce_eager=true",)
    capsys.readouterr()
    assert cli_calibrate.main(["--runs", runs[1], "--start", str(out)]) == 2, "nor in two calls"
    assert "mine has enforce_eager=true, which is not simulated, and plain has not" in capsys.readouterr().err


def test_the_command_writes_hardware_that_a_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    assert cli_calibrate.main(["--runs", run(tmp_path / "run"), "--start", "H200", "--out", str(out)]) == 0
    assert "measure next: " in capsys.readouterr().out
    made = load_hardware(str(out))
    assert made.steps is not None and made.steps.correction.fitted_levels == 2
    assert made.fit is not None and (made.fit.gpu, made.fit.version, made.fit.tp) == ("H200", "0.29", (4,))
    assert made.steps.correction.fitted_settings == 1 and made.error == error_after(1), "two loads of one setting"
    again = tmp_path / "again.yaml"
    assert (
        cli_calibrate.main(
            ["--runs", run(tmp_path / "two", label="collocated-1xtp2"), "--start", str(out), "--out", str(again)]
        )
        == 0
    )
    further = load_hardware(str(again))
    assert further.steps is not None and further.steps.correction.fitted_levels == 4
    assert further.error == error_after(2)
    assert further.fitted_on == ("run", "two")


def test_the_command_says_which_levels_it_has_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, more = run(tmp_path / "run"), run(tmp_path / "more", loads=(1,))
    copy = str(shutil.copytree(first, tmp_path / "copy"))
    out, again, old = (tmp_path / f"{name}.yaml" for name in ("mine", "again", "old"))
    assert cli_calibrate.main(["--runs", first, "--start", "H200", "--out", str(out)]) == 0
    capsys.readouterr()
    for given in ([first], [copy], [first, copy]):
        assert cli_calibrate.main(["--runs", *given, "--start", str(out)]) == 2
        *notes, error = capsys.readouterr().err.splitlines()
        assert f"--start {out} has all {2 * len(given)} levels already" in error
        assert notes == [f"note: {Path(each).name}: 2 levels given again, left out" for each in given]
    assert cli_calibrate.main(["--runs", first, more, "--start", str(out), "--out", str(again)]) == 0
    text, note = capsys.readouterr()
    assert "after 3 levels" in text and "run: 2 levels given again" in note
    made = load_hardware(str(again))
    assert made.steps is not None and made.steps.correction.fitted_settings == 1 and made.error == error_after(1)
    assert made.fit is not None and made.fit.in_flight_per_gpu == (0.25, 1.0)
    kept = load_hardware(str(out))
    assert kept.steps is not None and kept.fit is not None
    unrecorded = kept.with_correction(kept.steps.correction.model_copy(update={"levels": ()}))
    old.write_text(to_yaml(signed(unrecorded, kept.fit)))
    assert load_hardware(str(old)).error == kept.error, "a file without the record is as valid"
    assert cli_calibrate.main(["--runs", first, "--start", str(old)]) == 2, "it names its runs"


def test_a_file_has_the_range_of_all_its_levels(tmp_path: Path) -> None:
    """Whatever the order in which they came."""
    runs = [run(tmp_path / "four"), run(tmp_path / "two", label="collocated-1xtp2")]
    made = []
    for number, given in enumerate(([runs], [runs[:1], runs[1:]], [runs[1:], runs[:1]])):
        begin = "H200"
        for step, some in enumerate(given):
            out = tmp_path / f"{number}-{step}.yaml"
            assert cli_calibrate.main(["--runs", *some, "--start", begin, "--out", str(out)]) == 0
            begin = str(out)
        fit = load_hardware(begin).fit
        assert fit is not None
        made.append(fit.model_copy(update={"digest": ""}))
    assert made[0] == made[1] == made[2]
    assert made[0].tp == (2, 4) and made[0].in_flight_per_gpu == (0.5, 2.0)


def test_the_gpu_that_the_runs_record_is_enough(tmp_path: Path) -> None:
    """With the command of the first hour and all levels of its deployments."""
    out = tmp_path / "hardware.yaml"
    words = next(step for step in steps.plan(tmp_path, where="cluster", model="m", port=1, lengths=(1, 1))
                 if step.name == "calibration").command  # fmt: skip
    runs = tmp_path / "results"
    for deployed in steps.DEPLOYMENTS["cluster"]:
        run(runs / deployed.label, label=deployed.label)
    assert cli_calibrate.main(list(words[1:])) == 0
    made = load_hardware(str(out))
    assert made.steps is not None
    assert (made.gpu_type, made.steps.correction.fitted_levels) == ("H200", 6)
    assert made.steps.correction.fitted_settings == 1, "one deployment is collocated"


def test_levels_of_another_stack_are_not_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, changed = tmp_path / "mine.yaml", tmp_path / "changed.yaml"
    assert cli_calibrate.main(["--runs", run(tmp_path / "run"), "--start", "H200", "--out", str(out)]) == 0
    changed.write_text(out.read_text().replace("gpus_per_node: 8", "gpus_per_node: 4"))
    sglang = tmp_path / "sglang.yaml"
    sglang.write_text(to_yaml(computed("H200", "sglang")))
    capsys.readouterr()
    for start, version, part in (
        (out, "0.18.0", "its levels are of vLLM version 0.29, the runs are of 0.18"),
        (changed, "0.29.0", "was changed after its levels were measured"),
        (sglang, "0.30.0", "its tables are of sglang, the runs are of vllm"),
    ):
        runs = run(tmp_path / f"of-{version}", version=version)
        assert cli_calibrate.main(["--runs", runs, "--start", str(start)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and part in error


def test_a_model_is_one_under_every_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a folder, by its id and by its name, in a plan with the file too; a model with other numbers is another one,
    although it has the name."""
    folder = model_folder(tmp_path / "prod-20b", GPT_OSS_20B)
    pruned = model_folder(tmp_path / "other" / "gpt-oss-20b", GPT_OSS_20B, num_hidden_layers=20)
    runs = [run(tmp_path / "name"), run(tmp_path / "id", label="collocated-1xtp2", model="openai/gpt-oss-20b")]
    out, again = tmp_path / "mine.yaml", tmp_path / "again.yaml"
    words = ["--runs", *runs, "--start", "H200"]
    assert cli_calibrate.main([*words, "--model", folder, "--out", str(out)]) == 0
    assert cli_calibrate.main(words) == 0, "two names of one model"
    more = run(tmp_path / "more", label="collocated-1xtp1")
    assert cli_calibrate.main(["--runs", more, "--start", str(out), "--out", str(again)]) == 0
    made = load_hardware(str(out))
    assert made.fit is not None and made.fit.model == "prod-20b"
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    assert outside_fit(made, SHAPE, deployment) == outside_fit(made, "openai/gpt-oss-20b", deployment) == ()
    assert [each.dimension for each in outside_fit(made, require_shape(pruned), deployment)] == ["model"]
    capsys.readouterr()
    for given in (["--model", pruned], ["--model", "gpt-oss-120b"]):
        assert cli_calibrate.main([*words, *given]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"--model {given[1]}: name is of gpt-oss-20b" in error
    big = run(tmp_path / "big", model="gpt-oss-120b")
    assert cli_calibrate.main(["--runs", big, "--start", str(out)]) == 2
    assert "its levels are of model prod-20b, the runs are of gpt-oss-120b" in capsys.readouterr().err


def test_a_run_is_compared_as_its_own_model_under_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = run(tmp_path / "run", gpu="H100", version="0.11.0", model="openai/gpt-oss-120b", loads=(4,))
    folder = model_folder(tmp_path / "prod-120b", GPT_OSS_120B)
    assert cli_plan.main(["--compare", runs, "--model", folder]) == 0
    out, error = capsys.readouterr()
    assert "predicted as" not in error and "model" not in out.partition("extrapolated:")[2]
    assert cli_plan.main(["--compare", runs, "--model", "gpt-oss-20b"]) == 0
    assert "is of openai/gpt-oss-120b, predicted as gpt-oss-20b" in capsys.readouterr().err


def test_tables_without_errors_claim_none_in_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run(tmp_path / "run", gpu="H100", version="0.11.0", loads=(4,))
    for hardware, told in ((["H100", "--engine-version", "0.24"], False), (["h100-vllm-0.11"], True)):
        assert cli_plan.main(["--compare", runs, "--hardware", *hardware]) == 0
        out = capsys.readouterr().out
        assert "run is extrapolated: " in out and ("come from other runs" in out) is told


def test_a_stack_that_is_faster_than_its_tables_is_found_in_few_rounds() -> None:
    """Its host time goes to 0 in the first round, from where the next one must still see what the host's time does."""
    hurried = Correction(host_ms=0.0, factor=0.85, prefill_factor=1.0, sequence_us=SEQUENCE_US)
    slow = Correction(
        host_ms=2.0,
        factor=1.0,
        prefill_factor=1.0,
        sequence_us=SEQUENCE_US,
        covariance=((4.0, 0, 0, 0), (0, 0.01, 0, 0), (0, 0, 0.1, 0), (0, 0, 0, 1.0)),
    )
    measured = []
    for label, lengths, loads in SPREAD:
        made = sweep(label, lengths, loads)
        values = predict(start().with_correction(hurried), SHAPE, made, (0,))
        measured.append(made.model_copy(update={"values": tuple(values)}))
    found = calibrated(start().with_correction(slow), SHAPE, measured).correction
    assert found.host_ms == 0.0
    assert found.factor == pytest.approx(0.85, abs=0.03)
    assert found.prefill_factor == pytest.approx(1.0, abs=0.03)


def test_every_output_names_the_version_of_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, picture = run(tmp_path / "run"), tmp_path / "curves.svg"
    assert cli_calibrate.main(["--runs", runs, "--start", "H200"]) == 0
    assert "Note: step times of H200 come from tables of vllm 0.24.0" in capsys.readouterr().out
    words = ["--compare", runs, "--hardware", "H200", "--engine-version", "0.29", "--plot", str(picture)]
    assert cli_plan.main(words) == 0
    assert "Note: step times of H200 come from tables of vllm 0.24.0" in capsys.readouterr().out
    assert "vllm 0.24.0" in picture.read_text()


def test_a_level_that_the_stack_cannot_have_is_named() -> None:
    measured = [sweep(*each) for each in SPREAD]
    assert calibrated(start(), SHAPE, measured).contradicting == ()
    tpot_s, *rest = measured[1].values[0]
    assert tpot_s is not None
    for factor, named in ((1.05, False), (2.0, True), (200.0, True), (0.4, True)):
        wrong = measured[1].model_copy(update={"values": ((factor * tpot_s, *rest),)})
        found = calibrated(start(), SHAPE, [measured[0], wrong, measured[2]])
        assert [(each.sweep, each.metric) for each in found.contradicting] == [(wrong.name, "TPOT")] * named, factor
        assert not found.contradicted_by_all
    (level,) = found.contradicting
    assert level.measured_s == pytest.approx(0.4 * tpot_s) and level.predicted_s == pytest.approx(tpot_s, rel=0.15)


def test_what_contradicts_the_stack_leaves_a_file_without_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / "true"), run(tmp_path / "wrong", label="collocated-1xtp2", loads=(4,), faster=0.1)]
    doubtful, again = tmp_path / "doubtful.yaml", tmp_path / "again.yaml"
    assert cli_calibrate.main(["--runs", *runs, "--start", "H200", "--out", str(doubtful)]) == 0
    out, error = capsys.readouterr()
    assert "wrong, concurrency 4, contradicts the stack" in out and "wrong --gpu, --engine or --model" in error
    assert load_hardware(str(doubtful)).error is None and load_hardware(str(doubtful)).fit is not None
    more = run(tmp_path / "more", label="collocated-1xtp1")
    assert cli_calibrate.main(["--runs", more, "--start", str(doubtful), "--out", str(again)]) == 0
    assert load_hardware(str(again)).error is None, "a further level does not make the first ones true"


def test_what_is_outside_of_its_own_bands_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.yaml"
    runs = run(tmp_path / "run", loads=(4,), faster=1.6, ttft_s=0.06)
    assert cli_calibrate.main(["--runs", runs, "--start", "H200", "--out", str(out)]) == 0
    printed, error = capsys.readouterr()
    assert "1 of 1 level outside of the band" in printed and "contradict" not in printed + error
    assert "measured levels are outside of the bands of their own correction" in error
    made = load_hardware(str(out))
    assert made.fit is not None and made.error is None


def test_runs_of_another_stack_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.yaml"
    for faster in (0.02, 50.0):
        runs = run(tmp_path / f"wrong-{faster}", faster=faster)
        assert cli_calibrate.main(["--runs", runs, "--start", "H200", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "no level is of this stack" in error and "wrong --gpu" in error
        assert not out.exists()


def test_runs_without_tables_are_named_a_start_that_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_cpus = str(Path(__file__).parents[2] / "bm_results" / "local-pack-vs-spread" / "collocated")
    for runs, words in (
        (on_cpus, ["--start", "H200"]),
        (on_cpus, ["--start", "recorded"]),
        (on_cpus, ["--out", str(tmp_path / "out.yaml")]),
        (run(tmp_path / "t4", gpu="T4"), ["--start", "H200"]),
    ):
        assert cli_calibrate.main(["--runs", runs, *words]) == 2
        error = capsys.readouterr().err
        named = error.rpartition("give --start ")[2].split()[0]
        assert error.count("\n") == 1 and load_hardware(named).cpu == (runs == on_cpus), error


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs", run(tmp_path / "run")]
    for words, part in (
        (["--start", "H100"], "the runs are of H200"),
        (["--start", "H200", "--rounds", "3"], "--rounds does nothing"),
        (["--start", "T4"], "T4"),
    ):
        assert cli_calibrate.main([*runs, *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and part in error, words


def test_a_run_is_predicted_over_the_network_of_its_own_nodes(tmp_path: Path) -> None:
    """Its manifest has the nodes. 10 Gb/s are far less than EFA, which the constants are of. Comparisons, and the
    responses that a correction is fitted to, have the same network."""
    nodes = [
        ClusterNode(id=each, gpu_type="H200", gpus=8, head=each == "a", nic=Nic(kind=kind, gbit_per_s=rate, count=1))
        for kind, rate in (("efa", 3200.0), ("ethernet", 10.0))
        for each in "ab"
    ]
    deployment = Deployment(model="gpt-oss-120b", topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    versions = {"vllm": "0.29.0", "ray": "2.60.0"}
    compared, fitted = [], []
    for number, of in enumerate((nodes[:2], nodes[2:])):
        folder = tmp_path / f"{number}"
        write(folder, deployment, loads=(4,), repeats=1, cluster=ClusterView(nodes=tuple(of)), versions=versions)
        points = compared_experiment(folder, start(), None, None, {}).points
        compared.append(next(each.predicted for each in points if each.metric == "mean TTFT"))
        fitted.append(predict(start(), SHAPE, measured_sweep(load_experiment(folder), None), (0,))[0].ttft_s)
    for efa, ethernet in (compared, fitted):
        assert ethernet > 1.5 * efa
    local = load_experiment(folder)
    local = local.model_copy(update={"manifest": local.manifest.model_copy(update={"local": True})})
    assert measured_sweep(local, None).nodes == ()
