"""docs/your-nodes.md, followed to the letter: its files are written, its commands are run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from pdlab.cli import launch, plan
from pdlab.core import catalog
from pdlab.core.files import CONFIGS, ROOT
from pdlab.core.nodes import ClusterNode

PAGE = (ROOT / "docs" / "your-nodes.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def blocks(title: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", section(title), re.M | re.S)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def commands(title: str) -> list[list[str]]:
    lines = [line for text in blocks(title, "bash") for line in text.splitlines()]
    return [shlex.split(line) for line in lines]


def read_again() -> None:
    """The files of GPU types have changed."""
    catalog.known_gpus.cache_clear()
    catalog.known_gpu.cache_clear()


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """configs/ as in the checkout, to write into."""
    folder = tmp_path / "configs"
    shutil.copytree(CONFIGS, folder)
    monkeypatch.setattr(catalog, "CONFIGS", folder)
    read_again()
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    read_again()


def test_a_gpu_type(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = blocks("Add a GPU type", "yaml")
    before = ClusterNode(id="n", gpu_type="MyCard", gpus=8)
    assert catalog.gpu_memory_gb(before) is None
    read_again()
    assert "`mycard.yaml` into configs/gpus/" in section("Add a GPU type")
    (configs / "gpus" / "mycard.yaml").write_text(text)
    assert (catalog.gpu_memory_gb(before), catalog.gpu_link(before)) == (64, "pcie")
    nodes = [{"id": "a", "gpu_type": "MyCard", "gpus": 8, "cpus": 64}]
    Path("my.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    ((_, script, *words),) = commands("Add a GPU type")
    assert script == "launch_gptoss.py" and launch.main(words) == 0
    shown = capsys.readouterr().out
    assert "weights, GB each" in shown and "not known" not in shown
    assert plan.main(["--cluster", "my.yaml"]) == 2, "step times of another GPU are no prediction"
    assert "calibrate" in capsys.readouterr().err


def test_a_node_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("Add a node type", "yaml")
    assert "`mynode-x4.yaml`" in section("Add a node type")
    Path("mynode-x4.yaml").write_text(text)
    ((_, script, *words),) = commands("Add a node type")
    assert script == "launch_gptoss.py" and launch.main(words) == 0
    shown = capsys.readouterr()
    assert "RoCE RDMA" in shown.out and "pdlab/node: node-1" in shown.out and "from head" in shown.out
    assert shown.err == "" and "weights, GB each" in shown.out


def test_every_key_and_value_of_the_table_is_taken() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", section("Add a node type"), re.M)
    keys = {key for cell, _ in rows for key in re.findall(r"`([a-z_.]+)`", cell)}
    assert keys - {"count", "nic.kind"} < set(ClusterNode.model_fields)
    kinds = next(cell for key, cell in rows if "nic.kind" in key).split(", ")
    for kind in kinds:
        ClusterNode.model_validate({"id": "a", "nic": {"kind": kind}})
    assert len(kinds) == 5
