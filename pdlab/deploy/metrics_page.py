"""Prometheus pages of Ray's nodes and of vLLM, read with prometheus-client's parser.

A page of a node has thousands of lines, and that parser takes eight times as long as a regular expression. So it gets
only the lines whose metric the caller wants, which it reads in about the time of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pdlab.core.errors import ClusterError
from pdlab.deploy import http_client
from pdlab.deploy.serving.ray_names import TELEMETRY

TIMEOUT_S = 30.0  # a page of Ray's agent takes seconds where all cores are busy
AGAIN_S = 0.2
# vLLM's own names, those that Ray's exporters make of them, and pdlab's.
ENGINE = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_", "pdlab_", "ray_pdlab_")


class MetricSample(NamedTuple):
    """One line of a page. ``name``: without the prefix that was looked for and a counter's ``_total``."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def replica(self) -> str:
        """The Ray Serve replica that reports it; empty if none is named."""
        return self.labels.get("ReplicaId", "")

    @property
    def through_ray(self) -> bool:
        """Written by Ray's exporter (ray/_private/telemetry of Ray 2.60), which makes the sum of a histogram of its
        buckets' middles, not of what was observed: a queue of 1 ms, in a bucket from 0 to 0.3 s, counts as 0.15 s.
        (Its older exporter, with ``RAY_enable_open_telemetry=0``, has exact sums, and fails on Ray Serve's metrics.)"""
        return self.labels.get("otel_scope_name", "").startswith(f"{TELEMETRY}.")


def samples(
    page: str, wanted: Callable[[str], bool] = lambda name: True, prefixes: tuple[str, ...] = ENGINE
) -> Iterator[MetricSample]:
    """The page's samples whose name, without the prefix and ``_total``, is ``wanted``.

    Some exporters give each counter twice, with and without ``_total``; it is counted once. Raises ClusterError for a
    wanted line that is no sample.
    """
    from prometheus_client.parser import text_string_to_metric_families

    lines: list[str] = []
    names: dict[str, str] = {}
    for line in page.split("\n"):
        if not line.startswith(prefixes):
            continue
        full = line.partition("{")[0].partition(" ")[0].partition("\t")[0]
        if full not in names:
            names[full] = _base(full, prefixes)
        if wanted(names[full]):
            lines.append(line)
    counters = {name for full, name in names.items() if full.endswith("_total")}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = names[sample.name]
                if sample.name.endswith("_total") or name not in counters:
                    yield MetricSample(name, sample.labels, sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise ClusterError(f"a metrics page is damaged: {' '.join(str(error).split())[:200]}") from error


def _base(full: str, prefixes: tuple[str, ...]) -> str:
    prefix = max((prefix for prefix in prefixes if full.startswith(prefix)), key=len)
    return full.removeprefix(prefix).removesuffix("_total")


def read_pages(urls: Iterable[str]) -> list[str]:
    """The pages' texts. Raises ClusterError when one does not answer."""
    return [_page(url, time.monotonic() + TIMEOUT_S) for url in urls]


def _page(url: str, deadline: float) -> str:
    """The text of a page, requested again after a 500 of Ray's exporter until ``deadline``: a page that is read five
    times a second gave one now and then. Raises ClusterError."""
    while True:
        try:
            return http_client.get(url, TIMEOUT_S)
        except http_client.NoAnswer as error:
            if error.code == 500 and time.monotonic() < deadline:
                time.sleep(AGAIN_S)
                continue
            raise ClusterError(f"metrics page {url} does not answer ({error}); is the deployment still up?") from error
