"""Facts from UCX's own log: its table of protocols, its version, modules that did not load. Pure.

UCX prints the table at the end of an endpoint (UCX_LOG_LEVEL=info UCX_PROTO_INFO=used). This reads three forms: 1.19
(UCX_PROTO_INFO=y: candidates without counts), 1.21 (count and range in one cell), and 1.22 and 1.23 (separate cells,
the title on its own lines). The lanes of a `cfg#` line are ignored: it lists tcp even if the data moves over cma.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdlab.core.text import counted

Operation = Literal["read", "write", "message"]

_SCOPE = re.compile(r"\b(self|intra-node|inter-node) cfg#\d+$")
_TITLE = re.compile(
    r"^(?:remote memory (?P<rma>read|write) by ucp_(?:get|put)|(?P<message>(?:active|tagged) message) by)"
)
_RANGE = re.compile(r"^(?:(?P<count>\d+)\s+)?(?P<low>\d+[KMG]?)(?:\.\.(?P<high>inf|\d+[KMG]?))?$")
_LANE = re.compile(r"(?:(\d+)% on )?\b([a-z][a-z0-9_]*)/([\w.:-]+)")
_FAILED = re.compile(r"dlopen\('(?P<path>[^']*/lib(?P<name>uc[tm]_\w+)\.so[^']*)', mode=\w+\) failed: (?P<why>.*)")
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\d+\.\d+\.\d+)")
# A protocol over a transport, on all its devices, with less than this share of the operations is not part of the wire.
STRAY = 0.05
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class UcxLane:
    """A transport on a device; ``percent`` of the bytes if UCX reports it."""

    transport: str
    device: str
    percent: int | None = None

    @property
    def name(self) -> str:
        return f"{self.transport}/{self.device}"


@dataclass(frozen=True)
class ProtocolRow:
    """One row of a table: messages of ``low`` to ``high`` bytes (None: no limit) use ``protocol`` over ``lanes``.

    ``count``: number of messages; None if UCX printed candidates without counts. ``scope``: UCX's class of the peer:
    self, intra-node or inter-node.
    """

    operation: Operation
    count: int | None
    low: int
    high: int | None
    protocol: str
    lanes: tuple[UcxLane, ...]
    scope: str = ""


def parse_table(log: str) -> tuple[ProtocolRow, ...]:
    """All rows of all tables in UCX's log; other lines are skipped."""
    rows: list[ProtocolRow] = []
    scope, operation, columns = "", None, 0
    for line in log.splitlines():
        start = line.find("|")
        if start < 0 or not line.rstrip().endswith("|"):
            if "+--" in line:
                columns = line[line.index("+--") :].count("+") - 1
            else:
                scope, operation = "", None
            continue
        cells = [cell.strip() for cell in line[start:].strip().strip("|").split("|")]
        if scope_match := _SCOPE.search(cells[0]):
            scope, operation = scope_match[1], None
            cells = cells[1:]
        if len(cells) == 1:
            operation = _operation(cells[0]) if scope else None
        # A truncated line has fewer cells than the border above it.
        elif operation and len(cells) == columns and (row := _row(operation, cells)):
            rows.append(replace(row, scope=scope))
    return tuple(rows)


def _operation(title: str) -> Operation | None:
    title_match = _TITLE.match(title)
    if title_match is None:
        return None
    if title_match["message"]:
        return "message"
    return "read" if title_match["rma"] == "read" else "write"


def _row(operation: Operation, cells: Sequence[str]) -> ProtocolRow | None:
    count = None
    if len(cells) == 4 and cells[0].isdigit():
        count, cells = int(cells[0]), cells[1:]
    if len(cells) != 3 or not (sizes := _RANGE.match(cells[0])):
        return None
    if sizes["count"]:
        count = int(sizes["count"])
    lanes = tuple(UcxLane(lane[2], lane[3], int(lane[1]) if lane[1] else None) for lane in _LANE.finditer(cells[2]))
    low = _size(sizes["low"])
    high = None if sizes["high"] == "inf" else _size(sizes["high"] or sizes["low"])
    return ProtocolRow(operation, count, low, high, cells[1].removeprefix("(?) "), lanes)


