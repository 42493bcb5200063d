"""The steps of the first hour: pdlab commands, each with a time limit, an estimate and advice. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdlab.core import defaults
from pdlab.core.command_lines import command_line, flag_words, how_to_fetch
from pdlab.core.commands import INSTALL_TABLES, PLAN, RUN_PLAN, RUN_VIZ
from pdlab.core.text import counted
from pdlab.steps.runner import RAN, StepVerdict

# Where it runs. A rehearsal has the deployments of the cluster, but no real wires and no weights.
RunsOn = Literal["cluster", "local", "rehearsal"]

LEVELS: dict[RunsOn, tuple[int, ...]] = {
    "cluster": (4, 8, 16, 32, 64),
    "local": (1, 2, 4, 6, 8),
    "rehearsal": (4, 16, 32),
}
REQUESTS_PER_UNIT = 10
# Expected: gpt-oss-120b on H100 (configs/sweeps/pack-vs-spread.yaml); locally the tiny model on two cores.
LAUNCH_S: dict[RunsOn, float] = {"cluster": 300.0, "local": 60.0, "rehearsal": 60.0}
TTFT_S: dict[RunsOn, float] = {"cluster": 0.5, "local": 0.3, "rehearsal": 0.5}
TPOT_S: dict[RunsOn, float] = {"cluster": 0.012, "local": 0.015, "rehearsal": 0.012}
SLOWER: dict[RunsOn, float] = {"cluster": 1.0, "local": 1.0, "rehearsal": 4.0}  # real seconds per expected second
SWEEP_START_S, LEVEL_END_S = 60.0, 12.0
FILL_S: dict[RunsOn, float] = {"cluster": 60.0, "local": 0.0, "rehearsal": 0.0}  # to fill the KV pools
LIMIT = 3.0  # a step's time limit is this times its estimate, within the next two bounds
LEAST_LIMIT_S, MOST_LIMIT_S = 300.0, 1500.0
MOST_TOTAL_S = 3600.0


@dataclass(frozen=True)
class Step:
    """One step of the first hour.

    ``command``: the command and its words. ``codes``: exit codes that are no failure, with their verdict.
    ``needs``: steps that must have run; ``any_of``: steps of which one must have run. ``serves``: the step starts a
    deployment, which the next such step replaces; a resumed hour runs it again for a step that needs it. ``summary``:
    its JSON file under the output folder. ``advice``: what to do unless it ended ok. ``always``: it also runs after
    an interruption.
    """

    name: str
    title: str
    command: tuple[str, ...]
    estimate_s: float
    advice: str
    codes: Mapping[int, StepVerdict]
    needs: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    serves: bool = False
    summary: str | None = None
    always: bool = False

    @property
    def limit_s(self) -> float:
        """The step is ended after this many seconds."""
        return limit_of(self.estimate_s)


@dataclass(frozen=True)
class FirstHourDeployment:
    """One deployment of the first hour. ``label`` is also the name of its result folder. ``settings``: those of its
    launch."""

    name: str
    label: str
    settings: Mapping[str, Any]


def _collocated(tp: int) -> Mapping[str, Any]:
    return {"mode": "collocated", "pool": {"replicas": 1, "tp": tp}}


def _disaggregated(mode: str, tp: int) -> Mapping[str, Any]:
    return {"mode": mode, "prefill": {"tp": tp}, "decode": {"tp": tp}}


_ON_GPUS = (
    FirstHourDeployment("collocated", "collocated-1xtp2", _collocated(tp=2)),
    FirstHourDeployment("pack", "pd-pack-p1xtp2-d1xtp2", _disaggregated("pd-pack", tp=2)),
    FirstHourDeployment("spread", "pd-spread-p1xtp4-d1xtp4", _disaggregated("pd-spread", tp=4)),
)
DEPLOYMENTS: dict[RunsOn, tuple[FirstHourDeployment, ...]] = {
    "cluster": _ON_GPUS,
    "rehearsal": _ON_GPUS,
    "local": (
        FirstHourDeployment("collocated", "collocated-1xtp1", _collocated(tp=1)),
        FirstHourDeployment("pack", "pd-pack-p1xtp1-d1xtp1", _disaggregated("pd-pack", tp=1)),
        FirstHourDeployment("spread", "pd-spread-p1xtp1-d1xtp1", _disaggregated("pd-spread", tp=1)),
    ),
}
DOCTOR_FIX = "each ERROR in its log has its fix on the line 'fix:'; apply it, then continue with --resume"
LAUNCH_FIX = (
    "the last lines of its log show the reason; the logs of failed replicas are in the archive; docs/setup.md has a "
    "table"
)
SWEEP_FIX = "the table in its log names the gate of every invalid level; docs/methodology.md has the gates"


def plan(out: Path, *, where: RunsOn, model: str, port: int, lengths: tuple[int, int]) -> tuple[Step, ...]:
    """All steps. ``lengths``: input and output tokens per request."""
    steps = [] if where == "rehearsal" else _before_anything_is_served(out, where, model)
    for deployed in DEPLOYMENTS[where]:
        steps += _deployment(deployed, out, where, model, port, lengths)
    return (*steps, *_afterwards(out, where, port))


def _before_anything_is_served(out: Path, where: RunsOn, model: str) -> list[Step]:
    local = where == "local"
    backends = ("UCX",) if local else ("UCX", "LIBFABRIC")
    steps: list[Step] = [
        Step(
            name="doctor",
            title="what the nodes lack",
            command=_command("doctor", here=local, backends=backends, json_file=out / "doctor.json"),
            estimate_s=60.0,
            advice=DOCTOR_FIX,
            codes={0: "ok", 3: "finding"},
            summary="doctor.json",
        ),
        Step(
            name="weights",
            title="weights on every node",
            command=_command("weights", model=model, here=local),
            estimate_s=30.0,
            advice=f"{how_to_fetch(model, here=local)}, then continue with --resume",
            codes={0: "ok"},
        ),
    ]
    return steps + [_transfer(out, strategy, where, backends, model) for strategy in ("pack", "spread")]


def _afterwards(out: Path, where: RunsOn, port: int) -> list[Step]:
    local = where == "local"
    sweeps = tuple(f"sweep {deployed.name}" for deployed in DEPLOYMENTS[where])
    folders = tuple(out / "results" / deployed.label for deployed in DEPLOYMENTS[where])
    calibration = Step(
        name="calibration",
        title=f"the measured levels as hardware that {PLAN} takes",
        command=_command("calibrate", runs=folders, start="recorded", out=out / "hardware.yaml"),
        estimate_s=120.0,
        advice=f"its log names what is missing, such as {INSTALL_TABLES}; then continue with --resume",
        codes={0: "ok", 2: "finding"},
        any_of=sweeps,
    )
    return [
        Step(
            name="shutdown",
            title="give the GPUs back" if where == "cluster" else "stop the local nodes",
            command=_command("launch", shutdown=True, port=port),
            estimate_s=20.0,
            advice=f"{command_line('launch', shutdown=True)}, then `ray status`",
            codes={0: "ok", 1: "finding"},
            always=True,
        ),
        Step(
            name="report",
            title="plots, tables and verdicts",
            command=_command("viz", exps=folders, view={"normalized": True}, plot_path=out / "report.png",
                             report=out / "report.html"),
            estimate_s=30.0,
            advice=f"{RUN_VIZ} --exps ... with the folders that have levels (a folder without any is refused)",
            codes={0: "ok"},
            any_of=sweeps,
        ),
        Step(
            name="prediction",
            title="measured beside the plan's prediction",
            command=_command("plan", compare=folders, hardware=defaults.LOCAL_HARDWARE if local else None,
                             plot=out / "prediction.png"),
            estimate_s=60.0,
            advice=f"{RUN_PLAN} --compare ... by hand; the measured results are there all the same",
            codes={0: "ok"},
            any_of=sweeps,
        ),
        *([calibration] if where == "cluster" else []),
    ]  # fmt: skip


def _transfer(out: Path, strategy: str, where: RunsOn, backends: Sequence[str], model: str) -> Step:
    local = where == "local"
    tp = 1 if local else 2 if strategy == "pack" else 4
    file = f"transfer-{strategy}.json"
    return Step(
        name=f"transfer {strategy}",
        title=f"KV transfer itself, {strategy}, {' and '.join(backends)}",
        command=_command("check-transfer", strategy=strategy, prefill_tp=tp, decode_tp=tp,
                         compare=strategy == "pack", random_blocks=strategy == "spread", backends=backends,
                         local=defaults.LOCAL_NODES if local else None, model=model, tokens=(1000,) if local else (),
                         json_file=out / file),
        estimate_s=60.0 if local else 120.0,
        advice="the verdict names cause and remedy (docs/debugging.md); CORRUPT on one backend only is its fault",
        codes={0: "ok", 3: "finding", 4: "finding", 5: "finding"},
        summary=file,
    )  # fmt: skip


def _deployment(
    deployed: FirstHourDeployment, out: Path, where: RunsOn, model: str, port: int, lengths: tuple[int, int]
) -> list[Step]:
    launch, sweep = f"launch {deployed.name}", f"sweep {deployed.name}"
    url = defaults.base_url(port)
    tokens = {"input_tokens": lengths[0], "output_tokens": lengths[1]}
    limit_s = limit_of(LAUNCH_S[where])
    rehearsed = where == "rehearsal"
    target: dict[str, Any] = {"local": defaults.LOCAL_NODES} if where == "local" else {"deployment": {"model": model}}
    steps = [
        Step(
            name=launch,
            title=f"start {deployed.label}" + (", the canaries' reference" if deployed.name == "collocated" else ""),
            command=_command("launch", **deployed.settings, **target, rehearse=rehearsed, workload=tokens, port=port,
                             detach=True, timeout_s=limit_s - 60),
            estimate_s=LAUNCH_S[where],
            advice=LAUNCH_FIX,
            codes={0: "ok"},
            needs=() if rehearsed else ("weights",),
            serves=True,
        ),
    ]  # fmt: skip
    if deployed.name == "collocated":
        steps.append(
            Step(
                name="smoke",
                title="one short level",
                command=_command("bench", smoke=True, requests=tokens, base_url=url, out=out / "results", force=True),
                estimate_s=SWEEP_START_S,
                advice=SWEEP_FIX,
                codes={0: "ok", 3: "finding"},
                needs=(launch,),
            )
        )
    steps.append(
        Step(
            name=sweep,
            title=f"{counted(len(LEVELS[where]), 'level')} of {deployed.label}",
            command=_command("bench", type="concurrency", concurrency=LEVELS[where], requests=tokens, base_url=url,
                             name=deployed.label, out=out / "results", resume=True,
                             fill_cache="no" if rehearsed else None),  # simulated KV pools do not age
            estimate_s=sweep_s(where, lengths[1]),
            advice=SWEEP_FIX,
            codes={0: "ok", 3: "finding"},
            needs=(launch,),
        )
    )  # fmt: skip
    return steps


def _command(command: str, **fields: Any) -> tuple[str, ...]:
    return command, *flag_words(command, **fields)


def sweep_s(where: RunsOn, output_tokens: int) -> float:
    """Estimated seconds of a sweep, with the time to fill the KV pools before it.

    A closed loop with N requests in flight sends 10 N requests, so a level takes ten times a request's time.
    """
    request_s = SLOWER[where] * (TTFT_S[where] + output_tokens * TPOT_S[where])
    return SWEEP_START_S + FILL_S[where] + len(LEVELS[where]) * (REQUESTS_PER_UNIT * request_s + LEVEL_END_S)


def limit_of(estimate_s: float) -> float:
    """The time limit, in seconds, of a step with this estimate."""
    return min(max(LIMIT * estimate_s, LEAST_LIMIT_S), MOST_LIMIT_S)


def total_s(steps: tuple[Step, ...]) -> float:
    """The sum of their estimates, in seconds."""
    return sum(step.estimate_s for step in steps)


def missing(step: Step, verdicts: Mapping[str, StepVerdict]) -> str | None:
    """Why the step cannot run; None if it can."""
    lacking = [name for name in step.needs if verdicts.get(name) not in RAN]
    if lacking:
        return f"it needs {', '.join(lacking)}"
    if step.any_of and not any(verdicts.get(name) in RAN for name in step.any_of):
        return f"it needs one of {', '.join(step.any_of)}"
    return None


def remaining_steps(steps: tuple[Step, ...], verdicts: Mapping[str, StepVerdict]) -> list[Step]:
    """The steps that a resumed hour runs: those that failed or never ran, and the launches that they need."""
    open_names = {step.name for step in steps if verdicts.get(step.name) not in RAN or step.always}
    needed = open_names | {need for step in steps if step.name in open_names for need in step.needs
                           if any(other.serves and other.name == need for other in steps)}  # fmt: skip
    if needed <= {step.name for step in steps if step.always}:
        return []
    return [step for step in steps if step.name in needed]
