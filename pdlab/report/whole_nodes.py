"""Curves with the GPUs of the whole nodes that they take, which only the placement knows."""

from __future__ import annotations

from pdlab.analysis.curves import Curve, Gpus
from pdlab.core.deployment import Deployment
from pdlab.placement.copies import whole_node_gpus


def counted(curve: Curve) -> Curve:
    """The curve with `Gpus.whole`; published curves stay unchanged."""
    if curve.published is not None:
        return curve
    return curve.model_copy(update={"gpus": counted_gpus(curve.gpus, curve.deployment)})


def counted_gpus(gpus: Gpus, deployment: Deployment | None) -> Gpus:
    """With `Gpus.whole`. Ranks on CPUs are not rented by the node."""
    if gpus.device == "cpu":
        return gpus
    if deployment is not None:
        whole = whole_node_gpus(deployment, gpus.node)
    else:  # only the number of GPUs is known
        nodes = -(-gpus.total // gpus.node)
        whole = nodes * gpus.node / (nodes * gpus.node // gpus.total)
    return gpus.model_copy(update={"whole": float(whole)})
