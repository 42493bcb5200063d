"""Modules are changed right after their import, or refused when they are not as expected."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zmq
from support.zmq_callers import GARBAGE, handshake, in_thread, stranger, throw

from pdlab.cluster import loopback


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pdlab_fake").mkdir()
    (tmp_path / "pdlab_fake" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path / "pdlab_fake"


def mark(module: Any) -> None:
    module.host = f"{module.host}, changed"


def test_before_and_after_the_import(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("early", "late", "other"):
        (package / f"{name}.py").write_text("host = 'as written'\n")
    import pdlab_fake.early as early

    monkeypatch.setattr(loopback, "CHANGES", {"pdlab_fake.early": mark, "pdlab_fake.late": mark})
    loopback.install()
    import pdlab_fake.late as late
    import pdlab_fake.other as other

    assert (early.host, late.host, other.host) == ("as written, changed", "as written, changed", "as written")


def test_another_version_ends_the_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "replica.py").write_text("nothing = 'of what is expected'\n")
    monkeypatch.setattr(loopback, "CHANGES", {"pdlab_fake.replica": loopback._replica})
    loopback.install()
    with pytest.raises(RuntimeError, match=r"pdlab_fake\.replica has no add_port_to_grpc_server"):
        __import__("pdlab_fake.replica")


@pytest.mark.parametrize("metrics", ["bind :{{ config.metrics_port }}", "bind 10.0.0.1:{{ config.metrics_port }}"])
def test_haproxy(metrics: str) -> None:
    module: Any = ModuleType("templates")
    defaults = "defaults\n    option httplog\n    option abortonclose\n    option splice-request\n"
    rest = f"frontend\n    {metrics}\nlisten stats\n  bind *:{{{{ config.stats_port }}}}\n"
    module.HAPROXY_CONFIG_TEMPLATE = defaults + rest
    if "10." in metrics:
        with pytest.raises(RuntimeError, match="expected one line"):
            loopback._haproxy(module)
        return
    loopback._haproxy(module)
    binds = [line.split()[1] for line in module.HAPROXY_CONFIG_TEMPLATE.splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:{{", "127.0.0.1:{{"]
    options = [line.split()[1] for line in module.HAPROXY_CONFIG_TEMPLATE.splitlines() if "option " in line]
    assert options == ["httplog", "splice-request"], "a client that leaves would take a core"


def test_only_the_raylets_command_disables_its_agents_server() -> None:
    started: list[tuple[Any, ...]] = []
    module: Any = SimpleNamespace(
        resolve_ip_for_localhost=None, start_ray_process=lambda *args, **kwargs: started.append((*args, kwargs))
    )
    loopback._services(module)
    module.start_ray_process(["raylet", "--a=1"], "raylet", fate_share=True)
    module.start_ray_process(["gcs_server"], "gcs_server", fate_share=True)
    assert started == [
        (["raylet", "--a=1", "--dashboard_agent_listen_port=-1"], "raylet", {"fate_share": True}),
        (["gcs_server"], "gcs_server", {"fate_share": True}),
    ]
    assert module.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"


def test_replicas_listen_at_their_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []
    module: Any = SimpleNamespace(add_port_to_grpc_server=lambda _, address: hosts.append(address))
    loopback._replica(module)
    module.add_port_to_grpc_server(None, "[::]:0")
    monkeypatch.setenv(loopback.LISTEN, "10.77.0.2")
    module.add_port_to_grpc_server(None, "[::]:0")
    assert hosts == ["127.0.0.1:0", "10.77.0.2:0"]


def test_the_store_of_a_process_group() -> None:
    made: list[dict[str, Any]] = []
    module: Any = SimpleNamespace(TCPStore=lambda **kwargs: made.append(kwargs))
    loopback._rendezvous(module)
    module.TCPStore(host_name="h", port=0, is_master=True)
    module.TCPStore(host_name="h", port=7, is_master=False)
    with socket.socket(fileno=made[0]["master_listen_fd"]) as listening:
        assert listening.getsockname() == ("127.0.0.1", made[0]["port"])
    assert made[1] == {"host_name": "h", "port": 7, "is_master": False}


def test_a_port_that_is_taken_is_torchs_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class DistNetworkError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(DistNetworkError=DistNetworkError))
    module: Any = SimpleNamespace(TCPStore=None)
    loopback._rendezvous(module)
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(DistNetworkError, match="EADDRINUSE"):
        module.TCPStore(host_name="h", port=holder.getsockname()[1], is_master=True)


def make_zmq_socket(ctx: Any, path: str, socket_type: Any, bind: bool) -> Any:
    """As vLLM's."""
    made = ctx.socket(socket_type)
    made.linger = 0
    getattr(made, "bind" if bind else "connect")(path)
    return made


