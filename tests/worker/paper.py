"""The explorer's paper engines where their pages lie on devices, so that real transfers move them.

Each engine can be watched and held at its steps. Used by the tests of workers.
"""

import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpd.engine.decode_row import DecodeDone
from jpd.engine.prefill import PrefillDone
from jpd.explore import paper_engines
from jpd.explore.paper_engines import PaperDecode, PaperPool, PaperPrefill
from jpd.parallel.mesh import make_worker_mesh
from jpd.transfer.wire import Wire
from jpd.worker.protocol import Attempt


def reference(attempt: Attempt) -> list[int]:
    """What the attempt must generate, computed without pages."""
    assert attempt.sampling.max_tokens is not None
    return paper_engines.reference(
        attempt.token_ids, attempt.sampling.max_tokens, attempt.stop_token_ids
    )


class DevicePool(PaperPool):
    """Pages travel as arrays of one device's mesh, all of a message in one piece."""

    def __init__(self, num_pages: int, page_size: int, device: int) -> None:
        super().__init__(num_pages, page_size)
        self.wire = Wire(1, page_size, tuple(range(1, num_pages + 1)), token_bytes=8, dtype="int32")
        devices = jax.devices()[device : device + 1]
        self.mesh: Mesh = make_worker_mesh(devices, tensor=1, expert=1, num_cached_heads=1)

    def gather(
        self, attempt_id: str, page_ids: Sequence[int], layers: range
    ) -> tuple[jax.Array, ...]:
        sharding = NamedSharding(self.mesh, PartitionSpec())
        found = ([self.layers[layer][page] for page in page_ids] for layer in layers)
        arrays = [np.array(pages, np.int32)[:, :, None, None] for pages in found]
        return tuple(jax.device_put(arrays, sharding))

    def scatter(self, arrays: Sequence[jax.Array], page_ids: Sequence[int], layers: range) -> None:
        for layer, array in zip(layers, arrays, strict=True):
            pages = np.asarray(array)[:, :, 0, 0].tolist()
            for page_id, page in zip(page_ids, pages, strict=True):
                self.layers[layer][page_id][:] = page


class WatchedPrefill(PaperPrefill):
    """Calls `before_step` first, on its worker's thread."""

    before_step: Callable[[], object] = staticmethod(lambda: None)

    @property
    def unfinished(self) -> set[str]:
        return set(self._tasks)

    def step(self) -> list[PrefillDone]:
        self.before_step()
        return super().step()


class WatchedDecode(PaperDecode):
    """The same of the other engine."""

    before_step: Callable[[], object] = staticmethod(lambda: None)

    def step(self, *, nobody_waits: bool = False) -> list[DecodeDone]:
        self.before_step()
        return super().step(nobody_waits=nobody_waits)


class Gate:
    """Holds an engine's thread at its next step until opened; `entered` says that it waits."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(20), "a test left the gate closed"
