"""The folder of faults made under load: what was written is read; what is damaged is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos import example, request, write

from pdlab.core.errors import StoreError
from pdlab.results import chaos
from pdlab.results.store import Store


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, example())
    assert chaos.is_chaos(folder) and not chaos.is_chaos(tmp_path)
    assert chaos.load(folder) == example()


def test_a_second_one_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    names = [chaos.new_folder(tmp_path, "x").name for _ in range(3)]
    assert names == ["chaos-x", "chaos-x-2", "chaos-x-3"]


def test_it_holds_no_load_level(tmp_path: Path) -> None:
    assert list(Store(write(tmp_path, example())).levels()) == []


def test_lines_are_there_before_the_end(tmp_path: Path) -> None:
    chaos.append(tmp_path, [request(0, 1, 2), request(1, 2, 3, "wrong", "x")])
    assert len((tmp_path / chaos.REQUESTS).read_text().splitlines()) == 2
    assert not chaos.is_chaos(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (chaos.CHAOS, "{", "cannot be read"),
        (chaos.CHAOS, "{}", "is missing"),
        (chaos.REQUESTS, '{"number": 0}\n', "requests.jsonl, line 1: "),
        (chaos.REQUESTS, '{"number":0,"prompt":0,"sent_s":1,"end_s":2,"outcome":"fine"}', "must be one of"),
    ],
)
def test_damage_is_one_line(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    folder = write(tmp_path, example())
    (folder / name).write_text(text)
    with pytest.raises(StoreError, match=complaint) as caught:
        chaos.load(folder)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_what_is_gone_is_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path, example())
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"manifest\.json: cannot be read"):
        chaos.load(folder)
