"""Which band a prediction by tabulated steps has, and where there is none: by codes and dimensions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from support import published
from support.made_up_tables import made_up_tables
from support.model_folders import LLAMA_70B, model_folder

from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Collocated, Deployment, Pool, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.findings import found
from pdlab.core.rendering import macro
from pdlab.core.version import STACK
from pdlab.core.workload import Closed, Load, Open, Slo, Workload
from pdlab.plan import TEMPLATES, csv_predictions, error_catalog, stack_bands
from pdlab.plan.comparison import compared_experiment
from pdlab.plan.csv_rows import read
from pdlab.plan.error_catalog import error_after, public_errors, public_models, stack_of, with_stack_prior
from pdlab.plan.extrapolation import OutsideFit, major_minor, outside_fit
from pdlab.plan.pd_catalog import public_pd, with_pd_correction
from pdlab.plan.rate_matching import RateMatcher
from pdlab.plan.scenario import Scenario
from pdlab.plan.stack_bands import OTHER_WEIGHTS, StackBand, band_of
from pdlab.plan.stack_prior import LEAST_STACKS
from pdlab.plan.step_findings import launched_stack, step_findings
from pdlab.sim import aic
from pdlab.sim.computed_hardware import beside, computed
from pdlab.sim.hardware import FitDomain, Hardware, Speculation, TableMode, load_hardware
from pdlab.sim.simulator import Prompts, simulate
from pdlab.sim.step_source import Correction
from pdlab.sim.step_time import kv_capacity_tokens

pytestmark = pytest.mark.usefixtures("tabulated")
GPT_OSS = require_shape("gpt-oss-120b")
OTHER = require_shape("gpt-oss-20b")
WORKLOAD = Workload(input_tokens=1024, output_tokens=1024)


def band(
    gpu: str = "H200",
    *,
    shape: ModelShape = GPT_OSS,
    engine: str = "vllm",
    version: str = "0.18",
    label: str = "collocated-1xtp4",
    workload: Workload = WORKLOAD,
    load: Load | None = None,
    in_flight: float = 4.0,
    **arguments: object,
) -> StackBand:
    hardware = with_stack_prior(computed(gpu, engine, version), shape)
    deployment = Deployment(model=shape.name, topology=parse_label(label), engine_kwargs=arguments)
    outside = outside_fit(hardware, shape, deployment, [workload])
    return band_of(hardware, shape, deployment, workload, load or Closed(concurrency=16), [in_flight], outside)


def codes(found: StackBand) -> list[str]:
    return [each.code for each in found.findings]


@pytest.mark.parametrize("label", ["collocated-1xtp4", "pd-spread-p1xtp4-d1xtp4"])
def test_engine_arguments_that_no_public_stack_is_known_to_have(label: str) -> None:
    assert band(max_num_seqs=64, max_num_batched_tokens=4096).error is not None
    found = band(label=label, async_scheduling=False)
    assert found.error is None and "async_scheduling=false" in found.findings[0].text
    assert codes(found) == ["no_band"]


def test_a_stack_like_the_public_ones_has_their_band() -> None:
    found = band()
    assert found.error is not None and codes(found) == ["band_of_public_stacks"]
    assert found.findings[0].numbers["unseen"] == "nothing"


def test_a_version_of_no_public_stack_widens_it_and_is_named() -> None:
    known, newer = band(), band(version="0.99")
    assert known.error is not None and newer.error is not None
    widths = [each.error.parts["TPOT"].common_percent for each in (known, newer) if each.error]
    assert widths[0] < widths[1]
    assert newer.findings[0].numbers["unseen"] == "vllm 0.99"


def test_nine_stacks_at_least_make_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = public_errors()
    for count, banded in ((LEAST_STACKS - 1, False), (LEAST_STACKS, True)):
        vllm = [each for each in catalog.stacks if each.engine == "vllm"][-count:]
        few = catalog.model_copy(update={"stacks": tuple(vllm)})
        for module in (stack_bands, error_catalog):
            monkeypatch.setattr(module, "public_errors", lambda few=few: few)
        assert (band().error is not None) is banded


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (lambda: band("L40S"), "L40S"),
        (lambda: band(engine="trtllm", version="1.3"), "2 of them are"),
        (lambda: band(shape=GPT_OSS.model_copy(update={"weight_dtype": "int4"})), "weights"),
        (lambda: band(label="pd-pack-p1xtp2-d1xtp2"), "pd"),
        (lambda: band(engine="sglang"), "sglang"),
        (lambda: band(load=Open(rate_rps=1)), "closed loops"),
        (lambda: band(label="collocated-1xtp16"), "TP"),
        (lambda: band(workload=Workload(input_tokens=60_000, output_tokens=500)), "input tokens"),
        (lambda: band(in_flight=500.0), "in flight per GPU"),
    ],
)
def test_where_no_stack_like_it_was_left_out_there_is_none(found: object, why: str) -> None:
    assert callable(found)
    made = found()
    assert made.error is None and codes(made) == ["no_band"]
    assert why in str(made.findings[0].numbers["why"])


@pytest.mark.parametrize(("held", "banded"), [(0.90, True), (0.85, False), (None, False)])
def test_a_model_that_nobody_measured_has_a_band_where_those_of_left_out_models_held(
    monkeypatch: pytest.MonkeyPatch, held: float | None, banded: bool
) -> None:
    shares = {"model": {"TPOT": 0.97} if held is None else {"TPOT": 0.97, "mean TTFT": held}}
    catalog = public_errors().model_copy(update={"left_out": shares})
    for module in (stack_bands, error_catalog):
        monkeypatch.setattr(module, "public_errors", lambda: catalog)
    found, known = band(shape=OTHER), band()
    assert known.error is not None
    if not banded:
        assert found.error is None and codes(found) == ["no_band"]
        assert "left-out model" in str(found.findings[0].numbers["why"])
        return
    assert found.error is not None and found.findings[0].numbers["unseen"] == "gpt-oss-20b"
    widths = [each.error.parts["TPOT"].common_percent for each in (known, found) if each.error]
    assert widths[0] < widths[1]


def test_measured_levels_have_the_errors_of_stacks_with_as_many() -> None:
    hardware = computed("H200", "vllm", "0.18").model_copy(update={"error": error_after(3)})
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))

    def of(*dimensions: str) -> StackBand:
        outside = [OutsideFit(each, "") for each in dimensions]  # type: ignore[arg-type]
        return band_of(hardware, GPT_OSS, deployment, WORKLOAD, Closed(concurrency=16), [4.0], outside)

    assert of("TP", "input length", "load").error == error_after(3)
    assert codes(of("model")) == ["no_band"]
    assert "GPU" in str(of("GPU", "TP").findings[0].numbers["why"])


def measured() -> Hardware:
    """Tables of H200 that three levels of TP 4 corrected."""
    fit = FitDomain(
        model="gpt-oss-120b",
        gpu="H200",
        version="0.18",
        modes=("collocated", "pd-pack"),
        tp=(4,),
        input_tokens=(1024, 1024),
        output_tokens=(1024, 1024),
        in_flight_per_gpu=(1.0, 8.0),
    )
    return computed("H200", "vllm", "0.18").model_copy(update={"error": error_after(3), "fit": fit})


def test_measured_levels_give_no_band_to_what_no_public_stack_is() -> None:
    deployment = Deployment(topology=parse_label("pd-pack-p1xtp4-d1xtp4"))
    found = band_of(measured(), GPT_OSS, deployment, WORKLOAD, Closed(concurrency=16), [2.0], ())
    assert found.error is None and "pd-pack" in str(found.findings[0].numbers["why"])


@pytest.mark.parametrize(
    ("folder", "load", "prompts", "output_tokens", "why"),
    [
        ("x_1xtp1", {}, "fresh", 1024, []),  # the levels have another TP, and another load
        ("x_1xtp1", {}, "fresh", 100, ["128 to 8192 output tokens, not 100"]),
        ("x_1xtp1", {}, "repeated", 1024, ["prefix caches"]),
        ("x_1xtp1", {"max_concurrency": None, "request_rate": 1.0}, "fresh", 1024, ["closed loops"]),
        ("x_1xtp1-1xtp1", {}, "fresh", 1024, ["pd-pack with vllm"]),
    ],
)
def test_a_comparison_is_judged_as_a_prediction_is(
    folder: str, load: dict[str, object], prompts: Prompts, output_tokens: int, why: list[str], tmp_path: Path
) -> None:
    files = {
        f"c{n}": published.content(
            n,
            model_id="gpt-oss-120b",
            total_input_tokens=n * 20 * 1024,
            total_output_tokens=n * 20 * output_tokens,
            **load,
        )
        for n in (8, 16)
    }
    found = compared_experiment(published.write(tmp_path / folder, files), measured(), None, prompts, {}).outside
    assert [each.dimension for each in found] == ["errors"] * len(why)
    assert all(part in each.text for part, each in zip(why, found, strict=True))


@pytest.mark.parametrize("mode", ["HYBRID", "EMPIRICAL", "SOL"])
@pytest.mark.parametrize("own_levels", [True, False])
def test_calculated_step_times_have_no_band_of_measured_ones(mode: str, own_levels: bool) -> None:
    hardware = measured() if own_levels else computed("H200", "vllm", "0.18")
    assert hardware.steps is not None
    other = hardware.model_copy(update={"steps": hardware.steps.model_copy(update={"mode": mode})})
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    given = (deployment, WORKLOAD, Closed(concurrency=16), [4.0], ())
    assert band_of(hardware, GPT_OSS, *given).error is not None
    found = band_of(other, GPT_OSS, *given)
    assert found.error is None and mode in str(found.findings[0].numbers["why"])


def test_a_ranking_has_a_verdict_only_where_there_is_a_band() -> None:
    """The ranking's intervals are of the same errors: P:D and Poisson arrivals have none on tables."""
    scenario = Scenario(measured(), GPT_OSS, WORKLOAD, Slo(ttft_s=2.0, tpot_s=0.02))
    collocated, split = (
        Deployment(model="gpt-oss-120b", topology=parse_label(label))
        for label in ("collocated-1xtp4", "pd-pack-p1xtp4-d1xtp4")
    )
    assert (
        scenario.outside(collocated) == () and scenario.outside(collocated, scenario.outcome(collocated, CLOSED)) == ()
    )
    assert [each.dimension for each in scenario.outside(split)] == ["errors"]
    cached = replace(scenario, prefix_hit_rate=0.5)
    assert [each.dimension for each in cached.outside(collocated)] == ["errors"]
    arrivals = scenario.outcome(collocated, Open(rate_rps=1.0), 5.0)
    assert [each.dimension for each in scenario.outside(collocated, arrivals)] == ["errors"]


