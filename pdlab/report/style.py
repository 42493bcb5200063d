"""How a curve looks: colour, marker and line, chosen so that related configurations look related.

A PD family is the pair of prefill and decode replica shapes (TP2 -> TP4); it has one hue of the
Okabe-Ito palette, and the P:D ratio inside it is lightness and marker. Collocated curves are
dashed greys, published ones dotted. Colour is never the only difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdlab.analysis.curves import Curve
from pdlab.core.deployment import Disaggregated, Pool

RGB = tuple[float, float, float]

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D46")
MARKERS = ("o", "s", "^", "D", "v", "p", "<", ">", "h", "d")
COLLOCATED = "collocated"
OTHER = "other"
PUBLISHED = "published elsewhere"


class Style(NamedTuple):
    """``family`` is the heading under which the curve stands in a legend, ``rank`` its place; ``color`` is #rrggbb."""

    family: str
    rank: int
    color: str
    marker: str
    dashes: tuple[float, ...]


def styles(curves: Sequence[Curve]) -> tuple[Style, ...]:
    """One style per curve, in their order; the same set of configurations always looks the same."""
    families: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=_order):
        families.setdefault(family(curve), []).append(curve)
    hues = {name: HUES[i % len(HUES)] for i, name in enumerate(f for f in families if f != COLLOCATED)}
    found: dict[int, Style] = {}
    for name, members in families.items():
        for rank, curve in enumerate(members):
            share = rank / max(1, len(members) - 1) if len(members) > 1 else 0.5
            found[id(curve)] = Style(
                family=name,
                rank=len(found),
                color=_grey(share) if name == COLLOCATED else _shade(hues[name], share, len(members)),
                marker=MARKERS[rank % len(MARKERS)],
                dashes=_dashes(curve),
            )
    return tuple(found[id(curve)] for curve in curves)


def family(curve: Curve) -> str:
    """``collocated``, ``P TP2 to D TP4``, or ``other`` where the configuration is not known."""
    if curve.published is not None:
        return PUBLISHED
    if curve.deployment is None:
        return OTHER
    topology = curve.deployment.topology
    if isinstance(topology, Disaggregated):
        return f"P {_shape(topology.prefill)} to D {_shape(topology.decode)}"
    return COLLOCATED


def text_color(color: str) -> str:
    """A darker tone of a curve's colour, which reads on white at small sizes."""
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
    return (0, -topology.pool.gpus_per_replica, 0, float(topology.pool.replicas), curve.label)


def _dashes(curve: Curve) -> tuple[float, ...]:
    if curve.published is not None:
        return (1.0, 1.6)
    if curve.deployment is None:
        return ()
    topology = curve.deployment.topology
    if isinstance(topology, Disaggregated):
        return (6.0, 1.2, 1.2, 1.2) if topology.placement == "spread" else ()
    return (4.0, 1.8)


def _shade(hue: str, share: float, members: int) -> str:
    """From a dark to a light tone of the hue, never so light that it fades on white."""
    tone = 0.0 if members == 1 else min(1.0, (members + 1) / 4) * (0.85 * share - 0.55)
    return _hex(_mix(_rgb(hue), (0.0, 0.0, 0.0) if tone < 0 else (1.0, 1.0, 1.0), abs(tone)))


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
    return "#" + "".join(f"{round(part * 255):02x}" for part in color)


STYLE_FILE = Path(__file__).parent / "assets" / "pdlab.mplstyle"
