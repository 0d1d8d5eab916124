"""Checkpoint tensors → device arrays in the shardings of one or several meshes.

1. Names, shapes and numbers are checked; shardings are made. Nothing is on a device yet.
2. For each parameter, blocks that hold whole shards of every mesh are read, each once, cut into
   shards and copied to its devices. The host never holds more than one block.

Knows no file format (a TensorSource does) and no engine. Called by the launcher.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import DTypeLike

from jpd.checkpoint.int8 import quantize
from jpd.checkpoint.layout import check_values, distinct, param_refs
from jpd.checkpoint.orbax_source import OrbaxSource
from jpd.checkpoint.progress import ProgressCallback, ProgressMeter
from jpd.checkpoint.source import HostArray, Slices, TensorSource
from jpd.errors import ConfigError, Problem
from jpd.nn.config import DecoderConfig
from jpd.nn.params import AbstractParams, ParamSpec
from jpd.nn.tensor_ref import TensorRef
from jpd.parallel.sharding import sharding_for

Bounds = tuple[int, int]


def load_params(
    source: TensorSource | OrbaxSource,
    config: DecoderConfig,
    abstract: AbstractParams,
    targets: Sequence[Mesh],
    dtype: DTypeLike,
    progress: ProgressCallback | None = None,
    *,
    check_numbers: bool = True,
) -> list[tuple[jax.Array, ...]]:
    """The parameters on each mesh, in the order of `abstract.specs`, which were made for `dtype`.

    Blocks. Raises ConfigError, before any device memory is taken, for whatever is wrong with the
    checkpoint; `check_numbers` reads all of it once more to find NaN and infinities.
    """
    assert any(spec.dtype == np.dtype(dtype) for spec in abstract.specs), dtype  # not all are
    shardings = target_shardings(abstract, targets)
    if isinstance(source, OrbaxSource):
        return source.restore(abstract, shardings, progress)
    refs = param_refs(source, config, abstract)
    if check_numbers:
        check_values(source, refs, progress)
    meter = ProgressMeter("loading", params_bytes(abstract), progress)
    parts = {
        spec.path: _Part(spec, per_target)
        for spec, per_target in zip(abstract.specs, shardings, strict=True)
    }
    for spec in abstract.specs:
        if not spec.is_scale:  # a scale is made with its weight
            scales = [parts[spec.scale_path]] if spec.summed else []
            _place(source, refs[spec.path], [parts[spec.path], *scales])
        meter.add(spec.num_bytes, spec.path)
    return [
        tuple(parts[spec.path].array(target) for spec in abstract.specs)
        for target in range(len(targets))
    ]


def target_shardings(
    abstract: AbstractParams, targets: Sequence[Mesh]
) -> list[tuple[NamedSharding, ...]]:
    """For each parameter its sharding on each mesh. Raises ConfigError with all uneven axes."""
    problems: list[Problem] = []
    shardings: list[tuple[NamedSharding, ...]] = []
    for spec in abstract.specs:
        try:
            shardings.append(tuple(sharding_for(mesh, spec.axes, spec.shape) for mesh in targets))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(distinct(problems))
    return shardings


def params_bytes(abstract: AbstractParams) -> int:
    return sum(spec.num_bytes for spec in abstract.specs)


class _Part:
    """One parameter on its way to every mesh."""

    def __init__(self, spec: ParamSpec, shardings: Sequence[NamedSharding]) -> None:
        self.spec, self._shardings = spec, shardings
        self._bounds = [_device_bounds(sharding, spec.shape) for sharding in shardings]
        self._shards: list[dict[jax.Device, jax.Array]] = [{} for _ in shardings]

    def blocks(self) -> list[tuple[Bounds, ...]]:
        """Blocks to be read one after another; those of an int8 weight hold whole channels."""
        whole = {dim: (0, self.spec.shape[dim]) for dim in self.spec.summed}
        shards = (bounds for by_device in self._bounds for bounds in by_device.values())
        return _blocks(
            self.spec.shape,
            (tuple(whole.get(dim, one) for dim, one in enumerate(shard)) for shard in shards),
        )

    def put(self, values: HostArray, block: Sequence[Bounds]) -> None:
        """Copy the shards within `block` to their devices. Waits, so that it can be freed."""
        values = np.ascontiguousarray(values.astype(self.spec.dtype, copy=False))
        for by_device, placed in zip(self._bounds, self._shards, strict=True):
            wanted = {d: b for d, b in by_device.items() if d not in placed and _within(b, block)}
            placed.update(_put_shards(values, block, wanted))
        jax.block_until_ready([list(placed.values()) for placed in self._shards])

    def array(self, target: int) -> jax.Array:
        """The whole of it on one mesh, when everything was put."""
        placed = [self._shards[target][device] for device in self._bounds[target]]
        return jax.make_array_from_single_device_arrays(
            self.spec.shape, self._shardings[target], placed
        )


def _place(source: TensorSource, ref: TensorRef, parts: Sequence[_Part]) -> None:
    """A parameter, or an int8 weight and its scales, to every mesh."""
    summed = parts[0].spec.summed
    for block in parts[0].blocks():
        values = np.asarray(ref.read(source.read_slice, _slices(block)))
        arrays = quantize(values, summed) if summed else (values,)
        channels = [bounds for dim, bounds in enumerate(block) if dim not in summed]
        for part, array, own in zip(parts, arrays, (block, channels), strict=False):
            part.put(array, own)


def _put_shards(
    values: HostArray, block: Sequence[Bounds], wanted: Mapping[jax.Device, tuple[Bounds, ...]]
) -> dict[jax.Device, jax.Array]:
    placed = {}
    for device, bounds in wanted.items():
        pairs = zip(bounds, block, strict=True)
        inner = tuple(slice(low - first, high - first) for (low, high), (first, _) in pairs)
        placed[device] = jax.device_put(values[inner], device, may_alias=False)
    return placed


def _device_bounds(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> dict[jax.Device, tuple[Bounds, ...]]:
    """Per device of this process, [start, stop) in every dim of its shard."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {
        device: tuple(part.indices(dim)[:2] for part, dim in zip(index or (), shape, strict=True))
        for device, index in indices.items()
    }


def _blocks(
    shape: tuple[int, ...], shards: Iterable[tuple[Bounds, ...]]
) -> list[tuple[Bounds, ...]]:
    """The smallest blocks that cut no shard: in each dim, intervals that overlap become one.

    Shards of a dim [0, 2) [2, 4) on one mesh and [0, 4) on another give the one interval [0, 4).
    """
    wanted = list(dict.fromkeys(shards))
    per_dim = [_merge({shard[dim] for shard in wanted}) for dim in range(len(shape))]
    grid = itertools.product(*per_dim)
    return [block for block in grid if any(_within(shard, block) for shard in wanted)]


def _merge(intervals: Iterable[Bounds]) -> list[Bounds]:
    merged: list[Bounds] = []
    for low, high in sorted(intervals):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _within(shard: Sequence[Bounds], block: Sequence[Bounds]) -> bool:
    return all(a >= first and b <= end for (a, b), (first, end) in zip(shard, block, strict=True))


def _slices(block: Sequence[Bounds]) -> Slices:
    return tuple(slice(low, high) for low, high in block)
