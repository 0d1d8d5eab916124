"""Sharding rules are plain arithmetic: no device is needed to know what fits."""

import pytest
from jax.sharding import PartitionSpec

from jpd.errors import ConfigError
from jpd.parallel.mesh import worker_mesh_shape
from jpd.parallel.sharding import bytes_per_device, num_parts, spec_for, uneven_axes

Q_AXES = ("embed", "kv_heads", "group", "head_dim")


def shape_of(tensor: int, num_cached_heads: int, expert: int = 1) -> dict[str, int]:
    return dict(worker_mesh_shape(tensor=tensor, expert=expert, num_cached_heads=num_cached_heads))


def test_tensor_axis_is_split_between_kv_heads_and_their_groups() -> None:
    assert shape_of(4, 8) == {"data": 1, "expert": 1, "tensor": 4, "replica": 1}
    assert shape_of(4, 2) == {"data": 1, "expert": 1, "tensor": 2, "replica": 2}
    assert shape_of(4, 1) == {"data": 1, "expert": 1, "tensor": 1, "replica": 4}


def test_specs_by_hand() -> None:
    mesh_shape = shape_of(4, 2)
    assert spec_for(Q_AXES, (64, 2, 4, 16), mesh_shape) == PartitionSpec(
        None, "tensor", "replica", None
    )
    assert spec_for(("embed", "mlp"), (64, 96), mesh_shape) == PartitionSpec(
        None, ("tensor", "replica")
    )
    assert spec_for(Q_AXES, (64, 2, 4, 16), shape_of(1, 2)) == PartitionSpec(None, None, None, None)


def test_uneven_vocab_is_replicated_and_anything_else_refused_with_both_numbers() -> None:
    mesh_shape = shape_of(4, 4)
    assert spec_for(("vocab", "embed"), (161, 64), mesh_shape) == PartitionSpec(None, None)
    assert [str(item) for item in uneven_axes(("embed", "mlp"), (64, 98), mesh_shape)] == [
        "mlp = 98 is not divisible by tensor = 4"
    ]
    with pytest.raises(ConfigError, match="mlp = 98 is not divisible by tensor = 4"):
        spec_for(("embed", "mlp"), (64, 98), mesh_shape)


def test_axes_that_collide_are_rejected() -> None:
    with pytest.raises(ValueError, match="use a mesh axis twice"):
        spec_for(("mlp", "vocab"), (64, 64), shape_of(2, 2))


def test_bytes_per_device() -> None:
    mesh_shape = shape_of(4, 2)
    assert bytes_per_device(Q_AXES, (64, 2, 4, 16), 2, mesh_shape) == 64 * 1 * 2 * 16 * 2
    assert bytes_per_device(
        ("pages", "page", "kv_heads", None), (10, 16, 2, 32), 4, mesh_shape
    ) == (10 * 16 * 1 * 32 * 4)
    assert num_parts(Q_AXES, (64, 2, 4, 16), mesh_shape) == 4
    expert = shape_of(2, 2, expert=4)
    assert bytes_per_device(("experts", "embed", "expert_mlp"), (8, 4, 6), 1, expert) == 2 * 4 * 3
