"""Grafana's dashboard and Prometheus' alert rules, declared once (`ROWS`, `ALERTS`), and the files that provision both.

Metrics have the names of Ray's default exporter: the prefix ``ray_``, and the suffix ``_total`` for counters. Means are
rates of counters, because that exporter computes the sums of histograms from the middles of their buckets. A counter of
failures appears with the first failure, which ``rate`` and ``increase`` miss: `_times` counts it. Where nothing was
served there is no figure, and not the NaN of 0 / 0 or of an empty histogram, across which Grafana draws a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pdlab.core.files import replace
from pdlab.deploy.serving.prefill_call import COUNTERS as PREFILL_CALLS
from pdlab.deploy.serving.ttft_metrics import PART_SECONDS, READ_BYTES, READS, REQUESTS, SECONDS
from pdlab.results.timeline import PARTS

INTERVAL = "$__rate_interval"
RATE = f"[{INTERVAL}]"
SOURCE = {"type": "prometheus", "uid": "${source}"}
UID, TITLE = "pdlab", "pdlab: prefill-decode serving"
WIDTH, HEIGHT = 8, 8  # of a panel; a row is 24 wide
MINUTES = 5  # of an alert's rates
SCRAPED_EVERY = "10s"
ENGINE = "{{deployment}} {{ReplicaId}}"  # the legend of an engine's line
# Without an upper end Grafana draws lines of zeros on an axis to 100, and shares of nothing on one to 10,000 %.
HIGHEST = {"percentunit": 1}
HIGHEST_OF_ZEROS = {"short": 1, "ops": 1}
# What `pdlab.guard.receives` counts and users ask for; a test compares them.
GUARD_ACTIONS = ("recomputed", "refused", "failed_reads", "stale", "unconfirmed", "deadlines", "errors", "unhealed")
SHOWN_CALLS = tuple(name for name in PREFILL_CALLS if name not in ("calls", "answered"))


class Query(NamedTuple):
    """A PromQL expression, and the legend of its lines (labels in braces)."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """One panel. ``unit`` is one of Grafana's. ``stacked``: draw the lines on top of each other."""

    title: str
    what: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


class PanelRow(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


class Alert(NamedTuple):
    """One alert. ``holds``: how long its condition must hold before it fires (Prometheus' duration)."""

    name: str
    expression: str
    holds: str
    severity: str
    summary: str


def counted(name: str) -> str:
    """A counter of Ray's, as its exporter names it."""
    return f"ray_{name}_total"


def _rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{RATE}))"


def _times(metric: str, interval: str = INTERVAL) -> str:
    """How often something was counted in the interval. A counter that appeared on a page counts from 0. If Prometheus
    began to scrape the page within the interval, a counter that was there already counts from what it was then."""
    window = f"[{interval}]"
    scraped = f"on (job, instance) group_left () sum_over_time(up{window})"
    appeared = f"0 * {metric} and count_over_time({metric}{window}) < {scraped}"
    return f"sum({metric} - ({metric} offset {interval} or {appeared} or min_over_time({metric}{window})))"


def _part(name: str) -> str:
    return f'{{part="{name}"}}'


def _or_none(expression: str) -> str:
    """0 where the counter has not appeared, for it does so at the first thing that it counts."""
    return f"{expression} or vector(0)"


def _quantile(share: float, metric: str, by: str = "le", only: str = "") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate(ray_{metric}_bucket{only}{RATE}))) >= 0"


def _ratio(a: str, b: str) -> str:
    return f"{a} / ({b} > 0)"


def _of_pool(by_replica: str) -> str:
    """Values by ReplicaId, with the deployment that each engine is of: the counter of KV pools knows which."""
    pools = f"max by (ReplicaId, deployment) ({counted('pdlab_kv_pool_tokens')} > bool 0)"
    return f"{by_replica} * on (ReplicaId) group_left (deployment) {pools}"


def _gauge(name: str) -> Query:
    """A gauge of each engine."""
    return Query(_of_pool(f"max by (ReplicaId) (ray_vllm_{name})"), ENGINE)


def _rate_of(name: str, *, absent_is_0: bool = False) -> Query:
    """A counter of each engine, per second. ``absent_is_0``: engines that have not counted yet are shown as 0."""
    rate = _rate(counted(name), "ReplicaId")
    if absent_is_0:
        rate = f"({rate} or 0 * max by (ReplicaId) ({counted('pdlab_kv_pool_tokens')}))"
    return Query(_of_pool(rate), ENGINE)


