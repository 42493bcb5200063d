"""The guard in vLLM's workers.

Decode's workers report a failed read by request and not by block, and only after all reads of the request have ended.
They renew a connection with a failed read. Prefill's workers report expired leases and free released ones.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from pdlab.guard.marks import ReadMarks
from pdlab.guard.metrics import GuardStats
from pdlab.guard.peers import PeerBook
from pdlab.guard.read_ends import POLL_KEY, READ_ENDS_ADDRESS, Address, register_worker, report_ends
from pdlab.guard.vllm_names import KVConnectorWorkerMetadata, NixlPullConnectorWorker
from pdlab.marks.engine_marks import WIRE

logger = logging.getLogger("vllm.pdlab.guard")

# Field of vLLM's connector metadata: requests whose blocks decode does not want.
RELEASED = "pdlab_released"
# vLLM's type of a failure to send a notification for a prompt without a read (decode has the prompt in its cache).
NOTIFICATION_FAILED = "notification_failed"


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' report of a step: requests with a failed read, expired leases, renewed leases."""

    failed: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)
    renewed: set[str] = field(default_factory=set)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        return WorkerReport(self.failed | other.failed, self.expired | other.expired, self.renewed | other.renewed)


class GuardWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's pull worker. A handshake may fail in its own thread; everything else runs in the worker's thread."""

    _reqs_to_send: dict[str, float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._guard_failed: set[str] = set()  # until the request is reported as done
        self._guard_report = WorkerReport()
        self._guard_notified: set[str] = set()
        self._guard_freed: set[str] = set()
        self._guard_peers = PeerBook()
        self._guard_unreported: tuple[set[str], set[str]] = (set(), set())  # (sent, read) since the last step's report
        self._guard_polled_s = 0.0
        self._guard_read_ends_address: Address | None = None
        super().__init__(*args, **kwargs)
        self.xfer_stats = GuardStats()
        vllm_config = args[0] if args else kwargs["vllm_config"]
        self.poll_s = float(vllm_config.kv_transfer_config.get_from_extra_config(POLL_KEY, 0.0))
        self._mark_reads()

    def _mark_reads(self) -> None:
        self._guard_marks = ReadMarks(self.tp_rank)
        get_telemetry = self.nixl_wrapper.get_xfer_telemetry

        def get_and_mark(handle: Any) -> Any:
            telemetry = get_telemetry(handle)
            self._guard_marks.ended(handle, telemetry)
            return telemetry

        # vLLM calls this once for each ended read and does not keep the request with the result.
        self.nixl_wrapper.get_xfer_telemetry = get_and_mark

    def take_report(self) -> WorkerReport | None:
        """The report since the last call; None if it is empty."""
        report = self._guard_report
        if not (report.failed or report.expired or report.renewed):
            return None
        self._guard_report = WorkerReport()
        return report

    # Decode: reads.

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        with self._handshake_lock:
            if meta.remote.engine_id not in self._remote_agents:  # forgotten after this request's handshake
                self._background_nixl_handshake(req_id, meta.remote.engine_id, meta)
                return
        if _has_blocks(meta):
            self._guard_marks.posted(req_id)
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception as error:  # wrong block ids would end the engine core
            logger.exception("the read for request %s could not be set up", req_id)
            self._log_failure(failure_type="read_setup_failed", req_id=req_id, error=error)
            self._handle_failed_transfer(req_id, None)
        if not _has_blocks(meta):
            self._recving_metadata.pop(req_id, None)  # vLLM removes it only at the end of a read

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        """Report a failed request only after all its reads have ended.

        vLLM ends a request at its first failed read while other reads still write into its blocks. With a hybrid KV
        cache vLLM does not report the failure.
        """
        self.xfer_stats.record_failed_transfer()
        if handle is not None:
            try:
                self.nixl_wrapper.release_xfer_handle(handle)
            except Exception:
                logger.exception("a failed transfer of request %s could not be released", req_id)
        meta = self._recving_metadata.get(req_id)
        if meta is not None:
            self._note_failure(meta.remote.engine_id)
        if meta is None or not _has_blocks(meta):
            self._recving_metadata.pop(req_id, None)  # only a notification failed; prefill's lease will expire
            return
        self._guard_failed.add(req_id)
        if req_id not in self._recving_transfers:
            self._failed_recv_reqs.put(req_id)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        peers = self._guard_peers
        engines = {name: self._recving_metadata[name].remote.engine_id for name in transfers} if peers.active else {}
        self._guard_marks.polled(transfers)
        done: set[str] = super()._pop_done_transfers(transfers)
        for req_id in done:
            if (read := self._guard_marks.finish(req_id)) is not None:
                self.xfer_stats.data[WIRE].append(read)
        for req_id in (done - self._guard_failed) & engines.keys():
            peers.read_ended_well(engines[req_id])
        if self._guard_failed:
            for req_id in done & self._guard_failed:
                self._failed_recv_reqs.put(req_id)  # so that vLLM does not post-process missing blocks
        return done

    # Decode: connections.

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: Any = None,
        **extra_context: Any,
    ) -> None:
        super()._log_failure(failure_type, req_id, msg, error, meta, **extra_context)
        if failure_type == NOTIFICATION_FAILED and "dst_engine_id" in extra_context:
            self._note_failure(extra_context["dst_engine_id"])

    def _note_failure(self, peer: str) -> None:
        with self._handshake_lock:
            if peer in self._remote_agents:
                self._guard_peers.read_failed(peer)
            else:
                self._guard_peers.handshake_failed(peer)

    def _forget_peers(self) -> None:
        """Drop the state of NIXL and vLLM for prefill engines whose connection must be renewed."""
        peers = self._guard_peers
        readers = [name for name in self._recving_transfers if name in self._recving_metadata]
        busy = {self._recving_metadata[name].remote.engine_id for name in readers}
        with self._handshake_lock:
            for peer in peers.to_forget(busy, self._remote_agents):
                logger.warning("prefill engine %s: a read failed, its connection is dropped", peer)
                try:
                    self._cleanup_remote_engine(peer, log_eviction=False)
                except Exception:
                    logger.exception("not all of prefill engine %s could be forgotten", peer)
                    self._remote_agents.pop(peer, None)
        if peers.counts:
            self.xfer_stats.record(peers.counts)
            peers.counts.clear()

    # Prefill: leases.

    def start_load_kv(self, metadata: Any) -> None:
        if (address := getattr(metadata, READ_ENDS_ADDRESS, None)) is not None:
            self._guard_read_ends_address = address
            register_worker(self)
        if self._guard_peers.active:
            self._forget_peers()
        super().start_load_kv(metadata)
        for req_id in getattr(metadata, RELEASED, ()):
            if req_id in self._reqs_to_send:
                del self._reqs_to_send[req_id]
                self._reqs_to_process.discard(req_id)
                self.consumer_notification_counts_by_req.pop(req_id, None)
                self.expected_consumer_notifications_by_req.pop(req_id, None)
                self._guard_freed.add(req_id)

    def _get_new_notifs(self) -> set[str]:
        notified: set[str] = super()._get_new_notifs()
        self._guard_notified = set(notified)  # a copy, because vLLM adds expired requests to the other set
        return notified

    def _handle_heartbeat(self, payload: str) -> None:
        super()._handle_heartbeat(payload)
        renewed = {req_id for req_id in payload.split(",") if req_id in self._reqs_to_send}
        if renewed:
            self._guard_report.renewed |= renewed
            # Keep the order of expiry: vLLM frees from the front and stops at the first lease that has not expired.
            self._reqs_to_send = dict(sorted(self._reqs_to_send.items(), key=lambda item: item[1]))

    # Between steps.

    def poll_if_due(self) -> bool:
        """Call `poll` if the last call is ``poll_s`` ago. Returns whether reads are in progress."""
        if self._recving_transfers and time.monotonic() - self._guard_polled_s >= self.poll_s:
            self.poll()
        return bool(self._recving_transfers)

    def poll(self) -> None:
        """Handle the ends of reads and leases as a step does, and report good reads to the engine core at once.

        The next step reports all ends. Call it only in the thread of the steps: NIXL and vLLM's worker need that.
        """
        if not self._recving_transfers or self._guard_read_ends_address is None:
            return
        sending, receiving = self._finished_transfers()
        self._guard_unreported[0].update(sending)
        self._guard_unreported[1].update(receiving)
        self._guard_polled_s = time.monotonic()
        if good := receiving - self._guard_report.failed:
            report_ends(self._guard_read_ends_address, os.getpid(), good)

    def get_finished(self) -> tuple[set[str], set[str]]:
        sending, receiving = self._finished_transfers()
        before, self._guard_unreported = self._guard_unreported, (set(), set())
        return sending | before[0], receiving | before[1]

    def _finished_transfers(self) -> tuple[set[str], set[str]]:
        sending, receiving = super().get_finished()
        if sending:
            self._guard_report.expired |= sending - self._guard_notified
        if self._guard_freed:
            sending |= self._guard_freed
            self._guard_freed = set()
        for req_id in receiving:
            self._guard_marks.drop(req_id)  # a read that could not be set up
        if receiving and self._guard_failed:
            failed = receiving & self._guard_failed
            self._guard_report.failed |= failed
            self._guard_failed -= failed
        return sending, receiving


def _has_blocks(meta: Any) -> bool:
    """Whether there are blocks to read. Without any, prefill gets only a notification."""
    return any(len(group) > 0 for group in meta.local_block_ids)
