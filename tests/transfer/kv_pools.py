"""Pools with recognisable numbers, the moves in and out of them, and pieces on their wires."""

import functools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.engine.page_moves import PageMoves
from jpd.parallel.mesh import kv_partitions, make_worker_mesh
from jpd.transfer.checked import CheckedTransfer
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.plan import KVLayout, plan_transfer
from jpd.transfer.protocol import ArrivedPiece, KVPiece, KVTransfer
from jpd.transfer.wire import Wire

NUM_TOKENS, PAGE_SIZE, NUM_LAYERS = 48, 4, 2
MOVE_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Side:
    """One worker's mesh, its pool and the moves of it. Shared by tests: fill it before use."""

    mesh: Mesh
    cache: KVCache
    moves: PageMoves

    @property
    def layout(self) -> KVLayout:
        return KVLayout(kv_partitions(self.mesh), self.mesh.size)

    def fill(self, seed: int) -> list[np.ndarray]:
        """New numbers in every layer; returns them."""
        draw = np.random.default_rng(seed)
        shape = self.cache.spec.layer_shape
        values = [draw.normal(size=shape).astype(np.float32) for _ in self.cache.layers]
        self.cache.layers = tuple(jax.device_put(value, self.cache.sharding) for value in values)
        return values

    def read(self) -> list[np.ndarray]:
        return [np.array(layer) for layer in self.cache.layers]


@functools.cache
def make_side(
    first_device: int,
    tensor: int,
    num_heads: int,
    *,
    expert: int = 1,
    page_size: int = PAGE_SIZE,
    kv_parts: tuple[int, ...] = (3, 3),
) -> Side:
    """A pool of NUM_TOKENS tokens; one head with parts of different sizes is MLA's."""
    devices = jax.devices()[first_device : first_device + tensor * expert]
    mesh = make_worker_mesh(devices, tensor=tensor, expert=expert, num_cached_heads=num_heads)
    spec = KVSpec(
        num_layers=NUM_LAYERS,
        num_pages=1 + NUM_TOKENS // page_size,
        page_size=page_size,
        num_cached_heads=num_heads,
        kv_width=sum(kv_parts),
        dtype=np.float32,
        kv_parts=kv_parts,
    )
    return Side(mesh, KVCache(spec, mesh), PageMoves(spec, mesh))


def wire_between(
    source: Side, target: Side, *, dtype: str = "float32", has_checksum: bool = False
) -> Wire:
    spec = target.cache.spec
    plan = plan_transfer(source.layout, target.layout, spec.token_bytes)
    return plan.wire(spec.page_size, MOVE_SIZES, dtype, has_checksum)


def piece_of(
    side: Side,
    wire: Wire,
    page_ids: Sequence[int] = (1, 2),
    *,
    destination: str = "decode-0",
    attempt_id: str = "a",
    page_start: int = 0,
    start: int = 0,
    num_pages: int | None = None,
    offered_time: float | None = None,
    layers: range = range(NUM_LAYERS),
) -> KVPiece:
    """Pages of `side`, gathered."""
    if num_pages is None:
        num_pages = len(page_ids) * side.cache.spec.page_size // wire.page_size
    return KVPiece(
        attempt_id=attempt_id,
        layer_start=layers.start,
        num_layers=len(layers),
        destination=destination,
        page_start=page_start,
        num_pages=num_pages,
        arrays=side.moves.gather(side.cache, page_ids, wire, start, num_pages, layers),
        wire=wire,
        num_bytes=wire.num_bytes(num_pages) * len(layers) // NUM_LAYERS,
        is_last=True,
        offered_time=time.monotonic() if offered_time is None else offered_time,
    )


def pull(
    target: Side, piece: KVPiece, wrap: Callable[[KVTransfer], KVTransfer] = lambda inner: inner
) -> ArrivedPiece:
    """A piece through a transfer, checked where the wire has a checksum."""
    arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
    transfer = wrap(InProcessTransfer(timeout_seconds=30))
    if piece.wire.has_checksum:
        transfer = CheckedTransfer(transfer)
    transfer.register(piece.destination, target.mesh, arrived.put)
    try:
        transfer.offer(piece)
        return arrived.get(timeout=20)
    finally:
        transfer.close()


def assert_same_piece(piece: KVPiece, arrived: ArrivedPiece) -> None:
    """For wires that are not cut."""
    assert arrived.error is None
    assert (arrived.where, arrived.num_bytes) == (piece.where, piece.num_bytes)
    for sent, received in zip(piece.arrays, arrived.arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(sent), np.asarray(received))
