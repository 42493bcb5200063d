"""When vLLM keeps no more than the window of layers with sliding attention: its hybrid KV cache manager. Pure.

Without a KV connector it is on since 0.12. Beside one it is on since 0.23, if the connector supports it. Source:
``VllmConfig`` of vLLM 0.12, 0.18, 0.20 to 0.23 and 0.29, which tests/contract/test_hybrid_kv.py asks. Without a
connector the source of 0.11 has it too. But the KV pools of its published runs, also of collocated ones, are those
without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdlab.core.deployment import Deployment
from pdlab.core.text import version_numbers
from pdlab.core.version import STACK

TURNED_OFF = "disable_hybrid_kv_cache_manager"  # the engine argument
SINCE, BESIDE_CONNECTORS_SINCE = (0, 12), (0, 23)  # versions of vLLM
SUPPORTING = frozenset(
    {
        *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MooncakeStoreConnector"),
        *("OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector", "ExampleHiddenStatesConnector"),
    }
)
OFFLOADING = "OffloadingConnector"  # of --kv-offload-gb
SEVERAL = "MultiConnector"  # supports it if all of its connectors do


def is_hybrid(arguments: Mapping[str, Any], connectors: Sequence[str] = (), version: str = STACK["vllm"]) -> bool:
    """Whether engines with these arguments keep windows alone. ``connectors``: KV connectors that the arguments do not
    name. ``version``: of vLLM; that of pdlab's stack if it is no number."""
    if arguments.get(TURNED_OFF):
        return False
    beside = {*connectors, *_connectors_in(arguments.get("kv_transfer_config"))}
    numbers = version_numbers(version) or version_numbers(STACK["vllm"])  # "current"
    assert numbers is not None
    return numbers >= (BESIDE_CONNECTORS_SINCE if beside else SINCE) and beside <= SUPPORTING


def _connectors_in(config: Mapping[str, Any] | None) -> Iterator[str]:
    """The connectors that a ``kv_transfer_config`` names, those inside of a `SEVERAL` in its place."""
    if not config:
        return
    if config.get("kv_connector") != SEVERAL:
        yield str(config.get("kv_connector"))
        return
    for each in (config.get("kv_connector_extra_config") or {}).get("connectors") or ():
        yield from _connectors_in(each)


def connectors_of(deployment: Deployment) -> tuple[str, ...]:
    """The KV connectors of a deployment's engines."""
    transport = deployment.transport
    names: list[str] = [transport.connector] if transport is not None else []
    if deployment.kv_offload_gb is not None:
        names.append(OFFLOADING)
    return (*names, *(str(each["kv_connector"]) for each in deployment.kv_connectors))
