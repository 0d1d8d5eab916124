"""The gRPC service through which other processes offer and pull KV: threads of its own, a port.

Only passes on; what is said is `jpd.transfer.remote`'s. Refuses calls without the hosts' token.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from jpd.rpc import kv_pb2 as pb
from jpd.rpc.kv_pb2_grpc import KvTransferServicer, add_KvTransferServicer_to_server
from jpd.rpc.records import RecordError, load
from jpd.rpc.security import Security, add_port, open_blocking_server, with_port
from jpd.transfer.notice import Notice
from jpd.transfer.offers import LateReadError
from jpd.transfer.protocol import PageRequest

MAX_THREADS = 32
"""Pulls served at a time; further ones wait."""


class KVEndpoint(Protocol):
    """What the service passes calls to."""

    def hear(self, notice: Notice) -> bool: ...

    def hear_request(self, request: PageRequest) -> bool: ...

    def serve(self, offer_id: str, is_over: Callable[[], bool]) -> Iterator[pb.PullResponse]:
        """Raises LateReadError."""
        ...

    def renew(self, offer_ids: Sequence[str]) -> None: ...

    def release(self, offer_ids: Sequence[str]) -> None: ...


class KVService(KvTransferServicer):
    """Implements jpd.kv.v1.KvTransfer."""

    def __init__(self, endpoint: KVEndpoint) -> None:
        self._endpoint = endpoint

    def Offer(self, request: pb.OfferRequest, context: Any) -> pb.OfferResponse:
        try:
            notice = load(request.notice_record, Notice)
        except RecordError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.OfferResponse(is_known=self._endpoint.hear(notice))

    def Ask(self, request: pb.AskRequest, context: Any) -> pb.AskResponse:
        try:
            asked = load(request.request_record, PageRequest)
        except RecordError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.AskResponse(is_known=self._endpoint.hear_request(asked))

    def Pull(self, request: pb.PullRequest, context: Any) -> Iterator[pb.PullResponse]:
        try:
            yield from self._endpoint.serve(request.offer_id, lambda: not context.is_active())
        except LateReadError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        self._endpoint.renew(request.offer_ids)
        return pb.RenewResponse()

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self._endpoint.release(request.offer_ids)
        return pb.ReleaseResponse()


class KVServer:
    """The service on a port, from construction to `close`."""

    def __init__(self, endpoint: KVEndpoint, address: str, security: Security) -> None:
        """Serves on a free port of `address`. Raises OSError."""
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kv-service")
        self._server = open_blocking_server(self._pool, security)
        add_KvTransferServicer_to_server(KVService(endpoint), self._server)
        port = add_port(self._server, with_port(address, 0), security)
        self.address = with_port(address, port)
        self._server.start()

    def close(self) -> None:
        """End calls under way, and the threads. Blocks."""
        self._server.stop(None).wait()
        self._pool.shutdown()
