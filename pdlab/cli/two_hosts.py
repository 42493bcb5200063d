"""``python -m pdlab two-hosts up|down|shape|shell``: two hosts on this machine, each with a Ray node."""

from __future__ import annotations

import os
import signal
from typing import Annotated, Any, Literal

from pydantic import Field

from pdlab.cluster import local_nodes, two_hosts
from pdlab.cluster.local_nodes import LocalNodes, environment_on, on_two_hosts
from pdlab.cluster.namespaces import INSIDE, spawn_in
from pdlab.core.commands import LAUNCH, PDLAB, RUN_BENCH, RUN_CHECK_TRANSFER
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.nodes import HOST_NAMES, LinkShape
from pdlab.core.settings import FlagsOf, Settings, not_given, setting
from pdlab.deploy.endpoint import clear_on_host, reshape_on_host

_EPILOG = f"""examples:
  {PDLAB} two-hosts up --rate 1gbit --delay-ms 0.5
  {PDLAB} two-hosts shell -- {RUN_CHECK_TRANSFER} --strategy spread
  {PDLAB} two-hosts shell -- curl http://127.0.0.1:8000/v1/models
  {PDLAB} two-hosts shape --rate 20mbit
  {PDLAB} two-hosts down

{LAUNCH} --local --two-hosts serves on the hosts, and makes them if they are not up. {RUN_BENCH} finds the
deployment there by itself. docs/two-hosts.md lists what the hosts have of their own and what they share.
"""


LINK, SHELL = "the link (up and shape)", "the shell"


class TwoHostsSettings(Settings):
    """What to do with the two hosts of this machine."""

    COMMAND = "two-hosts"
    ABOUT = (
        "Make two hosts on this machine from Linux namespaces, with a Ray head, a worker and a slow link (needs root "
        "and iproute2)."
    )
    EXAMPLES = _EPILOG

    action: Literal["up", "down", "shape", "shell"] = setting(
        ...,
        "up: make the hosts and start Ray on them; shape: change the link's rate and delay during traffic; shell: run "
        "a shell, or the command after --, on one of the hosts; down: end all processes on the hosts, then the hosts",
        "what is done",
        positional=True,
        value="up|down|shape|shell",
    )
    command: tuple[str, ...] = setting(
        (), "with shell: the command", SHELL, positional=True, several="words", value="-- COMMAND", otherwise="$SHELL"
    )
    host: Literal["a", "b"] | None = setting(
        None, "host of the shell; a: Ray's head and the driver, b: the worker", SHELL, otherwise="a"
    )
    link: Annotated[dict[str, Any], FlagsOf(LinkShape, LINK)] = Field(default_factory=dict)

    def check(self) -> None:
        if self.action not in ("up", "shape"):
            not_given(self, ("link",), self.action)
        if self.action != "shell":
            not_given(self, ("host",), self.action)
            if self.command:
                raise UsageError(f"unexpected argument {self.command[0]!r}: only shell takes a command")


@command(TwoHostsSettings)
def main(settings: TwoHostsSettings) -> int:
    """Run the action. Returns the exit code. Raises PdlabError."""
    link = settings.value_of("link", LinkShape)
    two_hosts.require()
    if INSIDE in os.environ:
        raise UsageError(f"this is {os.environ[INSIDE]}, one of the two hosts; run it outside (leave the shell first)")
    if settings.action == "up":
        nodes = local_nodes.start(2, link)
        try:
            local_nodes.await_joined(nodes)
        except BaseException:
            local_nodes.stop(nodes)
            raise
        print(describe(nodes))
    elif settings.action == "shape":
        nodes = local_nodes.shape_link(link)
        reshape_on_host(nodes.host(1).pid, link)
        print(describe(nodes))
    elif settings.action == "down":
        _down()
    else:
        return _shell(on_two_hosts(local_nodes.running()), settings.host or "a", list(settings.command))
    return 0


def describe(nodes: LocalNodes) -> str:
    """The hosts, their link and Ray's address, as text."""
    assert nodes.two_hosts is not None
    lines = [f"{host.name}  {host.address}  PID 1 is {host.pid} here" for host in nodes.two_hosts.hosts]
    return "\n".join([*lines, f"link     {nodes.two_hosts.shape}", f"Ray      {nodes.address} on {HOST_NAMES[0]}"])


def _down() -> None:
    nodes = local_nodes.running_or_salvaged()
    if nodes is not None and nodes.pids and nodes.two_hosts is None:
        raise UsageError(f"the local Ray nodes that are up are not on two hosts; {LAUNCH} --shutdown stops them")
    if nodes is not None:
        local_nodes.stop(nodes)
        if nodes.two_hosts:
            clear_on_host(nodes.host(1).pid)
    local_nodes.end_strays()
    print("stopped the two hosts and everything on them" if nodes else "no two hosts were up")


def _shell(nodes: LocalNodes, host_name: str, command: list[str]) -> int:
    host = nodes.host(1 if host_name == "a" else 2)
    words = command or [os.environ.get("SHELL") or "/bin/sh"]
    env = environment_on(host, nodes)
    try:
        child = spawn_in(host.pid, words, dies_with_parent=True, env=env)
    except FileNotFoundError as error:
        raise UsageError(f"{words[0]}: no such command") from error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command shares this terminal and gets Ctrl-C itself
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: child.terminate())
    code = child.wait()
    return code if code >= 0 else 128 - code  # a shell's code for an end by a signal