CLOSED = Closed(concurrency=8)


@pytest.mark.parametrize(
    ("label", "load", "banded"),
    [
        ("collocated-1xtp4", CLOSED, True),
        ("collocated-1xtp2", CLOSED, True),  # the errors include those of a TP that was not measured
        ("collocated-1xtp2", Open(rate_rps=1.0), False),
        ("pd-pack-p1xtp4-d1xtp4", CLOSED, False),
    ],
)
def test_a_ranking_and_a_predicted_row_judge_alike(label: str, load: Closed | Open, banded: bool) -> None:
    deployment = Deployment(model="gpt-oss-120b", topology=parse_label(label))
    scenario = Scenario(measured(), GPT_OSS, WORKLOAD, Slo(ttft_s=2.0, tpot_s=0.02))
    assert (scenario.outside(deployment, scenario.outcome(deployment, load, 5.0)) == ()) is banded
    rows = "config,isl,osl,concurrency,request_rate,num_prompts,prompts\n"
    given = f"{load.concurrency}," if isinstance(load, Closed) else f",{load.rate_rps}"
    (row,) = csv_predictions.predict(
        read(f"{rows}{label},1024,1024,{given},24,fresh\n", "rows.csv", "gpt-oss-120b").requested, measured(), (0,)
    )
    assert (row["predicted_mean_tpot_ms_low"] != "") is banded
    assert ("extrapolated" in row[csv_predictions.NOTE] or "without a band" in row[csv_predictions.NOTE]) is not banded


