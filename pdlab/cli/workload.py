"""Command line of ``pdlab workload``: what a workload file or a trace sends, as one line per request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pdlab.core.commands import PDLAB, RUN_BENCH
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.files import write_output
from pdlab.core.output_paths import check_writable
from pdlab.core.settings import FlagsOf, Settings, not_given, setting
from pdlab.traffic.file import TrafficFile

EPILOG = f"""\
examples:
  {PDLAB} workload chat.yaml                          what it sends, in figures
  {PDLAB} workload chat.yaml -o requests.jsonl        every request as a line
  {PDLAB} workload trace.jsonl                        a trace by itself, replayed as it is
  {PDLAB} workload trace.jsonl --window 0-1200 --speed 2 --scale 16 -o requests.jsonl
      its first 20 minutes in 10, with a 16th of the tokens; then {RUN_BENCH} --workload requests.jsonl
  {PDLAB} workload chat.yaml --export aiperf -o aiperf.jsonl
      for aiperf profile --custom-dataset-type mooncake_trace --input-file aiperf.jsonl --fixed-schedule

docs/traffic.md has the keys of a workload file and the formats of traces.
"""


class WorkloadSettings(Settings):
    """What is read, and what is written."""

    COMMAND = "workload"
    ABOUT = "Read a workload file or a trace; print its figures, and write each request as a line."
    EXAMPLES = EPILOG

    file: Path = setting(
        ..., "a workload file (YAML), a trace, or a file that -o wrote", "workload", positional=True, value="FILE"
    )
    changes: Annotated[dict[str, Any], FlagsOf(TrafficFile, only=("speed", "scale", "window"), over_file=True)] = Field(
        default_factory=dict
    )
    output: Path | None = setting(
        None, "write the requests to this file as JSON Lines", "workload", "-o", "--output", value="FILE"
    )
    describe: bool = setting(False, "with -o: print the figures too", "workload")
    export: Literal["aiperf"] | None = setting(
        None,
        "with -o: write the requests in the format of this load generator",
        "workload",
        value="TOOL",
        needs="output",
    )
    tokenizer: str | None = setting(
        None,
        "with --export: make the text from the words in this folder's tokenizer.json",
        "workload",
        value="FOLDER",
        needs="export",
        advanced=True,
    )
    force: bool = setting(False, "overwrite an existing file", "workload")

    def check(self) -> None:
        """Flags that would have no effect are refused. Raises UsageError."""
        if self.output is None:
            not_given(self, ("describe", "force"), "no -o, which only prints figures")


@command(WorkloadSettings)
def main(settings: WorkloadSettings) -> int:
    """Read and write."""
    from pdlab.traffic.compiled import compiled
    from pdlab.traffic.describe import described

    if settings.output is not None:
        _write(settings, settings.output)
    if settings.output is None or settings.describe:
        print(described(*compiled(settings.file, settings.changes)).text())
    return 0


def _write(settings: WorkloadSettings, output: Path) -> None:
    from pdlab.traffic.compiled import compiled
    from pdlab.traffic.export import aiperf, vocabulary
    from pdlab.traffic.requests import Lines

    check_writable(output, "-o")
    if output.exists() and not settings.force:
        raise UsageError(f"-o {output}: is there already; choose another, or give --force")
    if output.exists() and settings.file.exists() and output.samefile(settings.file):
        raise UsageError(f"-o {output} is the file that is read, which would be lost: choose another")
    head, requests = compiled(settings.file, settings.changes)
    if settings.export is None:
        lines = Lines(head, requests)
        write_output(output, lines, "-o")
        print(f"wrote {output}: SHA-256 {lines.sha256}")
    else:
        texts = aiperf(head, requests, vocabulary(settings.tokenizer))
        write_output(output, (f"{text}\n" for text in texts), "-o")
        print(f"wrote {output}: for {settings.export}")