def _size(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


@dataclass(frozen=True)
class Wire:
    """The wire of the pages. ``counted``: from UCX's own counts, else from the candidate for that size."""

    protocol: str
    lanes: tuple[UcxLane, ...]
    counted: bool
    operations: int | None = None

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lane.transport for lane in self.lanes))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lane.device for lane in self.lanes))

    @property
    def name(self) -> str:
        """The lanes as ``srd/rdmap79s0:1 + srd/rdmap80s0:1``; of more than four the number of devices."""
        names = list(dict.fromkeys(lane.name for lane in self.lanes))
        return (
            " + ".join(names)
            if len(names) <= 4
            else f"{'/'.join(self.transports)} on {counted(len(self.devices), 'device')}"
        )

    @property
    def emulated(self) -> bool:
        return "software emulation" in self.protocol


def wire_of(rows: Iterable[ProtocolRow], operation: Operation, page_bytes: int) -> Wire | None:
    """The wire of one process for an operation; None if the tables do not have it.

    Every protocol with at least a share STRAY of the operations is part of the wire, so that the larger share does not
    hide another transport.
    """
    operation_rows = [row for row in rows if row.operation == operation]
    counts: Counter[tuple[str, tuple[UcxLane, ...]]] = Counter()
    for row in operation_rows:
        if row.count:
            counts[row.protocol, row.lanes] += row.count
    if counts:
        total = sum(counts.values())
        ways = [Wire(*way, True, count) for way, count in counts.most_common()]
        of_kind: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for way in ways:
            of_kind[way.protocol, way.transports] += way.operations or 0
        ways = [way for way in ways if of_kind[way.protocol, way.transports] >= STRAY * total]
        wire = together(ways)
        return None if wire is None else replace(wire, operations=total)
    for row in reversed(operation_rows):  # the endpoints for the data are made last
        if row.count is None and row.low <= page_bytes and (row.high is None or page_bytes <= row.high):
            return Wire(row.protocol, row.lanes, False)
    return None


def reads(rows: Iterable[ProtocolRow], scopes: Sequence[str], least_bytes: int) -> Wire | None:
    """The wire of reads from peers of those scopes: by UCX's counts, else the candidates from ``least_bytes`` on."""
    chosen = [row for row in rows if row.operation == "read" and row.scope in scopes]
    if any(row.count for row in chosen):
        return wire_of(chosen, "read", least_bytes)
    return together(
        Wire(row.protocol, row.lanes, False) for row in chosen if row.high is None or row.high >= least_bytes
    )


def together(wires: Iterable[Wire | None]) -> Wire | None:
    """Merge the wires of several ranks, which may have different network devices; None without a wire.

    It has all protocols and lanes. The percentages of lanes are kept only if all wires have the same lanes.
    """
    ways = [wire for wire in wires if wire is not None]
    if not ways:
        return None
    lanes = dict.fromkeys(way.lanes for way in ways)
    if len(lanes) == 1:
        (joined,) = lanes
    else:
        joined = tuple(dict.fromkeys(replace(lane, percent=None) for lane_set in lanes for lane in lane_set))
    counts = [way.operations for way in ways if way.operations is not None]
    return Wire(
        " and ".join(dict.fromkeys(way.protocol for way in ways)), joined, all(way.counted for way in ways),
        sum(counts) if counts else None,
    )  # fmt: skip


def ucx_version(log: str) -> str | None:
    """The version, such as ``1.21.0``; None if it is not in the log."""
    version_match = _VERSION.search(log)
    return version_match[1] if version_match else None


def failed_modules(log: str) -> dict[str, str]:
    """UCX module (``uct_ib_efa``) -> why its first load failed; the first one is the copy of this UCX."""
    failed: dict[str, str] = {}
    for failure in _FAILED.finditer(log):
        why = failure["why"].removeprefix(f"{failure['path']}: ").strip()
        failed.setdefault(failure["name"], why)
    return failed
