"""Wrong command lines of every command: one line that says what is wrong, exit code 2, no file touched."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import folders

from pdlab import __main__ as pdlab
from pdlab.core.commands import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
LONG = "a" * 300
X2 = ("--cluster", "p5.48xlarge-x2", "--dry-run")
COLLOCATED = ("--collocated", *X2)
PACK = ("--pd-pack", *X2)
FILES = {
    "not.yaml": "topology: [\n",
    "faults.yaml": "faults: [kill_prefil_engine]\n",
    "waits.yaml": "faults: [all]\nhold_s: 8\nlimit_s: 5\n",
    "twice.yaml": "model: gpt-oss-120b\nmodel: gpt-oss-20b\ntopology: {kind: collocated, pool: {tp: 2}}\n",
    "unknown-key.yaml": "modle: gpt-oss-120b\ntopology: {kind: collocated, pool: {tp: 2}}\n",
    "engine.yaml": "topology: {kind: collocated, pool: {tp: 2}}\nengine_kwargs: {max_num_seq: 4}\n",
    "experiment.yaml": "name: x/y\nwhere: {local: 2}\ndeployments: [{label: collocated-1xtp1}]\nworkloads: [{}]\n"
    "loads: [{concurrency: [1]}]\n",
    "typo.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{lable: collocated-1xtp1}]\nworkloads: [{}]\n"
    "loads: [{concurrency: [1]}]\n",
    "impossible.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{label: collocated-1xtp1, engine_args: "
    "{gpu_memory_utilization: 9}}]\nworkloads: [{}]\nloads: [{concurrency: [1]}]\n",
    "workload.yaml": "input_tokens: 0\n",
    "rows.csv": "config,concurrency\npd-pack-p1xtp2-d3xtp,8\n",
    "wheel.whl": "",
    "kept.txt": "kept",
    "empty.whl": "",
    "deep.yaml": "[" * 1000,
    "yes.yaml": "input_tokens: yes\n",
    "list.yaml": "- 1\n",
    "wrong-type.yaml": "topology: collocated\n",
    "tp-nan.yaml": "topology: {kind: collocated, pool: {tp: .nan}}\n",
    "huge.csv": "config,concurrency\ncollocated-99999999999xtp8,8\n",
    "repeats.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{label: collocated-1xtp1}]\nworkloads: [{}]\n"
    "loads: [{concurrency: [1]}]\nrepeats: 1000000000\n",
    "tokenizer.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{label: collocated-1xtp1, engine_args: "
    "{tokenizer: ./nowhere}}]\nworkloads: [{}]\nloads: [{concurrency: [1]}]\n",
    "cut-model/config.json": '{"model_type": "gp',
    "list-model/config.json": "[]",
    "deep_1xtp2/conc4.json": "[" * 100_000,
    "cut_1xtp2/conc4.json": '{"duration": 1',
    "traffic.yaml": "conversations: {rate_rps: 1, sessions: 9, turns: 2, user_tokens: 9, answer_tokens: 9, think_s: 1}",
    "apart.csv": "arrival_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n",
    "trace.csv": "arrival_s,input_tokens,output_tokens\n0,5,x\n",
    "empty.yaml": "",
    "tabs.yaml": "topology:\n\tkind: collocated\n",
    "below-1.yaml": "topology: {kind: disaggregated, prefill: {tp: -2}, decode: {tp: 1}}\n",
    "kind.yaml": "topology: {kind: collocted, pool: {tp: 2}}\n",
    "words.csv": "config,concurrency\ncollocated-1xtp2,eight\n",
    "no-load.csv": "config\ncollocated-1xtp2\n",
    "header.csv": "config,concurrency\n",
    "cells.csv": "config,concurrency\ncollocated-1xtp2,8,9,9\n",
    "same-column.csv": "config,concurrency,config\ncollocated-1xtp2,8,collocated-1xtp2\n",
    "one-request.csv": "arrival_s,input_tokens,output_tokens\n0,5,5\n",
    "one-moment.csv": "arrival_s,input_tokens,output_tokens\n5,5,5\n5,5,5\n",
    "blocks.json": "{}",
    "pairs.csv": "input_tokens,output_tokens\n5,x\n",
    "array_1xtp2/conc4.json": "[]",
    "stray/notes.json": "{}",
    "later/manifest.json": '{"schema_version": 999}',
} | {
    f"{name}.yaml": "name: x\nwhere: {local: 2}\n"
    f"deployments: [{entries}]\nworkloads: [{workload}]\nloads: [{load}]\n"
    for name, entries, workload, load in (
        ("none", "", "{}", "{concurrency: [1]}"),
        ("two-loads", "{label: collocated-1xtp1}", "{}", "{concurrency: [1], rate_rps: [2]}"),
        ("two-names", "{label: collocated-1xtp1}, {label: collocated-1xtp1}", "{}", "{concurrency: [1]}"),
        ("too-large", "{label: collocated-4xtp8}", "{}", "{concurrency: [1]}"),
        ("slo", "{label: collocated-1xtp1}", "{}", "{slo: {ttft_ms: -4}}"),
        ("flag", '{label: collocated-1xtp1, flags: [--tpp, "4"]}', "{}", "{concurrency: [1]}"),
        ("seed", "{label: collocated-1xtp1}", "{seed: 4}", "{concurrency: [1]}"),
        ("long", "{label: collocated-1xtp1}", "{input_tokens: 1000000}", "{concurrency: [1]}"),
    )
}


class Case(NamedTuple):
    """``messages``: parts of the one line, in any order."""

    command: str
    words: tuple[str, ...]
    messages: tuple[str, ...]


def case(command: str, line: str | tuple[str, ...], *messages: str) -> Case:
    return Case(command, tuple(line.split()) if isinstance(line, str) else line, messages)


LAUNCH = [
    case("launch", "", "--collocated", "--pd-pack", "--config"),
    case("launch", ("--colocated", *X2), "--colocated is not a flag", "did you mean --collocated"),
    case("launch", ("--mode", "pd-pak", *X2), "--mode", "did you mean pd-pack"),
    case("launch", (*COLLOCATED, "4xtp2"), "unexpected argument '4xtp2'"),
    case("launch", (*COLLOCATED, "--tp", "2", "--tp", "4"), "--tp is given twice", "give it once"),
    case("launch", (*COLLOCATED, "--tp", "0"), "--tp: '0' is not a whole number from 1 to 10000"),
    case("launch", (*COLLOCATED, "--tp", "9" * 40), "--tp", "whole number"),
    case("launch", (*COLLOCATED, "--tp"), "--tp needs a value"),
    case("launch", (*COLLOCATED, "--dry-run=yes"), "--dry-run takes no value"),
    case("launch", ("--collocated", *PACK), "--collocated", "--pd-pack", "leave one out"),
    case("launch", (*COLLOCATED, "--host", "not a host"), "--host", "not an address or a host's name"),
    case("launch", (*COLLOCATED, "--host", "1.2.3"), "--host", "127.0.0.1"),
    case("launch", (*COLLOCATED, "--host", ""), "--host"),
    case("launch", (*COLLOCATED, "--port", "0"), "--port", "from 1 to 65535"),
    case("launch", (*COLLOCATED, "--port", "http"), "--port", "from 1 to 65535"),
    case("launch", (*COLLOCATED, "--max-model-len", "99999999"), "--max-model-len 99999999", "131072"),
    case("launch", (*COLLOCATED, "--engine-arg", "max_model_len=99999999"), "131072"),
    case("launch", (*COLLOCATED, "--timeout-s", "nan"), "--timeout-s", "number of seconds above 0"),
    case("launch", (*COLLOCATED, "--stream-batching-ms", "-1"), "--stream-batching-ms", "milliseconds from 0"),
    case("launch", (*COLLOCATED, "--link-delay-ms", "soon"), "--link-delay-ms", "milliseconds"),
    case("launch", (*COLLOCATED, "--link-rate", "1gbit"), "--link-rate", "--two-hosts"),
    case("launch", ("--pd-spread", "--two-hosts", "--link-rate", "fast", "--local", "--dry-run"), "'fast'", "1gbit"),
    case("launch", ("--collocated", "--local", "100000", "--dry-run"), "--local", "from 1 to 64"),
    case("launch", ("--collocated", "--dp", "2", "--local", "--dry-run"), "--dp 2", "experts", "use --num 2"),
    case("launch", ("--pd-spread", "--d-dp", "2", "--local", "--dry-run"), "--d-dp 2", "experts", "use --d-num 2"),
    case("launch", ("--collocated", "--local", "--cluster", "auto"), "--local and --cluster"),
    case("launch", (*COLLOCATED, "--rehearse", "--kv-offload-gb", "1"), "--rehearse and --kv-offload-gb exclude"),
    case("launch", ("--collocated", "--cluster", "nope", "--dry-run"), "'nope'", "known are", "p5.48xlarge-x2"),
    case("launch", ("--collocated", "--cluster", "p5.48xlarge-2", "--dry-run"), "did you mean p5.48xlarge-x2"),
    case("launch", ("--config", "pd-pack-p1xtp2-d3xtp", *X2), "nor a label such as"),
    case("launch", ("--config", LONG, *X2), "aaa...", "nor a file"),
    case("launch", ("--config", "not.yaml", *X2), "not.yaml", "not valid YAML", "line 2"),
    case("launch", ("--config", "twice.yaml", *X2), "key 'model' is there twice", "line 2"),
    case("launch", ("--config", "unknown-key.yaml", *X2), "modle: is not a known key", "did you mean model"),
    case("launch", ("--config", "engine.yaml", *X2), "max_num_seq", "did you mean max_num_seqs"),
    case("launch", ("--config", "kept.txt", *X2), "expected a mapping"),
    case("launch", (*COLLOCATED, "--model", "gpt-oss-12b"), "did you mean gpt-oss-120b"),
    case("launch", (*COLLOCATED, "--model", "./nowhere"), "./nowhere", "no such folder"),
    case("launch", (*COLLOCATED, "--engine-arg", "gpu_memory_utilisation=0.9"), "did you mean gpu_memory_utilization"),
    case("launch", (*COLLOCATED, "--engine-arg", "gpu_memory_utilization=9"), "above 0 and at most 1"),
    case("launch", (*COLLOCATED, "--engine-arg", "max_num_seqs=-5"), "max_num_seqs=-5: must be at least 1"),
    case("launch", (*COLLOCATED, "--engine-arg", "max_num_seqs=lots"), "must be a whole number"),
    case("launch", (*COLLOCATED, "--engine-arg", "dtype=float8"), "dtype=float8", "bfloat16"),
    case("launch", (*COLLOCATED, "--engine-arg", "enforce_eager=maybe"), "must be true or false"),
    case("launch", (*COLLOCATED, "--engine-arg", "max_num_seqs"), "KEY=VALUE"),
    case("launch", (*COLLOCATED, "--engine-arg", "seed={a: ["), "not valid YAML"),
    case("launch", (*COLLOCATED, "--engine-arg", "seed=1", "--engine-arg", "seed=2"), "seed is given twice"),
    case("launch", (*COLLOCATED, "--engine-arg", "tensor_parallel_size=2"), "--tp"),
    case("launch", (*PACK, "--p-engine-arg", "block_size=0"), "--p-engine-arg block_size=0: must be above 0"),
    case("launch", (*PACK, "--d-engine-arg", "blok_size=16"), "--d-engine-arg", "did you mean block_size"),
    case("launch", (*PACK, "--kv-backend", "NOPE"), "NOPE is not a NIXL backend", "UCX"),
    case("launch", (*PACK, "--kv-backend", "ucx"), "capitals"),
    case("launch", (*PACK, "--kv-backend", "GDS"), "GDS is for storage"),
    case("launch", (*PACK, "--ucx-tls", "banana"), "'banana' is not a transport of UCX"),
    case("launch", (*PACK, "--ucx-tls", "cuda_cpy,tcp"), "did you mean cuda_copy"),
    case("launch", (*PACK, "--ucx-tls", "tcp,,"), "a name is missing"),
    case("launch", (*PACK, "--use-libfabric", "--ucx-tls", "tcp"), "--ucx-tls tcp", "LIBFABRIC"),
    case("launch", (*COLLOCATED, "--ucx-tls", "tcp"), "--ucx-tls does not apply to collocated"),
    case("launch", (*PACK, "--p-tp", "3", "--model", "org/m", "--d-tp", "2"), "one must divide the other"),
    case("launch", (*COLLOCATED, "--export", "-"), "standard output"),
    case("launch", ("--collocated", *X2[:2], "--export", "kept.txt"), "--export kept.txt: is there already"),
    case("launch", ("--collocated", *X2[:2], "--export", "no/folder.yaml"), "--export no/folder.yaml", "no folder"),
    case("launch", ("--collocated", *X2[:2], "--export", "."), "--export .", "is a folder"),
    case("launch", ("--shutdown", "--collocated"), "--shutdown"),
    case("launch", (*COLLOCATED, "--engine-arg=--"), "--engine-arg needs a value"),
    case("launch", (*COLLOCATED, "--model", LONG), "is not known"),
    case("launch", (*PACK, "--ucx-tls", LONG), "is not a transport of UCX"),
    case("launch", (*COLLOCATED, "--expose", "detokenize"), "'detokenize' is not the path of a route"),
    case("launch", (*COLLOCATED, "--max-tokens", "1"), "--max-tokens: must be at least 16, got 1"),
    case(
        "launch",
        (*COLLOCATED, "--max-body-bytes", "1"),
        "--max-body-bytes: '1' is not a whole number of",
    ),
    case("launch", (*PACK, "--decode-bench"), "--decode-bench"),
    case("launch", ("--config", "deep.yaml", *X2), "deep.yaml: not valid YAML"),
    case("launch", ("--config", "", *X2), "--config needs a value, got ''"),
    case("launch", ("--config", "loop", *X2), "loop"),
    case("launch", ("--config", "wrong-type.yaml", *X2), "topology: must be a mapping of keys, got 'collocated'"),
    case("launch", ("--config", "tp-nan.yaml", *X2), "tp: must be a", "got nan"),
    case("launch", (*COLLOCATED, "--model", ""), "--model needs a value, got ''"),
    case("launch", (*COLLOCATED, "--model", "a\nb"), "'a\\nb' is not known"),
    case("launch", (*COLLOCATED, "--model", "modèle/ü"), "'modèle/ü' is not known"),
    case("launch", (*COLLOCATED, "--model", "cut-model"), "cut-model: config.json cannot be read"),
    case("launch", (*COLLOCATED, "--model", "list-model"), "list-model: config.json holds no JSON object"),
    case("launch", (*COLLOCATED, "--tp", "٣٣x"), "--tp: '٣٣x' is not a whole number"),
    case("launch", (*COLLOCATED, "--num", "20000"), "--num: '20000' is not a whole number from 1 to 10000"),
    case("launch", (*COLLOCATED, "--engine-arg", "max_num_seqs=99999999999999999999999"), "must be at most"),
    case("launch", (*COLLOCATED, "--engine-arg", "gpu_memory_utilization=.nan"), "must be a number"),
    case("launch", (*COLLOCATED, "--engine-arg", "tokenizer=./nowhere"), "tokenizer=./nowhere: no such folder"),
    case("launch", (*COLLOCATED, "--engine-arg", "max_model_len=0"), "--max-model-len 0: must be at least 1"),
    case("launch", (*COLLOCATED, "--export", "loop"), "--export loop: cannot be written (a loop of links)"),
    case("launch", (*COLLOCATED, "--expose", "/a b"), "--expose: '/a b' is not the path of a route"),
    case("launch", (*PACK, "--env", "A-B=/x"), "--env 'A-B=/x': expected NAME=VALUE"),
    case("launch", (*COLLOCATED, "--api-key", "--no-api-key"), "--api-key and --no-api-key exclude each other"),
    case("launch", (*COLLOCATED, "--no-api-key", "--api-key-file", "kept.txt"), "--no-api-key and --api-key-file"),
]
LAUNCH += [
    case("launch", (*COLLOCATED, "--api-key-file", "nowhere"), "--api-key-file nowhere: cannot be read"),
    case("launch", (*COLLOCATED, "--api-key-file", "empty"), "--api-key-file empty: is a folder"),
    case("launch", (*COLLOCATED, "--api-key-file", "kept.txt"), "chmod 600 kept.txt"),
    case("launch", (*COLLOCATED, "--engine-arg", "port=1"), "--engine-arg port: pdlab sets it; use --port"),
    case(
        "launch",
        (*COLLOCATED, "--engine-arg", "max_num_batched_tokens=10", "--engine-arg", "max_num_seqs=64"),
        "max_num_batched_tokens=10: must be at least max_num_seqs (64)",
    ),
    case("launch", (*COLLOCATED, "--engine-arg", "kv_cache_dtype=fp7"), "is none of vLLM's values", "did you mean fp8"),
    case("launch", (*COLLOCATED, "--engine-arg", "reasoning_parser=none"), "is none of vLLM's values; known are c"),
    case("launch", (*COLLOCATED, "--engine-arg", "kv_transfer_config={}"), "use --kv-backend, --kv-offload-gb or"),
    case("launch", (*COLLOCATED, "--engine-arg", "=5"), "--engine-arg '=5': expected KEY=VALUE"),
    case("launch", (*COLLOCATED, "--tp", "3"), "does not divide the 64 attention heads", "use one of 1, 2, 4, 8, 16"),
    case("launch", (*COLLOCATED, "--num", "-1"), "--num: '-1' is not a whole number"),
    case("launch", (*COLLOCATED, "--p-tp", "2"), "--p-tp does not apply to collocated"),
    case("launch", (*COLLOCATED, "--host", "999.1.1.1"), "--host: '999.1.1.1' is not an address"),
    case("launch", (*COLLOCATED, "--host", "::1::2"), "--host: '::1::2' is not an address"),
    case("launch", ("--collocated", "--local", "0", "--dry-run"), "--local: '0' is not a number of nodes from 1 to 64"),
    case("launch", ("--collocated", "--cluster", "kept.txt", "--dry-run"), "for ClusterView, found text"),
    case("launch", (*PACK, "--p-tp", "8", "--d-tp", "8", "--p-num", "99"), "does not fit p5.48xlarge-x2"),
    case("launch", (*PACK, "--kv-backend", "UCX,UCX"), "UCX is there twice; keep one"),
    case("launch", (*PACK, "--ucx-env", "UCX_TLS=banana"), "--ucx-tls"),
    case("launch", (*PACK, "--use-libfabric", "--kv-backend", "UCX"), "exclude each other"),
    case("launch", (*PACK, "--d-engine-arg", "max_num_seqs=1.5"), "must be a whole number"),
    case("launch", ("--pd", *X2), "--pd is not a flag; did you mean --pd-fluid or --pd-pack or --pd-spread?"),
    case("launch", ("--pd-pack", "@/dev/null", *X2), "unexpected argument"),
    case("launch", ("--config", "empty.yaml", *X2), "expected a mapping of keys for Deployment, found nothing"),
    case("launch", ("--config", "tabs.yaml", *X2), "tabs.yaml: not valid YAML", "line 2"),
    case("launch", ("--config", "below-1.yaml", *X2), "prefill.tp: must be at least 1, got -2"),
    case("launch", ("--config", "kind.yaml", *X2), "'kind' must be one of 'collocated', 'disaggregated'"),
    case("launch", ("--config", "empty", *X2), "empty: cannot be read (Is a directory)"),
]
PLAN = [
    case("plan", "--seed -1 --slo-tpot-ms 12", "--seed", "'-1' is not a seed"),
    case("plan", "--seed 1.5", "--seed", "not a seed"),
    case("plan", "--engine-version 0.29", "--hardware h100-vllm-0.11", "leave --engine", "--hardware H100"),
    case("plan", "--hardware H100 --engine-version latest", "--engine-version", "'latest' is not a major and a minor"),
    case("plan", "--hardware H100 --quant weights=fp8", "--quant weights=fp8", "known are fmha, gemm, kvcache, moe"),
    case("plan", "--hardware A100 --engine sglang", "GPU type A100", "no step times", "A100-80G"),
    case("plan", "--p-hardware H100", "--p-hardware", "--d-hardware"),
    case("plan", "--p-hardware H100 --d-hardware A100", "GPU type A100", "no step times"),
    case("plan", "--p-hardware h100-vllm-0.11 --d-hardware H200", "--p-hardware h100-vllm-0.11", "no GPU type"),
    case("plan", "--p-hardware H100 --d-hardware H200 --placement pack", "--p-hardware", "different nodes"),
    case("plan", "--p-hardware H100 --d-hardware GB200", "--d-hardware GB200 of 4", "nodes of one size"),
    case("plan", "--p-hardware H100 --d-hardware H200 --explain collocated-1xtp8", "--explain", "pd-spread"),
    case("plan", "--draft-tokens 3", "--draft-tokens", "--acceptance-length"),
    case("plan", "--acceptance-length 3.5 --draft-tokens 2", "--acceptance-length", "more than 2 guessed"),
    case("plan", "--acceptance-length 0.5", "--acceptance-length", "not a number from 1"),
    case("plan", "--goodput-map x.txt", "--goodput-map x.txt", ".png"),
    case("plan", "--goodput-map x.png --measured nowhere", "nowhere", "does not exist"),
    case("plan", "--measured nowhere", "--measured", "--goodput-map"),
    case("plan", "--gpus 10000", "--gpus", "from 1 to 1024"),
    case("plan", "--gpus 99999999999", "--gpus", "from 1 to 1024"),
    case("plan", "--gpus 0", "--gpus"),
    case("plan", "--concurrency 99999999", "--concurrency", "at most 20000"),
    case("plan", "--concurrency 4,eight", "--concurrency", "whole number"),
    case("plan", "--concurrency 4 --concurrency 8", "--concurrency is given twice", "commas between"),
    case("plan", "--rate 2 --concurrency 4", "--concurrency and --rate"),
    case("plan", "--rate 1e999", "--rate", "above 0"),
    case("plan", "--burstiness 2", "--burstiness", "--rate"),
    case("plan", "--itl 99999999", "tokens of context", "shorten"),
    case("plan", "--slo-quantile 0.5", "--slo-quantile", "give one"),
    case("plan", "--slo-tpot-ms 12 --slo-quantile 95", "--slo-quantile", "above 0 and below 1"),
    case("plan", "--slo-tpot-ms -1", "--slo-tpot-ms", "above 0"),
    case("plan", "--prefix-hit-rate 2", "--prefix-hit-rate", "0 to below 1"),
    case("plan", "--model gpt-oss-12b", "--model gpt-oss-12b", "did you mean gpt-oss-120b"),
    case("plan", "--hardware h100-v", "hardware 'h100-v'", "h100-vllm-0.11"),
    case("plan", "--node p5", "--node p5", "p5.48xlarge"),
    case("plan", "--workload nowhere.yaml", "nowhere.yaml", "cannot be read"),
    case("plan", "--workload workload.yaml", "input_tokens: must be at least 1, got 0"),
    case("plan", "--workload workload.yaml --itl 5", "--workload replaces --itl"),
    case("plan", "--workload nowhere.csv", "nowhere.csv: no such file"),
    case("plan", "--workload trace.csv", "trace.csv, line 2"),
    case("plan", "--workload trace.csv --itl 5", "leave --itl out"),
    case("plan", "--workload traffic.yaml --prefix-hit-rate 0.5", "sets the shared text of prompts"),
    case("plan", "--workload traffic.yaml --goodput-map x.png", "sets the times of requests"),
    case("plan", "--kv-offload-gb 9", "--kv-offload-gb", "--workload"),
    case("plan", "--workload apart.csv --kv-offload-gb 9", "no prompt of --workload apart.csv shares text"),
    case("plan", "--workload traffic.yaml --kv-offload-gb 9 --fidelity vllm", "does not simulate --kv-offload-gb"),
    case("plan", "--workload traffic.yaml --slo-ttft-ms 9 --kv-offload-gb 9 --fluid", "--kv-offload-gb does nothing"),
    case("plan", "--plot x.gif", "--plot x.gif", ".gif is no format"),
    case("plan", "--plot no/folder.png", "--plot no/folder.png", "no folder"),
    case("plan", "--out kept.txt", "--out kept.txt", "is a file"),
    case("plan", "--explain pd-pack-p1xtp2-d3xtp", "pd-pack-p1xtp2-d3xtp"),
    case("plan", "--explain collocated-1xtp3", "does not divide"),
    case("plan", "--explain collocated-1xtp2 --top 2", "--top does nothing with --explain"),
    case("plan", "--predict nowhere.csv", "--predict nowhere.csv", "cannot be read"),
    case("plan", "--predict rows.csv", "line 2", "pd-pack-p1xtp2-d3xtp"),
    case("plan", "--predict rows.csv --out rows.csv", "would be lost"),
    case("plan", "--predict rows.csv --out no/x.csv", "--out no/x.csv", "no folder"),
    case("plan", "--predict rows.csv --gpus 16", "--gpus does nothing with --predict"),
    case("plan", "--compare nowhere", "nowhere does not exist"),
    case("plan", ("--compare", LONG), "cannot be searched", "too long"),
    case("plan", "--compare ours --predict rows.csv", "exclude each other"),
    case("plan", "--placement packed", "--placement 'packed': choose from pack, spread, any"),
    case("plan", "--seed=--", "--seed needs a value"),
    case("plan", "--top nine", "--top", "whole number"),
    case("plan", "--rate 5e-324", "--rate: '5e-324' is not a rate from 0.0001 to 100000"),
    case("plan", "--rate 1e9", "--rate: '1e9' is not a rate"),
    case("plan", "--prefix-hit-rate nan", "--prefix-hit-rate: 'nan' is not a number"),
    case("plan", ("--workload", ""), "--workload needs a value"),
    case("plan", "--workload yes.yaml", "yes.yaml: input_tokens: must be a number", "yes, no"),
    case("plan", "--workload loop", "loop: cannot be read"),
    case("plan", "--workload list.yaml", "expected a mapping of keys for Workload, found a list"),
    case("plan", ("--explain", ""), "--explain needs a value"),
    case("plan", "--explain collocated-99999999999xtp8", "from 1 to 10000"),
    case("plan", "--explain collocated-5000xtp8", "has 40000 GPUs, at most 1024"),
    case("plan", "--explain collocated-1xtp2 --rate 2 --concurrency 4", "--concurrency and --rate exclude each other"),
    case("plan", "--predict huge.csv", "huge.csv, line 2", "from 1 to 10000"),
    case("plan", "--compare ours ours", "--compare names ours twice"),
    case("plan", ("--out", ""), "--out needs a value"),
    case("plan", "--out loop", "--out loop: cannot be written (a loop of links)"),
    case("plan", "--out dangling/x", "dangling is a link to nothing"),
    case("plan", ("--model", " "), "--model needs a value"),
]
PLAN += [
    case("plan", "--gpus eight", "--gpus: 'eight' is not a number of GPUs"),
    case("plan", "--gpus 8 16", "unexpected argument '16'"),
    case("plan", "--slo-ttft-ms nan", "--slo-ttft-ms: 'nan' is not a number above 0"),
    case("plan", "--concurrency ,", "--concurrency: '' is not a whole number"),
    case("plan", "--top 0", "--top: '0' is not a whole number of at least 1"),
    case("plan", "--model org/unknown", "--model org/unknown: ", "config.json"),
    case("plan", "--hardware empty", "empty: cannot be read (Is a directory)"),
    case("plan", "--lengths lognormal:-1", "no distribution of lengths"),
    case("plan", "--lengths file:pairs.csv", "pairs.csv, line 2: 'x' is not a number of tokens"),
    case("plan", "--workload one-request.csv", "holds one request; from 2"),
    case("plan", "--workload one-moment.csv", "all requests arrive at the same time"),
    case("plan", "--workload one-moment.csv --rate 2", "leave --rate out"),
    case("plan", "--predict words.csv", "words.csv, line 2: concurrency 'eight' is not a number"),
    case("plan", "--predict no-load.csv", "no column concurrency or request_rate"),
    case("plan", "--predict header.csv", "has a header and no rows"),
    case("plan", "--predict cells.csv", "4 cells for 2 columns"),
    case("plan", "--predict same-column.csv", "column 'config' occurs twice"),
    case("plan", "--compare stray", "stray/notes.json: no known benchmark client"),
    case("plan", "--compare array_1xtp2", "array_1xtp2/conc4.json: no known benchmark client"),
    case("plan", "--compare later", "schema_version: must be one of 2, got 999"),
    case("plan", "--blocks blocks.json", "not the --json of a KV-transfer check"),
    case("plan", "--explain pd-pack-p1xtp2", "label 'pd-pack-p1xtp2': expected"),
    case("plan", "--count-gpus all", "choose from used, nodes"),
    case("plan", "--slo ttft_ms=5", "--slo is not a flag", "or --slo-ttft-ms"),
    case("plan", "--hardware abacus", "nor a GPU type nor a file; known are "),
    case("plan", "--workload w.yaml --lengths uniform:0.8-1.0", "--workload replaces"),
    case("plan", "--lengths gauss:1", "--lengths: 'gauss:1' is no distribution of lengths", "fixed, uniform:0.8-1.0"),
    case("plan", "--lengths file:nowhere.csv", "--lengths: nowhere.csv: cannot be read"),
    case("plan", "--lengths lognormal:3", "takes 131072 tokens of context"),
    case("plan", "--workload x.csv --lengths uniform:0.8-1.0", "leave --lengths out"),
    case("plan", "--predict x.csv --lengths uniform:0.8-1.0", "--lengths does nothing with --predict"),
    case("plan", "--explain collocated-1xtp2 --predict x.csv", "exclude each other"),
    case("plan", "--explain collocated-1xtp2 --plot x.png", "--plot does nothing with --explain"),
    case("plan", "--explain collocated-1xtp2 --out x", "--out does nothing with --explain"),
    case("plan", "--predict x.csv --plot x.png", "--plot does nothing with --predict"),
    case("plan", "--compare x --slo-tpot-ms 12", "--slo-tpot-ms does nothing with --compare"),
    case("plan", "--gpus 8 --prompts fresh", "--prompts does nothing with a ranking"),
    case("plan", "--hardware cpu-vllm-0.29 --node p4d", "--node"),
    case("plan", "--gpus 1 --itl 125000", "fits no TP degree"),
    case("plan", "--model deepseek-v3 --gpus 8", "fits no TP degree"),
]
WORKLOAD = [
    case("workload", "", "FILE is needed"),
    case("workload", "nowhere.jsonl", "nowhere.jsonl: no such file"),
    case("workload", "list.yaml", "expected a mapping of keys for TrafficFile, found a list"),
    case("workload", "workload.yaml", "input_tokens: is not a known key"),
    case("workload", "trace.csv", "trace.csv, line 2"),
    case("workload", "trace.csv --force", "--force does nothing with no -o"),
    case("workload", "trace.csv --export aiperf", "--export", "--output"),
    case("workload", "one-request.csv -o kept.txt", "-o kept.txt: is there already"),
    case("workload", "one-request.csv -o no/x", "-o no/x: no folder"),
    case("workload", "one-request.csv --export genai -o x", "--export", "aiperf"),
    case("workload", "one-request.csv --export aiperf -o x --tokenizer empty", "--tokenizer empty: no tokenizer.json"),
]
VIZ = [
    case("viz", "", "--exps is needed"),
    case("viz", "--exps", "--exps needs a value"),
    case("viz", "--exps nowhere", "nowhere does not exist"),
    case("viz", "--exps our", "did you mean ours"),
    case("viz", ("--exps", LONG), "cannot be searched", "too long"),
    case("viz", ("--audit", LONG), "cannot be searched", "too long"),
    case("viz", "--audit nowhere", "nowhere does not exist"),
    case("viz", "--audit kept.txt", "kept.txt is a file"),
    case("viz", "--audit ours ours", "--audit names ours twice"),
    case("viz", "--audit ours --exps ours", "--audit", "leave --exps out"),
    case("viz", "--audit ours --report x.html", "--report does nothing with --audit"),
    case("viz", "--exps empty", "holds no result files"),
    case("viz", "--exps ours ours", "--exps names ours twice"),
    case("viz", "--exps unanswered_1xtp2", "no request was answered"),
    case("viz", "--exps nan_1xtp2", "mean_ttft_ms is nan"),
    case("viz", "--exps ours --plot-path x.gif", ".gif", "png, svg or pdf"),
    case("viz", "--exps ours --plot-path kept.txt/x.png", "--plot-path", "kept.txt is a file"),
    case("viz", "--exps ours --plot-path .", "is a folder"),
    case("viz", "--exps ours --plot-path x.png --format svg", "disagree"),
    case("viz", "--exps ours --no-plot --format svg", "--no-plot"),
    case("viz", "--exps ours --report x.pdf", "--report x.pdf", ".html"),
    case("viz", "--exps ours --report kept.txt/x.html", "--report", "kept.txt is a file"),
    case("viz", ("--exps", "ours", "--report", ""), "--report needs a value, got ''"),
    case("viz", ("--exps", "ours", "--report", LONG + ".html"), "--report", "too long"),
    case("viz", "--exps ours --plot-path=--", "--plot-path needs a value"),
    case("viz", "--exps ours --slo ttft=2", "--slo ttft=2", "ttft_ms=2000"),
    case("viz", "--exps ours --slo ttft_ms=-1", "above 0"),
    case("viz", "--exps ours --slo ttft_ms=1,ttft_ms=2", "ttft_ms is there twice"),
    case("viz", "--exps ours --slo-quantile 0.9", "--slo-quantile is for --slo"),
    case("viz", "--exps ours --slo ttft_ms=1 --slo-quantile 1", "--slo-quantile", "below 1"),
    case("viz", "--exps ours --gpus-per-node 4 --no-use-normalized", "--gpus-per-node", "--no-use-normalized"),
    case("viz", "--exps ours --per-role decode --no-use-normalized", "--per-role", "--no-use-normalized"),
    case("viz", "--exps ours --gpus-per-node 0", "--gpus-per-node", "at least 1"),
    case("viz", "--exps ours --gpus ours", "PATTERN=N"),
    case("viz", "--exps ours --gpus our=4", "did you mean ours"),
    case("viz", "--exps ours --gpus ours=1 --gpus ours=1", "ours is given twice"),
    case("viz", "--exps ours --latency-mode chunky", "did you mean chunk"),
    case("viz", "--exps ours --chunk-size 4", "--latency-mode chunk"),
    case("viz", "--exps ours --use-interactivity --latency-mode first_token", "--use-interactivity is 1000/TPOT"),
    case("viz", "--exps ours --stat p98", "--stat", "p99"),
    case("viz", "--exps ours --confidence 95", "--confidence", "below 1"),
    case("viz", "--exps ours --price-per-gpu-hour free", "--price-per-gpu-hour", "above 0"),
    case("viz", "--exps ours --published nowhere.csv", "nowhere.csv", "cannot be read"),
    case("viz", "--exps ours --stat p50 --stat p99", "--stat is given twice"),
    case("viz", "--exps ours --log-latancy", "did you mean --log-latency"),
    case("viz", ("--exps", ""), "--exps needs a value"),
    case("viz", ("--exps", "a\nb"), "a\\nb does not exist"),
    case("viz", "--exps loop", "loop"),
    case("viz", "--audit loop", "loop"),
    case("viz", "--exps deep_1xtp2", "deep_1xtp2/conc4.json: cannot be read as JSON"),
    case("viz", "--exps cut_1xtp2", "cut_1xtp2/conc4.json: cannot be read as JSON"),
    case("viz", "--exps ours --slo ttft_ms=1e400", "'ttft_ms=1e400' is no bound"),
    case("viz", "--exps ours --slo ttft_ms=5 --slo ttft_ms=5", "--slo ttft_ms=5 is given twice"),
    case("viz", "--exps ours --report loop/x.html", "--report loop/x.html: cannot be written (a loop of links)"),
    case("viz", "--exps ours --plot-path dangling/x.png", "dangling is a link to nothing"),
    case("viz", "--audit ours --stat p99", "--stat does nothing with --audit"),
    case("viz", "--audit ours --no-plot", "--no-plot does nothing with --audit"),
    case("viz", "--audit ours --gpus ours=4", "--gpus has 4", "leave --gpus out"),
    case("viz", "--exps ours --no-plot --log-latency", "--log-latency does nothing with --no-plot"),
    case("viz", "--exps ours --show-tables --no-show-tables", "--show-tables and --no-show-tables exclude each other"),
]
VIZ += [
    case("viz", "ours", "unexpected argument 'ours'"),
    case("viz", "--exps stray", "stray/notes.json: no known benchmark client"),
    case("viz", "--exps ours empty", "empty holds no result files"),
    case("viz", "--exps ours --plot-path x.", "--plot-path x.: the suffix selects the format"),
    case("viz", "--exps ours --at tpt_ms=5", "'tpt_ms=5' is no bound"),
    case("viz", "--exps ours --at tpot_ms=5,tpot_ms=6", "tpot p50 is there twice"),
    case("viz", "--exps ours --at tpot_ms=5 --at tpot_ms=5", "--at tpot_ms=5 is given twice"),
    case("viz", "--exps ours --gpus ours=0", "expected PATTERN=N with N at least 1"),
    case("viz", "--exps ours --count-gpus nodes --no-use-normalized", "--count-gpus is for throughput per node"),
    case("viz", "--exps ours --published cells.csv", "column 'config' is not known"),
    case("viz", "--audit ours --at tpot_ms=5", "--at does nothing with --audit"),
    case("viz", "--audit ours --confidence 0.95", "--confidence does nothing with --audit"),
    case("viz", "--exps ours --no-use-normalized --gpus-per-node 8", "--gpus-per-node is for throughput per node"),
    case("viz", "--exps ours --chunk-size 16", "--latency-mode chunk"),
    case("viz", "--exps ours --no-plot --no-log-latency", "--log-latency does nothing with --no-plot"),
]
BENCH = [
    case("bench", "-c 4 -c 8", "-c is given twice", "commas between"),
    case("bench", "-c 4 --concurrency 8", "the same flag"),
    case("bench", "--itl 100 --isl 200", "--itl and --isl are the same flag"),
    case("bench", "-c 0", "--concurrency: 0 is outside"),
    case("bench", "-c four", "whole numbers such as 4,8,16"),
    case("bench", "-c 4 -r 2", "--request-rate belongs to --type request-rate"),
    case("bench", "-r fast", "numbers such as 1,2.5,4"),
    case("bench", "-r nan", "--request-rate: nan"),
    case("bench", "-t ramp", "--ramp START:END"),
    case("bench", "--ramp 1-16", "START:END"),
    case("bench", "-t request-rat", "did you mean request-rate"),
    case("bench", "--seed -1", "--seed", "not a seed"),
    case("bench", "--repeats 0", "--repeats: '0' is not a whole number from 1 to 1000"),
    case("bench", "--request-timeout-s inf", "--request-timeout-s", "above 0"),
    case("bench", "--burstiness 0 -r 2", "--burstiness", "above 0"),
    case("bench", "-c 4 --burstiness 2", "--burstiness belongs to --type request-rate"),
    case("bench", "--shared-prefix 9999", "shared_prefix_tokens is 9999"),
    case("bench", "--shared-prefix -1", "--shared-prefix"),
    case("bench", "--lengths gauss:1", "--lengths: 'gauss:1' is no distribution", "uniform:0.8-1.0"),
    case("bench", "--lengths uniform:1.0-0.8", "--lengths", "the smaller one first"),
    case("bench", "--lengths file:nowhere.csv", "--lengths: nowhere.csv: cannot be read", "give a CSV"),
    case("bench", "--lengths file:kept.txt", "--lengths: kept.txt: needs the columns input_tokens and output_tokens"),
    case("bench", "--lengths lognormal:0.5,max=100", "at most 100 tokens of a request", "give a larger max"),
    case("bench", "--lengths uniform:0.8-1.0 --shared-prefix 4000", "the shortest request has 4000 input tokens"),
    case("bench", "--slo-quantile 0.9", "--slo-quantile is for --slo"),
    case("bench", "--slo-start 2", "--slo-start is for --slo"),
    case("bench", "--slo-resolution 0.2 -c 4", "--slo-resolution is for --slo"),
    case("bench", "--slo ttft_ms=5 --slo-resolution 9", "--slo-resolution", "at most 1"),
    case("bench", "--slo tpot=5", "tpot_ms=50"),
    case("bench", "--slo tpot_ms=5 --smoke", "--smoke", "--slo"),
    case("bench", "--resume --force", "give one of the two"),
    case("bench", "--out kept.txt", "--out kept.txt", "is a file"),
    case("bench", "--out kept.txt/inside", "--out kept.txt/inside", "kept.txt is a file"),
    case("bench", "-u localhost:8000", "--base-url", "http://HOST:PORT"),
    case("bench", "-u http://127.0.0.1:9 -e x", "no OpenAI server answers"),
    case("bench", "-u http://127.0.0.1:9 -e ../x", "--exp-name '../x'"),
    case("bench", "-u http://127.0.0.1:9 -e x --tokenizer ./nowhere", "--tokenizer './nowhere': no such folder"),
    case("bench", "-u http://127.0.0.1:9 -e x --tokenizer ours", "--tokenizer ours: a folder without a tokenizer"),
    case("bench", "--plan", "--plan is not a flag"),
    case("bench", "--dry-run -r 2 --hold-s 1e300", "--hold-s: must be at most 86400, got 1e+300"),
    case(
        "bench", "--dry-run -r 100 --hold-s 20000", "rate 100 held for 20000 s is 2000000 requests", "hold it less long"
    ),
    case("bench", "--dry-run --slo ttft_ms=5 --start-from magic", "--start-from", "'magic'", "plan"),
    case("bench", "run", "FILE|NAME is needed"),
    case("bench", "run nowhere", "experiment 'nowhere'", "configs/sweeps/"),
    case("bench", "run local-pack-vs-spred --dry-run", "did you mean local-pack-vs-spread"),
    case("bench", "run local-pack-vs-spread --dry-run --out kept.txt", "--out kept.txt", "is a file"),
    case("bench", "run experiment.yaml --dry-run", "name: must be a name for a folder", "'x/y'"),
    case("bench", "run typo.yaml --dry-run", "deployments.0.lable: is not a known key", "did you mean label"),
    case("bench", "run impossible.yaml --dry-run", "gpu_memory_utilization=9"),
    case("bench", "run not.yaml", "not valid YAML"),
    case("bench", "ratio --prefill ours --decode ours", "--prefill ours: its levels are mixed", "prefill-only"),
    case("bench", "ratio --prefill nowhere --decode ours", "nowhere does not exist"),
    case("bench", "ratio --prefill kept.txt --decode ours", "kept.txt is a file"),
    case("bench", "ratio --prefill ours", "--decode is needed"),
    case("bench", "runn experiment.yaml", "'runn' is neither run nor ratio", "did you mean run?"),
    case("bench", ("-u", "http://a b:9", "-e", "x"), "--base-url 'http://a b:9'", "http://HOST:PORT"),
    case("bench", ("-u", "http://127.0.0.1:9\n", "-e", "x"), "--base-url", "http://HOST:PORT"),
    case("bench", ("-u", "http://127.0.0.1:9/v1?x=1", "-e", "x"), "--base-url", "http://HOST:PORT"),
    case("bench", "--repeats 99999999999999999", "--repeats", "from 1 to 1000"),
    case("bench", "--prompts-per-level 99999999999", "--prompts-per-level", "from 1 to 1000000"),
    case("bench", "--out loop", "--out loop: cannot be written (a loop of links)"),
    case("bench", "-u http://127.0.0.1:9 -e x --tokenizer é/ü", "--tokenizer 'é/ü': no such folder"),
    case("bench", ("-c", ""), "-c", "needs a value"),
    case("bench", ("run", "\n", "--dry-run"), "FILE|NAME needs a value"),
    case("bench", ("run", "local-pack-vs-spread", "--dry-run", "--out", ""), "--out needs a value"),
    case("bench", "run repeats.yaml --dry-run", "repeats: must be at most 1000, got 1000000000"),
    case("bench", "run tokenizer.yaml --dry-run", "tokenizer=./nowhere: no such folder"),
    case("bench", "run deep.yaml --dry-run", "deep.yaml: not valid YAML"),
]
BENCH += [
    case("bench", "-c 4 --dry-run -e a/b", "--exp-name 'a/b'", "it names a folder"),
    case("bench", "-c 4 --dry-run -e .", "--exp-name '.'"),
    case("bench", "-c 4 --client-processes 99999999", "is not a number of processes from 1 to 1024"),
    case("bench", "-c 4,4", "4 is given twice; use --repeats"),
    case("bench", "-r 2 -t concurrency", "--request-rate belongs to --type request-rate"),
    case("bench", "-t ramp --ramp 0:5", "expected START:END in requests/s above 0"),
    case("bench", "--soak 99999999999 -c 4", "at most 1440 minutes, a day"),
    case("bench", "--smoke --soak 5", "--soak holds one load"),
    case("bench", "--slo ttft_ms=5 --slo-start 2 --start-from plan", "give one of the two"),
    case("bench", "--start-from plan -c 4", "--start-from is for --slo, which is not given"),
    case("bench", "-u http://x:99999 -c 4 --dry-run", "expected http://HOST:PORT"),
    case("bench", "run none.yaml --dry-run", "deployments: must have at least 1 of them"),
    case("bench", "run two-loads.yaml --dry-run", "not concurrency and rate_rps"),
    case("bench", "run two-names.yaml --dry-run", "two deployments are called collocated-1xtp1"),
    case("bench", "run too-large.yaml --dry-run", "collocated-4xtp8 does not fit local-2"),
    case("bench", "run slo.yaml --dry-run", "slo.ttft_ms: must be above 0, got -4"),
    case("bench", "run flag.yaml --dry-run", "--tpp is not a flag; did you mean --tp"),
    case("bench", "run seed.yaml --dry-run", "prompts are drawn from the experiment's own"),
    case("bench", "run long.yaml --dry-run", "has 1000250 tokens, its max_model_len is 131072"),
    case("bench", "run local-pack-vs-spread --dry-run --until lead=5", "'lead=5' is no difference to resolve"),
    case("bench", "ratio --prefill empty --decode ours", "empty holds no result files"),
]
OTHERS = [
    case("chaos", "", "give one of FILE and --all"),
    case("chaos", "short --all", "give one of FILE and --all"),
    case("chaos", "shrot", "'shrot' is neither a file nor a plan", "did you mean short"),
    case("chaos", "nowhere.yaml", "nowhere.yaml: cannot be read"),
    case("chaos", "faults.yaml", "'kill_prefil_engine' is not a kind of fault", "did you mean kill_prefill_engine"),
    case("chaos", "waits.yaml", "limit_s 5 must be above hold_s 8"),
    case("chaos", "short --seed -1", "--seed", "not a seed"),
    case("chaos", "short --concurrency 0", "--concurrency", "at least 1"),
    case("chaos", "short --concurrency 1000", "--concurrency: must be at most 256, got 1000"),
    case("chaos", "short --duration-s 1", "--duration-s: must be at least 10, got 1"),
    case("chaos", "short --base-url nonsense", "'nonsense'", "http://HOST:PORT"),
    case("chaos", "short", "no launcher of this machine", "--not-mine"),
    case("chaos", "short --dry-run", "no launcher of this machine", "launch_gptoss.py"),
    case("chaos", "short --launch", "--launch chooses the plans itself"),
    case("chaos", "short --short", "--short is for --launch, which is not given"),
    case("ratio", "--prefil ours --decode ours", "--prefil is not a flag; did you mean --prefill?"),
    case("ratio", "", "--prefill, --decode are needed"),
    case("check-transfer", "--backends UCX,UCX", "UCX is there twice; keep one"),
    case("check-transfer", "--prefill-tp 3 --decode-tp 2", "one must divide the other"),
    case("demo", "--itl 99999999", "tiny-gptoss has a context of 131072 tokens"),
    case("two-hosts", "down now", "unexpected argument 'now': only shell takes a command"),
    case("two-hosts", "up --rate 0", "link rate '0': from 1mbit to 100gbit"),
    case("two-hosts", "up --delay-ms 99999999", "from 0 to 1000 ms one way"),
    case("weights", "--here --model ./nowhere", "model ./nowhere: no such folder"),
    case("experiment", "local-pack-vs-spread --dry-run --port 0", "--port", "from 1 to 65535"),
    case("experiment", "local-pack-vs-spread --dry-run --client-processes 0", "--client-processes"),
    case("calibrate", "", "--runs is needed"),
    case("calibrate", "--runs ours --start h99", "hardware 'h99'"),
    case("calibrate", "--runs ours --rounds -1", "--rounds"),
    case("calibrate", "--runs nowhere --start cpu-vllm-0.29", "nowhere does not exist"),
    case("calibrate", "--runs ours --out no/x.yaml", "--out no/x.yaml", "no folder"),
    case("calibrate", "--runs ours --name x", "--name", "--out"),
    case("calibrate", "--runs ours ours --start cpu-vllm-0.29", "--runs names ours twice"),
    case("calibrate", "--runs ours --out kept.txt --name ../x", "--name '../x'"),
    case("calibrate", "--runs ours --out kept.txt", "--out kept.txt: is there already"),
    case("check-transfer", "--tokens 999999999999", "--tokens 999999999999: at most 100000000"),
    case("check-transfer", "--repeats 999999999999999999", "--repeats", "from 1 to 100000"),
    case("check-transfer", "--json loop", "--json loop: cannot be written (a loop of links)"),
    case("check-transfer", ("--model", ""), "--model needs a value"),
    case("first-hour", "--dry-run --out ours", "has other results", "choose another --out"),
    case("first-hour", "--dry-run --resume --out empty", "leave it out"),
    case("install-wheel", "empty.whl", "empty.whl: not a wheel (no zip archive)"),
    case("demo", "--out dangling", "a link to nothing"),
    case("first-hour", ("--dry-run", "--model", ""), "--model needs a value"),
    case("first-hour", "--dry-run --out loop", "--out loop: cannot be written (a loop of links)"),
    case("weights", ("--here", "--model", "\n"), "--model needs a value"),
    case("calibrate", "--runs ours --start cpu-vllm-0.29 --model tiny", "--model tiny", "tiny-gptoss"),
    case("calibrate", "--runs ours --start cpu-vllm-0.29 --cross-validate", "at least 3 experiments"),
    case("calibrate", "--runs ours --days 4,8,4", "--days is for", "--cross-validate"),
    case("calibrate", "--runs ours --days 4,8", "three percentages"),
    case("check-transfer", "--seed -1", "--seed", "not a seed"),
    case("check-transfer", "--plot x.gif", "--plot x.gif", ".gif is no format"),
    case("check-transfer", "--plot no/x.png", "--plot no/x.png", "no folder"),
    case("check-transfer", "--json no/x.json", "--json no/x.json", "no folder"),
    case("check-transfer", "--json .", "is a folder"),
    case("check-transfer", "--backends NOPE", "NOPE is not a NIXL backend"),
    case("check-transfer", "--ucx-tls banana", "'banana' is not a transport of UCX"),
    case("check-transfer", "--backends LIBFABRIC --ucx-tls tcp", "--ucx-tls is for the backend UCX"),
    case("check-transfer", "--model gpt-oss", "--model gpt-oss", "gpt-oss-120b"),
    case("check-transfer", "--repeats 2", "--repeats 2", "5 or more"),
    case("check-transfer", "--local 1000", "--local", "from 1 to 64"),
    case("check-transfer", "--plant-fault swap-block", "did you mean swap-blocks"),
    case("check-transfer", "--tokens 1,x", "--tokens", "whole number"),
    case("check-transfer", "--strategy packed", "--strategy 'packed': choose from pack, spread"),
    case("doctor", "--here --backends nope", "capitals"),
    case("doctor", "--here --json no/x.json", "--json no/x.json", "no folder"),
    case("doctor", "--here --quick --backends LIBFABRIC", "--backends does nothing with --quick"),
    case("install-wheel", "", "WHEEL is needed"),
    case("install-wheel", "kept.txt", "kept.txt: not a wheel"),
    case("install-wheel", "nowhere.whl", "nowhere.whl", "No such file"),
    case("install-wheel", "wheel.whl --target here", "--target here", "absolute"),
    case("install-wheel", "wheel.whl --backends nope", "capitals"),
    case("install-wheel", "wheel.whl --module not-one", "--module 'not-one'"),
    case("two-hosts", "", "is needed"),
    case("two-hosts", "upp", "'upp': choose from up, down, shape, shell"),
    case("two-hosts", "up --rate fast", "'fast'", "1gbit"),
    case("two-hosts", "up --delay-ms soon", "--delay-ms", "milliseconds"),
    case("wire", "--rate fast", "'fast'", "1gbit"),
    case("wire", "--tokens many", "--tokens", "whole number"),
    case("demo", "--port 99999", "--port", "from 1 to 65535"),
    case("demo", "-c many", "whole numbers such as 4,8,16"),
    case("demo", "--itl 0", "--itl", "at least 1"),
    case("demo", "--out kept.txt", "--out", "is a file"),
    case("demo", "--out ours", "not empty"),
    case("first-hour", "--dry-run --port 0", "--port", "from 1 to 65535"),
    case("first-hour", "--dry-run --model gpt-oss-12b", "--model gpt-oss-12b", "did you mean gpt-oss-120b"),
    case("first-hour", "--dry-run --out kept.txt", "--out kept.txt", "is a file"),
    case("first-hour", "--local --model gpt-oss-120b", "--local serves tiny-gptoss"),
    case("weights", "--here --model gpt-oss-12b", "did you mean gpt-oss-120b"),
    case("weights", "--here --timeout-s never", "--timeout-s", "above 0"),
    case("launch", (*PACK, "--env", "tcp"), "--env tcp", "no tcp", "--env tcp=VALUE"),
    case("launch", (*PACK, "--accept-wire", "tcpp"), "did you mean tcp"),
    case("", "benhc", "'benhc' is not a command", "did you mean bench"),
]
CASES = [*LAUNCH, *PLAN, *WORKLOAD, *VIZ, *BENCH, *OTHERS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results and files, none of which a wrong command may touch."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "gone")
    folders.write(folder / "ours", folders.deployments(1)[0], repeats=1)
    (folder / "empty").mkdir()
    published = json.loads((PUBLISHED / "results-of-tuesday" / "conc4.json").read_text())
    for name, changes in (
        ("unanswered_1xtp2", {"completed": 0, "total_input_tokens": 0, "total_output_tokens": 0}),
        ("nan_1xtp2", {key: float("nan") for key in published if key.endswith("_ms")}),
    ):
        (folder / name).mkdir()
        (folder / name / "conc4.json").write_text(json.dumps({**published, **changes}))
    return folder


@pytest.fixture
def untouched(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(place / "cache"))
    before = contents(place)
    yield
    assert contents(place) == before


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def refused(out: str, err: str, messages: tuple[str, ...]) -> None:
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("error: "), err
    assert "Traceback" not in err and "Input should be" not in err and "Errno" not in err
    assert len(err) < 700
    missing = [part for part in messages if part not in err]
    assert not missing, f"{missing} not in {err}"


def test_there_are_enough_of_them() -> None:
    assert len({(each.command, each.words) for each in CASES}) == len(CASES) >= 150


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("each", CASES, ids=[f"{c.command} {' '.join(c.words)}"[:70].strip() or "-" for c in CASES])
def test_one_line_and_nothing_touched(each: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert pdlab.main([each.command, *each.words] if each.command else each.words) == 2
    refused(*capsys.readouterr(), each.messages)


SHIMS = [(script, next(each for each in CASES if each.command == name)) for name, script in SCRIPTS.items()]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("script", "each"), SHIMS, ids=[script for script, _ in SHIMS])
def test_a_script_answers_as_its_command_does(script: str, each: Case, place: Path) -> None:
    words = [*([] if script.endswith(".sh") else [sys.executable]), str(ROOT / script)]
    done = subprocess.run([*words, *each.words], capture_output=True, text=True, timeout=300, cwd=place)
    assert done.returncode == 2
    refused(done.stdout, done.stderr, each.messages)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("words", [["viz", "--exps"], ["viz", "--audit"], ["plan", "--compare"]], ids=" ".join)
def test_a_folder_that_may_not_be_searched(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made up, for root may search everything."""

    def closed(call: Callable[..., object]) -> Callable[..., object]:
        def refuse(path: object = ".", *args: object, **kwargs: object) -> object:
            if isinstance(path, str | os.PathLike) and Path(path).name.startswith("closed"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return refuse

    for name in ("stat", "lstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, closed(getattr(os, name)))
    assert pdlab.main([*words, "closed_1xtp2"]) == 2
    refused(*capsys.readouterr(), ("closed_1xtp2: cannot be searched (Permission denied)",))
