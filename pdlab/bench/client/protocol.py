"""Messages between the driver and the load generator's processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field, InstanceOf, model_validator

from pdlab.bench.levels import prefix_seed
from pdlab.core import defaults
from pdlab.core.schema import Frozen
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Level, Open, Ramp, Replay, Workload
from pdlab.results.schema import ClientLoad, RequestRecord
from pdlab.results.stored_rows import Row, StoredRows
from pdlab.results.timeline import RequestTimeline

SESSION_HEADER = "x-session-id"  # to the router of an engine: the request's session
STOP = "stop"


class ReplayedPlan(Frozen):
    """The compiled workload (`pdlab.traffic.requests`) of a level that replays one.

    ``path``: the file; ``groups``: sets of sessions in it that wait for each other. ``stretch``: factor on all its
    times. ``endpoint``: as in its head. ``block_tokens``: tokens per block of the engines' KV cache, if the load
    generator must return prompts that the file does not determine.
    """

    path: str
    groups: int = Field(ge=1)
    stretch: float = Field(default=1.0, gt=0)
    endpoint: Literal["completions", "chat"] = "completions"
    block_tokens: int | None = Field(default=None, ge=1)


class ComputedTokens(Row):
    """What an engine computed for a request, by its ``id`` in the compiled workload: the ``tokens`` of its prompt, and
    of prompt and answer ``computed``, which lack the answer's last token. ``keys``: of their whole blocks
    (`pdlab.traffic.prompts`)."""

    id: str
    tokens: int
    computed: int
    keys: tuple[int, ...]


class ClientLevel(Frozen):
    """One load as sent to the load-generator process (one JSON line).

    Token lengths are exact: one pair for all requests, or ``lengths[i]`` for request i of the level. ``due_s[i]``: when
    request i is due, in seconds since the level's start. The first ``prefix_tokens`` are the same in every request and
    drawn from ``prefix_seed``. ``pd-bare`` posts each prompt to ``prefill_url`` and streams the answer from
    ``decode_url``: two vLLM servers without a serving layer. With a `ReplayedPlan` as ``load`` the requests, their
    lengths and their times are those of a compiled workload. ``tokenizer`` is a folder or a Hugging Face id. With
    several processes this one is number ``part`` of ``parts``: ``load`` and ``num_requests`` are those of the whole
    level, and each process takes its share. ``stamped``: every request has its sending time, in seconds of the
    machine's monotonic clock, in a header (`pdlab.core.rehearsal`). ``timeline``: every request requests a timeline.
    """

    name: str
    backend: Literal["openai", "pd-bare"] = "openai"
    base_url: str | None = None
    prefill_url: str | None = None
    decode_url: str | None = None
    model: str
    tokenizer: str
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    lengths: tuple[tuple[int, int], ...] | None = None
    due_s: tuple[float, ...] | None = None
    num_requests: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**32)
    load: Closed | Open | Ramp | ReplayedPlan
    prefix_tokens: int = Field(default=0, ge=0)
    prefix_seed: int = Field(default=0, ge=0, lt=2**32)
    request_timeout_s: float = Field(default=defaults.REQUEST_TIMEOUT_S, gt=0)
    part: int = Field(default=0, ge=0)
    parts: int = Field(default=1, ge=1)
    stamped: bool = False
    timeline: bool = False

    @property
    def concurrency(self) -> int | None:
        """Requests in flight of a closed loop; None: the load is an open loop."""
        return self.load.concurrency if isinstance(self.load, Closed) else None

    @property
    def replay(self) -> ReplayedPlan | None:
        return self.load if isinstance(self.load, ReplayedPlan) else None

    @property
    def scheduled(self) -> bool:
        """Whether requests are sent by a schedule, as in every open loop. vLLM's benchmark draws the times too, but it
        does not return them, its ramps have only whole numbers of requests/s, and several processes need one schedule.
        """
        return self.concurrency is None

    def schedule_s(self) -> list[float]:
        """When each request of the whole level is due, in seconds since the level's start: ``due_s`` where it is given.

        Gaps are gamma-distributed with shape ``burstiness`` around the rate of the moment. At a constant rate their sum
        is scaled to requests / rate, as vLLM does. All processes of a level compute the same list and each takes its
        own requests, so that the arrivals are those of one process.
        """
        if self.due_s is not None:
            return list(self.due_s)
        import numpy as np

        rng, total, load = np.random.default_rng(self.seed), self.num_requests, self.load
        assert isinstance(load, Open | Ramp)
        if isinstance(load, Open):
            rates = np.full(total, load.rate_rps)
        else:
            start, end, x = load.start_rps, load.end_rps, np.arange(total) / max(1, total - 1)
            rates = start + (end - start) * x if load.shape == "linear" else start * (end / start) ** x
        due = np.cumsum(rng.gamma(load.burstiness, 1 / (rates * load.burstiness)))
        if isinstance(load, Open):
            due *= total / load.rate_rps / due[-1]
        return [float(moment) for moment in due]

    @property
    def own_concurrency(self) -> int | None:
        """This process's share of the concurrency; the first processes take the remainder."""
        return None if self.concurrency is None else self._places(self.part)

    def _places(self, part: int) -> int:
        total = self.concurrency or 0
        return total // self.parts + (part < total % self.parts)

    @property
    def own_requests(self) -> range:
        """Numbers, within the level, of the requests of this process: in an open loop every ``parts``-th,
        in a closed loop as many as its share of the concurrency."""
        if self.concurrency is None:
            return range(self.part, self.num_requests, self.parts)
        total, before = self.num_requests, sum(map(self._places, range(self.part)))
        end = before + self._places(self.part)
        return range(total * before // self.concurrency, total * end // self.concurrency)

    @property
    def most_parts(self) -> int:
        """The largest number of processes that get a share of the load."""
        return self.replay.groups if self.replay else self.concurrency or self.num_requests

    @model_validator(mode="after")
    def _complete(self) -> ClientLevel:
        if self.lengths is not None and len(self.lengths) != self.num_requests:
            raise ValueError(f"{len(self.lengths)} lengths for {self.num_requests} requests")
        if self.due_s is not None and (not isinstance(self.load, Open) or len(self.due_s) != self.num_requests):
            raise ValueError(
                f"{counted(len(self.due_s), 'time')} at which requests are due: one of each, at a constant rate"
            )
        if self.part >= self.parts or self.parts > self.most_parts:
            raise ValueError(f"part {self.part} of {self.parts}: more processes than there is load for")
        if self.backend == "openai" and not self.base_url:
            raise ValueError("backend openai needs base_url")
        if self.backend == "pd-bare" and not (self.prefill_url and self.decode_url):
            raise ValueError("backend pd-bare needs prefill_url and decode_url")
        return self


class EndedPart(Frozen):
    """Some requests of a level, as in a `ClientAnswer`, in any order."""

    records: tuple[RequestRecord, ...] = ()
    timelines: tuple[RequestTimeline, ...] = ()
    prompts: tuple[ComputedTokens, ...] = ()


class ClientAnswer(Frozen):
    """What the load generator measured for one level.

    ``records`` are ordered by arrival, times in seconds since the first arrival. ``cpu_share`` is
    the CPU time of the whole client process over wall time between the first arrival and the last
    answer (1 = one core); ``loop_lag_s`` the 95th percentile of how late its event loop woke up;
    ``clock_step_s`` how far the wall clock moved against the monotonic one meanwhile. Of several
    ``processes`` these are the worst. ``origin_s`` is the first arrival on the monotonic clock, ``schedule_s``
    where the schedule of an open loop begins there: lateness counts from the most punctual request.
    ``started_at`` and ``finished_at`` are ISO 8601, UTC. ``timelines``, by arrival: of the requests whose server
    sent one. ``prompts``: of a replay by chat or of real text, as the server and its tokenizer have them. All three are
    read from files that the load generator's processes wrote (`CollectedRequests`).
    """

    name: str
    records: InstanceOf[Sequence[RequestRecord]] = ()
    prompts: InstanceOf[Sequence[ComputedTokens]] = ()
    timelines: InstanceOf[Sequence[RequestTimeline]] = ()
    cpu_share: float | None = None
    loop_lag_s: float | None = None
    clock_step_s: float | None = None
    origin_s: float = 0.0
    schedule_s: float | None = None
    processes: int = 1
    started_at: str
    finished_at: str

    @property
    def load(self) -> ClientLoad:
        return ClientLoad(
            processes=self.processes,
            cpu_share=self.cpu_share,
            loop_lag_s=self.loop_lag_s,
            clock_step_s=self.clock_step_s,
        )


class CollectedRequests:
    """The requests of a level, which processes report part by part."""

    def __init__(self) -> None:
        self._records, self._timelines = StoredRows(RequestRecord), StoredRows(RequestTimeline)
        self._prompts = StoredRows(ComputedTokens)

    def add(
        self,
        records: Iterable[RequestRecord] = (),
        timelines: Iterable[RequestTimeline] = (),
        prompts: Iterable[ComputedTokens] = (),
    ) -> None:
        for record in records:
            self._records.add(record, record.arrival_s)
        for timeline in timelines:
            self._timelines.add(timeline, timeline.arrival_s or 0.0)
        for prompt in prompts:
            self._prompts.add(prompt, 0.0)

    def of(self, answer: ClientAnswer) -> ClientAnswer:
        """The answer with all of its requests."""
        collected = {"records": self._records, "timelines": self._timelines, "prompts": self._prompts}
        return answer.model_copy(update=collected)


def slowed(level: ClientLevel, slow_down: float) -> ClientLevel:
    """The level as it is sent where a simulated second takes ``slow_down`` seconds."""
    load = level.load
    rates = [name for name in ("rate_rps", "start_rps", "end_rps") if hasattr(load, name)]
    slower: dict[str, float] = {name: getattr(load, name) / slow_down for name in rates}
    if isinstance(load, ReplayedPlan):
        slower = {"stretch": load.stretch * slow_down}
    return level.model_copy(
        update={
            "load": load.model_copy(update=slower),
            "due_s": None if level.due_s is None else tuple(moment_s * slow_down for moment_s in level.due_s),
            "request_timeout_s": level.request_timeout_s * slow_down,
            "stamped": True,
            "timeline": False,  # real times, of simulated engines
        }
    )


def in_simulated_time(answer: ClientAnswer, slow_down: float) -> ClientAnswer:
    """The answer to a level that was `slowed`, with all times in simulated seconds."""

    def shorter(record: RequestRecord) -> RequestRecord:
        times = divided(record, "arrival_s", "first_token_s", "finish_s", "lateness_s")
        return record.model_copy(update={**times, "itl_s": tuple(gap_s / slow_down for gap_s in record.itl_s)})

    def divided(of: RequestRecord | ClientAnswer, *names: str) -> dict[str, float]:
        return {name: value / slow_down for name in names if (value := getattr(of, name)) is not None}

    requests = CollectedRequests()
    requests.add(map(shorter, answer.records), answer.timelines, answer.prompts)
    times = divided(answer, "loop_lag_s", "clock_step_s", "origin_s", "schedule_s")
    return requests.of(answer.model_copy(update=times))


def merged(answers: Sequence[ClientAnswer]) -> ClientAnswer:
    """The answers of several processes of one machine as one: they share its monotonic clock and one schedule."""
    origin_s = min(answer.origin_s for answer in answers)
    schedule_s = min((answer.schedule_s for answer in answers if answer.schedule_s is not None), default=None)
    requests = CollectedRequests()
    for answer in answers:
        requests.add(
            timelines=(timeline.shifted(answer.origin_s - origin_s) for timeline in answer.timelines),
            prompts=answer.prompts,
        )
        late_s = answer.schedule_s - schedule_s if answer.schedule_s is not None and schedule_s is not None else 0.0
        for record in answer.records:
            moved = record.shifted(answer.origin_s - origin_s) if answer.origin_s > origin_s else record
            waited = moved.replayed is not None and moved.replayed.after
            if late_s and moved.lateness_s is not None and not waited:
                moved = moved.model_copy(update={"lateness_s": round(moved.lateness_s + late_s, 6)})
            requests.add((moved,))

    def worst(field: str) -> float | None:
        values = [value for answer in answers if (value := getattr(answer, field)) is not None]
        return max(values, key=abs) if values else None

    return requests.of(
        ClientAnswer(
            name=answers[0].name,
            cpu_share=worst("cpu_share"),
            loop_lag_s=worst("loop_lag_s"),
            clock_step_s=worst("clock_step_s"),
            origin_s=origin_s,
            schedule_s=schedule_s,
            processes=len(answers),
            started_at=min(answer.started_at for answer in answers),
            finished_at=max(answer.finished_at for answer in answers),
        )
    )


def client_level(
    level: Level,
    workload: Workload,
    *,
    base_url: str,
    model: str,
    tokenizer: str,
    request_timeout_s: float,
    plan: ReplayedPlan | None = None,
    timeline: bool = False,
) -> ClientLevel:
    """A level of a sweep in the client's form; ``plan``: what it replays."""
    replays = isinstance(level.load, Replay)
    arrivals = workload.arrivals(level)
    return ClientLevel(
        name=level.key.stem,
        base_url=base_url,
        model=model,
        tokenizer=tokenizer,
        input_tokens=workload.sent_input_tokens,
        output_tokens=workload.sent_output_tokens,
        lengths=workload.draw(level) if workload.varied and not replays else None,
        due_s=None if arrivals is None else tuple(arrival.due_s for arrival in arrivals),
        num_requests=level.num_requests,
        seed=level.seed,
        load=plan if replays else level.load,
        prefix_tokens=workload.shared_prefix_tokens,
        prefix_seed=prefix_seed(workload),
        request_timeout_s=request_timeout_s,
        timeline=timeline,
    )
