"""Who may talk to a host: a shared token on every call, and TLS with certificates on both sides.

Channels and ports between jpd's own processes are made here and nowhere else. The public doors are
not: see `jpd.frontend`.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import grpc

AUTHORIZATION = "authorization"
MAX_MESSAGE_BYTES = 64 << 20
CERTIFICATE_NAME = "jpd"
"""The name that the certificate of every host carries, whatever its address."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects anew, whatever befell another
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_REFUSAL = (grpc.StatusCode.UNAUTHENTICATED, "the token is missing or another one")
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second host would take half of the calls silently
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts: the authority that both sides trust, and what this side shows."""

    authority: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Security:
    """What both ends of a channel know. An empty token and no certificates: everybody may call."""

    token: str = ""
    certificates: Certificates | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((AUTHORIZATION, f"Bearer {self.token}"),) if self.token else ()


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it. A name counts as reachable, but for localhost."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def open_channel(target: str, security: Security) -> grpc.aio.Channel:
    """A channel for the running event loop."""
    options = _options(security)
    if security.certificates is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, _channel_credentials(security), options=options)


def open_blocking_channel(target: str, security: Security) -> grpc.Channel:
    """A channel for threads."""
    options = _options(security)
    if security.certificates is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, _channel_credentials(security), options=options)


def _options(security: Security) -> list[tuple[str, Any]]:
    if security.certificates is None:
        return list(CHANNEL_OPTIONS)
    return [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", CERTIFICATE_NAME)]


def _channel_credentials(security: Security) -> grpc.ChannelCredentials:
    pem = security.certificates
    assert pem is not None
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def why_no_connection(details: str, security: Security) -> str:
    """What a failed connection says of certificates, in words of the mesh file; "": nothing."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "its certificate was not issued by [security] ca_file"
    if "WRONG_VERSION_NUMBER" in details:
        return "it speaks no TLS: it has another [security]"
    if "failed to connect" in details and "Socket closed" in details:
        if security.certificates is None:
            return "it ended the connection: it may want TLS, and [security] has no certificates"
        return "it ended the connection: [security] certificate_file may not be of its ca_file"
    return ""


def open_server(security: Security) -> grpc.aio.Server:
    """A server that refuses calls without the token."""
    guards = [_TokenGuard(security.token)] if security.token else []
    return grpc.aio.server(interceptors=guards, options=SERVER_OPTIONS)


def add_port(server: Any, address: str, security: Security) -> int:
    """Listen there, on a free port when it ends in :0; returns the port. Raises OSError."""
    try:
        if security.certificates is None:
            return int(server.add_insecure_port(address))
        pem = security.certificates
        credentials = grpc.ssl_server_credentials(
            [(pem.key, pem.certificate)], pem.authority, require_client_auth=True
        )
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def open_blocking_server(pool: Executor, security: Security) -> Any:
    """The same on the threads of a pool."""
    guards = [_BlockingTokenGuard(security.token)] if security.token else []
    return grpc.server(pool, interceptors=guards, options=SERVER_OPTIONS)


class _TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:
        if _shows(call.invocation_metadata, self._expected):
            return await continuation(call)
        return grpc.unary_unary_rpc_method_handler(_refuse)


class _BlockingTokenGuard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        if _shows(call.invocation_metadata, self._expected):
            return continuation(call)
        return grpc.unary_unary_rpc_method_handler(_refuse_blocking)


def _shows(metadata: Sequence[tuple[str, str | bytes]], expected: bytes) -> bool:
    """Whether a caller's metadata have the token; takes as long whatever they have."""
    shown = next((value for key, value in metadata if key == AUTHORIZATION), "")
    return hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, expected)


async def _refuse(request: object, context: Any) -> None:
    await context.abort(*_REFUSAL)


def _refuse_blocking(request: object, context: Any) -> None:
    context.abort(*_REFUSAL)
