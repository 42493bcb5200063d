"""The settings of a sweep, and those of the command ``bench``. It imports nothing that measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import Field, model_validator

from pdlab.bench import levels
from pdlab.bench.fill import FillCache
from pdlab.bench.levels import FINAL_HOLD_S
from pdlab.core import defaults
from pdlab.core.arguments import MAX_HOLD_S, MAX_LOAD, MAX_REPEATS, MAX_REQUESTS
from pdlab.core.commands import LAUNCH, PDLAB, PLAN, RUN_BENCH
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen, Incidental
from pdlab.core.settings import (
    AboveZero,
    FlagsOf,
    PerUnit,
    Positive,
    Processes,
    Seconds,
    SecondsOrNone,
    Settings,
    Text,
    given_of,
    setting,
    written_numbers,
)
from pdlab.core.workload import LOAD, REQUESTS, Open, Ramp, Slo, Workload

RECOVER_S = 900.0
EPILOG = f"""\
examples:
  {RUN_BENCH}
      the default levels against what {LAUNCH} serves on this machine
  {RUN_BENCH} -e collocated-4xtp2 -c 4,16,64 --itl 5000 --otl 250 --repeats 3
      three levels, each three times, so that the intervals include the noise between repeats
  {RUN_BENCH} --slo ttft_ms=2000,tpot_ms=50
      the highest request rate within an SLO
  {RUN_BENCH} --workload conversations.yaml
      replay sessions: a request is sent when it is due and the answer before it has ended
  {PDLAB} experiment pd-ratio --dry-run
      a whole experiment of configs/sweeps/
  {PDLAB} ratio --prefill bm_results/p --decode bm_results/d
      the P:D ratio from measured prefill-only and decode-only rates

