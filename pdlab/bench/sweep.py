"""Drive a sweep against a running deployment: warm up, measure every level and search, store the results.

One level is kept at a time, so that an interruption loses only the level that was running. The
folder's manifest is written before the first request: a later start then has a record of the used prompts.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from pdlab.bench import gates, levels, slo_search
from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ReplayedPlan
from pdlab.bench.fill import fill
from pdlab.bench.measure import Driver, describe
from pdlab.bench.options import SweepFlags
from pdlab.bench.progress import Progress
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.bench.target import Target, normal_url, resolve_target
from pdlab.bench.traffic import keep_plan, replayed
from pdlab.core.arguments import MAX_REQUESTS
from pdlab.core.commands import VIZ
from pdlab.core.errors import DeploymentDied, StoreError, UsageError
from pdlab.core.findings import Finding, found
from pdlab.core.model_names import same_model
from pdlab.core.replayed import COMPILED
from pdlab.core.schema import Frozen, incidental
from pdlab.core.text import counted, duration
from pdlab.core.workload import Closed, Level, Load, Open, Ramp, RunKey, Workload
from pdlab.deploy import canary
from pdlab.deploy.endpoint import key_of, measured, next_attempt
from pdlab.results.level_data import LevelData
from pdlab.results.provenance import client_versions, git_state, now
from pdlab.results.schema import Manifest, RequestRecord, Run, SloSearch, Tuning
from pdlab.results.soak import soak
from pdlab.results.store import MANIFEST, Store

MOST_CLIENTS = 8
# Gates that a dead replica fails, beside others.
SIGNS_OF_DEATH = {"failed_requests", "prefill_calls", "restarts"}
FIRST_ROUND_S = 30.0  # of an open loop that is held for long


class SweepOptions(SweepFlags):
    """All settings of a sweep.

    ``per_gpu``: closed loops of that many requests per GPU of the deployment. ``only_repeat``: measure that repeat
    only. ``shuffle``: a seed that orders the levels at random. ``tuning``: the search that the deployment's settings
    come from, for the manifest. ``command`` is kept in the manifest as the exact command line.
    """

    loads: tuple[Load, ...] = ()
    per_gpu: tuple[float, ...] = ()
    searches: tuple[SloSearchOptions, ...] = ()
    workload: Workload = Workload()
    only_repeat: int | None = None
    shuffle: str | None = None
    tuning: Tuning | None = None
    command: str = "pdlab.bench.sweep.run_sweep(...)"


class SweepResult(Frozen):
    """``runs`` are the sweep's levels in its order, the ones that --resume skipped included, then the
    searches' levels by rate. ``loads``: those that were requested."""

    folder: Path
    runs: tuple[Run, ...]
    searches: tuple[SloSearch, ...] = ()
    loads: tuple[Load, ...]
    measured: int

    @property
    def valid(self) -> bool:
        """See `all_answered`."""
        return all_answered(self.runs, self.searches, self.loads)


def all_answered(runs: Iterable[Run], searches: Sequence[SloSearch], loads: Iterable[Load]) -> bool:
    """Every level of the requested ``loads`` is valid, and every search has its result. (Other levels of a search may
    fail, because they drive the server beyond its capacity.)
    """
    searched = {("rate", point.rate_rps, search.repeat) for search in searches for point in search.points}
    requested = {(load.kind, load.value) for load in loads}

    def counts(key: RunKey) -> bool:
        further_look = key.look > 0 or (key.kind, key.value) not in requested
        return not (further_look and (key.kind, key.value, key.repeat) in searched)

    load_runs = [run for run in runs if counts(run.key)]
    return all(run.validity.valid for run in load_runs) and all(search.finished for search in searches)


