"""Facts of machines that are not here, as `pdlab.remote.node` would answer on them."""

from __future__ import annotations

from typing import Any

WHEEL = "/venv/lib/python3.12/site-packages/nixl_cu13.libs"
TOOLS = {"nvcc": "/usr/local/cuda/bin/nvcc", "ninja": "/v/ninja", "gcc": "/usr/bin/gcc", "Python.h": "/i/Python.h"}


def device(name: str, kind: str, driver: str, gbit_per_s: float, **changes: Any) -> dict[str, Any]:
    """An RDMA device of a container that was given it."""
    facts = {"name": name, "kind": kind, "driver": driver, "gbit_per_s": gbit_per_s}
    return {**facts, "active": True, "given": True, "usable": True, **changes}


ABSENT = {"given": False, "usable": False}
REFUSED = {"given": True, "usable": False}


def machine(rdma: list[dict[str, Any]], gpus: int, transports: list[str], **changes: Any) -> dict[str, Any]:
    """A node on which all is well, but that it has this fabric."""
    return {
        "host": "node",
        "boot": "machine-a",
        "namespaces": {"pid": "pid:[1]", "ipc": "ipc:[1]", "net": "net:[1]"},
        "versions": {"ray": "2.60.0", "vllm": "0.29.0", "nixl": "1.3.2", "torch": "2.13.0"},
        "modules": {},
        "environment": {},
        "memlock": None,
        "hugepages": 5128,
        "rdma": rdma,
        "interfaces": ["eth0", "lo"],
        "gpus": gpus,
        "system_libraries": {"libibverbs": ["/usr/lib/libibverbs.so.1.14.48.0"], "libefa": ["/usr/lib/libefa.so.1"]},
        "bundled_libraries": [f"{WHEEL}/libibverbs-1de1263b.so.1.14.48.0"],
        "ports_taken": [],
        "toolchain": TOOLS,
        "driver": "580.95.05" if gpus else None,
        "efa_nv_peermem": True,
        "nvidia_peermem": True,
        "nccl_net": ["/opt/amazon/ofi-nccl/lib/libnccl-net.so"],
        "advertised": None,
        "auth": {"mode": "token", "token": "abc"},
        "shm": {"bytes": 900 * 2**30, "free_bytes": 890 * 2**30},
        "resolved": {"addresses": ["10.0.0.4"], "error": None},
        "mig": [False] * gpus,
        "weights": None,
        "loaded": {"ucx": "1.21.0", "error": None, "backends": {"UCX": None}, "libraries": [], "log": "",
                   "transports": ["cma/memory", "tcp/eth0", *(["cuda_ipc/cuda"] if gpus else []), *transports]},
        **changes,
    }  # fmt: skip


def nd_h100_v5(**changes: Any) -> dict[str, Any]:
    """Azure's ND H100 v5: eight InfiniBand NICs of 400 Gbit/s, and the Ethernet one, which the kernel lists first."""
    rdma = [device("mlx5_an0", "roce", "mlx5_core", 100.0)]
    rdma += [device(f"mlx5_ib{number}", "infiniband", "mlx5_core", 400.0) for number in range(8)]
    transports = [f"{transport}/mlx5_ib{number}:1" for number in range(8) for transport in ("dc_mlx5", "rc_mlx5")]
    return machine(rdma, 8, transports) | changes


def nd_h100_v5_pod(**changes: Any) -> dict[str, Any]:
    """The same in a container without /dev/infiniband, which sees the devices in sysfs all the same."""
    rdma = [{**each, **ABSENT} for each in nd_h100_v5()["rdma"]]
    return {**nd_h100_v5(), "rdma": rdma, "loaded": machine([], 8, [])["loaded"], "memlock": 64 * 2**10, **changes}


def workstation(**changes: Any) -> dict[str, Any]:
    """A desk's machine with a NIC that could do RoCE, and Linux's default limits."""
    return machine([device("mlx5_0", "roce", "mlx5_core", 25.0)], 0, ["rc_mlx5/mlx5_0:1"], memlock=8 * 2**20) | changes


def efa_pod(given: int, gpus: int, **changes: Any) -> dict[str, Any]:
    """A pod with some of the 32 EFA devices of a p5.48xlarge, all of which sysfs shows."""
    rdma = [device(f"rdmap{number}", "efa", "efa", 100.0, **({} if number < given else ABSENT)) for number in range(32)]
    return machine(rdma, gpus, [f"srd/rdmap{number}:1" for number in range(given)]) | changes
