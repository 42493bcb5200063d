"""Stands in for launch_gptoss.py: the oracle is what it "serves". Notes every call in $CALLS.

``--engine-arg code_revision=broken`` makes a start fail as the real one does: one line, exit code 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pdlab.deploy.endpoint import Running, clear_running, save_running
from pdlab.deploy.options import build_parser, deployment_from
from pdlab.results.schema import Manifest


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    url = f"http://127.0.0.1:{args.port}"
    with Path(os.environ["CALLS"]).open("a") as calls:
        calls.write(" ".join(argv) + "\n")
    if args.shutdown:
        clear_running(url)
        return 0
    deployment = deployment_from(args)
    if deployment.engine_kwargs.get("code_revision") == "broken":
        print("[   0.1 s] starting", file=sys.stderr)
        print("error: a replica failed to start: planted", file=sys.stderr)
        return 1
    pool = "collocated" if deployment.mode == "collocated" else "decode"
    manifest = Manifest(origin="measured", label=deployment.label, deployment=deployment, gpus=deployment.gpus)
    running = Running(
        base_url=url,
        model_id="oracle",
        tokenizer=os.environ["TOKENIZER"],
        manifest=manifest,
        metrics_urls=(f"{url}/metrics",),
        replicas=("r0",),
        pools={"r0": pool},
    )
    save_running(running)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
