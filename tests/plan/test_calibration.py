"""Calibration: it finds constants that are known, and its errors are those of predictions not fitted to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import folders, published
from support.folders import run_on
from support.plans import HARDWARE, MODEL, SHAPE
from support.validity import failing

from pdlab.cli import calibrate as cli_calibrate
from pdlab.cli import plan as cli_plan
from pdlab.core.deployment import Deployment, Serving, parse_label
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.lengths import parse_lengths
from pdlab.core.nodes import Nic
from pdlab.core.schema import to_yaml
from pdlab.core.workload import Closed, Level, Open, RunKey, Workload
from pdlab.plan import calibration
from pdlab.plan.accuracy import MeasuredSweep, PredictedPoint, median_errors, rankings, table
from pdlab.plan.calibration import assumed_prompts, compare, cross_validate, fit, measured_sweep, predict, residuals
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Experiment, Origin, Run, Validity
from pdlab.sim.hardware import Hardware, Speculation, load_hardware

SHARED = Path(__file__).resolve().parents[3] / "shared" / "reference" / "measured-h100"
LEVELS = tuple(Level(load=Closed(concurrency=n), num_requests=4 * n, seed=0) for n in (4, 16, 32))


def synthetic(truth: Hardware, labels: Iterable[str]) -> list[MeasuredSweep]:
    """Experiments "measured" on hardware whose constants are known."""
    experiments = []
    for label in labels:
        experiment = MeasuredSweep(
            name=label,
            deployment=Deployment(topology=parse_label(label)),
            workload=Workload(),
            levels=LEVELS,
            values=(),
            prompts="repeated",
        )
        values = tuple(predict(truth, SHAPE, experiment, (0,)))
        experiments.append(experiment.model_copy(update={"values": values}))
    return experiments


def with_free(hardware: Hardware, *names: str) -> Hardware:
    """Only these constants are fitted."""
    constants = {
        name: constant.model_copy(update={"basis": "fitted" if name in names else "assumed"})
        for name, constant in hardware.constants.items()
    }
    return hardware.model_copy(update={"constants": constants})


def test_known_constants_are_found() -> None:
    names = ("launch_ms", "tensor_share", "weight_read_share", "overhead_ms")
    truth = with_free(HARDWARE, *names)
    wrong = (1.25, 0.8, 1.2, 0.85)
    start = truth.with_values({name: truth.value(name) * by for name, by in zip(names, wrong, strict=True)})
    experiments = synthetic(truth, ["collocated-1xtp8", "collocated-1xtp2"])
    before = median_errors([p for e in experiments for p in compare(start, SHAPE, e, (0,))])
    fitted = fit(start, SHAPE, experiments, seeds=(0,), rounds=15)
    after = median_errors([p for e in experiments for p in compare(fitted, SHAPE, e, (0,))])
    assert before["TPOT"] > 5 and after["TPOT"] < 1
    assert after["mean TTFT"] < 3
    for name in names:
        assert fitted.value(name) == pytest.approx(truth.value(name), rel=0.1), name
    untouched = set(truth.constants) - set(names)
    assert all(fitted.value(name) == truth.value(name) for name in untouched)


def test_cross_validation_predicts_what_it_did_not_see() -> None:
    """One experiment comes from other hardware: left out it is missed, and the others are missed because of it."""
    truth = with_free(HARDWARE, "launch_ms")
    slow = truth.with_values({"launch_ms": 3 * truth.value("launch_ms")})
    alike = synthetic(truth, ["collocated-1xtp8", "collocated-1xtp4", "collocated-1xtp2"])
    odd = synthetic(slow, ["collocated-2xtp4"])
    points = cross_validate(truth, SHAPE, [*alike, *odd], rounds=4, workers=1)
    tpot = {
        name: [abs(p.error_percent) for p in points if p.experiment == name and p.metric == "TPOT"]
        for name in ("collocated-1xtp8", "collocated-2xtp4")
    }
    assert min(tpot["collocated-2xtp4"]) > 20 > max(tpot["collocated-1xtp8"])
    assert len(table(points).splitlines()) == 2 + 4 * len(LEVELS)


@pytest.mark.parametrize("origin", ["measured", "imported"])
def test_the_first_level_counts_as_the_others_where_it_was_warmed_up(origin: Origin) -> None:
    """Handshakes and compilation are in the first level of published runs, and before it in pdlab's own."""
    experiment = load_experiment(Path(__file__).parents[1] / "data" / "published" / "demo_itl2000_otl50_1xtp4")
    manifest = experiment.manifest.model_copy(update={"origin": origin})
    sweep = measured_sweep(experiment.model_copy(update={"manifest": manifest}), "fresh")
    tpot_of_first, *_ = residuals(HARDWARE, SHAPE, sweep, (0,))[:, 0]
    assert tpot_of_first == (1.0 if origin == "measured" else 0.2)


