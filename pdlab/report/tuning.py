"""Whether the collocated baseline of PD was tuned, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdlab.analysis.curves import Curve
from pdlab.analysis.headline import Headline
from pdlab.core.text import counted, listed, percent, plain
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
    if reference.tuning is not None:
        return f"Baseline {headline.reference}: {tuning_text(reference.tuning)}."
    if reference.origin == "imported":
        return f"Baseline {headline.reference}: whether it was tuned is unknown."
    settings = dict(reference.deployment.engine_kwargs)
    for pool in reference.deployment.pools.values():
        settings |= pool.engine_kwargs
    settings_words = (
        f"as launched, with {settings_text(settings)}" if settings else "the defaults of vLLM and of the launcher"
    )
    return (
        f"Baseline {headline.reference}: not tuned, {settings_words} (tune_baseline: in an experiment's file tunes it)."
    )


def tuning_text(tuning: Tuning) -> str:
    """``tuned, the best of 7 settings at TPOT p50 <= 12 ms is max_num_seqs=64 (...)``.

    In brackets: its margins over the second and over the experiment's own settings, the grid, and the folder of the
    levels.
    """
    grid = listed([f"{knob} {', '.join(str(_value(v)) for v in values)}" for knob, values in tuning.grid.items()])
    evidence = (
        f"{counted(tuning.repeats, 'repeat')} at {', '.join(tuning.loads)}; tried: {grid}; levels in {tuning.folder}"
    )
    known = [tried for tried in tuning.tried if tried.tokens_per_s is not None]
    many = f"{len(tuning.tried)} settings at {tuning.bounds}"
    if not known:
        return f"tuned without a result, none of the {many} is within the bounds at any load ({evidence})"
    margin = ""
    if tuning.settings and tuning.over_launched:
        ratio, low, high = tuning.over_launched
        ends = f"{percent(low - 1)} to {percent(high - 1)} %" if tuning.resolved else "not distinguishable"
        margin = f"{percent(ratio - 1)} % above {OWN} ({ends}); "
    elif tuning.settings:
        margin = f"{OWN}: not within the bounds, or not measured; "
    second = ""
    if len(known) > 1 and known[1].tokens_per_s:
        ahead = (known[0].tokens_per_s or 0.0) / known[1].tokens_per_s - 1
        second = f"{percent(ahead)} % above the second, {settings_text(known[1].settings)}; "
    return f"tuned, the best of {many} is {settings_text(tuning.settings)} ({margin}{second}{evidence})"


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
