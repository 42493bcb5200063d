"""debug/build_nixl_ucx_efa.sh over a stub of the sources: its steps, what is repeated, and what stops it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "debug" / "build_nixl_ucx_efa.sh"

# Stands for every tool: writes down how it was called. `make` fails as long as a file says so.
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
"make -j 1") [ ! -e "$BROKEN" ] ;;
"ucx_info -v") echo "# Library version: ${UCX_VERSION-1.20.0}" ;;
esac
"""


@pytest.fixture
def rig(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcc", "g++", "make", "autoreconf", "libtoolize", "pkg-config", "meson", "ninja", "python3"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    for name in ("ucx", "nixl"):
        (tmp_path / name).mkdir()
    for name in ("autogen.sh", "configure"):
        (tmp_path / "ucx" / name).write_text(TOOL)
        (tmp_path / "ucx" / name).chmod(0o755)
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "ucx_info").write_text(TOOL)
    (prefix / "bin" / "ucx_info").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "BROKEN": str(tmp_path / "broken"),
    }


def build(rig: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    base = Path(rig["CALLS"]).parent
    options = ["--prefix", str(base / "prefix"), "--jobs", "1", "--without-efa", "--without-cuda"]
    sources = ["--ucx-source", str(base / "ucx"), "--nixl-source", str(base / "nixl")]
    return subprocess.run([str(SCRIPT), *options, *sources, *words], env=rig, capture_output=True, text=True)


def calls(rig: dict[str, str]) -> list[str]:
    path = Path(rig["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_builds_once_and_then_has_nothing_to_do(rig: dict[str, str]) -> None:
    done = build(rig, "--wheel")
    assert done.returncode == 0, done.stderr
    ran = calls(rig)
    assert any(call.startswith("configure") and "--without-verbs" in call for call in ran)
    assert any("pip wheel" in call for call in ran)
    Path(rig["CALLS"]).unlink()
    again = build(rig, "--wheel")
    assert again.returncode == 0
    assert not any(call.startswith(("make", "configure")) or "-m pip" in call for call in calls(rig))
    assert again.stderr.count("done before") == 6


def test_goes_on_where_it_failed(rig: dict[str, str]) -> None:
    Path(rig["BROKEN"]).touch()
    done = build(rig)
    assert done.returncode == 1
    assert "ucx failed" in done.stderr
    assert not any("mesonmain" in call for call in calls(rig)), "a failed step must stop the build"
    Path(rig["BROKEN"]).unlink()
    Path(rig["CALLS"]).unlink()
    done = build(rig)
    assert done.returncode == 0, done.stderr
    assert "ucx-source: done before" in done.stderr
    assert any(call.startswith("make install") for call in calls(rig))


def test_other_sources_build_anew(rig: dict[str, str]) -> None:
    assert build(rig).returncode == 0
    here = Path(rig["CALLS"]).parent
    (here / "ucx").rename(here / "ucx2")
    Path(rig["CALLS"]).unlink()
    assert build(rig, "--ucx-source", str(here / "ucx2")).returncode == 2, "the first --ucx-source is gone"
    (here / "ucx").mkdir()
    assert build(rig, "--ucx-source", str(here / "ucx2")).returncode == 0
    assert any(call.startswith("configure") for call in calls(rig))


def test_an_edited_source_builds_anew(rig: dict[str, str]) -> None:
    assert build(rig).returncode == 0
    Path(rig["CALLS"]).unlink()
    (Path(rig["CALLS"]).parent / "ucx" / "patch.c").write_text("int fixed;")
    done = build(rig)
    assert done.returncode == 0 and "done before" not in done.stderr
    assert any(call.startswith("configure") for call in calls(rig))


def test_sources_may_be_tarballs(rig: dict[str, str]) -> None:
    here = Path(rig["CALLS"]).parent
    for name in ("ucx", "nixl"):
        with tarfile.open(here / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(here / name, f"{name}-1.20.0")
    words = ("--ucx-source", str(here / "ucx.tar.gz"), "--nixl-source", str(here / "nixl.tar.gz"))
    done = build(rig, *words)
    assert done.returncode == 0, done.stderr
    assert (here / "prefix" / "build" / "ucx" / "configure").exists(), "unpacked without its top folder"
    assert build(rig, *words).stderr.count("done before") == 5
    (here / "ucx.tar.gz").write_bytes(b"not a tarball")
    done = build(rig, *words)
    assert done.returncode == 1 and "ucx-source failed" in done.stderr


def repository(path: Path, tag: str) -> str:
    """URL of a git repository of the stub's files with that tag."""
    (path / "VERSION").write_text(tag)
    git = ["git", "-C", str(path), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "made"], ["tag", tag]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return path.as_uri()


@pytest.mark.parametrize("tags", [("v1.21.0", "1.3.2"), ("v1.21.0", "v1.3.2")], ids=str)
def test_sources_are_cloned_at_their_pinned_tags(tags: tuple[str, str], rig: dict[str, str]) -> None:
    here = Path(rig["CALLS"]).parent
    instead = {}
    for number, (folder, tag, url) in enumerate([("ucx", tags[0], "openucx/ucx"), ("nixl", tags[1], "ai-dynamo/nixl")]):
        made = repository(here / folder, tag)
        instead[f"GIT_CONFIG_KEY_{number}"] = f"url.{made}.insteadOf"
        instead[f"GIT_CONFIG_VALUE_{number}"] = f"https://github.com/{url}.git"
    instead["GIT_CONFIG_COUNT"] = "2"
    words = ["--prefix", str(here / "prefix"), "--jobs", "1", "--without-efa", "--without-cuda"]
    done = subprocess.run([str(SCRIPT), *words], env=rig | instead, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is commit") == 2
    assert (here / "prefix/build/nixl/VERSION").read_text() == tags[1]


def test_a_nixl_that_does_not_read_is_not_called_built(rig: dict[str, str]) -> None:
    here = Path(rig["CALLS"]).parent
    python = here / "tools" / "python3"
    python.write_text(TOOL + 'case "$*" in *initialize_xfer*) exit 1 ;; esac\n')
    (here / "prefix/python/nixl_cu99").mkdir(parents=True)
    done = build(rig)
    assert done.returncode == 1
    assert "the NIXL built does not read" in done.stderr and "nixl_cu99" in done.stderr


@pytest.mark.parametrize("version", ["1.19.1", ""])
def test_an_old_ucx_is_not_called_built(version: str, rig: dict[str, str]) -> None:
    done = build(rig | {"UCX_VERSION": version})
    assert done.returncode == 1
    assert "1.20 is the first with zero-copy over SRD" in done.stderr and "verify failed" in done.stderr
    again = build(rig | {"UCX_VERSION": "1.20.0"})
    assert again.returncode == 0 and again.stderr.count("done before") == 4


def test_without_devices_files_are_looked_at_and_nothing_is_tried(rig: dict[str, str]) -> None:
    here = Path(rig["CALLS"]).parent
    done = build(rig, "--without-devices")
    assert done.returncode == 1 and "built without" in done.stderr and "libplugin_UCX.so" in done.stderr
    (here / "prefix/lib/plugins").mkdir(parents=True)
    (here / "prefix/lib/plugins/libplugin_UCX.so").touch()
    done = build(rig, "--without-devices")
    assert done.returncode == 0, done.stderr
    assert "were not tried" in done.stderr
    assert not any("initialize_xfer" in call for call in calls(rig)), "no read"
    on_a_node = build(rig)
    assert on_a_node.stderr.count("done before") == 4 and "build: verify\n" in on_a_node.stderr
    dry = subprocess.run(
        [str(SCRIPT), "--prefix", str(here / "p"), "--without-devices", "--dry-run"], capture_output=True, text=True
    )
    assert "libuct_ib_efa.so" in dry.stdout and "libuct_cuda.so" in dry.stdout and "lists srd" not in dry.stdout


def test_the_image_is_built_without_devices() -> None:
    image = (SCRIPT.parent / "Dockerfile.nixl-ucx-efa").read_text()
    assert "build_nixl_ucx_efa.sh" in image and "--without-devices" in image


def test_a_dry_run_prints_and_does_nothing(rig: dict[str, str]) -> None:
    done = build(rig, "--dry-run", "--wheel")
    assert done.returncode == 0
    assert calls(rig) == []
    for step in ("check:", "ucx-source:", "ucx:", "nixl-source:", "nixl:", "verify:", "wheel:"):
        assert step in done.stdout
    assert not (Path(rig["CALLS"]).parent / "prefix" / "build").exists()


def test_the_last_check_reads_and_knows_whose_ucx_it_was(tmp_path: Path) -> None:
    """With the NIXL of this environment, which stands for the one just built."""
    program = SCRIPT.read_text().split("\nREAD='")[1].split("\n'\n")[0]
    done = subprocess.run([sys.executable, "-c", program, sys.prefix], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "read 1048576 bytes with" in done.stdout
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"that is not the UCX of {tmp_path}" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frobnicate"], "unknown option"),
        (["--prefix"], "needs a value"),
        (["--prefix", "relative"], "must be an absolute path"),
        (["--jobs", "many"], "must be a number"),
        (["--ucx-source", "/nowhere"], "does not exist"),
    ],
)
def test_bad_words_are_one_line(words: list[str], message: str) -> None:
    done = subprocess.run([str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_host_without_efa_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    if Path("/opt/amazon/efa").exists():
        pytest.skip("this host has the EFA installer's files")
    done = subprocess.run(
        [str(SCRIPT), "--prefix", str(tmp_path / "p"), "--without-cuda"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "check failed" in done.stderr
    assert not (tmp_path / "p" / "build" / "ucx").exists()
