"""The load generator's process by itself: open loop, the bare prefill-decode pair, refusals, its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.client_levels import client_level
from support.sweep import Oracle

from pdlab.bench.client import processes
from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ClientLevel
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.workload import Closed, Open, Ramp
from pdlab.results.level_data import LevelData
from pdlab.results.metrics import whole

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture(scope="module")
def client(warm_starts: None) -> Iterator[LoadClient]:
    with LoadClient() as started:
        yield started


@pytest.fixture
def level(shared_oracle: Oracle, tokenizer: Path) -> ClientLevel:
    served = {"base_url": shared_oracle.url, "model": "oracle", "tokenizer": str(tokenizer)}
    return client_level(**served, input_tokens=24, output_tokens=8, num_requests=60, load=Closed(concurrency=6))


def test_open_loop_arrives_at_its_rate(client: LoadClient, level: ClientLevel, shared_oracle: Oracle) -> None:
    done_counts: list[int] = []
    open_level = level.model_copy(update={"name": "open", "load": Open(rate_rps=30.0)})
    answer = client.run(open_level, lambda done, failed: done_counts.append(done))
    arrived = np.array([entry["arrived"] for entry in shared_oracle.log_of("open-")])
    gaps = np.diff(arrived)
    assert len(answer.records) == 60 and all(record.ok for record in answer.records)
    assert 60 / 30.0 - 0.2 < np.ptp(arrived) < 60 / 30.0 + 0.2
    assert 0.6 < gaps.std() / gaps.mean() < 1.5, "not a Poisson process"
    measured = np.array([record.arrival_s for record in answer.records])
    assert np.median(np.abs(measured - (arrived - arrived[0]))) < 0.05
    assert done_counts == sorted(done_counts) and 0 < done_counts[-1] <= 60


@pytest.mark.usefixtures("cold_start")
def test_a_client_that_stood_still_reports_which_requests_it_sent_late(
    level: ClientLevel, shared_oracle: Oracle
) -> None:
    """Coordinated omission: what was due meanwhile is sent afterwards, and no latency has the wait in it."""
    sent = level.model_copy(update={"name": "stopped", "load": Open(rate_rps=30.0), "num_requests": 90})
    with LoadClient() as client:

        def stop() -> None:
            while not shared_oracle.log_of("stopped-"):
                time.sleep(0.02)
            assert client.pid
            os.kill(client.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(client.pid, signal.SIGCONT)

        stopping = threading.Thread(target=stop)
        stopping.start()
        answer = client.run(sent)
        stopping.join()
    arrived = np.sort([entry["arrived"] for entry in shared_oracle.log_of("stopped-")])
    gap = int(np.argmax(np.diff(arrived)))
    assert arrived[gap + 1] - arrived[gap] > 0.9, "the server saw nothing for a second"
    late = np.array([record.lateness_s for record in answer.records])
    assert late.max() > 0.5 and np.argmax(late) > gap
    due = np.array([record.arrival_s - record.lateness_s for record in answer.records if record.lateness_s is not None])
    assert np.diff(np.sort(due)) == pytest.approx(np.diff(sent.schedule_s()), abs=1e-4), (
        "lateness counts from the schedule"
    )


def test_same_seed_same_prompts_other_seed_others(
    client: LoadClient, level: ClientLevel, shared_oracle: Oracle
) -> None:
    for name, seed in (("seed-a", 5), ("seed-b", 5), ("seed-c", 6)):
        client.run(level.model_copy(update={"name": name, "seed": seed, "num_requests": 10}))
    a, b, c = ({entry["prompt"] for entry in shared_oracle.log_of(f"seed-{name}-")} for name in "abc")
    assert a == b and not a & c


def test_one_token_prompts_repeat_only_when_they_must(
    client: LoadClient, level: ClientLevel, shared_oracle: Oracle
) -> None:
    client.run(
        level.model_copy(
            update={"name": "single", "input_tokens": 1, "output_tokens": 2, "load": Closed(concurrency=60)}
        )
    )
    entries = shared_oracle.log_of("single-")
    assert len(entries) == 60 and all(len(entry["prompt"].split()) == 1 for entry in entries)
    assert len({entry["prompt"] for entry in entries}) == 60


def test_bare_pair(client: LoadClient, level: ClientLevel, shared_oracle: Oracle) -> None:
    url = shared_oracle.url
    changes = {"name": "bare", "backend": "pd-bare", "prefill_url": url, "decode_url": url, "base_url": None}
    answer = client.run(level.model_copy(update=changes))
    figures = whole(LevelData.of(answer.records))
    assert figures.completed == 60 and figures.ttft and figures.tpot and figures.e2el
    entries = shared_oracle.log_of("bare-")
    prefills = [entry["body"] for entry in entries if not entry["body"]["stream"]]
    decodes = [entry["body"] for entry in entries if entry["body"]["stream"]]
    assert len(prefills) == len(decodes) == 60
    assert all(body["max_tokens"] == 1 and body["kv_transfer_params"]["do_remote_decode"] for body in prefills)
    assert all(body["kv_transfer_params"]["remote_engine_id"] == "oracle" for body in decodes)
    assert all(body["max_tokens"] == 8 and body["temperature"] == 0.0 for body in decodes)
    # 50 ms of prefill, then 100 ms to the first token and 10 ms to each other; the machine may add to that. What it
    # adds is counted once: six places hold one request at a time.
    assert figures.ttft.p50_s >= 0.149 and figures.e2el.p50_s >= 0.219
    assert sum(record.e2el_s or 0.0 for record in answer.records) <= 6 * figures.duration_s
    by_id = {(entry["id"], entry["body"]["stream"]): entry for entry in entries}
    served = [
        by_id[name, True]["sent"][0] - by_id[name, False]["arrived"] for name in {entry["id"] for entry in entries}
    ]
    assert figures.ttft.mean_s >= np.mean(served)


def test_a_stall_is_in_the_gaps_and_in_no_median(client: LoadClient, level: ClientLevel, shared_oracle: Oracle) -> None:
    shared_oracle.configure({"stall-": {"stall_every": 6, "stall_s": 0.4}})
    figures = whole(LevelData.of(client.run(level.model_copy(update={"name": "stall"})).records))
    assert figures.itl and figures.tpot
    # 10 of 60 requests stand still once, in one of their 7 gaps: 2.4 % of all gaps.
    assert 0.4 <= figures.itl.percentiles_s["p99"] < 0.8
    assert figures.itl.p50_s < 0.1
    assert figures.tpot.percentiles_s["p95"] > 4 * figures.tpot.p50_s


def test_a_prefill_that_fails_is_a_failed_request(
    client: LoadClient, level: ClientLevel, shared_oracle: Oracle
) -> None:
    shared_oracle.configure({"broken-": {"fail_every": 1}})
    url = shared_oracle.url
    changes = {"name": "broken", "backend": "pd-bare", "prefill_url": url, "decode_url": url, "num_requests": 4}
    answer = client.run(level.model_copy(update=changes))
    assert all(record.error and record.error.startswith("prefill: ") for record in answer.records)
    assert whole(LevelData.of(answer.records)).completed == 0


def test_a_refused_level_does_not_end_the_client(client: LoadClient, level: ClientLevel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer .* cannot be loaded .* --tokenizer"):
        client.run(level.model_copy(update={"tokenizer": str(tmp_path / "none")}))
    assert len(client.run(level.model_copy(update={"num_requests": 2})).records) == 2


@pytest.mark.usefixtures("cold_start")
def test_a_client_that_dies_is_an_error(level: ClientLevel) -> None:
    with LoadClient() as client:
        client.wait_ready()
        pid = client.pid
        assert pid
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(BenchError, match="load generator ended with code -9"):
            client.run(level.model_copy(update={"num_requests": 10_000}))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("load", [Closed(concurrency=6), Open(rate_rps=30.0)], ids=["closed", "open"])
def test_a_level_that_is_stopped_answers_what_was_sent(
    level: ClientLevel, shared_oracle: Oracle, load: Closed | Open, processes: int
) -> None:
    name = f"cut-{processes}-{load.kind}"
    with LoadClient(processes) as client:

        def stop() -> None:
            while len(shared_oracle.log_of(f"{name}-")) < 40:
                time.sleep(0.02)
            client.stop()

        stopping = threading.Thread(target=stop)
        stopping.start()
        answer = client.run(level.model_copy(update={"name": name, "num_requests": 3000, "load": load}))
        stopping.join()
        pid = client.pid
    ended = [record for record in answer.records if record.ok]
    cut = [record for record in answer.records if not record.ok]
    assert len(ended) >= 40 - 6 and len(ended) + len(cut) < 1500 and answer.processes == processes
    assert all(record.error == "in flight when the level was stopped" for record in cut)
    assert isinstance(load, Open) or len(cut) <= 6, "those that were not sent are not failed ones"
    assert all(record.output_tokens == 8 and record.e2el_s for record in ended)
    assert not Path(f"/proc/{pid}").exists()


def test_a_level_that_is_stopped_before_anything_was_sent_is_an_error(level: ClientLevel) -> None:
    with LoadClient() as client:
        client.wait_ready()
        client.stop()
        with pytest.raises(BenchError, match="load generator ended with code 0"):
            client.run(level)


@pytest.mark.usefixtures("cold_start")
def test_closing_ends_the_process_in_the_middle_of_a_level() -> None:
    client = LoadClient()
    client.start()
    pid = client.pid
    assert pid
    client.close()
    client.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def pair(warm_starts: None) -> Iterator[LoadClient]:
    with LoadClient() as started:
        started.grow(2)
        yield started


def test_two_processes_share_a_closed_loop(pair: LoadClient, level: ClientLevel, shared_oracle: Oracle) -> None:
    done_counts: list[int] = []
    answer = pair.run(
        level.model_copy(update={"name": "two", "load": Closed(concurrency=5)}),
        lambda done, failed: done_counts.append(done),
    )
    entries = shared_oracle.log_of("two-")
    assert answer.processes == 2 and len(answer.records) == len(entries) == 60
    assert len({entry["prompt"] for entry in entries}) == 60, "no prompt twice, of whichever process"
    moments = sorted((t, step) for e in entries for t, step in ((e["arrived"], 1), (e["sent"][-1], -1)))
    most = max(np.cumsum([step for _, step in moments]))
    assert most == 5
    arrived = np.sort([entry["arrived"] for entry in entries])
    measured = np.array([record.arrival_s for record in answer.records])
    assert measured[0] == 0 and (np.diff(measured) >= 0).all()
    assert np.abs(measured - (arrived - arrived[0])).max() < 0.05, "one clock for both"
    assert done_counts and done_counts[-1] <= 60


def test_two_processes_add_up_to_one_open_loop(pair: LoadClient, level: ClientLevel, shared_oracle: Oracle) -> None:
    open_level = level.model_copy(update={"name": "shared", "load": Open(rate_rps=30.0)})
    answer = pair.run(open_level)
    arrived = np.sort([entry["arrived"] for entry in shared_oracle.log_of("shared-")])
    gaps = np.diff(arrived)
    assert len(answer.records) == 60 and answer.clock_step_s is not None and abs(answer.clock_step_s) < 0.05
    assert 60 / 30.0 - 0.2 < np.ptp(arrived) < 60 / 30.0 + 0.2
    assert 0.6 < gaps.std() / gaps.mean() < 1.5, "not a Poisson process"


@pytest.mark.parametrize("shared", [False, True])
def test_a_ramp_ends_faster_than_it_began(
    client: LoadClient, pair: LoadClient, level: ClientLevel, shared_oracle: Oracle, shared: bool
) -> None:
    ramp = Ramp(start_rps=10, end_rps=60)
    ramp_level = level.model_copy(update={"name": f"ramp{shared}", "load": ramp})
    (pair if shared else client).run(ramp_level)
    arrived = np.sort([entry["arrived"] for entry in shared_oracle.log_of(f"ramp{shared}-")])
    assert len(arrived) == 60
    # 30 requests at a mean rate of 20.8 requests/s, then 30 at 46.7 (Ramp.mean_rps of either half).
    assert np.ptp(arrived[:30]) > 1.4 * np.ptp(arrived[30:])
    assert np.ptp(arrived) == pytest.approx(60 / ramp.mean_rps, rel=0.35)


def test_a_shared_prefix_is_shared_and_the_rest_is_not(
    client: LoadClient, level: ClientLevel, shared_oracle: Oracle
) -> None:
    for name, seed in (("prefix-a", 1), ("prefix-b", 2)):
        more = {"name": name, "seed": seed, "prefix_tokens": 16, "prefix_seed": 5, "num_requests": 20}
        client.run(level.model_copy(update=more))
    prompts = [entry["prompt"].split() for entry in shared_oracle.log_of("prefix-")]
    assert len(prompts) == 40 and {len(prompt) for prompt in prompts} == {24}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 40


def test_a_refusal_of_shared_load_has_its_reason_and_leaves_nothing(
    pair: LoadClient, level: ClientLevel, tmp_path: Path
) -> None:
    """The last one: it ends the pair, for the other process may be in the middle of the level."""
    with pytest.raises(UsageError, match=r"tokenizer .* cannot be loaded"):
        pair.run(level.model_copy(update={"tokenizer": str(tmp_path / "none")}))
    assert pair.pid is None


def test_who_waits_for_the_imports_is_called_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, program = tmp_path / "called", tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\nfor i in $(seq 500); do [ -e {called} ] && break; sleep 0.02; done\n"
        f'[ -e {called} ] && echo \'{{"event": "ready"}}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(program))
    monkeypatch.setattr(processes, "BEAT_S", 0.01)
    with LoadClient() as client:
        client.wait_ready(called.touch)
        called.unlink()
        client.wait_ready(called.touch)
    assert not called.exists(), "it is ready"
