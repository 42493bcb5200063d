"""``Workload`` (the requests), ``Load`` (their arrivals), ``Slo``, and ``Level`` (a load with its requests)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, model_validator

from pdlab.core.arguments import LENGTHS_HELP, MAX_TOKENS, SLO_QUANTILE
from pdlab.core.commands import LAUNCH
from pdlab.core.errors import UsageError
from pdlab.core.length_distribution import LengthDistribution, MeanTokens, Pair
from pdlab.core.lengths import FIXED, Fixed, Lengths, Lognormal, Pairs, parse_lengths
from pdlab.core.mixes import Arrival, Mixes
from pdlab.core.replayed import Replayed
from pdlab.core.schema import Frozen, Incidental, validate
from pdlab.core.settings import LENGTHS, PerUnit, Positive, Seed, Share, flag_names, setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.float64]

REQUESTS = "requests"  # title of a group of flags
WorkloadMode = Literal["mixed", "prefill-only", "decode-only", "decode-approx"]
LoadKind = Literal["concurrency", "rate", "ramp", "replay"]
# Kinds of lengths that set the nominal lengths themselves.
OWN_MEANS = (Pairs, Mixes, Replayed)


class Workload(Frozen):
    """Requests of random tokens.

    ``lengths``: how the lengths of requests vary around ``input_tokens`` and ``output_tokens``; a text is read by
    `pdlab.core.lengths.parse_lengths`. For a file or mixes, the two nominal lengths are the rounded means.

    ``mode``: ``prefill-only`` requests one output token. ``decode-only`` sends the whole prompt to engines that fill
    its KV cache without computing it (``Deployment.decode_bench``), so that decode runs at the real context length.
    ``decode-approx`` sends one input token to any engine, so that decode runs without context (docs/methodology.md).

    ``shared_prefix_tokens``: the first tokens of the input that all requests share, and the prefix cache may have.
    """

    input_tokens: Positive = setting(
        5000, "input tokens of a request", REQUESTS, "--itl", "--isl", "--input-len", value="TOKENS"
    )
    output_tokens: Positive = setting(
        250, "output tokens of a request", REQUESTS, "--otl", "--osl", "--output-len", value="TOKENS"
    )
    lengths: Annotated[Lengths, LENGTHS] = setting(FIXED, LENGTHS_HELP, REQUESTS, value="KIND", otherwise="")
    mode: WorkloadMode = setting(
        "mixed",
        f"mixed: ITL:OTL; prefill-only: ITL:1; decode-only: ITL:OTL on a deployment of {LAUNCH} --decode-bench; "
        "decode-approx: 1:OTL on any deployment, without the cost of a real context",
        REQUESTS,
    )
    seed: Seed = setting(0, "seed of the experiment; the seeds of the levels are derived from it", REQUESTS)
    shared_prefix_tokens: Annotated[int, Ge(0), Le(MAX_TOKENS)] = setting(
        0, "input tokens that are the same in every request", REQUESTS, "--shared-prefix", value="TOKENS"
    )

    @model_validator(mode="before")
    @classmethod
    def _lengths_as_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        lengths = data.get("lengths")
        if isinstance(lengths, str):
            try:
                lengths = parse_lengths(lengths)
            except UsageError as error:
                raise ValueError(f"lengths: {error}") from error
            data = {**data, "lengths": lengths}
        if isinstance(lengths, OWN_MEANS):
            means = lengths.mean((0, 0))
            what = "list of mixes" if isinstance(lengths, Mixes) else "file of lengths"
            for name, mean in zip(("input_tokens", "output_tokens"), means, strict=True):
                if data.get(name) not in (None, round(mean)):
                    raise ValueError(f"{name} is {data[name]}, but the {what} sets that itself: leave it out")
                data = {**data, name: round(mean)}
        return data

    @model_validator(mode="after")
    def _longest_holds_the_nominal(self) -> Workload:
        nominal = self.input_tokens + self.output_tokens
        if isinstance(self.lengths, Lognormal) and (self.lengths.most_tokens or nominal) < nominal:
            raise ValueError(
                f"lengths: at most {self.lengths.most_tokens} tokens of a request are fewer than "
                f"{self.input_tokens} + {self.output_tokens}: give a larger max"
            )
        return self

    @model_validator(mode="after")
    def _prefix_is_part_of_the_input(self) -> Workload:
        if self.shared_prefix_tokens and self.shared_prefix_tokens >= self.shortest_input:
            whose = "the shortest request" if self.varied else "a request"
            raise ValueError(
                f"shared_prefix_tokens is {self.shared_prefix_tokens}, but {whose} has {self.shortest_input} "
                "input tokens and needs some of its own"
            )
        return self

    @property
    def varied(self) -> bool:
        """Whether requests differ in length."""
        return not isinstance(self.lengths, Fixed)

    @property
    def mean_rate(self) -> float:
        """Mean arrivals/s over the rate of an open loop: for mixes those of a whole round, without the crowd."""
        return self.lengths.mean_rate if isinstance(self.lengths, Mixes) else 1.0

    def mean_rps(self, load: Open) -> float:
        """Mean arrival rate in requests/s, for mixes over a whole round."""
        return load.rate_rps * self.mean_rate

    def mean_requests(self, load: Open | Ramp, seconds: float) -> float:
        """Mean number of requests in that time from the begin of a level."""
        if isinstance(self.lengths, Mixes) and isinstance(load, Open):
            return load.rate_rps * self.lengths.mean_requests(seconds)
        return load.mean_rps * seconds

    def mean_duration_s(self, load: Open | Ramp, requests: float) -> float:
        """The time in which that many requests arrive on average, from the begin of a level."""
        if isinstance(self.lengths, Mixes) and isinstance(load, Open):
            return self.lengths.mean_duration_s(requests / load.rate_rps)
        return requests / load.mean_rps

    def most_rps(self, load: Open) -> float:
        """Highest arrival rate, in requests/s."""
        return load.rate_rps * (self.lengths.most_rate if isinstance(self.lengths, Mixes) else 1.0)

    @property
    def _nominal(self) -> Pair:
        return self.input_tokens, self.output_tokens

    def _sent(self, inputs: int, outputs: int) -> Pair:
        return 1 if self.mode == "decode-approx" else inputs, 1 if self.mode == "prefill-only" else outputs

    @property
    def sent_input_tokens(self) -> int:
        """Nominal input tokens as sent; those of every request if lengths are fixed."""
        return self._sent(*self._nominal)[0]

    @property
    def sent_output_tokens(self) -> int:
        """Nominal requested output tokens; those of every request if lengths are fixed."""
        return self._sent(*self._nominal)[1]

    @property
    def mean_tokens(self) -> MeanTokens:
        """Mean tokens of a request, as sent."""
        mean = self.lengths.mean(self._nominal)
        if self.mode == "decode-approx":
            return mean._replace(input=1.0)
        return mean._replace(output=1.0) if self.mode == "prefill-only" else mean

    @property
    def typical(self) -> Pair:
        """`mean_tokens` in whole tokens; the lengths themselves if they are fixed."""
        inputs, outputs = self.mean_tokens
        return round(inputs), round(outputs)

    @property
    def longest(self) -> Pair:
        """Input and output tokens of the longest possible request."""
        return self._sent(*self.lengths.longest(self._nominal))

    @property
    def longest_input(self) -> int:
        return self._sent(self.lengths.longest_input(self._nominal), 1)[0]

    @property
    def shortest_input(self) -> int:
        return self._sent(self.lengths.shortest_input(self._nominal), 1)[0]

    @property
    def declared_cached_share(self) -> float:
        """Share of the prompt tokens that the prefix cache may answer: the shared prefix of the input."""
        return self.shared_prefix_tokens / self.mean_tokens.input

    @property
    def label(self) -> str:
        """``5000:250`` as sent, ``5000:250 uniform 0.8-1.0``: what distinguishes workloads."""
        return " ".join(filter(None, [f"{self.sent_input_tokens}:{self.sent_output_tokens}", self.lengths.label]))

    @property
    def bench_fields(self) -> dict[str, Any]:
        """The fields of the settings of ``bench`` for these lengths."""
        if isinstance(self.lengths, Replayed):
            return {"replay_file": self.lengths.flag_value}
        nominal = (
            {}
            if isinstance(self.lengths, OWN_MEANS)
            else {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        )
        return {"requests": nominal if self.lengths == FIXED else {**nominal, "lengths": self.lengths}}

    def draw(self, level: Level) -> tuple[Pair, ...]:
        """Input and output tokens as sent of each request of a level.

        They depend only on the workload and the level's repeat and look, not on its load or the seed of its prompts. So
        every deployment gets the same sequence at every load, and comparisons are not affected by the draw (common
        random numbers). Raises UsageError if the pairs of a file are not stored.
        """
        if not self.varied:
            return (self._sent(*self._nominal),) * level.num_requests
        if (arrivals := self.arrivals(level)) is not None:
            return tuple((each.input_tokens, each.output_tokens) for each in arrivals)
        seed = json.dumps([self.seed, self.lengths.identity, *self._nominal, level.repeat, level.look])
        return tuple(self._sent(*pair) for pair in self.lengths.draw(self._nominal, level.num_requests, seed))

    def check_load(self, load: Load) -> None:
        """Raises UsageError unless mixes have a request rate, and a compiled workload, and nothing else, a replay."""
        if isinstance(self.lengths, Mixes) and not isinstance(load, Open):
            raise UsageError(
                f"--lengths {self.lengths.flag_value}: the lengths follow from the times of the requests, and a load "
                f"of kind {load.kind} has no times; give --request-rate"
            )
        if isinstance(self.lengths, Replayed) != isinstance(load, Replay):
            raise UsageError(
                f"the workload is {self.label}, the load is of kind {load.kind}: only a workload file can set the "
                "times of replayed requests"
            )

    def arrivals(self, level: Level) -> tuple[Arrival, ...] | None:
        """The due time of each request of a level, and its tokens as sent; None if lengths do not change with time.

        They depend on the workload and the level's load, repeat and look. Raises UsageError as `check_load`.
        """
        if not isinstance(self.lengths, Mixes):
            return None
        self.check_load(level.load)
        assert isinstance(level.load, Open)
        seed = json.dumps([self.seed, self.lengths.identity, level.repeat, level.look])
        drawn = self.lengths.arrivals(level.load.rate_rps, level.load.burstiness, seed)
        return tuple(
            Arrival(each.due_s, *self._sent(each.input_tokens, each.output_tokens))
            for each in islice(drawn, level.num_requests)
        )


FLAGS = flag_names(Workload)


def _file_flag(lengths: LengthDistribution) -> str:
    return "--workload" if isinstance(lengths, Replayed) else "--lengths"


def workload_of_flags(given: Mapping[str, Any], default: Workload | None = None) -> Workload:
    """The workload of the given fields. Raises UsageError with their flags. ``default``: the nominal lengths that are
    not given."""
    lengths = given.get("lengths")
    nominal = default or Workload()
    of_default = {"input_tokens": nominal.input_tokens, "output_tokens": nominal.output_tokens}
    if isinstance(lengths, OWN_MEANS):
        what = "--lengths mixes:..." if isinstance(lengths, Mixes) else f"the file of {_file_flag(lengths)}"
        for name in of_default:
            if name in given:
                flag = FLAGS[name]
                raise UsageError(f"{flag} {given[name]}: {what} sets the lengths of requests; leave {flag} out")
        of_default = {}
    return validate(Workload, {**of_default, **given}, where="the workload", names=FLAGS)


LOAD = "load"  # title of a group of flags
Burstiness = Annotated[float, Gt(0)]
BURSTINESS = setting(
    1.0,
    "open loop: shape of the gamma-distributed gaps between arrivals; smaller values are burstier",
    LOAD,
    value="B",
    otherwise="1: Poisson",
)


class Closed(Frozen):
    """Closed loop: ``concurrency`` requests in flight, a new one for each that finishes.

    ``per_gpu``: the requests per GPU, if the load was given by them.
    """

    kind: Literal["concurrency"] = "concurrency"
    concurrency: int = Field(ge=1)
    per_gpu: Annotated[float | None, Incidental] = Field(default=None, gt=0)

    @property
    def value(self) -> float:
        return self.concurrency


class Open(Frozen):
    """Open loop: requests arrive at ``rate_rps``, independently of the server."""

    kind: Literal["rate"] = "rate"
    rate_rps: float = Field(gt=0)
    burstiness: Burstiness = BURSTINESS

    @property
    def value(self) -> float:
        return self.rate_rps

    @property
    def mean_rps(self) -> float:
        return self.rate_rps


class Ramp(Frozen):
    """Open loop whose rate goes from ``start_rps`` to ``end_rps`` over the level's requests.

    ``shape`` linear or exponential in the number of requests sent. Its key is the end rate.
    """

    kind: Literal["ramp"] = "ramp"
    start_rps: float = Field(gt=0)
    end_rps: float = Field(gt=0)
    shape: Literal["linear", "exponential"] = setting("linear", "how a ramp grows", LOAD)
    burstiness: Burstiness = BURSTINESS

    @property
    def value(self) -> float:
        return self.end_rps

    @property
    def mean_rps(self) -> float:
        """The mean rate. The rate is a function of the share x of sent requests, so n requests take n times the
        integral of 1 / rate(x) over x from 0 to 1. The mean rate is the inverse of that integral."""
        a, b = self.start_rps, self.end_rps
        if a == b:
            return a
        ratio = math.log(b / a)
        return (b - a) / ratio if self.shape == "linear" else ratio / (1 / a - 1 / b)


class Replay(Frozen):
    """Open loop: each request of a compiled workload is sent at its due time, or after the answers that it waits for
    and its pause. ``speed``: divisor of the source's times; compiled times are already divided."""

    kind: Literal["replay"] = "replay"
    speed: float = Field(default=1.0, gt=0)

    @property
    def value(self) -> float:
        return self.speed


