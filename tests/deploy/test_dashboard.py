"""The dashboard and the alerts: as they are in the repository, and asked of a Prometheus that scrapes our names."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.dashboard_metrics import metrics
from support.web import reply, web_server

from pdlab.cli import dashboard as command
from pdlab.cluster.local_nodes import hold_port
from pdlab.deploy import dashboard
from pdlab.results.timeline import PARTS

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "grafana"
TEXTS = {"pdlab.json": dashboard.dashboard_text, "alerts.yml": dashboard.alerts_text}
# Of a deployment with two decode and one prefill replica. What is counted grows by so much a second, of every engine.
REPLICAS = {"p1": "Prefill:m", "d1": "Decode:m", "d2": "Decode:m"}
SECONDS = {"server": 0.01, "queue": 0.3, "prefill": 0.5, "transfer": 0.09, "step_lag": 0.1, "first_step": 0.1}
PARTS_S = {part: SECONDS.get(part, 0.0) for part in PARTS if part != "front"}
REQUESTS_PER_S = 10.0
IDLE = "ray_idle_"  # begins the names of counters that do not grow
SICK = "ray_sick_"  # and of a deployment in which all goes wrong
# A counter that appears some scrapes later, as one of failures does.
LATE, LATE_SCRAPES, LATE_TIMES = "ray_pdlab_late_total", 16, 3


@pytest.mark.golden
@pytest.mark.parametrize("name", TEXTS)
def test_the_files_in_the_repository_are_made_from_the_declaration(name: str) -> None:
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        (CONFIGS / name).write_text(TEXTS[name](), encoding="utf-8")
    assert (CONFIGS / name).read_text(encoding="utf-8") == TEXTS[name](), "run `make golden`"


def test_panels_are_side_by_side_and_of_grafanas_form() -> None:
    panels = dashboard.dashboard()["panels"]
    assert [each["id"] for each in panels] == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs)
            for target in panel["targets"]:
                assert target["datasource"]["uid"] == "${source}"
                # Legends name labels that the expression keeps.
                for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    assert label in target["expr"], (panel["title"], label)


def test_lines_of_zeros_are_not_drawn_on_an_axis_to_100() -> None:
    """What Grafana's library draws with a lower end of 0 and no upper one: 0 to 100, and 0 to 10,000 % for shares."""
    counts = [panel for panel in dashboard.dashboard()["panels"] if panel["type"] != "row"]
    ends = {}
    for panel in counts:
        defaults = panel["fieldConfig"]["defaults"]
        ends.setdefault(defaults["unit"], set()).add((defaults.get("max"), defaults["custom"].get("axisSoftMax")))
    of_nothing = {(None, None)}
    assert ends == {
        "percentunit": {(1, None)},
        "short": {(None, 1)},
        "ops": {(None, 1)},
        "s": of_nothing,
        "Bps": of_nothing,
        "reqps": of_nothing,
    }


def test_means_are_never_made_of_sums_of_histograms() -> None:
    """Ray's exporter makes those up from the middles of buckets."""
    assert not [name for name in metrics() if name.endswith("_sum")]


