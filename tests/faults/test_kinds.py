"""Kinds of faults: what each leaves behind, what it needs, what it spares."""

from __future__ import annotations

import pytest

from pdlab.core.errors import UsageError
from pdlab.faults.kinds import KINDS, DeploymentFeatures, FaultTarget, kind_of, why_not

PAIR = DeploymentFeatures(
    parts=frozenset(
        {(role, part) for role in ("prefill", "decode") for part in ("replica", "engine")}
        | {(None, part) for part in ("router", "proxy", "balancer", "raylet", "node")}
    ),
    replicas={"prefill": 1, "decode": 1},
    restarts=True,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_whatever_is_stopped_goes_on_and_whatever_is_cut_is_mended(kind: object) -> None:
    assert kind in KINDS.values()
    acts = KINDS[kind.name].acts  # type: ignore[attr-defined]
    for begins, ends in (("stop", "continue"), ("link_down", "link_up"), ("link_slow", "link_restore"),
                         ("drop", "drop_end")):  # fmt: skip
        begun = [(place, act.target) for place, act in enumerate(acts) if act.verb == begins]
        for place, target in begun:
            assert any(act.verb == ends and act.target == target for act in acts[place + 1 :]), begins
    sent = [place for place, act in enumerate(acts) if act.verb == "send_leaving"]
    assert all(any(act.verb == "leave" for act in acts[place:]) for place in sent)


def test_every_fault_of_the_matrix_is_there() -> None:
    for part in ("replica", "engine", "worker"):
        for role in ("prefill", "decode", "collocated"):
            assert {f"kill_{role}_{part}", f"stop_{role}_{part}"} <= set(KINDS)
    assert {f"{verb}_{part}" for verb in ("kill", "stop") for part in ("router", "proxy", "raylet", "node")} <= set(
        KINDS
    )
    assert {KINDS[name].phase for name in KINDS if name.startswith("leave_")} == {
        "before prefill", "between", "in transfer", "while streaming",
    }  # fmt: skip
    assert {"link_down", "link_slow", "relay_drop", "kill_prefill_before_read", "expire_before_read"} <= set(KINDS)


def test_the_kill_before_the_read_lies_between_prefills_answer_and_decodes_next_step() -> None:
    verbs = [(act.verb, act.target and act.target.role) for act in KINDS["kill_prefill_before_read"].acts]
    assert verbs == [
        ("stop", "decode"), ("await_prefill", None), ("kill", "prefill"), ("wait", None), ("continue", "decode"),
    ]  # fmt: skip


def test_decode_stands_still_for_longer_than_the_lease() -> None:
    acts = KINDS["expire_before_read"].acts
    verbs = [act.verb for act in acts]
    assert acts[verbs.index("wait")].wait == "lease"
    assert verbs.index("send_more") > verbs.index("wait"), "what is freed is used again"
    assert verbs[-1] == "continue"


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("kill_prefill_engine", {}, None),
        ("link_down", {}, "no link between two hosts"),
        ("link_down", {"link": True}, None),
        ("relay_drop", {"link": True}, "no relay"),
        ("relay_drop", {"link": True, "relay": True}, None),
        ("kill_decode_worker", {}, "TP 1"),
        ("kill_collocated_engine", {}, "no collocated pool"),
        ("kill_node", {}, None),
        ("kill_node", {"restarts": False}, "start that node again"),
        ("stop_node", {"restarts": False}, None),
        ("kill_raylet", {"parts": frozenset({("prefill", "engine")})}, "head node"),
        ("stop_balancer", {"parts": frozenset({("prefill", "engine")})}, "no HAProxy"),
        ("stop_router", {"parts": frozenset({("prefill", "engine")})}, "no request router"),
        ("leave_between", {"replicas": {"collocated": 2}}, "not separate"),
        ("leave_while_streaming", {"replicas": {"collocated": 2}}, None),
        ("stop_decode_engine", {"parts": frozenset()}, "no decode engine core runs here"),
    ],
)
def test_what_a_deployment_cannot_have_is_named(name: str, change: dict[str, object], why: str | None) -> None:
    reason = why_not(KINDS[name], PAIR._replace(**change))  # type: ignore[arg-type]
    assert (reason is None) if why is None else (reason is not None and why in reason)


@pytest.mark.parametrize(
    ("name", "replicas", "leaves_replicas"),
    [
        ("kill_prefill_engine", {"prefill": 2, "decode": 1}, True),
        ("kill_prefill_engine", {"prefill": 1, "decode": 2}, False),
        ("kill_prefill_before_read", {"prefill": 2, "decode": 2}, True),
        ("kill_prefill_before_read", {"prefill": 2, "decode": 1}, False),
        ("kill_router", {"prefill": 2, "decode": 2}, False),
        ("kill_node", {"prefill": 2, "decode": 2}, False),
        ("link_down", {"prefill": 2, "decode": 2}, False),
        ("leave_between", {"prefill": 2, "decode": 2}, False),
    ],
)
def test_what_it_spares(name: str, replicas: dict[str, int], leaves_replicas: bool) -> None:
    assert KINDS[name].leaves_replicas(replicas) is leaves_replicas  # type: ignore[arg-type]


def test_names() -> None:
    with pytest.raises(UsageError, match="did you mean kill_prefill_engine"):
        kind_of("kill_prefil_engine")
    assert FaultTarget("engine", "decode").text == "decode engine core" and FaultTarget("node").text == "whole node"
