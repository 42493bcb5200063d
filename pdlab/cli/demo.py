"""``make demo``: serve pd-spread, pd-pack and collocated on this machine, sweep each briefly, and draw one plot.

It continues after a failure: a deployment that does not start is named with its error under the plot of the others.
An invalid level is measured once more. Ctrl-C ends the demo with the plot of the measured levels.
"""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pdlab.bench.options import CONCURRENCIES
from pdlab.cluster import machine
from pdlab.core import defaults
from pdlab.core.commands import PDLAB, RUN_LAUNCH, require_installed
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.files import ROOT, cache_dir
from pdlab.core.output_paths import check_folder
from pdlab.core.settings import FlagsOf, Port, Settings, setting
from pdlab.core.text import counted
from pdlab.core.workload import Workload, workload_of_flags
from pdlab.demo.choice import LEVELS, PORT, choose, describe, held_port, nodes_are_up, refuse_if_too_small
from pdlab.demo.run import Demo

EPILOG = f"""\
examples:
  make demo
      the whole demo, in minutes
  {PDLAB} demo -c 1,4 --out out/demo
      two levels; results go to out/demo
  {PDLAB} demo --itl 1024 --otl 32
      longer prompts and shorter answers

It continues after a failure: a deployment that does not start is named under the plot of the others. Ctrl-C ends it
with the plot of what was measured.

Exit codes: 0 the plot has a valid level of each deployment; 3 there is a plot, but a deployment has none;
1 nothing could be measured or drawn; 2 bad input, or a machine on which the demo cannot run;
130 interrupted (the plot of what was measured is drawn all the same).
"""
MEASURED, WHERE = "what is measured", "where"
SHORT = Workload(input_tokens=256, output_tokens=64)
LENGTHS = ("input_tokens", "output_tokens")


class DemoSettings(Settings):
    """What ``make demo`` measures, and where its results go."""

    COMMAND = "demo"
    ABOUT = "Serve three deployments of a tiny model on this machine, sweep each, and plot them (make demo)."
    EXAMPLES = EPILOG

    concurrency: Annotated[tuple[int, ...], CONCURRENCIES] | None = setting(
        None,
        "levels of each sweep",
        MEASURED,
        "-c",
        "--concurrency",
        value="N,N,...",
        otherwise=f"{','.join(map(str, LEVELS))}, or fewer on a small or busy machine",
    )
    requests: Annotated[
        dict[str, Any],
        FlagsOf(Workload, MEASURED, only=LENGTHS, otherwise={name: str(getattr(SHORT, name)) for name in LENGTHS}),
    ] = Field(default_factory=dict)
    out: Path | None = setting(
        None, "folder of the results", WHERE, value="DIR", otherwise="demo-DATE-TIME in bm_results/"
    )
    port: Port | None = setting(None, "port to serve on", WHERE, otherwise=f"{PORT}, or a free one if that is taken")


@command(DemoSettings)
def main(settings: DemoSettings) -> int:
    """Run the demo."""
    from pdlab.core.catalog import load_model

    out = (settings.out or ROOT / defaults.RESULTS / f"demo-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    workload = workload_of_flags(settings.requests, SHORT)
    itl, otl = workload.longest
    shape = load_model(defaults.LOCAL_MODEL)
    if shape is not None and itl + otl > shape.max_context:
        raise UsageError(
            f"--itl {itl} and --otl {otl}: {shape.name} has a context of {counted(shape.max_context, 'token')}; "
            "shorten one"
        )
    check_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty; choose another folder")
    require_installed("ray")
    with held_port(settings.port) as chosen:
        host = machine.observe()
        refuse_if_too_small(host, (out, cache_dir(), Path(tempfile.gettempdir())))
        if nodes_are_up():
            raise UsageError(
                "a deployment on local Ray nodes is up, and the demo would take its place; "
                f"stop it first: {RUN_LAUNCH} --shutdown"
            )
        choice = choose(host, settings.concurrency)
        print(f"This machine: {describe(host, out)}")
        for line in choice.why:
            print(f"- {line}")
        print(
            f"- {counted(itl, 'token')} in, {otl} out: short requests, so that a level takes seconds on a CPU",
            flush=True,
        )
        (out / "logs").mkdir(parents=True, exist_ok=True)
        return Demo(out, chosen, choice.levels, workload, host).run()
