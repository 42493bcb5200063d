"""``python -m pdlab dashboard``: write Grafana's dashboard, Prometheus' alerts and their provisioning files."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from pdlab.core import defaults
from pdlab.core.commands import PDLAB
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.output_paths import check_folder
from pdlab.core.settings import Settings, setting

EPILOG = f"""\
examples:
  {PDLAB} dashboard --out out/grafana
      files for the deployment at --url: prometheus.yml, alerts.yml, the dashboard and Grafana's provisioning
  {PDLAB} dashboard --out out/grafana --target 10.0.0.4:8080 --target 10.0.0.5:8080
      the metrics pages of these Ray nodes
  {PDLAB} dashboard --out out/grafana --prometheus-url http://prometheus.monitoring:9090
      the Prometheus that Grafana reads
  prometheus --config.file out/grafana/prometheus.yml &
  GF_PATHS_PROVISIONING=$PWD/out/grafana/provisioning grafana server --homepath /usr/share/grafana
      then open http://127.0.0.1:3000/d/pdlab
"""
SCRAPED, WRITTEN = "what is scraped", "result"
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"


class DashboardSettings(Settings):
    """The sources of the metrics, and the folder of the files."""

    COMMAND = "dashboard"
    ABOUT = "Write a Grafana dashboard, Prometheus' configuration and alert rules, and their provisioning files."
    EXAMPLES = EPILOG

    url: str = setting(defaults.BASE_URL, "deployment whose metrics pages Prometheus scrapes", SCRAPED)
    target: tuple[str, ...] = setting(
        (),
        "metrics page of a Ray node (repeatable)",
        SCRAPED,
        several="times",
        value="HOST:PORT",
        otherwise=f"the pages of the deployment at --url, else the pages in {DISCOVERY}",
    )
    prometheus_url: str = setting("http://127.0.0.1:9090", "Prometheus' URL, for Grafana", WRITTEN, value="URL")
    out: Path = setting(..., "folder for the files", WRITTEN, value="DIR")


@command(DashboardSettings)
def main(settings: DashboardSettings) -> int:
    """Write the files."""
    from pdlab.deploy import dashboard

    for target in settings.target:
        page = _place(f"//{target}")
        if page is None or not page.port or page.netloc != target:
            raise UsageError(f"--target {target}: must be HOST:PORT of a metrics page, such as 10.0.0.4:8080")
    url = _place(settings.prometheus_url)
    if url is None or url.scheme not in ("http", "https"):
        raise UsageError(f"--prometheus-url {settings.prometheus_url}: must be a URL, such as http://127.0.0.1:9090")
    check_folder(settings.out, "--out")
    targets = settings.target or _published(settings.url)
    for path in dashboard.write(settings.out, targets, DISCOVERY, settings.prometheus_url):
        print(path)
    where = ", ".join(targets) if targets else f"the nodes in {DISCOVERY}"
    print(f"scraped: {where}")
    return 0


def _place(url: str) -> SplitResult | None:
    """The parts of a URL with a host and a valid port; None for another text."""
    try:
        parts = urlsplit(url)
        known = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    return parts if known and not re.search(r"\s", url) else None  # urlsplit accepts spaces


def _published(url: str) -> tuple[str, ...]:
    from pdlab.deploy.endpoint import load_running

    running = load_running(url)
    return tuple(urlsplit(each).netloc for each in running.metrics_urls) if running else ()
