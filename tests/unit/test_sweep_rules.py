"""The sweep's own rules without a server: counters that come late, folders that do not match, its text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab import bench, target
from pdlab.driver import settled
from pdlab.errors import StoreError, UsageError
from pdlab.progress import Progress
from pdlab.results import Manifest, NixlCounters, Run, Summary, Validity
from pdlab.spec import Collocated, Deployment, Pool
from pdlab.sweep import same_experiment
from pdlab.target import normal_url
from pdlab.workload import Closed, Open, RunKey, Workload


def counts(*transfers: float | None) -> Iterator[NixlCounters]:
    for value in transfers:
        yield NixlCounters(transfers=value, bytes_transferred=value)
    while True:
        yield NixlCounters(transfers=transfers[-1], bytes_transferred=transfers[-1])


def at_least(transfers: float) -> Callable[[NixlCounters], bool]:
    return lambda counters: (counters.transfers or 0.0) >= transfers


def test_settled_waits_for_late_counters() -> None:
    source = counts(None, None, 3, 8, 10, 10)
    assert settled(lambda: next(source), at_least(10), poll_s=0.001).transfers == 10


def test_settled_waits_until_two_agree() -> None:
    source = counts(10, 11, 12, 12)
    assert settled(lambda: next(source), at_least(10), poll_s=0.001).transfers == 12


def test_settled_gives_up() -> None:
    source = counts(5)
    assert settled(lambda: next(source), at_least(10), timeout_s=0.02, poll_s=0.001).transfers == 5


def manifest(**changes: Any) -> Manifest:
    deployment = Deployment(model="m", topology=Collocated(pool=Pool(tp=changes.pop("tp", 1))))
    fields: dict[str, Any] = {
        "origin": "measured", "label": deployment.label, "deployment": deployment, "gpus": deployment.gpus,
        "workload": Workload(),
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": Workload(seed=1)}, "workload seed 0, now it is 1"),
        ({"workload": Workload(input_tokens=7)}, "workload input_tokens 5000, now it is 7"),
        ({"tp": 2}, "deployment collocated-1xtp1"),
        ({"deployment": None}, "now it is unknown"),
        ({"gpus": 4}, "GPUs 1, now it is 4"),
        ({"label": "other"}, "label collocated-1xtp1, now it is other"),
    ],
)
def test_levels_of_two_experiments_never_share_a_folder(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match="use another --exp-name or --out") as refused:
        same_experiment(manifest(), manifest(**changes), Path("x"))
    assert words in str(refused.value)


def test_the_same_experiment_goes_on() -> None:
    same_experiment(manifest(), manifest(commands=("again",), started_at="later"), Path("x"))


@pytest.mark.parametrize("text", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_url_forms(text: str) -> None:
    assert normal_url(text) == "http://h:1"


@pytest.mark.parametrize("text", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://[::1"])
def test_bad_base_urls(text: str) -> None:
    with pytest.raises(UsageError, match="expected http://HOST:PORT"):
        normal_url(text)


def test_published_scripts_flags() -> None:
    asked = bench.options(
        ["-e", "x", "-t", "request-rate", "-r", "1,2", "--itl", "8", "--otl", "4", "--mode", "mixed", "-u", "http://h",
         "-m", "gpt-oss", "-s"]
    )  # fmt: skip
    assert asked.loads == (Open(rate_rps=1), Open(rate_rps=2)) and asked.smoke
    assert asked.workload == Workload(input_tokens=8, output_tokens=4)
    assert (asked.name, asked.model, asked.base_url) == ("x", "gpt-oss", "http://h")
    assert asked.command.startswith("./run_bm.sh -e x -t request-rate")


def test_flag_aliases_and_defaults() -> None:
    assert (
        bench.options(["--isl", "8", "--osl", "4"]).workload
        == bench.options(["--input-len", "8", "--output-len", "4"]).workload
    )
    assert [load.value for load in bench.options([]).loads] == [4, 8, 16, 32, 48, 64]
    assert [load.value for load in bench.options(["-t", "request-rate"]).loads] == [1, 2, 4, 8, 12, 16]
    assert bench.options(["-r", "3", "--burstiness", "0.5"]).loads == (Open(rate_rps=3, burstiness=0.5),)


def run(reasons: tuple[str, ...] = ()) -> Run:
    whole = Summary(duration_s=10, completed=20, requests_per_s=2, input_tokens_per_s=200, output_tokens_per_s=10)
    return Run(
        origin="measured", label="x", key=RunKey(kind="concurrency", value=4), workload=Workload(),
        load=Closed(concurrency=4), num_requests=20, completed=20, failed=0, whole=whole,
        validity=Validity(reasons=reasons),
    )  # fmt: skip


def test_table_shows_unknown_and_invalid() -> None:
    header, row, invalid = bench.table([run(("a", "b"))]).splitlines()
    assert row.split() == ["concurrency4", "20/20", "2.00", "10.0", "-", "-", "-", "-", "-", "-"]
    assert len(header) == len(row)
    assert invalid == "INVALID concurrency4: a; b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_plain_and_on_a_terminal() -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(stream)
        progress.begin(30, 1)
        progress.level("warm-up", 10, counts=False)
        progress.update(5, 0)
        progress.level_done("done")
        progress.level("concurrency 4", 20)
        progress.update(10, 2)
        progress.level_done("fine")
        progress.note("a note")
        progress.close()
        text = stream.getvalue()
        assert "warm-up: done\n" in text and "[1/1] concurrency 4: fine\n" in text and "a note\n" in text
        if stream.isatty():
            assert "20/30" in text and "2 failed" in text
        else:
            assert "[1/1] concurrency 4: 20 requests (elapsed 0:00)" in text


def test_gpus_come_from_a_label_or_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "load_running", lambda url: None)
    monkeypatch.setattr(target, "_served_models", lambda url: {"m": {}})

    def resolve(**more: Any) -> target.Target:
        return target.resolve_target("http://h:1/v1", workload=Workload(), **more)

    labelled = resolve(name="pd-spread-p2xtp2-d1xtp4")
    assert (labelled.manifest.gpus, labelled.notes, labelled.tokenizer) == (8, (), "m")
    assert resolve(name="free", gpus=16).manifest.gpus == 16
    unknown = resolve(name="free")
    assert unknown.manifest.gpus is None and "give --gpus N" in unknown.notes[0]
    assert resolve(name="free", smoke=True).name == "free-smoke"
    with pytest.raises(UsageError, match="--gpus 4: collocated-4xtp2 uses 8"):
        resolve(name="collocated-4xtp2", gpus=4)
