"""One completion asked of a deployment, by its own checks."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from pdlab.core import api_key

SHOWN_CHARS = 300


class NoAnswer(Exception):
    """``code``: the HTTP status of a refusal; None: nothing answered. Its text says which."""

    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(text)
        self.code = code


def complete(base_url: str, request: dict[str, Any], key: str | None, timeout_s: float) -> bytes:
    """The body of the answer to ``request``. ``key``: the endpoint's API key. Raises NoAnswer."""
    headers = {"content-type": "application/json", **api_key.header(key)}
    call = urllib.request.Request(f"{base_url}/v1/completions", json.dumps(request).encode(), headers)
    try:
        with urllib.request.urlopen(call, timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            text = " ".join(error.read().decode(errors="replace").split())[:SHOWN_CHARS]
        raise NoAnswer(error.code, f"got HTTP {error.code}: {text}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(None, f"got no answer from {base_url} ({error})") from error
