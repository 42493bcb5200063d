"""Result trees as people have them: one folder with everything, a folder per level, per ratio, per date, and these in
each other. Every tree is one study; the curves are the same whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from results.test_readers import AIPERF, written
from support.published import content

from pdlab.core.deployment import Disaggregated
from pdlab.core.errors import StoreError
from pdlab.results.interpretation import interpret
from pdlab.results.published_folders import BELOW, sourced_experiments
from pdlab.results.schema import Experiment

LOADS = (8, 32)


def experiments(folder: Path, gpus: int | None = None) -> list[Experiment]:
    return [each.experiment for each in sourced_experiments(folder, gpus)]


def found(folder: Path) -> dict[str, list[tuple[float, int]]]:
    """Part of the folder -> (load, repeat) of its levels."""
    return {each.part: [(run.key.value, run.key.repeat) for run in each.runs] for each in experiments(folder, 8)}


ONCE = [(8, 0), (32, 0)]
RATIOS = {"1p3d": ONCE, "2p2d": ONCE}


def of(names: list[str]) -> dict[str, Any]:
    """``{}`` is the load -> files."""
    return {name.format(load): content(load) for name in names for load in LOADS}


def of_aiperf(load: int) -> dict[str, Any]:
    config = AIPERF["input_config"] | {"phases": [{"kind": "profiling", "concurrency": load}]}
    return AIPERF | {"input_config": config}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (of(["1p3d_conc{}.json", "2p2d_conc{}.json"]), RATIOS),
        (of(["1P3D-c{}.json", "2P2D-c{}.json"]), RATIOS),
        (of(["1p3d/conc{}.json", "2p2d/conc{}.json"]), RATIOS),
        (of(["1p3d/c{}/result.json", "2p2d/c{}/result.json"]), RATIOS),
        (of(["c{}/1p3d.json", "c{}/2p2d.json"]), RATIOS),
        (of(["2026-01-05/1p3d/conc{}.json", "2026-01-05/2p2d/conc{}.json"]), RATIOS),
        ({f"c{load}/profile_export_aiperf.json": of_aiperf(load) for load in LOADS}, {"": ONCE}),
        ({f"c{load}/out.json": content(load, tag=tag) for load in LOADS for tag in ("a",)}, {"": ONCE}),
    ],
    ids=[
        "one-folder",
        "one-folder-capitals",
        "ratio",
        "ratio-level",
        "level-ratio",
        "date-ratio",
        "level",
        "level-tag",
    ],
)
def test_curves_of_a_tree(files: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert found(written(tmp_path / "study", files)) == expected


@pytest.mark.parametrize("dates", [("20260105-120000", "20260120-120000"), (None, None)], ids=["in-files", "in-names"])
def test_a_folder_per_date_is_a_curve_per_session(dates: tuple[str | None, str | None], tmp_path: Path) -> None:
    files = {
        f"{day}/conc{load}.json": content(load, date=date)
        for day, date in zip(("2026-01-05", "2026-01-20"), dates, strict=True)
        for load in LOADS
    }
    assert found(written(tmp_path / "study", files)) == {"2026-01-05": ONCE, "2026-01-20": ONCE}


def test_names_that_count_repeats_are_one_curve_whatever_their_dates(tmp_path: Path) -> None:
    files = {f"2026-01-{5 + 9 * i:02}/conc8_run{i}.json": content(8, date=None) for i in range(3)}
    assert found(written(tmp_path / "study", files)) == {"": [(8, 0), (8, 1), (8, 2)]}


def test_summaries_beside_the_folders_of_the_levels_hide_none(tmp_path: Path) -> None:
    """Which levels the files of the folder itself hold decides, and not that there are files."""
    files = of(["1p3d/conc{}.json", "2p2d/conc{}.json"])
    folder = written(tmp_path / "study", files | {"profile_export_aiperf_sweep.json": {"aiperf_version": "0.13.0"}})
    assert found(folder) == RATIOS
    (folder / "own.json").write_text(json.dumps(content(4)))
    assert found(folder) == {"": [(4, 0)]}
    assert len(interpret(folder).skipped[BELOW]) == 4


def test_the_deployment_comes_from_the_name(tmp_path: Path) -> None:
    names = {
        "4ptp1-2dtp2": "pd-pack-p4xtp1-d2xtp2",
        "2xtpep4": "collocated-2xtp4ep",
        "1xtp2-1xtp4_spread": "pd-spread-p1xtp2-d1xtp4",
        "p1d3": "pd-pack-p1xtp2-d3xtp2",
    }
    files = {f"{name}/conc8.json": content(8, tp=2 if name == "p1d3" else None) for name in names}
    read = experiments(written(tmp_path / "study", files))
    labels = {each.manifest.deployment.label: each.manifest.gpus for each in read if each.manifest.deployment}
    assert labels == dict(zip(names.values(), (8, 8, 6, 8), strict=True))
    pools = [each.manifest.deployment.topology for each in read if each.manifest.deployment]
    assert sum(isinstance(pool, Disaggregated) for pool in pools) == 3


@pytest.mark.parametrize(
    ("server", "expected"),
    [({"tp_size": 2}, "tp=2"), ({"tp_size": 4}, "tp=4")],
)
def test_what_the_server_reports_separates_curves(server: dict[str, int], expected: str, tmp_path: Path) -> None:
    line = {"sharegpt_output_len": None, "server_info": {"model_path": "org/m", **server}}
    files = {"a.jsonl": [content(8) | line], "b.jsonl": [content(8) | line | {"server_info": {"tp_size": 8}}]}
    parts = set(found(written(tmp_path / "study", files)))
    assert len(parts) == 2 and any(expected.replace("=", "") in part.replace("=", "") for part in parts), parts


def test_a_subfolder_that_cannot_be_listed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "study", of(["1p3d/conc{}.json", "2p2d/conc{}.json"]))
    listed = Path.iterdir

    def refused(path: Path) -> Any:
        if path.name == "2p2d":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(StoreError, match=r"study.*Permission denied"):
        experiments(folder, 8)
