"""Two bare vLLM API servers, prefill and decode: the yardstick for what Ray and pdlab add."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdlab.cluster import two_hosts  # noqa: E402
from pdlab.cluster.local_nodes import hold_port  # noqa: E402
from pdlab.cluster.namespaces import network_of, spawn_in  # noqa: E402
from pdlab.cluster.priority import ANSWERING, set_niceness  # noqa: E402
from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.files import cache_dir  # noqa: E402
from pdlab.core.nodes import LinkShape  # noqa: E402
from pdlab.deploy.cpu_engine.tiny_model import ensure_tiny_model  # noqa: E402
from pdlab.deploy.serve_config import cpu_engine_kwargs, cpu_env  # noqa: E402

MODEL = "tiny-gptoss"
POLL_S = 0.05


def tiny_model() -> str:
    """Folder of the tiny model, built if it is not there."""
    shape = load_model(MODEL)
    assert shape is not None
    return str(ensure_tiny_model(shape, cache_dir()))


class BarePair:
    """A prefill and a decode server, started side by side.

    ``tuned``: with the engine arguments, environment, niceness and worker extension of pdlab's CPU engines;
    otherwise as vLLM ships, with a KV cache of 1 GiB. ``on_two_hosts``: prefill on one host made of
    namespaces and decode on another, as ``--local --two-hosts`` has them, so that KV takes the same wire;
    they answer within `network`.
    """

    def __init__(self, *, tuned: bool, on_two_hosts: bool = False) -> None:
        self.tuned = tuned
        self.on_two_hosts = on_two_hosts
        self.urls: dict[str, str] = {}
        self.ready_s = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._held: list[socket.socket] = []
        self._stack = contextlib.ExitStack()
        self._pair: two_hosts.TwoHosts | None = None

    def __enter__(self) -> BarePair:
        began = time.monotonic()
        self._scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pdlab-bare-"))
        try:
            if self.on_two_hosts:
                self._pair = self._stack.enter_context(_hosts(Path(self._scratch)))
            for role in ("producer", "consumer"):
                self._processes.append(self._start(role))
            with self.network():
                self._wait()
        except BaseException:
            self.__exit__()
            raise
        self.ready_s = time.monotonic() - began
        return self

    def pids(self) -> list[int]:
        """Of the servers and of all that they started."""
        import psutil

        servers = [psutil.Process(process.pid) for process in self._processes]
        return [each.pid for server in servers for each in (server, *server.children(recursive=True))]

    def network(self) -> contextlib.AbstractContextManager[None]:
        """Within it this thread, and what it starts, reaches the servers: on two hosts from that of prefill."""
        return network_of(self._pair.hosts[0].pid if self._pair else None)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + 10
            while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for held in self._held:
            held.close()
        self._stack.close()

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        host = self._pair.hosts[role == "consumer"] if self._pair else None
        address = host.address if host else "127.0.0.1"
        with network_of(host.pid if host else None):
            (held, port), (side_held, side_channel) = hold_port(), hold_port()
        self._held += [held, side_held]
        self.urls[role] = f"http://{address}:{port}"
        kwargs = {**cpu_engine_kwargs(), "max_model_len": 8192}
        env = {**os.environ, **cpu_env(), "VLLM_NO_USAGE_STATS": "1"}
        env |= {"TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch, "VLLM_HOST_IP": address}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.tuned:
            env["PYTHONPATH"] = str(ROOT)
            kwargs["distributed_executor_backend"] = "uni"
        else:
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
            env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
            for key in ("worker_extension_cls", "kv_cache_memory_bytes", "block_size"):
                kwargs.pop(key)
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
        flags = []
        for key, value in kwargs.items():
            flags += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
        transfer = (
            f'{{"kv_connector":"NixlConnector","kv_role":"kv_{role}","kv_buffer_device":"cpu",'
            '"kv_connector_extra_config":{"backends":["UCX"]}}'
        )
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model(),
            "--served-model-name", MODEL, "--host", address, "--port", str(port), *flags,
            "--disable-uvicorn-access-log", "--kv-transfer-config", transfer,
        ]  # fmt: skip
        options: dict[str, Any] = {"env": env, "start_new_session": True}
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = spawn_in(host.pid, command, **options) if host else subprocess.Popen(command, **options)
        if self.tuned:  # the worker extension gives the engine core its own
            set_niceness(ANSWERING, process.pid)
        return process

    def _wait(self) -> None:
        waiting = list(self.urls.values())
        while waiting:
            for process in self._processes:
                if process.poll() is not None:
                    raise SystemExit(f"a bare vLLM server ended with code {process.returncode}")
            try:
                with urllib.request.urlopen(f"{waiting[0]}/health", timeout=5):
                    waiting.pop(0)
            except OSError:
                time.sleep(POLL_S)


@contextlib.contextmanager
def _hosts(folder: Path) -> Iterator[two_hosts.TwoHosts]:
    """Two hosts that end with the block."""

    class Done(Exception):
        pass

    with contextlib.suppress(Done), two_hosts.create_hosts(folder, LinkShape(), os.environ, folder.name) as pair:
        yield pair
        raise Done  # they would stay
