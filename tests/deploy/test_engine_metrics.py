"""vLLM's metrics as vLLM and both of Ray's exporters write them (forms recorded from Ray 2.60)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from support.web import reply, web_server

from pdlab.cluster.local_nodes import hold_port
from pdlab.core.errors import ClusterError
from pdlab.deploy import metrics_page
from pdlab.deploy.engine_metrics import parse_snapshot, read_snapshot
from pdlab.deploy.metrics_page import read_pages, samples
from pdlab.deploy.verify import describe_counters
from pdlab.results.schema import NixlCounters

COMMON = 'Component="core_worker",SessionName="s",Version="2.60.0"'
OTEL = 'otel_scope_name="ray._private.telemetry.open_telemetry_metric_recorder",otel_scope_version=""'
OLDER = f"""# TYPE ray_vllm_request_queue_time_seconds histogram
ray_vllm_request_queue_time_seconds_bucket{{{COMMON},ReplicaId="a",le="0.3"}} 4.0
ray_vllm_request_queue_time_seconds_count{{{COMMON},ReplicaId="a"}} 6.0
ray_vllm_request_queue_time_seconds_sum{{{COMMON},ReplicaId="a"}} 0.86
# TYPE ray_vllm_request_success_total counter
ray_vllm_request_success_total{{{COMMON},ReplicaId="a"}} 6.0
# HELP ray_vllm_request_success (DEPRECATED, use ray_vllm_request_success_total metric instead)
# TYPE ray_vllm_request_success gauge
ray_vllm_request_success{{{COMMON},ReplicaId="a"}} 6.0
ray_vllm_nixl_num_failed_transfers_total{{{COMMON},ReplicaId="a"}} 2.0
ray_vllm_nixl_num_failed_transfers{{{COMMON},ReplicaId="a"}} 2.0
"""
NEWER = f"""ray_vllm_request_queue_time_seconds_bucket{{{COMMON},ReplicaId="a",le="0.3",{OTEL}}} 4.0
ray_vllm_request_queue_time_seconds_bucket{{{COMMON},ReplicaId="a",le="+Inf",{OTEL}}} 6.0
ray_vllm_request_queue_time_seconds_count{{{COMMON},ReplicaId="a",{OTEL}}} 6.0
ray_vllm_request_queue_time_seconds_sum{{{COMMON},ReplicaId="a",{OTEL}}} 1.4
ray_vllm_request_success_total{{{COMMON},ReplicaId="a",{OTEL}}} 6.0
"""
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


def test_a_counter_that_stands_there_twice_counts_once() -> None:
    assert [sample.value for sample in samples(OLDER) if sample.name == "request_success"] == [6.0]
    assert parse_snapshot([OLDER], (), {}).nixl.failed_transfers == 2.0


def test_exact_sums_are_read_and_of_estimated_ones_the_buckets() -> None:
    exact = parse_snapshot([OLDER], ("a",), {"a": "prefill"}).engines["prefill"]
    assert (exact.requests, exact.queue_s, exact.queue_count) == (6.0, 0.86, 6.0)
    rough = parse_snapshot([NEWER], ("a",), {"a": "prefill"}).engines["prefill"]
    assert (rough.requests, rough.queue_s, rough.queue_count) == (6.0, None, 6.0)
    assert exact.buckets == {} and rough.buckets == {"queue": {"0.3": 4.0, "+Inf": 6.0}}


def test_calls_of_prefill() -> None:
    """Beside the calls the absence of a counter is a true zero; without them nothing is known."""
    page = "".join(
        f'ray_pdlab_prefill_{name}_total{{{COMMON},ReplicaId="{replica}",{OTEL}}} {value}\n'
        for name, replica, value in (("calls", "a", 6), ("calls", "b", 4), ("retries", "b", 2), ("calls", "gone", 9))
    )
    decode = parse_snapshot([page], ("a", "b"), {"a": "decode", "b": "decode"}).engines["decode"]
    assert (decode.prefill_calls, decode.prefill_retries, decode.prefill_local) == (10.0, 2.0, 0.0)
    assert parse_snapshot([NEWER], ("a",), {"a": "decode"}).engines["decode"].prefill_local is None


def test_whether_a_split_was_set_by_hand() -> None:
    page = 'ray_pdlab_roles_prefill{{a="b"}} 2.0\nray_pdlab_roles_changed{{a="b"}} {}\n'
    changed = [parse_snapshot([NEWER, page.format(value)], ("a",), {}).roles_changed for value in ("1.0", "0.0")]
    assert changed == [True, False] and parse_snapshot([NEWER], ("a",), {}).roles_changed is None


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ('m="a}b"', "a}b"),
        ('m="a{b"', "a{b"),
        (r'm="say \"hi\""', 'say "hi"'),
        (r'm="back\\slash"', r"back\slash"),
        (r'm="\"} 9"', '"} 9'),
        ('m="a b",n="},{"', "a b"),
        ('m=""', ""),
        ("", None),
    ],
)
def test_labels_with_anything_in_them(label: str, value: str | None) -> None:
    first, second = samples(f"ray_vllm_x_sum{{{label}}} 42.0 1790000000\nray_vllm_y_count 1\n")
    assert (first.value, dict(first.labels).get("m"), second.value) == (42, value, 1)


@contextmanager
def pages(*answers: tuple[int, bytes]) -> Iterator[str]:
    """The URL of a metrics page with these answers in turn, the last one again and again."""
    left = list(answers)

    def answer(call: BaseHTTPRequestHandler) -> None:
        status, body = left.pop(0) if len(left) > 1 else left[0]
        reply(call, body, status)

    with web_server(answer) as url:
        yield f"{url}/metrics"


def test_a_page_that_fails_for_a_moment() -> None:
    with pages((500, b""), (200, b"ray_vllm_x 1")) as url:
        assert read_pages([url]) == ["ray_vllm_x 1"]


def test_a_page_that_is_not_there_is_asked_for_once() -> None:
    with pages((404, b""), (200, b"ray_vllm_x 1")) as url, pytest.raises(ClusterError, match=r"does not answer .*404"):
        read_pages([url])


@pytest.mark.parametrize(("status", "body"), [(500, b"no"), (200, b"\xff\xfe")])
def test_a_page_that_is_none(status: int, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "TIMEOUT_S", 1.0)
    with pages((status, body)) as url, pytest.raises(ClusterError, match="does not answer") as caught:
        read_snapshot([url])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/metrics", "no URL"])
def test_a_page_of_nobody(url: str) -> None:
    held, port = hold_port()
    with held, pytest.raises(ClusterError, match="is the deployment still up"):
        read_snapshot([url.format(port=port)])


def test_every_page_is_read() -> None:
    with pages((200, VLLM.encode())) as one, pages((200, RAY.encode())) as two:
        assert read_snapshot([one, two]).nixl == counters_of([VLLM, RAY])


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


INFO = (
    'ray_vllm_cache_config_info{{block_size="{size}",mamba_block_size="None",num_gpu_blocks="{blocks}",{more}}} 1.0\n'
)
TOLD = "ray_pdlab_kv_pool_tokens_total{{{more}}} {tokens}\n"


def counted(replica: str, prompt: float, generated: float = 0.0, hits: float = 0.0) -> str:
    counts = {"prompt_tokens": prompt, "generation_tokens": generated, "prefix_cache_hits": hits}
    return "".join(
        f'ray_vllm_{name}_total{{ReplicaId="{replica}"}} {value}\n' for name, value in counts.items() if value
    )


def test_a_kv_pool_is_as_old_as_the_tokens_it_was_given() -> None:
    page = TOLD.format(more='ReplicaId="p",WorkerId="1"', tokens="4e3") + counted("p", 8000, 0, 2000)
    page += INFO.format(size=16, blocks=100, more='ReplicaId="d"') + counted("d", 700, 100)
    page += TOLD.format(more='ReplicaId="gone"', tokens=7) + counted("gone", 1)
    snapshot = parse_snapshot([page], ("p", "d"), {"p": "prefill", "d": "decode"})
    assert snapshot.kv_pools and {name: pool.age for name, pool in snapshot.kv_pools.items()} == {"p": 1.5, "d": 0.5}
    assert snapshot.pool_age == 0.5 and snapshot.to_fill == 800
    two = parse_snapshot([page], ("d", "gone"), {"d": "decode", "gone": "decode"})
    assert two.to_fill == 1600, "every second request leaves its blocks in this one"


def test_an_engine_that_was_given_nothing_is_known_to_be_fresh() -> None:
    page = TOLD.format(more='ReplicaId="a"', tokens=100)
    snapshot = parse_snapshot([page], ("a",), {"a": "collocated"})
    assert snapshot.pool_age == 0.0 and snapshot.to_fill == 100


@pytest.mark.parametrize(
    "page",
    [
        "",
        TOLD.format(more='ReplicaId="a"', tokens=100),
        INFO.format(size="None", blocks=100, more='ReplicaId="a"') + TOLD.format(more='ReplicaId="b"', tokens=100),
    ],
)
def test_a_pool_that_one_engine_does_not_tell_is_unknown(page: str) -> None:
    snapshot = parse_snapshot([page + counted("a", 5)], ("a", "b"), {"a": "collocated", "b": "collocated"})
    assert snapshot.kv_pools is None and snapshot.pool_age is None and snapshot.to_fill is None


def test_without_a_launcher_the_engines_that_tell_count() -> None:
    page = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1.0\nvllm:prompt_tokens_total 320\n'
    assert parse_snapshot([page], (), {}).pool_age == 2.0


def test_what_fluid_engines_prefilled_for_others_is_not_answered() -> None:
    """vLLM counts a request in the engine that prefills it and in the one that decodes it."""
    page = """
# TYPE ray_vllm_request_success counter
ray_vllm_request_success_total{ReplicaId="a",finished_reason="length"} 30.0
ray_vllm_request_success_total{ReplicaId="b",finished_reason="length"} 50.0
# TYPE ray_pdlab_prefill_answered counter
ray_pdlab_prefill_answered_total{ReplicaId="a"} 20.0
ray_pdlab_prefill_answered_total{ReplicaId="b"} 15.0
"""
    snapshot = parse_snapshot([page], (), {"a": "fluid", "b": "fluid"})
    assert snapshot.finished == snapshot.engines["fluid"].requests == 45.0
    assert snapshot.finished_by == {"a": 10.0, "b": 35.0}


@pytest.mark.parametrize(
    "line", ['ray_vllm_prompt_tokens_total{a="b" 3', "vllm:prompt_tokens_total x", "vllm:prompt_tokens"]
)
def test_a_damaged_line_is_an_error_if_it_is_wanted(line: str) -> None:
    with pytest.raises(ClusterError, match="damaged"):
        parse_snapshot([f"vllm:prompt_tokens_total 1\n{line}\n"], (), {})
    assert parse_snapshot([line.replace("prompt_tokens", "unread")], (), {}).nixl.transfers is None
