"""The real sweep, vLLM's load generator included, against a server whose timing is known.

One sweep for the whole file: clean levels, whose figures must be the ones that the server itself
logged, and levels with one planted fault each, which must be invalid for that fault alone.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sweep import BUSY_MACHINE, Oracle, ended_well, pd_deployment, publish, run_bm, start_oracle

from pdlab.core.workload import Level, RunKey
from pdlab.results.schema import Experiment, Run
from pdlab.results.store import Store

INPUT, OUTPUT, PROMPTS = 48, 20, 48
TTFT_S, TPOT_S = 0.1, 0.01
CLEAN = {2: "clean", 4: "two at a time", 8: "four tokens a chunk"}
# Concurrency of the level -> what is planted in it, the gate that must fire, and its sentence.
FAULTS = {
    3: ({"drift": 0.1}, "steady_state", "no steady state: output tokens/s changed by -"),
    5: ({"short_every": 16}, "token_counts", "3 of 48 answers have a wrong output token count (19, not 20)"),
    6: ({"cut_every": 16}, "failed_requests", "3 of 48 requests failed (first: "),
    7: ({"hang_every": 24}, "failed_requests", "2 of 48 requests failed (first: no complete answer within 2 s)"),
    9: ({"prompt_tokens_off": 1}, "token_counts", "48 of 48 answers have a wrong input token count (49, not 48)"),
    10: ({"kv_failed": 1}, "kv_transfers", "48 KV transfers failed"),
    11: ({"kv_bytes": 0}, "kv_transfers", "no KV bytes were transferred, by vLLM's counters"),
    12: ({"kv_expired": 1}, "kv_transfers", "the KV blocks of 48 requests expired before decode read them"),
    13: ({"fail_every": 12}, "failed_requests", "4 of 48 requests failed (first: Internal Server Error)"),
    14: (
        {"cached_share": 0.3},
        "prefix_cache",
        "30% of the prompt tokens came from the prefix cache, but the workload",
    ),
    15: ({"preemptions": 1}, "preemptions", "engines preempted requests 48 times: their KV cache was full"),
    16: ({"restart_at": 40}, "restarts", "an engine was restarted during the level: its counters decreased"),
    17: ({"replace_at": 5}, "restarts", "a replica was replaced: r1 answers, but the launch neither"),
    18: ({"others": 2}, "other_requests", "the decode engines finished 144 requests during the level, but this client"),
    30: ({}, "few_requests", "too few requests for a steady window: 60 must finish in it"),
}


@dataclass
class Swept:
    experiment: Experiment
    store: Store
    log: list[dict[str, Any]]
    done: subprocess.CompletedProcess[str]

    def run(self, concurrency: int) -> Run:
        return next(run for run in self.experiment.runs if run.key.value == concurrency)

    def served(self, concurrency: int) -> list[dict[str, Any]]:
        """The server's own log of one level, by arrival."""
        return [entry for entry in self.log if entry["id"].startswith(f"concurrency{concurrency}-")]


