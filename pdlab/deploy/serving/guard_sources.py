"""The KV guard on nodes that have no pdlab: its sources are written there before an engine starts.

vLLM imports the guard by name, in the replica, in the engine core and in every worker. The sources travel with the
replica's class and become a folder, named by what is in it, that those processes have in PYTHONPATH: the builder puts
it into the runtime environment that Ray gives the replica and all of its workers. Runs in Ray Serve's replicas, sent
there by value: imports the standard library, and Ray.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

HOME = "${HOME}"
WHERE = ".cache/pdlab/kv-guard"
IN_USE = "in-use"
GUARD_MODULE = "connector.py"  # vLLM imports it by name; without it there is no guard
WRITE_TIMEOUT_S = 120.0
# Folders of other versions that nobody uses are removed when they are that old.
OLD_S = 3600.0


# Of the package above the guard. Where a node has pdlab too, its other packages are found beside the guard.
PARENT = "from pkgutil import extend_path\n\n__path__ = extend_path(__path__, __name__)\n"
# What the guard's modules import of pdlab.
PACKAGES = ("guard", "marks")


def sources(pdlab: Traversable) -> dict[str, str]:
    """The guard's packages as path -> text, below a package ``pdlab`` that has nothing else of its own.

    ``pdlab`` is the package's folder, or a folder inside a zip that is imported. Raises RuntimeError where it has no
    guard.
    """
    files = {
        f"pdlab/{package}/{module.name}": module.read_text(encoding="utf-8")
        for package in PACKAGES
        if (pdlab / package).is_dir()
        for module in sorted((pdlab / package).iterdir(), key=lambda each: each.name)
        if module.name.endswith(".py")
    }
    if f"pdlab/guard/{GUARD_MODULE}" not in files:
        raise RuntimeError(f"the KV guard cannot be sent to the nodes: {pdlab} has no guard/{GUARD_MODULE}")
    return {"pdlab/__init__.py": PARENT, **files}


def digest(files: Mapping[str, str]) -> str:
    """The name of the folder: equal sources have equal names."""
    text = "\0".join(f"{name}\0{files[name]}" for name in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pythonpath(files: Mapping[str, str], before: str | None = None) -> str:
    """PYTHONPATH for Ray's runtime environment, with the guard first. Ray inserts a node's own variables."""
    return f"{HOME}/{WHERE}/{digest(files)}:{before or '${PYTHONPATH}'}"


def write(files: Mapping[str, str]) -> str:
    """Make the folder on this node, whole or not at all. Returns its path. Raises RuntimeError."""
    parent = Path(os.environ.get("HOME", "") + "/") / WHERE
    folder = parent / digest(files)
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is(folder, files):
            made = Path(tempfile.mkdtemp(dir=parent, prefix=".making-"))
            for name, text in files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
            (made / IN_USE).touch()
            shutil.rmtree(folder, ignore_errors=True)
            try:
                made.rename(folder)
            except OSError:  # another replica of this node was first
                shutil.rmtree(made, ignore_errors=True)
        if not _is(folder, files):
            raise OSError(f"{folder} is not what was written")
    except OSError as error:
        raise RuntimeError(
            f"the KV guard cannot be written to {parent} ({error}): make the home folder of Ray's user writable there, "
            "or serve with --no-kv-guard"
        ) from error
    # What was not there when this process began is not looked for again otherwise.
    sys.path_importer_cache.pop(str(folder), None)
    importlib.invalidate_caches()
    return str(folder)


def hold(files: Mapping[str, str]) -> tuple[str, Any]:
    """Make the folder, and keep it while this process lives. Returns its path and the open file that keeps it. Raises
    RuntimeError. Folders of other versions that nobody keeps are removed, and this one when its last keeper ends."""
    while True:
        folder = write(files)
        try:
            held = (Path(folder) / IN_USE).open("rb")
        except FileNotFoundError:
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if os.fstat(held.fileno()).st_nlink:  # its last keeper may have ended meanwhile
            break
        held.close()
    for other in Path(folder).parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(other) != folder and time.time() - other.stat().st_mtime > OLD_S:
                _remove_unused(other)
    atexit.register(_let_go, folder, held, os.getpid())
    return folder, held


def _let_go(folder: str, held: Any, pid: int) -> None:
    if os.getpid() == pid:  # and not in a child that was forked with it
        held.close()
        _remove_unused(Path(folder))


def _remove_unused(folder: Path) -> None:
    try:
        with (folder / IN_USE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        if folder.name.startswith(".making-"):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # somebody uses it


def _is(folder: Path, files: Mapping[str, str]) -> bool:
    """Whether the folder belongs only to us and has these files."""
    try:
        owned = folder.stat().st_uid == os.getuid()
        return owned and all((folder / name).read_text(encoding="utf-8") == text for name, text in files.items())
    except (OSError, UnicodeDecodeError):
        return False


class InstallsGuard:
    """Mixed into Ray's engine servers: before the engine starts, the guard is on every node of the replica."""

    guard_files: Mapping[str, str]

    async def start(self) -> None:
        folder, self._guard_folder = hold(self.guard_files)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # this node's home folder is not the one in Ray's environment
            os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        await _write_elsewhere(self.guard_files)
        await super().start()  # type: ignore[misc]


async def _write_elsewhere(files: Mapping[str, str]) -> None:
    """The same on the other nodes that the replica's placement group has bundles on."""
    ray: Any = importlib.import_module("ray")
    util: Any = importlib.import_module("ray.util")
    group = util.get_current_placement_group()
    if group is None:
        return
    own_node = ray.get_runtime_context().get_node_id()
    nodes = {node for node in util.placement_group_table(group)["bundles_to_node_id"].values() if node} - {own_node}
    if not nodes:
        return
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    task = ray.remote(num_cpus=0, max_retries=3)(write)
    for node in sorted(nodes):
        strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        reference = task.options(scheduling_strategy=strategy).remote(dict(files))
        try:
            await asyncio.wait_for(reference, WRITE_TIMEOUT_S)
        except Exception as error:
            logging.getLogger("ray.serve").error("the KV guard could not be sent to node %s: %r", node, error)
            raise
