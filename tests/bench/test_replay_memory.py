"""Memory of `run_bm.sh` itself while it replays a workload: what it keeps of each request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdlab.traffic.requests import TrafficHead, TrafficRequest, write_requests

TOKENS, BLOCKS, BLOCK = 50, 20, 16
# Fewer leave room in what keeps the latest 20,000 requests.
FEW, MANY = 25_000, 100_000
# What memory may grow by, in bytes of each request.
OF_REQUEST = 60
POLL_S = 0.002

# One level, reported by made-up processes, up to its files.
MEASURE = """
import contextlib, io, json, sys
from pathlib import Path
from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ReplayedPlan
from pdlab.bench.client.replay import id_prefix
from pdlab.bench.forecast import CacheRules
from pdlab.bench.measure import Driver
from pdlab.bench.progress import Progress
from pdlab.bench.target import Target
from pdlab.bench.traffic import read_traffic
from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.engine_cache import EngineCache
from pdlab.core.workload import Level, Replay, Workload
from pdlab.results.schema import Manifest
from pdlab.results.store import Store

folder, count, processes, tokens = Path(sys.argv[1]), *map(int, sys.argv[2:])
plan = folder / "plan.jsonl"
level = Level(load=Replay(), num_requests=count, seed=1)
prefix = id_prefix(level.key.stem, level.seed)
marks = {"queued": 1.0, "scheduled": 2.0, "first": 90.0, "first_byte": 91.0}

def messages(part):
    yield {"event": "prepared"}
    own = range(part, count, processes)
    for at in range(0, len(own), 200):
        records, timelines = [], []
        for n in own[at : at + 200]:
            due_s = 0.01 * n
            replayed = {"id": f"r{n}", "session": f"s{n - n % 10 // 9}", "cached_tokens": n % 7}
            if n % 10 == 9:
                replayed |= {"parent": f"r{n - 1}", "turn": 2}
            records.append({
                "arrival_s": due_s, "first_token_s": due_s + 0.1, "finish_s": due_s + 0.11 + n % 5 / 1e3,
                "input_tokens": 320, "output_tokens": tokens, "itl_s": [k / 1e3 for k in range(1, tokens)],
                "lateness_s": n % 11 / 1e3, "requested": [320, tokens], "replayed": replayed,
            })
            timelines.append({
                "id": f"{prefix}r{n}", "path": "collocated", "role_d": f"replica{n % 10 % 9 % 2}", "t": marks,
                "arrival_s": due_s, "ttft_s": 0.1,
            })
        yield {"event": "ended", "part": {"records": records, "timelines": timelines}}
    yield {"event": "done", "answer": {
        "name": "replay1", "cpu_share": 0.5, "loop_lag_s": 0.001, "clock_step_s": 0.0, "origin_s": 7.0 + part,
        "schedule_s": 7.0, "started_at": "a", "finished_at": "b",
    }}

client = LoadClient(processes)
for part, process in enumerate(client._processes):
    process._ready, process._send = True, lambda line: None
    process._receive = messages(part).__next__
deployment = Deployment(model="m", topology=parse_label("collocated-2xtp1"))
target = Target(base_url="http://h", model_id="m", tokenizer="t", name="x", replicas=("replica0", "replica1"),
                manifest=Manifest(origin="measured", label=deployment.label, deployment=deployment))
driver = Driver(client, target, Workload(lengths=read_traffic(plan)), Progress(io.StringIO()),
                request_timeout_s=9, timeline=True, plan=ReplayedPlan(path=str(plan), groups=count))
driver._watch.beside = lambda stop: contextlib.nullcontext()
cache = EngineCache.of(require_shape("gpt-oss-120b"), 3000, BLOCK, hybrid=True, retention=0)
driver._rules = lambda: CacheRules({"replica0": cache, "replica1": cache}, True)
run, records = driver.measure(level)
run = Store(folder).write(run, records, driver.timelines)
print(json.dumps([run.completed, sum((each.replayed.foreseen_tokens or 0) > 0 for each in records)]))
""".replace("BLOCK", str(BLOCK))


def measured(folder: Path, count: int, processes: int = 1, tokens: int = TOKENS) -> tuple[int, int, int]:
    """Requests that were answered, those with a foreseen hit, and the peak of anonymous memory in bytes."""
    folder.mkdir()
    requests = (
        TrafficRequest(
            id=f"r{n}",
            session=f"s{n - n % 10 // 9}",
            at_s=None if n % 10 == 9 else n / 100,
            parent=f"r{n - 1}" if n % 10 == 9 else None,
            blocks=tuple((f"b{n // 10 if k < 5 else n}-{k}", BLOCK) for k in range(3 if n % 10 == 9 else BLOCKS)),
            out=tokens,
        )
        for n in range(count)
    )
    with (folder / "plan.jsonl").open("w") as stream:
        write_requests(stream, TrafficHead(), requests)
    words = [sys.executable, "-c", MEASURE, str(folder), str(count), str(processes), str(tokens)]
    peak_kb = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            if (now := re.search(r"RssAnon:\s+(\d+)", status.read_text())) is not None:
                peak_kb = max(peak_kb, int(now[1]))
            time.sleep(POLL_S)
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    answered, hits = json.loads(output.splitlines()[-1])
    return answered, hits, 1024 * peak_kb


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_peak_memory_of_four_times_as_many_requests(tmp_path: Path, processes: int) -> None:
    peaks = []
    for count in (FEW, MANY):
        answered, hits, peak = measured(tmp_path / str(count), count, processes)
        assert answered == count and hits > count / 2
        peaks.append(peak)
    grown = (peaks[1] - peaks[0]) / (MANY - FEW)
    print(processes, *(f"{peak / 1e6:.0f} MB" for peak in peaks), f"{grown:.0f} bytes a request")
    assert grown < OF_REQUEST
