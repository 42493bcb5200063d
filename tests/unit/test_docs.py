"""What the documents name exists, and README's table of modules is the folder."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "debug" / "readme_nixl_ray.md"]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *DECISIONS]
# Results that a run writes, the label of a node, a cache's folder.
NOT_SHIPPED = (
    "bm_results/LABEL",
    "bm_results/NAME",
    "bm_results/collocated",
    "bm_results/pd",
    "pdlab/node",
    "pdlab/logs",
)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def test_readme_names_every_module_and_none_that_is_gone() -> None:
    cells = [line.split("|")[1] for line in DOCUMENTS[0].read_text().splitlines() if line.startswith("| `pdlab/")]
    names = [name.removeprefix("pdlab/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    files = {path.name for path in (ROOT / "pdlab").iterdir() if path.is_file()} - {"__init__.py"}
    assert len(names) == len(set(names)), "named twice"
    assert not [file for file in files if not any(fnmatch.fnmatch(file, name) for name in names)]
    assert not [name for name in names if not fnmatch.filter([*files, "child/"], name)]


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
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        if section:
            assert section in {anchor(line.lstrip("# ")) for line in found.read_text().splitlines() if line[:1] == "#"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"\b(?:pdlab|configs|docs|tests|debug|benchmarks|bm_results)/[\w./*-]*\w", text)
    for name in named:
        if not name.startswith(NOT_SHIPPED):
            assert list(ROOT.glob(name)), name
    for module in re.findall(r"-m (pdlab\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets
