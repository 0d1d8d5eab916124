"""The KV pool is made on the devices, in its sharding."""

import jax
import jax.numpy as jnp
import pytest

from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.parallel.mesh import make_worker_mesh

SPEC = KVSpec(
    num_layers=3, num_pages=6, page_size=4, num_cached_heads=2, kv_width=8, dtype=jnp.float32
)


def test_sizes_by_hand() -> None:
    assert SPEC.layer_shape == (6, 4, 2, 8)
    assert SPEC.token_bytes == 3 * 2 * 8 * 4
    assert SPEC.page_bytes == 4 * SPEC.token_bytes


@pytest.mark.parametrize(("tensor", "heads_per_device"), [(1, 2), (2, 1), (4, 1)])
def test_every_device_holds_its_own_heads_and_nothing_passed_through_the_host(
    tensor: int, heads_per_device: int
) -> None:
    mesh = make_worker_mesh(jax.devices()[:tensor], tensor=tensor, expert=1, num_cached_heads=2)
    cache = KVCache(SPEC, mesh)
    assert len(cache.layers) == 3
    for layer in cache.layers:
        assert layer.sharding == cache.sharding
        assert layer.addressable_shards[0].data.shape == (6, 4, heads_per_device, 8)
        assert layer._npy_value is None
    assert cache.num_bytes == sum(layer.nbytes for layer in cache.layers)
