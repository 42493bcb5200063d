"""Whether the baseline was tuned, as the headline says it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import folders

from pdlab.cli import viz
from pdlab.core.deployment import Deployment, parse_label
from pdlab.results.schema import ExperimentRecord, TriedSettings, Tuning
from pdlab.results.store import write_record

ROOT = Path(__file__).resolve().parents[2]
PD = Deployment(model="tiny-gptoss", topology=parse_label("pd-pack-p1xtp1-d1xtp1"))
COLLOCATED = Deployment(model="tiny-gptoss", topology=parse_label("collocated-2xtp1"))
TUNING = Tuning(
    grid={"max_num_seqs": (4, 64), "enable_prefix_caching": (False,)},
    bounds="TPOT p50 <= 12 ms",
    workload="512:64",
    loads=("concurrency 4",),
    repeats=1,
    tried=(
        TriedSettings(settings={"max_num_seqs": 64, "enable_prefix_caching": False}, tokens_per_s=550.0),
        TriedSettings(tokens_per_s=500.0),
    ),
    settings={"max_num_seqs": 64, "enable_prefix_caching": False},
    over_launched=(1.1, 1.02, 1.19),
    resolved=True,
    folder="x-tuning",
)


def baseline_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], base: Deployment = COLLOCATED, **changes: object
) -> str:
    pair = [folders.write(tmp_path / "pd", PD), folders.write(tmp_path / "base", base, **changes)]
    report = tmp_path / "r.html"
    assert viz.main(["--exps", *map(str, pair), "--no-plot", "--report", str(report)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Baseline ")]
    assert len(lines) == report.read_text().count("<p>Baseline ")
    return "".join(lines)


def test_a_tuned_baseline_has_grid_winner_and_margin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = COLLOCATED.model_copy(update={"engine_kwargs": TUNING.settings})
    assert baseline_line(tmp_path, capsys, tuned, tuning=TUNING) == (
        "Baseline 2xTP1 collocated: tuned, the best of 2 settings at TPOT p50 <= 12 ms is max_num_seqs=64 "
        "enable_prefix_caching=false (10 % above the experiment's own settings (2 to 19 %); 10 % above the second, the "
        "experiment's own settings; 1 repeat at concurrency 4; whether each load is valid with each setting is not "
        "recorded; tried: max_num_seqs 4, 64 and enable_prefix_caching false; levels in x-tuning)."
    )


@pytest.mark.parametrize("levels", [True, False])
def test_a_search_without_its_compared_loads_is_judged_by_its_levels(
    levels: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped manifest has the throughput of settings at different loads: those of two are valid at one only."""
    results = ROOT / "bm_results"
    for name in ("local-pack-vs-spread", "local-pack-vs-spread-tuning")[: 1 + levels]:
        shutil.copytree(results / name, tmp_path / name)
    assert viz.main(["--exps", str(tmp_path / "local-pack-vs-spread"), "--no-plot", "--no-show-tables"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Baseline "))
    if levels:
        assert (
            "tuned, but not with the best of 3 settings at TPOT p50 <= 10 ms and TTFT p50 <= 200 ms: "
            "max_num_batched_tokens=256 is 6 % above the experiment's own settings, which the baseline has (not "
            "distinguishable; 1 repeat at concurrency 2; not compared at concurrency 8, which is not valid with "
            "max_num_batched_tokens=256 and max_num_batched_tokens=1024; " in line
        )
    else:
        assert "tuned, the best of 3 settings" in line
        assert "whether each load is valid with each setting is not recorded" in line


def test_a_baseline_that_was_not_tuned_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2xTP1 collocated: not tuned, the defaults of vLLM" in baseline_line(tmp_path, capsys)
    deployment = COLLOCATED.model_copy(update={"engine_kwargs": {"max_num_seqs": 64}})
    assert "not tuned, as launched, with max_num_seqs=64 (" in baseline_line(tmp_path / "given", capsys, deployment)
    assert "whether it was tuned is unknown" in baseline_line(tmp_path / "imported", capsys, origin="imported")


def test_without_a_comparison_of_pd_there_is_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Deployment(model="tiny-gptoss", topology=parse_label("collocated-1xtp2"))
    pair = [folders.write(tmp_path / "a", other), folders.write(tmp_path / "b", COLLOCATED)]
    assert viz.main(["--exps", *map(str, pair), "--no-plot"]) == 0
    assert "Baseline" not in capsys.readouterr().out


def test_levels_of_a_search_are_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders.write(tmp_path / "x-tuning" / "a", COLLOCATED)
    write_record(
        tmp_path / "x-tuning", ExperimentRecord(name="x-tuning", file="x", experiment={}, visits=(), tunes="x")
    )
    assert viz.main(["--exps", str(tmp_path / "x-tuning"), "--no-plot"]) == 0
    assert "is the search for engine settings of x: its best result is partly chance" in capsys.readouterr().err
