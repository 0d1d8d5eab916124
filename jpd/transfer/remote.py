"""Transfer between processes: pieces are offered over gRPC, and pulled by their destination.

1. `offer` keeps a piece in the book (offers.py) and sends a notice; `ask` lets another process do
so. 2. The destination's lane pulls when its turn comes, over a transport (transports.py), and
meanwhile renews the leases of what it has queued. 3. What has arrived, and what nobody wants any
more, is released. What is between workers of this process takes the way of the inner transfer.
Nothing here blocks a worker's thread.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.rpc import kv_pb2 as pb
from jpd.rpc.kv_pb2_grpc import KvTransferStub
from jpd.rpc.records import dump
from jpd.rpc.security import Security, open_blocking_channel
from jpd.transfer.destination import Destination
from jpd.transfer.kv_service import KVServer
from jpd.transfer.lane import Lane
from jpd.transfer.notice import Notice, notice_of
from jpd.transfer.offers import Offers
from jpd.transfer.protocol import (
    ArrivedPiece,
    Deliver,
    KVPiece,
    KVTransfer,
    PageRequest,
    Serve,
    arrived_piece,
)
from jpd.transfer.transports import Transport

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
RENEWALS_PER_LEASE = 3
ENDED_POLL_SECONDS = 0.05
"""How soon a source sees that the reader of a ticket has gone away without a release."""


class RemoteTransfer:
    """KVTransfer of one process that has peers."""

    def __init__(
        self,
        local: KVTransfer,
        transport: Transport,
        address: str,
        security: Security,
        *,
        lease_seconds: float,
        pull_seconds: float,
    ) -> None:
        """`local` serves this process's own workers. `address` is where peers reach this one.

        A pull takes at most `pull_seconds`. Raises OSError.
        """
        self._local, self._transport, self._security = local, transport, security
        self._lease_seconds, self._pull_seconds = lease_seconds, pull_seconds
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._offers: Offers[KVPiece] = Offers(lease_seconds, time.monotonic, uuid.uuid4().hex[:8])
        self._lanes: dict[str, Lane[Notice]] = {}
        self._serves: dict[str, Serve] = {}
        self._peers: dict[str, str] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._serving: set[str] = set()  # offers that are being read
        self._pulls: dict[str, Any] = {}  # attempt → the call that pulls for it
        self._closed = threading.Event()
        self._server = KVServer(self, address, security)
        self._keeper = threading.Thread(target=self._keep, name="transfer-leases", daemon=True)
        self._keeper.start()

    @property
    def address(self) -> str:
        """Of this process's service, for its peers."""
        return self._server.address

    @property
    def num_kept(self) -> int:
        """Pieces offered to other processes and not released yet."""
        with self._lock:
            return len(self._offers)

    @property
    def num_unknown(self) -> int:
        """Messages that named an offer not kept here (any more), since the start."""
        with self._lock:
            return self._offers.num_unknown

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Where the workers of other processes are reached, by name; in place of those before."""
        with self._lock:
            self._peers = dict(addresses)

    # KVTransfer.

    def register(
        self, worker: str, mesh: Mesh, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        self._local.register(worker, mesh, deliver, serve)
        if serve is not None:
            self._serves[worker] = serve
        puller = _Puller(worker, Destination(mesh), self._transport, self._open_pull)
        self._lanes[worker] = Lane(
            f"{worker}-remote",
            puller.pull,
            deliver,
            on_drop=lambda notice: self.tell_released([notice]),
        )
        puller.on_end = lambda notice: self._end_pull(notice)

    def offer(self, piece: KVPiece) -> None:
        """Raises OSError when nobody knows where the destination is, or parts are elsewhere."""
        if piece.destination in self._lanes:
            self._local.offer(piece)
            return
        if not all(array.is_fully_addressable for array in piece.arrays):
            raise OSError("the piece cannot be sent: not all of its devices are of this process")
        with self._lock:
            peer = self._peers.get(piece.destination)
            if peer is None:
                raise OSError(f"no peer is known that has worker {piece.destination}")
            offer_id = self._offers.add(piece)
        name, place = self._transport.name, self._transport.address
        notice = notice_of(piece, offer_id, self.address, name, place)
        call = self._call(peer, "Offer", pb.OfferRequest(notice_record=dump(notice)))
        call.add_done_callback(lambda done: self._check_heard(done, offer_id, peer))

    def ask(self, request: PageRequest) -> None:
        if request.source in self._serves:
            self._local.ask(request)
            return
        with self._lock:
            peer = self._peers.get(request.source)
        if peer is None:
            raise OSError(f"no peer is known that has worker {request.source}")
        call = self._call(peer, "Ask", pb.AskRequest(request_record=dump(request)))
        call.add_done_callback(lambda done: self._check_asked(done, request.attempt_id, peer))

    def cancel(self, attempt_id: str) -> None:
        self._local.cancel(attempt_id)
        with self._lock:
            self._offers.cancel(attempt_id)
            pull = self._pulls.get(attempt_id)
        for lane in self._lanes.values():
            lane.cancel(attempt_id)
        if pull is not None:
            pull.cancel()

    def num_in_flight(self, worker: str) -> int:
        return self._local.num_in_flight(worker) + self._lanes[worker].num_in_flight()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            pulls = list(self._pulls.values())
            self._released.notify_all()
        for lane in self._lanes.values():
            lane.stop()
        for pull in pulls:
            pull.cancel()
        for lane in self._lanes.values():
            lane.thread.join()
        self._keeper.join()
        self._server.close()
        for channel in self._channels.values():
            channel.close()
        with self._lock:
            self._offers.clear()
        self._local.close()

    # KVEndpoint: what other processes say.

    def hear(self, notice: Notice) -> bool:
        lane = self._lanes.get(notice.destination)
        if lane is None:
            logger.warning("a piece for %s was offered, which is not here", notice.destination)
            return False
        lane.put(notice)
        return True

    def hear_request(self, request: PageRequest) -> bool:
        serve = self._serves.get(request.source)
        if serve is not None:
            serve(request)
        return serve is not None

    def serve(self, offer_id: str, is_over: Callable[[], bool]) -> Iterator[pb.PullResponse]:
        with self._lock:
            piece = self._offers.begin_copy(offer_id)
            self._serving.add(offer_id)
        try:
            yield from self._transport.serve(piece)
            if self._transport.address:  # the bytes take another way: kept until it is released
                self._await_release(offer_id, is_over)
        finally:
            with self._lock:
                self._serving.discard(offer_id)
                self._offers.end_copy(offer_id)

    def _await_release(self, offer_id: str, is_over: Callable[[], bool]) -> None:
        end = time.monotonic() + self._pull_seconds
        with self._released:
            while offer_id in self._serving and not self._closed.is_set():
                if is_over() or time.monotonic() > end:
                    return
                self._released.wait(ENDED_POLL_SECONDS)

    def renew(self, offer_ids: Sequence[str]) -> None:
        with self._lock:
            self._offers.renew(offer_ids)

    def release(self, offer_ids: Sequence[str]) -> None:
        with self._released:
            for offer_id in offer_ids:
                self._offers.release(offer_id)
                self._serving.discard(offer_id)
            self._released.notify_all()

    # What this process says.

    def tell_released(self, notices: Sequence[Notice]) -> None:
        """Their sources need not keep these any longer."""
        for notice in notices:
            request = pb.ReleaseRequest(offer_ids=[notice.offer_id])
            self._call(notice.source_address, "Release", request)

    def _check_heard(self, done: Any, offer_id: str, peer: str) -> None:
        """A piece of which nobody heard is not kept; its destination's deadline ends the wait."""
        if done.code() is grpc.StatusCode.OK and done.result().is_known:
            return
        if not self._closed.is_set():
            logger.warning("offer %s was not taken by %s: %s", offer_id, peer, done.code())
        self.release([offer_id])

    def _check_asked(self, done: Any, attempt_id: str, peer: str) -> None:
        """What nobody heard is not said again; who asked has a deadline."""
        if done.code() is not grpc.StatusCode.OK or not done.result().is_known:
            if not self._closed.is_set():
                logger.warning("pages of %s were asked of %s: %s", attempt_id, peer, done.code())

    def _open_pull(self, notice: Notice) -> Any:
        request = pb.PullRequest(offer_id=notice.offer_id)
        stub = KvTransferStub(self._channel(notice.source_address))
        call = stub.Pull(request, timeout=self._pull_seconds, metadata=self._security.metadata)
        with self._lock:
            self._pulls[notice.attempt_id] = call
        return call

    def _end_pull(self, notice: Notice) -> None:
        with self._lock:
            self._pulls.pop(notice.attempt_id, None)
        self.tell_released([notice])

    def _keep(self) -> None:
        """Ends leases that are over and renews those of what is queued here, idle or not."""
        while not self._closed.wait(self._lease_seconds / RENEWALS_PER_LEASE):
            with self._lock:
                self._offers.expire()
            by_source: dict[str, list[str]] = {}
            for lane in self._lanes.values():
                for notice in lane.queued():
                    by_source.setdefault(notice.source_address, []).append(notice.offer_id)
            for source, offer_ids in by_source.items():
                self._call(source, "Renew", pb.RenewRequest(offer_ids=offer_ids))

    def _call(self, target: str, verb: str, request: object) -> Any:
        """Say something without waiting for the answer."""
        stub = KvTransferStub(self._channel(target))
        method = getattr(stub, verb)
        return method.future(request, timeout=CALL_SECONDS, metadata=self._security.metadata)

    def _channel(self, target: str) -> grpc.Channel:
        with self._lock:
            if target not in self._channels:
                self._channels[target] = open_blocking_channel(target, self._security)
            return self._channels[target]


