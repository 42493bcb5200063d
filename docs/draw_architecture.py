#!/usr/bin/env python3
"""Draw docs/architecture.svg: the packages of pdlab/ and what each imports, read from the imports themselves.

An arrow that follows from others (a imports b, b imports c, a imports c) is left out. `--check` writes nothing and
exits with 1 when the stored picture is not the one that the imports give.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 116, 44, 34, 104
# Beside the name: what the package holds.
HOLDS = {
    "core": "shared values",
    "remote": "sent to nodes",
    "results": "runs, metrics",
    "marks": "parts of TTFT",
    "roles": "who prefills",
    "placement": "replica to node",
    "cluster": "Ray nodes",
    "traffic": "workload files",
    "sim": "simulator",
    "analysis": "curves, intervals",
    "transfer": "KV transfer proof",
    "plan": "which deployment",
    "guard": "KV guard in engines",
    "deploy": "serve and check",
    "bench": "load to runs",
    "report": "tables, plots",
    "steps": "child processes",
    "demo": "on this machine",
    "first_hour": "on booked nodes",
    "faults": "broken on purpose",
    "rehearsal": "simulated engines",
    "cli": "command lines",
}


def imports() -> dict[str, set[str]]:
    """Package -> the other packages that its modules import, inside functions too."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "pdlab").glob("*/**/*.py")):
        package = path.relative_to(ROOT / "pdlab").parts[0]
        edges = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            edges |= {name.split(".")[1] for name in names if name.startswith("pdlab.")} - {package}
    return found


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others (transitive reduction of a graph without cycles)."""

    def reach(start: str) -> set[str]:
        return edges[start].union(*(reach(after) for after in edges[start]))

    return {name: {to for to in after if not any(to in reach(by) for by in after)} for name, after in edges.items()}


def rows(edges: dict[str, set[str]]) -> list[list[str]]:
    """Packages by the longest way down from one that nothing imports; that one first."""

    def depth(name: str) -> int:
        return 1 + max((depth(by) for by in edges if name in edges[by]), default=-1)

    found: dict[int, list[str]] = {}
    for name in sorted(edges):
        found.setdefault(depth(name), []).append(name)
    return [found[at] for at in sorted(found)]


def placed(levels: list[list[str]], edges: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Left upper corners. In a row packages stand in the order of the mean position of what imports them."""
    width = max(map(len, levels)) * (BOX_WIDTH + GAP)
    found: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(levels):
        above = {name: [found[by][0] for by in found if name in edges[by]] for name in level}
        level.sort(key=lambda name: (sum(above[name]) / len(above[name]) if above[name] else width / 2, name))
        step = width / len(level)
        for at, name in enumerate(level):
            found[name] = ((at + 0.5) * step - BOX_WIDTH / 2, 12 + number * ROW)
    return found


def curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From box to box; past the boxes of a row in between through the gap beside the first one's column."""
    if end[1] - start[1] < ROW:
        stops = [start, end]
    else:
        beside = (BOX_WIDTH + GAP) / 2 * (-1 if end[0] < start[0] else 1)
        stops = [start, (start[0] + beside, start[1] + ROW - BOX_HEIGHT / 2), end]
    words = [f"M{start[0]:.0f} {start[1]:.0f}"]
    for (x, y), (a, b) in itertools.pairwise(stops):
        bend = (b - y) / 2
        words.append(f"C{x:.0f} {y + bend:.0f} {a:.0f} {b - bend:.0f} {a:.0f} {b:.0f}")
    return " ".join(words)


def svg() -> str:
    """The picture."""
    whole = imports()
    edges = reduced(whole)
    levels = rows(whole)
    corners = placed(levels, edges)
    width = max(map(len, levels)) * (BOX_WIDTH + GAP)
    height = len(levels) * ROW - ROW + BOX_HEIGHT + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5b6b7b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name in sorted(edges):
        x, y = corners[name]
        for to in sorted(edges[name]):
            a, b = corners[to]
            start, end = (x + BOX_WIDTH / 2, y + BOX_HEIGHT), (a + BOX_WIDTH / 2, b)
            lines.append(
                f'<path d="{curve(start, end)}" fill="none" stroke="#5b6b7b" stroke-width="1.3" '
                'marker-end="url(#arrow)"/>'
            )
    for name, (x, y) in sorted(corners.items()):
        middle = x + BOX_WIDTH / 2
        lines.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="#eef3f8" '
            'stroke="#2f5d8a"/>'
            f'<text x="{middle:.0f}" y="{y + 19:.0f}" text-anchor="middle" font-size="14" fill="#12263a">{name}</text>'
            f'<text x="{middle:.0f}" y="{y + 35:.0f}" text-anchor="middle" font-size="10.5" fill="#44576a">'
            f"{HOLDS[name]}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    drawn = svg()
    if args.check:
        if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn:
            return 0
        print("docs/architecture.svg is not what the imports give: python docs/draw_architecture.py", file=sys.stderr)
        return 1
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
