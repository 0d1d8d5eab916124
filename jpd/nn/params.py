"""The parameters of a decoder as a flat list: what the checkpoint fills and jitted functions take.

`abstract_params` needs no memory and no devices. `rebuild` is called inside jit: per step only a
flat tuple of raw arrays crosses from Python, no module tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.kernels.backends import AttentionBackend
from jpd.nn.config import DecoderConfig, LayerConfig
from jpd.nn.decoder import Decoder, LayerGroup


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its place in the module tree, and one logical axis name per dimension."""

    path: str  # such as layers.0.attn.q.weight
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]
    summed: tuple[int, ...] = ()  # of an int8 weight: the dims that share one scale

    @property
    def is_scale(self) -> bool:
        """It holds the scales of an int8 weight, and stands in no checkpoint but jpd's own."""
        return self.path.endswith(".scale")

    @property
    def scale_path(self) -> str:
        """Of an int8 weight: the parameter that holds its scales."""
        return self.path.removesuffix("weight") + "scale"

    @property
    def num_params(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    @property
    def num_bytes(self) -> int:
        return self.num_params * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DecoderDef:
    """The decoder without its arrays."""

    graphdef: Any
    treedef: Any


@dataclass(frozen=True, slots=True)
class GroupDef:
    """Some layers of a decoder without their arrays; equal for groups of the same kinds."""

    graphdef: Any
    treedef: Any
    names: tuple[tuple[int, str], ...]  # of its parameters: layer of the group, and the rest

    def places(self, specs: Sequence[ParamSpec], first_layer: int) -> tuple[int, ...]:
        """Where the parameters of the group that begins with this layer stand among a decoder's."""
        found = {spec.path: place for place, spec in enumerate(specs)}
        return tuple(found[f"layers.{first_layer + layer}.{rest}"] for layer, rest in self.names)


@dataclass(frozen=True, slots=True)
class AbstractParams:
    """A decoder's definition and its parameters in the one order used everywhere."""

    graphdef: DecoderDef
    specs: tuple[ParamSpec, ...]

    @property
    def num_params(self) -> int:
        """As published: scales do not count."""
        return sum(spec.num_params for spec in self.specs if not spec.is_scale)


def abstract_params(
    config: DecoderConfig,
    dtype: Any,
    backend: AttentionBackend = AttentionBackend(),  # noqa: B008 (frozen)
    *,
    is_split: bool = True,
) -> AbstractParams:
    """Describe the parameters of `config` stored as `dtype`, and how attention is computed.

    `is_split`: the weights may be shared out among devices.
    """
    graphdef, state = nnx.split(Decoder(config, jnp.dtype(dtype), backend, is_split=is_split))
    treedef: Any = jax.tree.structure(state)
    specs = []
    for name, variable in _named_params(state):
        value = variable.get_value()
        axes, summed = (variable.get_metadata(key) for key in ("axes", "summed"))
        specs.append(ParamSpec(name, tuple(value.shape), value.dtype, axes, summed))
    assert treedef.num_leaves == len(specs)
    return AbstractParams(DecoderDef(graphdef, treedef), tuple(specs))


def group_def(
    config: DecoderConfig,
    layers: Sequence[LayerConfig],
    dtype: Any,
    backend: AttentionBackend,
    *,
    is_split: bool,
) -> GroupDef:
    """Layers of these kinds of the decoder that `abstract_params` describes."""
    group = LayerGroup(config, layers, jnp.dtype(dtype), backend, is_split=is_split)
    graphdef, state = nnx.split(group)
    names = []
    for name, _ in _named_params(state):
        _, layer, rest = name.split(".", 2)
        names.append((int(layer), rest))
    return GroupDef(graphdef, jax.tree.structure(state), tuple(names))


def _named_params(state: Any) -> Iterator[tuple[str, Any]]:
    """The parameters by their paths, in the order of the state's leaves."""
    for path, variable in jax.tree.leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Param)
    ):
        yield (
            ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path),
            variable,
        )


def rebuild_group(group: GroupDef, leaves: Sequence[jax.Array]) -> LayerGroup:
    """The layers with `leaves`, in the order of `GroupDef.names`."""
    state = jax.tree.unflatten(group.treedef, list(leaves))
    layers: LayerGroup = nnx.merge(group.graphdef, state)
    return layers


def rebuild(graphdef: DecoderDef, leaves: Sequence[jax.Array]) -> Decoder:
    """The decoder with `leaves`, in the order of `AbstractParams.specs`."""
    state = jax.tree.unflatten(graphdef.treedef, list(leaves))
    decoder: Decoder = nnx.merge(graphdef.graphdef, state)
    return decoder
