"""Data model of results: ``RequestRecord``, ``Run``, ``Manifest``, ``Experiment``. `pdlab.results.store` keeps them on
disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, computed_field, model_validator

from pdlab.core.bounds import Metric
from pdlab.core.deployment import Deployment
from pdlab.core.findings import CODES, Finding
from pdlab.core.nodes import ClusterView, Placement
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.schema import Frozen, OneLine
from pdlab.core.workload import Load, RunKey, Slo, Workload
from pdlab.results.stored_rows import Row
from pdlab.traffic.requests import TrafficHead

SLO_PREFIX = "slo-"
PERCENTILES = (50, 90, 95, 99)


def _a_number(text: str) -> str:
    float(text)
    return text


BucketEnd = Annotated[str, AfterValidator(_a_number)]
Origin = Literal["measured", "simulated", "imported"]


class ReplayedRequest(Frozen):
    """Identifies the request of a compiled workload that a record belongs to.

    ``turn``: its number in the session; a request without a parent has 1. ``parent`` and ``waits``: ids of the requests
    that it waits for. ``sent``: False if it was not sent because one of these failed. ``cached_tokens``: prompt tokens
    from a cache, as the server counts them; None if the server does not, which is vLLM's default. ``foreseen_tokens``:
    the same by vLLM's rules (`pdlab.bench.forecast`), where these give one number. ``foreseen_bounds``: least and most
    tokens, where the rules give only a range. ``replica`` and ``prefill_replica``: the replicas that answered and
    prefilled, from their timelines.
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
        """Prompt tokens that came from a cache: the server's count, else the forecast."""
        return self.foreseen_tokens if self.cached_tokens is None else self.cached_tokens

    @property
    def after(self) -> tuple[str, ...]:
        """Ids of all requests that it waits for."""
        return (*((self.parent,) if self.parent is not None else ()), *self.waits)


class RequestRecord(Row):
    """One request. Times are seconds since the level began; None: the request did not get that far.

    ``itl_s``: gaps between received chunks. ``lateness_s``: delay between the due time and the sending; None if
    unknown. An open loop takes the due time from its schedule, or from the end of the requests waited for. In a closed
    loop a request is due when the previous answer has freed its place. ``requested``: input and output tokens of this
    request, if lengths vary; None: the workload's lengths. ``timed_out``: no complete answer came within the client's
    limit. ``usage``: False if the server did not report token counts; the input is then as requested, the output the
    tokens of the answer's text by the client's tokenizer.

    TTFT, TPOT and E2EL are defined here once. They begin when the request is sent.
    """

    arrival_s: float
    first_token_s: float | None = None
    finish_s: float | None = None
    input_tokens: int
    output_tokens: int
    itl_s: tuple[float, ...] = ()
    error: str | None = None
    lateness_s: float | None = None
    requested: tuple[int, int] | None = None
    timed_out: bool = False
    usage: bool = True
    replayed: ReplayedRequest | None = None

    @property
    def due_s(self) -> float | None:
        """When it was due, in seconds since the level began; None if unknown."""
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
        """Statistic -> seconds: ``mean``, unless it is unknown, and all percentiles."""
        return {**({} if self.mean_s is None else {"mean": self.mean_s}), **self.percentiles_s}


class Summary(Frozen):
    """Figures of one window of a run. None: unknown (imported runs) or undefined (TPOT of one token).

    Rates are per second over ``duration_s``, of the whole deployment, not normalised. ``completed``: requests that
    finished in the window. ``judged``: requests behind the latencies; None: not recorded
    (`pdlab.analysis.requests.judged`).
    """

    duration_s: float
    completed: int
    judged: int | None = Field(default=None, ge=0)
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


ABOVE_CAPACITY = ("in_flight_grows", "answers_take_longer")
"""Findings on an open loop that the deployment does not keep up with."""


