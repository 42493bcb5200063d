"""Run a fault plan on a running deployment: references, load, faults, samples, leftovers. A Ray driver.

As a module it runs on a host made of namespaces (`pdlab.cluster.run_on_host`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from pdlab.analysis.chaos import disturbances, recovery_s
from pdlab.cluster import local_nodes, run_on_host
from pdlab.cluster.connection import Cluster, prepare
from pdlab.cluster.local_nodes import MARKER, LocalNodes
from pdlab.core.commands import LAUNCH
from pdlab.core.deployment import Deployment
from pdlab.core.errors import CanaryError, ClusterError, DeployError, PdlabError, UsageError
from pdlab.core.request_lengths import shortest_length
from pdlab.core.served_model import served_model
from pdlab.deploy import canary, serving_path
from pdlab.deploy.application import APP, Application
from pdlab.deploy.endpoint import key_of, load_running, measured
from pdlab.deploy.engine_metrics import parse_snapshot
from pdlab.deploy.http_client import NoAnswer, complete
from pdlab.deploy.metrics_page import read_pages, samples
from pdlab.deploy.verify import LaunchProgress
from pdlab.faults import plan as plans
from pdlab.faults.inject import FaultContext, Injector
from pdlab.faults.kinds import ROLES, DeploymentFeatures, FaultTarget, Role
from pdlab.faults.link import ShapedLink
from pdlab.faults.load import LEAVING_TIMES, Load, LoadTarget, Prompt, request_of, token_prompts
from pdlab.faults.node_restart import in_background, request_restart
from pdlab.faults.plan import MOST_MORE, ChaosOptions, DueFault, FaultPlan, FaultSchedule
from pdlab.faults.targets import (
    DeploymentProcess,
    NodeActors,
    NodeSurvey,
    classify,
    counted,
    present_parts,
    resident_mib,
)
from pdlab.results.chaos import ChaosRun, ChaosSample, InjectedFault, Leftovers, append, finish
from pdlab.results.provenance import now
from pdlab.results.schema import Manifest

ROLE_OF = {
    "Prefill": "prefill",
    "Decode": "decode",
    "Fluid": "fluid",
    "LLMServer": "collocated",
    "DPServer": "collocated",
}
LAST_RECOVERY_S = 600.0  # for a large model: a replica of it takes minutes to start
LOOK_AGAIN_S = 1.0
CALM_S = 5.0  # ordinary load between a recovery and the next fault
SAMPLE_S = 5.0
LEFT_POLL_S, LEFT_REQUESTS_EVERY_S = 0.5, 3.0
LEFT_REQUEST_TIMEOUT_S = 10.0
LEFT_GRACE_S = 5.0  # in addition to the lease
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 90.0  # limit for processes to end
POOL_GAUGE = "kv_cache_usage_perc"
COUNTERS = ("nixl_num_failed_transfers", "nixl_num_failed_notifications", "nixl_num_kv_expired_reqs")
GUARD = "guard_"
# Ray keeps a varying number of these processes.
PASSING = ("IDLE", "NodeActor")
CounterKey = tuple[str, tuple[tuple[str, str], ...]]
"""A counter's name and labels."""


class ChaosOrder(ChaosOptions):
    """An order for `execute`. ``name``: of the plan. ``folder``: of the results; None: a dry run."""

    plan: FaultPlan
    name: str
    folder: str | None = None
    command: str = ""


class DeploymentUnderTest(NamedTuple):
    """The deployment under test, and the API key of its endpoint."""

    base_url: str
    model_id: str
    manifest: Manifest
    key: str | None

    @property
    def deployment(self) -> Deployment | None:
        return self.manifest.deployment


