"""The launcher's record of what is served, and the NIXL counters of Prometheus pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support.web import web_server

from pdlab.cluster.local_nodes import hold_port
from pdlab.core.catalog import local_cluster
from pdlab.core.deployment import Deployment, Disaggregated, Pool, Transport, parse_label
from pdlab.core.errors import ClusterError, StoreError, UsageError
from pdlab.core.files import cache_dir
from pdlab.deploy import metrics_page
from pdlab.deploy.endpoint import Running, clear_running, launching, load_running, measured, next_attempt, save_running
from pdlab.deploy.engine_metrics import parse_snapshot, read_snapshot
from pdlab.deploy.verify import describe_counters
from pdlab.placement.place import place
from pdlab.results.schema import CanaryResult, Manifest, NixlCounters

# As vLLM's own server writes them (prometheus_client).
VLLM = """\
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="tiny"} 3.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 4.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="tiny"} 0.02
vllm:nixl_xfer_time_seconds_created{engine="0",model_name="tiny"} 1.79e+09
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 4.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 1.2e6
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="tiny"} 1.0
vllm:nixl_num_failed_transfers_created{engine="0",model_name="tiny"} 1.79e+09
vllm:nixl_num_failed_notifications_total{engine="0",model_name="tiny"} 0.0
vllm:num_requests_running{engine="0",model_name="tiny"} 7.0
"""
# As Ray's metrics agent exports what vLLM reports through Ray.
RAY = """\
# HELP ray_vllm_nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
ray_vllm_nixl_bytes_transferred_bucket{ReplicaId="a1",WorkerId="f",engine="0",le="1e+06"} 1.0
ray_vllm_nixl_bytes_transferred_count{ReplicaId="a1",WorkerId="f",engine="0"} 2.0
ray_vllm_nixl_bytes_transferred_sum{ReplicaId="a1",WorkerId="f",engine="0"} 500000.0
ray_vllm_nixl_xfer_time_seconds_count{ReplicaId="a1",WorkerId="f",engine="0"} 2.0
ray_vllm_nixl_num_failed_transfers{ReplicaId="a1"} 3.0
ray_vllm_nixl_num_kv_expired_reqs_total{ReplicaId="a1"} 1.0
"""


def counters_of(pages: list[str]) -> NixlCounters:
    return parse_snapshot(pages, (), {}).nixl


class TestParseCounters:
    @pytest.mark.parametrize(
        ("page", "counts"), [(VLLM, (1.2e6, 4, 1, 0, 0)), (RAY, (5e5, 2, 3, 0, 1))], ids=["vLLM's", "Ray's"]
    )
    def test_names(self, page: str, counts: tuple[float, ...]) -> None:
        names = ("bytes_transferred", "transfers", "failed_transfers", "failed_notifications", "kv_expired_requests")
        assert counters_of([page]) == NixlCounters(**dict(zip(names, counts, strict=True)))

    def test_pages_and_engines_add_up(self) -> None:
        second = VLLM.replace('engine="0"', 'engine="1"')
        total = counters_of([VLLM + second, RAY])
        assert (total.bytes_transferred, total.transfers, total.failed_transfers) == (2.9e6, 10, 5)

    @pytest.mark.parametrize("name", ["vllm:nixl_num_failed_transfers", "ray_vllm_nixl_num_failed_transfers"])
    @pytest.mark.parametrize("total", ["", "_total"])
    def test_with_and_without_total(self, name: str, total: str) -> None:
        assert counters_of([f"{name}{total} 2\n"]).failed_transfers == 2
        assert counters_of([f'{name}{total}{{engine="0"}} 2 1790000000\n']).failed_transfers == 2

    @pytest.mark.parametrize(
        "label",
        ['m="a}b"', 'm="a{b"', r'm="say \"hi\""', r'm="back\\slash"', r'm="\"} 9"', 'm="a b",n="},{"', 'm=""', ""],
    )
    def test_labels_with_anything_in_them(self, label: str) -> None:
        page = f"ray_vllm_nixl_bytes_transferred_sum{{{label}}} 42.0\nray_vllm_nixl_xfer_time_seconds_count 1\n"
        counters = counters_of([page])
        assert (counters.bytes_transferred, counters.transfers) == (42, 1)

    @pytest.mark.parametrize("pages", [[], [""], ["# nothing\n", "vllm:num_requests_running 3\n"]], ids=str)
    def test_missing_is_unknown(self, pages: list[str]) -> None:
        assert counters_of(pages) == NixlCounters()
        assert counters_of(pages).failed_transfers is None

    def test_beside_counted_transfers_a_missing_failure_counter_is_zero(self) -> None:
        counters = counters_of(["vllm:nixl_xfer_time_seconds_count 0.0\n"])
        assert counters == NixlCounters(
            transfers=0, failed_transfers=0, failed_notifications=0, kv_expired_requests=0, bytes_transferred=None
        )

    def test_without_counted_transfers_nothing_is_zero(self) -> None:
        counters = counters_of(["vllm:nixl_num_failed_transfers_total 2\n"])
        assert (counters.transfers, counters.failed_transfers, counters.failed_notifications) == (None, 2, None)

    def test_the_guards_counters(self) -> None:
        page = (
            'ray_pdlab_guard_receives_total{ReplicaId="a"} 9.0\nray_pdlab_guard_recomputed_total{ReplicaId="a"} 2.0\n'
        )
        got = counters_of([page])
        assert (got.guard_receives, got.guard_recomputed, got.guard_deadlines, got.guard_errors) == (9, 2, 0, 0)
        own = counters_of(["pdlab_guard_receives_total 3.0\npdlab_guard_deadlines_total 1.0\n"])
        assert (own.guard_receives, own.guard_deadlines) == (3, 1)
        assert counters_of([VLLM]).guard_recomputed is None, "no guard, nothing known"

    def test_names_that_only_look_alike(self) -> None:
        page = "vllm:nixl_bytes_transferred_sum_x 1\nmy_vllm:nixl_bytes_transferred_sum 1\nvllm_nixl_bytes 1\n"
        assert counters_of([page]) == NixlCounters()


@contextmanager
def page(status: int, body: bytes) -> Iterator[str]:
    def answer(call: BaseHTTPRequestHandler) -> None:
        call.send_response(status)
        call.end_headers()
        call.wfile.write(body)

    with web_server(answer) as url:
        yield f"{url}/metrics"


class TestScrapeCounters:
    def test_every_page_is_read(self) -> None:
        with page(200, VLLM.encode()) as one, page(200, RAY.encode()) as two:
            assert read_snapshot([one, two]).nixl == counters_of([VLLM, RAY])

    @pytest.mark.parametrize(("status", "body"), [(500, b"no"), (404, b""), (200, b"\xff\xfe")])
    def test_a_page_that_is_none(self, status: int, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics_page, "TIMEOUT_S", 1.0)
        with page(status, body) as url, pytest.raises(ClusterError, match="does not answer") as caught:
            read_snapshot([url])
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/metrics", "no URL"])
    def test_nobody_there(self, url: str) -> None:
        held, port = hold_port()
        with held, pytest.raises(ClusterError, match="is the deployment still up"):
            read_snapshot([url.format(port=port)])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
    return tmp_path


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
        kept = running().model_copy(
            update={"manifest": Manifest(origin="measured", label="x", deployment=deployment, gpus=4)}
        )
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


class TestCacheDir:
    def test_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        monkeypatch.setenv("PDLAB_CACHE_DIR", "/own")
        assert cache_dir() == Path("/own")
        monkeypatch.delenv("PDLAB_CACHE_DIR")
        assert cache_dir() == Path("/xdg/pdlab")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert cache_dir() == Path("/home/someone/.cache/pdlab")


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


@pytest.mark.parametrize(
    ("counters", "text"),
    [
        (NixlCounters(), "KV transfers: vLLM exports no NIXL counters"),
        (NixlCounters(transfers=6, bytes_transferred=0.0), "KV transfers: 6 done, about 0 MB, 0 failed"),
        (
            NixlCounters(transfers=6, bytes_transferred=2_234_567.0, failed_transfers=0),
            "KV transfers: 6 done, about 2.2 MB, 0 failed",
        ),
        (
            NixlCounters(transfers=40, bytes_transferred=7.4123e9, failed_transfers=2),
            "KV transfers: 40 done, about 7400 MB, 2 failed",
        ),
    ],
)
def test_bytes_are_told_as_the_estimate_that_they_are(counters: NixlCounters, text: str) -> None:
    assert describe_counters(counters) == text


@pytest.mark.usefixtures("cache")
class TestAttempts:
    """Numbers from which prompts are drawn: never the same twice for one start of a deployment."""

    def launched(self, started_at: str) -> None:
        manifest = Manifest(origin="measured", label="x", started_at=started_at)
        save_running(Running(base_url="http://127.0.0.1:8000", model_id="m", tokenizer="t", manifest=manifest))

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

    def test_a_damaged_count_is_no_hindrance(self, tmp_path: Path) -> None:
        self.launched("1")
        assert self.attempt() == 0
        (path,) = tmp_path.glob("running/*.sweeps.json")
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
        manifest = Manifest(origin="measured", label="x", local=True)
        save_running(Running(base_url="http://127.0.0.1:8000", model_id="m", tokenizer="t", manifest=manifest))
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
