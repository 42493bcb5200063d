"""The search for engine settings, judged again from the levels beside the experiment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pdlab.analysis.loading import load
from pdlab.analysis.tuning import judged_again

RESULTS = Path(__file__).parents[2] / "bm_results"
NAME = "local-pack-vs-spread"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for name in (NAME, f"{NAME}-tuning"):
        shutil.copytree(RESULTS / name, tmp_path / name)
    return tmp_path


def test_the_levels_beside_the_experiment_show_the_compared_loads(copied: Path) -> None:
    (loaded,) = load([copied / NAME / "collocated"], {})
    assert loaded.experiment.manifest.tuning is not None and loaded.experiment.manifest.tuning.compared is None
    again = judged_again(loaded)
    assert again is not None and again.compared == ("concurrency 2",)


@pytest.mark.parametrize("gone", ["collocated+batched256", "collocated+*"])
def test_a_partial_copy_of_the_levels_shows_nothing(copied: Path, gone: str) -> None:
    removed = [shutil.rmtree(folder) for folder in (copied / f"{NAME}-tuning").glob(gone)]
    assert removed
    (loaded,) = load([copied / NAME / "collocated"], {})
    assert judged_again(loaded) == loaded.experiment.manifest.tuning
