#!/usr/bin/env python3
"""What the guard costs on the serving path: the same deployment with it and without it, in turn, in one run.

Without it: Ray Serve LLM's own builder, called by a launcher whose `pdlab.deploy.serving.builders` is replaced. One
client for all (vLLM's own load generator), PD with direct streaming, the tiny model, no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from serving_path import Figures, measure  # noqa: E402

from pdlab.bench.client.processes import LoadClient  # noqa: E402
from pdlab.cluster.local_nodes import hold_port  # noqa: E402

UNGUARDED = """
import importlib, sys
import launch_gptoss
import pdlab.deploy.serving.builders as builders
import pdlab.deploy.verify
from pdlab.deploy.exports import to_public
from pdlab.deploy.serve_config import PD_BUILDER, ServeApp

def plain(args):
    app, _ = to_public(ServeApp(import_path=PD_BUILDER, args=args))
    module, _, name = app.import_path.partition(":")
    return getattr(importlib.import_module(module), name)(app.args)

builders.build_pd_openai_app = plain
pdlab.deploy.verify._check_shapes = lambda *_: None  # Ray's own answers to a list of prompts are wrong
sys.exit(launch_gptoss.main(sys.argv[1:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--concurrency", type=int, default=16, help="default %(default)s")
    parser.add_argument(
        "--prompts", type=int, default=20, help="requests per unit of concurrency (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="launches of each (default %(default)s)")
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("--otl", type=int, default=64, help="output tokens (default %(default)s)")
    parser.add_argument("--lengths", default="uniform:0.8-1.0", help="of single requests (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="of the level, per launch (default %(default)s)")
    args = parser.parse_args()
    held, free = hold_port()  # nobody else is given it meanwhile
    port = str(free)
    flags = ["--pd-spread", "--local", "--detach", "--port", port]
    launchers = {"with": ["launch_gptoss.py"], "without": ["-c", UNGUARDED]}
    figures_by_launcher: dict[str, list[Figures]] = {"without": [], "with": []}
    try:
        for number in range(args.rounds):
            order = list(figures_by_launcher) if number % 2 == 0 else list(figures_by_launcher)[::-1]
            for name in order:
                subprocess.run([sys.executable, *launchers[name], *flags], check=True, cwd=ROOT, capture_output=True)
                with LoadClient() as client:
                    (figures,) = measure(client, {"base_url": f"http://127.0.0.1:{port}"}, [args.concurrency], args)
                figures_by_launcher[name].append(figures)
                line = ", ".join(f"{key} {value:.1f}" for key, value in figures._asdict().items())
                print(f"{name:8} {line}", flush=True)
    finally:
        stop = [sys.executable, "launch_gptoss.py", "--port", port, "--shutdown"]
        subprocess.run(stop, check=True, cwd=ROOT, capture_output=True)
        held.close()
    ratios = [
        statistics.fmean(getattr(f, name) for f in figures_by_launcher["with"])
        / statistics.fmean(getattr(f, name) for f in figures_by_launcher["without"])
        for name in Figures._fields
    ]
    print(
        "with / without: "
        + ", ".join(f"{name} {ratio:.3f}" for name, ratio in zip(Figures._fields, ratios, strict=True))
    )


if __name__ == "__main__":
    main()
