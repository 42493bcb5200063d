"""make wire with made-up commands: their order, the right exit codes, and hosts that are always taken down."""

from __future__ import annotations

import pytest

from pdlab.cli import wire as cli_wire
from pdlab.core.settings import parse
from pdlab.demo import wire
from pdlab.steps.runner import StepRunner
from pdlab.transfer.options import CheckTransferSettings

UP, DOWN = "up", "down"


class Hosts:
    """In the place of the commands: ``codes`` of `two-hosts up` and of each check; None: interrupted there."""

    def __init__(self, codes: list[int | None]) -> None:
        self.codes = codes
        self.ran: list[tuple[str, ...]] = []

    def run_shown(self, *argv: str, always: bool = False) -> int:
        self.ran.append(argv)
        assert argv[:3] == ("-m", "pdlab", "two-hosts") and always == (argv[3] == DOWN)
        if argv[3] == DOWN:
            return 0
        code = self.codes.pop(0)
        if code is None:
            raise KeyboardInterrupt
        return code


@pytest.mark.parametrize(
    ("codes", "result", "words"),
    [
        ([0, 0, 0, 4], 0, [UP, "shell", "shell", "shell", DOWN]),
        ([2], 2, [UP]),  # what is up is somebody else's
        ([0, 0, 3], 3, [UP, "shell", "shell", DOWN]),
        ([0, 0, 0, 0], 1, [UP, "shell", "shell", "shell", DOWN]),  # the planted fault was not seen
        ([0, 0, None], 130, [UP, "shell", "shell", DOWN]),
    ],
    ids=["right", "no-hosts", "slow", "blind", "interrupted"],
)
def test_the_hosts_are_taken_down_and_the_code_tells(
    codes: list[int | None], result: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(codes)
    monkeypatch.setattr(
        StepRunner, "run_shown", lambda self, *argv, always=False: hosts.run_shown(*argv, always=always)
    )
    monkeypatch.setattr(wire, "require", lambda: None)
    assert cli_wire.main(["--rate", "20mbit", "--tokens", "1000"]) == result
    assert [argv[3] for argv in hosts.ran] == words
    assert hosts.ran[0][4:] == ("--rate", "20mbit")
    assert all("1000" in argv for argv in hosts.ran if argv[3] == "shell")


@pytest.mark.parametrize(
    ("rate", "least_s"),
    # 322 blocks of 16 tokens in 18 regions, 8 heads of 64 values of K and V in two bytes: 190 MB, moved six times.
    [("20mbit", 6 * 76), ("1gbit", 60 + 6 * 1.5), ("none", None)],
)
def test_a_slow_link_gets_the_time_that_it_needs(
    rate: str, least_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts([0, 0, 0, 4])
    monkeypatch.setattr(
        StepRunner, "run_shown", lambda self, *argv, always=False: hosts.run_shown(*argv, always=always)
    )
    monkeypatch.setattr(wire, "require", lambda: None)
    assert cli_wire.main(["--rate", rate, "--tokens", "1000,5000"]) == 0
    checks = [argv[argv.index("--strategy") :] for argv in hosts.ran if argv[3] == "shell"]
    for words in checks:
        plan = parse(CheckTransferSettings, words)
        if least_s is None:
            assert "--timeout-s" not in words
        else:
            assert least_s <= plan.timeout_s <= 2 * least_s, "and a wire that hangs is noticed"
    assert len(checks) == 3


def test_a_bad_rate_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts([])
    monkeypatch.setattr(
        StepRunner, "run_shown", lambda self, *argv, always=False: hosts.run_shown(*argv, always=always)
    )
    assert cli_wire.main(["--rate", "fast"]) == 2
    assert hosts.ran == []
