"""Pieces between two real processes, each with devices of its own, over both transports."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpd.rpc.security import Security
from jpd.transfer.faulty import corrupted
from jpd.transfer.notice import PART_BYTES, ArrayForm, parts
from jpd.transfer.remote import RemoteTransfer
from tests.transfer import kv_pools
from tests.transfer.peer_process import HEADS, LEASE_SECONDS, PAGE_SIZE, make_transfer, target_of

TOKEN = "a secret of these tests"
WORKERS = ("decode-1", "decode-2", "decode-4")


class Peer:
    """The other process, and what it says."""

    def __init__(self, repo: Path, transport: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.peer_process", transport, TOKEN],
            cwd=repo,
            env={**os.environ, "PYTHONPATH": str(repo)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = self.next()["address"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("peer: "):
                self._lines.put(json.loads(line[6:]))

    def next(self, seconds: float = 60.0) -> dict[str, Any]:
        return self._lines.get(timeout=seconds)

    def is_silent_for(self, seconds: float) -> bool:
        try:
            self.next(seconds)
        except queue.Empty:
            return True
        return False

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module", params=["host_staged", "jax_transfer"])
def pair(request: pytest.FixtureRequest, repo: Path) -> Iterator[tuple[RemoteTransfer, Peer]]:
    peer = Peer(repo, request.param)
    transfer = make_transfer(request.param, TOKEN)
    transfer.set_peers(dict.fromkeys(WORKERS, peer.address))
    yield transfer, peer
    transfer.close()
    peer.close()


def wait_until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("source_tensor", [1, 2, 4])
def test_a06_d03_the_same_bytes_as_in_one_process(
    pair: tuple[RemoteTransfer, Peer], source_tensor: int, dtype: str
) -> None:
    transfer, peer = pair
    source = kv_pools.make_side(0, source_tensor, HEADS, page_size=2 * PAGE_SIZE)
    source.fill(source_tensor)
    for target_tensor in (1, 2, 4):
        here, worker = target_of(target_tensor), f"decode-{target_tensor}"
        wire = kv_pools.wire_between(source, here, dtype=dtype)
        piece = kv_pools.piece_of(source, wire, (3, 1), destination=worker, page_start=2)
        alone = kv_pools.pull(here, piece)
        here.moves.scatter(here.cache, alone.arrays, (3, 4, 5, 6))
        transfer.offer(piece)
        told = peer.next()
        assert (told["worker"], told["attempt"], told["start"]) == (worker, "a", 2), told
        assert told.get("num_bytes") == piece.num_bytes, told
        for layer, values in zip(here.read(), told["values"], strict=True):
            np.testing.assert_array_equal(np.array(values, np.float32), layer[3:7])
    wait_until(lambda: transfer.num_kept == 0)
    assert transfer.num_unknown == 0, "a06: no release named what is not kept"


@pytest.mark.slow
def test_many_pieces_of_many_attempts_arrive_once_and_nothing_is_kept(
    pair: tuple[RemoteTransfer, Peer],
) -> None:
    transfer, peer = pair
    source = kv_pools.make_side(0, 2, HEADS)
    source.fill(1)
    wire = kv_pools.wire_between(source, target_of(2))
    sent = [(f"m{number}", start) for number in range(10) for start in (0, 2, 4)]
    for attempt_id, start in sent:
        transfer.offer(
            kv_pools.piece_of(
                source, wire, destination="decode-2", attempt_id=attempt_id, page_start=start
            )
        )
    told = [peer.next() for _ in sent]
    assert sorted((one["attempt"], one["start"]) for one in told) == sorted(sent)
    wait_until(lambda: transfer.num_kept == 0)


@pytest.mark.slow
def test_a07_a_read_after_the_lease_is_refused_not_served(
    pair: tuple[RemoteTransfer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, peer = pair
    source = kv_pools.make_side(0, 1, HEADS)
    wire = kv_pools.wire_between(source, target_of(1))
    with transfer._lock:  # nobody looks while the lease ends
        offer = transfer._offers.add
        monkeypatch.setattr(transfer._offers, "add", lambda piece: late(transfer, offer(piece)))
    transfer.offer(kv_pools.piece_of(source, wire, destination="decode-1", attempt_id="late"))
    told = peer.next()
    assert told["attempt"] == "late" and "NOT_FOUND" in told["error"], told
    wait_until(lambda: transfer.num_kept == 0)


def late(transfer: RemoteTransfer, offer_id: str) -> str:
    transfer._offers._offers[offer_id].lease_end = 0.0
    return offer_id


@pytest.mark.slow
def test_a18_what_nobody_pulls_is_let_go_after_its_lease_while_idle(
    pair: tuple[RemoteTransfer, Peer],
) -> None:
    transfer, peer = pair
    source = kv_pools.make_side(0, 1, HEADS)
    wire = kv_pools.wire_between(source, target_of(1))
    known = dict.fromkeys(WORKERS, peer.address)
    transfer.set_peers({**known, "decode-1": "127.0.0.1:1"})  # nobody is there
    start = time.monotonic()
    transfer.offer(kv_pools.piece_of(source, wire, destination="decode-1"))
    assert time.monotonic() - start < 0.5, "an offer does not wait for the network"
    wait_until(lambda: transfer.num_kept == 0, seconds=3 * LEASE_SECONDS)
    transfer.set_peers({})
    with pytest.raises(OSError, match="decode-1"):
        transfer.offer(kv_pools.piece_of(source, wire, destination="decode-1"))
    transfer.set_peers(known)
    transfer.offer(kv_pools.piece_of(source, wire, destination="decode-1", attempt_id="after"))
    assert peer.next()["attempt"] == "after", "c04: the peer is used again"


@pytest.mark.slow
def test_a_cancelled_attempt_is_kept_by_nobody(pair: tuple[RemoteTransfer, Peer]) -> None:
    transfer, peer = pair
    source = kv_pools.make_side(0, 1, HEADS)
    wire = kv_pools.wire_between(source, target_of(1))
    for number in range(20):
        piece = kv_pools.piece_of(
            source, wire, destination="decode-1", attempt_id=f"c{number}", page_start=0
        )
        transfer.offer(piece)
        transfer.cancel(f"c{number}")
    wait_until(lambda: transfer.num_kept == 0, seconds=1.0)
    while not peer.is_silent_for(0.3):
        pass  # those that were quicker than their cancel, or were told that they are late
    transfer.offer(kv_pools.piece_of(source, wire, destination="decode-1", attempt_id="then"))
    assert peer.next()["attempt"] == "then"


@pytest.mark.slow
def test_a_caller_without_the_token_is_refused(repo: Path) -> None:
    peer = Peer(repo, "host_staged")
    transfer = make_transfer("host_staged", "another token")
    transfer.set_peers({"decode-1": peer.address})
    source = kv_pools.make_side(0, 1, HEADS)
    wire = kv_pools.wire_between(source, target_of(1))
    transfer.offer(kv_pools.piece_of(source, wire, destination="decode-1"))
    wait_until(lambda: transfer.num_kept == 0)
    assert peer.is_silent_for(0.5)
    transfer.close()
    peer.close()


def test_a_piece_of_more_than_two_gibibytes_is_cut_without_a_gap() -> None:
    form = ArrayForm((512, 32, 8, 7000), "bfloat16")
    assert form.num_bytes == 512 * 32 * 8 * 7000 * 2 > 1 << 30
    huge = 5 * (1 << 30) + 12345
    end = 0
    for start, stop in parts(huge, 1 << 28):
        assert start == end and 0 < stop - start <= 1 << 28
        end = stop
    assert end == huge
    assert list(parts(0)) == [] and list(parts(PART_BYTES)) == [(0, PART_BYTES)]
    assert list(parts(PART_BYTES + 1))[-1] == (PART_BYTES, PART_BYTES + 1)


def test_altered_arrays_are_other_arrays() -> None:
    """`corrupted` stands for the network in test_wire_form; it must really alter something."""
    source = kv_pools.make_side(0, 1, HEADS)
    source.fill(1)
    piece = kv_pools.piece_of(source, kv_pools.wire_between(source, target_of(1)))
    assert (np.asarray(corrupted(piece.arrays, 0)[0]) != np.asarray(piece.arrays[0])).any()
    assert Security().token == ""
