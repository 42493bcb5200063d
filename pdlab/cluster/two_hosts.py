"""Two hosts on one machine, made of namespaces, with a link of a given rate and delay between them.

A host is a process (`pdlab.cluster.namespace_init`) that is PID 1 of its own network, PID, IPC, UTS and mount
namespaces. UCX, NIXL, Ray and vLLM treat two hosts as two machines. There is no named namespace and no interface
outside a host: when PID 1 ends, the kernel ends its processes and removes both ends of the link. The link is a veth
pair. With a delay it is two TAP devices with a process between them (`pdlab.cluster.link_relay`). `tc tbf` sets the
rate. The hosts share the machine's file system, but not /dev/shm, /proc and /sys. Needs root and iproute2 (`ip`, `tc`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdlab.cluster import machine
from pdlab.cluster.namespaces import network_of, spawn_in, spawn_init, unavailable
from pdlab.core.errors import ClusterError, UsageError
from pdlab.core.nodes import HOST_NAMES, LinkShape
from pdlab.core.schema import Frozen
from pdlab.core.text import last_line
from pdlab.remote.kernel_files import interfaces

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "pdlab0"
MTU_BYTES = 9000  # usual inside a data centre; with 1500 headers take 4 % of the rate
QUEUE_S = 0.05  # longest queue of the shaper before it drops
BURST_S, LEAST_BURST_BYTES = 0.001, 16_384
END_TIMEOUT_S = 10.0

_FOLDER = Path(__file__).resolve().parent

# Kept so that Python does not warn of an unreaped child: hosts and nodes live longer than the command that makes them.
CHILDREN: list[subprocess.Popen[bytes]] = []


class Host(Frozen):
    """One host. ``pid``: the machine's number of its PID 1."""

    name: str
    address: str
    pid: int


class TwoHosts(Frozen):
    """Two hosts and their link. ``relay``: the process that delays the link; None: no delay."""

    hosts: tuple[Host, Host]
    shape: LinkShape
    relay: int | None = None


def require() -> None:
    """Raises UsageError with the reason if this process cannot make two hosts."""
    why = unavailable()
    if why is None:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        why = f"{' and '.join(missing)} not found: install iproute2" if missing else None
    if why is not None:
        raise UsageError(f"two hosts on this machine: {why}")


@contextlib.contextmanager
def create_hosts(folder: Path, shape: LinkShape, env: Mapping[str, str], owner: str) -> Iterator[TwoHosts]:
    """Make two hosts. They stay up if the block ends without an error; until then they end with this process.

    ``folder``: has a few small files of the hosts. ``env``: environment of both PID 1. ``owner``: the word by which
    `strays` finds them. Raises UsageError if this process cannot make hosts, ClusterError if a step fails.
    """
    require()
    with (folder / "hosts").open("w") as file:
        file.write("127.0.0.1 localhost\n::1 localhost\n")
        file.writelines(f"{address} {name}\n" for address, name in zip(ADDRESSES, HOST_NAMES, strict=True))
    inits: list[subprocess.Popen[bytes]] = []
    try:
        for name in HOST_NAMES:
            (folder / name).mkdir(exist_ok=True)
            command = [sys.executable, "-I", str(_FOLDER / "namespace_init.py"), name, str(folder), owner]
            with (folder / f"{name}.log").open("w") as errors:
                init = spawn_init(
                    command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                )  # fmt: skip
            inits.append(init)
        first, second = (
            Host(name=name, address=address, pid=init.pid)
            for name, address, init in zip(HOST_NAMES, ADDRESSES, inits, strict=True)
        )
        for init, host in zip(inits, (first, second), strict=True):
            _await_ready(init, folder / f"{host.name}.log", host.name)
            _net(host, "ip", "link", "set", "lo", "up")
        pair = _connect(TwoHosts(hosts=(first, second), shape=shape), folder, env)
        yield pair
    except BaseException:
        _end(inits)
        raise
    for init in inits:
        assert init.stdin is not None
        init.stdin.write(b"stay\n")
        init.stdin.flush()
        _close(init)
    CHILDREN.extend(inits)


def reshape(pair: TwoHosts, shape: LinkShape, folder: Path, env: Mapping[str, str]) -> TwoHosts:
    """Change the rate and delay of the link. Raises ClusterError.

    A new delay needs a new link: TCP sends again what was in flight on the old link.
    """
    if shape.delay_s != pair.shape.delay_s:
        return _connect(pair.model_copy(update={"shape": shape}), folder, env)
    _set_rate(pair, shape)
    return pair.model_copy(update={"shape": shape})


