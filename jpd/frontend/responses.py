"""HTTP responses the routes return: JSON, failures in OpenAI's shape, and event streams.

Knows bytes and headers only. All run in the task of their request, which the border cancels when
the client goes away.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from jpd.frontend.errors import Failure


def json_response(
    body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """ASCII JSON without NaN, which a strict parser would refuse."""
    content = json.dumps(body, allow_nan=False).encode("ascii")
    return Response(content, status, headers, media_type="application/json")


def failure_response(failure: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """OpenAI's error object with its status, and when to come back if that is known."""
    merged = dict(headers or {})
    if failure.retry_after_seconds is not None:
        merged["retry-after"] = str(max(1, round(failure.retry_after_seconds)))
    if failure.http_status == 401:
        merged["www-authenticate"] = "Bearer"
    return json_response(failure.body(), failure.http_status, merged)


class EventStream(Response):
    """Server-sent events as they come. `events` is closed however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # No super().__init__: it would set a body and its length.
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