def test_everything_is_provisioned_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command.main(["--out", str(out), "--target", "10.0.0.4:8080", "--target", "[::1]:9"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {Path(line) for line in printed[:-1]} == {path for path in out.rglob("*") if path.is_file()}
    config = yaml.safe_load((out / "prometheus.yml").read_text())
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["10.0.0.4:8080", "[::1]:9"]}]
    provider = yaml.safe_load((out / "provisioning" / "dashboards" / "pdlab.yaml").read_text())["providers"][0]
    assert json.loads((Path(provider["options"]["path"]) / "pdlab.json").read_text()) == dashboard.dashboard()
    source = yaml.safe_load((out / "provisioning" / "datasources" / "pdlab.yaml").read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    # Grafana makes $__rate_interval of it.
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"] == "10s"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--target", each) for each in ("10.0.0.4", "10.0.0.4:x", "http://10.0.0.4:80/metrics", ":8080", "a b:8080")),
        *(("--target", each) for each in ("a:0", "a:1?x")),
        *(
            ("--prometheus-url", each)
            for each in ("prometheus:9090", "http://", "ftp://a:1", "http://a b", "http://a:x")
        ),
    ],
)
def test_a_wrong_address_is_refused(flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = [] if flag == "--target" else ["--target", "[::1]:9"]
    assert command.main(["--out", str(tmp_path / "out"), *right, flag, value]) == 2
    form = "HOST:PORT" if flag == "--target" else "a URL"
    assert capsys.readouterr().err.startswith(f"error: {flag} {value}: must be {form}")
    assert not (tmp_path / "out").exists()


# --- asked of a Prometheus ---


def page(seconds: float, scrapes: int) -> str:
    """Ray's metrics page that many seconds after the engines began, after so many scrapes. It has three deployments:
    one that serves, one that is idle, and one where all goes wrong."""
    idle = [line.replace("ray_", IDLE, 1) for line in metric_lines(1.0, 0)]
    sick = [line.replace("ray_", SICK, 1) for line in metric_lines(seconds, scrapes, sick=True)]
    return "\n".join([*metric_lines(seconds, scrapes), *idle, *sick, ""])


def metric_lines(seconds: float, scrapes: int, *, sick: bool = False) -> list[str]:
    """``sick``: TTFT is mostly queue, KV caches are full, reads fail, and what is unhealed stays so. Otherwise a read
    failed long ago, a third of the TTFT is queue, caches are two fifths full, and what was unhealed is healed."""
    lines: list[str] = []
    parts_s = PARTS_S | ({"queue": 3.0} if sick else {})

    def say(name: str, value: float, **labels: str) -> None:
        more = {"SessionName": "s", "WorkerId": labels.get("ReplicaId", "w"), **labels}
        inside = ",".join(f'{key}="{text}"' for key, text in more.items())
        lines.append(f"{name}{{{inside}}} {value}")

    requests = REQUESTS_PER_S * seconds
    for replica, deployment in REPLICAS.items():
        say("ray_pdlab_kv_pool_tokens_total", 7000, ReplicaId=replica, deployment=deployment)
        for gauge, value in (
            ("kv_cache_usage_perc", 0.99 if sick else 0.4),
            ("num_requests_running", 3),
            ("num_requests_waiting", 2),
        ):
            say(f"ray_vllm_{gauge}", value, ReplicaId=replica, model_name="m", engine="0")
        counters = (
            "generation_tokens",
            "prompt_tokens",
            "num_preemptions",
            "prefix_cache_hits",
            "prefix_cache_queries",
        )
        for counter in counters:
            say(f"ray_vllm_{counter}_total", 5 * seconds, ReplicaId=replica, model_name="m", engine="0")
        for end in ("0.01", "0.1", "+Inf"):
            say("ray_vllm_inter_token_latency_seconds_bucket", requests, ReplicaId=replica, le=end)
    for name in ("failed_transfers", "failed_notifications", "kv_expired_reqs"):
        say(f"ray_vllm_nixl_num_{name}_total", seconds if sick else 1, ReplicaId="d1")
    for replica in ("d1", "d2"):
        for part, part_s in parts_s.items():
            say("ray_pdlab_ttft_seconds_total", part_s * requests, ReplicaId=replica, part=part, path="pd")
            for end in ("0.1", "0.5", "1.0", "+Inf"):
                say(
                    "ray_pdlab_ttft_part_seconds_bucket",
                    requests if end == "+Inf" or part_s <= float(end) else 0,
                    ReplicaId=replica,
                    part=part,
                    le=end,
                )
        for end in ("0.5", "1.0", "2.0", "+Inf"):
            say(
                "ray_pdlab_ttft_part_seconds_bucket",
                requests if end != "0.5" else 0,
                ReplicaId=replica,
                part="total",
                le=end,
            )
        say("ray_pdlab_ttft_requests_total", requests, ReplicaId=replica, path="pd")
        say("ray_pdlab_kv_read_bytes_total", 1e6 * requests, ReplicaId=replica)
        say("ray_pdlab_kv_reads_total", requests, ReplicaId=replica)
        for action in (*dashboard.GUARD_ACTIONS, "receives", *(() if sick else ("healed",))):
            say(f"ray_pdlab_guard_{action}_total", seconds, ReplicaId=replica)
        for call in dashboard.SHOWN_CALLS:
            say(f"ray_pdlab_prefill_{call}_total", seconds, ReplicaId=replica)
    for name in ("prefill", "decode", "join", "leave", "changed"):
        say(f"ray_pdlab_roles_{name}", 1)
    say("ray_pdlab_old_total", LATE_TIMES)
    if scrapes > LATE_SCRAPES:
        say(LATE, LATE_TIMES)
    return lines


class Asked:
    """A Prometheus that has scraped the page for a while."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.get("query", query=expression.replace("$__rate_interval", "6s"))["result"]
        return result


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus on this machine (apt-get install prometheus)")
    began, scrapes = time.monotonic(), itertools.count()

    def scraped(call: BaseHTTPRequestHandler) -> None:
        text = page(time.monotonic() - began, next(scrapes))
        reply(call, text.encode(), content_type="text/plain; version=0.0.4")

    folder = tmp_path_factory.mktemp("prometheus")
    with web_server(scraped) as url:
        yield from run_prometheus(binary, folder, url.removeprefix("http://"))


def run_prometheus(binary: str, folder: Path, target: str) -> Iterator[Asked]:
    dashboard.write(folder, [target], "", "http://127.0.0.1:9090")
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms", "scrape_timeout": "400ms"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    held, port = hold_port()
    held.close()
    words = [
        binary,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            one = Asked(port)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try:
                    # The rate must be full before anything is asked.
                    full = len(one.query("count_over_time(ray_pdlab_ttft_requests_total[6s]) > 10")) == 2
                    if full and one.query(f"count_over_time({LATE}[6s]) > 3"):
                        break
                except OSError:
                    assert process.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(0.3)
            yield one
        finally:
            process.terminate()


def test_every_expression_finds_something(prometheus: Asked) -> None:
    panels = {
        query.expression: panel.title for row in dashboard.ROWS for panel in row.panels for query in panel.queries
    }
    # A line of its own, not the 0 that stands for a counter that nobody has seen.
    own = {expression.removesuffix(" or vector(0)"): title for expression, title in panels.items()}
    assert [title for expression, title in own.items() if not prometheus.query(expression)] == []


def test_failures_that_never_happened_are_shown_as_none(prometheus: Asked) -> None:
    shown = [
        query.expression
        for row in dashboard.ROWS
        for panel in row.panels
        if panel.title in ("Failures of NIXL", "KV guard", "Calls of prefill")
        for query in panel.queries
    ]
    assert len(shown) > 15
    for expression in shown:
        never = expression.replace("ray_", "ray_never_")
        assert [one["value"][1] for one in prometheus.query(never)] == ["0"], never


def test_engines_without_a_preemption_are_shown_with_none(prometheus: Asked) -> None:
    (panel,) = (panel for row in dashboard.ROWS for panel in row.panels if panel.title == "Preemptions")
    never = panel.queries[0].expression.replace("ray_vllm_", "ray_never_")
    shown = {
        one["metric"]["ReplicaId"]: (one["metric"]["deployment"], one["value"][1]) for one in prometheus.query(never)
    }
    assert shown == {name: (pool, "0") for name, pool in REPLICAS.items()}


def test_every_line_of_an_engine_has_its_pool(prometheus: Asked) -> None:
    """An id says nothing to a reader."""
    for row in dashboard.ROWS:
        for panel in row.panels:
            for query in panel.queries:
                for one in prometheus.query(query.expression):
                    if "ReplicaId" in one["metric"]:
                        assert one["metric"]["deployment"] == REPLICAS[one["metric"]["ReplicaId"]], panel.title
                        assert query.legend == dashboard.ENGINE, panel.title


def test_a_failure_that_makes_its_counter_appear_is_counted(prometheus: Asked) -> None:
    """``rate`` misses it. What was counted before Prometheus scrapes is no news."""

    def highest(expression: str) -> float:
        (one,) = prometheus.query(f"max_over_time(({expression})[60s:500ms])")
        return float(one["value"][1])

    times = dashboard._times(LATE)
    assert highest(times) == LATE_TIMES and highest(f"sum(rate({LATE}[6s]))") == 0
    assert highest(times.replace(LATE, "ray_pdlab_old_total")) == 0


def test_where_nothing_is_served_there_is_no_figure(prometheus: Asked) -> None:
    """0 / 0 and quantiles of an empty histogram are NaN, and Grafana's library draws a line across them."""
    empty = set()
    for row in dashboard.ROWS:
        for panel in row.panels:
            for query in panel.queries:
                values = [one["value"][1] for one in prometheus.query(query.expression.replace("ray_", IDLE))]
                assert "NaN" not in values, panel.title
                if not values:
                    empty.add(panel.title)
    assert empty == {
        "Mean TTFT by part",
        "TTFT in the server",
        "Parts, p95",
        "Time between tokens, p50 and p95",
        "Transfer and step lag",
        "Prefix cache hits",
    }


def test_mean_parts_are_exact_and_add_up(prometheus: Asked) -> None:
    (panel,) = (panel for row in dashboard.ROWS for panel in row.panels if panel.title == "Mean TTFT by part")
    means = {query.legend: float(prometheus.query(query.expression)[0]["value"][1]) for query in panel.queries}
    assert list(means) == list(PARTS_S), "stacked in the order of time"
    assert means == pytest.approx(PARTS_S, rel=0.05)


def test_engines_are_shown_by_their_pool(prometheus: Asked) -> None:
    (panel,) = (panel for row in dashboard.ROWS for panel in row.panels if panel.title == "KV cache in use")
    shown = {one["metric"]["ReplicaId"]: one for one in prometheus.query(panel.queries[0].expression)}
    assert {name: one["metric"]["deployment"] for name, one in shown.items()} == REPLICAS
    assert all(float(one["value"][1]) == pytest.approx(0.4) for one in shown.values())


def raised(prometheus: Asked, names: str) -> set[str]:
    """The alerts whose conditions hold for the metrics whose names begin so."""
    return {
        alert.name
        for alert in dashboard.ALERTS
        if prometheus.query(alert.expression.replace(f"{dashboard.MINUTES}m", "6s").replace("ray_", names))
    }


def test_alerts_load_and_are_raised_where_they_should_be(prometheus: Asked) -> None:
    rules = {rule["name"]: rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]}
    assert set(rules) == {alert.name for alert in dashboard.ALERTS}
    assert all(rule["health"] == "ok" for rule in rules.values()), rules
    assert raised(prometheus, SICK) == set(rules)
    quiet = {"PdlabKvTransferFailed", "PdlabQueueIsMostOfTtft", "PdlabKvCacheFull", "PdlabPrefillUnhealed"}
    assert raised(prometheus, "ray_") == set(rules) - quiet
    assert raised(prometheus, IDLE) == set()


