"""SLOs as a command line gives them."""

from __future__ import annotations

import pytest

from pdlab.core.errors import UsageError
from pdlab.core.workload import Slo, parse_slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft_ms=2000,tpot_ms=50", Slo(ttft_s=2.0, tpot_s=0.05)),
        ("e2el_ms=1.5", Slo(e2el_s=0.0015)),
        ("ttft_ms=1e-9", Slo(ttft_s=1e-12)),
        ("ttft_ms=2e3", Slo(ttft_s=2.0)),
    ],
)
def test_bounds(text: str, slo: Slo) -> None:
    assert parse_slo(text, 0.95) == slo


@pytest.mark.parametrize("text", ["", "ttft_ms=0", "ttft_ms=-1", "ttft_ms=inf", "ttft=5", "ttft_ms=5;tpot_ms=5"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no bound; expected ttft_ms=2000"):
        parse_slo(text, 0.95)