Load = Annotated[Closed | Open | Ramp | Replay, Field(discriminator="kind")]


def title(load: Load) -> str:
    """A load in words."""
    if isinstance(load, Closed):
        return f"concurrency {load.concurrency}"
    if isinstance(load, Ramp):
        return f"{load.start_rps:g} to {load.end_rps:g} requests/s"
    if isinstance(load, Replay):
        return "replay" if load.speed == 1 else f"replay at {load.speed:g} times the speed"
    return f"{load.rate_rps:g} requests/s"


Bound = Annotated[float, Gt(0), PerUnit(1000)]
SLO = "SLO"  # title of a group of flags
SLO_BOUNDS = ("ttft", "tpot", "e2el", "itl_p99", "stall")


class Slo(Frozen):
    """Bounds on the latencies of a request, in seconds (None: no bound). A request meets the SLO if every bound holds,
    a load if at least the share ``quantile`` of its requests do.

    ``itl_p99_s``: bound on the 99th percentile of a request's gaps between chunks; ``stall_s``: on its longest gap.
    Goodput is the highest rate that meets the SLO (DistServe, Zhong et al., OSDI 2024).
    """

    ttft_s: Bound | None = setting(None, "longest time to first token (TTFT)", SLO, "--ttft-ms", value="MS")
    tpot_s: Bound | None = setting(
        None, "longest time per output token after the first (TPOT)", SLO, "--tpot-ms", value="MS"
    )
    e2el_s: Bound | None = setting(
        None, "longest time from sending a request to its last token (E2EL)", SLO, "--e2el-ms", value="MS"
    )
    itl_p99_s: Bound | None = setting(
        None, "largest 99th percentile of a request's gaps between chunks", SLO, "--itl-p99-ms", value="MS"
    )
    stall_s: Bound | None = setting(None, "longest gap between chunks of a request", SLO, "--stall-ms", value="MS")
    quantile: Share = setting(SLO_QUANTILE, "share of requests that must meet the SLO", SLO, "--quantile", value="Q")

    @property
    def bounded(self) -> bool:
        return self.of_gaps or (self.ttft_s, self.tpot_s, self.e2el_s) != (None, None, None)

    @property
    def of_gaps(self) -> bool:
        """Whether gaps between chunks, which only records have, are bounded."""
        return (self.itl_p99_s, self.stall_s) != (None, None)

    @property
    def label(self) -> str:
        """``ttft2000ms-tpot50ms-q0.95``, for the name of a search's file."""
        bounds = [f"{name.replace('itl_p99', 'itl-p99-')}{ms:g}ms" for name, ms in self.bounds_ms.items()]
        return "-".join([*bounds, f"q{self.quantile:g}"])

    @property
    def bounds_ms(self) -> dict[str, float]:
        """Bounded latency -> its bound in ms."""
        bounds_s = {name: getattr(self, f"{name}_s") for name in SLO_BOUNDS}
        return {name: 1000 * bound_s for name, bound_s in bounds_s.items() if bound_s is not None}

    @property
    def flag(self) -> str:
        """``ttft_ms=2000,tpot_ms=50``, the text for `parse_slo`."""
        return ",".join(f"{name}_ms={ms:g}" for name, ms in self.bounds_ms.items())

    def stress(self, ttft_s: Column, tpot_s: Column, e2el_s: Column) -> Column:
        """For each request the largest latency over its bound; a request with at most 1 meets the SLO."""
        import numpy as np

        worst = np.zeros_like(e2el_s)
        for times_s, bound_s in ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s), (e2el_s, self.e2el_s)):
            if bound_s is not None:
                worst = np.maximum(worst, times_s / bound_s)
        return worst

    def stress_of(self, columns: Iterable[Any], tpot: float = 1.0, ttft: float = 1.0) -> float:
        """The SLO's quantile of `stress`. ``tpot``: factor on TPOT and E2EL; ``ttft``: on TTFT. ``columns``: TTFT, TPOT
        and E2EL of every request in seconds."""
        ttft_s, tpot_s, e2el_s = columns
        return self.at_quantile(self.stress(ttft_s * ttft, tpot_s * tpot, e2el_s * tpot))

    def at_quantile(self, stresses: Column) -> float:
        """The SLO's quantile of the `stress` of some requests."""
        import numpy as np

        return float(np.sort(stresses)[max(math.ceil(self.quantile * len(stresses)) - 1, 0)])


