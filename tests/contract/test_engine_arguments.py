"""The shipped table of engine arguments is that of the installed vLLM, read from its source; PDLAB_UPDATE_GOLDEN=1
writes it anew."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest

from pdlab.core.catalog import known_models, require_shape
from pdlab.core.errors import UsageError
from pdlab.deploy import engine_arguments

PLAIN = {"int", "float", "str", "bool", "list", "dict", "None"}


def vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    return Path(spec.origin).parent


def fields(tree: ast.AST, name: str) -> dict[str, ast.AnnAssign]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                each.target.id: each
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
    return {}


class Reader:
    """vLLM's argument classes, its configuration classes behind them, and its names for sets of literals."""

    def __init__(self, vllm: Path) -> None:
        self.arguments = ast.parse((vllm / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
        sources = [*sorted((vllm / "config").glob("*.py")), vllm / "model_executor/layers/quantization/__init__.py"]
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
        self.configs: dict[str, dict[str, ast.AnnAssign]] = {}
        self.literals: dict[str, ast.expr] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.configs[node.name] = fields(tree, node.name)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.literals[node.targets[0].id] = node.value
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    self.literals.setdefault(node.target.id, node.value)

    def table(self) -> dict[str, dict[str, Any]]:
        every = fields(self.arguments, "EngineArgs") | fields(self.arguments, "AsyncEngineArgs")
        return {name: self.rule(name, node) for name, node in sorted(every.items()) if not name.startswith("_")}

    def rule(self, name: str, node: ast.AnnAssign) -> dict[str, Any]:
        kinds, literals = self.kinds(node.annotation)
        rule: dict[str, Any] = {"types": sorted(kinds) if kinds is not None else None}
        if literals and kinds is not None and not kinds - {"None"}:
            rule["choices"] = literals
        elif literals and kinds is not None:
            rule["types"] = sorted({*kinds, *(type(each).__name__ for each in literals)})
        return rule | self.bounds(name, node)

    def kinds(self, node: ast.expr) -> tuple[set[str] | None, list[Any]]:
        """(plain types, or None where anything may be; literals)"""
        if isinstance(node, ast.Constant):
            return ({"None"}, []) if node.value is None else (None, [])
        if isinstance(node, ast.BinOp):
            (left, some), (right, more) = self.kinds(node.left), self.kinds(node.right)
            return (None if left is None or right is None else left | right), some + more
        name = node.value.id if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) else None
        if name == "Literal":
            return set(), list(self.values(node.slice))
        if name in ("list", "set", "tuple"):
            return {"list"}, []
        if name == "dict":
            return {"dict"}, []
        if isinstance(node, ast.Name):
            if node.id in PLAIN:
                return {node.id}, []
            alias = self.literals.get(node.id)
            if isinstance(alias, ast.Subscript) and isinstance(alias.value, ast.Name) and alias.value.id == "Literal":
                return set(), list(self.values(alias.slice))
        return None, []

    def values(self, node: ast.expr) -> Iterator[Any]:
        for each in node.elts if isinstance(node, ast.Tuple) else [node]:
            if isinstance(each, ast.Constant):
                yield each.value
            elif isinstance(each, ast.Name):
                alias = self.literals[each.id]
                assert isinstance(alias, ast.Subscript)
                yield from self.values(alias.slice)

    def bounds(self, name: str, node: ast.AnnAssign) -> dict[str, float]:
        default = node.value
        owner, field = None, name
        if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
            owner, field = default.value.id, default.attr
        elif isinstance(default, ast.Call) and isinstance(default.func, ast.Name) and default.func.id == "get_field":
            class_name, field_name = default.args
            assert isinstance(class_name, ast.Name) and isinstance(field_name, ast.Constant)
            owner, field = class_name.id, field_name.value
        if owner is None:  # None by default, and handed to the configuration that has a field of that name
            owners = ("CacheConfig", "SchedulerConfig", "ParallelConfig")
            owner = next((each for each in owners if field in self.configs[each]), None)
        config_field = self.configs.get(owner or "", {}).get(field)
        if config_field is None or not isinstance(config_field.value, ast.Call):
            return {}
        limits = {word.arg: word.value for word in config_field.value.keywords if word.arg in engine_arguments.LIMITS}
        return {str(limit): ast.literal_eval(value) for limit, value in limits.items()}


def frontend(vllm: Path) -> dict[str, dict[str, Any]]:
    """Arguments of vLLM's HTTP front end, which Ray Serve LLM takes among the engine's."""
    tree = ast.parse((vllm / "entrypoints" / "launchers" / "cli_args.py").read_text(encoding="utf-8"))
    names = fields(tree, "FrontendArgs") | fields(tree, "BaseFrontendArgs")
    return {name: {"types": None} for name in sorted(names)}


def parsers(vllm: Path) -> dict[str, dict[str, Any]]:
    """Arguments whose values are names of parsers that vLLM registers. Ray Serve LLM loads none of another module."""
    return {
        "tool_call_parser": {"types": ["None"], "choices": registered(vllm / "tool_parsers", "_TOOL_PARSERS")},
        # An empty name takes out that of the model's file.
        "reasoning_parser": {"types": ["str"], "choices": ["", *registered(vllm / "reasoning", "_REASONING_PARSERS")]},
    }


def registered(package: Path, name: str) -> list[str]:
    """Keys of the package's mapping of that name."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(each, ast.Name) and each.id.startswith(name) for each in node.targets):
            return sorted(str(ast.literal_eval(key)) for key in node.value.keys if key is not None)
    raise AssertionError(f"{package}: no {name}")


def test_the_table_is_that_of_the_installed_vllm() -> None:
    vllm = vllm_folder()
    fields = {
        "vllm": version(packages_distributions()["vllm"][0]).partition("+")[0],
        "arguments": frontend(vllm) | Reader(vllm).table() | parsers(vllm),
    }
    text = json.dumps(fields, indent=None, separators=(",", ":")).replace('"},', '"},\n').replace("},", "},\n") + "\n"
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        engine_arguments.TABLE.write_text(text, encoding="utf-8")
    assert json.loads(engine_arguments.TABLE.read_text(encoding="utf-8")) == json.loads(text)
    assert len(fields["arguments"]) > 150


REFUSED = {
    "gpu_memory_utilization": [9, 0, "much", None, True],
    "max_num_seqs": [-5, 0, 2.5, "many"],
    "max_num_batched_tokens": [0],
    "block_size": [0],
    "dtype": ["float8"],
    "kv_cache_dtype": ["fp9"],
    "enforce_eager": ["maybe", 2],
    "watermark": [1.0],
    "scheduling_policy": ["lifo"],
    "tool_call_parser": ["opneai", True, 5],
    "reasoning_parser": ["openai", None],
}
TAKEN = {
    "gpu_memory_utilization": [0.9, 1, "0.85"],
    "max_num_seqs": [256, None],
    "dtype": ["bfloat16", "auto"],
    "enforce_eager": [True, False],
    "kv_cache_memory_bytes": [None, 10**9],
    "eplb_config": [{"num_redundant_experts": 8}],
    "enable_prefix_caching": [None, False],
    "attention_backend": ["FLASHINFER"],
    "quantization": ["fp8", "of-a-plugin"],
    "tool_call_parser": ["openai", "hermes", None],
    "reasoning_parser": ["openai_gptoss", ""],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_vllm_refuses_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"--engine-arg {name}="):
        engine_arguments.check({name: value}, "--engine-arg")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in TAKEN.items() for value in values])
def test_what_vllm_takes_is_taken(name: str, value: object) -> None:
    engine_arguments.check({name: value}, "--engine-arg")


def test_a_misspelt_name_is_told_its_right_one() -> None:
    with pytest.raises(UsageError, match=r"gpu_memory_utilisation: .*did you mean gpu_memory_utilization"):
        engine_arguments.check({"gpu_memory_utilisation": 0.9}, "--engine-arg")


@pytest.mark.parametrize("model", known_models())
def test_parsers_of_the_models_are_vllms(model: str) -> None:
    shape = require_shape(model)
    engine_arguments.check(shape.engine_kwargs, "engine_kwargs")
    # The tiny models but tiny-gptoss have no format of their own to write tool calls in.
    assert engine_arguments.reads_tool_calls(shape.engine_kwargs) is (model not in ("tiny-deepseek", "tiny-llama"))
    # Of the catalogue's models, those of gpt-oss write their reasoning apart.
    assert ("reasoning_parser" in shape.engine_kwargs) is (shape.architecture == "GptOssForCausalLM")
