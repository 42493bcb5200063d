"""Experiments run from files, with the oracle in place of deployments: order, failures, interruption, search."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.processes import wait_for
from support.sweep import BUSY_MACHINE, ROOT, WARM, Oracle

from pdlab.bench.experiment import run
from pdlab.bench.experiment.schedule import make_schedule
from pdlab.bench.progress import ExperimentProgress
from pdlab.core.errors import DeploymentDied
from pdlab.results.schema import ExperimentRecord
from pdlab.results.store import Store, read_record

pytestmark = pytest.mark.usefixtures("warm_client")

FILE: dict[str, Any] = {
    "name": "trial",
    "where": {"local": 2},
    "deployments": [
        {"name": "fine", "label": "pd-spread-p1xtp1-d1xtp1"},
        {"name": "broken", "label": "collocated-2xtp1", "engine_arg": {"code_revision": "broken"}},
    ],
    "workloads": [{"input_tokens": 32, "output_tokens": 16}],
    "loads": [{"concurrency": [2]}, {"concurrency_per_gpu": [2]}],
    "prompts_per_level": 24,
    "repeats": 2,
}


class Lab:
    """Runs experiments in a folder of its own."""

    def __init__(self, folder: Path, oracle: Oracle, tokenizer: Path) -> None:
        self.folder = folder
        self.port = oracle.url.rsplit(":", 1)[1]
        self.calls_path = folder / "calls"
        self.env = {
            **os.environ,
            "PDLAB_CACHE_DIR": str(folder / "cache"),
            "CALLS": str(self.calls_path),
            "TOKENIZER": str(tokenizer),
            **WARM,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [WARM.get("PYTHONPATH")])]),
        }

    def file(self, **changes: Any) -> Path:
        path = self.folder / "trial.yaml"
        path.write_text(yaml.safe_dump({**FILE, **changes}))
        return path

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests/support/run_with_fake.py"), str(self.folder / "trial.yaml")]
        command += ["--out", str(self.folder / "bm"), "--port", self.port, *flags]
        return subprocess.Popen(
            command, env=self.env, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *flags: str) -> tuple[int, str, str]:
        with self.start(*flags) as process:
            out, errors = process.communicate(timeout=300)
        return process.returncode, out, errors

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines() if self.calls_path.exists() else []

    @property
    def record(self) -> ExperimentRecord:
        record = read_record(self.folder / "bm" / "trial")
        assert record
        return record


@pytest.fixture
def lab(tmp_path: Path, oracle: Oracle, tokenizer: Path, warm_client: None) -> Lab:
    oracle.configure({"": {"ttft_s": 0.02, "tpot_s": 0.002}})
    return Lab(tmp_path, oracle, tokenizer)


def test_a_deployment_that_does_not_start_is_marked_and_the_rest_runs(lab: Lab) -> None:
    path = lab.file()
    code, out, errors = lab.run()
    assert code == 3, errors
    assert "Traceback" not in errors
    planned = [(visit.repeat, visit.configuration.name) for visit in make_schedule(str(path)).visits]
    assert [(visit.repeat, visit.deployment) for visit in lab.record.visits] == planned
    by_name = {name: [v for v in lab.record.visits if v.deployment == name] for name in ("fine", "broken")}
    assert [visit.status for visit in by_name["fine"]] == ["done", "done"]
    assert [visit.error for visit in by_name["broken"]] == [
        "a replica failed to start: planted",
        "not tried again: a replica failed to start: planted",
    ]
    assert all(visit.launch_s is not None and visit.finished_at for visit in by_name["fine"])
    # Two starts of the one, one of the other, and everything down at the end.
    assert [call for call in lab.calls if "--shutdown" in call] == [lab.calls[-1]]
    assert sum("--pd-spread" in call for call in lab.calls) == 2 and sum("broken" in call for call in lab.calls) == 1
    experiment_folder = lab.folder / "bm" / "trial" / "fine"
    experiment = Store(experiment_folder).load()
    assert [run.key.stem for run in experiment.runs] == [
        "concurrency2", "concurrency2-r1", "concurrency4", "concurrency4-r1",
    ]  # fmt: skip
    # Other work on this machine may make a level of a second late or uneven.
    assert all(set(run.validity.failed_gates) <= {*BUSY_MACHINE, "steady_state"} for run in experiment.runs)
    assert [getattr(run.load, "per_gpu", None) for run in experiment.runs] == [None, None, 2.0, 2.0]
    assert len({run.seed for run in experiment.runs}) == 4
    assert "FAILED broken, repeat 0: a replica failed to start: planted" in out
    shown = subprocess.run(["sh", "-c", "echo *"], cwd=experiment_folder.parent, capture_output=True, text=True)
    assert shown.stdout.split() == ["fine"], "what a shell makes of bm_results/trial/*"
    assert "about " in errors and " to go)" in errors


def test_a_launcher_that_dies_without_an_error_line_is_reported_by_its_exit_code(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_schedule(str(lab.file()))
    script = lab.folder / "dies.py"
    monkeypatch.setattr(run, "LAUNCHER", [str(script)])
    for program, words in (
        ("raise SystemExit(7)", "exit code 7: it printed nothing"),
        ("print('[   0.1 s] starting', flush=True)\nraise SystemExit(7)", r"exit code 7: \[   0.1 s\] starting"),
    ):
        script.write_text(program)
        launcher = run._Launcher(plan, run.RunOptions(), ExperimentProgress([1.0], io.StringIO()))
        with pytest.raises(run.LaunchFailed, match=f"^{words}$"):
            launcher.launch(plan.visits[0])


def test_the_collocated_side_is_tuned_first(lab: Lab) -> None:
    """Here the answers are max_num_seqs times as fast."""
    lab.file(
        deployments=[
            {"name": "base", "label": "collocated-2xtp1", "engine_arg": {"max_num_seqs": 2}},
            {"name": "pd", "label": "pd-spread-p1xtp1-d1xtp1"},
        ],
        loads=[{"concurrency": [2, 4]}],
        repeats=1,
        at=["e2el_ms=5000"],
        tune_baseline={"grid": {"max_num_seqs": [2, 3, 4]}},
    )
    code, out, errors = lab.run()
    assert code in (0, 3), errors  # 3: a machine too busy for one of the levels
    launches = [call for call in lab.calls if "--shutdown" not in call]
    assert len(launches) == 5, "as launched (which is 2), 3 and 4, then the two that are compared"
    assert [("--engine-arg max_num_seqs=4" in call, "--pd-spread" in call) for call in launches[3:]] in (
        [(True, False), (False, True)],
        [(False, True), (True, False)],
    )
    tuning = lab.record.tuned["base"]
    assert tuning.settings == {"max_num_seqs": 4} and tuning.over_launched and tuning.over_launched[0] > 1.2
    assert [tried.settings.get("max_num_seqs") for tried in tuning.tried] == [4, None, 3]
    assert tuning.tried[-1].error == "a replica failed to start: planted"
    assert "base: tuned, the best of 3 settings at E2EL p50 <= 5,000 ms is max_num_seqs=4" in out
    folders = lab.folder / "bm"
    assert Store(folders / "trial" / "base").read_manifest().tuning == tuning
    assert Store(folders / "trial" / "pd").read_manifest().tuning is None
    searched = read_record(folders / "trial-tuning")
    assert searched and searched.tunes == "trial" and len(searched.visits) == 3
    lab.run("--resume")
    assert [call for call in lab.calls if "--shutdown" not in call] == launches, "nothing is left to launch"
    assert lab.record.tuned["base"] == tuning


def test_interrupted_and_resumed(lab: Lab) -> None:
    lab.file(deployments=FILE["deployments"][:1])
    first = lab.folder / "bm" / "trial" / "fine" / "concurrency2.json"
    other = first.with_name("concurrency4.json")
    with lab.start() as process:
        wait_for(lambda: first.exists() or other.exists() or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted; finished levels are kept. Go on with: python -m pdlab experiment" in errors
    assert "Traceback" not in errors and "--shutdown" in lab.calls[-1]
    assert "interrupted" in [visit.status for visit in lab.record.visits]
    kept = {path: path.read_bytes() for path in first.parent.glob("concurrency*")}
    refused = lab.run()
    assert refused[0] == 2 and "continue it with --resume, or choose another --out" in refused[2]
    code, out, errors = lab.run("--resume")
    late = "load generator saturated" in out + errors  # on a busy machine: a level that is kept and called invalid
    assert code == (3 if late else 0), errors
    assert {path: path.read_bytes() for path in kept} == kept
    assert [visit.status for visit in lab.record.visits] == ["done", "done"]
    launches = len(lab.calls)
    code, out, _ = lab.run("--resume")
    assert code == (3 if late else 0) and len(lab.calls) == launches, "nothing is left, so nothing is started"
    assert "fine: 4 levels, " in out and (late or "4 valid" in out)
    lab.file(deployments=FILE["deployments"][:1], prompts_per_level=25)
    changed = lab.run("--resume")
    assert changed[0] == 2 and "was made with another prompts_per_level (" in changed[2]


@pytest.mark.parametrize(
    "decode_s", [0.002, pytest.param(1.0, marks=pytest.mark.long)], ids=["quick-answers", "long-answers"]
)
def test_the_search_finds_the_highest_rate_of_a_known_queue(lab: Lab, oracle: Oracle, decode_s: float) -> None:
    """The real path, on a live clock: rough and short, two levels and their confirmations. Arrivals are all but
    regular, so that nobody waits below the service rate and everybody does above it; the statistics of queues are
    tested in virtual time (tests/bench/test_slo_offline.py). Long answers take more than half of the two seconds for
    which a rate is held at least: windows that do not know of them see a system that fills and call it piling up."""
    service_s = 0.03
    timed = {"ttft_s": 0.2, "tpot_s": decode_s}
    oracle.configure({"": timed, "rate": {**timed, "queue_s": service_s, "patience_s": 0.045, "late_s": 0.4}})
    slo = {
        "ttft_ms": 400, "quantile": 0.7, "start_rps": 20, "resolution": 1.0, "confidence": 0.8, "max_points": 6,
        "longest_s": 3,
    }  # fmt: skip
    short = {"input_tokens": 32, "output_tokens": 2}  # a load that a busy machine's load generator keeps up with
    file = {
        "repeats": 1,
        "workloads": [short],
        "loads": [{"slo": slo, "burstiness": 100}],
        "prompts_per_level": None,
        "hold_s": 2.0,
    }
    lab.file(deployments=FILE["deployments"][:1], **file)
    code, out, errors = lab.run()
    experiment = Store(lab.folder / "bm" / "trial" / "fine").load()
    (search,) = experiment.searches
    late = {
        run.key.value for run in experiment.runs if {"lateness", "client_saturation"} & set(run.validity.failed_gates)
    }
    if late and not search.finished:  # a machine too busy to drive the load: reported, and no end claimed beyond it
        assert code == 3 and "load generator" in search.detail, (out, errors)
    else:
        assert search.low_rps and search.high_rps, search.detail
        assert code == (0 if search.finished else 3), (out, errors)
        assert max(run.key.look for run in experiment.runs) >= 1, "an end was confirmed"
    assert search.low_rps is None or search.low_rps <= 1 / service_s, search.detail
    assert search.high_rps is None or 1 / service_s <= search.high_rps, search.detail
    assert {run.key.value for run in experiment.runs} == {point.rate_rps for point in search.points}
    assert len(experiment.runs) <= 6
    e2el_s = timed["ttft_s"] + decode_s
    for level in experiment.runs:
        assert level.num_requests >= 10 * e2el_s * level.key.value, "held for ten times E2EL"
        assert level.steady_window_s is None or level.steady_window_s[0] >= 2 * e2el_s
        below = level.key.value < 0.8 / service_s and level.key.value not in late
        assert not below or "steady_state" not in level.validity.failed_gates, "nothing piles up below the capacity"
    assert search.detail in errors


def test_a_deployment_that_does_not_come_back_is_taken_down_before_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    updates: list[dict[str, Any]] = []

    def died(*_: object) -> None:
        raise DeploymentDied("p1 died; not whole again within 900 s")

    monkeypatch.setattr(run, "_sweep", died)
    monkeypatch.setattr(run, "unfinished_work", lambda *_: (("a level",), ()))
    monkeypatch.setattr(run, "reach", lambda _: contextlib.nullcontext())
    launcher: Any = SimpleNamespace(
        launch=lambda _: calls.append("launch"),
        stop=lambda: calls.append("stop"),
        typed_command=lambda _: "",
        failed_configurations={},
    )
    visit: Any = SimpleNamespace(configuration=SimpleNamespace(name="x"), parts=[None], repeat=0)
    plan: Any = SimpleNamespace(file=SimpleNamespace(name="trial"))
    writer: Any = SimpleNamespace(update=lambda _, **changes: updates.append(changes))
    progress: Any = SimpleNamespace(visit_done=lambda text, measured: calls.append(text))
    run._visit(0, visit, plan, run.RunOptions(out=tmp_path), writer, launcher, progress)
    assert calls == ["launch", "stop", "FAILED: p1 died; not whole again within 900 s"]
    assert updates[-1]["status"] == "failed" and "not whole again" in updates[-1]["error"]
    assert launcher.failed_configurations == {}, "the next repeat launches it anew"
