"""``make wire``: pack in memory, spread over a 1 Gbit/s wire, and a planted corruption, each called by its name.

Runs the very commands that a person would type, and prints them. Needs root: the two hosts are namespaces.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdlab.cli.demo import run
from pdlab.cluster.two_hosts import parse_shape, require
from pdlab.core.arguments import exit_code
from pdlab.core.commands import python_words
from pdlab.core.settings import Numbers, Settings, parse, setting

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


class WireSettings(Settings):
    """What ``make wire`` checks."""

    PROG = "python -m pdlab wire"
    ABOUT = (
        "Prove the KV transfer over a slow link on this machine: pack in memory, spread over the link, and a planted "
        "corruption."
    )
    EXAMPLES = EPILOG

    rate: str = setting("1gbit", "bandwidth of the link between the two hosts", "what is checked", value="RATE")
    tokens: Numbers = setting((1000, 5000), "KV-cache sizes", "what is checked", value="N,N,...")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    return exit_code(lambda: _run(parse(WireSettings, sys.argv[1:] if argv is None else argv)))


def _run(settings: WireSettings) -> int:
    parse_shape(settings.rate, None)
    require()
    tokens = ",".join(map(str, settings.tokens))
    hosts = [sys.executable, "-m", "pdlab", "two-hosts"]
    code = run([*hosts, "up", "--rate", settings.rate])
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