class Validity(Frozen):
    """The gates that a level failed (docs/methodology.md); without ``findings`` the level is valid.

    ``unchecked``: gates that could not be judged because data are missing, with the reason; they do not make a level
    invalid. ``notes`` explain figures and do not make a level invalid. Every stored level also has ``reasons`` (the
    findings' sentences) and ``failed_gates`` for readers without pdlab.
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

    @property
    def above_capacity(self) -> bool:
        """Whether it is invalid only because its rate is above the capacity of the deployment."""
        return any(finding.code in ABOVE_CAPACITY for finding in self.findings) and set(self.failed_gates) == {
            CODES[code].gate for code in ABOVE_CAPACITY
        }

    def failing(self, *findings: Finding) -> Validity:
        """The same with these findings added, each once."""
        every = list(self.findings)
        every += [new for number, new in enumerate(findings) if new not in self.findings + findings[:number]]
        return self.model_copy(update={"findings": tuple(every)})

    @model_validator(mode="before")
    @classmethod
    def _without_sentences(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("reasons") and not data.get("findings"):
            raise ValueError("reasons without findings")
        return {name: value for name, value in data.items() if name not in ("reasons", "failed_gates")}


class NixlCounters(Frozen):
    """vLLM's NIXL counters summed over the decode engines (None: not exported yet).

    ``bytes_transferred``: KV bytes pulled; ``transfers``: finished pulls. ``guard_*`` are the KV guard's counters
    (None: no guard):

    - ``guard_receives``: receives watched
    - ``guard_recomputed``: prompts that decode computed instead
    - ``guard_deadlines``: reads given up at the deadline
    - ``guard_errors``: requests failed by the guard
    - ``guard_failed_reads``: prompts that decode computed because a read had failed
    - ``guard_handshakes_renewed``: connections to prefill made anew after a failed read
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

    ``prefix_cache_*``: tokens, of the engine's own cache; ``external_cache_*``: of KV cache that came through a
    connector. ``queue_s``, ``prefill_s``, ``decode_s``, ``ttft_s`` and ``e2e_s`` are the sums of the engine's
    histograms over requests; ``*_count`` is the number of requests in each. The mean over a level is the difference of
    the sums over the difference of the counts. ``kv_transfer_s``: sum of the NIXL transfer times of ``kv_transfers``.

    ``prefill_calls``: requests for which decode called prefill. ``prefill_retries``: those that called another replica.
    ``prefill_local``: those whose prompt decode computed. ``prefill_failures``: those answered with an error.
    ``prefill_timeouts``: calls without an answer in time.

    ``modelled_*``: simulated engines only; sums over requests whose sending time is known. ``modelled_ttft_s`` and
    ``modelled_decode_s`` are the times by the model. ``modelled_late_s``: how long after their moment the engine
    received events.

    Ray's exporter loses the sums (Ray Serve LLM 2.60). ``buckets`` then has, for ttft, queue, prefill and kv_transfer,
    the number of observations up to each upper end in seconds, as the exporter writes it.
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
    buckets: dict[str, dict[BucketEnd, float]] = Field(default_factory=dict)


class Trend(Frozen):
    """Drift of a level inside its steady window, by lines fitted over ``slices`` equal slices (rule in
    docs/methodology.md).

    ``throughput_change``: change of output tokens/s from the begin to the end of the window, over their mean.
    ``in_flight_growth``: change of the number of requests in flight; ``in_flight_mean``: their mean; ``arrivals``:
    arrivals in the window. ``*_t``: fitted slope over its standard error.

    ``in_flight_by_rate``: open loops only; arrivals/s in the window times the mean time in the system. Without drift
    this is the mean number in flight (J. D. C. Little, A Proof for the Queuing Formula L = lambda W, Operations
    Research 9, 1961). ``in_flight_error``: its standard deviation, from the requests that the edges of the window cut.
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
    """Load on the load generator itself; of several processes the worst value.

    ``cpu_share``: of one core. ``loop_lag_s``: p95 of the event loop's lateness. ``clock_step_s``: how far the wall
    clock moved against the monotonic clock during the level. ``lateness``: how late requests were sent.
    """

    processes: int = Field(default=1, ge=1)
    cpu_share: float | None = None
    loop_lag_s: float | None = None
    clock_step_s: float | None = None
    lateness: Distribution | None = None


class ReplacedLevel(Frozen):
    """An invalid first measurement of a level that was measured again.

    ``file``: path relative to the experiment's folder. ``reasons``: why it was invalid.
    """

    file: str
    reasons: tuple[str, ...]


class SoakWindow(Frozen):
    """One minute of a soak. ``requests``: answered requests that arrived in it; the latencies are theirs.
    ``output_tokens_per_s``: tokens of the answers that ended in it."""

    begins_s: float
    ends_s: float
    requests: int
    output_tokens_per_s: float
    ttft: Distribution | None = None
    tpot: Distribution | None = None


class Change(Frozen):
    """One latency in the last third of a soak against the first third.

    ``first_s`` and ``last_s``: means. ``ratio``: last over first, of geometric means of ``blocks`` block means each.
    ``low`` and ``high``: its 95 % interval. ``verdict`` is *same* if the interval holds 1 and is within 5 % of 1, or if
    it is within 1 %. It is *undecided* if a wider interval holds 1, or for ``reason``.
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
    """A load that was meant to be held for ``requested_s``, over time (`pdlab.results.soak`). ``changes`` is keyed
    ttft, tpot."""

    requested_s: float
    windows: tuple[SoakWindow, ...]
    changes: dict[str, Change]


