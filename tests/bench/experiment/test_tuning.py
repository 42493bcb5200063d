"""The search for engine settings of the collocated side: what is launched for it, and what is run afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.bench.experiment import run, schedule
from pdlab.bench.experiment.file import TuneBaseline
from pdlab.bench.experiment.schedule import Schedule, make_schedule
from pdlab.bench.experiment.tuning import TuningSearch, search_of, tuned_plan
from pdlab.bench.progress import Progress
from pdlab.bench.sweep import SweepOptions
from pdlab.cli import experiment
from pdlab.core.errors import UsageError
from pdlab.core.status_line import minutes
from pdlab.core.workload import Closed, Open
from pdlab.results.schema import Tuning

BASE: dict[str, Any] = {
    "name": "x",
    "where": {"local": 2},
    "deployments": [
        {"label": "pd-pack-p1xtp1-d1xtp1"},
        {"label": "collocated-2xtp1", "engine_arg": {"max_num_seqs": 8}},
        {"name": "wide", "label": "collocated-1xtp2"},
    ],
    "workloads": [{"input_tokens": 64, "output_tokens": 8}],
    "loads": [{"concurrency": [1, 2, 4, 8, 16, 32]}],
    "at": ["tpot_ms=12,ttft_p95_ms=2000"],
    "tune_baseline": {"grid": {"max_num_seqs": [8, 16], "enable_prefix_caching": [False]}},
}


def plan(folder: Path, **changes: Any) -> Schedule:
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}, sort_keys=False))
    return make_schedule(str(path))


def searched(folder: Path, **changes: Any) -> TuningSearch:
    search = search_of(plan(folder, **changes))
    assert search
    return search


@pytest.mark.parametrize("of_search", [True, False])
def test_an_invalid_level_of_the_search_is_measured_once_more(
    of_search: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are compared only at loads that are valid with all of them."""
    made = searched(tmp_path).plan if of_search else plan(tmp_path)
    swept: list[SweepOptions] = []
    monkeypatch.setattr(run, "run_sweep", lambda options, progress: swept.append(options))
    visit, progress = made.visits[0], Progress()
    run._sweep(visit.parts[0], visit, made, run.RunOptions(out=tmp_path), progress)
    assert [options.retry_invalid for options in swept] == [of_search]


def test_every_combination_is_a_deployment_beside_the_settings_of_the_file(tmp_path: Path) -> None:
    search = searched(tmp_path)
    assert [(each.name, each.settings) for each in search.of("wide")] == [
        ("wide+as-launched", {}),
        ("wide+seqs8+cached0", {"max_num_seqs": 8, "enable_prefix_caching": False}),
        ("wide+seqs16+cached0", {"max_num_seqs": 16, "enable_prefix_caching": False}),
    ]
    assert search.deployments == ("collocated-2xtp1", "wide")
    made = {visit.configuration.name: visit.configuration for visit in search.plan.visits}
    assert set(made) == {each.name for each in search.candidates} and len(search.plan.visits) == 6
    arguments = made["collocated-2xtp1+seqs16+cached0"].deployment.engine_kwargs
    assert arguments == {"max_num_seqs": 16, "enable_prefix_caching": False}
    assert made["collocated-2xtp1+as-launched"].deployment.engine_kwargs == {"max_num_seqs": 8}
    assert search.plan.file.name == "x-tuning" and search.plan.tunes == "x" and search.plan.file.tune_baseline is None
    assert search.plan.visits[0].parts[0].loads == tuple(Closed(concurrency=n) for n in (1, 4, 8, 32))


def test_settings_that_change_nothing_are_not_launched(tmp_path: Path) -> None:
    search = searched(tmp_path, tune_baseline={"grid": {"max_num_seqs": [8, 16]}, "deployments": ["collocated-2xtp1"]})
    assert [each.settings for each in search.candidates] == [{}, {"max_num_seqs": 16}]


