"""vLLM's KV offloading on CPU engines: its manager and scheduler side, with copies by torch.

vLLM's own worker copies between a GPU and the host, and refuses CPUs. This one is named by ``spec_name`` and
``spec_module_path`` of the OffloadingConnector's settings. A copy is done when it is submitted.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pdlab.deploy.serving.vllm_names import KV_OFFLOAD, KV_OFFLOAD_CPU

_base: Any = importlib.import_module(KV_OFFLOAD)
_cpu: Any = importlib.import_module(KV_OFFLOAD_CPU)


class HostCopyWorker(_base.OffloadingWorker):  # type: ignore[misc]
    """Holds ``num_blocks`` blocks of every tensor of the KV cache in separate memory."""

    def __init__(self, kv_caches: Any, num_blocks: int) -> None:
        self._engine = [each.tensor for each in kv_caches.tensors]
        self._references = kv_caches.group_data_refs
        self._host = [torch.zeros((num_blocks, each.page_size_bytes), dtype=torch.int8) for each in kv_caches.tensors]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is in flight."""

    def _copy(self, job_id: int, engine: Any, host: Any, *, store: bool) -> bool:
        began, size = time.perf_counter(), 0
        for references, of_engine, of_host in self._pairs(engine, host):
            for reference in references:
                mine, kept = self._engine[reference.tensor_idx], self._host[reference.tensor_idx]
                width = reference.page_size_bytes
                if store:
                    kept[of_host, :width] = mine[of_engine, :width]
                else:
                    mine[of_engine, :width] = kept[of_host, :width]
                size += width * len(of_engine)
        seconds = time.perf_counter() - began
        self._done.append(_base.TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=seconds))
        return True

    def _pairs(self, engine: Any, host: Any) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Per group of layers its tensors, and the blocks of the engine and of the host: those of the groups lie one
        behind the other."""
        assert len(engine.block_ids) == len(host.block_ids)
        at = 0
        for references, count in zip(self._references, engine.group_sizes, strict=True):
            yield references, _indexes(engine.block_ids[at : at + count]), _indexes(host.block_ids[at : at + count])
            at += count


def _indexes(blocks: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(blocks, dtype=np.int64))


class HostCopySpec(_cpu.CPUOffloadingSpec):  # type: ignore[misc]
    """Named in the connector's settings."""

    _worker: HostCopyWorker | None

    def get_worker(self, kv_caches: Any) -> HostCopyWorker:
        if self._worker is None:
            self._worker = HostCopyWorker(kv_caches, self.num_blocks)
        return self._worker
