"""Which collocated launch may be the reference of which deployment."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from support.launched import running
from support.web import reply, web_server

from pdlab.core.catalog import load_cluster
from pdlab.core.deployment import Deployment, Disaggregated, Pool, parse_label
from pdlab.core.errors import CanaryError, DeployError
from pdlab.core.nodes import ClusterView
from pdlab.deploy import canary, verify
from pdlab.deploy.verify import _reference_key
from pdlab.placement.place import place
from pdlab.remote.logs import LogTail
from pdlab.results.schema import NixlCounters

X2 = load_cluster("p5.48xlarge-x2")


def key(label: str, view: ClusterView = X2, vllm: str = "0.29.0", **more: Any) -> str | None:
    deployment = Deployment(topology=parse_label(label), **more)
    return key_of(deployment, view, vllm)


def key_of(deployment: Deployment, view: ClusterView = X2, vllm: str = "0.29.0") -> str | None:
    placed, versions = place(deployment, view), {"vllm": vllm}
    served = running(deployment=deployment, cluster=view, placement=placed, versions=versions)
    return _reference_key(deployment, served)


def test_a_collocated_launch_of_the_same_engines_is_the_reference() -> None:
    assert key("collocated-4xtp2") == key("collocated-1xtp2") == key("pd-pack-p2xtp2-d1xtp2") is not None


def test_fluid_engines_have_the_same_reference() -> None:
    assert key("pd-fluid-2xtp2") == key("pd-fluid-3xtp2-p1d2") == key("collocated-1xtp2")


def ordered_pairs(wrong: bool) -> Any:
    tokens = (1, 2, 3)
    tops = [{f"token_id:{token}": -0.1, "token_id:9": -5.0} for token in tokens]
    right = {"choices": [{"token_ids": list(tokens), "logprobs": {"top_logprobs": tops}}]}
    other = {"choices": [{"token_ids": [9, 9, 9], "logprobs": {"top_logprobs": tops}}]}
    answers = {("a", "b"): right, ("b", "a"): other if wrong else right}
    app = SimpleNamespace(pair_answers=lambda model_id, request: answers)
    lines: list[str] = []
    verify._check_pairs(app, running(), [canary.read_answer(right)], 0.1, lines.append)  # type: ignore[arg-type]
    return lines


def test_every_ordered_pair_of_engines_answers_like_one_alone() -> None:
    assert ordered_pairs(wrong=False) == ["canary: 2 ordered pairs of engines, each with a KV transfer of its own"]
    with pytest.raises(CanaryError, match="1 of 2 ordered pairs of engines answer wrongly: prefill b, decode a"):
        ordered_pairs(wrong=True)


def test_unlike_pools_have_none() -> None:
    assert key("pd-pack-p1xtp2-d1xtp4") is None
    topology = Disaggregated(prefill=Pool(tp=2), decode=Pool(tp=2, engine_kwargs={"seed": 1}), placement="pack")
    assert key_of(Deployment(topology=topology)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"label": "collocated-1xtp4"},
        {"label": "collocated-1xtp2pp2"},
        {"label": "collocated-1xtp2dp2"},
        {"label": "collocated-1xtp2dp2ep"},
        {"engine_kwargs": {"kv_cache_dtype": "fp8"}},
        {"max_model_len": 4096},
        {"vllm": "0.30.0"},
        {"view": ClusterView(nodes=tuple(n.model_copy(update={"gpu_type": "H200"}) for n in X2.nodes))},
    ],
    ids=str,
)
def test_what_changes_numerics_changes_the_reference(changed: dict[str, Any]) -> None:
    keys = {key("collocated-1xtp2"), key("collocated-1xtp2dp2"), key(**{"label": "collocated-1xtp2", **changed})}
    assert len(keys) == (2 if changed.get("label") == "collocated-1xtp2dp2" else 3)


def test_an_engines_own_line_says_why_nothing_was_transferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's counters only say that no bytes moved; its handshake wrote why."""
    why = "RuntimeError: NIXL compatibility hash mismatch. Local: 0a, Remote: 0b."
    app = SimpleNamespace(replica_logs=lambda: [LogTail("n", "/out", None), LogTail("n", "/err", why)])
    equal = canary.CanaryResult(equal=True, detail="the same")
    monkeypatch.setattr(canary, "ask", lambda *_: [])
    monkeypatch.setattr(canary, "compare", lambda *_, **__: equal)
    monkeypatch.setattr(canary, "load_reference", lambda *_: ())
    for name in ("await_route", "_check_shapes"):
        monkeypatch.setattr(verify, name, lambda *_: None)
    monkeypatch.setattr(verify, "await_nixl", lambda *_: NixlCounters(transfers=0, bytes_transferred=0.0))
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    with pytest.raises(CanaryError) as caught:
        verify.check(app, deployment, running(deployment=deployment), lambda _: None)  # type: ignore[arg-type]
    assert why in str(caught.value)


def routes(pages: list[tuple[int, bytes]]) -> Callable[[BaseHTTPRequestHandler], None]:
    """A proxy's answers to ``/-/routes``, in turn; the last one again and again."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        assert request.path == "/-/routes"
        status, body = pages.pop(0) if len(pages) > 1 else pages[0]
        reply(request, body, status)

    return answer


def test_a_proxy_that_learns_the_route_late_is_waited_for() -> None:
    pages = [(503, b"No routes yet"), (200, b"{}"), (200, b'{"/":"pdlab"}')]
    with web_server(routes(pages)) as url:
        verify.await_route(url)
    assert pages == [(200, b'{"/":"pdlab"}')]


@pytest.mark.parametrize("page", [(200, b'{"/other":"another"}'), (200, b"[]"), (200, b"not JSON"), (503, b"draining")])
def test_a_proxy_that_never_learns_the_route_is_named(page: tuple[int, bytes]) -> None:
    with web_server(routes([page])) as url, pytest.raises(DeployError, match=r"no route to it.*/-/routes"):
        verify.await_route(url, timeout_s=0.3)


def test_a_proxy_that_is_not_there_is_named() -> None:
    with web_server(lambda request: None) as url:
        pass
    with pytest.raises(DeployError, match="no route to it"):
        verify.await_route(url, timeout_s=0.3)
