"""Fleets of real workers on paper engines, and the smallest router that can drive them."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from jpd.cache.page_allocator import PageAllocator
from jpd.cache.prefix_cache import PrefixCache
from jpd.explore.paper_engines import PaperOutlet
from jpd.request import SamplingParams
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import KVTransfer
from jpd.worker.client import InProcessClient
from jpd.worker.decode_attempts import DecodeAttempts
from jpd.worker.inbox import Call
from jpd.worker.page_pool import PagePool
from jpd.worker.parts import WorkerParts
from jpd.worker.prefill_attempts import PieceSender, PrefillAttempts
from jpd.worker.protocol import Attempt, PrefillResult, Role, WorkerStatus
from jpd.worker.worker import Worker
from tests.worker.paper import DevicePool, WatchedDecode, WatchedPrefill

_numbers = itertools.count()


def attempt_of(
    token_ids: Sequence[int],
    max_tokens: int = 4,
    *,
    attempt_id: str | None = None,
    stop_token_ids: tuple[int, ...] = (),
    deadline: float = float("inf"),
    priority: int = 0,
) -> Attempt:
    return Attempt(
        attempt_id=attempt_id or f"attempt-{next(_numbers)}",
        token_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
        stop_token_ids=stop_token_ids,
        deadline=deadline,
        priority=priority,
    )


@dataclass
class Member:
    """One worker with its paper engines within reach."""

    worker: Worker
    client: InProcessClient
    kv: DevicePool
    pool: PagePool
    prefill: WatchedPrefill | None
    decode: WatchedDecode | None

    @property
    def status(self) -> WorkerStatus:
        return self.worker.status()

    async def check_integrity(self) -> None:
        """On the worker's own thread: tables and pool agree."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def check() -> None:
            try:
                self.worker.check_integrity()
            except AssertionError as error:
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, None)

        assert self.worker.submit(Call(check, lambda error: None))
        await asyncio.wait_for(done, 10)


@dataclass
class TestFleet:
    __test__ = False
    members: dict[str, Member]
    transfer: KVTransfer
    tokens: dict[str, list[int]] = field(default_factory=dict)
    results: dict[str, PrefillResult] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    async def run(
        self,
        attempt: Attempt,
        prefill: str = "prefill-0",
        decode: str = "decode-0",
        *,
        is_sent_back: bool = False,
    ) -> list[int]:
        """Reserve, prefill, decode: the tokens. Waits for room; cancels everywhere on an error."""
        tokens = self.tokens.setdefault(attempt.attempt_id, [])
        try:
            while (got := await self[decode].client.reserve(attempt)) is None:
                await asyncio.sleep(0.002)
            got = replace(got, is_sent_back=is_sent_back)
            first = await self[prefill].client.prefill(attempt, got)
            self.results[attempt.attempt_id] = first
            tokens.append(first.token_id)
            if first.finish_reason is None and attempt.sampling.max_tokens > 1:
                async for event in self[decode].client.decode(attempt.attempt_id, first.token_id):
                    tokens.extend(event.token_ids)
        finally:
            for name in {prefill, decode}:
                await self[name].client.cancel(attempt.attempt_id)
        return tokens

    async def assert_at_rest(self, seconds: float = 5.0) -> None:
        """I1: every gauge returns to its baseline, and tables and pools agree."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(map(is_at_rest, self.members.values())):
            await asyncio.sleep(0.005)
        for member in self.members.values():
            assert is_at_rest(member), member.status
            await member.check_integrity()

    def close(self) -> None:
        for member in self.members.values():
            member.worker.close()
        self.transfer.close()


def is_at_rest(member: Member) -> bool:
    status = member.status
    used = (
        status.num_slots_used,
        status.num_pages_used,
        status.num_prefills_waiting,
        status.num_prefill_tokens_waiting,
        status.num_transfers_in_flight,
    )
    return not any(used)


@asynccontextmanager
async def fleet(**options: Any) -> AsyncIterator[TestFleet]:
    """The fleet of `start_fleet`, closed at the end."""
    running = start_fleet(**options)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.close)


def start_fleet(
    *,
    num_pages: dict[str, int] | int = 64,
    page_size: int = 4,
    chunk: int = 8,
    slots: int = 4,
    max_model_len: int = 128,
    reserve_tokens: int = 128,
    transfer_timeout_seconds: float = 5.0,
    retain_seconds: float = 600.0,
    roles: dict[str, Role] | None = None,
    transfer_wrapper: Callable[[KVTransfer], KVTransfer] | None = None,
) -> TestFleet:
    """Running workers, by default one prefill and one decode. num_pages leaves out the bin."""
    inner = InProcessTransfer(transfer_timeout_seconds)
    transfer = transfer_wrapper(inner) if transfer_wrapper else inner
    members: dict[str, Member] = {}
    roles = roles or {"prefill-0": "prefill", "decode-0": "decode"}
    for index, (name, role) in enumerate(roles.items()):
        others = {o for o, r in roles.items() if r != "prefill" and o != name}
        destinations = frozenset(others if role != "decode" else ())
        pages = num_pages if isinstance(num_pages, int) else num_pages[name]
        kv = DevicePool(pages + 1, page_size, index)
        allocator = PageAllocator(pages + 1)
        pool = PagePool(
            allocator,
            PrefixCache(allocator, page_size, retain_seconds),
            page_size=page_size,
            retain_seconds=retain_seconds,
        )
        members[name] = _member(
            name,
            role,
            kv,
            pool,
            transfer,
            chunk,
            slots,
            max_model_len,
            reserve_tokens,
            transfer_timeout_seconds,
            destinations,
            frozenset(roles) - {name},
        )
    for member in members.values():
        member.worker.start()
        member.worker.ready.result(10)
    return TestFleet(members, transfer)


def _member(
    name: str,
    role: Role,
    kv: DevicePool,
    pool: PagePool,
    transfer: KVTransfer,
    chunk: int,
    slots: int,
    max_model_len: int,
    reserve_tokens: int,
    timeout_seconds: float,
    destinations: frozenset[str],
    peers: frozenset[str],
) -> Member:
    decode_engine = None if role == "prefill" else WatchedDecode(kv, slots)
    decode = decode_engine and DecodeAttempts(
        name,
        decode_engine,
        pool,
        num_slots=slots,
        max_model_len=max_model_len,
        reserve_tokens=reserve_tokens,
        transfer_timeout_seconds=timeout_seconds,
        outlet=PaperOutlet(kv, transfer.offer, time.monotonic, peers),
    )
    sender = PieceSender(transfer)
    prefill_engine = WatchedPrefill(kv, chunk, sender.send, time.monotonic)
    prefill = PrefillAttempts(
        name,
        prefill_engine,
        pool,
        sender,
        max_model_len=max_model_len,
        transfer_timeout_seconds=timeout_seconds,
        on_local_done=decode.complete if decode else None,
    )
    parts = WorkerParts(
        pool=pool,
        prefill=prefill,
        decode=decode,
        destinations=destinations,
        transfer=transfer,
        warm_up=lambda after_each: after_each(),
        num_compilations=lambda: 0,
    )
    worker = Worker(name, role, parts)
    transfer.register(name, kv.mesh, worker.deliver, worker.serve)
    return Member(worker, InProcessClient(worker), kv, pool, prefill_engine, decode_engine)