Exit codes: 0 all levels valid, 1 failed, 2 bad input or no server, 3 some level invalid, 130 interrupted.
Metrics: docs/metrics.md; gates: docs/methodology.md.
"""


SLO_SEARCH = "search for the highest rate within an SLO"  # title of a group of flags
TWO_STARTS = "{} and {} both set the start of the search: give one of the two"
SERVER, RESULTS = "server", "results"  # titles of groups of flags
Minutes = Annotated[float, Gt(0), PerUnit(1 / 60)]
HoldSeconds = Annotated[Seconds, Le(MAX_HOLD_S)]


class LevelOptions(Settings):
    """Settings for measuring each level, in a sweep and in every sweep of an experiment."""

    prompts_per_level: Annotated[int, Ge(1), Le(MAX_REQUESTS)] | None = setting(
        None,
        "requests of a level",
        REQUESTS,
        otherwise="10 per unit of concurrency; at a request rate, as many as --hold-s takes",
    )
    hold_s: HoldSeconds = setting(
        levels.HOLD_S, "hold a request rate for S seconds, or 10 times E2EL if that is longer", REQUESTS, value="S"
    )
    fill_cache: FillCache = setting(
        "auto",
        "fill every engine's KV pool once before the first level, with prompts that get one output token each; auto: "
        "only if that takes at most 3 minutes, and not on CPUs of this machine",
        REQUESTS,
    )
    timeline: bool = setting(
        True,
        "store the parts of each request's time, which the servers report, with the requests (docs/timeline.md)",
        REQUESTS,
        both_ways=True,
    )
    request_timeout_s: Seconds = setting(
        defaults.REQUEST_TIMEOUT_S,
        "a request without a complete answer after S seconds has failed",
        REQUESTS,
        value="S",
    )
    recover_s: Annotated[SecondsOrNone, Incidental] = setting(
        RECOVER_S,
        "if a replica dies during a level, wait up to S seconds until all replicas run again, and measure that level "
        "once more; 0: end the sweep",
        REQUESTS,
        value="S",
    )


class SweepFlags(LevelOptions):
    """The settings of a sweep that have a flag of their own."""

    client_processes: Processes | None = setting(
        None,
        "largest number of processes of the load generator, which adds them while it is saturated",
        LOAD,
        otherwise="half of the cores",
    )
    soak_s: Minutes | None = setting(
        None, "hold one load for MINUTES and show TPOT and TTFT over time", REQUESTS, "--soak", value="MINUTES"
    )
    repeats: Annotated[int, Ge(1), Le(MAX_REPEATS)] = setting(
        1, "measure every level, and search, N times, with new prompts", REQUESTS
    )
    smoke: bool = setting(
        False, "measure one short level (the first); results go to EXP_NAME-smoke", REQUESTS, "-s", "--smoke"
    )
    base_url: str = setting(defaults.BASE_URL, "URL of the server", SERVER, "-u", "--base-url", value="URL")
    model: str | None = setting(
        None,
        "model name in the requests",
        SERVER,
        "-m",
        "--served-model-name",
        value="NAME",
        otherwise="the launcher's, or the only one served",
    )
    tokenizer: str | None = setting(
        None,
        "tokenizer: a folder or a Hugging Face id",
        SERVER,
        value="DIR|ID",
        otherwise="the launcher's, or the served model's name",
    )
    gpus: Positive | None = setting(None, "GPUs of the deployment, if the launcher did not publish it", SERVER)
    name: str | None = setting(
        None,
        "folder of the results",
        RESULTS,
        "-e",
        "--exp-name",
        value="NAME",
        otherwise="label of the running deployment; a mode other than mixed is appended",
    )
    out: Path = setting(defaults.RESULTS, "results go to DIR/EXP_NAME", RESULTS, value="DIR")
    resume: bool = setting(False, "skip levels that are finished", RESULTS)
    force: bool = setting(False, "measure finished levels again and replace them", RESULTS)
    retry_invalid: bool = setting(
        False,
        "after all levels, measure each invalid level once more (with --resume also those of earlier runs); the second "
        "result counts, the first moves to EXP_NAME/replaced/",
        RESULTS,
    )


ALL_RATES_RPS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)
# Fields that do not go with a replay, whose file sets the requests and their times.
OF_ONE_LOAD = (
    *("type", "concurrency", "request_rate", "per_gpu", "ramp", "growth", "arrivals", "mixes", "final", "hold_s"),
    *("slo", "smoke", "soak_s", "prompts_per_level"),
    *(f"requests.{name}" for name in Workload.model_fields if name != "seed"),
)

N = TypeVar("N", int, float)


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """``all`` or ``4,8,16``. Raises UsageError."""
    if text.strip() == "all":
        return defaults.CONCURRENCIES
    example = "--concurrency: expected all or whole numbers such as 4,8,16"
    values = []
    for part in text.split(","):
        if not part.strip().isascii() or not part.strip().isdigit():
            raise UsageError(f"{example}, got {text!r}")
        values.append(int(part))
    return distinct("--concurrency", values)


def parse_rates(text: str) -> tuple[float, ...]:
    """``all`` or ``1,2.5,4`` (requests/s). Raises UsageError."""
    if text.strip() == "all":
        return ALL_RATES_RPS
    return _floats("--request-rate", text, "all or numbers such as 1,2.5,4 (requests/s)")


def parse_per_gpu(text: str) -> tuple[float, ...]:
    """``1,2.5,4`` requests in flight per GPU. Raises UsageError."""
    return _floats("--concurrency-per-gpu", text, "numbers such as 1,2,4")


def _floats(flag: str, text: str, expected: str) -> tuple[float, ...]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag}: expected {expected}, got {text!r}") from error
    return distinct(flag, values)


def distinct(flag: str, values: list[N]) -> tuple[N, ...]:
    for value in values:
        if not 0 < value <= MAX_LOAD:
            raise UsageError(f"{flag}: {value:g} is outside 0 < value <= {MAX_LOAD}")
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise UsageError(f"{flag}: {twice[0]:g} is given twice; use --repeats to measure a level again")
    return tuple(values)


CONCURRENCIES = Text(parse_concurrencies, written_numbers)
RATES, PER_GPU = Text(parse_rates, written_numbers), Text(parse_per_gpu, written_numbers)


class SearchOptions(Frozen):
    """Start and end of a search. ``resolution``: it ends when the ratio of neighbouring rates is below 1 + resolution.

    ``start_rps`` None: from the rates measured before, else from the closed-loop levels, else 1; from there it goes by
    a factor ``step``, then by more, up to 2. ``max_points``: the largest number of levels, which share the allowed
    error. ``longest_s``: the longest first level, if independent requests are lacking. ``start_from`` plan: the command
    line sets ``start_rps`` and ``step`` by the simulator, on ``hardware`` (None: that of the deployment), before
    anything is measured.
    """

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    resolution: Annotated[float, Gt(0), Le(1)] = setting(
        0.1,
        "end when the lowest failing rate is at most (1 + R) times the highest passing rate",
        SLO_SEARCH,
        "--slo-resolution",
        value="R",
    )
    start_rps: AboveZero | None = setting(
        None,
        "first rate of the search",
        SLO_SEARCH,
        "--slo-start",
        value="RATE",
        otherwise="the rates that the folder has; without any, half of the highest that closed loops reached, or 1",
    )
    step: float = Field(default=2.0, gt=1, le=2)
    max_points: int = Field(default=20, ge=2)
    longest_s: float = Field(default=600.0, gt=0)
    start_from: Literal["plan"] | None = setting(
        None, "with --slo: begin the search at the rate that the simulator finds", SLO_SEARCH
    )
    hardware: str | None = setting(
        None,
        f"with --start-from: calibrated step times, as with {PLAN}",
        SLO_SEARCH,
        value="NAME",
        needs="start_from",
        otherwise=f"{defaults.HARDWARE}, on local nodes {defaults.LOCAL_HARDWARE}",
    )

    @model_validator(mode="after")
    def _one_start(self) -> SearchOptions:
        if self.start_from is not None and self.start_rps is not None:
            raise ValueError(TWO_STARTS.format("start_from", "start_rps"))
        if self.hardware is not None and self.start_from is None:
            raise ValueError("hardware belongs to start_from: plan")
        return self


class BenchSettings(SweepFlags):
    """The flags of `SweepFlags`, and the flags from which loads, lengths and searches are made. They include the
    flags of the published script."""

    COMMAND = "bench"
    ABOUT = "Sweep load levels against a running deployment; results go to OUT/EXP_NAME/."
    EXAMPLES = EPILOG
    GROUPS = (LOAD, REQUESTS, SLO_SEARCH, SERVER, RESULTS)
    EXCLUSIONS = (
        ("resume", "force", "{} skips finished levels and {} replaces them: give one of the two"),
        ("mixes", "requests.lengths", "{} is a short form of {}: give one of the two"),
        ("search.start_from", "search.start_rps", TWO_STARTS),
        ("smoke", "slo", "{} is one short level, {} measures many: leave one of the two out"),
    )

    type: Literal["concurrency", "request-rate", "ramp"] | None = setting(
        None,
        "closed loop, open loop, or open loop of a growing rate",
        LOAD,
        "-t",
        "--type",
        otherwise="by the flags that are given, else concurrency",
    )
    concurrency: Annotated[tuple[int, ...], CONCURRENCIES] | None = setting(
        None,
        f"requests in flight; all = {','.join(map(str, defaults.CONCURRENCIES))}",
        LOAD,
        "-c",
        "--concurrency",
        value="all|N,N,...",
        otherwise="all",
    )
    request_rate: Annotated[tuple[float, ...], RATES] | None = setting(
        None,
        f"arrivals per second; all = {written_numbers(ALL_RATES_RPS)}",
        LOAD,
        "-r",
        "--request-rate",
        value="all|R,R,...",
        otherwise="all",
    )
    per_gpu: Annotated[tuple[float, ...], PER_GPU] = setting(
        (), "requests in flight per GPU of the deployment", LOAD, "--concurrency-per-gpu", value="N,N,..."
    )
    ramp: str | None = setting(
        None, "arrivals per second, growing from START to END over a level", LOAD, value="START:END[,...]"
    )
    growth: Annotated[dict[str, Any], FlagsOf(Ramp, prefix="ramp-", only=("shape",))] = Field(default_factory=dict)
    arrivals: Annotated[dict[str, Any], FlagsOf(Open, only=("burstiness",))] = Field(default_factory=dict)
    requests: Annotated[dict[str, Any], FlagsOf(Workload)] = Field(default_factory=dict)
    mixes: str | None = setting(
        None,
        "length mixes that take turns, each at RATE times the request rate (default 1); --lengths mixes:... has more "
        "options",
        REQUESTS,
        value="INPUT:OUTPUT[@RATE],...",
    )
    mix_every: AboveZero | None = setting(
        None, "with --mixes: each mix lasts S seconds", REQUESTS, value="S", otherwise="60", needs="mixes"
    )
    replay_file: Path | None = setting(
        None,
        "replay a workload file, a trace, or a file that pdlab workload wrote; the file sets when each request is due, "
        "how long it is and which answer it waits for",
        LOAD,
        "--workload",
        value="FILE",
    )
    final: bool = setting(False, f"hold every request rate for {FINAL_HOLD_S:g} s: figures to publish", REQUESTS)
    slo: str | None = setting(
        None,
        "find the highest request rate at which a share of --slo-quantile of the requests meets all bounds; bounds: "
        "ttft_ms, tpot_ms, e2el_ms, itl_p99_ms (of the gaps of one request), stall_ms (its longest gap)",
        SLO_SEARCH,
        value="ttft_ms=N,tpot_ms=N[,...]",
    )
    share: Annotated[dict[str, Any], FlagsOf(Slo, SLO_SEARCH, "slo-", only=("quantile",), needs="slo")] = Field(
        default_factory=dict
    )
    search: Annotated[dict[str, Any], FlagsOf(SearchOptions, needs="slo")] = Field(default_factory=dict)
    dry_run: bool = setting(
        False, "print the levels, and for how long rates are held; send nothing to the server", RESULTS
    )

    def check(self) -> None:
        if self.smoke and self.fill_cache == "yes":
            raise UsageError("--smoke is one short level, which fills no KV pool: leave --fill-cache out")
        if self.replay_file is not None and (unused := given_of(self, OF_ONE_LOAD)):
            raise UsageError(f"the file of --workload sets the requests and their times: leave {unused[0]} out")
