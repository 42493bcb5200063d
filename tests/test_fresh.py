""".ci/fresh: a command sees nothing that the machine holds, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRESH = str(ROOT / ".ci" / "fresh")
MAY = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
needs_namespaces = pytest.mark.skipif(not MAY, reason="mount namespaces need root")


def run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FRESH, "bash", "-c", script], env={**os.environ, "FRESH_ROOT": str(folder), **env},
        capture_output=True, text=True, timeout=60, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that is not below /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@needs_namespaces
def test_nothing_of_the_machine_is_seen(outside: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp"), tempfile.NamedTemporaryFile(dir="/dev/shm"):
        done = run(
            'find /tmp /dev/shm "$HOME" -mindepth 1; env',
            outside,
            RAY_ADDRESS="x:1",
            PIP_RETRIES="7",
            https_proxy="p:1",
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all("=" in line for line in lines), "a file was found"
    settings = dict(line.split("=", 1) for line in lines)
    assert settings["PIP_RETRIES"] == "7" and settings["https_proxy"] == "p:1" and "RAY_ADDRESS" not in settings
    assert settings["HOME"].startswith(str(outside))


@needs_namespaces
def test_what_it_writes_goes_with_it(outside: Path) -> None:
    name = f"pdlab-fresh-{os.getpid()}"
    done = run(f'touch /tmp/{name} /dev/shm/{name} "$HOME"/{name}; exit 7', outside)
    assert done.returncode == 7
    assert not Path("/tmp", name).exists() and not Path("/dev/shm", name).exists()
    assert list(outside.iterdir()) == []


@needs_namespaces
def test_a_checkout_below_tmp_keeps_its_place(outside: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "file").write_text("mine")
        done = subprocess.run(
            [FRESH, "cat", f"{folder}/file"], env={**os.environ, "FRESH_ROOT": str(outside)},
            capture_output=True, text=True, timeout=60, cwd=folder,
        )  # fmt: skip
    assert done.stdout == "mine", done.stderr


def test_where_there_is_no_namespace_it_says_so_and_goes_on(tmp_path: Path) -> None:
    refused = tmp_path / "unshare"
    refused.write_text("#!/bin/sh\necho unshare: Operation not permitted >&2; exit 1\n")
    refused.chmod(0o755)
    done = run("echo here; exit 5", tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (5, "here\n")
    (line,) = done.stderr.splitlines()
    assert "bash runs with this machine's own /tmp, /dev/shm and home" in line
