"""The simulator puts configurations in the order that was reported, and the checks of that can fail."""

from __future__ import annotations

import orderings

from pdlab.plan.accuracy import LevelPoint


def test_the_reported_orderings_are_simulated() -> None:
    compared = orderings.orderings()
    assert len(compared) == 6
    assert not [f"{each.reported}: {each.simulated}" for each in compared if not each.holds]


def line(tpot_ms: float, rps: float) -> dict[int, LevelPoint]:
    """A made-up curve: TPOT grows by half with every load, throughput doubles."""
    return {n: LevelPoint(1e-3 * tpot_ms * 1.5**i, rps * 2**i) for i, n in enumerate(orderings.LOADS)}


def test_each_check_can_fail() -> None:
    slower = [line(5 + number, 1) for number in range(4)]
    assert orderings.by_tp(slower).holds and not orderings.by_tp(slower[::-1]).holds
    # Steady curves of one shape: who is ahead is ahead everywhere.
    ahead = {name: line(5, rps) for name, rps in (("1:3", 4), ("1:2", 3), ("1:1", 2), ("2:1", 1), ("collocated", 1.5))}
    assert [name for name, _ in orderings.winners(ahead)] == ["1:3"] and not orderings.by_ratio(ahead).holds
    assert orderings.dominated(ahead, "2:1").holds and not orderings.dominated(ahead, "1:1").holds
    assert orderings.alike(line(5, 1), line(5.1, 1)).holds and not orderings.alike(line(5, 1), line(5, 1.1)).holds
    assert orderings.tcp(line(5, 10), line(5, 1)).holds
    assert not orderings.tcp(line(5, 2), line(5, 1)).holds and not orderings.tcp(line(5, 30), line(5, 1)).holds