def subject_of(order: ChaosOrder) -> DeploymentUnderTest:
    """The deployment at the order's address.

    Raises UsageError if no launcher of this machine has published it and the order does not accept that.
    """
    running = load_running(order.base_url)
    if running is not None:
        return DeploymentUnderTest(order.base_url, running.model_id, running.manifest, key_of(order.base_url))
    if not order.not_mine:
        raise UsageError(
            f"{order.base_url}: no launcher of this machine (and cache folder) has published a deployment there, and "
            f"faults are only for your own: launch it with {LAUNCH}, or give --not-mine"
        )
    key = key_of(order.base_url)
    manifest = Manifest(origin="measured", label="unknown", started_at=now())
    return DeploymentUnderTest(order.base_url, "", manifest, key)


def execute(order: ChaosOrder) -> None:
    """Execute the order. Progress goes to standard error, a dry run's text to standard output. Raises PdlabError."""
    subject = subject_of(order)
    with contextlib.ExitStack() as stack:
        if order.folder is not None:
            stack.enter_context(measured(order.base_url))
        local = local_nodes.still_running(order.base_url) if subject.manifest.on_local_nodes else None
        host = urlsplit(order.base_url).hostname or "127.0.0.1"
        env = serving_path.environment(subject.deployment, host) if subject.deployment else {}
        loading = prepare(local, env)
        cluster = stack.enter_context(Cluster(local, env))
        loading.result()
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it warns of every killed raylet
        faults = _FaultRun(order, subject, cluster, local)
        stack.callback(faults.node_actors.close)
        faults.run()


