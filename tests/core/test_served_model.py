"""Weights in a bucket, or in a folder that only nodes have: accepted, and what is known of them is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.cli import launch
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.core.errors import UsageError
from pdlab.core.served_model import not_on_this_machine, served_model, where_checked
from pdlab.deploy.serve_config import model_id

ON_X2 = ("--collocated", "--cluster", "p5.48xlarge-x2", "--dry-run")


def deployment(model: str, model_id: str | None = None) -> Deployment:
    return Deployment(model=model, model_id=model_id, topology=Collocated(pool=Pool()))


@pytest.mark.parametrize("model", ["s3://bucket/llama", "gs://b/llama/", "abfss://c@a/llama", "/model-cache/llama"])
def test_the_nodes_load_it_by_its_own_address(model: str) -> None:
    shape, source = served_model(deployment(model))
    assert (shape, source) == (None, model) and not_on_this_machine(model)
    assert model_id(deployment(model), None) == "llama"
    text = where_checked(deployment(model), None)
    assert text is not None and "--model-id" in text and "hf_config_path" in text


@pytest.mark.parametrize("model", ["s3://bucket/llama", "/model-cache/llama"])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "openai/gpt-oss-20b"])
def test_the_shape_is_that_of_the_model_that_model_id_names(model: str, name: str) -> None:
    shape, source = served_model(deployment(model, name))
    assert shape is not None and (shape.name, source) == ("gpt-oss-20b", model)
    text = where_checked(deployment(model, name), shape)
    assert text is not None and "shape" not in text


@pytest.mark.parametrize("name", ["prod", "org/unknown-model"])
def test_a_name_of_no_model_leaves_the_shape_unknown(name: str) -> None:
    assert served_model(deployment("s3://bucket/llama", name)).shape is None


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere", "/nowhere/shape.yaml", "s4://bucket/llama"])
def test_what_is_here_or_nothing_is_judged_as_before(model: str) -> None:
    assert not not_on_this_machine(model) and where_checked(deployment(model), None) is None
    with pytest.raises(UsageError):
        served_model(deployment(model))


def test_a_folder_that_is_here_is_looked_into(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        served_model(deployment(str(tmp_path)))


def test_a_launch_on_this_machine_needs_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--collocated", "--local", "--model", "/model-cache/llama", "--dry-run"]) == 2
    assert "--local" in capsys.readouterr().err
    assert launch.main([*ON_X2, "--tp", "4", "--model", "/model-cache/llama"]) == 0
    shown = capsys.readouterr()
    assert "model_source: /model-cache/llama" in shown.out and "a launch checks that each node has it" in shown.err
