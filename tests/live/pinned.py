"""``pinned.py replicas|application``: pin KV blocks on prefill that nobody reads, and print in seconds how long a stop
then takes: of one prefill replica without and one with them, or of the application. A process of its own, for it is a
Ray driver."""

from __future__ import annotations

import json
import sys
import time

from pdlab.cluster import local_nodes
from pdlab.cluster.connection import Cluster, prepare
from pdlab.deploy.application import APP, Application

PREFILL = "Prefill:tiny-gptoss"


def pin() -> None:
    from ray import serve
    from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

    handle = serve.get_deployment_handle(PREFILL, APP).options(stream=True)
    params = {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip
    for number in range(8):  # by power of two choices some reach each replica that takes requests
        request = CompletionRequest(
            model="tiny-gptoss", prompt=[5 + number] * 300, max_tokens=1, kv_transfer_params=params
        )
        answers = list(handle.completions.remote(request, None))
        assert answers[0].kv_transfer_params["remote_block_ids"], "nothing is pinned"


def stop(replica: str) -> float:
    import ray

    actor = ray.get_actor(f"SERVE_REPLICA::{APP}#{PREFILL}#{replica}", namespace="serve")
    began = time.monotonic()
    ray.get(actor.perform_graceful_shutdown.remote(), timeout=120)
    return time.monotonic() - began


def main(what: str) -> list[float]:
    nodes = local_nodes.running()
    assert nodes is not None
    prepare(nodes, {}).result()
    with Cluster(nodes) as cluster:
        app = Application(cluster)
        if what == "application":
            pin()
            began = time.monotonic()
            assert app.delete()
            return [time.monotonic() - began]
        first, second = (r.replica for r in app.state().replicas if r.deployment == PREFILL and r.state == "RUNNING")
        free_s = stop(first)
        pin()  # on the second, for the first takes no requests any more
        return [free_s, stop(second)]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
