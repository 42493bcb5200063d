"""The KV-transfer check on a Ray cluster: ranks run as actors on chosen nodes and are ended afterwards.

The nodes need NIXL and numpy, but not pdlab, because the code of the ranks is sent by value.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdlab.cluster.connection import Cluster, pinned_to
from pdlab.cluster.local_nodes import LocalNodes, become_driver, running, start, stop
from pdlab.core.errors import TransferError, first_line
from pdlab.core.nodes import NODE_ID_LABEL, ClusterView
from pdlab.transfer.check import BackendResult, probe_plan, run_backend, wire_unreported, with_wire_of
from pdlab.transfer.plan import TransferPlan
from pdlab.transfer.rank.actor import RankActor, end_ranks
from pdlab.transfer.rank.messages import RankOptions

PLACE_TIMEOUT_S = 60.0
JOIN_WAIT_S = 10.0
REAP_TIMEOUT_S = 10.0
STOPS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class BackendOutcome:
    """One backend's result, or the error that prevented it."""

    backend: str
    result: BackendResult | None
    error: TransferError | None = None

    @property
    def code(self) -> int:
        if self.result is not None:
            return self.result.verdict.code
        assert self.error is not None
        return self.error.exit_code


@dataclass(frozen=True)
class TransferNodes:
    """The nodes of both sides, by id in the view."""

    prefill: str
    decode: str


def choose_nodes(view: ClusterView, plan: TransferPlan) -> TransferNodes:
    """Nodes for the plan's strategy, independent of Ray's order. A spread prefers nodes of different machines.

    Raises TransferError (placement) with the free slots of the cluster if no nodes fit.
    """
    kind = "GPU" if view.device == "gpu" else "CPU"
    nodes = sorted(view.engine_nodes, key=lambda node: (not node.head, node.id))
    prefill, decode = plan.prefill_tp, plan.decode_tp
    if plan.strategy == "pack":
        requirement = f"one node with {prefill + decode} free {kind}s"
        placements = [TransferNodes(node.id, node.id) for node in nodes if len(node.slots) >= prefill + decode]
    else:
        requirement = f"two nodes, one with {prefill} and one with {decode} free {kind}s"
        fitting = [
            (a.machine == b.machine, TransferNodes(a.id, b.id))
            for a in nodes
            for b in nodes
            if a is not b and len(a.slots) >= prefill and len(b.slots) >= decode
        ]
        placements = [places for _, places in sorted(fitting, key=lambda pair: pair[0])]
    if not placements:
        free_slots = (
            "; ".join(f"{_short(node.id)} {len(node.slots)} free of {node.total_slots}" for node in nodes) or "no node"
        )
        raise TransferError(
            "placement", f"--strategy {plan.strategy} needs {requirement}, and the cluster has ({kind}s): {free_slots}"
        )
    return placements[0]


def _short(node_id: str) -> str:
    return node_id if len(node_id) < 20 else node_id[:8]


