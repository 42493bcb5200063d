"""AIPerf as a second witness: it and pdlab's own load generator send one workload to one engine, in turn, and find the
same TTFT and the same tokens/s. AIPerf's figures are those of its own table. It is installed as for
`tests.live.test_clients`."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.live.conftest import BUSY_MACHINE, TIMEOUT_S, Stack
from tests.live.test_clients import HUB_NAME, hub, on_path

pytestmark = pytest.mark.long

MODEL, ROUNDS = "tiny-llama", 3
# AIPerf refuses follow-ups on completions.
WORKLOADS = {
    "completions": "random: {rate_rps: 3, requests: 60, workload: {input_tokens: 600, output_tokens: 24, "
    "lengths: 'uniform:0.5-1.0'}}",
    "chat": "conversations: {rate_rps: 0.8, sessions: 16, turns: 4, user_tokens: 200 lognormal:0.5, answer_tokens: 24, "
    "think_s: 1, system_tokens: 200}",
}
# By how much two senders may differ, and how much pdlab's own repeats scatter on a machine that can tell it.
FLOOR, TOO_BUSY = 0.15, 0.5
SAME_TOKENS = 0.02  # answers of chat are encoded anew
Figures = dict[str, float]


@pytest.fixture(scope="module")
def tokenizer(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, which is served."""
    if on_path("aiperf") is None:
        pytest.skip("aiperf is neither on PATH nor under PDLAB_CLIENTS")
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    done = stack.launch("--collocated", "--model", MODEL, "--engine-arg", f"chat_template={template}")
    assert done.code == 0, done.text
    (folder,) = {path.parent for path in (stack.folder / "cache").rglob("tokenizer_config.json")}
    return folder


def by_pdlab(stack: Stack, plan: Path, out: Path) -> Figures:
    done = stack.run("-m", "pdlab", "bench", "-u", stack.url, "--workload", str(plan), "--out", str(out))
    assert done.code in (0, 3), "3 where a busy machine makes the load generator late"
    run = json.loads((out / stack.running().manifest.label / "replay1.json").read_text())
    assert not run["failed"] and set(run["validity"]["failed_gates"]) <= BUSY_MACHINE, run["validity"]
    whole = run["whole"]
    return {
        "ttft_p50_ms": 1000 * whole["ttft"]["percentiles_s"]["p50"],
        "output_tokens_per_s": whole["output_tokens_per_s"],
        "input_tokens": whole["input_tokens_per_s"] * whole["duration_s"] / whole["completed"],
        "requests": whole["completed"],
    }


def by_aiperf(stack: Stack, plan: Path, out: Path, endpoint: str, tokenizer: Path) -> Figures:
    out.mkdir()
    trace, program = out / "trace.jsonl", on_path("aiperf")
    assert program is not None
    words = ("-m", "pdlab", "workload", str(plan), "--export", "aiperf", "--tokenizer", str(tokenizer))
    assert stack.run(*words, "-o", str(trace)).code == 0
    profile = [
        *(*program, "profile", "-m", MODEL, "--url", stack.url, "--endpoint-type", endpoint, "--streaming"),
        *("--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--tokenizer", HUB_NAME, "--use-server-token-count", "--ui", "None"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--output-artifact-dir", str(out / "aiperf")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub(out / "hf", tokenizer))}
    done = subprocess.run(
        profile, cwd=out, text=True, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **offline},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    (table,) = (out / "aiperf").rglob("profile_export_aiperf.csv")
    head, *lines = (row for row in csv.reader(table.read_text().splitlines()) if row)
    rows = {row[0]: dict(zip(head[1:], row[1:], strict=False)) for row in lines}
    return {
        "ttft_p50_ms": float(rows["Time to First Token (ms)"]["p50"]),
        "output_tokens_per_s": float(rows["Output Token Throughput (tokens/sec)"]["avg"]),
        "input_tokens": float(rows["Usage Prompt Tokens (tokens)"]["avg"]),
        "requests": float(rows["Request Count"]["avg"]),
    }


@pytest.mark.parametrize("endpoint", WORKLOADS)
def test_both_find_the_same(endpoint: str, stack: Stack, tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    file.write_text(f"seed: 3\nendpoint: {endpoint}\n{WORKLOADS[endpoint]}\n")
    assert stack.run("-m", "pdlab", "workload", str(file), "-o", str(tmp_path / "plan.jsonl")).code == 0
    head, *requests = (tmp_path / "plan.jsonl").read_text().splitlines()
    ours, theirs = [], []
    for number in range(ROUNDS):
        plan = tmp_path / f"plan{number}.jsonl"
        # The seed of a compiled workload draws texts alone: nothing is found in the prefix cache of the round before.
        plan.write_text("\n".join([json.dumps({**json.loads(head), "seed": 100 + number}), *requests, ""]))
        ours.append(by_pdlab(stack, plan, tmp_path / f"pdlab{number}"))
        theirs.append(by_aiperf(stack, plan, tmp_path / f"aiperf{number}", endpoint, tokenizer))
        print(json.dumps({"pdlab": ours[-1], "aiperf": theirs[-1]}))
    assert {each["requests"] for each in (*ours, *theirs)} == {len(requests)}
    for each, other in zip(ours, theirs, strict=True):
        assert other["input_tokens"] == pytest.approx(each["input_tokens"], rel=SAME_TOKENS)
    for name in ("ttft_p50_ms", "output_tokens_per_s"):
        own, foreign = [each[name] for each in ours], [each[name] for each in theirs]
        scatter = max(own) / min(own) - 1
        if scatter > TOO_BUSY:
            pytest.skip(f"{name} of pdlab alone scatters by {scatter:.0%}: {own}")
        ratio = statistics.median(foreign) / statistics.median(own)
        assert abs(ratio - 1) <= max(FLOOR, scatter), f"{name}: AIPerf {foreign}, pdlab {own}"
