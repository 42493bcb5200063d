"""Facts of this machine's GPUs from NVIDIA's library (NVML): memory, name, links, MIG mode.

Sent by value to nodes without pdlab: imports only the standard library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
NVLINKS = 18  # NVML_NVLINK_MAX_LINKS


def gpu_facts(nvml: Any = None) -> dict[str, Any]:
    """``memory_bytes`` of the smallest GPU, ``name`` of the first, ``link``: nvlink or pcie (only of several GPUs).

    Empty without NVML or without a GPU that answers. ``nvml``: replaces the library.
    """
    gpus = _each_gpu(_memory_name_link, nvml) or []
    sizes, names = [size for size, _, _ in gpus if size], [name for _, name, _ in gpus if name]
    facts: dict[str, Any] = {"memory_bytes": min(sizes)} if sizes else {}
    if names:
        facts["name"] = names[0]
    if len(gpus) > 1:
        facts["link"] = "nvlink" if all(linked for _, _, linked in gpus) else "pcie"
    return facts


def mig_modes() -> list[bool] | None:
    """Whether each GPU is in MIG mode; None without NVML."""
    return _each_gpu(_mig_mode)


def _each_gpu(read: Callable[[Any, Any], Any], nvml: Any = None) -> list[Any] | None:
    """``read(nvml, device)`` for every GPU that answers; None without NVML."""
    if nvml is None:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count, results = ctypes.c_uint(), []
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                results.append(read(nvml, device))
        return results
    finally:
        nvml.nvmlShutdown()


def _memory_name_link(nvml: Any, device: Any) -> tuple[int | None, str | None, bool]:
    """(bytes of memory, name, whether an NVLink is up)."""
    # nvmlMemory_t is total, free and used, in bytes; a structure of ctypes cannot be sent by value.
    memory, name = (ctypes.c_ulonglong * 3)(), (ctypes.c_char * NAME_BYTES)()
    has_memory = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    has_name = nvml.nvmlDeviceGetName(device, name, NAME_BYTES) == 0
    linked = any(_is_active(nvml, device, link) for link in range(NVLINKS))
    return memory[0] if has_memory else None, name.value.decode(errors="replace") if has_name else None, linked


def _is_active(nvml: Any, device: Any, link: int) -> bool:
    """Whether an NVLink of the GPU is up. Without NVLink NVML returns an error."""
    active = ctypes.c_uint()
    return nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(active)) == 0 and active.value == 1


def _mig_mode(nvml: Any, device: Any) -> bool:
    """Whether the GPU is in MIG mode. Without MIG NVML returns an error."""
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    known = nvml.nvmlDeviceGetMigMode(device, ctypes.byref(current), ctypes.byref(pending)) == 0
    return known and current.value == 1
