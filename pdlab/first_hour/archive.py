"""An archive to send to a helper: the logs, facts, manifests and verdicts of a first hour, without secrets."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from pdlab.core.files import replace
from pdlab.remote.redaction import HIDDEN, LEAST_SECRET, is_count, is_secret, names_a_path, redacted

MOST_BYTES = 4_000_000  # of one file; a larger file loses its beginning
MOST_SECRET_BYTES = 65_536  # of one file with a secret
TEXTS = {".json", ".log", ".txt", ".yaml", ".html", ".out", ".err", ""}


def known_secrets(environment: Mapping[str, str], files: Iterable[Path]) -> set[str]:
    """Values to remove: of variables of ``environment`` with the name of a secret, and the contents of ``files`` and of
    the files that such variables name."""
    named = {name: value.strip() for name, value in environment.items() if is_secret(name)}
    paths = {name for name, value in named.items() if _is_path(name, value)}
    values = {value for name, value in named.items() if name not in paths and not is_count(name.upper(), value)}
    for path in (*files, *(Path(named[name]) for name in paths)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.is_file() and path.stat().st_size <= MOST_SECRET_BYTES:
                values.add(path.read_text(encoding="utf-8").strip())
    # A word such as "token" (RAY_AUTH_MODE) is in every log.
    return {value for value in values if len(value) >= LEAST_SECRET}


def _is_path(name: str, value: str) -> bool:
    """Whether the value of a variable is the path of a secret, which is no secret, and not a secret that begins so."""
    with contextlib.suppress(OSError):  # longer than a path may be
        return value.startswith("/") and (names_a_path(name) or Path(value).exists())
    return False


def secret_files(home: Path | None, cache: Path | None, environment: Mapping[str, str] | None = None) -> list[Path]:
    """The files in which Ray, pdlab and Hugging Face keep their secrets. ``home``, ``cache``: None if not known."""
    files = [Path(hub) / "token"] if (hub := (environment or {}).get("HF_HOME")) else []
    if home is not None:
        kept = (".ray/auth_token", ".cache/huggingface/token", ".huggingface/token")
        files += [home / name for name in kept]
    if cache is not None and cache.is_dir():
        # A key's file may be named by its digest; its folder has the name of a secret then.
        files += [
            path for path in cache.rglob("*") if path.is_file() and any(map(is_secret, path.relative_to(cache).parts))
        ]
    return files


def redact(text: str, secrets: Collection[str]) -> str:
    """The text without ``secrets``, and without values that look like a secret."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return redacted(text)


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
