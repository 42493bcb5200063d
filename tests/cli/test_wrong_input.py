"""Wrong command lines of every command: one line that says what is wrong, exit code 2, no file touched.

golden/wrong/COMMAND.txt has each of them behind ``$``, and its error below. A line ``= NAME TEXT`` before it makes a
file, with Python's escapes. A new mistake gets a line ``$ COMMAND ...``, and `make golden` writes the error: no other
test has its own list of command lines that are refused before anything starts. In these files PUBLISHED, PLACE and LONG
stand for what these names have here, and a backslash with an n for a new line in a word.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import folders, golden

from pdlab import __main__ as pdlab
from pdlab.core.commands import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
WRONG = Path(__file__).with_name("golden") / "wrong"
PUBLISHED = ROOT / "tests" / "data" / "published"
LONG = "a" * 300
FILES = {
    "not.yaml": "topology: [\n",
    "faults.yaml": "faults: [kill_prefil_engine]\n",
    "waits.yaml": "faults: [all]\nhold_s: 8\nlimit_s: 5\n",
    "twice.yaml": "model: gpt-oss-120b\nmodel: gpt-oss-20b\ntopology: {kind: collocated, pool: {tp: 2}}\n",
    "unknown-key.yaml": "modle: gpt-oss-120b\ntopology: {kind: collocated, pool: {tp: 2}}\n",
    "engine.yaml": "topology: {kind: collocated, pool: {tp: 2}}\nengine_kwargs: {max_num_seq: 4}\n",
    "impossible.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{label: collocated-1xtp1, engine_arg: "
    "{gpu_memory_utilization: 9}}]\nworkloads: [{}]\nloads: [{concurrency: [1]}]\n",
    "until.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{label: collocated-2xtp1}, {label: collocated-1xtp1}]\n"
    "workloads: [{}]\nloads: [{concurrency: [1, 4]}]\nrepeats: 3\n",
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
    "tokenizer.yaml": "name: x\nwhere: {local: 2}\ndeployments: [{label: collocated-1xtp1, engine_arg: "
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
    "no-topology.yaml": "model: gpt-oss-120b\n",
    "reserved.yaml": "topology: {kind: collocated, pool: {}}\nengine_kwargs: {model: x}\n",
    "latin.yaml": "\udcff",
    "no-layers.yaml": "name: x\n",
    "no-nodes.yaml": "name: x\nnodes: []\n",
    "same-ids.yaml": "nodes: [{id: a, gpus: 8}, {id: a, gpus: 8}]\n",
    "free-gpu.yaml": "nodes: [{id: a, gpus: 2, free_gpus: [2]}]\n",
    "no-cpus.yaml": "nodes: [{id: a, gpus: 8, gpu_type: H100}, {id: b, cpus: 4, head: true}]\n",
    "bad-nic.yaml": "nodes: [{id: a, gpus: 8, nic: {kind: wifi}}]\n",
    "few-cpus.yaml": "nodes: [{id: a, gpus: 8, cpus: 4}]\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results and files, none of which a wrong command may touch."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
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


def refused(out: str, err: str) -> str:
    """The error, which is one line."""
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("error: "), err
    assert "Traceback" not in err and "Input should be" not in err and "Errno" not in err
    assert len(err) < 700
    return err


class Case(NamedTuple):
    """A command line, and the files that are made for it."""

    files: dict[str, str]
    line: str


def cases(command: str) -> Iterator[Case]:
    """Those of a stored file."""
    files: dict[str, str] = {}
    for line in (WRONG / f"{command}.txt").read_text(encoding="utf-8").split("\n"):
        mark, _, rest = line.partition(" ")
        if mark == "=":
            name, _, files[name] = rest.partition(" ")
        elif mark == "$":
            yield Case(files, rest)
            files = {}


def words_of(line: str) -> list[str]:
    return shlex.split(line.replace("\\n", "\n").replace("PUBLISHED", str(PUBLISHED)).replace("LONG", LONG))


def shown(error: str, place: Path) -> str:
    """As it is stored: without the paths of this machine, and without the reasons that Python's JSON reader gives."""
    error = re.sub(r"((?:as JSON|config\.json cannot be read) \()[^;\n]*\)", r"\1...)", error)
    return error.replace(str(PUBLISHED), "PUBLISHED").replace(str(place), "PLACE")


COMMANDS = sorted(path.stem for path in WRONG.glob("*.txt"))


def test_there_are_enough_of_them() -> None:
    every = [str(case) for command in COMMANDS for case in cases(command)]
    assert len(set(every)) == len(every) >= 800
    assert {"launch", "bench", "viz", "plan"} < {*COMMANDS} <= {*pdlab.COMMANDS, "pdlab"}


@pytest.mark.golden
@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_and_nothing_touched(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for files, line in cases(command):
        made = {place / name: text.encode().decode("unicode_escape").encode() for name, text in files.items()}
        for path, data in made.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        assert pdlab.main(words_of(line)) == 2, line
        lines += [f"= {name} {text}\n" for name, text in files.items()]
        lines.append(f"$ {line}\n{shown(refused(*capsys.readouterr()), place)}")
        for path, data in made.items():
            assert path.read_bytes() == data
            path.unlink()
            if path.parent != place:
                path.parent.rmdir()
    golden.compare("".join(lines), WRONG / f"{command}.txt")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("command", "script"), SCRIPTS.items(), ids=SCRIPTS.values())
def test_a_script_answers_as_its_command_does(command: str, script: str, place: Path) -> None:
    words = [*([] if script.endswith(".sh") else [sys.executable]), str(ROOT / script)]
    line, error = (WRONG / f"{command}.txt").read_text().splitlines()[:2]
    done = subprocess.run([*words, *words_of(line[2:])[1:]], capture_output=True, text=True, timeout=300, cwd=place)
    assert done.returncode == 2
    assert shown(refused(done.stdout, done.stderr), place) == f"{error}\n"


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
    assert "closed_1xtp2: cannot be searched (Permission denied)" in refused(*capsys.readouterr())