def test_levels_that_contradict_their_correction_leave_no_band() -> None:
    """`pdlab calibrate` then writes no errors. Those of stacks without measured levels are not its errors either."""
    contradicting = computed("H200", "vllm", "0.18").with_correction(Correction(fitted_levels=6))
    given = (Deployment(topology=parse_label("collocated-1xtp4")), WORKLOAD, Closed(concurrency=16), [4.0], ())
    found = band_of(contradicting, GPT_OSS, *given)
    assert found.error is None and codes(found) == ["no_band"]


def test_a_fit_has_its_own_band_inside_and_none_outside() -> None:
    home, deployment = load_hardware("h100-vllm-0.11"), Deployment(topology=parse_label("collocated-1xtp4"))
    inside = band_of(home, GPT_OSS, deployment, Workload(), Closed(concurrency=16), [4.0], ())
    assert inside == StackBand(home.error)
    beyond = band_of(home, GPT_OSS, deployment, Workload(), Closed(concurrency=16), [4.0], [OutsideFit("TP", "")])
    assert beyond == StackBand(None)


def test_a_stack_that_is_among_the_public_ones_gets_its_own_correction() -> None:
    hardware = computed("H200", "vllm", "0.18")
    known = next(each for each in public_errors().stacks if each.stack == stack_of(hardware, GPT_OSS))
    steps = with_stack_prior(hardware, GPT_OSS).steps
    assert steps is not None
    assert math.log(steps.correction.prefill_factor) == pytest.approx(known.correction[2], abs=0.1)


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Meta-Llama-3.1-70B-Instruct", "prod-model"])
def test_another_checkpoint_of_a_known_model_is_that_model(tmp_path: Path, name: str) -> None:
    hardware = computed("H100", "vllm", "0.18")
    shape = require_shape(model_folder(tmp_path / name, LLAMA_70B))
    tuned = shape.model_copy(update={"weight_dtype": "fp8"})
    assert stack_of(hardware, tuned).model == "Llama-3.1-70B fp8"
    assert stack_of(hardware, shape).model == "Llama-3.1-70B"
    assert public_errors().unseen(stack_of(hardware, tuned)) == ()
    found = band(shape=tuned)
    assert found.error is not None and found.findings[0].numbers["unseen"] == "nothing"