@pytest.mark.parametrize(("origin", "prompts"), [("imported", "repeated"), ("measured", "fresh")])
def test_closed_loops_of_others_repeat_their_prompts_unless_stated(origin: Origin, prompts: str) -> None:
    experiment = load_experiment(Path(__file__).parents[1] / "data" / "published" / "demo_itl2000_otl50_1xtp4")
    runs = tuple(run.model_copy(update={"load": Closed(concurrency=4)}) for run in experiment.runs)
    manifest = experiment.manifest.model_copy(update={"origin": origin})
    closed = experiment.model_copy(update={"runs": runs, "manifest": manifest})
    assert measured_sweep(closed, None).prompts == prompts
    assert measured_sweep(closed, "fresh").prompts == "fresh"
    assert measured_sweep(experiment, None).prompts == "fresh", "an open loop draws new ones"


def published_levels(folder: Path, **changes: Any) -> Experiment:
    """Closed loops of 4 and 8 requests, of a full closed loop unless changed."""
    files = {f"c{n}": published.content(n, **{"model_id": MODEL, **changes}) for n in (4, 8)}
    return load_experiment(published.write(folder / "x_1xtp2", files))


def test_levels_with_impossible_figures_are_compared_with_a_note_and_not_fitted(tmp_path: Path) -> None:
    """Little's law: of a full closed loop that takes a third of the time, three times the requests are in flight."""
    assert measured_sweep(published_levels(tmp_path / "fair"), None).doubts == ()
    experiment = published_levels(tmp_path)
    fair, other = experiment.runs
    rates = ("requests_per_s", "output_tokens_per_s")
    faster = other.whole.model_copy(update={name: 3 * getattr(other.whole, name) for name in rates})
    mixed = experiment.model_copy(update={"runs": (fair, other.model_copy(update={"whole": faster}))})
    compared, fitted = measured_sweep(mixed, None), measured_sweep(mixed, None, fitted=True)
    assert [len(each.levels) for each in (compared, fitted)] == [2, 1]
    for sweep, words in ((compared, "has impossible figures"), (fitted, "is left out: with impossible figures")):
        (doubt,) = sweep.doubts
        assert doubt.startswith(f"x_1xtp2, concurrency 8 {words} (whole run: ") and "are 24.0 in flight" in doubt


def test_a_level_whose_stated_rate_contradicts_its_counts_is_not_fitted(tmp_path: Path) -> None:
    experiment = published_levels(tmp_path, request_throughput=100.0)
    (first, _) = measured_sweep(experiment, None).doubts
    assert "the file states 100.00 requests/s, but counts over its duration give 0.98" in first
    with pytest.raises(StoreError, match="2 with impossible figures"):
        measured_sweep(experiment, None, fitted=True)


def test_the_note_about_assumed_prompts_names_the_flag(tmp_path: Path) -> None:
    experiment = published_levels(tmp_path)
    note = assumed_prompts([measured_sweep(experiment, None)] * 2)
    assert note is not None and note.startswith("x_1xtp2 and 1 more: ") and "--prompts fresh" in note
    one = experiment.model_copy(update={"runs": experiment.runs[:1]})
    assert assumed_prompts([measured_sweep(experiment, "repeated"), measured_sweep(one, None)]) is None


