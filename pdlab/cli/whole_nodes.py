"""Curves with the GPUs of the whole nodes that they take: placement tells, which analysis does not know."""

from __future__ import annotations

from pdlab.analysis.curves import Curve
from pdlab.placement.copies import whole_node_gpus


def counted(curve: Curve) -> Curve:
    """The curve with `Gpus.whole`. Ranks on CPUs are rented by no node; what is published elsewhere stays as it is."""
    gpus = curve.gpus
    if gpus.device == "cpu" or curve.published is not None:
        return curve
    if curve.deployment is not None:
        whole = whole_node_gpus(curve.deployment, gpus.node)
    else:  # only the number of GPUs is known
        nodes = -(-gpus.total // gpus.node)
        whole = nodes * gpus.node / (nodes * gpus.node // gpus.total)
    return curve.model_copy(update={"gpus": gpus.model_copy(update={"whole": float(whole)})})
