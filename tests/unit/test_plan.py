"""plan.py: bad input, predictions from a CSV, ranking and what is handed over."""

from __future__ import annotations

import csv
import io
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

import launch_gptoss
import plan
from pdlab.catalog import ModelShape, load_cluster, load_model
from pdlab.perf import Hardware, load_hardware
from pdlab.plan_report import launch_flags
from pdlab.planner import Slo, evaluate, feasible, plan_deployments, rates, regimes
from pdlab.spec import Collocated, Deployment, parse_label
from pdlab.workload import Workload

CONFIGURATIONS = """\
mode,num,tp,p_num,p_tp,d_num,d_tp,concurrency,num_prompts,note
collocated,4,2,,,,,8,40,a
pd-pack,,,1,2,2,2,16,80,b
pd-spread,,,1,4,1,4,8,40,c
collocated,4,2,,,,,16,80,d
"""


def shape() -> ModelShape:
    found = load_model("gpt-oss-120b")
    assert found is not None
    return found


def hardware() -> Hardware:
    return load_hardware("h100-vllm-0.11")


def predicted(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    path = tmp_path / "in.csv"
    path.write_text(text)
    assert plan.main(["--predict", str(path)]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


class TestPredict:
    def test_rows_come_back_in_order_with_their_columns(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = predicted(CONFIGURATIONS, tmp_path, capsys)
        assert [row["note"] for row in rows] == list("abcd")
        for row in rows:
            for name in ("mean_tpot_ms", "mean_ttft_ms", "requests_per_s", "output_tokens_per_s_per_node"):
                assert float(row[f"predicted_{name}"]) > 0
        assert float(rows[3]["predicted_mean_tpot_ms"]) > float(rows[0]["predicted_mean_tpot_ms"])

    def test_labels_name_a_configuration_too(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        by_columns = predicted(CONFIGURATIONS, tmp_path, capsys)
        text = "label,concurrency\ncollocated-4xtp2,8\npd-pack-p1xtp2-d2xtp2,16\n1xtp4-1xtp4-spread,8\n4xtp2,16\n"
        by_label = predicted(text, tmp_path, capsys)
        key = "predicted_requests_per_s"
        assert [row[key] for row in by_label] == [row[key] for row in by_columns]

    def test_rows_of_one_sweep_share_their_caches(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        head = "mode,num,tp,concurrency,num_prompts,prompts\n"
        again, fresh = (
            predicted(f"{head}collocated,1,8,64,320,{policy}\n", tmp_path, capsys)[0]
            for policy in ("repeated", "fresh")
        )
        assert float(again["predicted_requests_per_s"]) > 1.3 * float(fresh["predicted_requests_per_s"])

    def test_a_slow_wire_costs_throughput(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        head = "mode,p_num,p_tp,d_num,d_tp,concurrency,prompts,link\n"
        srd, tcp = (
            float(
                predicted(f"{head}pd-spread,1,4,1,4,64,fresh,{link}\n", tmp_path, capsys)[0]["predicted_requests_per_s"]
            )
            for link in ("srd", "tcp")
        )
        assert tcp < srd / 4

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "empty"),
            ("mode,num,tp,concurrency\n", "no rows"),
            ("foo,concurrency\n1,2\n", "no column says the configuration"),
            ("mode,num,tp\ncollocated,1,2\n", "no column concurrency or request_rate"),
            ("mode,num,tp,concurrency\ncollocated,1,2,x\n", "line 2: concurrency 'x' is not a number"),
            ("mode,num,tp,concurrency\ncollocated,1,2,8\ncollocated,1.5,2,8\n", "line 3: num '1.5' must be a whole"),
            ("mode,num,tp,concurrency\ncollocated,1,2,-8\n", "must be above 0"),
            ("mode,num,tp,concurrency\nsomewhere,1,2,8\n", "mode 'somewhere' is not known"),
            ("mode,num,tp,concurrency,link\ncollocated,1,2,8,string\n", "link 'string' is not known"),
            ("mode,num,tp,concurrency,prompts\ncollocated,1,2,8,perhaps\n", "prompts 'perhaps' is not known"),
            ("mode,num,tp,ep,concurrency\ncollocated,1,2,maybe,8\n", "is not a flag"),
            ("label,concurrency\nnonsense,8\n", "line 2: label 'nonsense'"),
            ("mode,num,tp,concurrency,model\ncollocated,1,2,8,gpt-9\n", "model 'gpt-9' has no shape"),
            ("mode,num,tp,concurrency,itl\ncollocated,1,1,8,90000\n", "does not fit"),
        ],
    )
    def test_a_bad_file_is_one_line(
        self, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "in.csv"
        path.write_text(text)
        assert plan.main(["--predict", str(path)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus 0", "at least 1"),
        ("--gpus many", "whole number"),
        ("--slo-tpot-ms -3", "above 0"),
        ("--slo-tpot-ms soon", "above 0"),
        ("--slo-quantile 1.5", "--slo-quantile"),
        ("--model gpt-9", "configs/models/"),
        ("--hardware abacus", "is not known"),
        ("--node laptop", "--node laptop"),
        ("--workload w.yaml --itl 5", "--workload replaces"),
        ("--workload nowhere.yaml", "cannot be read"),
        ("--rate 3 --concurrency 4", "exclude each other"),
        ("--concurrency 4,x", "whole number"),
        ("--prefix-hit-rate 1", "--prefix-hit-rate"),
        ("--explain nonsense", "label 'nonsense'"),
        ("--explain collocated-1xtp2 --predict x.csv", "not allowed with"),
        ("--predict nowhere.csv", "cannot be read"),
        ("--compare nowhere", "does not exist"),
        ("--gpus 1 --itl 200000", "fits no TP degree"),
        ("--gpus 8 --plot out.gif", "--plot"),
        ("--frobnicate", "unrecognized"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(shlex.split(words)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error


class TestRanking:
    def test_every_deployment_asked_about_can_be_placed(self) -> None:
        found = feasible(
            "gpt-oss-120b", shape(), hardware(), load_cluster("p5.48xlarge-x2"), 16, Workload(), placement="spread"
        )
        assert {d.mode for d in found} == {"collocated", "pd-spread"}
        assert all(d.gpus <= 16 for d in found)
        assert len({d.label for d in found}) == len(found)

    def test_a_looser_slo_never_lowers_goodput(self) -> None:
        deployment = Deployment(topology=parse_label("pd-pack-p1xtp2-d1xtp2"))
        values = [
            evaluate(deployment, shape(), hardware(), Workload(), Slo(tpot_s=bound), 8).goodput_per_gpu
            for bound in (0.007, 0.009, 0.012, 0.02)
        ]
        assert values == sorted(values) and values[0] < values[-1]

    def test_the_best_is_first_and_the_same_every_time(self) -> None:
        view = load_cluster("p5.48xlarge-x2")
        trials = [
            plan_deployments(
                "gpt-oss-120b", shape(), hardware(), view, 8, Workload(), Slo(tpot_s=0.012), concurrencies=[16, 48]
            )[0]
            for _ in range(2)
        ]
        labels = [[candidate.deployment.label for candidate in trial] for trial in trials]
        assert labels[0] == labels[1]
        goodput = [candidate.goodput_per_gpu for candidate in trials[0]]
        assert goodput == sorted(goodput, reverse=True)

    def test_an_slo_that_nothing_meets_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(["--gpus", "4", "--slo-tpot-ms", "0.5", "--concurrency", "8"]) == 0
        assert "No deployment meets the SLO" in capsys.readouterr().out

    def test_rate_matching_takes_no_queue(self) -> None:
        """Prefill: one prompt per step. Decode: a batch within the bound, over the time that a request stays."""
        deployment = Deployment(topology=parse_label("pd-pack-p1xtp2-d1xtp2"))
        alone = rates(deployment, shape(), hardware(), Workload(), Slo(tpot_s=0.012))
        assert 5 < alone.prefill_rps < 9  # the published runs: about 7.7
        doubled = rates(deployment, shape(), hardware(), Workload(output_tokens=499), Slo(tpot_s=0.012))
        assert doubled.decode_rps == pytest.approx(alone.decode_rps / 2, rel=0.15)

    def test_regimes_follow_one_another(self) -> None:
        chosen = [
            evaluate(Deployment(topology=parse_label(label)), shape(), hardware(), Workload(), Slo(), 8)
            for label in ("collocated-4xtp2", "pd-pack-p1xtp2-d3xtp2")
        ]
        found = regimes(chosen, 8)
        assert found
        for one, next_one in pairwise(found):
            assert one.to_tokens_per_s < next_one.from_tokens_per_s
            assert one.label != next_one.label


class TestHandOver:
    def test_the_winners_command_is_accepted_by_the_launcher(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--gpus", "16", "--slo-tpot-ms", "12", "--concurrency", "32,96", "--out", str(tmp_path)]
        assert plan.main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        commands = [shlex.split(line) for line in lines if "launch_gptoss.py" in line]
        assert commands
        for command in commands:
            assert launch_gptoss.main([*command[2:], "--dry-run"]) == 0

    @pytest.mark.parametrize(
        "label", ["collocated-2xtp4", "pd-pack-p2xtp1-d3xtp2", "pd-spread-p1xtp4ep-d2xtp2", "collocated-1xdp8ep"]
    )
    def test_flags_mean_the_deployment(self, label: str, capsys: pytest.CaptureFixture[str]) -> None:
        deployment = Deployment(topology=parse_label(label))
        words = [*shlex.split(launch_flags(deployment)), "--cluster", "p5.48xlarge-x2", "--dry-run"]
        if isinstance(deployment.topology, Collocated) and deployment.topology.pool.dp > 1:
            words += ["--tp", "1"]
        assert launch_gptoss.main(words) == 0
        assert capsys.readouterr().out.splitlines()[0].split()[1] == label

    def test_explanation_adds_up(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(["--explain", "pd-spread-p1xtp4-d1xtp4", "--concurrency", "8"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("concurrency 8"))
        *phases, total = (int(cell) for cell in row.split()[2:9])
        assert sum(phases) == pytest.approx(total, abs=len(phases))

    def test_curves_are_drawn(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "curves.png"
        assert plan.main(["--gpus", "8", "--concurrency", "8,16,32", "--plot", str(path)]) == 0
        assert path.stat().st_size > 10_000
