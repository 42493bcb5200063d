"""Every metric of the dashboard and the alerts is one that pdlab or vLLM exports, under the name that Ray gives it."""

from __future__ import annotations

import inspect
import re

from contract.conftest import quietly
from support.dashboard_metrics import metrics

from pdlab.deploy import dashboard
from pdlab.deploy.serving import kv_pool, prefill_call, role_board, ttft_metrics
from pdlab.guard import receives
from pdlab.guard.receives import ACTIONS

KINDS = ("counter", "gauge", "histogram")
# In vLLM a metric is made by ``self._counter_cls(name="vllm:...")``.
MADE = re.compile(r"self\._(counter|gauge|histogram)_cls\(\s*name=\"vllm:(\w+)\"")


def of_vllm() -> dict[str, str]:
    """Name -> kind."""
    modules = ("vllm.v1.metrics.loggers", "vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats")
    found = [pair for module in modules for pair in MADE.findall(inspect.getsource(quietly(module)))]
    return {f"vllm_{name}": kind for kind, name in found}


def of_pdlab() -> dict[str, str]:
    split = re.findall(r"values \|?= \{([^}]*)\}", inspect.getsource(role_board))
    roles = {name for each in split for name in re.findall(r'"(\w+)":', each)}
    return {
        **dict.fromkeys(ttft_metrics.COUNTERS, "counter"),
        **dict.fromkeys(ttft_metrics.HISTOGRAMS, "histogram"),
        **{f"pdlab_prefill_{name}": "counter" for name in prefill_call.COUNTERS},
        **{f"pdlab_guard_{name}": "counter" for name in ACTIONS},
        **{f"pdlab_roles_{name}": "gauge" for name in roles},
        kv_pool.COUNTER: "counter",
    }


def exported(name: str, kind: str) -> set[str]:
    """As Ray's default exporter names it: OpenTelemetry's rule for counters."""
    return {
        "counter": {f"ray_{name.removesuffix('_total')}_total"},
        "gauge": {f"ray_{name}"},
        "histogram": {f"ray_{name}_bucket"},
    }[kind]


def test_every_metric_that_is_asked_for_is_exported() -> None:
    vllms, ours = of_vllm(), of_pdlab()
    assert len(vllms) > 20 and {"prefill", "decode", "changed", "join", "leave"} <= {
        name.removeprefix("pdlab_roles_") for name in ours if name.startswith("pdlab_roles_")
    }
    known = {each for name, kind in {**vllms, **ours}.items() for each in exported(name, kind)}
    assert metrics() - known == set()
    assert len(metrics()) > 30


def test_of_what_the_guard_counts_it_shows_what_went_wrong() -> None:
    assert set(dashboard.GUARD_ACTIONS) < set(receives.ACTIONS)


def test_rays_exporter_ends_the_names_of_counters_in_total() -> None:
    source = inspect.getsource(quietly("ray._private.telemetry.open_telemetry_metric_recorder"))
    assert "create_observable_counter" in source, "of which OpenTelemetry's Prometheus exporter makes _total"
    wrappers = inspect.getsource(quietly("vllm.v1.metrics.ray_wrappers"))
    assert 're.sub(r"[^a-zA-Z0-9_]", "_", name)' in wrappers, "vllm:x is vllm_x in Ray"
