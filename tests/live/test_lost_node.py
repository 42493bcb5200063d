"""A local node whose raylet ends with status 0 is not missed by `ray start`, only by Ray's GCS."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.live.conftest import ROOT, TIMEOUT_S, Stack

pytestmark = pytest.mark.live

PROGRAM = """
import json, psutil
from pdlab.cluster import local_nodes, machine
from pdlab.cluster.connection import Cluster
from pdlab.cluster.loopback import NODE_NUMBER
from pdlab.remote.kernel_files import inherited

warnings = []
nodes = local_nodes.start(2)
try:
    local_nodes.await_joined(nodes)
    raylet, = [pid for pid in local_nodes.processes(nodes)
               if machine.command_line(pid)[0].endswith("/raylet") and inherited(pid, f"{NODE_NUMBER}=2")]
    ended = psutil.Process(raylet)
    ended.terminate()
    ended.wait(60)
    local_nodes.become_driver(nodes)
    with Cluster(nodes, warn=warnings.append) as cluster:
        names = sorted(node.id for node in cluster.view().nodes)
    again = local_nodes.running()
    print(json.dumps([names, len(warnings), again.pids[0] == nodes.pids[0], again.pids[1] != nodes.pids[1]]))
finally:
    local_nodes.stop(nodes)
print(local_nodes.processes(nodes))
"""


def test_it_is_started_once_more(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT, env=stack.env, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ['[["local-1", "local-2"], 1, true, true]', "[]"], done.stderr
