"""vLLM's NIXL connector with the guard, for ``kv_connector_module_path``.

The classes keep vLLM's names, because vLLM and Ray Serve LLM decide by the name in ``kv_connector``
(``NixlConnector`` or ``MultiConnector``).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from pdlab.guard.lease_queries import AnswerTable, SideChannelClient
from pdlab.guard.leases import LEASE_KEY, LeaseBook
from pdlab.guard.marks import ReceiveMarks
from pdlab.guard.metrics import GuardPromMetrics, GuardStats
from pdlab.guard.read_ends import POLL_KEY, READ_ENDS_ADDRESS, ReadEndReceiver
from pdlab.guard.receives import Admission, ReceiveBook
from pdlab.guard.vllm_names import KVConnectorRole, NixlBaseConnector, NixlPullConnector, NixlPullConnectorScheduler
from pdlab.guard.vllm_names import MultiConnector as VllmMultiConnector
from pdlab.guard.worker import RELEASED, GuardWorker, WorkerReport
from pdlab.marks.engine_marks import CACHED, CORE, REFUSED

logger = logging.getLogger("vllm.pdlab.guard")

DEADLINE_KEY = "pdlab_deadline_s"
DEADLINE_S = 10.0
RELISTEN_PAUSE_S = 0.2


class GuardConnectorScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """vLLM's scheduler side of the connector, with leases (on prefill) and receives (on decode)."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra_config = vllm_config.kv_transfer_config.get_from_extra_config
        deadline_s = float(extra_config(DEADLINE_KEY, DEADLINE_S))
        self.leases = LeaseBook(engine_id)
        self.receives = ReceiveBook(SideChannelClient(), reader=engine_id, deadline_s=deadline_s)
        self.marks = ReceiveMarks()
        self.read_ends: ReadEndReceiver | None = None
        if float(extra_config(POLL_KEY, 0.0)) > 0:
            self.read_ends = ReadEndReceiver(vllm_config.parallel_config.world_size)
        self._listener_error: BaseException | None = None

    # Decode.

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and not request.abort_immediately:
            self.receives.arrived(request.request_id, params)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            admission = self.receives.admission(request.request_id)
            if admission is Admission.WAIT:
                self.marks.awaits_answer(request.request_id)
                return None, False
            if admission is Admission.REFUSE:
                params["do_remote_prefill"] = False
                self._stop_heartbeat(request.request_id)
                self.marks.finish(request.request_id, REFUSED)
                logger.warning("request %s: KV cache from prefill refused, computing the prompt", request.request_id)
                return 0, False
        matched: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        expects = bool(params and params.get("do_remote_prefill"))  # vLLM unsets it
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not self.receives.active:
            return
        request_id = request.request_id
        if num_external_tokens > 0 and request_id in self._reqs_need_recv:
            self.receives.admitted(request_id)
            self.marks.admitted(request_id)
        else:
            self.receives.drop(request_id)  # the prompt is in decode's own cache, so there is no read
            if expects and num_external_tokens == 0:
                self.marks.finish(request_id, CACHED)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        request_id, params = request.request_id, request.kv_transfer_params
        self.marks.drop(request_id)
        if params and params.get("do_remote_prefill") and LEASE_KEY in params:
            # vLLM would notify prefill through a NIXL handshake, and a failed handshake would end the engine core.
            params["do_remote_prefill"] = False
            self._stop_heartbeat(request_id)
            self.receives.cancelled(request_id, params)
            return False, None
        self.receives.drop(request_id)
        delayed, answer = super().request_finished(request, block_ids)
        if delayed and answer and answer.get("do_remote_prefill"):
            answer[LEASE_KEY] = self.leases.pin(request_id, self._kv_lease_duration)
        return delayed, answer

    # Prefill.

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            if report.renewed:
                # vLLM renews by two thirds of a lease; a sixth is left out for the time from the worker to here.
                self.leases.renew(report.renewed, self._kv_lease_duration / 2)
            if report.expired:
                self.leases.lapse(report.expired)
        if connector_output.finished_sending:
            self.leases.end(connector_output.finished_sending)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        released = self.leases.take_released()
        if released:
            self.receives.counts["given_back"] += len(released)
            setattr(metadata, RELEASED, released)
        if self.read_ends is not None:
            setattr(metadata, READ_ENDS_ADDRESS, self.read_ends.address)
        return metadata

    # The side channel.

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata(metadata)
        if self._listener_error is not None:
            raise RuntimeError(
                f"NIXL's side channel cannot listen at {self.side_channel_host}:{self.side_channel_port}: "
                f"{self._listener_error}"
            ) from self._listener_error

    def _nixl_handshake_listener(
        self, encoded_data: Any, ready_event: threading.Event, stop_event: threading.Event, host: str, port: int
    ) -> None:
        """vLLM's listener, which also answers queries of leases and continues after an unreadable message."""
        table = AnswerTable(encoded_data, self.leases)
        while not stop_event.is_set():
            try:
                super()._nixl_handshake_listener(table, ready_event, stop_event, host, port)
                return
            except Exception as error:
                if not ready_event.is_set():
                    self._listener_error = error
                    ready_event.set()
                    return
                logger.exception("NIXL's side channel ended and begins again")
                stop_event.wait(RELISTEN_PAUSE_S)

    def shutdown(self) -> None:
        super().shutdown()
        self.receives.close()
        if self.read_ends is not None:
            self.read_ends.close()


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull connector with the guard's scheduler side and worker side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = GuardConnectorScheduler(vllm_config, self.engine_id, kv_cache_config)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = GuardWorker(vllm_config, self.engine_id, kv_cache_config)

    @property
    def guarded(self) -> NixlConnector:
        """The connector with the guard: this object."""
        return self

    @property
    def receives(self) -> ReceiveBook:
        """The receives; only on the scheduler's side."""
        receives: ReceiveBook = self.connector_scheduler.receives
        return receives

    @property
    def marks(self) -> ReceiveMarks:
        """The times of the receives' events; only on the scheduler's side."""
        marks: ReceiveMarks = self.connector_scheduler.marks
        return marks

    def report_in(self, metadata: Any) -> WorkerReport | None:
        """The guard's report in the workers' metadata of a step."""
        return metadata if isinstance(metadata, WorkerReport) else None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        assert self.connector_worker is not None
        report: WorkerReport | None = self.connector_worker.take_report()
        return report

    def get_kv_connector_stats(self) -> Any:
        if self.connector_worker is not None:
            return super().get_kv_connector_stats()
        counts, marks = self.receives.counts, self.marks.take()
        if not counts and not marks:
            return None
        stats = GuardStats()
        stats.record(counts)
        stats.data[CORE] = marks
        counts.clear()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return GuardStats(data=data) if data is not None else GuardStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> GuardPromMetrics:
        return GuardPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class MultiConnector(VllmMultiConnector):  # type: ignore[misc]
    """vLLM's connector of several connectors; one of them has the guard."""

    @property
    def guarded(self) -> NixlConnector:
        """The connector with the guard. Raises TypeError without one."""
        found = next((each for each in self._connectors if isinstance(each, NixlConnector)), None)
        if found is None:
            raise TypeError(
                f"none of {', '.join(type(each).__name__ for each in self._connectors)} is the guard's: the "
                "kv_connector_module_path of NixlConnector must be pdlab.guard.connector"
            )
        return found

    def report_in(self, metadata: Any) -> WorkerReport | None:
        """The guard's report in the workers' metadata of a step."""
        parts = getattr(metadata, "metadata", ())
        return next((part for part in parts if isinstance(part, WorkerReport)), None)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """vLLM finds the class of statistics by name, and its own connector has the same name as the guard's."""
        if data is not None and isinstance(data.get("NixlConnector"), dict):
            data = {**data, "NixlConnector": GuardStats(data=data["NixlConnector"]["data"])}
        return super().build_kv_connector_stats(data)
