"""A worker without a device: the WorkerClient contract with arithmetic that can be done by hand.

The token after t is (t + 1) % vocab_size, unless `next_token` says otherwise. Latencies, room and
faults are scripted. Knows no router; used by the tests of the router and of the frontends.

    worker = FakeWorker("decode-0", "decode", slots=2)
    worker.script("prefill", WorkerLostError("prefill-0", "fell over"))  # the next prefill raises
    worker.script("decode", "hang", after_tokens=3)  # the next decode stops talking
    worker.die(); worker.revive(); worker.freeze(); worker.thaw()
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import RequestError, WorkerLostError
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    UnknownAttemptError,
    WorkerStatus,
)
from tests.support.fake_answers import end_of, logprobs_of, max_tokens_of, prompt_logprobs_of
from tests.support.fake_prefixes import FakePrefixes
from tests.support.fake_turns import PrefillTurns
from tests.support.fault_script import Fault, FaultScript, Verb

NextToken = Callable[[Sequence[int], Attempt], int]


@dataclass(slots=True)
class _Held:
    """What one attempt holds here."""

    attempt: Attempt
    num_pages: int
    num_slots: int
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0  # waiting or being computed here
    is_local: bool = False  # prefilled here: nothing travels


class FakeWorker:
    """Implements WorkerClient; every method runs on the router's event loop."""

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        slots: int = 4,
        pages: int = 64,
        page_size: int = 16,
        step_seconds: float = 0.0,
        prefill_token_seconds: float = 0.0,
        reply_seconds: float = 0.0,
        transfer_seconds: float = 0.0,
        vocab_size: int = 256,
        bytes_per_token: int = 8,
        max_model_len: int | None = None,
        prefix_cache: bool = False,
        can_prefill: bool = True,
        next_token: NextToken | None = None,
    ) -> None:
        self._name, self._role = name, role
        self.num_slots = 0 if role == "prefill" else slots
        self.num_pages, self.page_size = pages, page_size
        self.step_seconds, self.prefill_token_seconds = step_seconds, prefill_token_seconds
        self.reply_seconds, self.transfer_seconds = reply_seconds, transfer_seconds
        self.vocab_size, self.bytes_per_token = vocab_size, bytes_per_token
        self.max_model_len = max_model_len
        self.can_prefill = can_prefill
        self.next_token = next_token
        self.emit_stale_events = False
        self.status_hangs = False
        self.num_compilations_after_ready = 0
        self.roles: tuple[Role, ...] = ("prefill", "decode", "colocated")
        self.attempts: dict[Verb, deque[Attempt]] = {
            verb: deque(maxlen=10_000) for verb in ("reserve", "prefill", "transfer", "decode")
        }
        self.cancelled: deque[str] = deque(maxlen=10_000)
        self.num_unknown = 0
        self._held: dict[str, _Held] = {}
        self._prefixes = FakePrefixes(page_size) if prefix_cache else None
        self._faults = FaultScript()
        self._lost_reason = ""
        self._draining = False
        self._died, self._moving = asyncio.Event(), asyncio.Event()
        self._moving.set()
        self._turns = PrefillTurns()
        self._room_callbacks: list[Callable[[], None]] = []
        self._last_step_time = 0.0

    # What a test says to the worker.

    def script(self, verb: Verb, fault: Fault, *, times: int = 1, after_tokens: int = 0) -> None:
        """The next `times` calls of `verb` raise the fault, or never answer."""
        self._faults.add(verb, fault, times, after_tokens)

    def die(self, reason: str = "killed by the test") -> None:
        """Everything held is lost; every call raises WorkerLostError until `revive`."""
        self._lost_reason = reason
        self._held.clear()
        self._died.set()
        self._moving.set()

    def revive(self) -> None:
        """Come back empty, with cached prefixes forgotten."""
        self._lost_reason = ""
        self._died.clear()
        if self._prefixes is not None:
            self._prefixes = FakePrefixes(self.page_size)
        self._tell_room()

    def freeze(self) -> None:
        """The engine loop stands still; status is still answered."""
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    def evict(self, token_ids: Sequence[int], salt: str | None = None) -> None:
        """Forget the pages of this prefix, as a full pool would."""
        assert self._prefixes is not None, "it has a prefix cache"
        self._prefixes.evict(token_ids, salt)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pages_used(self) -> int:
        return sum(held.num_pages for held in self._held.values())

    @property
    def num_slots_used(self) -> int:
        return sum(held.num_slots for held in self._held.values())

    # WorkerClient.

    @property
    def name(self) -> str:
        return self._name

    @property
    def role(self) -> Role:
        return self._role

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        self.attempts["reserve"].append(attempt)
        await self._obey_script("reserve")
        await self._pause(0.0)
        num_tokens = len(attempt.token_ids) + max_tokens_of(attempt)
        num_pages = -(-num_tokens // self.page_size)
        self._check_fits(attempt, num_tokens, num_pages)
        room = self.num_pages - self.num_pages_used
        if self._draining or self.num_slots_used >= self.num_slots or room < num_pages:
            return None
        num_cached = self._match(attempt)
        self._held[attempt.attempt_id] = _Held(attempt, num_pages, 1, num_cached)
        return Reservation(attempt.attempt_id, self._name, num_cached)

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        self.attempts["prefill"].append(attempt)
        is_local = reservation.worker == self._name
        held = self._hold_prefill(attempt, is_local)
        started = asyncio.get_running_loop().time()
        try:
            async with self._turns.take(attempt.priority):
                queued = asyncio.get_running_loop().time()
                await self._obey_script("prefill")
                num_cached = self._match(attempt)
                num_computed = len(attempt.token_ids) - num_cached
                await self._pause(self.prefill_token_seconds * num_computed)
            self._check_held(attempt.attempt_id)
            self._remember(attempt.token_ids, attempt.cache_salt)
        except Exception:
            self._free(attempt.attempt_id)
            raise
        held.num_prefill_tokens = 0
        token_id = self._next_token(attempt.token_ids, attempt)
        finish_reason = end_of(attempt, 1, token_id)
        if not is_local:
            self._free_after_transfer(attempt.attempt_id)
        await self._pause(self.reply_seconds)
        ended = asyncio.get_running_loop().time()
        return PrefillResult(
            attempt.attempt_id,
            token_id,
            finish_reason,
            num_cached,
            num_computed,
            queued - started,
            ended - queued,
            logprobs=logprobs_of(attempt, token_id),
            prompt_logprobs=prompt_logprobs_of(attempt),
        )

    async def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        held = self._check_held(attempt_id)
        attempt = held.attempt
        self.attempts["decode"].append(attempt)
        try:
            yield await self._await_transfer(held)
            token_ids = [*attempt.token_ids, first_token_id]
            for num_produced in itertools.count(2):
                await self._obey_script("decode", num_produced - 1)
                await self._pause(self.step_seconds)
                self._check_held(attempt_id)
                if self.emit_stale_events:
                    yield DecodeEvent(f"stale-{attempt_id}", (0,))
                token_ids.append(self._next_token(token_ids, attempt))
                finish_reason = end_of(attempt, num_produced, token_ids[-1])
                if finish_reason is not None:
                    self._remember(token_ids, attempt.cache_salt)
                    self._free(attempt_id)
                logprobs = logprobs_of(attempt, token_ids[-1])
                yield DecodeEvent(attempt_id, (token_ids[-1],), finish_reason, logprobs=logprobs)
                if finish_reason is not None:
                    return
        except Exception:  # a reader who goes away frees nothing: `cancel` does
            self._free(attempt_id)
            raise

    async def cancel(self, attempt_id: str) -> None:
        self.cancelled.append(attempt_id)
        self._check_alive()
        await self._moving.wait()
        self._free(attempt_id)
        self._last_step_time = asyncio.get_running_loop().time()

    async def status(self) -> WorkerStatus:
        if self.status_hangs:
            await asyncio.Event().wait()
        waiting = [held for held in self._held.values() if held.num_prefill_tokens]
        return WorkerStatus(
            name=self._name,
            role=self._role,
            healthy=not self._lost_reason,
            reason=self._lost_reason,
            draining=self._draining,
            num_slots=self.num_slots,
            num_slots_used=self.num_slots_used,
            num_pages=self.num_pages,
            num_pages_used=self.num_pages_used,
            num_pages_cached=0,
            num_prefills_waiting=len(waiting),
            num_prefill_tokens_waiting=sum(held.num_prefill_tokens for held in waiting),
            num_transfers_in_flight=0,
            num_compilations_after_ready=self.num_compilations_after_ready,
            last_step_time=self._last_step_time,
            roles=self.roles,
            can_prefill=self.can_prefill,
            incarnation="" if self._prefixes is None else self._prefixes.incarnation,
            num_prefix_changes=0 if self._prefixes is None else self._prefixes.num_changes,
        )

    async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        self._check_alive()
        assert self._prefixes is not None, "it was never said that there are any"
        return self._prefixes.since(incarnation, sequence)

    async def drain(self) -> None:
        self._draining = True
        while self._held:
            await asyncio.sleep(0.01)

    async def set_role(self, role: Role) -> None:
        assert self._draining and not self._held
        self._role, self._draining = role, False

    def on_room(self, callback: Callable[[], None]) -> None:
        self._room_callbacks.append(callback)

    # Inside.

    def _check_alive(self) -> None:
        if self._lost_reason:
            raise WorkerLostError(self._name, self._lost_reason)

    def _check_held(self, attempt_id: str) -> _Held:
        self._check_alive()
        if attempt_id not in self._held:
            self.num_unknown += 1
            raise UnknownAttemptError(self._name, f"attempt {attempt_id} is not held here")
        return self._held[attempt_id]

    def _check_fits(self, attempt: Attempt, num_tokens: int, num_pages: int) -> None:
        limit = self.max_model_len
        if limit is not None and num_tokens > limit:
            raise RequestError("prompt", len(attempt.token_ids), f"{self._name} holds {limit}")
        if num_pages > self.num_pages:
            raise RequestError("prompt", len(attempt.token_ids), f"needs {num_pages} pages")

    async def _pause(self, seconds: float) -> None:
        """Let time pass as the engine would: stopped by `freeze`, broken by `die`."""
        await self._moving.wait()
        self._check_alive()
        if seconds <= 0.0:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._died.wait()
        await self._moving.wait()
        self._check_alive()
        self._last_step_time = asyncio.get_running_loop().time()

    async def _obey_script(self, verb: Verb, num_tokens: int = 0) -> None:
        fault = self._faults.take(verb, num_tokens)
        if fault == "hang":
            await self._died.wait()
            self._check_alive()
        elif isinstance(fault, Exception):
            raise fault

    def _hold_prefill(self, attempt: Attempt, is_local: bool) -> _Held:
        self._check_alive()
        num_tokens = len(attempt.token_ids)
        if is_local:
            held = self._check_held(attempt.attempt_id)
            held.is_local = True
        else:
            held = _Held(attempt, -(-num_tokens // self.page_size), 0)
            self._held[attempt.attempt_id] = held
        held.num_prefill_tokens = num_tokens
        return held

    async def _await_transfer(self, held: _Held) -> DecodeEvent:
        self.attempts["transfer"].append(held.attempt)
        await self._obey_script("transfer")
        attempt_id = held.attempt.attempt_id
        num_tokens = 0
        if not held.is_local:
            await self._pause(self.transfer_seconds)
            num_tokens = len(held.attempt.token_ids) - held.num_cached_tokens
        self._check_held(attempt_id)
        now = asyncio.get_running_loop().time()
        return DecodeEvent(attempt_id, (), None, now, num_tokens * self.bytes_per_token)

    def _next_token(self, token_ids: Sequence[int], attempt: Attempt) -> int:
        if self.next_token is not None:
            return self.next_token(token_ids, attempt)
        return (token_ids[-1] + 1) % self.vocab_size

    def _free_after_transfer(self, attempt_id: str) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.transfer_seconds, self._free, attempt_id)

    def _free(self, attempt_id: str) -> None:
        if self._held.pop(attempt_id, None) is not None:
            self._tell_room()

    def _tell_room(self) -> None:
        for callback in self._room_callbacks:
            callback()

    def _match(self, attempt: Attempt) -> int:
        return 0 if self._prefixes is None else self._prefixes.match(attempt)

    def _remember(self, token_ids: Sequence[int], salt: str | None) -> None:
        if self._prefixes is not None:
            self._prefixes.keep(token_ids, salt)


def one_each(**options: Any) -> list[FakeWorker]:
    """The smallest fleet: one prefill and one decode worker with the same options."""
    names: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode"}
    return [FakeWorker(name, role, **options) for name, role in names.items()]
