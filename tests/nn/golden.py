"""Golden checkpoints straight into the network, without the loader: the ground of these tests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jpd.nn.config import DecoderConfig
from jpd.nn.decoder import PagedBatch
from jpd.nn.families import find_family
from jpd.nn.params import AbstractParams, DecoderDef, abstract_params, rebuild

GOLDEN = Path(__file__).parent.parent / "golden"
PAGE_SIZE = 8


class GoldenModel:
    """One golden folder: network, weights as float32, and what the reference computed.

    `tensors`: those of the folder where they are not plain numbers.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, np.ndarray] | None = None) -> None:
        raw = json.loads((folder / "config.json").read_text())
        family = find_family(raw)
        self.config: DecoderConfig = family.to_config(raw)
        self.abstract: AbstractParams = abstract_params(self.config, jnp.float32)
        refs = family.tensors(self.config)
        assert sorted(refs) == sorted(spec.path for spec in self.abstract.specs)
        tensors = tensors or _read_tensors(folder)
        self.leaves = tuple(
            jnp.asarray(read_ref(refs[spec.path], tensors, spec.shape), jnp.float32)
            for spec in self.abstract.specs
        )
        self.expected: Mapping[str, np.ndarray] = dict(np.load(folder / "expected.npz"))

    def empty_kv(self, num_pages: int) -> tuple[jax.Array, ...]:
        config = self.config
        shape = (num_pages, PAGE_SIZE, config.num_cached_heads, config.kv_width)
        return tuple(jnp.zeros(shape, jnp.float32) for _ in config.layers)

    def forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        kv: tuple[jax.Array, ...],
        page_table: np.ndarray,
        kv_lengths: Sequence[int],
        valid: np.ndarray | None = None,
        rope_lengths: Sequence[int] | None = None,
    ) -> tuple[np.ndarray, tuple[jax.Array, ...]]:
        """Logits of all tokens, and the new pages."""
        valid = np.ones(tokens.shape, bool) if valid is None else valid
        batch = PagedBatch(
            jnp.asarray(page_table, jnp.int32),
            jnp.asarray(kv_lengths, jnp.int32),
            jnp.asarray(valid),
        )
        if rope_lengths is not None:
            batch = replace(batch, rope_lengths=jnp.asarray(rope_lengths, jnp.int32))
        logits, kv = forward(
            self.abstract.graphdef,
            self.leaves,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            kv,
            batch,
        )
        return np.asarray(logits), kv

    def whole(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [B, T, V] of prompts in one pass, each row with pages of its own."""
        rows, length = tokens.shape
        pages_per_row = -(-length // PAGE_SIZE)
        page_table = 1 + np.arange(rows * pages_per_row).reshape(rows, pages_per_row)
        positions = np.broadcast_to(np.arange(length), tokens.shape)
        kv = self.empty_kv(1 + page_table.size)
        return self.forward(tokens, positions, kv, page_table, [length] * rows)[0]


@partial(jax.jit, static_argnums=0)
def forward(
    graphdef: DecoderDef,
    leaves: tuple[jax.Array, ...],
    tokens: jax.Array,
    positions: jax.Array,
    kv: tuple[jax.Array, ...],
    batch: PagedBatch,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    decoder = rebuild(graphdef, leaves)
    hidden, kv = decoder(tokens, positions, kv, batch)
    return decoder.logits(hidden), kv


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", "flax") as file:
        return {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def read_ref(ref: Any, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    for name in ref.names:
        assert tensors[name].shape == ref.file_shape, name
    assert ref.shape == shape
    values: np.ndarray = ref.read(lambda name, slices: tensors[name][slices])
    assert values.shape == shape
    return values


@cache
def golden_model(name: str) -> GoldenModel:
    return GoldenModel(GOLDEN / name)
