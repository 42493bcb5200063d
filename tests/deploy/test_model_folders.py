"""A model by the folder of its config.json: the checks, the default context and the memory are those of its shape."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pdlab.cli import launch, models, plan
from pdlab.core.catalog import ModelShape, load_model, resolve_model
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.core.errors import UsageError
from pdlab.core.request_lengths import DEFAULT_MODEL_LEN
from pdlab.core.workload import Workload
from pdlab.deploy.engine_memory import EngineMemory, engine_memory
from pdlab.deploy.launch import start_timeout_s
from pdlab.deploy.serve_config import engine_kwargs
from pdlab.transfer.options import kv_shape
from tests.core.test_model_config import DEEPSEEK, GPT_OSS, LLAMA, QWEN_MOE, folder

QWEN_235B = QWEN_MOE | {
    "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "vocab_size": 151936,
    "max_position_embeddings": 40960, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
CLUSTER = ("--cluster", "p5.48xlarge-x2", "--dry-run")
INDEXER = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 16}


def shape_of(path: Path, config: dict[str, Any]) -> ModelShape:
    shape = resolve_model(folder(path, config)).shape
    assert shape is not None
    return shape


def test_accepted_with_a_memory_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "qwen", QWEN_235B)
    assert launch.main(["--pd-spread", "--p-tp", "4", "--d-tp", "8", "--model", model, *CLUSTER]) == 0
    text = capsys.readouterr().out
    assert "engine of" in text and "not known" not in text


@pytest.mark.parametrize(("context", "expected"), [(10_485_760, DEFAULT_MODEL_LEN), (8192, 8192)])
def test_the_default_context_is_one_that_an_engine_can_hold(context: int, expected: int, tmp_path: Path) -> None:
    """vLLM's own default is the model's: of Llama 4 Scout, ten million tokens."""
    shape = shape_of(tmp_path / "model", {**LLAMA, "max_position_embeddings": context})
    deployment = Deployment(topology=Collocated(pool=Pool(tp=1)))
    assert engine_kwargs(deployment, "collocated", shape, cpu=False)["max_model_len"] == expected
    longer = deployment.model_copy(update={"max_model_len": 5000})
    assert engine_kwargs(longer, "collocated", shape, cpu=False)["max_model_len"] == 5000


def test_latent_attention_may_have_any_two_tp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's assertion on copied KV heads leaves latent attention out: every rank has the whole vector."""
    config = DEEPSEEK | {"num_attention_heads": 16, "num_key_value_heads": 16}
    model = folder(tmp_path / "latent", config)
    assert launch.main(["--pd-spread", "--p-tp", "8", "--d-tp", "4", "--model", model, *CLUSTER]) == 0
    assert "experimental" in capsys.readouterr().err


def test_a_cache_that_a_shape_cannot_say_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "sparse", DEEPSEEK | INDEXER)
    assert launch.main(["--collocated", "--tp", "4", "--model", model, *CLUSTER]) == 0
    assert "sparse-attention indexer" in capsys.readouterr().out
    assert plan.main(["--model", model, "--gpus", "8", "--concurrency", "8"]) == 2
    assert "sparse-attention indexer" in capsys.readouterr().err


def test_the_start_has_time_for_the_weights(tmp_path: Path) -> None:
    from pdlab.core.catalog import load_cluster

    view = load_cluster("p5.48xlarge-x2")
    large = QWEN_235B | {"num_hidden_layers": 940}
    small, large_s = (start_timeout_s(shape_of(tmp_path / name, config), view)
                      for name, config in (("small", LLAMA), ("large", large)))  # fmt: skip
    assert large_s > small


def test_planned_as_it_is_launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "llama", LLAMA)
    words = ["--model", model, "--gpus", "2", "--concurrency", "4", "--itl", "500", "--otl", "50", "--top", "1"]
    assert plan.main(words) == 0
    assert "llama" in capsys.readouterr().out


