"""``pdlab COMMAND`` and ``python -m pdlab COMMAND``: every command line of the project."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pdlab.core.commands import PDLAB, SCRIPTS, module_of
from pdlab.core.exit_code import INTERRUPTED, exit_code, forget_interrupts
from pdlab.core.files import CHECKOUT
from pdlab.core.help_pages import HELP, HELP_ALL, parser_of, store_page, stored_page
from pdlab.core.text import choices
from pdlab.core.version import __version__

# Command -> what it does. Its module is pdlab/cli/COMMAND.py, imported when the command is run.
COMMANDS = {
    "launch": "plan, start, check, export or stop a deployment",
    "bench": "sweep load levels against a running deployment",
    "experiment": "launch and sweep everything that a file of configs/sweeps/ lists",
    "ratio": "compute the P:D ratio from measured prefill-only and decode-only rates",
    "viz": "make tables, plots, a report or an audit of result folders",
    "describe": "print how pdlab reads the results of another client, or write it as a file to correct by hand",
    "plan": "simulate and rank deployments before a GPU is booked",
    "workload": "print the figures of a workload file or a trace, and write each request as a line",
    "calibrate": "fit the simulator's constants to measured runs",
    "doctor": "find what makes KV transfers slow or wrong on the nodes",
    "check-transfer": "prove the KV transfer between ranks",
    "cluster": "print the cluster file of the running Ray cluster",
    "weights": "check that a model's weights are on every node, or download them",
    "models": "print parameters, weights and KV cache of models, from their config.json",
    "first-hour": "run all steps on newly booked nodes, from the doctor to a report and one archive",
    "chaos": "kill, stop and cut parts of a running deployment under load, and compare every answer",
    "roles": "show or set which engines of --pd-fluid prefill and which decode",
    "dashboard": "write a Grafana dashboard, Prometheus' configuration and alert rules",
    "install-wheel": "install a wheel on every node of the Ray cluster",
    "code-zip": "write the modules of pdlab that a Ray cluster imports as one zip",
    "two-hosts": "make two hosts on this machine, with a shaped link between them",
    "demo": "serve, sweep and plot three deployments on this machine",
    "wire": "prove the KV transfer over a slow link on this machine",
}
# Command -> its target of make in a checkout.
TARGETS = {"demo": "make demo", "wire": "make wire"}


def usage() -> str:
    """The commands, one per line."""
    width = max(map(len, COMMANDS))
    shorter = {} if CHECKOUT is None else {name: f" ({script})" for name, script in (SCRIPTS | TARGETS).items()}
    lines = [f"  {name.ljust(width)}  {text}{shorter.get(name, '')}" for name, text in COMMANDS.items()]
    return "\n".join([f"usage: {PDLAB} COMMAND [FLAGS]; COMMAND --help lists its flags", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Without a command, list the commands; 2 for an unknown command."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # while the command was imported
        print("interrupted", file=sys.stderr)
        forget_interrupts()
        return INTERRUPTED


def _run(words: list[str]) -> int:
    if not words or words[0] in HELP:
        return _shown(usage())
    if words[0] == "--version":
        return _shown(f"pdlab {__version__}")
    if words[0] not in COMMANDS:
        problem = f"{words[0]!r} is not a command; {choices(words[0], COMMANDS)}"
        print(f"error: {problem}; {PDLAB} lists all", file=sys.stderr)
        return 2
    if len(words) == 2 and words[1] in (*HELP, HELP_ALL):
        return exit_code(lambda: _print_help(words[0], everything=words[1] == HELP_ALL))
    code: int = _module(words[0]).main(words[1:])
    return code


def script(command: str) -> NoReturn:
    """Run a command as its script in the checkout, and exit with its code."""
    sys.exit(main([command, *sys.argv[1:]]))


def _module(command: str) -> Any:
    from pdlab.core.collector import imported  # here, because a stored help page imports no command

    return imported(module_of(command))


def _print_help(command: str, *, everything: bool) -> int:
    page = stored_page(command)
    if page is None:
        _module(command)
        from pdlab.core.settings import help_page, settings_of

        page = help_page(settings_of(command))
        store_page(command, page)
    parser = parser_of(page, everything=everything)
    if everything and not any(each.advanced for each in page.arguments):
        parser.parse_args([HELP_ALL])  # it is not a flag of this command
    parser.print_help()
    return 0


def _shown(text: str) -> int:
    def show() -> int:
        print(text)
        return 0

    return exit_code(show)


if __name__ == "__main__":
    sys.exit(main())