def test_a_format_that_only_the_name_has_leaves_no_band(tmp_path: Path) -> None:
    """Its weights and steps are of 16 bits then. With the file that has the format there is a band."""
    fp8 = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    for number, (name, quantisation) in enumerate((("Llama-70B", {}), ("Llama-70B-FP8", {}), ("Llama-70B-FP8", fp8))):
        folder = model_folder(tmp_path / str(number) / name, LLAMA_70B)
        if quantisation:
            (Path(folder) / "hf_quant_config.json").write_text(json.dumps(quantisation))
        shape = require_shape(folder)
        assert (band(shape=shape).error is not None) is (number != 1)
        hardware = measured().model_copy(update={"fit": None})
        deployment = Deployment(topology=parse_label("collocated-1xtp4"))
        of_levels = band_of(hardware, shape, deployment, WORKLOAD, None, [], ())
        assert of_levels.unlike == ((OTHER_WEIGHTS,) if number == 1 else ())
        apart = band(shape=shape, label="pd-spread-p1xtp4-d1xtp4")
        assert (OTHER_WEIGHTS in apart.unlike) is (number == 1)


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Llama-3.1-70B-pruned"])
def test_a_name_makes_no_model_a_known_one(tmp_path: Path, name: str) -> None:
    pruned = require_shape(model_folder(tmp_path / name, LLAMA_70B, num_hidden_layers=60))
    assert public_errors().unseen(stack_of(computed("H100", "vllm", "0.18"), pruned)) == ("model",)
    assert public_pd().unseen(stack_of(computed("H100", "vllm", "0.18"), pruned))[0] == "model"


