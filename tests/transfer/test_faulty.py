"""The transfer that goes wrong on purpose does so, and only where it was told to."""

import queue
import time

import numpy as np
import pytest

from jpd.errors import TransferError
from jpd.transfer.faulty import Fault, FaultyTransfer, Stage
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece, KVPiece
from tests.transfer import kv_pools


def pieces_of(attempt_ids: str) -> list[KVPiece]:
    """Two pieces of each attempt."""
    source, target = kv_pools.make_side(0, 2, 2), kv_pools.make_side(4, 2, 2)
    source.fill(1)
    wire = kv_pools.wire_between(source, target)
    return [
        kv_pools.piece_of(source, wire, attempt_id=attempt_id, page_start=page)
        for attempt_id in attempt_ids
        for page in (0, 2)
    ]


def run(
    fault: Fault, attempt_ids: str = "ab", *, timeout_seconds: float = 5
) -> tuple[list[ArrivedPiece], FaultyTransfer]:
    """All pieces under one fault: what was delivered, in order."""
    arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
    transfer = FaultyTransfer(InProcessTransfer(timeout_seconds), [fault])
    transfer.register("decode-0", kv_pools.make_side(4, 2, 2).mesh, arrived.put)
    for piece in pieces_of(attempt_ids):
        transfer.offer(piece)
    end = time.monotonic() + 10
    while transfer.num_in_flight("decode-0"):
        assert time.monotonic() < end
        time.sleep(0.005)
    transfer.close()
    return [arrived.get_nowait() for _ in range(arrived.qsize())], transfer


STAGES: list[Stage] = ["offer", "pull", "arrive"]


@pytest.mark.parametrize("stage", STAGES)
def test_drop_loses_one_piece(stage: Stage) -> None:
    pieces, transfer = run(Fault("drop", piece_index=1, attempt_id="a", stage=stage))
    assert [(p.attempt_id, p.page_start) for p in pieces] == [("a", 0), ("b", 0), ("b", 2)]
    assert transfer.num_faults == 1


@pytest.mark.parametrize("stage", ["pull", "arrive"])
def test_raise_delivers_an_error(stage: Stage) -> None:
    pieces, _ = run(Fault("raise", piece_index=0, attempt_id="b", stage=stage))
    assert [isinstance(piece.error, TransferError) for piece in pieces] == [0, 0, 1, 0]


def test_an_offer_that_raises_is_told_to_who_offers() -> None:
    with pytest.raises(OSError, match="made to fail"):
        run(Fault("raise", piece_index=1, stage="offer"))


@pytest.mark.parametrize("stage", STAGES)
def test_delay_lets_others_overtake(stage: Stage) -> None:
    pieces, _ = run(Fault("delay", attempt_id="a", delay_seconds=0.3, stage=stage))
    assert [(p.attempt_id, p.page_start) for p in pieces][-1] == ("a", 0)
    assert len(pieces) == 4 and all(piece.error is None for piece in pieces)


def test_a07_a_piece_that_is_pulled_too_late_is_refused() -> None:
    fault = Fault("delay", attempt_id="a", delay_seconds=0.9, stage="pull")
    pieces, _ = run(fault, timeout_seconds=0.7)
    assert isinstance(pieces[-1].error, TransferError) and pieces[-1].arrays == ()
    fault = Fault("delay", attempt_id="a", delay_seconds=0.9, stage="offer")
    pieces, _ = run(fault, timeout_seconds=0.7)
    assert pieces[-1].error is None, "it is not older than its offer"


def test_a_release_that_is_late_keeps_the_piece_in_flight() -> None:
    start = time.monotonic()
    pieces, _ = run(Fault("delay", attempt_id="a", delay_seconds=0.3, stage="release"))
    assert len(pieces) == 4 and time.monotonic() - start >= 0.3


def test_a_release_can_only_be_late_or_lost() -> None:
    with pytest.raises(ValueError, match="cannot corrupt"):
        Fault("corrupt", stage="release")


@pytest.mark.parametrize("stage", STAGES)
def test_corrupt_alters_one_page_of_one_layer(stage: Stage) -> None:
    pieces, transfer = run(Fault("corrupt", layer=1, stage=stage))
    sent = [np.asarray(array) for array in pieces_of("a")[0].arrays]
    assert transfer.num_faults == 2
    for piece in pieces[::2]:
        received = [np.asarray(array) for array in piece.arrays]
        np.testing.assert_array_equal(received[0], sent[0])
        np.testing.assert_array_equal(received[1][1:], sent[1][1:])
        assert (received[1][0] != sent[1][0]).all()
    for piece in pieces[1::2]:
        np.testing.assert_array_equal(np.asarray(piece.arrays[1]), sent[1])