def test_measured_speculative_decoding_is_simulated(tmp_path: Path) -> None:
    """Engines that accept two tokens per step need about half of the steps."""
    drafts = {"spec_decode_num_drafts": 100, "spec_decode_draft_tokens": 200}
    plain = measured_sweep(published_levels(tmp_path / "plain"), None)
    with_it = measured_sweep(published_levels(tmp_path, spec_decode_acceptance_length=2.0, **drafts), None)
    assert with_it.as_measured(HARDWARE).speculation == Speculation(acceptance_length=2.0, draft_tokens=2)
    of_flag = Speculation(acceptance_length=1.5, draft_tokens=1)
    assert with_it.as_measured(HARDWARE.with_speculation(of_flag)).speculation == of_flag
    for slow, fast in zip(*(predict(HARDWARE, SHAPE, each, (0,)) for each in (plain, with_it)), strict=True):
        assert slow.tpot_s is not None and fast.tpot_s is not None
        assert 0.4 < fast.tpot_s / slow.tpot_s < 0.7


def test_speculative_decoding_without_its_guesses_has_the_fewest(tmp_path: Path) -> None:
    sweep = measured_sweep(published_levels(tmp_path, accept_length=2.5), None)
    assert sweep.speculation == Speculation(acceptance_length=2.5, draft_tokens=2)


def test_runs_with_speculative_decoding_are_compared_and_fit_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published_levels(tmp_path, accept_length=2.5)
    assert cli_plan.main(["--compare", str(tmp_path / "x_1xtp2")]) == 0
    printed = capsys.readouterr()
    assert "speculative decoding accepts 2.5 tokens per step" in printed.out
    assert "speculative decoding (fit: none)" in printed.out and "--prompts fresh" in printed.err
    assert cli_calibrate.main(["--runs", str(tmp_path / "x_1xtp2"), "--rounds", "0"]) == 2
    assert "(2 with speculative decoding, whose draft takes time in every step)" in capsys.readouterr().err


def test_speculative_decoding_of_unknown_length_is_noted_and_not_fitted(tmp_path: Path) -> None:
    experiment = published_levels(tmp_path, spec_decoding="mtp")
    sweep = measured_sweep(experiment, None)
    assert sweep.speculation is None and all("give --acceptance-length" in each for each in sweep.doubts)
    assert len(sweep.doubts) == len(sweep.levels) == 2
    with pytest.raises(StoreError, match="2 with speculative decoding"):
        measured_sweep(experiment, None, fitted=True)


def test_levels_with_early_tokens_are_compared_with_a_note_and_fit_nothing(tmp_path: Path) -> None:
    """Their TTFT ends before the hand-over to decode: a fit to it would take the hand-over for shorter than it is."""
    experiment = published_levels(tmp_path)
    serving = Serving(early_token=True)
    early = Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1"), serving=serving)
    without_pd = Deployment(topology=parse_label("collocated-1xtp2"), serving=serving)
    for deployment, noted in ((early, True), (without_pd, False)):
        manifest = experiment.manifest.model_copy(update={"deployment": deployment})
        measured = experiment.model_copy(update={"manifest": manifest})
        sweep = measured_sweep(measured, None)
        assert ["its TTFT lacks the hand-over" in doubt for doubt in sweep.doubts] == [True] * noted
        assert len(sweep.levels) == 2
        if noted:
            with pytest.raises(StoreError, match=r"2 with early tokens \(--early-token\)"):
                measured_sweep(measured, None, fitted=True)
        else:
            assert len(measured_sweep(measured, None, fitted=True).levels) == 2


def test_runs_of_another_engine_are_noted_and_fit_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published_levels(tmp_path, backend="sglang")
    folder = str(tmp_path / "x_1xtp2")
    assert cli_plan.main(["--compare", folder]) == 0
    said = "x_1xtp2 was measured on sglang, but h100-vllm-0.11 describes vllm: give --hardware"
    assert said in capsys.readouterr().err
    words = ["--runs", folder, "--gpu", "H100", "--engine", "0.11", "--out", str(tmp_path / "out.yaml")]
    assert cli_calibrate.main(words) == 2
    assert "x_1xtp2 is of sglang, fits are of vllm; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (1, "1 of 3 repeats of concurrency 1 is left out: not valid"),
        (2, "2 of 3 repeats of concurrency 1 are left out: not valid"),
        (3, "concurrency 1 is left out: not valid"),
    ],
)
def test_the_repeats_that_are_left_out_are_counted(bad: int, said: str) -> None:
    experiment = load_experiment(Path(__file__).resolve().parents[2] / "bm_results" / "local-pack-vs-spread" / "pack")
    runs = tuple(
        run.model_copy(update={"validity": failing("x")}) if run.key.value == 1 and run.key.repeat < bad else run
        for run in experiment.runs
    )
    assert measured_sweep(experiment.model_copy(update={"runs": runs}), None).doubts == (f"pack, {said}",)


