"""Verify a started deployment: canary, first transfers, transfer counters."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Fluid
from pdlab.core.errors import CanaryError, DeployError
from pdlab.core.files import cache_dir
from pdlab.core.served_model import served_model
from pdlab.core.text import counted
from pdlab.deploy import canary, http_client
from pdlab.deploy.application import APP, Application
from pdlab.deploy.endpoint import Running
from pdlab.deploy.engine_metrics import await_nixl
from pdlab.deploy.serve_config import KV_GUARD_SCHEDULER, engine_kwargs
from pdlab.remote.logs import root_cause
from pdlab.results.schema import CanaryResult, NixlCounters

ROUTE_TIMEOUT_S = 30.0
ROUTE_POLL_S = 0.2


class LaunchProgress:
    """Prints lines to standard error: the current step, and the time since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._last: str | None = None

    def __call__(self, text: str) -> None:
        if text != self._last:
            print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)
            self._last = text


@dataclass(frozen=True)
class CheckedLaunch:
    """``answers``: the deployment's own, for the canary after a sweep; none where they mean nothing."""

    result: CanaryResult
    answers: tuple[canary.CanaryAnswer, ...] = ()


def check(app: Application, deployment: Deployment, running: Running, progress: LaunchProgress) -> CheckedLaunch:
    """Warm every pair, compare the canary's tokens, prove the transfers. Raises CanaryError, DeployError."""
    topology = deployment.topology
    key = _reference_key(deployment, running)
    await_route(running.base_url)
    try:
        canary_answers = canary.ask(running.base_url, running.model_id, running.key)
    except CanaryError as error:
        raise CanaryError(f"{error}{_engine_error(app)}") from error
    if deployment.decode_bench:
        progress("no canary: the KV cache of prompts is filled with random values")
        return CheckedLaunch(
            CanaryResult(equal=None, detail="decode bench: answers mean nothing, nothing was compared")
        )
    _check_shapes(deployment, running, canary_answers, progress)
    if isinstance(topology, Collocated):
        assert key is not None, "one pool has one key"
        canary.save_reference(cache_dir(), key, canary_answers)
        progress("canary: answers kept as the collocated reference")
        return CheckedLaunch(
            CanaryResult(equal=None, detail="collocated: this is the reference"), tuple(canary_answers)
        )
    if isinstance(topology, Disaggregated) and topology.prefill.ranks > 1:
        progress(f"warmed {app.warm_pairs(running.model_id)} prefill x decode pairs")
    tps = [pool.tp for pool in deployment.pools.values()]
    rounding = canary.ROUNDING if len(set(tps)) == 1 else canary.ROUNDING_UNEQUAL_TP
    stored = None if key is None else canary.load_reference(cache_dir(), key)
    if stored is not None:
        reference, source = stored, "reference: a collocated launch"
    else:
        fluid = isinstance(topology, Fluid)
        source = "an engine" if fluid else "a prefill engine"
        requests = canary.requests(running.model_id)[: len(canary_answers)]
        alone = app.ask_alone("fluid" if fluid else "prefill", running.model_id, requests)
        reference, source = tuple(canary.read_answer(answer) for answer in alone), f"reference: {source} by itself"
    result = canary.compare(canary_answers, reference, source, rounding=rounding)
    progress(f"{'warning: ' if result.rounded else ''}canary: {result.detail}")
    if result.equal is False:
        raise CanaryError(
            f"the deployment answers, but wrongly: {result.detail}. KV cache arrives damaged or in the wrong place; "
            "try another --kv-backend, equal --p-tp and --d-tp, and see docs/setup.md"
        )
    if isinstance(topology, Fluid):
        _check_pairs(app, running, reference, rounding, progress)
    if result.equal is None and tps[0] > tps[-1]:
        raise CanaryError(f"prefill TP > decode TP is only served when the canary can be compared; {result.detail}")
    counters = await_nixl(running.metrics_urls, running.replicas, lambda read: read.transfers)
    progress(describe_counters(counters))
    if counters.guard_recomputed:
        progress(
            f"warning: the KV guard had decode compute {counted(counters.guard_recomputed, 'prompt')}: the canary saw "
            "no KV cache of theirs; see pdlab_guard_* on the metrics pages"
        )
    if not counters.bytes_transferred:
        raise CanaryError(
            f"vLLM counts no KV bytes: nothing was transferred, decode computed the prompt itself{_engine_error(app)}"
        )
    if counters.failed_transfers:
        raise CanaryError(f"vLLM counts {counters.failed_transfers:g} failed KV transfers{_engine_error(app)}")
    return CheckedLaunch(result, tuple(canary_answers))


