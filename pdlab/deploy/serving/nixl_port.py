"""Chooses a port for the NIXL side channel that no other engine of the node has.

Ray takes the replica's rank for it. When a replica was replaced, Ray Serve moves ranks so that they are contiguous
again, and a later one gets the rank whose port a survivor still has: vLLM then waits for its listener for ever. Runs in
Ray Serve's replicas, sent there by value: imports only the standard library.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from typing import Any

from pdlab.deploy.serving.ray_names import NIXL

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
SLOTS = 64  # beyond them ports of another pool begin: 64 replicas of 16 GPUs are 1,024 ports, and pools are 2,000 apart


class HoldsPort:
    """Mixed into Ray's engine servers of prefill and decode: the port is chosen, and held, before the engine starts."""

    async def start(self) -> None:
        try:
            self._nixl_port = choose(self._llm_config)  # type: ignore[attr-defined]
        except Exception as error:  # another Ray: it chooses, as it did
            logging.getLogger("ray.serve").warning("Ray chooses the port of the NIXL side channel: %r", error)
        await super().start()  # type: ignore[misc]


def choose(llm_config: Any) -> socket.socket | None:
    """Put the port into the environment, from which Ray and vLLM take it; returns the socket that holds it, which must
    live as long as the engine. None: it is chosen already, or the engine is a data parallel rank, whose port vLLM
    derives from its number."""
    if os.environ.get(PORT) or isinstance(llm_config.engine_kwargs.get("data_parallel_rank"), int):
        return None
    nixl: Any = importlib.import_module(NIXL)
    ray: Any = importlib.import_module("ray")
    base = int(llm_config.experimental_configs.get("NIXL_SIDE_CHANNEL_PORT_BASE", 20000))
    own = nixl.NixlConnectorBackend(llm_config)._compute_port_offset()
    step = llm_config.get_engine_config().num_devices
    offsets = [own, *(slot * step for slot in range(SLOTS) if slot * step != own)]
    held = hold(ray.util.get_node_ip_address(), [base + offset for offset in offsets])
    if held is not None:
        os.environ[PORT] = str(held.getsockname()[1])
    return held


def hold(host: str, ports: list[int]) -> socket.socket | None:
    """A socket that holds the first of ``ports`` that nobody has; None: all are taken.

    The socket is bound and does not listen. vLLM's listener sets SO_REUSEADDR and can be bound too; a second socket of
    this kind cannot.
    """
    for port in ports:
        held = socket.socket()
        try:
            held.bind((host, port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            held.close()
            continue
        return held
    return None
