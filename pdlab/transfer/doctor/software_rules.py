"""Rules of the doctor: packages, libraries, devices, and which of them load. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlab.transfer.doctor.findings import Facts, Finding, Rule
from pdlab.transfer.ucx_log import failed_modules

EFA_GBIT_PER_S = 100  # of one EFA device of a p5.48xlarge
SRD, NCCL_PLUGIN = "SRD", "NCCL plugin"


def _versions(facts: Facts) -> Iterator[Finding]:
    names = sorted({name for fact in facts.values() for name in fact.get("versions", {})})
    for name in names:
        by_node = {node: fact["versions"].get(name) for node, fact in facts.items() if "versions" in fact}
        if len(set(by_node.values())) > 1:
            version_list = ", ".join(f"{node} {version or 'none'}" for node, version in by_node.items())
            yield Finding(
                "error" if name in ("vllm", "nixl") else "warning",
                f"{name} version",
                tuple(by_node),
                version_list,
                "the NIXL handshake compares hashes of vLLM and connector: transfers are refused"
                if name in ("vllm", "nixl")
                else "nodes behave differently",
                f"install the same {name} on every node (requirements.txt)",
            )
        elif name in ("vllm", "nixl") and set(by_node.values()) == {None}:
            yield Finding(
                "error",
                f"{name} version",
                tuple(by_node),
                f"{name} is not installed for the Python that Ray runs",
                "no engine starts" if name == "vllm" else "no KV transfer is possible",
                "make setup-gpu on the node, in the environment of `ray start`",
            )


def _ucx_versions(facts: Facts) -> Iterator[Finding]:
    ucx_versions = {
        node: fact["loaded"].get("ucx") for node, fact in facts.items() if fact.get("loaded", {}).get("ucx")
    }
    if len(set(ucx_versions.values())) > 1:
        version_list = ", ".join(f"{node} {version}" for node, version in ucx_versions.items())
        yield Finding(
            "error",
            "UCX version",
            tuple(ucx_versions),
            version_list,
            "UCX of different versions may choose different protocols, or fail to connect",
            "use the same UCX on every node: unset LD_LIBRARY_PATH, or debug/install_on_nodes.py",
        )
    for node, version in ucx_versions.items():
        old = tuple(int(number) for number in version.split(".")[:2]) < (1, 20)
        if old and _efa_devices(facts[node]):
            yield Finding(
                "error",
                "UCX version",
                (node,),
                f"UCX {version} with EFA devices",
                "SRD without zero-copy get: every read is emulated in software",
                "UCX 1.20 or later: debug/build_nixl_ucx_efa.sh",
            )


def _system_ucx(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        loaded = [path for path in fact.get("loaded", {}).get("libraries", ()) if "libucp" in path]
        outside = [path for path in loaded if "nixl_cu" not in path]
        if outside and len(loaded) > 1:
            yield Finding(
                "error",
                "UCX twice",
                (node,),
                ", ".join(loaded),
                "two copies of UCX in one process crash, or settings reach only one of them",
                "unset LD_LIBRARY_PATH and LD_PRELOAD, or use a NIXL built against the system's UCX",
            )
        elif outside:
            yield Finding(
                "note",
                "UCX of the system",
                (node,),
                outside[0],
                "NIXL runs on this UCX instead of the one in its wheel",
                "none if you built it (debug/build_nixl_ucx_efa.sh) and every node has it",
            )


def _duplicates(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        libraries = fact.get("loaded", {}).get("libraries", ())
        by_name: dict[str, set[str]] = {}
        for path in libraries:
            match = re.match(r"(lib(?:ibverbs|efa|nl-3|nl-route-3|rdmacm))", Path(path).name)
            if match:
                by_name.setdefault(match[1], set()).add(path)
        for name, paths in by_name.items():
            if len(paths) > 1:
                yield Finding(
                    "error",
                    f"{name} twice",
                    (node,),
                    ", ".join(sorted(paths)),
                    "two copies keep two lists of devices: UCX sees none, falls back to TCP and logs nothing",
                    "build NIXL and UCX against the system's rdma-core (debug/build_nixl_ucx_efa.sh)",
                )


def _efa_devices(fact: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [device for device in fact.get("rdma", ()) if device["driver"] == "efa"]


def _efa(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        devices = _efa_devices(fact)
        if not devices:
            continue
        closed = [device["name"] for device in devices if not device["usable"]]
        if closed:
            yield Finding(
                "error",
                "EFA not usable",
                (node,),
                f"{len(closed)} of {len(devices)} EFA devices cannot be opened ({closed[0]})",
                "UCX and libfabric do not see them: transfers go over TCP, some hundred times slower",
                "give the process /dev/infiniband (containers: --device /dev/infiniband/uverbsN), rw",
            )
        system = fact.get("system_libraries", {})
        if "libefa" not in system:
            yield Finding(
                "error",
                "libefa missing",
                (node,),
                "EFA devices, but the dynamic loader finds no libefa",
                "UCX's EFA module does not load, and logs that only with UCX_MODULE_LOG_LEVEL=info",
                "install the EFA installer's rdma-core (docs/setup.md)",
            )
        bundled = [path for path in fact.get("bundled_libraries", ()) if "libibverbs" in path]
        newer = _abi(system.get("libibverbs", ())), _abi(bundled)
        if newer[0] and newer[1] and newer[0] > newer[1]:
            yield Finding(
                "warning",
                "rdma-core ABI",
                (node,),
                f"libibverbs 1.14.{newer[0]} of the system, 1.14.{newer[1]} in the nixl wheel",
                "providers of a newer rdma-core do not load into an older libibverbs: UCX may see no EFA",
                "check the wire with debug/test_nixl_connector_ray.py; if not srd, run debug/build_nixl_ucx_efa.sh",
            )
        rails = fact.get("environment", {}).get("UCX_MAX_RMA_RAILS", "2")
        per_gpu = len(devices) // max(fact.get("gpus", 0), 1)
        if per_gpu > 2 and rails.isdecimal() and int(rails) < per_gpu:  # UCX takes inf and auto as well
            yield Finding(
                "warning",
                "rails",
                (node,),
                f"{per_gpu} EFA devices per GPU, UCX_MAX_RMA_RAILS {rails} (2 where not set)",
                f"a transfer uses {rails} of {per_gpu} devices: at most {int(rails) * EFA_GBIT_PER_S / 8:g} "
                f"of {per_gpu * EFA_GBIT_PER_S / 8:g} GB/s",
                f"set UCX_MAX_RMA_RAILS={per_gpu} on every node",
            )


def _abi(paths: Sequence[str]) -> int | None:
    """``libibverbs.so.1.14.57.0`` is of rdma-core 57."""
    numbers = [int(match[1]) for path in paths if (match := re.search(r"\.so\.1\.14\.(\d+)\.", path))]
    return max(numbers, default=None)


def _modules(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        loaded = fact.get("loaded")
        if not loaded:
            continue
        efa = bool(_efa_devices(fact))
        for module, why in failed_modules(loaded.get("log", "")).items():
            needed = (efa and "efa" in module) or (fact.get("gpus") and "cuda" in module)
            yield Finding(
                "error" if needed else "note",
                f"UCX module {module}",
                (node,),
                why,
                "UCX continues without it and logs nothing" + ("" if needed else "; this node does not need it"),
                "install the library that it names" if needed else "none needed",
            )


def hashes(facts: Facts) -> dict[str, dict[str, str]]:
    """Library -> node -> hash of the file that NIXL loads there; a node that does not load it is left out."""
    digests: dict[str, dict[str, str]] = {}
    for node, fact in facts.items():
        for path, digest in ((fact.get("loaded") or {}).get("digests") or {}).items():
            # libucp-bcc5ee2e.so.0.0.0: the wheel's tool puts a hash into the name
            digests.setdefault(re.split(r"(?:-[0-9a-f]{8})?\.so", Path(path).name)[0], {})[node] = digest
    return digests


def loads_alike(facts: Facts) -> str | None:
    """None if every node loads the same libraries and every backend; else the first difference, with its node."""
    for node, fact in facts.items():
        loaded = fact.get("loaded") or {"error": "no answer"}
        failed = [f"{name}: {why}" for name, why in loaded.get("backends", {}).items() if why]
        if loaded.get("error") or failed:
            return f"{node}: {loaded.get('error') or failed[0]}"
    for library, nodes in hashes(facts).items():
        if len(set(nodes.values())) > 1 or len(nodes) < len(facts):
            return f"{library}: " + ", ".join(f"{node} {nodes.get(node, 'does not load it')}" for node in facts)
    return None


def _builds(facts: Facts) -> Iterator[Finding]:
    """Compares hashes: two builds of one version may differ."""
    differing = {library: nodes for library, nodes in hashes(facts).items() if len(set(nodes.values())) > 1}
    if differing:
        library, nodes = next(iter(differing.items()))
        yield Finding(
            "warning",
            "builds differ",
            tuple(dict.fromkeys(node for nodes in differing.values() for node in nodes)),
            f"{', '.join(differing)}; hashes of {library}: "
            + ", ".join(f"{n} {digest}" for n, digest in nodes.items()),
            "different builds may choose different protocols, or find different devices",
            "install the same wheel on every node: debug/install_on_nodes.py",
        )


def _backends(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        loaded = fact.get("loaded")
        if not loaded:
            continue
        if loaded.get("error"):
            yield Finding(
                "error",
                "NIXL",
                (node,),
                loaded["error"],
                "no KV transfer is possible",
                "reinstall nixl for this Python (requirements.txt); see the log in --json",
            )
        for name, why in loaded.get("backends", {}).items():
            if why:
                yield Finding(
                    "error",
                    f"NIXL backend {name}",
                    (node,),
                    why,
                    "the backend does not load: a deployment that uses it fails",
                    "use another --kv-backend, or install the libraries that the plugin needs (docs/debugging.md)",
                )


def _shadowed(facts: Facts) -> Iterator[Finding]:
    for name in ("vllm", "nixl"):
        module_paths = {node: fact.get("modules", {}).get(name) for node, fact in facts.items()}
        for node, path in module_paths.items():
            if path and "site-packages" not in path and "dist-packages" not in path:
                yield Finding(
                    "warning",
                    f"{name} from elsewhere",
                    (node,),
                    path,
                    "the imported package is not the installed one: the versions above may not be those that run",
                    "check PYTHONPATH and the working directory of `ray start`",
                )


LEAST_DRIVER = 580  # of CUDA 13, for which torch is built


def _toolchain(facts: Facts) -> Iterator[Finding]:
    """The tools that compile when an engine starts: for Triton always, for FlashInfer if its sampler is on."""
    for node, fact in facts.items():
        tools = fact.get("toolchain")
        if not tools or not fact.get("gpus"):
            continue
        flashinfer = fact.get("environment", {}).get("VLLM_USE_FLASHINFER_SAMPLER", "0") != "0"
        required_tools = ["gcc", "Python.h", *(["nvcc", "ninja"] if flashinfer else [])]
        missing_tools = [tool for tool in required_tools if not tools.get(tool)]
        if missing_tools:
            compilers = "FlashInfer compiles its sampler and Triton its launchers" if flashinfer else "Triton compiles"
            yield Finding(
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
            yield Finding(
                "note",
                "compiler",
                (node,),
                f"not found for the Python that Ray runs: {', '.join(absent_tools)}",
                "engines started by pdlab do not need them: FlashInfer's sampler is off",
                "none needed, unless an engine argument turns FlashInfer on",
            )


def _driver(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        version = fact.get("driver")
        if fact.get("gpus") and version and int(version.split(".")[0]) < LEAST_DRIVER:
            yield Finding(
                "error",
                "NVIDIA driver",
                (node,),
                f"driver {version}",
                "torch is built for CUDA 13: no engine starts",
                f"install driver {LEAST_DRIVER} or later on every node",
            )


def _gpu_direct(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        if _efa_devices(fact) and fact.get("gpus") and fact.get("efa_nv_peermem") is False:
            yield Finding(
                "warning",
                "GPUDirect",
                (node,),
                "EFA devices and GPUs, but no kernel module efa_nv_peermem (/sys/module)",
                "EFA may not reach GPU memory: KV cache goes through host memory, many times slower",
                "sudo modprobe efa_nv_peermem; AWS's EFA installer provides it",
            )


def _no_srd(facts: Facts) -> Iterator[Finding]:
    """UCX's own list of transports is the proof; versions and files are circumstantial."""
    for node, fact in facts.items():
        transports = (fact.get("loaded") or {}).get("transports")
        efa = len(_efa_devices(fact))
        if not efa or transports is None:
            continue
        if not any(name.startswith("srd/") for name in transports):
            transport_names = ", ".join(sorted({name.split("/")[0] for name in transports})) or "none"
            yield Finding(
                "error",
                SRD,
                (node,),
                f"{efa} EFA devices, and UCX finds none of them (its transports: {transport_names})",
                "KV crosses nodes over TCP, some hundred times slower, and nothing reports it",
                "debug/build_nixl_ucx_efa.sh, or --kv-backend LIBFABRIC if its plugin loads",
            )


def _nccl_plugin(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        if _efa_devices(fact) and fact.get("gpus") and fact.get("nccl_net") == []:
            yield Finding(
                "note",
                NCCL_PLUGIN,
                (node,),
                "EFA devices, and no libnccl-net*.so (aws-ofi-nccl)",
                "NCCL between nodes goes over sockets: wide expert parallel and TP over nodes are very slow; engines "
                "within a node do not need it",
                "AWS's EFA installer provides it (/opt/amazon/ofi-nccl); add its lib folder to LD_LIBRARY_PATH "
                "before Ray starts",
            )


# Obstacles to any engine, without KV transfer too.
ENGINE_RULES: tuple[Rule, ...] = (_toolchain, _driver)

RULES: tuple[Rule, ...] = (
    *ENGINE_RULES,
    _gpu_direct,
    _no_srd,
    _nccl_plugin,
    _versions,
    _ucx_versions,
    _system_ucx,
    _duplicates,
    _efa,
    _modules,
    _builds,
    _backends,
    _shadowed,
)
