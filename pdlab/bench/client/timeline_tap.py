"""Reads the timelines of requests from the answers before vLLM's request functions, which skip comments.

Each piece of an answer is passed on first and examined only when the next one is read, so that no measured time becomes
later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from pdlab.deploy.serving.events import END
from pdlab.deploy.serving.timeline import COMMENT, HEADER

# At a line's begin, and never the stream's first. A model may write the rest: in JSON its text has no line ends.
_COMMENT, _END = b"\n" + COMMENT.encode(), END.encode()
Found = Callable[[str], None]


class _Tapped:
    """Stands for an object of aiohttp. ``found`` is called with each timeline's JSON."""

    def __init__(self, inner: Any, found: Found) -> None:
        self._inner = inner
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TappedSession(_Tapped):
    """An ``aiohttp.ClientSession`` that passes the answers to its posts on unchanged."""

    def post(self, *args: Any, **kwargs: Any) -> Any:
        return _TappedPost(self._inner.post(*args, **kwargs), self._found)


class _TappedPost(_Tapped):
    async def __aenter__(self) -> Any:
        response = await self._inner.__aenter__()
        if (timeline := response.headers.get(HEADER)) is not None:
            self._found(timeline)
        return _TappedResponse(response, self._found)

    async def __aexit__(self, *error: Any) -> Any:
        return await self._inner.__aexit__(*error)


class _TappedResponse(_Tapped):
    def __init__(self, inner: Any, found: Found) -> None:
        super().__init__(inner, found)
        self.content = TappedContent(inner.content, found)


class TappedContent(_Tapped):
    """A response's ``content``, read by pieces."""

    _rest = b""

    async def iter_any(self) -> AsyncIterator[bytes]:
        async for piece in self._inner.iter_any():
            yield piece
            self._look_at(piece)

    def _look_at(self, piece: bytes) -> None:
        """Find the comments in a piece. A comment may come in several pieces, so its possible beginning is kept."""
        text = self._rest + piece
        at = text.find(_COMMENT)
        if at < 0:
            self._rest = text[1 - len(_COMMENT) :]
            return
        timeline, end, _ = text[at + len(_COMMENT) :].partition(_END)
        if end:
            self._found(timeline.decode(errors="replace"))
            self._rest = b""
        else:
            self._rest = text[at:]