def test_a_sweep_of_which_nothing_can_be_predicted_gives_the_reason_of_every_level() -> None:
    """Levels that got less than was offered, and one that is not valid: both reasons, and not a missing TTFT."""
    folder = Path(__file__).parents[1] / "data" / "published" / "demo_itl2000_otl50_1xtp4"
    experiment = load_experiment(folder)
    rates = [run for run in experiment.runs if isinstance(run.load, Open)]

    def with_rate(run: Run, share: float) -> Run:
        whole = run.whole.model_copy(update={"requests_per_s": share * run.load.value})
        return run.model_copy(update={"whole": whole, "validity": Validity()})

    saturated = with_rate(rates[0], 0.5)
    bad = with_rate(rates[0], 1).model_copy(update={"validity": failing("x")})
    with pytest.raises(StoreError, match=r"\(1 saturated: below 80% of the requests/s that were offered\)"):
        measured_sweep(experiment.model_copy(update={"runs": (saturated,)}), "fresh")
    with pytest.raises(StoreError, match=r"\(1 saturated: .* and 1 not valid\)"):
        measured_sweep(experiment.model_copy(update={"runs": (saturated, bad)}), "fresh")
    assert (
        len(measured_sweep(experiment.model_copy(update={"runs": (saturated, with_rate(rates[0], 1))}), "fresh").levels)
        == 1
    )


def test_the_order_of_configurations_is_scored_per_workload_and_node() -> None:
    """1xtp2 serves least of all and is a quarter of a node: per node it serves most. Levels may come in any order."""
    truth = with_free(HARDWARE, "launch_ms")
    experiments = synthetic(truth, ["collocated-1xtp8", "collocated-2xtp4", "collocated-1xtp2"])
    points = [point for e in experiments for point in compare(truth, SHAPE, e, (0,))]
    ((lengths, ranking),) = rankings(experiments, points, node_gpus=8).items()
    assert lengths == "5000:250" and ranking and all(at.correlation == pytest.approx(1) for at in ranking)
    shuffled = [e.model_copy(update={"levels": e.levels[::-1]}) for e in experiments]
    assert rankings(shuffled, points, node_gpus=8) == {lengths: ranking}

    def curve(name: str, factor: float) -> list[PredictedPoint]:
        return [
            point.model_copy(update={"predicted": point.measured * (factor if point.metric == "requests/s" else 1)})
            for point in points
            if point.experiment == name
        ]

    turned = [*curve("collocated-1xtp8", 1), *curve("collocated-2xtp4", 1), *curve("collocated-1xtp2", 1 / 9)]
    (worse,) = rankings(experiments, turned, node_gpus=8).values()
    assert min(at.correlation for at in worse) < 1
    other = experiments[2].model_copy(update={"workload": Workload(input_tokens=10000)})
    assert rankings([*experiments[:2], other], points, node_gpus=8) == {}, "two of one workload, one of another"


