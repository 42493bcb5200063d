"""On PYTHONPATH, this gives a load generator that is being started to the process of `warm_client.template`, which has
imported vLLM already and forks: the same process in all that can be observed, without ten seconds of imports."""

import os
import sys

if sys.orig_argv[-2:] == ["-m", "pdlab.bench.client.worker"] and "PDLAB_TEST_WARM_CLIENT" in os.environ:
    import json
    import signal
    import socket
    from pathlib import Path

    with socket.socket(socket.AF_UNIX) as template:
        template.connect(os.environ["PDLAB_TEST_WARM_CLIENT"])
        start = json.dumps({"env": dict(os.environ), "cwd": str(Path.cwd())}).encode()
        socket.send_fds(template, [len(start).to_bytes(4, "big")], [0, 1, 2])
        template.sendall(start)
        for fd in (0, 1, 2):
            os.close(fd)
        answer = template.recv(4)
    code = int.from_bytes(answer, "big", signed=True) if answer else 1
    if code < 0:
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)
