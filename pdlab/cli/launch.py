#!/usr/bin/env python3
"""Serve gpt-oss collocated or with prefill and decode disaggregated; see --help and README.md.

Ray and vLLM are imported only for a real start: --help and --dry-run answer at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.cluster.two_hosts import require
from pdlab.core.api_key import KEY, chosen, read, serve_env
from pdlab.core.environment import secret_values
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import exit_code
from pdlab.core.files import cache_dir, write_output
from pdlab.core.nodes import NODE_NAME_LABEL, ClusterView, Role
from pdlab.core.output_paths import check_writable
from pdlab.core.settings import declared, flag_names, not_given, parse
from pdlab.deploy import serving_path
from pdlab.deploy.dry_run import describe
from pdlab.deploy.export_options import ExportOptions
from pdlab.deploy.options import (
    FROM_STDIN,
    LaunchRequest,
    LaunchSettings,
    command_line,
    request_from,
    request_from_json,
)
from pdlab.deploy.prepared import CheckedModel, Prepared, checked_model, prepared_launch
from pdlab.placement.place import pinned_to_ids

if TYPE_CHECKING:
    from pdlab.deploy import exports


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
    if settings.target is not None:
        _check_exports(settings)
        settings = _for_pods(settings)
    if settings.api_key_file is not None:
        read(settings.api_key_file)
    request = request_from(settings, argv)
    if settings.dry_run or settings.target:
        _plan(settings, request, argv)
    else:
        _start(request)
    return 0


def _request_from_stdin(argv: Sequence[str]) -> LaunchRequest:
    if list(argv) != [FROM_STDIN]:
        raise UsageError(f"{FROM_STDIN} takes no other flag: the request has all settings")
    return request_from_json(sys.stdin.buffer.read() if sys.stdin else "")


def _start(request: LaunchRequest) -> None:
    """Check everything that needs no cluster, then launch."""
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
        prepared_launch(request, model, view)
    if request.two_hosts:
        require()
    request = request.model_copy(update={"api_key_file": _key_file(request)})
    if request.rehearsal is None:
        launch.launch(request)
        return
    from pdlab.rehearsal.fake_cluster import RehearsalSubstitutes

    launch.launch(request, RehearsalSubstitutes(request))


def _shutdown(settings: LaunchSettings) -> int:
    if settings.mode or settings.config or settings.dry_run or settings.target:
        raise UsageError("--shutdown stops what is served: leave out the mode, --config, --dry-run and --export")
    others = {each.name for each in declared(LaunchSettings)} - {"shutdown", "host", "port"}
    not_given(settings, sorted(others), "--shutdown, which stops what is served")
    from pdlab.deploy import launch

    launch.shutdown(host=settings.host, port=settings.port)
    return 0


def _checked_model(request: LaunchRequest) -> CheckedModel:
    """The deployment's model. Prints warnings. Raises UsageError if no nodes can serve it."""
    model = checked_model(request)
    for warning in model.warnings:
        _warn(warning)
    transport = request.deployment.transport
    if transport is not None and transport.verbose:
        _warn(
            "NIXL debug logging costs 5 to 10 times in KV-transfer speed: look at transports with it, measure without"
        )
    if not _on_loopback(request.host) and request.api_key is False:
        _warn(f"serving on {request.host} without an API key: whoever reaches that address can use the model")
    return model


def _plan(settings: LaunchSettings, request: LaunchRequest, argv: Sequence[str]) -> None:
    """Print or export the deployment, without a start."""
    model = _checked_model(request)
    flag, file = settings.target or ("", None)
    if settings.dry_run and file == "-":
        raise UsageError(f"--dry-run and {flag} - both write to standard output: give one of them, or {flag} FILE")
    view = request.known_view() or _live_view()
    if settings.export_k8s is not None:
        from pdlab.deploy.kubernetes.manifest import pod_nodes

        view = pod_nodes(view)
    prepared = prepared_launch(request, model, view)
    for caution in prepared.cautions:
        _warn(caution)
    if request.rehearsal is not None:
        from pdlab.rehearsal.fake_cluster import RehearsalSubstitutes

        print(RehearsalSubstitutes(request).describe(), file=sys.stderr)
    if settings.dry_run:
        text = describe(
            prepared,
            serving_path=request.serving_path,
            base_url=request.base_url,
            launch_command=_for_real(argv),
        )
        print(text, end="")
    if settings.target is not None:
        _export(settings, prepared, request)


def _check_exports(settings: LaunchSettings) -> None:
    """Raises UsageError if an output cannot be written, or would replace a file."""
    assert settings.target is not None
    files = [settings.target] if settings.target[1] != "-" else []
    files += [("--export-env", settings.export_env)] if settings.export_env is not None else []
    for flag, file in files:
        path = Path(file)
        check_writable(path, flag)
        if path.exists():
            raise UsageError(f"{flag} {path}: is there already; remove it, choose another, or give - and redirect")


