"""From a request to a checked deployment: place, deploy, watch, warm, canary, counters, wire, publish."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from pdlab.cluster import local_nodes, run_on_host
from pdlab.cluster.connection import BackgroundImports, Cluster, prepare
from pdlab.cluster.local_nodes import MARKER, LocalNodes
from pdlab.cluster.namespaces import INSIDE
from pdlab.core import api_key
from pdlab.core.catalog import ModelShape
from pdlab.core.commands import LAUNCH, RUN_LAUNCH
from pdlab.core.defaults import base_url
from pdlab.core.deployment import Deployment
from pdlab.core.errors import ClusterError, UsageError
from pdlab.core.failure import attach_logs
from pdlab.core.files import cache_dir, holder
from pdlab.core.files import replace as replace_file
from pdlab.core.model_size import dense_bytes, expert_bytes
from pdlab.core.nodes import ClusterView, LinkShape, Placement
from pdlab.core.served_model import in_bucket, not_on_this_machine, served_model
from pdlab.deploy import preflight, serving_path, wire_proof
from pdlab.deploy.application import Application, AppState, deployment_names
from pdlab.deploy.cpu_engine import engine_template
from pdlab.deploy.cpu_engine.tiny_model import ensure_tiny_model
from pdlab.deploy.endpoint import OnHost, Running, clear_running, launching, load_running, measured_lock, save_running
from pdlab.deploy.options import LaunchRequest, request_from_json, request_to_json
from pdlab.deploy.orphan_cleanup import CleanupProcess, cleanup_process
from pdlab.deploy.prepared import Prepared, prepare_deployment
from pdlab.deploy.serve_config import ServeApp, cpu_env, transport_env, with_secrets
from pdlab.deploy.verify import LaunchProgress, check
from pdlab.placement.actual import observe
from pdlab.placement.place import fits
from pdlab.remote.logs import log_ends
from pdlab.results.provenance import git_state, hardware, now, versions
from pdlab.results.schema import Manifest

ON_THIS_MACHINE = ", or serve on this machine with --local"
RELEASE_TIMEOUT_S = 10.0
RELEASE_POLL_S = 0.25
LEAST_START_TIMEOUT_S = 1800.0
START_BASE_S, LOAD_BYTES_PER_S, START_PER_NODE_S = 900.0, 250e6, 30.0


class Substitutes(Protocol):
    """A rehearsal's substitutes for nodes and engines (`pdlab.rehearsal.fake_cluster`)."""

    def start_nodes(self, announce: Callable[[str, str], None] | None = None) -> LocalNodes:
        """``announce`` as `pdlab.cluster.local_nodes.start`. Raises UsageError, ClusterError."""

    def environment(self) -> dict[str, str]:
        """Environment of Ray Serve's processes, in addition to that of the serving path."""

    def tokenizer(self) -> str:
        """Folder of the tokenizer of the simulated engines."""

    def simulated(self, prepared: Prepared, local: LocalNodes, progress: Callable[[str], None]) -> ServeApp:
        """The application with simulated engines. Raises UsageError."""

    def manifest(self, manifest: Manifest) -> Manifest:
        """The manifest, marked as a rehearsal."""


def launch(request: LaunchRequest, substitutes: Substitutes | None = None) -> None:
    """Launch the deployment of the request. Returns when it is ready (``detach``), or when the person stops it.
    ``substitutes``: those of a rehearsal.

    Other launches are refused until this one has published its deployment, or has failed (on two hosts: until this
    process ends). Raises PdlabError. Then, and on Ctrl-C, everything that was started is stopped again.
    """
    # On one of two hosts another process is the launcher, and has the cleanup process.
    local = request.node_count is not None and INSIDE not in os.environ
    with (
        cleanup_process(request.base_url) if local else contextlib.nullcontext() as cleanup,
        contextlib.ExitStack() as turn,
    ):
        turn.enter_context(launching(request.base_url, local=request.node_count is not None))
        if request.two_hosts and INSIDE not in os.environ:
            _launch_on_first_host(request, cleanup)
        else:
            _launch(request, turn.close, cleanup, substitutes)


