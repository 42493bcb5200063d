"""Fault plans (files of configs/faults/) and the seeded schedule of their faults. Pure."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le
from pydantic import Field, field_validator, model_validator

from pdlab.core import defaults
from pdlab.core.errors import UsageError
from pdlab.core.files import CONFIGS
from pdlab.core.schema import Frozen, load_yaml
from pdlab.core.settings import Noun, Seed, Settings, setting
from pdlab.core.text import choices, counted
from pdlab.faults.kinds import KINDS, DeploymentFeatures, FaultKind, kind_of, why_not

ALL = "all"
MOST_MORE = 200
WHAT, TO = "what is done", "to what"  # titles of groups of flags
FOLDER = CONFIGS / "faults"


class ChaosOptions(Settings):
    """The deployment that gets the faults."""

    base_url: str = setting(defaults.BASE_URL, "server of the deployment", TO, value="URL")
    not_mine: bool = setting(False, "allow a deployment that no launcher of this machine has started", TO)


class FaultPlan(Frozen):
    """Faults under a closed loop of requests.

    ``faults``: kinds in this order, or ``[all]``: every kind that the deployment can have. ``rounds``: repeats of the
    list. ``duration_s``: length of a run with a seeded order, in place of ``rounds``. The first fault is due ``warm_s``
    after the start of the load, each other one ``every_s`` after the one before. Each one is delayed by a seeded part
    of ``spread`` x ``every_s``. With ``recover_s`` a fault waits for the recovery from the one before, at most this
    long. ``hold_s``: how long something stays stopped, slow or down. ``lease_s``: lease of KV blocks, as in the
    engines. ``limit_s``: a longer request is a hang. ``answers``: this many right answers in a row are a recovery.
    ``leavers``: requests whose client leaves, per fault. ``more``: requests that reuse the memory of expired blocks
    (None: as many as fill prefill's KV pool once, at most MOST_MORE).
    """

    about: str = ""
    faults: tuple[str, ...] = Field(min_length=1)
    rounds: int = Field(default=1, ge=1, le=1000)
    seed: Seed = setting(0, "seed of the times, order and targets of the faults", WHAT)
    duration_s: Annotated[float, Ge(10), Le(86_400), Noun("a number of seconds")] | None = setting(
        None, "inject faults for S seconds", WHAT, value="S"
    )
    concurrency: Annotated[int, Ge(1), Le(256)] = setting(4, "requests in flight", WHAT)
    warm_s: float = Field(default=5.0, ge=0, le=3600)
    every_s: float = Field(default=20.0, ge=1, le=3600)
    spread: float = Field(default=0.25, ge=0, lt=1)
    recover_s: float = Field(default=0.0, ge=0, le=3600)
    hold_s: float = Field(default=5.0, gt=0, le=600)
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    limit_s: float = Field(default=60.0, gt=0, le=3600)
    answers: int = Field(default=5, ge=1, le=1000)
    max_tokens: int = Field(default=16, ge=1, le=4096)
    prompt_tokens: tuple[int, ...] = Field(default=(40, 160, 320, 640), min_length=1)
    prompts: int = Field(default=12, ge=1, le=1000)
    leavers: int = Field(default=4, ge=1, le=256)
    more: int | None = Field(default=None, ge=1, le=1000)
    link_mbit: float = Field(default=2.0, ge=1, le=100_000)
    drop_share: float = Field(default=0.2, gt=0, lt=1)

    def slowed(self, slow_down: float) -> FaultPlan:
        """The plan for simulated engines that are ``slow_down`` times slower: longer leases and limits."""
        return self.model_copy(update={"lease_s": slow_down * self.lease_s, "limit_s": slow_down * self.limit_s})

    @field_validator("faults")
    @classmethod
    def _known(cls, faults: tuple[str, ...]) -> tuple[str, ...]:
        for name in faults:
            if name not in KINDS and name != ALL:
                raise ValueError(f"{name!r} is not a kind of fault; {choices(name, [*KINDS, ALL])}")
        if ALL in faults and len(faults) > 1:
            raise ValueError("all cannot be combined with other kinds: it is every kind that the deployment can have")
        return faults

    @field_validator("prompt_tokens")
    @classmethod
    def _lengths(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        for length in lengths:
            if not 1 <= length <= 100_000:
                raise ValueError(f"{counted(length, 'token')}: a prompt has from 1 to 100000")
        return lengths

    @model_validator(mode="after")
    def _ends(self) -> FaultPlan:
        if self.duration_s is not None and self.rounds != 1:
            raise ValueError("rounds and duration_s exclude each other: leave one out")
        if self.duration_s is not None and self.duration_s <= self.warm_s:
            raise ValueError(f"duration_s {self.duration_s:g} must be above warm_s {self.warm_s:g}")
        if self.limit_s <= self.hold_s:
            raise ValueError(f"limit_s {self.limit_s:g} must be above hold_s {self.hold_s:g}: else a stop is a hang")
        return self

    def wait_s(self, wait: str | float) -> float:
        """Seconds of an act's ``wait``."""
        return {"hold": self.hold_s, "lease": self.lease_s}[wait] if isinstance(wait, str) else wait


def load_plan(word: str) -> FaultPlan:
    """Load a plan from a file, or by its name in configs/faults/. Raises UsageError."""
    path = Path(word)
    if path.suffix.lower() not in (".yaml", ".yml") and not path.exists():
        known = sorted(each.stem for each in FOLDER.glob("*.yaml"))
        if word not in known:
            raise UsageError(f"{word!r} is neither a file nor a plan of configs/faults/; {choices(word, known)}")
        path = FOLDER / f"{word}.yaml"
    return load_yaml(path, FaultPlan)


class DueFault(NamedTuple):
    """One scheduled fault. ``at_s``: seconds after the start of the load. ``draw``: from 0 to 1, selects a replica."""

    number: int
    kind: FaultKind
    at_s: float
    draw: float


class FaultSchedule(NamedTuple):
    """The scheduled faults. ``impossible``: kind of the plan that the deployment cannot have -> reason."""

    due: tuple[DueFault, ...]
    impossible: dict[str, str]


def schedule(plan: FaultPlan, possible: DeploymentFeatures) -> FaultSchedule:
    """Schedule the faults of a plan. The same plan, seed and deployment give the same schedule."""
    names = list(KINDS) if plan.faults == (ALL,) else list(plan.faults)
    impossible = {name: why for name in names if (why := why_not(kind_of(name), possible)) is not None}
    left = [kind_of(name) for name in names if name not in impossible]
    rng = random.Random(f"faults {plan.seed}")
    due: list[DueFault] = []
    order: list[FaultKind] = []
    while left:
        if not order:
            order = list(left)
            if plan.duration_s is not None:
                rng.shuffle(order)
            elif len(due) >= plan.rounds * len(left):
                break
        at_s = plan.warm_s + plan.every_s * (len(due) + plan.spread * rng.random())
        if plan.duration_s is not None and at_s >= plan.duration_s:
            break
        due.append(DueFault(len(due) + 1, order.pop(0), round(at_s, 3), rng.random()))
    return FaultSchedule(tuple(due), impossible)


def describe(plan: FaultPlan, made: FaultSchedule, subject: str, replicas: dict[str, int]) -> str:
    """The schedule as text."""
    pools = ", ".join(f"{count} {role}" for role, count in replicas.items())
    lines = [
        f"{subject}: {pools}",
        f"load: {counted(plan.concurrency, 'request')} at a time, {counted(plan.prompts, 'prompt')} of "
        f"{', '.join(map(str, plan.prompt_tokens))} tokens, {counted(plan.max_tokens, 'token')} greedy, a hang is "
        f"{plan.limit_s:g} s; seed {plan.seed}",
    ]
    waits = f", or after the recovery (at most {plan.recover_s:g} s later)" if plan.recover_s else ""
    lines.append(f"{counted(len(made.due), 'fault')}, each at its time{waits}:")
    for due in made.due:
        lines.append(f"  {due.at_s:8.1f} s  {due.kind.name}: {act_text(due.kind, plan)}")
    if made.impossible:
        lines.append("not possible here:")
        lines += [f"  {name}: {why}" for name, why in made.impossible.items()]
    return "\n".join(lines)


def act_text(kind: FaultKind, plan: FaultPlan) -> str:
    """The acts of a kind in words."""
    words = []
    for act in kind.acts:
        target = act.target.text if act.target else ""
        words.append(
            {
                "kill": f"kill -9 {target}",
                "stop": f"SIGSTOP {target}",
                "continue": f"SIGCONT {target}",
                "restart": "start that node again",
                "wait": f"wait {plan.wait_s(act.wait):g} s",
                "await_prefill": "wait until prefill has answered",
                "link_down": "ip link set down",
                "link_up": "ip link set up",
                "link_slow": f"tc tbf {plan.link_mbit:g} Mbit/s",
                "link_restore": "restore the link's rate",
                "drop": f"drop {100 * plan.drop_share:g} % of frames",
                "drop_end": "drop none",
                "send_leaving": f"send {counted(plan.leavers, 'request')}",
                "await_chunks": "wait until they stream",
                "leave": "their clients leave",
                "send_more": f"send {f'{plan.more} ' if plan.more else ''}more requests, which reuse the memory",
            }[act.verb]
        )
    return ", ".join(words)
