"""Modules are changed right after their import, or refused when they are not as expected."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
    module.HAPROXY_CONFIG_TEMPLATE = f"frontend\n    {metrics}\nlisten stats\n  bind *:{{{{ config.stats_port }}}}\n"
    if "10." in metrics:
        with pytest.raises(RuntimeError, match="expected one line"):
            loopback._haproxy(module)
        return
    loopback._haproxy(module)
    binds = [line.split()[1] for line in module.HAPROXY_CONFIG_TEMPLATE.splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:{{", "127.0.0.1:{{"]


def test_the_raylet_alone_is_told_that_its_agent_serves_nothing() -> None:
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
    asked: list[str] = []
    module: Any = SimpleNamespace(add_port_to_grpc_server=lambda _, address: asked.append(address))
    loopback._replica(module)
    module.add_port_to_grpc_server(None, "[::]:0")
    monkeypatch.setenv(loopback.LISTEN, "10.77.0.2")
    module.add_port_to_grpc_server(None, "[::]:0")
    assert asked == ["127.0.0.1:0", "10.77.0.2:0"]


def test_the_store_of_a_process_group() -> None:
    made: list[dict[str, Any]] = []
    module: Any = SimpleNamespace(TCPStore=lambda **kwargs: made.append(kwargs))
    loopback._rendezvous(module)
    module.TCPStore(host_name="h", port=0, is_master=True)
    module.TCPStore(host_name="h", port=7, is_master=False)
    with socket.socket(fileno=made[0]["master_listen_fd"]) as listening:
        assert listening.getsockname() == ("127.0.0.1", made[0]["port"])
    assert made[1] == {"host_name": "h", "port": 7, "is_master": False}
