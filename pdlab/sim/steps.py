"""Chooses the step times of an engine: fitted constants, or tables with a correction."""

from __future__ import annotations

import math

from pdlab.core.catalog import ModelShape, config_of
from pdlab.core.deployment import Pool
from pdlab.sim import aic
from pdlab.sim.hardware import Hardware, Speculation, StepTables
from pdlab.sim.step_source import Corrected, Limits, StepSource, Tabulated
from pdlab.sim.step_time import step_costs


def steps_of(hardware: Hardware, shape: ModelShape, pool: Pool) -> StepSource:
    """The step times of one engine (one DP rank) of ``pool``, by the hardware's tables or else by its constants. Raises
    UsageError."""
    own = hardware.of(pool)
    source: StepSource = (
        step_costs(own, shape, pool)
        if own.steps is None
        else Corrected(tables_of(own.steps, shape, pool), own.steps.correction, waits_of(shape, pool))
    )
    return source if own.speculation is None else Speculative(source, own.speculation)


USUAL_ALL_REDUCES = 2  # of a layer, for the time `pdlab.sim.step_source.Correction.sync_us`


def waits_of(shape: ModelShape, pool: Pool) -> float:
    """The number of waits of ranks in a step: layers of two all-reduces, times the doublings of TP."""
    files = config_of(shape)
    count = aic.all_reduces(files.config, pool) if files is not None else USUAL_ALL_REDUCES
    return shape.layers * math.log2(pool.tp) * count / USUAL_ALL_REDUCES


# The most GPUs over which whole experts are spread where steps are near measured ones. Beyond one node the tables give
# 2,400 to 3,400 tokens/s of prefill per GPU for EP 32 of DeepSeek-V3 on H100. SGLang's team measured 6,500
# (lmsys.org/blog/2025-05-05-large-scale-ep).
COMPARED_EXPERT_RANKS = 8


def has_wide_experts(pool: Pool) -> bool:
    """Whether whole experts are on more GPUs than the tables are valid for."""
    return pool.expert_parallel and pool.tp * pool.dp > COMPARED_EXPERT_RANKS


def tables_of(tables: StepTables, shape: ModelShape, pool: Pool) -> Tabulated:
    """The tables of one engine of ``pool``, without a correction. Raises UsageError."""
    return aic.tabulate(
        shape, tables.system, tables.engine, tables.version, pool, tables.quant, tables.mode, tables.engine_version
    )


class Speculative:
    """Steps of an engine that guesses tokens, as steps of one token each. The time of such a step is the decode time
    divided by the tokens that a sequence gets in it, plus the unchanged prefill time. A step that checks n tokens of
    each sequence costs as much as a step of n times as many sequences with the same total KV cache."""

    __slots__ = ("accepted", "checked", "source")

    def __init__(self, source: StepSource, speculation: Speculation) -> None:
        self.source = source
        self.accepted, self.checked = speculation.acceptance_length, speculation.draft_tokens + 1

    @property
    def admit_s(self) -> float:
        return self.source.admit_s

    @property
    def limits(self) -> Limits:
        limits = self.source.limits
        return limits.model_copy(update={"batch": limits.batch / self.checked})

    @property
    def beyond(self) -> float:
        return self.source.beyond

    def step_s(
        self, batch: float, prefill_tokens: float, context: float, prefill_context: float | None = None
    ) -> float:
        if not batch:
            return self.source.step_s(batch, prefill_tokens, context, prefill_context)
        decode_s = self.source.step_s(batch * self.checked, 0, context / self.checked)
        if not prefill_tokens:
            return decode_s / self.accepted
        mean = context if prefill_context is None else prefill_context
        unguessed_s = self.source.step_s(batch, 0, context)
        return decode_s / self.accepted + self.source.step_s(batch, prefill_tokens, context, mean) - unguessed_s
