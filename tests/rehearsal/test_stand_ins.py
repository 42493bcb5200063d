"""In a process with stand-ins nothing of vLLM or torch is imported, and Ray Serve LLM is none the wiser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, pickle, sys
from pdlab.rehearsal import stand_ins
stand_ins.at_start()
stand_ins.at_start()  # a second time changes nothing
out = {"finders": sum(type(finder).__name__ == "_StandIns" for finder in sys.meta_path)}
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm import envs
import os
request = CompletionRequest(model="m", prompt="p", min_p=0.5)
out["request"] = [request.n, request.max_tokens, request.min_p, request.kv_transfer_params]
back = pickle.loads(pickle.dumps(request))
out["pickled"] = back == request
out["arguments"] = [AsyncEngineArgs(tensor_parallel_size=4).tensor_parallel_size]
os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "20003"
out["envs"] = [envs.is_set("VLLM_NIXL_SIDE_CHANNEL_PORT"), envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
               envs.is_set("VLLM_NIXL_SIDE_CHANNEL_HOST"), envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
               sorted(envs.environment_variables)]
missing = []
for name in ("vllm.v1.engine.async_llm", "torch", "transformers", "vllm.entrypoints.openai.api_server"):
    try:
        __import__(name)
    except ImportError:
        missing.append(name)
out["missing"] = missing
try:
    envs.VLLM_PORT
except AttributeError as error:
    out["other"] = str(error)
print(json.dumps(out))
"""


def test_stand_ins_are_there_and_nothing_else_is() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    out = json.loads(done.stdout)
    assert out == {
        "finders": 1,
        "request": [1, 16, 0.5, None],
        "pickled": True,
        "arguments": [4],
        "envs": [True, 20003, False, None, ["VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"]],
        "missing": ["vllm.v1.engine.async_llm", "torch", "transformers", "vllm.entrypoints.openai.api_server"],
        "other": "simulated engines have no VLLM_PORT",
    }
