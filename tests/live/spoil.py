"""A worker extension that spoils the KV transfer: every block arrives in another block's place.

What a NIXL backend that mixes up descriptors does: bytes move, nothing fails, HTTP says 200.
"""

from __future__ import annotations

import dataclasses
import importlib

from pdlab.deploy.cpu_engine.worker import WorkerExtension


class Spoil(WorkerExtension):
    """Named as ``worker_extension_cls`` of the decode pool."""


def spoil() -> None:
    nixl = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker")
    worker = nixl.NixlPullConnectorWorker
    read = worker._read_blocks

    def misplaced(self, read_spec, *args, **kwargs):  # type: ignore[no-untyped-def]
        turned = [list(group)[::-1] for group in read_spec.remote_block_ids]
        return read(self, dataclasses.replace(read_spec, remote_block_ids=turned), *args, **kwargs)

    worker._read_blocks = misplaced


spoil()