def _launch(
    request: LaunchRequest,
    published: Callable[[], None] = lambda: None,
    cleanup: CleanupProcess | None = None,
    substitutes: Substitutes | None = None,
) -> None:
    """`launch` in the network where it belongs, once it may; calls ``published`` when others may again."""
    progress = LaunchProgress()
    _check_port(request)
    with _terminate_as_interrupt(), contextlib.ExitStack() as undo:
        key = api_key.read(request.api_key_file) if request.api_key_file else None
        env = serving_path.environment(request.deployment, request.host) | api_key.serve_env(key)
        shape, source = served_model(request.deployment)
        if substitutes is not None:
            source = substitutes.tokenizer()
            env |= substitutes.environment()
        if source is None:
            assert shape is not None
            # Before anything else is imported in the background: `from transformers import ...` in two threads
            # at once fails, for the package puts another module in its own place while it loads.
            source = str(ensure_tiny_model(shape, cache_dir()))
        imports = BackgroundImports()
        local = _local(request, undo, progress, cleanup, substitutes, imports)
        loading = prepare(local, env, imports)
        with Cluster(local, env, progress, ON_THIS_MACHINE) as cluster, contextlib.ExitStack() as taken_down:
            taken_down.callback(clear_running, request.base_url)
            if local is None and not request.accept_open_cluster:
                _refuse_open(cluster)
            app = Application(cluster)
            if local is None:
                taken_down.callback(_quietly, app.stop_serve)
            taken_down.callback(_quietly, app.delete)
            patience_s = 0.0
            if app.state().status != "NOT_STARTED":
                progress("taking down what was served before")
                app.delete()
                patience_s = RELEASE_TIMEOUT_S
            try:
                running = _serve(app, request, shape, source, loading, progress, patience_s, substitutes)
            except BaseException as error:
                if local:
                    local_nodes.note_shared_memory(local)
                kept = local_nodes.keep_logs(local) if local else _keep_logs(app)
                attach_logs(error, kept)
                if kept:
                    progress(f"logs kept in {kept}")
                raise
            if local:
                local_nodes.note_shared_memory(local)
            if request.detach:
                taken_down.pop_all()
                undo.pop_all()
                progress(f"serving at {running.base_url}/v1; stop it with: {RUN_LAUNCH} --shutdown")
                return
            published()
            progress(f"serving at {running.base_url}/v1 until Ctrl-C")
            while True:
                signal.pause()


def _launch_on_first_host(request: LaunchRequest, cleanup: CleanupProcess | None) -> None:
    """Bring two hosts up, or find them, and launch from the first: a driver belongs on its node's host."""
    progress = LaunchProgress()
    # No other machine reaches these hosts, and what routes requests must reach the replicas on the second.
    everywhere = request.model_copy(
        update={"host": "0.0.0.0" if request.host in ("127.0.0.1", "localhost") else request.host}
    )
    with _terminate_as_interrupt(), contextlib.ExitStack() as undo:
        local = _local(request, undo, progress, cleanup)
        assert local is not None
        host = local.host(1)
        text = request_to_json(everywhere)
        run_on_host.call(host.pid, "pdlab.deploy.launch", text, local_nodes.environment_on(host, local))
        undo.pop_all()


def shutdown(host: str, port: int) -> None:
    """Stop the deployment at that address, and the Ray nodes that ``--local`` started."""
    if INSIDE in os.environ:
        raise UsageError(f"--shutdown on {os.environ[INSIDE]}, one of the two hosts, would end itself: run it outside")
    progress = LaunchProgress()
    url = base_url(port, host)
    measuring = holder(measured_lock(url))
    if measuring:
        progress(f"warning: this ends what {measuring} is measuring")
    local = local_nodes.running_or_salvaged()
    if local:
        local_nodes.stop(local)
        local_nodes.end_strays()
        progress("stopped the local Ray nodes and everything on them")
        clear_running(url)
        return
    with Cluster() as cluster:
        app = Application(cluster)
        existed = app.delete()
        app.stop_serve()
    clear_running(url)
    progress(f"{'stopped the application' if existed else 'nothing of pdlab is served'}; Ray's own nodes stay up")


def live_view(otherwise: str = "") -> ClusterView:
    """The running cluster as it is now. Raises ClusterError when there is none; ``otherwise``: as of `Cluster`."""
    with Cluster(otherwise=otherwise) as cluster:
        return cluster.view()


def _local(
    request: LaunchRequest,
    undo: contextlib.ExitStack,
    progress: LaunchProgress,
    cleanup: CleanupProcess | None = None,
    substitutes: Substitutes | None = None,
    imports: BackgroundImports | None = None,
) -> LocalNodes | None:
    """The local nodes to serve on: those that are up, or new ones that fall again if this launch fails. While they
    start, ``imports`` go on."""
    if request.node_count is None:
        return None
    up = local_nodes.running()
    if up and (unlike := _unlike(up, request)):
        raise UsageError(f"{unlike}; stop them first with {LAUNCH} --shutdown")
    if up:
        progress(f"{up.count} local Ray nodes are up")
        # What serves on the first of two hosts ends with this process by itself (`pdlab.cluster.run_on_host`).
        if cleanup and not up.two_hosts:
            cleanup.application(up.id)
    elif substitutes is not None:
        progress(f"starting {request.node_count} local Ray nodes with made-up GPUs")
        up = substitutes.start_nodes(cleanup.nodes if cleanup else None)
        undo.callback(local_nodes.stop, up)
    else:
        assert request.local_nodes is not None
        progress(f"starting {request.local_nodes} local Ray nodes{' on two hosts' if request.two_hosts else ''}")
        link = (request.link or LinkShape()) if request.two_hosts else None
        if imports is not None:
            imports.ahead()
        template = local_nodes.Template(engine_template.__name__, engine_template.SOCKET, cpu_env())
        up = local_nodes.start(request.local_nodes, link, cleanup.nodes if cleanup else None, template)
        undo.callback(local_nodes.stop, up)
    if INSIDE not in os.environ and up.two_hosts:
        link = request.link or up.two_hosts.shape
        if link != up.two_hosts.shape:
            up = local_nodes.shape_link(link)
        progress(f"the link between the two hosts: {link}")
    return up


