"""Rules of the doctor: obstacles to any engine, with or without a KV transfer. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdlab.core.command_lines import how_to_fetch
from pdlab.core.text import counted
from pdlab.transfer.doctor.findings import HERE, SPANNING, DoctorFinding, Facts, Rule

LEAST_DRIVER = 580  # first driver for CUDA 13, for which torch is built


def _toolchain(facts: Facts) -> Iterator[DoctorFinding]:
    """Compilers at the start of an engine: Triton always needs them, FlashInfer if its sampler is on."""
    for node, fact in facts.items():
        tools = fact.get("toolchain")
        if not tools or not fact.get("gpus"):
            continue
        flashinfer = fact.get("environment", {}).get("VLLM_USE_FLASHINFER_SAMPLER", "0") != "0"
        required_tools = ["gcc", "Python.h", *(["nvcc", "ninja"] if flashinfer else [])]
        missing_tools = [tool for tool in required_tools if not tools.get(tool)]
        if missing_tools:
            compilers = "FlashInfer compiles its sampler and Triton its launchers" if flashinfer else "Triton compiles"
            yield DoctorFinding(
                "error",
                "compiler",
                (node,),
                f"not found for the Python that Ray runs: {', '.join(missing_tools)}",
                f"{compilers} when an engine starts: it fails there, minutes after the launch",
                "apt-get install build-essential python3-dev; unset VLLM_USE_FLASHINFER_SAMPLER, or install the CUDA "
                "toolkit, and start Ray with the environment's bin folder on PATH (docs/setup.md)",
            )
        elif not flashinfer and (not tools.get("ninja") or not tools.get("nvcc")):
            absent_tools = [tool for tool in ("nvcc", "ninja") if not tools.get(tool)]
            yield DoctorFinding(
                "note",
                "compiler",
                (node,),
                f"not found for the Python that Ray runs: {', '.join(absent_tools)}",
                "engines started by pdlab do not need them: FlashInfer's sampler is off",
                "none needed, unless an engine argument turns FlashInfer on",
            )


def _driver(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        version = fact.get("driver")
        if fact.get("gpus") and version and int(version.split(".")[0]) < LEAST_DRIVER:
            yield DoctorFinding(
                "error",
                "driver_too_old",
                (node,),
                f"driver {version}",
                "torch is built for CUDA 13: no engine starts",
                f"install driver {LEAST_DRIVER} or later on every node",
            )


# Least free /dev/shm. vLLM's queue between the ranks takes 240 MiB (shm_broadcast.py of 0.29: 10 chunks of 24 MiB) per
# engine with TP > 1. NCCL and Ray's object store use it too. Containers have 64 MiB by default.
LEAST_SHM_BYTES = 2**30


def _shm(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        shm = fact.get("shm")
        if shm and shm["free_bytes"] < LEAST_SHM_BYTES:
            yield DoctorFinding(
                "warning",
                "dev_shm",
                (node,),
                f"{shm['free_bytes'] / 2**20:.0f} MiB free of {shm['bytes'] / 2**20:.0f} MiB",
                "vLLM's queue takes 240 MiB of it per engine with TP > 1, NCCL and Ray's object store take more: "
                "engines die with a bus error, or Ray moves its objects to /tmp",
                "containers with --shm-size 16g or --ipc host (Kubernetes: an emptyDir of medium Memory at /dev/shm)",
            )


def _host_names(facts: Facts) -> Iterator[DoctorFinding]:
    """Gloo connects the ranks of an engine over the interface of its variable, else at the host name's address."""
    machines = {fact.get("boot") for fact in facts.values()}
    for node, fact in facts.items():
        environment, interfaces = fact.get("environment", {}), set(fact.get("interfaces", ()))
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            value = environment.get(variable, "")
            if interfaces and value and not _names_one(variable, value, interfaces):
                yield DoctorFinding(
                    "error",
                    "interface_variable",
                    (node,),
                    f"{variable}={value}; this node has {', '.join(sorted(interfaces))}",
                    "the ranks of an engine find no interface to meet at: it does not start",
                    f"unset {variable}, or name an interface that every node has",
                    name=variable,
                )
        resolved = fact.get("resolved")
        if not resolved or environment.get("GLOO_SOCKET_IFNAME") or len(machines) < 2:
            continue
        addresses = resolved["addresses"]
        if not addresses or all(re.match(r"127\.|::1$", address) for address in addresses):
            to = f"resolves to {', '.join(addresses)}" if addresses else f"does not resolve ({resolved['error']})"
            yield DoctorFinding(
                "error",
                "host_name",
                (node,),
                f"{fact.get('host')} {to}",
                "Gloo sends this address to the ranks on other nodes: an engine over several nodes hangs at its start",
                "GLOO_SOCKET_IFNAME=INTERFACE where `ray start` runs, or the node's own address in /etc/hosts",
                (SPANNING,),
            )


def _names_one(variable: str, value: str, interfaces: set[str]) -> bool:
    """Whether the variable's list matches an interface of this node. NCCL's entries are prefixes; ``=`` means exact
    names, ``^`` excludes."""
    names = [name for name in value.lstrip("^=").split(",") if name]
    if variable.startswith("GLOO") or value.startswith("="):
        return bool(interfaces & set(names))
    matching = {interface for interface in interfaces for name in names if interface.startswith(name)}
    return bool(interfaces - matching if value.startswith("^") else matching)


def _mig(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        modes = fact.get("mig") or []
        if any(modes):
            yield DoctorFinding(
                "warning",
                "mig",
                (node,),
                f"MIG is on for {sum(modes)} of {counted(len(modes), 'GPU')}",
                "slices of GPUs cannot reach each other (no cuda_ipc, no NVLink, no NCCL): TP > 1 fails, the KV "
                "cache of a pack goes through host memory, and a slice has only a part of the GPU's memory",
                "nvidia-smi -mig 0 on the node, or nodes without MIG",
            )


def _weights(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        found = fact.get("weights")
        if not found:
            continue
        fetch = how_to_fetch(found["model"], here=node == HERE)
        for name, why in found["broken"].items():
            yield DoctorFinding(
                "error",
                "weights",
                (node,),
                f"{found['folder']}/{name}: {why}",
                "the engine fails when it loads the model, minutes after the launch",
                f"remove the file, and what it links to, and fetch it again ({fetch})",
            )
        if found["missing"]:
            more = f" and {len(found['missing']) - 3} more" if len(found["missing"]) > 3 else ""
            yield DoctorFinding(
                "note",
                "weights",
                (node,),
                f"not on the node: {', '.join(found['missing'][:3])}{more}",
                "engines download them while they start, or fail without a network",
                fetch,
            )


RULES: tuple[Rule, ...] = (_toolchain, _driver, _shm, _host_names, _mig, _weights)
