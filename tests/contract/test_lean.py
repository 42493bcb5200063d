"""What pdlab.cluster.lean stands on in Ray: the router then imports neither torch nor vLLM nor pandas."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from pdlab.cluster import lean
lean.install()
import ray.serve, ray.serve._private.controller, ray.serve._private.haproxy
import ray.llm._internal.serve.core.ingress.router
print("LOADED", [name for name in ("pandas", "torch", "vllm") if sys.modules.get(name)])
from ray.llm._internal.common.utils import download_utils
print("THEN", download_utils.torch.hub.__name__, "torch" in sys.modules)
"""


def test_controller_proxy_and_router_import_none_of_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["LOADED []", "THEN torch.hub True"]
