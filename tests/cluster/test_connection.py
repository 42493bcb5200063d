"""A process that becomes a driver of local nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.cluster import connection

ROOT = Path(__file__).resolve().parents[2]
BECOMES = """
import sys
from pdlab.cluster import connection
from pdlab.cluster.local_nodes import AT_START, LocalNodes
nodes = LocalNodes(id="x", count=1, gcs_port=1, temp_dir="/nowhere", pids=(), env={AT_START: "made_here"})
connection.importlib.import_module = lambda name, found=connection.importlib.import_module: (
    print(name) if name.startswith("ray") else found(name)
)
connection.prepare(nodes, {}).result()
"""


def test_what_the_nodes_processes_do_at_their_start_comes_before_ray(tmp_path: Path) -> None:
    (tmp_path / "made_here.py").write_text("def at_start(): print('at start')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", BECOMES], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["at start", "ray.serve", "ray.serve.llm"]


AHEAD = """
import os, sys
from pdlab.cluster import connection, local_nodes
connection.AHEAD = ("decimal",)
connection.SHARED = ("not_installed",)
imports = connection.BackgroundImports()
imports.ahead()
imports.shared()
imports.last("json").result()
print("decimal" in sys.modules, os.environ[connection.WRITTEN[0]])
print(local_nodes.environment("x", "/nowhere").get(connection.WRITTEN[0]))
"""


@pytest.mark.parametrize("setting", [None, "/asked/for"])
def test_what_torch_writes_into_the_environment_is_not_the_nodes(setting: str | None) -> None:
    name, value = connection.WRITTEN
    env = {key: each for key, each in os.environ.items() if key != name} | ({} if setting is None else {name: setting})
    done = subprocess.run(
        [sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=60, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"True {setting or value}", str(setting)]
