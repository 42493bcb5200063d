"""The log of roles beside a level: what is written comes back, what a deployment logged is put on the level's time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import records as made

from pdlab.core.errors import StoreError
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.workload import Open, RunKey
from pdlab.results import roles_log
from pdlab.results.roles_log import RoleChange
from pdlab.results.schema import Run, Summary

KEY = RunKey(kind="rate", value=2.5)
CHANGES = (RoleChange(0.0, 4, 4, "given"), RoleChange(12.5, 2, 6, "4:4 -> 2:6: decode 5.1"))


def run(started_at: str | None = "2026-11-23T04:00:00.000+00:00", slow_down: float | None = None) -> Run:
    rehearsal = Rehearsal(slow_down=slow_down) if slow_down else None
    whole = Summary(duration_s=60, completed=10, requests_per_s=1, input_tokens_per_s=1, output_tokens_per_s=1)
    more = {"label": "pd-fluid-8xtp2", "whole": whole, "started_at": started_at, "rehearsal": rehearsal}
    return made.run((), Open(rate_rps=2.5), **more)


def of_deployment(folder: Path, *moments: str) -> None:
    rows = [{"at": at, "prefill": n, "decode": 8 - n, "reason": f"no. {n}"} for n, at in enumerate(moments, 1)]
    (folder / roles_log.OF_ALL).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_changes_of_a_level_come_back(tmp_path: Path) -> None:
    assert roles_log.read(tmp_path, run()) == ()
    roles_log.write(tmp_path, KEY, CHANGES)
    assert roles_log.read(tmp_path, run()) == CHANGES
    assert roles_log.path_of(tmp_path, KEY).name == "rate2.5.roles.jsonl"


def test_of_a_deployment_s_log_a_level_has_its_own_time_and_the_last_change_before(tmp_path: Path) -> None:
    of_deployment(
        tmp_path,
        "2026-11-23T03:00:00Z",
        "2026-11-23T03:59:50+00:00",
        "2026-11-23T04:00:20.500+00:00",
        "2026-11-23T05:00:40+01:00",
        "2026-11-23T04:02:00Z",
    )
    changes = roles_log.read(tmp_path, run())
    assert [(change.at_s, change.prefill) for change in changes] == [(0.0, 2), (20.5, 3), (40.0, 4)]
    slow = roles_log.read(tmp_path, run(slow_down=4.0))
    assert [change.at_s for change in slow] == [0.0, 5.125, 10.0, 30.0]
    assert roles_log.read(tmp_path, run(started_at=None)) == ()
    roles_log.write(tmp_path, KEY, CHANGES)
    assert roles_log.read(tmp_path, run()) == CHANGES, "the level's own log comes first"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"at": "x", "prefill": 1, "decode": 1, "reason": ""}',
        '{"at": "2026-11-23", "prefill": 1}',
        "\xff",
    ],
)
def test_what_is_no_log_is_named_with_a_fix(tmp_path: Path, text: str) -> None:
    (tmp_path / roles_log.OF_ALL).write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"roles\.jsonl: cannot be read as a log of roles") as raised:
        roles_log.read(tmp_path, run())
    assert "roles --log" in str(raised.value) and "\n" not in str(raised.value)
