"""Ray unpacks pdlab's zip as an entry of py_modules, and its builders build an exported application from it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from contract.conftest import quietly

from pdlab.cli import launch
from pdlab.deploy.kubernetes.code_zip import archive, code, file_name

BUILD = """
import importlib, json, os, sys, warnings
warnings.simplefilter("ignore")
import yaml
import ray, ray.runtime_context
ray.runtime_context.RuntimeContext.runtime_env = property(lambda self: {})  # asked of a driver, it would start a Ray
app = yaml.safe_load(open(sys.argv[1]))["applications"][0]
module, _, name = app["import_path"].partition(":")
built = getattr(importlib.import_module(module), name)(app["args"])
import pdlab
from pdlab.deploy.serving.builders import _applications
made = {each._bound_deployment.name: ray.cloudpickle.dumps(each._bound_deployment.func_or_class)
        for each in _applications(built)}
print(json.dumps([pdlab.__file__, sorted(made)]))
"""


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    path = tmp_path / file_name(code())
    path.write_bytes(archive(code()))
    return path


@pytest.mark.usefixtures("ray_llm")
def test_ray_keeps_the_package_when_it_unpacks(zipped: Path, tmp_path: Path) -> None:
    """A zip with one top folder loses it."""
    packaging = quietly("ray._private.runtime_env.packaging")
    packaging.unzip_package(
        package_path=str(zipped), target_dir=str(tmp_path / "out"), remove_top_level_directory=True,
        unlink_zip=False, logger=logging.getLogger("test"),
    )  # fmt: skip
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == set(code())


@pytest.mark.parametrize("words", ["--pd-spread", "--pd-fluid", "--collocated"])
@pytest.mark.usefixtures("ray_llm")
def test_an_export_builds_from_the_zip_alone(words: str, zipped: Path, tmp_path: Path) -> None:
    app = tmp_path / "app.yaml"
    assert launch.main([words, "--cluster", "p5.48xlarge-x2", "--export", str(app)]) == 0
    env = {**os.environ, "PYTHONPATH": str(zipped), "RAY_ENABLE_AUTO_CONNECT": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(app)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    file, deployments = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(zipped)) and deployments
    kind = yaml.safe_load(app.read_text())["applications"][0]["import_path"].rpartition(":")[2]
    assert len(deployments) >= (3 if kind == "build_pd_openai_app" else 2)