def test_every_model_of_public_points_has_numbers() -> None:
    names = {each.model.split()[0] for each in public_errors().stacks} | {each.model for each in public_pd().stacks}
    assert names == set(public_models().models)
    for model, name in (("gpt-oss-120b", "gpt-oss-120b"), ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3")):
        assert public_models().name_of(require_shape(model)) == name


def test_a_file_that_names_no_version_is_of_the_current_tables() -> None:
    hardware = computed("H200", "vllm", "0.24")
    assert hardware.steps is not None
    by_hand = hardware.steps.model_copy(update={"version": "current", "engine_version": None})
    plain = hardware.model_copy(update={"steps": by_hand})
    first, *_ = step_findings(plain, GPT_OSS)
    assert first.code == "tables_of_version" and first.numbers["tables"] == "0.24.0"
    assert stack_of(plain, GPT_OSS).version == "0.24"
    later = hardware.model_copy(update={"steps": by_hand.model_copy(update={"engine_version": "0.24"})})
    assert step_findings(later, GPT_OSS)[0].code == "tables_of_version"


def test_a_host_time_of_unknown_spread() -> None:
    hardware = computed("H200", "vllm", "0.18")
    for correction, spread in ((Correction(host_ms=1.0), "not known"), (known_correction(hardware), "1 ms")):
        findings = step_findings(hardware.with_correction(correction), GPT_OSS)
        assert [each.numbers["spread"] for each in findings if each.code == "host_time"] == [spread]


@pytest.mark.parametrize(("version", "sequence_us"), [("0.10", 27), ("0.29", 7)])
def test_the_time_of_a_sequence_is_told(version: str, sequence_us: float) -> None:
    """Two versions may have the same time of a step: a batch tells them apart."""
    hardware = with_stack_prior(computed("H200", "vllm", version, bare=True), GPT_OSS)
    both = [Deployment(topology=parse_label(label)) for label in ("collocated-1xtp4", PD)]
    told = [each for each in step_findings(hardware, GPT_OSS, both) if each.code in ("host_time", "steps_of_pd")]
    assert len(told) == 2 and all(f"{sequence_us} us per decoding sequence" in each.text for each in told)


@pytest.mark.parametrize("label", ["collocated-1xtp8", "collocated-1xtp16"])
def test_an_engine_over_several_nodes_is_told_by_which_link(label: str) -> None:
    """The tables know the network. Fitted constants do not."""
    requested = read(f"config,itl,otl,concurrency\n{label},1024,128,4\n", "x").requested
    for hardware, words in (
        (computed("GB200", "vllm", "0.24"), "with the link that the tables have between nodes of GB200"),
        (load_hardware("h100-vllm-0.11"), "as if NVLink joined them"),
    ):
        (found,) = csv_predictions.predict(requested, hardware)
        over_nodes = int(label.rpartition("tp")[2]) > hardware.gpus_per_node
        assert (words in found[csv_predictions.NOTE]) is over_nodes
        assert ("NVLink" in found[csv_predictions.NOTE]) is (over_nodes and hardware.steps is None)


def known_correction(hardware: Hardware) -> Correction:
    """Of vLLM 0.18, in the host's file."""
    assert hardware.steps is not None
    return hardware.steps.correction


@pytest.mark.parametrize(
    ("mode", "calculated"), [("SOL", True), ("EMPIRICAL", True), ("HYBRID", False), ("SILICON", False)]
)
def test_calculated_step_times_are_a_finding(mode: TableMode, calculated: bool) -> None:
    findings = step_findings(computed("H200", mode=mode), GPT_OSS, [Deployment(topology=Collocated(pool=Pool(tp=4)))])
    assert ("step_times_calculated" in [each.code for each in findings]) is calculated


ROWS = "tp,isl,osl,concurrency,num_prompts\n"


def predicted(hardware: Hardware, *rows: str) -> list[dict[str, object]]:
    table = read(ROWS + "".join(f"{row}\n" for row in rows), "rows.csv", "gpt-oss-120b")
    return csv_predictions.predict(table.requested, hardware, seeds=(0, 1))


def test_a_predicted_row_has_the_band_and_what_it_rests_on() -> None:
    (row,) = predicted(computed("H200", "vllm", "0.18"), "4,1024,1024,8,24")
    low, value, high = (float(str(row[f"predicted_mean_tpot_ms{end}"])) for end in ("_low", "", "_high"))
    assert low < value < high
    assert math.log(high / value) == pytest.approx(math.log(value / low), rel=0.01)
    assert "public stacks" in str(row[csv_predictions.NOTE])


def test_a_row_with_a_band_is_not_called_extrapolated() -> None:
    banded, beyond = predicted(computed("H200", "vllm", "0.18"), "4,1024,1024,8,24", "4,60000,1024,8,24")
    assert "extrapolated" not in str(banded[csv_predictions.NOTE])
    assert "extrapolated: no measured run on H200" in str(beyond[csv_predictions.NOTE])


def test_every_reason_for_no_band_is_named() -> None:
    """Another GPU, lengths, TP and load, and an engine argument; near saturation hides none of them."""
    found = band(
        "L40S",
        label="collocated-1xtp16",
        workload=Workload(input_tokens=60_000, output_tokens=30_000),
        load=Open(rate_rps=1),
        in_flight=500.0,
        async_scheduling=False,
    )
    reasons = "; ".join(found.unlike)
    for each in ("L40S", "input tokens", "output tokens", "in flight", "TP is", "closed loops", "async_scheduling"):
        assert reasons.count(each) == 1, each
    split = band(engine="trtllm", label="pd-spread-p1xtp4-d1xtp4", workload=Workload(input_tokens=60_000))
    assert "input tokens" in "; ".join(split.unlike) and len(split.unlike) > 1
    hardware = computed("H100", "vllm", "0.18").with_values({"overhead_gb": 19.0})
    (full,) = predicted(hardware, "2,40000,1024,64,128")
    note = str(full[csv_predictions.NOTE])
    assert "near saturation" in note and "input tokens, not 40000" in note


def test_a_plan_of_tables_names_lengths_that_no_public_point_has() -> None:
    long = Workload(input_tokens=60_000, output_tokens=1000)
    deployment = Deployment(model="gpt-oss-120b", topology=parse_label("collocated-1xtp4"))
    scenario = Scenario(computed("H200", "vllm", "0.18"), GPT_OSS, long, Slo(tpot_s=0.02))
    outside = scenario.outside(deployment)
    assert [each.dimension for each in outside] == ["no fit", "errors"] and "60000" in outside[1].text


def test_a_row_of_another_version_than_the_plan_has_no_band() -> None:
    columns = ROWS.strip() + ",framework,framework_version\n"
    table = read(columns + "4,1024,1024,8,24,vllm,0.18.1\n4,1024,1024,8,24,vllm,0.11.0\n", "rows.csv", "gpt-oss-120b")
    same, other = csv_predictions.predict(table.requested, computed("H200", "vllm", "0.18"), seeds=(0,))
    assert same["predicted_mean_tpot_ms_low"] != "" and other["predicted_mean_tpot_ms_low"] == ""
    assert other["predicted_mean_tpot_ms"] != "" and "vllm 0.11" in str(other[csv_predictions.NOTE])


def test_prompts_that_caches_answer_have_no_band() -> None:
    hardware = computed("H200", "vllm", "0.18")
    rows = ROWS.strip() + ",prompts\n" + "".join(f"4,1024,1024,{n},48,{{0}}\n" for n in (4, 8))
    fresh, repeated = (
        csv_predictions.predict(read(rows.format(how), "rows.csv", "gpt-oss-120b").requested, hardware, seeds=(0,))[1]
        for how in ("fresh", "repeated")
    )
    assert fresh["predicted_mean_tpot_ms_low"] != "" and repeated["predicted_mean_tpot_ms_low"] == ""
    assert "prefix caches" in str(repeated[csv_predictions.NOTE])


def test_a_row_beyond_the_tables_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made_up_tables(8)
    short = whole.model_copy(update={"limits": whole.limits.model_copy(update={"context": 4096.0})})
    monkeypatch.setattr(aic, "tabulate", lambda *_: short)
    far, near = predicted(computed("B200", "vllm", "0.19"), "8,8192,1024,4,8", "8,2048,1024,4,8")
    note = found("step_times_extrapolated", times=(8192 + 1024) / 4096).text
    assert note in str(far[csv_predictions.NOTE])
    assert note.partition(":")[0] not in str(near[csv_predictions.NOTE])


def test_near_saturation_a_row_has_a_note_and_no_band() -> None:
    """A prompt of 8,192 tokens and its answer are a fortieth of the KV memory: 40 of them wait, 36 might, 24 do not."""
    hardware = computed("H100", "vllm", "0.18").with_values({"overhead_gb": 19.0})
    capacity = kv_capacity_tokens(hardware, GPT_OSS, Pool(tp=2))
    fits = capacity / 8700
    rows = predicted(
        hardware, *(f"2,8192,1024,{round(share * fits)},{3 * round(share * fits)}" for share in (1.3, 0.93, 0.6))
    )
    for row, near in zip(rows, (True, True, False), strict=True):
        assert ("near saturation" in str(row[csv_predictions.NOTE])) is near
        ends = [value for name, value in row.items() if name.endswith(("_low", "_high"))]
        assert len(ends) == 6 and all((value == "") is near for value in ends)
        assert row["predicted_mean_ttft_ms"] != ""


PD, MEAN_TTFT = "pd-spread-p1xtp4-d2xtp4", "predicted_mean_ttft_ms"


def pd_band(
    engine: str = "trtllm",
    gpu: str = "B200",
    load: Load | None = None,
    *,
    ray: bool = False,
    label: str = PD,
    dtype: str = "fp8",
) -> StackBand:
    shape = require_shape("deepseek-v3").model_copy(update={"weight_dtype": dtype})
    stack = next(each for each in public_pd().stacks if (each.engine, each.gpu) == ("trtllm", gpu))
    hardware = with_pd_correction(computed(gpu, engine, stack.version, bare=not ray), shape)
    deployment = Deployment(model=shape.name, topology=parse_label(label))
    outside = outside_fit(hardware, shape, deployment, [WORKLOAD])
    return band_of(hardware, shape, deployment, WORKLOAD, load or Closed(concurrency=16), [4.0], outside)


def test_engines_of_pd_without_ray_have_the_band_of_public_stacks_of_pd() -> None:
    found = pd_band()
    assert found.error is not None and codes(found) == ["band_of_public_stacks"]
    assert found.findings[0].numbers == {"stacks": len(public_pd().stacks), "unseen": "nothing"}
    collocated = band()
    assert collocated.error is not None
    widths = [each.parts["mean TTFT"].level_percent for each in (found.error, collocated.error)]
    assert widths[0] > widths[1], "rows of P:D state less of what ran"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (lambda: pd_band(ray=True), "pd"),
        (lambda: pd_band("vllm"), "of P:D is of vllm"),
        (lambda: pd_band(load=Open(rate_rps=1)), "closed loops"),
        (lambda: pd_band(label="pd-spread-p1xtp64-d1xtp64"), "their engines on B200 have at most 8 GPUs, not 64"),
        (lambda: pd_band(gpu="H200", label="pd-spread-p1xtp8-d1xtp16"), "on H200 have at most 8 GPUs, not 16"),
        (lambda: pd_band(gpu="H200", label="pd-spread-p1xtp8-d1xdp32ep"), "on H200 have at most 8 GPUs, not 32"),
        (lambda: pd_band(dtype="bfloat16"), "their weights are fp4, fp8, not bfloat16"),
    ],
)
def test_pd_unlike_the_public_points_has_none(found: object, why: str) -> None:
    assert callable(found)
    made = found()
    assert made.error is None and why in str(made.findings[0].numbers["why"])


