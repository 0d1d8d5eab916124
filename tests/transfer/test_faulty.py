"""The transfer that goes wrong on purpose does so, and only where it was told to."""

import queue
import time

import jax
import numpy as np
import pytest

from jpd.errors import TransferError
from jpd.transfer.faulty import Fault, FaultyTransfer
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece
from tests.transfer import kv_pools


@pytest.fixture(scope="module")
def staging() -> tuple[jax.Array, ...]:
    source = kv_pools.make_side(0, 2, 2, seed=1)
    return kv_pools.gather(source, np.array([1, 2], np.int32), 2)


def run(
    staging: tuple[jax.Array, ...], fault: Fault, attempt_ids: str = "ab"
) -> tuple[list[ArrivedPiece], FaultyTransfer]:
    """Two pieces of each attempt under one fault: what was delivered, in order."""
    arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
    transfer = FaultyTransfer(InProcessTransfer(timeout_seconds=5), [fault])
    target = kv_pools.make_side(4, 2, 2, seed=2)
    transfer.register("decode-0", target.mesh, arrived.put)
    for attempt_id in attempt_ids:
        for page in (0, 2):
            transfer.offer(
                kv_pools.piece_of(staging, "decode-0", attempt_id=attempt_id, page_start=page)
            )
    end = time.monotonic() + 10
    while transfer.num_in_flight("decode-0"):
        assert time.monotonic() < end
        time.sleep(0.005)
    transfer.close()
    return [arrived.get_nowait() for _ in range(arrived.qsize())], transfer


def test_drop_loses_one_piece(staging: tuple[jax.Array, ...]) -> None:
    pieces, transfer = run(staging, Fault("drop", piece_index=1, attempt_id="a"))
    assert [(p.attempt_id, p.page_start) for p in pieces] == [("a", 0), ("b", 0), ("b", 2)]
    assert transfer.num_faults == 1


def test_raise_delivers_an_error(staging: tuple[jax.Array, ...]) -> None:
    pieces, _ = run(staging, Fault("raise", piece_index=0, attempt_id="b"))
    assert [isinstance(piece.error, TransferError) for piece in pieces] == [0, 0, 1, 0]


def test_delay_lets_others_overtake(staging: tuple[jax.Array, ...]) -> None:
    pieces, _ = run(staging, Fault("delay", attempt_id="a", delay_seconds=0.3))
    assert [(p.attempt_id, p.page_start) for p in pieces][-1] == ("a", 0)
    assert len(pieces) == 4


def test_corrupt_alters_one_page_of_one_layer(staging: tuple[jax.Array, ...]) -> None:
    pieces, transfer = run(staging, Fault("corrupt", layer=1))
    sent = [np.asarray(array) for array in staging]
    assert transfer.num_faults == 2
    for piece in pieces[::2]:
        received = [np.asarray(array) for array in piece.arrays]
        np.testing.assert_array_equal(received[0], sent[0])
        np.testing.assert_array_equal(received[1][1:], sent[1][1:])
        assert (received[1][0] != sent[1][0]).all()
    for piece in pieces[1::2]:
        np.testing.assert_array_equal(np.asarray(piece.arrays[1]), sent[1])
