"""What the documents name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pdlab import __version__
from pdlab.__main__ import COMMANDS
from pdlab.bench.gates import CANARY, GATES
from pdlab.core.commands import SCRIPTS

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "debug" / "readme_nixl_ray.md"]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "upstream").glob("*.md")), *DECISIONS]
# Results that a run writes, the label of a node, a cache's folder.
NOT_SHIPPED = (
    "bm_results/LABEL",
    "bm_results/NAME",
    "bm_results/chaos",
    "bm_results/collocated",
    "bm_results/pd",
    "pdlab/cli/NAME",
    "pdlab/node",
    "pdlab/logs",
)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def test_decisions_have_numbers_of_their_own() -> None:
    numbers = [path.name[:3] for path in DECISIONS]
    assert numbers == [f"{number:03}" for number in range(1, len(numbers) + 1)]
    for path in DECISIONS:
        assert path.read_text().startswith(f"# {path.name[:3]} "), path.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        path, _, section = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        if section:
            assert section in {anchor(line.lstrip("# ")) for line in file.read_text().splitlines() if line[:1] == "#"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"\b(?:pdlab|configs|docs|tests|debug|benchmarks|bm_results)/[\w./*-]*\w", text)
    for name in named:
        if not name.startswith(NOT_SHIPPED):
            assert list(ROOT.glob(name)), name
    assert not re.findall(r"-m pdlab\.\w+", text), "a command is `python -m pdlab COMMAND`"
    assert set(re.findall(r"-m pdlab ([a-z][\w-]*)|^pdlab ([a-z][\w-]*)", text, re.M)) <= {
        pair for command in COMMANDS for pair in ((command, ""), ("", command))
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets


COLUMNS, README_LINES = 100, 110


def wide_lines(text: str, *, quotes: bool = False) -> list[int]:
    """Numbers of lines that are too wide. Rows of tables and lines with a URL may be, and code if the page ``quotes``
    what tools printed."""
    wide, in_code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        in_code ^= line.lstrip().startswith("```")
        if len(line) > COLUMNS and not (quotes and in_code) and line[:1] != "|" and "://" not in line:
            wide.append(number)
    return wide


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_pages_fit_a_terminal(document: Path) -> None:
    assert wide_lines(document.read_text(), quotes=document.parent.name == "debug") == []


def test_wide_lines_are_found() -> None:
    wide = "x" * (COLUMNS + 1)
    text = f"{wide}\n```sh\n{wide}\n```\n| {wide} |\nhttps://{wide}\n- {wide}"
    assert wide_lines(text) == [1, 3, 7] and wide_lines(text, quotes=True) == [1, 7]


WORDS = 25
SPEAKING = re.compile(r"\b(say|says|ask|asks|tell|tells)\b")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Line of the paragraph, and sentence. Code and quoted outputs are no sentences, inline code is one word. A cell of
    a table is a list: semicolons end its entries."""
    block: list[str] = []
    start, in_code = 0, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        line = line.strip()
        in_code ^= line.startswith("```")
        item = re.match(r"(?:[-*]|\d+\.) +", line)
        if not line or item or line.startswith(("#", ">", "|", "```", "<!--")):
            yield from ((start, sentence) for sentence in split_sentences(" ".join(block)))
            block = []
        if in_code or line.startswith(("#", ">", "```", "<!--")):
            continue
        if line.startswith("|"):
            cells = re.sub(r"`+[^`]*`+", "CODE", line).strip("| ").split(" | ")
            entries = [entry for cell in cells for entry in cell.split("; ")]
            yield from ((number, sentence) for entry in entries for sentence in split_sentences(entry))
            continue
        start = start if block else number
        block.append(line[item.end() :] if item else line)


def split_sentences(text: str) -> list[str]:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`+[^`]*`+", "CODE", text))
    return re.split(r"(?<=[.!?])[\"')*_]*\s+", plain)


def long_sentences(text: str) -> list[tuple[int, str]]:
    return [
        (line, sentence)
        for line, sentence in sentences(text)
        if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > WORDS
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_sentence_has_one_fact(document: Path) -> None:
    """At most 25 words: subject, verb, object."""
    assert long_sentences(document.read_text()) == []


def test_long_sentences_are_found() -> None:
    words = " ".join(["word"] * WORDS)
    fits = f"# {words} x\n{words}. {words}\n\n- `{words}` x\n- {words}\n| {words}; {words} |\n> {words} x\n"
    assert long_sentences(f"{fits}```\n{words} x\n```\n") == []
    assert long_sentences(f"{words}\nx. y\n\n- [{words}](u) x\n| a | {words} x |") == [
        (1, f"{words} x."),
        (4, f"{words} x"),
        (5, f"{words} x"),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_thing_speaks(document: Path) -> None:
    """Files record, engines report, programs request: only people say, ask and tell."""
    spoken = [(line, sentence) for line, sentence in sentences(document.read_text()) if SPEAKING.search(sentence)]
    assert spoken == []


def test_the_methodology_has_the_reason_of_every_gate() -> None:
    section = (ROOT / "docs" / "methodology.md").read_text().split("\n## Gates\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^- \*\*(\w+)\*\*", section, re.M)) == sorted([*(gate.name for gate in GATES), CANARY])


def smoke(path: Path) -> bool:
    """Whether a file has a live test that is not long."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def marked(nodes: Iterable[ast.expr], name: str) -> bool:
        return any(f"mark.{name}" in ast.unparse(node) for node in nodes)

    module = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    live = path.parent.name == "live" or marked(module, "live")
    if not live or marked(module, "long"):
        return False
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not marked(node.decorator_list, "long")]
    functions = [node for body in (tree.body, *(each.body for each in classes)) for node in body]
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(ast.unparse(each) == "pytest.mark.long" for each in node.decorator_list)
        for node in functions
    )


def test_the_page_of_the_tests_names_every_live_smoke_test() -> None:
    named = re.findall(r"^\| [^|]+ \| (tests/\S+) \|", (ROOT / "docs" / "testing.md").read_text(), re.M)
    files = {str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")) if smoke(path)}
    assert len(files) > 10 and sorted(named) == sorted(files)


def test_the_readme_is_short_and_its_table_names_scripts_and_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    rows = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in text.splitlines() if line[:3] == "| `"]
    named = {command: script for command, script in rows[1:]}
    assert len(named) > 8 and set(named) <= set(COMMANDS)
    scripts = {command: script for command, script in named.items() if script and not script.startswith("make ")}
    assert scripts == {command: SCRIPTS[command] for command in scripts}


def test_the_recipes_of_contributing_name_what_exists() -> None:
    """Classes, functions and tables of the code, such as `GATES`, `FaultKind` and `_composed`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`@?([A-Z]\w+|_\w+|[a-z]+(?=\())[^`\s]*[^`]*`", text)) - {"NAME", "Name"}
    code = [
        ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("pdlab", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    known = {"README"}
    for node in (node for tree in code for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    assert len(named) > 8 and named <= known, named - known


def test_a_commit_runs_the_checks_of_make_check() -> None:
    """As CONTRIBUTING.md promises."""
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text().replace(" --force-exclude", "")
    checks = [
        line.partition(")")[2].strip().removesuffix(" .") for line in recipe.splitlines() if line.startswith("\t")
    ]
    assert len(checks) > 3
    for check in checks:
        assert re.sub(r"^-m ruff", "ruff", check) in hooks, check


def test_the_changelog_has_its_form() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if re.match("##? ", line)]
    assert headings[:2] == ["# Changelog", "## [Unreleased]"]
    released = [re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", line) for line in headings[2:]]
    assert released and all(released) and released[0] and released[0][1] == __version__
