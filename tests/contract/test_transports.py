"""The names of backends and transports are those of the installed NIXL and of the UCX inside it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from pdlab.core.transports import BACKENDS, EXTRA_BACKENDS, STORAGE_BACKENDS, TRANSPORTS, no_backend, no_transport


def site_packages() -> Path:
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        pytest.skip("NIXL is not installed here")
    return Path(spec.origin).parents[1]


def test_backends_are_the_plugins_of_the_installed_nixl() -> None:
    plugins = {
        path.stem.removeprefix("libplugin_") for path in site_packages().glob(".nixl_*.libs/plugins/libplugin_*.so")
    }
    assert {"UCX", "LIBFABRIC"} <= plugins
    assert plugins - {*BACKENDS, *STORAGE_BACKENDS} == set()
    assert plugins & set(EXTRA_BACKENDS) == set()


def test_transports_are_those_of_the_installed_ucx() -> None:
    libraries = [*site_packages().glob("nixl_*.libs/libucp-*.so*")]
    assert libraries
    for library in libraries:
        words = {word.decode() for word in re.findall(rb"[a-z][a-z0-9_]+(?::aux)?(?=\0)", library.read_bytes())}
        # The names that its help text explains, and those that its table of aliases leads to.
        text = re.search(rb"list of transports to use\.[^\0]*", library.read_bytes())
        assert text is not None
        explained = re.findall(rb"\n - ([a-z_]+(?:/[a-z_]+)?) +: ", text[0])
        named = {name for group in explained for name in group.decode().split("/")}
        assert len(named) > 10 and named <= TRANSPORTS
        aliases = {word.removesuffix(":aux") for word in words} & {"rc_verbs", "ud_mlx5", "dc_mlx5", "srd", "gga_mlx5"}
        assert len(aliases) == 5 and aliases <= TRANSPORTS


@pytest.mark.parametrize("text", ["tcp", "all", "^tcp", "^cuda_ipc,rc", "self,sm,tcp", r"\rc_verbs", "ud_verbs:aux,rc"])
def test_what_ucx_takes(text: str) -> None:
    assert no_transport(text) is None


@pytest.mark.parametrize("text", ["", "banana", "tcp,", "TCP", "tcp;rc", "rc:aux2"])
def test_what_it_does_not(text: str) -> None:
    assert no_transport(text)


def test_backends_by_name() -> None:
    assert no_backend(["UCX", "LIBFABRIC"]) is None and no_backend(["MOONCAKE"]) is None
    assert "for storage" in str(no_backend(["POSIX"])) and "did you mean UCX" in str(no_backend(["UCXX"]))
