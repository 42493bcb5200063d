"""The real CPU stack: two Ray nodes on this machine, vLLM engines, NIXL; one for the whole session."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.web import fetch

from pdlab.bench.client.protocol import SESSION_HEADER

ROOT = Path(__file__).resolve().parents[2]
# Gates that say that this machine was too busy to drive or to serve the load, whatever is deployed.
# A level of a few seconds is in no steady state where something else takes the cores for one of them.
BUSY_MACHINE = {"client_saturation", "lateness", "front_saturation", "steady_state"}
TIMEOUT_S = 800  # a launch on a busy machine takes minutes; what ends, ends at once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.live)


class Done(NamedTuple):
    """A finished command; ``text`` is everything it printed."""

    code: int
    text: str


class Started:
    """A command that still runs."""

    def __init__(self, process: subprocess.Popen[str], printed: str) -> None:
        self.process, self.printed, self.pid = process, printed, process.pid

    def end(self) -> Done:
        """Its end, and all that it printed to standard error."""
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            text = self.printed + stderr.read()
        print(text)
        return Done(self.process.wait(TIMEOUT_S), text)


class Stack:
    """Runs pdlab's commands against a cache folder and a port of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.shared: set[str] = set()
        self.env = {**os.environ, "PDLAB_CACHE_DIR": str(folder / "cache")}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, *words]

    def run(self, *words: str, env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Done:
        done = subprocess.run(
            self.command(*words), cwd=ROOT, env={**self.env, **(env or {})}, text=True, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(done.stdout)
        return Done(done.returncode, done.stdout)

    def start(self, *words: str, until: str) -> Started:
        """A command in a session of its own that has printed a line with the pattern ``until`` to standard error."""
        process = subprocess.Popen(
            self.command(*words), cwd=ROOT, env=self.env, text=True, stderr=subprocess.PIPE, start_new_session=True
        )
        assert process.stderr is not None
        printed = ""
        for line in process.stderr:
            printed += line
            if re.search(until, line):
                break
        return Started(process, printed)

    def launch(self, *flags: str, env: dict[str, str] | None = None) -> Done:
        words = ("launch_gptoss.py", *flags, "--local", "--detach", "--port", str(self.port), "--timeout-s", "600")
        done = self.run(*words, env=env)
        self.note_shared_memory()
        return done

    def shutdown(self) -> Done:
        """Exits with 1 if nothing is up."""
        return self.run("launch_gptoss.py", "--shutdown", "--port", str(self.port))

    def pids(self) -> list[int]:
        """The processes of the local Ray nodes."""
        from pdlab.cluster import local_nodes

        nodes = self.nodes()
        return local_nodes.processes(nodes) if nodes else []

    def note_shared_memory(self) -> None:
        """Keep the names in /dev/shm that processes of the nodes have mapped now: none may be there at the end."""
        inodes = set()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                inodes |= {line.split()[4] for line in lines if "/dev/shm/" in line}
        for path in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):
                self.shared |= {str(path)} if str(path.stat().st_ino) in inodes else set()

    def running(self) -> Any:
        """What the launcher published (None: nothing)."""
        from pdlab.deploy.endpoint import load_running

        return load_running(self.url)

    def nodes(self) -> Any:
        """The local Ray nodes that are up (None: none)."""
        from pdlab.cluster import local_nodes

        return local_nodes.running()

    def complete(self, prompt: list[int] | str, tokens: int = 16, session: str | None = None) -> list[int]:
        """Token ids of a greedy completion."""
        body = {"model": "tiny-gptoss", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
        headers = {SESSION_HEADER: session} if session else {}
        body |= {"ignore_eos": True, "return_token_ids": True}
        status, text = fetch(f"{self.url}/v1/completions", body, headers=headers)
        if status != 200:
            raise OSError(f"HTTP {status}: {text}")
        token_ids: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return token_ids

    def answers(self) -> bool:
        """Whether a completion is answered."""
        try:
            return bool(self.complete("ba", tokens=1))
        except OSError:
            return False


@contextlib.contextmanager
def own_stack(folder: Path) -> Iterator[Stack]:
    """A cache folder and a port of its own. Nodes that are up at the end are shut down."""
    from pdlab.cluster.local_nodes import hold_port

    held, port = hold_port()
    made = Stack(folder, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDLAB_CACHE_DIR", made.env["PDLAB_CACHE_DIR"])
        try:
            yield made
        finally:
            held.close()
            if made.nodes() is not None:  # else --shutdown looks for another Ray of this machine
                made.shutdown()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with own_stack(tmp_path_factory.mktemp("live")) as made:
        yield made
