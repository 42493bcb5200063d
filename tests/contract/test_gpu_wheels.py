"""What pdlab sets for GPU engines because of what is in the GPU packages themselves, file by file.

They cannot be imported on a machine without a GPU, so their files are read out of the wheels. PDLAB_GPU_WHEELS names
the folder that holds them; `make test-extras` downloads them.
"""

from __future__ import annotations

import ast
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.core.catalog import load_cluster, load_deployment, resolve_model
from pdlab.deploy import serve_config
from pdlab.deploy.serve_config import render
from pdlab.placement.place import place
from pdlab.transfer.doctor import fabric_rules
from tests.support.deployments import SHAPES


class Wheel:
    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self.names = self._zip.namelist()

    def text(self, name: str) -> str:
        return self._zip.read(name).decode()


def wheel(distribution: str) -> Wheel:
    folder = os.environ.get("PDLAB_GPU_WHEELS")
    if not folder:
        pytest.skip("PDLAB_GPU_WHEELS names no folder with the GPU packages' wheels (see the top of this file)")
    wheels = sorted(Path(folder).glob(f"{distribution}-*.whl"))
    if not wheels:
        pytest.skip(f"{folder} has no wheel of {distribution}")
    return Wheel(wheels[-1])


@pytest.fixture(scope="module")
def vllm() -> Wheel:
    return wheel("vllm")


@pytest.fixture(scope="module")
def nixl() -> Wheel:
    return wheel("nixl_cu13")


@pytest.fixture(scope="module")
def flashinfer() -> Wheel:
    return wheel("flashinfer_python")


class TestSampler:
    def test_it_is_on_unless_the_variable_says_otherwise(self, vllm: Wheel) -> None:
        (name, value) = next(iter(serve_config.gpu_env().items()))
        envs = vllm.text("vllm/envs.py")
        assert re.search(rf'"{name}": lambda: \(\s+bool\(int\(os.environ\["{name}"\]\)\)', envs)
        assert f"{name}: bool = True" in envs and bool(int(value)) is False
        assert name in vllm.text("vllm/v1/sample/ops/topk_topp_sampler.py")

    def test_it_would_be_compiled(self, flashinfer: Wheel) -> None:
        assert [name for name in flashinfer.names if name.endswith(".so")] == [], "no compiled module is in the wheel"
        source = flashinfer.text("flashinfer/jit/cpp_ext.py")
        for place_of_nvcc in ('os.environ.get("CUDA_HOME")', '"which", "nvcc"', '"/usr/local/cuda"'):
            assert place_of_nvcc in source, "where pdlab.remote.node looks for nvcc"
        assert re.search(r'command = \[\s+"ninja"', source), "found on PATH alone"


class TestNixl:
    def test_the_bundled_ibverbs_is_older_than_current_installers(self, nixl: Wheel) -> None:
        (bundled,) = (name for name in nixl.names if "libibverbs" in name)
        assert fabric_rules._abi([bundled]) == 48

    def test_libefa_is_not_bundled_and_libfabrics_plugin_is(self, nixl: Wheel) -> None:
        assert any("libuct_ib_efa.so" in name for name in nixl.names)
        assert not any("libefa" in name or "libfabric.so" in name or "libhwloc" in name for name in nixl.names)
        assert any(name.endswith("libplugin_LIBFABRIC.so") for name in nixl.names)


class TestPorts:
    """pdlab.transfer.doctor.settings_rules.side_channel_ports."""

    SCHEDULER = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py"

    def test_vllm_adds_the_data_parallel_rank(self, vllm: Wheel) -> None:
        source = vllm.text(self.SCHEDULER)
        assert re.search(r"VLLM_NIXL_SIDE_CHANNEL_PORT\s+\+ vllm_config.parallel_config.data_parallel_index", source)

    def test_a_taken_port_is_waited_for_without_a_limit(self, vllm: Wheel) -> None:
        assert "ready_event.wait()  #" in vllm.text(self.SCHEDULER)


def fields(vllm: Wheel) -> set[str]:
    """Arguments of vLLM's engine and of its server: Ray divides an engine's arguments into these two."""
    found = set()
    for file, names in (
        ("vllm/engine/arg_utils.py", {"EngineArgs"}),
        ("vllm/entrypoints/launchers/cli_args.py", {"BaseFrontendArgs", "FrontendArgs"}),
    ):
        for cls in ast.parse(vllm.text(file)).body:
            if isinstance(cls, ast.ClassDef) and cls.name in names:
                found |= {
                    node.target.id
                    for node in cls.body
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                }
    return found


def engine_configs(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "engine_kwargs" in value:
            yield value["engine_kwargs"]
        for inner in value.values():
            yield from engine_configs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from engine_configs(inner)


@pytest.mark.parametrize(("name", "cluster"), SHAPES.items(), ids=list(SHAPES))
def test_every_deployments_arguments_are_vllms(name: str, cluster: str, vllm: Wheel) -> None:
    known = fields(vllm)
    deployment, view = load_deployment(name), load_cluster(cluster)
    shape, source = resolve_model(deployment.model)
    app = render(deployment, place(deployment, view), view, shape, source or "MODEL-FOLDER")
    configs = list(engine_configs(yaml.safe_load(yaml.safe_dump(app.args))))
    assert configs
    for kwargs in configs:
        assert set(kwargs) <= known, "arguments that vLLM does not have"
        for name, kind in (("max_model_len", int), ("max_num_seqs", int), ("gpu_memory_utilization", float)):
            assert isinstance(kwargs.get(name, kind()), kind)


def test_the_default_memory_share_is_vllms(vllm: Wheel) -> None:
    match = re.search(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", vllm.text("vllm/config/cache.py"))
    assert match and float(match[1]) == 0.92
