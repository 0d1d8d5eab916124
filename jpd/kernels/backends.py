"""The ways of computing attention, by name, and the rules of where each works.

`blocks` is jnp in blocks of keys, on every platform; `reference` is jnp on all keys at once, for
comparison; `cudnn` and `tpu_ragged` are kernels of their makers. Knows no model: a planner says
what one needs. Used by the planner, the launcher and `jpd.kernels.attention`.
"""

from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from jpd.config import AttentionChoice

AttentionName = Literal["reference", "blocks", "cudnn", "tpu_ragged"]

CUDNN_DTYPES = ("bfloat16", "float16")
CUDNN_MAX_HEAD_DIM = 256  # from Hopper on; 128 before
CUDNN_HEAD_STEP = 8
TPU_LANES = 128


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """How a worker computes attention. Hashable: it is a part of what is compiled."""

    name: AttentionName = "blocks"
    mesh: Mesh | None = None  # over whose head axes a kernel is mapped that XLA cannot split

    @classmethod
    def on(cls, name: AttentionName, mesh: Mesh) -> "AttentionBackend":
        """For a worker's mesh; jnp is split by XLA and needs to know of none."""
        return cls(name, mesh if name in ("cudnn", "tpu_ragged") else None)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of attention, on one device of a worker."""

    platform: str  # cpu, gpu or tpu
    dtype: str  # of queries
    cache_dtype: str
    head_dim: int
    is_latent: bool  # one cached head, whose values are a part of its keys
    has_softcap: bool
    has_sinks: bool


def resolve(choice: AttentionChoice) -> AttentionName:
    """Kernels that have never met their hardware are taken only where they are asked for."""
    return "blocks" if choice == "auto" else choice


def broken_rule(name: AttentionName, needs: AttentionNeeds) -> str | None:
    """Why this way cannot serve it; None: it can."""
    match name:
        case "reference" | "blocks":
            return None
        case "cudnn":
            return _cudnn_rule(needs)
        case "tpu_ragged":
            return _tpu_rule(needs)


def _cudnn_rule(needs: AttentionNeeds) -> str | None:
    head = needs.head_dim
    if needs.platform != "gpu":
        return f"needs platform gpu, not {needs.platform}"
    if needs.is_latent:
        return "has no latent attention (its values are a part of the keys)"
    if needs.has_softcap:
        return "has no soft cap on scores"
    if needs.has_sinks:
        return "has no attention sinks"
    if needs.dtype not in CUDNN_DTYPES:
        return f"needs engine.dtype {' or '.join(CUDNN_DTYPES)}, not {needs.dtype}"
    if head > CUDNN_MAX_HEAD_DIM or head % CUDNN_HEAD_STEP:
        return (
            f"needs head_dim a multiple of {CUDNN_HEAD_STEP} up to {CUDNN_MAX_HEAD_DIM}, not {head}"
        )
    return None


def _tpu_rule(needs: AttentionNeeds) -> str | None:
    if needs.platform != "tpu":
        return f"needs platform tpu, not {needs.platform}"
    if needs.is_latent:
        return "has no latent attention (its values are a part of the keys)"
    if needs.has_sinks:
        return "has no attention sinks"
    if needs.head_dim % TPU_LANES:
        return f"needs head_dim a multiple of {TPU_LANES}, not {needs.head_dim}"
    if needs.dtype != needs.cache_dtype:
        return f"needs cache.dtype equal to engine.dtype {needs.dtype}, not {needs.cache_dtype}"
    return None
