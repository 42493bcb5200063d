"""A baseline for NIXL: move the same pages with UCX and without NIXL, in one thread, through the libucp of NIXL.

Structures and constants are from ucp.h; the fields used here are the same in UCX 1.19 to 1.23. Sent to the nodes by
value.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.remote.kernel_files import mapped_files
from pdlab.transfer.rank.messages import RankError

PARAM_FEATURES, FEATURE_RMA, FEATURE_AM = 1, 2, 64
WORKER_THREAD_MODE, THREAD_SINGLE = 1, 0
EP_REMOTE_ADDRESS = 1
MAP_ADDRESS, MAP_LENGTH = 1, 2
ATTR_MEMH, AT_MEMH = 256, 64 // 8
IN_PROGRESS = 1
POSTS_PER_LOOK = 16


@dataclass(frozen=True)
class ExposedMemory:
    """Memory that a peer can read and write: UCX address of its worker, and (base address, remote key) per region."""

    worker: bytes
    regions: tuple[tuple[int, bytes], ...]


class RawUcx:
    """A UCX context and worker for ``regions`` (base, length). Raises RankError (raw).

    Endpoints have UCX's default of no error handling, with which UCX may use every transport. NIXL's endpoints report
    peer failures.
    """

    def __init__(self, regions: Sequence[tuple[int, int]]) -> None:
        self._ucp = _library()
        self._worker, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        self._maps: list[ctypes.c_void_p] = []
        self._eps: list[ctypes.c_void_p] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        numbers = [ctypes.c_uint() for _ in range(3)]
        self._ucp.ucp_get_version(*(ctypes.byref(number) for number in numbers))
        config = ctypes.c_void_p()
        self._check_status(self._ucp.ucp_config_read(None, None, ctypes.byref(config)), "read its configuration")
        params = _parameters(PARAM_FEATURES, FEATURE_RMA | FEATURE_AM)
        status = self._ucp.ucp_init_version(numbers[0], numbers[1], params, config, ctypes.byref(self._context))
        self._ucp.ucp_config_release(config)
        self._check_status(status, "make a context")
        params = _parameters(WORKER_THREAD_MODE, THREAD_SINGLE)
        self._check_status(
            self._ucp.ucp_worker_create(self._context, params, ctypes.byref(self._worker)), "make a worker"
        )
        self.bases = [base for base, _ in regions]
        for base, length in regions:
            memory = ctypes.c_void_p()
            params = _parameters(MAP_ADDRESS | MAP_LENGTH, base, length)
            self._check_status(self._ucp.ucp_mem_map(self._context, params, ctypes.byref(memory)), "map the cache")
            self._maps.append(memory)

    def expose(self) -> ExposedMemory:
        """Allow the peer's access, and start a thread for UCX's progress, which tcp needs on the target."""
        address, length = ctypes.c_void_p(), ctypes.c_size_t()
        self._check_status(
            self._ucp.ucp_worker_get_address(self._worker, ctypes.byref(address), ctypes.byref(length)),
            "return its address",
        )
        worker = ctypes.string_at(address, length.value)
        self._ucp.ucp_worker_release_address(self._worker, address)
        keys = []
        for base, memory in zip(self.bases, self._maps, strict=True):
            buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
            self._check_status(
                self._ucp.ucp_rkey_pack(self._context, memory, ctypes.byref(buffer), ctypes.byref(size)), "pack a key"
            )
            keys.append((base, ctypes.string_at(buffer, size.value)))
            self._ucp.ucp_rkey_buffer_release(buffer)
        self._thread = threading.Thread(target=self._progress, daemon=True, name="raw-ucx")
        self._thread.start()
        return ExposedMemory(worker, tuple(keys))

    def _progress(self) -> None:
        while not self._stop.is_set():
            if not self._ucp.ucp_worker_progress(self._worker):
                time.sleep(0)

    def rates(
        self, exposed: ExposedMemory, near: Sequence[int], far: Sequence[int], page: int, write: bool, repeats: int,
        until_s: float,
    ) -> list[float]:  # fmt: skip
        """GB/s of ``repeats`` passes over local blocks ``near`` and remote blocks ``far``, ``page`` bytes per region.

        Raises RankError (raw) if UCX refuses, or if a pass is not done at ``until_s`` of the monotonic clock.
        """
        ucp, ep = self._ucp, ctypes.c_void_p()
        address = ctypes.create_string_buffer(exposed.worker, len(exposed.worker))
        params = _parameters(EP_REMOTE_ADDRESS, ctypes.addressof(address))
        self._check_status(ucp.ucp_ep_create(self._worker, params, ctypes.byref(ep)), "connect")
        self._eps.append(ep)
        keys = []
        for _, packed in exposed.regions:
            key = ctypes.c_void_p()
            self._check_status(ucp.ucp_ep_rkey_unpack(ep, packed, ctypes.byref(key)), "unpack a key")
            keys.append(key)
        move = ucp.ucp_put_nbx if write else ucp.ucp_get_nbx
        attributes = []
        for memory in self._maps:
            words = _parameters(ATTR_MEMH)
            words[AT_MEMH] = memory.value or 0
            attributes.append(words)
        work = [
            (own_base + own_block * page, peer_base + peer_block * page, key, words)
            for own_base, (peer_base, _), key, words in zip(self.bases, exposed.regions, keys, attributes, strict=True)
            for own_block, peer_block in zip(near, far, strict=True)
        ]
        rates = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            for number, (local_address, remote_address, key, words) in enumerate(work):
                self._free_request(move(ep, local_address, page, remote_address, key, words))
                if number % POSTS_PER_LOOK == 0:
                    ucp.ucp_worker_progress(self._worker)
            self._finish(ucp.ucp_worker_flush_nbx(self._worker, _parameters(0)), until_s)
            rates.append(len(work) * page / (time.perf_counter() - began) / 1e9)
        for key in keys:
            ucp.ucp_rkey_destroy(key)
        return rates[1:]

    def close(self) -> None:
        """Release everything."""
        for ep in self._eps:
            request = self._ucp.ucp_ep_close_nbx(ep, _parameters(0))
            try:
                self._finish(request, time.monotonic() + 2.0)
            except RankError:
                continue  # the peer has closed already
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for memory in self._maps:
            self._ucp.ucp_mem_unmap(self._context, memory)
        self._ucp.ucp_worker_destroy(self._worker)
        self._ucp.ucp_cleanup(self._context)

    def _free_request(self, request: int | None) -> None:
        if request is None:
            return
        if request >= 2**64 - 100:
            raise RankError("raw", f"UCX refuses to move a page: {self._text(request - 2**64)}")
        self._ucp.ucp_request_free(request)

    def _finish(self, request: int | None, until_s: float) -> None:
        if request is None:
            return
        if request >= 2**64 - 100:
            raise RankError("raw", f"UCX: {self._text(request - 2**64)}")
        while (status := self._ucp.ucp_request_check_status(request)) == IN_PROGRESS:
            self._ucp.ucp_worker_progress(self._worker)
            if time.monotonic() > until_s:
                raise RankError("raw", "raw UCX did not finish in time")
        self._ucp.ucp_request_free(request)
        self._check_status(status, "finish")

    def _check_status(self, status: int, action: str) -> None:
        if status != 0:
            raise RankError("raw", f"UCX cannot {action}: {self._text(status)}")

    def _text(self, status: int) -> str:
        return str(_ucs().ucs_status_string(status).decode())


def _loaded(name: str) -> Path:
    """The file of a library that this process has loaded. Raises RankError (raw)."""
    for path in mapped_files():
        if path.rsplit("/", 1)[-1].startswith(name):
            return Path(path)
    raise RankError("raw", f"{name} is not loaded")


def _library() -> Any:
    ucp = ctypes.CDLL(str(_loaded("libucp")))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("ucp_init_version", ctypes.c_int, [ctypes.c_uint, ctypes.c_uint, pointer, pointer, pointer]),
        ("ucp_config_release", None, [pointer]),
        ("ucp_worker_create", ctypes.c_int, [pointer] * 3),
        ("ucp_worker_get_address", ctypes.c_int, [pointer] * 3),
        ("ucp_worker_release_address", None, [pointer] * 2),
        ("ucp_worker_progress", ctypes.c_uint, [pointer]),
        ("ucp_worker_flush_nbx", pointer, [pointer] * 2),
        ("ucp_worker_destroy", None, [pointer]),
        ("ucp_mem_map", ctypes.c_int, [pointer] * 3),
        ("ucp_mem_unmap", ctypes.c_int, [pointer] * 2),
        ("ucp_rkey_pack", ctypes.c_int, [pointer] * 4),
        ("ucp_rkey_buffer_release", None, [pointer]),
        ("ucp_rkey_destroy", None, [pointer]),
        ("ucp_ep_create", ctypes.c_int, [pointer] * 3),
        ("ucp_ep_rkey_unpack", ctypes.c_int, [pointer, ctypes.c_char_p, pointer]),
        ("ucp_ep_close_nbx", pointer, [pointer] * 2),
        ("ucp_get_nbx", pointer, [pointer, pointer, size, ctypes.c_uint64, pointer, pointer]),
        ("ucp_put_nbx", pointer, [pointer, pointer, size, ctypes.c_uint64, pointer, pointer]),
        ("ucp_request_check_status", ctypes.c_int, [pointer]),
        ("ucp_request_free", None, [pointer]),
        ("ucp_cleanup", None, [pointer]),
    ):
        function = getattr(ucp, name)
        function.restype, function.argtypes = result, arguments
    return ucp


def _ucs() -> Any:
    ucs = ctypes.CDLL(str(_loaded("libucs")))
    ucs.ucs_status_string.restype = ctypes.c_char_p
    return ucs


def _parameters(*leading: int) -> Any:
    """A parameter structure: its first words, and zeros beyond its end."""
    return (ctypes.c_uint64 * 64)(*leading)