@contextlib.contextmanager
def local_cluster(count: int) -> Iterator[LocalNodes]:
    """Ray nodes of this machine for a block; running nodes are used and stay up."""
    already_running = running()
    nodes = already_running or start(count)
    try:
        yield nodes
    finally:
        if already_running is None:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
            stop(nodes)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Callable[[], None]]:
    """Let SIGTERM and a closed terminal raise KeyboardInterrupt in a block, so that everything is cleaned up.

    Yields the function that installs the handlers. Call it again after the connection to Ray, which installs its own.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def install() -> None:
        for number in STOPS:
            signal.signal(number, interrupt)

    before = {number: signal.getsignal(number) for number in STOPS}
    install()
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(
    plan: TransferPlan, local: int | None, print_line: Callable[[str], None] = lambda _: None, command_s: float = 0.0
) -> list[BackendOutcome]:
    """Run every backend of the plan in turn, on ``local`` Ray nodes of this machine or on the running Ray (None).

    ``command_s``: earlier start-up time of the command, added to the first backend's ``startup_s``. A backend that
    cannot run is an outcome. Raises TransferError (placement) and ClusterError.
    """
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        install = stack.enter_context(stopped_by_signals())
        nodes = stack.enter_context(local_cluster(local)) if local else None
        if nodes is not None:
            become_driver(nodes)
        cluster = stack.enter_context(Cluster(nodes, otherwise=", or check this machine with --local"))
        install()
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        view, places = _seats(cluster, plan, wait_s=0.0 if local else JOIN_WAIT_S)
        outcomes = []
        for backend in plan.backends:
            options = plan.ranks(backend, vram=view.device == "gpu")
            try:
                with RayRanks(options, view, places) as ranks:
                    ray_s = time.monotonic() - began
                    result = run_backend(plan, options, ranks, print_line)
                if wire_unreported(result):
                    proto_options = [replace(rank_options, proto_info="y") for rank_options in options]
                    with RayRanks(proto_options, view, places) as ranks:
                        probe = run_backend(probe_plan(plan), proto_options, ranks)
                    result = with_wire_of(result, probe)
                result = replace(result, ray_s=ray_s, startup_s=result.startup_s + command_s)
                outcomes.append(BackendOutcome(backend, result))
            except TransferError as error:
                outcomes.append(BackendOutcome(backend, None, error))
            began, command_s = time.monotonic(), 0.0
        return outcomes


def _seats(cluster: Cluster, plan: TransferPlan, wait_s: float) -> tuple[ClusterView, TransferNodes]:
    """The view and the nodes for the plan; waits up to ``wait_s`` for nodes that are still joining."""
    deadline = time.monotonic() + wait_s
    while True:
        view = cluster.view()
        try:
            return view, choose_nodes(view, plan)
        except TransferError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


class RayRanks:
    """The ranks as Ray actors, each on its node; a context manager that ends them."""

    def __init__(self, options: Sequence[RankOptions], view: ClusterView, places: TransferNodes) -> None:
        self.options = list(options)
        self.view, self.places = view, places
        self.actors: list[Any] = []
        self.seats: list[tuple[str, str, int]] = []

    def __enter__(self) -> RayRanks:
        import ray

        for package in ("pdlab.remote", "pdlab.transfer.rank"):  # and all modules in them
            ray.cloudpickle.register_pickle_by_value(importlib.import_module(package))
        actor = ray.remote(RankActor)
        gpus = self.view.device == "gpu"
        try:
            for options in self.options:
                pinned = pinned_to(self._node_of(options))
                need: Mapping[str, Any] = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
                env = {"env_vars": {"NIXL_LOG_LEVEL": os.environ.get("NIXL_LOG_LEVEL", "WARN")}}
                self.actors.append(actor.options(scheduling_strategy=pinned, runtime_env=env, **need).remote(options))
            self._settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _node_of(self, options: RankOptions) -> str:
        place = self.places.prefill if options.side == "prefill" else self.places.decode
        return self.view.node(place).labels[NODE_ID_LABEL]

    def _settle(self) -> None:
        """Wait until every actor runs on its node. Raises TransferError (placement)."""
        import ray

        pending = [actor.where.remote() for actor in self.actors]
        ray.wait(pending, num_returns=len(pending), timeout=PLACE_TIMEOUT_S)
        for options, reference in zip(self.options, pending, strict=True):
            try:
                seat = ray.get(reference, timeout=0)
            except ray.exceptions.GetTimeoutError as error:
                raise TransferError(
                    "placement", f"{options.name} did not start on its node within {PLACE_TIMEOUT_S:g} s: "
                    "do other actors hold its resources?",
                ) from error  # fmt: skip
            except ray.exceptions.RayError as error:
                raise TransferError("placement", f"{options.name} could not start: {first_line(error)}") from error
            if seat[0] != self._node_of(options):
                raise TransferError("placement", f"{options.name} runs on node {seat[0]} instead of the planned one")
            self.seats.append(seat)

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self.actors:
            with contextlib.suppress(Exception):  # already dead
                ray.kill(actor, no_restart=True)
        self._reap()

    def _reap(self) -> None:
        """End the processes of the actors that survive `ray.kill`, as a hanging process does."""
        import ray

        by_node: dict[str, list[int]] = {}
        for node, _, pid in self.seats:
            by_node.setdefault(node, []).append(pid)
        task = ray.remote(num_cpus=0)(end_ranks)
        pending = [task.options(scheduling_strategy=pinned_to(node)).remote(pids) for node, pids in by_node.items()]
        if pending:
            with contextlib.suppress(Exception):  # a node that died has no process left
                ray.get(pending, timeout=REAP_TIMEOUT_S)

    def call(self, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """See `check.Ranks`."""
        import ray

        pending = [self.actors[rank].call.remote(method, *words) for rank, words in zip(ranks, args, strict=True)]
        ray.wait(pending, num_returns=len(pending), timeout=timeout_s)
        answers = []
        for rank, reference in zip(ranks, pending, strict=True):
            name = self.options[rank].name
            try:
                answers.append(ray.get(reference, timeout=0))
            except ray.exceptions.GetTimeoutError:
                answers.append(("timeout", f"{name} does not answer within {timeout_s:g} s"))
            except ray.exceptions.RayTaskError as error:
                raise TransferError("bug", f"{name}: {first_line(error.cause or error)}") from error
            except ray.exceptions.RayError as error:
                answers.append(("peer", f"{name} died: {first_line(error)}"))
        return answers

    def ips(self) -> list[str]:
        """See `check.Ranks`."""
        return [ip for _, ip, _ in self.seats]
