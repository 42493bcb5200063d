"""``python -m pdlab ratio``: the P:D ratio from measured prefill-only and decode-only rates."""

from __future__ import annotations

from pathlib import Path

from pdlab.analysis.phase_ratio import report
from pdlab.core.commands import BENCH, PDLAB, RUN_BENCH
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.settings import Settings, setting
from pdlab.results.published_folders import load_experiment

EPILOG = f"""\
examples:
  {RUN_BENCH} --mode prefill-only -e p && {RUN_BENCH} --mode decode-only -e d
      measure each phase first, on a collocated deployment of one replica each (decode with --decode-bench)
  {PDLAB} ratio --prefill bm_results/p --decode bm_results/d
      the rate-matched ratio at every decode level
  {PDLAB} ratio --prefill bm_results/p --decode bm_results/d --measured bm_results/pd-*
      compared with measured ratios
"""


class RatioSettings(Settings):
    """The result folders that ``python -m pdlab ratio`` compares."""

    COMMAND = "ratio"
    ABOUT = "Compute the P:D ratio from measured prefill-only and decode-only rates."
    EXAMPLES = EPILOG

    prefill: Path = setting(..., "prefill-only levels of one replica", "result folders", value="DIR")
    decode: Path = setting(..., "decode-only levels of one replica", "result folders", value="DIR")
    measured: tuple[Path, ...] = setting(
        (),
        "PD deployments under mixed load, whose ratios are compared with the computed one",
        "result folders",
        several="words",
        value="DIR",
    )


@command(RatioSettings)
def main(settings: RatioSettings) -> int:
    """Print the ratio."""
    prefill, decode = load_experiment(settings.prefill), load_experiment(settings.decode)
    for flag, experiment, mode in (("--prefill", prefill, "prefill-only"), ("--decode", decode, "decode-only")):
        modes = sorted({run.workload.mode for run in experiment.runs})
        if mode not in modes:
            raise UsageError(
                f"{flag} {experiment.name}: its levels are {' and '.join(modes)}; give a folder that {BENCH} "
                f"--mode {mode} has measured"
            )
    print(report(prefill, decode, [load_experiment(path) for path in settings.measured]))
    return 0
