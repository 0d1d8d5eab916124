"""Moves of one pool: buckets that were compiled, and the moment at which a gather looks."""

import numpy as np

from jpd.engine.compile_counter import CompileCounter
from tests.transfer import kv_pools


def test_warm_moves_compile_nothing_for_any_number_of_pages() -> None:
    source, target = kv_pools.make_side(0, 2, 2), kv_pools.make_side(4, 1, 2)
    for dtype, has_checksum in (("float32", False), ("int8", True)):
        wire = kv_pools.wire_between(source, target, dtype=dtype, has_checksum=has_checksum)
        source.moves.warm_up_gather(source.cache, [wire])
        target.moves.warm_up_scatter(target.cache, [wire])
        with CompileCounter() as counter:
            for num_pages in range(1, 5):
                arrived = kv_pools.pull(target, kv_pools.piece_of(source, wire, range(num_pages)))
                target.moves.scatter(target.cache, arrived.arrays, range(1, num_pages + 1))
            assert counter.num_compilations == 0


def test_a_gather_sees_the_pages_as_they_were_when_it_was_dispatched() -> None:
    side = kv_pools.make_side(0, 1, 2)
    wire = kv_pools.wire_between(side, side)
    before = side.fill(1)
    staged = side.moves.gather(side.cache, (4,), wire)
    side.moves.scatter(side.cache, [array + 1 for array in staged], (4,))
    assert np.array_equal(np.asarray(staged[0])[0], before[0][4])
    assert np.array_equal(np.asarray(side.cache.layers[0])[4], before[0][4] + 1)