def test_a_csv_is_predicted_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "llama", LLAMA)
    rows = tmp_path / "rows.csv"
    rows.write_text("mode,num,tp,concurrency,itl,otl\ncollocated,1,2,8,500,50\n")
    assert plan.main(["--model", model, "--predict", str(rows)]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(row["predicted_mean_tpot_ms"]) > 0


def test_latent_attention_has_no_heads_to_check_one_by_one() -> None:
    latent = load_model("deepseek-v3")
    assert latent is not None
    with pytest.raises(UsageError, match=f"--num-layers 61 --block-len-bytes {16 * 576 * 2}"):
        kv_shape(latent)


class TestDraftModels:
    """Speculative decoding has weights and KV cache of its own."""

    def memory(self, shape: ModelShape, speculation: dict[str, Any] | None) -> EngineMemory | None:
        kwargs = {"speculative_config": speculation} if speculation else {}
        deployment = Deployment(topology=Collocated(pool=Pool(tp=2, engine_kwargs=kwargs)))
        return engine_memory(deployment, "collocated", shape, 80.0, cpu=False, workload=Workload())

    def test_a_model_of_its_own(self, tmp_path: Path) -> None:
        target, draft = shape_of(tmp_path / "target", LLAMA), shape_of(tmp_path / "draft", LLAMA)
        plain = self.memory(target, None)
        both = self.memory(target, {"model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
        assert plain is not None and both is not None and draft.layers == target.layers
        assert both.weights_bytes == pytest.approx(2 * plain.weights_bytes)
        assert both.longest_bytes == pytest.approx(2 * plain.longest_bytes)

    def test_layers_of_the_model_for_several_tokens(self, tmp_path: Path) -> None:
        target = shape_of(tmp_path / "target", DEEPSEEK)
        plain, both = self.memory(target, None), self.memory(target, {"method": "mtp", "num_speculative_tokens": 1})
        assert plain is not None and both is not None
        assert both.longest_bytes == pytest.approx(plain.longest_bytes * 5 / 4)  # one layer beside four
        experts = 9 * 3 * 256 * 128 * 2 / 2
        assert experts < both.weights_bytes - plain.weights_bytes < 1.3 * experts

    def test_without_weights(self, tmp_path: Path) -> None:
        target = shape_of(tmp_path / "target", LLAMA)
        assert self.memory(target, {"method": "ngram", "num_speculative_tokens": 3}) == self.memory(target, None)

    def test_one_that_is_not_known_leaves_the_memory_unknown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = shape_of(tmp_path / "target", LLAMA)
        assert self.memory(target, {"model": "org/nowhere", "method": "eagle3"}) is None
        words = ["--collocated", "--tp", "2", "--model", str(tmp_path / "target"), *CLUSTER]
        words += ["--engine-arg", "speculative_config={model: org/nowhere, method: eagle3, num_speculative_tokens: 2}"]
        assert launch.main(words) == 0
        assert "draft model org/nowhere" in capsys.readouterr().out


class TestModelsCommand:
    def test_the_catalogue(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert models.main([]) == 0
        lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
        assert lines["gpt-oss-120b"][1:6] == ["117", "B", "65.1", "73,728", "36,864"]
        assert lines["deepseek-v3"][4] == "70,272"

    def test_files_and_what_is_not_known(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "org--gpt_config.json").write_text(json.dumps(GPT_OSS))
        known, sparse = tmp_path / "org--gpt_config.json", folder(tmp_path / "sparse", DEEPSEEK | INDEXER)
        assert models.main(["--model", str(known), sparse, "--markdown"]) == 0
        table = capsys.readouterr().out
        assert "| org/gpt | " in table and "| - | - |" in table and "sparse-attention indexer" in table
        assert models.main(["--model", str(known), "org/nowhere"]) == models.UNKNOWN
        captured = capsys.readouterr()
        assert "org/gpt" in captured.out and "org/nowhere" in captured.err