class SpeculativeDecoding(Frozen):
    """Speculative decoding in a level. ``accepted_tokens``: mean tokens per sequence and step. ``guessed_tokens``: mean
    guesses per sequence and step. None: unknown."""

    accepted_tokens: float | None = Field(default=None, ge=1)
    guessed_tokens: float | None = Field(default=None, gt=0)


NO_LENGTHS = Workload(input_tokens=1, output_tokens=1, mode="prefill-only")  # in place of unknown ones


class Run(Frozen):
    """One measured or simulated level: whole-run and steady-state figures, validity, provenance.

    ``steady``: figures of the window without ramp-up and drain (rule in docs/metrics.md); None if the level is too
    short. ``steady_window_s``: begin and end of that window, seconds since the first arrival. ``engines_before`` and
    ``engines_after`` are keyed by pool: collocated, prefill, decode. ``front_cores``: cores that ingress and proxy used
    on their busiest node, if Ray exported them. ``requested_tokens``: mean input and output tokens of the
    requests, if lengths vary. An imported level also has them if its answers ended before the length in its name.
    ``pool_age``: tokens given to an engine before the level, over its KV pool's size, of the engine with the least
    (None: unknown); below 1 the pool was fresh. ``rehearsal``: real serving path, simulated engines; all times are
    simulated. ``speculation`` and ``engine`` (vllm, sglang or trtllm): as the file of another client has them (None:
    none, or unknown).

    ``model``: the model that an imported file names. None: the file names none, or pdlab measured the level; the
    manifest's deployment then has the model. ``raw_sha256``: hash of the uncompressed records. ``replaces``: the first
    measurement, if the level was measured twice.
    """

    schema_version: Literal[2] = 2
    origin: Origin
    label: OneLine
    model: OneLine | None = None
    key: RunKey
    workload: Workload
    load: Load
    num_requests: int
    seed: int | None = None
    completed: int
    failed: int
    requested_tokens: tuple[float, float] | None = None
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
    speculation: SpeculativeDecoding | None = None
    engine: Literal["vllm", "sglang", "trtllm"] | None = None
    started_at: str | None = None
    finished_at: str | None = None
    raw_sha256: str | None = None
    replaces: ReplacedLevel | None = None

    @property
    def has_lengths(self) -> bool:
        """Whether ``workload`` has the lengths of the requests. They are unknown if no request of an imported level was
        answered, and no name gives them."""
        return self.origin != "imported" or self.completed > 0 or self.workload != NO_LENGTHS


class SloPoint(Frozen):
    """One rate of a search: ``met`` of ``judged`` requests were within every bound.

    ``effective``: the equivalent number of independent requests, because neighbours in a queue are correlated. ``low``
    and ``high``: one-sided Clopper-Pearson bounds of the true share, at one look's part of the search's error;
    ``verdict`` follows from them. ``repeats``: the levels that were pooled; ``looks``: their number; ``latest``: the
    share in the last of them. ``steady``: whether all of them were in a steady state; None: some could not be checked.
    ``in_flight``: mean number over all of them. ``clear``: every look was far within the bounds on TPOT and gaps
    (`pdlab.results.slo.clearly_within`). ``piled_up``: requests piled up in every look. ``served_rps``: if so, the
    least that was served (`pdlab.results.slo.served_rps`), as a rate of the load (`Workload.mean_rate`).
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
    """Search for the highest request rate that meets an SLO: between ``low_rps`` and ``high_rps``, at ``confidence``.

    ``low_rps``: highest rate shown to meet it (None: none). ``high_rps``: lowest rate shown to miss it (None: none).
    ``best_rps``: highest rate at which the measured share was at least the quantile. ``finished``: False while the
    search can still narrow. ``detail``: the result in one sentence. ``error_shares``: number of looks that share the
    allowed error.
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
    def title(self) -> str:
        return self.slo.label + (f", repeat {self.repeat}" if self.repeat else "")

    @property
    def stem(self) -> str:
        return f"{SLO_PREFIX}{self.slo.label}" + (f"-r{self.repeat}" if self.repeat else "")


class CanaryResult(Frozen):
    """Answers compared with a reference. ``equal``: None if there was no reference. ``rounded``: prompts, of those
    ``compared``, whose token differs within bfloat16's rounding."""

    equal: bool | None
    compared: int = 0
    rounded: int = 0
    detail: str


