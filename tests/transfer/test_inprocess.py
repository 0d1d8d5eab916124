"""Queueing, deadlines, cancelling and closing of the in-process transfer."""

import functools
import queue
import threading
import time
from collections.abc import Callable

import pytest

from jpd.errors import TransferError
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece, KVPiece
from tests.transfer import kv_pools

MakePiece = Callable[..., KVPiece]


class Destination:
    """Records what arrives; a closed `gate` holds its transfer thread inside `deliver`."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def deliver(self, piece: ArrivedPiece) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        self.arrived.put(piece)

    def next(self) -> ArrivedPiece:
        return self.arrived.get(timeout=10)


@pytest.fixture(scope="module")
def source() -> kv_pools.Side:
    side = kv_pools.make_side(0, 1, 2)
    side.fill(1)
    return side


@pytest.fixture(scope="module")
def target() -> kv_pools.Side:
    return kv_pools.make_side(4, 1, 2)


@pytest.fixture(scope="module")
def make_piece(source: kv_pools.Side, target: kv_pools.Side) -> MakePiece:
    return functools.partial(kv_pools.piece_of, source, kv_pools.wire_between(source, target))


@pytest.fixture
def destination() -> Destination:
    return Destination()


@pytest.fixture
def transfer(target: kv_pools.Side, destination: Destination):
    transfer = InProcessTransfer(timeout_seconds=5)
    transfer.register("decode-0", target.mesh, destination.deliver)
    yield transfer
    destination.gate.set()
    transfer.close()


def test_pieces_arrive_in_order_and_the_gauge_returns_to_zero(
    transfer: InProcessTransfer, destination: Destination, make_piece: MakePiece
) -> None:
    destination.gate.clear()
    pieces = [make_piece(page_start=2 * i) for i in range(3)]
    for piece in pieces:
        transfer.offer(piece)
    assert transfer.num_in_flight("decode-0") == 3
    destination.gate.set()
    for piece in pieces:
        kv_pools.assert_same_piece(piece, destination.next())
    wait_until(lambda: transfer.num_in_flight("decode-0") == 0)


def test_cancel_drops_what_is_queued_and_leaves_other_attempts(
    transfer: InProcessTransfer, destination: Destination, make_piece: MakePiece
) -> None:
    destination.gate.clear()
    for attempt_id in ("first", "gone", "gone", "kept"):
        transfer.offer(make_piece(attempt_id=attempt_id))
    assert destination.entered.wait(10)
    transfer.cancel("gone")
    transfer.cancel("gone")
    assert transfer.num_in_flight("decode-0") == 2
    destination.gate.set()
    assert [destination.next().attempt_id for _ in range(2)] == ["first", "kept"]


def test_a07_a_piece_past_its_deadline_is_refused(
    transfer: InProcessTransfer, destination: Destination, make_piece: MakePiece
) -> None:
    late = make_piece(offered_time=time.monotonic() - 6)
    transfer.offer(late)
    transfer.offer(make_piece(attempt_id="fresh"))
    refused = destination.next()
    assert isinstance(refused.error, TransferError) and "decode-0" in str(refused.error)
    assert refused.arrays == ()
    assert destination.next().error is None


def test_a10_a_copy_that_cannot_start_is_told_to_the_destination(
    transfer: InProcessTransfer, destination: Destination, make_piece: MakePiece
) -> None:
    broken = make_piece()
    broken.arrays[1].delete()
    transfer.offer(broken)
    arrived = destination.next()
    assert isinstance(arrived.error, TransferError) and arrived.arrays == ()


def test_offer_does_not_wait_for_a_stuck_destination(
    transfer: InProcessTransfer, destination: Destination, make_piece: MakePiece
) -> None:
    destination.gate.clear()
    start = time.monotonic()
    for _ in range(50):
        transfer.offer(make_piece())
    assert time.monotonic() - start < 1


def test_a_stuck_destination_does_not_hold_up_another(
    transfer: InProcessTransfer,
    destination: Destination,
    target: kv_pools.Side,
    make_piece: MakePiece,
) -> None:
    other = Destination()
    transfer.register("decode-1", target.mesh, other.deliver)
    destination.gate.clear()
    transfer.offer(make_piece())
    transfer.offer(make_piece(destination="decode-1"))
    assert other.next().error is None


def test_close_drops_the_queue_and_ends_the_threads(
    target: kv_pools.Side, make_piece: MakePiece
) -> None:
    destination = Destination()
    transfer = InProcessTransfer(timeout_seconds=5)
    transfer.register("decode-9", target.mesh, destination.deliver)
    destination.gate.clear()
    for _ in range(4):
        transfer.offer(make_piece(destination="decode-9"))
    assert destination.entered.wait(10)
    threading.Timer(0.1, destination.gate.set).start()
    transfer.close()
    assert destination.arrived.qsize() == 1
    assert not [t for t in threading.enumerate() if t.name == "transfer-decode-9"]


def wait_until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
