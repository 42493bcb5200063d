"""Whether a model's weights are on every node, and the way to get them there before a launch; see --help."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from pdlab.core.arguments import OneLineParser, exit_code, seconds
from pdlab.core.catalog import known_models, resolve_model

MISSING = 3

EPILOG = f"""\
examples:
  python -m pdlab weights                      are gpt-oss-120b's on every node of this machine's Ray cluster?
  python -m pdlab weights --fetch              download them there, all nodes at once (65 GB for gpt-oss-120b)
  python -m pdlab weights --here --fetch       on this machine alone, where HF_HOME says, as it is for ray start

exit code: 0 they are everywhere, 3 something is missing, 2 bad command line
models of configs/models/: {", ".join(known_models())}
"""


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(
        prog="python -m pdlab weights",
        description="Look for a model's files on every node, as vLLM will look for them, or fetch them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = p.add_argument_group("which files, and where")
    what.add_argument("--model", default="gpt-oss-120b", metavar="NAME|PATH", help="default %(default)s")
    what.add_argument("--here", action="store_true", help="on this machine alone, without Ray")
    fetch = p.add_argument_group("download")
    fetch.add_argument("--fetch", action="store_true", help="download what is missing, on all nodes at once")
    fetch.add_argument(
        "--timeout-s", type=seconds, default=7200.0, metavar="S", help="for a download (default %(default)g)"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    shape, source = resolve_model(args.model)
    if source is None:
        print(f"{args.model} is built by pdlab at the first launch: there is nothing to fetch")
        return 0
    harmony = shape is not None and shape.architecture.startswith("GptOss")
    nodes = _this_machine(args, source, harmony) if args.here else _nodes(args, source, harmony)
    for name, node in nodes.items():
        print(line(name, source, node))
    if not any(node["missing"] for node in nodes.values()):
        return 0
    if not args.fetch:
        fetch = shlex.join(["python", "-m", "pdlab", "weights", "--model", args.model, "--fetch"])
        print(f"fetch them before the nodes cost money: {fetch}")
    return MISSING


def line(name: str, source: str, node: dict[str, Any]) -> str:
    """One node's answer, in words."""
    error = f"; {node['error']}" if node.get("error") else ""
    missing: list[str] = node["missing"]
    if not missing:
        return f"{name} ({node['host']}): {source} is there, {node['bytes'] / 1e9:.1f} GB in {node['folder']}{error}"
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"{name} ({node['host']}): MISSING of {source}: {shown}{error}"


def _this_machine(args: argparse.Namespace, source: str, harmony: bool) -> dict[str, dict[str, Any]]:
    from pdlab.remote import weights

    return {"here": weights.fetch(source, args.timeout_s, harmony) if args.fetch else weights.look(source)}


def _nodes(args: argparse.Namespace, source: str, harmony: bool) -> dict[str, dict[str, Any]]:
    from pdlab.cluster.connection import Cluster
    from pdlab.remote import weights

    with Cluster() as cluster:
        if not args.fetch:
            return cluster.call_every_node(weights.look, source)
        return cluster.call_every_node(weights.fetch, source, args.timeout_s, harmony, timeout_s=args.timeout_s + 600)
