"""The board of a fluid pool's roles without Ray, its clock in a test's hands."""

from __future__ import annotations

import asyncio
from typing import Any

from pdlab.deploy.serving.engine_traffic import TrafficCounts
from pdlab.deploy.serving.role_board import RoleBoard


class Quiet(RoleBoard):
    """Decides when it is told to."""

    def _run(self) -> None:
        pass


def report(of: RoleBoard, *names: str, **more: Any) -> dict[str, Any]:
    """Those engines report ``more`` and no traffic; gives the answer to the last one."""
    answer: dict[str, Any] = {}
    for name in names:
        answer = asyncio.run(of.report(name, "node", {**TrafficCounts().take().fields, **more}))
    return answer


def roles(of: RoleBoard) -> dict[str, str]:
    """Engine -> its role."""
    return {name: engine["role"] for name, engine in asyncio.run(of.look())["engines"].items()}
