"""Drive a sweep against a running deployment: warm up, measure every level, judge it, keep it.

One level is kept at a time, so that an interruption loses only the level that was running. The
folder's manifest is written before the first request: a later start knows that prompts were used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from pdlab import levels, metrics
from pdlab.errors import BenchError, ClusterError, StoreError
from pdlab.levels import ClientAnswer, ClientLevel
from pdlab.load_client import LoadClient
from pdlab.progress import Progress
from pdlab.provenance import client_versions, git_state, now
from pdlab.results import MANIFEST, Manifest, NixlCounters, Run, Store
from pdlab.running import scrape_counters
from pdlab.spec import Disaggregated, Frozen
from pdlab.target import Target, require_answering, resolve_target
from pdlab.workload import Closed, Level, Load, Ramp, Sweep, Workload

BASE_URL = "http://127.0.0.1:8000"
WARMUP_CONCURRENCY = 8
# Ray's metrics agent exports every 10 s by default.
SETTLE_TIMEOUT_S = 25.0
SETTLE_POLL_S = 1.0


class SweepOptions(Frozen):
    """Everything that a sweep is told. ``name`` None: the running deployment's label (with the mode
    behind it unless mixed); ``command`` is kept in the manifest as the exact command line."""

    loads: tuple[Load, ...] = Field(min_length=1)
    workload: Workload = Workload()
    base_url: str = BASE_URL
    name: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    gpus: int | None = None
    repeats: int = 1
    prompts_per_level: int | None = None
    smoke: bool = False
    resume: bool = False
    force: bool = False
    out: Path = Path("bm_results")
    request_timeout_s: float = Field(default=600.0, gt=0)
    command: str = "pdlab.sweep.run_sweep(...)"


class SweepResult(Frozen):
    """``runs`` are the sweep's levels in its order, the ones that --resume skipped included."""

    folder: Path
    runs: tuple[Run, ...]
    measured: int

    @property
    def valid(self) -> bool:
        return all(run.validity.valid for run in self.runs)


def run_sweep(options: SweepOptions, progress: Progress | None = None) -> SweepResult:
    """Measure every level of ``options`` that is not finished yet.

    Raises UsageError for bad input and an unreachable server, StoreError when the folder holds
    finished levels (without resume or force) or another experiment, BenchError when the server or
    the load generator dies. An invalid level is no error: it is kept with its reasons.
    """
    progress = progress or Progress()
    workload = options.workload
    _build(options, attempt=0)  # bad input is said before anything is asked of the server
    target = resolve_target(
        options.base_url,
        workload=workload,
        name=options.name,
        model=options.model,
        tokenizer=options.tokenizer,
        gpus=options.gpus,
        smoke=options.smoke,
    )
    store = Store(options.out / target.name)
    earlier = _earlier(store)
    attempt = len(earlier.commands) if earlier else 0
    sweep = _build(options, attempt)
    manifest = _start_manifest(target, earlier, options.command, store.folder)
    todo = _todo(store, sweep.levels, options)
    for note in target.notes:
        progress.note(note)
    if todo:
        store.write_manifest(manifest)
        with LoadClient() as client:
            try:
                _Driver(client, target, store, options, progress).run(todo, manifest, attempt)
            finally:
                progress.close()
    kept = {run.key: run for run in store.runs()}
    runs = tuple(kept[level.key] for level in sweep.levels)
    return SweepResult(folder=store.folder, runs=runs, measured=len(todo))


def _build(options: SweepOptions, attempt: int) -> Sweep:
    return levels.build_sweep(
        options.workload,
        options.loads,
        repeats=options.repeats,
        prompts_per_level=options.prompts_per_level,
        smoke=options.smoke,
        attempt=attempt,
    )


def _earlier(store: Store) -> Manifest | None:
    if (store.folder / MANIFEST).exists():
        return store.read_manifest()
    if any(store.folder.glob("*.json")):
        raise StoreError(f"{store.folder} holds results without a {MANIFEST}; use another --exp-name or --out")
    return None


