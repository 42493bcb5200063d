"""Checks during a level that the measured deployment is alive, so that a sweep does not wait for a dead one."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from pdlab.core.errors import ClusterError, DeploymentDied
from pdlab.deploy import http_client
from pdlab.deploy.http_client import NoAnswer
from pdlab.deploy.metrics_page import MetricSample, samples

LOOK_EVERY_S = 5.0
LOOK_AGAIN_S = 1.0
PAGES_EVERY_S = 10.0
ANSWER_TIMEOUT_S = 8.0
CONNECT_TIMEOUT_S = 4.0
REFUSED_S = 8.0  # a server that restarts, or a full backlog, is back sooner
SILENT_S = 12.0
HEALTH_LAG_S = 25.0  # a health check of Ray Serve (10 s), Ray's export of it (10 s), and a look
ROUTER = "LLMRouter"  # of direct streaming, whatever the model's name
HEALTHY = "deployment_replica_healthy"
_HEALTH = (HEALTHY, "health_check_failures")
UNSEEN_LOOKS = 3  # of a replica that failed health checks: so often in a row nobody called it healthy
_GO_ON = "the running level is not kept; start the deployment again and use --resume"


# A process in front of the engines -> its title.
FRONT = {
    "ingress": re.compile(r"ray::ServeReplica:[^:]*:OpenAiIngress"),
    "router": re.compile(rf"ray::ServeReplica:[^:]*:{ROUTER}"),
    "proxy": re.compile(r"ray::ProxyActor"),
}


def front_cpu(page: str) -> dict[str, float]:
    """Cores used on the page's node by the processes in front of the engines: ingress, Ray Serve's proxy, and the
    router that HAProxy calls. Ray's reporter exports per cent of a core, all processes of one title together.
    """
    values: dict[str, float] = {}
    for sample in _read([page], ("cpu_percentage",), "ray_component_"):
        for name, pattern in FRONT.items():
            if pattern.match(sample.labels.get("Component", "")):
                values[name] = values.get(name, 0.0) + sample.value / 100
    return values


def _read(pages: Iterable[str], names: Collection[str], prefix: str) -> Iterator[MetricSample]:
    """The samples with these names. A damaged page has none, like a page that does not answer."""
    for page in pages:
        with contextlib.suppress(ClusterError):
            yield from list(samples(page, names.__contains__, (prefix,)))


class ReplicaHealth(NamedTuple):
    """One Ray Serve replica, as its controller's metrics report it. ``healthy``: None where they have no sample now.
    That is no sign by itself, for Ray drops a gauge two exports after its last report. ``failures`` of health checks
    are counted for ever. ``application``: empty where the page does not name it."""

    replica: str
    deployment: str
    healthy: bool | None
    failures: float
    application: str = ""


def replica_health(pages: Iterable[str]) -> list[ReplicaHealth]:
    """The replicas that Prometheus pages list. Empty where Ray Serve exports no series per replica."""
    deployments: dict[str, tuple[str, str]] = {}
    healthy: dict[str, bool] = {}
    failures: dict[str, float] = {}
    for sample in _read(pages, _HEALTH, "ray_serve_"):
        replica = sample.labels.get("replica")
        if replica is None:
            continue
        deployments[replica] = sample.labels.get("deployment", "?"), sample.labels.get("application", "")
        if sample.name == HEALTHY:
            healthy[replica] = sample.value > 0
        else:
            failures[replica] = failures.get(replica, 0.0) + sample.value
    return [
        ReplicaHealth(replica, deployment, healthy.get(replica), failures.get(replica, 0.0), application)
        for replica, (deployment, application) in deployments.items()
    ]


def read_health(pages: Iterable[str]) -> list[ReplicaHealth]:
    """`replica_health` of the pages at ``urls``; pages that do not answer are left out."""
    return replica_health(_read_pages(pages))


def _read_pages(urls: Iterable[str]) -> list[str]:
    pages = []
    for url in urls:
        with contextlib.suppress(NoAnswer):
            pages.append(http_client.get(url, ANSWER_TIMEOUT_S))
    return pages


class Watch:
    """Watches one deployment: its address, the metrics pages of its Ray nodes, and its published replicas.

    Three signs end a level. The address does not answer, or accepts connections in silence while no request is
    answered. A node's metrics page refuses connections. Ray Serve reports a published replica as dead.
    """

    def __init__(self, base_url: str, metrics_urls: Sequence[str] = (), replicas: Sequence[str] = ()) -> None:
        self._base_url = base_url
        self._pages = tuple(metrics_urls)
        self._replicas = tuple(replicas)
        self._answered = 0
        self._died: DeploymentDied | None = None
        self._unseen: dict[str, int] = {}
        self._front: dict[str, list[float]] = {}

    @property
    def front_cores(self) -> dict[str, float]:
        """Cores that ingress, router and proxy used on their busiest node: medians over the last block."""
        return {name: median(cores) for name, cores in self._front.items()}

    def count(self, answered: int) -> None:
        """Take the number of answered requests of the running level, which is a sign of life."""
        self._answered = answered

    @contextlib.contextmanager
    def beside(self, end: Callable[[], None]) -> Iterator[None]:
        """Watch in a separate thread during the block. If the deployment is found dead, it calls ``end``, which must
        end the block.

        Raises DeploymentDied then, in place of what ``end`` made the block raise.
        """
        self._answered, self._died, self._front = 0, None, {}
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over, end), daemon=True)
        thread.start()
        try:
            yield
        except Exception:
            if self._died is None:
                raise
        finally:
            over.set()
            thread.join(ANSWER_TIMEOUT_S)
        if self._died is not None:
            raise self._died

    def require_replicas(self, within_s: float = 0.0) -> None:
        """Raises DeploymentDied when a published replica is dead or was replaced, by Ray Serve's reports within that
        time.

        Returns at once if Ray Serve's health of replicas cannot be read.
        """
        deadline = time.monotonic() + within_s
        while True:
            health = replica_health(self._read_pages())
            dead = self._dead(health)
            if dead:
                raise dead
            waiting = time.monotonic() < deadline or any(self._unseen.values())
            if not health or not waiting:
                return
            time.sleep(LOOK_AGAIN_S)

    def _watch(self, over: threading.Event, end: Callable[[], None]) -> None:
        server = _FailureTimer(f"{self._base_url} no longer answers", _GO_ON)
        nodes = {
            url: _FailureTimer(f"the Ray node whose metrics are at {urlsplit(url).netloc} no longer answers", _GO_ON)
            for url in self._pages
        }
        unseen = {url for url in self._pages if not _accepts(url)}  # never there: no sign of a death
        pages_at = time.monotonic() + PAGES_EVERY_S
        wait_s, answered = LOOK_EVERY_S, 0
        self._unseen.clear()
        while not over.wait(wait_s):
            began = time.monotonic()
            silent = _silence(self._base_url)
            if silent and silent.limit_s == SILENT_S and self._answered > answered:
                silent = None  # too busy to list its models, but it answers requests
            answered = self._answered
            died = server.death_after(silent, began)
            for url, patience in nodes.items():
                if url not in unseen:
                    died = died or patience.death_after(
                        None if _accepts(url) else _FailureLimit("refused", REFUSED_S), began
                    )
            if not died and time.monotonic() >= pages_at:
                pages_at = time.monotonic() + PAGES_EVERY_S
                pages = self._read_pages()
                self._note_front(pages)
                died = self._dead(replica_health(pages))
            if died and not over.is_set():
                self._died = died
                end()
                return
            failing = server.failing or any(patience.failing for patience in nodes.values())
            if any(self._unseen.values()):
                failing, pages_at = True, 0.0
            wait_s = LOOK_AGAIN_S if failing else LOOK_EVERY_S

    def _note_front(self, pages: Sequence[str]) -> None:
        nodes = [front_cpu(page) for page in pages]
        for name in {name for node in nodes for name in node}:
            self._front.setdefault(name, []).append(max(node.get(name, 0.0) for node in nodes))

    def _read_pages(self) -> list[str]:
        return _read_pages(self._pages if self._replicas else ())

    def _dead(self, health: Sequence[ReplicaHealth]) -> DeploymentDied | None:
        ours = [one for one in health if one.replica in self._replicas]
        # Ray Serve stops the router of a node that has no engine any more: that one's death is what happened.
        for one in sorted(ours, key=lambda one: one.deployment.startswith(ROUTER)):
            others = [h.replica for h in health if h.deployment == one.deployment and h.healthy]
            new = [replica for replica in others if replica not in self._replicas]
            if one.healthy:
                self._unseen[one.replica] = 0
            elif one.healthy is None and one.failures:
                self._unseen[one.replica] = self._unseen.get(one.replica, 0) + 1
            gone = one.healthy is False or self._unseen.get(one.replica, 0) >= UNSEEN_LOOKS
            if not gone and not (new and not one.healthy):
                continue
            self._unseen[one.replica] = 0
            if new:
                return DeploymentDied(
                    f"replica {one.replica} of {one.deployment} was replaced: {', '.join(new)} answers now, not "
                    "verified and with cold caches",
                    "; launch again, then use --resume",
                )
            return DeploymentDied(
                f"replica {one.replica} of {one.deployment} died and is not replaced yet",
                ": the running level is not kept; wait until Ray Serve has replaced it and launch again, then use "
                "--resume",
            )
        return None


class _FailureLimit(NamedTuple):
    reason: str
    limit_s: float


class _FailureTimer:
    """Decides that something is dead: it has failed without a break for long enough, and at least twice."""

    def __init__(self, subject: str, then: str) -> None:
        self._subject, self._then = subject, then
        self._since: float | None = None

    @property
    def failing(self) -> bool:
        return self._since is not None

    def death_after(self, silence: _FailureLimit | None, began: float) -> DeploymentDied | None:
        if silence is None:
            self._since = None
            return None
        if self._since is None:
            self._since = began
            return None
        for_s = time.monotonic() - self._since
        if for_s < silence.limit_s:
            return None
        return DeploymentDied(f"{self._subject} ({silence.reason}, for {for_s:.0f} s)", f": {self._then}")


def _silence(base_url: str) -> _FailureLimit | None:
    """Why the server does not list its models; None when it does."""
    try:
        http_client.get(f"{base_url}/v1/models", ANSWER_TIMEOUT_S)
        return None
    except NoAnswer as error:
        if error.code is not None:
            # A server that requires credentials lives; one that is too busy may have no time for this.
            return _FailureLimit(f"HTTP {error.code}", SILENT_S) if error.code >= 500 else None
        if error.timed_out:
            return _FailureLimit(f"no answer within {ANSWER_TIMEOUT_S:g} s", SILENT_S)
        return _FailureLimit(error.detail, REFUSED_S)


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
