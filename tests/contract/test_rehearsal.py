"""What rehearsals rely on in Ray Serve LLM and vLLM: where engines are put in, and what stands in for vLLM there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from contract.conftest import printed, quietly

from pdlab.rehearsal import protocol, stand_ins
from pdlab.rehearsal.fake_cluster import ENGINE_CLASS_ENV, OF_MANY_NODES, node_env, serve_env
from pdlab.rehearsal.stand_ins import MADE, PROTOCOLS

ROOT = Path(__file__).resolve().parents[2]
# Ray's own engine and what only a KV-aware router or its tools import.
NOT_IMPORTED = ("vllm_engine.py", "sglang", "kv_aware", "benchmark", "batch")


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def imports_of_vllm() -> Iterator[tuple[str, str]]:
    """(module, name) of everything that Ray Serve LLM's processes import of vLLM with a simulated engine."""
    ray_llm = folder_of("ray.llm") / "_internal"
    for path in sorted([*ray_llm.glob("serve/**/*.py"), *ray_llm.glob("common/**/*.py")]):
        if any(part in path.as_posix() for part in NOT_IMPORTED):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def test_whatever_ray_imports_of_vllm_has_a_stand_in() -> None:
    found = set(imports_of_vllm())
    assert len(found) > 20
    for module, name in found:
        if (module, name) == ("vllm", "envs"):
            assert "vllm.envs" in MADE
        elif module in PROTOCOLS:
            assert name in PROTOCOLS[module], f"{module}.{name}"
        else:
            assert module in MADE, f"{module}.{name}"


@pytest.mark.parametrize("module", [name for name in PROTOCOLS if name != "vllm.renderers.base"])
def test_stand_ins_have_vllms_fields_and_defaults(module: str) -> None:
    real_module = quietly(module)
    for name in PROTOCOLS[module]:
        real, ours = getattr(real_module, name), getattr(protocol, name)
        fields = getattr(real, "model_fields", {})
        for field, info in ours.model_fields.items():
            if not fields:  # a union of requests
                continue
            assert field in fields, f"{name}.{field}"
            if info.default_factory is None and not info.is_required() and not fields[field].is_required():
                if fields[field].default_factory is not None:
                    continue
                assert info.default == fields[field].default, f"{name}.{field}"


def test_an_answers_choices_have_vllms_names() -> None:
    completion = quietly("vllm.entrypoints.openai.completion.protocol")
    for ours, real in (
        (protocol.CompletionResponseChoice, completion.CompletionResponseChoice),
        (protocol.UsageInfo, completion.UsageInfo),
    ):
        assert set(ours.model_fields) <= set(real.model_fields)


def test_the_renderer_takes_ids_where_ray_puts_them() -> None:
    text = (folder_of("ray.llm") / "_internal/common/patches/vllm/tokenize_once.py").read_text(encoding="utf-8")
    assert "from vllm.renderers.base import BaseRenderer" in text
    assert '{**prompts[0], "prompt_token_ids": ids}' in text
    real = quietly("vllm.renderers.base").BaseRenderer
    wanted = ["self", "prompts", "params"]
    assert list(inspect.signature(real.tokenize_prompts_async).parameters)[:3] == wanted
    assert list(inspect.signature(protocol.BaseRenderer.tokenize_prompts_async).parameters)[:3] == wanted


