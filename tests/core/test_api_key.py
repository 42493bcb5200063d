"""The key of the served endpoint: where it comes from, and what is let through."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pdlab.core import api_key
from pdlab.core.errors import UsageError

KEY = "0123456789abcdef-key"


def authorized(
    headers: list[tuple[bytes, bytes]], path: str = "/v1/models", kind: str = "http"
) -> tuple[list[Any], bool]:
    """What the client is sent, and whether the application saw the request."""
    sent: list[Any] = []
    paths: list[str] = []

    async def app(scope: Any, *_: Any) -> None:
        paths.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    guard = api_key.KeyGuard(app, api_key.digest(KEY))
    asyncio.run(guard({"type": kind, "path": path, "headers": headers}, None, send))
    return sent, bool(paths)


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_the_key_opens(value: str) -> None:
    assert authorized([(b"Authorization", value.encode())]) == ([], True)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", KEY.encode())],
        [(b"authorization", f"Basic {KEY}".encode())],
        [(b"authorization", f"Bearer {KEY}x".encode())],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer " + api_key.digest(KEY).encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", KEY.encode())],
        [(b"authorization", b"Bearer wrong"), (b"authorization", f"Bearer {KEY}".encode())],
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/metrics", "/", "/health/x", "//ping"])
def test_nothing_else_does(headers: list[tuple[bytes, bytes]], path: str) -> None:
    sent, passed = authorized(headers, path)
    assert not passed
    assert sent[0]["status"] == 401 and (b"www-authenticate", b"Bearer") in sent[0]["headers"]
    assert "Authorization: Bearer KEY" in json.loads(sent[1]["body"])["error"]["message"]


def test_a_websocket_is_closed() -> None:
    assert authorized([], kind="websocket") == ([{"type": "websocket.close", "code": 1008}], False)


@pytest.mark.parametrize("path", ["/health", "/-/healthz", "/internal/route"])
def test_whether_it_lives_is_no_secret(path: str) -> None:
    assert authorized([], path) == ([], True)


def test_ray_serve_gets_the_digest_alone() -> None:
    env = api_key.serve_env(KEY)
    assert KEY not in json.dumps(env) and env[api_key.DIGEST] == api_key.digest(KEY)
    assert api_key.serve_env(None) == {}


def test_without_a_digest_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(api_key.DIGEST, raising=False)
    with pytest.raises(KeyError):
        api_key.middlewares()


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.write_text(f"{KEY}\n")
    own.chmod(0o600)
    assert api_key.chosen(own, {api_key.KEY: "x" * 20}, needed=False, folder=tmp_path) == own
    from_variable = api_key.chosen(None, {api_key.KEY: "y" * 20}, needed=False, folder=tmp_path)
    assert from_variable is not None and api_key.read(from_variable) == "y" * 20
    assert api_key.chosen(None, {}, needed=False, folder=tmp_path) is None
    made = api_key.chosen(None, {}, needed=True, folder=tmp_path / "cache")
    assert made is not None and len(api_key.read(made)) == 64
    assert made == api_key.chosen(None, {}, needed=True, folder=tmp_path / "cache"), "made once"
    for path in (made, from_variable):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert api_key.client_key(str(own), {}) == KEY
    assert api_key.client_key(str(own), {api_key.KEY: "z" * 20}) == "z" * 20
    assert api_key.client_key(None, {}) is None


def test_an_empty_file_of_the_own_key_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("")
    made = api_key.chosen(None, {}, needed=True, folder=tmp_path)
    assert made is not None and len(api_key.read(made)) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["api-key"]


@pytest.mark.parametrize("before", [None, "", f"{KEY}\n"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links(
    code: int, before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        if before == f"{KEY}\n":
            target.write_text(before)  # another launch was faster
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    if before == "":
        (tmp_path / "api-key").write_text("")
    path = api_key.own_key_file(tmp_path)
    key = api_key.read(path) if before != f"{KEY}\n" else path.read_text().strip()
    assert (key == KEY) if before else len(key) == 64
    assert [each.name for each in tmp_path.iterdir()] == ["api-key"]


def test_a_full_disk_leaves_no_empty_key(small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(small_disk_bytes(small_disk)))
    with pytest.raises(OSError, match="No space left"):
        api_key.own_key_file(small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["fill"]


def small_disk_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def test_the_end_of_a_line_is_no_part_of_a_key(tmp_path: Path) -> None:
    environ = {api_key.KEY: f"{KEY}\n"}
    path = api_key.chosen(None, environ, needed=True, folder=tmp_path)
    assert path is not None and api_key.read(path) == KEY == api_key.client_key(None, environ)
    assert path == api_key.chosen(None, {api_key.KEY: KEY}, needed=True, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("short", 0o600, "at least 16 printable ASCII characters"),
        ("with a space in the middle", 0o600, "without spaces"),
        ("schlüsselschlüssel", 0o600, "ASCII"),
        (KEY, 0o644, "other users can read it; chmod 600"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_file_that_will_not_do(text: str | None, mode: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(UsageError, match=message) as refused:
        api_key.chosen(file, {}, needed=True, folder=tmp_path)
    assert "\n" not in str(refused.value) and (text is None or text not in str(refused.value))


def test_a_variable_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="PDLAB_API_KEY: a key is at least 16"):
        api_key.chosen(None, {api_key.KEY: "short"}, needed=False, folder=tmp_path)
