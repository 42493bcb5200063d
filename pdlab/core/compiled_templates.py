"""Keep compiled templates in the user's cache: compiling those of a ranking takes longer than printing it."""

from __future__ import annotations

import hashlib
import pickle
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import jinja2
from jinja2.bccache import Bucket

from pdlab.core.errors import NoHomeError, WriteError
from pdlab.core.files import cache_dir, replace


class CompiledTemplates(jinja2.BytecodeCache):
    """Jinja's cache of compiled templates. ``sources``: files, beside the templates, on which the code depends."""

    def __init__(self, sources: tuple[Path, ...]) -> None:
        states = [path.stat() for path in sources]
        origin = (jinja2.__version__, [(state.st_mtime_ns, state.st_size) for state in states])
        self._made_from = hashlib.sha256(repr(origin).encode()).digest()

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """The template's name and a hash of its path, because folders have templates of the same name."""
        return f"{Path(name).name}-{crc32(str(filename).encode()):08x}"

    def load_bytecode(self, bucket: Bucket) -> None:
        """Read the compiled template. If it cannot be read, Jinja compiles the template again."""
        with suppress(OSError, EOFError, ValueError, NoHomeError, pickle.UnpicklingError):
            data = _file(bucket).read_bytes()
            if data.startswith(self._made_from):
                bucket.bytecode_from_string(data[len(self._made_from) :])

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write the compiled template, if the cache can be written."""
        with suppress(WriteError, NoHomeError):
            replace(_file(bucket), self._made_from + bucket.bytecode_to_string())


def _file(bucket: Bucket) -> Path:
    return cache_dir() / "templates" / bucket.key
