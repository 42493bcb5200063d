"""What a node tells of its GPUs, by a library that answers as NVML does."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.remote import gpus, node

NOT_SUPPORTED = 3


class Nvml:
    """GPUs of so many bytes each; an index is a handle. ``links``: per GPU the states of its NVLinks, if it has any."""

    def __init__(self, sizes: list[int], links: list[list[int]], init: int = 0) -> None:
        self.sizes, self.links, self.init, self.down = sizes, links, init, 0

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        self.down += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.sizes)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1  # 0 would be a null pointer
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, length: int) -> int:
        name.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj[0] = self.sizes[device.value - 1]
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, active: Any) -> int:
        states = self.links[device.value - 1]
        if link >= len(states):
            return NOT_SUPPORTED
        active._obj.value = states[link]
        return 0


@pytest.mark.parametrize(
    ("sizes", "links", "facts"),
    [
        ([85_520_809_984] * 2, [[1] * 18] * 2, {"memory_bytes": 85_520_809_984, "link": "nvlink"}),
        ([48_305_799_168] * 2, [[], []], {"memory_bytes": 48_305_799_168, "link": "pcie"}),
        ([9, 7], [[0, 0], [1]], {"memory_bytes": 7, "link": "pcie"}),
        ([9], [[1]], {"memory_bytes": 9}),
        ([], [], {}),
    ],
)
def test_facts(sizes: list[int], links: list[list[int]], facts: dict[str, Any]) -> None:
    library = Nvml(sizes, links)
    named = {"name": "NVIDIA H100 80GB HBM3"} if sizes else {}
    assert gpus.gpu_facts(library) == facts | named and library.down == 1


def test_without_a_driver_nothing_is_known() -> None:
    assert gpus.gpu_facts(Nvml([9], [[]], init=9)) == {}


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    facts = node.machine_facts()
    assert facts["gpus"] == {} and facts["host"] and facts["nic"]
