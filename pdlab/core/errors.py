"""Expected failures. A command prints each as one line, and ends with its exit code."""

from __future__ import annotations

CANNOT_RUN = 5  # exit code: no nodes, or not the software, for a check


class PdlabError(Exception):
    """Base of all expected failures. ``exit_code``: exit code of the process."""

    exit_code = 1


class UsageError(PdlabError):
    """Bad input: the message names the value, the rule and the fix."""

    exit_code = 2


class NoHomeError(UsageError):
    """The user has no home folder, and nothing else names a folder for pdlab's files."""


class PlacementError(UsageError):
    """The deployment does not fit the cluster. The message has the demand and the free slots."""


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
    """The deployment answers with wrong tokens, or with wrong counters of KV transfers."""


class WireError(PdlabError):
    """KV cache uses another transport than planned, or its transport is unknown."""


class BenchError(PdlabError):
    """The load could not be driven."""


class DeploymentDied(BenchError):
    """The measured deployment, or a part of it, died. The running level is discarded.

    ``what``: the part that died. ``advice``: how to restart it; the message has both.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


class TransferError(PdlabError):
    """The KV-transfer check cannot run. ``kind``: plugin, backend, memory, side-channel, software, peer (a rank died),
    timeout (a rank hangs), or placement."""

    exit_code = CANNOT_RUN

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def reason_of(error: Exception) -> str:
    """Why a file cannot be used, in the operating system's words if the failure came from it."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that is not blank, stripped; without one the exception's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