def parse_slo(text: str, quantile: float) -> Slo:
    """Parse the values of --slo (``ttft_ms=2000,tpot_ms=50``) and --slo-quantile. Raises UsageError."""
    expected = "ttft_ms=2000,tpot_ms=50[,e2el_ms=N,itl_p99_ms=N,stall_ms=N], above 0"
    bounds: dict[str, float] = {}
    for match, ms in bounds_in_ms(text, "--slo", f"({'|'.join(SLO_BOUNDS)})", expected):
        if f"{match[1]}_s" in bounds:
            raise UsageError(f"--slo {text}: {match[1]}_ms is there twice; keep one")
        bounds[f"{match[1]}_s"] = ms / 1000
    return validate(Slo, {**bounds, "quantile": quantile}, where=f"--slo {text}, --slo-quantile {quantile:g}")


def bounds_in_ms(text: str, flag: str, name: str, expected: str) -> Iterator[tuple[re.Match[str], float]]:
    """The parts of ``NAME_ms=NUMBER,...``: for each the match of the pattern ``name``, and the number of ms, above 0.

    Raises UsageError with ``flag`` and ``expected``.
    """
    for part in text.split(","):
        match = re.fullmatch(rf"\s*{name}_ms\s*=\s*(?P<ms>\d*\.?\d+(?:[eE][+-]?\d{{1,3}})?|\d+\.)\s*", part)
        ms = float(match["ms"]) if match else 0.0
        if not match or not 0 < ms < math.inf:
            raise UsageError(f"{flag} {text}: {part.strip()!r} is no bound; expected {expected}")
        yield match, ms


class RunKey(Frozen):
    """Identity of one level within an experiment: (load kind, load value, repeat).

    ``look``: number of the measurement, if an SLO search measures a level several times in a repeat.
    """

    kind: LoadKind
    value: float
    repeat: int = Field(default=0, ge=0)
    look: int = Field(default=0, ge=0)

    @property
    def stem(self) -> str:
        """File name without suffix: ``concurrency8``, ``rate2.5-r1``, ``rate2.5-look1``."""
        repeat, look = (f"-r{self.repeat}" if self.repeat else "", f"-look{self.look}" if self.look else "")
        return f"{self.kind}{self.value:g}{repeat}{look}"


class Level(Frozen):
    """One point of a sweep: a load for ``num_requests`` requests, with prompts from ``seed``."""

    load: Load
    repeat: int = Field(default=0, ge=0)
    look: int = Field(default=0, ge=0)
    num_requests: int = Field(ge=1)
    seed: int = Field(ge=0)

    @property
    def key(self) -> RunKey:
        return RunKey(kind=self.load.kind, value=self.load.value, repeat=self.repeat, look=self.look)