class _FaultRun:
    """One order on one deployment."""

    def __init__(
        self, order: ChaosOrder, subject: DeploymentUnderTest, cluster: Cluster, local: LocalNodes | None
    ) -> None:
        self.order = order
        rehearsal = subject.manifest.rehearsal
        self.plan = order.plan.slowed(rehearsal.slow_down or 1.0) if rehearsal else order.plan
        self.subject = subject
        self.cluster = cluster
        self.local = local
        self.progress = LaunchProgress()
        self.app = Application(cluster)
        self.node_actors = NodeActors(cluster, f"{MARKER}={local.id}" if local else None)
        self._counts: dict[CounterKey, float] = {}
        self.link = ShapedLink(local, self.node_actors) if local is not None and local.two_hosts is not None else None

    def run(self) -> None:
        state = self.app.state()
        if state.status != "RUNNING":
            raise ClusterError(f"the application {APP} is {state.status}; faults need a RUNNING application")
        _, members = self.look()
        replicas = self._replicas()
        possible = DeploymentFeatures(
            parts=present_parts(members),
            replicas=replicas,
            restarts=self.local is not None,
            link=self.link is not None,
            relay=self.link is not None and self.link.has_relay,
        )
        made = plans.schedule(self.plan, possible)
        title = f"{self.subject.manifest.label} at {self.subject.base_url}"
        print(plans.describe(self.plan, made, title, cast(dict[str, int], replicas)), flush=True)
        if self.order.folder is None:
            return
        if not made.due:
            raise UsageError("none of the plan's faults applies to this deployment; the reasons are above")
        self._make(Path(self.order.folder), made, replicas)

    # Facts of the deployment

    def look(self, *, ports: bool = False) -> tuple[list[NodeSurvey], list[DeploymentProcess]]:
        """The surveys and the classified processes now. Raises ClusterError."""
        from ray._private import state as ray_state

        surveys = self.node_actors.survey(ports=ports)
        state = self.app.state()
        actors = list(ray_state.actors().values())
        return surveys, classify(surveys, state.replicas, self._roles(), actors, ray_state.jobs())

    def _roles(self) -> dict[str, Role]:
        """Serve's name of an engine deployment -> role. Ray Serve LLM makes the name of the role and the model."""
        names = self.app.state().deployments
        return {
            name: cast(Role, ROLE_OF[name.partition(":")[0]]) for name in names if name.partition(":")[0] in ROLE_OF
        }

    def _replicas(self) -> dict[Role, int]:
        roles = self._roles()
        counts = Counter(roles[r.deployment] for r in self.app.state().replicas if r.deployment in roles)
        return {role: counts[role] for role in ROLES if counts[role]}

    def _engines(self) -> dict[str, Role]:
        """Running engine replicas -> role."""
        roles = self._roles()
        running = [r for r in self.app.state().replicas if r.state == "RUNNING"]
        return {replica.replica: roles[replica.deployment] for replica in running if replica.deployment in roles}

    def prefilled(self) -> float | None:
        """Number of requests that prefill engines have finished; None: unknown."""
        try:
            snapshot = parse_snapshot(read_pages(self.cluster.metrics_urls()), (), {})
            prefill = [replica for replica, role in self._engines().items() if role == "prefill"]
        except PdlabError:
            return None
        counts = [snapshot.finished_by[replica] for replica in prefill if replica in snapshot.finished_by]
        return sum(counts) if counts else None

    def kv_use(self) -> dict[str, float]:
        """Running engine replica -> share of KV blocks in use, for replicas whose gauge is on a page now."""
        engines = self._engines()
        use: dict[str, float] = {}
        for page in read_pages(self.cluster.metrics_urls()):
            for sample in samples(page, POOL_GAUGE.__eq__):
                if sample.replica in engines:
                    use[sample.replica] = max(use.get(sample.replica, 0.0), sample.value)
        return use

    def count(self) -> None:
        """Read the counters. Counters of engines that have ended keep their last value."""
        with contextlib.suppress(PdlabError):
            for page in read_pages(self.cluster.metrics_urls()):
                for sample in samples(page, _is_counted):
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    self._counts[key] = max(sample.value, self._counts.get(key, 0.0))

    def _grown(self, before: Mapping[CounterKey, float]) -> dict[str, float]:
        grown: dict[str, float] = {}
        for (name, labels), value in sorted(self._counts.items()):
            grown[name] = grown.get(name, 0.0) + value - before.get((name, labels), 0.0)
        return grown

    def _pool_tokens(self) -> float | None:
        """Tokens of one prefill engine's KV pool; None: unknown."""
        with contextlib.suppress(PdlabError):
            engines = self._engines()
            snapshot = parse_snapshot(read_pages(self.cluster.metrics_urls()), tuple(engines), engines)
            tokens = [p.tokens for p in (snapshot.kv_pools or {}).values() if p.role == "prefill"]
            return max(tokens, default=None)
        return None

    # References

    def _service(self) -> LoadTarget:
        model_id = self.subject.model_id or self._only_model()
        topology = self.subject.deployment.topology if self.subject.deployment else None
        prefill, decode = getattr(topology, "prefill", None), getattr(topology, "decode", None)
        unequal = prefill is not None and decode is not None and prefill.tp != decode.tp
        return LoadTarget(
            base_url=self.subject.base_url,
            model_id=model_id,
            max_tokens=self.plan.max_tokens,
            limit_s=self.plan.limit_s,
            key=self.subject.key,
            rounding=canary.ROUNDING_UNEQUAL_TP if unequal else canary.ROUNDING,
        )

    def _only_model(self) -> str:
        names = [name.partition(":")[2] for name in self._roles()]
        if not names:
            raise UsageError(f"{self.subject.base_url}: no engine of Ray Serve LLM runs there")
        return names[0].replace("--", "/")

    def _prompts(self, service: LoadTarget, replicas: Mapping[Role, int]) -> list[Prompt]:
        """Every prompt with its reference, which is the answer of one engine without KV transfer.

        Also sends each prompt to the deployment. Raises CanaryError if an answer is wrong before any fault, and
        DeployError without an answer.
        """
        deployment = self.subject.deployment
        cluster = self.subject.manifest.cluster
        cpu = cluster is not None and cluster.device == "cpu"
        context = shortest_length(deployment, served_model(deployment).shape, cpu=cpu) if deployment else None
        most = None if context is None else max(1, context - LEAVING_TIMES * self.plan.max_tokens)
        ids = token_prompts(self.plan.prompts, self.plan.prompt_tokens, self.plan.seed, most)
        alone = [request_of(service, each, None, stream=False) for each in ids]
        if "prefill" in replicas or "fluid" in replicas:
            answers = self.app.ask_alone("prefill" if "prefill" in replicas else "fluid", service.model_id, alone)
        else:
            answers = [self._complete(service, request) for request in alone]
        references = [canary.read_answer(answer) for answer in answers]
        canary_answers = []
        for place, each in enumerate(ids):
            salted = request_of(service, each, f"before-{time.time_ns()}-{place}", stream=False)
            canary_answers.append(canary.read_answer(self._complete(service, salted)))
        result = canary.compare(
            canary_answers, references, "one engine by itself", rounding=service.rounding, bounded=False
        )
        if result.equal is False:
            raise CanaryError(f"the deployment gives a wrong answer before any fault: {result.detail}")
        self.progress(f"references: {result.detail}")
        return [Prompt(tuple(each), answer) for each, answer in zip(ids, references, strict=True)]

    def _complete(self, service: LoadTarget, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = complete(service.base_url, request, service.key, REQUEST_TIMEOUT_S)
        except NoAnswer as error:
            raise DeployError(f"a request before any fault {error}") from error
        return answer

    # The faults

    def _make(self, folder: Path, made: FaultSchedule, replicas: dict[Role, int]) -> None:
        started = now()
        service = self._service()
        prompts = self._prompts(service, replicas)
        surveys, members = self.look(ports=True)
        before, whole = self._inventory(surveys, members), self._present(members)
        self.count()
        counts = dict(self._counts)
        # Before a fault can take a replica: recoveries are told by the replicas of the first sample.
        running = dict(Counter(self._engines().values()))
        append(folder, [ChaosSample(at_s=0.0, rss_mib=resident_mib(surveys, members), running=running)])
        load = Load(service, prompts, self.plan.concurrency, self.plan.seed, lambda each: append(folder, [each]))
        injector = Injector(self.plan, load, self.node_actors, self.link, self._fault_context(prompts, replicas))
        faults: list[InjectedFault] = []
        interrupted, leftovers = False, None
        loaded_s = 0.0
        try:
            load.start()
            with self._sampled(folder, load):
                try:
                    for due in made.due:
                        self._await_turn(due, load, faults)
                        fault = injector.inject(due)
                        faults.append(fault)
                        append(folder, [fault])
                        self.progress(_described(fault))
                    self._await_end(load, faults, whole)
                except KeyboardInterrupt:
                    interrupted = True
                    self.progress("interrupted: nothing more is injected")
                finally:
                    injector.undo()
                    loaded_s = load.now_s()
                    load.stop()
            if not interrupted:
                leftovers = self._leftovers(service, prompts, before, whole, time.monotonic())
                self.count()
        finally:
            run = ChaosRun(
                label=self.subject.manifest.label, plan=self.order.name, seed=self.plan.seed,
                concurrency=self.plan.concurrency, limit_s=self.plan.limit_s, answers=self.plan.answers,
                lease_s=self.plan.lease_s, loaded_s=round(loaded_s, 3), guarded=guarded(self.subject.manifest),
                impossible=made.impossible, counters=self._grown(counts), leftovers=leftovers,
                interrupted=interrupted, command=self.order.command,
                started_at=started, finished_at=now(),
            )  # fmt: skip
            manifest = self.subject.manifest.model_copy(update={"finished_at": now()})
            finish(folder, run, manifest)
        if interrupted:
            raise KeyboardInterrupt

    def _fault_context(self, prompts: Sequence[Prompt], replicas: dict[Role, int]) -> FaultContext:
        more = self.plan.more
        if more is None:
            tokens = self._pool_tokens()
            mean = sum(len(each.ids) for each in prompts) / len(prompts)
            pools = replicas.get("prefill", 1)
            more = MOST_MORE if tokens is None else min(MOST_MORE, math.ceil(pools * tokens / mean))
        return FaultContext(
            look=self.look,
            prefilled=self.prefilled,
            names=self.cluster.names,
            restart=self._restart if self.local is not None else None,
            replicas=replicas,
            more=more,
        )

    def _restart(self, name: str) -> None:
        number = self.local.number_of(name) if self.local is not None else None
        if self.local is None or number is None:
            raise ClusterError(f"node {name} was not started by this machine")
        if self.local.two_hosts is not None:
            request_restart(self.local, number)
        else:
            self.local = local_nodes.restart(self.local, number)

    def _await_turn(self, due: DueFault, load: Load, faults: list[InjectedFault]) -> None:
        """Wait until the fault is due and, if the plan waits for it, until the recovery from the fault before."""
        last = faults[-1] if faults else None
        waits = last is not None and self.plan.recover_s and last.outcome != "skipped"
        while waits and last is not None and load.now_s() < last.ended_s + self.plan.recover_s:
            if self._recovered(last, load):
                calm_s = load.now_s() + min(CALM_S, self.plan.every_s)
                break
            load.check()
            time.sleep(0.1)
        else:
            calm_s = 0.0
        while load.now_s() < max(due.at_s, calm_s):
            load.check()
            time.sleep(0.1)

    def _await_end(self, load: Load, faults: list[InjectedFault], whole: Counter[str]) -> None:
        """Wait for the end of a soak, for the recovery from the last fault, and until the engines are ``whole``."""
        while self.plan.duration_s is not None and load.now_s() < self.plan.duration_s:
            load.check()
            time.sleep(0.1)
        until_s = load.now_s() + LAST_RECOVERY_S
        for last in disturbances(faults)[-1:]:
            self.progress(f"waiting for the recovery and for all replicas, at most {LAST_RECOVERY_S:g} s")
            while not self._recovered(last, load) and load.now_s() < until_s:
                load.check()
                time.sleep(0.1)
            while not self._is_whole(whole) and load.now_s() < until_s:
                load.check()
                time.sleep(LOOK_AGAIN_S)

    def _is_whole(self, whole: Counter[str]) -> bool:
        """Whether no engine is missing; False also if Ray does not tell now."""
        with contextlib.suppress(ClusterError):
            return not whole - self._present(self.look()[1])
        return False

    def _recovered(self, fault: InjectedFault, load: Load) -> bool:
        if fault.outcome == "skipped" and not fault.acts:
            return True
        if load.now_s() < fault.ended_s:
            return False
        took_s = recovery_s(fault, list(load.finished), self.plan.answers)
        return took_s is not None

    @contextlib.contextmanager
    def _sampled(self, folder: Path, load: Load) -> Iterator[None]:
        """Sample memory, KV use and counters every few seconds of a block."""

        def sample(over: threading.Event) -> None:
            while not over.wait(SAMPLE_S):
                try:
                    surveys, members = self.look()
                    use = self.kv_use()
                    self.count()
                    engines = self._engines()
                except Exception:  # something is down at this moment
                    continue
                kv = {f"{engines.get(replica, 'engine')} {replica}": value for replica, value in use.items()}
                moment = ChaosSample(
                    at_s=round(load.now_s(), 2), rss_mib=resident_mib(surveys, members), kv_use=kv,
                    running=dict(Counter(engines.values())),
                )  # fmt: skip
                append(folder, [moment])

        with in_background(sample, "chaos-samples", SAMPLE_S + 60.0):
            yield

    # Leftovers

    def _inventory(
        self, surveys: Sequence[NodeSurvey], members: Sequence[DeploymentProcess]
    ) -> tuple[Counter[str], ...]:
        """Processes, ports and actors, by kind."""
        from ray._private import state as ray_state

        processes, ports = counted(surveys, members)
        alive = [actor for actor in ray_state.actors().values() if actor["State"] == "ALIVE"]
        actors = Counter(actor["ActorClassName"].rpartition(".")[2] for actor in alive)
        return processes, ports, actors

    def _present(self, members: Sequence[DeploymentProcess]) -> Counter[str]:
        """Processes of engines and of their replicas, by kind. A replica counts if Ray Serve reports that it runs.

        Ray Serve notices a death only after some seconds, and a process is there before its replica runs.
        """
        there = Counter(FaultTarget(each.part, each.role).text for each in members if each.role is not None)
        running = Counter(FaultTarget("replica", role).text for role in self._engines().values())
        for name in (FaultTarget("replica", role).text for role in ROLES):
            there[name] = min(there[name], running[name])
        return +there

    def _leftovers(
        self, service: LoadTarget, prompts: Sequence[Prompt], before: tuple[Counter[str], ...],
        whole: Counter[str], ended: float,
    ) -> Leftovers:  # fmt: skip
        limit_s = self.plan.lease_s + LEFT_GRACE_S
        last: dict[str, float] = {}
        free_s: float | None = None
        requested_at = -math.inf
        short = min(prompts, key=lambda each: len(each.ids))
        self.progress("waiting until KV blocks, processes and ports are released")
        while time.monotonic() - ended <= limit_s:
            if time.monotonic() - requested_at > LEFT_REQUESTS_EVERY_S:
                # Ray's pages drop a gauge that is not set again, as that of an idle engine.
                requested_at = time.monotonic()
                for number in range(2 * max(1, len(self._engines()))):
                    request = request_of(service, short.ids, f"after-{time.time_ns()}-{number}", stream=False)
                    with contextlib.suppress(NoAnswer):
                        complete(service.base_url, request | {"max_tokens": 1}, service.key, LEFT_REQUEST_TIMEOUT_S)
            with contextlib.suppress(PdlabError):
                last |= self.kv_use()
            if all(last.get(replica) == 0 for replica in self._engines()) and last:
                free_s = time.monotonic() - ended
                break
            time.sleep(LEFT_POLL_S)
        engines = self._engines()
        more, missing = self._changed(before, whole)
        while (any(more) or missing) and time.monotonic() - ended < limit_s + SETTLE_S:
            time.sleep(1.0)
            more, missing = self._changed(before, whole)
        processes, ports, actors = more
        return Leftovers(
            kv_use={f"{role} {replica}": last.get(replica) for replica, role in sorted(engines.items())},
            kv_free_after_s=None if free_s is None else round(free_s, 2), kv_limit_s=limit_s,
            processes=processes, ports=ports, actors=actors, missing=missing,
        )  # fmt: skip

    def _changed(
        self, before: tuple[Counter[str], ...], whole: Counter[str]
    ) -> tuple[tuple[dict[str, int], ...], dict[str, int]]:
        """(processes, ports, actors) by kind that were not there ``before``; engine processes that are missing."""
        surveys, members = self.look(ports=True)
        after = self._inventory(surveys, members)
        more = tuple(added_since(now_there, then) for now_there, then in zip(after, before, strict=True))
        return more, dict(whole - self._present(members))


def _is_counted(name: str) -> bool:
    return name in COUNTERS or name.startswith(GUARD)


def added_since(after: Counter[str], before: Counter[str]) -> dict[str, int]:
    """Kind -> increase, without kinds whose number varies by itself (`PASSING`)."""
    kinds = {name: count - before[name] for name, count in sorted(after.items()) if name not in PASSING}
    return {name: count for name, count in kinds.items() if count > 0}


def guarded(manifest: Manifest) -> bool | None:
    """Whether the engines have a KV guard; None: unknown, simulated engines, or no KV transfer."""
    transport = manifest.deployment.transport if manifest.deployment is not None else None
    return None if transport is None or manifest.rehearsal else transport.kv_guard


def _described(fault: InjectedFault) -> str:
    what = f"fault {fault.number} at {fault.began_s:.1f} s: {fault.kind}"
    if fault.outcome == "injected":
        return f"{what} ({'; '.join(fault.targets) or 'clients'})"
    return f"{what} {fault.outcome}: {fault.detail}"


if __name__ == "__main__":
    sys.exit(run_on_host.answering(lambda text: execute(ChaosOrder.model_validate_json(text))))
