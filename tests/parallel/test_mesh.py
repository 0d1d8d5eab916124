"""Worker meshes and their wire views, on virtual CPU devices."""

import jax
import numpy as np
import pytest

from jpd.errors import ConfigError
from jpd.parallel.mesh import kv_partitions, make_worker_mesh, wire_view
from jpd.parallel.platform import ensure_cpu_devices
from jpd.parallel.sharding import sharding_for

POOL_AXES = ("pages", "page", "kv_heads", None)


def test_devices_keep_the_order_of_the_mesh_file() -> None:
    devices = [jax.devices()[index] for index in (3, 1, 6, 4)]
    mesh = make_worker_mesh(devices, tensor=4, expert=1, num_cached_heads=2)
    assert list(mesh.devices.flat) == devices
    assert kv_partitions(mesh) == 2


def test_wrong_number_of_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="3 devices for tensor=2 x expert=1"):
        make_worker_mesh(jax.devices()[:3], tensor=2, expert=1, num_cached_heads=2)


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_wire_view_holds_the_same_heads_more_coarsely(partitions: int) -> None:
    mesh = make_worker_mesh(jax.devices()[:8], tensor=4, expert=2, num_cached_heads=4)
    view = wire_view(mesh, partitions)
    assert list(view.devices.flat) == list(mesh.devices.flat)
    fine = sharding_for(mesh, POOL_AXES, (2, 2, 4, 2)).devices_indices_map((2, 2, 4, 2))
    coarse = sharding_for(view, POOL_AXES, (2, 2, 4, 2)).devices_indices_map((2, 2, 4, 2))
    heads = np.arange(4)
    for device, index in fine.items():
        assert set(heads[index[2]]) <= set(heads[coarse[device][2]])
        assert len(heads[coarse[device][2]]) == 4 // partitions


def test_wire_view_must_divide() -> None:
    mesh = make_worker_mesh(jax.devices()[:2], tensor=2, expert=1, num_cached_heads=2)
    with pytest.raises(ValueError, match="does not divide kv partitions = 2"):
        wire_view(mesh, 4)


def test_more_cpu_devices_cannot_be_had_once_jax_runs() -> None:
    jax.devices()
    ensure_cpu_devices(len(jax.devices()))
    with pytest.raises(ConfigError, match="launch before using JAX"):
        ensure_cpu_devices(len(jax.devices()) + 1)
