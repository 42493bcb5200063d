"""The kept page of a command: the same help as its settings give, without pydantic, until a source changes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pdlab.__main__ import COMMANDS, main
from pdlab.core import help_pages
from pdlab.core.help_pages import HELP_ALL, HelpPage, parser_of, store_page, stored_page
from pdlab.core.settings import help_page, settings_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "90")


def settings_page(command: str) -> HelpPage:
    import_module(f"pdlab.cli.{command.replace('-', '_')}")
    return help_page(settings_of(command))


@pytest.mark.parametrize("everything", [False, True], ids=["help", "help-all"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_kept_page_gives_the_help_of_the_settings(command: str, everything: bool) -> None:
    page = settings_page(command)
    store_page(command, page)
    read = stored_page(command)
    assert read is not None
    text = parser_of(read, everything=everything).format_help()
    assert text == parser_of(page, everything=everything).format_help()


def test_the_second_help_loads_neither_pydantic_nor_the_settings() -> None:
    code = (
        "import sys\nfrom pdlab.__main__ import main\nmain(['viz', '--help'])\n"
        "heavy = {'pydantic', 'yaml', 'pdlab.cli.viz', 'pdlab.core.settings'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True) for _ in range(2)]
    first, second = runs
    assert "pydantic" in first.stderr
    assert second.stderr.strip() == "[]"
    assert first.stdout == second.stdout != ""


def test_a_page_is_stale_as_soon_as_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "settings.py"
    source.write_text("old")
    module = type(sys)("pdlab.of_a_test")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "pdlab.of_a_test", module)
    store_page("viz", settings_page("viz"))
    assert stored_page("viz") is not None
    state = source.stat()
    source.write_text("new")
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert stored_page("viz") is None
    source.unlink()
    assert stored_page("viz") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"[{}, [1, 2]]", b"\xff"])
def test_a_damaged_page_is_none(content: bytes) -> None:
    store_page("viz", settings_page("viz"))
    help_pages._file("viz").write_bytes(content)
    assert stored_page("viz") is None


def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["viz", "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: viz.py") and err == ""


def test_help_all_is_refused_where_every_flag_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["viz", HELP_ALL]) == 2
    assert f"{HELP_ALL} is not a flag" in capsys.readouterr().err
