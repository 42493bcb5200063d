"""``python -m pdlab roles``: what is typed wrong, and what the table says."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.core.errors import ClusterError
from pdlab.deploy import roles as asking

LOOKED: dict[str, Any] = {
    "by": "auto",
    "local_below": 120,
    "engines": {
        "d1": {"role": "decode", "node": "0123456789", "waiting_prompt_tokens": 0, "running": 7},
        "p1": {"role": "prefill", "node": "0123456789", "waiting_prompt_tokens": 900, "running": 0},
        "p2": {"role": "draining", "node": "abc", "waiting_prompt_tokens": 0, "running": 2},
    },
    "decisions": [
        {"at": f"2026-01-01T00:00:0{i}", "prefill": 1, "decode": 2, "reason": f"reason {i}"} for i in range(9)
    ],
    "reach_ms": (40, 3.5, 7.0, 12.0),
}


def test_the_table_has_who_prefills_first_and_why() -> None:
    lines = asking.describe(LOOKED).splitlines()
    assert lines[0] == "2:1 (prefill:decode), a controller follows the load"
    assert "prompts below 120 tokens" in lines[1]
    assert "3.5 ms (median of 40), 19 of 20 within 7 ms, 12 ms at most" in lines[2]
    rows = [line.split() for line in lines if line.split()[:1] in (["p1"], ["p2"], ["d1"])]
    assert rows == [
        ["p1", "01234567", "prefill", "900", "0"],
        ["p2", "abc", "draining", "0", "2"],
        ["d1", "01234567", "decode", "0", "7"],
    ]
    assert lines[-1].endswith("1:2  reason 8") and "reason 3" not in asking.describe(LOOKED)


def test_the_number_of_engines_is_said_and_why() -> None:
    engines = {**LOOKED["engines"], "j": {**LOOKED["engines"]["d1"], "role": "joining"}}
    count = {"wanted": 4, "least": 2, "most": 6, "reason": "3 -> 4 engines: 3 are loaded 120%"}
    lines = asking.describe({**LOOKED, "engines": engines, "count": count}).splitlines()
    assert lines[0].startswith("2:1 (prefill:decode)"), "who joins does neither"
    assert lines[1] == "2 to 6 engines by the load: 3 -> 4 engines: 3 are loaded 120%"
    assert any(line.split()[:3] == ["j", "01234567", "joining"] for line in lines)


def test_by_hand_is_said() -> None:
    text = asking.describe({**LOOKED, "by": "2:1", "local_below": 0, "reach_ms": None})
    assert text.startswith("2:1 (prefill:decode), set to 2:1\n\nengine")


def test_no_board_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", exc_type=ImportError)
    monkeypatch.setattr(asking, "board_names", list)
    with pytest.raises(ClusterError, match="launch them with launch_gptoss.py --pd-fluid".replace(".", r"\.")):
        asking.ask("look")
    monkeypatch.setattr(asking, "board_names", lambda: ["a", "b"])
    with pytest.raises(ClusterError, match="2 role boards"):
        asking.ask("look")