def test_an_experiment_of_this_repository_is_calibrated_and_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Folders as `python -m pdlab experiment configs/sweeps/local-pack-vs-spread.yaml` leaves them: repeats,
    and one model, found without being named."""
    labels = {"pack": "pd-pack-p1xtp1-d1xtp1", "spread": "pd-spread-p1xtp1-d1xtp1", "collocated": "collocated-2xtp1"}
    runs = []
    for name, label in labels.items():
        deployment = Deployment(model="tiny-gptoss", topology=parse_label(label))
        runs.append(str(folders.write(tmp_path / name, deployment, loads=(1, 4), repeats=2, local=True)))
    out = tmp_path / "mine.yaml"
    words = ["--start", "cpu-vllm-0.29", "--rounds", "1", "--cross-validate", "--name", "mine", "--out", str(out)]
    assert cli_calibrate.main(["--runs", *runs, *words, "--days", "4.8,8,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ") and " concurrency " in line]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [name for name in labels for _ in range(2)]
    assert all("%" in row and " - " not in row for row in rows)
    assert any(line.startswith("each left out once: TPOT ") for line in lines)
    assert any("Spearman" in line or "no target" in line for line in lines)
    fitted = load_hardware(str(out))
    assert fitted.name == "mine" and fitted.fitted_on == tuple(labels)
    assert fitted.fit is not None and fitted.fit.model == "tiny-gptoss" and fitted.fit.gpu == "cpu"
    assert fitted.fit.version == "0.29" and fitted.stack == "vLLM 0.29.0, Ray 2.60.0"
    assert fitted.fit.tp == (1,) and fitted.fit.input_tokens == (512, 512) and fitted.fit.output_tokens == (64, 64)
    assert fitted.fit.modes == ("collocated", "pd-pack", "pd-spread") and fitted.fit.in_flight_per_gpu == (0.5, 2.0)
    assert fitted.constants["launch_ms"].source == cli_calibrate.CALIBRATED
    assert fitted.error is not None and fitted.error.points == 3, "without the lowest load of each"
    assert set(fitted.error.parts) == {"TPOT", "mean TTFT", "requests/s"}
    assert any(line.startswith("errors common to a configuration") for line in lines)
    assert fitted.error.percent("mean TTFT") == (fitted.error.ttft_percent, 8.0)
    held = [line.partition(":")[0] for line in lines if "90 % intervals, each experiment's" in line]
    assert held == ["without days", "with days, as predictions are given"]


class TestWhatAFitWasMadeOn:
    """It is read from the runs or named by a flag, whatever the file to start from is of."""

    SHEET = ("--data-sheet", "memory_gb=150.8,memory_gb_per_s=4800,tensor_tflops=989")

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unmoved(start: Hardware, *_: object, **__: object) -> Hardware:
            return start

        monkeypatch.setattr(cli_calibrate, "fit", unmoved)

    def calibrated(self, out: Path, *words: str) -> Hardware:
        assert cli_calibrate.main([*words, "--out", str(out)]) == 0
        return load_hardware(str(out))

    def refused(self, capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> str:
        capsys.readouterr()
        assert cli_calibrate.main([*words, "--out", str(out)]) == 2 and not out.exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    def test_it_is_what_the_runs_record(self, tmp_path: Path) -> None:
        run = run_on(tmp_path / "run", "H200", "0.29.0", gpus=4)
        made = self.calibrated(tmp_path / "theirs.yaml", "--runs", run, *self.SHEET)
        assert made.fit is not None and made.fit.gpu == made.gpu_type == made.gpu == "H200"
        assert (made.fit.model, made.fit.version, made.stack) == (MODEL, "0.29", "vLLM 0.29.0, Ray 2.60.0")
        assert (made.steps_in_flight, HARDWARE.steps_in_flight) == (2, 1), "vLLM 0.29 schedules asynchronously"
        shares = (made.value("memory_utilization"), HARDWARE.value("memory_utilization"))
        assert shares == (0.92, 0.9), "vLLM's default since 0.20"
        routed = [cli_calibrate._scheduled_as(HARDWARE, version).routers_count_ends for version in ("0.29", "0.16")]
        assert routed == [True, False], "of the newest Ray for that vLLM, where no run records its Ray"
        assert made.name == "theirs" and made.gpus_per_node == 4 and made.value("memory_gb") == 150.8
        assert made.fitted_on == ("run",) and made.error is None
        assert "H100" not in to_yaml(made).partition("constants:")[0]

    def test_a_gpu_whose_data_sheet_is_not_known_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run, out = run_on(tmp_path / "run", "H200", "0.29.0"), tmp_path / "out.yaml"
        assert "--data-sheet" in self.refused(capsys, out, "--runs", run)
        assert "tensor_tflops" in self.refused(capsys, out, "--runs", run, "--data-sheet", "memory_gb=150.8")
        home = run_on(tmp_path / "home", "H100", "0.29.0")
        assert self.calibrated(out, "--runs", home).gpu == HARDWARE.gpu

    def test_what_runs_do_not_record_is_from_flags(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "out.yaml"
        no_gpu, no_version = run_on(tmp_path / "a", None, "0.29.0"), run_on(tmp_path / "b", "H100", None)
        assert "--gpu" in self.refused(capsys, out, "--runs", no_gpu)
        assert "--engine" in self.refused(capsys, out, "--runs", no_version)
        assert "is not a version" in self.refused(capsys, out, "--runs", no_version, "--engine", "new")
        made = self.calibrated(out, "--runs", no_version, "--engine", "0.18.1")
        assert made.fit is not None and made.fit.version == "0.18" and made.stack == "vLLM 0.18"
        made = self.calibrated(tmp_path / "x.yaml", "--runs", no_gpu, "--gpu", "H100")
        assert made.fit is not None and made.fit.gpu == "H100"

    def test_contradictions_are_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "out.yaml"
        home, newer = run_on(tmp_path / "a", "H100", "0.11.0"), run_on(tmp_path / "b", "H100", "0.29.0")
        other = run_on(tmp_path / "c", "H200", "0.11.0")
        assert "0.11 and 0.29" in self.refused(capsys, out, "--runs", home, newer)
        assert "H100 and H200" in self.refused(capsys, out, "--runs", home, other, *self.SHEET)
        assert "--gpu H200" in self.refused(capsys, out, "--runs", home, "--gpu", "H200")
        assert "--engine 0.29" in self.refused(capsys, out, "--runs", home, "--engine", "0.29")
        assert "--model gpt-oss-20b" in self.refused(capsys, out, "--runs", home, "--model", "gpt-oss-20b")
        assert "cpu" in self.refused(capsys, out, "--runs", home, "--start", "cpu-vllm-0.29")
        assert "--rounds 0" in self.refused(capsys, out, "--runs", home, "--rounds", "0")

    def test_the_network_is_that_of_the_runs_if_it_is_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fast, slow = Nic(kind="infiniband", count=8, gbit_per_s=400), Nic(kind="ethernet", count=1, gbit_per_s=10)
        one = run_on(tmp_path / "one", "H100", "0.11.0", nic=slow)
        two = run_on(tmp_path / "two", "H100", "0.11.0", label="collocated-1xtp8", nic=slow)
        other = run_on(tmp_path / "other", "H100", "0.11.0", label="collocated-1xtp2", nic=fast)
        made = self.calibrated(tmp_path / "same.yaml", "--runs", one, two)
        assert made.wires is not None and (made.wires.network, made.wires.node_gb_per_s) == ("tcp", 1.25)
        assert made.fit is not None, "signed with it"
        assert self.calibrated(tmp_path / "both.yaml", "--runs", one, other).wires is None
        capsys.readouterr()
        spread = ["--explain", "pd-spread-p1xtp4-d1xtp4", "--concurrency", "8", "--hardware"]
        times_ms = []
        for hardware in ("h100-vllm-0.11", str(tmp_path / "same.yaml")):
            assert cli_plan.main([*spread, hardware]) == 0
            row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("concurrency 8"))
            times_ms.append(float(row.split()[5].replace(",", "")))
        assert times_ms[1] > 5 * times_ms[0], "KV cache crosses the runs' Ethernet"
        assert cli_plan.main(["--gpus", "16", "--concurrency", "1", "--hardware", str(tmp_path / "same.yaml")]) == 0
        assert "p5.48xlarge" not in capsys.readouterr().out

    def test_the_link_between_gpus_is_that_of_the_runs(self, tmp_path: Path) -> None:
        one = run_on(tmp_path / "one", "H100", "0.11.0", gpu_link="pcie")
        two = run_on(tmp_path / "two", "H100", "0.11.0", label="collocated-1xtp8", gpu_link="pcie")
        unstated = run_on(tmp_path / "unstated", "H100", "0.11.0", label="collocated-1xtp2")
        links = [
            made.fit.gpu_link
            for name, runs in (("pcie", (one, two)), ("type", (unstated,)))
            if (made := self.calibrated(tmp_path / f"{name}.yaml", "--runs", *runs)).fit is not None
        ]
        assert links == ["pcie", None]

    def test_engine_arguments_are_those_of_all_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        eager = {"enforce_eager": True, "max_num_seqs": 64}
        one = run_on(tmp_path / "one", "H100", "0.11.0", arguments=eager)
        two = run_on(tmp_path / "two", "H100", "0.11.0", label="collocated-1xtp8", arguments={"enforce_eager": True})
        plain = run_on(tmp_path / "plain", "H100", "0.11.0", label="collocated-1xtp2")
        out = tmp_path / "out.yaml"
        error = self.refused(capsys, out, "--runs", one, two, plain)
        assert "one has enforce_eager=true" in error and "plain has not" in error
        made = self.calibrated(out, "--runs", one, two)
        assert made.fit is not None and made.fit.engine_arguments == ("enforce_eager=true",)

    def test_rehearsed_runs_are_no_measurement(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        deployment = Deployment(model=MODEL, topology=parse_label("collocated-1xtp4"))
        rehearsal = {"hardware": "h100-vllm-0.11", "slow_down": 2.0}
        run = str(folders.write(tmp_path / "r", deployment, loads=(2,), repeats=1, rehearsal=rehearsal))
        assert "rehearsed" in self.refused(capsys, tmp_path / "out.yaml", "--runs", run)


def test_repeats_are_one_row_of_their_means() -> None:
    def point(predicted: float, true: float, load: str = "concurrency 4") -> PredictedPoint:
        return PredictedPoint(experiment="a", load=load, metric="requests/s", predicted=predicted, measured=true)

    (row,) = table([point(10, 9), point(12, 11), point(14, 13)]).splitlines()[2:]
    assert row == "| a | concurrency 4 | - | - | 12.00 / 11.00 (+9 %) |"
    # Every repeat is an error of its own in the median, and the lowest load is left out with all of them.
    points = [point(10, 5), point(10, 5), point(10, 10, "concurrency 8"), point(12, 10, "concurrency 8")]
    assert median_errors(points) == {"requests/s": pytest.approx(10)}


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli_calibrate.main(["--runs", str(tmp_path / "none")]) == 2
    folder = str(folders.write(tmp_path / "pack", Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1"))))
    other = str(folders.write(tmp_path / "tiny", folders.deployments(1)[0]))
    assert cli_calibrate.main(["--runs", folder, "--model", "no-such-model"]) == 2
    assert cli_calibrate.main(["--runs", folder, other]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "does not exist" in lines[0] and "no-such-model" in lines[1]
    assert "gpt-oss-120b and tiny-gptoss" in lines[2]


def test_several_recorded_models_are_refused_whatever_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("org/model-a", "org/model-b"):
        published_levels(tmp_path / name, model_id=name)
    runs = [str(tmp_path / "org" / name / "x_1xtp2") for name in ("model-a", "model-b")]
    assert cli_calibrate.main(["--runs", *runs, "--model", MODEL, "--rounds", "0"]) == 2
    assert "the runs are of org/model-a and org/model-b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recorded", "noted"), [("org/other", True), (MODEL, False), (f"/weights/{MODEL}", False), (None, False)]
)
def test_a_recorded_name_that_is_not_known_to_be_the_models_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: str | None, noted: bool
) -> None:
    published_levels(tmp_path, model_id=recorded)
    runs = ["--runs", str(tmp_path / "x_1xtp2"), "--rounds", "0"]
    assert cli_calibrate.main([*runs, "--model", MODEL]) == 0
    assert (f"note: x_1xtp2 is of {recorded}, fitted as {MODEL}" in capsys.readouterr().err) is noted


def test_where_fits_start() -> None:
    """The round numbers leave free what was fitted and fix what was not; a coarse start is within its ratio."""
    start = load_hardware("h100-start")
    assert start.error is None and not start.fitted_on
    for name, constant in HARDWARE.constants.items():
        assert start.constants[name].basis == constant.basis, name
        if constant.basis != "fitted":
            assert start.value(name) == constant.value, name
    rough = calibration.rounded_start(HARDWARE)
    fitted = [name for name, constant in HARDWARE.constants.items() if constant.basis == "fitted"]
    for name in fitted:
        assert 2.5**-0.5 - 1e-9 <= rough.value(name) / HARDWARE.value(name) <= 2.5**0.5 + 1e-9, name
        assert float(f"{rough.value(name):.0e}"[0]) in (1, 2, 5), name
    assert rough.with_values({name: HARDWARE.value(name) for name in fitted}) == HARDWARE


def test_hardware_files_have_the_sources_of_their_constants() -> None:
    for name, constant in HARDWARE.constants.items():
        assert constant.source and constant.unit, name
    assert Hardware.model_validate(yaml.safe_load(to_yaml(HARDWARE))) == HARDWARE
    with pytest.raises(UsageError):
        load_hardware("nothing-of-that-name")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"published runs are not there ({SHARED})")
def test_published_runs_left_out_are_predicted() -> None:
    """Fitted to three collocated experiments and one PD, the fourth collocated and the 10k:500 one are predicted."""
    folders = {path.name.removeprefix("gptoss_"): path for path in SHARED.iterdir() if path.is_dir()}
    labels = ("1xtp8", "8xtp1", "4xtp2", "1xtp2-1xtp2")
    experiments = {name: measured_sweep(load_experiment(path), "repeated") for name, path in folders.items()}
    inside = [e for name, e in experiments.items() if name.endswith(labels)]
    assert len(inside) == 4
    fitted = fit(HARDWARE, SHAPE, inside, seeds=(0,), rounds=2)
    outside = [p for name, e in experiments.items() if not name.endswith(labels) for p in compare(fitted, SHAPE, e)]
    errors = median_errors(outside)
    assert errors["TPOT"] < 6
    assert errors["mean TTFT"] < 20
    assert errors["requests/s"] < 6


def test_the_folder_of_a_whole_experiment_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    whole = str(Path(__file__).resolve().parents[2] / "bm_results" / "local-pack-vs-spread")
    assert cli_calibrate.main(["--runs", whole, "--rounds", "0", "--start", "cpu-vllm-0.29"]) == 0
    printed = capsys.readouterr()
    assert all(f"| {name} | concurrency 1 |" in printed.out for name in ("collocated", "pack", "spread"))
    assert printed.err == "note: collocated, 1 of 3 repeats of concurrency 8 is left out: not valid\n"
    assert cli_calibrate.main(["--runs", whole, "--rounds", "0"]) == 0
    assert "spread was measured on engines on CPUs, but h100-vllm-0.11 describes H100" in capsys.readouterr().err


def test_the_errors_of_the_shipped_cpu_fit_are_those_on_the_shipped_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names the command that prints them."""
    error = load_hardware("cpu-vllm-0.29").error
    assert error is not None and not error.parts
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    words = re.search(r"python -m pdlab calibrate (.*?);", error.how)
    assert words is not None
    given = [
        path for word in words[1].split() for path in (map(str, sorted(Path().glob(word))) if "*" in word else [word])
    ]
    assert cli_calibrate.main(given) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    claimed = [error.tpot_percent, error.ttft_percent, error.requests_per_s_percent]
    assert first.startswith("cpu-vllm-0.29 as it is:")
    assert [float(value) for value in re.findall(r"([\d.]+) %", first)] == claimed
    assert error.points == len([row for row in rows if " concurrency " in row]) - 3, "without the lowest of each"
    row = re.search(r"^\| `cpu-vllm-0.29` as it is .*$", (root / "docs" / "model.md").read_text(), re.MULTILINE)
    assert row and [float(cell.strip(" %")) for cell in row[0].split("|")[2:5]] == claimed


