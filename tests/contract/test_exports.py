"""Ray reads what is exported: its schema of a Serve config."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from pdlab.cli import launch

MANIFESTS = sorted((Path(__file__).parents[1] / "deploy" / "kubernetes" / "golden").glob("*.yaml"))
X2 = ["--cluster", "p5.48xlarge-x2"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("ray_llm")
def test_the_application_of_a_manifest_fits_the_serve_schema(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    (service,) = [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == "RayService"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    read = ServeDeploySchema.model_validate(config)
    assert set(config) <= set(ServeDeploySchema.model_fields)
    assert read.proxy_location == "EveryNode" and read.http_options.host == "0.0.0.0"


@pytest.mark.usefixtures("ray_llm")
def test_ray_reads_the_options_of_the_controller(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    file = tmp_path / "app.yaml"
    assert launch.main(["--pd-spread", *X2, "--code-url", "https://x.example/c.zip", "--export", str(file)]) == 0
    config = yaml.safe_load(file.read_text())
    read = ServeDeploySchema.model_validate(config)
    assert read.controller_options.runtime_env == config["controller_options"]["runtime_env"]
    assert read.applications[0].runtime_env == {"py_modules": ["https://x.example/c.zip"]}


def test_ray_brings_what_the_round_trip_of_parquet_takes() -> None:
    assert importlib.util.find_spec("pyarrow") is not None
