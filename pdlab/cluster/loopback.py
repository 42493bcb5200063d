"""Loaded into every Python process of the local nodes: what they open is at one address, and the deployment's alone.

A node started with ``--node-ip-address=127.0.0.1`` would listen only on loopback (Ray's C++ servers
look at exactly that), but Ray's Python replaces the address by the machine's outward one, and the
other listeners take no address at all. Ray has no option for any of it, so these modules are changed right
after they are imported:

- ``ray._private.services``: 127.0.0.1 stays what it is; the raylet is told that its agent has no HTTP server;
- ``ray._private.node``: no Ray Client server; sockets have names that no other node of this machine takes;
- ``ray.serve._private.replica``: replicas' gRPC listens at the node's address, not at ``[::]``;
- ``ray.serve._private.haproxy_templates``: HAProxy's metrics and statistics listen on loopback (and
  a client that leaves costs no core);
- ``ray.dashboard.http_server_agent``: the agents' HTTP server, which is the job API, is not started;
- ``torch.distributed.rendezvous``: the store of a process group listens at the node's address;
- vLLM's NIXL connector: the side channel, which asks nobody who they are, answers only clients with the nodes' token.

A module that is not as expected raises RuntimeError: its process ends rather than listening to everybody.
Imports only the standard library.
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
NODE_NUMBER = "PDLAB_NODE"  # of the nodes side by side on this machine
LOOPBACK = "127.0.0.1"
# With it Ray's HAProxy (2.8.25) takes a whole core from when a client leaves until its answer is there.
ABORT = "    option abortonclose\n"


def install() -> None:
    """Change the modules above, those that are loaded already and those that will be."""
    change_after_import(CHANGES)


def install_in_driver() -> None:
    """The same without the side channel, which is an engine's: a driver has neither its ends nor always the token."""
    change_after_import({name: change for name, change in CHANGES.items() if change is not _side_channel})


def _address() -> str:
    return os.environ.get(LISTEN, LOOPBACK)


def _services(module: Any) -> None:
    _need(module, "resolve_ip_for_localhost")
    _need(module, "start_ray_process")
    module.resolve_ip_for_localhost = lambda host: host
    start = module.start_ray_process

    def start_ray_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        # Ray tells the agent this port, not the raylet, which then waits until the agent has said it: at most 15 s,
        # after which it ends. The agent has imported more than a thousand modules by then: on a busy machine, or not.
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
    # Ray takes the first name that no file has, and two nodes that start side by side take the same one.
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
        # Modules of the agent send with it; Ray takes port -1 for an agent that serves nothing.
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
            # As torch says it: of data parallel ranks vLLM takes another port then.
            torch = importlib.import_module("torch.distributed")
            error_name = errno.errorcode.get(error.errno or 0, "")
            raise torch.DistNetworkError(f"port {kwargs['port']} of {_address()}: {error} ({error_name})") from error
        return store(**{**kwargs, "port": listening.getsockname()[1], "master_listen_fd": listening.detach()})

    module.TCPStore = tcp_store


def _side_channel(module: Any) -> None:
    """vLLM's sockets with CURVE, ZeroMQ's encryption. The listener's key pair comes from the token, so a caller without
    it knows not even the public key, and CURVE hears nobody without that: neither metadata nor garbage passes."""
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
        for option, value in options.items():  # of the sockets to be made: CURVE has to be there before they connect
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
