"""Shipping a wheel: installed bytes are the wheel's, and what is imported is what was installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.stub_wheel import needs_installer, wheel

from pdlab.remote import install

ROOT = Path(__file__).resolve().parents[2]


@needs_installer
def test_installed_twice_is_the_same(tmp_path: Path) -> None:
    made, target = wheel(tmp_path), str(tmp_path / "target")
    first = install.install(made.name, made.read_bytes(), target, "shipped")
    assert first["files"] == 1
    assert first["loaded"] == str(tmp_path / "target" / "shipped" / "__init__.py")
    assert install.install(made.name, made.read_bytes(), target, "shipped") == first


@needs_installer
def test_where_distutils_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools warns when somebody looks for pip then, and a warning fails the test."""
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    made = wheel(tmp_path)
    assert install.install(made.name, made.read_bytes(), str(tmp_path / "target"), "shipped")["files"] == 1


def test_an_installer_that_fails_with_a_blank_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(install.importlib.machinery.PathFinder, "find_spec", lambda name: object())
    error = install.install("shipped-1.0-py3-none-any.whl", b"", str(tmp_path), None)["error"]
    assert error == f"{Path(sys.executable).name}: no message"


@needs_installer
def test_another_wheel_has_another_digest(tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    digests = set()
    for text in ("VALUE = 1\n", "VALUE = 2\n"):
        made = wheel(tmp_path, text)
        digests.add(install.install(made.name, made.read_bytes(), target, None)["digest"])
    assert len(digests) == 2


@needs_installer
@pytest.mark.parametrize(
    ("name", "content", "module", "message"),
    [
        ("../../etc/shipped.whl", b"", None, "not the file name of a wheel"),
        ("shipped-1.0-py3-none-any.whl", b"not a wheel", None, "uv: |pip: |python"),
        (None, None, "no_such_module", "import no_such_module"),
        (None, None, "json", "is loaded from"),
    ],
)
def test_what_goes_wrong_is_said(
    name: str | None, content: bytes | None, module: str | None, message: str, tmp_path: Path
) -> None:
    made = wheel(tmp_path)
    installed = install.install(
        name or made.name, made.read_bytes() if content is None else content, str(tmp_path / "target"), module
    )
    assert "digest" not in installed
    assert any(part in installed["error"] for part in message.split("|")), installed
