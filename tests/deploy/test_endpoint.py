"""The launcher's record of what is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import launched

from pdlab.core.catalog import local_cluster
from pdlab.core.deployment import Deployment, Disaggregated, Pool, Transport, parse_label
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.files import cache_dir
from pdlab.deploy.endpoint import Running, clear_running, launching, load_running, measured, next_attempt, save_running
from pdlab.placement.place import place
from pdlab.results.schema import CanaryResult, Manifest


def running(base_url: str = "http://127.0.0.1:8000", label: str = "pd-spread-p1xtp1-d1xtp1") -> Running:
    deployment = Deployment(topology=parse_label(label), model="tiny-gptoss")
    view = local_cluster(2)
    manifest = Manifest(
        origin="measured",
        label=deployment.label,
        deployment=deployment,
        cluster=view,
        placement=place(deployment, view),
        gpus=2,
        local=True,
        commands=("python launch_gptoss.py --pd-spread --local",),
        versions={"ray": "2.60.0", "driver": None},
        hardware={"cores": 2, "memory_gib": 23.5, "gpus": None},
        canary=CanaryResult(equal=True, compared=3, detail='3 of 3 prompts: "the same" tokens'),
        started_at="2026-11-20T10:00:00+00:00",
    )
    return Running(
        base_url=base_url,
        model_id="tiny-gptoss",
        tokenizer="/cache/models/tiny",
        manifest=manifest,
        metrics_urls=("http://127.0.0.1:1/metrics", "http://127.0.0.1:2/metrics"),
    )


@pytest.mark.usefixtures("cache")
class TestRecord:
    @pytest.mark.parametrize("label", ["pd-spread-p1xtp1-d1xtp1", "pd-pack-p1xtp1-d1xtp1", "collocated-2xtp1"])
    def test_round_trip(self, label: str) -> None:
        kept = running(label=label)
        save_running(kept)
        assert load_running(kept.base_url) == kept

    def test_round_trip_of_nested_values(self) -> None:
        topology = Disaggregated(
            prefill=Pool(tp=2, engine_kwargs={"compilation_config": {"level": 0, "sizes": [1, 2]}}),
            decode=Pool(dp=2, expert_parallel=True),
            placement="pack",
            transport=Transport(backends=("LIBFABRIC", "UCX"), verbose=True),
        )
        deployment = Deployment(topology=topology, engine_kwargs={"max_num_seqs": 8})
        kept = launched.running(deployment=deployment, gpus=4)
        save_running(kept)
        assert load_running(kept.base_url) == kept

    def test_a_later_launch_replaces_it(self, cache: Path) -> None:
        save_running(running())
        later = running(label="collocated-1xtp1")
        save_running(later)
        assert load_running(later.base_url) == later
        assert len(list((cache / "running").iterdir())) == 1

    @pytest.mark.parametrize("url", ["http://localhost:8000", "http://0.0.0.0:8000", "http://127.0.0.1:8000/v1"])
    def test_other_names_of_the_same_address(self, url: str) -> None:
        save_running(running())
        assert load_running(url) == running()
        clear_running(url)
        assert load_running("http://127.0.0.1:8000") is None

    def test_other_addresses(self) -> None:
        save_running(running())
        for url in ("http://127.0.0.1:8001", "http://127.0.0.1", "http://other:8000", "http://[::1]:8000"):
            assert load_running(url) is None

    def test_nothing_to_clear(self) -> None:
        clear_running("http://127.0.0.1:8000")

    @pytest.mark.parametrize("url", ["", "localhost:8000", "http://", "http://::1:8000", "http://h:port"])
    def test_no_address(self, url: str) -> None:
        with pytest.raises(StoreError, match=r"expected http://HOST:PORT"):
            load_running(url)

    def test_a_damaged_record_is_named(self, cache: Path) -> None:
        save_running(running())
        (path,) = (cache / "running").iterdir()
        path.write_text("base_url: [")
        with pytest.raises(UsageError, match=path.name):
            load_running("http://127.0.0.1:8000")


@pytest.mark.usefixtures("cache")
def test_a_record_of_another_version_says_how_to_go_on() -> None:
    """Else no launch begins again on that machine."""
    url = "http://127.0.0.1:8765"
    path = cache_dir() / "running" / "127.0.0.1_8765.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("base_url: http://127.0.0.1:8765\nsetting_that_is_gone: 1\n")
    with pytest.raises(UsageError, match=f"if nothing is served at {url}, delete it") as raised:
        load_running(url)
    assert str(path) in str(raised.value)
    clear_running(url)
    assert load_running(url) is None


@pytest.mark.usefixtures("cache")
class TestAttempts:
    """Numbers from which prompts are drawn: never the same twice for one start of a deployment."""

    def launched(self, started_at: str) -> None:
        save_running(launched.running(started_at=started_at))

    def attempt(self, stream: str = "a", least: int = 0) -> int:
        return next_attempt("http://localhost:8000", stream, least)

    def test_they_go_on_within_a_start_and_begin_anew_with_the_next(self) -> None:
        self.launched("1")
        assert [self.attempt() for _ in range(3)] == [0, 1, 2]
        self.launched("2")
        assert self.attempt() == 0

    def test_streams_count_by_themselves(self) -> None:
        self.launched("1")
        assert [self.attempt("a"), self.attempt("b"), self.attempt("a")] == [0, 0, 1]

    def test_a_folder_may_be_further(self) -> None:
        self.launched("1")
        assert [self.attempt(), self.attempt(least=5), self.attempt(least=2)] == [0, 5, 6]

    def test_what_nobody_published_goes_on_for_ever(self) -> None:
        assert [self.attempt(), self.attempt()] == [0, 1]

    def test_a_damaged_count_is_no_hindrance(self, cache: Path) -> None:
        self.launched("1")
        assert self.attempt() == 0
        (path,) = cache.glob("running/*.sweeps.json")
        path.write_text("{")
        assert self.attempt(least=3) == 3


@pytest.mark.usefixtures("cache")
class TestLocks:
    def test_one_sweep_under_every_name_of_an_address(self) -> None:
        with (
            measured("http://localhost:8000"),
            pytest.raises(UsageError, match=r"the deployment at http://0\.0\.0\.0:8000 is held by process \d+"),
            measured("http://0.0.0.0:8000"),
        ):
            pass

    def test_a_launch_holds_off_launches_and_sweeps_of_what_it_replaces(self) -> None:
        save_running(launched.running(local=True))
        with launching("http://127.0.0.1:9000", local=True):
            with pytest.raises(UsageError, match=r"another launch is not finished\) is held by process \d+ \(.*, for"):
                launching("http://127.0.0.1:7000", local=True).__enter__()
            for url in ("http://127.0.0.1:8000", "http://127.0.0.1:9000"):
                with pytest.raises(UsageError, match="is held by"):
                    measured(url).__enter__()
            with launching("http://cluster:8000", local=False), measured("http://cluster:8001"):
                pass
        with measured("http://127.0.0.1:8000"), pytest.raises(UsageError, match=r"at http://127\.0\.0\.1:8000 is held"):
            launching("http://127.0.0.1:9000", local=True).__enter__()
