#!/usr/bin/env python3
"""Serve gpt-oss collocated or with prefill and decode disaggregated; see --help and README.md.

Ray and vLLM are imported only for a real start: --help and --dry-run answer at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pdlab.cluster.two_hosts import parse_shape, require
from pdlab.core.api_key import chosen
from pdlab.core.arguments import check_writable, exit_code
from pdlab.core.catalog import ModelShape, load_cluster, local_cluster, resolve_model, two_hosts_cluster
from pdlab.core.deployment import Deployment, Disaggregated
from pdlab.core.errors import UsageError
from pdlab.core.files import cache_dir
from pdlab.core.nodes import ClusterView, LinkShape
from pdlab.core.vllm_limits import check_context, check_divisibility
from pdlab.deploy.cpu_engine.tiny_model import tiny_model_folder
from pdlab.deploy.dry_run import describe
from pdlab.deploy.options import (
    LOCAL_MODEL,
    LaunchRequest,
    build_parser,
    chooses_backend,
    deployment_from,
    workload_from,
)
from pdlab.deploy.prepared import Prepared, prepare_deployment
from pdlab.deploy.serve_config import ServeApp, serve_config, serving_env


@dataclass(frozen=True)
class Asked:
    """What the command line asks for, checked as far as that goes without a cluster."""

    deployment: Deployment
    shape: ModelShape | None
    model_source: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(build_parser().parse_args(arguments), arguments))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.local and args.cluster:
        raise UsageError("--local and --cluster exclude each other: --local starts its own Ray nodes on this machine")
    if args.shutdown:
        return _shutdown(args)
    if args.export not in (None, "-"):
        _check_export(Path(args.export))
    link = _link(args)
    asked = _asked(args)
    if args.dry_run or args.export:
        _plan(args, asked, argv)
        return 0
    from pdlab.deploy import launch

    view = load_cluster(args.cluster) if args.cluster not in (None, "auto") else None
    if view is not None or args.local:
        # A request that cannot fit fails here, before Ray is imported.
        _prepared(args, asked, view or _local_view(args))
    if args.two_hosts:
        require()
    key_file = _key_file(args)
    launch.launch(
        LaunchRequest(
            deployment=asked.deployment,
            cluster=view,
            local_nodes=args.local,
            two_hosts=args.two_hosts,
            link=link,
            host=args.host,
            port=args.port,
            wait=args.wait,
            detach=args.detach or not args.wait,
            timeout_s=args.timeout_s,
            command=(shlex.join(["python", "launch_gptoss.py", *argv]),),
            api_key_file=None if key_file is None else str(key_file),
            accept_open_cluster=args.accept_open_cluster,
            choose_backend=chooses_backend(args),
            accept_wire=args.accept_wire,
            workload=workload_from(args),
        )
    )
    return 0


def _shutdown(args: argparse.Namespace) -> int:
    if args.mode or args.config or args.dry_run or args.export:
        raise UsageError("--shutdown stops what is served: leave out the mode, --config, --dry-run and --export")
    from pdlab.deploy import launch

    launch.shutdown(host=args.host, port=args.port)
    return 0


def _asked(args: argparse.Namespace) -> Asked:
    deployment = deployment_from(args)
    shape, source = resolve_model(deployment.model)
    if args.local and not (shape.local if shape else source and Path(source).is_dir()):
        raise UsageError(
            f"--local serves on this machine's CPUs, too little for {deployment.model}: "
            f"leave --model out ({LOCAL_MODEL}) or give a folder"
        )
    check_context(deployment, shape)
    for warning in check_divisibility(deployment, shape):
        _warn(warning)
    topology = deployment.topology
    if isinstance(topology, Disaggregated) and topology.transport.verbose:
        _warn(
            "NIXL debug logging costs 5 to 10 times in KV-transfer speed: look at transports with it, measure without"
        )
    if not _on_loopback(args.host) and args.api_key is False:
        _warn(f"serving on {args.host} without an API key: whoever reaches that address can use the model")
    if source is None:
        assert shape is not None
        source = str(tiny_model_folder(shape, cache_dir()))
    return Asked(deployment, shape, source)


def _plan(args: argparse.Namespace, asked: Asked, argv: Sequence[str]) -> None:
    """Print or export what would be started."""
    if args.dry_run and args.export == "-":
        raise UsageError("--dry-run and --export - both write to standard output: give one of them, or --export FILE")
    prepared = _prepared(args, asked, _view(args))
    for caution in prepared.cautions:
        _warn(caution)
    if args.dry_run:
        print(describe(prepared, base_url=f"http://{args.host}:{args.port}", launch_command=_for_real(argv)), end="")
    if args.export:
        _export(args, prepared.app, asked.deployment)


def _prepared(args: argparse.Namespace, asked: Asked, view: ClusterView) -> Prepared:
    return prepare_deployment(asked.deployment, view, asked.shape, asked.model_source, workload_from(args))


def _check_export(path: Path) -> None:
    """Raises UsageError where nothing can be written, or where a file would be lost."""
    check_writable(path, "--export")
    if path.exists():
        raise UsageError(f"--export {path}: is there already; remove it, choose another, or give - and redirect")


def _on_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _key_file(args: argparse.Namespace) -> Path | None:
    """File with the key that clients have to send; None: none is asked for. Raises UsageError."""
    if args.api_key is False:
        if args.api_key_file:
            raise UsageError("--no-api-key and --api-key-file exclude each other: leave one out")
        return None
    needed = args.api_key is True or not _on_loopback(args.host)
    file = chosen(args.api_key_file, os.environ, needed=needed, folder=cache_dir())
    if file is not None:
        print(f"clients need the API key in {file}: Authorization: Bearer KEY", file=sys.stderr)
    return file


def _view(args: argparse.Namespace) -> ClusterView:
    if args.local:
        return _local_view(args)
    if args.cluster in (None, "auto"):
        from pdlab.deploy import launch

        return launch.live_view()
    return load_cluster(args.cluster)


def _local_view(args: argparse.Namespace) -> ClusterView:
    return two_hosts_cluster(_link(args) or LinkShape()) if args.two_hosts else local_cluster(args.local)


def _link(args: argparse.Namespace) -> LinkShape | None:
    """What the link of --two-hosts shall be; None: nothing is said of it. Raises UsageError."""
    asked = args.link_rate is not None or args.link_delay_ms is not None
    if asked and not args.two_hosts:
        raise UsageError("--link-rate and --link-delay-ms are for the link of --local --two-hosts")
    if args.two_hosts and args.local != 2:
        what = f"--local {args.local}" if args.local else f"--cluster {args.cluster or 'auto'}"
        raise UsageError(f"--two-hosts goes with --local, whose two nodes it puts on two hosts, not with {what}")
    return parse_shape(args.link_rate, args.link_delay_ms) if asked else None


def _for_real(argv: Sequence[str]) -> str:
    """The same command line without --dry-run and --export."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--export":
            next(words, None)
        elif word != "--dry-run" and not word.startswith("--export="):
            kept.append(word)
    return shlex.join(["python", "launch_gptoss.py", *kept])


def _export(args: argparse.Namespace, app: ServeApp, deployment: Deployment) -> None:
    needed = serving_env(deployment)
    if needed:
        words = " ".join(f"{name}={value}" for name, value in needed.items())
        _warn(f"a Serve config cannot carry what --direct-streaming needs: start Ray on every node with {words}")
    if args.api_key or args.api_key_file or not _on_loopback(args.host):
        _warn("a Serve config cannot carry an API key: whoever reaches what `serve deploy` starts can use the model")
    config = yaml.safe_dump(serve_config(app, host=args.host, port=args.port), sort_keys=False)
    if args.export == "-":
        print(config, end="")
        return
    try:
        Path(args.export).write_text(config, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--export {args.export}: cannot be written ({error.strerror})") from error
    print(f"wrote {args.export}: {shlex.join(['serve', 'deploy', args.export])}", file=sys.stderr)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
