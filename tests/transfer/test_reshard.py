"""Every pair of meshes: bytes equal, other pages untouched, nothing bounced over the host."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece
from tests.transfer import kv_pools

SOURCE_PAGES = np.array([5, 2, 3], np.int32)
TARGET_PAGES = np.array([1, 6, 4], np.int32)


@contextmanager
def counted_host_reads() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of all arrays whose values were fetched to the host, by any thread."""
    reads: list[tuple[int, ...]] = []
    value = ArrayImpl._value.fget

    def read(array: ArrayImpl) -> np.ndarray:
        reads.append(array.shape)
        return value(array)

    with mock.patch.object(ArrayImpl, "_value", property(read)):
        yield reads


def move(source: kv_pools.Side, target: kv_pools.Side) -> tuple[tuple[jax.Array, ...], int]:
    """Pages of `source` through a transfer into `target`: its new pool, and the host reads made."""
    arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
    transfer = InProcessTransfer(timeout_seconds=30)
    transfer.register("decode-0", target.mesh, arrived.put)
    partitions = kv_pools.wire_partitions(source, target)
    staging = kv_pools.gather(source, SOURCE_PAGES, partitions)
    try:
        with counted_host_reads() as reads:
            transfer.offer(kv_pools.piece_of(staging, "decode-0"))
            piece = arrived.get(timeout=20)
    finally:
        transfer.close()
    assert piece.error is None
    assert all(
        array.sharding == kv_pools.wire_sharding(target, partitions) for array in piece.arrays
    )
    return kv_pools.scatter(target, piece.arrays, TARGET_PAGES), len(reads)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("target_tensor", [1, 2, 4])
@pytest.mark.parametrize("source_tensor", [1, 2, 4])
def test_pages_arrive_whole_and_the_rest_is_untouched(
    source_tensor: int, target_tensor: int, num_heads: int
) -> None:
    source = kv_pools.make_side(0, source_tensor, num_heads, seed=1)
    target = kv_pools.make_side(4, target_tensor, num_heads, seed=2)
    expected = [np.array(layer) for layer in target.layers]
    for layer, sent in zip(expected, source.layers, strict=True):
        layer[TARGET_PAGES] = np.asarray(sent)[SOURCE_PAGES]
    old_pool = target.layers

    new_pool, num_host_reads = move(source, target)

    assert num_host_reads == 0
    for layer, want in zip(new_pool, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(layer), want)
        assert layer.sharding == target.sharding
    assert all(layer.is_deleted() for layer in old_pool), "the pool was copied, not donated"


def test_a_mesh_with_experts_is_a_source_and_a_target() -> None:
    source = kv_pools.make_side(0, 2, 2, seed=1, expert=2)
    target = kv_pools.make_side(4, 4, 4, seed=2)
    wide = kv_pools.make_side(0, 2, 4, seed=1, expert=2)
    for left, right in ((wide, target), (kv_pools.make_side(4, 1, 2, seed=3), source)):
        want = [np.asarray(layer)[SOURCE_PAGES] for layer in left.layers]
        new_pool, num_host_reads = move(left, right)
        assert num_host_reads == 0
        for layer, pages in zip(new_pool, want, strict=True):
            np.testing.assert_array_equal(np.asarray(layer)[TARGET_PAGES], pages)


def test_the_naive_move_between_splits_is_caught() -> None:
    """The count above can fail: a device_put from 2 parts to 4 goes through the host."""
    source = kv_pools.make_side(0, 2, 4, seed=1)
    target = kv_pools.make_side(4, 4, 4, seed=2)
    with counted_host_reads() as reads:
        jax.block_until_ready(jax.device_put(source.layers, target.sharding))
    assert len(reads) == len(source.layers)
