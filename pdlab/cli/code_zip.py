"""Write the part of pdlab that runs inside a Ray cluster as one zip."""

from __future__ import annotations

from pathlib import Path

from pdlab.core.commands import PDLAB, RUN_LAUNCH
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.files import replace
from pdlab.core.output_paths import check_writable
from pdlab.core.settings import Settings, setting
from pdlab.deploy.kubernetes.code_zip import archive, code, file_name

EPILOG = f"""\
examples:
  {PDLAB} code-zip .
      writes pdlab-code-DIGEST.zip here; put it where every node can read it, and name it in an export:
  {RUN_LAUNCH} --config pd-spread-p1xtp4-d1xtp4 --cluster p5.48xlarge-x2 --export app.yaml \\
      --code-url https://HOST/pdlab-code-DIGEST.zip
      a Serve config for a cluster without pdlab
  {PDLAB} code-zip /opt/code/pdlab-code.zip
      for PYTHONPATH of Ray's processes, in an image or on every node

The same code gives the same DIGEST. Ray keeps an archive by the name in its URL: upload other code under its own name.
"""


class CodeZipSettings(Settings):
    """Where the zip is written."""

    COMMAND = "code-zip"
    ABOUT = "Write a zip with the modules of pdlab that a Ray cluster imports."
    EXAMPLES = EPILOG

    out: Path = setting(
        ..., "a folder for pdlab-code-DIGEST.zip, or the name of a .zip file", "output", positional=True,
        value="OUT",
    )  # fmt: skip


@command(CodeZipSettings)
def main(settings: CodeZipSettings) -> int:
    """Write the zip."""
    files = code()
    path = settings.out / file_name(files) if settings.out.is_dir() else settings.out
    if path.suffix != ".zip":
        raise UsageError(f"OUT {settings.out}: Ray unpacks files that end in .zip; give a folder or such a file")
    check_writable(path, "OUT")
    replace(path, archive(files))
    print(path)
    return 0
