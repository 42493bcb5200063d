"""What to ask of a deployment: ``Workload`` (the requests), ``Load`` (how they arrive), ``Slo``, ``Sweep``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pdlab.spec import Frozen

WorkloadMode = Literal["mixed", "prefill-only", "decode-only"]


class Workload(Frozen):
    """Random-token requests of fixed lengths, in tokens.

    ``prefill-only`` asks for one output token; ``decode-only`` sends one input token, which
    measures decode without the cost of a real context (see docs/metrics.md).
    """

    input_tokens: int = Field(default=5000, ge=1)
    output_tokens: int = Field(default=250, ge=1)
    mode: WorkloadMode = "mixed"
    seed: int = Field(default=0, ge=0)

    @property
    def sent_input_tokens(self) -> int:
        """Input tokens of one request as sent."""
        return 1 if self.mode == "decode-only" else self.input_tokens

    @property
    def sent_output_tokens(self) -> int:
        """Output tokens asked of one request."""
        return 1 if self.mode == "prefill-only" else self.output_tokens


class Closed(Frozen):
    """Closed loop: ``concurrency`` requests in flight, a new one for each that finishes."""

    kind: Literal["concurrency"] = "concurrency"
    concurrency: int = Field(ge=1)

    @property
    def value(self) -> float:
        return self.concurrency


class Open(Frozen):
    """Open loop: requests arrive at ``rate_rps`` whatever the server does.

    ``burstiness`` is the shape of the gamma distribution of gaps: 1 is a Poisson process.
    """

    kind: Literal["rate"] = "rate"
    rate_rps: float = Field(gt=0)
    burstiness: float = Field(default=1.0, gt=0)

    @property
    def value(self) -> float:
        return self.rate_rps


Load = Annotated[Closed | Open, Field(discriminator="kind")]


class Slo(Frozen):
    """A request meets it when every bound holds, a load when at least ``quantile`` of requests do.

    Bounds in seconds; None is no bound. This is the goodput of DistServe (Zhong et al., OSDI 2024):
    the highest rate at which the share of requests within all bounds is at least the quantile.
    """

    ttft_s: float | None = Field(default=None, gt=0)
    tpot_s: float | None = Field(default=None, gt=0)
    e2el_s: float | None = Field(default=None, gt=0)
    quantile: float = Field(default=0.95, gt=0, lt=1)

    @model_validator(mode="after")
    def _some_bound(self) -> Slo:
        if self.ttft_s is None and self.tpot_s is None and self.e2el_s is None:
            raise ValueError("give at least one bound: ttft_s, tpot_s or e2el_s")
        return self

    @property
    def label(self) -> str:
        """``ttft2000ms-tpot50ms-q0.95``: names a search's file."""
        bounds = [(n, getattr(self, f"{n}_s")) for n in ("ttft", "tpot", "e2el")]
        return "-".join([*(f"{n}{1000 * s:g}ms" for n, s in bounds if s is not None), f"q{self.quantile:g}"])


class RunKey(Frozen):
    """Identity of one level within an experiment: (load kind, load value, repeat)."""

    kind: Literal["concurrency", "rate"]
    value: float
    repeat: int = Field(default=0, ge=0)

    @property
    def stem(self) -> str:
        """File name without suffix: ``concurrency8``, ``rate2.5-r1``."""
        return f"{self.kind}{self.value:g}" + (f"-r{self.repeat}" if self.repeat else "")


class Level(Frozen):
    """One point of a sweep: a load held for ``num_requests`` requests, prompts drawn from ``seed``."""

    load: Load
    repeat: int = Field(default=0, ge=0)
    num_requests: int = Field(ge=1)
    seed: int = Field(ge=0)

    @property
    def key(self) -> RunKey:
        return RunKey(kind=self.load.kind, value=self.load.value, repeat=self.repeat)


class Sweep(Frozen):
    """A workload under a list of levels."""

    workload: Workload
    levels: tuple[Level, ...] = Field(min_length=1)
