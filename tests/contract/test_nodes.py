"""What we lean on to see nodes, to run functions on them, and to start them with the arguments they know."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import SERVE, parameters, quietly

from pdlab import local_nodes, serve_args
from pdlab.application import APP
from pdlab.cluster import Cluster
from pdlab.environment import node_facts
from pdlab.errors import ClusterError
from pdlab.nodes import NODE_NAME_LABEL
from pdlab.replica_logs import LogTail, count_prewarmed, tail_logs
from pdlab.spec import Deployment, parse_label

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")


class TestView:
    """pdlab.cluster.Cluster.view."""

    def test_a_node_that_runs_no_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        node = {"NodeID": "n1", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 8.0}}
        monkeypatch.setattr(quietly("ray._private.state"), "available_resources_per_node", lambda: {})
        monkeypatch.setattr(Cluster, "alive", lambda _: [node])
        monkeypatch.setattr(Cluster, "ask_nodes", lambda *_: {})
        with pytest.raises(ClusterError, match=r"^Ray's node 10\.0\.0\.7 runs no task within 60 s$"):
            Cluster().view()
        monkeypatch.setattr(Cluster, "ask_nodes", lambda *_: {"n1": {"host": "h", "nic": {"kind": "efa", "count": 32}}})
        (seen,) = Cluster().view().nodes
        assert (seen.host, seen.nic.kind, seen.nic.count) == ("h", "efa", 32)

    def test_what_is_free_on_a_node(self) -> None:
        assert parameters(quietly("ray._private.state").available_resources_per_node) == []


class TestNodesWithoutPdlab:
    """Functions that run as Ray tasks take their modules along."""

    def test_they_run_where_pdlab_is_not_installed(self, tmp_path: Path) -> None:
        ray = quietly("ray")
        logs = tmp_path / "logs"
        logs.mkdir()
        text = f":actor_name:ServeReplica:{APP}:Decode:m\nPre-warm handshake done\nValueError: why\n"
        (logs / "worker-1.err").write_text(text)
        for function in (node_facts, tail_logs, count_prewarmed):
            ray.cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        calls = [(node_facts, ()), (tail_logs, (str(logs), APP)), (count_prewarmed, (str(logs), APP))]
        (tmp_path / "calls").write_bytes(ray.cloudpickle.dumps(calls))
        program = """
import importlib.util, pathlib
from ray import cloudpickle
assert importlib.util.find_spec("pdlab") is None
calls = cloudpickle.loads(pathlib.Path("calls").read_bytes())
answers = [function(*args) for function, args in calls]
pathlib.Path("answers").write_bytes(cloudpickle.dumps(answers))
"""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        facts, tails, warmed = ray.cloudpickle.loads((tmp_path / "answers").read_bytes())
        assert facts == node_facts()
        assert tails == tail_logs(str(logs), APP) and tails[0].error == "ValueError: why"
        assert isinstance(tails[0], LogTail)
        assert warmed == (1, 0)


class TestArguments:
    def test_vllm_knows_every_cpu_argument(self) -> None:
        engine = quietly("vllm.engine.arg_utils").AsyncEngineArgs
        frontend = quietly("vllm.entrypoints.launchers.cli_args").FrontendArgs
        known = {field.name for kind in (engine, frontend) for field in dataclasses.fields(kind)}
        assert set(serve_args.cpu_engine_kwargs()) <= known

    def test_vllm_knows_every_cpu_variable(self) -> None:
        known = quietly("vllm.envs").environment_variables
        assert {name for name in serve_args.cpu_env() if name.startswith("VLLM_")} <= set(known)

    def test_ray_start_knows_every_flag(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands: list[list[str]] = []

        class Started:
            pid = 2**22 + 1  # of no process

            def __init__(self, command: list[str], **_: Any) -> None:
                commands.append(command)

            def poll(self) -> int:
                return 0

        monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(local_nodes.subprocess, "Popen", Started)
        monkeypatch.setattr(local_nodes, "_wait_for", lambda *_: None)
        local_nodes.stop(local_nodes.start(2))

        known = {word for option in quietly("ray.scripts.scripts").start.params for word in option.opts}
        assert len(commands) == 2
        for command in commands:
            assert command[1] == "start"
            assert {word.partition("=")[0] for word in command[2:]} <= known
        labels = [word for word in commands[1] if word.startswith("--labels=")]
        parse = quietly("ray._private.label_utils").parse_node_labels_string
        assert parse(labels[0].removeprefix("--labels=")) == {NODE_NAME_LABEL: "local-2"}

    def test_ray_and_serve_read_our_variables(self) -> None:
        """Those that Python reads; raylets read the others (RAY_enable_worker_prestart, ...)."""
        texts = [
            Path(inspect.getfile(quietly(module))).read_text(encoding="utf-8")
            for module in ("ray.serve._private.constants", f"{SERVE}.constants")
        ]
        ours = {**local_nodes.environment("id", "/tmp/x"), **serve_args.serving_env(direct_streaming())}
        names = [name for name in ours if name.startswith(("RAY_SERVE_", "RAYLLM_"))]
        assert len(names) >= 7
        assert [name for name in names if not any(name in text for text in texts)] == []


def direct_streaming() -> Deployment:
    deployment = Deployment(topology=parse_label("collocated-1xtp1"))
    return deployment.model_copy(update={"serving": deployment.serving.model_copy(update={"direct_streaming": True})})
