"""The memory of a rank's KV cache, DRAM or GPU. Runs on the nodes too, sent by value: imports torch inside functions."""

from __future__ import annotations

import importlib
import mmap
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pdlab.kv_layout import KvShape, Words

MEMCPY_BYTES = 256 << 20
MEMCPY_REPEATS = 5


class KvMemory:
    """One allocation per region, as vLLM makes them; ``regions`` are its words on the host.

    Of GPU memory the arrays are a copy on the host: `push` and `pull` move it, outside of any timing.
    ``bases`` are the addresses to register. Raises MemoryError.
    """

    def __init__(self, shape: KvShape, tp: int, num_blocks: int, vram: bool) -> None:
        words = shape.page_bytes(tp) // 8
        self.regions = [_pages(num_blocks * words).reshape(num_blocks, words) for _ in range(shape.regions)]
        self.kind = "VRAM" if vram else "DRAM"
        self._tensors: list[Any] = []
        if vram:
            torch = importlib.import_module("torch")
            torch.cuda.set_device(0)
            self._tensors = [torch.empty(region.shape, dtype=torch.int64, device="cuda") for region in self.regions]
        self.bases = tuple(
            int(tensor.data_ptr()) for tensor in self._tensors
        ) or tuple(int(region.ctypes.data) for region in self.regions)  # fmt: skip

    @property
    def spans(self) -> list[tuple[int, int, int, str]]:
        """What NIXL registers: address, length, device, name."""
        return [(base, region.nbytes, 0, "") for base, region in zip(self.bases, self.regions, strict=True)]

    def push(self, blocks: npt.ArrayLike) -> None:
        """Bring those blocks of the host's copy to the GPU; nothing to do for DRAM."""
        if not self._tensors:
            return
        torch = importlib.import_module("torch")
        rows = np.asarray(blocks)
        index = torch.as_tensor(rows, device="cuda")
        for tensor, region in zip(self._tensors, self.regions, strict=True):
            tensor[index] = torch.from_numpy(region[rows].view(np.int64)).cuda()
        torch.cuda.synchronize()

    def pull(self) -> None:
        """Bring the GPU's memory to the host's copy; nothing to do for DRAM."""
        for tensor, region in zip(self._tensors, self.regions, strict=False):
            region[:] = tensor.cpu().numpy().view(np.uint64)

    def copy_gb_per_s(self) -> float:
        """Ceiling of any transfer inside a host: median rate of one thread's memcpy, or of the GPU's own copy."""
        count = MEMCPY_BYTES // 8
        if self._tensors:
            torch = importlib.import_module("torch")
            source, target = (torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2))
            times = []
            for _ in range(MEMCPY_REPEATS + 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        else:
            source, target = _pages(count), _pages(count)
            source[:] = 1
            times = []
            for _ in range(MEMCPY_REPEATS + 1):
                began = time.perf_counter()
                np.copyto(target, source)
                times.append(time.perf_counter() - began)
        return float(MEMCPY_BYTES / np.median(times[1:]) / 1e9)  # the first one touches the pages


def _pages(words: int) -> Words:
    """Words at the start of a page of their own."""
    try:
        block = mmap.mmap(-1, words * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {words * 8} bytes of memory: {error}") from error
    return np.frombuffer(block, dtype=np.uint64)
