"""``pdlab describe``: how pdlab reads a folder of other clients' results, as a file that a person can correct."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.core.command_lines import command_line
from pdlab.core.commands import PDLAB, VIZ
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.settings import Settings, setting
from pdlab.core.text import counted, listed

if TYPE_CHECKING:
    from pdlab.results.interpretation import InterpretedCurve

EPILOG = f"""\
examples:
  {PDLAB} describe results/                    print what is found there
  {PDLAB} describe results/ --write            write it to results/pdlab-describe.yaml
  {PDLAB} describe results/ --write --force    write it again; what was corrected is kept where it still fits

Correct the file: the deployment (pd-spread-p1xtp4-d2xtp2, collocated-4xtp2) or the number of GPUs, the label and the
model of each curve, or skip: true for a file that is not a result. {VIZ} reads the description with the results.
"""


class DescribeSettings(Settings):
    """The folder to describe."""

    COMMAND = "describe"
    ABOUT = "Print, or write as a file to be corrected by hand, what pdlab reads from other clients' results."
    EXAMPLES = EPILOG

    folder: Path = setting(..., "a folder of result files", "results", positional=True, value="FOLDER")
    write: bool = setting(False, "write it into the folder, as pdlab-describe.yaml; else it is printed", "results")
    force: bool = setting(
        False, "overwrite the existing file; corrections that still fit are kept", "results", needs="write"
    )


@command(DescribeSettings)
def main(settings: DescribeSettings) -> int:
    """Describe."""
    from pdlab.core.files import replace
    from pdlab.results.description import DESCRIPTION
    from pdlab.results.interpretation import interpret
    from pdlab.results.published_folders import require_folder
    from pdlab.results.store import MANIFEST

    require_folder(settings.folder)
    if (settings.folder / MANIFEST).is_file():
        raise UsageError(f"{settings.folder} was measured by pdlab: its {MANIFEST} describes it")
    file = settings.folder / DESCRIPTION
    if settings.write and file.exists() and not settings.force:
        raise UsageError(f"{file} is there already: correct it, or write it again with --force")
    curves = interpret(settings.folder).curves
    measured = sorted(path.parent.name for path in settings.folder.glob(f"*/{MANIFEST}"))
    if not curves and measured:
        raise UsageError(
            f"{settings.folder} holds folders that pdlab measured ({listed(measured)}): the {MANIFEST} of each "
            f"describes it; plot them with {command_line('viz', exps=(settings.folder,))}"
        )
    if not curves:
        raise UsageError(f"{settings.folder} holds no result files; give another folder")
    text = describing(curves)
    if not settings.write:
        print(text, end="")
        print(f"note: nothing was written; --write keeps it as {file}, to be corrected", file=sys.stderr)
        return 0
    replace(file, text.encode())
    unknown = sum(curve.gpus is None for curve in curves)
    print(f"wrote {file}: {counted(len(curves), 'curve')}, {unknown} of unknown size")
    return 0


def describing(curves: Sequence[InterpretedCurve]) -> str:
    """The description of the curves as YAML, with the tools, loads and lengths that were found as comments."""
    import yaml

    lines = [f"# How pdlab understands these results. Correct it; {VIZ} reads it with the results.", "results:"]
    for curve in curves:
        lines.append(
            f"# {', '.join(curve.tools)}: {counted(len(curve.runs), 'level')}, {curve.loads}, {curve.lengths} tokens"
        )
        if curve.gpus is None:
            lines.append("# The number of GPUs is not known: give it, or the deployment.")
        for match in curve.matches:
            entry = curve.entry(match).model_dump(exclude={"skip"})
            for i, (name, value) in enumerate(entry.items()):
                shown = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
                lines.append(f"{'- ' if i == 0 else '  '}{name}: {'' if value is None else shown}".rstrip())
    return "\n".join(lines) + "\n"
