"""Engines of one node never take each other's port, whatever ranks Ray Serve gives them."""

from __future__ import annotations

import contextlib
import importlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import nixl_port
from pdlab.deploy.serving.nixl_port import PORT, choose, hold


@pytest.fixture
def base() -> int:
    """A free port before another one: beside many programs the next one is often taken."""
    for _ in range(50):
        with socket.socket() as probe, socket.socket() as after:
            probe.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError):
                after.bind(("127.0.0.1", probe.getsockname()[1] + 1))
                return int(probe.getsockname()[1])
    raise AssertionError("no two ports in a row are free")


def listening(port: int) -> socket.socket:
    """As ZeroMQ binds."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def test_two_never_hold_one_port(base: int) -> None:
    first = hold("127.0.0.1", [base, base + 1])
    second = hold("127.0.0.1", [base, base + 1])
    assert first is not None and second is not None
    with first, second:
        assert [first.getsockname()[1], second.getsockname()[1]] == [base, base + 1]
        assert hold("127.0.0.1", [base, base + 1]) is None


def test_the_engine_listens_at_the_port_that_is_held(base: int) -> None:
    held = hold("127.0.0.1", [base])
    assert held is not None
    with held, listening(base), socket.create_connection(("127.0.0.1", base), 10):
        assert hold("127.0.0.1", [base]) is None
    again = hold("127.0.0.1", [base, base + 1])
    assert again is not None, "it is free when the replica has ended"
    again.close()


@pytest.fixture
def ray_at(monkeypatch: pytest.MonkeyPatch, base: int) -> Any:
    monkeypatch.setenv(PORT, "as it was")  # so that what is set meanwhile goes again
    monkeypatch.delenv(PORT)
    ranks = {"rank": 0}
    backend = SimpleNamespace(NixlConnectorBackend=lambda config: SimpleNamespace(
        _compute_port_offset=lambda: 2 * ranks["rank"]
    ))  # fmt: skip
    modules = {
        "ray.llm._internal.serve.engines.vllm.kv_transfer.nixl": backend,
        "ray": SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")),
    }
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: modules.get(name) or real(name, *rest))

    def config(rank: int, **kwargs: Any) -> Any:
        ranks["rank"] = rank
        return SimpleNamespace(
            engine_kwargs=kwargs, experimental_configs={"NIXL_SIDE_CHANNEL_PORT_BASE": base},
            get_engine_config=lambda: SimpleNamespace(num_devices=2),
        )  # fmt: skip

    return config


def test_a_rank_whose_port_a_survivor_has_takes_another_slot(
    ray_at: Any, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(base + 2):  # the survivor, which had rank 1 when it started
        held = choose(ray_at(1))
        assert held is not None
        with held:
            assert nixl_port.os.environ[PORT] == str(base), "the slot of the one that died"
        monkeypatch.delenv(PORT)
        fresh = choose(ray_at(2))
        assert fresh is not None
        with fresh:
            assert nixl_port.os.environ[PORT] == str(base + 4), "its own, where that is free"


def test_what_is_chosen_already_stays(ray_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(ray_at(0, data_parallel_rank=3)) is None and PORT not in nixl_port.os.environ
    monkeypatch.setenv(PORT, "5")
    assert choose(ray_at(0)) is None and nixl_port.os.environ[PORT] == "5"
