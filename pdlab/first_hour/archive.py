"""An archive to send to a helper: the logs, facts, manifests and verdicts of a first hour, without secrets."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from pdlab.core.environment import is_secret
from pdlab.core.files import replace

MOST_BYTES = 4_000_000  # of one file; a larger file loses its beginning
TEXTS = {".json", ".log", ".txt", ".yaml", ".html", ".out", ".err", ""}
LEAST_SECRET = 6
HIDDEN = "[removed]"
# The name of a secret, then its value: as in an environment, JSON, YAML, a header or a flag.
_ASSIGNED = re.compile(
    r"""(?ix)(?P<name>["']?\b[\w-]*(?:api[_-]?key|auth[_-]?token|access[_-]?token|hf[_-]?token|(?<![a-z])token|secret[\w-]*
    |passw(?:or)?d|credentials?)["']?\s*(?:[=:]|\s--?>)\s*["']?)(?P<value>[^\s"',}\]]{6,})"""
)
_KNOWN = (
    re.compile(r"(?i)(?P<name>\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{6,})"),
    re.compile(
        r"(?P<name>\b)(?P<value>hf_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[\w-]{20,})"
    ),
    re.compile(r"(?P<name>\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)(?P<value>[^\s/@]+)(?=@)"),
    re.compile(
        r"(?P<name>)(?P<value>-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----)", re.DOTALL
    ),
)


def known_secrets(environment: Mapping[str, str], files: Iterable[Path]) -> set[str]:
    """Values to remove: of variables of ``environment`` with the name of a secret, and the contents of ``files``."""
    values = {value.strip() for name, value in environment.items() if is_secret(name)}
    for path in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            values.add(path.read_text(encoding="utf-8").strip())
    # The path of a secret is no secret. A word such as "token" (RAY_AUTH_MODE) is in every log.
    return {value for value in values if len(value) >= LEAST_SECRET and not value.startswith("/") and " " not in value}


def secret_files(home: Path, cache: Path) -> list[Path]:
    """The files in which Ray, pdlab and Hugging Face keep their secrets."""
    files = [home / ".ray" / "auth_token", home / ".cache" / "huggingface" / "token", home / ".huggingface" / "token"]
    if cache.is_dir():
        files += [path for path in cache.rglob("*") if path.is_file() and is_secret(path.name)]
    return files


def redact(text: str, secrets: Collection[str]) -> str:
    """The text without ``secrets``, and without values that look like a secret."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern in (*_KNOWN, _ASSIGNED):
        text = pattern.sub(lambda match: match["name"] + HIDDEN, text)
    return text


def contents(out: Path) -> Iterator[Path]:
    """The text files of the folder, without the requests of levels, which are large and explain no failure."""
    for path in sorted(out.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix in TEXTS and not path.name.startswith("."):
            yield path


def write(out: Path, secrets: Collection[str]) -> Path:
    """Make the archive in ``out``, without files that cannot be read. Returns its path. Raises WriteError."""
    name = f"first-hour-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    path, packed = out / f"{name}.tar.gz", io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in contents(out):
            with contextlib.suppress(OSError):
                data = redact(_end(file), secrets).encode()
                member = tarfile.TarInfo(f"{name}/{file.relative_to(out)}")
                member.size, member.mtime = len(data), int(file.stat().st_mtime)
                archive.addfile(member, io.BytesIO(data))
    replace(path, packed.getvalue())
    return path


def _end(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - MOST_BYTES))
        cut = f"[the first {size - MOST_BYTES} bytes are left out]\n" if size > MOST_BYTES else ""
        return cut + file.read().decode(errors="replace")
