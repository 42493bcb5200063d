"""Wrong command lines and files of the launcher: one line on stderr, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.cli import launch

ON_X2 = ["--cluster", "p5.48xlarge-x2", "--dry-run"]

# (id, command line, what the one line must say)
LINES: list[tuple[str, list[str], list[str]]] = [
    ("tp-fraction", ["--pd-pack", "--d-tp", "1.5", *ON_X2], ["--d-tp", "'1.5'"]),
    ("tp-word", ["--pd-pack", "--d-tp", "four", *ON_X2], ["--d-tp", "'four'"]),
    ("tp-flag-pd", ["--pd-pack", "--tp", "2", *ON_X2], ["--tp", "--p-"]),
    ("backend-collocated", ["--collocated", "--use-libfabric", *ON_X2], ["--kv-backend", "collocated"]),
    ("two-backends", ["--pd-pack", "--use-ucx", "--use-libfabric", *ON_X2], ["--use-libfabric", "--use-ucx"]),
    ("backend-empty", ["--pd-pack", "--kv-backend", "UCX,,", *ON_X2], ["UCX,,"]),
    ("env-no-name", ["--pd-pack", "--env", "=tcp", *ON_X2], ["--env '=tcp'", "NAME=VALUE"]),
    ("env-not-exported", ["--pd-pack", "--p-env", "PDLAB_ABSENT", *ON_X2], ["--p-env PDLAB_ABSENT", "export it"]),
    ("env-tls", ["--pd-pack", "--ucx-env", "UCX_TLS=tcp", *ON_X2], ["--env: UCX_TLS", "--ucx-tls"]),
    ("env-of-ray", ["--pd-pack", "--d-env", "RAY_SERVE_ENABLE_HA_PROXY=1", *ON_X2], ["--d-env", "`ray start`"]),
    ("env-secret", ["--pd-pack", "--env", "HF_TOKEN=hf_abcdefgh", *ON_X2], ["HF_TOKEN", "name only"]),
    ("env-twice", ["--pd-pack", "--env", "A=1", "A=2", *ON_X2], ["--env A is given twice"]),
    ("p-env-collocated", ["--collocated", "--p-env", "A=1", *ON_X2], ["--p-env", "collocated"]),
    ("prefill-timeout-zero", ["--pd-pack", "--prefill-timeout-s", "0", *ON_X2], ["--prefill-timeout-s", "above 0"]),
    ("prefill-absent-zero", ["--pd-pack", "--prefill-absent-s", "0", *ON_X2], ["--prefill-absent-s", "above 0"]),
    ("prefill-timeout-week", ["--pd-pack", "--prefill-timeout-s", "604800", *ON_X2], ["--prefill-timeout-s", "86400"]),
    ("prefill-failure-word", ["--pd-pack", "--on-prefill-failure", "again", *ON_X2], ["'again'", "retry, local, fail"]),
    ("prefill-failure-none", ["--pd-pack", "--on-prefill-failure", "", *ON_X2], ["--on-prefill-failure"]),
    (
        "prefill-failure-twice",
        ["--pd-pack", "--on-prefill-failure", "retry,retry", *ON_X2],
        ["--on-prefill-failure", "each step once"],
    ),
    (
        "prefill-failure-behind-the-last",
        ["--pd-pack", "--on-prefill-failure", "local,retry", *ON_X2],
        ["--on-prefill-failure", "nothing is tried after local"],
    ),
    ("prefill-failure-collocated", ["--collocated", "--on-prefill-failure", "fail", *ON_X2], ["collocated"]),
    (
        "ranks-share-a-port",
        ["--pd-pack", "--p-tp", "1", "--p-dp", "2", "--p-num", "2", "--d-tp", "1", *ON_X2],
        ["prefill replicas 0 and 1", "rank 0", "port", "--p-dp 4"],
    ),
    (
        "tp-kv-heads",
        ["--pd-spread", "--p-tp", "16", "--d-tp", "8", "--cluster", "p5.48xlarge-x12", "--dry-run"],
        ["16", "8"],
    ),
    ("decode-stages", ["--pd-spread", "--d-pp", "2", *ON_X2], ["decode PP 2", "one pipeline stage", "--d-pp 1"]),
    ("prefill-stages", ["--pd-spread", "--p-pp", "2", *ON_X2], ["prefill PP 2", "one pipeline stage", "--p-pp 1"]),
    ("ep-experts", ["--collocated", "--tp", "1", "--dp", "3", "--ep", *ON_X2], ["3", "128 experts"]),
    ("pp-layers", ["--collocated", "--tp", "1", "--pp", "37", *ON_X2], ["37", "36 layers"]),
    ("model-no-file", ["--collocated", "--model", "nowhere.yaml", *ON_X2], ["nowhere.yaml"]),
    (
        "local-big-model",
        ["--collocated", "--local", "--model", "gpt-oss-120b", "--dry-run"],
        ["--local", "gpt-oss-120b"],
    ),
    ("local-hub-model", ["--collocated", "--local", "--model", "org/name", "--dry-run"], ["--local", "org/name"]),
    ("local-too-small", ["--pd-pack", "--local", "--p-num", "4", "--dry-run"], ["does not fit", "CPU", "--p-num 3"]),
    ("d-engine-arg-ours", ["--pd-pack", "--d-engine-arg", "model=x", *ON_X2], ["--d-engine-arg", "--model"]),
    ("shutdown-dry", ["--shutdown", "--dry-run"], ["--shutdown", "--dry-run"]),
    (
        "pack-too-big",
        ["--pd-pack", "--p-num", "2", *ON_X2],
        ["does not fit", "12 GPUs", "8 of 8", "--p-num 1", "--pd-spread"],
    ),
    (
        "spread-one-node",
        ["--pd-spread", "--p-tp", "8", "--d-tp", "8", "--d-num", "2", *ON_X2],
        ["24 GPUs", "--d-num 1"],
    ),
    ("collocated-too-big", ["--collocated", "--num", "5", *ON_X2], ["5 x 4 GPUs", "--num 4", "1 more node"]),
]

# (id, flag that reads the file, its text, what the one line must say)
FILES: list[tuple[str, str, str, list[str]]] = [
    ("no-topology", "--config", "model: gpt-oss-120b\n", ["topology"]),
    (
        "reserved",
        "--config",
        "topology: {kind: collocated, pool: {}}\nengine_kwargs: {model: x}\n",
        ["model", "--model"],
    ),
    ("not-text", "--config", "\udcff", ["UTF-8"]),
    ("cluster-no-nodes", "--cluster", "name: x\nnodes: []\n", ["nodes"]),
    ("cluster-same-ids", "--cluster", "nodes: [{id: a, gpus: 8}, {id: a, gpus: 8}]\n", ["distinct"]),
    ("cluster-free-gpu", "--cluster", "nodes: [{id: a, gpus: 2, free_gpus: [2]}]\n", ["free_gpus"]),
    ("cluster-bad-nic", "--cluster", "nodes: [{id: a, gpus: 8, nic: {kind: wifi}}]\n", ["nic", "wifi"]),
    ("cluster-few-cpus", "--cluster", "nodes: [{id: a, gpus: 8, cpus: 4}]\n", ["does not fit", "4 CPUs", "--tp 2"]),
    ("shape-no-layers", "--model", "name: x\n", ["source"]),
]


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = launch.main(argv)
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert code == 2 and out == "" and len(errors) == 1, err
    assert errors[0].startswith("error: ") and "Traceback" not in err
    return errors[0]


@pytest.mark.parametrize(("argv", "messages"), [case[1:] for case in LINES], ids=[case[0] for case in LINES])
def test_command_line(argv: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(argv, capsys)
    assert all(word in line for word in messages), line


@pytest.mark.parametrize(("flag", "text", "messages"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_file(flag: str, text: str, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    rest = {
        "--config": ON_X2,
        "--cluster": ["--collocated", "--dry-run"],
        "--model": ["--collocated", *ON_X2],
    }[flag]
    line = complaint([flag, str(path), *rest], capsys)
    assert str(path) in line or "does not fit" in line
    assert all(word in line for word in messages), line


def test_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json" in complaint(["--collocated", "--model", str(tmp_path), *ON_X2], capsys)


def test_folder_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in complaint(["--config", str(tmp_path), *ON_X2], capsys)
