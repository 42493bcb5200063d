"""Which prompts stay where they are decoded."""

from __future__ import annotations

import pytest

from pdlab.roles.local import locally_below


def test_a_prompt_stays_while_it_stalls_others_for_less_than_it_would_wait() -> None:
    below = locally_below(40_000, running=20, queue_s=0.5, transfer_s=0.1)
    assert below == 1200
    stall_s = below / 40_000
    assert 20 * stall_s == pytest.approx(0.6)


def test_more_requests_to_stall_leave_fewer_prompts() -> None:
    assert (
        locally_below(40_000, 40, 0.5, 0.1) < locally_below(40_000, 20, 0.5, 0.1) < locally_below(40_000, 20, 2.0, 0.1)
    )


def test_nothing_is_saved_by_staying_where_nothing_waits() -> None:
    assert locally_below(40_000, 20, 0.0, 0.0) == 0
    assert locally_below(40_000, 0, -1.0, 0.05) == 2000
