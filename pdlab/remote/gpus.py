"""The GPUs of the machine this runs on, as NVIDIA's library (NVML) tells: their memory and how they reach each other.

Sent by value to nodes that have no pdlab: this module imports nothing of pdlab but its neighbours in pdlab.remote.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pdlab.remote.node import node_facts

NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
NVLINKS = 18  # NVML_NVLINK_MAX_LINKS


def machine_facts() -> dict[str, Any]:
    """`pdlab.remote.node.node_facts` and, as ``gpus``, `gpu_facts`."""
    return {**node_facts(), "gpus": gpu_facts()}


def gpu_facts(nvml: Any = None) -> dict[str, Any]:
    """``memory_bytes`` of the smallest GPU, the ``name`` of the first, and ``link``: nvlink or pcie (left out for a
    single GPU).

    Empty without NVML or without a GPU that answers. ``nvml``: in place of the library.
    """
    if nvml is None:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return {}
    if nvml.nvmlInit_v2() != 0:
        return {}
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        sizes, linked, names = [], [], []
        for index in range(count.value):
            # nvmlMemory_t is total, free and used, in bytes; a structure of ctypes cannot be sent by value.
            device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                sizes.append(memory[0])
            name = (ctypes.c_char * NAME_BYTES)()
            if nvml.nvmlDeviceGetName(device, name, NAME_BYTES) == 0:
                names.append(name.value.decode(errors="replace"))
            linked.append(any(_is_active(nvml, device, link) for link in range(NVLINKS)))
    finally:
        nvml.nvmlShutdown()
    facts: dict[str, Any] = {"memory_bytes": min(sizes)} if sizes else {}
    if names:
        facts["name"] = names[0]
    if len(linked) > 1:
        facts["link"] = "nvlink" if all(linked) else "pcie"
    return facts


def _is_active(nvml: Any, device: ctypes.c_void_p, link: int) -> bool:
    """Whether an NVLink of the GPU is up; one without NVLink answers that it is not supported."""
    active = ctypes.c_uint()
    return nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(active)) == 0 and active.value == 1
