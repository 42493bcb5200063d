"""How commands are named: by script in a checkout, as `pdlab COMMAND` where pdlab is installed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from pdlab.__main__ import COMMANDS, main
from pdlab.core import exit_code, files
from pdlab.core.commands import SCRIPTS, python_words, typed


def test_every_script_exists_and_belongs_to_a_command() -> None:
    assert files.CHECKOUT is not None
    assert set(SCRIPTS) <= set(COMMANDS)
    assert [script for script in SCRIPTS.values() if not (files.CHECKOUT / script).is_file()] == []


def test_in_a_checkout() -> None:
    assert typed("viz", "--exps", "a b") == "python viz.py --exps 'a b'"
    assert typed("bench") == "./run_bm.sh"
    assert typed("weights") == "python -m pdlab weights"
    assert python_words("launch") == ["launch_gptoss.py"]
    assert python_words("bench") == ["-m", "pdlab", "bench"]


INSTALLED = """
from importlib import import_module
from pdlab.core import files
files.CHECKOUT = None
from pdlab.__main__ import COMMANDS, main
from pdlab.core.commands import module_of, python_words, typed
from pdlab.core.findings import CODES
from pdlab.core.settings import help_page, settings_of
assert [typed(command, "-h") for command in ("viz", "bench", "weights")] == [
    "pdlab viz -h", "pdlab bench -h", "pdlab weights -h",
]
assert python_words("launch") == ["-m", "pdlab", "launch"]
print(*CODES.values())
main([])
for command in COMMANDS:
    import_module(module_of(command))
    print(help_page(settings_of(command)))
"""


def test_texts_name_what_can_be_typed() -> None:
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    named = {name for name in (*SCRIPTS.values(), "-m pdlab") if name in done.stdout}
    assert named == set() and done.stdout.count("pdlab launch ") > 8


def test_a_checkout_is_known_by_its_folders(tmp_path: Path) -> None:
    package = tmp_path / "pdlab"
    assert files.checkout_of(package) is None
    (tmp_path / "configs").mkdir()
    assert files.checkout_of(package) is None, "any folder may have a configs/ beside a package"
    (tmp_path / "pyproject.toml").touch()
    assert files.checkout_of(package) == tmp_path


def test_installed_code_does_not_put_its_site_packages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert files.python_path("/own").split(":") == ["/own", str(files.CHECKOUT), "/theirs"]
    monkeypatch.setattr(files, "CHECKOUT", None)
    assert files.python_path("/own").split(":") == ["/own", "/theirs"]
    monkeypatch.delenv("PYTHONPATH")
    assert files.python_path() == ""


def test_a_package_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        import no_such_package.of_ray  # type: ignore[import-not-found]  # noqa: F401

        return 0

    assert exit_code.exit_code(run) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "no_such_package " in err and sys.executable in err and "make setup" in err


@pytest.mark.parametrize("module", ["pdlab.no_such_module", "json.no_such_module"])
def test_a_module_of_ours_that_is_missing_is_a_fault(module: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        exit_code.exit_code(lambda: __import__(module) and 0)


def ended(words: str, streams: str) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.quote(sys.executable)} -m pdlab {words} {streams}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", ["", "--version", "models", "models --help", "models --markdown --help"])
def test_output_that_nobody_can_take(words: str) -> None:
    full = ended(words, ">/dev/full")
    assert full.returncode == 1
    assert full.stderr == "error: no output can be written (No space left on device): free disk space\n"
    closed = ended(words, ">&-")
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")


def test_an_error_does_not_go_where_results_go() -> None:
    done = ended("models --model no-such-model --markdown --no-such-flag", "2>&-")
    assert (done.returncode, done.stdout) == (2, "")
    full = ended("models --no-such-flag", ">/dev/full")
    assert full.returncode == 2 and full.stderr.count("\n") == 1


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from pathlib import Path; from pdlab.core.exit_code import exit_code\n"
        "def run():\n"
        "    with Path(sys.argv[1]).open('w') as file:\n"
        "        return subprocess.run(['echo', 'noise'], check=True).returncode + (file.fileno() < 3)\n"
        "sys.exit(exit_code(run))"
    )
    line = shlex.join([sys.executable, "-c", code, str(tmp_path / "result")])
    done = subprocess.run(["bash", "-c", f"{line} >&-"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, (tmp_path / "result").read_text()) == (0, "", "")


def test_characters_that_the_locale_lacks_are_escaped() -> None:
    code = (
        "from pdlab.core.exit_code import exit_code; exit_code(lambda: print('\\udce9 \\N{MULTIPLICATION SIGN}') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.stdout == b"\\udce9 \\xd7\n"


def test_an_interrupt_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdlab.__main__._module", interrupted)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--model", "~nobody-is-called-this/config.json"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the home folder of this user, or of a ~USER, is not known") and err.count("\n") == 1

    def no_home() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")  # as pathlib does

    for name in ("PDLAB_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert main(["models", "--help"]) == 0
    assert main(["models", "--model", "org/no-such-model"]) == 2
