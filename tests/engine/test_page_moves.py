"""Pages from pool to pool over the wire view: bytes equal, nothing else touched, no host bounce."""

import itertools

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import Mesh

from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.compile_counter import CompileCounter
from jpd.engine.page_moves import PageMoves
from jpd.parallel.mesh import kv_partitions, make_worker_mesh
from jpd.transfer.plan import KVLayout, plan_transfer

BUCKETS = ShapeBuckets.from_config(
    EngineConfig(prefill_chunk=16, max_model_len=64), CacheConfig(page_size=4), 64
)


def pool(spec: KVSpec, devices: list[jax.Device]) -> tuple[KVCache, PageMoves, Mesh]:
    mesh = make_worker_mesh(
        devices, tensor=len(devices), expert=1, num_cached_heads=spec.num_cached_heads
    )
    return KVCache(spec, mesh), PageMoves(spec, mesh, BUCKETS), mesh


def fill(cache: KVCache, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=cache.spec.layer_shape).astype(np.float32) for _ in cache.layers]
    cache.layers = tuple(jax.device_put(value, cache.sharding) for value in values)
    return values


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("source_tensor", "target_tensor"), list(itertools.product((1, 2, 4), repeat=2))
)
def test_d01_every_pair_of_splits_moves_the_same_bytes(
    num_heads: int, source_tensor: int, target_tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KVSpec(2, 12, 4, num_heads, 6, np.float32)
    devices = jax.devices()
    source, source_moves, source_mesh = pool(spec, devices[:source_tensor])
    target, target_moves, target_mesh = pool(spec, devices[4 : 4 + target_tensor])
    sent, kept = fill(source, 1), fill(target, 2)
    layouts = [KVLayout(kv_partitions(mesh), mesh.size) for mesh in (source_mesh, target_mesh)]
    partitions = plan_transfer(*layouts, spec.token_bytes).wire_partitions
    host_reads = []
    value = ArrayImpl._value
    monkeypatch.setattr(
        ArrayImpl, "_value", property(lambda self: host_reads.append(1) or value.fget(self))
    )
    old = target.layers
    staged = source_moves.gather(source, (3, 9, 5), partitions)
    assert staged[0].shape == (4, 4, num_heads, 6), "padded to the bucket of four"
    moved = jax.device_put(staged, target_moves.wire_sharding(partitions))
    target_moves.scatter(target, moved, (7, 2, 11))
    assert not host_reads
    assert all(layer.is_deleted() for layer in old)
    monkeypatch.undo()
    for layer, layer_sent, layer_kept in zip(target.layers, sent, kept, strict=True):
        assert layer.sharding == target.sharding
        arrived = np.asarray(layer)
        assert np.array_equal(arrived[[7, 2, 11]], layer_sent[[3, 9, 5]])
        others = [1, 3, 4, 5, 6, 8, 9, 10]
        assert np.array_equal(arrived[others], layer_kept[others])


def test_warm_moves_compile_nothing_for_any_number_of_pages() -> None:
    spec = KVSpec(2, 12, 4, 2, 6, np.float32)
    source, source_moves, _ = pool(spec, jax.devices()[:2])
    target, target_moves, _ = pool(spec, jax.devices()[2:3])
    source_moves.warm_up_gather(source, [1])
    target_moves.warm_up_scatter(target, [1])
    with CompileCounter() as counter:
        for num_pages in range(1, 5):
            staged = source_moves.gather(source, range(1, num_pages + 1), 1)
            moved = jax.device_put(staged, target_moves.wire_sharding(1))
            target_moves.scatter(target, moved, range(1, num_pages + 1))
        assert counter.num_compilations == 0


def test_a_gather_sees_the_pages_as_they_were_when_it_was_dispatched() -> None:
    spec = KVSpec(2, 12, 4, 2, 6, np.float32)
    cache, moves, _ = pool(spec, jax.devices()[:1])
    before = fill(cache, 1)
    staged = moves.gather(cache, (4,), 1)
    moves.scatter(cache, [array + 1 for array in staged], (4,))
    assert np.array_equal(np.asarray(staged[0])[0], before[0][4])
    assert np.array_equal(np.asarray(cache.layers[0])[4], before[0][4] + 1)
