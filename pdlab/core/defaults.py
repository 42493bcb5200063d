"""Default values that several commands share."""

from __future__ import annotations

from pathlib import Path

PORT = 8000
MODEL, LOCAL_MODEL = "gpt-oss-120b", "tiny-gptoss"
HARDWARE, LOCAL_HARDWARE = "h100-vllm-0.11", "cpu-vllm-0.29"  # names in configs/catalog/
REQUEST_TIMEOUT_S = 600.0
CONCURRENCIES = (4, 8, 16, 32, 48, 64)  # levels of the published sweeps
RESULTS = Path("bm_results")
LOCAL_NODES = 2


def base_url(port: int, host: str = "127.0.0.1") -> str:
    """The URL at which a client on this machine reaches a server that listens at ``host``."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


BASE_URL = base_url(PORT)
