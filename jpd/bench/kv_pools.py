"""KV pools of a size worth moving, without a model: what the transfer benchmark moves."""

import time
from collections.abc import Callable

import jax
import numpy as np
import numpy.typing as npt

from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.engine.page_moves import PageMoves
from jpd.parallel.mesh import kv_partitions, make_worker_mesh
from jpd.transfer.plan import KVLayout, plan_transfer
from jpd.transfer.protocol import ArrivedPiece, KVPiece
from jpd.transfer.quantised import token_head_bytes
from jpd.transfer.wire import Wire

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE = 16, 8, 128, 32
"""As many layers as the smallest of models: XLA runs few operations on one core of a CPU only."""
PIECE_PAGES, NUM_PIECES = 8, 4
NUM_PAGES = PIECE_PAGES * NUM_PIECES


class Pool:
    """A pool of random numbers on `tensor` devices from `first_device` on."""

    def __init__(self, first_device: int, tensor: int) -> None:
        devices = jax.devices()[first_device : first_device + tensor]
        self.mesh = make_worker_mesh(devices, tensor=tensor, expert=1, num_cached_heads=NUM_HEADS)
        self.spec = KVSpec(
            num_layers=NUM_LAYERS,
            num_pages=NUM_PAGES + 1,
            page_size=PAGE_SIZE,
            num_cached_heads=NUM_HEADS,
            kv_width=2 * HEAD_DIM,
            dtype=np.float32,
            kv_parts=(HEAD_DIM, HEAD_DIM),
        )
        self.cache, self.moves = KVCache(self.spec, self.mesh), PageMoves(self.spec, self.mesh)
        draw = np.random.default_rng(0)
        values = [
            draw.standard_normal(self.spec.layer_shape, np.float32) for _ in range(NUM_LAYERS)
        ]
        self.cache.layers = tuple(jax.device_put(value, self.cache.sharding) for value in values)
        self.plain = jax.device_put([value[1:] for value in values], jax.devices()[0])

    @property
    def num_bytes(self) -> int:
        """Of all its pages."""
        return NUM_PAGES * self.spec.page_bytes

    @property
    def layout(self) -> KVLayout:
        return KVLayout(kv_partitions(self.mesh), self.mesh.size)

    def wire_to(self, target: "Pool", dtype: str = "float32") -> Wire:
        token_bytes = self.spec.token_bytes
        if dtype == "int8":
            token_bytes = NUM_LAYERS * NUM_HEADS * token_head_bytes(self.spec.kv_parts)
        plan = plan_transfer(self.layout, target.layout, token_bytes)
        return plan.wire(PAGE_SIZE, (PIECE_PAGES,), dtype, has_checksum=False)

    def offer_all(self, offer: Callable[[KVPiece], None], destination: str, wire: Wire) -> int:
        """Gather and offer every page; returns in how many pieces."""
        page_ids = range(1, NUM_PAGES + 1)
        for start in range(0, NUM_PAGES, PIECE_PAGES):
            offer(
                KVPiece(
                    attempt_id="bench",
                    layer_start=0,
                    num_layers=NUM_LAYERS,
                    destination=destination,
                    page_start=start,
                    num_pages=PIECE_PAGES,
                    arrays=self.moves.gather(self.cache, page_ids, wire, start, PIECE_PAGES),
                    wire=wire,
                    num_bytes=wire.num_bytes(PIECE_PAGES),
                    is_last=start + PIECE_PAGES == NUM_PAGES,
                    offered_time=time.monotonic(),
                )
            )
        return NUM_PIECES

    def write(self, piece: ArrivedPiece) -> None:
        """Into pages of the same numbers. Raises what kept the piece from arriving."""
        if piece.error is not None:
            raise piece.error
        first = 1 + piece.page_start
        self.moves.scatter(self.cache, piece.arrays, range(first, first + piece.num_pages))

    def read(self) -> list[npt.NDArray[np.float32]]:
        """All pages but the bin."""
        return [np.asarray(layer)[1:] for layer in self.cache.layers]