class WireProof(Frozen):
    """What carried the KV cache of one long request of ``payload_bytes`` at the launch.

    ``planned`` and ``observed``: efa, rdma, tcp, shared memory or gpu peer. None: links of several kinds, or nothing
    shows the wire. ``proven``: they are equal (None: unknown). ``evidence``: the source of ``observed``, UCX's table of
    its reads or the byte counters of the interfaces (None: neither). ``accepted``: the user accepted another wire.
    ``counted``: node -> interface -> bytes (received, sent) during the request. ``ucx``: the transports in UCX's table.
    ``emulated``: UCX emulates reads over that wire in software, at tcp's speed.
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
    """Engine ``settings`` that were tried; empty: the settings of the launch.

    ``tokens_per_s``: output tokens/s of the whole deployment within the bounds, at the loads that were compared. None:
    not within them at any of these, or not measured (``error``).
    """

    settings: dict[str, bool | int] = Field(default_factory=dict)
    tokens_per_s: float | None = None
    error: str | None = None


class Tuning(Frozen):
    """A search for the engine settings of a baseline, before the measurement.

    ``tried``: best first. ``settings``: those used afterwards (empty: as launched). ``over_launched``: throughput with
    the best over that without, within ``bounds``, and the ends of its 95 % interval; None if unknown. ``over_second``:
    the same over the second. ``resolved``: whether the interval of ``over_launched`` excludes 1. ``loads``: the
    planned ones. ``compared``: those that are valid with all settings, at which these are compared; None: not recorded.
    ``invalid``: the other loads, and the settings with which each is not valid. ``folder``: folder of the levels.
    """

    grid: dict[str, tuple[bool | int, ...]]
    bounds: str
    workload: str
    loads: tuple[str, ...]
    repeats: int
    tried: tuple[TriedSettings, ...]
    settings: dict[str, bool | int] = Field(default_factory=dict)
    over_launched: tuple[float, float, float] | None = None
    over_second: tuple[float, float, float] | None = None
    resolved: bool = False
    compared: tuple[str, ...] | None = None
    invalid: dict[str, tuple[dict[str, bool | int], ...]] | None = None
    folder: str


class Manifest(Frozen):
    """What an experiment ran on. ``placement`` is the actual one. Times are ISO 8601, UTC.

    ``serving_path``: what stood between client and engines, and why. ``canary``: at the launch; ``canaries_after``: the
    same prompts after each sweep, against the answers of the launch. ``tuning``: the search that gave the engine
    settings, if any. ``traffic``: head of the replayed compiled workload; its SHA-256 is in the workload's lengths.
    ``rehearsal``: see `Run`. ``model`` and ``tokenizer``: of a server that pdlab did not launch, the name in the
    requests and the tokenizer that drew the prompts (None: pdlab launched it, or the file has no name).
    """

    schema_version: Literal[2] = 2
    origin: Origin
    label: OneLine
    deployment: Deployment | None = None
    model: OneLine | None = None
    tokenizer: OneLine | None = None
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
        """Whether its Ray nodes were started on this machine."""
        return self.local or self.rehearsal is not None

    @property
    def early_tokens(self) -> bool:
        """Whether clients may have got prefill's first token before the KV cache moved. TTFT then ends before the
        hand-over to decode, which no figure of a level has. Simulated engines send decode's."""
        if self.deployment is None or self.origin == "simulated" or self.rehearsal is not None:
            return False
        return self.deployment.transport is not None and self.deployment.serving.early_token


class VisitRecord(Frozen):
    """One start and measurement of one deployment in an experiment of several.

    ``failed``: it did not start, or it ended before its levels; ``error`` has the reason.
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
    """``.experiment.json`` beside the folders of one experiment file.

    ``experiment``: content of the file. ``visits``: the deployments in the order of measurement, with outcomes.
    ``stopped``: why no more repeats were added, if their number depended on results. ``tuned``: deployment -> the
    search that gave its engine settings. ``tunes``: the experiment that this search is for.

    The name begins with a dot so that ``viz.py --exps bm_results/NAME/*`` matches only folders of results.
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


def note_texts(runs: Iterable[Run]) -> list[str]:
    """The notes on these levels in words, each once."""
    return list(dict.fromkeys(note.text for run in runs for note in run.validity.notes))


class Experiment(Frozen):
    """A manifest, its runs by (kind, value, repeat), and its searches for an SLO's highest rate.

    ``name``: the folder's. ``label``: what a person calls it. ``part``: distinguishes this curve from others in the
    same folder; empty if it is the only one. ``settings``: key -> value in its files, if the folder holds several
    curves.
    """

    name: OneLine
    label: OneLine | None = None
    part: OneLine = ""
    settings: dict[str, OneLine] = Field(default_factory=dict)
    manifest: Manifest
    runs: tuple[Run, ...]
    searches: tuple[SloSearch, ...] = ()

    @property
    def model(self) -> str | None:
        """The served model; None if no file names one, or if the files name several.

        An imported experiment has the model of its files, whatever the folder's name and the flags are.
        """
        manifest = self.manifest
        if manifest.origin != "imported":
            return manifest.deployment.model if manifest.deployment else manifest.model
        models = {run.model for run in self.runs if run.model is not None}
        return models.pop() if len(models) == 1 else None
