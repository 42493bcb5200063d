"""Real clients of others against a local PD deployment: the table of viz.py has their own figures.

A client is on PATH or in a virtual environment under PDLAB_CLIENTS; docs/testing.md has how to install them. One that
is in neither is skipped. The figures come from what a client prints, from its table or from its requests, and not from
the summary that pdlab reads. With PDLAB_UPDATE_GOLDEN=1 the files are kept, shortened, in tests/data/clients, where
tests/results/test_client_files.py reads them.
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
import yaml
from support.client_files import EQUAL, Figures, compared, keep

from tests.live.conftest import TIMEOUT_S, Stack

pytestmark = pytest.mark.long

MODEL, INPUT, OUTPUT, REQUESTS, CONCURRENCIES = "tiny-llama", 64, 16, 20, (2, 4)
RATES, STAGE_S = (4.0, 8.0), 5
HUB_NAME = "local/tokenizer"  # AIPerf takes no folder as tokenizer
# vLLM's command looks for the distribution vllm, which that for CPUs is not called.
VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
VLLM_SWEEP = (
    "import argparse; from vllm.benchmarks.sweep.serve import SweepServeArgs, main; "
    "parser = argparse.ArgumentParser(); SweepServeArgs.add_cli_args(parser); main(parser.parse_args())"
)


class Served(NamedTuple):
    """Where the model answers, and its tokenizer."""

    url: str
    tokenizer: Path


class Client(NamedTuple):
    """``program``: how it is called, None if it is not there. ``commands``: the words behind it, one list per call, of
    `Served` and the folder of the results. ``figures``: load -> column -> the client's own figure, of the folder and of
    what it printed."""

    program: Callable[[], list[str] | None]
    commands: Callable[[Served, Path], list[list[str]]]
    figures: Callable[[Path, str], Figures]


def on_path(name: str) -> list[str] | None:
    """A program on PATH, or in an environment under PDLAB_CLIENTS."""
    places = [str(each) for each in sorted(Path(os.environ.get("PDLAB_CLIENTS") or "/nowhere").glob("*/bin"))]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    return [found] if found else None


def vllm(code: str) -> list[str] | None:
    return [sys.executable, "-c", code] if importlib.util.find_spec("vllm") else None


def sglang() -> list[str] | None:
    """The one module of SGLang up to 0.5.3 that needs nothing else of it; its package cannot be imported here."""
    clients = Path(os.environ.get("PDLAB_CLIENTS") or "/nowhere")
    for module in clients.glob("*/lib/python3.*/site-packages/sglang/bench_serving.py"):
        run = f"import runpy; runpy.run_path({str(module)!r}, run_name='__main__')"
        return [str(module.parents[4] / "bin" / "python"), "-c", run]
    return None


PRINTED = {
    "ttft_mean_ms": "Mean TTFT (ms)",
    "ttft_p50_ms": "Median TTFT (ms)",
    "requests_per_s": "Request throughput (req/s)",
    "output_tokens_per_s": "Output token throughput (tok/s)",
}


def of_printed(printed: str, **more: str) -> Figures:
    """The blocks that `vllm bench serve`, and the clients made from it, print; the mean of several of one load."""
    blocks: dict[float, list[dict[str, float]]] = {}
    for block in printed.split("Serving Benchmark Result")[1:]:
        load = re.search(r"(?:Maximum|Max) request concurrency:\s+(\d+)", block)
        assert load
        found = {}
        for column, text in {**PRINTED, **more}.items():
            match = re.search(rf"{re.escape(text)}:\s+([\d.]+)", block)
            assert match, text
            found[column] = float(match[1])
        blocks.setdefault(float(load[1]), []).append(found)
    return {load: {name: statistics.mean(each[name] for each in of) for name in of[0]} for load, of in blocks.items()}


def of_aiperf(folder: Path, printed: str) -> Figures:
    found: Figures = {}
    for table in folder.rglob("profile_export_aiperf.csv"):
        head, *lines = (row for row in csv.reader(table.read_text().splitlines()) if row)
        rows = {row[0]: row for row in lines}
        of = found.setdefault(float(table.parent.name.removeprefix("concurrency_")), {})
        for metric, name in (
            ("ttft", "Time to First Token"),
            ("tpot", "Inter Token Latency"),
            ("e2el", "Request Latency"),
        ):
            row = dict(zip(head, rows[f"{name} (ms)"], strict=False))
            of |= {f"{metric}_mean_ms": float(row["avg"]), f"{metric}_p50_ms": float(row["p50"])}
        of["requests_per_s"] = float(rows["Request Throughput (requests/sec)"][1])
    return found


def of_guidellm(folder: Path, printed: str) -> Figures:
    found: Figures = {}
    for benchmark in json.loads((folder / "benchmarks.json").read_text())["benchmarks"]:
        requests = benchmark["requests"]["successful"]
        first = min(each["request_start_time"] for each in requests)
        found[float(benchmark["config"]["strategy"]["streams"])] = {
            "ttft_mean_ms": statistics.mean(each["time_to_first_token_ms"] for each in requests),
            "e2el_mean_ms": 1000 * statistics.mean(each["request_latency"] for each in requests),
            "requests_per_s": len(requests) / (max(each["request_end_time"] for each in requests) - first),
            "output_tokens_per_s": benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"],
        }
    return found


def of_genai_bench(folder: Path, printed: str) -> Figures:
    found: Figures = {}
    names = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e_latency"}
    for file in folder.rglob("*_num_concurrency_*.json"):
        level = json.loads(file.read_text())
        good = [each for each in level["individual_request_metrics"] if not each["error_code"]]
        found[float(level["aggregated_metrics"]["num_concurrency"])] = {
            # An answer in one piece has no TPOT.
            f"{ours}_mean_ms": 1000 * statistics.mean(each[name] for each in good if each[name] is not None)
            for ours, name in names.items()
        }
    return found


def of_evalscope(folder: Path, printed: str) -> Figures:
    (summary,) = folder.rglob("performance_summary.txt")
    found: Figures = {}
    names = {"Latency (s)": ("e2el", 1000.0), "TTFT (ms)": ("ttft", 1.0), "TPOT (ms)": ("tpot", 1.0)}
    load = 0.0
    for line in summary.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("│ ").split("│")]
        if len(cells) == 6 and cells[0].isdigit() and cells[5].endswith("%"):
            found[float(cells[0])] = {"requests_per_s": float(cells[3]), "output_tokens_per_s": float(cells[4])}
        if len(cells) == 7 and cells[0].isdigit():
            load = float(cells[0])
        metric, to_ms = next((names[cell] for cell in cells if cell in names), ("", 0.0))
        if metric and metric != "e2el":  # seconds are printed with three decimals
            mean, median = (float(cell) * to_ms for cell in cells[cells.index(f"{metric.upper()} (ms)") + 1 :][:2])
            found[load] |= {f"{metric}_mean_ms": mean, f"{metric}_p50_ms": median}
    return found


def of_inference_perf(folder: Path, printed: str) -> Figures:
    (file,) = folder.rglob("per_request_lifecycle_metrics.json")
    requests = sorted(json.loads(file.read_text()), key=lambda each: each["start_time"])
    names = {"ttft": "time_to_first_token", "tpot": "time_per_output_token", "e2el": "request_latency"}
    found: Figures = {}
    for rate in RATES:
        count = int(rate * STAGE_S)
        stage, requests = [each["computed_metrics"] for each in requests[:count]], requests[count:]
        found[rate] = {
            f"{ours}_mean_ms": 1000 * statistics.mean(each[name] for each in stage) for ours, name in names.items()
        }
    assert not requests
    return found


def bench(served: Served) -> list[str]:
    return [
        *("--base-url", served.url, "--model", MODEL, "--tokenizer", str(served.tokenizer)),
        *("--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS)),
    ]


def vllm_commands(served: Served, folder: Path) -> list[list[str]]:
    return [
        [
            *(*bench(served), "--dataset-name", "random", "--ignore-eos", "--max-concurrency", str(concurrency)),
            *("--seed", str(concurrency), "--save-result", "--save-detailed"),
            *("--result-dir", str(folder), "--result-filename", f"conc{concurrency}.json"),
        ]
        for concurrency in CONCURRENCIES
    ]


def sweep_commands(served: Served, folder: Path) -> list[list[str]]:
    """The server runs already: the one that the sweep starts and ends only waits."""
    folder.rmdir()  # it makes its folder itself
    params = folder.parent / "params.json"
    params.write_text(json.dumps([{"max_concurrency": concurrency} for concurrency in CONCURRENCIES]))
    words = [sys.executable, "-c", VLLM_BENCH, *bench(served), "--dataset-name", "random", "--ignore-eos"]
    command = " ".join(f"'{word}'" if " " in word else word for word in words)
    port = served.url.rpartition(":")[2]
    return [
        [
            *("--serve-cmd", f"bash -c 'sleep 600' --port {port}", "--bench-cmd", command, "--show-stdout"),
            *("--after-bench-cmd", "true", "--bench-params", str(params), "--num-runs", "2"),
            *("-o", str(folder.parent), "-e", folder.name),
        ]
    ]


def sglang_commands(served: Served, folder: Path) -> list[list[str]]:
    return [
        [
            *(*bench(served), "--backend", "vllm", "--dataset-name", "random-ids", "--random-range-ratio", "1"),
            *("--max-concurrency", str(concurrency), "--seed", str(concurrency), "--output-details"),
            *("--output-file", str(folder / "levels.jsonl")),
        ]
        for concurrency in CONCURRENCIES
    ]


def aiperf_commands(served: Served, folder: Path) -> list[list[str]]:
    return [
        [
            *("profile", "-m", MODEL, "--url", served.url, "--endpoint-type", "completions", "--streaming"),
            *("--tokenizer", HUB_NAME, "--concurrency", ",".join(map(str, CONCURRENCIES))),
            *("--request-count", str(REQUESTS), "--isl", str(INPUT), "--osl", str(OUTPUT), "--ui", "None"),
            *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
            *("--output-artifact-dir", str(folder)),
        ]
    ]


def guidellm_commands(served: Served, folder: Path) -> list[list[str]]:
    backend = f"kind=openai_http,target={served.url},model={MODEL},request_format=/v1/completions"
    return [
        [
            *("run", "--backend", backend, "--profile", f"kind=concurrent,streams={CONCURRENCIES[0]}"),
            *("--override", "profile.streams", ",".join(map(str, CONCURRENCIES))),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={served.tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
            *("--output", f"kind=json,path={folder / 'benchmarks.json'}", "--disable-console-interactive"),
        ]
    ]


def genai_commands(served: Served, folder: Path) -> list[list[str]]:
    return [
        [
            *("benchmark", "--api-backend", "vllm", "--api-base", served.url, "--api-key", "x"),
            *("--api-model-name", MODEL, "--model-tokenizer", str(served.tokenizer), "--task", "text-to-text"),
            *("--traffic-scenario", f"D({INPUT},{OUTPUT})", "--max-requests-per-run", str(REQUESTS)),
            *("--max-time-per-run", "1", "--server-engine", "vLLM", "--server-gpu-count", "2"),
            *(word for concurrency in CONCURRENCIES for word in ("--num-concurrency", str(concurrency))),
            *("--experiment-base-dir", str(folder.parent), "--experiment-folder-name", folder.name),
        ]
    ]


def evalscope_commands(served: Served, folder: Path) -> list[list[str]]:
    return [
        [
            *("perf", "--url", f"{served.url}/v1/completions", "--api", "openai", "--model", MODEL),
            *("--tokenizer-path", str(served.tokenizer), "--dataset", "random"),
            *("--parallel", *map(str, CONCURRENCIES), "--number", *(str(REQUESTS) for _ in CONCURRENCIES)),
            *("--min-prompt-length", str(INPUT), "--max-prompt-length", str(INPUT)),
            *("--max-tokens", str(OUTPUT), "--min-tokens", str(OUTPUT), "--extra-args", '{"ignore_eos": true}'),
            *("--outputs-dir", str(folder), "--no-timestamp", "--name", "pd"),
        ]
    ]


def inference_perf_commands(served: Served, folder: Path) -> list[list[str]]:
    lengths = {
        f"{side}_distribution": {"min": tokens, "max": tokens, "mean": tokens, "std_dev": 0, "total_count": 100}
        for side, tokens in (("input", INPUT), ("output", OUTPUT))
    }
    fields = {"request": False, "response": False, "response_chunks": False, "computed_metrics": True}
    config = {
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": served.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(served.tokenizer)},
        "data": {"type": "random", **lengths},
        "load": {
            "type": "poisson",
            "num_workers": 1,
            "interval": 1,
            "stages": [{"rate": rate, "duration": STAGE_S} for rate in RATES],
        },
        "report": {
            "request_lifecycle": {"per_request": True, "per_request_fields": fields, "use_server_output_tokens": True}
        },
        "storage": {"local_storage": {"path": str(folder)}},
    }
    file = folder.parent / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return [["-c", str(file)]]


CLIENTS = {
    "vllm": Client(
        lambda: vllm(VLLM_BENCH),
        vllm_commands,
        lambda folder, printed: of_printed(printed, tpot_p50_ms="Median TPOT (ms)"),
    ),
    "vllm-sweep": Client(
        lambda: vllm(VLLM_SWEEP),
        sweep_commands,
        lambda folder, printed: of_printed(printed, tpot_p50_ms="Median TPOT (ms)", e2el_mean_ms="Mean E2EL (ms)"),
    ),
    "sglang": Client(
        sglang,
        sglang_commands,
        lambda folder, printed: of_printed(printed, itl_mean_ms="Mean ITL (ms)", e2el_mean_ms="Mean E2E Latency (ms)"),
    ),
    "aiperf": Client(lambda: on_path("aiperf"), aiperf_commands, of_aiperf),
    "guidellm": Client(lambda: on_path("guidellm"), guidellm_commands, of_guidellm),
    "genai-bench": Client(lambda: on_path("genai-bench"), genai_commands, of_genai_bench),
    "evalscope": Client(lambda: on_path("evalscope"), evalscope_commands, of_evalscope),
    "inference-perf": Client(lambda: on_path("inference-perf"), inference_perf_commands, of_inference_perf),
}


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """PDLAB_TEST_SERVED=URL,TOKENIZER: a server that is there already."""
    given = os.environ.get("PDLAB_TEST_SERVED")
    if given:
        url, _, tokenizer = given.partition(",")
        yield Served(url, Path(tokenizer))
        return
    template = tmp_path_factory.mktemp("chat") / "template.jinja"  # genai-bench knows chat only
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    stack: Stack = request.getfixturevalue("stack")
    done = stack.launch("--pd-spread", "--model", MODEL, "--engine-arg", f"chat_template={template}")
    assert done.code == 0, done.text
    (folder,) = {path.parent for path in (stack.folder / "cache").rglob("tokenizer_config.json")}
    yield Served(stack.url, folder)


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
    client, folder = CLIENTS[name], tmp_path / "results"
    program = client.program()
    if program is None:
        pytest.skip(f"{name} is neither on PATH nor under PDLAB_CLIENTS")
    folder.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub(tmp_path / "hf", served.tokenizer))}
    printed = ""
    for words in client.commands(served, folder):
        done = subprocess.run(
            [*program, *words], cwd=tmp_path, text=True, timeout=TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **offline},
        )  # fmt: skip
        printed += done.stdout
        assert done.returncode == 0, done.stdout[-3000:]
    own = client.figures(folder, printed)
    assert set(own) == set(RATES if name == "inference-perf" else CONCURRENCIES)
    rows = compared(folder, own, EQUAL)
    assert {row["model"] for row in rows} == ({None} if name == "sglang" else {MODEL})
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        named = {str(served.tokenizer): MODEL, served.url.removeprefix("http://"): "localhost:8000", str(folder): "."}
        keep(name, folder, own, {**named, str(tmp_path): "."}, program[0])
