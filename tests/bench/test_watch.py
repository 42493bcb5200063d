"""What is measured dies in each of its ways; the watcher reports it, and only then. Time limits are made short."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from support.web import reply, web_server

from pdlab.bench import watch
from pdlab.bench.watch import Watch, front_cpu, replica_health
from pdlab.core.errors import BenchError, DeploymentDied

LIMITS = (watch.LOOK_EVERY_S, watch.LOOK_AGAIN_S, watch.ANSWER_TIMEOUT_S, watch.REFUSED_S, watch.SILENT_S)
PAGE = """\
# HELP ray_serve_deployment_replica_healthy Tracks healthy replicas.
ray_serve_deployment_replica_healthy{Component="core_worker",application="pdlab",deployment="Decode:m",replica="r0"} %s
ray_serve_deployment_replica_healthy{application="pdlab",deployment="Prefill:m",replica="r1",WorkerId=""} 1.0
"""
FAILED = 'ray_serve_health_check_failures_total{application="pdlab",deployment="Decode:m",replica="r0"} 1.0\n'
UNSEEN = "".join(line for line in PAGE.splitlines(True) if "Decode" not in line)
NEW = 'ray_serve_deployment_replica_healthy{application="pdlab",deployment="Decode:m",replica="r7"} 1.0\n'


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "LOOK_AGAIN_S", "PAGES_EVERY_S"):
        monkeypatch.setattr(watch, name, 0.02)
    monkeypatch.setattr(watch, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(watch, "REFUSED_S", 0.3)
    monkeypatch.setattr(watch, "SILENT_S", 0.6)


class Server:
    """Lists its models, and shows a metrics page."""

    def __init__(self) -> None:
        self.status, self.page, self.url = 200, PAGE % "1.0", ""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/metrics":
            reply(request, made.page.encode())
        else:
            reply(request, {"data": []}, made.status)

    with web_server(answer) as url:
        made.url = url
        yield made


def level(watched: Watch, seconds: float = 3.0, answering: bool = False) -> float:
    """A level that lasts until it is ended; returns how long it did."""
    ended = threading.Event()

    def end() -> None:
        ended.set()

    began = time.monotonic()
    with watched.beside(end):
        count = 0
        while time.monotonic() < began + seconds and not ended.is_set():
            count += answering
            watched.count(count)
            time.sleep(0.02)
        if ended.is_set():
            raise BenchError("the load generator ended with code -9")
    return time.monotonic() - began


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_what_lives_is_left_alone(server: Server) -> None:
    assert level(Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"]), 0.8) >= 0.8


def test_a_server_that_refuses_connections() -> None:
    with pytest.raises(DeploymentDied, match=r"no longer answers \(.*refused.*, for \d+ s\): the running level is not"):
        level(Watch(f"http://127.0.0.1:{closed_port()}"))


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts, as the kernel does for a stopped process, and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_accepts_and_is_silent(silent: str) -> None:
    with pytest.raises(DeploymentDied, match=r"no longer answers \(no answer within 0.2 s, for \d+ s\)"):
        level(Watch(silent))


def test_one_too_busy_to_list_its_models_lives_while_it_answers_requests(silent: str) -> None:
    assert level(Watch(silent), 2.0, answering=True) >= 2.0


def test_http_503_is_no_life(server: Server) -> None:
    server.status = 503
    with pytest.raises(DeploymentDied, match="HTTP 503"):
        level(Watch(server.url))


def test_http_401_is_life(server: Server) -> None:
    server.status = 401
    assert level(Watch(server.url), 0.8) >= 0.8


def test_a_node_that_goes(server: Server) -> None:
    node = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{node.getsockname()[1]}/metrics"
    threading.Timer(0.3, node.close).start()
    with pytest.raises(DeploymentDied, match=rf"the Ray node whose metrics are at {url[7:-8]} no longer answers"):
        level(Watch(server.url, [url]))


def test_a_page_that_was_never_there_is_no_dead_node(server: Server) -> None:
    assert level(Watch(server.url, [f"http://127.0.0.1:{closed_port()}/metrics"]), 0.8) >= 0.8


def test_a_dead_replica(server: Server) -> None:
    watched = Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"])
    threading.Timer(0.2, lambda: setattr(server, "page", PAGE % "0.0")).start()
    with pytest.raises(DeploymentDied, match=r"replica r0 of Decode:m died and is not replaced yet: .* wait until Ray"):
        level(watched)


def test_a_replaced_replica_is_called_that_before_anything_is_sent(server: Server) -> None:
    watched = Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"])
    watched.require_replicas()
    server.page = PAGE % "0.0" + NEW
    with pytest.raises(DeploymentDied, match=r"replica r0 of Decode:m was replaced: r7 answers now, .* launch again"):
        watched.require_replicas()


def test_replicas_of_others_are_none_of_its_business(server: Server) -> None:
    server.page = PAGE % "0.0" + NEW
    Watch(server.url, [f"{server.url}/metrics"], ["r1", "r7"]).require_replicas()


def test_the_engine_is_named_and_not_the_router_that_ended_with_it(server: Server) -> None:
    """Ray Serve stops the router of a node whose last engine died; either is exported first."""
    engine = PAGE % "0.0"
    router = engine.splitlines()[1].replace("Decode:m", "LLMRouter").replace("r0", "r2") + "\n"
    for page in (router + engine, engine + router):
        server.page = page
        with pytest.raises(DeploymentDied, match="replica r0 of Decode:m died"):
            Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1", "r2"]).require_replicas()
    server.page = router
    with pytest.raises(DeploymentDied, match="replica r2 of LLMRouter died"):
        Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1", "r2"]).require_replicas()


def test_a_failure_in_the_level_is_passed_on(server: Server) -> None:
    with pytest.raises(BenchError, match="by itself"), Watch(server.url).beside(lambda: None):
        raise BenchError("by itself")


def test_a_gauge_that_is_not_shown_is_no_death(server: Server) -> None:
    server.page = UNSEEN
    assert level(Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"]), 0.8) >= 0.8


def test_a_failed_health_check_is_no_death_where_the_next_is_fine(server: Server) -> None:
    server.page = PAGE % "1.0" + FAILED
    watched = Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"])
    watched.require_replicas()
    assert level(watched, 0.8) >= 0.8


def test_failed_and_never_called_healthy_again_is_dead(server: Server) -> None:
    """The gauge's zero is shown for two exports only: whoever looked elsewhere has missed it."""
    server.page = UNSEEN + FAILED
    watched = Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"])
    for look in (watched.require_replicas, lambda: level(watched)):
        with pytest.raises(DeploymentDied, match="replica r0 of Decode:m died and is not replaced yet"):
            look()
    server.page += NEW
    with pytest.raises(DeploymentDied, match="replica r0 of Decode:m was replaced: r7 answers now"):
        watched.require_replicas()


