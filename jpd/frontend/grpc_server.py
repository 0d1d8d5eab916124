"""The gRPC door: jpd.v1.Jpd with the standard health and reflection services, on grpc.aio.

Knows TextService and what the server tells of itself. Runs on the router's event loop.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jpd.frontend.door_security import NO_SECURITY, DoorSecurity, UnauthorizedError
from jpd.frontend.grpc_servicer import SERVICE_NAME, JpdServicer
from jpd.frontend.operations import ServerFacts
from jpd.frontend.service import TextService
from jpd.rpc.security import AUTHORIZATION, with_port

MAX_MESSAGE_BYTES = 16 << 20
"""Of a message to the server; stated in jpd.proto. A larger one ends with RESOURCE_EXHAUSTED."""

HEALTH_PERIOD_SECONDS = 0.25
OWN_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
"""Of the door itself: they serve as long as it is open."""


class GrpcServer:
    """The server and its health task. `start` and `stop` once each, on the router's event loop."""

    def __init__(
        self,
        service: TextService,
        facts: ServerFacts,
        security: DoorSecurity = NO_SECURITY,
        max_calls: int | None = None,
    ) -> None:
        """Calls beyond `max_calls` at a time end with RESOURCE_EXHAUSTED."""
        self._facts = facts
        self._security = security
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_calls,
            interceptors=[] if security.api_key is None else [_KeyGuard(security)],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # else a second server takes half of the calls silently
            ],
        )
        self._health = health.aio.HealthServicer()
        self._health_task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        servicer = JpdServicer(service, self._stopping)
        self._server.add_generic_rpc_handlers((servicer.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, *OWN_SERVICES), self._server)

    async def start(self, host: str, port: int) -> int:
        """Serve; returns the port, which is a free one when 0 was asked for. Raises OSError."""
        try:
            bound = self._add_port(with_port(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        for name in OWN_SERVICES:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._set_health()
        await self._server.start()
        self._health_task = asyncio.create_task(self._follow_health())
        return bound

    def _add_port(self, address: str) -> int:
        if not self._security.has_tls:
            return int(self._server.add_insecure_port(address))
        credentials = grpc.ssl_server_credentials([self._security.read_chain()])
        return int(self._server.add_secure_port(address, credentials))

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls, let the running ones end, cancel what still runs after the grace."""
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
        await self._health.enter_graceful_shutdown()
        self._stopping.set()
        await self._server.stop(grace_seconds)

    async def _follow_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_PERIOD_SECONDS)
            await self._set_health()

    async def _set_health(self) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._facts.health().serving else response.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


class _KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the API key."""

    def __init__(self, security: DoorSecurity) -> None:
        self._security = security

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:
        pairs = call.invocation_metadata
        shown = next((value for key, value in pairs if key == AUTHORIZATION), "")
        try:
            self._security.check_method(
                call.method, shown.encode() if isinstance(shown, str) else shown
            )
        except UnauthorizedError as error:
            refusal = str(error)

            async def refuse(requests: object, context: Any) -> None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

            return grpc.stream_stream_rpc_method_handler(refuse)  # of any call: it reads nothing
        return await continuation(call)
