"""What the dashboard and the alerts ask Prometheus for."""

from __future__ import annotations

import re

from pdlab.deploy.dashboard import ALERTS, ROWS


def metrics() -> set[str]:
    """Names of the metrics in their expressions."""
    expressions = [query.expression for row in ROWS for panel in row.panels for query in panel.queries]
    expressions += [alert.expression for alert in ALERTS]
    return {name for each in expressions for name in re.findall(r"\bray_[a-z0-9_]+", each)}
