"""Server-sent events to a client that may be slow or gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response

HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


def event(value: Any) -> bytes:
    """One JSON value as an event, in ASCII: clients may end a line at U+2028 and its like."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"


async def gone(receive: Any) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends chunks as they come. `abandon` is called when the client leaves or stops reading.

    A client that takes nothing for `idle_s` seconds has left.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], abandon: Callable[[], None], idle_s: float
    ) -> None:
        super().__init__()
        self._chunks, self._abandon, self._idle_s = chunks, abandon, idle_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except (TimeoutError, OSError):
            pass  # left, or stopped reading: nobody is there to be told
        finally:
            self._abandon()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Any) -> None:
        async def put(message: dict[str, Any]) -> None:
            # Not wait_for: before Python 3.12 it can lose the cancellation of this task.
            async with asyncio.timeout(self._idle_s):
                await send(message)

        await put({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        async for chunk in self._chunks:
            await put({"type": "http.response.body", "body": chunk, "more_body": True})
        await put({"type": "http.response.body", "body": b"", "more_body": False})
