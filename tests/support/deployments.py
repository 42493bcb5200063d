"""Deployments to render in tests, each with a cluster that takes it: one of every shape that renders differently."""

from __future__ import annotations

from pdlab.core.files import CONFIGS

# Names of configs/deployments/: the first line of a file names a cluster.
FILES = {
    path.stem: path.read_text(encoding="utf-8").split("\n")[0].removeprefix("# cluster: ")
    for path in sorted((CONFIGS / "deployments").glob("*.yaml"))
}
# Labels, which need no file.
LABELS = dict.fromkeys(
    (
        "collocated-4xtp2",
        "pd-fluid-8xtp2",
        "pd-pack-p1xtp1-d2xtp2",
        "pd-pack-p1xtp4-d1xtp2",
        "pd-pack-p1xtp4-d1xtp4",
        "pd-pack-p2xtp1-d3xtp2",
        "pd-spread-p1xtp4-d1xtp4",
    ),
    "p5.48xlarge-x2",
)
SHAPES = FILES | LABELS
# The published comparison of pools and placements.
STORY = (
    *(f"collocated-{pool}" for pool in ("8xtp1", "4xtp2", "2xtp4", "1xtp8")),
    *(f"pd-pack-p{prefill}-d1xtp4" for prefill in ("1xtp4", "1xtp2", "2xtp2", "1xtp1", "2xtp1", "3xtp1", "4xtp1")),
    *(f"pd-pack-p{p}xtp2-d{d}xtp2" for p, d in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))),
    *(f"pd-pack-p{p}xtp1-d{d}xtp2" for p, d in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 3))),
    "pd-pack-p1xtp4-d1xtp2",
    "pd-spread-p1xtp4-d1xtp4",
)
