"""Real clients of others against a local PD deployment: the table of viz.py has their own figures.

A client that is not on PATH is skipped. The figures come from what it prints, from its table or from its requests, and
not from the summary that pdlab reads.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pdlab
from tests.live.conftest import TIMEOUT_S, Stack

pytestmark = pytest.mark.long

MODEL, INPUT, OUTPUT, REQUESTS, CONCURRENCY = "tiny-gptoss", 64, 16, 16, 2
EQUAL = 1e-3
VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
HUB_NAME = "local/tokenizer"  # AIPerf takes no folder as tokenizer


class Served(NamedTuple):
    """Where the model answers, and its tokenizer."""

    url: str
    tokenizer: Path


class Client(NamedTuple):
    """``words``: the command without the program, of `Served` and the folder of the results; ``figures``: name of a
    column -> the client's own figure, of the folder and of what it printed."""

    words: Callable[[Served, Path], list[str]]
    figures: Callable[[Path, str], dict[str, float]]


def of_vllm(folder: Path, printed: str) -> dict[str, float]:
    names = {
        "ttft_mean_ms": "Mean TTFT (ms)",
        "ttft_p50_ms": "Median TTFT (ms)",
        "tpot_p50_ms": "Median TPOT (ms)",
        "requests_per_s": "Request throughput (req/s)",
        "output_tokens_per_s": "Output token throughput (tok/s)",
    }
    found = {}
    for column, text in names.items():
        match = re.search(rf"{re.escape(text)}:\s+([\d.]+)", printed)
        assert match, text
        found[column] = float(match[1])
    return found


def of_aiperf(folder: Path, printed: str) -> dict[str, float]:
    (table,) = folder.rglob("profile_export_aiperf.csv")
    head, *lines = (row for row in csv.reader(table.read_text().splitlines()) if row)
    rows = {row[0]: row for row in lines}
    found = {}
    for metric, name in (("ttft", "Time to First Token"), ("tpot", "Inter Token Latency"), ("e2el", "Request Latency")):
        row = dict(zip(head, rows[f"{name} (ms)"], strict=False))
        found |= {f"{metric}_mean_ms": float(row["avg"]), f"{metric}_p50_ms": float(row["p50"])}
    return found


def of_guidellm(folder: Path, printed: str) -> dict[str, float]:
    (benchmark,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    latencies_s = [each["request_latency"] for each in requests]
    return {
        "ttft_mean_ms": statistics.mean(each["time_to_first_token_ms"] for each in requests),
        "e2el_mean_ms": 1000 * statistics.mean(latencies_s),
    }


def of_genai_bench(folder: Path, printed: str) -> dict[str, float]:
    (file,) = folder.rglob("*_num_concurrency_*.json")
    requests = json.loads(file.read_text())["individual_request_metrics"]
    good = [each for each in requests if not each["error_code"]]
    names = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e_latency"}
    return {f"{ours}_mean_ms": 1000 * statistics.mean(each[name] for each in good) for ours, name in names.items()}


CLIENTS = {
    "vllm": Client(
        lambda served, folder: [
            *("--base-url", served.url, "--model", MODEL, "--tokenizer", str(served.tokenizer)),
            *("--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)),
            *("--ignore-eos", "--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY)),
            *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "a.json"),
        ],
        of_vllm,
    ),
    "aiperf": Client(
        lambda served, folder: [
            *("profile", "-m", MODEL, "--url", served.url, "--endpoint-type", "completions", "--streaming"),
            *("--tokenizer", HUB_NAME, "--concurrency", str(CONCURRENCY)),
            *("--request-count", str(REQUESTS), "--isl", str(INPUT), "--osl", str(OUTPUT), "--ui", "None"),
            *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(folder)),
        ],
        of_aiperf,
    ),
    "guidellm": Client(
        lambda served, folder: [
            *("run", "--backend", f"kind=openai_http,target={served.url},model={MODEL},request_format=/v1/completions"),
            *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={served.tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
            *("--output", f"kind=json,path={folder / 'benchmarks.json'}", "--disable-console-interactive"),
        ],
        of_guidellm,
    ),
    "genai-bench": Client(
        lambda served, folder: [
            *("benchmark", "--api-backend", "vllm", "--api-base", served.url, "--api-key", "x"),
            *("--api-model-name", MODEL, "--model-tokenizer", str(served.tokenizer), "--task", "text-to-text"),
            *("--traffic-scenario", f"D({INPUT},{OUTPUT})", "--num-concurrency", str(CONCURRENCY)),
            *("--max-requests-per-run", str(REQUESTS), "--max-time-per-run", "1"),
            *("--experiment-base-dir", str(folder.parent), "--experiment-folder-name", folder.name),
        ],
        of_genai_bench,
    ),
}


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """PDLAB_TEST_SERVED=URL,TOKENIZER: a server that is there already."""
    given = os.environ.get("PDLAB_TEST_SERVED")
    if given:
        url, _, tokenizer = given.partition(",")
        yield Served(url, Path(tokenizer))
        return
    stack: Stack = request.getfixturevalue("stack")
    done = stack.launch("--pd-spread")
    assert done.code == 0, done.text
    (tokenizer,) = {path.parent for path in (stack.folder / "cache").rglob("tokenizer_config.json")}
    yield Served(stack.url, tokenizer)


def hub(place: Path, tokenizer: Path) -> Path:
    """A cache of the Hub that has the tokenizer as `HUB_NAME`."""
    repository = place / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(tokenizer)
    return place


@pytest.mark.parametrize("name", CLIENTS)
def test_our_table_has_the_figures_of_the_client(name: str, served: Served, tmp_path: Path) -> None:
    program = [shutil.which(name) or ""]
    if name == "vllm":  # its command looks for the distribution vllm, which that for CPUs is not called
        program = [sys.executable, "-c", VLLM_BENCH] if importlib.util.find_spec("vllm") else [""]
    if not program[0]:
        pytest.skip(f"{name} is not on PATH")
    client, folder = CLIENTS[name], tmp_path / "results"
    folder.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub(tmp_path / "hf", served.tokenizer))}
    done = subprocess.run(
        [*program, *client.words(served, folder)], cwd=tmp_path, text=True, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **offline},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    (row,) = pdlab.load(folder, gpus={folder.name: 2}).levels()
    own = client.figures(folder, done.stdout)
    assert len(own) >= 2
    assert {column: row[column] for column in own} == pytest.approx(own, rel=EQUAL, abs=0.006)  # two decimals printed
    assert (row["load_kind"], row["load"], row["model"]) == ("concurrency", CONCURRENCY, MODEL)
