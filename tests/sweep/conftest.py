"""The oracle server, a tokenizer, and one shared sweep of the real client against them."""

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

import pytest

from pdlab.results import Manifest
from pdlab.running import Running
from pdlab.spec import Deployment, Disaggregated, Pool, to_yaml
from pdlab.tiny_model import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Oracle:
    """A running oracle server."""

    url: str

    def configure(self, config: dict[str, dict[str, float]]) -> None:
        request = urllib.request.Request(f"{self.url}/oracle/config", data=json.dumps(config).encode())
        urllib.request.urlopen(request, timeout=10).close()

    def log(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/oracle/log", timeout=30) as answer:
            entries: list[dict[str, Any]] = json.load(answer)
        return entries

    def log_of(self, prefix: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log() if entry["id"].startswith(prefix)]


def start_oracle() -> Iterator[Oracle]:
    command = [sys.executable, str(ROOT / "tests" / "oracle.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield Oracle(url=f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.kill()


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    yield from start_oracle()


@pytest.fixture(scope="session")
def shared_oracle() -> Iterator[Oracle]:
    yield from start_oracle()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder, 4096)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def pd_deployment(label_prefill: int = 1) -> Deployment:
    topology = Disaggregated(prefill=Pool(replicas=label_prefill), decode=Pool(), placement="spread")
    return Deployment(model="tiny-gptoss", topology=topology)


def publish(cache: Path, oracle: Oracle, tokenizer: Path, deployment: Deployment) -> None:
    """Write what the launcher would have written for the oracle."""
    manifest = Manifest(origin="measured", label=deployment.label, deployment=deployment, gpus=deployment.gpus)
    running = Running(
        base_url=oracle.url,
        model_id="oracle",
        tokenizer=str(tokenizer),
        manifest=manifest,
        metrics_urls=(f"{oracle.url}/metrics",),
    )
    folder = cache / "running"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"127.0.0.1_{oracle.url.rsplit(':', 1)[1]}.yaml").write_text(to_yaml(running))


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "PDLAB_CACHE_DIR": str(cache)}


def run_bm(*args: str, cache: Path, cwd: Path | None = None, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """./run_bm.sh with those arguments, from a folder that is not the repository."""
    return subprocess.run(
        [str(ROOT / "run_bm.sh"), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(cache),
        cwd=cwd or cache,
    )
