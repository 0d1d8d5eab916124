"""The source's book of offered pieces: who may still read them, and until when they are kept.

An offer is kept until its destination releases it, its attempt is cancelled or its lease ends,
whichever comes first, but never while a copy of it is in flight. The destination renews the lease
of what it has queued. A read that comes too late is refused: what was kept is gone, and nothing
else is ever served in its place. Pure bookkeeping: no threads, no devices. The transports between
processes hold one each, under a lock of theirs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Offered(Protocol):
    """What can be offered: pieces of attempts."""

    @property
    def attempt_id(self) -> str: ...


Piece = TypeVar("Piece", bound=Offered)


class LateReadError(Exception):
    """A read of an offer that is not kept any more, or never was."""


@dataclass(slots=True)
class _Offer(Generic[Piece]):
    piece: Piece
    lease_end: float
    num_copies: int = 0  # in flight
    is_doomed: bool = False  # goes with the end of its last copy


class Offers(Generic[Piece]):
    """Pieces by offer id.

    `incarnation` is new with every start of the process, so that an id of a source that was lost
    never names a piece of the one that came back in its place.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float], incarnation: str) -> None:
        self._lease_seconds, self._clock = lease_seconds, clock
        self._incarnation = incarnation
        self._offers: dict[str, _Offer[Piece]] = {}
        self._num_added = 0
        self.num_unknown = 0  # messages that named an offer not kept (any more)
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def next_expiry(self) -> float:
        """When the first lease ends, by the clock; infinite when nothing waits for a reader."""
        ends = (offer.lease_end for offer in self._offers.values() if not offer.num_copies)
        return min(ends, default=float("inf"))

    def add(self, piece: Piece) -> str:
        """Keep a piece for its destination; returns the id by which it is pulled."""
        self._num_added += 1
        offer_id = f"{self._incarnation}.{self._num_added}"
        self._offers[offer_id] = _Offer(piece, self._clock() + self._lease_seconds)
        return offer_id

    def renew(self, offer_ids: Iterable[str]) -> None:
        """The destination still wants these."""
        lease_end = self._clock() + self._lease_seconds
        for offer_id in offer_ids:
            offer = self._find(offer_id)
            if offer is not None:
                offer.lease_end = lease_end

    def begin_copy(self, offer_id: str) -> Piece:
        """The piece, kept until `end_copy`. Raises LateReadError."""
        offer = self._find(offer_id)
        if offer is None:
            raise LateReadError(f"offer {offer_id} is not kept here (any more)")
        offer.num_copies += 1
        return offer.piece

    def end_copy(self, offer_id: str) -> None:
        """A copy has ended, well or not; a failed one may be begun again within the lease."""
        offer = self._offers.get(offer_id)
        if offer is None:  # cleared in the meantime
            return
        offer.num_copies -= 1
        if offer.is_doomed and not offer.num_copies:
            del self._offers[offer_id]

    def release(self, offer_id: str) -> None:
        """The destination has the piece, or does not want it any more."""
        if self._find(offer_id) is not None:
            self._drop(offer_id)

    def cancel(self, attempt_id: str) -> None:
        """Keep nothing of this attempt. Idempotent."""
        for offer_id in [i for i, o in self._offers.items() if o.piece.attempt_id == attempt_id]:
            self._drop(offer_id)

    def expire(self) -> None:
        """Let go of what nobody asked for within its lease."""
        now = self._clock()
        for offer_id, offer in list(self._offers.items()):
            if offer.lease_end <= now and not offer.num_copies and not offer.is_doomed:
                self.num_expired += 1
                self._drop(offer_id)

    def clear(self) -> None:
        """Keep nothing, whoever reads: the end of the process."""
        self._offers.clear()

    def _find(self, offer_id: str) -> _Offer[Piece] | None:
        """An offer that may still be read; one whose lease has ended may not, swept or not."""
        offer = self._offers.get(offer_id)
        if offer is None or offer.is_doomed:
            self.num_unknown += 1
            return None
        if offer.lease_end <= self._clock() and not offer.num_copies:
            self.num_expired += 1
            self._drop(offer_id)
            return None
        return offer

    def _drop(self, offer_id: str) -> None:
        offer = self._offers[offer_id]
        if offer.num_copies:
            offer.is_doomed = True
        else:
            del self._offers[offer_id]
