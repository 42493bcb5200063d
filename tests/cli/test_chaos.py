"""What chaos does with its words: plans changed by flags, launches of its own, exit codes, what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos import example
from support.launched import running

from pdlab.cli import chaos
from pdlab.cluster import two_hosts
from pdlab.core.errors import ClusterError, UsageError
from pdlab.deploy.endpoint import save_running
from pdlab.faults import launched
from pdlab.faults import run as faults_run
from pdlab.faults.plan import load_plan
from pdlab.results import chaos as results
from pdlab.results.chaos import Chaos
from pdlab.steps.runner import StepRunner

URL = "http://127.0.0.1:8000"


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[faults_run.ChaosOrder]:
    """Orders that were executed, on a deployment of this machine; what each leaves is `support.chaos.example`."""
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PDLAB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    save_running(running(URL))
    given: list[faults_run.ChaosOrder] = []

    def execute(order: faults_run.ChaosOrder) -> None:
        given.append(order)
        if order.folder is not None:
            keep(Path(order.folder), example())

    monkeypatch.setattr(faults_run, "execute", execute)
    return given


def keep(folder: Path, made: Chaos) -> None:
    results.append(folder, [*made.requests, *made.faults, *made.samples])
    results.finish(folder, made.run, made.manifest)


def test_flags_change_the_plan(orders: list[faults_run.ChaosOrder]) -> None:
    assert chaos.main(["soak", "--seed", "7", "--concurrency", "3", "--duration-s", "100", "--dry-run"]) == 0
    (order,) = orders
    assert order.plan == load_plan("soak").model_copy(update={"seed": 7, "concurrency": 3, "duration_s": 100.0})
    assert order.folder is None and order.name == "soak" and order.command.endswith("--duration-s 100 --dry-run")
    assert chaos.main(["--all", "--duration-s", "60", "--dry-run"]) == 0
    assert orders[1].plan.faults == ("all",) and orders[1].name == "all"


def test_a_wrong_answer_is_told_by_the_exit_code_and_kept(
    orders: list[faults_run.ChaosOrder], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert chaos.main(["short", "--out", "kept"]) == 3
    out = capsys.readouterr().out
    folder = tmp_path / "kept" / "chaos-x"
    assert "kill_prefill_before_read" in out and "1 wrong" in out and f"viz.py --exps {Path('kept/chaos-x')}" in out
    assert (folder / "table.txt").read_text().strip() in out and results.load(folder).requests


def test_all_well_is_0(orders: list[faults_run.ChaosOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    good = example()._replace(requests=tuple(r for r in example().requests if r.outcome == "right"))

    def execute(order: faults_run.ChaosOrder) -> None:
        assert order.folder is not None
        keep(Path(order.folder), good)

    monkeypatch.setattr(faults_run, "execute", execute)
    assert chaos.main(["short"]) == 0


@pytest.mark.parametrize(("error", "code"), [(UsageError("no"), 2), (ClusterError("no"), 1)])
def test_what_fails_before_it_begins_leaves_no_folder(
    error: Exception, code: int, orders: list[faults_run.ChaosOrder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def execute(_: faults_run.ChaosOrder) -> None:
        raise error

    monkeypatch.setattr(faults_run, "execute", execute)
    assert chaos.main(["short", "--out", "kept"]) == code
    assert not list((tmp_path / "kept").iterdir())


class TestLaunches:
    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        ran: list[list[str]] = []
        monkeypatch.setattr(StepRunner, "run_shown", lambda self, *argv, always=False: (ran.append([*argv]), 0)[1])
        monkeypatch.setattr(two_hosts, "require", lambda: None)
        return ran

    def test_each_deployment_is_launched_broken_and_taken_down(self, commands: list[list[str]]) -> None:
        words = ["--launch", "--seed", "5", "--port", "8123", "--launch-flag=--no-kv-guard"]
        assert chaos.main(words) == 0
        launches = [words for words in commands if words[0] == "launch_gptoss.py" and "--detach" in words]
        ends = [words for words in commands if "--shutdown" in words]
        assert len(launches) == len(ends) == len(launched.DEPLOYMENTS)
        assert all("--no-kv-guard" in words and "8123" in words for words in launches)
        faults = [words[3] for words in commands if words[:3] == ["-m", "pdlab", "chaos"]]
        assert faults == [plan for each in launched.DEPLOYMENTS for plan in each.plans]
        assert all("http://127.0.0.1:8123" in words for words in commands if words[:3] == ["-m", "pdlab", "chaos"])
        assert {name for each in (*launched.DEPLOYMENTS, *launched.SHORT) for name in each.plans} == {
            "all", "replicas", "short", "soak", "workers",
        }  # fmt: skip

    def test_without_root_two_hosts_are_left_out(
        self, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse() -> None:
            raise UsageError("run it as root")

        monkeypatch.setattr(two_hosts, "require", refuse)
        assert chaos.main(["--launch"]) == 0
        assert not any("--two-hosts" in words for words in commands)
        assert "left out, two hosts" in capsys.readouterr().err

    @pytest.mark.parametrize(("code", "result"), [(3, 3), (1, 1)])
    def test_codes(self, code: int, result: int, monkeypatch: pytest.MonkeyPatch) -> None:
        ran: list[str] = []

        def run_shown(self: StepRunner, *argv: str, always: bool = False) -> int:
            ran.append(argv[0])
            return code if argv[0] == "-m" else 0

        monkeypatch.setattr(StepRunner, "run_shown", run_shown)
        assert chaos.main(["--launch", "--short"]) == result
        assert ran == ["launch_gptoss.py", "-m", "launch_gptoss.py"], "it is taken down whatever comes"

    def test_the_makefile_calls_it(self) -> None:
        root = Path(__file__).resolve().parents[2]
        assert "-m pdlab chaos --launch" in (root / "Makefile").read_text()

    def test_flags_of_the_launches_are_the_launchers(self) -> None:
        from pdlab.core.command_lines import flag_words
        from pdlab.core.settings import parse
        from pdlab.deploy.options import LaunchSettings

        for each in launched.DEPLOYMENTS:
            settings = parse(LaunchSettings, flag_words("launch", **each.launch, local=2, deployment=launched.SMALL))
            assert settings.deployment == {"engine_kwargs": {"kv_cache_memory_bytes": launched.KV_BYTES}}
