"""CPU seconds of the processes of a deployment, and of bare vLLM servers, by kind of process."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KINDS = {
    "HAProxy": r"(\S*/)?haproxy ",
    "router": r"ray::ServeReplica:[^:]*:LLMRouter",
    "ingress": r"ray::ServeReplica:[^:]*:OpenAiIngress",
    "prefill": r"ray::ServeReplica:[^:]*:Prefill",
    "decode": r"ray::ServeReplica:[^:]*:(Decode|LLMServer|DPServer)",
    "engine core": r"VLLM::EngineCore",
    "API server": r".* vllm\.entrypoints\.openai\.api_server ",
    "Serve controller": r"ray::ServeController",
    "HAProxy manager": r"ray::(HAProxyManager|ProxyActor)",
    "raylet": r"\S*/raylet ",
    "GCS": r"\S*/gcs_server ",
    "dashboard agent": r"ray::DashboardAgent",
    "runtime-env agent": r"ray::RuntimeEnvAgent",
    "load generator": r".* pdlab\.bench\.client\.worker ",
}
_KINDS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}
OTHER = "other"


def kind_of(title: str) -> str:
    """Of a process by its command line, or by the title that it gave itself; `OTHER` if none is known."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.match(f"{title} ")), OTHER)


def cpu_s(pids: Iterable[int]) -> dict[str, float]:
    """CPU seconds until now of each kind, user and system, of all threads. Processes that are gone are left out."""
    total: dict[str, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            kind = kind_of(_title(pid))
            total[kind] = total.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return total


def pids_of(pids: Iterable[int], kinds: Collection[str]) -> list[int]:
    """Those of the processes that are of one of the kinds."""
    return [pid for pid in pids if kind_of(_title(pid)) in kinds]


def _title(pid: int) -> str:
    """The command line of a process, or the title that it gave itself; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def used_s(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Between two calls of `cpu_s`."""
    return {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}