def _unlike(up: LocalNodes, request: LaunchRequest) -> str | None:
    """Why the launch cannot use the local nodes that are up; None: it can."""
    if (up.made_up and up.made_up.name) != (request.rehearsal and request.cluster and request.cluster.name):
        made = f"as a fake {up.made_up.name}" if up.made_up else "of this machine"
        return f"local Ray nodes {made} are up, this launch needs others"
    if (up.two_hosts is not None) != request.two_hosts:
        made, other = ("on two hosts", "without") if up.two_hosts else ("side by side", "with")
        return f"local Ray nodes {made} are up, this launch needs others ({other} --two-hosts)"
    if up.count != request.node_count:
        return f"{up.count} local Ray nodes are up, this launch needs {request.node_count}"
    return None


def tokenizer_of(deployment: Deployment, source: str) -> str:
    """The tokenizer that the engines load, which an engine argument may name in place of the model's own."""
    arguments = [deployment.engine_kwargs, *(pool.engine_kwargs for pool in deployment.pools.values())]
    named: list[str] = [each["tokenizer"] for each in arguments if each.get("tokenizer")]
    return named[-1] if named else source


def _serve(
    app: Application,
    request: LaunchRequest,
    shape: ModelShape | None,
    source: str,
    loading: Future[Any],
    progress: LaunchProgress,
    patience_s: float,
    substitutes: Substitutes | None = None,
) -> Running:
    deployment = request.deployment
    app.start_serve(request.host, request.port)
    view = _free_view(app.cluster.view, deployment, patience_s)
    prepared = prepare_deployment(deployment, view, shape, source, request.workload)
    placement = prepared.placement
    progress(
        f"placed {deployment.label}: "
        + ", ".join(f"{r} on {', '.join(placement.nodes_of(r))}" for r in placement.roles)
    )
    progress(f"serving path: {request.serving_path}")
    for caution in prepared.cautions:
        progress(f"warning: {caution}")
    if substitutes is None:
        deployment = preflight.examine(
            app.cluster, deployment, view, placement, progress,
            model=None if in_bucket(source) else source, choose=request.choose_backend, accept=request.accept_wire,
        )  # fmt: skip
    prepared = prepared.with_transport_of(deployment)
    served = prepared.app
    if substitutes is not None:
        assert app.cluster.local is not None
        served = substitutes.simulated(prepared, app.cluster.local, progress)
    request = request.model_copy(update={"deployment": deployment})
    started = now()
    loading.result()
    app.submit(with_secrets(served, deployment, os.environ) if substitutes is None else served)
    name = prepared.model_id
    manifest = _manifest(request, view, placement, started)
    manifest = manifest if substitutes is None else substitutes.manifest(manifest)
    running = Running(
        base_url=request.base_url,
        model_id=name,
        tokenizer=tokenizer_of(deployment, shape.hf_id or source if shape and not_on_this_machine(source) else source),
        manifest=manifest,
        metrics_urls=app.cluster.metrics_urls(),
        on_host=_on_host(app.cluster.local),
        api_key_file=None if request.api_key_file is None else str(request.api_key_file),
    )
    if not request.wait:
        save_running(running)
        progress("submitted without waiting: not verified (no canary, no transfer counters)")
        return running
    for state in app.wait(request.timeout_s or start_timeout_s(shape, view)):
        progress(_stages(state))
    roles = {served: role for role, served in deployment_names(deployment, name).items()}
    pools = {r.replica: roles[r.deployment] for r in state.replicas if r.deployment in roles}
    replicas = tuple(replica.replica for replica in state.replicas)
    running = running.model_copy(update={"replicas": replicas, "pools": pools})
    started_of = {role: pool.replicas for role, pool in deployment.pools.items()}
    came_out = observe(placement, view, app.bundles(deployment, view, name), started_of)
    checked = check(app, deployment, running, progress)
    proof = None  # in a rehearsal no KV cache moves
    if substitutes is None:
        proof = wire_proof.prove(app, deployment, running, view, came_out, shape, progress, request.accept_wire)
    checks = {"canary": checked.result, "wire": proof}
    manifest = manifest.model_copy(update={"placement": came_out, **checks, "finished_at": None})
    running = running.model_copy(update={"manifest": manifest, "answers": checked.answers})
    save_running(running)
    return running


