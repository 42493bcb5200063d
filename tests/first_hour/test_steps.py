"""The steps themselves: within the hour, in an order that holds, and command lines that the commands accept."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from pdlab.cli import bench, calibrate, doctor, viz, weights
from pdlab.cli import plan as plan_cli
from pdlab.core.settings import parse
from pdlab.deploy.options import LaunchSettings, deployment_from
from pdlab.first_hour.steps import MOST_TOTAL_S, Step, missing, plan, remaining_steps, total_s
from pdlab.steps.runner import StepVerdict
from pdlab.transfer.options import CheckTransferSettings, plan_from

CLUSTER = plan(Path("/out"), where="cluster", model="gpt-oss-120b", port=8000, lengths=(5000, 250))
LOCAL = plan(Path("/out"), where="local", model="tiny-gptoss", port=8000, lengths=(256, 32))
REHEARSAL = plan(Path("/out"), where="rehearsal", model="gpt-oss-120b", port=8000, lengths=(2000, 100))
NAMES = ["doctor", "weights", "transfer pack", "transfer spread", "launch collocated", "smoke", "sweep collocated",
         "launch pack", "sweep pack", "launch spread", "sweep spread", "shutdown", "report", "prediction"]  # fmt: skip
ON_GPUS = [*NAMES, "calibration"]  # of their tabulated steps


@pytest.mark.parametrize("steps", [CLUSTER, LOCAL, REHEARSAL], ids=["cluster", "local", "rehearsal"])
def test_the_steps_are_within_the_hour_by_estimate(steps: tuple[Step, ...]) -> None:
    names = ON_GPUS if steps is CLUSTER else NAMES[4:] if steps is REHEARSAL else NAMES
    assert [step.name for step in steps] == names, "a rehearsal has no wires to look at"
    assert 600 < total_s(steps) <= MOST_TOTAL_S
    for step in steps:
        assert 0 < step.estimate_s < step.limit_s and step.advice and 0 in step.codes


@pytest.mark.parametrize("steps", [CLUSTER, LOCAL, REHEARSAL], ids=["cluster", "local", "rehearsal"])
def test_what_a_step_needs_comes_before_it(steps: tuple[Step, ...]) -> None:
    names: set[str] = set()
    for step in steps:
        assert {*step.needs, *step.any_of} <= names
        names.add(step.name)


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "doctor": lambda words: parse(doctor.DoctorSettings, words),
    "weights": lambda words: parse(weights.WeightsSettings, words),
    "check-transfer": lambda words: plan_from(parse(CheckTransferSettings, words)),
    "bench": bench.options,
    "viz": lambda words: parse(viz.VizSettings, words),
    "plan": lambda words: parse(plan_cli.PlanSettings, words),
    "calibrate": lambda words: parse(calibrate.CalibrateSettings, words),
}


@pytest.mark.parametrize("step", [*CLUSTER, *LOCAL, *REHEARSAL], ids=lambda step: step.name)
def test_every_command_line_is_one_that_its_command_accepts(step: Step) -> None:
    command, *words = step.command
    if command == "launch":
        args: argparse.Namespace = parse(LaunchSettings, words)
        if not args.shutdown:
            assert args.timeout_s < step.limit_s, "the launcher gives up, and takes down, before it is ended"
            label = deployment_from(args).label
            sweeps = [other for other in (*CLUSTER, *LOCAL) if step.name in other.needs and "-e" in other.command]
            assert label in {other.command[other.command.index("-e") + 1] for other in sweeps}
    else:
        PARSERS[command](words)


def ended(**changed: StepVerdict) -> dict[str, StepVerdict]:
    return {**dict.fromkeys(ON_GPUS, "ok"), **{name.replace("_", " "): verdict for name, verdict in changed.items()}}


def test_a_step_that_failed_stops_those_alone_that_need_it() -> None:
    verdicts = ended(doctor="failed", transfer_spread="timed out", launch_pack="failed", sweep_pack="skipped")
    stopped = [step.name for step in CLUSTER if missing(step, verdicts)]
    assert stopped == ["sweep pack"]
    assert missing(CLUSTER[8], verdicts) == "it needs launch pack"


def test_a_finding_stops_nothing_and_no_sweep_stops_the_report() -> None:
    assert not [step for step in CLUSTER if missing(step, ended(doctor="finding", transfer_pack="finding"))]
    none = ended(sweep_collocated="failed", sweep_pack="failed", sweep_spread="timed out")
    assert [step.name for step in CLUSTER if missing(step, none)] == ["report", "prediction", "calibration"]
    one = {**none, "sweep pack": "finding"}
    assert not [step for step in CLUSTER if missing(step, one)]  # type: ignore[arg-type]


def test_a_resumed_hour_launches_again_what_a_sweep_needs() -> None:
    assert [step.name for step in remaining_steps(CLUSTER, ended(sweep_pack="failed"))] == [
        "launch pack",
        "sweep pack",
        "shutdown",
    ]
    assert [step.name for step in remaining_steps(CLUSTER, ended(weights="failed"))] == ["weights", "shutdown"]
    assert remaining_steps(CLUSTER, ended()) == []
    assert [step.name for step in remaining_steps(CLUSTER, {})] == ON_GPUS
