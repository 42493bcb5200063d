"""What a launcher publishes of a deployment that serves, for tests that launch none."""

from __future__ import annotations

from typing import Any

from pdlab.core.deployment import Deployment
from pdlab.deploy.endpoint import Running
from pdlab.results.schema import Manifest

URL = "http://127.0.0.1:8000"


def running(
    url: str = URL, *, deployment: Deployment | None = None, tokenizer: str = "t", model_id: str = "m", **more: Any
) -> Running:
    """A measured deployment without a canary; ``more``: other fields of its manifest."""
    label = deployment.label if deployment else "x"
    manifest = Manifest(**{"origin": "measured", "label": label, "deployment": deployment, **more})
    return Running(base_url=url, model_id=model_id, tokenizer=tokenizer, manifest=manifest)


def oracle(url: str, tokenizer: str, deployment: Deployment) -> Running:
    """`support.oracle`, which stands for that deployment."""
    made = running(url, deployment=deployment, tokenizer=tokenizer, model_id="oracle", gpus=deployment.gpus)
    pools = {"r0": "collocated" if deployment.mode == "collocated" else "decode"}
    return made.model_copy(update={"metrics_urls": (f"{url}/metrics",), "replicas": ("r0",), "pools": pools})
