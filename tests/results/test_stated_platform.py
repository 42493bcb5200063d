"""What files of others state about their platform: GPU type, engine and version, and nothing that they do not state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import published

from pdlab.analysis.curves import gpus_of
from pdlab.core.errors import UsageError
from pdlab.plan.extrapolation import Platform, ran_on
from pdlab.results.published_folders import load_experiment, load_experiments
from pdlab.results.stated_platform import stated_version


def of(tmp_path: Path, **stated: Any) -> Platform:
    return ran_on(load_experiment(published.write(tmp_path / "x_1xtp2", {"conc8": published.content(8, **stated)})))


@pytest.mark.parametrize(
    ("stated", "gpu"),
    [
        ({"gpu": "h200-nb"}, "H200"),
        ({"gpu_type": "NVIDIA H100 80GB HBM3"}, "H100"),
        ({"accelerator": "8x B200"}, "B200"),
        ({"hw": "mi355x_amd"}, "MI355X"),
        ({"metadata": {"gpu": "H200"}}, "H200"),
        ({"hardware": "NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3"}, "H100"),
        ({"hardware": "2 nodes"}, None),
        ({"gpu": "a new one"}, None),
        ({"num_gpus": 2}, None),
        ({"gpu": "cpu"}, "cpu"),
        ({}, None),
    ],
)
def test_the_gpu_type_of_a_file(tmp_path: Path, stated: dict[str, Any], gpu: str | None) -> None:
    assert of(tmp_path, **stated).gpu == gpu


def test_engines_on_cpus_have_no_gpus(tmp_path: Path) -> None:
    folder = published.write(tmp_path / "x_1xtp2", {"conc8": published.content(8, gpu="CPU")})
    assert gpus_of(load_experiment(folder)).unit == "engine rank"


def test_gpus_of_two_types_have_no_step_times(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ran on H100 and H200; step times are of one GPU type"):
        of(tmp_path, gpu="H200, H100")


@pytest.mark.parametrize(
    ("stated", "engine", "version"),
    [
        ({"framework": "vllm", "framework_version": "0.14.1"}, "vllm", "0.14"),
        ({"framework": "vllm", "framework_version": "vllm/vllm-openai:v0.11.0"}, "vllm", "0.11"),
        ({"framework": "vLLM 0.11.0"}, "vllm", "0.11"),
        ({"framework": "sglang", "framework_version": "lmsysorg/sglang:v0.5.5-cu129-amd64"}, "sglang", "0.5"),
        ({"engine": "vllm", "vllm_version": "0.12.0"}, "vllm", "0.12"),
        ({"framework": "vllm", "engine_version": "0.12.0"}, "vllm", "0.12"),
        ({"framework": "vllm"}, None, None),
        ({"framework_version": "0.14.1"}, None, None),
        ({"version": "0.14.1"}, None, None),
    ],
)
def test_the_engine_of_a_file(tmp_path: Path, stated: dict[str, Any], engine: str | None, version: str | None) -> None:
    platform = of(tmp_path, **stated)
    assert (platform.engine, platform.version) == (engine, version)


@pytest.mark.parametrize(
    ("engine", "framework", "text", "version"),
    [
        ("vllm", "vllm", "rocm/7.0:rocm7.0_ubuntu_22.04_vllm_0.10.1_instinct_20250927_rc1", "0.10.1"),
        ("trtllm", "trt", "nvcr.io#nvidia/tensorrt-llm/release:1.1.0rc2.post2", "1.1.0rc2.post2"),
        ("trtllm", "tensorrt-llm", "1.1.0", "1.1.0"),
        # The versions of what is around an engine, or of an image that someone made, are not the engine's.
        ("trtllm", "dynamo-trt", "nvcr.io#nvidia/ai-dynamo/tensorrtllm-runtime:0.5.1-rc0.pre3", None),
        ("vllm", "dynamo-vllm", "0.7.0", None),
        ("vllm", "dynamo-vllm 0.7.0", "", None),
        ("vllm", "vllm", "ghcr.io/llm-d/llm-d-cuda:v0.3.0", None),
        ("vllm", "vllm", "registry/vllm:2.3.1", None),
        ("vllm", "vllm", "nightly", None),
    ],
)
def test_the_version_of_an_engine_is_not_that_of_its_image(
    engine: str, framework: str, text: str, version: str | None
) -> None:
    assert stated_version({"framework": framework, "framework_version": text}, engine) == version


def test_files_of_other_gpus_are_curves_of_their_own(tmp_path: Path) -> None:
    files = {name: published.content(8, gpu=name) for name in ("h100", "h200")}
    both = load_experiments(published.write(tmp_path / "x_1xtp2", files), 2)
    assert [ran_on(each).gpu for each in both] == ["H100", "H200"]
    assert [each.manifest.hardware for each in both] == [{"gpu": "h100"}, {"gpu": "h200"}]
