"""Command lines that end before they need a cluster load nothing that takes long to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pdlab
from pdlab.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"ray", "vllm", "nixl", "torch", "transformers", "tokenizers", "matplotlib", "pandas"}
LIGHT = ("bench", "viz")  # asked most often
DRY = [
    ["launch", "--pd-spread", "--cluster", "p5.48xlarge-x2", "--dry-run"],
    ["launch", "--collocated", "--num", "2", "--local", "--dry-run"],
    ["launch", "--pd-pack", "--cluster", "p5.48xlarge-x2", "--export", "-"],
    # The differences that so many repeats detect take a quantile of Student's t, which is scipy's.
    ["experiment", "local-pack-vs-spread", "--dry-run"],
]
# One process for all of them: what one loads is still there with the next.
ALL = """
import contextlib, io, json, sys
from pdlab.__main__ import main
for words, heavy in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    loaded = sorted(set(sys.modules) & set(heavy))
    if loaded or code:
        print(words, "loads", loaded, "and ends with", code)
"""


def test_answers_without_heavy_imports() -> None:
    lines = [([name, "--help"], HEAVY | {"numpy"}) for name in LIGHT]
    lines += [([name, "--help"], HEAVY) for name in COMMANDS] + [(words, HEAVY | {"scipy.stats"}) for words in DRY]
    words = [sys.executable, "-c", ALL, json.dumps([(line, sorted(heavy)) for line, heavy in lines])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""


CHECK = "from pdlab.deploy import engine_arguments; engine_arguments.check({'max_num_seqs': 4}, 'x')"
COLLOCATED = str(ROOT / "tests" / "data" / "published" / "demo_itl1000_otl100_mixed_baseline_2xtp2")
TABLES = f"from pdlab.cli import viz; viz.main(['--exps', {COLLOCATED!r}, '--no-plot'])"
REPORT = f"import pdlab; report = pdlab.build_report(pdlab.load({COLLOCATED!r}))"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import pdlab; assert 'load' in dir(pdlab)", {"numpy", "matplotlib", "pydantic", "yaml"}),
        (REPORT, {"matplotlib", "jinja2"}),
        (f"{REPORT}; pdlab.render_text(report)", {"matplotlib"}),
        (TABLES, {"matplotlib", "pandas"}),
        (CHECK, {"torch", "vllm", "ray"}),
        ("import pdlab.sim.steps", {"aiconfigurator_core", "pandas", "numpy"}),
        ("import pdlab.plan.facts", {"pdlab.results.schema", "pandas"}),
        ("from pdlab.deploy.serving.timeline import SendsTimeline; SendsTimeline()", {"opentelemetry"}),
    ],
    ids=["package", "report", "text", "tables", "arguments of engines", "step times", "plans", "timelines"],
)
def test_nothing_heavy_is_imported_until_it_is_used(code: str, heavy: set[str]) -> None:
    program = f"import sys; {code}; print('LOADED', sorted({{*sys.modules}} & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["LOADED []"], done.stderr


def test_every_command_has_its_module() -> None:
    modules = {path.stem.replace("_", "-") for path in (ROOT / "pdlab" / "cli").glob("*.py")} - {"--init--"}
    assert set(COMMANDS) == modules - {
        "chaos-launch",
        "rehearsal-pace",
        "slo-start",
        "tuning",
        "until",
    }  # parts of others


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == set(COMMANDS)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdlab {pdlab.__version__}\n"
