"""Command lines that end before they need a cluster load nothing that takes long to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pdlab
from pdlab.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"ray", "vllm", "nixl", "torch", "transformers", "tokenizers", "matplotlib", "pandas"}
DRY = [
    ["launch", "--pd-spread", "--cluster", "p5.48xlarge-x2", "--dry-run"],
    ["launch", "--collocated", "--num", "2", "--local", "--dry-run"],
    ["launch", "--pd-pack", "--cluster", "p5.48xlarge-x2", "--export", "-"],
    ["experiment", "local-pack-vs-spread", "--dry-run"],
]


def loaded(program: str, words: list[str]) -> str:
    code = (
        f"import sys\n{program}\n"
        "try:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print('LOADED', sorted(set(sys.modules) & {HEAVY!r}), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("words", [*([name, "--help"] for name in COMMANDS), *DRY, ["--help"]], ids=" ".join)
def test_answers_without_heavy_imports(words: list[str]) -> None:
    assert loaded("from pdlab.__main__ import main", words) == "LOADED [] 0"


@pytest.mark.parametrize(
    "script",
    ["launch_gptoss.py", "viz.py", "plan.py", *sorted(f"debug/{p.name}" for p in (ROOT / "debug").glob("*.py"))],
)
def test_a_script_is_its_command(script: str) -> None:
    words = [sys.executable, str(ROOT / script), "--help"]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_every_command_has_its_module() -> None:
    modules = {path.stem.replace("_", "-") for path in (ROOT / "pdlab" / "cli").glob("*.py")} - {"--init--"}
    assert set(COMMANDS) == modules - {"chaos-launch", "slo-start", "tuning", "until"}  # parts of others


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benhc"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "'benhc' is not a command" in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == set(COMMANDS)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdlab {pdlab.__version__}\n"


@pytest.mark.parametrize("words", ["", "--help", "--version"])
def test_a_reader_that_is_gone_is_no_error(words: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{{ sleep 0.2; {sys.executable} -m pdlab {words}; echo $? >&2; }} | true"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
