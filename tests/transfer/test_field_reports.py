"""Faults that users of other systems met when KV moves, tried on our transfers."""

import gc
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jpd.rpc.security import Security
from jpd.transfer.faulty import Fault, FaultyTransfer
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece
from jpd.transfer.remote import RemoteTransfer
from jpd.transfer.transports import StagedTransport
from tests.transfer import kv_pools


def remote(lease_seconds: float = 5.0) -> RemoteTransfer:
    return RemoteTransfer(
        InProcessTransfer(5.0),
        StagedTransport(),
        "127.0.0.1",
        Security(),
        lease_seconds=lease_seconds,
        pull_seconds=10.0,
    )


class Arrivals:
    """What was delivered, by attempt and page."""

    def __init__(self) -> None:
        self.pieces: list[ArrivedPiece] = []
        self._changed = threading.Condition()

    def take(self, piece: ArrivedPiece) -> None:
        with self._changed:
            self.pieces.append(piece)
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float = 20.0) -> list[ArrivedPiece]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.pieces) >= count, seconds)
            return list(self.pieces)


@pytest.mark.parametrize("round_number", range(5))
def test_c06_a_cold_start_with_everything_at_once(round_number: int) -> None:
    """The first offers of many threads meet peers that nobody has talked to yet."""
    source = kv_pools.make_side(0, 1, 2)
    targets = [kv_pools.make_side(4, 1, 2), kv_pools.make_side(4, 2, 2)]
    sender, receivers, arrivals = remote(), [remote(), remote()], [Arrivals(), Arrivals()]
    try:
        for number, (receiver, target) in enumerate(zip(receivers, targets, strict=True)):
            receiver.register(f"decode-{number}", target.mesh, arrivals[number].take)
        sender.set_peers({f"decode-{n}": at.address for n, at in enumerate(receivers)})
        pieces = [
            kv_pools.piece_of(
                source,
                kv_pools.wire_between(source, targets[number % 2]),
                destination=f"decode-{number % 2}",
                attempt_id=f"a{number}",
            )
            for number in range(16)
        ]
        threads = [threading.Thread(target=sender.offer, args=(piece,)) for piece in pieces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        for found in arrivals:
            got = found.wait_for(8)
            assert len(got) == 8 and all(piece.error is None for piece in got)
    finally:
        for transfer in (sender, *receivers):
            transfer.close()


def test_c02_a_destination_that_is_not_there_costs_one_lease_at_most() -> None:
    source = kv_pools.make_side(0, 1, 2)
    wire = kv_pools.wire_between(source, source)
    sender = remote(lease_seconds=0.3)
    try:
        sender.set_peers({"decode-0": "127.0.0.1:9"})
        start = time.monotonic()
        for number in range(20):
            sender.offer(kv_pools.piece_of(source, wire, attempt_id=f"a{number}"))
        assert time.monotonic() - start < 1.0
        while sender.num_kept:
            assert time.monotonic() - start < 3.0
            time.sleep(0.01)
    finally:
        sender.close()


def test_c07_closing_in_the_middle_ends_every_thread_and_keeps_nothing() -> None:
    source, target = kv_pools.make_side(0, 1, 2), kv_pools.make_side(4, 1, 2)
    wire = kv_pools.wire_between(source, target)
    sender, receiver, arrivals = remote(), remote(), Arrivals()
    receiver.register("decode-0", target.mesh, arrivals.take)
    sender.set_peers({"decode-0": receiver.address})
    before = {thread.name for thread in threading.enumerate()}
    for number in range(30):
        sender.offer(kv_pools.piece_of(source, wire, attempt_id=f"a{number}"))
    start = time.monotonic()
    receiver.close()
    sender.close()
    assert time.monotonic() - start < 5.0
    assert sender.num_kept == 0
    left = {t.name for t in threading.enumerate()} - before
    assert not [name for name in left if name.startswith(("transfer-", "kv-service"))]


def test_d15_an_array_of_which_only_a_part_is_here_is_refused() -> None:
    source = kv_pools.make_side(0, 1, 2)
    piece = kv_pools.piece_of(source, kv_pools.wire_between(source, source))
    partly = SimpleNamespace(is_fully_addressable=False, shape=(1,), dtype=np.float32)
    sender = remote()
    try:
        sender.set_peers({"decode-0": "127.0.0.1:9"})
        object.__setattr__(piece, "arrays", (piece.arrays[0], partly))
        with pytest.raises(OSError, match="not all of its devices are of this process"):
            sender.offer(piece)
        assert sender.num_kept == 0
    finally:
        sender.close()


@pytest.mark.parametrize("action", [None, "drop", "raise", "delay"])
def test_h06_no_array_outlives_its_piece_however_that_ended(action: str | None) -> None:
    source, target = kv_pools.make_side(0, 2, 2), kv_pools.make_side(4, 1, 2)
    wire = kv_pools.wire_between(source, target)
    faults = [Fault(action, delay_seconds=0.01)] if action else []  # type: ignore[arg-type]
    transfer, arrivals = FaultyTransfer(InProcessTransfer(5.0), faults), Arrivals()
    transfer.register("decode-0", target.mesh, arrivals.take)

    def move(name: str) -> None:
        for page in (0, 2):
            transfer.offer(kv_pools.piece_of(source, wire, attempt_id=name, page_start=page))
        while transfer.num_in_flight("decode-0"):
            time.sleep(0.002)
        for piece in arrivals.wait_for(1 if action == "drop" else 2):
            if piece.error is None:
                target.moves.scatter(target.cache, piece.arrays, (1, 2))
        arrivals.pieces.clear()

    counts = []
    try:
        for number in range(20):
            move(f"a{number}")
            if number in (3, 19):
                gc.collect()
                counts.append(len(jax.live_arrays()))
    finally:
        transfer.close()
    assert counts[0] == counts[1]


def test_g05_as_many_arrays_travel_for_one_page_as_for_many() -> None:
    source, target = kv_pools.make_side(0, 2, 4), kv_pools.make_side(4, 4, 4)
    wire = kv_pools.wire_between(source, target)
    counts = {
        num_pages: len(kv_pools.piece_of(source, wire, range(1, num_pages + 1)).arrays)
        for num_pages in (1, 2, 4)
    }
    assert set(counts.values()) == {kv_pools.NUM_LAYERS * wire.slices}
