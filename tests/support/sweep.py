"""What the sweep's tests share: the oracle server's handle, the launcher's record, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from support import launched

from pdlab.bench.target import SHORT
from pdlab.core.deployment import Deployment, Disaggregated, Pool
from pdlab.deploy.endpoint import load_running, save_running

ROOT = Path(__file__).resolve().parents[2]
# Gates that say that this machine was too busy to drive the load, whatever is planted.
BUSY_MACHINE = {"client_saturation", "lateness"}


@dataclass
class Oracle:
    """A running oracle server."""

    url: str
    process: subprocess.Popen[str]

    def configure(self, config: dict[str, dict[str, float]]) -> None:
        request = urllib.request.Request(f"{self.url}/oracle/config", data=json.dumps(config).encode())
        urllib.request.urlopen(request, timeout=10).close()

    def log(self) -> list[dict[str, Any]]:
        """The requests, without the completions of each start that show whether the server answers."""
        with urllib.request.urlopen(f"{self.url}/oracle/log", timeout=30) as answer:
            entries: list[dict[str, Any]] = json.load(answer)
        return [entry for entry in entries if entry["prompt"] != SHORT]

    def log_of(self, prefix: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log() if entry["id"].startswith(prefix)]


def start_oracle() -> Iterator[Oracle]:
    command = [sys.executable, str(ROOT / "tests" / "support" / "oracle.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield Oracle(url=f"http://127.0.0.1:{int(process.stdout.readline())}", process=process)
        finally:
            process.kill()


def pd_deployment() -> Deployment:
    topology = Disaggregated(prefill=Pool(), decode=Pool(), placement="spread")
    return Deployment(model="tiny-gptoss", topology=topology)


def publish(cache: Path, oracle: Oracle, tokenizer: Path, deployment: Deployment) -> None:
    """Write what the launcher would have written for the oracle."""
    running = launched.oracle(oracle.url, str(tokenizer), deployment)
    with mock.patch.dict(os.environ, PDLAB_CACHE_DIR=str(cache)):
        save_running(running)
        assert load_running(oracle.url) == running


def ended_well(code: int | None, output: str) -> bool:
    """Whether a sweep found every level valid, but for what this machine was too busy to drive."""
    invalid = [line for line in output.splitlines() if line.startswith("INVALID ")]
    return not invalid if code == 0 else code == 3 and all(": load generator " in line for line in invalid)


WARM: dict[str, str] = {}  # environment of a sweep whose load generator is forked from `start_template`'s


def start_template(folder: Path, tokenizer: Path) -> Iterator[None]:
    """Sweeps take load generators that have imported vLLM (tests/support/warm_client): ten seconds of CPU less each."""
    here = Path(__file__).parent / "warm_client"
    command = [sys.executable, str(here / "template.py"), str(folder / "socket"), str(tokenizer)]
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "ready\n"
            WARM.update(PDLAB_TEST_WARM_CLIENT=str(folder / "socket"), PYTHONPATH=str(here))
            yield
        finally:
            WARM.clear()
            process.stdin.close()


def environment(cache: Path, *, warm: bool = True) -> dict[str, str]:
    return {**os.environ, **(WARM if warm else {}), "PDLAB_CACHE_DIR": str(cache)}


def start_bm(*args: str, cache: Path, warm: bool = True) -> subprocess.Popen[str]:
    """./run_bm.sh with those arguments, as `run_bm`, while the test goes on."""
    command, env = [str(ROOT / "run_bm.sh"), *args], environment(cache, warm=warm)
    return subprocess.Popen(command, env=env, cwd=cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_bm(
    *args: str, cache: Path, cwd: Path | None = None, timeout: float = 170, warm: bool = True
) -> subprocess.CompletedProcess[str]:
    """./run_bm.sh with those arguments, from a folder that is not the repository."""
    return subprocess.run(
        [str(ROOT / "run_bm.sh"), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(cache, warm=warm),
        cwd=cwd or cache,
    )
