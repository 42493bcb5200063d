"""Send a wheel through Ray to every node, install it, and check that all nodes load the same files."""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from pathlib import Path

from pdlab.core.commands import RUN_INSTALL_WHEEL
from pdlab.core.errors import CANNOT_RUN, ClusterError, UsageError
from pdlab.core.exit_code import NOT_CLEAN, command, no_file
from pdlab.core.settings import Backends, Settings, setting
from pdlab.core.text import counted

EPILOG = f"""\
examples:
  {RUN_INSTALL_WHEEL} nixl_cu13-1.3.2-cp312-cp312-linux_x86_64.whl
      on every node of the Ray cluster that this machine belongs to
  {RUN_INSTALL_WHEEL} nixl_cu13-1.3.2-cp312-cp312-linux_x86_64.whl --module nixl_cu13 --backends UCX
      then check that every node loads the same libraries
  {RUN_INSTALL_WHEEL} nixl_cu13-1.3.2-cp312-cp312-linux_x86_64.whl --target /opt/pdlab-nixl/site
      into a folder of its own, not into the Python's packages

debug/build_nixl_ucx_efa.sh --wheel builds such a wheel. It is installed without dependencies, into the Python
that Ray runs on each node, or into --target. Launch anew afterwards, so that Ray's workers restart: a running
process keeps the libraries that it has loaded.

exit code: 0 every node has the same files (with --backends: and loads the same libraries),
3 they differ or a node failed, 5 no cluster, 2 bad command line
"""


INSTALLED, CHECKED = "what is installed, and where", "what is checked afterwards"


class InstallWheelSettings(Settings):
    """Which wheel to install on every node, and what to check afterwards."""

    COMMAND = "install-wheel"
    ABOUT = "Install one wheel on every node of the Ray cluster, then compare the nodes."
    EXAMPLES = EPILOG

    wheel: Path = setting(..., "the wheel to install", INSTALLED, positional=True, value="WHEEL")
    target: str | None = setting(
        None, "install into this folder, not into the Python's own packages", INSTALLED, value="DIR"
    )
    module: str | None = setting(
        None, "import this module after the installation, in a new process", CHECKED, value="NAME", otherwise="none"
    )
    backends: Backends = setting(
        (),
        "create these NIXL backends after the installation, in a new process, and compare the loaded libraries",
        CHECKED,
        value="NAME[,NAME]",
    )


@command(InstallWheelSettings, {ClusterError: CANNOT_RUN})
def main(settings: InstallWheelSettings) -> int:
    """Install and compare."""
    if settings.wheel.suffix != ".whl":
        raise UsageError(f"{settings.wheel}: not a wheel; give a file that ends in .whl")
    if settings.target and not Path(settings.target).is_absolute():
        raise UsageError(f"--target {settings.target}: must be an absolute path, the same on every node")
    try:
        content = settings.wheel.read_bytes()
    except OSError as error:
        raise UsageError(f"{no_file(error)}; give the path of a wheel that can be read") from error
    if settings.module is not None and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", settings.module):
        raise UsageError(f"--module {settings.module!r}: not the name of a module; for example nixl_cu13")
    if not zipfile.is_zipfile(settings.wheel):
        raise UsageError(f"{settings.wheel}: not a wheel (no zip archive); build or download it again")

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
        print(f"{settings.wheel.name}, {len(content) / 1e6:.1f} MB, to {counted(len(names), 'node')}", file=sys.stderr)
        answers = cluster.call_nodes(install.install, settings.wheel.name, content, settings.target, settings.module)
        loads = cluster.call_nodes(load, settings.backends, None, settings.target) if settings.backends else {}
    digests = {}
    for node, name in names.items():
        answer = answers.get(node, {"error": "no answer"})
        digests[name] = answer.get("digest")
        print(f"{name}: {answer.get('error') or '{files} files, {digest}, {loaded}'.format(**answer)}")
    if None in digests.values() or len(set(digests.values())) != 1:
        print("the nodes differ: repair those above, and run this again", file=sys.stderr)
        return NOT_CLEAN
    if settings.backends:
        facts = {name: {"loaded": loads.get(node)} for node, name in names.items()}
        wrong = loads_alike(facts)
        if wrong is not None:
            print(f"the nodes have the same files and load others: {wrong}", file=sys.stderr)
            return NOT_CLEAN
        loaded = [f"{library} {next(iter(nodes.values()))}" for library, nodes in sorted(hashes(facts).items())]
        print(f"every node loads {', '.join(loaded)}")
    expected = hashlib.sha256(content).hexdigest()[:12]
    print(f"every node has the same files of the wheel {expected}")
    return 0