def _todo(store: Store, wanted: Sequence[Level], options: SweepOptions) -> list[Level]:
    finished = [level for level in wanted if store.has(level.key)]
    if not finished or options.force:
        return list(wanted)
    if not options.resume:
        names = ", ".join(level.key.stem for level in finished)
        raise StoreError(
            f"{store.folder} already has {names}; use --resume to skip finished levels or --force to measure them again"
        )
    kept = {run.key: run for run in store.runs()}
    for level in finished:
        run = kept[level.key]
        if run.num_requests != level.num_requests or run.load != level.load:
            raise StoreError(
                f"{store.path(level.key)} was measured with {run.num_requests} requests, now {level.num_requests} are "
                "asked; repeat the first command line, use --force, or another --exp-name"
            )
    return [level for level in wanted if level not in finished]


def same_experiment(earlier: Manifest, current: Manifest, folder: Path) -> None:
    """Raises StoreError when levels of ``current`` do not belong beside those of ``earlier``."""

    def refuse(what: str, before: object, after: object) -> StoreError:
        return StoreError(
            f"{folder} was measured with {what} {before}, now it is {after}; use another --exp-name or --out"
        )

    if earlier.workload != current.workload:
        old = earlier.workload.model_dump() if earlier.workload else {}
        new = current.workload.model_dump() if current.workload else {}
        what = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        raise refuse(f"workload {what}", old.get(what), new.get(what))
    before, after = earlier.deployment, current.deployment
    if (before and before.fingerprint) != (after and after.fingerprint):
        old_name = f"{before.label} ({before.fingerprint})" if before else "unknown"
        new_name = f"{after.label} ({after.fingerprint})" if after else "unknown"
        raise refuse("deployment", old_name, new_name)
    if earlier.label != current.label:
        raise refuse("label", earlier.label, current.label)
    if earlier.gpus != current.gpus:
        raise refuse("GPUs", earlier.gpus, current.gpus)


def _start_manifest(target: Target, earlier: Manifest | None, command: str, folder: Path) -> Manifest:
    commit, dirty = git_state()
    manifest = target.manifest.model_copy(
        update={
            "versions": {**target.manifest.versions, **client_versions()},
            "git_commit": commit or target.manifest.git_commit,
            "git_dirty": target.manifest.git_dirty if dirty is None else dirty,
            "commands": (*target.manifest.commands, command),
            "started_at": now(),
            "finished_at": None,
        }
    )
    if earlier is None:
        return manifest
    same_experiment(earlier, manifest, folder)
    launches = tuple(line for line in target.manifest.commands if line not in earlier.commands)
    return manifest.model_copy(
        update={"commands": (*earlier.commands, *launches, command), "started_at": earlier.started_at}
    )


