"""vLLM's scheduler with the guard, for ``scheduler_cls``.

vLLM uses one ``scheduler_cls`` with and without ``async_scheduling``. So `GuardScheduler` makes the scheduler that vLLM
would take, with the guard mixed in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from pdlab.guard.connector import MultiConnector, NixlConnector
from pdlab.guard.first_token import has_first_token, take
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
from pdlab.marks.engine_marks import READ, RECOMPUTED

logger = logging.getLogger("vllm.pdlab.guard")


class Guarded:
    """Mixin before a scheduler of vLLM.

    If the KV cache of a request did not arrive, or may belong to another request, the request computes its prompt. This
    is vLLM's way for failed loads: no computed tokens, and the name among the failed receives. If a read goes past its
    deadline, the request gives up its blocks, and they are kept until the workers report the end of the read. A request
    with prefill's first token answers with this token as soon as its KV cache is usable.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.connector  # type: ignore[attr-defined]
        if not isinstance(connector, NixlConnector | MultiConnector):
            raise TypeError(
                f"the guard's scheduler needs the guard's connector, not {type(connector).__name__}: "
                "kv_connector_module_path must be pdlab.guard.connector"
            )
        self._connector: NixlConnector = connector.guarded
        self._receives: ReceiveBook = self._connector.receives
        self._read_ends = self._connector.connector_scheduler.read_ends
        self._late_read_blocks: dict[str, list[Any]] = {}
        self._stuck_since: float | None = None
        self._to_fail: list[str] = []
        self._deferred: set[str] = set()  # ended reads that wait for the end of the step that is being scheduled
        self._first_outputs: list[tuple[int, Any]] = []  # (client, first token's output) for the next outputs

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._take_read_ends(scheduling=True)
        if self._receives.active or self._late_read_blocks:
            self._handle_settled_and_overdue()
            self._connector.marks.step_begins()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def has_requests(self) -> bool:
        return bool(super().has_requests()) or bool(self._late_read_blocks)  # type: ignore[misc]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        waiting = self._receives.waiting()
        if waiting:
            # vLLM would keep their blocks until a worker reports the end of the read, and workers have reported it.
            names = {request_ids} if isinstance(request_ids, str) else request_ids
            names = names if names is None else set(names)
            self.finished_recving_kv_req_ids.update(name for name in waiting if names is None or name in names)  # type: ignore[attr-defined]
            request_ids = names
        return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        self._take_read_ends(scheduling=False)
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self._to_fail:
            self._fail_stuck(outputs)
        for client, output in self._first_outputs:
            # Insert it first, because the outputs may have the second token.
            outputs.setdefault(client, EngineCoreOutputs()).outputs.insert(0, output)
        self._first_outputs.clear()
        return outputs

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        report = self.connector.report_in(kv_connector_output.kv_connector_worker_meta)  # type: ignore[attr-defined]
        if report is not None and report.failed:
            self._receives.failed |= report.failed
        if self._read_ends is not None and kv_connector_output.finished_recving:
            kv_connector_output.finished_recving = self._read_ends.not_taken(kv_connector_output.finished_recving)
        self._reads_ended(kv_connector_output)

    def _take_read_ends(self, *, scheduling: bool) -> None:
        """Handle ends of reads that no step's output has reported yet.

        A request with prefill's first token is not part of the step that is being scheduled, so that its first token is
        sent before the second one is computed.
        """
        if self._read_ends is None:
            return
        names, self._deferred = self._read_ends.take() | self._deferred, set()
        if scheduling:
            requests = self.requests  # type: ignore[attr-defined]
            self._deferred = {name for name in names if name in requests and has_first_token(requests[name])}
            names -= self._deferred
        if names:
            self._receives.counts["reported_early"] += len(names)
            self._reads_ended(KVConnectorOutput(finished_recving=names))

    def _reads_ended(self, kv_connector_output: Any) -> None:
        if kv_connector_output.finished_recving:
            kv_connector_output.finished_recving = {
                request_id for request_id in kv_connector_output.finished_recving if self._read_ended(request_id)
            }
        super()._update_from_kv_xfer_finished(kv_connector_output)  # type: ignore[misc]

    def _read_ended(self, request_id: str) -> bool:
        """Handle the end of a read; returns whether vLLM's scheduler must handle it too."""
        blocks = self._late_read_blocks.pop(request_id, None)
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
        self._connector.marks.read_reported(request_id)
        outcome = self._receives.read_ended(request_id)
        self._settle(request, outcome)
        return outcome is not Outcome.WAIT

    def _settle(self, request: Any, outcome: Outcome) -> None:
        if outcome is Outcome.RECOMPUTE:
            self._recompute(request)
        elif outcome is Outcome.USE:
            self._use(request)

    def _handle_settled_and_overdue(self) -> None:
        for request_id, outcome in self._receives.settled():
            if (request := self._waiting_for_kv(request_id)) is not None:
                self._settle(request, outcome)
                self._end_receive(request_id)
        for request_id in self._receives.overdue():
            if (request := self._waiting_for_kv(request_id)) is not None:
                logger.error("request %s: its KV transfer goes on after %s s", request_id, self._receives.deadline_s)
                self._late_read_blocks[request_id] = self.kv_cache_manager.pop_blocks_for_free(request)  # type: ignore[attr-defined]
                self._recompute(request)
                self._end_receive(request_id)
        self._detect_stuck()

    def _end_receive(self, request_id: str) -> None:
        """End a receive as vLLM does when its workers report the end of the read."""
        self._connector.connector_scheduler._stop_heartbeat(request_id)
        self.finished_recving_kv_req_ids.add(request_id)  # type: ignore[attr-defined]

    def _detect_stuck(self) -> None:
        """Find requests that cannot get blocks: nothing runs, and reads past their deadline keep blocks.

        A request that waits for prefill's answer is not stuck: at its own deadline it is refused and needs blocks.
        """
        stuck: list[str] = []
        if self._late_read_blocks and not self.running:  # type: ignore[attr-defined]
            queues = (*self.waiting, *self.skipped_waiting)  # type: ignore[attr-defined]
            stuck = [
                request.request_id
                for request in queues
                if request.status == RequestStatus.WAITING and not self._receives.awaits_answer(request.request_id)
            ]
        if not stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.perf_counter()
        elif time.perf_counter() - self._stuck_since > self._receives.deadline_s:
            self._stuck_since = None
            self._to_fail += stuck

    def _waiting_for_kv(self, request_id: str) -> Any:
        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        return request

    def _use(self, request: Any) -> None:
        self._connector.marks.finish(request.request_id, READ)
        token = take(self, request) if has_first_token(request) else None
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
        self._first_outputs.append((request.client_index, first))

    def _recompute(self, request: Any) -> None:
        logger.warning("request %s: no KV cache from prefill, computing the prompt", request.request_id)
        request.num_computed_tokens = 0
        self._connector.marks.finish(request.request_id, RECOMPUTED)
        self.failed_recving_kv_req_ids.add(request.request_id)  # type: ignore[attr-defined]

    def _fail_stuck(self, outputs: dict[int, Any]) -> None:
        """Fail the requests that cannot get blocks beside the kept ones; otherwise they would never end."""
        names, self._to_fail = self._to_fail, []
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
    """vLLM's `Scheduler` with the guard."""


class GuardAsyncScheduler(Guarded, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler` with the guard."""


class GuardScheduler:
    """The scheduler class that vLLM gets; it makes one of the two schedulers."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        chosen = GuardAsyncScheduler if asynchronous else GuardSyncScheduler
        return chosen(vllm_config, *args, **kwargs)
