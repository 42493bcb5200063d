#!/usr/bin/env python3
"""Serve gpt-oss collocated or with prefill and decode disaggregated; see --help and README.md.

Ray and vLLM are imported only for a real start: --help and --dry-run answer at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pdlab.cluster.two_hosts import require
from pdlab.core.api_key import KEY, chosen, read
from pdlab.core.catalog import ModelShape, resolve_model
from pdlab.core.environment import secret_values
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import exit_code
from pdlab.core.files import cache_dir, write_output
from pdlab.core.nodes import NODE_NAME_LABEL, ClusterView, Role
from pdlab.core.output_paths import check_writable
from pdlab.core.settings import parse
from pdlab.core.text import shell_assignments
from pdlab.core.vllm_limits import check_context, check_divisibility
from pdlab.deploy import serving_path
from pdlab.deploy.cpu_engine.tiny_model import tiny_model_folder
from pdlab.deploy.dry_run import describe
from pdlab.deploy.options import (
    FROM_STDIN,
    LOCAL_MODEL,
    LaunchRequest,
    LaunchSettings,
    command_line,
    request_from,
    request_from_json,
)
from pdlab.deploy.prepared import Prepared, prepare_deployment
from pdlab.deploy.serve_config import serve_config
from pdlab.placement.place import pinned_to_ids


@dataclass(frozen=True)
class Model:
    """What the engines load: ``shape`` is None for a model that is not in the catalogue."""

    shape: ModelShape | None
    source: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(parse(LaunchSettings, arguments), arguments))


def _run(settings: LaunchSettings, argv: Sequence[str]) -> int:
    if settings.request_from_stdin:
        _start(_request_from_stdin(argv))
        return 0
    if settings.shutdown:
        return _shutdown(settings)
    if settings.api_key is False and settings.api_key_file is not None:
        raise UsageError("--no-api-key and --api-key-file exclude each other: leave one out")
    if settings.export not in (None, "-"):
        _check_export(Path(settings.export))
    if settings.api_key_file is not None:
        read(settings.api_key_file)
    request = request_from(settings, argv)
    if settings.dry_run or settings.export:
        _plan(settings, request, argv)
    else:
        _start(request)
    return 0


def _request_from_stdin(argv: Sequence[str]) -> LaunchRequest:
    if list(argv) != [FROM_STDIN]:
        raise UsageError(f"{FROM_STDIN} takes no other flag: the request has what they would say")
    return request_from_json(sys.stdin.buffer.read() if sys.stdin else "")


def _start(request: LaunchRequest) -> None:
    """Launch, once everything is checked that can be without a cluster."""
    model = _checked_model(request)
    if request.rehearsal is None and (names := request.deployment.secrets):
        secret_values(dict.fromkeys(names), os.environ)
        _warn(
            f"Ray writes the environment of engines into its own log on the nodes, {' and '.join(names)} too: to keep "
            "them out, leave --env out, and set them before `ray start` on every node"
        )
    from pdlab.deploy import launch

    view = request.known_view()
    if view is not None:
        # A request that cannot fit fails here, before Ray is imported.
        _prepared(request, model, view)
    if request.two_hosts:
        require()
    request = request.model_copy(update={"api_key_file": _key_file(request)})
    if request.rehearsal is None:
        launch.launch(request)
        return
    from pdlab.rehearsal.fake_cluster import RehearsalStage

    launch.launch(request, RehearsalStage(request))


def _shutdown(settings: LaunchSettings) -> int:
    if settings.mode or settings.config or settings.dry_run or settings.export:
        raise UsageError("--shutdown stops what is served: leave out the mode, --config, --dry-run and --export")
    from pdlab.deploy import launch

    launch.shutdown(host=settings.host, port=settings.port)
    return 0


def _checked_model(request: LaunchRequest) -> Model:
    """The deployment's model. Prints warnings; raises UsageError for what cannot be served, whatever the nodes."""
    deployment = request.deployment
    shape, source = resolve_model(deployment.model)
    if request.local_nodes and not ((shape and shape.local) or (source and Path(source).is_dir())):
        raise UsageError(
            f"--local serves on this machine's CPUs, too little for {deployment.model}: "
            f"leave --model out ({LOCAL_MODEL}) or give a folder"
        )
    check_context(deployment, shape)
    for warning in check_divisibility(deployment, shape):
        _warn(warning)
    if deployment.transport is not None and deployment.transport.verbose:
        _warn(
            "NIXL debug logging costs 5 to 10 times in KV-transfer speed: look at transports with it, measure without"
        )
    if not _on_loopback(request.host) and request.api_key is False:
        _warn(f"serving on {request.host} without an API key: whoever reaches that address can use the model")
    if source is None:
        assert shape is not None
        source = str(tiny_model_folder(shape, cache_dir()))
    return Model(shape, source)