def test_no_batch_is_smaller_than_its_sequences() -> None:
    tune = TuneBaseline(grid={"max_num_batched_tokens": (128, 2048), "max_num_seqs": (64, 1024)}, at="tpot_ms=12")
    assert [tuple(each.values()) for each in tune.settings] == [(128, 64), (2048, 64), (2048, 1024)]


@pytest.mark.parametrize(
    ("changes", "loads"),
    [
        ({"loads": [{"rate_rps": [2, 8]}]}, (Open(rate_rps=2), Open(rate_rps=8))),
        ({"loads": [{"rate_rps": [2]}, {"concurrency_per_gpu": [4]}]}, (Closed(concurrency=8, per_gpu=4),)),
        ({"tune_baseline": {"loads": {"rate_rps": [3]}}}, (Open(rate_rps=3),)),
    ],
)
def test_loads_are_the_files_or_its_own(changes: dict[str, Any], loads: tuple[object, ...], tmp_path: Path) -> None:
    assert searched(tmp_path, **changes).plan.visits[0].parts[0].loads == loads


def test_it_takes_bounds_loads_and_a_collocated_deployment(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tune_baseline: needs bounds within which most is best"):
        plan(tmp_path, at=[])
    with pytest.raises(UsageError, match="no collocated deployment of the file runs mixed"):
        searched(tmp_path, deployments=BASE["deployments"][:1])
    with pytest.raises(UsageError, match="no concurrency and no rate_rps for mixed"):
        searched(tmp_path, loads=[{"slo": {"ttft_ms": 9}}])
    assert search_of(plan(tmp_path, tune_baseline=None)) is None


def test_a_dry_run_prints_how_many_launches_and_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(tmp_path, expect={"launch_s": 60, "ttft_s": 0.1, "tpot_s": 0.01})
    without = plan(tmp_path, expect=planned.file.expect.model_dump(), tune_baseline=None)
    search = search_of(planned)
    assert search
    lines, plain = experiment.describe(planned, tmp_path / "x"), experiment.describe(without, tmp_path / "x")
    tuning_s = sum(schedule.visit_s(search.plan, visit, tmp_path / "x-tuning") for visit in search.plan.visits)
    assert tuning_s > 6 * 60
    assert f"first the collocated side is tuned: 6 settings launched 6 times, about {minutes(tuning_s)}, " in lines
    assert "the most output tokens/s at TPOT p50 <= 12 ms and TTFT p95 <= 2,000 ms wins" in lines
    assert "  wide+seqs16+cached0\n" in lines and "tuned" not in plain

    def whole_s(text: str) -> int:
        (line,) = [line for line in text.splitlines() if "(minutes:seconds) in all" in line]
        whole, rest = line.split()[1].split(":")
        return 60 * int(whole) + int(rest)

    assert whole_s(lines) == pytest.approx(whole_s(plain) + tuning_s, abs=1)


def test_what_is_found_is_what_is_launched_and_the_file_stays(tmp_path: Path) -> None:
    schedule = plan(tmp_path)
    tuning = Tuning(
        grid={"max_num_seqs": (16,)}, bounds="b", workload="64:8", loads=(), repeats=1, tried=(),
        settings={"max_num_seqs": 16}, folder="x-tuning",
    )  # fmt: skip
    tuned = tuned_plan(schedule, {"collocated-2xtp1": tuning})
    assert tuned.file == schedule.file and tuned.tuned == {"collocated-2xtp1": tuning}
    for before, after in zip(schedule.configurations, tuned.configurations, strict=True):
        if before.name == "collocated-2xtp1":
            assert after.deployment.engine_kwargs == {"max_num_seqs": 16}
            assert after.settings.deployment["engine_kwargs"] == {"max_num_seqs": 16}
        else:
            assert after == before
    assert [visit.configuration.name for visit in tuned.visits] == [v.configuration.name for v in schedule.visits]
