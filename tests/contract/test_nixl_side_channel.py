"""vLLM's own listener of the NIXL side channel, with the sockets that pdlab.cluster.loopback gives it."""

from __future__ import annotations

import inspect
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq
from contract.conftest import quietly
from support.zmq_callers import GARBAGE, in_thread, stranger, throw

from pdlab.cluster import loopback
from pdlab.cluster.local_nodes import hold_port
from pdlab.guard.lease_queries import CLAIM, Peer, SideChannelClient

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
METADATA = b"where KV memory lies, and the keys to it"


@pytest.fixture(scope="module")
def utils() -> ModuleType:
    quietly(f"{NIXL}.base_scheduler")
    quietly(f"{NIXL}.base_worker")
    return quietly(f"{NIXL}.utils")


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray-token").write_text("a" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray-token"))


def listen(stop: threading.Event, port: int, ready: threading.Event) -> None:
    scheduler = quietly(f"{NIXL}.base_scheduler").NixlBaseConnectorScheduler
    scheduler._nixl_handshake_listener({(0, 1): METADATA}, ready, stop, "127.0.0.1", port)


def question(rank: int) -> bytes:
    request: bytes = quietly("msgspec.msgpack").encode((quietly(f"{NIXL}.base_scheduler").GET_META_MSG, 0, rank))
    return request


def as_decode(utils: Any, endpoint: str) -> list[bytes]:
    """What a decode rank reads, asked as `NixlBaseConnectorWorker._nixl_handshake` asks."""
    with utils.zmq_ctx(zmq.REQ, endpoint) as socket:
        socket.send(question(1))
        assert socket.poll(60_000), "a decode rank gets no answer"
        answer: list[bytes] = socket.recv_multipart()
        return answer


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("guarded", [True, False], ids=["on local nodes", "as vLLM has it"])
def test_vllms_listener_answers_decode_ranks_alone(utils: Any, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "make_zmq_socket", utils.make_zmq_socket)
    if guarded:
        loopback.CHANGES[utils.__name__](utils)
    held, port = hold_port()
    ready, endpoint = threading.Event(), f"tcp://127.0.0.1:{port}"
    with held, in_thread(listen, port, ready):
        assert ready.wait(60)
        if not guarded:
            assert stranger(endpoint, question(1)) == "answered", "this vLLM asks who calls: the change is not needed"
            return
        assert as_decode(utils, endpoint)[0] == METADATA
        assert stranger(endpoint, question(1)).startswith("HANDSHAKE_FAILED")
        assert stranger(endpoint, b"what no listener of vLLM's survives").startswith("HANDSHAKE_FAILED")
        for data in GARBAGE:
            assert METADATA not in throw(endpoint, data)
        kv_guard = (
            SideChannelClient()
        )  # it asks where nobody listens: this listener, without the guard, would end of it
        assert kv_guard.send(1, CLAIM, Peer("127.0.0.1", 9, "engine"), "request", "reader")
        (socket,) = kv_guard._sockets.values()
        assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE, "the KV guard's questions have keys too"
        kv_guard.close()
        assert as_decode(utils, endpoint)[0] == METADATA


@pytest.mark.usefixtures("token")
def test_its_sockets_cannot_do_without_encryption(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of pyzmq keep quiet about a socket option that fails."""
    monkeypatch.setattr(utils, "make_zmq_socket", utils.make_zmq_socket)
    loopback.CHANGES[utils.__name__](utils)
    for kind in (zmq.ROUTER, zmq.REQ):
        with utils.zmq_ctx(kind, f"tcp://127.0.0.1:{0 if kind == zmq.ROUTER else 9}") as made:
            assert made.getsockopt(zmq.MECHANISM) == zmq.CURVE
            assert bool(made.getsockopt(zmq.CURVE_SERVER)) is (kind == zmq.ROUTER)


def test_the_connector_has_no_other_socket(utils: Any) -> None:
    """Both ends open theirs with `zmq_ctx`, which opens it with what is changed."""
    ends = [quietly(f"{NIXL}.{name}") for name in ("base_scheduler", "base_worker")]
    assert all(end.zmq_ctx is utils.zmq_ctx for end in ends)
    assert "make_zmq_socket(" in inspect.getsource(utils.zmq_ctx.__wrapped__)
    folder = Path(inspect.getfile(utils)).parent
    opened = re.compile(
        r"\bzmq\.(?:asyncio\.)?Context\(|make_zmq_socket\(|zmq_socket_ctx\(|\bsocket\.socket\(|\.bind\("
    )
    assert [path.name for path in sorted(folder.glob("*.py")) if opened.search(path.read_text())] == ["utils.py"]


def test_it_is_changed_by_its_name(utils: Any) -> None:
    assert loopback.CHANGES[utils.__name__] is loopback._side_channel
