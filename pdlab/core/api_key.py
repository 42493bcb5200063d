"""The API key of the served endpoint: its file, and the middleware that checks it on every route.

A launch takes the key from ``--api-key-file`` or the environment variable ``PDLAB_API_KEY``, never from the command
line, which every user of a machine can read. Ray Serve's processes get only the key's SHA-256 (`DIGEST` in their
environment), which grants no access. They load `middlewares` through Ray Serve's hook for HTTP servers: the proxy, and
with direct streaming the servers of the engine replicas. The middleware runs in those processes, so this module imports
only the standard library and pdlab's errors.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from pdlab.core.errors import UsageError, reason_of

KEY = "PDLAB_API_KEY"
DIGEST = "PDLAB_API_KEY_SHA256"
MIN_CHARS = 16
# Paths that need no key: health checks, and HAProxy's query to the router, whose answer is only the next replica.
OPEN = ("/health", "/ping", "/-/healthz", "/-/routes", "/internal/route")

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]


def digest(key: str) -> str:
    """SHA-256 of the key, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def allowed(headers: Iterable[tuple[bytes, bytes]], expected: str) -> bool:
    """Whether ASGI ``headers`` have ``Authorization: Bearer KEY`` with the key of the digest ``expected``."""
    authorization_headers = [value for name, value in headers if name.lower() == b"authorization"]
    if len(authorization_headers) != 1:
        return False
    scheme, _, key = authorization_headers[0].partition(b" ")
    key_digest = hashlib.sha256(key.strip()).hexdigest()
    return scheme.lower() == b"bearer" and hmac.compare_digest(key_digest, expected)


def header(key: str | None) -> dict[str, str]:
    """The header that carries ``key``; empty without a key."""
    return {"authorization": f"Bearer {key}"} if key else {}


class KeyGuard:
    """ASGI middleware that answers 401 to a request without the key."""

    def __init__(self, app: App, expected: str) -> None:
        self.app = app
        self.expected = expected

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        kind = scope["type"]
        if kind not in ("http", "websocket") or scope["path"] in OPEN or allowed(scope["headers"], self.expected):
            await self.app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "this endpoint needs its API key: send the header Authorization: Bearer KEY"
            body = json.dumps({"error": {"message": message, "type": "authentication_error", "code": 401}}).encode()
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})


def middlewares() -> list[Any]:
    """The middlewares of Ray Serve's HTTP servers, named by its RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    from starlette.middleware import Middleware

    # Without the digest, a KeyError stops the start, so that no server runs without a check.
    return [Middleware(KeyGuard, expected=os.environ[DIGEST])]


def serve_env(key: str | None) -> dict[str, str]:
    """Environment variables that make Ray Serve's HTTP servers require ``key``; empty without a key."""
    if key is None:
        return {}
    return {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pdlab.core.api_key:middlewares", DIGEST: digest(key)}


def read(path: Path) -> str:
    """The key in the file. Raises UsageError if it cannot be read, is weak, or is readable by other users."""
    try:
        if path.is_dir():
            raise UsageError(f"--api-key-file {path}: is a folder; give the file with the key")
        if path.stat().st_mode & 0o077:
            raise UsageError(f"--api-key-file {path}: other users can read it; chmod 600 {path}")
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path}: cannot be read ({reason_of(error)})") from error
    return check(text, f"--api-key-file {path}")


def check(key: str, where: str) -> str:
    """Returns ``key``. Raises UsageError unless it fits a header and is hard to guess."""
    if len(key) < MIN_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{where}: a key is at least {MIN_CHARS} printable ASCII characters without spaces, this has {len(key)} "
            "characters; make one with: openssl rand -hex 32"
        )
    return key


def own_key_file(folder: Path) -> Path:
    """The file with this user's key. The first call creates it; only this user can read it."""
    path = folder / "api-key"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        return path
    # Written beside it, so that no other launch reads half a key, and a full disk leaves no empty file.
    written = _written_beside(path, secrets.token_hex(32))
    try:
        os.link(written, path)
    except OSError:  # the file exists, or the file system has no hard links, as CIFS, vfat and some of FUSE
        if not path.exists() or not path.stat().st_size:
            written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return path


def _written_beside(path: Path, key: str) -> Path:
    """A file with the key in the folder of ``path``, which only this user can read."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(number, "w") as file:
            file.write(f"{key}\n")
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _of_variable(environ: Mapping[str, str]) -> str | None:
    """The key in PDLAB_API_KEY; None if it is not set. Raises UsageError."""
    return check(environ[KEY].strip(), KEY) if environ.get(KEY) else None


def chosen(file: Path | None, environ: Mapping[str, str], *, needed: bool, folder: Path) -> Path | None:
    """The file with the key to serve with; None: no key. Raises UsageError.

    It is ``file``, else a file in ``folder`` with the key of the variable PDLAB_API_KEY, else, if a key is ``needed``,
    this user's own file in ``folder``.
    """
    if file is not None:
        read(file)
        return file.absolute()
    if (key := _of_variable(environ)) is not None:
        # Its name has the digest, so that a sweep finds the key of this deployment and not the latest key.
        path = folder / "api-keys" / digest(key)[:16]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _written_beside(path, key).replace(path)
        return path
    return own_key_file(folder) if needed else None


def client_key(path: str | None, environ: Mapping[str, str]) -> str | None:
    """The key that a client sends: PDLAB_API_KEY, else the key in the launcher's file ``path``."""
    key = _of_variable(environ)
    return read(Path(path)) if key is None and path is not None else key
