"""Wrong command lines of run_bm.sh: one line that names the flag and the fix, exit code 2, nothing written."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sweep import Oracle, pd_deployment, publish, run_bm

from pdlab.cli import bench
from pdlab.core.workload import Closed, RunKey, Workload
from pdlab.results.schema import Manifest, Run, Summary
from pdlab.results.store import Store

Here = Callable[..., "subprocess.CompletedProcess[str]"]
URL = "@URL"
LINES: list[tuple[str, list[str], str]] = [
    ("name empty", ["-u", URL, "-e", ""], "--exp-name needs a value"),
    ("gpus", ["-u", URL, "--gpus", "0"], "--gpus: '0'"),
    ("gpus against the record", ["-u", URL, "--gpus", "9"], "pd-spread-p1xtp1-d1xtp1 uses 2"),
    ("label against the record", ["-u", URL, "-e", "collocated-4xtp2"], "what runs is pd-spread-p1xtp1-d1xtp1"),
    ("model", ["-u", URL, "-m", "gpt-5"], "--served-model-name 'gpt-5'"),
    ("too long", ["-u", URL, "--itl", "100000"], "--itl + --otl is 100250 tokens"),
]


@pytest.fixture(scope="module")
def cache(shared_oracle: Oracle, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    publish(folder, shared_oracle, tokenizer, pd_deployment())
    return folder


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """`run_bm` without its process, which takes a second. `tests/cli/test_wrong_input.py` runs the script itself."""
    on_term = signal.getsignal(signal.SIGTERM)

    def run(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("PDLAB_CACHE_DIR", str(cache))
        monkeypatch.chdir(cache)
        capsys.readouterr()
        code = bench.main(args)
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, on_term)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def measured_level(manifest: Manifest) -> Run:
    whole = Summary(duration_s=1, completed=1, requests_per_s=1, input_tokens_per_s=1, output_tokens_per_s=1)
    counts: dict[str, Any] = {"num_requests": 1, "completed": 1, "failed": 0, "whole": whole}
    key, load = RunKey(kind="concurrency", value=1), Closed(concurrency=1)
    return Run(origin="measured", label=manifest.label, key=key, workload=Workload(), load=load, **counts)


@pytest.mark.parametrize(("args", "expected"), [line[1:] for line in LINES], ids=[line[0] for line in LINES])
def test_one_line_and_exit_code_2(
    args: list[str], expected: str, cache: Path, shared_oracle: Oracle, run_here: Here
) -> None:
    assert expected in one_line(run_here(*[arg.replace(URL, shared_oracle.url) for arg in args], cache=cache))
    assert not (cache / "bm_results").exists()


def test_a_server_unknown_to_the_launcher_needs_a_name(shared_oracle: Oracle, tmp_path: Path, run_here: Here) -> None:
    assert "--exp-name is needed" in one_line(run_here("-u", shared_oracle.url, cache=tmp_path))


def test_foreign_and_damaged_folders(cache: Path, shared_oracle: Oracle, tmp_path: Path, run_here: Here) -> None:
    base = ["-u", shared_oracle.url, "-c", "2", "--out", str(tmp_path)]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "conc4.json").write_text("{}")
    assert "holds results without a manifest.json" in one_line(run_here(*base, "-e", "foreign", cache=cache))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    assert "manifest.json: cannot be read" in one_line(run_here(*base, "-e", "damaged", cache=cache))
    other = Manifest(origin="measured", label="collocated-1xtp1", gpus=1)
    store = Store(tmp_path / "other")
    store.write_manifest(other)
    store.write(measured_level(other), ())
    assert "was measured with workload" in one_line(run_here(*base, "-e", "other", "--resume", cache=cache))


def test_a_record_that_is_not_true_any_more(
    shared_oracle: Oracle, tokenizer: Path, tmp_path: Path, run_here: Here
) -> None:
    publish(tmp_path, shared_oracle, tokenizer, pd_deployment())
    (record,) = (tmp_path / "running").iterdir()
    record.write_text(record.read_text().replace("model_id: oracle", "model_id: gone"))
    assert "the launcher last started gone" in one_line(run_here("-u", shared_oracle.url, cache=tmp_path))
    record.write_text("model_id: [")
    assert "not valid YAML" in one_line(run_here("-u", shared_oracle.url, cache=tmp_path))


@pytest.mark.usefixtures("warm_client")
def test_tokenizer_that_is_not_there(cache: Path, shared_oracle: Oracle, tmp_path: Path) -> None:
    done = run_bm(
        *("-u", shared_oracle.url, "--tokenizer", str(tmp_path / "none"), "-c", "2", "--out", str(tmp_path)),
        cache=cache,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no such folder" in done.stderr.splitlines()[-1]
    assert "--tokenizer" in done.stderr.splitlines()[-1]
