"""Sources of step times: the interface of a source, tables on a grid, and a correction. Pure.

A simulator gets the time of each step from a source, and nothing else of an engine's speed. Sources are
`pdlab.sim.step_time.StepCosts` (fitted constants), `Tabulated` (times of a grid), and `Corrected`, which adds a
`Correction`:

    step = host + sequence x batch + sync x layers x log2(TP) + factor x decode + prefill_factor x (whole step - decode)

where ``decode`` is the GPU time of only the decoding sequences. The host's time is a separate term, because it belongs
to a version of the engine and not to a GPU. The wait of TP ranks for each other in every layer is another term, because
tables have the time of an isolated all-reduce. The tables end with the logits: ``sequence`` is the time to sample a
token and to return it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple, Protocol

from annotated_types import Ge, Gt
from pydantic import Field, model_validator

from pdlab.core.deployment import Collocated, Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.core.text import counted

LEAST_CHUNK = 16.0  # prefill tokens: the attention of fewer tokens counts as that of this number
SHORT_CHUNK = 32.0  # prefill tokens: a step with fewer has one prompt, whatever its context


class Limits(Frozen):
    """The limits of a source. ``tokens``: of one step. ``batch``: sequences. ``context``: tokens of a sequence's
    context. ``prefill_tokens``: prefill tokens of a prompt in one step. ``prefix``: tokens of that prompt before
    them."""

    tokens: float = math.inf
    batch: float = math.inf
    context: float = math.inf
    prefill_tokens: float = math.inf
    prefix: float = math.inf


NO_LIMITS = Limits()


class OutsideTables(UsageError):
    """A step that is too far beyond the tables of a source."""


class StepSource(Protocol):
    """The seconds of an engine's steps. ``admit_s``: further seconds per token of a request that joins a batch."""

    @property
    def admit_s(self) -> float: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def beyond(self) -> float:
        """The largest requested step, as a multiple of the limits. Up to 1, no step is extrapolated."""
        ...

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        """Seconds of one step of ``batch`` sequences of mean ``context``, and of ``prefill_tokens``.
        ``prefill_context``: the mean number of tokens before each prefill token (None: ``context``). Raises
        OutsideTables far beyond ``limits``."""
        ...


class LinearTable(Frozen):
    """A function of one argument: its values ``ys`` in seconds at growing ``xs``, linear between them."""

    xs: tuple[float, ...] = Field(min_length=2)
    ys: tuple[float, ...]

    @model_validator(mode="after")
    def _is_one(self) -> LinearTable:
        if len(self.xs) != len(self.ys):
            raise ValueError(f"has {counted(len(self.xs), 'argument')} and {counted(len(self.ys), 'value')}")
        _check_growing("xs", self.xs)
        return self

    def at(self, x: float) -> float:
        """Seconds at ``x``. Below the first argument it is the first value. The caller checks the other end."""
        xs, ys = self.xs, self.ys
        i = _cell(xs, x)
        f = _share(xs, i, x)
        return ys[i] + (ys[i + 1] - ys[i]) * f


class BilinearTable(Frozen):
    """A function of two arguments: its values in seconds, ``z[i][j]`` at ``xs[i]`` and ``ys[j]``, bilinear between."""

    xs: tuple[float, ...] = Field(min_length=2)
    ys: tuple[float, ...] = Field(min_length=2)
    z: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _is_one(self) -> BilinearTable:
        if len(self.z) != len(self.xs) or any(len(row) != len(self.ys) for row in self.z):
            raise ValueError(f"needs {counted(len(self.xs), 'row')} of {counted(len(self.ys), 'value')}")
        _check_growing("xs", self.xs)
        _check_growing("ys", self.ys)
        return self

    def at(self, x: float, y: float) -> float:
        """Seconds at ``x`` and ``y``. Below a first argument it is the value there. The caller checks upper ends."""
        xs, ys = self.xs, self.ys
        i, j = _cell(xs, x), _cell(ys, y)
        f, g = _share(xs, i, x), _share(ys, j, y)
        low, high = self.z[i], self.z[i + 1]
        one = low[j] + (low[j + 1] - low[j]) * g
        other = high[j] + (high[j + 1] - high[j]) * g
        return one + (other - one) * f


def _check_growing(name: str, values: tuple[float, ...]) -> None:
    if any(not here < after for here, after in pairwise(values)):
        raise ValueError(f"{name} must grow, got {list(values)}")


def _cell(grid: tuple[float, ...], value: float) -> int:
    return min(max(bisect_right(grid, value) - 1, 0), len(grid) - 2)


