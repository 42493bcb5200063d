"""A sweep that replays a workload file: its folder, its verdict, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.completions import completions_server
from support.launched import running

from pdlab.bench import traffic
from pdlab.bench.experiment.file import configurations, load_experiment_file, loads_and_searches
from pdlab.bench.sweep import SweepOptions, build, run_sweep
from pdlab.cli.bench import options
from pdlab.core.deployment import Collocated, Deployment, Pool
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.replayed import COMPILED, Replayed
from pdlab.core.workload import Closed, Open, Replay, Workload
from pdlab.deploy.endpoint import save_running
from pdlab.results.store import Store
from pdlab.traffic.requests import TrafficHead, TrafficRequest, write_requests


def a_file(folder: Path, *, think_s: float = 0.1, **head: object) -> Path:
    """Four sessions of two requests; the second waits for the first."""
    requests = []
    for number in range(4):
        name = f"c{number}"
        blocks = ((f"sys/{number % 2}", 16), (f"{name}/a", 4 + number))
        requests.append(TrafficRequest(id=f"{name}t0", session=name, at_s=0.1 * number, blocks=blocks, out=5))
        blocks = ((f"{name}/b", 3),)
        requests.append(
            TrafficRequest(id=f"{name}t1", session=name, parent=f"{name}t0", gap_s=think_s, blocks=blocks, out=4)
        )
    path = folder / "chat.jsonl"
    with path.open("w") as stream:
        write_requests(stream, TrafficHead(scale=16, ticks_s=3.0, spread=True, **head), requests)
    return path


def test_a_file_is_known_before_it_is_sent(tmp_path: Path) -> None:
    sweep = options(["--workload", str(a_file(tmp_path, speed=2.0))])
    lengths = sweep.workload.lengths
    assert isinstance(lengths, Replayed) and sweep.loads == (Replay(speed=2.0),)
    assert (lengths.requests, lengths.sessions, lengths.groups) == (8, 4, 4)
    # Second prompts hold the first ones and their answers: 20 + n, and 20 + n + 5 + 3.
    assert lengths.mean_tokens == (pytest.approx((4 * 20 + 6 + 4 * 28 + 6) / 8), 4.5)
    assert lengths.longest_request == (31, 4) and lengths.input_range == (20, 31)
    assert lengths.last_s == pytest.approx(0.3) and lengths.chained_s == pytest.approx(0.4)
    assert sweep.workload.longest == (31, 4) and sweep.workload.typical == (26, 4)
    level = build(sweep, attempt=0)[0]
    assert (level.key.stem, level.num_requests) == ("replay2", 8)
    again = Workload(lengths=lengths.model_copy(update={"path": None, "name": "elsewhere"}))
    assert again == sweep.workload and again.lengths.identity == lengths.identity


def test_its_requests_are_drawn_at_no_other_load(tmp_path: Path) -> None:
    sweep = options(["--workload", str(a_file(tmp_path))])
    level = build(sweep, attempt=0)[0].model_copy(update={"load": Open(rate_rps=1.0)})
    with pytest.raises(UsageError, match="replayed only at the times in the file"):
        sweep.workload.draw(level)


def test_other_pauses_are_another_workload(tmp_path: Path) -> None:
    first = traffic.read_traffic(a_file(tmp_path))
    other = traffic.read_traffic(a_file(tmp_path, think_s=0.2))
    assert first != other and first.label != other.label


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-c", "4"], "leave --concurrency out"),
        (["--itl", "5"], "leave --itl out"),
        (["--slo", "ttft_ms=10"], "leave --slo out"),
        (["--smoke"], "leave --smoke out"),
    ],
)
def test_what_the_file_sets_is_refused_as_a_flag(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(["--workload", str(a_file(tmp_path)), *flags])


def test_a_replay_has_no_other_load_and_no_other_load_is_a_replay(tmp_path: Path) -> None:
    replayed = options(["--workload", str(a_file(tmp_path))])
    with pytest.raises(UsageError, match="the load is of kind concurrency"):
        build(replayed.model_copy(update={"loads": (Closed(concurrency=2),)}), attempt=0)
    with pytest.raises(UsageError, match="the load is of kind replay"):
        build(SweepOptions(loads=(Replay(),), workload=Workload()), attempt=0)


def test_a_changed_file_is_not_replayed(tmp_path: Path) -> None:
    lengths = traffic.read_traffic(a_file(tmp_path))
    a_file(tmp_path, think_s=3.0)
    with pytest.raises(UsageError, match="was changed since it was read"):
        traffic.keep_plan(tmp_path / "..", lengths)
    with pytest.raises(UsageError, match=r"give --workload chat\.jsonl"):
        traffic.keep_plan(tmp_path, lengths.model_copy(update={"path": None}))


@pytest.mark.usefixtures("warm_starts")
def test_a_replay_is_a_level(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    path = a_file(tmp_path)
    text = path.read_bytes()
    deployment = Deployment(model="tiny-gptoss", topology=Collocated(pool=Pool()))
    with completions_server() as server:
        save_running(running(server.url, deployment=deployment, tokenizer=str(tokenizer), gpus=1))
        sweep = options(["--workload", str(path), "-u", server.url, "--out", str(tmp_path / "out"), "-e", "chat"])
        result = run_sweep(sweep)
        with pytest.raises(StoreError, match="use another --exp-name"):
            run_sweep(
                options([*("--workload", str(a_file(tmp_path, think_s=0.2)), "-u", server.url), "--resume"]).model_copy(
                    update={"out": tmp_path / "out", "name": "chat"}
                )
            )
    (run,) = result.runs
    assert run.validity.failed_gates == (), run.validity.reasons
    assert {"steady_state", "few_requests"} <= run.validity.unchecked.keys()
    assert run.validity.unchecked["steady_state"].code == "replay_load"
    assert "dependencies" not in run.validity.unchecked
    assert run.key.stem == "replay1" and run.completed == 8 and run.steady is None
    assert run.requested_tokens == (pytest.approx((4 * 20 + 6 + 4 * 28 + 6) / 8), 4.5)
    folder = tmp_path / "out" / "chat"
    manifest = Store(folder).read_manifest()
    assert manifest.traffic is not None and manifest.workload is not None
    assert (manifest.traffic.scale, manifest.traffic.ticks_s, manifest.traffic.spread) == (16, 3.0, True)
    assert isinstance(manifest.workload.lengths, Replayed)
    assert (folder / COMPILED).read_bytes() == text
    assert manifest.workload.lengths.sha256 == sweep.workload.lengths.identity.split()[1]
    records = {each.replayed.id: each for each in Store(folder).read_records(run.key) if each.replayed}
    assert records["c1t1"].replayed and records["c1t1"].replayed.turn == 2
    assert records["c1t1"].requested == (21 + 5 + 3, 4) == (records["c1t1"].input_tokens, 4)
    assert records["c1t1"].due_s is not None
    assert records["c1t1"].due_s == pytest.approx((records["c1t0"].finish_s or 0.0) + 0.1, abs=1e-3)


EXPERIMENT = """
name: chats
where: {local: 1}
deployments: [{label: collocated-1xtp1}]
workloads: [{name: chat, file: chat.jsonl}, {name: plain, input_tokens: 20, output_tokens: 4}]
loads: [{concurrency: [2]}]
"""


def test_an_experiment_replays_a_file(tmp_path: Path) -> None:
    a_file(tmp_path)
    path = tmp_path / "chats.yaml"
    path.write_text(EXPERIMENT)
    file, _ = load_experiment_file(str(path))
    chat, plain = file.workloads
    assert isinstance(chat.lengths, Replayed) and isinstance(chat.workload(3).lengths, Replayed)
    assert chat.workload(3).lengths.flag_value == str(tmp_path / "chat.jsonl")
    (configuration,) = configurations(file, path)
    assert loads_and_searches(file, configuration, chat) == ((Replay(),), ())
    assert loads_and_searches(file, configuration, plain)[0] == (Closed(concurrency=2),)
    assert json.loads(file.model_dump_json())["workloads"][0]["lengths"]["sha256"] == chat.lengths.sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("loads: [{concurrency: [2]}]", ""), "loads: is missing"),
        (("[2]}]", "[2], workloads: [chat]}]"), "workload chat is replayed"),
        (("file: chat.jsonl", "file: chat.jsonl, input_tokens: 3"), "leave input_tokens out"),
        (("file: chat.jsonl", "file: other.jsonl"), "other.jsonl: no such file"),
    ],
)
def test_wrong_experiments_are_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    a_file(tmp_path)
    path = tmp_path / "chats.yaml"
    path.write_text(EXPERIMENT.replace(*change))
    with pytest.raises(UsageError, match=message):
        load_experiment_file(str(path))