def test_an_engine_over_two_nodes_has_a_band_where_public_ones_were() -> None:
    wide = pd_band(gpu="H100", label="pd-spread-p1xtp16-d1xtp16")
    assert wide.error is not None


def test_engines_of_pd_without_ray_have_the_correction_of_public_stacks_of_pd() -> None:
    """Not behind Ray, whose path is another, and not where levels were measured."""
    bare, ray = computed("B200", "trtllm", bare=True), computed("B200", "trtllm")
    known = public_pd().correction("trtllm", "fp8")
    shape = GPT_OSS.model_copy(update={"weight_dtype": "fp8"})
    corrected = with_pd_correction(bare, shape)
    both = [Deployment(topology=parse_label(label)) for label in ("collocated-1xtp4", PD)]
    collocated, apart = (corrected.serving(each) for each in both)
    assert apart.steps is not None and apart.steps.correction.prefill_factor == known.prefill_factor
    assert apart.value("pd_overhead_ms") == known.path_ms
    for version, sequence_us in (("0.12", 27.0), ("0.18", 7.0)):
        of_vllm = with_stack_prior(computed("H200", "vllm", version, bare=True), shape)
        assert [each.steps.correction.sequence_us for each in (of_vllm, of_vllm.of_pd()) if each.steps] == [
            sequence_us,
            sequence_us,
        ]
    assert collocated.steps == bare.steps and collocated.constants == bare.constants
    assert with_pd_correction(ray, shape) == ray
    measured = bare.with_correction(Correction(fitted_levels=3))
    assert with_pd_correction(measured, shape) == measured
    said = [[each.code for each in step_findings(corrected, None, some)] for some in (both, both[:1], both[1:])]
    assert [("steps_of_pd" in each, "host_time" in each) for each in said] == [
        (True, True),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("gpu", "model", "version", "lacking"),
    [
        ("H200", "gpt-oss-120b", "0.18", None),
        ("GB200", "gpt-oss-120b", "0.18", "GB200"),
        ("H200", "other-7b", "0.18", "other-7b"),
        ("H200", "gpt-oss-120b", "9.9", "vllm 9.9"),
    ],
)
def test_a_plan_names_what_no_public_stack_has(gpu: str, model: str, version: str, lacking: str | None) -> None:
    layers = 36 if model == GPT_OSS.name else 30
    shape = GPT_OSS.model_copy(update={"name": model, "hf_id": f"x/{model}", "layers": layers})
    hardware = with_stack_prior(computed(gpu, "vllm", version), shape)
    found = Scenario(hardware, shape, WORKLOAD, Slo()).step_findings()
    numbers = [each.numbers["unseen"] for each in found if each.code == "unlike_public_stacks"]
    assert numbers == ([lacking] if lacking else [])


