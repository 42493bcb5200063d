"""Command lines of pdlab: with a script in a checkout, or as ``pdlab COMMAND`` if pdlab is installed."""

from __future__ import annotations

import re
import shlex
import sys

from pdlab.core.files import CHECKOUT

# Command -> its script at the top of the checkout.
SCRIPTS = {
    "launch": "launch_gptoss.py",
    "bench": "run_bm.sh",
    "viz": "viz.py",
    "plan": "plan.py",
    "doctor": "debug/doctor.py",
    "check-transfer": "debug/test_nixl_connector_ray.py",
    "install-wheel": "debug/install_on_nodes.py",
}


def module_of(command: str) -> str:
    """The module that runs a command. Other packages know `pdlab.cli` by these names only."""
    return f"pdlab.cli.{command.replace('-', '_')}"


def typed(command: str, *words: str) -> str:
    """The command line of ``command`` with ``words``, for a shell."""
    return shlex.join([*_front(command), *words])


def _front(command: str) -> list[str]:
    if CHECKOUT is None:
        return ["pdlab", command]
    script = SCRIPTS.get(command)
    if script is None:
        return ["python", "-m", "pdlab", command]
    return ["python", script] if script.endswith(".py") else [f"./{script}"]


def program(command: str) -> str:
    """The name of a command in its help."""
    if CHECKOUT is None:
        return f"pdlab {command}"
    return SCRIPTS.get(command, f"python -m pdlab {command}")


def as_typed_here(text: str) -> str:
    """A text about commands: where there is no checkout, with ``pdlab COMMAND`` in place of its scripts."""
    if CHECKOUT is not None:
        return text
    commands = {script: f"pdlab {command}" for command, script in SCRIPTS.items()} | {"-m pdlab": "pdlab"}
    starts, scripts = "|".join(("python ", r"\./", r"(?<![\w/])")), "|".join(map(re.escape, commands))
    return re.sub(rf"(?:{starts})({scripts})(?!\w)", lambda found: commands[found[1]], text)


def not_installed(package: str) -> str:
    """A message about a missing Python package, with the command that installs it."""
    fix = 'pip install "pdlab[serve]"' if CHECKOUT is None else "make setup, or make setup-gpu on a GPU node"
    return f"the Python package {package} is not installed for {sys.executable}: {fix}"


def python_words(command: str) -> list[str]:
    """The interpreter's arguments for ``command`` in `pdlab.core.files.ROOT`: a script, or the module."""
    script = SCRIPTS.get(command, "")
    if CHECKOUT is not None and script.endswith(".py"):
        return [script]
    return ["-m", "pdlab", command]
