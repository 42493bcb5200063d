"""Every export is read back by the reader of its format, with the same figures."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import folders, published

import pdlab
from pdlab.analysis.curves import curves, gpus_of
from pdlab.cli import viz
from pdlab.cli.viz import EXPORTS
from pdlab.core.deployment import Disaggregated
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Open, Workload
from pdlab.plan.extrapolation import Platform, ran_on
from pdlab.report.export import PER_LEVEL, TABLES, ExportedLevel, _left_out
from pdlab.report.load import Row

OF_CLIENTS = ("aiperf", "llmd", "inferencex")
FIGURES = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "gpus", "load")


def exported(kind: str, target: Path, *sources: Path) -> Path:
    """The folder with the export."""
    path = (
        target / kind / ("" if kind in ("aiperf", "llmd") else "levels.json" if kind == "inferencex" else f"x.{kind}")
    )
    assert viz.main(["--exps", *map(str, sources), "--no-plot", "--export", f"{kind}={path}"]) == 0
    return target / kind


def key(row: Row) -> tuple[Any, ...]:
    return row["load_kind"], row["load"], row["gpus"], row["requests_per_s"]


def figures(row: Row) -> dict[str, Any]:
    kept = {name: row[name] for name in FIGURES}
    return kept | {name: value for name, value in row.items() if name.endswith("_ms") and value is not None}


@pytest.fixture
def closed(tmp_path: Path) -> list[Path]:
    """Two of ours, one collocated and one PD, with repeats; and one of others with percentiles."""
    ours = [folders.write(tmp_path / f"e{i}", each, repeats=2) for i, each in enumerate(folders.deployments(2))]
    tail = {f"p{percent}_{metric}_ms": 100.0 + percent for percent in (90, 95, 99) for metric in ("ttft", "e2el")}
    return [*ours, published.write(tmp_path / "x_2xtp4", {"conc64": published.content(64, **tail)})]


def test_the_formats_are_those_of_the_flag() -> None:
    assert sorted([*PER_LEVEL, "inferencex", *TABLES]) == sorted(EXPORTS)


@pytest.mark.parametrize("kind", EXPORTS)
def test_what_is_exported_is_read_back_with_the_same_figures(kind: str, closed: list[Path], tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    back = sorted(pdlab.load(exported(kind, tmp_path / "out", *closed)).levels(), key=key)
    source = pdlab.load(*closed)
    if kind in OF_CLIENTS:  # they have the figures of the whole run
        whole = [
            each._replace(
                experiment=each.experiment.model_copy(
                    update={"runs": tuple(run.model_copy(update={"steady": None}) for run in each.experiment.runs)}
                )
            )
            for each in source.loaded
        ]
        source = type(source)(source.folders, source.stated, tuple(whole))
    expected = sorted(source.levels(), key=key)
    assert len(back) == len(expected) == 13
    for new, old in zip(back, expected, strict=True):
        wanted, found = figures(old), figures(new)
        if kind == "inferencex":  # it has no number of requests, so more percentiles may be shown of it
            found = {name: value for name, value in found.items() if name in wanted}
        assert found == pytest.approx(wanted, rel=1e-9)
        assert (new["model"], new["load_kind"]) == (old["model"], old["load_kind"])
        if kind in TABLES:
            assert new["judged"] == old["judged"]
        assert new["valid"] and (kind == "inferencex" or new["completed"] == old["completed"])


@pytest.mark.parametrize("kind", EXPORTS)
def test_the_platform_comes_back(kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    on_cpus = folders.write(tmp_path / "e", folders.deployments(1)[0], local=True, versions={"vllm": "0.29.0+cpu"})
    stated = {"gpu": "h200-nb", "framework": "sglang", "framework_version": "0.5.5"}
    of_others = published.write(tmp_path / "x_2xtp4", {"conc64": published.content(64, **stated)})
    nothing = published.write(tmp_path / "y_2xtp4", {"conc64": published.content(64)})
    found = {}
    for number, source in enumerate((on_cpus, of_others, nothing)):
        for each in pdlab.load(exported(kind, tmp_path / f"out{number}", source)).experiments:
            found[number] = (gpus_of(each).device, ran_on(each), each.manifest.hardware.get("gpu"))
    assert found == {
        0: ("cpu", Platform("cpu", "vllm", "0.29"), "cpu"),
        1: ("gpu", Platform("H200", "sglang", "0.5"), "H200"),
        2: ("gpu", Platform(), None),
    }


def test_rates_of_inferencex_are_per_gpu_of_their_role(tmp_path: Path) -> None:
    pd = folders.deployments(5)[4]
    assert isinstance(pd.topology, Disaggregated)
    prefill, decode = pd.topology.prefill.gpus, pd.topology.decode.gpus
    assert prefill != decode
    source = folders.write(tmp_path / "e", pd, loads=(4,), repeats=1)
    (row,) = json.loads((exported("inferencex", tmp_path / "out", source) / "levels.json").read_text())
    (whole,) = (run.whole for each in pdlab.load(source).experiments for run in each.runs)
    assert row["output_tput_per_gpu"] * decode == pytest.approx(whole.output_tokens_per_s)
    assert row["input_tput_per_gpu"] * prefill == pytest.approx(whole.input_tokens_per_s)
    assert row["tput_per_gpu"] * (prefill + decode) == pytest.approx(whole.total_tokens_per_s)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_keeps_the_window_and_the_invalid_repeat_of_a_curve(kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    levels = {
        "a": published.content(8), "b": published.content(8, num_prompts=400), "c": published.content(16)
    }  # fmt: skip
    back = pdlab.load(exported(kind, tmp_path / "others", published.write(tmp_path / "x_1xtp2", levels)))
    (curve,) = curves(back.experiments)
    assert [(p.value, p.repeats, p.excluded, p.window) for p in curve.points] == [
        (8, 1, 1, "whole"),
        (16, 1, 0, "whole"),
    ]
    ours = folders.write(tmp_path / "e", folders.deployments(1)[0])
    back = pdlab.load(exported(kind, tmp_path / "ours", ours))
    assert (
        {row["window"] for row in back.levels()} == {"steady"} == {row["window"] for row in pdlab.load(ours).levels()}
    )
    assert {point.window for curve in curves(back.experiments) for point in curve.points} == {"steady"}


@pytest.mark.parametrize("kind", ["aiperf", "csv"])
@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"request_rate": 2.0}, {"load_kind": "rate", "load": 2.0, "burstiness": 1.0}),
        ({"request_rate": 2.0, "burstiness": 0.5}, {"load_kind": "rate", "load": 2.0, "burstiness": 0.5}),
    ],
)
def test_open_loops(kind: str, changes: dict[str, Any], shown: dict[str, Any], tmp_path: Path) -> None:
    free = {"max_concurrency": None, "max_concurrent_requests": None}
    source = published.write(tmp_path / "x_1xtp2", {"a": published.content(64, **free, **changes)})
    (row,) = pdlab.load(exported(kind, tmp_path / "out", source)).levels()
    assert {name: row[name] for name in shown} == shown


def test_what_a_format_has_no_field_for_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0}
    files = {"a": published.content(8), "b": published.content(64, request_rate=2.0, burstiness=0.5)}
    files |= {"c": published.content(64, **ramp), "d": published.content(16, num_prompts=400)}
    source = published.write(tmp_path / "x_1xtp2", files)
    counts = {}
    for kind in ("aiperf", "llmd", "inferencex", "csv"):
        counts[kind] = len(pdlab.load(exported(kind, tmp_path / "out", source)).levels())
    assert counts == {"aiperf": 2, "llmd": 1, "inferencex": 1, "csv": 4}
    out = capsys.readouterr().out
    assert "1 not valid" in out and "1 a ramp" in out
    (invalid,) = (row for row in pdlab.load(tmp_path / "out" / "csv").levels() if not row["valid"])
    assert invalid["load"] == 16.0 and "80 of 400 requests failed" in str(invalid["reasons"])
    ramps = published.write(tmp_path / "r_1xtp2", {"c": files["c"]})
    assert viz.main(["--exps", str(ramps), "--no-plot", "--export", f"aiperf={tmp_path / 'none'}"]) == 2


def without(name: str, real: Callable[..., Any] = builtins.__import__) -> Callable[..., Any]:
    def imported(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ImportError(module)
        return real(module, *args, **kwargs)

    return imported


def test_parquet_without_pyarrow_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = published.write(tmp_path / "x_1xtp2", {"a": published.content(8)})
    monkeypatch.setattr(builtins, "__import__", without("pyarrow"))
    words = ["--exps", str(source), "--no-plot", "--export", f"parquet={tmp_path / 'a.parquet'}"]
    assert viz.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and "pip install pyarrow" in err and err.count("\n") == 1
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.parquet").write_bytes(b"PAR1")
    assert viz.main(["--exps", str(tmp_path / "t"), "--no-plot"]) == 2
    assert "pip install pyarrow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mixes", "rate_rps"),
    [
        ("mixes:100:10@0.2,50:20@0.2", 0.4),
        ("mixes:100:10,50:20,crowd=prompts*4@6+3", 2.0),
        ("mixes:100:10,50:20@3", None),
        ("mixes:100:10,crowd=rate*4@6+3", None),
        ("mixes:100:10,crowd=rate*0.5@6+3", None),
    ],
)
def test_the_rate_of_mixes_is_that_of_the_arrivals(mixes: str, rate_rps: float | None, tmp_path: Path) -> None:
    """Those clients know one rate, which does not change."""
    source = folders.write(tmp_path / "e", folders.deployments(1)[0], loads=(4,), repeats=1)
    (experiment,) = pdlab.load(source).experiments
    workload, load = Workload(lengths=parse_lengths(mixes)), Open(rate_rps=2.0)
    run = experiment.runs[0].model_copy(update={"workload": workload, "load": load})
    level = ExportedLevel("x", experiment, run)
    reasons = {_left_out(run, kind) for kind in ("aiperf", "llmd")}
    assert reasons == {None if rate_rps else "a rate that changes with time"}
    if rate_rps is not None:
        of_aiperf, of_llmd = (PER_LEVEL[kind][1](level) for kind in ("aiperf", "llmd"))
        assert of_aiperf["input_config"]["phases"][0]["rate"] == pytest.approx(rate_rps)
        assert json.dumps({"rate_qps": rate_rps})[1:-1] in json.dumps(of_llmd)
