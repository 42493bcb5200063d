"""Exports on a Ray that pdlab did not start and that has no pdlab: `serve deploy` of the file, and right answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from support.web import fetch

from pdlab.cli import launch
from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import JOINED, LocalNodes, hold_port
from pdlab.core.catalog import require_shape
from pdlab.deploy import canary
from pdlab.deploy.cpu_engine.tiny_model import ensure_tiny_model
from pdlab.deploy.kubernetes.code_zip import archive, code, file_name
from tests.live.conftest import ROOT, TIMEOUT_S

MODEL = "tiny-gptoss"
# As `ray start` is called by a person: the name of a node, and no more CPUs than the two engines need.
NODE = (
    *("--num-cpus=4", "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0", "--block"),
    *("--node-ip-address=127.0.0.1", "--disable-usage-stats", "--dashboard-agent-listen-port=0"),
)
# The prefill engine alone, asked through Ray: the same model without a KV transfer. And what vLLM counted before.
REFERENCE = """
import json, sys, time
from pdlab.cluster import local_nodes
from pdlab.cluster.connection import Cluster
from pdlab.deploy import canary
from pdlab.deploy.application import Application
from pdlab.deploy.engine_metrics import read_snapshot
nodes = local_nodes.LocalNodes.model_validate_json(sys.argv[1])
local_nodes.become_driver(nodes)
with Cluster(nodes) as cluster:
    for _ in range(60):
        counted = read_snapshot(cluster.metrics_urls()).nixl
        if (counted.transfers or 0) >= len(canary.requests(sys.argv[2])):
            break
        time.sleep(1)
    answers = Application(cluster).ask_alone("prefill", sys.argv[2], canary.requests(sys.argv[2]))
