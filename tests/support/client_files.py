"""Files that real clients wrote, shortened, and the clients' own figures of them: tests/data/clients.

``NAME/`` has the files, ``NAME.json`` the client, its version, and its figures: load -> column of our table -> figure.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pdlab
from pdlab.report.load import Row

KEPT = Path(__file__).resolve().parents[1] / "data" / "clients"
EQUAL = 1e-3
PRINTED = 0.006  # two decimals are printed
Figures = dict[float, dict[str, float]]

# The distribution that has a client's version.
DISTRIBUTIONS = {"vllm-sweep": "vllm", "genai-bench": "genai-bench"}
# Of many requests, and of long texts and lines, so much is kept.
MOST_REQUESTS, LONGEST = 2, 200
_SUMMARIES = ("_aggregate.", "_sweep.")  # of AIPerf's levels, which are read one by one
_LISTS_OF_REQUESTS = {"successful", "requests"}
_LEFT_OUT = {"pdf", "mean_ci", "percentile_cis"} | {"text", "image", "video", "audio", "tool_call"}  # of guidellm
_TEXTS = {"generated_texts", "output", "request_args", "prompt", "cmd", "cli_command", "platform", "str", "headers"}


def compared(folder: Path, own: Figures, equal: float) -> list[Row]:
    """The rows of our table, whose figures are those of the client: the mean of repeats of one load."""
    rows = pdlab.load(folder, gpus={folder.name: 2}).levels()
    for load, figures in own.items():
        of_load = [row for row in rows if row["load"] == load]
        assert of_load and all(row["valid"] for row in of_load), [row["reasons"] for row in of_load]
        ours = {column: statistics.mean(float(row[column] or "nan") for row in of_load) for column in figures}
        assert len(figures) >= 2
        assert ours == pytest.approx(figures, rel=equal, abs=PRINTED)
    assert {row["load"] for row in rows} == set(own)
    return rows


def keep(name: str, folder: Path, own: Figures, names: Mapping[str, str], program: str) -> None:
    """Replace what is kept of a client: the result files of ``folder``, shortened, with ``names`` -> what is written
    in their place."""
    shutil.rmtree(KEPT / name, ignore_errors=True)
    for file in sorted(folder.rglob("*")):
        if file.suffix not in (".json", ".jsonl", ".csv", ".yaml") or any(part.startswith(".") for part in file.parts):
            continue
        text = _shortened(file)
        for real, shown in {**names, platform.node(): "host"}.items():
            text = text.replace(real, shown)
        assert not any(place in text for place in (str(Path.home()), "/tmp/", str(Path.cwd()))), file
        kept = KEPT / name / file.relative_to(folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
    figures = {f"{load:g}": columns for load, columns in own.items()}
    kept_figures = {"client": DISTRIBUTIONS.get(name, name), "version": _version(name, program), "figures": figures}
    (KEPT / f"{name}.json").write_text(json.dumps(kept_figures, indent=1) + "\n")


def _shortened(file: Path) -> str:
    text = file.read_text()
    summary = any(part in file.name for part in _SUMMARIES)
    if summary and file.suffix == ".csv":
        return "".join(line[:LONGEST].rstrip() + "\n" for line in text.splitlines()[: 2 * MOST_REQUESTS])
    if file.suffix == ".jsonl" and "results" not in file.name:
        lines = [json.dumps(_short("", json.loads(line))) for line in text.splitlines() if line.strip()]
        return "\n".join(lines[:MOST_REQUESTS] if file.name.startswith("profile_export") else lines) + "\n"
    if file.suffix == ".json":
        content = json.loads(text)
        if isinstance(content, list) and file.name.startswith("per_request"):
            content = content[:MOST_REQUESTS]
        if summary:
            content = {name: value for name, value in content.items() if not isinstance(value, list | dict)}
            return json.dumps(content | {"metrics": {}}, indent=1) + "\n"
        return json.dumps(_short("", content), indent=1) + "\n"
    return text


def _short(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(name, each) for name, each in value.items() if name not in _LEFT_OUT}
    if isinstance(value, list):
        if key in _LISTS_OF_REQUESTS and value and isinstance(value[0], dict):
            value = value[:MOST_REQUESTS]
        return [_short(key, each) for each in value]
    return "" if isinstance(value, str) and (key in _TEXTS or len(value) > LONGEST) else value


def _version(name: str, program: str) -> str:
    """Of the distribution, as the client's own Python knows it."""
    python = program if Path(program).name.startswith("python") else str(Path(program).parent / "python")
    distributions = [DISTRIBUTIONS.get(name, name), f"{DISTRIBUTIONS.get(name, name)}-cpu"]
    code = (
        "import sys; from importlib.metadata import distributions as d; "
        f"print(*[x.version for x in d() if (x.metadata['Name'] or '').lower() in {distributions!r}])"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True)
    return done.stdout.split()[0]
