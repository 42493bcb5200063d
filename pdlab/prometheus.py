"""vLLM's metrics on Prometheus pages, under vLLM's own names or as Ray exports them (``ray_vllm_...``)."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pdlab.errors import ClusterError

TIMEOUT_S = 10.0
_LABELS = r"\{(?:[^\"}\n]|\"(?:[^\"\\\n]|\\.)*\")*\}"  # a quoted value may hold braces and escaped quotes
_SAMPLE = re.compile(
    rf"^(?:ray_)?vllm[:_](?P<name>\w+?)(?P<total>_total)?(?P<labels>{_LABELS})?[ \t]+(?P<value>\S+)", re.MULTILINE
)
_RAY = 'otel_scope_name="ray._private.telemetry.'


class Sample(NamedTuple):
    """One line of a page; ``name`` is vLLM's, without ``vllm:``, ``ray_`` and a counter's ``_total``."""

    name: str
    labels: str
    value: float

    def label(self, name: str) -> str | None:
        """The label's value; None without it."""
        match = re.search(rf'[{{,]{name}="([^"]*)"', self.labels)
        return match[1] if match else None

    @property
    def through_ray(self) -> bool:
        """Written by Ray's exporter (ray/_private/telemetry of Ray 2.60), which makes the sum of a histogram of its
        buckets' middles, not of what was observed: a queue of 1 ms, in a bucket from 0 to 0.3 s, counts as 0.15 s.
        (Its older exporter, with ``RAY_enable_open_telemetry=0``, has exact sums, and fails on Ray Serve's metrics.)"""
        return _RAY in self.labels


def samples(page: str) -> Iterator[Sample]:
    """The page's samples of vLLM's metrics. Some exporters give each counter twice, with and without ``_total``; it is
    counted once."""
    found = list(_SAMPLE.finditer(page))
    counters = {match["name"] for match in found if match["total"]}
    for match in found:
        if match["total"] or match["name"] not in counters:
            yield Sample(match["name"], match["labels"] or "", float(match["value"]))


def read_pages(urls: Iterable[str]) -> list[str]:
    """The pages' texts. Raises ClusterError when one does not answer."""
    pages = []
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                pages.append(answer.read().decode())
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise ClusterError(f"metrics page {url} does not answer ({error}); is the deployment still up?") from error
    return pages
