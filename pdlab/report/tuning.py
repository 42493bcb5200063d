"""Whether the collocated baseline of PD was tuned, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdlab.analysis.curves import Curve
from pdlab.analysis.headline import Headline
from pdlab.core.rendering import macro
from pdlab.core.text import plain
from pdlab.report.section import WORDS
from pdlab.results.schema import TriedSettings, Tuning

OWN = "the experiment's own settings"


def baseline_text(headline: Headline, curves: Sequence[Curve]) -> str | None:
    """``Baseline A: tuned, ...`` or ``not tuned, ...``.

    None if the reference is not collocated, or no PD deployment is compared with it.
    """
    by_label = {curve.label: curve.deployment for curve in curves}
    reference = next(curve for curve in curves if curve.label == headline.reference)
    others = [by_label[each.label] for each in headline.comparisons]
    if reference.deployment is None or reference.deployment.mode != "collocated":
        return None
    if all(other is None or other.mode == "collocated" for other in others):
        return None
    settings = dict(reference.deployment.engine_kwargs)
    for pool in reference.deployment.pools.values():
        settings |= pool.engine_kwargs
    tuned = tuning_text(reference.tuning) if reference.tuning else None
    return macro(WORDS, "baseline", reference, tuned, settings_text(settings) if settings else None)


def tuning_text(tuning: Tuning) -> str:
    """``tuned, the best of 7 settings at TPOT p50 <= 12 ms is max_num_seqs=64 (...)``.

    In brackets: its margins over the second and over the experiment's own settings, the grid, and the folder of the
    levels.
    """
    grid = [f"{knob} {', '.join(str(_value(v)) for v in values)}" for knob, values in tuning.grid.items()]
    known = [tried for tried in tuning.tried if tried.tokens_per_s is not None]
    return macro(WORDS, "tuned", tuning, known, grid, settings_text)


def tried_text(tried: TriedSettings) -> str:
    """``max_num_seqs=64: 1,234 output tokens/s``"""
    if tried.tokens_per_s is not None:
        result = f"{plain(tried.tokens_per_s)} output tokens/s"
    else:
        result = f"not measured ({tried.error})" if tried.error else "not within the bounds at any load"
    return f"{settings_text(tried.settings)}: {result}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """``max_num_batched_tokens=8192 max_num_seqs=64``; `OWN` for none."""
    return " ".join(f"{name}={_value(value)}" for name, value in settings.items()) or OWN


def _value(value: object) -> object:
    """As YAML and the launcher's flags write it."""
    return str(value).lower() if isinstance(value, bool) else value