def test_one_count_for_all_replicas_shows_no_death() -> None:
    page = 'ray_serve_deployment_replica_healthy{application="a",deployment="d"} 2.0\n'
    assert replica_health([page]) == []
    assert [health.healthy for health in replica_health([PAGE % "0.0", FAILED])] == [False, True]


def test_dead_within_half_a_minute() -> None:
    """Noticed at the next look at the latest, then failing for long enough, then by the look that ends it."""
    every_s, again_s, answer_s, refused_s, silent_s = LIMITS
    assert every_s + max(refused_s, silent_s) + again_s + answer_s <= 30


CPU = """\
ray_component_cpu_percentage{Component="ray::ServeReplica:pdlab:OpenAiIngress",SessionName="s",ip="10.0.0.1"} 88.5
ray_component_cpu_percentage{Component="ray::ServeReplica:pdlab:Decode:m",ip="10.0.0.1"} 240.0
ray_component_cpu_percentage{Component="ray::ServeReplica:pdlab:LLMRouter",ip="10.0.0.1"} 12.0
ray_component_cpu_percentage{Component="ray::ProxyActor",ip="10.0.0.1"} 31.0
ray_component_cpu_percentage{Component="raylet",ip="10.0.0.1"} 2.0
"""


def test_the_cpu_of_what_stands_in_front_of_the_engines() -> None:
    assert front_cpu(CPU) == {"ingress": 0.885, "router": 0.12, "proxy": 0.31}
    assert front_cpu(PAGE % "1.0") == {}


def test_a_level_has_the_busiest_nodes_cpu_while_it_ran(server: Server) -> None:
    server.page = PAGE % "1.0" + CPU
    watched = Watch(server.url, [f"{server.url}/metrics"], ["r0", "r1"])
    assert watched.front_cores == {}
    with watched.beside(lambda: None):
        while not watched.front_cores:
            time.sleep(0.01)
    assert watched.front_cores == {"ingress": 0.885, "router": 0.12, "proxy": 0.31}
    server.page = PAGE % "1.0"
    with watched.beside(lambda: None):
        time.sleep(0.1)
    assert watched.front_cores == {}, "of the level before"
