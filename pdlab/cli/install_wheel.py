"""Ship a wheel through Ray to every node, install it, and prove that every node loads the same files."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pdlab.core.arguments import OneLineParser, backends, exit_code, no_file
from pdlab.core.errors import ClusterError, UsageError

DIFFERENT, CANNOT_RUN = 3, 5

EPILOG = """\
examples, after debug/build_nixl_ucx_efa.sh --wheel:
  python debug/install_on_nodes.py nixl_cu13-1.3.2-cp312-cp312-linux_x86_64.whl
      on every node of the Ray cluster that this machine belongs to
  python debug/install_on_nodes.py nixl_cu13-1.3.2-cp312-cp312-linux_x86_64.whl --module nixl_cu13 --backends UCX
      and see that every node loads the same libraries with it
  python debug/install_on_nodes.py nixl_cu13-1.3.2-cp312-cp312-linux_x86_64.whl --target /opt/pdlab-nixl/site
      beside the Python's own packages

Installs without dependencies, into the Python that Ray runs on each node, or into --target. Restart Ray's
workers afterwards (launch anew): a process keeps what it has loaded.

exit code: 0 every node has the same files (and loads the same libraries, where --backends asked for them),
3 they differ or a node failed, 5 no cluster, 2 bad command line
"""


def parser() -> argparse.ArgumentParser:
    p = OneLineParser(
        prog="debug/install_on_nodes.py",
        description="Install one wheel on every node of the Ray cluster, and compare what each node has then.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument_group("what is installed, and where").add_argument
    add("wheel", type=Path, metavar="WHEEL", help="the wheel to install")
    add("--target", metavar="DIR", help="install there, in place of the Python's own packages")
    add = p.add_argument_group("what is checked afterwards").add_argument
    add("--module", metavar="NAME", help="import this afterwards, in a process of its own (default: none)")
    add(
        "--backends",
        type=backends,
        default=(),
        metavar="NAME[,NAME]",
        help="create these NIXL backends afterwards, in a process of its own, and compare the libraries that it loads",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(parser().parse_args(argv)), {ClusterError: CANNOT_RUN})


def _run(args: argparse.Namespace) -> int:
    if args.wheel.suffix != ".whl":
        raise UsageError(f"{args.wheel}: not a wheel; give a file that ends in .whl")
    if args.target and not Path(args.target).is_absolute():
        raise UsageError(f"--target {args.target}: must be an absolute path, the same on every node")
    try:
        content = args.wheel.read_bytes()
    except OSError as error:
        raise UsageError(f"{no_file(error)}; give the path of a wheel that can be read") from error
    if args.module is not None and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", args.module):
        raise UsageError(f"--module {args.module!r}: not the name of a module; for example nixl_cu13")
    if not zipfile.is_zipfile(args.wheel):
        raise UsageError(f"{args.wheel}: not a wheel (no zip archive); build or download it again")

    from pdlab.cluster import local_nodes
    from pdlab.cluster.connection import Cluster, prepare
    from pdlab.remote import install
    from pdlab.remote.node import load
    from pdlab.transfer.doctor.software_rules import hashes, loads_alike

    local = local_nodes.running()
    if local:
        prepare(local, {}).cancel()
    with Cluster(local) as cluster:
        names = cluster.names()
        print(f"{args.wheel.name}, {len(content) / 1e6:.1f} MB, to {len(names)} nodes", file=sys.stderr)
        answers = cluster.call_nodes(install.install, args.wheel.name, content, args.target, args.module)
        loads = cluster.call_nodes(load, args.backends, None, args.target) if args.backends else {}
    digests = {}
    for node, name in names.items():
        answer = answers.get(node, {"error": "no answer"})
        digests[name] = answer.get("digest")
        print(f"{name}: {answer.get('error') or '{files} files, {digest}, {loaded}'.format(**answer)}")
    if None in digests.values() or len(set(digests.values())) != 1:
        print("the nodes differ: repair those above, and run this again", file=sys.stderr)
        return DIFFERENT
    if args.backends:
        facts = {name: {"loaded": loads.get(node)} for node, name in names.items()}
        wrong = loads_alike(facts)
        if wrong is not None:
            print(f"the nodes have the same files and load others: {wrong}", file=sys.stderr)
            return DIFFERENT
        loaded = [f"{library} {next(iter(nodes.values()))}" for library, nodes in sorted(hashes(facts).items())]
        print(f"every node loads {', '.join(loaded)}")
    expected = hashlib.sha256(content).hexdigest()[:12]
    print(f"every node has the same files of the wheel {expected}")
    return 0
