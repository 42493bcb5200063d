"""The KV guard on vLLM's own scheduler, worker and side channel, and every name of vLLM that it stands on."""

from __future__ import annotations

import contextlib
import inspect
import json
import pickle
import queue
import re
import socket
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from contract.conftest import parameters, quietly
from support.lease_answers import Prefill

from pdlab.cluster.local_nodes import hold_port
from pdlab.core.catalog import require_shape
from pdlab.deploy import serve_config
from pdlab.deploy.cpu_engine.tiny_model import ensure_tiny_model
from pdlab.deploy.serving import step_watch
from pdlab.guard import lease_queries, read_ends
from pdlab.guard.lease_queries import CLAIM, RELEASE, Peer, Reply, SideChannelClient
from pdlab.guard.leases import EXPIRED, GRANTED, LEASE_KEY, OLD, LeaseAnswer, LeaseBook
from pdlab.guard.receives import ACTIONS
from pdlab.marks.engine_marks import CACHED, CORE, FIRST_TOKEN, READ, RECOMPUTED, REFUSED, WIRE, boot_id

pytestmark = pytest.mark.usefixtures("import_warnings_aside")

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
DEADLINE_S = 10.0
BLOCK = 32
PROMPT = 320  # tokens


@pytest.fixture(scope="module")
def connector() -> Any:
    return quietly("pdlab.guard.connector")


@pytest.fixture(scope="module")
def guard_scheduler(connector: Any) -> Any:
    return quietly("pdlab.guard.scheduler")


@pytest.fixture(scope="module")
def guard_worker(connector: Any) -> Any:
    return quietly("pdlab.guard.worker")


