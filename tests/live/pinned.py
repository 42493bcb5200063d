"""``pinned.py nothing|replica|application``: pin KV blocks on a prefill engine (but for ``nothing``), and print how
long it takes until a replica, or the application, has stopped. Run in a process of its own, which is a Ray driver."""

from __future__ import annotations

import json
import sys
import time

from pdlab.cluster import local_nodes
from pdlab.cluster.connection import Cluster, prepare
from pdlab.deploy.application import APP, Application

PREFILL = "Prefill:tiny-gptoss"


def main(what: str) -> float:
    nodes = local_nodes.running()
    assert nodes is not None
    prepare(nodes, {}).result()
    with Cluster(nodes) as cluster:
        import ray
        from ray import serve
        from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

        app = Application(cluster)
        handle = serve.get_deployment_handle(PREFILL, APP).options(stream=True)
        params = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        for number in range(0 if what == "nothing" else 8):  # by power of two choices some reach each replica
            request = CompletionRequest(
                model="tiny-gptoss", prompt=[5 + number] * 300, max_tokens=1, kv_transfer_params=params
            )
            answers = list(handle.completions.remote(request, None))
            assert answers[0].kv_transfer_params["remote_block_ids"], "nothing is pinned"
        began = time.monotonic()
        if what == "application":
            assert app.delete()
            return time.monotonic() - began
        replica = next(r for r in app.state().replicas if r.deployment == PREFILL and r.state == "RUNNING")
        actor = ray.get_actor(f"SERVE_REPLICA::{APP}#{PREFILL}#{replica.replica}", namespace="serve")
        ray.get(actor.perform_graceful_shutdown.remote(), timeout=120)
        return time.monotonic() - began


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
