"""How each error of jpd looks at the doors: one table for HTTP and gRPC alike.

Knows the error tree and the status numbers, no transport. Called by the HTTP and gRPC servers.
What is not in the tree is a bug of ours: its text stays in the log and the client gets a request id
to quote.
"""

from dataclasses import dataclass

from jpd.errors import (
    DeadlineError,
    JpdError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestError,
    TransferError,
    WorkerError,
    WorkerLostError,
)
from jpd.frontend.door_security import UnauthorizedError

MAX_MESSAGE_CHARS = 500
MAX_PARAM_CHARS = 100


class BodyTooLargeError(JpdError):
    """The request's body exceeds the limit of this server."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__(f"the request body exceeds {limit_bytes} bytes")


class RouteError(JpdError):
    """No such path, or the path does not take this method, or not from this caller."""

    def __init__(self, http_status: int, message: str, code: str = "no_route") -> None:
        self.http_status, self.code = http_status, code
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Failure:
    """One error as clients see it. `type` and `code` are OpenAI's words where it has them."""

    http_status: int
    grpc_status: str  # name of a grpc.StatusCode
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message[:MAX_MESSAGE_CHARS],
                "type": self.type,
                "param": self.param[:MAX_PARAM_CHARS] if self.param else None,
                "code": self.code,
            }
        }


_Row = tuple[type[Exception], int, str, str, str]

_TABLE: tuple[_Row, ...] = (  # the first row whose class fits
    (ModelNotFoundError, 404, "NOT_FOUND", "invalid_request_error", "model_not_found"),
    (RequestError, 400, "INVALID_ARGUMENT", "invalid_request_error", "invalid_value"),
    (UnauthorizedError, 401, "UNAUTHENTICATED", "invalid_request_error", "invalid_api_key"),
    (BodyTooLargeError, 413, "RESOURCE_EXHAUSTED", "invalid_request_error", "body_too_large"),
    (OverloadedError, 429, "RESOURCE_EXHAUSTED", "rate_limit_error", "overloaded"),
    (DeadlineError, 504, "DEADLINE_EXCEEDED", "timeout_error", "deadline_exceeded"),
    (RequestCancelledError, 499, "CANCELLED", "cancelled_error", "cancelled"),
    (TransferError, 503, "UNAVAILABLE", "server_error", "transfer_failed"),
    (WorkerLostError, 503, "UNAVAILABLE", "server_error", "worker_lost"),
    (WorkerError, 503, "UNAVAILABLE", "server_error", "worker_failed"),
)


def describe(error: BaseException, request_id: str) -> Failure:
    """The failure to show for `error`; an unknown one shows nothing but where to look."""
    if isinstance(error, RouteError):
        return Failure(
            error.http_status, "UNIMPLEMENTED", "invalid_request_error", error.code, str(error)
        )
    for kind, http_status, grpc_status, type_, code in _TABLE:
        if isinstance(error, kind):
            param = error.field if isinstance(error, RequestError) else None
            wait = error.retry_after_seconds if isinstance(error, OverloadedError) else None
            return Failure(http_status, grpc_status, type_, code, str(error), param, wait)
    message = f"internal error; the server's log has it under request id {request_id}"
    return Failure(500, "INTERNAL", "server_error", "internal_error", message)
