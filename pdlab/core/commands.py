"""Command lines of pdlab: with a script in a checkout, or as ``pdlab COMMAND`` if pdlab is installed."""

from __future__ import annotations

import importlib.util
import shlex
import sys

from pdlab.core.files import CHECKOUT

PDLAB = "pdlab" if CHECKOUT is None else "python -m pdlab"

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


def program(command: str) -> str:
    """The name of a command in texts."""
    return SCRIPTS[command] if CHECKOUT is not None and command in SCRIPTS else f"{PDLAB} {command}"


def typed(command: str, *words: str) -> str:
    """The command line of ``command`` with ``words``, for a shell."""
    name = program(command)
    front = f"python {name}" if name.endswith(".py") else f"./{name}" if name.endswith(".sh") else name
    return shlex.join([*front.split(), *words])


# As texts name the commands, and as texts begin the lines that run them.
LAUNCH, BENCH, VIZ, PLAN, DOCTOR, CHECK_TRANSFER, INSTALL_WHEEL = map(program, SCRIPTS)
RUN_LAUNCH, RUN_BENCH, RUN_VIZ, RUN_PLAN, RUN_DOCTOR, RUN_CHECK_TRANSFER, RUN_INSTALL_WHEEL = map(typed, SCRIPTS)


# Installs the step times of other GPUs, engines and models.
INSTALL_TABLES = "pip install 'pdlab[perf]'" if CHECKOUT is None else "make setup-perf"


def not_installed(package: str) -> str:
    """A message about a missing Python package, with the command that installs it."""
    fix = 'pip install "pdlab[serve]"' if CHECKOUT is None else "make setup, or make setup-gpu on a GPU node"
    return f"the Python package {package} is not installed for {sys.executable}: {fix}"


def require_installed(package: str) -> None:
    """Raises ModuleNotFoundError, as the import of a missing ``package`` does. The import may take seconds, or be in
    another process."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def python_words(command: str) -> list[str]:
    """The interpreter's arguments for ``command`` in `pdlab.core.files.ROOT`: a script, or the module."""
    script = SCRIPTS.get(command, "")
    if CHECKOUT is not None and script.endswith(".py"):
        return [script]
    return ["-m", "pdlab", command]
