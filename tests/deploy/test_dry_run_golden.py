"""A deployment of every shape places on its cluster and renders to the stored text.

PDLAB_UPDATE_GOLDEN=1 rewrites the stored texts; read the difference before keeping it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import golden

from pdlab.core.catalog import load_cluster, load_deployment, local_cluster, resolve_model
from pdlab.core.files import CONFIGS
from pdlab.core.settings import parse
from pdlab.core.workload import Workload
from pdlab.deploy.dry_run import describe
from pdlab.deploy.options import LOCAL_WORKLOAD, LaunchSettings, command_line, request_from
from pdlab.deploy.prepared import prepare_deployment
from pdlab.placement.place import fits
from tests.support.deployments import SHAPES, STORY

pytestmark = pytest.mark.golden


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("name", "cluster"), SHAPES.items(), ids=list(SHAPES))
def test_rendering(name: str, cluster: str) -> None:
    assert load_deployment(name).label == name
    text = dry_run(f"--config {name} --cluster {cluster}")
    assert "&id" not in text, "YAML aliases: the arguments share an object"
    golden.compare(text, GOLDEN / f"{name}.txt")


def test_of_a_number_that_moves_room_is_shown_for_all() -> None:
    text = dry_run("--pd-fluid --num 2 --min 2 --max 5 --tp 2 --cluster p5.48xlarge-x2")
    assert "4 GPUs of 16 free ones used, 10 at most" in text
    assert "engines     2 at the start, then 2 to 5 by the load" in text
    assert text.count("(if the load needs it)") == 3


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
    workload = LOCAL_WORKLOAD if view.device == "cpu" else Workload()
    prepared = prepare_deployment(request.deployment, view, shape, source or "MODEL-FOLDER", workload)
    return describe(
        prepared,
        serving_path=request.serving_path,
        base_url="http://127.0.0.1:8000",
        launch_command=command_line(words),
    )


def test_no_stale_renderings() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SHAPES)


@pytest.mark.parametrize("name", STORY)
def test_the_published_deployments_are_known_by_their_labels(name: str) -> None:
    deployment = load_deployment(name)
    assert deployment.label == name and deployment.model == "gpt-oss-120b"
    assert fits(deployment, load_cluster("p5.48xlarge-x2"))


def test_local_cluster_file_is_what_local_starts() -> None:
    assert load_cluster("local-2") == local_cluster(2)


@pytest.mark.parametrize("name", [path.stem for path in (CONFIGS / "models").glob("*.yaml")])
def test_models_load(name: str) -> None:
    shape, source = resolve_model(name)
    assert shape is not None and shape.name == name
    assert (source is None) == shape.local