def side_channel(token: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The changed module in a process of nodes with that token."""
    (folder / "ray-token").write_text(token)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "ray-token"))
    module: Any = SimpleNamespace(__name__="utils", zmq=zmq, zmq_ctx=None, make_zmq_socket=make_zmq_socket)
    loopback._side_channel(module)
    return module


def answer_all(stop: threading.Event, listening: Any) -> None:
    while not stop.is_set():
        if listening.poll(50):
            identity, _, message = listening.recv_multipart()
            listening.send_multipart((identity, b"", b"metadata for " + message))


def test_the_side_channel_answers_who_has_the_nodes_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = side_channel("a" * 64, tmp_path, monkeypatch)
    decode = side_channel("a" * 64 + "\n", tmp_path, monkeypatch)
    others = side_channel("b" * 64, tmp_path, monkeypatch)
    anywhere = "tcp://127.0.0.1:0"
    with zmq.Context() as context, prefill.make_zmq_socket(context, anywhere, zmq.ROUTER, True) as listening:
        endpoint = listening.getsockopt_string(zmq.LAST_ENDPOINT)
        with in_thread(answer_all, listening):
            for data in GARBAGE:
                assert b"metadata" not in throw(endpoint, data)
            public, own = zmq.curve_keypair()
            guessed, _ = zmq.curve_keypair()
            keys = {"CURVE_SERVERKEY": guessed, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": own}
            assert stranger(endpoint, b"x").startswith("HANDSHAKE_FAILED")
            assert stranger(endpoint, b"x", **keys).startswith("HANDSHAKE_FAILED")
            with zmq.Context() as another, others.make_zmq_socket(another, endpoint, zmq.REQ, False) as socket:
                socket.send(b"rank 0")
                with socket.get_monitor_socket() as monitor:
                    assert handshake(monitor).startswith("HANDSHAKE_FAILED")
                    socket.disable_monitor()
            with zmq.Context() as another, decode.make_zmq_socket(another, endpoint, zmq.REQ, False) as socket:
                socket.send(b"rank 0")
                assert socket.poll(60_000) and socket.recv() == b"metadata for rank 0"


def test_no_side_channel_without_curve_or_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(
        __name__="utils", zmq=SimpleNamespace(has=lambda _: False), zmq_ctx=None, make_zmq_socket=make_zmq_socket
    )
    with pytest.raises(RuntimeError, match="without CURVE"):
        loopback._side_channel(module)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "gone"))
    module.zmq = zmq
    with pytest.raises(FileNotFoundError, match="gone"):
        loopback._side_channel(module)
    assert module.make_zmq_socket is make_zmq_socket


def test_nodes_side_by_side_have_sockets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def ray_node() -> Any:
        class Node:
            def start_ray_client_server(self) -> None:
                raise AssertionError("it listens to everybody")

            def _make_inc_temp(self, suffix: str = "", prefix: str = "", directory_name: str | None = None) -> str:
                return f"{directory_name}/{prefix}{suffix}"

        return SimpleNamespace(Node=Node)

    names = []
    for number in ("2", "3", None):
        if number is None:
            monkeypatch.delenv(loopback.NODE_NUMBER)
        else:
            monkeypatch.setenv(loopback.NODE_NUMBER, number)
        module = ray_node()
        loopback._node(module)
        one = module.Node()
        one.start_ray_client_server()
        names.append(one._make_inc_temp(prefix="raylet", directory_name="/tmp/s/sockets"))
        assert (
            one._make_inc_temp(suffix=".out", prefix="raylet", directory_name="/tmp/s/logs") == "/tmp/s/logs/raylet.out"
        )
    assert names == ["/tmp/s/sockets/raylet-2", "/tmp/s/sockets/raylet-3", "/tmp/s/sockets/raylet"]
