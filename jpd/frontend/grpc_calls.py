"""How calls of the gRPC door begin and end: ids, log lines, codecs, trailers, errors as a status.

Knows grpc, no service. Used by `grpc_servicer` and `grpc_chat`.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from jpd.errors import RequestError
from jpd.frontend.errors import Failure, describe

MAX_TIMELINE_TRAILERS = 8  # clients accept 8 KiB of metadata unless told otherwise

logger = logging.getLogger("jpd.grpc")

Answer = TypeVar("Answer")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Trailers = list[tuple[str, str]]


def codec(
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


def parsed(request: Answer | None) -> Answer:
    """The request. Raises RequestError where it could not be read."""
    if request is None:
        raise RequestError("request", None, "is not a valid message, or has text that is not UTF-8")
    return request


def begin_call(context: Any, method: str) -> str:
    """A new id for a call, which has its line in the log once it is over."""
    request_id, start = uuid.uuid4().hex, time.perf_counter()

    def log(ended: Any) -> None:
        code = ended.code()
        status = code.name if code is not None else "OK" if ended.done() else "client gone"
        milliseconds = round((time.perf_counter() - start) * 1e3, 1)
        logger.info(
            "%s %s %s %.1f ms",
            request_id,
            method,
            status,
            milliseconds,
            extra={
                "fields": {
                    "request_id": request_id,
                    "method": method,
                    "status": status,
                    "milliseconds": milliseconds,
                }
            },
        )

    context.add_done_callback(log)
    return request_id


async def answer(context: Context, method: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The result of a unary call, or its failure as a status."""
    request_id = begin_call(context, method)
    try:
        return await call()
    except Exception as error:
        await abort(context, error, request_id, [("jpd-request-id", request_id)])
        raise AssertionError("abort always raises") from error


async def abort(context: Any, error: Exception, request_id: str, trailers: Trailers) -> None:
    """Ends the RPC with the status of `error`. Always raises."""
    failure = logged_failure(error, request_id)
    if failure.param is not None:
        trailers.append(("jpd-error-field", failure.param.encode("ascii", "replace").decode()))
    if failure.retry_after_seconds is not None:
        trailers.append(("retry-after", str(max(1, round(failure.retry_after_seconds)))))
    await context.abort(status_of(failure), failure.message, tuple(trailers))


def logged_failure(error: Exception, request_id: str) -> Failure:
    """The failure as clients see it; a bug of ours is in the log too."""
    failure = describe(error, request_id)
    if failure.http_status == 500:
        logger.error("request %s raised", request_id, exc_info=error)
    return failure


def status_of(failure: Failure) -> Any:
    """The grpc.StatusCode."""
    return getattr(grpc.StatusCode, failure.grpc_status)
