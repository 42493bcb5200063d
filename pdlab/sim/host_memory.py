"""KV cache in host memory of the engines that prefill (``--kv-offload-gb``): loaded blocks, and their arrival.

An engine's loads run one after the other; each of its GPUs loads its share at the rate of configs/gpus/. Stores cost no
time: they use the other direction, during the steps. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from pdlab.core.catalog import ModelShape, known_gpu
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.sim.engine import Engine, PendingPrefill
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_time import kv_block_bytes
from pdlab.traffic.host_cache import NO_HIT, HostCache, HostHit
from pdlab.traffic.prompts import PromptBlocks


@dataclass(slots=True)
class HostMemory:
    """The host memory of a deployment's engines that prefill. ``blocks``: the blocks that each engine holds there.
    ``block_s``: the time to load a block."""

    blocks: int
    block_s: float
    block_tokens: int
    window: int | None
    step_tokens: int
    caches: dict[Engine, HostCache] = field(default_factory=dict)
    hits: dict[int, tuple[int, HostHit]] = field(default_factory=dict)  # request -> hits on the device, in host memory
    waiting: dict[int, PendingPrefill] = field(default_factory=dict)  # requests whose blocks are being loaded

    @classmethod
    def of(cls, deployment: Deployment, hardware: Hardware, shape: ModelShape) -> HostMemory | None:
        """The host memory of a deployment; None: it has none. Raises UsageError for another store of KV cache, and if
        the rate of loads is unknown."""
        if deployment.kv_connectors:
            name = deployment.kv_connectors[0]["kv_connector"]
            raise UsageError(f"--kv-connector {name} is not simulated, only --kv-offload-gb is: leave it out")
        if deployment.kv_offload_gb is None:
            return None
        pool = next(iter(deployment.served_pools.values()))  # the one that prefills
        hardware = hardware.of(pool)
        known = known_gpu(hardware.gpu_type)
        if known is None or known.host_gb_per_s is None:
            raise UsageError(
                f"--kv-offload-gb {deployment.kv_offload_gb:g}: the rate from host memory to "
                f"{hardware.gpu_type or 'CPU engines'} is unknown: add host_gb_per_s to its file in configs/gpus/, or "
                "leave --kv-offload-gb out"
            )
        block_bytes = kv_block_bytes(hardware, shape, pool)
        return cls(
            blocks=int(deployment.kv_offload_gb * 1e9 // block_bytes) // pool.pp,
            block_s=block_bytes / (known.host_gb_per_s * 1e9 * pool.tp * pool.pp),
            block_tokens=hardware.block_tokens,
            window=(shape.sliding_window or None) if hardware.hybrid_kv else None,
            step_tokens=hardware.step_tokens,
        )

    def tokens_to_load(self, engine: Engine, request: int, prompt: PromptBlocks, device: int) -> int:
        """Tokens that are loaded from host memory, after those on the device."""
        if engine not in self.caches:
            self.caches[engine] = HostCache(self.blocks, self.block_tokens, self.window, self.step_tokens)
        hit = self.caches[engine].load(prompt, device)
        self.hits[request] = device, hit
        return hit.tokens

    def loads(self, engine: Engine, waiting: PendingPrefill, now_s: float) -> float | None:
        """The time at which all blocks from host memory are loaded; None: there are none."""
        _, hit = self.hits.get(waiting.request, (0, NO_HIT))
        if not hit.blocks:
            return None
        self.waiting[waiting.request] = waiting
        engine.host_free_s = max(engine.host_free_s, now_s) + hit.blocks * self.block_s
        return engine.host_free_s

    def loaded(self, engine: Engine, request: int) -> None:
        """The blocks of a request are loaded: it goes before the requests that have not begun."""
        begun = sum(1 for _ in takewhile(lambda each: each.tokens_left is not None, engine.waiting))
        engine.waiting.insert(begun, self.waiting.pop(request))

    def computed(self, engine: Engine, request: int, prompt: PromptBlocks, device: int) -> int:
        """A prompt was computed, and is stored. Returns the number of its tokens that came from host memory."""
        had, hit = self.hits.pop(request)
        self.caches[engine].computed(prompt, had, hit.tokens)
        return max(had + hit.tokens - device, 0)