ROWS = (
    PanelRow(
        "Time to first token",
        (
            Panel(
                "Mean TTFT by part",
                "Exact means. The parts follow one another and add up to the time in the server (docs/timeline.md).",
                "s",
                # One expression for each part: they are stacked in this order, and Prometheus sorts lines by name.
                tuple(
                    Query(_ratio(_rate(counted(SECONDS) + _part(part)), _rate(counted(REQUESTS))), part)
                    for part in PARTS
                    if part != "front"
                ),
                stacked=True,
            ),
            Panel(
                "TTFT in the server",
                "From the request's arrival at the server until its first byte, or its first token if the answer is "
                "not streamed. The network and the proxy are outside.",
                "s",
                tuple(
                    Query(_quantile(share, PART_SECONDS, only='{part="total"}'), f"p{100 * share:g}")
                    for share in (0.5, 0.9, 0.95, 0.99)
                ),
            ),
            Panel(
                "Parts, p95",
                "Each part by itself, of the requests with time in it: they do not add up to the p95 of the TTFT.",
                "s",
                (Query(_quantile(0.95, PART_SECONDS, "le, part", only='{part!="total"}'), "{{part}}"),),
            ),
            Panel(
                "Requests answered, by path",
                "pd: KV cache was read; cached: decode had all of it; local, recomputed: decode computed it.",
                "reqps",
                (Query(_rate(counted(REQUESTS), "path"), "{{path}}"),),
                stacked=True,
            ),
            Panel(
                "Time between tokens, p50 and p95",
                "vLLM's histogram.",
                "s",
                tuple(
                    Query(_quantile(share, "vllm_inter_token_latency_seconds"), f"p{100 * share:g}")
                    for share in (0.5, 0.95)
                ),
            ),
            Panel(
                "Tokens",
                "Generated tokens, and prompt tokens that engines were given.",
                "short",
                (
                    Query(_rate(counted("vllm_generation_tokens")), "generated/s"),
                    Query(_rate(counted("vllm_prompt_tokens")), "prompt/s"),
                ),
            ),
        ),
    ),
    PanelRow(
        "KV transfer",
        (
            Panel(
                "Bytes read",
                "By decode engines, for requests that were answered.",
                "Bps",
                (_rate_of(READ_BYTES),),
                stacked=True,
            ),
            Panel(
                "Reads",
                "By decode ranks, for requests that were answered.",
                "ops",
                (_rate_of(READS),),
            ),
            Panel(
                "Transfer and step lag",
                "transfer: from posting a read until a poll sees its end; step_lag: until the scheduler gets the news.",
                "s",
                tuple(
                    Query(
                        _quantile(share, PART_SECONDS, "le, part", only='{part=~"transfer|step_lag"}'),
                        f"{{{{part}}}} p{100 * share:g}",
                    )
                    for share in (0.5, 0.95)
                ),
            ),
            Panel(
                "Failures of NIXL",
                "Since the engines started. Failed transfers and notifications, and KV cache that expired unread.",
                "short",
                tuple(
                    Query(_or_none(f"sum({counted(f'vllm_nixl_num_{name}')})"), name.replace("_", " "))
                    for name in ("failed_transfers", "failed_notifications", "kv_expired_reqs")
                ),
            ),
            Panel(
                "KV guard",
                "How often, in the last interval of each point; recomputed prompts are the sum of the reasons.",
                "short",
                tuple(Query(_or_none(_times(counted(f"pdlab_guard_{name}"))), name) for name in GUARD_ACTIONS),
            ),
            Panel(
                "Calls of prefill",
                "Calls that went otherwise than to one prefill replica and back, in the last interval of each point.",
                "short",
                tuple(Query(_or_none(_times(counted(f"pdlab_prefill_{name}"))), name) for name in SHOWN_CALLS),
            ),
        ),
    ),
    PanelRow(
        "Engines",
        (
            Panel(
                "KV cache in use",
                "Share of each engine's pool. An idle engine reports nothing.",
                "percentunit",
                (_gauge("kv_cache_usage_perc"),),
            ),
            Panel(
                "Requests running",
                "By engine. An idle engine reports nothing.",
                "short",
                (_gauge("num_requests_running"),),
            ),
            Panel(
                "Requests waiting",
                "By engine. On decode they wait for room, for KV cache or for a step.",
                "short",
                (_gauge("num_requests_waiting"),),
            ),
            Panel(
                "Preemptions",
                "Requests whose KV cache was taken away and is computed again.",
                "ops",
                (_rate_of("vllm_num_preemptions", absent_is_0=True),),
            ),
            Panel(
                "Prefix cache hits",
                "Share of the looked-up prompt tokens that the engine's own cache had.",
                "percentunit",
                (
                    Query(
                        _of_pool(
                            _ratio(
                                _rate(counted("vllm_prefix_cache_hits"), "ReplicaId"),
                                _rate(counted("vllm_prefix_cache_queries"), "ReplicaId"),
                            )
                        ),
                        ENGINE,
                    ),
                ),
            ),
            Panel(
                "Roles of a fluid pool",
                "Engines that prefill and decode; changed: the split was set by hand. Empty without --pd-fluid.",
                "short",
                tuple(
                    Query(f"max(ray_pdlab_roles_{name})", name)
                    for name in ("prefill", "decode", "join", "leave", "changed")
                ),
            ),
        ),
    ),
)


