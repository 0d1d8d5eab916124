"""The outermost layer of the HTTP app: what must hold for every request whatever its route does.

1. A request id of our own, sent back in X-Request-Id; the client's id only goes into the log line.
2. Who does not show the API key, where one is needed, is refused before the body is read.
3. Calls beyond the limit of those at a time, and bodies above the limit, are refused before they
   are read whole; what only looks at the server is always answered.
4. A client that goes away cancels the task of its request at once, streaming or not.
5. An exception no one expected becomes a 500 without its text, or the end of a begun stream.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jpd.errors import OverloadedError
from jpd.frontend.door_security import OPEN_FOLDERS, DoorSecurity
from jpd.frontend.errors import BodyTooLargeError, describe
from jpd.frontend.responses import failure_response

logger = logging.getLogger("jpd.http")

MAX_CLIENT_ID_CHARS = 128
DEFAULT_MAX_CALLS = 4096
RETRY_AFTER_SECONDS = 1.0

_Message = MutableMapping[str, Any]


class Border:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, security: DoorSecurity, max_calls: int
    ) -> None:
        self._app = app
        self._security = security
        self._max_body_bytes = max_body_bytes
        self._max_calls = max_calls
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._max_body_bytes)
        scope["jpd_request_id"] = exchange.request_id
        try:
            exchange.check_key(self._security)
            exchange.check_length()
            with self._counted(scope):
                await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not exchange.client_gone:
                raise
        except Exception as error:
            await exchange.fail(error)
        finally:
            exchange.close()

    @contextlib.contextmanager
    def _counted(self, scope: Scope) -> Iterator[None]:
        """Around one call. Raises OverloadedError when too many are under way."""
        if scope["method"] != "POST" or scope["path"].startswith(OPEN_FOLDERS):
            yield
            return
        if self._num_calls >= self._max_calls:
            raise OverloadedError(f"{self._num_calls} calls are under way", RETRY_AFTER_SECONDS)
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1


class _Exchange:
    """One request and its answer on their way through the border."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.request_id = uuid.uuid4().hex
        self.client_gone = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        self._status = 0
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._start = time.perf_counter()

    def check_key(self, security: DoorSecurity) -> None:
        """Raises UnauthorizedError."""
        shown = dict(self._scope["headers"]).get(b"authorization", b"")
        security.check_path(self._scope["path"], shown)

    def check_length(self) -> None:
        """Raises BodyTooLargeError when the body says that it is too long."""
        length = dict(self._scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise BodyTooLargeError(self._max_body_bytes)

    async def receive(self) -> _Message:
        if self._watcher is not None:  # the body has been read: only the end can come
            await asyncio.shield(self._watcher)
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_body_bytes += len(message.get("body", b""))
            if self._num_body_bytes > self._max_body_bytes:
                raise BodyTooLargeError(self._max_body_bytes)
            if not message.get("more_body", False):
                self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            identity = (b"x-request-id", self.request_id.encode("ascii"))
            message["headers"] = [*message.get("headers", ()), identity]
        elif not message.get("more_body", False) and self._watcher is not None:
            self._watcher.cancel()  # whoever leaves after the last byte has had the answer
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with the failure when no answer has begun; else the connection just ends."""
        failure = describe(error, self.request_id)
        if failure.http_status == 500:
            logger.error("request %s raised", self.request_id, exc_info=error)
        if self._status == 0:
            await failure_response(failure)(self._scope, self.receive, self.send)
        elif failure.http_status != 500:
            logger.error("request %s broke off: %s", self.request_id, failure.message)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if logger.isEnabledFor(logging.INFO):
            self._log()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        if self._task is not None:
            self._task.cancel()

    def _log(self) -> None:
        headers = dict(self._scope["headers"])
        client_id = headers.get(b"x-request-id", b"")[:MAX_CLIENT_ID_CHARS].decode("latin-1")
        status = "client gone" if self.client_gone else self._status
        milliseconds = (time.perf_counter() - self._start) * 1e3
        logger.info(
            "%s %s %r %s %.1f ms client_id=%r",
            self.request_id,
            self._scope["method"],
            self._scope["path"][:MAX_CLIENT_ID_CHARS],
            status,
            milliseconds,
            client_id,
            extra={
                "fields": {
                    "request_id": self.request_id,
                    "method": self._scope["method"],
                    "path": self._scope["path"][:MAX_CLIENT_ID_CHARS],
                    "status": status,
                    "milliseconds": round(milliseconds, 1),
                    "client_id": client_id,
                }
            },
        )