def test_a_plan_a_comparison_and_a_table_predict_the_same_of_pd() -> None:
    """All of them simulate with the values that P:D engines have."""
    shape = GPT_OSS.model_copy(update={"weight_dtype": "fp8"})
    bare = computed("B200", "trtllm", bare=True)
    corrected = with_stack_prior(bare, shape)
    deployment, load = Deployment(topology=parse_label(PD)), Closed(concurrency=16)
    scenario = Scenario(corrected, shape, WORKLOAD, Slo())
    planned = scenario.outcome(deployment, load)
    again = simulate(deployment, [planned.level.level], WORKLOAD, corrected.of_pd(), shape)
    other = simulate(deployment, [planned.level.level], WORKLOAD, corrected.model_copy(update={"apart": None}), shape)
    assert planned.level.first_token_s.tolist() == pytest.approx(list(again[0].first_token_s))
    assert list(again[0].first_token_s) != pytest.approx(list(other[0].first_token_s))
    rates = [
        RateMatcher(each, shape, WORKLOAD).rates(Pool(tp=4), Pool(tp=4), 1.0, "srd").decode_rps
        for each in (corrected, corrected.of_pd(), bare)
    ]
    assert rates[0] == rates[1] != rates[2]


def test_rows_of_pools_on_two_gpu_types_are_spread() -> None:
    """Prefill on the first type, decode on the second. Other deployments have no second type."""
    both = beside(computed("H100", "vllm", "0.18"), computed("H200", "vllm", "0.18"))
    requested = read(
        "config,itl,otl,concurrency\npd-spread-p1xtp1-d1xtp4,1024,128,4\ncollocated-1xtp4,1024,128,4\n", "x"
    ).requested
    spread, collocated = csv_predictions.predict(requested, both)
    alone, _ = csv_predictions.predict(requested, both.beside[0])
    assert spread[MEAN_TTFT] != alone[MEAN_TTFT] != "" and collocated[MEAN_TTFT] == ""
    assert "two GPU types are for pd-spread" in collocated[csv_predictions.NOTE]


@pytest.mark.parametrize(("cell", "refused"), [("H100", True), ("H200", True), ("H200+H100", True), ("B200", True),
    ("H100+H200", False), ("NVIDIA H100 80GB HBM3 and H200", False), ("", False)])  # fmt: skip
def test_a_row_on_two_gpu_types_names_both(cell: str, refused: bool) -> None:
    """A row that says H100 alone was not measured with decode on H200."""
    both = beside(computed("H100", "vllm", "0.18"), computed("H200", "vllm", "0.18"))
    text = f"config,itl,otl,concurrency,gpu\npd-spread-p1xtp4-d1xtp4,1024,128,4,\n{{0}},1024,128,4,{cell}\n"
    requested = read(text.format("pd-spread-p1xtp4-d1xtp4"), "x").requested
    plain, row = csv_predictions.predict(requested, both, (0,))
    assert (row[MEAN_TTFT] == "") is refused and plain[MEAN_TTFT]
    assert ("name both as H100+H200" in row[csv_predictions.NOTE]) is refused


def test_a_pack_beyond_a_node_has_no_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node holds it, and no run of it was measured: neither a fit nor public stacks have its errors."""
    monkeypatch.setattr(stack_bands, "public_pd", lambda: public_pd().model_copy(update={"left_out": EVERY_BAND_HOLDS}))
    row = "config,itl,otl,concurrency\npd-{},{}\n"
    for hardware, lengths in (
        (computed("B200", "trtllm", bare=True), "8192,1024,1"),
        (load_hardware("h100-vllm-0.11"), "5000,250,8"),
    ):
        banded = []
        for label in ("spread-p1xtp4-d2xtp4", "pack-p1xtp4-d2xtp4"):
            requested = read(row.format(label, lengths), "x", "gpt-oss-120b").requested
            (found_,) = csv_predictions.predict(requested, hardware, (0,))
            banded.append(bool(found_["predicted_mean_ttft_ms_low"]))
        assert banded == [True, False] and "pack of 12 GPUs does not fit" in found_[csv_predictions.NOTE]


def test_where_prefill_engines_are_full_a_row_has_a_note_and_no_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request seldom keeps prefill busy. 256 at once do."""
    monkeypatch.setattr(stack_bands, "public_pd", lambda: public_pd().model_copy(update={"left_out": EVERY_BAND_HOLDS}))
    hardware = computed("B200", "trtllm", bare=True)
    header = "mode,p_workers,p_tp,d_workers,d_tp,isl,osl,concurrency,num_prompts"
    rows = "".join(f"disagg,1,4,2,4,8192,1024,{load},{4 * load}\n" for load in (1, 256))
    requested = read(f"{header}\n{rows}", "rows.csv", "gpt-oss-120b").requested
    few, many = csv_predictions.predict(requested, hardware, seeds=(0,))
    assert found("prefill_near_saturation", share=0.9).text.partition(":")[0] in str(many[csv_predictions.NOTE])
    assert "near saturation" not in str(few[csv_predictions.NOTE])
    assert few["predicted_mean_ttft_ms_low"] and not many["predicted_mean_ttft_ms_low"]


