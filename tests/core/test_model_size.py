"""Sizes of models by their dtype: linear layers of Llama 70B are 68.5e9 values, the rest 2.1e9 of two bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.cli import launch
from pdlab.core.catalog import BYTES_PER_VALUE, ModelShape, load_model, resolve_model
from pdlab.core.errors import UsageError
from pdlab.core.model_size import dense_bytes, expert_bytes

LLAMA_70B = """\
name: llama-3.3-70b
source: config.json
architecture: LlamaForCausalLM
layers: 80
hidden: 8192
heads: 64
kv_heads: 8
head_dim: 128
experts: 1
experts_per_token: 1
dense_layers: 80
dense_intermediate: 28672
vocab: 128256
max_context: 131072
"""


def llama(folder: Path, dtype: str) -> Path:
    path = folder / "llama.yaml"
    path.write_text(f"{LLAMA_70B}weight_dtype: {dtype}\n")
    return path


def weights_gb(shape: ModelShape) -> float:
    return (expert_bytes(shape) + dense_bytes(shape, with_embedding=True)) / 1e9


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("nvfp4", 41.5, 43.5),  # 4.5 bits: one byte of scale for 16 values
        ("fp4", 41.5, 43.5),
        ("mxfp4", 40, 41.4),  # 4.25 bits: one byte of scale for 32 values
        ("awq", 39, 41),  # 4.16 bits: 20 bits for 128 values
        ("gptq", 39, 41),
        ("int4", 39, 41),
        ("fp8", 70, 74),
        ("bf16", 139, 142),
        ("bfloat16", 139, 142),
    ],
)
def test_a_dense_model_has_the_size_of_its_checkpoint(dtype: str, low: float, high: float, tmp_path: Path) -> None:
    shape = resolve_model(str(llama(tmp_path, dtype))).shape
    assert shape is not None and low < weights_gb(shape) < high


def test_every_dtype_has_a_size(tmp_path: Path) -> None:
    for dtype in BYTES_PER_VALUE:
        shape = resolve_model(str(llama(tmp_path, dtype))).shape
        assert shape is not None and 35 < weights_gb(shape) < 290


def test_a_model_with_experts_keeps_attention_in_bfloat16() -> None:
    """openai/gpt-oss-120b: 65 GB on disk, of which attention and embeddings are bfloat16."""
    shape = load_model("gpt-oss-120b")
    assert shape is not None and 63 < weights_gb(shape) < 67
    assert dense_bytes(shape, with_embedding=False) > 2e9


@pytest.mark.parametrize("key", ["weight_dtype", "kv_dtype"])
def test_an_unknown_dtype_is_one_line(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = llama(tmp_path, "fp8" if key == "kv_dtype" else "q3_k")
    if key == "kv_dtype":
        path.write_text(f"{path.read_text()}kv_dtype: q3_k\n")
    with pytest.raises(UsageError, match="q3_k"):
        resolve_model(str(path))
    words = ["--model", str(path), "--collocated", "--tp", "4", "--cluster", "p5.48xlarge-x2", "--dry-run"]
    assert launch.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and key in error and "q3_k" in error and "known are" in error
