"""vLLM's benchmark loads without what the load generator leaves out, and takes no more from there than we put there."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

from pdlab.bench.client.worker import ENGINES_OWN

PROGRAM = """
import sys
from pdlab.bench.client.worker import import_benchmark
import_benchmark()
from vllm.benchmarks.datasets import RandomDataset
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncOutput
from vllm.benchmarks.serve import TaskType, benchmark
print("LOADED", sorted({"torch._inductor.lowering", "vllm.lora.layers"} & set(sys.modules)))
"""


def test_it_loads_without_compiler_and_lora_layers() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_it_takes_what_the_stubs_have() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    taken: dict[str, set[str]] = {name: set() for name in ENGINES_OWN}
    files = sorted((Path(spec.submodule_search_locations[0]) / "benchmarks").rglob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in taken:
                taken[node.module] |= {alias.name for alias in node.names}
    assert taken == {name: set(attributes) for name, attributes in ENGINES_OWN.items()}
