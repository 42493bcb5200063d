"""The images: each step is one that can be repeated, and the CPU image's steps install the pinned stack."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV"}
# Of the image's system, which a script on this machine does not change.
SYSTEM = ("apt-get", "/etc/")


class Step(NamedTuple):
    """One instruction of a Dockerfile, its continued lines joined."""

    word: str
    rest: str


def steps(path: Path) -> list[Step]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [Step(*line.split(" ", 1)) for line in joined.splitlines()]


def faults(path: Path) -> list[str]:
    """What keeps an image from being built again, or makes it larger than it must be."""
    found = []
    words = [step.word for step in steps(path)]
    arguments = {
        name: value for step in steps(path) if step.word == "ARG" for name, _, value in [step.rest.partition("=")]
    }
    found += [f"unknown instruction {word}" for word in words if word not in KNOWN]
    if [word for word in words if word != "ARG"][:1] != ["FROM"]:
        found.append("does not begin with FROM")
    for word, rest in steps(path):
        filled = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], ""), rest)
        if word == "ARG" and not arguments[rest.partition("=")[0]]:
            found.append(f"{rest} has no default")
        if word == "FROM" and (":" not in filled or filled.endswith(":latest")):
            found.append(f"{filled} is no fixed base")
        if word == "COPY":
            found += [f"{name} is not in the project" for name in rest.split()[:-1] if not (ROOT / name).exists()]
        if word == "RUN":
            commands = [command.split() for command in rest.split(" && ")]
            installs = [command for command in commands if command[:2] == ["apt-get", "install"]]
            if installs and (["apt-get", "update"] not in commands or "/var/lib/apt/lists/*" not in rest):
                found.append("apt-get install without update before it and without removal of the lists behind it")
            found += ["apt-get install asks, or takes more than is needed" for command in installs
                      if not {"-y", "--no-install-recommends"} <= set(command)]  # fmt: skip
            if "pip install" in rest:
                found.append("a package beside the pinned ones")
            if done := subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True).stderr:
                found.append(f"no shell command: {done}")
        if re.search(r"(?i)(token|password|secret|api_key)\s*=", rest):
            found.append("a secret in a layer")
    return found


def test_there_are_two() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".gpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])
def test_steps_can_be_repeated(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])
def test_the_pins_are_what_is_installed(path: Path) -> None:
    stack = path.suffix[1:]
    lock = {"cpu": "requirements-cpu.txt", "gpu": "requirements.txt"}[stack]
    copied = {name for step in steps(path) if step.word == "COPY" for name in step.rest.split()[:-1]}
    assert copied == {"setup.sh", lock, "requirements-dev.txt"}
    assert Step("RUN", f"./setup.sh {stack}") in steps(path)
    # KubeRay's probes, and what Ray is started by.
    assert {"bash", "wget"} <= set(path.read_text().split())
    (ignored,) = [(ROOT / ".dockerignore").read_text().split()]
    kept = [pattern[1:] for pattern in ignored if pattern.startswith("!")]
    assert all(any(Path(name).match(pattern) for pattern in kept) for name in copied)


@pytest.mark.parametrize(
    "text, fault",
    [
        ("FROM python\n", "fixed base"),
        ("FROM python:latest\n", "fixed base"),
        ("FROM a:1\nCOPY nowhere.txt .\n", "nowhere.txt"),
        ("FROM a:1\nRUN apt-get install -y --no-install-recommends wget\n", "update"),
        ("FROM a:1\nRUN apt-get update && apt-get install wget && rm -rf /var/lib/apt/lists/*\n", "asks"),
        ("FROM a:1\nRUN pip install vllm\n", "pinned"),
        ("FROM a:1\nRUN if true\n", "shell"),
        ("FROM a:1\nENV HF_TOKEN=x\n", "secret"),
        ("FROM a:1\nINSTALL x\n", "INSTALL"),
        ("ARG V\nFROM a:1\n", "default"),
    ],
)
def test_a_planted_fault_is_found(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    assert any(fault in each for each in faults(path)), faults(path)


@pytest.mark.long  # installs 7 GB
def test_the_steps_of_the_cpu_image_make_the_stack(tmp_path: Path) -> None:
    """As a script in a folder of its own; the steps that change the system of the image are left out."""
    script = ["set -euo pipefail", f"cd {shlex.quote(str(tmp_path))}"]
    for word, rest in steps(ROOT / "deploy" / "Dockerfile.cpu"):
        if word == "COPY":
            *names, target = rest.split()
            script.append(shlex.join(["cp", *(str(ROOT / name) for name in names), target]))
        elif word == "RUN" and not any(part in rest for part in SYSTEM):
            script.append(rest)
        elif word == "ENV":
            script.append("export " + rest.replace("/opt/pdlab", str(tmp_path)))
    assert "./setup.sh cpu" in script
    script += ["ray --version", "python -c 'import vllm, nixl; print(vllm.__version__)'", "command -v serve"]
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(["bash", "-c", "\n".join(script)], env=env, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "version 2.60.0" in done.stdout and "0.29.0" in done.stdout
        assert done.stdout.splitlines()[-1] == str(tmp_path / ".venv" / "bin" / "serve")
    finally:
        shutil.rmtree(tmp_path / ".venv", ignore_errors=True)
