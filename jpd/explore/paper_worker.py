"""A real worker on paper engines, turned by hand, behind a client that survives its loss.

What a launcher does for real workers, without threads and devices. Called by the explorer's world.
"""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jpd.cache.page_allocator import PageAllocator
from jpd.cache.prefix_cache import PrefixCache
from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import WorkerLostError
from jpd.explore.paper_engines import PaperDecode, PaperOutlet, PaperPool, PaperPrefill
from jpd.explore.paper_transfer import PaperNetwork
from jpd.worker.client import InProcessClient
from jpd.worker.decode_attempts import DecodeAttempts
from jpd.worker.inbox import Call
from jpd.worker.page_pool import PagePool
from jpd.worker.parts import WorkerParts
from jpd.worker.prefill_attempts import PieceSender, PrefillAttempts
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    WorkerStatus,
)
from jpd.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """Small enough that everything runs short of everything."""

    page_size: int
    num_pages: int  # the bin included
    num_slots: int
    chunk: int
    max_model_len: int
    transfer_timeout_seconds: float
    retain_seconds: float
    reserve_tokens: int
    layer_groups: int


class PaperWorker:
    """WorkerClient of one worker, whichever incarnation of it is there."""

    def __init__(
        self,
        name: str,
        role: Role,
        sizes: WorkerSizes,
        peers: frozenset[str],
        network: PaperNetwork,
        clock: Callable[[], float],
    ) -> None:
        """`peers`: the workers to which it sends KV."""
        self._name, self._role, self._sizes = name, role, sizes
        self._peers, self._network, self._clock = peers, network, clock
        self._room_callbacks: list[Callable[[], None]] = []
        self.is_silent = False  # it does nothing and says nothing, and nobody has been told
        self.start()

    def start(self) -> None:
        """A new incarnation, empty; the one before is over."""
        self.is_silent = self._has_failed = False
        transfer = self._network.endpoint(self._name)
        pool, parts = self._make_parts(transfer)
        self.pool = pool
        self.worker = Worker(self._name, self._role, parts, self._clock)
        transfer.register(self._name, None, self.worker.deliver, self.worker.serve)
        self._transfer = transfer
        self._client = InProcessClient(self.worker)
        for callback in self._room_callbacks:
            self._client.on_room(callback)
            callback()

    def _make_parts(self, transfer: Any) -> tuple[PagePool, WorkerParts]:
        sizes = self._sizes
        allocator = PageAllocator(sizes.num_pages, self._clock)
        pool = PagePool(
            allocator,
            PrefixCache(allocator, sizes.page_size, sizes.retain_seconds, self._clock),
            page_size=sizes.page_size,
            retain_seconds=sizes.retain_seconds,
        )
        self._paper = paper = PaperPool(sizes.num_pages, sizes.page_size)
        paper.on_write = self._check_owner
        decode = self._make_decode(paper, pool, transfer) if self._role != "prefill" else None
        sender = PieceSender(transfer)
        engine = PaperPrefill(
            paper, sizes.chunk, sender.send, self._clock, layer_groups=sizes.layer_groups
        )
        self._prefilling = prefill = PrefillAttempts(
            self._name,
            cast(Any, engine),
            pool,
            sender,
            max_model_len=sizes.max_model_len,
            transfer_timeout_seconds=sizes.transfer_timeout_seconds,
            on_local_done=decode.complete if decode is not None else None,
            clock=self._clock,
        )
        return pool, WorkerParts(
            pool=pool,
            prefill=prefill,
            decode=decode,
            destinations=self._peers if self._role == "prefill" else frozenset(),
            transfer=transfer,
            warm_up=lambda after_each: after_each(),
            num_compilations=lambda: 0,
        )

    def _make_decode(self, paper: PaperPool, pool: PagePool, transfer: Any) -> DecodeAttempts:
        engine = PaperDecode(paper, self._sizes.num_slots)
        self._decoding = DecodeAttempts(
            self._name,
            cast(Any, engine),
            pool,
            num_slots=self._sizes.num_slots,
            max_model_len=self._sizes.max_model_len,
            reserve_tokens=self._sizes.reserve_tokens,
            transfer_timeout_seconds=self._sizes.transfer_timeout_seconds,
            outlet=cast(Any, PaperOutlet(paper, transfer.offer, self._clock, self._peers)),
            clock=self._clock,
        )
        return self._decoding

    def _check_owner(self, attempt_id: str, page_ids: Sequence[int]) -> None:
        """I7: KV is only ever written into pages of the attempt that it belongs to."""
        role = self._prefilling if self._role == "prefill" else self._decoding
        pages = role.pages_of(attempt_id)
        assert pages is not None, f"KV of {attempt_id}, which holds nothing here, was written"
        others = set(page_ids) - set(pages.page_ids)
        assert not others, f"KV of {attempt_id} was written into pages {others} of others"

    # Driven by the explorer.

    def remember(self, token_ids: Sequence[int]) -> None:
        """Hold this as a prefix, as if it had been served before."""
        pages = self.pool.take(token_ids, len(token_ids))
        assert pages is not None, "an empty pool is full"
        for position, token in enumerate(token_ids):
            self._paper.put(pages.page_ids, position, token)
        self.pool.keep(token_ids, pages.page_ids)
        self.pool.release(pages.page_ids)

    @property
    def is_lost(self) -> bool:
        return self.is_silent or self._has_failed

    @property
    def has_work(self) -> bool:
        return not self.is_lost and self.worker.has_work

    def turn(self) -> None:
        """One turn of the worker's loop. I7 after it: every page is owned once, by who says so."""
        if not self.is_lost:
            self.worker.turn()
            if self.worker.ready.done():  # nobody warms up here: it can only have failed
                self.worker.ready.result()
            self.worker.check_integrity()

    def fail(self) -> None:
        """The engine raises: everybody who waits hears of it."""
        self._has_failed = True

        def broken() -> None:
            raise RuntimeError("its engine broke, as the explorer wanted")

        self.worker.submit(Call(broken, lambda error: None))
        self.worker.turn()
        self._transfer.close()

    def vanish(self) -> None:
        """The process is gone, and nobody says so."""
        self.is_silent = True
        self._transfer.close()

    def restart(self) -> None:
        """Come back at the same name. What hung on the one before now breaks."""
        if self.is_silent:
            self.fail()
        self.start()

    def check_at_rest(self) -> None:
        """I1: every gauge is at its baseline."""
        status = self.worker.status()
        used = {
            "slots": status.num_slots_used,
            "pages": status.num_pages_used,
            "prefills": status.num_prefills_waiting,
            "prompt tokens": status.num_prefill_tokens_waiting,
            "pieces": status.num_transfers_in_flight,
        }
        assert not any(used.values()), f"{self._name} is idle and still holds {used}"

    # WorkerClient.

    @property
    def name(self) -> str:
        return self._name

    @property
    def role(self) -> Role:
        return self._role

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        return await self._client.reserve(attempt)

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        return await self._client.prefill(attempt, reservation)

    def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        return self._client.decode(attempt_id, first_token_id)

    async def cancel(self, attempt_id: str) -> None:
        await self._client.cancel(attempt_id)

    async def status(self) -> WorkerStatus:
        if self.is_silent:
            raise WorkerLostError(self._name, "nobody answers")
        return await self._client.status()

    async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        return await self._client.prefix_changes(incarnation, sequence)

    async def drain(self) -> None:
        await self._client.drain()

    async def set_role(self, role: Role) -> None:
        await self._client.set_role(role)

    def on_room(self, callback: Callable[[], None]) -> None:
        self._room_callbacks.append(callback)
        self._client.on_room(callback)


def draw_sizes(draw: random.Random, page_size: int) -> WorkerSizes:
    """Sizes at which pages, slots and time are scarce."""
    return WorkerSizes(
        page_size=page_size,
        num_pages=draw.randint(6, 10),
        num_slots=draw.randint(1, 3),
        chunk=draw.randint(2, 5),
        max_model_len=16,
        transfer_timeout_seconds=2.0,
        retain_seconds=draw.choice((0.5, 100.0)),
        reserve_tokens=draw.choice((1, 2, 100)),
        layer_groups=draw.choice((1, 1, 2)),
    )
