"""The guard's sources on a node that has no pdlab: written, found by every process of an engine, removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pdlab
from pdlab.deploy.serving import guard_sources

PDLAB = Path(pdlab.__file__).parent
FILES = {"pdlab/__init__.py": "", "pdlab/guard/__init__.py": "SENT = 'first'\n"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def no_atexit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_sources.atexit, "register", lambda *_: None)


def run(code: str, path: str) -> str:
    """In an interpreter that has PYTHONPATH alone."""
    env = {"PYTHONPATH": path, "HOME": os.environ["HOME"], "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_guard_travels_with_what_it_imports() -> None:
    files = guard_sources.sources(PDLAB)
    assert {
        "pdlab/__init__.py",
        "pdlab/guard/connector.py",
        "pdlab/guard/scheduler.py",
        "pdlab/marks/engine_marks.py",
    } < set(files)
    assert files["pdlab/guard/leases.py"] == (PDLAB / "guard" / "leases.py").read_text(encoding="utf-8")


def test_an_engines_process_imports_it_by_name() -> None:
    folder, held = guard_sources.hold(guard_sources.sources(PDLAB))
    code = "import pdlab.guard.leases as it; print(it.__file__, it.LeaseBook('e').claim('r', 'd').verdict)"
    assert run(code, folder) == f"{folder}/pdlab/guard/leases.py unknown"
    held.close()


def test_it_does_not_hide_a_pdlab_that_the_node_has() -> None:
    """On a rehearsal's nodes it did: no module named pdlab.rehearsal."""
    folder, held = guard_sources.hold(guard_sources.sources(PDLAB))
    code = "import pdlab.guard.leases as a, pdlab.core.errors as b; print(a.__file__, b.__file__)"
    assert run(code, f"{folder}:{PDLAB.parent}").split() == [
        f"{folder}/pdlab/guard/leases.py",
        str(PDLAB / "core" / "errors.py"),
    ]
    held.close()


def test_the_path_is_the_nodes_own(home: Path) -> None:
    path = guard_sources.pythonpath(FILES)
    assert path.endswith(":${PYTHONPATH}")
    assert os.path.expandvars(path).split(":")[0] == guard_sources.write(FILES)
    assert guard_sources.pythonpath(FILES, "/given").endswith(":/given")


def test_other_sources_are_another_folder() -> None:
    first, second = (
        guard_sources.write(FILES),
        guard_sources.write({**FILES, "pdlab/guard/__init__.py": "SENT = 'another'\n"}),
    )
    assert first != second
    assert run("import pdlab.guard; print(pdlab.guard.SENT)", f"{second}:{first}") == "another"


def test_what_is_there_is_kept_and_what_is_broken_is_made_anew() -> None:
    folder = Path(guard_sources.write(FILES))
    inode = folder.stat().st_ino
    assert guard_sources.write(FILES) == str(folder) and folder.stat().st_ino == inode
    (folder / "pdlab/guard/__init__.py").write_text("import os")
    guard_sources.write(FILES)
    assert (folder / "pdlab/guard/__init__.py").read_text() == FILES["pdlab/guard/__init__.py"]
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".making-")]


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".cache").write_text("a file")
    with pytest.raises(RuntimeError, match="home folder of Ray's user writable there, or serve with --no-kv-guard"):
        guard_sources.write(FILES)


def test_the_last_one_that_uses_it_removes_it() -> None:
    folder, first = guard_sources.hold(FILES)
    _, second = guard_sources.hold(FILES)
    guard_sources._let_go(folder, first, os.getpid())
    assert Path(folder).exists()
    guard_sources._let_go(folder, second, os.getpid() + 1)
    assert Path(folder).exists(), "a child that was forked with it has not made it"
    guard_sources._let_go(folder, second, os.getpid())
    assert not Path(folder).exists()


def test_old_folders_of_other_versions_go_unless_they_are_used() -> None:
    other = {**FILES, "pdlab/guard/__init__.py": "SENT = 'another'\n"}
    used, held = guard_sources.hold(FILES)
    left = Path(guard_sources.write({**FILES, "pdlab/guard/__init__.py": "SENT = 'left'\n"}))
    half = Path(used).parent / ".making-x"
    half.mkdir()
    long_ago = time.time() - guard_sources.OLD_S - 60
    for path in (Path(used), left, half):
        os.utime(path, (long_ago, long_ago))
    _, other_held = guard_sources.hold(other)
    assert Path(used).exists() and not left.exists() and not half.exists()
    held.close()
    other_held.close()


def test_a_process_that_has_looked_before_finds_it() -> None:
    """Python remembers that a folder was not there."""
    folder = f"{os.environ['HOME']}/{guard_sources.WHERE}/{guard_sources.digest(FILES)}"
    root = str(Path(pdlab.__file__).parent.parent)
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from pdlab.deploy.serving import guard_sources
sys.path.remove({root!r})
for name in [name for name in sys.modules if name.split(".")[0] == "pdlab"]:
    del sys.modules[name]
try:
    import pdlab.guard
except ImportError:
    guard_sources.write({FILES!r})
    import pdlab.guard
    print(pdlab.guard.SENT)
"""
    assert run(code, folder) == "first"
