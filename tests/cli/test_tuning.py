"""What a search for engine settings says, from made-up levels of its candidates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support import folders

from pdlab.bench.experiment.schedule import make_schedule
from pdlab.bench.experiment.tuning import TuningSearch, search_of
from pdlab.cli.tuning import judged
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import BenchError
from pdlab.report.tuning import tried_text, tuning_text
from pdlab.results.schema import ExperimentRecord, VisitRecord

DEPLOYMENT = Deployment(model="tiny-gptoss", topology=parse_label("collocated-2xtp1"))
NOTHING = ExperimentRecord(name="x-tuning", file="x", experiment={}, visits=())


def search(folder: Path, at: str) -> TuningSearch:
    path = folder / "x.yaml"
    file = {
        "name": "x",
        "where": {"local": 2},
        "deployments": [{"name": "base", "label": "collocated-2xtp1"}],
        "workloads": [{"input_tokens": folders.INPUT, "output_tokens": folders.OUTPUT}],
        "loads": [{"concurrency": [1, 4, 16]}],
        "tune_baseline": {"grid": {"max_num_seqs": [4, 64, 256]}, "at": at},
    }
    path.write_text(yaml.safe_dump(file))
    tuning_search = search_of(make_schedule(str(path)))
    assert tuning_search
    return tuning_search


def measured(folder: Path, repeats: int = 3, invalid: dict[str, list[int]] | None = None, **faster: float) -> None:
    """``invalid``: name of settings -> loads that are not valid with them."""
    for name, factor in faster.items():
        bad = {(load, repeat): ("planted",) for load in (invalid or {}).get(name, []) for repeat in range(repeats)}
        path = folder / f"base+{name.replace('_', '-')}"
        folders.write(path, DEPLOYMENT, faster=factor, repeats=repeats, reasons=bad)


def test_the_most_within_the_bounds_wins_and_its_margins_are_told(tmp_path: Path) -> None:
    measured(tmp_path, as_launched=1.0, seqs4=0.5, seqs64=1.5)
    failed = VisitRecord(deployment="base+seqs256", repeat=0, status="failed", error="out of memory")
    record = NOTHING.model_copy(update={"visits": (failed,)})
    tuning = judged(search(tmp_path, "tpot_ms=19"), "base", tmp_path, record)
    assert tuning.settings == {"max_num_seqs": 64} and tuning.resolved
    assert tuning.over_launched is not None
    ratio, low, high = tuning.over_launched
    assert low < ratio < high and ratio > 1.2
    assert [tried.settings.get("max_num_seqs") for tried in tuning.tried] == [64, None, 4, 256]
    assert [tried.error for tried in tuning.tried] == [None, None, None, "out of memory"]
    sentence = tuning_text(tuning)
    assert sentence.startswith("tuned, the best of 4 settings at TPOT p50 <= 19 ms is max_num_seqs=64 (")
    assert (
        "% above the experiment's own settings (" in sentence
        and "the second, the experiment's own settings; " in sentence
    )
    assert tuning.compared == ("concurrency 1", "concurrency 4", "concurrency 16") and tuning.invalid == {}
    assert "tried: max_num_seqs 4, 64, 256; " in sentence and sentence.endswith(f"levels in {tmp_path.name})")
    assert tried_text(tuning.tried[-1]) == "max_num_seqs=256: not measured (out of memory)"


def test_settings_are_compared_only_at_loads_that_are_valid_with_all(tmp_path: Path) -> None:
    """As launched, it serves most at its highest load, where the faster settings have no valid level."""
    measured(tmp_path, invalid={"seqs64": [16], "seqs4": [4]}, as_launched=1.0, seqs4=0.5, seqs64=1.5)
    tuning = judged(search(tmp_path, "e2el_ms=50000"), "base", tmp_path, NOTHING)
    assert tuning.settings == {"max_num_seqs": 64} and tuning.resolved
    assert tuning.compared == ("concurrency 1",)
    assert tuning.invalid == {"concurrency 4": ({"max_num_seqs": 4},), "concurrency 16": ({"max_num_seqs": 64},)}
    sentence = tuning_text(tuning)
    assert (
        "1 repeat at concurrency 1; not compared at concurrency 4, which is not valid with max_num_seqs=4; not "
        "compared at concurrency 16, which is not valid with max_num_seqs=64; tried: " in sentence
    )


def test_without_a_load_that_is_valid_with_all_it_stays_as_it_was(tmp_path: Path) -> None:
    measured(tmp_path, invalid={"as_launched": [16], "seqs64": [1, 4]}, as_launched=1.0, seqs64=1.5)
    tuning = judged(search(tmp_path, "e2el_ms=50000"), "base", tmp_path, NOTHING)
    assert tuning.settings == {} and tuning.compared == ()
    sentence = tuning_text(tuning)
    assert sentence.startswith("tuned without a result, no load is valid with all of the 4 settings at E2EL p50")
    assert {tried.tokens_per_s for tried in tuning.tried} == {None}


def test_one_repeat_names_the_best_and_says_that_it_may_be_chance(tmp_path: Path) -> None:
    measured(tmp_path, repeats=1, as_launched=1.0, seqs4=0.5, seqs64=1.02, seqs256=1.01)
    tuning = judged(search(tmp_path, "e2el_ms=5000"), "base", tmp_path, NOTHING)
    assert tuning.settings == tuning.tried[0].settings and not tuning.resolved
    assert "(not distinguishable)" in tuning_text(tuning) or tuning.settings == {}


def test_what_is_as_fast_as_launched_stays_as_launched(tmp_path: Path) -> None:
    measured(tmp_path, as_launched=2.0, seqs4=0.5, seqs64=1.0)
    tuning = judged(search(tmp_path, "tpot_ms=19"), "base", tmp_path, NOTHING)
    assert tuning.settings == {} and tuning.over_launched is None
    sentence = tuning_text(tuning)
    assert sentence.startswith("tuned, the best of 4 settings") and "above the experiment" not in sentence
    assert re.search(r"above the second, max_num_seqs=64 \(\d+ to \d+ %\); ", sentence)
    assert tuning.tried[-1].error == "no level is valid"


def test_settings_that_alone_are_within_the_bounds_win(tmp_path: Path) -> None:
    measured(tmp_path, as_launched=0.1, seqs64=1.0)
    tuning = judged(search(tmp_path, "tpot_ms=19"), "base", tmp_path, NOTHING)
    assert tuning.settings == {"max_num_seqs": 64} and tuning.over_launched is None
    assert "the experiment's own settings: not within the bounds, or not measured" in tuning_text(tuning)


def test_bounds_that_nothing_meets_leave_it_as_it_was(tmp_path: Path) -> None:
    measured(tmp_path, as_launched=1.0, seqs64=1.5)
    tuning = judged(search(tmp_path, "tpot_ms=0.1"), "base", tmp_path, NOTHING)
    assert tuning.settings == {} and {tried.tokens_per_s for tried in tuning.tried} == {None}
    assert tuning_text(tuning).startswith(
        "tuned without a result, none of the 4 settings at TPOT p50 <= 0.1 ms is within"
    )


def test_nothing_measured_ends_it(tmp_path: Path) -> None:
    failed = VisitRecord(deployment="base+as-launched", repeat=0, status="failed", error="no GPU")
    with pytest.raises(BenchError, match="nothing was measured of base, which tune_baseline is for: no GPU"):
        judged(search(tmp_path, "tpot_ms=12"), "base", tmp_path, NOTHING.model_copy(update={"visits": (failed,)}))
