"""The memory of a rank's KV cache, in DRAM or on a GPU. Sent to the nodes by value; functions import torch."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pdlab.transfer.rank.layout import KvShape, Words

MEMCPY_BYTES = 256 << 20


class KvMemory:
    """One allocation per region, as in vLLM. ``bases``: their addresses. Raises MemoryError.

    ``regions``: their words on the host, shape (num_blocks, words of a page) each. For GPU memory they are a copy that
    `push` and `pull` transfer, outside of any timing.
    """

    def __init__(self, shape: KvShape, tp: int, num_blocks: int, vram: bool) -> None:
        words = shape.page_bytes(tp) // 8
        self.regions = [_pages(num_blocks * words).reshape(num_blocks, words) for _ in range(shape.regions)]
        self.kind = "VRAM" if vram else "DRAM"
        self._tensors: list[Any] = []
        self._copy: _Copy | None = None
        if vram:
            torch = importlib.import_module("torch")
            torch.cuda.set_device(0)
            self._tensors = [torch.empty(region.shape, dtype=torch.int64, device="cuda") for region in self.regions]
        self.bases = tuple(
            int(tensor.data_ptr()) for tensor in self._tensors
        ) or tuple(int(region.ctypes.data) for region in self.regions)  # fmt: skip

    @property
    def spans(self) -> list[tuple[int, int, int, str]]:
        """(address, length, device, name) of each region, for NIXL's registration."""
        return [(base, region.nbytes, 0, "") for base, region in zip(self.bases, self.regions, strict=True)]

    def push(self, blocks: npt.ArrayLike) -> None:
        """Copy those blocks from the host to the GPU; does nothing for DRAM."""
        if not self._tensors:
            return
        torch = importlib.import_module("torch")
        rows = np.asarray(blocks)
        index = torch.as_tensor(rows, device="cuda")
        for tensor, region in zip(self._tensors, self.regions, strict=True):
            tensor[index] = torch.from_numpy(region[rows].view(np.int64)).cuda()
        torch.cuda.synchronize()

    def pull(self) -> None:
        """Copy the GPU's memory to the host; does nothing for DRAM."""
        for tensor, region in zip(self._tensors, self.regions, strict=False):
            region[:] = tensor.cpu().numpy().view(np.uint64)

    def copy_gb_per_s(self, page_bytes: int) -> float:
        """Ceiling of a transfer within a host: the rate of one thread's memcpy, or of the GPU's own copy.

        It copies pages of ``page_bytes`` from random places, as those of a request; more bytes than a CPU's caches.
        """
        if self._copy is None:
            self._copy = _Copy(max(2, MEMCPY_BYTES // page_bytes), page_bytes // 8, bool(self._tensors))
        return self._copy.gb_per_s()


class _Copy:
    """Copies the pages of one buffer into another one in a random order."""

    def __init__(self, rows: int, words: int, vram: bool) -> None:
        order = np.random.default_rng(0).permutation(rows)
        self.bytes = rows * words * 8
        if vram:
            torch = importlib.import_module("torch")
            source, target = (torch.zeros((rows, words), dtype=torch.int64, device="cuda") for _ in range(2))
            index = torch.as_tensor(order, device="cuda")

            def copy() -> None:
                torch.index_select(source, 0, index, out=target)
                torch.cuda.synchronize()
        else:
            source, target = (_pages(rows * words).reshape(rows, words) for _ in range(2))
            source[:] = 1

            def copy() -> None:
                np.take(source, order, axis=0, out=target, mode="clip")  # the mode that needs no second buffer

        self.copy = copy
        copy()  # so that the kernel has mapped all pages

    def gb_per_s(self) -> float:
        began = time.perf_counter()
        self.copy()
        return self.bytes / (time.perf_counter() - began) / 1e9


def _pages(words: int) -> Words:
    """New words at the start of a page, in huge pages if the kernel has some: cma pins each page."""
    try:
        block = mmap.mmap(-1, words * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {words * 8} bytes of memory: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, dtype=np.uint64)
