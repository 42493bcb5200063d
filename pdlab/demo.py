"""``make demo``: pd-spread, pd-pack and collocated on this machine, a short sweep of each, one plot.

Runs the very commands that a person would type, and prints them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pdlab.catalog import ROOT

# In this order a person sees PD work first; the collocated engines use as many CPUs as the pairs.
LAUNCHES = (
    ["--pd-spread", "--p-num", "1", "--p-tp", "1", "--d-num", "1", "--d-tp", "1"],
    ["--pd-pack", "--p-num", "1", "--p-tp", "1", "--d-num", "1", "--d-tp", "1"],
    ["--collocated", "--num", "2", "--tp", "1"],
)
NAMES = ("pd-spread-p1xtp1-d1xtp1", "pd-pack-p1xtp1-d1xtp1", "collocated-2xtp1")
MEANING = """
What you saw: three real deployments of one model on this machine, with vLLM engines on the CPU and,
in the two PD ones, KV cache moved between engines by NIXL. Both Ray nodes are this machine and the
KV cache takes the same way in pack and spread, so a difference between those two is noise here. Between
collocated and PD the plot shows who serves more tokens per second at the same time per token, and
what PD costs in time to first token. Two small engines on shared cores say nothing about H100s;
the same commands without --local, on H100s, do."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdlab.demo", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the results (default: bm_results/demo-DATE-TIME)")
    parser.add_argument("-c", "--concurrency", default="1,2,4,8,16", help="levels of each sweep (default %(default)s)")
    parser.add_argument("--itl", default="256", help="input tokens (default %(default)s)")
    parser.add_argument("--otl", default="64", help="output tokens (default %(default)s)")
    parser.add_argument("--port", default="8000", help="port to serve on (default %(default)s)")
    args = parser.parse_args(argv)
    out = args.out or ROOT / "bm_results" / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    began = time.monotonic()
    url = f"http://127.0.0.1:{args.port}"
    load = ["-t", "concurrency", "-c", args.concurrency, "--itl", args.itl, "--otl", args.otl]
    python = sys.executable
    try:
        for name, flags in zip(NAMES, LAUNCHES, strict=True):
            launch = [python, "launch_gptoss.py", *flags, "--local", "--detach", "--port", args.port]
            sweep = [python, "-m", "pdlab.bench", "-e", name, *load, "-u", url, "--out", str(out)]
            for command in (launch, sweep):
                code = run(command)
                if code:
                    print(f"the demo ends here: that command ended with code {code}", file=sys.stderr)
                    return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        run([python, "launch_gptoss.py", "--shutdown", "--port", args.port])
    experiments = [str(out / name) for name in NAMES]
    plot = out / "demo.png"
    code = run(
        [python, "viz.py", "--exps", *experiments, "--use-normalized", "--gpus-per-node", "2", "--plot-path", str(plot)]
    )
    print(MEANING)
    print(f"\nplot: {plot}\ntook {(time.monotonic() - began) / 60:.1f} minutes")
    return code


def run(command: list[str]) -> int:
    """Show a command, run it in the project's folder; returns its exit code."""
    shown = ["python" if word == sys.executable else word for word in command]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