class _Driver:
    """One sweep being measured."""

    def __init__(
        self, client: LoadClient, target: Target, store: Store, options: SweepOptions, progress: Progress
    ) -> None:
        self._client = client
        self._target = target
        self._store = store
        self._options = options
        self._progress = progress
        deployment = target.manifest.deployment
        self._moves_kv = deployment is not None and isinstance(deployment.topology, Disaggregated)
        self._counters: NixlCounters | None = None
        self._counters_error: str | None = None

    def run(self, todo: Sequence[Level], manifest: Manifest, attempt: int) -> None:
        warmup = self._warmup(attempt)
        self._progress.begin(warmup.num_requests + sum(level.num_requests for level in todo), len(todo))
        self._progress.level("warm-up, after the load generator's start", warmup.num_requests, counts=False)
        self._read_counters()
        answer = self._client.run(warmup, self._progress.update)
        failed = [record.error for record in answer.records if not record.ok]
        if len(failed) == warmup.num_requests:
            require_answering(self._target.base_url)
            raise BenchError(f"no warm-up request was answered (first: {failed[0]})")
        self._read_counters(moved=len(answer.records) - len(failed))
        self._progress.level_done(f"{len(failed)} of {len(answer.records)} failed" if failed else "done")
        for level in todo:
            self._level(level)
            manifest = manifest.model_copy(update={"finished_at": now()})
            self._store.write_manifest(manifest)

    def _warmup(self, attempt: int) -> ClientLevel:
        workload, target = self._options.workload, self._target
        requests = levels.warmup_requests(target.manifest.deployment)
        return ClientLevel(
            name="warm-up",
            base_url=target.base_url,
            model=target.model_id,
            tokenizer=target.tokenizer,
            input_tokens=workload.sent_input_tokens,
            output_tokens=workload.sent_output_tokens,
            num_requests=requests,
            seed=levels.warmup_seed(workload, smoke=self._options.smoke, attempt=attempt),
            concurrency=min(requests, WARMUP_CONCURRENCY),
            request_timeout_s=self._options.request_timeout_s,
        )

    def _level(self, level: Level) -> None:
        target, workload = self._target, self._options.workload
        self._progress.level(
            title(level.load) + (f", repeat {level.repeat}" if level.repeat else ""), level.num_requests
        )
        asked = levels.client_level(
            level,
            workload,
            base_url=target.base_url,
            model=target.model_id,
            tokenizer=target.tokenizer,
            request_timeout_s=self._options.request_timeout_s,
        )
        before = self._counters
        answer = self._client.run(asked, self._progress.update)
        answered = sum(record.ok for record in answer.records)
        if answered < level.num_requests:
            require_answering(target.base_url)
        self._read_counters(moved=answered)
        run = self._store.write(self._judge(level, answer, before), answer.records, force=self._options.force)
        self._progress.level_done(describe(run))

    def _judge(self, level: Level, answer: ClientAnswer, before: NixlCounters | None) -> Run:
        workload = self._options.workload
        outcome = metrics.Outcome(
            records=answer.records,
            workload=workload,
            num_requests=level.num_requests,
            kv_expected=self._moves_kv and bool(self._target.metrics_urls),
            nixl_before=before,
            nixl_after=self._counters,
            counters_error=self._counters_error,
            client_cpu_share=answer.cpu_share,
            client_loop_lag_s=answer.loop_lag_s,
        )
        completed = sum(record.ok for record in answer.records)
        return Run(
            origin="measured",
            label=self._target.manifest.label,
            key=level.key,
            workload=workload,
            load=level.load,
            num_requests=level.num_requests,
            seed=level.seed,
            completed=completed,
            failed=level.num_requests - completed,
            whole=metrics.whole(answer.records),
            steady=metrics.steady(answer.records, level.load),
            validity=metrics.validate_level(outcome),
            nixl_before=before,
            nixl_after=self._counters,
            client_cpu_share=answer.cpu_share,
            started_at=answer.started_at,
            finished_at=answer.finished_at,
        )

    def _read_counters(self, moved: int = 0) -> None:
        if not self._target.metrics_urls or not self._moves_kv:
            return
        before = self._counters.transfers or 0.0 if self._counters else 0.0
        try:
            self._counters = settled(
                lambda: scrape_counters(self._target.metrics_urls, self._target.replicas),
                transfers=before + moved if moved else 0.0,
            )
            self._counters_error = None
        except ClusterError as error:
            self._counters_error = str(error)


def settled(
    scrape: Callable[[], NixlCounters],
    transfers: float,
    timeout_s: float = SETTLE_TIMEOUT_S,
    poll_s: float = SETTLE_POLL_S,
) -> NixlCounters:
    """Poll counters, which are exported late, until at least ``transfers`` are counted and two polls
    agree; at ``timeout_s`` whatever they are then."""
    deadline = time.monotonic() + timeout_s
    last = scrape()
    while transfers and time.monotonic() < deadline:
        time.sleep(poll_s)
        current = scrape()
        if current == last and (current.transfers or 0.0) >= transfers:
            return current
        last = current
    return last


def title(load: Load) -> str:
    """A load in words."""
    if isinstance(load, Closed):
        return f"concurrency {load.concurrency}"
    if isinstance(load, Ramp):
        return f"{load.start_rps:g} to {load.end_rps:g} requests/s"
    return f"{load.rate_rps:g} requests/s"


def describe(run: Run) -> str:
    """One line on a finished level."""
    figures = f"{run.whole.output_tokens_per_s:.0f} output tokens/s"
    if run.whole.ttft:
        figures += f", TTFT p50 {1000 * run.whole.ttft.p50_s:.0f} ms"
    if run.whole.tpot:
        figures += f", TPOT p50 {1000 * run.whole.tpot.p50_s:.1f} ms"
    return figures if run.validity.valid else f"INVALID ({'; '.join(run.validity.reasons)}), {figures}"
