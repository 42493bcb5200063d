"""Expected failures: a command line turns each into one line and an exit code."""

from __future__ import annotations


class PdlabError(Exception):
    """Base of every failure that a user can do something about; ``exit_code`` is that of the process."""

    exit_code = 1


class UsageError(PdlabError):
    """Bad input: the message names the value, the rule and the fix."""

    exit_code = 2


class PlacementError(UsageError):
    """The deployment does not fit the cluster; the message carries the arithmetic."""


class StoreError(PdlabError):
    """A result on disk is missing, unreadable, or would be overwritten."""

    exit_code = 2


class WriteError(StoreError):
    """A file cannot be written (full disk, missing permission); its previous content is unchanged."""

    exit_code = 1


class ClusterError(PdlabError):
    """Ray could not be started, reached or stopped."""


class DeployError(PdlabError):
    """A replica failed to start or did not become ready in time."""


class CanaryError(PdlabError):
    """The deployment answers, but its tokens or its KV-transfer counters are wrong."""


class WireError(PdlabError):
    """KV cache takes another transport than the plan names, or no evidence shows which it takes."""


class BenchError(PdlabError):
    """The load could not be driven."""


class DeploymentDied(BenchError):
    """The measured deployment died, in part or as a whole: the running level is discarded.

    ``what`` died, without the ``advice`` behind it for a person who has to bring it back.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


class TransferError(PdlabError):
    """The KV-transfer check cannot run; ``kind`` names why: plugin, backend, memory, side-channel, software,
    peer (a rank died or dropped), timeout (a rank hangs), placement."""

    exit_code = 5

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
