"""How a curve looks: colour, marker and line, chosen so that related configurations look related.

A PD family is the pair of prefill and decode replica shapes (TP2 -> TP4). It has one hue of the Okabe-Ito palette;
lightness and marker show the P:D ratio inside it. Collocated curves are dashed greys, published ones dotted. Colour is
never the only difference: members of a family differ in lightness, marker and dash at once. tests/report/test_style.py
checks that for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdlab.analysis.curves import Curve
from pdlab.core.deployment import Disaggregated, Fluid, Pool
from pdlab.results.curve_names import PLAIN

RGB = tuple[float, float, float]

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D46")
MARKERS = ("o", "s", "^", "D", "v", "p", "<", ">", "h", "d")
# By rank in a family. Each row shows one placement: solid or long dashes, dash and dots, short dashes.
SOLID: tuple[tuple[float, ...], ...] = ((), (9.0, 1.6), (5.0, 1.4), (14.0, 1.6), (3.0, 1.2))
DASH_DOT = (
    (6.0, 1.2, 1.2, 1.2),
    (6.0, 1.2, 1.2, 1.2, 1.2, 1.2),
    (11.0, 1.2, 1.2, 1.2),
    (3.0, 1.2, 1.2, 1.2),
    (11.0, 1.2, 1.2, 1.2, 1.2, 1.2),
)
DASHED = ((4.0, 1.8), (7.0, 1.8), (2.2, 1.4), (10.0, 1.8), (5.5, 3.0))
DARKEST, LIGHTEST, STEP = 26.0, 74.0, 16.0  # CIE L*
COLLOCATED = "collocated"
OTHER = "other"
PUBLISHED = "published elsewhere"
CHOSEN = "on the frontier, or best within a bound"
NOT_CHOSEN = "other curves"
GREY = "#b8b8b8"
INK, SOFT = "#222222", "#666666"  # texts


class Style(NamedTuple):
    """``family``: heading of the curve in a legend; ``rank``: its place there. ``color``: #rrggbb. ``hollow``: hollow
    markers, for a rehearsal. ``quiet``: behind the others, without a name of its own."""

    family: str
    rank: int
    color: str
    marker: str
    dashes: tuple[float, ...]
    hollow: bool = False
    quiet: bool = False


def styles(curves: Sequence[Curve], chosen: Collection[str] | None = None) -> tuple[Style, ...]:
    """One style per curve, in their order; the same set of configurations always looks the same.

    ``chosen``: labels of the curves with a colour; the others, except published ones, are grey (None: all have one).
    """
    if chosen is not None:
        return _few_coloured(curves, chosen)
    families: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=_order):
        families.setdefault(family(curve), []).append(curve)
    hues = {name: HUES[i % len(HUES)] for i, name in enumerate(f for f in families if f != COLLOCATED)}
    style_of: dict[int, Style] = {}
    for name, members in families.items():
        for rank, curve in enumerate(members):
            share = rank / max(1, len(members) - 1) if len(members) > 1 else 0.5
            style_of[id(curve)] = Style(
                family=name,
                rank=len(style_of),
                color=_grey(share) if name == COLLOCATED else _shade(hues[name], rank, len(members)),
                marker=MARKERS[rank % len(MARKERS)],
                dashes=_dashes(curve, rank),
                hollow=curve.rehearsed,
            )
    return tuple(style_of[id(curve)] for curve in curves)


def _few_coloured(curves: Sequence[Curve], chosen: Collection[str]) -> tuple[Style, ...]:
    ordered = sorted(curves, key=lambda curve: (curve.label not in chosen, _order(curve)))
    rank = {id(curve): i for i, curve in enumerate(ordered)}
    return tuple(
        Style(
            CHOSEN,
            rank[id(curve)],
            HUES[rank[id(curve)] % len(HUES)].lower(),
            MARKERS[rank[id(curve)] % len(MARKERS)],
            (),
            curve.rehearsed,
        )
        if curve.label in chosen
        else Style(PUBLISHED, rank[id(curve)], GREY, "d", (1.0, 1.6))
        if curve.published is not None
        else Style(NOT_CHOSEN, rank[id(curve)], GREY, "o", (), curve.rehearsed, quiet=True)
        for curve in curves
    )


def family(curve: Curve) -> str:
    """``collocated``, ``P TP2 to D TP4``, ``fluid TP2``. For an unknown configuration ``h200_sxm vllm fp4`` from its
    files, or ``other``."""
    if curve.published is not None:
        return PUBLISHED
    if curve.deployment is None:
        return " ".join(curve.settings[key] for key in PLAIN if key in curve.settings) or OTHER
    topology = curve.deployment.topology
    if curve.rehearsed:
        return f"rehearsed {topology.kind}"
    if isinstance(topology, Disaggregated):
        return f"P {_shape(topology.prefill)} to D {_shape(topology.decode)}"
    if isinstance(topology, Fluid):
        return f"fluid {_shape(topology.pool)}"
    return COLLOCATED


def hue(number: int) -> str:
    """A colour of its own for each of the first `HUES` times three numbers: these, then lighter, then darker ones."""
    turn, place = divmod(number, len(HUES))
    pole, share = (((1.0, 1.0, 1.0), 0.55), ((0.0, 0.0, 0.0), 0.45))[turn % 3 - 1]
    return _hex(_mix(_rgb(HUES[place]), pole, share)) if turn % 3 else HUES[place].lower()


def text_color(color: str) -> str:
    """A darker tone of a curve's colour, readable on white at small sizes."""
    return _hex(_mix(_rgb(color), (0.0, 0.0, 0.0), 0.25))


