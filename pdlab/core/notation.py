"""Common notations of prefill-decode configurations -> a topology.

- Nodes, as in reports on large-scale expert parallelism: ``P4D9`` is one prefill group on 4 nodes and one decode group
  on 9. ``(P3x3)D4`` is 3 prefill groups of 3 nodes each, and one decode group on 4. A group is one expert-parallel
  engine on all its nodes, with data-parallel ranks.
- Instances: ``3P1D`` is three prefill instances and one decode instance. It lacks their size, so it is refused.
- pdlab: ``4xtp2``, ``1xtp2-1xtp2``, ``collocated-4xtp2``, ``pd-spread-p1xtp4-d1xtp4``, ``pd-fluid-8xtp2``.
"""

from __future__ import annotations

import re

from pdlab.core.deployment import Collocated, Disaggregated, Pool, Topology, parse_label, parse_pool
from pdlab.core.errors import UsageError
from pdlab.core.text import counted

_GROUP = r"\(?{role}(?P<{name}_nodes>[1-9]\d*)(?:x(?P<{name}_groups>[1-9]\d*))?\)?"
_NODES = re.compile(_GROUP.format(role="P", name="p") + r"[- ]?" + _GROUP.format(role="D", name="d"), re.IGNORECASE)
_INSTANCES = re.compile(r"(?P<p>[1-9]\d*)P[- :]?(?P<d>[1-9]\d*)D", re.IGNORECASE)
_PAIR = re.compile(r"p?(?P<p>\d+x[a-z0-9]+)-d?(?P<d>\d+x[a-z0-9]+)", re.IGNORECASE)


def parse(text: str, *, gpus_per_node: int = 8, tp: int = 1) -> Topology:
    """Parse a configuration in one of these notations. A notation without a placement means ``spread``.

    In the notation of nodes, a group of n nodes is one expert-parallel engine with ``n * gpus_per_node / tp``
    data-parallel ranks of TP ``tp``. Raises UsageError, also for ``3P1D``, which lacks the sizes of the instances.
    """
    plain = text.strip()
    if (match := _NODES.fullmatch(plain)) and plain.count("(") == plain.count(")"):
        sizes = {name: int(match[name] or 1) for name in ("p_nodes", "p_groups", "d_nodes", "d_groups")}
        return Disaggregated(
            prefill=_span(plain, sizes["p_groups"], sizes["p_nodes"] * gpus_per_node, tp),
            decode=_span(plain, sizes["d_groups"], sizes["d_nodes"] * gpus_per_node, tp),
            placement="spread",
        )
    if match := _INSTANCES.fullmatch(plain):
        raise UsageError(
            f"configuration {text!r} counts instances without their size; write the pools out, for example "
            f"{match['p']}xtp4-{match['d']}xtp4"
        )
    if match := _PAIR.fullmatch(plain):
        return Disaggregated(
            prefill=parse_pool(match["p"].lower()), decode=parse_pool(match["d"].lower()), placement="spread"
        )
    if re.fullmatch(r"\d+x[a-z0-9]+", plain, re.IGNORECASE):
        return Collocated(pool=parse_pool(plain.lower()))
    try:
        return parse_label(plain)
    except UsageError as error:
        raise UsageError(
            f"configuration {text!r}: expected P4D9 or (P3x3)D4 (nodes), 3xtp4-1xtp4 (pools), 4xtp2 (collocated), "
            "or a label such as pd-spread-p1xtp4-d1xtp4"
        ) from error


def _span(text: str, groups: int, gpus: int, tp: int) -> Pool:
    if gpus % tp:
        raise UsageError(
            f"configuration {text!r}: a group of {counted(gpus, 'GPU')} is not divisible by TP {tp}; give another tp"
        )
    ranks = gpus // tp
    return Pool(replicas=groups, tp=tp, dp=ranks, expert_parallel=ranks > 1)
