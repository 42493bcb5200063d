"""One TP rank of prefill or decode in its own process: the steps of vLLM's NixlConnector, with codes to check them.

The same as in vLLM are the agent's configuration, the registration of whole layers, the descriptors of all blocks that
are prepared once and selected by index, the notification of the producer, and the release. Sent to Ray's actors by
value; functions import NIXL and, for GPU memory, torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from pdlab.remote.kernel_files import mapped_files
from pdlab.remote.network import RankHost, bytes_between, counters, host_facts, settled_counters
from pdlab.transfer.rank.codes import CodeBook, Inspection, check, fill_source, fill_untouched
from pdlab.transfer.rank.faults import misplace, rewrite
from pdlab.transfer.rank.layout import BlockTable, RankPair, descriptor_ids, descriptors, pairs
from pdlab.transfer.rank.memory import KvMemory
from pdlab.transfer.rank.messages import RankError, RankOptions, TransferTimes
from pdlab.transfer.rank.nixl_import import nixl_api
from pdlab.transfer.rank.raw_ucx import ExposedMemory, RawUcx
from pdlab.transfer.rank.side_channel import Registration, SideChannel, fetch_registration

NUM_THREADS = 4  # vLLM's default of `num_threads` in kv_connector_extra_config
NOTICE_S = 0.005  # between two checks for a notification, outside of any timing


class Rank:
    """A rank. Call its methods through `call`, which returns expected failures as values."""

    def __init__(self, options: RankOptions) -> None:
        self.options = options
        self.agent: Any = None
        self._channel: SideChannel | None = None
        self._peers: dict[int, str] = {}
        self._handles: list[tuple[RankPair, Any, Any, int]] = []
        self._notices: Counter[str] = Counter()
        self._registered: Any = None
        self._raw: RawUcx | None = None
        self._log_end = 0
        self._born_s = self._imported_s = self._opened_s = time.monotonic()
        self._environment()
        # The import continues while the driver starts the other ranks.
        self._importing = threading.Thread(target=self._import_early, daemon=True, name="import-nixl")
        self._importing.start()

    def call(self, method: str, *args: Any) -> tuple[str, Any]:
        """Call a method; returns ("ok", value), or (kind of an expected failure, its text)."""
        try:
            return "ok", getattr(self, method)(*args)
        except RankError as error:
            return error.kind, str(error)
        except MemoryError as error:
            return "memory", f"{self.options.name}: {error or 'out of memory'}"

    def ping(self) -> int:
        """Answer with the process number."""
        return os.getpid()

    def early_s(self) -> float:
        """Seconds of NIXL's import before the call of `open`, which the driver does not measure."""
        return min(self._imported_s, self._opened_s) - self._born_s

    def facts(self, ip: str) -> RankHost:
        """Facts of this rank's host. ``ip``: its address for other nodes."""
        return host_facts(ip)

    def open(self) -> Registration:
        """Make memory and agent; returns the registration for peers. Raises RankError (plugin, backend, memory)."""
        self._opened_s = time.monotonic()
        options = self.options
        shape = options.shape
        self.memory = KvMemory(shape, options.tp, options.num_blocks, options.vram)
        self.book = CodeBook(shape, options.num_blocks, max(options.prefill_tp, options.decode_tp), options.requests)
        blocks = np.arange(options.num_blocks)
        if options.side == "prefill":
            fill_source(self.book, self.memory.regions, options.tp, options.rank)
        else:
            fill_untouched(self.book, self.memory.regions, options.tp, options.rank, blocks)
        self.memory.push(blocks)
        api = self._api()
        config = (
            api.nixl_agent_config(num_threads=NUM_THREADS, capture_telemetry=True)
            if options.backend == "UCX"
            else api.nixl_agent_config(backends=[options.backend], capture_telemetry=True)
        )
        try:
            self.agent = api.nixl_agent(f"{options.side}-{options.rank}-{os.getpid()}", config)
        except Exception as error:  # NIXL's bindings raise classes of their own
            raise RankError(
                "backend",
                f"{options.name}: NIXL cannot start {options.backend}: {error}; the doctor checks its plugin",
            ) from error
        if options.backend not in self.agent.backends:
            plugins = ", ".join(self.agent.get_plugin_list())
            raise RankError("plugin", f"{options.name}: NIXL has no plugin {options.backend}; it has {plugins}")
        try:
            self._registered = self.agent.register_memory(
                self.agent.get_reg_descs(self.memory.spans, self.memory.kind), backends=[options.backend]
            )
            blob = self.agent.get_agent_metadata()
        except Exception as error:
            raise RankError("memory", f"{options.name}: NIXL cannot register the cache: {error}") from error
        page = shape.page_bytes(options.tp)
        return Registration(options.rank, blob, self.memory.bases, options.num_blocks, page, 0, self._software())

    def serve(self, ranks: list[Registration]) -> int:
        """Start the side channel for all ranks of this side; returns the port."""
        self._channel = SideChannel(ranks)
        return self._channel.port

    def connect(self, host: str, port: int) -> float:
        """Make a handshake with every peer of this rank; returns the seconds. Raises RankError (side-channel, software,
        peer)."""
        options, began = self.options, time.perf_counter()
        for pair in self._pairs():
            peer = pair.prefill if options.side == "decode" else pair.decode
            try:
                registered = fetch_registration(host, port, peer, min(options.timeout_s, 10.0))
            except (OSError, ValueError) as error:
                raise RankError(
                    "side-channel",
                    f"{options.name} gets no answer from the side channel at {host}:{port}: {error}; "
                    "check that the port is open between the nodes and that the address is of the right interface",
                ) from error
            if registered.software != self._software():
                raise RankError(
                    "software",
                    f"{options.name} has {self._software()}, its peer {registered.software}; vLLM refuses that",
                )
            if peer not in self._peers:
                self._peers[peer] = self._call_peer(self.agent.add_remote_agent, registered.agent)
            own_offset, peer_offset = pair.decode_offset, pair.prefill_offset
            if options.side == "prefill":
                own_offset, peer_offset = peer_offset, own_offset
            page = options.shape.page_bytes(options.tp)
            near = descriptors(self.memory.bases, options.num_blocks, page, own_offset, pair.length, 0)
            far = descriptors(
                registered.bases,
                registered.num_blocks,
                registered.page_bytes,
                peer_offset,
                pair.length,
                registered.device,
            )
            local = self._call_peer(self.agent.prep_xfer_dlist, "NIXL_INIT_AGENT", near, self.memory.kind)
            remote = self._call_peer(self.agent.prep_xfer_dlist, self._peers[peer], far, self.memory.kind)
            self._handles.append((pair, local, remote, registered.num_blocks))
        return time.perf_counter() - began

    def prepare(self, tables: Sequence[BlockTable], previous: Sequence[BlockTable]) -> float:
        """Before a transfer, untimed: prefill writes the requests' codes, decode clears the blocks of the previous one.

        Returns the host's monotonic clock, with which several ranks start together.
        """
        options = self.options
        if options.side == "prefill":
            fill_source(self.book, self.memory.regions, options.tp, options.rank, tables)
            self.memory.push(np.concatenate([table.prefill for table in tables]))
        elif previous:
            blocks = np.concatenate([table.decode for table in previous])
            fill_untouched(self.book, self.memory.regions, options.tp, options.rank, blocks)
            self.memory.push(blocks)
        return time.monotonic()

    def transfer(self, tables: Sequence[BlockTable], start_s: float = 0.0) -> TransferTimes:
        """Move the requests, all in flight together, and poll without a pause.

        ``start_s``: reading of the monotonic clock at which to start. Raises RankError (peer, timeout).
        """
        options, agent = self.options, self.agent
        operation = options.direction.upper()
        planned = []
        for table in tables:
            notice = f"{table.request}:{self._consumers()}".encode()
            for pair, local, remote, peer_blocks in self._handles:
                prefill, decode = misplace(options.fault, table.prefill, table.decode)
                near, far = (decode, prefill) if options.side == "decode" else (prefill, decode)
                ids = descriptor_ids(near, options.shape.regions, options.num_blocks)
                planned.append((table, pair, local, ids, remote, (far, peer_blocks), notice))
        far_ids = [descriptor_ids(far, options.shape.regions, peer_blocks) for *_, (far, peer_blocks), _ in planned]
        before = counters()
        while time.monotonic() < start_s:
            pass
        deadline = time.monotonic() + options.timeout_s
        begin_s = time.monotonic()
        begun: dict[int, float] = {}
        ended: dict[int, float] = {}
        flying, finished = [], []
        try:
            for (table, _, local, near_ids, remote, _, notice), there_ids in zip(planned, far_ids, strict=True):
                begun.setdefault(table.request, time.monotonic())
                handle = agent.make_prepped_xfer(operation, local, near_ids, remote, there_ids, notif_msg=notice)
                flying.append((table.request, handle, agent.transfer(handle)))
            while flying:
                still = []
                for request, handle, state in flying:
                    now = agent.check_xfer_state(handle) if state == "PROC" else state
                    if now == "DONE":
                        ended[request] = time.monotonic()
                        finished.append(handle)
                    elif now == "PROC":
                        still.append((request, handle, now))
                    else:
                        raise RankError("peer", f"{options.name}: transfer of request {request} ended as {now}")
                flying = still
                if flying and time.monotonic() > deadline:
                    late = sorted({request for request, *_ in flying})
                    raise RankError(
                        "timeout",
                        f"{options.name}: requests {late} did not end within {options.timeout_s:g} s (--timeout-s): "
                        "the peer hangs, or the wire is far slower than expected",
                    )
        except RankError:
            raise
        except Exception as error:  # exceptions of the bindings, such as nixlRemoteDisconnectError
            raise RankError("peer", f"{options.name}: lost its peer during a transfer: {error}") from error
        end_s = time.monotonic()
        traffic = bytes_between(before, settled_counters())
        telemetry = [agent.get_xfer_telemetry(handle) for handle in finished]
        for handle in finished:
            agent.release_xfer_handle(handle)
        return TransferTimes(
            begin_s,
            end_s,
            tuple(ended[table.request] - begun[table.request] for table in tables),
            sum(_seconds(handle_telemetry.postDuration) for handle_telemetry in telemetry),
            sum(handle_telemetry.totalBytes for handle_telemetry in telemetry),
            sum(len(ids) for ids in far_ids),
            sum(handle_telemetry.descCount for handle_telemetry in telemetry),
            traffic,
        )

    def await_notices(self, tables: Sequence[BlockTable]) -> float:
        """Wait for the notifications of all consumers, after which vLLM would free the blocks; returns the seconds.

        Raises RankError (timeout).
        """
        began = time.monotonic()
        expected = self._expected_notices(tables)
        while True:
            for notices in self.agent.get_new_notifs().values():
                self._notices.update(notice.decode() for notice in notices)
            if all(self._notices[notice] >= count for notice, count in expected.items()):
                break
            if time.monotonic() - began > self.options.timeout_s:
                raise RankError(
                    "timeout",
                    f"{self.options.name}: no notification of {sorted(set(expected) - set(self._notices))} "
                    f"within {self.options.timeout_s:g} s; vLLM would hold the blocks until their lease ends",
                )
            time.sleep(NOTICE_S)
        for notice in expected:
            del self._notices[notice]
        return time.monotonic() - began

    def copy_gb_per_s(self, page_bytes: int) -> float:
        """The host's own copy rate, measured in this process under the same load."""
        return self.memory.copy_gb_per_s(page_bytes)

    def raw_expose(self) -> ExposedMemory:
        """After `close`: let the peer measure UCX without NIXL on this rank's cache. Raises RankError (raw)."""
        return self._raw_ucx().expose()

    def raw_rates(self, exposed: ExposedMemory, table: BlockTable, repeats: int) -> list[float]:
        """GB/s of UCX without NIXL for one request's pages. Overwrites the cache. Raises RankError (raw)."""
        options = self.options
        near, far = (table.decode, table.prefill) if options.side == "decode" else (table.prefill, table.decode)
        raw, until_s = self._raw_ucx(), time.monotonic() + options.timeout_s
        page = options.shape.page_bytes(options.tp)
        return raw.rates(exposed, near.tolist(), far.tolist(), page, options.direction == "write", repeats, until_s)

    def raw_close(self) -> str:
        """Close raw UCX; returns its part of UCX's log."""
        if self._raw is None:
            return ""
        self._raw.close()
        self._raw = None
        return os.pread(self._log, self._log_size() - self._log_end, self._log_end).decode(errors="replace")

    def _raw_ucx(self) -> RawUcx:
        if self._raw is None:
            self._raw = RawUcx([(base, length) for base, length, *_ in self.memory.spans])
        return self._raw

    def inspect(self, tables: Sequence[BlockTable]) -> tuple[Inspection, float]:
        """Check decode's whole cache after a transfer; returns the inspection and its duration in seconds."""
        options = self.options
        began = time.perf_counter()
        self.memory.pull()
        own_pairs = [pair for pair in self._all_pairs() if pair.decode == options.rank]
        rewrite(options.fault, self.book, self.memory.regions, own_pairs, options.prefill_tp, tables[0])
        finding = check(self.book, self.memory.regions, options.tp, options.rank, own_pairs, options.prefill_tp, tables)
        return finding, time.perf_counter() - began

    def close(self) -> str:
        """Release everything in vLLM's order; returns UCX's log. UCX prints its table at the end of the agent."""
        if self.agent is not None:
            self._release()
            gc.collect()
        if self._channel is not None:
            self._channel.close()
        self._log_end = self._log_size()
        return os.pread(self._log, self._log_end, 0).decode(errors="replace")

    def _log_size(self) -> int:
        ctypes.CDLL(None).fflush(None)
        return os.fstat(self._log).st_size

    def _release(self) -> None:
        """Release the agent. In a separate function, because a local name of a handle would keep the agent alive."""
        for _, local, remote, _ in self._handles:
            self.agent.release_dlist_handle(local)
            self.agent.release_dlist_handle(remote)
        self._handles.clear()
        for name in self._peers.values():
            self.agent.remove_remote_agent(name)
        self._peers.clear()
        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
        self._registered = self.agent = None

    def libraries(self) -> tuple[str, ...]:
        """Loaded files of UCX, libfabric, NIXL and the verbs."""
        names = ("libuc", "libfabric", "libefa", "libibverbs", "libnl-", "libnixl", "libplugin", "libnuma")
        return tuple(sorted(path for path in mapped_files() if path.rsplit("/", 1)[-1].startswith(names)))

    def _environment(self) -> None:
        """Set the environment that UCX reads at its load. UCX's log goes to a file in memory."""
        self._log = os.memfd_create("ucx.log")
        os.environ.update(
            UCX_LOG_LEVEL="info",
            UCX_PROTO_INFO=self.options.proto_info,
            UCX_MODULE_LOG_LEVEL="info",
            UCX_LOG_FILE=f"/proc/self/fd/{self._log}",
        )
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does before it imports NIXL
        if self.options.ucx_tls:
            os.environ["UCX_TLS"] = self.options.ucx_tls

    def _import_early(self) -> None:
        with contextlib.suppress(ImportError):  # `open` imports it again and reports the error
            nixl_api(self.options.vram)
            self._imported_s = time.monotonic()

    def _api(self) -> Any:
        self._importing.join()
        try:
            return nixl_api(self.options.vram)
        except ImportError as error:
            raise RankError("plugin", f"{self.options.name}: NIXL cannot be loaded: {error}") from error

    def _software(self) -> dict[str, str]:
        return {"nixl": metadata.version("nixl"), "cache": self.options.shape.name}

    def _all_pairs(self) -> tuple[RankPair, ...]:
        return pairs(self.options.shape, self.options.prefill_tp, self.options.decode_tp)

    def _pairs(self) -> list[RankPair]:
        """The pairs of this rank."""
        side, rank = self.options.side, self.options.rank
        return [pair for pair in self._all_pairs() if getattr(pair, side) == rank]

    def _consumers(self) -> int:
        """Number of ranks that notify one producer at the end of a transfer, in vLLM's count."""
        options = self.options
        if options.direction == "write":
            return 1
        return max(1, options.decode_tp // options.prefill_tp)

    def _expected_notices(self, tables: Sequence[BlockTable]) -> Counter[str]:
        count = len(self._pairs())
        return Counter({f"{table.request}:{self._consumers()}": count for table in tables}) if count else Counter()

    def _call_peer(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # the bindings raise classes of their own
            raise RankError("peer", f"{self.options.name}: {error}") from error


def _seconds(value: Any) -> float:
    """Seconds of a value of NIXL's telemetry: a number in microseconds, or a timedelta."""
    return float(value.total_seconds()) if hasattr(value, "total_seconds") else float(value) / 1e6
