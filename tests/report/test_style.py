"""Curves of one family stay apart, to colour-blind readers too."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from support.curves import made_up

from pdlab.core.deployment import Collocated, Deployment, Disaggregated, PlacementKind, Pool
from pdlab.report.style import HUES, Style, lightness, styles

# Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009): linear RGB as seen without one kind of cone (severity 1.0).
SIMULATED = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
APART = 10.0  # CIE76: about four times what is just noticed side by side
WHITE = np.array([0.95047, 1.0, 1.08883])
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of #rrggbb, as that reader sees it."""
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(SIMULATED[vision]) @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def family(members: int, shape: int, placement: PlacementKind) -> list[Deployment]:
    """PD deployments of one family: that many P:D ratios of the same two shapes."""
    return [
        Deployment(
            topology=Disaggregated(
                prefill=Pool(replicas=n, tp=2 ** (shape % 3)), decode=Pool(tp=2 ** (shape // 3)), placement=placement
            )
        )
        for n in range(1, members + 1)
    ]


def looks(*deployments: Deployment) -> list[Style]:
    return list(styles([made_up(deployment) for deployment in deployments]))


@pytest.mark.parametrize("vision", SIMULATED)
@pytest.mark.parametrize("placement", ["pack", "spread"])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_family_is_told_apart_by_lightness_marker_and_dash(
    members: int, placement: PlacementKind, vision: str
) -> None:
    # As many families as there are hues, so that each hue is looked at.
    every = looks(*(each for shape in range(len(HUES)) for each in family(members, shape, placement)))
    families: dict[str, list[Style]] = {}
    for style in every:
        families.setdefault(style.family, []).append(style)
    assert len(families) == len(HUES)
    for name, family_styles in families.items():
        assert len(family_styles) == members
        assert (
            len({style.marker for style in family_styles}) == len({style.dashes for style in family_styles}) == members
        )
        for one, other in combinations(family_styles, 2):
            apart = np.linalg.norm(lab(one.color, vision) - lab(other.color, vision))
            assert apart > APART, f"{name}: {one.color} and {other.color} are {apart:.1f} apart"


def test_collocated_ones_too() -> None:
    drawn = looks(*(Deployment(topology=Collocated(pool=Pool(replicas=2**n, tp=2 ** (4 - n)))) for n in range(5)))
    assert len({style.marker for style in drawn}) == len({style.dashes for style in drawn}) == 5
    levels = sorted(lightness(style.color) for style in drawn)
    assert all(after - before > APART for before, after in pairwise(levels))


def test_nothing_fades_on_white() -> None:
    for members in (1, 5, 9):
        for shape in range(len(HUES)):
            assert all(lightness(style.color) < 76 for style in looks(*family(members, shape, "pack")))


def test_a_set_always_looks_the_same() -> None:
    three = family(3, 0, "pack")
    assert looks(*three) == list(reversed(looks(*reversed(three))))