def _recent(metric: str) -> str:
    return _times(metric, f"{MINUTES}m")


ALERTS = (
    Alert(
        "PdlabKvTransferFailed",
        f"{_recent(counted('vllm_nixl_num_failed_transfers'))} > 0",
        "0m",
        "warning",
        f"Transfers of KV cache have failed in the last {MINUTES} minutes.",
    ),
    Alert(
        "PdlabPromptsRecomputed",
        f"{_recent(counted('pdlab_guard_recomputed'))} / {_recent(counted('pdlab_guard_receives'))} > 0.01",
        "2m",
        "warning",
        "Decode computes more than 1 % of the prompts, because their KV cache was refused or did not arrive.",
    ),
    Alert(
        "PdlabRequestsFailedWithoutPrefill",
        f"{_recent(counted('pdlab_prefill_failures'))} > 0",
        "1m",
        "critical",
        "Requests get HTTP 503, because prefill fails.",
    ),
    Alert(
        "PdlabReadsPastDeadline",
        f"{_recent(counted('pdlab_guard_deadlines'))} > 0",
        "2m",
        "critical",
        "Reads of KV cache do not end in time. Look at the network between prefill and decode.",
    ),
    Alert(
        "PdlabPrefillUnhealed",
        f"sum({counted('pdlab_guard_unhealed')}) - (sum({counted('pdlab_guard_healed')}) or vector(0)) > 0",
        "2m",
        "critical",
        "A decode worker gets no KV cache from a prefill engine over several new connections.",
    ),
    Alert(
        "PdlabQueueIsMostOfTtft",
        f"{_recent(counted(SECONDS) + '{part=~' + chr(34) + 'queue|admission' + chr(34) + '}')} / "
        f"{_recent(counted(SECONDS))} > 0.5",
        "10m",
        "warning",
        "Requests wait for engines for more than half of their TTFT: too few engines, or the wrong P:D ratio.",
    ),
    Alert(
        "PdlabKvCacheFull",
        "max by (ReplicaId) (ray_vllm_kv_cache_usage_perc) > 0.97",
        "5m",
        "warning",
        "The KV cache of an engine is full: requests wait for room or are preempted.",
    ),
)


def dashboard() -> dict[str, Any]:
    """Grafana's JSON, for versions from 9 on."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for number, panel in enumerate(row.panels):
            column, line = number % (24 // WIDTH), number // (24 // WIDTH)
            place = {"x": column * WIDTH, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, place))
        y += HEIGHT * -(-len(row.panels) // (24 // WIDTH))
    return {
        "uid": UID,
        "title": TITLE,
        "tags": ["pdlab"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if panel.stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    if panel.unit in HIGHEST_OF_ZEROS:
        custom["axisSoftMax"] = HIGHEST_OF_ZEROS[panel.unit]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.unit in HIGHEST:
        defaults["max"] = HIGHEST[panel.unit]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": SOURCE,
        "gridPos": dict(place),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "none" if panel.stacked else "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query.expression, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }


def alert_rules() -> dict[str, Any]:
    """A file of Prometheus' rules."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.holds,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "pdlab", "rules": rules}]}


def prometheus_config(targets: Sequence[str], discovery: str) -> dict[str, Any]:
    """Prometheus' configuration: these pages (``host:port``), or without any those that Ray lists in the file."""
    found: dict[str, Any] = (
        {"static_configs": [{"targets": list(targets)}]} if targets else {"file_sd_configs": [{"files": [discovery]}]}
    )
    return {
        "global": {"scrape_interval": SCRAPED_EVERY, "evaluation_interval": SCRAPED_EVERY},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "ray", **found}],
    }


def write(folder: Path, targets: Sequence[str], discovery: str, prometheus_url: str) -> list[Path]:
    """Write everything below ``folder``; returns the files. Raises WriteError."""
    provisioning = folder / "provisioning"
    dashboards = folder / "dashboards"
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        "jsonData": {"timeInterval": SCRAPED_EVERY},  # Grafana's default is 15s: it makes $__rate_interval of it
    }
    provider = {
        "name": "pdlab",
        "type": "file",
        "options": {"path": str(dashboards.resolve())},
    }
    files = {
        dashboards / "pdlab.json": dashboard_text(),
        folder / "alerts.yml": alerts_text(),
        folder / "prometheus.yml": _yaml(prometheus_config(targets, discovery)),
        provisioning / "datasources" / "pdlab.yaml": _yaml({"apiVersion": 1, "datasources": [source]}),
        provisioning / "dashboards" / "pdlab.yaml": _yaml({"apiVersion": 1, "providers": [provider]}),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode())
    return list(files)


def dashboard_text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def alerts_text() -> str:
    return _yaml(alert_rules())


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=100)
