"""plan.py: bad input, predictions from a CSV, ranking and what is handed over."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import folders
from support import records as made
from support.plans import HARDWARE, MODEL, SHAPE, nodes, scenario

from pdlab.analysis.curves import configuration
from pdlab.analysis.goodput_map import GoodputMap
from pdlab.analysis.regimes import ThroughputPoint, stretches
from pdlab.cli import bench, launch, plan, viz
from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, Disaggregated, Pool, launch_words, parse_label
from pdlab.core.rendering import rendered
from pdlab.core.settings import parse
from pdlab.core.workload import Closed, Open, Slo, Workload
from pdlab.placement.copies import copies_of
from pdlab.plan import TEMPLATES, csv_predictions, csv_rows, facts, open_loop, planner
from pdlab.plan import scenario as scenario_module
from pdlab.plan.candidates import SizedDeployment, engine_shapes, shortlist, units
from pdlab.plan.facts import regimes
from pdlab.plan.planner import capacity, evaluate, gain, sized_deployment
from pdlab.plan.rate_matching import RateMatcher, ReplicaUnit
from pdlab.results.schema import Manifest
from pdlab.results.store import Store
from pdlab.sim.hardware import FitError

CONFIGURATIONS = """\
mode,num,tp,p_num,p_tp,d_num,d_tp,concurrency,num_prompts,note
collocated,4,2,,,,,8,40,a
pd-pack,,,1,2,2,2,16,80,b
pd-spread,,,1,4,1,4,8,40,c
collocated,4,2,,,,,16,80,d
"""

SLOW_NODES = """\
name: slow
nodes:
- {id: a, gpus: 8, cpus: 96, gpu_type: H100, nic: {kind: ethernet, gbit_per_s: 10}, head: true}
- {id: b, gpus: 8, cpus: 96, gpu_type: H100, nic: {kind: ethernet, gbit_per_s: 10}}
"""


def sized(label: str) -> SizedDeployment:
    deployment = Deployment(topology=parse_label(label))
    return sized_deployment(scenario(tpot_s=0.012), deployment, nodes(1), 8)


def predicted(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    path = tmp_path / "in.csv"
    path.write_text(text)
    assert plan.main(["--predict", str(path)]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.parametrize(
    ("given", "node"),
    [
        ("p5.48xlarge-x2", "p5.48xlarge"),
        ("p5.48xlarge", "p5.48xlarge"),
        ("mine-x2.yaml", "mine-x2.yaml"),
        ("p5-x2", "p5-x2"),
    ],
)
def test_a_cluster_as_a_launch_names_it_is_nodes_of_its_type(given: str, node: str) -> None:
    assert parse(plan.PlanSettings, ["--cluster", given]).node == node


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

    @pytest.mark.parametrize("known", [True, False])
    def test_intervals_are_there_when_the_error_is_known(self, known: bool) -> None:
        error = FitError(tpot_percent=2, ttft_percent=10, requests_per_s_percent=2, points=1, how="")
        rows = csv_rows.read(CONFIGURATIONS, "in.csv")[2][:1]
        (row,) = csv_predictions.predict(rows, HARDWARE.model_copy(update={"error": error if known else None}))
        for name in ("mean_tpot_ms", "mean_ttft_ms", "requests_per_s"):
            low, value, high = (row[f"predicted_{name}{end}"] for end in ("_low", "", "_high"))
            assert 0 < float(low) < float(value) < float(high) if known else low == high == ""

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


def test_runs_are_compared_as_the_model_that_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folders.write(tmp_path / "own", folders.deployments(1)[0])
    assert plan.main(["--compare", str(path)]) == 0
    output = capsys.readouterr()
    assert "predicted for tiny-gptoss on H100 SXM 80 GB (h100-vllm-0.11) / measured" in output.out and not output.err
    assert plan.main(["--model", MODEL, "--compare", str(path)]) == 0
    output = capsys.readouterr()
    assert (
        "predicted for gpt-oss-120b on" in output.out and "is of tiny-gptoss, predicted as gpt-oss-120b" in output.err
    )
    stranger = folders.write(
        tmp_path / "other", folders.deployments(1)[0].model_copy(update={"model": "someone/else-7b"})
    )
    assert plan.main(["--compare", str(stranger)]) == 2
    assert "is of someone/else-7b: " in capsys.readouterr().err


def test_what_was_rehearsed_is_not_called_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folders.write(tmp_path / "own", folders.deployments(1)[0])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {"origin": "simulated", "rehearsal": {"hardware": "h100-vllm-0.11", "slow_down": 2.0}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    picture = tmp_path / "plot.svg"
    assert plan.main(["--compare", str(path), "--plot", str(picture)]) == 0
    assert "rehearsed, not measured (engines simulated by the same model): " in capsys.readouterr().out
    assert " rehearsed" in (text := picture.read_text()) and "rehearsed, measured" not in text


def test_cpu_engines_beside_a_gpus_step_times_are_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(plan.__file__).parents[2] / "bm_results" / "local-pack-vs-spread" / "pack")
    assert plan.main(["--compare", path]) == 0
    assert "pack was measured on engines on CPUs, but h100-vllm-0.11 describes H100" in capsys.readouterr().err
    assert plan.main(["--compare", path, "--hardware", "cpu-vllm-0.29"]) == 0
    assert not capsys.readouterr().err


def test_one_output_token_has_no_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    """Where one request in flight is all that rate matching gives, the ladder has one load."""
    assert plan.main(["--otl", "1", "--slo-tpot-ms", "12"]) == 0
    out = capsys.readouterr().out.splitlines()
    head = next(line for line in out if "TPOT ms" in line)
    row = next(line for line in out if line.split()[:1] == ["1"])
    assert row[head.index("TPOT ms") : head.index("TPOT ms") + 7].strip() == "-"
    assert not any("Which wins" in line for line in out)


def test_a_model_can_be_named_for_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.csv"
    path.write_text("config,concurrency,model\ncollocated-1xtp2,4,\ncollocated-1xtp2,4,gpt-oss-120b\n")
    assert plan.main(["--predict", str(path), "--model", "gpt-oss-20b"]) == 0
    small, large = (row.split(",")[3] for row in capsys.readouterr().out.splitlines()[1:])
    assert float(small) < float(large)


class TestEnumeration:
    def test_a_pack_is_copied_node_by_node(self) -> None:
        """6 GPUs of 8 per node: three nodes hold three copies, though 24 GPUs would be four."""
        deployment = Deployment(topology=parse_label("pd-pack-p1xtp2-d1xtp4"))
        assert copies_of(deployment, nodes(3), 24) == 3

    @pytest.mark.parametrize(
        ("label", "count", "copies"),
        [
            ("collocated-2xtp4", 2, 2),
            ("pd-spread-p1xtp4-d1xtp4", 2, 2),  # P and D of the second copy beside those of the first
            ("pd-spread-p4xtp1-d1xtp8", 3, 2),  # both prefill pools on one node
            ("pd-spread-p8xtp1-d1xtp8", 3, 1),
            ("pd-spread-p1xtp8-d3xtp8", 3, 0),
            ("pd-pack-p1xtp1-d1xtp1", 40, 160),
        ],
    )
    def test_copies(self, label: str, count: int, copies: int) -> None:
        assert copies_of(Deployment(topology=parse_label(label)), nodes(count), 8 * count) == copies

    def test_gpus_that_fill_no_node_are_used(self) -> None:
        kinds = engine_shapes(HARDWARE, SHAPE, 12, Workload())
        assert ReplicaUnit(Pool(tp=4), 3, None, 0) in set(units(kinds, 12, HARDWARE, SHAPE))

    def test_a_model_that_no_node_holds_gets_whole_nodes(self) -> None:
        kinds = engine_shapes(HARDWARE, require_shape("deepseek-v3"), 96, Workload(input_tokens=2000))
        assert all(kind.gpus >= 16 and kind.gpus % 8 == 0 for kind in kinds)
        assert any(kind.expert_parallel for kind in kinds)
        pairs = [unit for unit in units(kinds, 96, HARDWARE, require_shape("deepseek-v3")) if unit.decode]
        assert pairs and all(unit.prefill.pp == 1 for unit in pairs)

    def test_a_unit_has_no_common_factor_and_fits(self) -> None:
        kinds = engine_shapes(HARDWARE, SHAPE, 16, Workload())
        all_units = list(units(kinds, 16, HARDWARE, SHAPE))
        assert len(set(all_units)) == len(all_units)
        for unit in all_units:
            assert unit.gpus <= 16
            assert unit.decode is None or math.gcd(unit.prefills, unit.decodes) == 1

    def test_a_thousand_gpus_are_planned_too(self) -> None:
        matcher = RateMatcher(HARDWARE, SHAPE, Workload())
        kinds = engine_shapes(HARDWARE, SHAPE, 1000, Workload())
        chosen, possible, unplaced, *_ = shortlist(matcher, MODEL, nodes(125), 1000, kinds, 0.012)
        assert not unplaced and possible > 1000 and 10 < len(chosen) < 50
        assert all(700 <= sized.copies * sized.deployment.gpus <= 1000 for sized in chosen)


class TestMatching:
    def test_published_prefill_rate(self) -> None:
        """One TP2 replica of prefill serves about 7 requests/s of 5000 new tokens (docs/model.md)."""
        alone = RateMatcher(HARDWARE, SHAPE, Workload()).rates(Pool(tp=2), Pool(tp=2), 0.012, "srd")
        assert 5 < alone.prefill_rps < 9

    def test_twice_the_answer_is_half_the_rate(self) -> None:
        one, two = (
            RateMatcher(HARDWARE, SHAPE, Workload(output_tokens=n)).rates(Pool(tp=2), Pool(tp=2), 0.012, "srd")
            for n in (250, 499)
        )
        assert two.decode_rps == pytest.approx(one.decode_rps / 2, rel=0.1)

    def test_short_prompts_share_a_step(self) -> None:
        matcher = RateMatcher(HARDWARE, SHAPE, Workload(input_tokens=100))
        assert matcher.prefill(Pool(tp=2)) > 4 / matcher.prefill_s(Pool(tp=2))

    def test_cached_prefixes_are_not_computed(self) -> None:
        cold, warm = (RateMatcher(HARDWARE, SHAPE, Workload(), hit).prefill(Pool(tp=2)) for hit in (0.0, 0.5))
        assert warm > 1.6 * cold

    def test_a_tight_ttft_leaves_prefill_idle(self) -> None:
        shares = [RateMatcher(HARDWARE, SHAPE, Workload(), 0, t).share(Pool(tp=2), 2) for t in (0.1, 0.3, 0.6, 3.0)]
        assert shares[0] == 0 and shares == sorted(shares) and 0.9 < shares[-1] < 1

    def test_little_s_law_in_the_collocated_formula(self) -> None:
        """Batch = rate x TPOT x tokens, with the TPOT at the bound."""
        matcher = RateMatcher(HARDWARE, SHAPE, Workload())
        rps, batch = matcher.collocated(Pool(tp=4), 0.012)
        assert batch / (rps * 249) == pytest.approx(0.012, rel=0.05)


class TestRanking:
    def test_the_best_is_first_and_the_same_every_time(self) -> None:
        trials = [planner.plan(scenario(tpot_s=0.012), MODEL, nodes(1), 8, concurrencies=[16, 48]) for _ in range(2)]
        assert trials[0] == trials[1]
        goodput = [candidate.served_per_gpu for candidate in trials[0].candidates]
        assert goodput == sorted(goodput, reverse=True)

    def test_the_best_rate_meets_the_slo_and_a_goodput_never_meets_a_closed_loops_capacity(self) -> None:
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)
        planned = planner.plan(bounded, MODEL, nodes(1), 8)
        assert planned.loop == "open" and {
            candidate.loop for candidate in (*planned.candidates, *planned.otherwise)
        } == {"open"}
        served = [candidate.served_per_gpu for candidate in planned.candidates]
        assert served == sorted(served, reverse=True)
        for candidate in planned.candidates[:4]:
            assert candidate.best is not None and candidate.best.meets and candidate.best.load.kind == "rate"
            assert candidate.goodput_rps is not None and candidate.closed is not None
            assert candidate.best.load.value <= 1.02 * candidate.goodput_rps
            assert candidate.capacity_rps == pytest.approx(candidate.closed.goodput_rps, rel=0.5), (
                "a step of the ladder"
            )
        assert planned.screened and all(candidate.loop == "closed" for candidate in planned.screened)
        assert not {c.deployment.label for c in planned.screened} & {c.deployment.label for c in planned.candidates}
        assert planned.screened[0].served_per_gpu < planned.candidates[0].served_per_gpu, "else it might come first"
        with pytest.raises(ValueError, match="different loops"):
            gain(planned.candidates[0], planned.screened[0], bounded)
        ranking = facts.ranking(planned, bounded, nodes(1))
        assert ranking.two_loops and ranking.best_screened in planned.screened and not ranking.screened_may_win

    def test_goodput_and_closed_loop_are_compared_by_the_rows_own_figures(self) -> None:
        """In one of these rows open-loop traffic reaches more than the closed loop."""
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)
        planned = planner.plan(bounded, MODEL, nodes(1), 2)
        first, *others = planned.candidates
        assert first.capacity_rps is not None and first.best is not None
        above = replace(first, goodput_rps=1.5 * first.capacity_rps)
        for candidates, highest in (((first, *others), None), ((above, *others), 150), ((above,), 150)):
            text = facts.ranking_text(replace(planned, candidates=candidates, otherwise=()), bounded, nodes(1))
            rows = [line.split() for line in text.splitlines() if re.match(r"\d+  [cp]", line)]
            shares = [100 * float(row[5]) / float(row[6]) for row in rows]
            (told,) = re.findall(r"In (?:this row|these rows) goodput is (?:(\d+) to )?(\d+) % of it", text)
            assert len(rows) == len(candidates)
            assert float(told[0] or told[1]) == pytest.approx(min(shares), abs=1.5)
            assert float(told[1]) == pytest.approx(highest or max(shares), abs=1.5) and "rarely" not in text
        nothing = replace(first, goodput_rps=0.0, best=None)
        text = facts.ranking_text(replace(planned, candidates=(nothing,), otherwise=()), bounded, nodes(1))
        assert "goodput is" not in text

    def test_a_stretch_of_one_load_has_one_figure(self) -> None:
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)
        planned = planner.plan(bounded, MODEL, nodes(1), 2, concurrencies=[2, 4])
        alone = replace(planned.candidates[0], outcomes=planned.candidates[0].outcomes[:1])
        made = facts.ranking(replace(planned, otherwise=()), bounded, nodes(1))
        one = replace(made, map=facts.regime_map(replace(planned, candidates=(alone,)), bounded))
        text = rendered(TEMPLATES / "ranking.txt", r=one)
        (row,) = re.findall(r"as good\n-.*\n(.*)\n", text)
        assert re.fullmatch(rf"\d+ +{alone.deployment.label} +[\d.]+ *", row), row

    def test_what_closed_loops_serve_is_called_their_capacity(self) -> None:
        bounded = scenario(tpot_s=0.012)
        planned = planner.plan(bounded, MODEL, nodes(1), 8, concurrencies=[16, 48])
        assert planned.loop == "closed" and not planned.screened
        ranking = facts.ranking_text(planned, bounded, nodes(1))
        assert "closed-loop capacity/s per GPU" in ranking and "goodput" not in ranking

    def test_where_rate_matching_starts_too_high_lower_loads_are_tried(self) -> None:
        """It knows no queues: the loads that it gives for a bound on TTFT alone miss it in collocated engines."""
        candidate = evaluate(scenario(ttft_s=0.3), replace(sized("collocated-4xtp2"), in_flight=150.0), 8)
        loads = [outcome.load.value for outcome in candidate.outcomes]
        assert loads == sorted(set(loads)) and loads[0] < 15
        assert candidate.best is not None and candidate.best.good_share >= 0.9

    def test_a_goodput_map_has_what_is_measured_in_place_of_its_simulation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pdlab.report import goodput_map as picture
        from pdlab.report.figure import Figure

        drawn: list[tuple[GoodputMap, str]] = []
        figure = picture.figure

        def spy(goodput_map: GoodputMap, *, title: str, **options: Any) -> Figure:
            drawn.append((goodput_map, title))
            return figure(goodput_map, title=title, **options)

        monkeypatch.setattr(picture, "figure", spy)
        monkeypatch.setattr(open_loop, "MAP_RATES", (0.2, 0.7, 1.2))
        monkeypatch.setattr(scenario_module, "LEAST_OPEN", 600)
        store = Store(tmp_path / "mine")
        deployment = Deployment(topology=parse_label("collocated-2xtp4"))
        store.write_manifest(
            Manifest(origin="measured", label=deployment.label, deployment=deployment, gpus=8, workload=Workload())
        )
        load = Open(rate_rps=5)
        sent = [made.record(0.2 * i, 0.4, 1.6 / 249, 250, input_tokens=5000) for i in range(300)]
        store.write(made.run(sent, load, label=deployment.label, window=True), sent)
        out = tmp_path / "map.png"
        words = ["--gpus", "8", "--concurrency", "16", "--slo-tpot-ms", "12", "--slo-ttft-ms", "2000", "--top", "1"]
        words += ["--goodput-map", str(out), "--price-per-gpu-hour", "2.5"]
        assert plan.main([*words, "--measured", str(tmp_path / "mine")]) == 0
        printed = capsys.readouterr().out
        assert printed.endswith(f"Goodput map (measured and simulated): {out}\n")
        ((goodput_map, title),) = drawn
        origins = {each.label: each.origin for each in goodput_map.served}
        assert origins.pop("collocated-2xtp4") == "measured" and set(origins.values()) == {"simulated"}
        ranked = {label for label in re.findall(r"^ *\d+  (\S+)", printed, re.MULTILINE)}
        assert len(ranked) > 8 and {label.rstrip("~*") for label in ranked} - {"collocated-2xtp4"} <= set(origins)
        assert (
            goodput_map.ttft_s == (0.5, 1.0, 2.0, 4.0, 8.0)
            and "hatched: simulated" in title
            and "2.5 per GPU hour" in title
        )
        assert out.stat().st_size > 10_000
        for cells in goodput_map.cells[1:]:
            assert max(cell.goodput for line in cells for cell in line) > 0
        assert plan.main([*words, "--measured", str(tmp_path / "mine"), "--otl", "100"]) == 2
        assert "is of 5000:250 tokens, the plan of 5000:100" in capsys.readouterr().err
        assert plan.main(["--measured", str(tmp_path / "mine")]) == 2
        assert "--measured" in capsys.readouterr().err

    def test_what_depends_on_scattered_blocks_is_ranked_by_the_worse_case_and_shown_in_both(self) -> None:
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)
        copied, merged = (
            planner.plan(replace(bounded, scattered=case), MODEL, nodes(1), 8, concurrencies=[16, 26])
            for case in (True, False)
        )

        def of(candidates: Sequence[planner.Candidate]) -> dict[str, float]:
            return {candidate.deployment.label: candidate.served_per_gpu for candidate in candidates}

        depending = set(of(copied.otherwise))
        assert "pd-pack-p1xtp2-d1xtp2" in depending, "equal TP within a node"
        for candidate in copied.candidates:
            topology = candidate.deployment.topology
            equal = isinstance(topology, Disaggregated) and topology.prefill.tp == topology.decode.tp
            assert (candidate.deployment.label in depending) is (equal and topology.placement == "pack")
        for candidates, otherwise in ((merged.candidates, copied.otherwise), (copied.candidates, merged.otherwise)):
            both = of(candidates).keys() & of(otherwise).keys()
            assert both and all(of(candidates)[label] == of(otherwise)[label] for label in both)
        assert all(of(copied.candidates)[label] <= of(copied.otherwise)[label] for label in depending)
        label = "pd-pack-p1xtp2-d1xtp2"
        assert of(copied.candidates)[label] < 0.6 * of(copied.otherwise)[label]
        other = facts.verdict(copied, bounded).otherwise
        assert other is not None and other.merged and other.first.deployment.label.startswith("pd-pack")
        assert [row.depends for row in facts.ranking(copied, bounded, nodes(1)).rows] == [
            candidate.deployment.label in depending for candidate in copied.candidates[: facts.ROWS]
        ]
        flipped = facts.ranking(merged, replace(bounded, scattered=False), nodes(1))
        other = flipped.verdict.otherwise
        assert other is not None and not other.merged and other.first.deployment == copied.candidates[0].deployment
        both = (facts.ranking(copied, bounded, nodes(1)).both_cases, flipped.both_cases)
        for case in (next(case for case in cases if case.copied.deployment.label == label) for cases in both):
            assert case.copied.served_per_gpu == of(copied.candidates)[label]
            assert case.merged.served_per_gpu == of(copied.otherwise)[label]

    def test_no_verdict_comes_of_where_it_was_looked(self) -> None:
        """Every deployment is looked at up to its own limit, the collocated ones that PD is held against too."""
        for bounds in ({"ttft_s": 0.3}, {"e2el_s": 3.0}):
            view = nodes(2)
            planned = planner.plan(scenario(**bounds), MODEL, view, 16)
            assert any(c.collocated and c.best for c in planned.candidates)
            for candidate in (*planned.candidates, *planned.screened):
                if not any(o.stress <= 1 for o in candidate.outcomes):
                    assert candidate.outcomes[0].load.value == 1, candidate.deployment.label
            for candidate in (candidate for candidate in planned.candidates if candidate.rates):
                meeting, missing = ([level for level in candidate.rates if level.meets is met] for met in (True, False))
                near = [level for level in meeting if level.good_share < 0.98]
                assert near or missing[0].load.value < 1.06 * meeting[-1].load.value, candidate.deployment.label

    def test_another_seed_is_within_the_error(self) -> None:
        one, two = (
            evaluate(scenario(tpot_s=0.012, ttft_s=2.0, seed=seed), sized("pd-pack-p1xtp2-d1xtp2"), 8).served_per_gpu
            for seed in (0, 1)
        )
        assert one == pytest.approx(two, rel=0.15)

    def test_a_deployment_that_serves_less_than_one_request_at_a_time_is_simulated(self) -> None:
        deployment = Deployment(topology=parse_label("collocated-1xtp4"))
        loads = planner.ladder(scenario(ttft_s=20.0), SizedDeployment(deployment, 1, matched_rps=0.1, in_flight=0.3))
        assert loads[0].load.value == 1

    def test_no_load_is_tried_that_engines_do_not_take_into_a_batch(self) -> None:
        """Rate matching without a bound on TPOT gives tens of thousands for answers of one token."""
        deployment = Deployment(topology=parse_label("collocated-1xtp2"))
        short = scenario(Workload(input_tokens=16, output_tokens=1), ttft_s=0.3)
        loads = planner.ladder(short, SizedDeployment(deployment, 1, matched_rps=400.0, in_flight=60_000.0))
        assert loads[0].load.value == round(0.1 * 1024)

    def test_a_rate_takes_as_few_gpus_as_meet_the_slo(self) -> None:
        low, high = (
            planner.plan(scenario(tpot_s=0.012, ttft_s=2.0), MODEL, nodes(2), 16, rate_rps=rate).candidates[0]
            for rate in (2.0, 12.0)
        )
        assert low.best and high.best
        assert low.total_gpus < high.total_gpus <= 16

    def test_what_misses_by_less_than_the_models_errors_is_in_doubt(self) -> None:
        """One request at a time has a mean TPOT of 6.60 ms with TP1, 5.58 ms with TP2. The errors of TPOT are 3.5 % in
        90 % of cases."""
        for tpot_s, code, doubt in (
            (0.0065, "pd_misses_slo", "pd-pack-p1xtp1-d1xtp1"),
            (0.0060, "pd_misses_slo", None),
            (0.0055, "no_slo_met", "collocated-1xtp2"),
            (0.0050, "no_slo_met", None),
        ):
            bounded = scenario(tpot_s=tpot_s, ttft_s=2.0)
            planned = planner.plan(bounded, MODEL, nodes(1), 2, concurrencies=[1])
            found = facts.verdict(planned, bounded)
            assert (found.code, found.in_doubt.deployment.label if found.in_doubt else None) == (code, doubt)
            text = facts.ranking_text(planned, bounded, nodes(1))
            assert ("misses the SLO by less than the errors of the model" in text) is (doubt is not None)
            assert ("PD does not pay here" in text) is (code == "pd_misses_slo" and doubt is None)

    @pytest.mark.parametrize("of_pd", [True, False])
    @pytest.mark.parametrize(("stress", "sure"), [(0.99, False), (0.95, True)])
    @pytest.mark.parametrize("by_goodput", [False, True])
    def test_what_meets_by_less_than_the_models_errors_is_in_doubt(
        self, of_pd: bool, stress: float, sure: bool, by_goodput: bool
    ) -> None:
        """The kind that meets the SLO does so at one load, the other kind misses it by far. A goodput is at the bound
        by its nature, and the lower loads of its closed loop are not."""
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)

        def at(label: str, stress: float) -> planner.Candidate:
            deployment = sized(label).deployment
            outcome = bounded.outcome(deployment, Closed(concurrency=1))
            columns = (np.full(100, 0.1), np.full(100, stress * 0.012), np.full(100, 3.0))
            result = replace(outcome, columns=columns, stress=stress, meets=stress <= 1)
            best = result if stress <= 1 else None
            if by_goodput and best:
                barely = replace(result, columns=(columns[0], np.full(100, 0.01199), columns[2]), stress=0.999)
                return planner.Candidate(deployment, 1, (result,), barely, 2, goodput_rps=1.0, rates=(barely,))
            return planner.Candidate(deployment, 1, (result,), best, 2, goodput_rps=0.0 if by_goodput else None)

        labels = ("pd-pack-p1xtp1-d1xtp1", "collocated-1xtp2")
        met, missed = labels if of_pd else labels[::-1]
        made = planner.Plan((at(met, stress), at(missed, 2.0)), 2, bounded.slo, None, gpus=2)
        found = facts.verdict(made, bounded)
        assert found.code == ("only_pd_meets_slo" if of_pd else "pd_misses_slo")
        assert (found.barely is None) is sure and found.in_doubt is None
        text = facts.ranking_text(made, bounded, nodes(1))
        words = ("PD pays here", "PD may pay here") if of_pd else ("PD does not pay here", "PD does not clearly pay")
        assert (words[0] in text, words[1] in text) == (sure, not sure)
        assert (f"{met} meets the SLO by less than the errors of the model: measure it." in text) is not sure

    def test_a_rate_beyond_all_deployments_is_told_although_queues_leave_the_fit(self) -> None:
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)
        planned = planner.plan(bounded, MODEL, nodes(1), 2, rate_rps=6.0)
        assert any(each.dimension == "load" for each in planner.outside(planned.candidates[0], bounded))
        assert facts.verdict(planned, bounded).code == "no_slo_met"
        assert "plan for more GPUs" in facts.ranking_text(planned, bounded, nodes(1))
        short = replace(bounded, workload=Workload(input_tokens=200, output_tokens=50))
        planned = planner.plan(short, MODEL, nodes(1), 2, rate_rps=600.0)
        assert facts.verdict(planned, short).code == "extrapolated", "the lengths are outside, whatever the load"

    def test_an_overload_has_the_requests_that_are_completed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The more requests come, the fewer are within bounds; those that end are not fewer than below the overload."""
        bounded = scenario(tpot_s=0.012, ttft_s=2.0)
        deployment = sized("collocated-1xtp2").deployment
        served = [bounded.outcome(deployment, bounded.at_rate(rate_rps)) for rate_rps in (3.0, 20.0, 500.0)]
        assert not any(each.meets for each in served[1:])
        assert served[2].requests_per_s > served[0].requests_per_s and served[2].requests_per_s < 20.0
        assert served[2].output_tokens_per_s == pytest.approx(250 * served[2].requests_per_s)

    @pytest.mark.parametrize(
        ("bounds", "missed"), [({"ttft_s": 0.01, "tpot_s": 0.012}, "TTFT"), ({"ttft_s": 2.0, "tpot_s": 0.001}, "TPOT")]
    )
    def test_the_bound_that_is_missed_is_named_with_its_value(self, bounds: dict[str, float], missed: str) -> None:
        bounded = scenario(**bounds)
        planned = planner.plan(bounded, MODEL, nodes(1), 2, concurrencies=[1])
        found = facts.verdict(planned, bounded)
        assert found.missed is not None and found.missed.metric == missed
        assert found.missed.bound_s == bounds[f"{missed.lower()}_s"]
        column = found.nearest.best_or_nearest.columns[missed == "TPOT"] if found.nearest else ()
        assert sum(value <= found.missed.value_s for value in column) >= 0.95 * len(column)
        text = facts.ranking_text(planned, bounded, nodes(1))
        assert f"95 % of its requests have a {missed} of at most " in text and "over a bound" not in text

    def test_a_share_that_only_both_bounds_miss_has_no_missed_bound(self) -> None:
        result = scenario(tpot_s=0.012, ttft_s=2.0).outcome(sized("collocated-1xtp2").deployment, Closed(concurrency=1))
        latencies = [1.0] * 96 + [3.0] * 4
        apart = replace(result, columns=(np.array(latencies), np.array(latencies[::-1]), np.array([9.0] * 100)))
        assert facts.missed_bound(apart, Slo(ttft_s=2.0, tpot_s=2.0)) is None, "4 % miss each, 8 % one of them"
        assert facts.missed_bound(apart, Slo(ttft_s=0.5, tpot_s=0.9)) == ("TTFT", 1.0, 0.5)

    def test_estimates_that_all_miss_the_slo_are_told_outside_the_fit(self) -> None:
        bounded = replace(scenario(ttft_s=0.01, tpot_s=0.012), hardware=HARDWARE.model_copy(update={"fit": None}))
        planned = planner.plan(bounded, MODEL, nodes(1), 2, concurrencies=[1])
        assert facts.verdict(planned, bounded).code == "extrapolated"
        text = facts.ranking_text(planned, bounded, nodes(1))
        assert "No verdict: " in text and "By these estimates no deployment meets the SLO" in text

    def test_an_slo_that_nothing_meets(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(["--gpus", "4", "--slo-tpot-ms", "0.5", "--concurrency", "8"]) == 0
        out = capsys.readouterr().out
        assert (
            "No deployment meets the SLO" in out and "To measure how far the collocated baseline is from the SLO" in out
        )

    def test_a_slow_network_of_the_nodes_is_planned_with(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A prompt of 5,000 tokens has 0.37 GB of KV cache, which takes 1.8 s at 0.2 GB/s."""
        (tmp_path / "slow.yaml").write_text(SLOW_NODES)
        given = "--gpus 16 --concurrency 32 --placement spread --slo-ttft-ms 2000 --slo-tpot-ms 12 --node"
        assert plan.main([*given.split(), str(tmp_path / "slow.yaml")]) == 0
        slow = capsys.readouterr().out
        assert "TCP at 0.2 GB/s per node" in slow and "network ethernet (fit: efa)" in slow
        assert re.search(r"^ ?1 +collocated-", slow, re.MULTILINE), "no spread is worth its transfers"
        assert plan.main([*given.split(), "p5.48xlarge"]) == 0
        assert re.search(r"^ 1 +pd-spread-", capsys.readouterr().out, re.MULTILINE)

    def test_a_slow_network_of_the_nodes_is_explained_and_predicted_with(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node = ["--node", str(tmp_path / "slow.yaml")]
        Path(node[1]).write_text(SLOW_NODES)
        label = "pd-spread-p1xtp4-d1xtp4"
        assert plan.main(["--explain", label, "--concurrency", "1", *node]) == 0
        explained = capsys.readouterr().out
        assert "TCP at 0.2 GB/s per node" in explained and "network ethernet (fit: efa)" in explained
        row = re.search(r"^concurrency 1 +(.+)$", explained, re.MULTILINE)
        assert row and int(row[1].split()[3]) == pytest.approx(1850, rel=0.05), "0.37 GB of KV cache at 0.2 GB/s"

        rows = f"config,concurrency,num_prompts,link\n{label},4,8,\n{label},4,8,tcp\n{label},4,8,srd\n"
        (tmp_path / "rows.csv").write_text(rows)
        assert plan.main(["--predict", str(tmp_path / "rows.csv"), *node]) == 0
        on_nodes, tcp, srd = csv.DictReader(io.StringIO(capsys.readouterr().out))
        figures = [{name: each[name] for name in csv_predictions.COLUMNS} for each in (on_nodes, tcp)]
        assert figures[0] == figures[1]
        assert all("network ethernet (fit: efa)" in each["prediction_note"] for each in (on_nodes, srd))

    def test_pd_does_not_pay_where_such_lengths_were_fitted(self) -> None:
        """Short prompts and long answers: nothing to keep out of decode's way."""
        short = scenario(Workload(input_tokens=200, output_tokens=500), tpot_s=0.015, ttft_s=0.5)
        planned = planner.plan(short, MODEL, nodes(1), 8)
        assert facts.verdict(planned, short).code == "extrapolated"
        fit = short.hardware.fit
        assert fit is not None
        wider = fit.model_copy(update={"input_tokens": (200, 10_000), "in_flight_per_gpu": (0.3, 40.0)})
        fitted = short.hardware.model_copy(update={"fit": wider})
        assert facts.verdict(planned, replace(short, hardware=fitted)).code in ("does_not_pay", "unclear")

    def test_a_bound_on_tpot_alone_works_and_warns(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(shlex.split("--gpus 16 --itl 5000 --otl 250 --slo-tpot-ms 20")) == 0
        out = capsys.readouterr().out
        assert "Best deployment by closed-loop throughput" in out and "TTFT is not bounded" in out
        assert "\nNo winner is named while TTFT is unbounded" in out and "PD pays" not in out
        assert re.search(r"\(goodput/s per GPU: \S+ \d\.\d\d and collocated-\S+ \d\.\d\d\)\.", out)

    @pytest.mark.parametrize("bounds", [{"tpot_s": 0.012}, {}])
    def test_nobody_is_named_while_ttft_is_unbounded(self, bounds: dict[str, float]) -> None:
        bounded = scenario(**bounds)
        for loads in ({"concurrencies": [16]}, {"rate_rps": 2.0}):
            planned = planner.plan(bounded, MODEL, nodes(1), 8, **loads)  # type: ignore[arg-type]
            found = facts.verdict(planned, bounded)
            assert found.code == "ttft_unbounded" and found.base is not None and found.base.collocated
            both = replace(planned, slo=Slo(**bounds, ttft_s=2.0))
            assert facts.verdict(both, replace(bounded, slo=both.slo)).code != "ttft_unbounded"


class TestGain:
    def test_the_interval_holds_the_gain_and_grows_with_the_error(self) -> None:
        plain = scenario(tpot_s=0.012, ttft_s=2.0)
        split, base = (evaluate(plain, sized(label), 8) for label in ("pd-pack-p1xtp4-d1xtp4", "collocated-2xtp4"))
        widths = []
        for percent in (1.0, 5.0):
            error = FitError(
                tpot_percent=percent, ttft_percent=percent, requests_per_s_percent=percent, points=1, how=""
            )
            advantage = gain(split, base, replace(plain, hardware=HARDWARE.model_copy(update={"error": error})))
            assert advantage is not None and advantage.interval is not None
            low, high = advantage.interval
            assert low < advantage.value < high
            widths.append(high - low)
        assert widths[0] < widths[1]

    def test_other_arrivals_bring_no_clear_gain(self) -> None:
        """One deployment against itself with the arrivals of another seed, if the model had hardly an error."""
        error = FitError(tpot_percent=0.01, ttft_percent=0.01, requests_per_s_percent=0.01, points=1, how="")
        exact = replace(scenario(tpot_s=0.012, ttft_s=2.0), hardware=HARDWARE.model_copy(update={"error": error}))
        found = []
        for seed in range(6):
            seeded = replace(exact, seed=seed)
            found.append(planner.under_poisson(seeded, evaluate(seeded, sized("collocated-2xtp2"), 4)))
        gains = [gain(each, found[0], exact) for each in found[1:]]
        intervals = [each.interval for each in gains if each is not None and each.interval is not None]
        assert sum(low < 0 < high for low, high in intervals) >= 4

    def test_nothing_is_gained_over_oneself(self) -> None:
        plain = scenario(tpot_s=0.012)
        one = evaluate(plain, sized("pd-pack-p1xtp4-d1xtp4"), 8)
        advantage = gain(one, one, plain)
        assert advantage is not None and advantage.value == 0 and advantage.interval is not None
        assert advantage.interval[0] < 0 < advantage.interval[1]

    def test_capacity_is_read_off_between_loads(self) -> None:
        best = evaluate(scenario(tpot_s=0.012), sized("pd-pack-p1xtp4-d1xtp4"), 8)
        meeting = [o.requests_per_s for o in best.outcomes if o.stress <= 1]
        assert (
            max(meeting) <= capacity(best.outcomes, Slo(tpot_s=0.012)) <= max(o.requests_per_s for o in best.outcomes)
        )


def drawn(*levels: tuple[float, float]) -> list[ThroughputPoint]:
    return [ThroughputPoint(*level) for level in levels]


class TestRegimes:
    def test_two_lines_that_cross(self) -> None:
        """Wins below 15, loses above; nothing beyond the ends."""
        curves = {"flat": drawn((10.0, 2.0), (20.0, 2.0)), "steep": drawn((10.0, 1.0), (20.0, 3.0))}
        first, second = stretches(curves, tolerance=0.0)
        assert (first.label, second.label) == ("steep", "flat")
        assert first.to_tokens_per_s == pytest.approx(15, abs=0.2) and second.to_tokens_per_s == 20

    def test_a_difference_within_the_error_is_no_change(self) -> None:
        curves = {"a": drawn((10.0, 1.00), (20.0, 1.02)), "b": drawn((10.0, 1.01), (20.0, 1.00))}
        (only,) = stretches(curves, tolerance=0.03)
        assert {only.label, *only.rivals} == {"a", "b"}

    def test_nothing_simulated_no_map(self) -> None:
        assert stretches({"a": []}, tolerance=0.1) == []

    def test_neighbours_differ(self) -> None:
        plain = scenario()
        chosen = [evaluate(plain, sized(label), 8) for label in ("collocated-4xtp2", "pd-pack-p1xtp2-d3xtp2")]
        regime = regimes(chosen, plain)
        assert regime
        for lower, upper in pairwise(regime):
            assert lower.to_tokens_per_s < upper.from_tokens_per_s
            assert lower.label != upper.label


class TestHandOver:
    def test_the_winners_command_is_accepted_by_the_launcher(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--gpus", "16", "--slo-tpot-ms", "12", "--concurrency", "32,96", "--out", str(tmp_path)]
        assert plan.main(words) == 0
        out = capsys.readouterr().out
        assert "  # max_num_batched_tokens, max_num_seqs, enable_prefix_caching (--engine-arg KEY=VALUE here;\n" in out
        lines = out.splitlines()
        commands = [shlex.split(line) for line in lines if "launch_gptoss.py" in line]
        # Without --cluster a launch would ask the running Ray, so only the dry runs are tried.
        checked = [command[2:] for command in commands if "--dry-run" in command]
        assert len(checked) == 4 and all("--cluster" in command for command in checked)
        assert "collocated" in checked[-1][1], "the yardstick comes with the three best PD deployments"
        for command in checked:
            assert launch.main(command) == 0
        started = [command[2:] for command in commands if "--detach" in command]
        assert [command[:-1] for command in started] == [command[:-3] for command in checked]

    def test_a_plan_for_cpu_engines_is_for_this_machine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = "--hardware cpu-vllm-0.29 --model tiny-gptoss --gpus 2 --itl 256 --otl 64 --slo-ttft-ms 300"
        folder = tmp_path / "with a space"
        assert plan.main([*shlex.split(words), "--out", str(folder)]) == 0
        out = capsys.readouterr().out
        assert "(1 x local Ray node)" in out and "p5.48xlarge" not in out
        lines = [shlex.split(line) for line in out.splitlines() if line.startswith("  python ")]
        checked = [line[2:] for line in lines if "--dry-run" in line]
        assert len(checked) == 3 and all("--local" in line for line in lines if "launch_gptoss.py" in line)
        for line in checked:
            assert launch.main(line) == 0
        assert lines[-1][1:6] == ["plan.py", "--model", "tiny-gptoss", "--hardware", "cpu-vllm-0.29"]

    def test_the_printed_sweep_searches_for_the_goodput_that_was_planned(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plan.main(shlex.split("--gpus 2 --slo-tpot-ms 12 --slo-ttft-ms 2000 --top 1")) == 0
        out = capsys.readouterr().out.splitlines()
        first = next(line for line in out if line.split()[:1] == ["1"]).split()
        sweeps = [shlex.split(line)[1:] for line in out if "run_bm.sh" in line]
        options = bench.options(sweeps[0])
        (search,) = options.searches
        assert search.slo == Slo(ttft_s=2.0, tpot_s=0.012, quantile=0.95)
        copies, per_gpu = int(first[2]), float(first[5])
        assert search.start_rps is not None and search.start_rps * copies / 2 == pytest.approx(per_gpu, abs=0.01)

    @pytest.mark.parametrize(
        "label", ["collocated-2xtp4", "pd-pack-p2xtp1-d3xtp2", "pd-spread-p1xtp4ep-d2xtp2", "collocated-1xdp8ep"]
    )
    def test_flags_mean_the_deployment(self, label: str, capsys: pytest.CaptureFixture[str]) -> None:
        deployment = Deployment(topology=parse_label(label))
        words = [*launch_words(deployment), "--cluster", "p5.48xlarge-x2", "--dry-run"]
        assert launch.main(words) == 0
        assert capsys.readouterr().out.splitlines()[0].split()[1] == label

    def test_explanation_adds_up(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(["--explain", "pd-spread-p1xtp4-d1xtp4", "--concurrency", "8"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("concurrency 8"))
        *phases, total = (int(cell) for cell in row.split()[2:9])
        assert sum(phases) == pytest.approx(total, abs=len(phases))

    @pytest.mark.parametrize("load", ["--concurrency 64", "--rate 9"])
    def test_an_explanation_has_the_figures_of_the_ranking(self, load: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Phases before the first token are its TTFT. A closed loop sends its first wave at once, and it waits long."""
        label = "pd-pack-p3xtp1-d2xtp2" if "rate" in load else "collocated-2xtp4"
        assert plan.main(["--gpus", "8", *load.split()]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if label in line).split()
        ttft_ms, tpot_ms = float(row[8].replace(",", "")), float(row[9])
        assert plan.main(["--explain", label, *load.split()]) == 0
        kind, value = load.split()
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(kind[2:])).split()
        *to_first_token, decode = (int(cell) for cell in row[2:8])
        assert row[1] == value and sum(to_first_token) == pytest.approx(ttft_ms, abs=len(to_first_token))
        assert decode / 249 == pytest.approx(tpot_ms, rel=0.01)

    def test_an_explanation_names_scattered_blocks_where_they_count(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words, copied in (
            ("pd-pack-p1xtp2-d1xtp2", True),
            ("pd-pack-p1xtp2-d1xtp2 --assume-merged", False),
            ("pd-pack-p1xtp1-d1xtp2", None),
            ("collocated-2xtp2", None),
        ):
            assert plan.main(["--explain", *words.split(), "--concurrency", "4"]) == 0
            out = capsys.readouterr().out
            assert ("free blocks are scattered" in out) is (copied is not None), words
            assert ("copied one by one" in out) is (copied is True), words

    def test_curves_are_drawn(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "curves.png"
        assert plan.main(["--gpus", "8", "--concurrency", "8,16,32", "--plot", str(path)]) == 0
        assert path.stat().st_size > 10_000

    @pytest.mark.parametrize(("loads", "banded"), [("8", False), ("8,16", True)])
    def test_bands_are_explained_where_there_are_some(self, tmp_path: Path, loads: str, banded: bool) -> None:
        """A curve of one load has no band."""
        path = tmp_path / "curves.svg"
        assert plan.main(["--gpus", "2", "--concurrency", loads, "--plot", str(path)]) == 0
        assert ("<!-- Bands: " in path.read_text()) is banded

    def test_every_deployment_that_the_tables_call_best_is_drawn(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "curves.svg"
        words = ["--gpus", "8", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "12"]
        assert plan.main([*words, "--plot", str(path)]) == 0
        ranked, by_throughput = capsys.readouterr().out.split("Best deployment by ")
        best = {label for label in re.findall(r"^[\d ]+to \d+ +(\S+)", by_throughput, re.MULTILINE)}
        assert len(best) > 2 and not best <= {*re.findall(r"^ *[1-5]  ([\w-]+)", ranked, re.MULTILINE)}
        svg = path.read_text()
        for label in best:
            assert f"<!-- {configuration(Deployment(topology=parse_label(label)))}, predicted -->" in svg
        assert "Pareto frontier over the drawn curves." in svg


class TestProgress:
    def test_what_takes_long_is_on_standard_error_alone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        moment = itertools.count(step=0.7)
        monkeypatch.setattr(plan.time, "monotonic", lambda: next(moment))
        assert plan.main(["--gpus", "2", "--concurrency", "2"]) == 0
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert lines and all(re.fullmatch(r"simulating [\w-]+ \(\d+ of \d+, \d+ s\)", line) for line in lines)
        assert "simulating" not in out and "\r" not in err

    def test_what_is_quick_is_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        progress = plan._PlanProgress()
        progress(0, 3, "collocated-1xtp2")
        progress.end()
        assert capsys.readouterr().err == ""


def test_the_printed_comparison_counts_gpus_as_the_plan_did(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "2", "--concurrency", "2", "--top", "1"]
    for flags in ([], ["--count-gpus", "used"], ["--count-gpus", "nodes"]):
        assert plan.main([*words, *flags]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "viz.py" in line]
        settings = parse(viz.VizSettings, shlex.split(line)[2:])
        assert settings.shown.count == (flags[1] if flags else "used")


def test_follow_up_commands_can_be_pasted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "a folder; with $signs"
    words = ["--gpus", "2", "--concurrency", "2", "--top", "1", "--out", str(folder)]
    assert plan.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--config" in line]
    assert lines
    for line in lines:
        path = Path(shlex.split(line)[3])
        assert path.parent == folder and path.is_file()


class TestALoadThatIsNotServed:
    def test_its_requests_pile_up(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(["--gpus", "8", "--rate", "1000"]) == 0
        out = capsys.readouterr().out
        assert "No deployment keeps up with the load, so requests queue up" in out and "requests/s take" not in out

    def test_beyond_every_capacity_what_serves_most_per_gpu_is_first(self) -> None:
        made = planner.plan(scenario(), "gpt-oss-120b", nodes(1), 8, rate_rps=200.0).candidates
        served = [each.best_or_nearest.requests_per_s * each.copies / each.total_gpus for each in made]
        assert served == sorted(served, reverse=True) and served[0] > 1.5 * served[-1]
        assert {"collocated-4xtp2", "collocated-2xtp4"} == {each.deployment.label for each in made[:2]}

    @pytest.mark.parametrize(("rate_rps", "serves"), [(15.0, True), (30.0, False), (300.0, False)])
    def test_no_deployment_of_eight_gpus_serves_more_than_it_can(self, rate_rps: float, serves: bool) -> None:
        """Of 20 requests/s with 5000:250 tokens collocated 4xTP2 serves 19.5, and no other deployment keeps up."""
        made = planner.plan(scenario(), "gpt-oss-120b", nodes(1), 8, rate_rps=rate_rps).candidates
        assert any(each.best for each in made) is serves
        for each in made:
            assert each.best is None or each.best.requests_per_s * each.copies > 0.9 * rate_rps


def test_an_explained_deployment_says_what_no_node_has(capsys: pytest.CaptureFixture[str]) -> None:
    for label, words in (
        ("pd-pack-p4xtp4-d4xtp4", "a pack of 32 GPUs does not fit a node of 8"),
        ("collocated-1xtp16", "TP 16 spans nodes of 8 GPUs: its all-reduce is predicted as if NVLink joined them"),
    ):
        assert plan.main(["--explain", label, "--concurrency", "8"]) == 0
        out = capsys.readouterr().out
        assert words in out and "Extrapolated" in out


def test_the_shipped_systems_of_wide_experts_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "deepseek-v3", "--itl", "2000", "--otl", "100", "--concurrency", "16"]
    assert plan.main(["--explain", "pd-spread-p3xdp24ep-d1xdp32ep", *args]) == 0
    assert "EP over 24 GPUs with a load balancer and 8 redundant experts" in capsys.readouterr().out
