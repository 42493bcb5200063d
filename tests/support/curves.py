"""Curves made up on the spot, for what only looks at their configuration."""

from __future__ import annotations

from pdlab.analysis.curves import Curve, Gpus
from pdlab.core.deployment import Deployment


def made_up(deployment: Deployment) -> Curve:
    """A curve without points."""
    return Curve(
        name=deployment.label,
        label=deployment.label,
        gpus=Gpus(total=deployment.gpus),
        deployment=deployment,
        workload="512:64",
        points=(),
    )