# --- the rules in simulated time ---

UP = "1x600"  # of a page that Prometheus scrapes all the time, every 10 s
LABELS = 'job="ray",instance="a:1",ReplicaId="d1"'
FAILED = "ray_vllm_nixl_num_failed_transfers_total"


@dataclass
class Told:
    """Series as promtool takes them (values every 10 s; ``_x6``: none for a minute), and at which times an alert
    fires."""

    alert: str
    series: dict[str, str]
    fires: dict[str, bool]
    up: str = UP


TOLD = {
    "one read fails, which makes its counter appear": Told(
        "PdlabKvTransferFailed",
        {FAILED: "_x60 1x400"},
        {"9m50s": False, "10m20s": True, "14m50s": True, "15m30s": False, "60m": False},
    ),
    "another one fails later": Told(
        "PdlabKvTransferFailed",
        {FAILED: "1x180 2x400"},
        {"29m": False, "30m20s": True, "34m50s": True, "35m30s": False},
    ),
    "one fails a minute after Prometheus began": Told(
        "PdlabKvTransferFailed",
        {FAILED: "_x6 1x400"},
        {"50s": False, "1m20s": True, "5m50s": True, "6m30s": False},
    ),
    "another one fails a minute after Prometheus began": Told(
        "PdlabKvTransferFailed",
        {FAILED: "4x6 5x400"},
        {"50s": False, "1m20s": True, "5m50s": True, "6m30s": False},
    ),
    "reads failed before Prometheus began": Told(
        "PdlabKvTransferFailed", {FAILED: "4x600"}, dict.fromkeys(("0m", "1m", "4m50s", "5m10s", "60m"), False)
    ),
    "reads failed on a node that joins": Told(
        "PdlabKvTransferFailed",
        {FAILED: "_x60 4x400"},
        dict.fromkeys(("10m20s", "12m", "15m30s"), False),
        up="_x60 1x400",
    ),
    "a page that was not answered for a while": Told(
        "PdlabKvTransferFailed",
        {FAILED: "4x60 _x90 4x400"},
        dict.fromkeys(("10m", "20m", "24m50s", "25m10s", "26m", "32m"), False),
        up="1x60 0x89 1x400",
    ),
    "prompts are recomputed": Told(
        "PdlabPromptsRecomputed",
        {"ray_pdlab_guard_receives_total": "0+10x600", "ray_pdlab_guard_recomputed_total": "_x60 1x180 2+1x60 63x200"},
        {"13m": False, "39m": False, "46m": True, "56m": False},
    ),
    "requests fail": Told(
        "PdlabRequestsFailedWithoutPrefill",
        {"ray_pdlab_prefill_failures_total": "_x60 3x400"},
        {"10m20s": False, "11m30s": True, "15m30s": False},
    ),
    "reads do not end": Told(
        "PdlabReadsPastDeadline",
        {"ray_pdlab_guard_deadlines_total": "_x60 3x400"},
        {"11m50s": False, "12m30s": True, "15m30s": False},
    ),
    "a prefill engine is unhealed, and healed": Told(
        "PdlabPrefillUnhealed",
        {"ray_pdlab_guard_unhealed_total": "_x60 2x400", "ray_pdlab_guard_healed_total": "_x120 1x60 2x300"},
        {"11m50s": False, "12m30s": True, "29m": True, "31m": False},
    ),
    "the queue grows, and shrinks": Told(
        "PdlabQueueIsMostOfTtft",
        {
            'ray_pdlab_ttft_seconds_total{part="queue"}': "0+1x60 60+9x120 1140+1x200",
            'ray_pdlab_ttft_seconds_total{part="prefill"}': "0+4x400",
        },
        {"10m": False, "15m": False, "25m": True, "30m": True, "36m": False},
    ),
    "decode has no room": Told(
        "PdlabQueueIsMostOfTtft",
        {
            'ray_pdlab_ttft_seconds_total{part="admission"}': "0+9x200",
            'ray_pdlab_ttft_seconds_total{part="prefill"}': "0+4x200",
        },
        {"9m": False, "12m": True, "20m": True},
    ),
    "a KV cache is full": Told(
        "PdlabKvCacheFull",
        {"ray_vllm_kv_cache_usage_perc": "0.5x60 0.98x60 0.96x60"},
        {"14m": False, "16m": True, "21m": False},
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_an_alert_fires_while_it_should(case: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine (apt-get install prometheus)")
    told = TOLD[case]
    (tmp_path / "alerts.yml").write_text(dashboard.alerts_text())
    series = {'up{job="ray",instance="a:1"}': told.up, 'up{job="ray",instance="b:1"}': UP}
    for name, values in told.series.items():
        metric, _, own = name.removesuffix("}").partition("{")
        series[f"{metric}{{{LABELS}{',' if own else ''}{own}}}"] = values
    (alert,) = (each for each in dashboard.ALERTS if each.name == told.alert)
    labels = {"severity": alert.severity} | ({"ReplicaId": "d1"} if "by (ReplicaId)" in alert.expression else {})
    expected = [{"exp_labels": labels, "exp_annotations": {"summary": alert.summary}}]
    test = {
        "interval": dashboard.SCRAPED_EVERY,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": time, "alertname": told.alert, "exp_alerts": expected if fires else []}
            for time, fires in told.fires.items()
        ],
    }
    config = {"rule_files": ["alerts.yml"], "evaluation_interval": dashboard.SCRAPED_EVERY, "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run([promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_alert_is_told_to_fire_and_to_end() -> None:
    begins_and_ends = [False, True, False]
    told = {
        each.alert
        for each in TOLD.values()
        if [fires for fires, _ in itertools.groupby(each.fires.values())] == begins_and_ends
    }
    assert told == {alert.name for alert in dashboard.ALERTS}
