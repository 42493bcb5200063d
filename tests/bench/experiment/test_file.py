"""Experiment files: what they come to, and every way in which one can be wrong."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.bench.experiment import schedule
from pdlab.bench.experiment.file import (
    CLUSTER_LAUNCH_S,
    ExperimentFile,
    NamedWorkload,
    configurations,
    launch_settings,
    order,
)
from pdlab.bench.experiment.schedule import (
    AFTER_LEVEL_S,
    CLIENT_START_S,
    SEARCH_POINTS,
    make_schedule,
    part_s,
    visit_s,
)
from pdlab.cli import experiment
from pdlab.core.catalog import load_cluster, local_cluster
from pdlab.core.errors import UsageError
from pdlab.core.files import CONFIGS
from pdlab.core.schema import validate
from pdlab.core.settings import parse, to_words
from pdlab.core.workload import Closed, Level, Open, Ramp
from pdlab.deploy.options import LaunchSettings, request_from, request_from_json, request_to_json
from pdlab.placement.place import place
from pdlab.results.schema import ExperimentRecord
from pdlab.results.store import write_record

SHIPPED = sorted(path.stem for path in (CONFIGS / "sweeps").glob("*.yaml"))
BASE: dict[str, Any] = {
    "name": "x",
    "where": {"local": 2},
    "deployments": [{"label": "pd-pack-p1xtp1-d1xtp1"}],
    "workloads": [{"input_tokens": 64, "output_tokens": 8}],
    "loads": [{"concurrency": [1, 2]}],
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}, sort_keys=False))
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_can_be_planned(name: str, tmp_path: Path) -> None:
    plan = make_schedule(name)
    assert plan.file.name == name
    assert len(plan.visits) == plan.file.repeats * len(plan.configurations)
    text = experiment.describe(plan, tmp_path)
    assert all(configuration.name in text for configuration in plan.configurations)
    view = local_cluster(2) if plan.file.where.local else load_cluster("p5.48xlarge-x2")
    for configuration in plan.configurations:
        place(configuration.deployment, view)


def test_a_dry_run_prints_that_a_run_would_be_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last(*words: str) -> str:
        assert experiment.main(["local-pack-vs-spread", "--dry-run", *words]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    file = make_schedule("local-pack-vs-spread").file
    done = tmp_path / "done"
    (done / file.name).mkdir(parents=True)
    kept = ExperimentRecord(name=file.name, file="x", experiment=schedule.settings_of(file), visits=())
    write_record(done / file.name, kept)
    assert "is refused: " in last("--out", str(done)) and "continue it with --resume" in last("--out", str(done))
    assert "refused" not in last("--out", str(done), "--resume")
    fixed = file.model_copy(update={"workloads": (NamedWorkload(input_tokens=256, output_tokens=64),)})
    earlier = kept.model_copy(update={"experiment": schedule.settings_of(fixed)})
    write_record(done / file.name, earlier)
    assert "was made with other workloads;" in last("--out", str(done), "--resume")
    assert experiment.main(["local-pack-vs-spread", "--dry-run", "--out", str(done), "--resume"]) == 0
    dry = capsys.readouterr().out
    assert "in all" not in dry and "order" not in dry, "the levels there are of another experiment"
    assert "refused" not in last("--out", str(tmp_path))
    (tmp_path / "local-pack-vs-spread").mkdir()
    (tmp_path / "local-pack-vs-spread" / "notes.txt").touch()
    assert "has other results" in last("--out", str(tmp_path), "--resume")


def test_bounds_of_the_headline_are_part_of_the_file_and_may_change(tmp_path: Path) -> None:
    plan = make_schedule(write(tmp_path, at=["tpot_ms=12,ttft_p95_ms=2000", "e2el_ms=900"]))
    lines = experiment.describe(plan, tmp_path)
    assert "answered, too: who serves most at TPOT p50 <= 12 ms and TTFT p95 <= 2,000 ms\n" in lines
    assert "answered, too: who serves most at E2EL p50 <= 900 ms\n" in lines
    kept = ExperimentRecord(name="x", file="x", experiment=schedule.settings_of(plan.file), visits=())
    write_record(tmp_path / "x", kept)
    other = make_schedule(write(tmp_path, at=["tpot_ms=20"]))
    assert schedule.earlier_record(tmp_path / "x", other.file, resume=True) == kept


def test_units_are_the_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("tp-baselines", "8 GPUs"),
        ("local-pd-ratio", "one-prefill: collocated-1xtp1, 1 engine rank\n"),
    ):
        assert experiment.main([name, "--dry-run"]) == 0
        assert words in capsys.readouterr().out


def test_the_three_of_the_story_and_their_local_variants_are_shipped() -> None:
    assert {"tp-baselines", "pd-ratio", "pack-vs-spread"} <= set(SHIPPED)
    assert {f"local-{name}" for name in ("tp-baselines", "pd-ratio", "pack-vs-spread")} <= set(SHIPPED)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("local-")])
def test_local_variants_are_planned_for_less_than_half_an_hour(name: str, tmp_path: Path) -> None:
    plan = make_schedule(name)
    assert sum(schedule.visit_s(plan, visit, tmp_path) for visit in plan.visits) < 30 * 60


def test_unknown_names_list_the_shipped_ones() -> None:
    with pytest.raises(UsageError, match=r"neither a name of configs/sweeps/ .*local-pack-vs-spread"):
        make_schedule("no-such-experiment")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deployments": [{"label": "pd-pack-p1xtp3-d1xtp4"}]},
         "x.yaml: pd-pack-p1xtp3-d1xtp4: prefill TP 3 does not divide the 64 attention heads"),
        ({"deployments": [{"label": "collocated-1xtp1", "engine_arg": {"gpu_memory_utilization": 0.8}}]},
         "x.yaml: collocated-1xtp1: collocated engine of 1 GPU cannot hold gpt-oss-120b"),
        ({"deployments": [{"label": "collocated-1xtp1", "model": "tiny-llama", "ep": True}]},
         "x.yaml: collocated-1xtp1ep: --ep: tiny-llama has no experts"),
        ({"where": {"cluster": "auto"}, "deployments": [{"label": "pd-pack-p1xtp3-d1xtp4"}]},
         "prefill TP 3 does not divide the 64 attention heads"),
        ({"where": {"local": 2}, "deployments": [{"label": "collocated-1xtp1", "model": "gpt-oss-120b"}]},
         "--local serves on this machine's CPUs, too little for gpt-oss-120b"),
        ({"workloads": [{"input_tokens": 30000, "output_tokens": 250}]},
         "has 30250 tokens, its max_model_len is 16384: give the deployment max_model_len: 30720, or shorten the"),
        ({"workloads": [{"input_tokens": 200000, "output_tokens": 250}]},
         "(200000:250): gpt-oss-120b takes 131072 tokens of context; a request has 200250: shorten it"),
        ({"where": {"local": 2}, "deployments": [{"label": "pd-pack-p1xtp1-d1xtp1", "max_model_len": 9000}],
          "workloads": [{"input_tokens": 9000, "output_tokens": 250}]}, "(9000:250) has 9250 tokens, its max_model"),
        ({"deployments": [{"label": "pd-pack-p1xtp4-d1xtp4", "p_engine_arg": ["max_model_len=5000"]}]},
         "--p-engine-arg ['max_model_len=5000']: write its values as NAME: VALUE"),
        ({"deployments": [{"label": "pd-pack-p1xtp4-d1xtp4", "d_engine_arg": {"max_model_len": 5000}}],
          "workloads": [{"input_tokens": 5000, "output_tokens": 250}]}, "has 5250 tokens, its max_model_len is 5000:"),
    ],
)  # fmt: skip
def test_what_the_launcher_refuses_is_refused_before_the_first_start(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    cluster = {"where": {"cluster": "p5.48xlarge-x2"}, "deployments": [{"label": "collocated-1xtp4"}]}
    with pytest.raises(UsageError, match=re.escape(message)):
        make_schedule(write(tmp_path, **{**cluster, **changes}))


def test_the_length_that_a_refusal_names_is_not_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"where": {"cluster": "p5.48xlarge-x2"}, "workloads": [{"input_tokens": 30000}]}
    longer = [{"label": "collocated-1xtp4", "max_model_len": 30720}]
    assert make_schedule(write(tmp_path, deployments=longer, **changes)).visits


def test_an_entry_becomes_the_launchers_flags(tmp_path: Path) -> None:
    entry = {
        "name": "s", "label": "pd-spread-p2xtp1-d1xtp1", "ucx_tls": "tcp", "kv_backend": ["UCX"],
        "max_model_len": 4096, "otl": 100, "lengths": "uniform:0.5-1.0",
        "engine_arg": {"max_num_seqs": 8, "dtype": "bfloat16", "eplb_config": {"window_size": 1}},
        "ingress_replicas": 2, "two_hosts": True, "link_rate": "1gbit", "link_delay_ms": 0.5,
    }  # fmt: skip
    path = Path(write(tmp_path, deployments=[entry]))
    file = validate(ExperimentFile, yaml.safe_load(path.read_text()), where="x")
    words = to_words(launch_settings(file, file.deployments[0], path))
    assert set(itertools.pairwise(words)) >= {
        ("--p-num", "2"), ("--p-tp", "1"), ("--d-num", "1"), ("--d-tp", "1"), ("--local", "2"), ("--ucx-tls", "tcp"),
        ("--max-model-len", "4096"), ("--engine-arg", "max_num_seqs=8"), ("--engine-arg", "dtype=bfloat16"),
        ("--engine-arg", 'eplb_config={"window_size": 1}'), ("--link-rate", "1gbit"), ("--link-delay-ms", "0.5"),
        ("--ingress-replicas", "2"), ("--otl", "100"), ("--lengths", "uniform:0.5-1.0"),
    }  # fmt: skip
    assert words[0] == "--pd-spread" and "--two-hosts" in words
    settings = launch_settings(file, file.deployments[0], path)
    assert request_from(parse(LaunchSettings, words), words) == request_from(settings, words)
    (made,) = configurations(file, path)
    assert made.deployment.engine_kwargs == {"max_num_seqs": 8, "dtype": "bfloat16", "eplb_config": {"window_size": 1}}
    assert made.deployment.ingress_replicas == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_what_the_launcher_reads_is_what_was_planned(name: str) -> None:
    for configuration in make_schedule(name).configurations:
        assert request_from_json(request_to_json(configuration.request)) == configuration.request


def test_planning_makes_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    flags = {"host": "0.0.0.0", "direct_streaming": False}
    (made,) = make_schedule(write(tmp_path, deployments=[{"label": "collocated-1xtp1", **flags}])).configurations
    assert made.request.host == "0.0.0.0" and made.request.api_key_file is None
    assert not (tmp_path / "cache").exists()


def test_a_config_beside_the_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("topology: {kind: collocated, pool: {replicas: 2}}\nmodel: tiny-gptoss\n")
    plan = make_schedule(write(tmp_path, deployments=[{"config": "mine.yaml"}]))
    assert plan.configurations[0].deployment.label == "collocated-2xtp1"


def test_loads_of_a_plan(tmp_path: Path) -> None:
    loads = [
        {"concurrency_per_gpu": [0.2, 3]},
        {"rate_rps": [2], "burstiness": 0.5},
        {"ramp": [{"start_rps": 1, "end_rps": 8}]},
        {"slo": {"tpot_ms": 50}, "burstiness": 0.5},
    ]
    (part,) = make_schedule(write(tmp_path, loads=loads)).visits[0].parts
    assert part.loads == (
        Closed(concurrency=1, per_gpu=0.2),
        Closed(concurrency=6, per_gpu=3),
        Open(rate_rps=2, burstiness=0.5),
        Ramp(start_rps=1, end_rps=8),
    )
    (search,) = part.searches
    assert search.slo.tpot_s == 0.05 and search.slo.quantile == 0.95


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([{"rate_rps": [12345.67, 12345.68]}], r"two loads have one name, rate12345\.7 \(12345\.67 and 12345\.68;"),
        ([{"rate_rps": [12345.67]}, {"rate_rps": [12345.68]}], "two loads have one name, rate12345"),
        ([{"concurrency": [4]}, {"concurrency_per_gpu": [2]}], "concurrency 4 is listed twice"),
    ],
)
def test_two_loads_of_one_name_are_refused_before_a_launch(
    loads: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"pd-pack-p1xtp1-d1xtp1 under workload mixed: {words}"):
        make_schedule(write(tmp_path, loads=loads))


@pytest.mark.parametrize("load", [{"slo": {"ttft_ms": 500}}, {"slo": {"tpot_ms": 50}}, {"rate_rps": [2]}])
def test_a_search_shares_its_folder_with_no_other_burstiness(load: dict[str, Any], tmp_path: Path) -> None:
    bursty = {"slo": {"ttft_ms": 500}, "burstiness": 0.5}
    with pytest.raises(UsageError, match="pd-pack-p1xtp1-d1xtp1 under workload mixed: "):
        make_schedule(write(tmp_path, loads=[load, bursty]))
    workloads = [{"name": "a", "input_tokens": 64}, {"name": "b", "input_tokens": 32}]
    apart = [{**load, "workloads": ["a"]}, {**bursty, "workloads": ["b"]}]
    assert make_schedule(write(tmp_path, workloads=workloads, loads=apart)).visits


@pytest.mark.parametrize(
    ("lengths", "load", "seconds"),
    [
        ("fixed", {"rate_rps": [2]}, 60),
        ("fixed", {"rate_rps": [0.01]}, 2000),
        ("mixes:256:32@0.2,128:64@0.2,every=60", {"rate_rps": [2]}, 240),
        ("mixes:256:32,crowd=rate*10@60+30", {"rate_rps": [4]}, 240),
        ("mixes:256:32@0.2,128:64@0.2,every=60", {"slo": {"ttft_ms": 500, "start_rps": 20}}, SEARCH_POINTS * 240),
        ("mixes:256:32@4,128:64@4,every=60", {"slo": {"ttft_ms": 500, "start_rps": 0.25}}, SEARCH_POINTS * 373),
    ],
)
def test_an_open_loop_is_estimated_by_the_time_of_its_arrivals(
    lengths: str, load: dict[str, Any], seconds: float, tmp_path: Path
) -> None:
    """20 requests at least, two rounds at least, and 373 requests for a look of a search."""
    tokens = {} if lengths != "fixed" else {"input_tokens": 256, "output_tokens": 32}
    plan = make_schedule(write(tmp_path, workloads=[{"lengths": lengths, **tokens}], loads=[load]))
    (part,) = plan.parts.values()
    measured_s = part_s(plan.file, part, part.loads, part.searches)
    request_s = 0.5 + 64 * 0.02
    assert seconds <= measured_s <= 1.05 * seconds + CLIENT_START_S + 3 * request_s + SEARCH_POINTS * AFTER_LEVEL_S


@pytest.mark.parametrize(
    "load",
    [{"concurrency": [4]}, {"rate_rps": [2]}, {"slo": {"ttft_ms": 500, "start_rps": 2}}],
    ids=["closed", "open", "search"],
)
def test_a_simulated_second_of_a_rehearsal_takes_as_many_real_ones_as_its_file_says(
    load: dict[str, Any], tmp_path: Path
) -> None:
    """From 10 to 30 times slower the levels take 20 times their own time more. The launch and the load generator's own
    times are of this machine."""

    def whole_s(**settings: Any) -> float:
        entry = {"name": "a", "config": "collocated-1xtp8", **settings}
        path = write(tmp_path, where={"cluster": "p5.48xlarge-x2"}, deployments=[entry], loads=[load])
        plan = make_schedule(path)
        return visit_s(plan, plan.visits[0], tmp_path / "out")

    real_s, ten_s, thirty_s = whole_s(), whole_s(rehearse=True, slow_down=10), whole_s(rehearse=True, slow_down=30)
    assert thirty_s - ten_s == pytest.approx(20 / 9 * (ten_s - real_s))
    fixed_s = real_s - (ten_s - real_s) / 9
    points = SEARCH_POINTS if "slo" in load else 1
    assert fixed_s == pytest.approx(CLUSTER_LAUNCH_S + CLIENT_START_S + points * AFTER_LEVEL_S)
    assert unknown_s(tmp_path, load) == pytest.approx(real_s)


def unknown_s(tmp_path: Path, load: dict[str, Any]) -> float:
    """Of a rehearsal whose launch chooses its slow-down: in simulated seconds."""
    entry = {"name": "a", "config": "collocated-1xtp8", "rehearse": True}
    plan = make_schedule(write(tmp_path, where={"cluster": "p5.48xlarge-x2"}, deployments=[entry], loads=[load]))
    assert plan.slow_down(plan.configurations[0]) is None
    return visit_s(plan, plan.visits[0], tmp_path / "out")


def test_the_order_is_a_latin_square_and_the_seeds(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    file = validate(ExperimentFile, {**BASE, "repeats": 8}, where="x")
    visits = order(file, names)
    assert visits == order(file, names)
    blocks = [[name for repeat, name in visits if repeat == r] for r in range(8)]
    assert all(sorted(block) == sorted(names) for block in blocks)
    for square in (blocks[:4], blocks[4:]):
        for position in range(4):
            assert sorted(block[position] for block in square) == sorted(names)
    firsts = Counter(order(file.model_copy(update={"seed": seed}), names)[0][1] for seed in range(60))
    assert set(firsts) == set(names)
    more = order(file.model_copy(update={"repeats": 11}), names)
    assert more[: len(visits)] == visits, "more repeats later do not change those that are measured"


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["local-pack-vs-spread", "--dry-run", "--out", str(tmp_path / "bm")]) == 0
    assert "3 deployments on 2 local Ray nodes, 3 repeats" in capsys.readouterr().out and not list(tmp_path.iterdir())


class TestLengths:
    def test_a_file_of_pairs_is_found_beside_the_experiment(self, tmp_path: Path) -> None:
        (tmp_path / "pairs.csv").write_text("input_tokens,output_tokens\n60,8\n40,4\n")
        plan = make_schedule(write(tmp_path, workloads=[{"lengths": "file:pairs.csv"}]))
        (part,) = plan.visits[0].parts
        workload = part.workload.workload(plan.file.seed)
        assert (workload.input_tokens, workload.output_tokens, workload.longest) == (50, 6, (60, 8))
        drawn = workload.draw(Level(load=Closed(concurrency=2), num_requests=4, seed=0))
        assert Counter(drawn) == {(60, 8): 2, (40, 4): 2}

    def test_a_dry_run_names_them(self, tmp_path: Path) -> None:
        workloads = [{"input_tokens": 64, "output_tokens": 8, "lengths": "uniform:0.8-1.0"}]
        plan = make_schedule(write(tmp_path, workloads=workloads))
        assert ": mixed 64:8 uniform 0.8-1.0; concurrency 1" in experiment.describe(plan, tmp_path)

    def test_shipped_sweeps_vary_them_but_for_those_of_published_runs(self) -> None:
        for name in SHIPPED:
            varied = {workload.varied for workload in make_schedule(name).file.workloads}
            assert varied == {"published" not in name}, name

    @pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("published-")])
    def test_sweeps_of_published_runs_differ_in_lengths_alone(self, name: str) -> None:
        fixed, varied = (make_schedule(each).file for each in (name, name.removeprefix("published-")))
        changed = {"name": varied.name, "description": varied.description, "workloads": varied.workloads}
        assert fixed.model_copy(update=changed) == varied
        assert [w.label for w in fixed.workloads] == [
            w.label.removesuffix(" uniform 0.8-1.0") for w in varied.workloads
        ]