EVERY_BAND_HOLDS = {kind: {"TPOT": 0.9, "mean TTFT": 0.9} for kind in ("model", "gpu", "engine")}


def test_a_file_with_levels_but_without_errors_has_the_true_reason() -> None:
    """It was changed after its fit, or its levels contradict their correction. Neither is a public stack, and levels
    were measured."""
    made = measured()
    levels = made.with_correction(Correction(fitted_levels=3)).model_copy(update={"name": "mine", "error": None})
    changed = levels.model_copy(update={"fit": None})
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    for hardware, why in (
        (changed, "mine was changed after its levels were fitted"),
        (levels, "the measured levels of mine contradict its correction or are outside of its bands"),
    ):
        scenario = Scenario(hardware, GPT_OSS, WORKLOAD, Slo(ttft_s=1.0))
        assert [each.text for each in scenario.outside(deployment)] == [why]
        words = macro(TEMPLATES / "words.txt", "unknown_errors", scenario.outside(), hardware)
        assert why in words and "--predict" not in words
    never = computed("H200", "vllm", "0.18")
    words = macro(TEMPLATES / "words.txt", "unknown_errors", outside_fit(never, GPT_OSS), never)
    assert "no measured run on H200" in words and "--predict has a band" in words


def test_a_row_of_a_changed_file_names_the_change() -> None:
    levels = measured().with_correction(Correction(fitted_levels=3))
    changed = levels.model_copy(update={"name": "mine", "fit": None, "error": None})
    (found,) = predicted(changed, "4,1024,1024,8,24")
    note = str(found[csv_predictions.NOTE])
    assert "extrapolated: mine was changed after its levels were fitted" in note
    assert "contradict" not in note and "no measured run" not in note


def test_a_plan_says_that_pdlab_launches_another_stack() -> None:
    """With flags that plan for what is launched."""
    launched = major_minor(STACK["vllm"])
    home, older, bare = load_hardware("h100-vllm-0.11"), computed("H200", "vllm", "0.18"), computed("H200", bare=True)
    said = {each.name: [found.numbers["flags"] for found in launched_stack(each)] for each in (home, older, bare)}
    assert list(said.values()) == [
        [f"--hardware H100 --engine-version {launched}"],
        *[[f"--hardware H200 --engine-version {launched}"]] * 2,
    ]
    (pair,) = launched_stack(beside(computed("H100", "vllm", "0.18"), computed("H200", "vllm", "0.18")))
    assert pair.numbers["flags"] == f"--engine-version {launched}", "--hardware is refused beside the two"
    others = (computed("H200", "vllm", launched), computed("H200", "sglang"), load_hardware("cpu-vllm-0.29"))
    assert [launched_stack(each) for each in others] == [()] * 3


@pytest.mark.parametrize(("output_tokens", "few"), [(2, True), (250, False)])
def test_answers_of_few_guessing_steps_are_told(output_tokens: int, few: bool) -> None:
    """The second token of an answer cannot come before a whole step ends."""
    hardware = load_hardware("h100-vllm-0.11").with_speculation(Speculation(acceptance_length=3, draft_tokens=3))
    requested = read(f"config,itl,otl,concurrency\n1xtp4,2000,{output_tokens},4\n", "x").requested
    (row,) = csv_predictions.predict(requested, hardware, (0,))
    assert (f"answers of {output_tokens} tokens take few steps" in row[csv_predictions.NOTE]) is few


def test_an_engine_that_does_not_hold_the_model_has_its_role_and_gpu() -> None:
    both = beside(computed("H100", "vllm", "0.18"), computed("H200", "vllm", "0.18"))
    requested = read("config,itl,otl,concurrency\npd-spread-p1xtp4-d1xtp1,90000,128,4\n", "x").requested
    alone = read("config,itl,otl,concurrency\npd-pack-p1xtp1-d1xtp4,90000,128,4\n", "x").requested
    with pytest.raises(UsageError, match="a prefill engine of tp1 does not hold gpt-oss-120b"):
        csv_predictions.predict(alone, load_hardware("h100-vllm-0.11"), (0,))
    swapped = read("config,itl,otl,concurrency\npd-spread-p1xtp1-d1xtp4,90000,128,4\n", "x").requested
    with pytest.raises(UsageError, match="a prefill engine of tp1 on H100 does not hold gpt-oss-120b"):
        csv_predictions.predict(swapped, both, (0,))
    assert csv_predictions.predict(requested, both, (0,))[0][MEAN_TTFT]
