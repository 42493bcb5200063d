"""One folder of levels: what is read of it, and how often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import folders

from pdlab.core.errors import StoreError
from pdlab.core.workload import RunKey
from pdlab.results import store as stores
from pdlab.results.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(folders.write(tmp_path / "x", folders.deployments(1)[0], loads=(1, 2), repeats=1))


def test_a_level_is_read_again_only_when_its_file_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    before = stores.read_model
    monkeypatch.setattr(stores, "read_model", lambda path, kind: (read.append(path.stem), before(path, kind))[1])
    first = list(store.runs())
    assert read == ["concurrency1", "concurrency2"] and list(store.runs()) == first and len(read) == 2
    own = store.write(first[0].model_copy(update={"seed": 7}), (), force=True)
    assert list(store.runs()) == [own, first[1]] and read[2:] == ["concurrency1"]
    path = store.path(first[1].key)
    others = json.loads(path.read_text()) | {"seed": 8}
    path.write_text(json.dumps(others))
    assert [run.seed for run in store.runs()] == [7, 8], "whoever wrote it"
    path.unlink()
    assert [run.seed for run in store.runs()] == [7]
    store.path(RunKey(kind="concurrency", value=1)).write_text("{")
    with pytest.raises(StoreError, match="concurrency1"):
        list(store.runs())
