"""Default values that several commands share."""

from __future__ import annotations

from pathlib import Path

PORT = 8000
BASE_URL = f"http://127.0.0.1:{PORT}"
MODEL, LOCAL_MODEL = "gpt-oss-120b", "tiny-gptoss"
HARDWARE, LOCAL_HARDWARE = "h100-vllm-0.11", "cpu-vllm-0.29"  # names in configs/catalog/
REQUEST_TIMEOUT_S = 600.0
RESULTS = Path("bm_results")
LOCAL_NODES = 2
