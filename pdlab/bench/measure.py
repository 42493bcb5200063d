"""Measure one level against a running deployment: drive it, read the engines' counters around it, judge it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pdlab.bench import gates, levels
from pdlab.bench.client import protocol
from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ClientAnswer, ClientLevel, ReplayedPlan
from pdlab.bench.client.replay import id_prefix
from pdlab.bench.forecast import CacheRules, cache_rules, foreseen, placed
from pdlab.bench.progress import Progress
from pdlab.bench.recovery import await_whole
from pdlab.bench.target import Target, completion_error, require_answering
from pdlab.bench.watch import HEALTH_LAG_S, Watch
from pdlab.core.deployment import Fluid
from pdlab.core.errors import BenchError, ClusterError
from pdlab.core.findings import Finding, found
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Level, Replay, Workload, title
from pdlab.deploy.engine_metrics import Snapshot, read_snapshot
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.provenance import now
from pdlab.results.schema import RequestRecord, Run, Summary, Validity
from pdlab.results.timeline import RequestTimeline

# Gates that find that the load generator was the bottleneck.
OVERLOAD = {"client_saturation", "lateness"}
# Counters that count fewer requests than were answered are judged when they have stood still for so long: two exports
# of Ray's metrics agent (10 s each by default) and a page. An exporter on a busy machine may be later than that.
SHORT_STILL_S = 25.0
# The most that a level waits for its counters. What still moves then is late.
SETTLE_TIMEOUT_S = 60.0
SETTLE_POLL_S = 0.5
# Counters that do not come out even may have requests to come that Ray has not exported: so long they must stand still.
LOCAL_EXPORT_S, CLUSTER_EXPORT_S = 2.0, 11.0
MANY_FAILED = 0.5
# Completions before the warm-up: one may fail at a server that is not warm.
PROBES, PROBE_PAUSE_S = 3, 0.5

S = TypeVar("S")


class Driver:
    """Measures levels of one workload against one target, with one load generator.

    ``max_processes``: the largest number of load-generator processes, if one is saturated. ``plan``: the compiled
    workload that its levels replay. ``length_setting``: as in `gates.Evidence`.
    """

    def __init__(
        self,
        client: LoadClient,
        target: Target,
        workload: Workload,
        progress: Progress,
        *,
        request_timeout_s: float,
        smoke: bool = False,
        max_processes: int = 1,
        plan: ReplayedPlan | None = None,
        timeline: bool = False,
        length_setting: gates.LengthSetting | None = None,
    ) -> None:
        self._client = client
        self._target = target
        self._workload = workload
        self._progress = progress
        self._request_timeout_s = request_timeout_s
        self._smoke = smoke
        self._max_processes = max_processes
        self._plan = plan
        self._length_setting = length_setting
        deployment = target.manifest.deployment
        fronted = deployment is not None and not deployment.serving.direct_streaming
        self._ingress_replicas = deployment.ingress_replicas if deployment is not None and fronted else None
        self._moves_kv = deployment is not None and deployment.transport is not None
        pools = deployment.pools if deployment is not None else {}
        self._by_session = tuple(role for role, pool in pools.items() if pool.routing == "session")
        self._fluid = deployment is not None and isinstance(deployment.topology, Fluid)
        self._snapshot: Snapshot | None = None
        self.warm_e2el_s: float | None = None
        """E2EL of the warm-up's fastest answer: the first ones may be slow."""
        self._error: str | None = None
        self._settling: gates.Settling = "whole"
        self._uncounted = 0
        """Answers that the counters had not counted when they were read last, because they were late."""
        self._sent: Sequence[RequestRecord] = ()
        self._timeline = timeline and target.manifest.rehearsal is None
        self.timelines: Sequence[RequestTimeline] = ()
        """Of the level that was driven last, where its servers sent them."""
        self._exports = bool(target.metrics_urls)
        self._rehearsal = target.manifest.rehearsal
        # Many made-up nodes export as rarely as a cluster's.
        quick = target.manifest.on_local_nodes and self._rehearsal is None
        self._export_s = LOCAL_EXPORT_S if quick else CLUSTER_EXPORT_S
        self._watch = Watch(target.base_url, target.metrics_urls, target.replicas)

    def warm_up(self, attempt: int) -> None:
        """Send the warm-up's prompts and detect which metrics the engines export.

        Raises BenchError when none is answered, and when every level would be invalid: an answer has a wrong token
        count, or the server does not stream. A server that answers no completion is known before the load generator has
        started, which takes 10 s, or a minute on a busy machine.
        """
        warmup = self.warmup_level(attempt)
        self._watch.require_replicas()
        self._progress.level("warm-up, after the load generator's start", warmup.num_requests, counts=False)
        if (why := self._refusal()) is not None:
            self._require_server()
            raise BenchError(f"{why} ({PROBES} of {PROBES} times, before the warm-up)")
        self._read_counters(0)
        answer = self._run(warmup)
        failed = [record.error for record in answer.records if not record.ok]
        if len(failed) == warmup.num_requests:
            self._require_server()
            why = completion_error(self._target.base_url, self._target.model_id)
            raise BenchError(f"no warm-up request was answered (first: {failed[0]}){f'; {why}' if why else ''}")
        self.warm_e2el_s = min((r.e2el_s for r in answer.records if r.ok and r.e2el_s is not None), default=None)
        for note in gates.judge_warm_up(LevelData.of(answer.records), self._workload):
            self._progress.note(note)
        self._read_counters(len(answer.records) - len(failed), sent=None)
        self._exports = self._snapshot is not None and (
            self._snapshot.finished is not None or self._snapshot.nixl.transfers is not None
        )
        self._progress.level_done(f"{len(failed)} of {len(answer.records)} failed" if failed else "done")

    def _refusal(self) -> str | None:
        """The server's answer to short completions, if it refuses each of `PROBES`; None: it may answer others."""
        for number in range(PROBES):
            if number:
                time.sleep(PROBE_PAUSE_S)
            why = completion_error(self._target.base_url, self._target.model_id)
            if why is None:
                return None
        return why

    def _require_server(self) -> None:
        """Raises DeploymentDied if the server or a replica is gone."""
        require_answering(self._target.base_url)
        self._watch.require_replicas(HEALTH_LAG_S)

    def require_alive(self) -> None:
        """Raises DeploymentDied if Ray Serve has found a replica dead, or finds one within `HEALTH_LAG_S`."""
        self._watch.require_replicas(HEALTH_LAG_S)

    def recover(self, why: str, limit_s: float, attempt: int) -> None:
        """Wait until all replicas run again, use the new replicas, and warm them up, because they have neither
        connections nor compiled kernels. Raises DeploymentDied if this takes more than ``limit_s`` seconds.
        """
        self._target = await_whole(self._target, why, limit_s, self._progress.note)
        self._watch = Watch(self._target.base_url, self._target.metrics_urls, self._target.replicas)
        self._snapshot, self._error, self._settling, self._uncounted = None, None, "whole", 0
        self._client.restart()
        self.warm_up(attempt)

    def died_level(self, level: Level, died: Finding) -> tuple[Run, Sequence[RequestRecord]]:
        """The record of a level during which the deployment died, and the requests that were sent before that."""
        validity = Validity(findings=(died,))
        requests = LevelData.of(self._sent)
        whole, completed = self._without_chunk_gaps(metrics.whole(requests)), int(requests.ok.sum())
        return self._run_of(level, completed, whole=whole, validity=validity, finished_at=now()), self._sent

    def _run_of(self, level: Level, completed: int, **figures: Any) -> Run:
        """The level's record. ``figures``: its remaining fields, as in `Run`."""
        return Run(
            origin=self._target.manifest.origin,
            rehearsal=self._rehearsal,
            label=self._target.manifest.label,
            key=level.key,
            workload=self._workload,
            load=level.load,
            num_requests=level.num_requests,
            seed=level.seed,
            completed=completed,
            failed=level.num_requests - completed,
            **figures,
        )

    def _without_chunk_gaps(self, figures: Summary) -> Summary:
        """The figures, in a rehearsal without ITL: there an answer comes in three chunks, whose gaps are not those of
        tokens."""
        return figures if self._rehearsal is None else figures.model_copy(update={"itl": None})

    @property
    def local(self) -> bool:
        """Whether the engines are on CPUs of this machine."""
        return self._target.manifest.local

    @property
    def to_fill(self) -> float | None:
        """`Snapshot.to_fill` of the last counters."""
        return self._snapshot.to_fill if self._snapshot else None

    @property
    def engines(self) -> int:
        """Engines whose KV pools are known."""
        return len((self._snapshot.kv_pools if self._snapshot else None) or {})

    def fill(self, requests: int, seed: int, concurrency: int) -> float | None:
        """Send prompts as long as a whole request of the workload, each for one output token, and read the counters.
        Returns the answers per second; None: one failed.
        """
        workload = self._workload
        tokens = levels.fill_tokens(workload)
        self._progress.extend(requests, levels=0)
        self._progress.level(f"filling KV pools, prompts of {counted(tokens, 'token')}", requests, counts=False)
        level = self.warmup_level(0).model_copy(
            update={
                "name": "fill", "input_tokens": tokens, "output_tokens": 1, "num_requests": requests, "seed": seed,
                "prefix_tokens": 0, "load": Closed(concurrency=min(requests, concurrency)),
            }
        )  # fmt: skip
        answer = self._run(level)
        ends = [record.finish_s for record in answer.records if record.ok and record.finish_s is not None]
        self._read_counters(len(ends), sent=None)
        failed = requests - len(ends)
        self._progress.level_done(f"{failed} of {requests} failed" if failed else "done")
        return None if failed or not ends else requests / max(ends)

    def warmup_level(self, attempt: int) -> ClientLevel:
        workload, target = self._workload, self._target
        requests = levels.warmup_requests(target.manifest.deployment)
        input_tokens, output_tokens = workload.typical
        return ClientLevel(
            name="warm-up",
            base_url=target.base_url,
            model=target.model_id,
            tokenizer=target.tokenizer,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            num_requests=requests,
            seed=levels.warmup_seed(workload, smoke=self._smoke, attempt=attempt),
            prefix_tokens=workload.shared_prefix_tokens,
            prefix_seed=levels.prefix_seed(workload),
            load=Closed(concurrency=min(requests, levels.warmup_concurrency(target.manifest.deployment))),
            request_timeout_s=self._request_timeout_s,
        )

    def measure(self, level: Level, *, once: bool = False) -> tuple[Run, Sequence[RequestRecord]]:
        """Measure one level. If the load generator was the bottleneck, measure it again with more processes and new
        prompts, unless ``once``. Raises BenchError when the server or the load generator dies."""
        notes = list(self._target.figure_notes)
        while True:
            answer, before = self._drive(level)
            answer = self._foreseen(level, answer)
            run = self._judge(level, answer, before, tuple(notes))
            if once or not OVERLOAD & set(run.validity.failed_gates) or not self._grow(level, run, notes):
                return run, answer.records
            level = level.model_copy(
                update={"seed": levels.derive_seed(self._workload, "again", level.seed, self._client.processes)}
            )

    def _foreseen(self, level: Level, answer: ClientAnswer) -> ClientAnswer:
        """The answer to a replay with the replicas that served each request. If the engines' cache rules are known, it
        also has the tokens of each prompt that the prefix cache must have had. Other answers are unchanged."""
        plan = self._plan
        if plan is None or not isinstance(level.load, Replay):
            return answer
        records: Sequence[RequestRecord] = placed(
            answer.records, answer.timelines, id_prefix(level.key.stem, level.seed)
        )
        rules = self._rules()
        if rules is not None:
            records = foreseen(records, Path(plan.path), rules, answer.prompts)
        return answer.model_copy(update={"records": records})

    def _rules(self) -> CacheRules | None:
        """The rules of the engines' prefix caches; None: they are not known."""
        pools, manifest = (self._snapshot.kv_pools if self._snapshot else None) or {}, self._target.manifest
        return cache_rules(manifest.deployment, pools, local=manifest.local, rehearsal=self._rehearsal)

    def _grow(self, level: Level, run: Run, notes: list[Finding]) -> bool:
        most = level.load.concurrency if isinstance(level.load, Closed) else level.num_requests
        processes = min(2 * self._client.processes, self._max_processes, most)
        if processes <= self._client.processes:
            return False
        reason = next(finding.text for finding in run.validity.findings if finding.gate in OVERLOAD)
        before = self._client.processes
        notes.append(found("measured_with_more_processes", processes=processes, before=before, reason=reason))
        self._progress.note(f"{level.key.stem}: {notes[-1].text}")
        self._client.grow(processes)
        self._client.wait_ready()
        return True

    def _drive(self, level: Level) -> tuple[ClientAnswer, Snapshot | None]:
        target = self._target
        words = title(level.load) + (f", repeat {level.repeat}" if level.repeat else "")
        self._progress.level(words, level.num_requests)
        stale = self._error
        self._read_counters(0)
        plan, rules = self._plan, self._rules() if self._plan is not None else None
        if plan is not None and rules is not None:
            plan = plan.model_copy(update={"block_tokens": rules.block_tokens})
        client_level = protocol.client_level(
            level,
            self._workload,
            base_url=target.base_url,
            model=target.model_id,
            tokenizer=target.tokenizer,
            request_timeout_s=self._request_timeout_s,
            plan=plan,
            timeline=self._timeline,
        )
        late_before = self._settling == "late"
        # Where they cannot be read now, those after the level before stand in, if they were read.
        before, error = self._snapshot, stale if self._error else None
        answer = self._run(client_level)
        answered = sum(record.ok for record in answer.records)
        if answered < level.num_requests:
            require_answering(target.base_url)
        if answered < (1 - MANY_FAILED) * level.num_requests:
            self._watch.require_replicas(HEALTH_LAG_S)
        self._read_counters(answered, sent=level.num_requests)
        if late_before:  # what the counters lacked before the level may be in what they counted in it
            self._settling = "late"
        self._error = self._error or error
        return answer, before

    def _run(self, level: ClientLevel) -> ClientAnswer:
        """Send the level's requests. Raises DeploymentDied when the deployment dies meanwhile."""

        def update(done: int, failed: int) -> None:
            self._watch.count(done - failed)
            self._progress.update(done, failed)

        slow_down = self._rehearsal.slow_down if self._rehearsal else None
        self._sent, self.timelines = (), ()
        with self._watch.beside(self._client.stop):
            self._client.wait_ready(lambda: self._progress.update(0, 0))
            if slow_down is None:
                answer = self._client.run(level, update)
            else:
                slowed = protocol.slowed(level, slow_down)
                answer = protocol.in_simulated_time(self._client.run(slowed, update), slow_down)
            self._sent, self.timelines = answer.records, answer.timelines
        return answer

    def _judge(self, level: Level, answer: ClientAnswer, before: Snapshot | None, notes: tuple[Finding, ...]) -> Run:
        after = self._snapshot
        requests = LevelData.of(answer.records)
        completed = int(requests.ok.sum())
        new = self._unpublished(before, after, completed)
        window = metrics.steady_window(requests, level.load)
        steady = metrics.steady(requests, level.load, window)
        run = self._run_of(
            level,
            completed,
            requested_tokens=metrics.mean_requested_tokens(requests),
            whole=self._without_chunk_gaps(metrics.whole(requests)),
            steady=steady and self._without_chunk_gaps(steady),
            steady_window_s=window,
            trend=metrics.trend(requests, level.load, window),
            nixl_before=before.nixl if before else None,
            nixl_after=after.nixl if after else None,
            engines_before=before.engines if before else {},
            engines_after=after.engines if after else {},
            client=answer.load.model_copy(update={"lateness": metrics.distribution(requests.lateness_s)}),
            client_cpu_share=answer.cpu_share,
            front_cores=self._watch.front_cores,
            pool_age=before.pool_age if before else None,
            started_at=answer.started_at,
            finished_at=answer.finished_at,
        )
        evidence = gates.Evidence(
            run=run,
            requests=requests,
            kv_expected=self._moves_kv and bool(self._target.metrics_urls),
            unpublished=new,
            counters_error=self._error,
            settling=self._settling,
            ingress_replicas=self._ingress_replicas,
            fluid=self._fluid,
            timelines=answer.timelines,
            timelines_due=self._timeline and self._target.manifest.deployment is not None,
            roles_changed=_any_known(*(each.roles_changed for each in (before, after) if each is not None)),
            smoke=self._smoke,
            by_session=self._by_session,
            length_setting=self._length_setting,
        )
        return run.model_copy(update={"validity": gates.validate_level(evidence, notes, moves_kv=self._moves_kv)})

    def _unpublished(self, before: Snapshot | None, after: Snapshot | None, answered: int) -> tuple[str, ...]:
        """Replicas that the launch did not publish and that served requests of the level. A new replica is one. Another
        unpublished replica that finished requests is one only if the published replicas finished too few requests:
        replicas of another application finish requests, too."""
        published = set(self._target.replicas)
        if not published or after is None:
            return ()
        new = set(after.replicas) - (set(before.replicas) if before else set())
        counted = before is not None and after.finished is not None and self._settling != "late"
        if before and counted and (after.finished or 0.0) - (before.finished or 0.0) < answered:
            new |= {name for name, count in after.finished_by.items() if count > before.finished_by.get(name, 0.0)}
        return tuple(sorted(new - published))

    def _read_counters(self, answered: int, sent: int | None = 0) -> None:
        """Read the counters once they have counted the ``answered`` requests and those that the last read still missed.
        If the engines then counted another number than ``sent``, or ``sent`` is None, wait until Ray must have exported
        everything."""
        if not self._exports:
            return
        target, before = self._target, self._snapshot
        due = answered + self._uncounted

        def scrape() -> Snapshot:
            return read_snapshot(target.metrics_urls, target.replicas, target.pools)

        def complete(now: Snapshot) -> bool:
            if before is None or (now.finished or 0.0) < (before.finished or 0.0):  # an engine began anew
                return True
            if self._moves_kv and (now.nixl.transfers or 0.0) < (before.nixl.transfers or 0.0) + answered:
                return False
            counted = _counted(before, now)
            return all(count >= due for count in counted) if counted else self._moves_kv

        def still_s(now: Snapshot) -> float:
            exact = before and sent is not None and all(count == sent for count in _counted(before, now))
            return 0.0 if not now.delayed or exact else self._export_s

        try:
            read = settled(scrape, complete, still_s) if due else SettledCounters[Snapshot](scrape(), "whole")
            late = _counted(before, read.counters) if read.settling == "late" and before else []
            self._uncounted = due - int(min(late, default=due))
            self._snapshot, self._settling = read.counters, read.settling
            self._error = None
        except ClusterError as error:
            self._error = str(error)


