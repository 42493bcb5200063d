"""The start of a search from the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launched import running

from pdlab.bench.experiment import schedule
from pdlab.bench.experiment.schedule import make_schedule
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.cli import experiment as cli_experiment
from pdlab.cli import slo_start
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.schema import to_yaml
from pdlab.core.workload import Slo, Workload
from pdlab.deploy.endpoint import save_running
from pdlab.plan.error_catalog import error_after
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import FitDomain, signed

URL = "http://127.0.0.1:9"
SHORT = Workload(input_tokens=2000, output_tokens=4)


def publish(monkeypatch: pytest.MonkeyPatch, cache: Path, model: str = "gpt-oss-120b") -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(cache))
    deployment = Deployment(model=model, topology=parse_label("collocated-1xtp8"))
    save_running(running(URL, deployment=deployment, gpus=8))


def test_it_begins_where_the_simulator_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish(monkeypatch, tmp_path)
    search = SloSearchOptions(slo=Slo(ttft_s=0.5, stall_s=1.0, quantile=0.8), start_from="plan")
    started, words = slo_start.from_plan(search, SHORT, URL)
    assert started.start_rps is not None and 5 < started.start_rps < 200
    assert started.step == 1.25 and started.slo == search.slo and started.confidence == search.confidence
    assert words.startswith(f"{search.slo.label}: on the simulator between ")
    assert "(extrapolated: " in words and f"input length {SHORT.input_tokens}" in words
    again, _ = slo_start.from_plan(search.model_copy(update={"hardware": "h100-vllm-0.11"}), SHORT, URL)
    assert again == started and started.start_from is None, "the same every time"


@pytest.mark.usefixtures("tabulated")
def test_tables_are_judged_as_a_prediction_by_tables_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their errors include those of another TP and other lengths. They are of closed loops."""
    publish(monkeypatch, tmp_path)
    fit = FitDomain(
        model="gpt-oss-120b", gpu="H200", version="0.18", modes=("collocated",), tp=(4,), input_tokens=(1024, 1024),
        output_tokens=(1024, 1024), in_flight_per_gpu=(1.0, 8.0),
    )  # fmt: skip
    made = computed("H200", "vllm", "0.18").model_copy(update={"error": error_after(3)})
    (tmp_path / "mine.yaml").write_text(to_yaml(signed(made, fit)))
    search = SloSearchOptions(slo=Slo(ttft_s=0.5), start_from="plan", hardware=str(tmp_path / "mine.yaml"))
    _, words = slo_start.from_plan(search, Workload(input_tokens=2000, output_tokens=256), URL)
    assert "(extrapolated: errors are known of public stacks, and they are closed loops)" in words


@pytest.mark.parametrize(
    ("slo", "workload", "model", "words"),
    [
        (Slo(stall_s=1.0), SHORT, "gpt-oss-120b", "gaps between chunks are not simulated; bound TTFT"),
        (Slo(ttft_s=1.0), Workload(mode="decode-only"), "gpt-oss-120b", "mode decode-only is not simulated"),
        (Slo(ttft_s=1.0), SHORT, "somebody/else", "--model somebody/else: "),
    ],
)
def test_what_is_not_simulated(
    slo: Slo, workload: Workload, model: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(monkeypatch, tmp_path, model)
    with pytest.raises(UsageError, match=words):
        slo_start.from_plan(SloSearchOptions(slo=slo), workload, URL)


def experiment(folder: Path, **slo: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "mine",
                "where": {"cluster": "auto"},
                "deployments": [{"label": "collocated-4xtp2"}, {"label": "collocated-1xtp8"}],
                "workloads": [{"input_tokens": 2000, "output_tokens": 4}],
                "loads": [{"slo": {"ttft_ms": 500, "quantile": 0.8, **slo}}],
                "repeats": 2,
            }
        )
    )
    return path


def test_an_experiment_begins_each_search_where_its_deployment_ends_on_the_simulator(tmp_path: Path) -> None:
    plan = make_schedule(str(experiment(tmp_path, start_from="plan")))
    begun, words = slo_start.of_experiment(plan)
    starts: dict[str, set[Any]] = {}
    for visit in begun.visits:
        ((search,),) = [part.searches for part in visit.parts]
        assert search.step == 1.25 and search.start_from is None
        starts.setdefault(visit.configuration.name, set()).add(search.start_rps)
    assert [len(each) for each in starts.values()] == [1, 1], "the same in every repeat"
    (four,), (one,) = starts["collocated-4xtp2"], starts["collocated-1xtp8"]
    assert four > 1.2 * one, "four engines prefill more than one of all GPUs"
    assert len(words) == 2 and all(": on the simulator " in line for line in words)
    assert schedule.settings_of(begun.file) == schedule.settings_of(plan.file), "the record keeps what was asked"
    untouched = make_schedule(str(experiment(tmp_path)))
    assert slo_start.of_experiment(untouched) == (untouched, [])


def test_what_cannot_be_simulated_is_said_before_anything_is_launched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_experiment, "run", lambda plan, options: pytest.fail("launched"))
    path = experiment(tmp_path, start_from="plan", hardware="abacus")
    assert cli_experiment.main([str(path), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert "abacus" in printed and "collocated-4xtp2" in printed
    assert cli_experiment.main([str(path), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "q0.8, from what the simulator finds" in capsys.readouterr().out
