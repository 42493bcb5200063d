"""Tables in docs of what the code declares or simulates: counters and simulations are made from it, parts, faults,
their keys and the errors of a fit are compared.

PDLAB_UPDATE_GOLDEN=1 rewrites the tables that are made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.cli import viz
from pdlab.deploy.serving.prefill_call import COUNTERS
from pdlab.faults.kinds import KINDS
from pdlab.faults.plan import FaultPlan
from pdlab.guard.receives import ACTIONS
from pdlab.results.timeline import PARTS
from pdlab.sim.hardware import load_hardware

DOCS = Path(__file__).resolve().parents[1] / "docs"


def first_cells(page: str, heading: str) -> list[str]:
    """The first cells of the first table behind a heading, without the head of the table."""
    rows = (DOCS / page).read_text().split(f"\n{heading}\n")[1].split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    return [row.split("|")[1].strip() for row in rows]


def held(name: str, page: str, made: str) -> None:
    """The page has this text between the marks of that name. PDLAB_UPDATE_GOLDEN=1 writes it there."""
    path = DOCS / page
    head, begin, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name}: `make golden` -->\n")
    shown, end, tail = rest.partition(f"\n<!-- end of {name} -->")
    assert begin and end
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        path.write_text(head + begin + made + end + tail, encoding="utf-8")
        shown = made
    assert shown == made, "run `make golden`"


@pytest.mark.golden
def test_the_table_of_counters_is_made_from_them() -> None:
    named = {f"pdlab_prefill_{name}": text for name, text in COUNTERS.items()}
    named |= {f"pdlab_guard_{name}": text for name, text in ACTIONS.items()}
    rows = [f"| `{name}` | {text.rstrip('.')} |" for name, text in named.items()]
    held("counters", "metrics.md", "\n".join(["| counter | what it counts |", "|---|---|", *rows]))


@pytest.mark.golden
@pytest.mark.parametrize("name", ["orderings", "large_scale"])
def test_simulated_tables_are_what_their_command_prints(name: str) -> None:
    script = DOCS.parent / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    held(name, "model.md", done.stdout.strip())


def test_the_page_of_the_demo_ends_as_its_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines are quoted; the page shortens the table of the other pairs to one line."""
    assert viz.main(["--exps", str(DOCS.parent / "bm_results" / "local-pack-vs-spread"), "--no-plot"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    quoted = (DOCS / "demo.md").read_text(encoding="utf-8").split("The last lines are:\n\n")[1].split("\n\n")[0]
    ends = [" ".join(part.replace("\n>", " ").split()).removeprefix("> ") for part in quoted.split("\n>\n")]
    whole = [end for end in ends if not end.startswith("Other pairs")]
    begin = lines.index(whole[0])
    assert [line for line in lines[begin:] if line in whole] == whole
    assert whole[-1] == lines[-1]


def test_the_page_of_the_timeline_has_every_part_in_the_order_of_time() -> None:
    assert first_cells("timeline.md", "## The parts") == [f"`{name}`" for name in PARTS]


def kinds_in(cell: str) -> set[str]:
    """``kill_proxy``, `kill_balancer`, and `stop_` -> the kinds that a row describes; ROLE and PART stand for any."""
    names = re.findall(r"`(\w+)`", cell)
    verbs = [name for name in names if name.endswith("_")]
    whole = [name for name in names if not name.endswith("_")]
    named = {*whole, *(verb + name.partition("_")[2] for verb in verbs for name in whole)}
    patterns = [re.sub("ROLE|PART", "[a-z]+", name) for name in named]
    return {kind for kind in KINDS for pattern in patterns if re.fullmatch(pattern, kind)}


def test_the_page_of_faults_has_every_kind_and_every_key_of_a_plan() -> None:
    rows = [kinds_in(cell) for cell in first_cells("faults.md", "## What is injected, and how")]
    assert all(rows) and set().union(*rows) == set(KINDS)
    keys = {name for cell in first_cells("faults.md", "## Plans") for name in re.findall(r"`(\w+)`", cell)}
    assert keys == set(FaultPlan.model_fields) - {"about", "seed"}


def test_the_errors_of_the_shipped_fit_are_those_of_its_file() -> None:
    error = load_hardware("h100-vllm-0.11").error
    assert error is not None
    medians = [error.tpot_percent, error.ttft_percent, error.requests_per_s_percent]
    readme, page = (path.read_text() for path in (DOCS.parent / "README.md", DOCS / "model.md"))
    names = ("TPOT", "mean TTFT", "requests/s")
    said = ", ".join(f"{name} {value:g} %" for name, value in zip(names, medians, strict=True))
    assert f"({error.points} levels, median):\n{said}" in readme
    row = re.search(r"^\| \*\*each experiment predicted by a fit to the other six.*$", page, re.MULTILINE)
    assert row and [float(cell.strip(" %")) for cell in row[0].split("|")[2:5]] == medians
    common = ", ".join(f"{name} {error.parts[name].common_percent:g} %" for name in names)
    level = ", ".join(f"{error.parts[name].level_percent:g} %" for name in names)
    assert f"left out of the fit: {common} |" in page and f"from the same errors: {level} |" in page
