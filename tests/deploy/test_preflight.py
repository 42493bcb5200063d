"""Before a PD launch: warnings are told, what would break it stops it, a port that is just being freed does not."""

from __future__ import annotations

import pytest

from pdlab.core.errors import DeployError
from pdlab.deploy.preflight import judge
from pdlab.transfer.doctor.findings import Finding
from pdlab.transfer.doctor.settings_rules import SIDE_CHANNEL_PORT

TAKEN = Finding("error", SIDE_CHANNEL_PORT, ("n1",), "taken: 20000 (unknown)", "cannot start", "stop it")
ENGINE = Finding("note", SIDE_CHANNEL_PORT, ("n1",), "taken: 20000 (VLLM::EngineCore)", "its port is taken", "stop it")
WARNING = Finding("warning", "memlock", ("n1",), "memlock is 64 KiB", "slower", "ulimit -l unlimited")
ERROR = Finding("error", "versions", ("n1",), "nixl 1.0 and 1.3", "they do not agree", "install one")


def test_nothing_found_says_nothing() -> None:
    said: list[str] = []
    judge(list, said.append)
    assert said == []


def test_a_warning_is_told_and_does_not_stop() -> None:
    said: list[str] = []
    judge(lambda: [WARNING], said.append)
    assert said == ["doctor: memlock: memlock is 64 KiB; slower"]


@pytest.mark.parametrize("held", [TAKEN, ENGINE])
def test_a_port_that_is_freed_in_time(held: Finding) -> None:
    said: list[str] = []
    answers = iter([[held], [held, WARNING], [WARNING]])
    judge(lambda: next(answers), said.append)
    assert said[0].startswith("waiting for side-channel ports") and len(said) == 2
    assert list(answers) == [], "it looked until the port was free"


@pytest.mark.parametrize("held", [TAKEN, ENGINE])
def test_a_port_that_stays_taken(held: Finding) -> None:
    with pytest.raises(DeployError, match=r"side-channel port on n1: taken: 20000 .*; stop it"):
        judge(lambda: [held], lambda _: None, wait_s=0.0)


def test_an_error_stops_at_once() -> None:
    answers = iter([[ERROR]])
    with pytest.raises(DeployError, match="versions on n1"):
        judge(lambda: next(answers), lambda _: None)
