"""Results: ``RequestRecord``, ``Run``, ``Manifest``, ``Experiment``. `pdlab.results.store` keeps them on disk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, model_validator

from pdlab.core.bounds import Metric
from pdlab.core.deployment import Deployment
from pdlab.core.findings import Finding
from pdlab.core.nodes import ClusterView, Placement
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.schema import Frozen
from pdlab.core.workload import Load, RunKey, Slo, Workload
from pdlab.results.kept import Row
from pdlab.traffic.requests import TrafficHead

SLO_PREFIX = "slo-"
PERCENTILES = (50, 90, 95, 99)


Origin = Literal["measured", "simulated", "imported"]


class ReplayedRequest(Frozen):
    """Which request of a compiled workload a record is of: its ``id`` there, its session, the number of its ``turn``
    (1: it has no parent), and all that it had to wait for: its ``parent`` and ``waits``.

    ``sent`` False: it was not, for what it waits for failed. ``cached_tokens``: of its prompt, as the server counts
    them in its usage (None: it does not, which is vLLM's default).
    ``foreseen_tokens``: the same by vLLM's rules (`pdlab.bench.forecast`), where they can be followed.
    ``foreseen_bounds``: the least and the most, where the rules give no more.
    ``replica``: the one that answered, ``prefill_replica``: the one that prefilled for it, as their timelines tell.
    """

    id: str
    session: str
    turn: int = Field(default=1, ge=1)
    parent: str | None = None
    waits: tuple[str, ...] = ()
    sent: bool = True
    cached_tokens: int | None = None
    foreseen_tokens: int | None = None
    foreseen_bounds: tuple[int, int] | None = None
    replica: str | None = None
    prefill_replica: str | None = None

    @property
    def hit_tokens(self) -> int | None:
        """Tokens of its prompt that came from a cache: as the server counts them, else as foreseen."""
        return self.foreseen_tokens if self.cached_tokens is None else self.cached_tokens

    @property
    def after(self) -> tuple[str, ...]:
        """Ids of all that it waits for."""
        return (*((self.parent,) if self.parent is not None else ()), *self.waits)


class RequestRecord(Row):
    """One request, times in seconds since the level began; None where it did not get that far.

    ``itl_s`` are the gaps between received chunks. ``lateness_s`` is how long after it was due the request was sent
    (open loop: by the schedule, or by the end of what it waits for; closed loop: when an answer had left its place
    free); None where that is not known. ``asked`` are the input and output tokens that it was to have where lengths
    vary; None: those of the workload.
    ``timed_out``: it had no complete answer within the client's limit. ``replayed``: of a compiled workload.
    TTFT, TPOT and E2EL are defined here once; they begin when the request is sent.
    """

    arrival_s: float
    first_token_s: float | None = None
    finish_s: float | None = None
    input_tokens: int
    output_tokens: int
    itl_s: tuple[float, ...] = ()
    error: str | None = None
    lateness_s: float | None = None
    asked: tuple[int, int] | None = None
    timed_out: bool = False
    replayed: ReplayedRequest | None = None

    @property
    def due_s(self) -> float | None:
        """When it was to be sent, where that is known."""
        return None if self.lateness_s is None else self.arrival_s - self.lateness_s

    @property
    def ok(self) -> bool:
        return self.error is None and self.finish_s is not None and self.first_token_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: first_token - arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float | None:
        """End-to-end latency: finish - arrival."""
        return None if self.finish_s is None else self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2EL - TTFT) / (n - 1); None for n < 2."""
        ttft_s, e2el_s = self.ttft_s, self.e2el_s
        if ttft_s is None or e2el_s is None or self.output_tokens < 2:
            return None
        return (e2el_s - ttft_s) / (self.output_tokens - 1)

    def shifted(self, by_s: float) -> RequestRecord:
        """The same request on a clock that began ``by_s`` earlier."""
        moved = {
            name: round(value + by_s, 6)
            for name in ("arrival_s", "first_token_s", "finish_s")
            if (value := getattr(self, name)) is not None
        }
        return self.model_copy(update=moved)


class Distribution(Frozen):
    """Summary of one latency in seconds; ``percentiles_s`` is keyed ``p50``, ``p90``, ...

    An imported file may lack the mean (None) or any percentile. What pdlab measured has all of `PERCENTILES`.
    """

    mean_s: float | None
    percentiles_s: dict[Annotated[str, Field(pattern=r"^p\d+(\.\d+)?$")], float]

    @property
    def p50_s(self) -> float | None:
        return self.percentiles_s.get("p50")

    @property
    def statistics_s(self) -> dict[str, float]:
        """``mean``, unless it is unknown, and all percentiles."""
        return {**({} if self.mean_s is None else {"mean": self.mean_s}), **self.percentiles_s}


class Summary(Frozen):
    """Figures of one window of a run. None: not known (imported runs) or not defined (TPOT of one token).

    Rates are per second over ``duration_s``, whole deployment, not normalised.
    """

    duration_s: float
    completed: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Distribution | None = None
    tpot: Distribution | None = None
    itl: Distribution | None = None
    e2el: Distribution | None = None

    @property
    def total_tokens_per_s(self) -> float:
        return self.input_tokens_per_s + self.output_tokens_per_s

    @property
    def latencies(self) -> dict[Metric, Distribution]:
        """The known latencies by metric."""
        every: dict[Metric, Distribution | None] = {
            "ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el
        }  # fmt: skip
        return {metric: latency for metric, latency in every.items() if latency is not None}


class Validity(Frozen):
    """How a level failed its gates (docs/methodology.md): ``findings``, none where it is valid.

    ``unchecked``: the gates that could not be judged for want of data, and why: such a level is valid as far as is
    known. ``notes`` belong to the figures and do not invalidate them. ``reasons``, the sentences of the
    findings, and ``failed_gates``, their gates, stand in every stored level for those who read it without pdlab.
    Earlier versions stored nothing else: their sentences are read as findings that are not classified.
    """

    findings: tuple[Finding, ...] = ()
    unchecked: dict[str, Finding] = Field(default_factory=dict)
    notes: tuple[Finding, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(finding.text for finding in self.findings if finding.text)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def failed_gates(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(finding.gate for finding in self.findings if finding.gate))

    @property
    def valid(self) -> bool:
        return not self.findings

    def failing(self, *findings: Finding) -> Validity:
        """The same with these findings too, each once."""
        every = list(self.findings)
        every += [new for number, new in enumerate(findings) if new not in self.findings + findings[:number]]
        return self.model_copy(update={"findings": tuple(every)})

    @model_validator(mode="before")
    @classmethod
    def _without_sentences(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("reasons") and not data.get("findings"):
            raise ValueError("reasons without findings: measure again, or convert with benchmarks/convert_results.py")
        return {name: value for name, value in data.items() if name not in ("reasons", "failed_gates")}


class NixlCounters(Frozen):
    """vLLM's NIXL counters summed over the decode engines (None: not exported yet).

    ``bytes_transferred`` counts KV bytes pulled, ``transfers`` finished pulls. ``guard_*`` are the KV guard's: receives
    that it watched, prompts that decode computed instead, reads that it gave up at the deadline, requests that it
    failed, prompts that decode computed because a read had failed, and connections to prefill that were made anew
    after a failed read (None: no guard).
    """

    bytes_transferred: float | None = None
    transfers: float | None = None
    failed_transfers: float | None = None
    failed_notifications: float | None = None
    kv_expired_requests: float | None = None
    guard_receives: float | None = None
    guard_recomputed: float | None = None
    guard_deadlines: float | None = None
    guard_errors: float | None = None
    guard_failed_reads: float | None = None
    guard_handshakes_renewed: float | None = None


class EngineCounters(Frozen):
    """vLLM's own counters of one pool, summed over its engines, since they started (None: not exported).

    ``prefix_cache_*`` in tokens, of the engine's own cache; ``external_cache_*`` of KV cache that came
    through a connector. ``queue_s``, ``prefill_s``, ``decode_s``, ``ttft_s`` and ``e2e_s`` are sums of
    the engine's histograms over requests, ``*_count`` the number of requests in each, so that means of a
    level are differences divided. ``kv_transfer_s`` is the sum of NIXL transfer times, of ``kv_transfers``.
    ``prefill_calls``: requests whose prefill decode asked for; of those ``prefill_retries`` asked another replica,
    ``prefill_local`` had the prompt computed on decode, ``prefill_failures`` were answered with an error.
    ``prefill_timeouts``: calls that got no answer in time.
    ``modelled_*`` are of simulated engines alone: sums, over requests that said when they were sent, of their times by
    the model, and by how much events came after the engine had gone on beyond their moment.

    Where the engines' metrics go through Ray (as they do under Ray Serve LLM 2.60) sums are unknown, and ``buckets``
    has what is known: of ttft, queue, prefill and kv_transfer, the number of observations up to each upper
    end in seconds, as the exporter writes it.
    """

    requests: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    external_cache_queries: float | None = None
    external_cache_hits: float | None = None
    preemptions: float | None = None
    ttft_s: float | None = None
    ttft_count: float | None = None
    queue_s: float | None = None
    queue_count: float | None = None
    prefill_s: float | None = None
    prefill_count: float | None = None
    decode_s: float | None = None
    decode_count: float | None = None
    e2e_s: float | None = None
    e2e_count: float | None = None
    kv_transfer_s: float | None = None
    kv_transfers: float | None = None
    prefill_calls: float | None = None
    prefill_timeouts: float | None = None
    prefill_retries: float | None = None
    prefill_local: float | None = None
    prefill_failures: float | None = None
    modelled_requests: float | None = None
    modelled_ttft_s: float | None = None
    modelled_decode_s: float | None = None
    modelled_late_s: float | None = None
    buckets: dict[str, dict[str, float]] = Field(default_factory=dict)


class Trend(Frozen):
    """How much a level drifted inside its steady window, by lines fitted over ``slices`` equal slices of it
    (rule in docs/methodology.md).

    ``throughput_change``: of output tokens/s from the window's begin to its end, over their mean;
    ``in_flight_growth``: of requests in flight, in requests, beside the ``arrivals`` in the window and
    ``in_flight_mean``. ``*_t`` is the fitted slope over its standard error. ``in_flight_by_rate``: of an open loop,
    arrivals/s in the window times the mean time in the system, which is the mean number in flight where nothing
    drifts (J. D. C. Little, A Proof for the Queuing Formula L = lambda W, Operations Research 9, 1961), within
    ``in_flight_error``, the standard deviation of what the window's two edges cut.
    """

    slices: int
    throughput_change: float
    throughput_t: float
    in_flight_growth: float
    in_flight_t: float
    in_flight_mean: float
    arrivals: int
    in_flight_by_rate: float | None = None
    in_flight_error: float | None = None


class ClientLoad(Frozen):
    """What the load generator did to itself; of several processes the worst value.

    ``cpu_share`` of one core, ``loop_lag_s`` p95 of the event loop's lateness, ``clock_step_s`` how far
    the wall clock moved against the monotonic one over the level, ``lateness`` how late its requests were sent.
    """

    processes: int = Field(default=1, ge=1)
    cpu_share: float | None = None
    loop_lag_s: float | None = None
    clock_step_s: float | None = None
    lateness: Distribution | None = None


class ReplacedLevel(Frozen):
    """An invalid first measurement of a level that was measured again: its file, relative to the experiment's
    folder, and why it was invalid."""

    file: str
    reasons: tuple[str, ...]


class SoakWindow(Frozen):
    """A minute of a load that was held for long: the answered ``requests`` that arrived in it, and output tokens/s of
    the answers that ended in it."""

    begins_s: float
    ends_s: float
    requests: int
    output_tokens_per_s: float
    ttft: Distribution | None = None
    tpot: Distribution | None = None


class Change(Frozen):
    """One latency in the last third of a load against the first: means, and the last over the first (of geometric means
    of ``blocks`` block means each) with its 95 % interval from ``low`` to ``high``.

    *same*: all of the interval within 5 % of 1 and around it, or within 1 %; *undecided* where it holds 1 and is wider,
    or for ``reason``.
    """

    verdict: Literal["longer", "shorter", "same", "undecided"]
    first_s: float | None = None
    last_s: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    blocks: int | None = None
    reason: str | None = None


class Soak(Frozen):
    """A load that was to be held for ``asked_s``, over time (`pdlab.results.soak`). ``changes`` is keyed ttft, tpot."""

    asked_s: float
    windows: tuple[SoakWindow, ...]
    changes: dict[str, Change]


class Run(Frozen):
    """One measured or simulated level: whole-run and steady-state figures, validity, provenance.

    ``steady`` is the window without ramp-up and drain (rule in docs/metrics.md); None when the
    level is too short for one; ``steady_window_s`` its begin and end since the first arrival.
    ``engines_before`` and ``engines_after`` are keyed by pool: collocated, prefill, decode.
    ``front_cores``: cores that ingress and proxy used on their busiest node, where Ray exported that.
    ``asked_tokens``: mean input and output tokens asked of its requests, where lengths vary or where the answers of an
    imported level ended before the length in its name.
    ``pool_age``: tokens that an engine had been given when the level began, over what its KV pool holds, of the
    engine where that is least (None: not known); below 1 the pool was fresh. ``soak``: the load was held for long.
    ``rehearsal``: the serving path was real and the engines were simulated; all times are simulated ones.
    ``model``: the model that an imported file names (None: the file names none, or pdlab measured the level, and then
    the manifest's deployment names the model).
    ``raw_sha256`` is over the uncompressed records. ``replaces``: the level was measured twice, and this is the
    second result.
    """

    schema_version: Literal[2] = 2
    origin: Origin
    label: str
    model: str | None = None
    key: RunKey
    workload: Workload
    load: Load
    num_requests: int
    seed: int | None = None
    completed: int
    failed: int
    asked_tokens: tuple[float, float] | None = None
    whole: Summary
    steady: Summary | None = None
    validity: Validity = Validity()
    nixl_before: NixlCounters | None = None
    nixl_after: NixlCounters | None = None
    engines_before: dict[str, EngineCounters] = Field(default_factory=dict)
    engines_after: dict[str, EngineCounters] = Field(default_factory=dict)
    steady_window_s: tuple[float, float] | None = None
    trend: Trend | None = None
    client: ClientLoad | None = None
    client_cpu_share: float | None = None
    front_cores: dict[str, float] = Field(default_factory=dict)
    pool_age: float | None = Field(default=None, ge=0)
    soak: Soak | None = None
    rehearsal: Rehearsal | None = None
    started_at: str | None = None
    finished_at: str | None = None
    raw_sha256: str | None = None
    replaces: ReplacedLevel | None = None


class SloPoint(Frozen):
    """One rate of a search: of ``judged`` requests ``met`` were within every bound.

    ``effective``: to so many independent requests they come, which neighbours in a queue are not. ``low`` and
    ``high`` bound the true share (Clopper-Pearson of those, each one-sided at what is left of the search's error for
    one look); ``verdict`` follows from them. ``repeats`` are the levels that were pooled, ``looks`` their number,
    ``latest`` the share in the last one alone. ``steady``: every one was checked for a steady state and was in it;
    None: some could not be checked. ``in_flight``: mean number, over all of them.
    ``clear``: every look was far within bounds on TPOT and gaps (`pdlab.results.slo.clearly_within`). ``served_rps``:
    where requests piled up, what was served at least (`pdlab.results.slo.served_rps`).
    ``piled_up``: they did in every look.
    """

    rate_rps: float
    judged: int
    met: int
    share: float
    low: float
    high: float
    verdict: Literal["meets", "misses", "undecided", "invalid"]
    repeats: tuple[int, ...] = ()
    effective: int
    looks: int = 1
    latest: float | None = None
    steady: bool | None = None
    in_flight: float | None = None
    clear: bool = False
    served_rps: float | None = None
    piled_up: bool = False
    reason: str | None = None


class SloSearch(Frozen):
    """Highest request rate that meets an SLO: between ``low_rps`` and ``high_rps``, at ``confidence``.

    ``low_rps`` is the highest rate shown to meet it (None: none was), ``high_rps`` the lowest shown to
    miss it (None: none was). ``best_rps`` is the highest rate at which the measured share was at least
    the quantile. ``finished`` is False while the search can still narrow; ``detail`` is the plain sentence.
    ``error_shares``: over so many looks the allowed error is split.
    """

    schema_version: Literal[2] = 2
    label: str
    slo: Slo
    repeat: int = 0
    burstiness: float = 1.0
    confidence: float
    resolution: float
    low_rps: float | None
    high_rps: float | None
    best_rps: float | None
    points: tuple[SloPoint, ...]
    finished: bool
    detail: str
    error_shares: int

    @property
    def stem(self) -> str:
        return f"{SLO_PREFIX}{self.slo.label}" + (f"-r{self.repeat}" if self.repeat else "")


class CanaryResult(Frozen):
    """``equal`` is None when there was no reference to compare with ("not compared"). Of the ``compared`` prompts
    ``rounded`` took another token where the two were within bfloat16's rounding."""

    equal: bool | None
    compared: int = 0
    rounded: int = 0
    detail: str


class WireProof(Frozen):
    """What carried the KV cache of one long request of ``payload_bytes`` at the launch.

    ``planned`` and ``observed`` are efa, rdma, tcp, shared memory or gpu peer (None: links of several kinds; nothing
    shows it). ``proven``: they are the same (None: not proven). ``evidence``: what shows ``observed``, UCX's table of
    its reads or the byte counters of network interfaces (None: nothing does).
    ``accepted``: another wire was asked for. ``counted``: node -> interface -> bytes (received, sent) meanwhile.
    ``ucx``: the transports of UCX's table. ``emulated``: UCX reads over that wire in software, as slowly as over tcp.
    """

    planned: str | None
    observed: str | None
    proven: bool | None
    evidence: Literal["ucx", "counters"] | None = None
    accepted: bool = False
    payload_bytes: int
    counted: dict[str, dict[str, tuple[int, int]]] = Field(default_factory=dict)
    ucx: tuple[str, ...] = ()
    emulated: bool = False
    detail: str


class TriedSettings(Frozen):
    """Engine ``settings`` that were tried (none: as launched without the search): output ``tokens_per_s`` of the whole
    deployment within the bounds, None: not within them at any load, or not measured (``error``)."""

    settings: dict[str, bool | int] = Field(default_factory=dict)
    tokens_per_s: float | None = None
    error: str | None = None


class Tuning(Frozen):
    """A search for the engine settings of a deployment, ahead of the measurement that others are compared with.

    ``tried``: best first. ``settings``: those that it then ran with (none: as launched). ``over_launched``: the
    throughput with these over that without, within ``bounds``, with the ends of its 95 % interval; None where the
    latter is not known. ``resolved``: whether that interval excludes 1. ``folder``: where the levels of it are.
    """

    grid: dict[str, tuple[bool | int, ...]]
    bounds: str
    workload: str
    loads: tuple[str, ...]
    repeats: int
    tried: tuple[TriedSettings, ...]
    settings: dict[str, bool | int] = Field(default_factory=dict)
    over_launched: tuple[float, float, float] | None = None
    resolved: bool = False
    folder: str


class Manifest(Frozen):
    """What an experiment ran on. ``placement`` is the actual one; times are ISO 8601, UTC.

    ``serving_path``: what stood between client and engines, and why. ``canary`` is of the launch; ``canaries_after``:
    the same prompts again after each sweep, against the answers then. ``tuning``: the search that its engine settings
    come from, where one was made. ``traffic``: the head of the compiled workload that was replayed; its SHA-256 is in
    the workload's lengths. ``rehearsal``: see `Run`.
    """

    schema_version: Literal[2] = 2
    origin: Origin
    label: str
    deployment: Deployment | None = None
    cluster: ClusterView | None = None
    placement: Placement | None = None
    gpus: int | None = None
    local: bool = False
    serving_path: str | None = None
    workload: Workload | None = None
    commands: tuple[str, ...] = ()
    git_commit: str | None = None
    git_dirty: bool | None = None
    versions: dict[str, str | None] = Field(default_factory=dict)
    hardware: dict[str, str | int | float | None] = Field(default_factory=dict)
    transport_env: dict[str, str] = Field(default_factory=dict)
    canary: CanaryResult | None = None
    canaries_after: tuple[CanaryResult, ...] = ()
    wire: WireProof | None = None
    tuning: Tuning | None = None
    traffic: TrafficHead | None = None
    rehearsal: Rehearsal | None = None
    started_at: str | None = None
    finished_at: str | None = None

    @property
    def on_local_nodes(self) -> bool:
        """Whether its Ray nodes were made on this machine."""
        return self.local or self.rehearsal is not None


class VisitRecord(Frozen):
    """One deployment started and measured once in an experiment of several.

    ``failed``: it did not start or did not live through its levels; ``error`` says why.
    """

    deployment: str
    repeat: int
    status: Literal["planned", "done", "failed", "interrupted"]
    error: str | None = None
    command: str | None = None
    launch_s: float | None = None
    started_at: str | None = None
    finished_at: str | None = None


class ExperimentRecord(Frozen):
    """``.experiment.json`` beside the folders of one experiment file: the file, the order in which its
    deployments were measured, and the outcome of each. ``experiment`` is the file's content. ``stopped``: why no more
    repeats were added, where their number depended on what they showed. ``tuned``: deployment -> the search that its
    engine settings come from. ``tunes``: the experiment whose deployments this one is such a search for.

    Its name begins with a dot so that ``viz.py --exps bm_results/NAME/*`` sees folders of results alone.
    """

    schema_version: Literal[2] = 2
    name: str
    file: str
    experiment: dict[str, Any]
    folders: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    visits: tuple[VisitRecord, ...]
    stopped: str | None = None
    tuned: dict[str, Tuning] = Field(default_factory=dict)
    tunes: str | None = None
    commands: tuple[str, ...] = ()
    started_at: str | None = None
    finished_at: str | None = None


class Experiment(Frozen):
    """A manifest and its runs, ordered by (kind, value, repeat), and its searches for an SLO's highest rate.

    ``part``: of a folder of others that holds several curves, what tells this one from them (empty: it is the only
    one). ``settings``: key -> value of what its files say of themselves, where the folder holds several curves.
    """

    name: str
    part: str = ""
    settings: dict[str, str] = Field(default_factory=dict)
    manifest: Manifest
    runs: tuple[Run, ...]
    searches: tuple[SloSearch, ...] = ()

    @property
    def model(self) -> str | None:
        """The model that was served; None where no file says it, or where the files of several models are in it.

        An imported experiment has the model of its files, whatever the folder's name and the flags say.
        """
        manifest = self.manifest
        if manifest.origin != "imported":
            return manifest.deployment.model if manifest.deployment else None
        models = {run.model for run in self.runs if run.model is not None}
        return models.pop() if len(models) == 1 else None
