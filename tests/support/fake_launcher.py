"""Stands in for launch_gptoss.py: the oracle is what it "serves". Notes every call in $CALLS.

The command line that a request names must ask for that request.

``--engine-arg code_revision=broken`` makes a start fail as the real one does: one line, exit code 1; so does
``max_num_seqs=3``. With any other ``max_num_seqs`` the oracle answers as many times as fast.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import urllib.request
from pathlib import Path

from support import launched

from pdlab.core.errors import DeployError
from pdlab.core.exit_code import exit_code
from pdlab.core.settings import parse
from pdlab.deploy.endpoint import clear_running, save_running
from pdlab.deploy.options import FROM_STDIN, LaunchSettings, request_from, request_from_json


def main(argv: list[str]) -> int:
    args = parse(LaunchSettings, argv)
    request = request_from_json(sys.stdin.read()) if args.request_from_stdin else None
    url = f"http://127.0.0.1:{request.port if request else args.port}"
    with Path(os.environ["CALLS"]).open("a") as calls:
        calls.write((request.command[0] if request else " ".join(argv)) + "\n")
    if args.shutdown:
        clear_running(url)
        return 0
    assert request and argv == [FROM_STDIN]
    words = shlex.split(request.command[0])[2:]
    assert request_from(parse(LaunchSettings, words), words) == request
    deployment = request.deployment
    seqs = deployment.engine_kwargs.get("max_num_seqs")
    if seqs:
        config = json.dumps({"": {"ttft_s": 0.2 / seqs, "tpot_s": 0.02 / seqs}}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{url}/oracle/config", data=config), timeout=10).close()
    if deployment.engine_kwargs.get("code_revision") == "broken" or seqs == 3:
        print("[   0.1 s] starting", file=sys.stderr)
        raise DeployError("a replica failed to start: planted")
    save_running(launched.oracle(url, os.environ["TOKENIZER"], deployment))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
