"""Every file of configs/deployments loads, places on its cluster, and renders to the stored text.

PDLAB_UPDATE_GOLDEN=1 rewrites the stored texts; read the difference before keeping it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from pdlab.core.catalog import load_cluster, local_cluster, resolve_model
from pdlab.core.files import CONFIGS
from pdlab.core.settings import parse
from pdlab.core.workload import Workload
from pdlab.deploy.dry_run import describe
from pdlab.deploy.options import LOCAL_WORKLOAD, LaunchSettings, command_line, request_from
from pdlab.deploy.prepared import prepare_deployment

pytestmark = pytest.mark.golden


FILES = sorted((CONFIGS / "deployments").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"


def cluster_name(path: Path) -> str:
    """The cluster that the file's first line names."""
    match = re.match(r"# cluster: (\S+)\n", path.read_text(encoding="utf-8"))
    assert match, f"{path} must begin with '# cluster: NAME'"
    return match[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rendering(path: Path) -> None:
    words = ["--config", path.stem, "--cluster", cluster_name(path)]
    request = request_from(parse(LaunchSettings, words), words)
    deployment, view = request.deployment, request.known_view()
    assert deployment.label == path.stem and view is not None
    shape, source = resolve_model(deployment.model)
    workload = LOCAL_WORKLOAD if view.device == "cpu" else Workload()
    prepared = prepare_deployment(deployment, view, shape, source or "MODEL-FOLDER", workload)
    text = describe(
        prepared,
        serving_path=request.serving_path,
        base_url="http://127.0.0.1:8000",
        launch_command=command_line(words),
    )
    assert "&id" not in text, "YAML aliases: the arguments share an object"
    stored = GOLDEN / f"{path.stem}.txt"
    if os.environ.get("PDLAB_UPDATE_GOLDEN") == "1":
        GOLDEN.mkdir(exist_ok=True)
        stored.write_text(text, encoding="utf-8")
    assert stored.exists(), f"no stored rendering; make it with PDLAB_UPDATE_GOLDEN=1 and read it ({stored})"
    assert text == stored.read_text(encoding="utf-8")


def test_of_a_number_that_moves_room_is_shown_for_all() -> None:
    text = dry_run("--pd-fluid --num 2 --min 2 --max 5 --tp 2 --cluster p5.48xlarge-x2")
    assert "4 GPUs of 16 free ones used, 10 at most" in text
    assert "engines     2 to begin with, 2 to 5 as the load wants" in text
    assert text.count("(if the load wants it)") == 3


def test_where_prompts_go_is_said() -> None:
    words = "--pd-fluid --num 4 --tp 2 --prefill-locally-below 300 --prefix-affinity --cluster p5.48xlarge-x2"
    (roles,) = [line for line in dry_run(words).splitlines() if line.startswith("roles  ")]
    assert (
        "; prompts below 300 tokens where decoded; prompts where their beginning is cached, if that ends ear" in roles
    )
    assert "prefix_affinity: true" in dry_run(words)


def dry_run(line: str) -> str:
    words = line.split()
    request = request_from(parse(LaunchSettings, words), words)
    view = request.known_view()
    assert view is not None
    shape, source = resolve_model(request.deployment.model)
    prepared = prepare_deployment(request.deployment, view, shape, source or "MODEL-FOLDER", Workload())
    return describe(prepared, serving_path="", base_url="http://127.0.0.1:8000", launch_command="")


def test_no_stale_renderings() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {path.stem for path in FILES}


def test_the_whole_story_is_there() -> None:
    collocated = [f"collocated-{pool}" for pool in ("8xtp1", "4xtp2", "2xtp4", "1xtp8")]
    decode_tp4 = ["1xtp4", "1xtp2", "2xtp2", "1xtp1", "2xtp1", "3xtp1", "4xtp1"]
    pairs = [(prefill, "1xtp4") for prefill in decode_tp4]
    pairs += [(f"{p}xtp2", f"{d}xtp2") for p, d in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))]
    pairs += [(f"{p}xtp1", f"{d}xtp2") for p, d in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 3))]
    pairs += [("1xtp4", "1xtp2")]
    story = {*collocated, *(f"pd-pack-p{p}-d{d}" for p, d in pairs), "pd-spread-p1xtp4-d1xtp4"}
    assert story <= {path.stem for path in FILES}


@pytest.mark.parametrize(
    "name",
    [
        "p5.48xlarge-x2",
        "p5.48xlarge-x4",
        "p5.48xlarge-x12",
        "p5.48xlarge-x13",
        "p5.48xlarge-x14",
        "p5.48xlarge-x16",
        "local-2",
    ],
)
def test_clusters_load(name: str) -> None:
    assert load_cluster(name).name == name


def test_every_cluster_file_loads() -> None:
    for path in (CONFIGS / "clusters").glob("*.yaml"):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert load_cluster(path.stem).name == data["name"] == path.stem


def test_local_cluster_file_is_what_local_starts() -> None:
    assert load_cluster("local-2") == local_cluster(2)


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "models").glob("*.yaml")])
def test_models_load(name: str) -> None:
    shape, source = resolve_model(name)
    assert shape is not None and shape.name == name
    assert (source is None) == shape.local
