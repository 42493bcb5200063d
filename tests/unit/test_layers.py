"""Imports go strictly to lower floors, and heavy packages stay in the rooms they belong to."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "pdlab").glob("*.py"))

# A module may import modules of lower floors only. A new module needs a line here.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "doctor_findings",
        "environment",
        "errors",
        "kv_layout",
        "label_layout",
        "namespaces",
        "net_facts",
        "nixl_import",
        "node_install",
        "node_probe",
        "progress",
        "provenance",
        "ranking",
        "raw_ucx",
        "replica_logs",
        "side_channel",
        "sim_router",
        "ucx_table",
    ),
    (
        "arguments",
        "doctor_settings",
        "doctor_software",
        "inside",
        "kv_codes",
        "kv_memory",
        "prometheus",
        "rank_types",
        "spec",
        "verdict",
    ),
    (
        "doctor",
        "kv_faults",
        "nodes",
        "notation",
        "statistics",
        "transfer",
        "workload",
    ),
    (
        "assign",
        "catalog",
        "moderation",
        "nixl_rank",
        "observed",
        "request",
        "results",
        "sim_level",
        "transfer_report",
        "two_hosts",
    ),
    (
        "advice",
        "canary",
        "demo",
        "gates",
        "levels",
        "metrics",
        "names",
        "options",
        "perf",
        "running",
        "slo_search",
        "store",
        "tiny_model",
        "traces",
        "transfer_options",
        "ttft_split",
    ),
    (
        "arrivals",
        "columns",
        "engine_metrics",
        "experiment_file",
        "imports",
        "kernel_tables",
        "load_client",
        "matching",
        "phase_rates",
        "placement",
        "sim_engine",
        "sim_links",
        "target",
        "wire_demo",
    ),
    (
        "analysis",
        "audit_folders",
        "candidates",
        "driver",
        "loading",
        "serve_args",
        "sim",
    ),
    (
        "accuracy",
        "asked",
        "audit_content",
        "cost",
        "describe",
        "local_nodes",
        "palette",
        "planner",
        "published",
        "resampling",
        "simulated",
        "sweep",
    ),
    (
        "audit",
        "calibrate",
        "compare",
        "experiment_plan",
        "hosts_cli",
        "predict",
        "regimes",
    ),
    (
        "cluster",
        "crossover",
        "experiment_run",
        "goodput",
        "tables",
    ),
    (
        "application",
        "experiment_cli",
        "nixl_check",
        "plan_report",
        "plots",
        "preflight",
        "report_figures",
        "sentences",
    ),
    (
        "bench",
        "findings",
        "handover",
        "launch",
        "report",
        "transfer_plot",
    ),
)
# They run inside other processes (Ray replicas, vLLM's workers, the load client), where their packages
# are loaded anyway. No module imports them.
INSIDE_OTHERS = {"bench_client", "host_init", "link_relay", "replica", "worker"}

ALLOWED = {
    "ray": {"application", "cluster", "nixl_check", "replica"},
    "vllm": {"bench_client", "worker"},
    "nixl": {"nixl_check", "nixl_import", "worker"},
    "torch": {"kv_memory", "tiny_model", "worker"},
    "transformers": {"tiny_model"},
    "tokenizers": {"tiny_model"},
    "matplotlib": {"plots", "transfer_plot"},
    "aiconfigurator": {"kernel_tables"},
}
# Packages that take long to import: never at the top of a module of pdlab.
HEAVY = {"ray", "vllm", "nixl", "torch", "transformers", "tokenizers", "matplotlib", "pandas", "aiconfigurator"}


def floor(name: str) -> int | None:
    return next((number for number, names in enumerate(FLOORS) if name in names), None)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(imported module, whether at the top of the file) for every import statement and `import_module` of a name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            if node.module == "pdlab":
                yield from ((f"pdlab.{alias.name}", node in top) for alias in node.names)
            elif node.module:
                yield node.module, node in top
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            for word in node.args[:1]:
                if isinstance(word, ast.Constant):
                    yield str(word.value), False


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_down(path: Path) -> None:
    name = path.stem
    if name == "__init__" or name in INSIDE_OTHERS:
        return
    mine = floor(name)
    assert mine is not None, f"pdlab/{path.name} is on no floor; put it into FLOORS of {Path(__file__).name}"
    for module, _ in imports(path):
        if not module.startswith("pdlab."):
            continue
        other = module.split(".")[1]
        below = floor(other)
        assert other not in INSIDE_OTHERS, f"pdlab/{path.name} imports {other}, which runs in other processes"
        assert below is not None and below < mine, f"pdlab/{path.name} (floor {mine}) imports {other} (floor {below})"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    for module, top in imports(path):
        package = module.split(".")[0]
        assert path.stem in ALLOWED.get(package, {path.stem}), f"pdlab/{path.name} imports {package}"
        if path.stem not in INSIDE_OTHERS:
            assert not (top and package in HEAVY), (
                f"pdlab/{path.name}: import {package} inside the function that needs it"
            )


def test_the_walk_sees_imports() -> None:
    assert len(MODULES) > 5
    assert ("pdlab.nodes", True) in set(imports(ROOT / "pdlab" / "placement.py"))
    assert {("ray", False), ("ray.serve", False)} <= set(imports(ROOT / "pdlab" / "cluster.py"))


def test_a_module_is_on_one_floor() -> None:
    names = [name for names in FLOORS for name in names]
    assert len(set(names)) == len(names)
    assert not set(names) & INSIDE_OTHERS


def test_what_every_python_process_of_the_nodes_loads_imports_nothing_but_gc() -> None:
    """pdlab/child is no package, it is put on the path of Ray's processes."""
    folder = ROOT / "pdlab" / "child"
    assert [path.name for path in folder.glob("*.py")] == ["sitecustomize.py"]
    assert set(imports(folder / "sitecustomize.py")) == {("gc", True)}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--pd-spread", "--cluster", "p5.48xlarge-x2", "--dry-run"],
        ["--collocated", "--num", "2", "--local", "--dry-run"],
        ["--pd-pack", "--cluster", "p5.48xlarge-x2", "--export", "-"],
    ],
    ids=lambda words: words[-1],
)
def test_answers_without_heavy_imports(words: list[str]) -> None:
    program = (
        "import sys, time, launch_gptoss\n"
        "try:\n    code = launch_gptoss.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print('LOADED', sorted(set(sys.modules) & {HEAVY!r}), code, 'CPU', time.process_time())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded, cpu_s = done.stdout.splitlines()[-1].split(" CPU ")
    assert loaded == "LOADED [] 0"
    assert float(cpu_s) < 1.0, "CPU time, so that a busy machine does not fail it"
