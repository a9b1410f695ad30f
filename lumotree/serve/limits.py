"""What every request passes before the application sees it: the key, and the size of its body."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any

from lumotree.serve.errors import ApiError

OPEN_PATHS = ("/health",)
# A body over the limit is read on for this many times the limit, so that its sender can read why.
DISCARDED = 4


class Limits:
    """ASGI middleware. Reads a whole body, within bytes and time, before anything else runs."""

    def __init__(
        self, app: Any, *, api_key: str | None, max_body_bytes: int, idle_timeout_s: float
    ) -> None:
        self._app, self._most, self._idle_s = app, max_body_bytes, idle_timeout_s
        self._key = None if api_key is None else api_key.strip().encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(receive)
        except ApiError as error:
            await refuse(send, error)
            return
        if body is None:  # gone before it had said what it wanted
            return
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return first.pop() if first else await receive()

        await self._app(scope, again, send)

    def _check_key(self, scope: Any) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, token = given.partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._key):
            raise ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, receive: Any) -> bytes | None:
        parts, size, more = [], 0, True
        while more:
            try:
                async with asyncio.timeout(self._idle_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the request body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self._most:
                parts.append(part)
            elif size > self._most * (1 + DISCARDED):
                break
        if size > self._most:
            raise ApiError(
                413,
                f"the request body is larger than {self._most} bytes",
                code="request_too_large",
            )
        return b"".join(parts)


async def refuse(send: Any, error: ApiError) -> None:
    """The error as a whole response, after which the connection closes."""
    body = json.dumps(error.body()).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