def _plan(settings: LaunchSettings, request: LaunchRequest, argv: Sequence[str]) -> None:
    """Print or export what would be started."""
    model = _checked_model(request)
    if settings.dry_run and settings.export == "-":
        raise UsageError("--dry-run and --export - both write to standard output: give one of them, or --export FILE")
    prepared = _prepared(request, model, request.known_view() or _live_view())
    for caution in prepared.cautions:
        _warn(caution)
    if request.rehearsal is not None:
        from pdlab.rehearsal.fake_cluster import RehearsalStage

        print(RehearsalStage(request).describe(), file=sys.stderr)
    if settings.dry_run:
        base_url = f"http://{request.host}:{request.port}"
        text = describe(prepared, serving_path=request.serving_path, base_url=base_url, launch_command=_for_real(argv))
        print(text, end="")
    if settings.export:
        _export(settings, prepared, request)


def _prepared(request: LaunchRequest, model: Model, view: ClusterView) -> Prepared:
    return prepare_deployment(request.deployment, view, model.shape, model.source, request.workload)


def _check_export(path: Path) -> None:
    """Raises UsageError where nothing can be written, or where a file would be lost."""
    check_writable(path, "--export")
    if path.exists():
        raise UsageError(f"--export {path}: is there already; remove it, choose another, or give - and redirect")


def _on_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _key_file(request: LaunchRequest) -> Path | None:
    """File with the key that clients have to send; None: none is asked for. Raises UsageError."""
    if request.api_key is False:
        return None
    needed = request.api_key is True or not _on_loopback(request.host)
    file = chosen(request.api_key_file, os.environ, needed=needed, folder=cache_dir())
    if file is not None:
        print(f"clients need the API key in {file}: Authorization: Bearer KEY", file=sys.stderr)
    return file


def _live_view() -> ClusterView:
    from pdlab.deploy import launch

    return launch.live_view()


def _for_real(argv: Sequence[str]) -> str:
    """The same command line without --dry-run and --export."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--export":
            next(words, None)
        elif word != "--dry-run" and not word.startswith("--export="):
            kept.append(word)
    return command_line(kept)


def _export(settings: LaunchSettings, prepared: Prepared, request: LaunchRequest) -> None:
    print(f"serving path: {request.serving_path}", file=sys.stderr)
    needed = serving_path.environment(request.deployment, request.host)
    if names := request.deployment.secrets:
        _warn(
            f"a Serve config carries no secret: start Ray on every node with {' and '.join(names)} in the environment "
            "of `ray start`"
        )
    if needed:
        _warn(
            "a Serve config cannot carry what this serving path needs: start Ray on every node with "
            f"{shell_assignments(needed)}"
        )
    wants_key = settings.api_key or settings.api_key_file or os.environ.get(KEY) or not _on_loopback(settings.host)
    if wants_key and settings.api_key is not False:  # without a key on purpose: `_checked_model` has warned
        _warn(
            "a Serve config cannot carry an API key, and this one has none: whoever reaches what `serve deploy` starts "
            "can use the model; launch without --export to ask for the key"
        )
    config = yaml.safe_dump(serve_config(prepared.app, host=settings.host, port=settings.port), sort_keys=False)
    if pinned := pinned_to_ids(prepared.placement, prepared.view):
        caution = _pinned(pinned)
        _warn(caution)
        config = f"# {caution}\n{config}"
    if settings.export in (None, "-"):
        print(config, end="")
        return
    write_output(Path(settings.export), config, "--export")
    print(f"wrote {settings.export}: {shlex.join(['serve', 'deploy', settings.export])}", file=sys.stderr)


def _pinned(pinned: Mapping[Role, Sequence[str]]) -> str:
    pools = "; ".join(f"{role} to {', '.join(nodes)}" for role, nodes in pinned.items())
    return (
        f"pinned to Ray's node ids: {pools}. A node that replaces one of them has another id, and replicas wait for "
        f"the old one: start Ray on every node with --labels {NODE_NAME_LABEL}=NAME and export again, or export again "
        "after each replacement"
    )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