def test_ray_takes_the_engine_class_from_the_environment(ray_llm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    server = importlib.import_module("ray.llm._internal.serve.core.server.llm_server")
    assert server.RAYLLM_VLLM_ENGINE_CLS_ENV == ENGINE_CLASS_ENV
    monkeypatch.setenv(ENGINE_CLASS_ENV, "collections.OrderedDict")
    assert server.LLMServer._get_default_engine_class(None).__name__ == "OrderedDict"


def test_the_engine_has_every_method_that_rays_servers_call(ray_llm: ModuleType) -> None:
    base = importlib.import_module("ray.llm._internal.serve.core.engine.protocol").LLMEngine
    tree = ast.parse((ROOT / "pdlab/rehearsal/engine.py").read_text(encoding="utf-8"))
    (ours,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SimulatedEngine"]
    methods = {node.name for node in ours.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert base.__abstractmethods__ <= methods
    assert {"build_asgi_app", "tokenize", "check_health", "shutdown"} <= methods
    assert all(hasattr(base, name) for name in ("build_asgi_app", "tokenize", "check_health", "shutdown"))


def test_decode_is_given_what_prefill_answered(ray_llm: ModuleType) -> None:
    base = importlib.import_module("ray.llm._internal.serve.engines.vllm.kv_transfer.base")
    request = protocol.CompletionRequest(model="m", prompt="p")

    class Backend(base.DefaultPDProtocolMixin):  # type: ignore[misc,name-defined]
        pass

    prefill = Backend().prepare_prefill_request(request=request, peer=None)
    assert prefill.kv_transfer_params["do_remote_decode"] is True and prefill.max_tokens == 1
    chunk = protocol.CompletionResponse(
        model="m", choices=[], usage=protocol.UsageInfo(), kv_transfer_params={"rehearsal": {"digest": "d"}}
    )
    decode = Backend().prepare_decode_request(request=request, peer=None, prefill_response=chunk)
    assert decode.kv_transfer_params == {"rehearsal": {"digest": "d"}}


def test_ray_knows_the_settings_of_made_up_nodes() -> None:
    raylet = folder_of("ray") / "core/src/ray/raylet/raylet"
    assert "RAY_worker_maximum_startup_concurrency" in node_env(2)
    assert b"worker_maximum_startup_concurrency" in raylet.read_bytes()
    assert node_env(2)["RAY_metrics_report_interval_ms"] == "1000", "sweeps wait for it"
    assert node_env(13)["RAY_metrics_report_interval_ms"] == "10000"
    assert node_env(13)["RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"] == "10000", "no replica wakes for what nobody fetches"
    names = [
        name.removeprefix("RAY_").encode() for name in OF_MANY_NODES if name.startswith("RAY_") and "SERVE" not in name
    ]
    assert [name for name in names if name not in raylet.read_bytes()] == []
    reporter = vars(quietly("ray.dashboard.modules.reporter.reporter_consts"))
    assert [name for name in OF_MANY_NODES if not name.startswith("RAY_") and name not in reporter] == []
    assert b"metrics_report_interval_ms" in raylet.read_bytes()
    constants = (folder_of("ray.serve") / "_private/constants.py").read_text(encoding="utf-8")
    assert serve_env(4.0) == {"RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "40"}
    assert 'RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S", 10.0' in " ".join(constants.split())


def test_metrics_have_vllms_names() -> None:
    metrics = ast.parse((ROOT / "pdlab/rehearsal/metrics.py").read_text(encoding="utf-8"))
    names = {
        node.value.removeprefix("vllm_")
        for node in ast.walk(metrics)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("vllm_")
    }
    vllm = folder_of("vllm")
    sources = [vllm / "v1/metrics/loggers.py", vllm / "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert len(names) > 10
    for name in names:
        assert f'"vllm:{name}"' in text, name


def test_the_load_generator_can_send_a_header_with_a_request() -> None:
    text = (folder_of("vllm") / "benchmarks/lib/endpoint_request_func.py").read_text(encoding="utf-8")
    assert "extra_headers: dict | None = None" in text
    assert "headers |= request_func_input.extra_headers" in text


def test_a_replica_of_simulated_engines_loads_neither_pandas_nor_arrow() -> None:
    """Ray Serve takes pandas where there is one, Ray Serve LLM names pyarrow's file systems: 70 MB a process."""
    printed(
        "import sys; from pdlab.rehearsal import stand_ins; stand_ins.at_start()\n"
        "import ray.serve._private.replica, ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server\n"
        "import pdlab.rehearsal.engine\n"
        "assert sys.modules['pandas'] is None and 'pyarrow.fs' in sys.modules\n"
        "assert not hasattr(sys.modules['pyarrow'], '__version__') and 'pyarrow.lib' not in sys.modules\n"
        "from ray._private.serialization import SerializationContext\n"
        "from ray._private.worker import Worker\n"
        "SerializationContext(Worker())",
        cwd=ROOT,
        env={**os.environ, **stand_ins.WITHOUT_ARROW},
    )