class _Puller:
    """Pulls the pieces of one destination, on its lane's thread."""

    def __init__(
        self,
        worker: str,
        target: Destination,
        transport: Transport,
        open_pull: Callable[[Notice], Any],
    ) -> None:
        self._worker, self._target = worker, target
        self._transport, self._open_pull = transport, open_pull
        self.on_end: Callable[[Notice], None] = lambda notice: None

    def pull(self, notice: Notice) -> ArrivedPiece:
        """Blocks until the piece is there. Failures become the piece's error."""
        call = None
        try:
            if notice.transport != self._transport.name:
                raise ConnectionError(
                    f"it is offered over {notice.transport}, and pulled over {self._transport.name}"
                )
            arrays: tuple[Any, ...] = ()
            if notice.num_pages:
                call = self._open_pull(notice)
                arrays = self._transport.pull(notice, call, self._target)
        except Exception as error:  # the network's and the runtime's own kinds
            reason = f"{notice.where}: {_why(error)}"
            return self._arrived(notice, (), TransferError(self._worker, reason))
        finally:
            if call is not None:
                call.cancel()
            self.on_end(notice)
        return self._arrived(notice, arrays, None)

    def _arrived(
        self, notice: Notice, arrays: tuple[Any, ...], error: TransferError | None
    ) -> ArrivedPiece:
        num_bytes = 0 if error else notice.num_bytes
        return arrived_piece(notice, arrays, num_bytes, notice.is_last, error)


def _why(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and hasattr(error, "details"):
        return f"{error.code().name}: {error.details()}"
    return str(error)
