#!/usr/bin/env python3
"""Examine every node for causes of slow or wrong KV transfers; see --help."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdlab.core.commands import RUN_DOCTOR
from pdlab.core.errors import CANNOT_RUN, ClusterError
from pdlab.core.exit_code import NOT_CLEAN, command
from pdlab.core.files import write_output
from pdlab.core.output_paths import check_writable
from pdlab.core.settings import Backends, Settings, not_given, setting

if TYPE_CHECKING:
    from pdlab.transfer.doctor.findings import Concern

RANKS_PER_NODE = 8  # number of engines per role whose side-channel ports are checked

EPILOG = f"""\
examples:
  {RUN_DOCTOR}                 every node of the Ray cluster of this machine; without one, this machine
  {RUN_DOCTOR} --here          only this machine, without Ray
  {RUN_DOCTOR} --backends UCX,LIBFABRIC --json doctor.json
  {RUN_DOCTOR} --placement pack --model gpt-oss-120b       the rules for a pack, and the model's files

exit code: 0 no errors, 3 errors found, 5 cannot run, 2 bad command line
What each finding means, and which tool to use next: docs/debugging.md
"""


EXAMINED, OUTPUT = "what to examine", "output"


class DoctorSettings(Settings):
    """Which nodes are examined, for which deployments, and where the facts go."""

    COMMAND = "doctor"
    ABOUT = "What KV transfers depend on, on every node: versions, libraries, devices, limits, settings."
    EXAMPLES = EPILOG

    here: bool = setting(False, "examine only this machine, without Ray", EXAMINED)
    placement: Literal["pack", "spread"] | None = setting(
        None,
        "apply only the rules for PD deployments with this placement",
        EXAMINED,
        otherwise="all rules; on local nodes only those for local nodes",
    )
    model: str | None = setting(
        None, "also check that this model's files are present and complete", EXAMINED, value="NAME|PATH"
    )
    backends: Backends = setting(("UCX",), "NIXL backends to create as a test", EXAMINED, value="NAME[,NAME]")
    quick: bool = setting(False, "read files and settings only: start no process that loads NIXL", EXAMINED)
    json_file: Path | None = setting(None, "write all facts and findings to this file", OUTPUT, "--json", value="FILE")

    def check(self) -> None:
        if self.quick:
            not_given(self, ("backends",), "--quick, which creates none")


@command(DoctorSettings, {ClusterError: CANNOT_RUN})
def main(settings: DoctorSettings) -> int:
    """Examine the nodes."""
    from pdlab.core.catalog import found_model
    from pdlab.transfer.doctor import diagnosis
    from pdlab.transfer.doctor.settings_rules import QueryClock

    if settings.json_file is not None:
        check_writable(settings.json_file, "--json")
    before_s = time.time()
    model = found_model(settings.model)[1] if settings.model else None  # also None for a model that pdlab builds
    facts, local = _this_machine(settings, model) if settings.here else _nodes(settings, model)
    # A node reads its clock before it loads NIXL, so a slow load does not count.
    concerns = diagnosis.concerns_of(facts, settings.placement) if settings.placement else local
    findings = diagnosis.diagnose(facts, query_clock=QueryClock(before_s, time.time()), concerns=concerns)
    print(diagnosis.render(facts, findings))
    if settings.json_file is not None:
        text = json.dumps(diagnosis.as_json(facts, findings), indent=1)
        write_output(settings.json_file, text, "--json")
    return NOT_CLEAN if any(finding.severity == "error" for finding in findings) else 0


Examined = tuple[dict[str, dict[str, Any]], tuple["Concern", ...] | None]


def _this_machine(settings: DoctorSettings, model: str | None) -> Examined:
    from pdlab.remote import node as node_probe
    from pdlab.transfer.doctor.findings import HERE

    ports = _ports()
    if settings.quick:
        return {HERE: node_probe.quick(ports, None, model)}, None
    return {HERE: node_probe.thorough(ports, None, settings.backends, model)}, None


def _ports() -> tuple[int, ...]:
    from pdlab.core.deployment import Pool
    from pdlab.transfer.doctor.settings_rules import side_channel_ports

    replicas, ranks = Pool(replicas=RANKS_PER_NODE), Pool(dp=RANKS_PER_NODE)
    one, other = (side_channel_ports({"prefill": pool, "decode": pool}) for pool in (replicas, ranks))
    return tuple(sorted({*one, *other}))


def _nodes(settings: DoctorSettings, model: str | None) -> Examined:
    """The facts of every node, and the wires of deployments on local nodes (None: the nodes are not local)."""
    from pdlab.cluster import local_nodes
    from pdlab.cluster.connection import Cluster, prepare
    from pdlab.remote import node as node_probe

    local = local_nodes.running()
    otherwise = ", or examine only this machine with --here"
    if local:
        prepare(local, {}).cancel()
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(local, otherwise=otherwise))
        except ClusterError:
            if local or "RAY_ADDRESS" in os.environ:
                raise  # there should be a cluster
            print("no Ray cluster on this machine: only this machine is examined (as with --here)", file=sys.stderr)
            return _this_machine(settings, model)
        wires: tuple[Concern, ...] | None = None
        if local and not local.made_up:
            wires = ("tcp", "shared memory") if local.two_hosts else ("shared memory",)
        if settings.quick:
            return cluster.call_every_node(node_probe.quick, _ports(), None, model, otherwise=otherwise), wires
        arguments = (_ports(), None, settings.backends, model)
        return cluster.call_every_node(node_probe.thorough, *arguments, otherwise=otherwise), wires
