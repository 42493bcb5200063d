"""Changes to every Python process of the local nodes: they listen only at the node's address.

Ray's C++ servers listen at the address of ``--node-ip-address=127.0.0.1``. But Ray's Python replaces this address by
the machine's outward one, and the other listeners take no address. Ray has no option for this, so these modules are
changed right after their import:

- ``ray._private.services``: 127.0.0.1 is kept; the raylet gets the information that its agent has no HTTP server
- ``ray._private.node``: no Ray Client server; socket names are different for each node of this machine
- ``ray.serve._private.replica``: a replica's gRPC server listens at the node's address, not at ``[::]``
- ``ray.serve._private.haproxy_templates``: HAProxy's metrics and statistics listen on loopback; a client that closes
  its connection costs no core
- ``ray.dashboard.http_server_agent``: the agents do not start their HTTP server, which is the job API
- ``torch.distributed.rendezvous``: the store of a process group listens at the node's address
- vLLM's NIXL connector: the side channel, which has no authentication, accepts only clients with the nodes' token

A change raises RuntimeError if its module is not as expected, and the process ends. Imports only the standard library.
"""

from __future__ import annotations

import errno
import hmac
import importlib
import os
import pathlib
import socket
from collections.abc import Callable, Sequence
from typing import Any

from pdlab.cluster.after_import import change_after_import
from pdlab.cluster.ray_names import AGENT, HAPROXY_TEMPLATES, NODE, REPLICA, SERVICES
from pdlab.cluster.vllm_names import SIDE_CHANNEL

LISTEN = "PDLAB_LISTEN"  # the node's address
NODE_NUMBER = "PDLAB_NODE"  # number of a node among the local nodes of this machine, from 1
LOOPBACK = "127.0.0.1"
# With this option Ray's HAProxy (2.8.25) uses a whole core from the client's close until the answer is complete.
ABORT = "    option abortonclose\n"


def install() -> None:
    """Change the modules of `CHANGES`: loaded modules now, the others after their import."""
    change_after_import(CHANGES)


def install_in_driver() -> None:
    """As `install`, without the side channel: a driver has no side channel and may not have the token."""
    change_after_import({name: change for name, change in CHANGES.items() if change is not _side_channel})


def _address() -> str:
    return os.environ.get(LISTEN, LOOPBACK)


def _services(module: Any) -> None:
    _need(module, "resolve_ip_for_localhost")
    _need(module, "start_ray_process")
    module.resolve_ip_for_localhost = lambda host: host
    start = module.start_ray_process

    def start_ray_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        # Ray gives this port to the agent and not to the raylet. The raylet waits 15 s for the port from the agent,
        # and then ends. The agent first imports more than a thousand modules, which takes longer on a busy machine.
        if process_type == "raylet":
            command = [*command, "--dashboard_agent_listen_port=-1"]
        return start(command, process_type, *args, **kwargs)

    module.start_ray_process = start_ray_process


def _node(module: Any) -> None:
    _need(module, "Node")
    _need(module.Node, "start_ray_client_server")
    module.Node.start_ray_client_server = lambda self: None
    number = os.environ.get(NODE_NUMBER)
    if number is None:
        return
    # Ray takes the first free file name; two nodes that start at the same time take the same name.
    _need(module.Node, "_make_inc_temp")
    make = module.Node._make_inc_temp

    def make_own(self: Any, suffix: str = "", prefix: str = "", directory_name: str | None = None) -> Any:
        own = f"-{number}{suffix}" if str(directory_name).endswith("/sockets") else suffix
        return make(self, suffix=own, prefix=prefix, directory_name=directory_name)

    module.Node._make_inc_temp = make_own


def _replica(module: Any) -> None:
    _need(module, "add_port_to_grpc_server")
    add = module.add_port_to_grpc_server

    def add_port(server: Any, address: str) -> Any:
        return add(server, address.replace("[::]:", f"{_address()}:"))

    module.add_port_to_grpc_server = add_port