def _share(grid: tuple[float, ...], cell: int, value: float) -> float:
    return max((value - grid[cell]) / (grid[cell + 1] - grid[cell]), 0.0)


class StepSeconds(NamedTuple):
    """GPU seconds of one step. ``decode_s``: of a step with only its decoding sequences. ``whole_s``: of the whole
    step. ``beyond``: its size as a multiple of the limits of the tables."""

    decode_s: float
    whole_s: float
    beyond: float


FARTHEST = 4.0  # times a limit: up to there tables are extrapolated, because attention and matrices are roughly linear


class Tabulated(Frozen):
    """Times of an engine's step on a grid, in seconds of the GPU, without the host's share.

    ``shared``: everything but attention, by tokens of the step. ``decode``: a whole step without prefill, by batch and
    mean context. ``generation_attention``: attention of the decoding sequences in a step with prefill, by batch and
    mean context. ``context_attention``: attention of one prompt's chunk, by its tokens and the tokens before it.
    ``experts``: the share of routed experts in ``shared``, by tokens of the step (None: the model has none).
    ``provenance``: the source of the times, in words. ``estimated``: the kinds of values that were not measured with
    this model, GPU and engine.
    """

    shared: LinearTable
    decode: BilinearTable
    generation_attention: BilinearTable
    context_attention: BilinearTable
    experts: LinearTable | None = None
    limits: Limits
    provenance: str
    estimated: tuple[str, ...] = ()
    admit_s: float = 0.0

    @model_validator(mode="after")
    def _covers_its_limits(self) -> Tabulated:
        ends = {
            "tokens": self.shared.xs[-1],
            "batch": min(self.decode.xs[-1], self.generation_attention.xs[-1]),
            "context": min(self.decode.ys[-1], self.generation_attention.ys[-1]),
            "prefill_tokens": self.context_attention.xs[-1],
            "prefix": self.context_attention.ys[-1],
        }
        for name, end in ends.items():
            limit = getattr(self.limits, name)
            if limit > end:
                raise ValueError(f"limits: {name} {limit} is beyond the grid, which ends at {end:g}")
        return self

    def parts(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> StepSeconds:
        """The parts of one step, by the arguments of `StepSource.step_s`. Raises OutsideTables."""
        limits = self.limits
        beyond = max(batch / limits.batch, context / limits.context) if batch else 0.0
        if beyond > FARTHEST:
            raise self._outside(batch, prefill_tokens, context)
        decode_s = self.decode.at(batch, context) if batch else 0.0
        if not prefill_tokens:
            return StepSeconds(decode_s, decode_s, beyond)
        mean = context if prefill_context is None else prefill_context
        if mean >= prefill_tokens / 2 or prefill_tokens < SHORT_CHUNK:
            chunk, count, prefix = prefill_tokens, 1.0, max(mean - prefill_tokens / 2, 0.0)
        else:  # several prompts in one step, each of twice the mean context
            chunk = max(2 * mean, LEAST_CHUNK)
            count, prefix = prefill_tokens / chunk, 0.0
        tokens = (batch + prefill_tokens) / limits.tokens
        beyond = max(beyond, tokens, chunk / limits.prefill_tokens, prefix / limits.prefix)
        if beyond > FARTHEST:
            raise self._outside(batch, prefill_tokens, mean)
        whole_s = self.shared.at(batch + prefill_tokens) + count * self.context_attention.at(chunk, prefix)
        if batch:
            whole_s += self.generation_attention.at(batch, context)
        return StepSeconds(decode_s, max(whole_s, decode_s), beyond)

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        return self.parts(batch, prefill_tokens, context, prefill_context).whole_s

    def _outside(self, batch: float, prefill_tokens: float, context: float) -> OutsideTables:
        limits = self.limits
        return OutsideTables(
            f"a step of {batch:.0f} sequences and {prefill_tokens:.0f} prefill tokens at {context:.0f} tokens of "
            f"context is more than {FARTHEST:g} times beyond the step times ({self.provenance}), which end at "
            f"{limits.batch:.0f} sequences, {limits.prefill_tokens:.0f} prefill tokens and {limits.context:.0f} tokens"
            "; use shorter requests or fewer in flight"
        )


def parallelism_of(deployment: Deployment) -> str:
    """The parallelism of one engine of each role: ``collocated tp4``. The number of engines and their placement do not
    change the steps of one engine."""
    return ", ".join(f"{role} {pool.degrees}" for role, pool in deployment.pools.items())


class FittedLevel(Frozen):
    """A measured level of a fit: the labels of its deployment, lengths and load, and its mean figures in seconds. The
    figures tell it from a repeat."""

    deployment: str
    lengths: str
    load: str
    tpot_s: float | None
    ttft_s: float

    @property
    def setting(self) -> tuple[str, str]:
        """The parallelism of its engines, and lengths."""
        return parallelism_of(Deployment(topology=parse_label(self.deployment))), self.lengths

    @property
    def is_collocated(self) -> bool:
        """Whether its engines both prefill and decode."""
        return isinstance(parse_label(self.deployment), Collocated)


class Correction(Frozen):
    """A correction of tabulated steps by a stack's own levels.

    ``host_ms``: the host's time per step. ``factor``: on the GPU time of decoding sequences. ``prefill_factor``: on the
    time that prefill adds. ``sync_us``: in every step, for each doubling of TP and each layer with two all-reduces.
    ``sequence_us``: in every step, for each decoding sequence. ``covariance``: of (host_ms, ln factor, ln
    prefill_factor, sync_us), 4 x 4; None: unknown. ``fitted_levels``: the number of measured levels in its fit (0: a
    prior). ``fitted_settings``: the number of pairs of parallelism and lengths among those of collocated engines, of
    which the errors after levels are known. ``levels``: these levels (fewer than ``fitted_levels``: the others are not
    recorded).
    """

    host_ms: Annotated[float, Ge(0)] = 0.0
    factor: Annotated[float, Gt(0)] = 1.0
    prefill_factor: Annotated[float, Gt(0)] = 1.0
    sync_us: Annotated[float, Ge(0)] = 0.0
    sequence_us: Annotated[float, Ge(0)] = 0.0
    covariance: tuple[tuple[float, float, float, float], ...] | None = Field(default=None, min_length=4, max_length=4)
    fitted_levels: Annotated[int, Ge(0)] = 0
    fitted_settings: Annotated[int, Ge(0)] = 0
    levels: tuple[FittedLevel, ...] = ()
    source: str = ""

    @model_validator(mode="after")
    def _has_variances(self) -> Correction:
        if self.covariance is not None and any(row[index] < 0 for index, row in enumerate(self.covariance)):
            raise ValueError("covariance: a variance cannot be below 0")
        return self

    @property
    def host_sd_ms(self) -> float | None:
        """Standard deviation of ``host_ms``; None: not known."""
        return None if self.covariance is None else math.sqrt(self.covariance[0][0])

    @property
    def levels_recorded(self) -> bool:
        """Whether ``levels`` has all levels of the fit."""
        return len(self.levels) == self.fitted_levels

    def with_levels(self, earlier: Correction, levels: Sequence[FittedLevel]) -> Correction:
        """This correction, as fitted to the levels of an earlier one and to ``levels``. A setting counts once. Levels
        that are not recorded may be of the recorded settings, so they add none to these."""
        every = (*earlier.levels, *levels)
        settings = len({each.setting for each in every if each.is_collocated})
        return self.model_copy(
            update={
                "fitted_levels": earlier.fitted_levels + len(levels),
                "fitted_settings": settings if earlier.levels_recorded else max(settings, earlier.fitted_settings),
                "levels": every,
            }
        )


NO_CORRECTION = Correction()
# `Correction.sequence_us` of priors and fits, which have only the other parameters: the median over 17 public
# stacks. It is above 0 in each stack. Without any one of them, the median changes by less than 1.
SEQUENCE_US = 7.0


class Corrected:
    """Tabulated steps with a correction. ``doublings``: layers of two all-reduces x log2(TP)."""

    __slots__ = ("beyond", "correction", "host_s", "sequence_s", "tables")

    def __init__(self, tables: Tabulated, correction: Correction, doublings: float = 0.0) -> None:
        self.tables, self.correction = tables, correction
        self.beyond = 0.0
        self.host_s = correction.host_ms * 1e-3 + correction.sync_us * 1e-6 * doublings
        self.sequence_s = correction.sequence_us * 1e-6

    @property
    def admit_s(self) -> float:
        return self.tables.admit_s

    @property
    def limits(self) -> Limits:
        return self.tables.limits

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        decode_s, whole_s, beyond = self.tables.parts(batch, prefill_tokens, context, prefill_context)
        if beyond > self.beyond:
            self.beyond = beyond
        correction = self.correction
        own_s = self.host_s + self.sequence_s * batch
        return own_s + correction.factor * decode_s + correction.prefill_factor * (whole_s - decode_s)
