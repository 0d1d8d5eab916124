"""The mesh of one worker, and the views of it through which KV pages travel.

Mesh axes are ("data", "expert", "tensor", "replica"), devices in the order of the mesh file. The
operator's `tensor = T` is split in two: `tensor` = gcd(cached kv heads, T) splits the KV cache,
`replica` = T / that holds copies of it, so that fewer kv heads than T work. Knows no model. Called
by the launcher, the transfer and the planner.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "expert", "tensor", "replica")


def worker_mesh_shape(*, tensor: int, expert: int, num_cached_heads: int) -> Mapping[str, int]:
    """Sizes of the mesh axes. Pure arithmetic, for checks without devices."""
    partitions = math.gcd(num_cached_heads, tensor)
    return dict(zip(MESH_AXES, (1, expert, partitions, tensor // partitions), strict=True))


def make_worker_mesh(
    devices: Sequence[jax.Device], *, tensor: int, expert: int, num_cached_heads: int
) -> Mesh:
    """The mesh of one worker; `devices` in the order of the mesh file, tensor * expert of them."""
    shape = worker_mesh_shape(tensor=tensor, expert=expert, num_cached_heads=num_cached_heads)
    if len(devices) != math.prod(shape.values()):
        raise ValueError(f"{len(devices)} devices for tensor={tensor} x expert={expert}")
    return _mesh(np.array(devices), tuple(shape.values()))


def kv_partitions(mesh: Mesh) -> int:
    """Into how many distinct parts the KV pool is split on this mesh."""
    return int(mesh.shape["tensor"])


def wire_view(mesh: Mesh, partitions: int) -> Mesh:
    """The same devices, in the same order, with KV in only `partitions` (divides kv_partitions).

    Pages that travel to a mesh with another split leave and arrive in the split both sides share;
    going from and to it is a jitted local slice or gather, never a bounce over the host.
    """
    data, expert, tensor, replica = mesh.devices.shape
    if tensor % partitions:
        raise ValueError(
            f"a wire of {partitions} partitions does not divide kv partitions = {tensor}"
        )
    if partitions == tensor:
        return mesh
    return _mesh(mesh.devices, (data, expert, partitions, tensor // partitions * replica))


def slice_views(mesh: Mesh, partitions: int, slices: int) -> tuple[Mesh, ...]:
    """For each slice of a wire's parts, the devices that need only it, in wire order.

    Slice j of part i is part i * slices + j of a pool split in partitions * slices.
    """
    if slices == 1:
        return (wire_view(mesh, partitions),)
    data, expert, tensor, replica = mesh.devices.shape
    if tensor != partitions * slices:
        raise ValueError(f"{partitions} parts in {slices} slices, but kv partitions = {tensor}")
    cut = mesh.devices.reshape(data, expert, partitions, slices, replica)
    shape = (data, expert, partitions, replica)
    return tuple(_mesh(cut[:, :, :, index], shape) for index in range(slices))


def _mesh(devices: np.ndarray, shape: tuple[int, ...]) -> Mesh:
    return Mesh(devices.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
