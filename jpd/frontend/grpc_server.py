"""The gRPC door: jpd.v1.Jpd with the standard health and reflection services, on grpc.aio.

Cancelling an RPC, or its deadline, cancels the handler's task, which closes the stream of deltas
and so the router's request. Knows TextService, not the router. Runs on the router's event loop.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jpd.errors import RequestError
from jpd.frontend.answers import UsageCounter
from jpd.frontend.door_security import NO_SECURITY, DoorSecurity, UnauthorizedError
from jpd.frontend.errors import describe
from jpd.frontend.grpc_messages import (
    delta_message,
    model_info,
    read_chat,
    read_chat_tools,
    read_job,
    timeline_trailer,
    usage_message,
)
from jpd.frontend.operations import ServerFacts
from jpd.frontend.service import TextService
from jpd.rpc import jpd_pb2
from jpd.rpc.security import AUTHORIZATION, with_port

MAX_MESSAGE_BYTES = 16 << 20
"""Of a message to the server; stated in jpd.proto. A larger one ends with RESOURCE_EXHAUSTED."""

SERVICE_NAME = "jpd.v1.Jpd"
HEALTH_PERIOD_SECONDS = 0.25
MAX_TIMELINE_TRAILERS = 8  # clients accept 8 KiB of metadata unless told otherwise

logger = logging.getLogger("jpd.grpc")

Answer = TypeVar("Answer")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Trailers = list[tuple[str, str]]


class JpdServicer:
    """The methods of jpd.v1.Jpd. A request that could not be parsed arrives as None."""

    def __init__(self, service: TextService) -> None:
        self._service = service

    def handler(self) -> Any:
        """All methods, as grpc's server takes them."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        methods = {
            "Generate": stream(self.generate, *_codec(jpd_pb2.GenerateRequest)),
            "Tokenize": unary(self.tokenize, *_codec(jpd_pb2.TokenizeRequest)),
            "Detokenize": unary(self.detokenize, *_codec(jpd_pb2.DetokenizeRequest)),
            "GetModelInfo": unary(self.get_model_info, *_codec(jpd_pb2.GetModelInfoRequest)),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def generate(
        self, request: jpd_pb2.GenerateRequest | None, context: Context
    ) -> AsyncGenerator[jpd_pb2.GenerateResponse, None]:
        """Deltas as they come; the last message has the usage, the trailers the timelines."""
        request_id = uuid.uuid4().hex
        trailers: Trailers = [("jpd-request-id", request_id)]
        try:
            async with aclosing(
                self._messages(_parsed(request), context, request_id, trailers)
            ) as messages:
                async for message in messages:
                    yield message
            context.set_trailing_metadata(trailers)
        except Exception as error:
            await _abort(context, error, request_id, trailers)

    async def _messages(
        self,
        request: jpd_pb2.GenerateRequest,
        context: Context,
        request_id: str,
        trailers: Trailers,
    ) -> AsyncGenerator[jpd_pb2.GenerateResponse, None]:
        """Appends to `trailers` as choices end."""
        with self._service.counting_refusals():
            job = await read_job(request, self._service, context.time_remaining())
            job = replace(job, request_id=request_id)
            prepared = await self._service.prepare(job)
        counter = UsageCounter(prepared)
        num_running = prepared.num_choices
        async with aclosing(self._service.stream(prepared)) as deltas:
            async for delta in deltas:
                counter.add(delta)
                message = delta_message(delta, request.include_details)
                if delta.finish_reason is not None:
                    num_running -= 1
                    if delta.timeline is not None and len(trailers) <= MAX_TIMELINE_TRAILERS:
                        trailer = timeline_trailer(delta.index, delta.timeline)
                        trailers.append(("jpd-timeline", trailer))
                    if num_running == 0:
                        message.usage.CopyFrom(usage_message(counter))
                yield message

    async def tokenize(
        self, request: jpd_pb2.TokenizeRequest | None, context: Context
    ) -> jpd_pb2.TokenizeResponse:
        return await _answer(context, lambda: self._tokenize(_parsed(request)))

    async def _tokenize(self, request: jpd_pb2.TokenizeRequest) -> jpd_pb2.TokenizeResponse:
        is_chat = request.WhichOneof("prompt") == "chat"
        text = request.text
        if is_chat:
            text = await self._service.chat_prompt(
                read_chat(request.chat), tools=read_chat_tools(request.chat)
            )
        add_special_tokens = not is_chat
        if request.HasField("add_special_tokens"):
            add_special_tokens = request.add_special_tokens
        token_ids = await self._service.tokenize(text, add_special_tokens)
        return jpd_pb2.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: jpd_pb2.DetokenizeRequest | None, context: Context
    ) -> jpd_pb2.DetokenizeResponse:
        return await _answer(context, lambda: self._detokenize(_parsed(request)))

    async def _detokenize(self, request: jpd_pb2.DetokenizeRequest) -> jpd_pb2.DetokenizeResponse:
        text = await self._service.detokenize(tuple(request.token_ids), "token_ids")
        return jpd_pb2.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: jpd_pb2.GetModelInfoRequest | None, context: Context
    ) -> jpd_pb2.ModelInfo:
        return model_info(self._service.model)


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
        self._server.add_generic_rpc_handlers((JpdServicer(service).handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Serve; returns the port, which is a free one when 0 was asked for. Raises OSError."""
        try:
            bound = self._add_port(with_port(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
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

            async def refuse(request: object, context: Any) -> None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

            return grpc.unary_unary_rpc_method_handler(refuse)
        return await continuation(call)


def _codec(
    kind: type[Message],
) -> tuple[Callable[[bytes], Message | None], Callable[[Message], bytes]]:
    """How requests are read and answers written; what cannot be read becomes None, not a bug."""

    def parse(data: bytes) -> Message | None:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return parse, _serialize


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _parsed(request: Answer | None) -> Answer:
    if request is None:
        raise RequestError("request", None, "is not a valid message, or has text that is not UTF-8")
    return request


async def _answer(context: Context, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The result of a unary call, or its failure as a status."""
    try:
        return await call()
    except Exception as error:
        request_id = uuid.uuid4().hex
        await _abort(context, error, request_id, [("jpd-request-id", request_id)])
        raise AssertionError("abort always raises") from error


async def _abort(context: Any, error: Exception, request_id: str, trailers: Trailers) -> None:
    """Ends the RPC with the status of `error`. Always raises."""
    failure = describe(error, request_id)
    if failure.http_status == 500:
        logger.error("request %s raised", request_id, exc_info=error)
    if failure.param is not None:
        trailers.append(("jpd-error-field", failure.param.encode("ascii", "replace").decode()))
    if failure.retry_after_seconds is not None:
        trailers.append(("retry-after", str(max(1, round(failure.retry_after_seconds)))))
    status = getattr(grpc.StatusCode, failure.grpc_status)
    await context.abort(status, failure.message, tuple(trailers))
