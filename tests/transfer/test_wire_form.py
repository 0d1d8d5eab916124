"""What pages look like on their way: quantised, checked, and found out when they were altered."""

import itertools

import jax
import numpy as np
import pytest

from jpd.errors import TransferError
from jpd.transfer.checksum import part_sums
from jpd.transfer.faulty import Fault, FaultyTransfer, Stage
from jpd.transfer.quantised import dequantise, quantise, token_head_bytes
from tests.transfer import kv_pools

MLA = (4, 2)


@pytest.mark.parametrize("parts", [(3, 3), MLA, (6,)])
def test_int8_is_within_half_a_level_of_each_token_head_and_part(parts: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    pages = draw.normal(size=(2, 3, 4, 6)).astype(np.float32)
    pages *= np.exp(draw.normal(size=(2, 3, 4, 1), scale=3)).astype(np.float32)
    pages[0, 0, 0] = 0.0
    pages[..., parts[0] :] *= 1e-3  # a part of its own range loses nothing beside a large one
    levels, scales = quantise(jax.numpy.asarray(pages), parts)
    assert levels.dtype == np.int8 and scales.shape == (2, 3, 4, len(parts))
    back = np.asarray(dequantise(levels, scales, parts))
    for start, end in itertools.pairwise((0, *np.cumsum(parts))):
        largest = np.abs(pages[..., start:end]).max(-1, keepdims=True)
        error = np.abs(back - pages)[..., start:end]
        assert (error <= largest / 254 * (1 + 1e-5)).all()
    assert (back[0, 0, 0] == 0.0).all()


def test_int8_takes_little_more_than_a_quarter_of_float32() -> None:
    assert token_head_bytes((128, 128)) == 256 + 8
    assert token_head_bytes((512, 64)) == 576 + 8


@pytest.mark.parametrize(
    ("source_tensor", "target_tensor", "heads", "parts"),
    [(1, 1, 2, (3, 3)), (2, 4, 4, (3, 3)), (4, 2, 4, (3, 3)), (2, 2, 1, MLA)],
)
def test_quantised_pages_arrive_over_every_kind_of_plan(
    source_tensor: int, target_tensor: int, heads: int, parts: tuple[int, ...]
) -> None:
    source = kv_pools.make_side(0, source_tensor, heads, kv_parts=parts, page_size=8)
    target = kv_pools.make_side(4, target_tensor, heads, kv_parts=parts)
    wire = kv_pools.wire_between(source, target, dtype="int8", has_checksum=True)
    sent, kept = source.fill(1), target.fill(2)
    arrived = kv_pools.pull(target, kv_pools.piece_of(source, wire, (3,)))
    assert arrived.error is None
    assert len(arrived.arrays) == 2 * kv_pools.NUM_LAYERS * wire.strands
    target.moves.scatter(target.cache, arrived.arrays, (5, 2))
    for values, before, after in zip(sent, kept, target.read(), strict=True):
        got = after[[5, 2]].reshape(8, heads, -1)
        assert np.abs(got - values[3]).max() <= np.abs(values[3]).max() / 254 * (1 + 1e-5)
        assert (got != values[3]).any(), "nothing was quantised"
        np.testing.assert_array_equal(after[[1, 3, 4]], before[[1, 3, 4]])


@pytest.mark.parametrize(("source_tensor", "target_tensor"), [(1, 1), (2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize("stage", ["offer", "arrive", None])
def test_d16_a_piece_that_was_altered_in_flight_is_an_error(
    source_tensor: int, target_tensor: int, stage: Stage | None
) -> None:
    source = kv_pools.make_side(0, source_tensor, 4)
    target = kv_pools.make_side(4, target_tensor, 4)
    source.fill(1)
    wire = kv_pools.wire_between(source, target, has_checksum=True)
    faults = [] if stage is None else [Fault("corrupt", layer=1, stage=stage)]
    arrived = kv_pools.pull(
        target, kv_pools.piece_of(source, wire), lambda inner: FaultyTransfer(inner, faults)
    )
    if stage is None:
        assert arrived.error is None
        assert len(arrived.arrays) == kv_pools.NUM_LAYERS * wire.strands
    else:
        assert isinstance(arrived.error, TransferError) and arrived.arrays == ()
        assert "pages 0+2, layers 0+2 of a: checksum differs" in str(arrived.error)


def test_any_bit_anywhere_changes_the_sum_of_its_part_only() -> None:
    draw = np.random.default_rng(3)
    pages = draw.normal(size=(2, 2, 4, 3)).astype(np.float32)
    whole = np.asarray(part_sums([jax.numpy.asarray(pages)] * 2, 2))
    for _ in range(40):
        altered = pages.copy()
        index = tuple(int(draw.integers(size)) for size in pages.shape)
        altered.view(np.uint32)[index] ^= np.uint32(1 << int(draw.integers(32)))
        sums = np.asarray(part_sums([jax.numpy.asarray(pages), jax.numpy.asarray(altered)], 2))
        changed = (sums != whole)[0, 0, :, 0].tolist()
        assert changed == [index[2] < 2, index[2] >= 2]
    swapped = np.asarray(part_sums([jax.numpy.asarray(pages[::-1])] * 2, 2))
    assert (swapped != whole).all(), "the order of pages counts"
