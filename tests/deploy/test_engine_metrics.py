"""vLLM's metrics as vLLM and both of Ray's exporters write them (forms recorded from Ray 2.60)."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

import pytest
from support.web import web_server

from pdlab.core.errors import ClusterError
from pdlab.deploy.engine_metrics import parse_snapshot
from pdlab.deploy.metrics_page import read_pages, samples

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


def test_labels() -> None:
    sample = next(samples('vllm:request_success_total{model="a}b",ReplicaId="x\\"y"} 1 1790000000\n'))
    assert (sample.value, sample.replica, dict(sample.labels)) == (1.0, 'x"y', {"model": "a}b", "ReplicaId": 'x"y'})


@pytest.mark.parametrize(("codes", "answer"), [((500, 200), "ray_vllm_x 1"), ((404, 200), None)])
def test_a_page_that_fails_for_a_moment(codes: tuple[int, ...], answer: str | None) -> None:
    calls: list[str] = []

    def page(call: BaseHTTPRequestHandler) -> None:
        call.send_response(codes[len(calls)])
        calls.append(call.path)
        call.end_headers()
        call.wfile.write(b"ray_vllm_x 1")

    with web_server(page) as url:
        if answer is None:
            with pytest.raises(ClusterError, match=r"does not answer .*404"):
                read_pages([f"{url}/metrics"])
        else:
            assert read_pages([f"{url}/metrics"]) == [answer]
    assert len(calls) == (1 if answer is None else 2)


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