def start_timeout_s(shape: ModelShape | None, view: ClusterView) -> float:
    """Seconds after which a start has failed: a base for imports, compilation and graphs, the weights at the rate of a
    download or a busy disk, and what every node's share of a rendezvous may take."""
    weights = 0.0 if shape is None else expert_bytes(shape) + dense_bytes(shape, with_embedding=True)
    needed = START_BASE_S + weights / LOAD_BYTES_PER_S + START_PER_NODE_S * len(view.engine_nodes)
    return max(LEAST_START_TIMEOUT_S, needed)


def _free_view(current_view: Callable[[], ClusterView], deployment: Deployment, patience_s: float) -> ClusterView:
    """The nodes with what is free on them. Ray reports what an application gave back with a delay: for ``patience_s``
    after one was taken down, nodes on which the deployment does not fit are looked at again."""
    deadline = time.monotonic() + patience_s
    while True:
        view = current_view()
        if fits(deployment, view) or time.monotonic() >= deadline:
            return view
        time.sleep(RELEASE_POLL_S)


def _stages(state: AppState) -> str:
    """``Decode:m: 1 starting; Prefill:m: 3 running, 1 starting``: how many replicas are at which stage."""
    stages: dict[str, Counter[str]] = {name: Counter() for name in state.deployments}
    for replica in state.replicas:
        stages.setdefault(replica.deployment, Counter())[replica.state.lower()] += 1
    parts = {
        name: ", ".join(f"{count} {stage}" for stage, count in sorted(counts.items())) or "no replica placed yet"
        for name, counts in stages.items()
    }
    return "; ".join(f"{name}: {part}" for name, part in sorted(parts.items())) or "submitted"


def _manifest(request: LaunchRequest, view: ClusterView, placement: Placement, started: str) -> Manifest:
    commit, dirty = git_state()
    transport = request.deployment.transport
    return Manifest(
        origin="measured",
        label=request.deployment.label,
        deployment=request.deployment,
        cluster=view,
        placement=placement,
        gpus=request.deployment.gpus,
        local=request.local_nodes is not None,
        serving_path=request.serving_path,
        commands=request.command,
        git_commit=commit,
        git_dirty=dirty,
        versions=versions(),
        hardware=hardware(),
        transport_env={} if transport is None else transport_env(transport, view),
        started_at=started,
    )


def _on_host(local: LocalNodes | None) -> OnHost | None:
    if local is None or local.two_hosts is None:
        return None
    return OnHost(pid=local.host(1).pid, mark=f"{MARKER}={local.id}")


def _refuse_open(cluster: Cluster) -> None:
    if not cluster.requires_token():
        raise ClusterError(
            "this Ray cluster requires no token: anyone who reaches its ports can run code on every node. Start Ray on "
            "all nodes with RAY_AUTH_MODE=token (docs/security.md), or give --accept-open-cluster where a firewall "
            "keeps others away"
        )


def _check_port(request: LaunchRequest) -> None:
    """Raises UsageError if another program has the port: clients would reach that program.

    Ray Serve on local nodes that are up holds its port also while it serves nothing.
    """
    ours = load_running(request.base_url) or (request.node_count and local_nodes.running())
    if ours or request.host not in ("127.0.0.1", "localhost"):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", request.port))
        except OSError as error:
            raise UsageError(f"port {request.port} is taken by another program; choose one with --port") from error


def _keep_logs(app: Application) -> Path | None:
    """The replicas' logs of all nodes, in the cache folder; None when there are none, or they cannot be read now."""
    kept = cache_dir() / "logs" / "last-failure"
    with contextlib.suppress(Exception):  # also a cluster that ends: the user reads the launch's own error
        ends = app.logs_by(log_ends)
        shutil.rmtree(kept, ignore_errors=True)
        for node, name, text in ends:
            replace_file(kept / f"{node}-{name}", text.encode())
        return kept if ends else None
    return None


def _quietly(function: Any, *args: Any) -> None:
    """Undo as far as it goes: a second failure must not hide the first."""
    with contextlib.suppress(Exception):
        function(*args)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end a launch like Ctrl-C does: everything is taken down. SIGINT too where a shell
    started this in the background, with that signal ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run_on_host.answering(lambda text: _launch(request_from_json(text))))
