"""Any two curves that share loads and a model are compared: ratios, placements, frameworks, clients, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import published

from pdlab.analysis.headline import compared
from pdlab.report.build import build_report
from pdlab.report.load import load

LOADS = (8, 16, 32)


def faster(factor: float, concurrency: int, **changes: Any) -> dict[str, Any]:
    """A level at ``factor`` times the rate, with latencies that much shorter."""
    usual = published.content(concurrency)
    quick = {key: usual[key] / factor for key in usual if key == "duration" or key.endswith("_ms")}
    return {**usual, **quick, "request_throughput": usual["request_throughput"] * factor, **changes}


def level(name: str, factor: float, loads: tuple[int, ...] = LOADS, **changes: Any) -> dict[str, dict[str, Any]]:
    return {f"{name}conc{load}": faster(factor, load, **changes) for load in loads}


def found(tmp_path: Path, folders: dict[str, dict[str, dict[str, Any]]]) -> Any:
    paths = [published.write(tmp_path / name, files) for name, files in folders.items()]
    report = build_report(load(*paths))
    return compared(report.curves, report.view)


def lengths(share: float) -> dict[str, int]:
    """Total tokens of the prompts, ``share`` more than usual, of 8 in flight."""
    return {"total_input_tokens": round(20 * 8 * published.INPUT * (1 + share))}


@pytest.mark.parametrize(
    ("folders", "per_gpu"),
    [
        # Ratio against ratio.
        ({"x_1xtp2-3xtp2": level("", 1), "x_3xtp2-1xtp2": level("", 2)}, False),
        # Pack against spread.
        ({"x_1xtp4-1xtp4-pack": level("", 1), "x_1xtp4-1xtp4-spread": level("", 2)}, False),
        # Prefill and decode apart against collocated.
        ({"x_2xtp2": level("", 1), "x_1xtp2-1xtp2": level("", 2)}, False),
        # Framework against framework: of one folder and of two.
        (
            {
                "x_4xtp2": {
                    **level("a_", 1, metadata={"framework": "vllm"}),
                    **level("b_", 2, metadata={"framework": "sglang"}),
                }
            },
            False,
        ),
        ({"vllm_4xtp2": level("", 1, backend="vllm"), "sglang_4xtp2": level("", 2, backend="sglang")}, False),
        # Of different sizes the same load per GPU.
        ({"x_1xtp2": level("", 1), "x_2xtp2": level("", 2, (16, 32, 64))}, True),
        # Lengths that differ by no more than chance has it.
        ({"x_2xtp2": level("", 1, (8,)), "y_2xtp2": level("", 2, (8,), **lengths(0.05))}, False),
        # A name of the model without its organisation.
        ({"x_2xtp2": level("", 1), "y_2xtp2": level("", 2, model_id="model-a")}, False),
    ],
)
def test_two_curves_are_compared(tmp_path: Path, folders: dict[str, dict[str, dict[str, Any]]], per_gpu: bool) -> None:
    """The second gives twice as much per GPU."""
    (block,) = found(tmp_path, folders).headlines
    (pair,) = block.comparisons
    ratios = {each.figure: each.comparison for each in pair.ratios}
    throughput, tpot = ratios["throughput"], ratios["tpot"]
    assert throughput is not None and tpot is not None
    assert sorted([throughput.ratio, 1 / throughput.ratio]) == pytest.approx([0.5, 2], rel=0.02)
    assert throughput.verdict == ("better" if throughput.ratio > 1 else "worse")
    assert pair.per_gpu is per_gpu
    assert (tpot.ratio < 1) == (throughput.ratio > 1)


@pytest.mark.parametrize(
    "folders",
    [
        {"x_2xtp2": level("", 1, (8,)), "y_2xtp2": level("", 2, (8,), **lengths(0.3))},
        {"x_2xtp2": level("", 1), "y_2xtp2": level("", 2, model_id="org/model-b")},
        {"x_2xtp2": level("", 1), "y_2xtp2": level("", 2, (9, 17))},
    ],
)
def test_other_requests_another_model_or_no_shared_load_are_not_compared(
    tmp_path: Path, folders: dict[str, dict[str, dict[str, Any]]]
) -> None:
    whole = found(tmp_path, folders)
    assert not whole.headlines and len(whole.apart) == 2


def test_many_curves_of_one_file_are_read_named_and_compared(tmp_path: Path) -> None:
    """Every pair of one workload is in its matrix, as of a table of a public study."""
    rows = [
        {**faster(1 + gpu + tp / 10 + len(framework) / 100, load, total_output_tokens=20 * load * output),
         "metadata": {"gpu": f"gpu{gpu}_sxm", "framework": framework, "tp": tp, "output": str(output)}}
        for gpu in range(3)
        for framework in ("vllm", "trtllm")
        for tp in (1, 2)
        for output in (101, 1001)
        for load in LOADS
    ]  # fmt: skip
    folder = published.write(tmp_path / "study_1xtp2", {f"level{i}_": row for i, row in enumerate(rows)})
    report = build_report(load(folder, gpus={"study_1xtp2": 2}))
    labels = [curve.label for curve in report.curves]
    assert len(set(labels)) == len(labels) == 24
    assert max(map(len, labels)) < 40 and not any("study" in label or "=" in label for label in labels)
    first, second = report.comparison.matrices
    assert {len(each.labels) for each in (first, second)} == {12}
    assert len(first.cells()) == 12 * 11
    assert not set(first.labels) & set(second.labels)
