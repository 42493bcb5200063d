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


def base_url(port: int) -> str:
    """The URL of a server on this machine."""
    return f"http://127.0.0.1:{port}"


BASE_URL = base_url(PORT)