def _any_known(*values: bool | None) -> bool | None:
    known = [each for each in values if each is not None]
    return any(known) if known else None


def _counted(before: Snapshot, now: Snapshot) -> list[float]:
    """Requests that each pool has counted since ``before``, of the pools that count them."""

    def finished(snapshot: Snapshot, pool: str) -> float:
        counters = snapshot.engines.get(pool)
        return (counters.requests if counters else None) or 0.0

    pools = [pool for pool, counters in now.engines.items() if counters.requests is not None]
    return [finished(now, pool) - finished(before, pool) for pool in pools]


@dataclass(frozen=True)
class SettledCounters(Generic[S]):
    """The last counters, and whether they had stopped changing."""

    counters: S
    settling: gates.Settling


def settled(
    scrape: Callable[[], S],
    complete: Callable[[S], bool],
    still_s: Callable[[S], float] = lambda counters: 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SettledCounters[S]:
    """Poll counters, which are exported late, until they have not changed for two polls: ``complete`` ones for
    ``still_s``, others for `SHORT_STILL_S`. After `SETTLE_TIMEOUT_S` they are late.
    """
    since = began = clock()
    last = scrape()
    while clock() < began + SETTLE_TIMEOUT_S:
        sleep(SETTLE_POLL_S)
        current = scrape()
        if current != last:
            since = clock()
        elif complete(current):
            if clock() - since >= still_s(current):
                return SettledCounters(current, "whole")
        elif clock() - since >= SHORT_STILL_S:
            return SettledCounters(current, "short")
        last = current
    return SettledCounters(last, "late")


def describe(run: Run) -> str:
    """One line on a finished level."""
    figures = f"{run.whole.output_tokens_per_s:.0f} output tokens/s"
    if run.whole.ttft:
        figures += f", TTFT p50 {1000 * run.whole.ttft.percentiles_s['p50']:.0f} ms"
    if run.whole.tpot:
        figures += f", TPOT p50 {1000 * run.whole.tpot.percentiles_s['p50']:.1f} ms"
    if run.client and run.client.lateness:
        late = run.client.lateness.percentiles_s
        figures += f", sent late p50 {1000 * late['p50']:.1f} p99 {1000 * late['p99']:.1f} ms"
    return figures if run.validity.valid else f"INVALID ({'; '.join(run.validity.reasons)}), {figures}"
