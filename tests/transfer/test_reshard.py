"""Every pair of meshes: bytes equal, other pages untouched, nothing bounced over the host."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from jpd.transfer.protocol import ArrivedPiece, KVPiece
from jpd.transfer.wire import Wire
from tests.transfer import kv_pools

MLA = (4, 2)
"""The latent and the rotary key: one cached head for all."""


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


def pull(target: kv_pools.Side, piece: KVPiece) -> tuple[ArrivedPiece, int]:
    """A piece through a transfer; and how many values were read on the host meanwhile."""
    with counted_host_reads() as reads:
        return kv_pools.pull(target, piece), len(reads)


def move(
    source: kv_pools.Side,
    target: kv_pools.Side,
    wire: Wire,
    source_pages: list[int],
    target_pages: list[int],
    start: int = 0,
) -> int:
    """Wire pages from `start` on of a sequence in source_pages into target_pages."""
    piece = kv_pools.piece_of(source, wire, source_pages, start=start, num_pages=len(target_pages))
    arrived, num_reads = pull(target, piece)
    assert arrived.error is None
    for array in arrived.arrays:
        heads = array.shape[2]
        partitions = wire.uncut.partitions
        assert array.sharding == target.moves.wire_sharding(partitions, heads)
    target.moves.scatter(target.cache, arrived.arrays, target_pages)
    return num_reads


def tokens_of(values: np.ndarray, page_ids: list[int]) -> np.ndarray:
    """[tokens, K, W] of a sequence."""
    return values[page_ids].reshape(-1, *values.shape[2:])


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, "mla"])
@pytest.mark.parametrize(
    ("source_tensor", "target_tensor"), list(itertools.product((1, 2, 4), repeat=2))
)
def test_d01_d02_pages_arrive_whole_and_the_rest_is_untouched(
    source_tensor: int, target_tensor: int, num_heads: int | str
) -> None:
    heads, parts = (1, MLA) if num_heads == "mla" else (int(num_heads), (3, 3))
    source = kv_pools.make_side(0, source_tensor, heads, kv_parts=parts)
    target = kv_pools.make_side(4, target_tensor, heads, kv_parts=parts)
    wire = kv_pools.wire_between(source, target)
    for source_pages, target_pages in (([5, 2, 3], [1, 6, 4]), ([7], [2]), ([9, 1], [8, 3])):
        sent, expected = source.fill(1), target.fill(2)
        for layer, values in zip(expected, sent, strict=True):
            layer[target_pages] = values[source_pages]
        old = target.cache.layers
        num_reads = move(source, target, wire, source_pages, target_pages)
        assert num_reads == 0
        for layer, want in zip(target.read(), expected, strict=True):
            np.testing.assert_array_equal(layer[1:], want[1:])
        assert all(layer.is_deleted() for layer in old), "the pool was copied, not donated"
        assert all(layer.sharding == target.cache.sharding for layer in target.cache.layers)


PAGE_SIZES = [(4, 8), (8, 4), (4, 6), (6, 4), (2, 12), (12, 2)]


@pytest.mark.parametrize(("source_size", "target_size"), PAGE_SIZES)
@pytest.mark.parametrize(
    ("source_tensor", "target_tensor", "heads"), [(1, 1, 2), (2, 4, 4), (4, 2, 4), (2, 1, 1)]
)
def test_d08_pages_of_one_size_become_pages_of_another(
    source_tensor: int, target_tensor: int, heads: int, source_size: int, target_size: int
) -> None:
    source = kv_pools.make_side(0, source_tensor, heads, page_size=source_size)
    target = kv_pools.make_side(4, target_tensor, heads, page_size=target_size)
    wire = kv_pools.wire_between(source, target)
    source_pages = [3, 1, 2, 4][: -(-24 // source_size)]
    num_tokens = len(source_pages) * source_size
    for start in (0, 1):  # the target may hold the first page already
        # One page of the target more than is full: the end of a prompt.
        count = min(4, -(-num_tokens // target_size) - start)
        target_pages = [2, 4, 1, 3][:count]
        sent, kept = source.fill(3), target.fill(4)
        assert move(source, target, wire, source_pages, target_pages, start) == 0
        for values, before, after in zip(sent, kept, target.read(), strict=True):
            want = tokens_of(values, source_pages)[start * target_size :][: count * target_size]
            np.testing.assert_array_equal(tokens_of(after, target_pages)[: len(want)], want)
            others = [page for page in range(1, len(before)) if page not in target_pages]
            np.testing.assert_array_equal(after[others], before[others])


def test_a_mesh_with_experts_is_a_source_and_a_target() -> None:
    source = kv_pools.make_side(0, 2, 2, expert=2)
    wide = kv_pools.make_side(0, 2, 4, expert=2)
    for left, right in (
        (wide, kv_pools.make_side(4, 4, 4)),
        (kv_pools.make_side(4, 1, 2), source),
        (kv_pools.make_side(4, 4, 2), source),
    ):
        sent, _ = left.fill(1), right.fill(2)
        wire = kv_pools.wire_between(left, right)
        assert move(left, right, wire, [5, 2], [1, 3]) == 0
        for layer, values in zip(right.read(), sent, strict=True):
            np.testing.assert_array_equal(layer[[1, 3]], values[[5, 2]])


@pytest.mark.parametrize(
    ("source_tensor", "target_tensor", "heads", "slices"),
    [(2, 2, 4, 1), (4, 2, 4, 1), (2, 4, 4, 2), (1, 4, 4, 4), (1, 4, 2, 2), (4, 4, 1, 1)],
)
def test_no_device_receives_more_than_its_share(
    source_tensor: int, target_tensor: int, heads: int, slices: int
) -> None:
    source = kv_pools.make_side(0, source_tensor, heads)
    target = kv_pools.make_side(4, target_tensor, heads)
    wire = kv_pools.wire_between(source, target)
    assert wire.slices == slices
    arrived, _ = pull(target, kv_pools.piece_of(source, wire))
    assert arrived.error is None
    for array in arrived.arrays:
        share = array.nbytes // target.layout.partitions
        assert {shard.data.nbytes for shard in array.addressable_shards} == {share}


def test_the_naive_move_between_splits_is_caught() -> None:
    """The count above can fail: a device_put from 2 parts to 4 goes through the host."""
    source, target = kv_pools.make_side(0, 2, 4), kv_pools.make_side(4, 4, 4)
    source.fill(1)
    with counted_host_reads() as reads:
        jax.block_until_ready(jax.device_put(source.cache.layers, target.cache.sharding))
    assert len(reads) == len(source.cache.layers)
