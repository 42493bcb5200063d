"""The start of a search from the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdlab.bench.slo_search import Search
from pdlab.cli import bench, slo_start
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.workload import Slo, Workload
from pdlab.deploy.endpoint import Running, save_running
from pdlab.results.schema import Manifest

URL = "http://127.0.0.1:9"
SHORT = Workload(input_tokens=2000, output_tokens=4)


def publish(monkeypatch: pytest.MonkeyPatch, cache: Path, model: str = "gpt-oss-120b") -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(cache))
    deployment = Deployment(model=model, topology=parse_label("collocated-1xtp8"))
    manifest = Manifest(origin="measured", label=deployment.label, deployment=deployment, gpus=8)
    save_running(Running(base_url=URL, model_id="m", tokenizer="t", manifest=manifest))


def test_it_begins_where_the_simulator_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish(monkeypatch, tmp_path)
    search = Search(slo=Slo(ttft_s=0.5, stall_s=1.0, quantile=0.8))
    found, words = slo_start.from_plan(search, SHORT, URL, None)
    assert found.start_rps is not None and 5 < found.start_rps < 200
    assert found.step == 1.25 and found.slo == search.slo and found.confidence == search.confidence
    assert words.startswith(f"{search.slo.label}: on the simulator between ")
    again, _ = slo_start.from_plan(search, SHORT, URL, "h100-vllm-0.11")
    assert again == found, "the same every time"


@pytest.mark.parametrize(
    ("slo", "workload", "model", "words"),
    [
        (Slo(stall_s=1.0), SHORT, "gpt-oss-120b", "gaps between chunks are not simulated; bound TTFT"),
        (Slo(ttft_s=1.0), Workload(mode="decode-only"), "gpt-oss-120b", "--mode decode-only is not simulated"),
        (Slo(ttft_s=1.0), SHORT, "somebody/else", "the shape of somebody/else is not known; give --slo-start"),
    ],
)
def test_what_is_not_simulated(
    slo: Slo, workload: Workload, model: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(monkeypatch, tmp_path, model)
    with pytest.raises(UsageError, match=words):
        slo_start.from_plan(Search(slo=slo), workload, URL, None)


def test_nothing_is_deployed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
    assert bench.main(["--slo", "ttft_ms=500", "--start-from", "plan", "-u", URL]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --start-from plan: nothing says what is deployed at {URL}; launch it")
