"""The registry of findings: every code has its row, every row its use, and the tables in docs are made from it.

PDLAB_UPDATE_GOLDEN=1 rewrites the tables.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from string import Formatter

import pytest

from pdlab.bench.gates import CANARY, GATES
from pdlab.core.findings import CODES, FindingCode, found, sentence

ROOT = Path(__file__).resolve().parents[2]
# Page, with #SOURCE for a second table of it: the source of its findings, the heads of the table, and the cells of a
# row behind its code.
TABLES: dict[str, tuple[str, tuple[str, ...], Callable[[FindingCode], tuple[str, ...]]]] = {
    "docs/methodology.md": ("gates", ("gate", "finding", "what holds in a valid level"), lambda row: (row.rule,)),
    "docs/reading-plots.md": (
        "audit",
        ("finding", "in the output", "severity", "what should hold"),
        lambda row: (row.kind, row.severity, row.rule),
    ),
    "debug/readme_nixl_ray.md": (
        "transfer",
        ("finding", "severity", "what should hold"),
        lambda row: (row.severity, row.rule),
    ),
    "docs/planning.md": ("plan", ("finding", "what should hold"), lambda row: (row.rule,)),
    "docs/methodology.md#unchecked": ("unchecked", ("finding", "what the gate needs"), lambda row: (row.rule,)),
    "docs/methodology.md#notes": ("notes", ("finding", "there is a note unless"), lambda row: (row.rule,)),
    "docs/metrics.md#files": ("files", ("finding", "what holds in a valid level"), lambda row: (row.rule,)),
    "docs/metrics.md#replay": ("replay", ("finding", "it is reported if"), lambda row: (row.rule,)),
    "docs/reading-plots.md#report": ("report", ("finding", "there is a note unless"), lambda row: (row.rule,)),
    "docs/timeline.md": ("timeline", ("finding", "what changes it"), lambda row: (row.fix,)),
    "docs/debugging.md": (
        "doctor",
        ("finding", "in the output", "at worst", "what should hold"),
        lambda row: (f"`{row.template.format(name='NAME')}`", row.severity, row.rule),
    ),
}


@cache
def nodes() -> tuple[ast.AST, ...]:
    """Of every module of pdlab but the registry."""
    paths = [path for path in sorted((ROOT / "pdlab").rglob("*.py")) if path != ROOT / "pdlab" / "core" / "findings.py"]
    return tuple(node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_every_code_that_is_found_has_a_row_and_every_row_is_used() -> None:
    strings = {node.value for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    called = {
        node.args[0].value
        for node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "found"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert len(called) > 30 and called <= set(CODES)
    assert set(CODES) <= strings


def test_a_finding_has_the_words_of_its_row_and_keeps_its_numbers() -> None:
    finding = found("other_requests_more", pool=" decode", finished=60.0, sent=40)
    assert (finding.code, finding.gate, finding.numbers["finished"]) == ("other_requests_more", "other_requests", 60.0)
    assert finding.what.startswith("the decode engines finished 60 requests") and finding.fix.startswith("; ")
    assert finding.text == finding.what + finding.fix
    with pytest.raises(KeyError):
        found("other_requests_more", finished=60.0)
    with pytest.raises(KeyError):
        found("no such code")


def test_a_row_has_its_rule_without_numbers() -> None:
    for code, row in CODES.items():
        assert re.fullmatch(r"[a-z_]+", code), code
        assert row.rule and all(name is None for _, name, _, _ in Formatter().parse(row.rule)), code


def test_the_registry_has_the_gates() -> None:
    assert {code.gate for code in CODES.values() if code.gate} == {gate.name for gate in GATES} | {CANARY}


def table(page: str) -> str:
    """The table of a page. A gate is named in the first of its rows."""
    source, heads, cells = TABLES[page]
    lines, gate = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"], None
    for code, row in CODES.items():
        if row.source == source:
            first = (row.gate if row.gate != gate else "",) if row.gate else ()
            lines.append(f"| {' | '.join((*first, code, *cells(row)))} |".replace("|  |", "| |"))
            gate = row.gate
    return "\n".join(lines)


@pytest.mark.golden
@pytest.mark.parametrize("page", TABLES)
def test_the_tables_of_codes_are_made_from_the_registry(page: str) -> None:
    file, _, source = page.partition("#")
    marker = f"<!-- findings{source and f' of {source}'}: `make golden` -->\n"
    head, begin, rest = (ROOT / file).read_text(encoding="utf-8").partition(marker)
    shown, end, tail = rest.partition("\n<!-- end of findings -->")
    assert begin and end
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        (ROOT / file).write_text(head + begin + table(page) + end + tail, encoding="utf-8")
        shown = table(page)
    assert shown == table(page), "run `make golden` and read `git diff '*.md'`"


def test_every_code_is_in_a_table() -> None:
    assert {row.source for row in CODES.values()} == {source for source, *_ in TABLES.values()}


def test_the_page_of_the_doctor_names_what_the_doctor_finds() -> None:
    """``ERROR host name`` on the page: a topic of the registry, which can be that severe."""
    page = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(ERROR|WARNING) ([^`]+)`", page))
    rows = [row for row in CODES.values() if row.source == "doctor"]
    worst = {"ERROR": ("error",), "WARNING": ("error", "warning")}
    known = {(re.sub(r"\\{name\\}", ".+", re.escape(row.template)), row.severity) for row in rows}
    assert len(named) > 10
    for severity, topic in named:
        assert any(re.fullmatch(words, topic) and worst_of in worst[severity] for words, worst_of in known), topic


def test_a_doctors_row_has_the_worst_severity_of_its_findings() -> None:
    order = ("note", "warning", "error")
    seen: dict[str, set[str]] = {}
    for node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "DoctorFinding":
            severities, codes = (
                {each.value for each in ast.walk(arg) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
                for arg in node.args[:2]
            )
            for code in codes & set(CODES):
                seen.setdefault(code, set()).update(severities & set(order))
    assert set(seen) == {code for code, row in CODES.items() if row.source == "doctor"}
    assert {code: max(found, key=order.index) for code, found in seen.items()} == {
        code: CODES[code].severity for code in seen
    }


def test_a_counted_number_of_a_sentence_has_its_noun_in_its_form() -> None:
    template = "{files:#file is|files are} {how}, {count:g#prompt} and {name}"
    one = {"files": 1, "how": "x", "count": 1.0, "name": "y"}
    assert sentence(template, one) == "1 file is x, 1 prompt and y"
    assert sentence(template, {**one, "files": 2, "count": 2.5}) == "2 files are x, 2.5 prompts and y"
    assert found("guard_no_room", count=1).what.startswith("1 request failed")
    with pytest.raises(KeyError):
        sentence(template, {})
