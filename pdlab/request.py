"""What the launcher asks the cluster for."""

from __future__ import annotations

from dataclasses import dataclass

from pdlab.nodes import ClusterView, LinkShape
from pdlab.spec import Deployment

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class LaunchRequest:
    """Serve ``deployment``.

    ``cluster`` is the cluster of a file, or None: the running Ray (or, where ``local_nodes`` is
    given, that many Ray nodes started on this machine, with ``two_hosts`` on two hosts made of
    namespaces; ``link``: what the link between them shall be, None: as it is, or unshaped).
    ``wait``: return when the deployment is ready and checked, else at once. ``detach``: leave it
    running when the launcher ends. ``timeout_s``: seconds until a start counts as failed.
    ``command`` is the command line, for the manifest.
    """

    deployment: Deployment
    cluster: ClusterView | None = None
    local_nodes: int | None = None
    two_hosts: bool = False
    link: LinkShape | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    wait: bool = True
    detach: bool = False
    timeout_s: float = 1800.0
    command: tuple[str, ...] = ()