def _for_pods(settings: LaunchSettings) -> LaunchSettings:
    """The settings; for Kubernetes with the address at which a Service reaches pods. Raises UsageError."""
    if settings.export_k8s is None:
        return settings
    if settings.cluster in (None, "auto"):
        raise UsageError("--export-k8s needs the nodes that the pods will have: give --cluster FILE")
    everywhere = serving_path.EVERYWHERE
    if "host" in settings.model_fields_set and settings.host != everywhere:
        raise UsageError(f"--host {settings.host}: a Service does not reach pods there; give {everywhere}, or leave it")
    return settings.model_copy(update={"host": everywhere})


def _on_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _key_file(request: LaunchRequest) -> Path | None:
    """The file with the key that clients must send; None: no key. Raises UsageError."""
    if request.api_key is False:
        return None
    needed = request.api_key is True or not _on_loopback(request.host)
    file = chosen(request.api_key_file, os.environ, needed=needed, folder=cache_dir())
    if file is not None:
        print(f"clients need the API key in {file}: Authorization: Bearer KEY", file=sys.stderr)
    return file


def _live_view() -> ClusterView:
    from pdlab.deploy import launch

    return launch.live_view(f", or name the nodes with --cluster FILE{launch.ON_THIS_MACHINE}")


def _for_real(argv: Sequence[str]) -> str:
    """The same command line without --dry-run and the flags of exports."""
    dry_run = flag_names(LaunchSettings)["dry_run"]
    exporting = {name: each.flag.bare for each in declared(ExportOptions) for name in each.flags}
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        flag, _, inline = word.partition("=")
        if flag not in exporting:
            kept += [word] if word != dry_run else []
        elif not inline and exporting[flag] is None:
            next(words, None)
    return command_line(kept)


def _export(settings: LaunchSettings, prepared: Prepared, request: LaunchRequest) -> None:
    """Write the file that another tool deploys, and print its notes on standard error."""
    from pdlab.deploy import exports
    from pdlab.deploy.kubernetes import manifest

    assert settings.target is not None
    flag, file = settings.target
    print(f"serving path: {request.serving_path}", file=sys.stderr)
    protected = settings.api_key or settings.api_key_file or os.environ.get(KEY) or not _on_loopback(request.host)
    # Without a key on purpose: `_checked_model` has warned.
    wants_key = bool(protected) and settings.api_key is not False
    path_env = serving_path.environment(request.deployment, request.host)
    if flag == "--export-k8s":
        if exports.prefers_libfabric(prepared, request.choose_backend):
            prepared = exports.on_libfabric(prepared)
        documents = manifest.manifests(prepared, settings, port=request.port, path_env=path_env, wants_key=wants_key)
        notes = manifest.notes(prepared, settings, wants_key=wants_key, port=request.port)
        text, next_words = manifest.to_text(documents, notes), ["kubectl", "apply", "-f", file]
    else:
        exported = _serve_export(settings, prepared, request, path_env, wants_key)
        text, notes, next_words = exported.text, list(exported.notes), ["serve", "deploy", file]
        if settings.export_env is not None:
            write_output(Path(settings.export_env), exports.env_script(exported.env), "--export-env")
    for note in notes:
        print(f"note: {note}".replace("\n", "\n  "), file=sys.stderr)
    if file == "-":
        print(text, end="")
        return
    write_output(Path(file), text, flag)
    print(f"wrote {file}: {shlex.join(next_words)}", file=sys.stderr)


def _serve_export(
    settings: LaunchSettings, prepared: Prepared, request: LaunchRequest, path_env: dict[str, str], wants_key: bool
) -> exports.Export:
    """The Serve config of --export or --export-plain."""
    from pdlab.deploy import exports

    checked = wants_key and settings.export_plain is None and settings.code_url is None
    key_file = _key_file(request) if checked else None
    exported = exports.serve_export(
        prepared,
        settings,
        host=request.host,
        port=request.port,
        path_env=path_env,
        key_env=serve_env(read(key_file)) if key_file is not None else {},
        wants_key=wants_key,
        choose_backend=request.choose_backend,
    )
    pinned = pinned_to_ids(prepared.placement, prepared.view)
    return exported.with_note(_pinned(pinned)) if pinned else exported


def _pinned(pinned: Mapping[Role, Sequence[str]]) -> str:
    pools = "; ".join(f"{role} to {', '.join(nodes)}" for role, nodes in pinned.items())
    return (
        f"pinned to Ray's node ids: {pools}. A node that replaces one of them has another id, and replicas wait for "
        f"the old one: start Ray on every node with --labels {NODE_NAME_LABEL}=NAME and export again, or export again "
        "after each replacement"
    )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
