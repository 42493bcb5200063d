"""Compiled templates in the cache: they are used, and never in place of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from pdlab.core.compiled_templates import CompiledTemplates


def environment(folder: Path, source: Path) -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=False, loader=jinja2.FileSystemLoader(folder), bytecode_cache=CompiledTemplates((source,))
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "source.py").write_text("1")
    (tmp_path / "t.txt").write_text("{{ 1 + 1 }}")
    return tmp_path


def rendered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """What a process that begins now prints, and how many templates it compiles."""
    compiled: list[Any] = []
    made = environment(folder, folder / "source.py")
    compiles = made.compile

    def counted(*args: Any, **more: Any) -> Any:
        compiled.append(args)
        return compiles(*args, **more)

    monkeypatch.setattr(made, "compile", counted)
    return made.get_template("t.txt").render(), len(compiled)


def test_a_template_is_compiled_once_and_again_when_it_or_a_source_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered(folder, monkeypatch) == ("2", 1)
    assert rendered(folder, monkeypatch) == ("2", 0)
    (folder / "t.txt").write_text("{{ 1 + 2 }}")
    assert rendered(folder, monkeypatch) == ("3", 1)
    assert rendered(folder, monkeypatch) == ("3", 0)
    (folder / "source.py").write_text("22")
    assert rendered(folder, monkeypatch) == ("3", 1)


def test_what_cannot_be_read_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered(folder, monkeypatch)
    (file,) = (folder / "cache" / "templates").iterdir()
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole[:40], b"x" * len(whole)):
        file.write_bytes(content)
        assert rendered(folder, monkeypatch) == ("2", 1)


def test_a_cache_that_cannot_be_written_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("no folder")
    assert rendered(folder, monkeypatch) == ("2", 1)
    assert rendered(folder, monkeypatch) == ("2", 1)
