"""The doctor and the shipping of a wheel on two Ray nodes of this machine that are not alike."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.stub_wheel import needs_installer, wheel

from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.core.nodes import NODE_NAME_LABEL
from pdlab.transfer.doctor.findings import DoctorFinding

ROOT = Path(__file__).resolve().parents[2]
JOIN_TIMEOUT_S = 300
TAKEN_PORT = 22001  # of decode's side channels


class Unlike(NamedTuple):
    """Two nodes, of which the second finds another vllm and nixl, and logs too much."""

    folder: Path
    nodes: LocalNodes

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PDLAB_CACHE_DIR": str(self.folder / "cache")}
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
        print(done.stdout, done.stderr)
        return done


@pytest.fixture(scope="module")
def unlike() -> Iterator[Unlike]:
    folder = Path(tempfile.mkdtemp(prefix="doc-"))  # Ray's sockets need a short path
    shadow = folder / "shadow"
    for name in ("vllm", "nixl"):
        info = shadow / f"{name}-9.9.9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")
    (shadow / "nixl").mkdir()
    (shadow / "nixl" / "__init__.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDLAB_CACHE_DIR", str(folder / "cache"))
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes = local_nodes.start(1)
        second = None
        try:
            patch.setenv("PYTHONPATH", str(shadow))
            patch.setenv("NIXL_LOG_LEVEL", "DEBUG")
            second = _join(nodes, 2)
            yield Unlike(folder, nodes)
        finally:
            local_nodes.stop(nodes)  # by the marker in its environment, the second goes too
            if second is not None:
                second.wait(60)
            shutil.rmtree(folder)
    assert local_nodes.processes(nodes) == []


def _join(nodes: LocalNodes, number: int) -> subprocess.Popen[bytes]:
    """One more node, with the environment of this process as it is now; returns when it has joined."""
    command = [
        str(Path(sys.executable).with_name("ray")), "start", f"--address={nodes.address}", "--block", "--num-cpus=1",
        "--disable-usage-stats", "--include-log-monitor=false", "--num-gpus=0", "--node-ip-address=127.0.0.1",
        f"--object-store-memory={local_nodes.OBJECT_STORE_BYTES}", f"--labels={NODE_NAME_LABEL}=local-{number}",
    ]  # fmt: skip
    env = local_nodes.environment(nodes.id, nodes.temp_dir)
    path = Path(nodes.temp_dir) / f"node-{number}.log"
    with path.open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while "Ray runtime started" not in path.read_text():
        assert process.poll() is None and time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)
    return process


def test_what_differs_between_nodes_is_named_with_the_node(unlike: Unlike) -> None:
    out = unlike.folder / "doctor.json"
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", TAKEN_PORT))
        taken.listen()
        assert unlike.run("debug/doctor.py", "--json", str(out)).returncode == 3
    report: dict[str, Any] = json.loads(out.read_text())
    assert set(report["nodes"]) == {"local-1", "local-2"}
    findings = {
        each.pop("topic"): DoctorFinding(**{**each, "nodes": tuple(each["nodes"])}) for each in report["findings"]
    }
    for name in ("vllm", "nixl"):
        version = findings[f"{name} version"]
        assert version.severity == "error"
        assert "local-2 9.9.9" in version.evidence and "local-1 9.9.9" not in version.evidence
    for topic in ("debug logging", "NIXL", "nixl from elsewhere"):
        assert findings[topic].nodes == ("local-2",), topic
    port = findings["side-channel port"]
    assert port.severity == "error" and set(port.nodes) == {"local-1", "local-2"}
    assert f"taken: {TAKEN_PORT}" in port.evidence and f"process {os.getpid()}" in port.evidence
    assert report["nodes"]["local-1"]["loaded"]["backends"] == {"UCX": None}


@needs_installer
def test_a_wheel_reaches_every_node(unlike: Unlike) -> None:
    target = unlike.folder / "target"
    words = (str(wheel(unlike.folder)), "--target", str(target), "--module", "shipped")
    done = unlike.run("debug/install_on_nodes.py", *words)
    assert done.returncode == 0
    values = dict(line.split(": ", 1) for line in done.stdout.splitlines()[:2])
    assert set(values) == {"local-1", "local-2"} and len(set(values.values())) == 1
    assert str(target / "shipped" / "__init__.py") in values["local-1"]
    assert (target / "shipped" / "__init__.py").read_text() == "VALUE = 1\n"


@needs_installer
def test_the_same_wheel_that_loads_other_libraries_is_not_called_the_same(unlike: Unlike) -> None:
    words = (str(wheel(unlike.folder)), "--target", str(unlike.folder / "target"), "--backends", "UCX")
    done = unlike.run("debug/install_on_nodes.py", *words)
    assert done.returncode == 3
    assert "the nodes have the same files and load others: local-2: ModuleNotFoundError" in done.stderr