def run_sweep(options: SweepOptions, progress: Progress | None = None, client: LoadClient | None = None) -> SweepResult:
    """Measure every level of ``options`` that is not finished yet, then every search that is not.

    ``client``: a load generator that is not started yet (None: the sweep makes one).

    Raises UsageError for bad input, an unreachable server, and a server or folder that another sweep uses; StoreError
    when the folder has finished levels (without resume or force), another experiment or damaged requests (with resume),
    or cannot be written; BenchError when the load generator dies, or when the server dies and does not recover within
    ``options.recover_s``. An invalid level is no error: it is stored with its reasons.
    """
    progress = progress or Progress()
    workload = options.workload
    _check(options)  # bad input is refused before the server gets a request
    with measured(normal_url(options.base_url)):
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
        with store.held():
            return _run_held(with_loads(options, target.manifest.gpus), target, store, progress, client)


def _run_held(
    options: SweepOptions, target: Target, store: Store, progress: Progress, client: LoadClient | None
) -> SweepResult:
    """`run_sweep` while it holds the locks of the target and of the folder."""
    workload = options.workload
    earlier = _earlier(store)
    if earlier and options.resume:
        for run in store.runs():
            store.check_records(run)
    attempt = len(earlier.commands) if earlier else 0
    built = build(options, attempt)
    manifest = _start_manifest(target, earlier, options, store)
    todo = _todo(store, built, options)
    to_search = [search for search, repeat in repeated_searches(options) if unfinished(store, search, repeat)]
    _check_burstiness(store, to_search)
    searching = bool(to_search)
    again = options.retry_invalid and bool(_to_retry(store, [level for level in built if level not in todo]))
    if not manifest.gpus:
        progress.note(
            f"note: the number of GPUs of {target.name} is unknown: {VIZ} cannot draw it per node; give --gpus N"
        )
    for each in target.figure_notes:
        progress.note(each.text)
    if earlier is not None and earlier.gpus != manifest.gpus:  # also where nothing is left to measure
        store.write_manifest(earlier.model_copy(update={"gpus": manifest.gpus}))
    done = 0
    if todo or searching or again:
        # What another sweep sent to this start of the deployment is in its prefix cache.
        attempt = next_attempt(target.base_url, levels.prompt_stream(workload, smoke=options.smoke), attempt)
        todo = [level for level in build(options, attempt) if level.key in {planned.key for planned in todo}]
        plan = None
        if (lengths := replayed(workload)) is not None:
            manifest = manifest.model_copy(update={"traffic": keep_plan(store.folder, lengths)})
            path = str(store.folder.resolve() / COMPILED)
            plan = ReplayedPlan(path=path, groups=lengths.groups, endpoint=lengths.endpoint)
        store.write_manifest(manifest)
        with client or LoadClient() as started:
            driver = Driver(
                started,
                target,
                workload,
                progress,
                request_timeout_s=options.request_timeout_s,
                smoke=options.smoke,
                timeline=options.timeline,
                max_processes=options.client_processes or max(1, min(MOST_CLIENTS, (os.cpu_count() or 1) // 2)),
                plan=plan,
                length_setting=_length_setting(options),
            )
            warmup = levels.warmup_requests(target.manifest.deployment)
            progress.extend(warmup + sum(level.num_requests for level in todo), len(todo))
            sweeper = _Sweeper(driver, store, options, progress, attempt)
            try:
                sweeper.run(todo, built, manifest)
                _check_again(target, store, sweeper.measured, progress)
            finally:
                done = len(sweeper.measured)
                progress.close()
    kept = {run.key: run for run in store.runs()}
    runs = [kept[level.key] for level in built]
    slos = [search.slo for search in options.searches]
    repeats = {repeat for _, repeat in repeated_searches(options)}
    found_searches = (s for s in store.searches() if s.slo in slos and s.repeat in repeats)
    searches = tuple(sorted(found_searches, key=lambda search: search.repeat))
    for search in searches:
        rates = {point.rate_rps for point in search.points}
        of_rates = [run for key, run in kept.items() if key.kind == "rate" and key.repeat == search.repeat]
        runs += [run for run in of_rates if run.key.value in rates and run not in runs]
    return SweepResult(folder=store.folder, runs=tuple(runs), searches=searches, loads=options.loads, measured=done)


def _length_setting(options: SweepOptions) -> gates.LengthSetting | None:
    if options.soak_s is not None:
        return "soak_s"
    return None if options.prompts_per_level is None else "prompts_per_level"


def _check_again(target: Target, store: Store, measured: Collection[RunKey], progress: Progress) -> None:
    """The canary's prompts behind the sweep: its result is recorded, and judges the levels that were ``measured``.

    A failed KV transfer may leave an engine answering with the blocks of another prompt, at HTTP 200 and with no
    failed transfer counted (vLLM issue 52234).
    """
    if not target.answers:
        return
    result = canary.ask_again(target.base_url, target.model_id, target.answers, key_of(target.base_url))
    progress.note(f"canary after the sweep: {result.detail}")
    for run in store.runs():
        if run.key in measured:
            judged = run.model_copy(update={"validity": gates.after_canary(run.validity, result)})
            if judged != run:
                store.write_judged(judged)
    manifest = store.read_manifest()
    store.write_manifest(manifest.model_copy(update={"canaries_after": (*manifest.canaries_after, result)}))


def with_loads(options: SweepOptions, gpus: int | None) -> SweepOptions:
    """The options with absolute loads in place of loads per GPU. Raises UsageError if the number of GPUs is unknown, or
    if two loads become the same.
    """
    if not options.per_gpu:
        return options
    if gpus is None:
        raise UsageError("--concurrency-per-gpu: the number of GPUs of what runs there is unknown; give --gpus N")
    loads = levels.per_gpu_loads(options.per_gpu, gpus)
    counts = [load.concurrency for load in loads]
    if gpus > 1 and len(set(counts)) < len(counts):
        raise UsageError(
            f"--concurrency-per-gpu: on {counted(gpus, 'GPU')} two of them come out as one concurrency ({counts})"
        )
    return options.model_copy(update={"loads": options.loads + loads, "per_gpu": ()})


def _check(options: SweepOptions) -> None:
    """Raises UsageError for levels that cannot be measured. Names of loads per GPU are left out if the number of GPUs
    is unknown."""
    if options.gpus is not None:
        build(with_loads(options, options.gpus), attempt=0)
        return
    build(options, attempt=0)
    _levels(with_loads(options, 1), attempt=0)


def build(options: SweepOptions, attempt: int) -> tuple[Level, ...]:
    """The levels of ``options.loads`` in the order in which they are measured. Raises UsageError."""
    all_levels = list(_levels(options, attempt))
    if all_levels:
        levels.check_names(options.loads[:1] if options.smoke else options.loads)
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(all_levels)
    return tuple(all_levels)


def _levels(options: SweepOptions, attempt: int) -> tuple[Level, ...]:
    """`build` in the order of the loads, whatever their names."""
    slo_search.check_apart(options.searches, options.loads)
    if options.force and options.searches:
        raise UsageError(
            "--force replaces finished levels, and --slo goes on from the levels at a rate that the folder has: leave "
            "--force out, or give another --exp-name"
        )
    if not options.loads and (options.searches or options.per_gpu):
        return ()
    all_levels = levels.sweep_levels(
        options.workload,
        options.loads,
        repeats=options.repeats,
        prompts_per_level=options.prompts_per_level,
        smoke=options.smoke,
        attempt=attempt,
        only_repeat=options.only_repeat,
        hold_s=options.hold_s,
    )
    for level in all_levels:
        if level.num_requests > MAX_REQUESTS:
            raise UsageError(
                f"{level.load.kind} {level.load.value:g} held for "
                f"{levels.held_s(options.workload, options.hold_s):g} s is {level.num_requests} "
                f"requests, at most {MAX_REQUESTS} are drawn for a level: hold it less long, or lower the rate"
            )
    return all_levels


def repeated_searches(options: SweepOptions) -> list[tuple[SloSearchOptions, int]]:
    """Each search once per repeat, in the order of measurement."""
    repeats = range(options.repeats) if options.only_repeat is None else (options.only_repeat,)
    return [(search, repeat) for repeat in repeats for search in options.searches]


def _earlier(store: Store) -> Manifest | None:
    if (store.folder / MANIFEST).exists():
        return store.read_manifest()
    if any(store.folder.glob("*.json")):
        raise StoreError(f"{store.folder} holds results without a {MANIFEST}; use another --exp-name or --out")
    return None


def _todo(store: Store, planned: Sequence[Level], options: SweepOptions) -> list[Level]:
    finished = [level for level in planned if store.has(level.key)]
    if not finished or options.force:
        return list(planned)
    if not options.resume:
        names = ", ".join(level.key.stem for level in finished)
        raise StoreError(
            f"{store.folder} already has {names}; use --resume to skip finished levels or "
            f"{'another --exp-name' if options.searches else '--force to measure them again'}"
        )
    kept = {run.key.stem: run for run in store.runs()}
    for level in finished:
        if (change := _changed(kept[level.key.stem], level, options)) is not None:
            raise StoreError(
                f"{store.path(level.key)} was measured with {change.before}, this command has {change.after}; repeat "
                f"the first command line, use {'' if options.searches else '--force, or '}another --exp-name"
            )
    return [level for level in planned if level not in finished]


class _DifferentLevel(NamedTuple):
    """What differs between a kept level and a planned one of the same key, in words."""

    before: str
    after: str


def _changed(run: Run, level: Level, options: SweepOptions) -> _DifferentLevel | None:
    """None if the kept level is the one that is planned."""
    for name in type(level.load).model_fields:
        before, after = getattr(run.load, name), getattr(level.load, name)
        if before != after and name not in incidental(type(level.load)):
            return _DifferentLevel(
                *(f"{name} {f'{each:.15g}' if isinstance(each, float) else each}" for each in (before, after))
            )
    if options.soak_s is not None:
        soak_s = run.soak.requested_s if run.soak is not None else None
        if soak_s == options.soak_s:
            return None
        return _DifferentLevel(
            *("no --soak" if each is None else f"--soak {each / 60:g}" for each in (soak_s, options.soak_s))
        )
    # A rate is held longer where answers turned out to take long.
    timed = options.prompts_per_level is None and isinstance(level.load, Open | Ramp)
    enough = run.num_requests >= level.num_requests if timed else run.num_requests == level.num_requests
    return None if enough else _DifferentLevel(counted(run.num_requests, "request"), str(level.num_requests))


def _check_burstiness(store: Store, searches: Sequence[SloSearchOptions]) -> None:
    """Raises StoreError for a search whose levels would take the names of others in the folder."""
    kept = {run.key.stem: run.load.burstiness for run in store.runs() if isinstance(run.load, Open)}
    kept |= {search.stem: search.burstiness for search in store.searches()}
    for search in searches:
        for stem, burstiness in kept.items():
            if burstiness != search.burstiness:
                raise StoreError(
                    f"{store.folder / stem}.json was measured with burstiness {burstiness:g}, the search for "
                    f"{search.slo.label} has {search.burstiness:g}; use another --exp-name or --out"
                )


def _to_retry(store: Store, planned: Sequence[Level]) -> list[Level]:
    """Levels of ``planned`` that are finished and invalid, and were not measured a second time already."""
    kept = {run.key: run for run in store.runs()}
    measured = [(level, kept[level.key]) for level in planned if level.key in kept]
    return [level for level, run in measured if not run.validity.valid and run.replaces is None]


def same_experiment(earlier: Manifest, current: Manifest, folder: Path) -> None:
    """Raises StoreError when levels of ``current`` do not belong beside those of ``earlier``. An unknown model or
    number of GPUs differs from none."""

    def refuse(changed_key: str, before: object, after: object) -> StoreError:
        return StoreError(
            f"{folder} was measured with {changed_key} {before}, now it is {after}; use another --exp-name or --out"
        )

    if earlier.workload != current.workload:
        old = earlier.workload.model_dump() if earlier.workload else {}
        new = current.workload.model_dump() if current.workload else {}
        changed_key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        if earlier.workload and current.workload and earlier.workload.lengths != current.workload.lengths:
            raise refuse("workload", earlier.workload.label, current.workload.label)
        raise refuse(f"workload {changed_key}", old.get(changed_key), new.get(changed_key))
    before, after = earlier.deployment, current.deployment
    if (before and before.fingerprint) != (after and after.fingerprint):
        old_name = f"{before.label} ({before.fingerprint})" if before else "unknown"
        new_name = f"{after.label} ({after.fingerprint})" if after else "unknown"
        raise refuse("deployment", old_name, new_name)
    if earlier.label != current.label:
        raise refuse("label", earlier.label, current.label)
    if earlier.gpus and current.gpus and earlier.gpus != current.gpus:
        raise refuse("GPUs", earlier.gpus, current.gpus)
    for name in ("model", "tokenizer"):
        known, requested = getattr(earlier, name), getattr(current, name)
        if known is not None and requested is not None and not same_model(known, requested):
            raise refuse(name, known, requested)


def _start_manifest(target: Target, earlier: Manifest | None, options: SweepOptions, store: Store) -> Manifest:
    """The manifest of this start. Levels that the folder has keep their model, known or not. A start that measured
    nothing leaves its command line only.

    Raises StoreError if the folder has measurements of another experiment.
    """
    commit, dirty = git_state()
    command = options.command
    manifest = target.manifest.model_copy(
        update={
            "versions": {**target.manifest.versions, **client_versions()},
            "git_commit": commit or target.manifest.git_commit,
            "git_dirty": target.manifest.git_dirty if dirty is None else dirty,
            "commands": (*target.manifest.commands, command),
            "tuning": options.tuning,
            "started_at": now(),
            "finished_at": None,
        }
    )
    if earlier is None:
        return manifest
    launches = tuple(line for line in target.manifest.commands if line not in earlier.commands)
    manifest = manifest.model_copy(update={"commands": (*earlier.commands, *launches, command)})
    if not store.has_measurements:
        return manifest
    same_experiment(earlier, manifest, store.folder)
    return manifest.model_copy(
        update={
            "started_at": earlier.started_at,
            "canaries_after": earlier.canaries_after,
            "gpus": manifest.gpus or earlier.gpus,
            "model": earlier.model,
            "tokenizer": earlier.tokenizer,
        }
    )


class Measure(Protocol):
    """Measures one level; ``once``: not again if the load generator was the bottleneck."""

    def __call__(self, level: Level, *, once: bool) -> tuple[Run, Sequence[RequestRecord]]: ...


def _not_all_late(records: Sequence[RequestRecord]) -> bool:
    """False if every failed request timed out, as under a load above the capacity."""
    failed = Counter(record.timed_out for record in records if not record.ok)
    return not failed or failed[False] > 0


class _Sweeper:
    """One sweep being measured."""

    def __init__(self, driver: Driver, store: Store, options: SweepOptions, progress: Progress, attempt: int) -> None:
        self._driver = driver
        self._store = store
        self._options = options
        self._progress = progress
        self._attempt = attempt
        self.measured: set[RunKey] = set()

    def run(self, todo: Sequence[Level], planned: Sequence[Level], manifest: Manifest) -> None:
        """Measure ``todo``, then the levels of ``planned`` that are to be retried, then the searches."""
        self._driver.warm_up(self._attempt)
        options = self._options
        if not options.smoke:
            words = fill(
                self._driver, options.workload, options.fill_cache, self._attempt, self._progress.note,
                soak=options.soak_s is not None,
            )  # fmt: skip
            self._progress.note(f"KV pools: {words}")
        for measurement in self._measurements(todo, planned):
            measurement()
            self._store.write_manifest(manifest.model_copy(update={"finished_at": now()}))

    def _measurements(self, todo: Sequence[Level], planned: Sequence[Level]) -> Iterator[Callable[[], None]]:
        yield from (partial(self._level, level) for level in todo)
        if self._options.retry_invalid:  # after all others: what disturbed a level may have passed by then
            yield from (partial(self._retry, level) for level in _to_retry(self._store, planned))
        yield from (partial(self._search, *each) for each in repeated_searches(self._options))

    def _level(self, level: Level, *, longer: int = 1) -> None:
        level = self._held(level)
        level = level.model_copy(update={"num_requests": level.num_requests * longer})
        run, records = self._soaked(level, self._outliving)
        self._stored(self._store.write(run, records, self._driver.timelines, force=self._options.force))

    def _soaked(self, level: Level, measure: Measure) -> tuple[Run, Sequence[RequestRecord]]:
        """What ``measure`` makes of the level; of a soak (``options.soak_s``) held that long, and judged over time."""
        soak_s = self._options.soak_s
        if soak_s is None:
            return measure(level, once=False)
        run, records = measure(self._lasting(level, soak_s), once=True)
        return run.model_copy(update={"soak": soak(LevelData.of(records), run.load, soak_s)}), records

    def _stored(self, run: Run) -> None:
        self.measured.add(run.key)
        self._progress.level_done(describe(run))

    def _outliving(self, level: Level, *, once: bool) -> tuple[Run, Sequence[RequestRecord]]:
        """Measure a level. If a replica dies during it, set the result aside, wait until the deployment is whole, and
        measure again. Raises DeploymentDied if the deployment does not recover, or if a replica dies again."""
        limit_s = self._options.recover_s
        if not limit_s:
            return self._driver.measure(level, once=once)
        run, records, died = self._watched(level, once=once)
        if died is None:
            assert run is not None
            return run, records
        judged, records = (run, records) if run else self._driver.died_level(level, died)
        judged, why = judged.model_copy(update={"validity": judged.validity.failing(died)}), died.what
        replaced = self._store.set_aside(judged, records, self._driver.timelines)
        self._progress.level_done(f"SPOILED ({why}), kept in {replaced.file}")
        began = time.monotonic()
        self._driver.recover(why, limit_s, self._attempt)
        seed = levels.derive_seed(self._options.workload, "recovered", level.seed)
        self._progress.extend(level.num_requests)
        run, records = self._driver.measure(level.model_copy(update={"seed": seed}), once=once)
        note = found("measured_after_recovery", after_s=time.monotonic() - began)
        validity = run.validity.model_copy(update={"notes": (*run.validity.notes, note)})
        return run.model_copy(update={"validity": validity, "replaces": replaced}), records

    def _watched(self, level: Level, *, once: bool) -> tuple[Run | None, Sequence[RequestRecord], Finding | None]:
        """A measurement (None: it did not end), and the finding on a replica that died meanwhile (None: none did)."""
        run: Run | None = None
        records: Sequence[RequestRecord] = ()
        try:
            run, records = self._driver.measure(level, once=once)
            if SIGNS_OF_DEATH & set(run.validity.failed_gates) and _not_all_late(records):
                self._driver.require_alive()
        except DeploymentDied as died:
            return run, records, found("replica_died", why=died.what)
        replaced = [finding for finding in run.validity.findings if finding.code == "replica_replaced"]
        return run, records, replaced[0] if replaced else None

    def _lasting(self, level: Level, soak_s: float) -> Level:
        """The level of a soak. A first round, which is not kept, shows how many processes the load generator needs,
        because a soak is not measured again, and how many requests keep a closed loop busy for that long."""
        seed = levels.derive_seed(self._options.workload, "first round", level.seed)
        closed = isinstance(level.load, Closed)
        first_s = min(FIRST_ROUND_S, soak_s / 10)
        requests = level.num_requests
        if isinstance(level.load, Open | Ramp):
            within = levels.requests_within(level.load, self._options.workload, first_s)
            requests = max(levels.MIN_PROMPTS, within)
        self._progress.extend(requests)
        soak_text = f" and how many make {duration(soak_s)}" if closed else ""
        self._progress.note(
            f"a first round of {counted(requests, 'request')} shows how many processes the load needs{soak_text}"
        )
        first, _ = self._driver.measure(level.model_copy(update={"seed": seed, "num_requests": requests}))
        self._progress.level_done(describe(first))
        if not closed:
            return level
        pace_rps = (first.steady or first.whole).requests_per_s
        count = min(MAX_REQUESTS, max(level.num_requests, math.ceil(soak_s * pace_rps)))
        self._progress.extend(count - level.num_requests, levels=0)
        return level.model_copy(update={"num_requests": count})

    def _held(self, level: Level) -> Level:
        """The level, longer where the known E2EL requires it."""
        options = self._options
        timed = isinstance(level.load, Open | Ramp)
        if not timed or options.smoke or options.prompts_per_level is not None:
            return level
        known = [run.whole.e2el.percentiles_s["p50"] for run in self._store.runs() if run.whole.e2el is not None]
        e2el_s = min([*known, *filter(None, [self._driver.warm_e2el_s])], default=0.0)
        longer = levels.num_requests(level.load, options.workload, hold_s=options.hold_s, e2el_s=e2el_s)
        more = longer - level.num_requests
        if more <= 0:
            return level
        self._progress.extend(more)
        return level.model_copy(update={"num_requests": level.num_requests + more})

    def _retry(self, level: Level) -> None:
        """Measure an invalid level again, with new prompts, and set its first result aside."""
        level = self._held(level)
        self._progress.extend(level.num_requests)
        self._progress.note(f"{level.key.stem}: was not valid, is measured again")
        seed = levels.derive_seed(self._options.workload, "retry", level.seed)
        run, records = self._soaked(level.model_copy(update={"seed": seed}), self._driver.measure)
        self._stored(self._store.replace(run, records, self._driver.timelines))

    def _search(self, search: SloSearchOptions, repeat: int) -> None:
        """Measure rates until the search has its answer; every rate is a level like any other, kept as such."""
        guess = _guess(self._store)
        known: Known = {}
        while True:
            samples = samples_of_rates(self._store, search, repeat, known)
            label = self._store.read_manifest().label
            answer, step = slo_search.evaluate(
                samples, search, label=label, repeat=repeat, guess_rps=guess, mean_rate=self._options.workload.mean_rate
            )
            if answer.points:
                self._store.write_search(answer)
            if step is None:
                self._progress.note(f"{answer.title}: {answer.detail}")
                return
            load = Open(rate_rps=step.rate_rps, burstiness=search.burstiness)
            key = RunKey(kind=load.kind, value=load.value, repeat=repeat, look=step.look)
            seed = levels.level_seed(self._options.workload, key, attempt=self._attempt)
            first = Level(load=load, repeat=repeat, look=step.look, num_requests=step.requests, seed=seed)
            self._progress.extend(step.requests * step.longer)
            self._level(first, longer=step.longer)


Known = dict[tuple[RunKey, str | None], slo_search.LevelSample]


def samples_of_rates(
    store: Store, search: SloSearchOptions, repeat: int, known: Known | None = None
) -> tuple[slo_search.LevelSample, ...]:
    """Samples for an SLO from all open-loop levels of that repeat and burstiness in ``store``. ``known`` keeps the
    sample of each level from one call to the next.
    """
    known = {} if known is None else known
    samples = []
    for run in store.runs():
        if isinstance(run.load, Open) and run.load.burstiness == search.burstiness and run.key.repeat == repeat:
            key = (run.key, run.raw_sha256)
            if key not in known:
                known[key] = slo_search.sample(run, store.requests(run.key), search.slo)
            samples.append(known[key])
    return tuple(samples)


def unfinished(store: Store, search: SloSearchOptions, repeat: int) -> bool:
    """Whether a search has rates left to measure."""
    samples = samples_of_rates(store, search, repeat)
    return slo_search.evaluate(samples, search, label="", repeat=repeat).step is not None


def _guess(store: Store) -> float | None:
    """Where a search begins: half of the highest rate that closed-loop levels reached."""
    reached = [run.whole.requests_per_s for run in store.runs() if run.key.kind == "concurrency"]
    return max(reached) / 2 if any(reached) else None
