"""The metrics of a simulated engine, reported through Ray with vLLM's names, in simulated seconds.

Additional metrics have the simulated times of requests; `pdlab.bench.gates` compares a client's times with them.
Imports Ray.
"""

from __future__ import annotations

from typing import Any

from ray.util import metrics

from pdlab.rehearsal.realtime import EngineTimes

_SECONDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_SECONDS += [20.0, 40.0, 80.0]
# The buckets of vLLM 0.29's NixlPromMetrics.
_BYTES = [float(2 ** (10 + i)) for i in range(1, 25, 2)]
_TRANSFER_S = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0]
COUNTERS = {
    "vllm_request_success": "Requests that ended.",
    "vllm_prompt_tokens": "Prompt tokens.",
    "vllm_generation_tokens": "Generated tokens.",
    "vllm_prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "vllm_prefix_cache_hits": "Prompt tokens that the prefix cache had.",
    "vllm_num_preemptions": "Preempted requests.",
    "vllm_nixl_num_failed_transfers": "Transfers that failed.",
    "vllm_nixl_num_kv_expired_reqs": "Requests whose KV nobody fetched.",
    "pdlab_rehearsal_requests": "Ended requests with a sending time.",
    "pdlab_rehearsal_ttft_seconds": "Simulated TTFT of these requests.",
    "pdlab_rehearsal_decode_seconds": "Simulated times from first to last token of these requests.",
    "pdlab_rehearsal_late_seconds": "Delay of events that came after the engine had simulated a later time.",
}
KV_USE = "vllm_kv_cache_usage_perc"
HISTOGRAMS = {
    "vllm_time_to_first_token_seconds": _SECONDS,
    "vllm_request_queue_time_seconds": _SECONDS,
    "vllm_request_prefill_time_seconds": _SECONDS,
    "vllm_nixl_xfer_time_seconds": _TRANSFER_S,
    "vllm_nixl_bytes_transferred": _BYTES,
}


class EngineMetrics:
    """The metrics of one replica."""

    def __init__(self, replica: str) -> None:
        self._tags = {"ReplicaId": replica}
        self._counters: dict[str, Any] = {
            name: metrics.Counter(name, description=text, tag_keys=("ReplicaId",)) for name, text in COUNTERS.items()
        }
        self._histograms: dict[str, Any] = {
            name: metrics.Histogram(name, description=name, boundaries=ends, tag_keys=("ReplicaId",))
            for name, ends in HISTOGRAMS.items()
        }
        self._kv_use: Any = metrics.Gauge(KV_USE, description="Share of the KV pool in use.", tag_keys=("ReplicaId",))
        self._counted: dict[str, float] = {}

    def count(self, name: str, value: float = 1.0) -> None:
        if value > 0:
            self._counters[name].inc(value, tags=self._tags)

    def total(self, name: str, value: float) -> None:
        """Increase the counter to a total that never falls."""
        self.count(name, value - self._counted.get(name, 0.0))
        self._counted[name] = value

    def kv_use(self, share: float) -> None:
        self._kv_use.set(share, tags=self._tags)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value, tags=self._tags)

    def ended(self, times: EngineTimes, input_tokens: int, output_tokens: int, *, fetched: bool) -> None:
        """Record the end of a request on this engine. ``fetched``: it was decoded from another engine's KV."""
        self.count("vllm_request_success")
        self.count("vllm_prompt_tokens", input_tokens)
        self.count("vllm_generation_tokens", output_tokens)
        self.count("vllm_prefix_cache_queries", input_tokens)
        self.count("vllm_prefix_cache_hits", times.hit_tokens)
        first_s = times.first_token_s or times.prefill_end_s
        begin_s = times.queued_s
        if begin_s and first_s:
            self.observe("vllm_time_to_first_token_seconds", first_s - begin_s)
        if not fetched and begin_s and times.prefill_start_s:
            self.observe("vllm_request_queue_time_seconds", times.prefill_start_s - begin_s)
            self.observe("vllm_request_prefill_time_seconds", times.prefill_end_s - times.prefill_start_s)