@pytest.fixture(scope="module")
def swept(shared_oracle: Oracle, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    cache = tmp_path_factory.mktemp("cache")
    publish(cache, shared_oracle, tokenizer, pd_deployment())
    shared_oracle.configure({"concurrency4-": {"capacity": 2}, "concurrency8-": {"tokens_per_chunk": 4}})
    shared_oracle.configure({f"concurrency{value}-": fault for value, (fault, *_) in FAULTS.items()})
    levels = ",".join(str(value) for value in sorted({**CLEAN, **FAULTS}))
    done = run_bm(
        *("-u", shared_oracle.url, "-t", "concurrency", "-c", levels, "--itl", str(INPUT), "--otl", str(OUTPUT)),
        *("--recover-s", "0"),  # a replica that is replaced is planted, and its level is to be judged
        *("--prompts-per-level", str(PROMPTS), "--request-timeout-s", "2", "--out", str(cache / "bm")),
        cache=cache, warm=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    store = Store(cache / "bm" / "pd-spread-p1xtp1-d1xtp1")
    log = shared_oracle.log_of("warm-up-") + shared_oracle.log_of("concurrency")  # other tests use it too
    return Swept(experiment=store.load(), store=store, log=log, done=done)


def truth(entries: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """TTFT, E2EL and TPOT in seconds per request, as the server saw them."""
    arrived = np.array([entry["arrived"] for entry in entries])
    first = np.array([entry["sent"][0] for entry in entries])
    last = np.array([entry["sent"][-1] for entry in entries])
    return {"ttft": first - arrived, "e2el": last - arrived, "tpot": (last - first) / (OUTPUT - 1)}


def late_s(swept: Swept, concurrency: int) -> float:
    """p95 of how late the machine let the two processes be: the load generator by its own account, the server by the
    tokens of the clean level (it sends each one when it is due, or later)."""
    due = TTFT_S + TPOT_S * np.arange(OUTPUT)
    server = [np.array(entry["sent"]) - entry["arrived"] - due for entry in swept.served(2)]
    client = swept.run(concurrency).client
    assert client and client.loop_lag_s is not None
    return max(client.loop_lag_s, float(np.percentile(np.concatenate(server), 95)))


@pytest.mark.parametrize("concurrency", CLEAN)
def test_latencies_are_the_servers(swept: Swept, concurrency: int) -> None:
    run, expected = swept.run(concurrency), truth(swept.served(concurrency))
    assert run.validity.valid, run.validity.reasons
    assert run.validity.failed_gates == () and set(run.validity.unchecked) <= {"front_saturation", "prefill_calls"}
    assert run.completed == PROMPTS and run.failed == 0
    for name, values in expected.items():
        measured = getattr(run.whole, name)
        late = late_s(swept, concurrency)
        slack_s = 0.002 + late / OUTPUT if name == "tpot" else 0.015 + late
        for q, times in ((50, 1), (90, 2), (99, 4)):
            value = measured.percentiles_s[f"p{q}"]
            assert np.percentile(values, q) - 0.001 <= value <= np.percentile(values, q) + times * slack_s, (name, q)
        assert measured.mean_s == pytest.approx(values.mean(), abs=2 * slack_s)


@pytest.mark.parametrize("concurrency", CLEAN)
def test_rates_are_the_servers(swept: Swept, concurrency: int) -> None:
    run, entries = swept.run(concurrency), swept.served(concurrency)
    duration_s = max(entry["sent"][-1] for entry in entries) - min(entry["arrived"] for entry in entries)
    rel = 0.03 + 2 * late_s(swept, concurrency) / duration_s
    assert run.whole.duration_s == pytest.approx(duration_s, rel=rel)
    assert run.whole.requests_per_s == pytest.approx(PROMPTS / duration_s, rel=rel)
    assert run.whole.output_tokens_per_s == pytest.approx(PROMPTS * OUTPUT / duration_s, rel=rel)
    assert run.whole.input_tokens_per_s == pytest.approx(PROMPTS * INPUT / duration_s, rel=rel)


def test_known_closed_forms(swept: Swept) -> None:
    service_s = TTFT_S + (OUTPUT - 1) * TPOT_S
    clean, queued = swept.run(2).whole, swept.run(4).whole
    assert clean.e2el and queued.ttft
    rel = 0.08 + 3 * late_s(swept, 4) / service_s  # of a request that is sent, served and read late
    assert clean.e2el.p50_s == pytest.approx(service_s, rel=rel)
    assert clean.requests_per_s == pytest.approx(2 / service_s, rel=rel)
    # Four in flight before two slots: the same throughput, and each waits for one service time.
    assert queued.requests_per_s == pytest.approx(2 / service_s, rel=rel)
    assert queued.ttft.p50_s == pytest.approx(TTFT_S + service_s, rel=rel)


@pytest.mark.parametrize("concurrency", CLEAN)
def test_steady_state_is_the_servers(swept: Swept, concurrency: int) -> None:
    entries = sorted(swept.served(concurrency), key=lambda entry: entry["arrived"])
    opens = max(entry["sent"][0] for entry in entries[:concurrency])
    closes = entries[-1]["arrived"]
    finished = sum(opens < entry["sent"][-1] <= closes for entry in entries)
    chunks = [(moment, OUTPUT / len(entry["sent"])) for entry in entries for moment in entry["sent"]]
    tokens = sum(share for moment, share in chunks if opens < moment <= closes)
    steady = swept.run(concurrency).steady
    if finished < 2 * concurrency - 2:
        assert steady is None
        return
    assert steady is not None
    assert steady.duration_s == pytest.approx(closes - opens, rel=0.03)
    assert abs(steady.completed - finished) <= 2
    assert steady.output_tokens_per_s == pytest.approx(tokens / (closes - opens), rel=0.05)


def test_long_enough_levels_have_a_steady_state(swept: Swept) -> None:
    assert swept.run(2).steady and swept.run(4).steady


def test_inter_token_gaps(swept: Swept) -> None:
    for concurrency, tokens in ((2, 1), (8, 4)):
        itl, sent = swept.run(concurrency).whole.itl, [entry["sent"] for entry in swept.served(concurrency)]
        assert itl and {len(moments) for moments in sent} == {1 + -(-(OUTPUT - 1) // tokens)}
        # A machine that lets the server send a token late has it send the next one sooner.
        gap_s = float(np.median(np.concatenate([np.diff(moments) for moments in sent])))
        late = late_s(swept, concurrency)
        assert gap_s == pytest.approx(tokens * TPOT_S, abs=0.1 * tokens * TPOT_S + late)
        assert itl.p50_s == pytest.approx(gap_s, abs=0.1 * gap_s + late / OUTPUT)
    assert all(len(record.itl_s) == OUTPUT - 1 for record in swept.store.read_records(swept.run(2).key))


@pytest.mark.parametrize("concurrency", FAULTS)
def test_planted_fault_is_the_reason(swept: Swept, concurrency: int) -> None:
    run = swept.run(concurrency)
    _, gate, reason = FAULTS[concurrency]
    # With many requests at once the window is short: a busy machine may leave too few in it.
    busy = {"few_requests", *BUSY_MACHINE} if concurrency > 10 else BUSY_MACHINE
    assert gate in run.validity.failed_gates and set(run.validity.failed_gates) <= {gate, *busy}, run.validity.reasons
    assert any(text.startswith(reason) for text in run.validity.reasons), run.validity.reasons
    assert run.failed + run.completed == PROMPTS
    assert f"INVALID concurrency{concurrency}: " in swept.done.stdout


def test_failed_requests_are_in_the_records(swept: Swept) -> None:
    records = swept.store.read_records(swept.run(13).key)
    failed = [record for record in records if not record.ok]
    assert len(records) == PROMPTS and len(failed) == 4
    assert all(record.finish_s is None and record.first_token_s is None for record in failed)
    cut = [record for record in swept.store.read_records(swept.run(6).key) if not record.ok]
    assert cut and all(record.first_token_s is not None and record.finish_s is None for record in cut)


def test_kv_counters_are_the_levels_own(swept: Swept) -> None:
    clean = swept.run(2)
    assert clean.nixl_before and clean.nixl_after
    assert (clean.nixl_after.transfers or 0) - (clean.nixl_before.transfers or 0) == PROMPTS
    assert (clean.nixl_after.bytes_transferred or 0) - (clean.nixl_before.bytes_transferred or 0) == 1000 * PROMPTS


def test_no_prompt_is_served_twice(swept: Swept) -> None:
    prompts = Counter(entry["prompt"] for entry in swept.log)
    assert len(prompts) == 8 + PROMPTS * len(CLEAN | FAULTS)
    assert max(prompts.values()) == 1
    # Not even a cacheable beginning is shared.
    assert max(Counter(" ".join(prompt.split()[:8]) for prompt in prompts).values()) == 1


def test_requests_are_as_planned(swept: Swept) -> None:
    for entry in swept.log:
        body = entry["body"]
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (
            OUTPUT,
            0.0,
            True,
            True,
        )
        assert len(entry["prompt"].split()) == INPUT


def test_warm_up_comes_first_and_is_not_counted(swept: Swept) -> None:
    warmup = [entry for entry in swept.log if entry["id"].startswith("warm-up-")]
    assert len(warmup) == 8
    last = max(entry["sent"][-1] for entry in warmup)
    assert all(entry["arrived"] > last for entry in swept.log if not entry["id"].startswith("warm-up-"))
    assert {run.key.stem for run in swept.experiment.runs} == {f"concurrency{value}" for value in CLEAN | FAULTS}


def test_the_manifest_records_what_ran(swept: Swept) -> None:
    manifest = swept.experiment.manifest
    assert manifest.deployment == pd_deployment() and manifest.gpus == 2
    assert manifest.workload and manifest.workload.input_tokens == INPUT
    assert len(manifest.commands) == 1 and manifest.commands[0].startswith("./run_bm.sh -u http://127.0.0.1:")
    assert manifest.started_at and manifest.finished_at and manifest.started_at <= manifest.finished_at
    assert manifest.versions["client_vllm"]


def test_seeds_and_client_load_are_kept(swept: Swept) -> None:
    assert len({run.seed for run in swept.experiment.runs}) == len(swept.experiment.runs)
    for run in swept.experiment.runs:
        assert run.client_cpu_share is not None and 0 < run.client_cpu_share < 0.9


def test_the_printed_table_and_the_next_command(swept: Swept) -> None:
    lines = swept.done.stdout.splitlines()
    assert lines[0].split()[:2] == ["level", "ok/sent"]
    names = [f"concurrency{value}" for value in sorted({**CLEAN, **FAULTS})]
    assert [line.split()[0] for line in lines[1 : 1 + len(names)]] == names
    assert lines[-1] == f"next: python viz.py --exps {swept.store.folder} --use-normalized"
    assert "Traceback" not in swept.done.stderr


def test_finished_levels_are_refused_skipped_and_replaced(swept: Swept, shared_oracle: Oracle) -> None:
    folder = swept.store.folder
    cache = folder.parent.parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    base = ["-u", shared_oracle.url, "--itl", str(INPUT), "--otl", str(OUTPUT), "--out", str(folder.parent)]
    refused = run_bm(*base, "-c", "2,40", "--prompts-per-level", str(PROMPTS), cache=cache)
    assert refused.returncode == 2 and "already has concurrency2; use --resume" in refused.stderr
    skipped = run_bm(*base, "-c", "2,4", "--prompts-per-level", str(PROMPTS), "--resume", cache=cache)
    assert ended_well(skipped.returncode, skipped.stdout), skipped.stderr
    assert "2 of 2 levels were already measured and skipped" in skipped.stdout
    shorter = run_bm(*base, "-c", "2,4", "--prompts-per-level", "25", "--resume", cache=cache)
    assert shorter.returncode == 2 and "was measured with 48 requests, this command has 25" in shorter.stderr
    other = run_bm(*base[:4], "--otl", str(OUTPUT + 1), *base[6:], "-c", "40", cache=cache)
    assert other.returncode == 2 and "workload output_tokens 20, now it is 21" in other.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert RunKey(kind="concurrency", value=2) == swept.run(2).key


@pytest.fixture(scope="module")
def own_oracle() -> Iterator[Oracle]:
    yield from start_oracle()


@pytest.fixture(scope="module")
def varied(own_oracle: Oracle, tokenizer: Path, warm_client: None, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Closed loops with lengths that vary; one answer of the second level is too short."""
    cache = tmp_path_factory.mktemp("varied")
    publish(cache, own_oracle, tokenizer, pd_deployment())
    own_oracle.configure({"concurrency21-": {"short_every": 21}})
    done = run_bm(
        *("-u", own_oracle.url, "-t", "concurrency", "-c", "20,21", "--itl", str(INPUT), "--otl", str(OUTPUT)),
        *("--lengths", "uniform:0.5-1.5", "--prompts-per-level", "21", "--out", str(cache / "bm")),
        cache=cache,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    store = Store(cache / "bm" / "pd-spread-p1xtp1-d1xtp1")
    return Swept(experiment=store.load(), store=store, log=own_oracle.log_of("concurrency2"), done=done)


def test_requests_have_the_lengths_that_the_workload_draws(varied: Swept) -> None:
    for concurrency in (20, 21):
        run = varied.run(concurrency)
        level = Level(load=run.load, num_requests=run.num_requests, seed=0)
        drawn = run.workload.draw(level)
        served = [entry for entry in varied.log if entry["id"].startswith(f"concurrency{concurrency}-")]
        sent = [(len(entry["prompt"].split()), entry["body"]["max_tokens"]) for entry in served]
        assert Counter(sent) == Counter(drawn) and len(set(drawn)) > 10
        assert run.requested_tokens == pytest.approx(tuple(np.mean(drawn, axis=0)))
        kept = gzip.decompress(varied.store.records_path(run.key).read_bytes()).splitlines()
        assert Counter(tuple(json.loads(line)["requested"]) for line in kept) == Counter(drawn)


def test_each_answer_is_judged_by_the_length_that_it_was_to_have(varied: Swept) -> None:
    assert "token_counts" not in varied.run(20).validity.failed_gates
    failed = varied.run(21).validity
    assert "token_counts" in failed.failed_gates
    assert any(reason.startswith("1 of 21 answers have a wrong output token count") for reason in failed.reasons)