def _shape(pool: Pool) -> str:
    return pool.label.split("x", 1)[1].upper()


def _order(curve: Curve) -> tuple[object, ...]:
    """Collocated first, then PD by decode and prefill size and by ratio, then the unknown."""
    if curve.published is not None:
        return (3, 0, 0, 0.0, curve.label)
    if curve.deployment is None:
        return (2, 0, 0, 0.0, curve.label)
    topology = curve.deployment.topology
    if isinstance(topology, Disaggregated):
        p, d = topology.prefill, topology.decode
        return (1, -d.gpus_per_replica, -p.gpus_per_replica, p.replicas / d.replicas, curve.label)
    if isinstance(topology, Fluid):  # after all fixed roles
        prefill, decode = topology.split or (0, 1)
        return (1, 0, -topology.pool.gpus_per_replica, prefill / decode, curve.label)
    return (0, -topology.pool.gpus_per_replica, 0, float(topology.pool.replicas), curve.label)


def _dashes(curve: Curve, rank: int) -> tuple[float, ...]:
    if curve.published is not None:
        return (1.0, 1.6)
    if curve.deployment is None:
        return SOLID[rank % len(SOLID)]
    topology = curve.deployment.topology
    if isinstance(topology, Disaggregated):
        patterns = DASH_DOT if topology.placement == "spread" else SOLID
        return patterns[rank % len(patterns)]
    if isinstance(topology, Fluid):
        return DASH_DOT[rank % len(DASH_DOT)]
    return DASHED[rank % len(DASHED)]


def _shade(hue: str, rank: int, members: int) -> str:
    """The hue at its own lightness, in steps that colour-blind readers see, and never too light on white."""
    if members == 1:
        return hue.lower()
    step = min(STEP, (LIGHTEST - DARKEST) / (members - 1))
    half = step * (members - 1) / 2
    middle = min(max(lightness(hue), DARKEST + half), LIGHTEST - half)
    return _at_lightness(_rgb(hue), middle - half + step * rank)


def _at_lightness(color: RGB, target: float) -> str:
    """The colour mixed with black or white until it has that lightness, by halving."""
    pole = (0.0, 0.0, 0.0) if lightness(_hex(color)) > target else (1.0, 1.0, 1.0)
    low, high = 0.0, 1.0
    for _ in range(20):
        share = (low + high) / 2
        too_far = (lightness(_hex(_mix(color, pole, share))) < target) == (pole[0] == 0.0)
        low, high = (low, share) if too_far else (share, high)
    return _hex(_mix(color, pole, low))


def lightness(color: str) -> float:
    """CIE L* of #rrggbb, from 0 (black) to 100 (white)."""
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in _rgb(color)]
    luminance = sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def _grey(share: float) -> str:
    level = 0.10 + 0.50 * share
    return _hex((level, level, level))


def _mix(color: RGB, other: RGB, share: float) -> RGB:
    red, green, blue = (a + (b - a) * share for a, b in zip(color, other, strict=True))
    return red, green, blue


def _rgb(color: str) -> RGB:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _hex(color: RGB) -> str:
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in color)