@pytest.fixture(scope="module")
def vllm_config(guard_scheduler: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As the engines are started, but for the role and the executor."""
    shape = require_shape("tiny-gptoss")
    folder = ensure_tiny_model(shape, tmp_path_factory.mktemp("model"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = quietly("vllm.engine.arg_utils").EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=4096,
            distributed_executor_backend="uni",
            scheduler_cls=serve_config.KV_GUARD_SCHEDULER,
            kv_transfer_config=quietly("vllm.config").KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role="kv_consumer",
                kv_buffer_device="cpu",
                kv_connector_module_path=serve_config.KV_GUARD_CONNECTOR,
                kv_connector_extra_config={"backends": ["UCX"], serve_config.KV_GUARD_DEADLINE: DEADLINE_S},
            ),
        )
        return args.create_engine_config()


class Engine:
    """vLLM's scheduler with the guard, and workers that the test controls."""

    def __init__(self, vllm_config: Any, module: Any, *, asynchronous: bool, blocks: int = 200) -> None:
        spec, torch = quietly("vllm.v1.kv_cache_interface"), quietly("torch")
        shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
        groups = [
            spec.KVCacheGroupSpec(["full"], spec.FullAttentionSpec(**shape)),
            spec.KVCacheGroupSpec(["window"], spec.SlidingWindowSpec(**shape, sliding_window=128)),
        ]
        vllm_config.cache_config.num_gpu_blocks = blocks
        vllm_config.scheduler_config.async_scheduling = asynchronous
        make = vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler = make(
            vllm_config=vllm_config,
            kv_cache_config=spec.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=quietly("vllm.v1.structured_output").StructuredOutputManager(vllm_config),
            include_finished_set=False,
            log_stats=True,
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.module = module
        self.side = self.scheduler.connector.connector_scheduler
        self.prefill = Prefill(verdict=GRANTED)
        self.side.receives._client = self.prefill
        self.side.receives._clock = self.prefill
        self.side.leases._clock = self.prefill
        utils = quietly("vllm.v1.core.kv_cache_utils")
        sha256 = quietly("vllm.utils.hashing").sha256
        utils.init_none_hash(sha256)
        self._hasher = utils.get_request_block_hasher(BLOCK, sha256)

    @property
    def free(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def add(
        self, name: str = "r", *, tokens: int = PROMPT, abort: bool = False, max_tokens: int = 4, **params: Any
    ) -> Any:
        number = sum(map(ord, name))
        request = quietly("vllm.v1.request").Request(
            name,
            [(number + at) % 900 + 10 for at in range(tokens)],
            quietly("vllm").SamplingParams(
                max_tokens=max_tokens, extra_args={"kv_transfer_params": params} if params else None
            ),
            None,
            block_hasher=self._hasher,
            abort_immediately=abort,
        )
        self.scheduler.add_request(request)
        return request

    def params(self, name: str = "remote", age_s: float = 0.1) -> dict[str, Any]:
        """As prefill's `request_finished` gives them."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(10)), list(range(5))],
            "remote_engine_id": "p1",
            "remote_request_id": name,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            LEASE_KEY: {"granted_at": self.prefill.now - age_s, "lease_s": 30.0},
        }

    def step(self, *, done: tuple[str, ...] = (), sent: tuple[str, ...] = (), report: Any = None) -> dict[str, int]:
        """One step of the engine core. Returns the scheduled tokens by request."""
        outputs = quietly("vllm.v1.outputs")
        self.scheduled = scheduled = self.scheduler.schedule()
        tokens: dict[str, int] = dict(scheduled.num_scheduled_tokens)
        names = list(tokens)
        finished = [
            [7] if self.scheduler.requests[name].num_computed_tokens >= self.scheduler.requests[name].num_tokens else []
            for name in names
        ]
        transfers = outputs.KVConnectorOutput(
            finished_recving=set(done) or None, finished_sending=set(sent) or None, kv_connector_worker_meta=report
        )
        self.outputs = self.scheduler.update_from_output(
            scheduled,
            outputs.ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=finished,
                kv_connector_output=transfers,
            ),
        )
        return tokens

    def reading(self, name: str = "r", **given: Any) -> Any:
        request = self.add(name, **{**self.params(f"remote-{name}"), **given})
        assert self.step() == {}
        assert request.status.name == "WAITING_FOR_REMOTE_KVS"
        return request

    def reading_late(self) -> None:
        """A read that is not done as its deadline has passed; the next step is the first after it."""
        self.reading()
        self.prefill.now += DEADLINE_S + 0.1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def answers(self) -> list[tuple[str, list[int]]]:
        """Of the last step, in their order."""
        return [(out.request_id, out.new_token_ids) for each in self.outputs.values() for out in each.outputs]

    def counts(self) -> dict[str, int]:
        """What update_from_output has not taken yet, and what it has."""
        (output,) = self.outputs.values()
        data = (output.scheduler_stats.kv_connector_stats or {}) if output.scheduler_stats else {}
        return {key.removeprefix("pdlab_guard_"): sum(value) for key, value in data.items() if "guard" in key and value}

    def marks(self) -> list[Any]:
        """As they came with the statistics of the last step."""
        stats = [each.scheduler_stats for each in self.outputs.values() if each.scheduler_stats]
        return [mark for each in stats for mark in (each.kv_connector_stats or {}).get(CORE, ())]

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, quietly("vllm.v1.request").RequestStatus.FINISHED_ABORTED)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, vllm_config: Any, guard_scheduler: Any) -> Engine:
    return Engine(vllm_config, guard_scheduler, asynchronous=request.param)


@pytest.fixture
def report(guard_worker: Any) -> Any:
    return guard_worker.WorkerReport


@pytest.fixture
def polling(engine: Engine) -> Iterator[Engine]:
    """An engine of two workers that report the ends of reads between steps."""
    engine.scheduler._read_ends = engine.side.read_ends = read_ends.ReadEndReceiver(workers=2)
    yield engine
    engine.side.read_ends.close()


def report_read(engine: Engine, name: str, *workers: int) -> None:
    for worker in workers:
        read_ends.report_ends(engine.side.read_ends.address, worker, [name])


class TestReportedBetweenSteps:
    def test_kv_cache_is_used_in_the_next_step_and_a_second_report_changes_nothing(self, polling: Engine) -> None:
        polling.reading()
        report_read(polling, "r", 1, 2)
        assert polling.step() == {"r": 1}
        assert polling.counts()["reported_early"] == 1
        polling.steps(5)
        assert "r" not in polling.scheduler.requests
        polling.step(done=("r",))
        assert not polling.side.read_ends._taken and not polling.side.read_ends._reported_by

    def test_a_read_that_one_worker_reports_only_with_a_step(self, polling: Engine) -> None:
        """A worker on another machine sends no datagram that arrives."""
        polling.reading()
        report_read(polling, "r", 1)
        assert polling.step() == {}
        assert polling.step(done=("r",)) == {}
        assert polling.step() == {"r": 1} and not polling.side.read_ends._reported_by

    def test_marks_are_of_the_report(self, polling: Engine) -> None:
        polling.reading()
        report_read(polling, "r", 1, 2)
        polling.step()
        ((name, admitted, reported, usable, outcome),) = polling.marks()
        assert (name, outcome) == ("r", READ) and admitted <= reported <= usable

    def test_prefills_answer_is_awaited_too(self, polling: Engine) -> None:
        polling.reading("first")
        polling.prefill.verdict = None
        polling.reading()
        report_read(polling, "r", 1, 2)
        assert polling.step() == {} and polling.step() == {}
        polling.prefill.answer(EXPIRED)
        assert polling.step() == {"r": PROMPT}

    def test_a_read_that_failed_on_one_worker_is_computed_anew(self, polling: Engine, report: Any) -> None:
        polling.reading()
        report_read(polling, "r", 1)
        assert polling.step(done=("r",), report=report(failed={"r"})) == {}
        report_read(polling, "r", 2)  # as no worker does
        assert polling.step() == {"r": PROMPT}

    def test_blocks_of_a_request_that_has_gone_are_given_back_once(self, polling: Engine) -> None:
        before = polling.free
        polling.reading()
        polling.abort("r")
        polling.step()
        assert polling.free < before
        report_read(polling, "r", 1, 2)
        polling.step()
        assert polling.free == before
        polling.step(done=("r",))
        assert polling.free == before and not polling.side.receives.active

    def test_blocks_of_a_late_read_are_given_back(self, polling: Engine) -> None:
        before = polling.free
        polling.reading_late()
        polling.steps(9)
        assert polling.free < before
        report_read(polling, "r", 1, 2)
        polling.step()
        assert polling.free == before

    def test_a_datagram_of_another_sender_is_ignored(self, polling: Engine) -> None:
        polling.reading()
        port, _ = polling.side.read_ends.address
        for message in (b"", b"[]", b"{", b'{"nonce": 1}', b"\xff"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(message, ("127.0.0.1", port))
        for worker in (1, 2):
            read_ends.report_ends((port, "another nonce"), worker, ["r"])
        assert polling.step() == {}

    def test_workers_get_the_address_of_the_receiver(self, polling: Engine) -> None:
        polling.add("r", **polling.params())
        scheduled = polling.scheduler.schedule()
        metadata = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        assert getattr(metadata, read_ends.READ_ENDS_ADDRESS) == polling.side.read_ends.address


FIRST = {FIRST_TOKEN: 99}


class TestFirstToken:
    """Prefill's, which decode's engine does not compute again."""

    @pytest.mark.parametrize("tokens", [PROMPT, PROMPT + 5], ids=["full-blocks", "part-of-a-block"])
    def test_it_goes_out_when_kv_cache_has_arrived_and_the_first_step_computes_the_second(
        self, engine: Engine, tokens: int
    ) -> None:
        before = engine.free
        request = engine.reading(tokens=tokens, **FIRST)
        prompt_ids = request.prompt_token_ids
        assert engine.step(done=("r",)) == {}
        assert engine.answers() == [("r", [99])] and engine.counts()["reused"] == 1
        assert engine.step() == {"r": 1}
        (new,) = engine.scheduled.scheduled_new_reqs
        assert new.prompt_token_ids == [*prompt_ids, 99] and new.num_computed_tokens == tokens == len(prompt_ids)
        assert new.prefill_token_ids in (None, [*prompt_ids, 99]), "of vLLM's second model runner"
        places = {len(blocks) * BLOCK for blocks in new.block_ids}
        assert min(places) > tokens, "room for the token's KV cache"
        assert engine.answers() == [("r", [7])]
        engine.steps(3)
        assert "r" not in engine.scheduler.requests and engine.free == before, "four tokens, prefill's among them"

    def test_it_has_the_marks_and_statistics_of_a_first_token(self, engine: Engine) -> None:
        engine.reading(**FIRST)
        engine.step(done=("r",))
        ((_, admitted, reported, usable, outcome),) = engine.marks()
        (sent,) = engine.outputs.values()
        (output,) = sent.outputs
        events = {event.type.name: event.timestamp for event in output.events}
        assert outcome == READ
        assert events["QUEUED"] <= admitted <= reported <= usable <= events["SCHEDULED"] <= sent.timestamp
        assert output.prefill_stats.num_external_cached_tokens == output.prefill_stats.num_prompt_tokens == PROMPT

    def test_it_does_not_wait_for_the_step_that_is_scheduled(self, polling: Engine) -> None:
        """Else an idle engine would send it with the second."""
        polling.reading(**FIRST)
        report_read(polling, "r", 1, 2)
        assert polling.step() == {} and polling.answers() == [("r", [99])]
        assert polling.counts()["reported_early"] == 1
        assert polling.step() == {"r": 1} and polling.answers() == [("r", [7])]

    def test_where_prefills_answer_comes_last_it_is_in_front_of_the_second(self, engine: Engine) -> None:
        engine.reading("first")
        engine.prefill.verdict = None
        engine.reading(**FIRST, max_tokens=2)
        engine.step(done=("r",))
        assert engine.answers() == []
        engine.prefill.answer(GRANTED)
        assert engine.step() == {"r": 1}
        assert engine.answers() == [("r", [99]), ("r", [7])]
        (sent,) = engine.outputs.values()
        assert [str(output.finish_reason) for output in sent.outputs] == ["None", "length"]

    def test_a_preempted_request_goes_on_behind_it(self, engine: Engine) -> None:
        request = engine.reading(**FIRST)
        engine.step(done=("r",))
        engine.step()
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
        answered = 2
        for _ in range(6):
            engine.step()
            answered += sum(len(tokens) for _, tokens in engine.answers())
        assert answered == 4 and "r" not in engine.scheduler.requests

    def test_its_kv_cache_is_found_by_the_next_prompt(self, engine: Engine) -> None:
        request = engine.reading(tokens=2 * PROMPT - 1, **FIRST)
        prompt_ids = [*request.prompt_token_ids, 99]
        engine.step(done=("r",))
        engine.steps(5)
        again = engine.add("again", tokens=2 * PROMPT + 1)
        assert again.prompt_token_ids[: 2 * PROMPT] != prompt_ids
        again.prompt_token_ids[: 2 * PROMPT] = prompt_ids
        again._all_token_ids[: 2 * PROMPT] = prompt_ids
        again.block_hashes.clear()
        again.update_block_hashes()
        assert engine.step() == {"again": 1}

    def test_a_prompt_that_is_computed_anew_has_decodes_own(self, engine: Engine, report: Any) -> None:
        engine.reading(**FIRST)
        engine.step(done=("r",), report=report(failed={"r"}))
        assert engine.answers() == [] and engine.step() == {"r": PROMPT}
        assert engine.answers() == [("r", [7])]

    def test_without_room_for_it_decode_computes_its_own(self, engine: Engine) -> None:
        engine.reading(**FIRST)
        pool = engine.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(engine.free)
        engine.step(done=("r",))
        pool.free_blocks(blocks)
        assert engine.answers() == [] and engine.step() == {"r": 1}
        assert engine.answers() == [("r", [7])]

    @pytest.mark.parametrize("max_tokens", [1, 2])
    def test_an_answer_of_one_token_is_decodes(self, engine: Engine, max_tokens: int) -> None:
        engine.reading(**FIRST, max_tokens=max_tokens)
        engine.step(done=("r",))
        assert engine.answers() == [("r", [99])] * (max_tokens - 1)
        engine.step()
        assert engine.answers() == [("r", [7])] and "r" not in engine.scheduler.requests

    def test_an_engine_that_guesses_tokens_takes_none(self, engine: Engine) -> None:
        engine.reading(**FIRST)
        engine.scheduler.num_spec_tokens = 2
        engine.step(done=("r",))
        assert engine.answers() == []

    def test_a_client_that_leaves_behind_it_leaves_no_blocks(self, engine: Engine) -> None:
        before = engine.free
        engine.reading(**FIRST)
        engine.step(done=("r",))
        engine.abort("r")
        engine.step()
        assert engine.free == before


def test_the_loop_of_vllms_workers_polls_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own queue, spinning and asleep: no message is lost, and nobody polls from another thread."""
    broadcast = quietly("vllm.distributed.device_communicators.shm_broadcast")
    monkeypatch.setattr(broadcast.SpinCondition, "wait", broadcast.SpinCondition.wait)
    writer = broadcast.MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=1000)
    reader = broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    polls: list[int] = []

    class Worker:
        poll_s = 0.002

        def poll(self) -> None:
            raise AssertionError

        def poll_if_due(self) -> bool:
            polls.append(threading.get_ident())
            return True

    worker = Worker()
    monkeypatch.setattr(read_ends._thread, "worker", None)
    read_ends.register_worker(worker)
    read_ends.register_worker(worker)
    for asleep in (False, True):
        reader._spin_condition.busy_loop_s = 0 if asleep else 1
        polls.clear()
        later = threading.Timer(0.1, lambda: [writer.enqueue("small"), writer.enqueue("x" * 5000)])
        later.start()
        assert [len(reader.dequeue(indefinite=True)) for _ in range(2)] == [5, 5000]
        assert set(polls) == {threading.get_ident()} and len(polls) >= 10
        assert not asleep or len(polls) < 100
        later.join()


class TestDecode:
    def test_vllms_own_choice_of_scheduler_is_kept(self, engine: Engine, guard_scheduler: Any) -> None:
        asynchronous = engine.scheduler.scheduler_config.async_scheduling
        chosen = guard_scheduler.GuardAsyncScheduler if asynchronous else guard_scheduler.GuardSyncScheduler
        assert type(engine.scheduler) is chosen
        vllms = quietly("vllm.v1.core.sched.async_scheduler").AsyncScheduler
        assert isinstance(engine.scheduler, vllms) is asynchronous

    def test_kv_cache_that_arrived_is_used(self, engine: Engine) -> None:
        engine.reading()
        assert engine.step(done=("r",)) == {}
        assert engine.step() == {"r": 1}, "the last token of the prompt"

    def test_the_marks_of_a_read_are_in_order_with_vllms_own(self, engine: Engine) -> None:
        engine.reading()
        engine.step(done=("r",))
        (marks,) = engine.marks()
        events: dict[str, float] = {}
        for _ in range(3):
            engine.step()
            events |= {
                e.type.name: e.timestamp for o in engine.outputs.values() for out in o.outputs for e in out.events or ()
            }
        name, admitted, reported, usable, outcome = marks
        assert (name, outcome) == ("r", READ)
        assert events["QUEUED"] <= admitted <= reported <= usable <= events["SCHEDULED"]

    def test_the_marks_have_the_outcome_of_a_read(self, engine: Engine, report: Any) -> None:
        engine.reading()
        engine.step(done=("r",), report=report(failed={"r"}))
        assert [(mark[0], mark[4]) for mark in engine.marks()] == [("r", RECOMPUTED)]
        engine.prefill.verdict = OLD
        engine.add("s", **engine.params("remote-s", age_s=20.0))
        engine.step()
        assert [(mark[0], mark[1], mark[4]) for mark in engine.marks()] == [("s", None, REFUSED)]
        engine.step()
        assert engine.marks() == [], "each once"

    def test_the_marks_of_a_read_that_waits_for_prefills_answer(self, engine: Engine) -> None:
        engine.reading("first")
        engine.prefill.verdict = None
        engine.reading()
        engine.step(done=("r",))
        assert engine.marks() == []
        time.sleep(0.01)
        engine.prefill.answer(GRANTED)
        engine.step()
        ((_, _, reported, usable, outcome),) = engine.marks()
        assert outcome == READ and usable - reported >= 0.01

    def test_the_marks_of_a_refusal_are_of_the_step_that_refuses(self, engine: Engine) -> None:
        """It waits for prefill's answer from the first step on that could admit it, and a later one refuses it."""
        engine.reading("first")
        engine.prefill.verdict = None
        engine.add("s", **engine.params("remote-s", age_s=20.0))
        began = time.monotonic()
        engine.step()
        assert engine.marks() == []
        time.sleep(0.01)
        engine.prefill.answer(OLD)
        engine.step()
        ((name, admitted, reported, decided, outcome),) = engine.marks()
        assert (name, reported, outcome) == ("s", None, REFUSED) and began <= admitted <= decided - 0.01
        events: dict[str, float] = {}
        for _ in range(3):
            outputs = [out for each in engine.outputs.values() for out in each.outputs if out.request_id == "s"]
            events |= {event.type.name: event.timestamp for out in outputs for event in out.events or ()}
            engine.step()
        assert events["QUEUED"] <= admitted and decided <= events["SCHEDULED"]

    def test_a_prompt_in_decodes_own_cache_is_read_but_for_its_last_block(self, engine: Engine) -> None:
        """vLLM takes at most all tokens but the last one from its own cache, and NIXL reads what is left of the prompt.
        So the whole prompt is never decode's own."""
        engine.add("r", tokens=4 * BLOCK)
        engine.steps(6)
        assert "r" not in engine.scheduler.requests
        engine.reading("r", tokens=4 * BLOCK)
        to_read, *_ = engine.scheduled.kv_connector_metadata.reqs_to_recv["r"].local_block_ids
        assert len(to_read) == 1
        engine.step(done=("r",))
        assert [(mark[0], mark[4]) for mark in engine.marks()] == [("r", READ)]

    def test_where_nothing_has_to_be_read_the_marks_have_it(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a model with an inner state decode computes the last token itself, so the others can all be its own."""
        monkeypatch.setattr(engine.side, "_has_mamba", True)
        engine.add("r", tokens=3 * BLOCK + 1)
        engine.steps(6)
        engine.add("r", tokens=3 * BLOCK + 1, **engine.params())
        assert engine.step() == {"r": 1}
        found, events = engine.marks(), dict[str, float]()
        for _ in range(4):
            outputs = [out for each in engine.outputs.values() for out in each.outputs]
            events |= {event.type.name: event.timestamp for out in outputs for event in out.events or ()}
            engine.step()
            found += engine.marks()
        ((name, admitted, reported, decided, outcome),) = found
        assert (name, admitted, reported, outcome) == ("r", None, None, CACHED)
        assert events["QUEUED"] <= decided <= events["SCHEDULED"] and not engine.side.receives.active

    def test_a_prompt_that_is_computed_after_a_preemption_has_no_outcome(self, engine: Engine) -> None:
        request = engine.reading(max_tokens=20)
        engine.step(done=("r",))
        assert [mark[4] for mark in engine.marks()] == [READ]
        engine.steps(2)
        engine.add("s", **engine.params("remote-s"))
        engine.step()
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, time.monotonic())
        engine.scheduler.prev_step_scheduled_req_ids.clear()
        assert engine.side.receives.active
        scheduled: set[str] = set()
        for _ in range(4):
            scheduled |= engine.step().keys()
            assert engine.marks() == []
        assert scheduled == {"r"}

    def test_a_request_that_ends_leaves_no_marks(self, engine: Engine) -> None:
        engine.reading()
        engine.abort("r")
        engine.step(done=("r",))
        assert engine.marks() == [] and not engine.side.marks._open

    def test_the_deadline_is_the_one_that_was_given(self, engine: Engine) -> None:
        assert engine.side.receives.deadline_s == DEADLINE_S

    def test_a_failed_read_is_computed_anew(self, engine: Engine, report: Any) -> None:
        engine.reading()
        engine.step(done=("r",), report=report(failed={"r"}))
        assert engine.counts()["failed_reads"] == 1
        assert engine.step() == {"r": PROMPT}
        assert engine.prefill.released() == ["remote-r"]

    def test_a_failure_on_one_rank_counts_when_all_are_done(self, engine: Engine, report: Any) -> None:
        engine.reading()
        assert engine.step(report=report(failed={"r"})) == {}
        assert engine.step(done=("r",)) == {}
        assert engine.step() == {"r": PROMPT}

    @pytest.mark.parametrize("verdict", [GRANTED, EXPIRED, None], ids=["granted", "expired", "no answer"])
    def test_a_read_that_is_not_confirmed_yet_waits_for_the_answer(self, engine: Engine, verdict: str | None) -> None:
        engine.reading("first")
        engine.prefill.verdict = None
        engine.reading()
        assert engine.step(done=("r",)) == {}
        assert engine.step() == {}
        if verdict:
            engine.prefill.answer(verdict)
        else:
            engine.prefill.now += DEADLINE_S + 1
        assert engine.step()["r"] == (1 if verdict == GRANTED else PROMPT)

    @pytest.mark.parametrize("verdict", [OLD, None], ids=["old", "no answer"])
    def test_a_request_is_computed_where_prefill_grants_no_read(self, engine: Engine, verdict: str | None) -> None:
        engine.prefill.verdict = verdict
        request = engine.add(**engine.params(age_s=20.0))
        if verdict is None:
            assert engine.step() == {}
            engine.prefill.now += DEADLINE_S + 0.1
        assert engine.step() == {"r": PROMPT}
        assert request.status.name == "RUNNING" and engine.counts()["refused"] == 1

    def test_blocks_of_a_late_read_are_kept_until_it_has_ended(self, engine: Engine) -> None:
        before = engine.free
        engine.reading()
        taken = before - engine.free
        assert taken > 0
        engine.prefill.now += DEADLINE_S + 0.1
        assert engine.step() == {"r": PROMPT}
        assert engine.counts()["deadlines"] == 1
        assert engine.free <= before - 2 * taken, "the late read may still write into the first ones"
        engine.steps(8)
        assert "r" not in engine.scheduler.requests
        assert engine.free == before - taken and engine.scheduler.has_requests(), "the read's end has to be handled"
        engine.step(done=("r",))
        assert engine.free == before
        engine.step()
        assert not engine.scheduler.has_requests()

    def test_a_late_read_is_the_only_one_until_it_has_ended(self, engine: Engine) -> None:
        engine.reading_late()
        engine.step()
        free = engine.free
        engine.add("s", **engine.params("remote-s"))
        assert engine.step()["s"] == PROMPT, "at once"
        engine.steps(8)
        assert engine.free >= free, "it keeps no blocks"
        engine.step(done=("r",))
        engine.reading("t")

    def test_a_request_that_waits_for_prefills_answer_beside_a_late_read_is_not_out_of_room(
        self, engine: Engine, guard_scheduler: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prefill cannot be reached: a read hangs, and the next request waits as long for an answer as is allowed."""
        monkeypatch.setattr(guard_scheduler, "time", SimpleNamespace(perf_counter=engine.prefill))
        engine.reading()
        engine.prefill.verdict = None
        engine.add("s", **engine.params("remote-s", age_s=20.0))
        engine.prefill.now += DEADLINE_S + 0.1
        engine.step()
        engine.steps(8)
        assert "r" not in engine.scheduler.requests
        engine.side.receives._hung_since.clear()
        engine.add("t", **engine.params("remote-t", age_s=20.0))
        engine.side.receives._receives["t"].peer_avoided = False
        assert engine.step() == {}
        engine.prefill.now += DEADLINE_S - 0.1
        engine.step()
        engine.prefill.now += 0.2
        assert engine.step().get("t") == PROMPT
        assert engine.scheduler.requests["t"].status.name == "RUNNING", "it was not ended with an error"

    def test_a_late_read_that_fails_in_the_end(self, engine: Engine, report: Any) -> None:
        before = engine.free
        engine.reading_late()
        engine.step()
        engine.step(done=("r",), report=report(failed={"r"}))
        engine.steps(8)
        assert engine.free == before and not engine.side.receives.failed

    def test_a_client_that_leaves_during_the_read(self, engine: Engine) -> None:
        before = engine.free
        engine.reading()
        engine.abort("r")
        engine.step()
        assert engine.free < before, "the read goes on"
        engine.step(done=("r",))
        assert engine.free == before and not engine.side.receives.active

    def test_a_client_that_leaves_while_a_claim_is_open(self, engine: Engine) -> None:
        before = engine.free
        engine.reading("first")
        engine.step(done=("first",))
        engine.abort("first")
        engine.step()
        engine.prefill.verdict = None
        engine.reading()
        engine.step(done=("r",))
        engine.abort("r")
        engine.step()
        assert engine.free == before

    def test_a_client_that_leaves_after_the_deadline(self, engine: Engine) -> None:
        before = engine.free
        engine.reading_late()
        engine.step()
        engine.abort("r")
        engine.step()
        engine.step(done=("r",))
        engine.step()
        assert engine.free == before

    def test_blocks_of_a_request_that_was_never_scheduled_are_released(self, engine: Engine) -> None:
        engine.prefill.verdict = None
        engine.add(**engine.params())
        engine.abort("r")
        engine.step()
        assert engine.prefill.released() == ["remote"] and engine.counts()["cancels_reported"] == 1
        assert not engine.side._reqs_need_recv, "vLLM's own way is a NIXL handshake"

    def test_blocks_of_a_request_that_the_server_rejects_are_released(self, engine: Engine) -> None:
        """As `AsyncLLM.notify_kv_transfer_request_rejected` has the engine core do it."""
        engine.add(tokens=1, abort=True, **engine.params())
        engine.abort("r")
        assert engine.prefill.released() == ["remote"]
        assert [question[1] for question in engine.prefill.queries] == [RELEASE]

    def test_a_prompt_in_decodes_own_cache_is_not_read(self, engine: Engine) -> None:
        engine.add(tokens=PROMPT)
        engine.steps(8)
        assert not engine.scheduler.requests
        request = engine.add(**engine.params())
        engine.step()
        while request.status.name == "WAITING_FOR_REMOTE_KVS":
            engine.step(done=("r",))
        engine.steps(8)
        assert not engine.side.receives._receives

    @pytest.mark.parametrize("name", ["r", "nobody"])
    def test_an_end_that_nobody_waits_for_does_not_end_the_engine(self, engine: Engine, name: str) -> None:
        """vLLM asserts here: a handshake with a dead prefill, to tell it of an abort, ends the engine core."""
        engine.add(tokens=PROMPT)
        engine.step()
        engine.step(done=(name,))
        assert engine.scheduler.requests["r"].status.name == "RUNNING"

    def test_no_room_beside_kept_blocks_is_an_error_and_not_a_hang(
        self, vllm_config: Any, guard_scheduler: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small = Engine(vllm_config, guard_scheduler, asynchronous=False, blocks=30)
        monkeypatch.setattr(guard_scheduler, "time", SimpleNamespace(perf_counter=small.prefill))
        small.reading_late()
        assert small.step() == {}, "the blocks of the late read leave no room"
        small.add("next")
        small.step()
        small.prefill.now += DEADLINE_S - 0.1
        assert small.step() == {} and not small.answers()
        small.prefill.now += 0.2
        small.step()
        ends = {out.request_id: str(out.finish_reason) for output in small.outputs.values() for out in output.outputs}
        assert ends == {"r": "error", "next": "error"}
        small.step(done=("r",))
        assert small.add("after") and small.step() == {"after": PROMPT}


class TestPrefill:
    def prefilled(self, engine: Engine, name: str = "r") -> dict[str, Any]:
        engine.add(name, do_remote_decode=True, do_remote_prefill=False)
        request = engine.scheduler.requests[name]
        request.max_tokens = 1
        for _ in range(4):
            engine.step()
            for output in self.outputs(engine):
                if output.request_id == name and output.kv_transfer_params:
                    params: dict[str, Any] = output.kv_transfer_params
                    return params
        raise AssertionError("no transfer parameters")

    @staticmethod
    def outputs(engine: Engine) -> list[Any]:
        return [output for outputs in engine.outputs.values() for output in outputs.outputs]

    def test_decode_gets_the_lease(self, engine: Engine) -> None:
        params = self.prefilled(engine)
        assert params["do_remote_prefill"] is True
        assert params[LEASE_KEY] == {"granted_at": engine.prefill.now, "lease_s": 30.0}
        lease = params[LEASE_KEY]
        assert json.loads(json.dumps(lease)) == lease, "it goes through Ray and HTTP"
        assert engine.side.leases.claim("r", "d") == LeaseAnswer(GRANTED, 30.0)

    def test_a_lease_ends_with_its_blocks(self, engine: Engine, report: Any) -> None:
        before = engine.free
        for name, expired in (("a", set[str]()), ("b", {"b"})):
            self.prefilled(engine, name)
            engine.side.leases.claim(name, "d")
            assert engine.free < before
            engine.step(sent=(name,), report=report(expired=expired))
            assert engine.free == before
        assert engine.side.leases.claim("a", "d").verdict == GRANTED
        assert engine.side.leases.claim("b", "d").verdict == EXPIRED

    def test_heartbeats_reach_the_book(self, engine: Engine, report: Any) -> None:
        self.prefilled(engine)
        engine.side.leases.claim("r", "d")
        engine.prefill.now += 25
        engine.step(report=report(renewed={"r"}))
        assert engine.side.leases.claim("r", "d").covered_s == 15.0
        worker = quietly(f"{NIXL}.base_worker").NixlBaseConnectorWorker
        assert "self._lease_extension = kv_lease_duration * 2 // 3" in inspect.getsource(worker.__init__)

    def test_workers_get_what_is_released(self, engine: Engine, guard_worker: Any) -> None:
        self.prefilled(engine)
        engine.side.leases.release("r", "d")
        metadata = engine.scheduler.schedule().kv_connector_metadata
        assert getattr(metadata, guard_worker.RELEASED) == {"r"}


# The worker.


class Wrapper:
    """NIXL, as far as a worker's reads go."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.released: list[int] = []
        self.notifs: dict[str, list[bytes]] = {}
        self.removed: list[str] = []

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)

    def release_dlist_handle(self, handle: int) -> None:
        assert handle not in self.released

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        if handle in self.released:
            raise RuntimeError("no such transfer")
        self.released.append(handle)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifs, self.notifs = self.notifs, {}
        return notifs


@pytest.fixture
def worker(guard_worker: Any) -> Iterator[Any]:
    """A worker as vLLM's constructor leaves it, without NIXL and without memory."""
    worker = guard_worker.GuardWorker.__new__(guard_worker.GuardWorker)
    worker._guard_failed, worker._guard_notified, worker._guard_freed = set(), set(), set()
    worker._guard_report, worker._guard_peers = guard_worker.WorkerReport(), guard_worker.PeerBook()
    worker._handshake_lock, worker._handshake_futures = threading.RLock(), {}
    worker._handshake_initiation_executor = futures.ThreadPoolExecutor(max_workers=1)
    worker._remote_agents, worker._engine_last_active, worker._engine_ttl = {}, {}, 0.0
    worker._engine_clock_offset, worker.tp_mappings, worker.dst_num_blocks = {}, {}, {}
    worker.dst_xfer_side_handles, worker.kv_caches_base_addr = {}, {}
    worker.xfer_stats = quietly("pdlab.guard.metrics").GuardStats()
    worker.nixl_wrapper = Wrapper()
    worker._recving_transfers = defaultdict(list)
    worker._recving_metadata, worker._reqs_to_send, worker._reqs_to_process = {}, {}, set()
    worker._failed_recv_reqs, worker._invalid_block_ids = queue.Queue(), queue.Queue()
    worker._ready_requests = queue.Queue()
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker.expected_consumer_notifications_by_req = {}
    worker._lease_extension = 20
    worker._is_hma_required, worker.use_host_buffer, worker.use_mla = True, False, False
    worker.enable_permute_local_kv = worker.enable_heterogeneous_attn_post_process = False
    worker._physical_blocks_per_logical_kv_block = 1
    worker.pcp_rank = worker.tp_rank = 0
    worker._has_mamba, worker.engine_id = False, "d1"
    worker._mark_reads()
    worker.poll_s, worker._guard_polled_s = 0.0, 0.0
    worker._guard_unreported, worker._guard_read_ends_address = (set(), set()), None
    info = SimpleNamespace(remote_block_size=BLOCK, remote_physical_blocks_per_logical=1)
    worker.transfer_topo = SimpleNamespace(
        get_engine_info=lambda _: info, block_size_ratio=lambda _: 1, unregister_remote_engine=lambda _: None
    )
    yield worker
    worker._handshake_initiation_executor.shutdown()
    # Without it vLLM's __del__ has nothing to do; it would run whenever the garbage collector does, in another test.
    del worker._handshake_initiation_executor


def read(worker: Any, name: str, *states: str, blocks: int = 3) -> None:
    remote = SimpleNamespace(
        engine_id="p1", request_id="x", host="h", port=1, block_ids=[[1]] if blocks else [], blocks_expiry_time=None
    )
    ids = [list(range(blocks))]
    worker._recving_metadata[name] = SimpleNamespace(
        local_block_ids=ids, local_physical_block_ids=ids, remote=remote, local_num_computed_blocks=(0,)
    )
    for number, state in enumerate(states):
        handle = hash((name, number))
        worker.nixl_wrapper.states[handle] = state
        worker._recving_transfers[name].append(handle)


def connect(worker: Any, peer: str = "p1") -> None:
    """As a handshake leaves it."""
    worker._remote_agents[peer] = {(0, 0): f"agent of {peer}"}
    worker.dst_xfer_side_handles[peer] = {0: 77}
    worker.tp_mappings[peer], worker.dst_num_blocks[peer] = object(), 8
    worker.kv_caches_base_addr[peer], worker._engine_clock_offset[peer] = {0: [1]}, 0.1


def counted(worker: Any) -> dict[str, int]:
    """What the guard's worker has counted, and counts no more."""
    data = worker.xfer_stats.clone_and_reset().data
    return {key.removeprefix("pdlab_guard_"): sum(value) for key, value in data.items() if "guard" in key and value}


class TestConnections:
    """vLLM's own bookkeeping of a peer (`_cleanup_remote_engine`, `_ensure_handshake`), and a handshake of the test."""

    @pytest.fixture
    def handshakes(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Engine ids that a handshake was made with; it fails for those called ``dead``."""
        made: list[str] = []

        def handshake(host: str, port: int, tp_size: int, engine_id: str, *_: Any) -> Any:
            made.append(engine_id)
            if engine_id == "dead":
                raise TimeoutError("no answer")
            connect(worker, engine_id)
            return worker._remote_agents.pop(engine_id), 0.1

        monkeypatch.setattr(worker, "_nixl_handshake", handshake, raising=False)
        reads: list[str] = []

        def start(_: Any, req_id: str, meta: Any) -> None:
            assert meta.remote.engine_id in worker.tp_mappings, "read without a handshake"
            reads.append(req_id)
            handle = hash((req_id, 0))
            worker.nixl_wrapper.states.setdefault(handle, "ERR")
            worker._recving_transfers[req_id].append(handle)

        base = quietly(f"{NIXL}.pull_worker").NixlPullConnectorWorker
        monkeypatch.setattr(base, "_read_blocks_for_req", start)
        return made

    def run_request(self, worker: Any, name: str, state: str, peer: str = "p1") -> None:
        """One request through the worker's steps, until it is done."""
        metadata = quietly(f"{NIXL}.metadata").NixlConnectorMetadata()
        read(worker, name)
        meta = worker._recving_metadata.pop(name)
        meta.remote.engine_id, meta.tp_size, meta.dcp_size, meta.pp_size = peer, 1, 1, 1
        worker._recving_transfers.pop(name, None)
        metadata.reqs_to_recv[name] = meta
        worker.nixl_wrapper.states[hash((name, 0))] = state
        for _ in range(200):
            worker.start_load_kv(metadata)
            if name in worker.get_finished()[1]:
                return
            metadata = quietly(f"{NIXL}.metadata").NixlConnectorMetadata()
            time.sleep(0.01)
        raise AssertionError(f"{name} does not end")

    @pytest.fixture(autouse=True)
    def mapped(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        worker._logical_to_kernel_block_ids = lambda ids, ratio: ids

    def test_a_connection_that_failed_is_made_anew_at_the_next_request(
        self, worker: Any, handshakes: list[str]
    ) -> None:
        connect(worker)
        self.run_request(worker, "first", "ERR")
        assert handshakes == [] and worker.take_report().failed == {"first"}
        self.run_request(worker, "second", "DONE")
        assert handshakes == ["p1"] and worker.nixl_wrapper.removed == ["agent of p1"]
        assert worker.take_report() is None
        self.run_request(worker, "third", "DONE")
        assert handshakes == ["p1"] and counted(worker) == {"handshakes_renewed": 1}
        assert not worker._guard_peers.active

    def test_it_is_not_forgotten_while_a_read_goes_on(self, worker: Any, handshakes: list[str]) -> None:
        connect(worker)
        read(worker, "long", "PROC")
        self.run_request(worker, "first", "ERR")
        self.run_request(worker, "second", "ERR")
        assert worker.nixl_wrapper.removed == [] and handshakes == []
        worker.nixl_wrapper.states[hash(("long", 0))] = "ERR"
        worker.get_finished()
        self.run_request(worker, "third", "DONE")
        assert worker.nixl_wrapper.removed == ["agent of p1"] and handshakes == ["p1"]

    def test_reads_that_fail_over_every_new_connection_are_counted(self, worker: Any, handshakes: list[str]) -> None:
        connect(worker)
        for number in range(quietly("pdlab.guard.peers").UNHEALED_AFTER + 1):
            self.run_request(worker, f"r{number}", "ERR")
        self.run_request(worker, "good", "DONE")
        self.run_request(worker, "more", "DONE")
        counts = counted(worker)
        assert (counts["unhealed"], counts["healed"]) == (1, 1)

    def test_an_engine_that_has_died_is_no_fault_of_the_connection(self, worker: Any, handshakes: list[str]) -> None:
        connect(worker, "dead")
        for number in range(8):
            self.run_request(worker, f"r{number}", "ERR", peer="dead")
        self.run_request(worker, "alive", "DONE", peer="p2")
        assert handshakes == ["dead"] * 7 + ["p2"]
        assert counted(worker) == {}

    def test_a_notification_that_could_not_be_sent_is_a_failed_connection(self, worker: Any) -> None:
        connect(worker)
        read(worker, "r", blocks=0)
        worker.nixl_wrapper.send_notif = None  # not callable
        base = quietly(f"{NIXL}.pull_worker").NixlPullConnectorWorker
        spec = quietly(f"{NIXL}.tp_mapping").ReadSpec(remote_rank=0, local_block_ids=[[]], remote_block_ids=[[]])
        base._read_blocks(worker, spec, "p1", "r", "x", 1, 1, 1)
        assert worker._guard_peers.to_forget((), worker._remote_agents) == ["p1"]

    def test_a_peer_that_cannot_be_forgotten_whole_is_shaken_hands_with_all_the_same(
        self, worker: Any, handshakes: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect(worker)
        self.run_request(worker, "first", "ERR")

        def fails(_: str) -> None:
            raise RuntimeError("NIXL_ERR_INVALID_PARAM")

        monkeypatch.setattr(worker.nixl_wrapper, "remove_remote_agent", fails)
        self.run_request(worker, "second", "DONE")
        assert handshakes == ["p1"] and "p1" in worker._remote_agents


class TestWorker:
    def test_a_read_that_ended_well(self, worker: Any) -> None:
        read(worker, "r", "DONE")
        assert worker.get_finished() == (set(), {"r"})
        assert worker.take_report() is None

    def test_the_marks_of_a_request_with_two_reads(self, worker: Any) -> None:
        read(worker, "r", "DONE", "PROC")
        read(worker, "s", "PROC")
        for name in "rs":
            worker._guard_marks.posted(name)
        before = time.monotonic()
        assert worker.get_finished()[1] == set() and worker.xfer_stats.data[WIRE] == []
        worker.nixl_wrapper.states[hash(("r", 1))] = "DONE"
        worker.get_finished()
        ((name, rank, posted, seen, microseconds, size, reads, boot),) = worker.xfer_stats.data[WIRE]
        telemetry = Wrapper().get_xfer_telemetry(0)
        assert (name, rank, size, microseconds) == ("r", 0, 2 * telemetry.totalBytes, telemetry.xferDuration)
        assert posted <= before <= seen and reads == 2 and boot == boot_id()
        assert not worker.xfer_stats.is_empty() and list(worker._guard_marks._open) == ["s"]

    def test_a_poll_between_steps_reports_good_reads_at_once_and_all_with_the_next_step(self, worker: Any) -> None:
        with contextlib.closing(read_ends.ReadEndReceiver(workers=1)) as ends:
            worker._guard_read_ends_address = ends.address
            for name, state in {"good": "DONE", "bad": "ERR", "long": "PROC"}.items():
                read(worker, name, state)
            worker.poll()
            assert ends.take() == {"good"} and ends.take() == set()
            assert worker.get_finished() == (set(), {"good", "bad"})
            assert worker.take_report().failed == {"bad"}
            assert ends.not_taken({"good", "bad"}) == {"bad"}
            assert worker.get_finished() == (set(), set()), "each once"

    def test_a_poll_keeps_ended_leases_for_the_next_step(self, worker: Any) -> None:
        worker._guard_read_ends_address = (1, "nobody listens")
        read(worker, "r", "PROC")
        worker._guard_freed = {"sent"}
        worker.poll()
        assert worker.get_finished() == ({"sent"}, set())

    def test_a_worker_without_reads_or_an_address_does_not_poll(self, worker: Any) -> None:
        worker.nixl_wrapper.check_xfer_state = None  # not callable
        assert not worker.poll_if_due()
        read(worker, "r", "PROC")
        worker.poll()

    def test_polls_are_as_far_apart_as_was_given(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s, polls = 100.0, []
        monkeypatch.setattr(quietly("pdlab.guard.worker"), "time", SimpleNamespace(monotonic=lambda: now_s))
        worker.nixl_wrapper.check_xfer_state = lambda _: polls.append(now_s) or "PROC"
        worker._guard_read_ends_address, worker.poll_s = (1, "nobody listens"), 0.002
        read(worker, "r", "PROC")
        for _ in range(10):
            assert worker.poll_if_due()
            now_s += 0.001
        assert polls == pytest.approx([100.0, 100.002, 100.004, 100.006, 100.008])

    def test_a_failed_read_is_reported_by_request(self, worker: Any) -> None:
        read(worker, "r", "ERR")
        assert worker.get_finished()[1] == {"r"}
        assert worker.take_report().failed == {"r"} and worker.take_report() is None
        assert worker.get_block_ids_with_load_errors() == set(), "else vLLM fails the request, or asserts one KV group"
        assert sum(worker.xfer_stats.data["num_failed_transfers"]) == 1

    def test_a_request_is_done_when_all_of_its_reads_have_ended(self, worker: Any) -> None:
        """vLLM: done with the first that fails, and once more with the last, which is an assertion."""
        read(worker, "r", "ERR", "PROC")
        assert worker.get_finished()[1] == set()
        worker.nixl_wrapper.states[hash(("r", 1))] = "DONE"
        assert worker.get_finished()[1] == {"r"} and worker.take_report().failed == {"r"}
        assert worker.get_finished()[1] == set()

    def test_a_handshake_that_failed(self, worker: Any) -> None:
        read(worker, "r")
        worker._recving_transfers.pop("r", None)
        worker._handle_failed_transfer("r", None)
        assert worker.get_finished()[1] == {"r"} and worker.take_report().failed == {"r"}

    def test_a_second_release_ends_nothing(self, worker: Any) -> None:
        read(worker, "r", "ERR")
        worker.nixl_wrapper.released.append(hash(("r", 0)))
        assert worker.get_finished()[1] == {"r"}

    def test_a_failed_notification_without_a_read_is_awaited_by_nobody(self, worker: Any) -> None:
        read(worker, "r", blocks=0)
        worker._handle_failed_transfer("r", None)
        assert worker.get_finished()[1] == set() and not worker._recving_metadata

    def test_a_read_that_cannot_be_set_up_ends_nothing(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        base = quietly(f"{NIXL}.pull_worker").NixlPullConnectorWorker

        def malformed(*_: Any) -> None:
            raise AssertionError("more blocks than prefill has")

        monkeypatch.setattr(base, "_read_blocks_for_req", malformed)
        read(worker, "r")
        connect(worker)
        worker._recving_transfers.pop("r", None)
        worker._read_blocks_for_req("r", worker._recving_metadata["r"])
        assert worker.get_finished()[1] == {"r"} and worker.take_report().failed == {"r"}

    def test_expired_leases_are_reported_apart_from_those_that_were_read(self, worker: Any) -> None:
        for name, expires in (("expired", 0.0), ("read", 1e12), ("pinned", 1e12)):
            worker._reqs_to_send[name] = expires
            worker._reqs_to_process.add(name)
        worker.nixl_wrapper.notifs = {"d": [b"read:1"]}
        assert worker.get_finished()[0] == {"expired", "read"}
        assert worker.take_report().expired == {"expired"}

    def test_a_renewed_lease_does_not_keep_others(self, worker: Any) -> None:
        """vLLM frees from the front, and stops there."""
        for name in ("renewed", "expired"):
            worker._reqs_to_send[name] = 0.0
            worker._reqs_to_process.add(name)
        worker.nixl_wrapper.notifs = {"d": [b"HB:renewed,unknown"]}
        assert worker.get_finished()[0] == {"expired"}
        taken = worker.take_report()
        assert (taken.renewed, taken.expired) == ({"renewed"}, {"expired"})

    def test_what_is_released_is_freed(self, worker: Any, guard_worker: Any, connector: Any) -> None:
        metadata = quietly(f"{NIXL}.metadata").NixlConnectorMetadata()
        setattr(metadata, guard_worker.RELEASED, {"r", "unknown"})
        worker._reqs_to_send["r"] = 1e12
        worker._reqs_to_process.add("r")
        worker.start_load_kv(metadata)
        assert worker.get_finished()[0] == {"r"} and worker.take_report() is None
        assert not worker._reqs_to_process and worker.get_finished()[0] == set()

    def test_reports_of_ranks_are_one(self, report: Any) -> None:
        merged = report(failed={"a"}).aggregate(report(failed={"b"}, expired={"c"}, renewed={"d"}))
        assert (merged.failed, merged.expired, merged.renewed) == ({"a", "b"}, {"c"}, {"d"})


# The side channel.


@pytest.fixture
def side(connector: Any) -> Any:
    side = connector.GuardConnectorScheduler.__new__(connector.GuardConnectorScheduler)
    side.leases, side._listener_error = LeaseBook("p1"), None
    side._nixl_handshake_listener_t, side._stop_event = None, threading.Event()
    side.side_channel_host = "127.0.0.1"
    return side


def metadata_of_ranks() -> dict[tuple[int, int], Any]:
    payload = quietly(f"{NIXL}.metadata").NixlHandshakePayload
    return {(0, 0): payload(compatibility_hash="h", agent_metadata_bytes=b"where memory lies")}


def test_the_side_channel_answers_for_leases_and_survives_what_it_cannot_read(side: Any) -> None:
    held, side.side_channel_port = hold_port()
    base = quietly(f"{NIXL}.base_scheduler").NixlBaseConnectorScheduler
    client = SideChannelClient()
    with held:
        side.set_xfer_handshake_metadata(metadata_of_ranks())
        try:
            side.leases.pin("r", 1000)
            peer = Peer("127.0.0.1", side.side_channel_port, "p1")
            with quietly(f"{NIXL}.utils").zmq_ctx(zmq.REQ, f"tcp://127.0.0.1:{side.side_channel_port}") as rank:
                rank.send(msgspec.msgpack.encode((lease_queries.GET_META_MSG, 0, 0)))
                assert rank.poll(60_000) and b"where memory lies" in rank.recv_multipart()[0], "a handshake as before"
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.connect(f"tcp://127.0.0.1:{side.side_channel_port}")
                stranger.send_multipart([b"", b"\xc1 not msgpack"])
                stranger.send_multipart([b"no second frame"])
                stranger.poll(500)
            got: list[Reply] = []
            for query_id in range(1, 200):
                client.send(query_id, CLAIM, peer, "r", "d")
                threading.Event().wait(0.05)
                got += client.replies()
                if got:
                    break
            assert got[0].answer.verdict == GRANTED
            assert abs(got[0].clock_s - side.leases._clock()) < 60, "the clock that leases are stamped with"
        finally:
            client.close()
            base.shutdown(side)


def test_a_port_that_is_taken_ends_the_start(side: Any) -> None:
    """vLLM waits for ever for its listener to be ready."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        side.side_channel_port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(RuntimeError, match=r"side channel cannot listen at 127\.0\.0\.1:"):
            side.set_xfer_handshake_metadata(metadata_of_ranks())


# What is exported.


def test_counts_are_on_the_metrics_page(connector: Any, vllm_config: Any) -> None:
    prometheus = quietly("prometheus_client")
    registry = prometheus.CollectorRegistry()
    classes = (prometheus.Gauge, prometheus.Counter, prometheus.Histogram)

    def registered(cls: Any) -> Any:
        return lambda **given: cls(**given, registry=registry)

    types = {cls: registered(cls) for cls in classes}
    page = connector.NixlConnector.build_prom_metrics(vllm_config, types, ["engine"], {0: ["0"]})
    worker_side, scheduler_side = (connector.NixlConnector.build_kv_connector_stats() for _ in range(2))
    assert worker_side.is_empty()
    scheduler_side.record({"recomputed": 3, "deadlines": 1})
    assert not scheduler_side.is_empty()
    worker_side.record_failed_transfer()
    total = worker_side.aggregate(scheduler_side)
    copied = connector.NixlConnector.build_kv_connector_stats(
        data=msgspec.msgpack.decode(msgspec.msgpack.encode(total.data))
    )
    page.observe(copied.data)
    text = prometheus.generate_latest(registry).decode()
    assert 'pdlab_guard_recomputed_total{engine="0"} 3.0' in text and "vllm:nixl_num_failed_transfers_total" in text
    for action in ACTIONS:
        assert f'pdlab_guard_{action}_total{{engine="0"}}' in text, "a counter at 0 is there"


# Names.


def test_the_connector_is_vllms_by_its_name(connector: Any, vllm_config: Any) -> None:
    factory = quietly("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    found = factory.get_connector_class(vllm_config.kv_transfer_config)
    assert found is connector.NixlConnector and issubclass(found, quietly(f"{NIXL}.connector").NixlConnector)
    assert factory.supports_hma_config(vllm_config.kv_transfer_config)
    assert vllm_config.kv_transfer_config.has_connector("NixlConnector")
    backend = quietly("ray.llm._internal.serve.engines.vllm.kv_transfer.factory").KVConnectorBackendFactory
    assert backend.get_backend_class("NixlConnector").__name__ == "NixlConnectorBackend"


def own_methods() -> list[tuple[str, str]]:
    names = {
        "GuardConnectorScheduler": ("connector", "NixlPullConnectorScheduler"),
        "NixlConnector": ("connector", "NixlPullConnector"),
        "GuardWorker": ("worker", "NixlPullConnectorWorker"),
        "Guarded": ("scheduler", "Scheduler"),
        "GuardStats": ("metrics", "NixlKVConnectorStats"),
        "GuardPromMetrics": ("metrics", "NixlPromMetrics"),
    }
    return [(f"pdlab.guard.{module}:{name}", base) for name, (module, base) in names.items()]


ADDED = {
    "GuardWorker": {
        "_mark_reads",
        "poll_if_due",
        "poll",
        "_finished_transfers",
        "take_report",
        "_note_failure",
        "_forget_peers",
    },
    "NixlConnector": {"guarded", "receives", "report_in"},
    "GuardStats": {"record"},
    "Guarded": {
        "_take_read_ends",
        "_reads_ended",
        "_read_ended",
        "_handle_settled_and_overdue",
        "_detect_stuck",
        "_waiting_for_kv",
        "_use",
        "_settle",
        "_end_receive",
        "_recompute",
        "_fail_stuck",
    },
}


@pytest.mark.parametrize(("own", "base"), own_methods(), ids=lambda value: value.rpartition(":")[2])
def test_what_the_guard_overrides_is_there_with_the_same_parameters(own: str, base: str) -> None:
    module, _, name = own.partition(":")
    mine = getattr(quietly(module), name)
    theirs = getattr(quietly("vllm.v1.core.sched.scheduler") if base == "Scheduler" else quietly(module), base)
    for method, function in vars(mine).items():
        if method.startswith("__") or method in ADDED.get(name, set()) or not callable(getattr(mine, method)):
            continue
        assert hasattr(theirs, method), f"vLLM has no {base}.{method}"
        given = parameters(function.__func__ if isinstance(function, classmethod) else function)
        if "args" in given:
            continue
        expected = parameters(inspect.getattr_static(theirs, method).__func__
                              if isinstance(inspect.getattr_static(theirs, method), (classmethod, staticmethod))
                              else getattr(theirs, method))  # fmt: skip
        assert given == expected or given == ["self", *expected], (method, given, expected)


def test_what_the_guard_relies_on_inside_vllm() -> None:
    base = quietly(f"{NIXL}.base_scheduler").NixlBaseConnectorScheduler
    listener = inspect.getsource(base._nixl_handshake_listener)
    assert "identity, _, msg = sock.recv_multipart()" in listener
    assert "encoded_data[(target_pp_rank, target_tp_rank)], ts" in listener
    assert "target=self._nixl_handshake_listener" in inspect.getsource(base.set_xfer_handshake_metadata)
    assert quietly(f"{NIXL}.metadata").GET_META_MSG == lease_queries.GET_META_MSG
    assert "time.perf_counter() + request_kv_blocks_ttl" in inspect.getsource(
        quietly(f"{NIXL}.pull_scheduler").NixlPullConnectorScheduler.request_finished
    )
    scheduler = quietly("vllm.v1.core.sched.scheduler").Scheduler
    waiting = inspect.getsource(scheduler._update_waiting_for_remote_kv)
    assert "if request.request_id in self.failed_recving_kv_req_ids:" in waiting
    assert "self.kv_cache_manager.free(request)" in waiting
    assert "if ext_tokens is None:" in inspect.getsource(scheduler.schedule)
    assert "self._update_from_kv_xfer_finished(kv_connector_output)" in inspect.getsource(scheduler.update_from_output)
    finished = inspect.getsource(scheduler._update_from_kv_xfer_finished)
    assert finished.index("update_connector_output") < finished.index("self._free_blocks")
    worker = quietly(f"{NIXL}.base_worker").NixlBaseConnectorWorker
    done = inspect.getsource(worker.get_finished)
    assert "self._failed_recv_reqs.get_nowait()" in done and "next(iter(self._reqs_to_send.items()))" in done
    ensure = inspect.getsource(worker._ensure_handshake)
    assert "self._remote_agents[eid] = remote_agents" in ensure and "del self._handshake_futures[eid]" in ensure
    ready = inspect.getsource(worker._background_nixl_handshake)
    assert "self._handle_failed_transfer(req_id, None)" in ready
    cleanup = inspect.getsource(worker._cleanup_remote_engine)
    for forgotten in ("self._remote_agents.pop(engine_id)", "remove_remote_agent(", "release_dlist_handle("):
        assert forgotten in cleanup
    pull = quietly(f"{NIXL}.pull_worker").NixlPullConnectorWorker
    assert "if remote_engine_id not in self._remote_agents:" in inspect.getsource(pull.start_load_kv)
    notified = inspect.getsource(pull._read_blocks)
    assert f'failure_type="{quietly("pdlab.guard.worker").NOTIFICATION_FAILED}"' in notified
    assert "dst_engine_id=dst_engine_id" in notified
    mixin = inspect.getsource(quietly("vllm.v1.worker.kv_connector_model_runner_mixin"))
    runner = inspect.getsource(quietly("vllm.v1.worker.gpu.kv_connector"))
    loop = inspect.getsource(quietly("vllm.v1.executor.multiproc_executor").WorkerProc.worker_busy_loop)
    assert "self.rpc_broadcast_mq.dequeue(indefinite=True)" in loop
    for source in (mixin, runner):
        assert source.index(".get_finished(") < source.index("build_connector_worker_meta()")


def test_steps_are_seen_in_vllms_client() -> None:
    llm = quietly("vllm.v1.engine.async_llm").AsyncLLM
    assert "outputs = await engine_core.get_output_async()" in inspect.getsource(llm._run_output_handler)
    assert re.search(r"self\.log_stats = ", inspect.getsource(llm.__init__))
    processor = quietly("vllm.v1.engine.output_processor").OutputProcessor
    assert parameters(processor.get_num_unfinished_requests) == ["self"]
    core = quietly("vllm.v1.engine.core").EngineCoreProc
    assert "self.output_queue.put_nowait(output)" in inspect.getsource(core._process_engine_step)
    stats = inspect.getsource(quietly("vllm.v1.core.sched.scheduler").Scheduler.update_from_output)
    assert "engine_core_outputs[0] = eco = EngineCoreOutputs()" in stats, "statistics come with every step"
    server = quietly("ray.llm._internal.serve.core.server.llm_server").LLMServer
    assert inspect.iscoroutinefunction(server.check_health) and inspect.iscoroutinefunction(server.start)
    made = inspect.getsource(quietly("vllm.v1.core.sched.scheduler").Scheduler.make_stats)
    assert "kv_connector_stats" in made
    prefix = quietly("pdlab.guard.metrics").PREFIX
    assert {step_watch.UNHEALED, step_watch.HEALED} == {f"{prefix}unhealed", f"{prefix}healed"}


def test_the_death_of_an_engine_core_is_detected_by_vllms_client() -> None:
    """What `pdlab.deploy.serving.dead_engine` stands on: the client looks at the process itself."""
    llm = quietly("vllm.v1.engine.async_llm").AsyncLLM
    assert isinstance(llm.errored, property)
    assert "self.engine_core.resources.engine_dead" in inspect.getsource(llm.errored.fget)
    client = quietly("vllm.v1.engine.core_client").MPClient
    monitor = inspect.getsource(client.start_engine_core_monitor)
    assert "monitor_engine_liveness()" in monitor and "_self.resources.engine_dead = True" in monitor
    server = quietly("ray.llm._internal.serve.core.server.llm_server").LLMServer
    assert inspect.iscoroutinefunction(server.__del__)


def test_ray_puts_the_nodes_variables_into_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.deploy.serving import guard_sources

    utils = quietly("ray._private.utils")
    monkeypatch.setenv("HOME", "/home/node")
    monkeypatch.setenv("PYTHONPATH", "/before")
    utils.update_envs({"PYTHONPATH": guard_sources.pythonpath({"a": "b"})})
    import os

    first, second = os.environ["PYTHONPATH"].split(":")
    assert first.startswith("/home/node/.cache/pdlab/kv-guard/") and second == "/before"


def test_the_guards_folder_is_what_travels() -> None:
    from pdlab.deploy.serving import builders, guard_sources

    files = guard_sources.sources(builders._PDLAB)
    assert (Path(builders._PDLAB) / "guard" / "connector.py").read_text() == files["pdlab/guard/connector.py"]