def reap() -> None:
    """Reap children that have ended. The kernel ends a PID namespace only after the parents of its processes did so."""
    CHILDREN[:] = [child for child in CHILDREN if child.poll() is None]


def strays(owner: str) -> dict[int, Path]:
    """PID 1 -> folder of its files, for every host of that owner."""
    import psutil

    commands = {process.pid: process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])}
    init = str(_FOLDER / "namespace_init.py")
    return {pid: Path(words[-2]) for pid, words in commands.items() if init in words and words[-1] == owner}


def _end(inits: list[subprocess.Popen[bytes]]) -> None:
    for init in inits:
        init.kill()
        _close(init)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(init.poll() is None for init in inits) and time.monotonic() < deadline:
        reap()
        time.sleep(0.01)


def _connect(pair: TwoHosts, folder: Path, env: Mapping[str, str]) -> TwoHosts:
    """Replace the link by one with the rate and delay of ``pair.shape``."""
    first, second = pair.hosts
    if pair.relay is not None:  # its end removes its TAP devices
        with contextlib.suppress(OSError):
            if str(_FOLDER / "link_relay.py") in machine.command_line(pair.relay):
                os.kill(pair.relay, signal.SIGKILL)
    elif _has_link(first):
        _net(first, "ip", "link", "del", INTERFACE)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(_has_link(host) for host in pair.hosts) and time.monotonic() < deadline:
        time.sleep(0.005)
    reap()
    relay = None
    if pair.shape.delay_s:
        relay = _start_relay(pair, folder, env)
    else:
        _net(first, *f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {second.pid}".split())
    for host in pair.hosts:
        _net(host, *f"ip addr add {host.address}/24 dev {INTERFACE}".split())
        _net(host, *f"ip link set {INTERFACE} mtu {MTU_BYTES} up".split())
    _set_rate(pair, pair.shape)
    return pair.model_copy(update={"relay": relay})


def _start_relay(pair: TwoHosts, folder: Path, env: Mapping[str, str]) -> int:
    first, second = pair.hosts
    log = folder / "link.log"
    with Path(f"/proc/{second.pid}/ns/net").open() as far, log.open("w") as errors:
        command = [sys.executable, "-I", str(_FOLDER / "link_relay.py"), str(far.fileno()), INTERFACE]
        relay = spawn_in(
            first.pid, [*command, repr(pair.shape.delay_s), str(folder)], env=dict(env), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors, pass_fds=(far.fileno(),), start_new_session=True,
        )  # fmt: skip
    CHILDREN.append(relay)
    _await_ready(relay, log, "the process that delays the link")
    _close(relay)
    return relay.pid


def _set_rate(pair: TwoHosts, shape: LinkShape) -> None:
    for host in pair.hosts:
        _net(host, "tc", "qdisc", "del", "dev", INTERFACE, "root", may_fail=True)  # fails without a shaper
        if shape.gbit_per_s is not None:
            _net(host, *shaper(shape.gbit_per_s))


def shaper(gbit_per_s: float) -> list[str]:
    """The `tc` command that limits a host's sending rate: token bucket of 1 ms (at least 16 KiB), queue of 50 ms."""
    bytes_per_s = gbit_per_s * 1e9 / 8
    burst = max(LEAST_BURST_BYTES, round(bytes_per_s * BURST_S))
    limit = burst + max(2 * MTU_BYTES, round(bytes_per_s * QUEUE_S))
    rate = f"{round(gbit_per_s * 1e9)}bit"
    return f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst {burst} limit {limit}".split()


def _net(host: Host, *command: str, may_fail: bool = False) -> str:
    """Run a tool of iproute2 in the network of ``host``."""
    with network_of(host.pid):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode and not may_fail:
        complaint = " ".join((done.stderr or done.stdout).split())
        raise ClusterError(
            f"the link between the two hosts: `{' '.join(command)}` fails: {complaint or 'it gives no reason'}"
        )
    return done.stdout


def _has_link(host: Host) -> bool:
    return INTERFACE in interfaces(host.pid)


def _await_ready(process: subprocess.Popen[bytes], log: Path, process_name: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        raise ClusterError(f"{process_name} does not start: {last_line(log.read_text()) or 'it printed nothing'}")


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
