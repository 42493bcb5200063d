"""The same command across a real link between two hosts made of namespaces: the wire named, its rate measured."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RATE_MBIT = 400
TIMEOUT_S = 600

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("pdlab.cluster.two_hosts") is None, reason="pdlab has no two-hosts rig"
    ),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="hosts of namespaces need root and tc"),
]


def test_spread_crosses_the_wire_and_pack_does_not() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    env = {**os.environ, "PDLAB_CACHE_DIR": str(folder)}
    rig = [sys.executable, "-m", "pdlab", "two-hosts"]

    def measure(strategy: str) -> dict[str, Any]:
        out = folder / f"{strategy}.json"
        script = str(ROOT / "debug/test_nixl_connector_ray.py")
        words = ["--strategy", strategy, "--num-layers", "4", "--block-len-bytes", "65536", "--blocks", "96"]
        done = subprocess.run(
            [*rig, "shell", "--", sys.executable, script, *words, "--random-blocks", "--json", str(out)],
            cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
        )  # fmt: skip
        print(done.stdout)
        assert done.returncode == 0
        run: dict[str, Any] = json.loads(out.read_text())["runs"][0]
        return run

    try:
        subprocess.run([*rig, "up", "--rate", f"{RATE_MBIT}mbit"], cwd=ROOT, env=env, check=True, timeout=TIMEOUT_S)
        spread, pack = measure("spread"), measure("pack")
    finally:
        subprocess.run([*rig, "down"], cwd=ROOT, env=env, check=True, timeout=TIMEOUT_S)
        shutil.rmtree(folder)
    line_gb_per_s = RATE_MBIT / 8e3
    # The shaped link is an upper bound; a busy machine stays below it.
    gb_per_s = spread["sizes"][0]["gb_per_s"]
    assert 0 < gb_per_s < 1.1 * line_gb_per_s
    assert spread["verdict"]["share"] == pytest.approx(gb_per_s / line_gb_per_s, rel=0.05)
    assert "shaped" in spread["verdict"]["of"]
    assert {lane["transport"] for lane in spread["wire"]["lanes"]} == {"tcp"}
    assert 1.0 <= sum(spread["traffic"].values()) < 1.2, "the payload crossed the link once"
    assert {lane["transport"] for lane in pack["wire"]["lanes"]} == {"cma"} and pack["traffic"] == {}
    assert pack["sizes"][0]["gb_per_s"] > 2 * gb_per_s
