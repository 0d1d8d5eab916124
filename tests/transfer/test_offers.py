"""The source's book of offers, by its clock: who may read what, and when it is let go."""

from dataclasses import dataclass

import pytest

from jpd.transfer.offers import LateReadError, Offers

LEASE_SECONDS = 10.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Piece:
    attempt_id: str


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def offers(clock: Clock) -> Offers[Piece]:
    return Offers(LEASE_SECONDS, clock, "this-life")


@pytest.mark.parametrize("is_swept", [False, True])
def test_a07_a_lease_that_has_ended_is_never_read(
    offers: Offers[Piece], clock: Clock, is_swept: bool
) -> None:
    offer_id = offers.add(Piece("a"))
    assert offers.next_expiry == clock.now + LEASE_SECONDS
    clock.now += LEASE_SECONDS
    if is_swept:
        offers.expire()
    with pytest.raises(LateReadError, match=offer_id):
        offers.begin_copy(offer_id)
    assert (len(offers), offers.num_expired) == (0, 1)


def test_a07_a_renewed_lease_counts_from_its_renewal(offers: Offers[Piece], clock: Clock) -> None:
    kept, other = offers.add(Piece("a")), offers.add(Piece("b"))
    clock.now += LEASE_SECONDS - 1
    offers.renew([kept, "unknown"])
    clock.now += LEASE_SECONDS - 1
    offers.expire()
    assert offers.begin_copy(kept) == Piece("a")
    with pytest.raises(LateReadError):
        offers.begin_copy(other)


@pytest.mark.parametrize("end", ["release", "cancel", "expire"])
def test_a18_nothing_is_let_go_while_a_copy_of_it_is_in_flight(
    offers: Offers[Piece], clock: Clock, end: str
) -> None:
    offer_id = offers.add(Piece("a"))
    for _ in range(2):
        offers.begin_copy(offer_id)
    clock.now += 2 * LEASE_SECONDS
    {
        "release": lambda: offers.release(offer_id),
        "cancel": lambda: offers.cancel("a"),
        "expire": offers.expire,
    }[end]()
    assert len(offers) == 1
    offers.end_copy(offer_id)
    assert len(offers) == 1, "the other copy still reads it"
    offers.end_copy(offer_id)
    offers.expire()
    assert len(offers) == 0


def test_who_was_let_go_may_not_be_read_by_further_copies(offers: Offers[Piece]) -> None:
    offer_id = offers.add(Piece("a"))
    offers.begin_copy(offer_id)
    offers.cancel("a")
    with pytest.raises(LateReadError):
        offers.begin_copy(offer_id)


def test_a_cancel_is_of_one_attempt_and_may_come_twice(offers: Offers[Piece]) -> None:
    gone = [offers.add(Piece("a")) for _ in range(2)]
    kept = offers.add(Piece("b"))
    for _ in range(2):
        offers.cancel("a")
    assert len(offers) == 1 and offers.begin_copy(kept) == Piece("b")
    for offer_id in gone:
        offers.release(offer_id)
    assert offers.num_unknown == 2


def test_an_id_of_an_earlier_life_names_nothing_of_this_one(
    offers: Offers[Piece], clock: Clock
) -> None:
    offers.add(Piece("a"))
    of_before = Offers[Piece](LEASE_SECONDS, clock, "life-before").add(Piece("z"))
    with pytest.raises(LateReadError):
        offers.begin_copy(of_before)
