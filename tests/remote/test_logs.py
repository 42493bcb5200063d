"""The one line that says why an engine failed, from logs as vLLM and Ray write them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pdlab.remote import logs
from pdlab.remote.logs import LogTail, count_prewarmed, first_error, root_cause, tail_logs

# The root cause is in the engine core's own process; what follows only repeats that it failed.
ENGINE_CORE = """\
:job_id:01000000
:actor_name:ServeReplica:pdlab:Decode:tiny-gptoss
INFO 2026-11-20 10:00:00,123 pdlab_Decode:tiny-gptoss x1 -- Getting the server ready ...
WARNING 11-20 10:00:01 [config.py:12] ImportError: flash_attn is not there, going on without
(EngineCore pid=812) INFO 11-20 10:00:02 [core.py:77] Initializing a V1 LLM engine (v0.29.0) with config: dtype=bf16
(EngineCore pid=812) ERROR 11-20 10:00:03 [core.py:708] EngineCore failed to start.
(EngineCore pid=812) ERROR 11-20 10:00:03 [core.py:708] Traceback (most recent call last):
(EngineCore pid=812) ERROR 11-20 10:00:03 [core.py:708]   File "vllm/v1/core/kv_cache_utils.py", line 6, in check
(EngineCore pid=812) ERROR 11-20 10:00:03 [core.py:708]     raise ValueError(
(EngineCore pid=812) ERROR 11-20 10:00:03 [core.py:708] ValueError: To serve at least one request with max seq len \
(8192), 0.25 GiB KV cache is needed, which is larger than the available KV cache memory (0.12 GiB).
(EngineCore pid=812) Process EngineCore:
Traceback (most recent call last):
  File "vllm/v1/engine/utils.py", line 1320, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica:pdlab:Decode:tiny-gptoss.initialize() (pid=800)
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
# Tensor parallel: a worker's error, wrapped twice on its way up.
WORKER = """\
:actor_name:ServeReplica:pdlab:Prefill:m
(Worker_TP1 pid=90) ERROR 11-20 10:00:03 [multiproc_executor.py:840] WorkerProc failed to start.
(Worker_TP1 pid=90) ERROR 11-20 10:00:03 [multiproc_executor.py:840] torch.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=80) ERROR 11-20 10:00:04 [core.py:708] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
KILLED_CORE = """\
:actor_name:ServeReplica:pdlab:Prefill:m
INFO 11-20 10:00:03 [core.py:77] Loading weights
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}
"""
KILLED_WORKER = """\
:actor_name:ServeReplica:pdlab:Prefill:m
(EngineCore pid=80) ERROR 11-20 10:00:04 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly \
(exit code: -9), shutting down executor.
(EngineCore pid=80) ERROR 11-20 10:00:04 [core.py:1569] RuntimeError: Executor failed.
(EngineCore pid=80) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace \
(above) for the root cause.
"""
RAY_ACTOR = """\
:actor_name:ServeReplica:pdlab:Decode:m
Traceback (most recent call last):
  File "pd_server.py", line 509, in _maybe_prewarm
