"""Which engines take which role, once it is known how many prefill. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.roles.observed import EngineLoad, Role


def assign(
    engines: Sequence[EngineLoad], prefill: int, *, most_running: float = 0.0, opened: int = 0
) -> dict[str, Role]:
    """The role of each engine, so that ``prefill`` of them prefill or are about to.

    Those that change are those that lose least by it: of the decoding ones those that decode least, of the
    prefilling ones those with least to prefill; a draining engine before any other, in both directions. One that
    begins to prefill drains until it decodes at most ``most_running`` requests; at least ``opened`` engines take
    prompts all the same, those with fewest requests to stall.
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
    """Of a pool of which nothing is known: half of it prefills, within the bounds."""
    prefill = min(max(engines // 2, p_min), engines - d_min)
    return prefill, engines - prefill


def _gives_up(engine: EngineLoad) -> tuple[bool, int, str]:
    """In order of who decodes again first: draining engines, those with most requests to drain before others."""
    drains = engine.role == "draining"
    return not drains, -engine.running if drains else engine.waiting_prompt_tokens, engine.engine
