"""Runs the doors: uvicorn and grpc.aio on one event loop, the router's.

1. `start` binds both ports (0: a free one) and returns where they are.
2. `stop` closes the ports, lets running requests end for a while, and cancels the rest.

Installs no signal handlers and prints nothing: that is the command line's. Called by `jpd.api`.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from jpd.frontend.border import DEFAULT_MAX_CALLS
from jpd.frontend.door_security import NO_SECURITY, DoorSecurity
from jpd.frontend.grpc_server import GrpcServer
from jpd.frontend.http_app import DEFAULT_MAX_BODY_BYTES, create_app
from jpd.frontend.http_protocol import PatientProtocol
from jpd.frontend.operations import ServerFacts
from jpd.frontend.service import TextService
from jpd.rpc.security import is_loopback

logger = logging.getLogger("jpd.frontend")

LISTEN_BACKLOG = 2048
START_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the doors are; a port is None when that door was not asked for."""

    host: str
    http_port: int | None
    grpc_port: int | None
    has_tls: bool = False


class FrontendServer:
    """Both doors of one service. One start, one stop, on the router's event loop."""

    def __init__(
        self,
        service: TextService,
        facts: ServerFacts,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        security: DoorSecurity = NO_SECURITY,
        max_calls: int = DEFAULT_MAX_CALLS,
    ) -> None:
        """At each door at most `max_calls` calls are under way at a time."""
        self._max_calls = max_calls
        self._service = service
        self._facts = facts
        self._max_body_bytes = max_body_bytes
        self._security = security
        self._http: _HttpServer | None = None
        self._grpc: GrpcServer | None = None

    async def start(self, host: str, http_port: int | None, grpc_port: int | None) -> Endpoints:
        """Open the doors. Raises OSError when a port cannot be had; then none is open."""
        warning = self._security.warning(is_loopback(host))
        if warning is not None:
            logger.warning("%s: %s", host, warning)
        bound_http: int | None = None
        bound_grpc: int | None = None
        try:
            if http_port is not None:
                app = create_app(
                    self._service,
                    self._facts,
                    self._max_body_bytes,
                    self._security,
                    self._max_calls,
                )
                self._http = _HttpServer(app, _listen(host, http_port), self._security)
                bound_http = await self._http.start()
            if grpc_port is not None:
                self._grpc = GrpcServer(self._service, self._facts, self._security, self._max_calls)
                bound_grpc = await self._grpc.start(host, grpc_port)
        except BaseException:
            await self.stop(0.0)
            raise
        return Endpoints(host, bound_http, bound_grpc, self._security.has_tls)

    async def stop(self, drain_seconds: float) -> None:
        """Close the doors; running requests have `drain_seconds` to end. Idempotent."""
        http, self._http = self._http, None
        grpc_server, self._grpc = self._grpc, None
        stops = []
        if http is not None:
            stops.append(http.stop(drain_seconds))
        if grpc_server is not None:
            stops.append(grpc_server.stop(drain_seconds))
        await asyncio.gather(*stops)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a request was cancelled: whoever did it knows, and its traceback helps nobody."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


class _HttpServer:
    """uvicorn on a socket that is bound already."""

    def __init__(self, app: FastAPI, listener: socket.socket, security: DoorSecurity) -> None:
        self._listener = listener
        self._config = uvicorn.Config(
            app,
            lifespan="off",
            http=PatientProtocol,
            ws="none",
            log_config=None,
            access_log=False,  # the border writes a line of its own
            server_header=False,
            backlog=LISTEN_BACKLOG,
            ssl_certfile=security.tls_cert,
            ssl_keyfile=security.tls_key,
        )
        self._server = _QuietServer(self._config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        port: int = self._listener.getsockname()[1]
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError("the HTTP server ended while it started")
            await asyncio.sleep(START_POLL_SECONDS)
        return port

    async def stop(self, drain_seconds: float) -> None:
        # Read by uvicorn when it shuts down; it takes whole seconds by type only.
        self._config.timeout_graceful_shutdown = drain_seconds  # type: ignore[assignment]
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()


class _QuietServer(uvicorn.Server):
    """uvicorn that leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
