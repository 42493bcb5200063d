"""Timelines by the real sweep: what it requests of the server, what it stores, and what it notes of those that lack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sweep import Oracle, ended_well, pd_deployment, publish, run_bm, start_oracle

from pdlab.results.schema import Run
from pdlab.results.store import Store

pytestmark = pytest.mark.usefixtures("warm_client")

PROMPTS = 24
LEVEL = ("--itl", "32", "--otl", "16", "--prompts-per-level", str(PROMPTS), "-c", "2", "-e", "one", "--out", "bm")


@pytest.fixture(scope="module")
def server() -> Iterator[Oracle]:
    yield from start_oracle()


class Swept(NamedTuple):
    run: Run
    store: Store
    log: list[dict[str, Any]]

    @property
    def asked(self) -> set[str | None]:
        """Values of the header that requests a timeline, over the level's requests; None: not sent."""
        return {entry["asks_timeline"] for entry in self.log if entry["id"].startswith("concurrency2-")}

    @property
    def notes(self) -> list[str]:
        return [note.code for note in self.run.validity.notes]


def swept(server: Oracle, tokenizer: Path, cache: Path, *flags: str, sends: bool, launched: bool = True) -> Swept:
    """One level. ``sends``: whether the server knows timelines; ``launched``: whether pdlab launched it."""
    server.configure({"": {"timelines": sends}})
    if launched:
        publish(cache, server, tokenizer, pd_deployment())
    else:
        flags = (*flags, "--tokenizer", str(tokenizer))
    before = len(server.log())
    done = run_bm("-u", server.url, *LEVEL, *flags, cache=cache)
    assert ended_well(done.returncode, done.stdout), done.stderr
    store = Store(cache / "bm" / "one")
    (run,) = store.runs()
    made = Swept(run, store, server.log()[before:])
    assert len([entry for entry in made.log if entry["id"].startswith("concurrency2-")]) == PROMPTS
    return made


def test_timelines_are_requested_and_stored(server: Oracle, tokenizer: Path, tmp_path: Path) -> None:
    made = swept(server, tokenizer, tmp_path, sends=True)
    assert made.asked == {"1"}
    assert len(made.store.read_timelines(made.run.key)) == PROMPTS
    assert made.notes == []


def test_without_timelines_no_request_asks_and_no_file_is_written(
    server: Oracle, tokenizer: Path, tmp_path: Path
) -> None:
    made = swept(server, tokenizer, tmp_path, "--no-timeline", sends=True)
    assert {entry["asks_timeline"] for entry in made.log} == {None}
    assert not list((tmp_path / "bm").rglob("*timeline*"))
    assert made.notes == []


@pytest.mark.parametrize(("launched", "notes"), [(True, ["timelines_lacking"]), (False, [])])
def test_servers_that_pdlab_launched_and_that_send_none_are_noted(
    launched: bool, notes: list[str], server: Oracle, tokenizer: Path, tmp_path: Path
) -> None:
    made = swept(server, tokenizer, tmp_path, sends=False, launched=launched)
    assert made.asked == {"1"}
    assert not made.store.timelines_path(made.run.key).exists()
    assert made.notes == notes