ray.serve.exceptions.DeploymentUnavailableError: Deployment(name='Prefill:m') is unavailable: it failed to deploy.
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
"""
CALLBACK = """\
:actor_name:ServeReplica:pdlab:Decode:m
Exception: Error running callback method 'on_before_node_init' on LocalCallback: no attribute 'run_init_node'
"""
CLEAN = """\
:actor_name:ServeReplica:pdlab:Decode:m
INFO 2026-11-20 10:00:00,123 pdlab_Decode:m x1 -- Errors: 0, no error was seen
(EngineCore pid=812) INFO 11-20 10:00:02 [core.py:77] # raise ValueError
(EngineCore pid=812) WARNING 11-20 10:00:02 [cpu.py:7] RuntimeError: not in this build, a slower way is taken
UserWarning: something is deprecated
"""


class TestFirstError:
    @pytest.mark.parametrize(
        ("text", "begin", "has"),
        [
            (ENGINE_CORE, "ValueError: To serve at least one request", "(0.12 GiB)."),
            (WORKER, "OutOfMemoryError: CUDA out of memory.", ""),
            (KILLED_CORE, "", "{'EngineCore': -9}"),
            (KILLED_CORE, "", "memory ran out"),
            (KILLED_WORKER, "Worker proc VllmWorker-1 died unexpectedly", "memory ran out"),
            (CALLBACK, "Exception: Error running callback method", ""),
        ],
    )
    def test_the_first_of_its_own(self, text: str, begin: str, has: str) -> None:
        error = first_error(text)
        assert error is not None and error.startswith(begin) and has in error

    def test_another_exit_code_is_not_called_a_kill(self) -> None:
        error = first_error(KILLED_WORKER.replace("code: -9", "code: -4"))
        assert error is not None and "(exit code: -4)" in error and "memory" not in error

    @pytest.mark.parametrize(
        "line",
        [
            "(EngineCore pid=8) ERROR 11-20 10:00:03 [core.py:708] NotImplementedError",
            "NotImplementedError",
            "some.module.NotImplementedError",
        ],
    )
    def test_an_error_without_a_message(self, line: str) -> None:
        assert first_error(f"Traceback:\n    raise NotImplementedError\n{line}\n") == "NotImplementedError"

    @pytest.mark.parametrize("text", ["", CLEAN, RAY_ACTOR], ids=["empty", "clean", "another replica's"])
    def test_no_failure(self, text: str) -> None:
        assert first_error(text) is None


class TestTailLogs:
    @staticmethod
    def write(folder: Path, name: str, text: str, age_s: float = 0.0) -> Path:
        path = folder / name
        path.write_text(text)
        written = 1_800_000_000.0 - age_s
        os.utime(path, (written, written))
        return path

    def test_logs_of_this_application_newest_first(self, tmp_path: Path) -> None:
        old = self.write(tmp_path, "worker-1.out", CLEAN, age_s=60)
        new = self.write(tmp_path, "worker-2.err", ENGINE_CORE)
        self.write(tmp_path, "worker-3.out", WORKER.replace(":pdlab:", ":another:"))
        self.write(tmp_path, "worker-4.log", ENGINE_CORE)
        self.write(tmp_path, "raylet.out", ENGINE_CORE)
        tails = tail_logs(str(tmp_path), "pdlab")
        here = socket.gethostname()
        assert [(tail.node, tail.path) for tail in tails] == [(here, str(new)), (here, str(old))]
        assert root_cause(tails) == first_error(ENGINE_CORE)

    def test_logs_of_earlier_launches_are_left_out(self, tmp_path: Path) -> None:
        self.write(tmp_path, "worker-1.out", ENGINE_CORE, age_s=60)
        self.write(tmp_path, "worker-2.out", CLEAN)
        tails = tail_logs(str(tmp_path), "pdlab", since=1_800_000_000.0 - 30)
        assert [Path(tail.path).name for tail in tails] == ["worker-2.out"]
        assert root_cause(tails) is None

    def test_a_long_log_is_known_by_its_beginning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logs, "HEAD_BYTES", 200)
        monkeypatch.setattr(logs, "TAIL_BYTES", 200)
        text = ":actor_name:ServeReplica:pdlab:Decode:m\n" + "UCX DEBUG a line\n" * 1000 + "ValueError: the end\n"
        self.write(tmp_path, "worker-1.err", text)
        assert root_cause(tail_logs(str(tmp_path), "pdlab")) == "ValueError: the end"

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "worker-1.out").write_bytes(b":actor_name:ServeReplica:pdlab:x\n\xff\xfe\nOSError: \xff gone\n")
        (tail,) = tail_logs(str(tmp_path), "pdlab")
        assert tail.error == "OSError: \N{REPLACEMENT CHARACTER} gone"

    def test_what_the_prewarm_did(self, tmp_path: Path) -> None:
        """Lines as Ray's logger and its warnings write them, over one decode replica's two files."""
        head = ":actor_name:ServeReplica:pdlab:Decode:m\n"
        done = "INFO pdlab_Decode:m x1 -- [PDDecodeServer] Pre-warm handshake done for P replica 0.\n"
        empty = "[PDDecodeServer] P replica 1 returned empty kv_params; skipping.\n"
        self.write(tmp_path, "worker-1.err", head + done + empty + done)
        self.write(tmp_path, "worker-1.out", head + "[PDDecodeServer] Pre-warm complete\n")
        self.write(tmp_path, "worker-2.err", head + done, age_s=60)
        self.write(tmp_path, "worker-3.err", head.replace(":pdlab:", ":another:") + done)
        assert count_prewarmed(str(tmp_path), "pdlab") == (3, 1)
        assert count_prewarmed(str(tmp_path), "pdlab", since=1_800_000_000.0 - 30) == (2, 1)

    def test_no_folder(self, tmp_path: Path) -> None:
        assert tail_logs(str(tmp_path / "none"), "pdlab") == []


def test_root_cause_is_of_the_first_log_that_has_one() -> None:
    tails = [LogTail("a", "1", None), LogTail("a", "2", "ValueError: two"), LogTail("b", "3", "ValueError: three")]
    assert root_cause(tails) == "ValueError: two"
    assert root_cause(tails[:1]) is None
    assert root_cause([]) is None
