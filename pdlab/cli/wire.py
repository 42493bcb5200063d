"""``make wire``: pack in memory, spread over a 1 Gbit/s wire, and a planted corruption, each called by its name.

Runs the very commands that a person would type, and prints them. Needs root: the two hosts are namespaces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdlab.cli.demo import run
from pdlab.cluster.two_hosts import parse_shape, require
from pdlab.core.arguments import OneLineParser, exit_code, numbers
from pdlab.core.commands import python_words

# What is checked, and the exit code of a check that tells the truth about it.
CHECKS = (
    (["--strategy", "pack"], 0),
    (["--strategy", "spread"], 0),
    (["--strategy", "spread", "--plant-fault", "swap-blocks"], 4),
)
MEANING = """
What you saw: the KV cache of gpt-oss-120b prompts moved by NIXL, as vLLM's connector moves it, between two Ray
nodes on two hosts made of namespaces. Pack went through memory, spread over a shaped link, each with its
share of the ceiling; then two blocks were swapped on purpose, and the check reported which. On two
p5.48xlarge the same command, without the two hosts, says whether EFA carries it."""

EPILOG = """\
examples:
  sudo make wire
      two KV-cache sizes over a link of 1 Gbit/s
  sudo python -m pdlab wire --rate 20mbit --tokens 1000
      one size over a slow link
  sudo python -m pdlab wire --rate none
      as fast as this machine moves it
"""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    flags = OneLineParser(
        prog="python -m pdlab wire",
        description="Prove the KV transfer over a slow link on this machine: pack in memory, spread over the link, and "
        "a planted corruption.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = flags.add_argument_group("what is checked").add_argument
    add("--rate", metavar="RATE", default="1gbit", help="of the link between the two hosts (default %(default)s)")
    add("--tokens", type=numbers, default=(1000, 5000), metavar="N,N,...", help="KV-cache sizes (default 1000,5000)")
    return flags


def _run(args: argparse.Namespace) -> int:
    parse_shape(args.rate, None)
    require()
    tokens = ",".join(map(str, args.tokens))
    hosts = [sys.executable, "-m", "pdlab", "two-hosts"]
    code = run([*hosts, "up", "--rate", args.rate])
    if code:
        return code  # what is up already is somebody else's, and stays
    try:
        for words, right in CHECKS:
            command = [sys.executable, *python_words("check-transfer"), *words, "--random-blocks", "--tokens", tokens]
            code = run([*hosts, "shell", "--", *command])
            if code != right:
                print(f"that check ended with code {code}, and should end with {right}", file=sys.stderr)
                return code or 1
    finally:
        run([*hosts, "down"])
    print(MEANING)
    return 0
