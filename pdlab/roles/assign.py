"""Assign roles to engines for a given number of prefill engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlab.roles.observed import EngineLoad, Role


def assign(
    engines: Sequence[EngineLoad], prefill: int, *, most_running: float = 0.0, opened: int = 0
) -> dict[str, Role]:
    """Engine -> role, so that ``prefill`` engines prefill or are draining to prefill.

    Engines change that lose least: decoding engines with the fewest requests, and prefilling engines with the fewest
    waiting tokens. Draining engines change first in both directions. A new prefill engine drains until it decodes at
    most ``most_running`` requests. But at least ``opened`` engines take prompts at once, by fewest requests.
    """
    kept = sorted((each for each in engines if each.role != "decode"), key=_gives_up)
    taken = sorted((each for each in engines if each.role == "decode"), key=lambda each: (each.running, each.engine))
    fewer = max(len(kept) - prefill, 0)
    chosen = [*kept[fewer:], *taken[: max(prefill - len(kept), 0)]]
    roles: dict[str, Role] = {each.engine: "decode" for each in engines}
    waits = []
    for each in chosen:
        ready = each.role == "prefill" or each.running <= most_running
        roles[each.engine] = "prefill" if ready else "draining"
        if not ready:
            waits.append(each)
    short = opened - (len(chosen) - len(waits))
    for each in sorted(waits, key=lambda each: (each.running, each.engine))[: max(short, 0)]:
        roles[each.engine] = "prefill"
    return roles


def first_split(engines: int, p_min: int, d_min: int) -> tuple[int, int]:
    """(prefill, decode) engines before any load is known: half of the pool prefills, within the bounds."""
    prefill = min(max(engines // 2, p_min), engines - d_min)
    return prefill, engines - prefill


def _gives_up(engine: EngineLoad) -> tuple[bool, int, str]:
    """Sort key of the order in which engines return to decode: first draining engines, with the most requests first."""
    drains = engine.role == "draining"
    return not drains, -engine.running if drains else engine.waiting_prompt_tokens, engine.engine