def _engine_error(app: Application) -> str:
    """The error line of an engine's own log, which has what vLLM's counters do not show."""
    error = root_cause(app.replica_logs())
    return f"; from an engine's log: {error}" if error else "; the replicas' logs name no error"


def _check_pairs(
    app: Application,
    running: Running,
    reference: Sequence[canary.CanaryAnswer],
    rounding: float,
    progress: LaunchProgress,
) -> None:
    """One prompt over every ordered pair of engines, each of which makes its first transfer by that. Raises
    CanaryError, DeployError."""
    request = canary.requests(running.model_id)[0]
    answers = app.pair_answers(running.model_id, request)
    wrong = []
    for (prefill, decode), answer in answers.items():
        result = canary.compare([canary.read_answer(answer)], reference[:1], "one engine by itself", rounding=rounding)
        if result.equal is False:
            wrong.append(f"prefill {prefill}, decode {decode}: {result.detail}")
    if wrong:
        pairs = counted(len(answers), "ordered pair of engines answers", "ordered pairs of engines answer")
        raise CanaryError(f"{len(wrong)} of {pairs} wrongly: {wrong[0]}")
    progress(f"canary: {counted(len(answers), 'ordered pair')} of engines, each with a KV transfer of its own")


def await_route(base_url: str, timeout_s: float = ROUTE_TIMEOUT_S) -> None:
    """Wait until the proxy at ``base_url`` has the application's route, at most ``timeout_s`` seconds.

    Ray Serve reports an application as running when its replicas run; its proxies get the route by a broadcast after
    that and answer 404 until then (ray/serve/_private/haproxy.py, update_target_groups). Raises DeployError.
    """
    deadline, url = time.monotonic() + timeout_s, f"{base_url}/-/routes"
    while True:
        try:
            seen = http_client.get_json(url, timeout_s)
            if APP in seen.values():
                return
        except (http_client.NoAnswer, AttributeError) as error:
            seen = error
        if time.monotonic() > deadline:
            raise DeployError(
                f"the application runs, but after {timeout_s:g} s Ray Serve's proxy has no route to it ({url}: "
                f"{' '.join(str(seen).split())[:200]}); see the proxy's and the controller's logs"
            )
        time.sleep(ROUTE_POLL_S)


def _check_shapes(
    deployment: Deployment, running: Running, plain: Sequence[canary.CanaryAnswer], progress: LaunchProgress
) -> None:
    """The same prompts in other shapes of request must give the same tokens. Raises CanaryError."""
    sequences = deployment.serving.requests.max_prompts
    results = canary.ask_shapes(running.base_url, running.model_id, plain, sequences, running.key)
    wrong = [f"{name}: {result.detail}" for name, result in results.items() if result.equal is False]
    if wrong:
        raise CanaryError(f"the deployment answers some shapes of request wrongly: {'; '.join(wrong)}")
    equal = [name for name, result in results.items() if result.equal]
    if equal:
        progress(f"canary: {', '.join(equal)}: the same tokens as one by one")
    for name, result in results.items():
        if result.equal is None:
            progress(f"canary: {name}: {result.detail}")


def _reference_key(deployment: Deployment, running: Running) -> str | None:
    """What a canary's answers depend on: weights, versions, device, and all engine arguments but those of the
    KV transfer. None where prefill and decode differ in it: no collocated launch is a reference for both."""
    manifest = running.manifest
    cluster, placement = manifest.cluster, manifest.placement
    shape = served_model(deployment).shape
    keys = set()
    for role, pool in deployment.pools.items():
        nodes = placement.nodes_of(role) if cluster and placement else ()
        gpus = sorted({str(cluster.node(node).gpu_type) for node in nodes}) if cluster else []
        cpu = cluster is not None and cluster.device == "cpu"
        arguments = {**engine_kwargs(deployment, role, shape, cpu=cpu), "kv_transfer_config": None}
        if arguments.get("scheduler_cls") == KV_GUARD_SCHEDULER:
            del arguments["scheduler_cls"]  # belongs to the transfer: it changes no number
        versions = {name: manifest.versions.get(name) for name in ("vllm", "torch")}
        facts = [running.tokenizer, versions, gpus, pool.dp, pool.expert_parallel, arguments]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
        keys.add(f"{running.model_id}-{digest}")
    return keys.pop() if len(keys) == 1 else None


def describe_counters(counters: NixlCounters) -> str:
    """One line for the person. Bytes are an estimate (docs/metrics.md), so they get two digits and an "about"."""
    if counters.transfers is None or counters.bytes_transferred is None:
        return "KV transfers: vLLM exports no NIXL counters"
    megabytes = float(f"{counters.bytes_transferred / 1e6:.2g}")
    return (
        f"KV transfers: {counters.transfers:g} done, about {megabytes:g} MB, {counters.failed_transfers or 0:g} failed"
    )
