"""All sharding on one screen: logical axis → mesh axes, and the arithmetic that follows from it.

Pure arithmetic on axis names and sizes, so that `jpd check` needs no devices; only `sharding_for`
touches a mesh. Knows no model. Called by nn, cache, checkpoint, engine, transfer and the planner.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpd.errors import ConfigError, Problem

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data",),
    "kv_heads": ("tensor",),
    "group": ("replica",),  # query heads of one kv head
    "heads": ("tensor", "replica"),
    "mlp": ("tensor", "replica"),
    "vocab": ("tensor", "replica"),
    "experts": ("expert",),
    "expert_mlp": ("tensor", "replica"),
    # every other axis (embed, head_dim, seq, pages, page, ...) is not split
}

REPLICATED_WHEN_UNEVEN = frozenset({"vocab"})

Axes = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class UnevenAxis:
    """A dim that its mesh axes do not divide."""

    axis: str
    dim: int
    mesh_axes: tuple[str, ...]
    num_parts: int

    def __str__(self) -> str:
        parts = f"{' x '.join(self.mesh_axes)} = {self.num_parts}"
        return f"{self.axis} = {self.dim} is not divisible by {parts}"


def mesh_axes_for(axis: str | None, dim: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes (larger than 1) that split this dim; () when it is not split."""
    names = tuple(name for name in RULES.get(axis or "", ()) if mesh_shape[name] > 1)
    parts = math.prod(mesh_shape[name] for name in names)
    if axis in REPLICATED_WHEN_UNEVEN and dim % parts:
        return ()
    return names


def uneven_axes(
    axes: Axes, shape: Sequence[int], mesh_shape: Mapping[str, int]
) -> tuple[UnevenAxis, ...]:
    """Every dim of an array that cannot be split as RULES asks; () when all is well."""
    found = []
    for axis, dim in zip(axes, shape, strict=True):
        names = mesh_axes_for(axis, dim, mesh_shape)
        parts = math.prod(mesh_shape[name] for name in names)
        if dim % parts:
            found.append(UnevenAxis(str(axis), dim, names, parts))
    return tuple(found)


def spec_for(axes: Axes, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """The PartitionSpec of an array. Raises ConfigError when a dim cannot be split."""
    uneven = uneven_axes(axes, shape, mesh_shape)
    if uneven:
        shown = dict(mesh_shape)
        raise ConfigError([Problem("mesh", item.axis, shown, str(item)) for item in uneven])
    entries = [mesh_axes_for(axis, dim, mesh_shape) for axis, dim in zip(axes, shape, strict=True)]
    used = [name for names in entries for name in names]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {tuple(axes)} use a mesh axis twice: {used}")
    return PartitionSpec(*(_entry(names) for names in entries))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(names) > 1:
        return names
    return names[0] if names else None


def sharding_for(mesh: Mesh, axes: Axes, shape: Sequence[int]) -> NamedSharding:
    """The sharding of one array on `mesh`. Make it once per array and keep it."""
    return NamedSharding(mesh, spec_for(axes, shape, mesh.shape))


def num_parts(axes: Axes, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> int:
    """Into how many distinct parts the array is split."""
    names = (mesh_axes_for(axis, dim, mesh_shape) for axis, dim in zip(axes, shape, strict=True))
    return math.prod(mesh_shape[name] for dim_names in names for name in dim_names)


def bytes_per_device(
    axes: Axes, shape: Sequence[int], itemsize: int, mesh_shape: Mapping[str, int]
) -> int:
    """What one device holds of the array. Of an uneven dim: the ceiling."""
    total = itemsize
    for axis, dim in zip(axes, shape, strict=True):
        parts = math.prod(mesh_shape[name] for name in mesh_axes_for(axis, dim, mesh_shape))
        total *= -(-dim // parts)
    return total
