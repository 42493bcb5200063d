"""Runs inside vLLM's CPU workers, named as ``worker_extension_cls``: importing it prepares the process."""

from __future__ import annotations

import importlib
from typing import Any

from pdlab.cluster.priority import COMPUTING, set_niceness
from pdlab.deploy.serving.vllm_names import PLATFORMS

# Microseconds between two looks of NIXL's progress thread. vLLM leaves it at 0: the thread spins
# and takes a whole core per engine rank, which is all that two engines have on two cores.
NIXL_PROGRESS_DELAY_US = 100


class WorkerExtension:
    """Adds no method to the worker; vLLM needs a class to import."""


def ask_for_amx() -> None:
    """Ask the kernel for AMX tiles: without it the first short bf16 prompt dies with SIGILL on an AMX CPU."""
    cpu = importlib.import_module("torch.cpu")
    if cpu._is_amx_tile_supported():
        cpu._init_amx()


def calm_nixl() -> None:
    """Let NIXL's progress thread sleep between two polls (see NIXL_PROGRESS_DELAY_US)."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError:
        return
    spinning = api.nixlBind.nixlAgentConfig

    class CalmAgentConfig(spinning):  # type: ignore[misc,valid-type]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, NIXL_PROGRESS_DELAY_US if key == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = CalmAgentConfig


def leave_unpinned() -> None:
    """Keep vLLM's NIXL connector from pinning the worker to the last core of its NUMA node.

    It does so for every CPU engine, whatever the value of VLLM_CPU_OMP_THREADS_BIND: prefill and decode on one machine
    then share one core while the others idle.
    """
    platform = importlib.import_module(PLATFORMS).current_platform
    type(platform).discover_numa_topology = classmethod(lambda cls: [])


ask_for_amx()
calm_nixl()
leave_unpinned()
set_niceness(COMPUTING)  # a core that is not forked has that of the process that answers requests
