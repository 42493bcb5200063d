"""Which latency axes are logarithmic by themselves."""

from __future__ import annotations

import pytest

from pdlab.report.scales import logarithmic


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([[10, 20], [12, 24]], False),
        ([[10, 100], [12, 120]], False),
        ([[10, 201]], True),
        ([[10, 200]], False),
        ([[100, 300], [110, 320], [400, 2600]], True),  # one curve far beyond the others
        ([[150, 300], [700, 2600], [700, 2600]], False),  # two of them are no outlier
        ([[0, 0], [1, 2]], False),
        ([], False),
        ([[]], False),
    ],
)
def test_what_spans_far_or_reaches_far_beyond_the_others(values: list[list[float]], log: bool) -> None:
    assert logarithmic(values) is log
