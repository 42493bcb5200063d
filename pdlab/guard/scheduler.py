"""vLLM's scheduler with the guard, for ``scheduler_cls``.

vLLM calls the class that it is given whatever it resolved ``async_scheduling`` to, so `GuardScheduler` makes the
scheduler that vLLM itself would have taken, with the guard mixed in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from pdlab.guard.connector import MultiConnector, NixlConnector
from pdlab.guard.first_token import carries, take
from pdlab.guard.marks import ANEW, READ
from pdlab.guard.receives import Outcome, ReceiveBook
from pdlab.guard.vllm_names import (
    AsyncScheduler,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    KVConnectorOutput,
    RequestStatus,
    Scheduler,
)

logger = logging.getLogger("vllm.pdlab.guard")


class Guarded:
    """Mixed in before a scheduler of vLLM's.

    A request whose KV cache did not arrive, or may be another's, is made to compute its prompt, by the way that vLLM
    has for failed loads: no computed tokens, and its name among the failed receives. Where a read goes on past its
    deadline, the blocks are taken off the request and kept until the workers report the end of the read.

    A request that came with prefill's first token answers with it as soon as its KV cache may be used.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.connector  # type: ignore[attr-defined]
        if not isinstance(connector, NixlConnector | MultiConnector):
            raise TypeError(
                f"the guard's scheduler needs the guard's connector, not {type(connector).__name__}: "
                "kv_connector_module_path must be pdlab.guard.connector"
            )
        self._guarded: NixlConnector = connector.guarded
        self._receives: ReceiveBook = self._guarded.receives
        self._ends = self._guarded.connector_scheduler.ends
        self._held_blocks: dict[str, list[Any]] = {}
        self._stuck_since: float | None = None
        self._hopeless: list[str] = []
        self._ended: set[str] = set()  # reads of which the step that is scheduled does not know yet
        self._firsts: list[tuple[int, Any]] = []  # answers that are to go out with the next step's, by client

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._hear_ends(scheduling=True)
        if self._receives.active or self._held_blocks:
            self._look_after_receives()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def has_requests(self) -> bool:
        return bool(super().has_requests()) or bool(self._held_blocks)  # type: ignore[misc]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        waiting = self._receives.waiting()
        if waiting:
            # Their reads have ended: no worker will report it again, and vLLM would keep their blocks until one does.
            names = {request_ids} if isinstance(request_ids, str) else request_ids
            names = names if names is None else set(names)
            self.finished_recving_kv_req_ids.update(name for name in waiting if names is None or name in names)  # type: ignore[attr-defined]
            request_ids = names
        return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        self._hear_ends(scheduling=False)
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self._hopeless:
            self._fail_hopeless(outputs)
        for client, first in self._firsts:
            # In front: the second token may be among them.
            outputs.setdefault(client, EngineCoreOutputs()).outputs.insert(0, first)
        self._firsts.clear()
        return outputs

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        report = self.connector.report_in(kv_connector_output.kv_connector_worker_meta)  # type: ignore[attr-defined]
        if report is not None and report.failed:
            self._receives.failed |= report.failed
        if self._ends is not None and kv_connector_output.finished_recving:
            kv_connector_output.finished_recving = self._ends.not_taken(kv_connector_output.finished_recving)
        self._reads_ended(kv_connector_output)

    def _hear_ends(self, *, scheduling: bool) -> None:
        """Ends of reads that no step's output has told yet. A request with prefill's first token has it sent before its
        second is computed: it is no part of the step that is being scheduled."""
        if self._ends is None:
            return
        names, self._ended = self._ends.take() | self._ended, set()
        if scheduling:
            requests = self.requests  # type: ignore[attr-defined]
            self._ended = {name for name in names if name in requests and carries(requests[name])}
            names -= self._ended
        if names:
            self._receives.counts["told_sooner"] += len(names)
            self._reads_ended(KVConnectorOutput(finished_recving=names))

    def _reads_ended(self, kv_connector_output: Any) -> None:
        if kv_connector_output.finished_recving:
            kv_connector_output.finished_recving = {
                request_id for request_id in kv_connector_output.finished_recving if self._read_ended(request_id)
            }
        super()._update_from_kv_xfer_finished(kv_connector_output)  # type: ignore[misc]

    def _read_ended(self, request_id: str) -> bool:
        """Whether vLLM is to hear of it."""
        blocks = self._held_blocks.pop(request_id, None)
        if blocks is not None:
            self._receives.late_read_ended(request_id)
            self._receives.failed.discard(request_id)
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))  # type: ignore[attr-defined]
            return False
        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        if request is None:
            self._receives.drop(request_id)
            return False
        if request.is_finished():
            self._receives.drop(request_id)
            return True
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return False
        self._guarded.marks.told(request_id)
        outcome = self._receives.read_ended(request_id)
        if outcome is Outcome.ANEW:
            self._compute_anew(request)
        elif outcome is Outcome.USE:
            self._use(request)
        return outcome is not Outcome.WAIT

    def _look_after_receives(self) -> None:
        for request_id, outcome in self._receives.settled():
            request = self._waiting_for_kv(request_id)
            if request is not None:
                if outcome is Outcome.ANEW:
                    self._compute_anew(request)
                else:
                    self._use(request)
                self._guarded.connector_scheduler._stop_heartbeat(request_id)
                self.finished_recving_kv_req_ids.add(request_id)  # type: ignore[attr-defined]
        for request_id in self._receives.overdue():
            request = self._waiting_for_kv(request_id)
            if request is not None:
                logger.error("request %s: its KV transfer goes on after %s s", request_id, self._receives.deadline_s)
                self._held_blocks[request_id] = self.kv_cache_manager.pop_blocks_for_free(request)  # type: ignore[attr-defined]
                self._compute_anew(request)
                self._guarded.connector_scheduler._stop_heartbeat(request_id)
                self.finished_recving_kv_req_ids.add(request_id)  # type: ignore[attr-defined]
        self._look_for_stuck()

    def _look_for_stuck(self) -> None:
        """Requests that wait for room while nothing runs and reads past their deadline keep their blocks: until when,
        nobody knows. One that waits for prefill's word is refused at its own deadline, and then needs room."""
        stuck: list[str] = []
        if self._held_blocks and not self.running:  # type: ignore[attr-defined]
            queues = (*self.waiting, *self.skipped_waiting)  # type: ignore[attr-defined]
            stuck = [
                request.request_id
                for request in queues
                if request.status == RequestStatus.WAITING and not self._receives.awaits_word(request.request_id)
            ]
        if not stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.perf_counter()
        elif time.perf_counter() - self._stuck_since > self._receives.deadline_s:
            self._stuck_since = None
            self._hopeless += stuck

    def _waiting_for_kv(self, request_id: str) -> Any:
        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        return request

    def _use(self, request: Any) -> None:
        self._guarded.marks.over(request.request_id, READ)
        token = take(self, request) if carries(request) else None
        if token is None:
            return
        self._receives.counts["reused"] += 1
        if self.log_stats:  # type: ignore[attr-defined]
            request.record_event(EngineCoreEventType.SCHEDULED)
        if (stats := request.take_prefill_stats()) is not None:
            stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))  # type: ignore[attr-defined]
        first = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            events=request.take_events(),
            prefill_stats=stats,
            trace_headers=request.trace_headers,
        )
        self._firsts.append((request.client_index, first))

    def _compute_anew(self, request: Any) -> None:
        logger.warning("request %s: no KV cache from prefill, computing the prompt", request.request_id)
        request.num_computed_tokens = 0
        self._guarded.marks.over(request.request_id, ANEW)
        self.failed_recving_kv_req_ids.add(request.request_id)  # type: ignore[attr-defined]

    def _fail_hopeless(self, outputs: dict[int, Any]) -> None:
        """Requests for which no room is left beside the kept blocks: an error is better than no end."""
        names, self._hopeless = self._hopeless, []
        for request in super().finish_requests(set(names), RequestStatus.FINISHED_ERROR):  # type: ignore[misc]
            self._receives.counts["errors"] += 1
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


class GuardSyncScheduler(Guarded, Scheduler):  # type: ignore[misc]
    """Where vLLM takes `Scheduler`."""


class GuardAsyncScheduler(Guarded, AsyncScheduler):  # type: ignore[misc]
    """Where vLLM takes `AsyncScheduler`."""


class GuardScheduler:
    """Makes one of the two; to vLLM it is the scheduler's class."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        chosen = GuardAsyncScheduler if asynchronous else GuardSyncScheduler
        return chosen(vllm_config, *args, **kwargs)
