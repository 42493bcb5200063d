"""Which band a prediction by tabulated steps has, and where there is none: by codes and dimensions."""

from __future__ import annotations

import math

import pytest
from support.made_up_tables import made_up_tables

from pdlab.core.catalog import ModelShape, require_shape
from pdlab.core.deployment import Deployment, Pool, parse_label
from pdlab.core.workload import Closed, Load, Open, Workload
from pdlab.plan import csv_predictions
from pdlab.plan.csv_rows import read
from pdlab.plan.error_catalog import error_after, public_errors, stack_of, with_stack_prior
from pdlab.plan.extrapolation import OutsideFit, outside_fit
from pdlab.plan.stack_bands import StackBand, band_of
from pdlab.sim import aic
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.step_source import Tabulated

GPT_OSS = require_shape("gpt-oss-120b")
OTHER = require_shape("gpt-oss-20b")
WORKLOAD = Workload(input_tokens=1024, output_tokens=1024)


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(model: object, system: str, engine: str, version: str, pool: Pool, *rest: object) -> Tabulated:
        tables: Tabulated = made_up_tables(pool.tp)
        return tables

    monkeypatch.setattr(aic, "tabulate", made_up)


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
) -> StackBand:
    hardware = with_stack_prior(computed(gpu, engine, version), shape)
    deployment = Deployment(model=shape.name, topology=parse_label(label))
    outside = outside_fit(hardware, shape.name, deployment, [workload])
    return band_of(hardware, shape, deployment, workload, load or Closed(concurrency=16), [in_flight], outside)


def codes(found: StackBand) -> list[str]:
    return [each.code for each in found.findings]


def test_a_stack_like_the_public_ones_has_a_band_that_says_so() -> None:
    found = band()
    assert found.error is not None and codes(found) == ["band_of_public_stacks"]
    assert found.findings[0].numbers["unseen"] == "nothing"


def test_a_version_and_a_model_that_were_never_seen_widen_it_and_are_named() -> None:
    known, newer, strange = band(), band(version="0.99"), band(shape=OTHER)
    widths = []
    for each in (known, newer, strange):
        assert each.error is not None
        widths.append(each.error.parts["TPOT"].common_percent)
    assert widths[0] < min(widths[1:])
    assert newer.findings[0].numbers["unseen"] == "vllm 0.99"
    assert strange.findings[0].numbers["unseen"] == "gpt-oss-20b"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (lambda: band("L40S"), "L40S"),
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


def test_measured_levels_have_the_errors_of_stacks_with_as_many() -> None:
    hardware = computed("H200", "vllm", "0.18").model_copy(update={"error": error_after(3)})
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))

    def of(*dimensions: str) -> StackBand:
        outside = [OutsideFit(each, "") for each in dimensions]  # type: ignore[arg-type]
        return band_of(hardware, GPT_OSS, deployment, WORKLOAD, Closed(concurrency=16), [4.0], outside)

    assert of("TP", "input length", "load").error == error_after(3)
    assert codes(of("model")) == ["no_band"]
    assert "GPU" in str(of("GPU", "TP").findings[0].numbers["why"])


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


def test_another_checkpoint_of_a_known_model_is_that_model() -> None:
    hardware = computed("H100", "vllm", "0.18")
    tuned = OTHER.model_copy(update={"name": "Llama-3.1-70B-Instruct-FP8", "hf_id": None, "weight_dtype": "fp8"})
    assert stack_of(hardware, tuned).model == "Llama-3.1-70B fp8"
    assert stack_of(hardware, tuned.model_copy(update={"weight_dtype": "bfloat16"})).model == "Llama-3.1-70B"
    assert public_errors().unseen(stack_of(hardware, tuned)) == ()


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


def test_near_saturation_a_row_says_so_and_keeps_the_band_of_tpot_alone() -> None:
    """One prompt of 8,192 tokens and its answer is a tenth of the KV memory: 64 of them wait."""
    hardware = computed("H100", "vllm", "0.18")
    hardware = hardware.with_values({"overhead_gb": 36.0})
    (row,) = predicted(hardware, "2,8192,1024,32,96")
    assert "near saturation" in str(row[csv_predictions.NOTE])
    assert row["predicted_mean_ttft_ms_low"] == "" and row["predicted_requests_per_s_high"] == ""
    assert row["predicted_mean_tpot_ms_low"] != ""
