"""A transfer on paper: every message and every copy waits until the explorer lets it happen.

One endpoint per worker, as if each lived in a process of its own: the source keeps its `Offers`,
the destination hears of them, renews their leases while they are queued, pulls, and releases.
Messages may be lost, copies may fail, and everything may come in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.offers import LateReadError, Offers
from jpd.transfer.protocol import (
    ArrivedPiece,
    Deliver,
    KVPiece,
    PageRequest,
    PieceRange,
    Serve,
    arrived_piece,
)


@dataclass(frozen=True, slots=True)
class _Offered(PieceRange):
    """What a destination knows of a piece that it has not pulled yet."""

    source: str
    offer_id: str
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy in flight."""

    offered: _Offered
    piece: KVPiece
    offers: Offers[KVPiece]  # where it is kept: of a source that may have been lost since


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that can happen next: `do` it, or `lose` it where a network could."""

    name: str
    do: Callable[[], None]
    lose: Callable[[], None] | None = None


class PaperNetwork:
    """All endpoints and the messages between them."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self._lease_seconds, self._clock = lease_seconds, clock
        self._endpoints: dict[str, PaperTransfer] = {}
        self._messages: list[Happening] = []
        self._num_starts = 0

    def endpoint(self, worker: str) -> "PaperTransfer":
        """The endpoint of a worker; a new one takes the place of one that was lost."""
        self._num_starts += 1
        offers = Offers[KVPiece](self._lease_seconds, self._clock, f"{worker}#{self._num_starts}")
        self._endpoints[worker] = PaperTransfer(worker, self, offers)
        return self._endpoints[worker]

    def find(self, worker: str) -> "PaperTransfer":
        return self._endpoints[worker]

    def send(self, name: str, do: Callable[[], None]) -> None:
        """A message on its way: it arrives when the explorer says so, or never."""

        def arrive() -> None:
            self._messages.remove(message)
            do()

        def lose() -> None:
            self._messages.remove(message)

        message = Happening(name, arrive, lose)
        self._messages.append(message)

    def happenings(self) -> list[Happening]:
        """Everything that may happen next, in an order that depends on nothing but the past."""
        found = list(self._messages)
        for endpoint in self._endpoints.values():
            found += endpoint.happenings()
        return found

    def sweep(self) -> None:
        """What every endpoint does by the clock: leases end, and those of queued pieces do not."""
        for endpoint in self._endpoints.values():
            endpoint.sweep()

    @property
    def num_kept(self) -> int:
        """Pieces that some source still keeps or some destination still waits for."""
        ends = self._endpoints.values()
        return sum(len(end.offers) + end.num_in_flight(end.worker) for end in ends)


class PaperTransfer:
    """KVTransfer of one worker."""

    def __init__(self, worker: str, network: PaperNetwork, offers: Offers[KVPiece]) -> None:
        self.worker, self.offers = worker, offers
        self._network = network
        self._deliver: Deliver | None = None
        self._serve: Serve | None = None
        self._queue: list[_Offered] = []
        self._copies: list[_Copy] = []
        self._unwanted: set[str] = set()
        self._is_closed = False

    # KVTransfer.

    def register(
        self, worker: str, mesh: Mesh | None, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        self._deliver, self._serve = deliver, serve

    def offer(self, piece: KVPiece) -> None:
        offer_id = self.offers.add(piece)
        offered = _Offered(
            attempt_id=piece.attempt_id,
            layer_start=piece.layer_start,
            num_layers=piece.num_layers,
            page_start=piece.page_start,
            num_pages=piece.num_pages,
            source=self.worker,
            offer_id=offer_id,
            is_last=piece.is_last,
        )
        target = self._network.find(piece.destination)
        self._network.send(f"announce {offer_id}", lambda: target.hear(offered))

    def ask(self, request: PageRequest) -> None:
        source = self._network.find(request.source)
        pages = f"{request.page_start}+{request.num_pages}"
        name = f"{self.worker} asks {request.source} for pages {pages}"
        self._network.send(name, lambda: source.hear_request(request))

    def cancel(self, attempt_id: str) -> None:
        self.offers.cancel(attempt_id)
        for offered in [one for one in self._queue if one.attempt_id == attempt_id]:
            self._queue.remove(offered)
            self._release(offered)
        if any(copy.offered.attempt_id == attempt_id for copy in self._copies):
            self._unwanted.add(attempt_id)

    def num_in_flight(self, worker: str) -> int:
        return len(self._queue) + len(self._copies)

    def close(self) -> None:
        """The process is gone, and with it what it kept and what it waited for.

        Sources see that the reader of a copy is gone.
        """
        self._is_closed = True
        self.offers.clear()
        self._queue.clear()
        for copy in list(self._copies):
            self._end(copy)

    # Driven by the explorer.

    def hear(self, offered: _Offered) -> None:
        if not self._is_closed:
            self._queue.append(offered)

    def hear_request(self, request: PageRequest) -> None:
        if not self._is_closed and self._serve is not None:
            self._serve(request)

    def sweep(self) -> None:
        for offered in self._queue:
            self._network.find(offered.source).offers.renew([offered.offer_id])
        self.offers.expire()

    def happenings(self) -> list[Happening]:
        found = [Happening(f"pull {one.offer_id}", _bound(self._begin, one)) for one in self._queue]
        for copy in self._copies:
            arrive, lose = _bound(self._arrive, copy), _bound(self._break, copy)
            found.append(Happening(f"copy {copy.offered.offer_id}", arrive, lose))
        return found

    def _begin(self, offered: _Offered) -> None:
        self._queue.remove(offered)
        offers = self._network.find(offered.source).offers
        try:
            piece = offers.begin_copy(offered.offer_id)
        except LateReadError as error:
            self._fail(offered, str(error))
            return
        self._copies.append(_Copy(offered, piece, offers))

    def _arrive(self, copy: _Copy) -> None:
        self._end(copy)
        self._hand_over(arrived_piece(copy.offered, copy.piece.arrays, 1, copy.offered.is_last))
        self._release(copy.offered)

    def _break(self, copy: _Copy) -> None:
        self._end(copy)
        self._fail(copy.offered, "the copy broke")
        self._release(copy.offered)

    def _fail(self, offered: _Offered, reason: str) -> None:
        error = TransferError(self.worker, reason)
        self._hand_over(arrived_piece(offered, (), 0, offered.is_last, error))

    def _end(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        copy.offers.end_copy(copy.offered.offer_id)

    def _hand_over(self, arrived: ArrivedPiece) -> None:
        if not self._is_closed and self._deliver and arrived.attempt_id not in self._unwanted:
            self._deliver(arrived)

    def _release(self, offered: _Offered) -> None:
        source = self._network.find(offered.source)
        self._network.send(
            f"release {offered.offer_id}", lambda: source.offers.release(offered.offer_id)
        )


def _bound(action: Callable[..., None], one: object) -> Callable[[], None]:
    return lambda: action(one)