def _haproxy(module: Any) -> None:
    _need(module, "HAPROXY_CONFIG_TEMPLATE")
    text: str = module.HAPROXY_CONFIG_TEMPLATE
    for bind_line in ("bind :{{ config.metrics_port }}", "bind *:{{ config.stats_port }}"):
        if text.count(bind_line) != 1:
            raise RuntimeError(f"{module.__name__}: expected one line {bind_line!r} in HAPROXY_CONFIG_TEMPLATE")
        text = text.replace(bind_line, f"bind {LOOPBACK}:{bind_line.partition(':')[2]}")
    if text.count(ABORT) != 1:
        raise RuntimeError(f"{module.__name__}: expected one line {ABORT!r} in HAPROXY_CONFIG_TEMPLATE")
    text = text.replace(ABORT, "")
    module.HAPROXY_CONFIG_TEMPLATE = text


def _agent(module: Any) -> None:
    _need(module, "HttpServerAgent")
    _need(module.HttpServerAgent, "start")

    async def start(self: Any, _: Sequence[Any]) -> None:
        # Modules of the agent send with this session. Ray takes port -1 for an agent without a server.
        self.http_session = module.aiohttp.ClientSession()
        self.http_port = -1

    async def cleanup(self: Any) -> None:
        await self.http_session.close()

    module.HttpServerAgent.start = start
    module.HttpServerAgent.cleanup = cleanup


def _rendezvous(module: Any) -> None:
    _need(module, "TCPStore")
    store = module.TCPStore

    def tcp_store(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_master") or args or "master_listen_fd" in kwargs:
            return store(*args, **kwargs)
        try:
            listening = socket.create_server((_address(), kwargs["port"]))
        except OSError as error:
            # torch's own exception: with it vLLM takes another port for a data-parallel rank.
            torch = importlib.import_module("torch.distributed")
            error_name = errno.errorcode.get(error.errno or 0, "")
            raise torch.DistNetworkError(f"port {kwargs['port']} of {_address()}: {error} ({error_name})") from error
        return store(**{**kwargs, "port": listening.getsockname()[1], "master_listen_fd": listening.detach()})

    module.TCPStore = tcp_store


def _side_channel(module: Any) -> None:
    """Encrypt vLLM's side-channel sockets with CURVE, ZeroMQ's encryption.

    The listener's key pair is derived from the token. A caller without the token does not know the public key, and
    CURVE accepts no message from it.
    """
    _need(module, "zmq_ctx")
    _need(module, "make_zmq_socket")
    zmq, make = module.zmq, module.make_zmq_socket
    if not zmq.has("curve"):
        raise RuntimeError("this pyzmq is built without CURVE, which keeps strangers from the NIXL side channel")
    token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_bytes().strip()
    secret = hmac.digest(token, b"pdlab NIXL side channel", "sha256")
    key = importlib.import_module("zmq.utils.z85").encode(secret)
    listener = zmq.curve_public(key)

    def make_zmq_socket(ctx: Any, path: str, socket_type: Any, bind: bool) -> Any:
        if bind:
            options = {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: key}
        else:
            public, own = zmq.curve_keypair()
            options = {zmq.CURVE_SERVERKEY: listener, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: own}
        for option, value in options.items():  # on the context: a socket needs CURVE before it connects
            ctx.setsockopt(option, value)
        return make(ctx=ctx, path=path, socket_type=socket_type, bind=bind)

    module.make_zmq_socket = make_zmq_socket


def _need(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(f"{owner.__name__} has no {name}: pdlab cannot keep this version on loopback")


CHANGES: dict[str, Callable[[Any], None]] = {
    SERVICES: _services,
    NODE: _node,
    REPLICA: _replica,
    HAPROXY_TEMPLATES: _haproxy,
    AGENT: _agent,
    "torch.distributed.rendezvous": _rendezvous,
    SIDE_CHANNEL: _side_channel,
}
