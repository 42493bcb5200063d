"""Files replaced in one step, on a disk that is full too; locks that say who holds them and end with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import records as made

from pdlab.core.errors import StoreError, UsageError, WriteError
from pdlab.core.files import built_once, cache_dir, holder, locked, replace
from pdlab.core.workload import Closed
from pdlab.results.schema import RequestRecord, Run, Summary
from pdlab.results.store import Store

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
HOLD = (
    "import sys, time; from pathlib import Path; from pdlab.core.files import locked\n"
    "with locked(Path(sys.argv[1]), 'it'):\n    print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds tmp_path/lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def run_of(concurrency: int) -> Run:
    summary = Summary(duration_s=1, completed=1, requests_per_s=1, input_tokens_per_s=1, output_tokens_per_s=1)
    return made.run((), Closed(concurrency=concurrency), count=1, whole=summary)


def records(count: int) -> list[RequestRecord]:
    return [RequestRecord(arrival_s=i * 1.2345678, input_tokens=10, output_tokens=7 * i % 13) for i in range(count)]


class TestLocks:
    def test_the_refusal_of_a_second_one_names_the_holder(self, tmp_path: Path, other: subprocess.Popen[str]) -> None:
        lock = tmp_path / "lock"
        with pytest.raises(UsageError) as caught, locked(lock, "the deployment"):
            pass
        assert str(caught.value).startswith(f"the deployment is held by process {other.pid} (")
        assert "pdlab.core.files" in str(caught.value), "the command"
        assert " s (since " in str(caught.value) and str(lock) in str(caught.value)
        assert f"process {other.pid}" in (holder(lock) or "")

    def test_the_lock_of_a_killed_process_is_taken_over(self, tmp_path: Path, other: subprocess.Popen[str]) -> None:
        lock = tmp_path / "lock"
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert lock.exists(), "it had no time to remove it"
        assert holder(lock) is None
        with locked(lock, "it"):
            assert f"process {os.getpid()} " in (holder(lock) or "")
        assert not lock.exists() and holder(lock) is None

    def test_it_leaves_nothing_behind_but_what_was_kept(self, tmp_path: Path) -> None:
        empty, kept = tmp_path / "a" / "b" / ".lock", tmp_path / "c" / ".lock"
        with locked(empty, "it"), locked(kept, "that"):
            (tmp_path / "c" / "level.json").touch()
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "level.json"]

    def test_a_child_process_does_not_keep_it(self, tmp_path: Path) -> None:
        lock = tmp_path / "lock"
        with locked(lock, "it"):
            child = subprocess.Popen(["sleep", "60"])
        try:
            with locked(lock, "it"):
                pass
        finally:
            child.kill()
            child.wait()

    def test_processes_take_turns_without_a_gap(self, tmp_path: Path) -> None:
        """The file is removed at every release: two must never hold it at once."""
        program = (
            "import sys, time; from pathlib import Path\n"
            "from pdlab.core.errors import UsageError; from pdlab.core.files import locked\n"
            "lock, inside = Path(sys.argv[1]), Path(sys.argv[2])\n"
            "turns = 0\n"
            "while turns < 100:\n"
            "    try:\n"
            "        with locked(lock, 'it'):\n"
            "            inside.mkdir(); inside.rmdir(); turns += 1\n"
            "    except UsageError:\n"
            "        pass\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "lock"), str(tmp_path / "inside")]
        started = [subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        for process in started:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors

    def test_where_no_lock_can_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(WriteError, match="cannot be created to lock it"), locked(tmp_path / "file" / "lock", "it"):
            pass


class TestFullDisk:
    def test_the_file_is_named_and_nothing_half_written_stays(self, small_disk: Path) -> None:
        path = small_disk / "kept.json"
        replace(path, b"first")
        with pytest.raises(WriteError, match="No space left on device") as caught:
            replace(path, bytes(200_000))
        assert str(caught.value).startswith(f"{path} cannot be written")
        assert caught.value.exit_code == 1
        assert path.read_bytes() == b"first"
        assert [file.name for file in small_disk.iterdir()] == ["kept.json"]

    def test_of_a_level_that_does_not_fit_no_half_stays(self, small_disk: Path) -> None:
        store = Store(small_disk / "x")
        kept = store.write(run_of(1), records(10))
        (small_disk / "ballast").write_bytes(bytes(40_000))
        with pytest.raises(WriteError, match=r"concurrency2.*No space left on device"):
            store.write(
                run_of(2),
                [
                    RequestRecord(arrival_s=hash(i) / 7, input_tokens=1, output_tokens=1, error=os.urandom(9).hex())
                    for i in range(3000)
                ],
            )
        assert not store.has(run_of(2).key) and not list(store.folder.glob(".*"))
        store.check_records(kept)
        (small_disk / "ballast").unlink()
        store.write(run_of(2), records(10))

    def test_a_lock_holds_without_a_word_of_its_holder(self, small_disk: Path) -> None:
        lock = small_disk / "lock"
        lock.touch()
        (small_disk / "ballast").write_bytes(bytes(1))
        while True:
            try:
                with (small_disk / "ballast").open("ab") as file:
                    file.write(bytes(4096))
            except OSError:
                break
        with locked(lock, "it"), pytest.raises(UsageError, match="held by another process"), locked(lock, "it"):
            pass


class TestStoredRequests:
    def test_as_measured(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.check_records(store.write(run_of(1), records(50)))

    @pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "another level's", "no gzip"])
    def test_damage_is_named_with_the_fix(self, tmp_path: Path, damage: str) -> None:
        store = Store(tmp_path)
        kept, other = store.write(run_of(1), records(50)), store.write(run_of(2), records(60))
        path = store.records_path(kept.key)
        data = bytearray(path.read_bytes())
        if damage == "truncated":
            path.write_bytes(data[:-20])
        elif damage == "changed":
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        elif damage == "missing":
            path.unlink()
        elif damage == "no gzip":
            path.write_bytes(b"{}")
        else:
            path.write_bytes(store.records_path(other.key).read_bytes())
        with pytest.raises(StoreError) as caught:
            store.check_records(kept)
        assert str(caught.value).startswith(f"{path}: the level's requests ")
        assert f"remove {tmp_path}/concurrency1.json and {path.name}" in str(caught.value)
        store.check_records(other)


def test_a_folder_is_built_once_and_never_seen_half_built(tmp_path: Path) -> None:
    folder, builds = tmp_path / "models" / "tiny", list[Path]()

    def build(part: Path) -> None:
        builds.append(part)
        (part / "config").touch()
        if len(builds) == 1:
            raise OSError("a full disk")
        time.sleep(0.1)
        (part / "weights").touch()

    with pytest.raises(OSError, match="a full disk"):
        built_once(folder, build)
    assert not folder.exists()
    with ThreadPoolExecutor(4) as pool:
        seen = pool.map(lambda _: {path.name for path in built_once(folder, build).iterdir()}, range(4))
        assert [*seen] == [{"config", "weights"}] * 4
    assert len(builds) == 2


def test_the_cache_is_ours_before_it_is_the_desktops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("PDLAB_CACHE_DIR", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("PDLAB_CACHE_DIR")
    assert cache_dir() == Path("/xdg/pdlab")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path("/home/someone/.cache/pdlab")