class TestVariedLengths:
    def experiment(self, folder: Path, workload: Workload) -> Experiment:
        deployment = Deployment(model="tiny-gptoss", topology=parse_label("collocated-2xtp1"))
        stored = load_experiment(folders.write(folder, deployment, loads=(2,), repeats=2))
        key = RunKey(kind="concurrency", value=2, repeat=1, look=3)
        run = stored.runs[1].model_copy(
            update={"workload": workload, "load": Closed(concurrency=2, per_gpu=1), "key": key}
        )
        return stored.model_copy(update={"runs": (run,)})

    def test_levels_are_simulated_with_the_lengths_that_they_had(self, tmp_path: Path) -> None:
        workload = Workload(input_tokens=512, output_tokens=64, lengths=parse_lengths("uniform:0.8-1.0"))
        sweep = measured_sweep(self.experiment(tmp_path / "x", workload), "fresh")
        sent = Level(load=Closed(concurrency=2, per_gpu=1), repeat=1, look=3, num_requests=40, seed=0)
        assert sweep.workload.draw(sweep.levels[0]) == workload.draw(sent)

    def test_lengths_of_a_file_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "p.csv").write_text("input_tokens,output_tokens\n500,60\n")
        workload = Workload(lengths=parse_lengths(f"file:{tmp_path}/p.csv"))
        stored = Workload.model_validate_json(workload.model_dump_json())
        with pytest.raises(StoreError, match=r"^x: cannot be simulated: the lengths in p.csv are not kept"):
            measured_sweep(self.experiment(tmp_path / "x", stored), "fresh")
