"""Which folder a command may write to, and whether an earlier run in it is the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdlab.core.errors import StoreError
from pdlab.steps.resume import check_folder_is_new, check_same_run

BEFORE = {"model": "a", "port": 8000, "loads": [1, 2]}


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    check_folder_is_new(tmp_path / "not-made-yet", "state.json")
    check_folder_is_new(tmp_path, "state.json")
    (tmp_path / ".lock").touch()
    check_folder_is_new(tmp_path, "state.json", ignored=(".lock",))
    with pytest.raises(StoreError, match=r"state\.json is missing"):
        check_folder_is_new(tmp_path, "state.json")


@pytest.mark.parametrize(
    ("after", "resume", "reason"),
    [
        (BEFORE, True, None),
        (BEFORE, False, "has an earlier run; continue it with --resume"),
        ({**BEFORE, "port": 9000}, True, r"another port \(8000, now 9000\)"),
        ({**BEFORE, "port": 9000}, False, "another port"),
        ({**BEFORE, "loads": [1]}, True, "with other loads;"),
        ({"model": "a", "port": 8000}, True, "with other loads;"),
        ({**BEFORE, "new": 1}, True, r"another new \(None, now 1\)"),
        ({**BEFORE, "note": "x"}, True, None),
    ],
)
def test_an_earlier_run_goes_on_with_the_same_settings_only(
    after: dict[str, Any], resume: bool, reason: str | None, tmp_path: Path
) -> None:
    if reason is None:
        check_same_run(tmp_path, BEFORE, after, resume=resume, free=("note",))
    else:
        with pytest.raises(StoreError, match=reason):
            check_same_run(tmp_path, BEFORE, after, resume=resume, free=("note",))
