"""The axes of load of the picture and of the page: one entry for each kind of load."""

from __future__ import annotations

from typing import NamedTuple

from pdlab.core.workload import LoadKind


class LoadAxis(NamedTuple):
    """``name``: at the axis; ``title``: in the title of a panel; ``level``: one load in words, ``{}`` its value."""

    name: str
    title: str
    level: str


LOAD_AXES: dict[LoadKind, LoadAxis] = {
    "concurrency": LoadAxis("concurrency (in flight, whole deployment)", "concurrency", "concurrency {}"),
    "rate": LoadAxis("request rate (requests/s, whole deployment)", "request rate", "{} requests/s"),
    "ramp": LoadAxis(
        "rate at the end of a ramp (requests/s, whole deployment)", "request rate", "ramp to {} requests/s"
    ),
    "replay": LoadAxis("speed of a replay (times that of its source)", "speed of the replay", "replay at {} times"),
}
