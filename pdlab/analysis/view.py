"""Which figures of measured curves are shown: which latency, which throughput, and its unit."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from pdlab.core.bounds import Metric, Statistic
from pdlab.core.gpu_count import COUNT_HELP, DEFAULT_COUNT, Count
from pdlab.core.schema import Frozen
from pdlab.core.settings import Positive, Share, setting

LatencyMode = Literal["token", "first_token", "chunk"]
ThroughputMetric = Literal["output", "input", "total"]
CountedRole = Literal["all", "prefill", "decode"]

DEFAULT_CHUNK = 16
GPUS_PER_NODE = 8
SHOWN = "what is shown"


class View(Frozen):
    """Which latency is shown, which statistic of it, which throughput, per node or not.

    Per node counts only the GPUs of ``role``; per GPU is a node of one. ``count``: the GPUs in use, or those of whole
    nodes, which are rented whole; a role's are always those in use. ``confidence``: level of every interval and
    verdict.
    """

    normalized: bool = setting(
        True,
        "throughput per node; --no-use-normalized: of the whole deployment",
        SHOWN,
        "--use-normalized",
    )
    gpus_per_node: Positive = setting(GPUS_PER_NODE, "GPUs of one node; with 1, throughput is per GPU", SHOWN)
    role: CountedRole = setting(
        "all",
        "divide by all GPUs, or only by those of prefill or of decode; the last two leave collocated experiments out",
        SHOWN,
        "--per-role",
    )
    latency_mode: LatencyMode = setting(
        "token",
        "latency of the throughput plot: token = TPOT, first_token = TTFT, chunk = (chunk size - 1) * TPOT + TTFT",
        SHOWN,
        otherwise="token; first_token if no level has a TPOT",
    )
    chunk_size: Positive = setting(DEFAULT_CHUNK, "with --latency-mode chunk: chunk size", SHOWN, value="TOKENS")
    use_interactivity: bool = setting(
        False,
        "show interactivity in place of latency: 1000 / TPOT in ms, the tokens/s of one user (higher is better)",
        SHOWN,
    )
    throughput_metric: ThroughputMetric = setting(
        "output", "which tokens the throughput counts; the points always show requests/s too", SHOWN
    )
    statistic: Statistic = setting(
        "p50",
        "statistic of TTFT and TPOT over the requests of a level",
        SHOWN,
        "--stat",
        otherwise="p50, the median; the mean if no level has a median",
    )
    confidence: Share = setting(0.95, "confidence level of intervals and verdicts", SHOWN, value="P")
    count: Count = setting(DEFAULT_COUNT, COUNT_HELP, SHOWN, "--count-gpus")

    @model_validator(mode="after")
    def _interactivity_is_of_tokens(self) -> View:
        if self.use_interactivity and self.latency_mode != "token":
            raise ValueError("interactivity is 1000/TPOT: it works only with the latency mode token")
        return self

    @property
    def lower_is_better(self) -> bool:
        """Direction of `pdlab.analysis.curves.Point.latency`: interactivity is better when higher."""
        return not self.use_interactivity

    @property
    def latency_metrics(self) -> tuple[Metric, ...]:
        """The latencies that the latency axis is made of."""
        of: dict[LatencyMode, tuple[Metric, ...]] = {
            "token": ("tpot",),
            "first_token": ("ttft",),
            "chunk": ("ttft", "tpot"),
        }
        return of[self.latency_mode]

    @property
    def latency_name(self) -> str:
        """Name of the latency axis, without unit."""
        if self.use_interactivity:
            return "interactivity"
        return {"token": "TPOT", "first_token": "TTFT", "chunk": f"{self.chunk_size}-token chunk latency"}[
            self.latency_mode
        ]

    @property
    def latency_unit(self) -> str:
        return "tokens/s per user" if self.use_interactivity else "ms"