answers = [canary.read_answer(answer).model_dump(mode="json") for answer in answers]
print(json.dumps([counted.transfers, counted.failed_transfers, answers]))
"""

DRIVER = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}  # a driver has no event loop to share


class ForeignRay(NamedTuple):
    """Two Ray nodes with a dashboard, whose processes have no path to pdlab. ``port``: a free one to serve on."""

    nodes: LocalNodes
    env: dict[str, str]
    folder: Path
    dashboard: str
    port: int

    def run(self, *words: str) -> str:
        """What a program of the environment prints, run away from the checkout."""
        program = str(Path(sys.executable).parent / words[0])
        done = subprocess.run(
            [program, *words[1:]], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def deploy(self, file: Path) -> None:
        """`serve deploy`, and wait until the application runs. The dashboard is asked, for `serve status` imports
        Ray Serve on each call."""
        self.run("serve", "deploy", "--address", self.dashboard, str(file))
        token = (Path(self.nodes.temp_dir) / local_nodes.TOKEN_FILE).read_text()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            status, text = fetch(f"{self.dashboard}/api/serve/applications/", key=token)
            assert status == 200, text
            state = json.loads(text)["applications"].get("pdlab", {"status": "NOT_STARTED"})
            if state["status"] == "RUNNING":
                return
            assert state["status"] in ("NOT_STARTED", "DEPLOYING") and time.monotonic() < deadline, state
            time.sleep(0.5)

    def reference(self) -> tuple[float, float, list[canary.CanaryAnswer]]:
        """KV transfers that were done, those that failed, and the answers of prefill alone."""
        words = [sys.executable, "-c", REFERENCE, self.nodes.model_dump_json(), MODEL]
        done = subprocess.run(
            words, cwd=ROOT, env={**self.env, "PYTHONPATH": str(ROOT), **DRIVER}, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        moved, failed, answers = json.loads(done.stdout.splitlines()[-1])
        return moved, failed, [canary.CanaryAnswer.model_validate_json(json.dumps(each)) for each in answers]


def free_port() -> int:
    held, port = hold_port()
    held.close()
    return port


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("exports")
        patch.setenv("PDLAB_CACHE_DIR", str(folder / "cache"))
        shape = require_shape(MODEL)
        ensure_tiny_model(shape, folder / "cache")
        yield folder


@pytest.fixture
def foreign(cache: Path) -> Iterator[ForeignRay]:
    marker = uuid.uuid4().hex[:12]
    temp_dir = Path(f"{tempfile.gettempdir()}/pdlab-{marker[:8]}")
    (temp_dir / "t").mkdir(parents=True, mode=0o700)
    folder = cache / f"elsewhere-{marker}"
    folder.mkdir()
    own = local_nodes.environment(marker, str(temp_dir))
    # What Ray Serve is told has to come with the exported file. HAProxy's own files and ports are this machine's.
    needed = ("RAY_SERVE_HAPROXY_CONFIG", "RAY_SERVE_HAPROXY_SOCKET", "RAY_SERVE_HAPROXY_METRICS_SOCKET")
    env = {
        name: value
        for name, value in own.items()
        if not name.startswith("RAY_SERVE_") or name.startswith((*needed, "RAY_SERVE_HAPROXY_SERVER_STATE"))
    }
    env |= {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
    local_nodes._write_token(temp_dir / local_nodes.TOKEN_FILE)
    gcs, dashboard = free_port(), free_port()
    nodes = LocalNodes(id=marker, count=2, gcs_port=gcs, temp_dir=str(temp_dir), pids=())
    ray = str(Path(sys.executable).parent / "ray")
    first = ("--head", f"--port={gcs}", f"--temp-dir={temp_dir}", "--include-dashboard=true",
             f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1")  # fmt: skip
    started = []
    try:
        for number, flags in enumerate((first, (f"--address=127.0.0.1:{gcs}",)), start=1):
            log = temp_dir / f"node-{number}.log"
            words = [ray, "start", *flags, *NODE, f"--labels=pdlab/node=local-{number}"]
            with log.open("w") as file:
                process = subprocess.Popen(
                    words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )  # fmt: skip
            started.append(process)
            deadline = time.monotonic() + TIMEOUT_S
            while JOINED not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield ForeignRay(nodes, env, folder, f"http://127.0.0.1:{dashboard}", free_port())
    finally:
        with contextlib.suppress(OSError):
            logs = sorted(Path(temp_dir, "session_latest", "logs", "serve").glob("*.log"))
            print("\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-5:]))
        local_nodes.stop(nodes)
        for process in started:
            process.wait(60)


def answers_right(foreign: ForeignRay) -> None:
    """The canary, against the prefill engine alone, and KV cache moved."""
    found = canary.ask(f"http://127.0.0.1:{foreign.port}", MODEL)
    moved, failed, alone = foreign.reference()
    assert moved >= len(found) and not failed
    result = canary.compare(found, alone, "the prefill engine alone")
    assert len(found) == 3 and result.equal is True, result.detail


def export(foreign: ForeignRay, *words: str) -> Path:
    file = foreign.folder / "app.yaml"
    assert launch.main(["--pd-spread", "--local", "2", "--port", str(foreign.port), *words, str(file)]) == 0
    return file


DETOKENIZE = {"model": MODEL, "tokens": [5]}


def test_an_export_that_carries_pdlab_answers_right(foreign: ForeignRay) -> None:
    with pytest.raises(AssertionError, match="No module named 'pdlab'"):
        foreign.run("python", "-c", "import pdlab")
    zipped = foreign.folder / file_name(code())
    zipped.write_bytes(archive(code()))
    foreign.deploy(export(foreign, "--code-url", f"file://{zipped}", "--export"))
    answers_right(foreign)
    url = f"http://127.0.0.1:{foreign.port}"
    # The guard of requests is in front, and HAProxy, which Ray Serve starts if its controller is told to.
    assert fetch(f"{url}/detokenize", DETOKENIZE)[0] == 404
    titles = [Path(f"/proc/{pid}/comm") for pid in local_nodes.processes(foreign.nodes)]
    assert "haproxy" in {title.read_text().strip() for title in titles if title.exists()}


@pytest.mark.long
def test_a_plain_export_needs_no_pdlab_and_answers_right(foreign: ForeignRay) -> None:
    file = export(foreign, "--export-plain")
    assert "pdlab." not in str(yaml.safe_load(file.read_text())["applications"][0]["args"])
    foreign.deploy(file)
    answers_right(foreign)
    assert fetch(f"http://127.0.0.1:{foreign.port}/detokenize", DETOKENIZE)[0] == 200, "the route is open"
