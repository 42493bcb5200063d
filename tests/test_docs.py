"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdlab.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "debug" / "readme_nixl_ray.md"]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "upstream").glob("*.md")), *DECISIONS]
# Results that a run writes, the label of a node, a cache's folder.
NOT_SHIPPED = (
    "bm_results/LABEL",
    "bm_results/NAME",
    "bm_results/chaos",
    "bm_results/collocated",
    "bm_results/pd",
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
    assert set(re.findall(r"-m pdlab ([a-z][\w-]*)", text)) <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets
