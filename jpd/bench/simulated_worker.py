"""A worker that only takes time: prompts one after the other, rows of a batch in step.

Implements WorkerClient on whatever clock the event loop has. Knows no router. Used by the overload
part of `jpd bench router` and by `jpd bench frontend`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import WorkerLostError
from jpd.request import FinishReason
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    WorkerStatus,
)

KV_BYTES_PER_TOKEN = 1 << 17


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast it is."""

    prefill_tokens_per_second: float = 20_000.0
    step_seconds: float = 0.02
    step_seconds_per_row: float = 2e-4
    transfer_seconds: float = 0.005
    tokens_per_event: int = 8


class SimulatedWorker:
    """Prefills and decodes on paper; every method runs on the router's event loop."""

    def __init__(self, name: str, role: Role, pace: Pace, *, slots: int = 32) -> None:
        self.name, self._role, self._pace = name, role, pace
        self._num_slots = 0 if role == "prefill" else slots
        self._rows: dict[str, Attempt] = {}
        self._busy_until = 0.0
        self._room_callbacks: list[Callable[[], None]] = []

    @property
    def role(self) -> Role:
        return self._role

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        if len(self._rows) >= self._num_slots:
            return None
        self._rows[attempt.attempt_id] = attempt
        return Reservation(attempt.attempt_id, self.name, 0)

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        seconds = len(attempt.token_ids) / self._pace.prefill_tokens_per_second
        queue_seconds = max(0.0, self._busy_until - self._now)
        self._busy_until = self._now + queue_seconds + seconds
        await asyncio.sleep(queue_seconds + seconds)
        return PrefillResult(
            attempt.attempt_id, 1, None, 0, len(attempt.token_ids), queue_seconds, seconds
        )

    async def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        attempt = self._rows.get(attempt_id)
        if attempt is None:
            raise WorkerLostError(self.name, f"{attempt_id} is not held here")
        await asyncio.sleep(self._pace.transfer_seconds)
        num_bytes = len(attempt.token_ids) * KV_BYTES_PER_TOKEN
        yield DecodeEvent(attempt_id, (), None, self._now, num_bytes)
        num_left = (attempt.sampling.max_tokens or 1) - 1
        while num_left > 0:
            count = min(self._pace.tokens_per_event, num_left)
            await self._steps(count)
            num_left -= count
            finish: FinishReason | None = None if num_left else "length"
            if finish is not None:
                await self.cancel(attempt_id)
            yield DecodeEvent(attempt_id, (1,) * count, finish)

    async def _steps(self, count: int) -> None:
        """Until so many tokens of a row are there."""
        pace = self._pace
        await asyncio.sleep(
            count * (pace.step_seconds + pace.step_seconds_per_row * len(self._rows))
        )

    async def cancel(self, attempt_id: str) -> None:
        if self._rows.pop(attempt_id, None) is not None:
            for callback in self._room_callbacks:
                callback()

    async def status(self) -> WorkerStatus:
        status = WorkerStatus.at_rest(
            self.name,
            self._role,
            num_slots=self._num_slots,
            num_pages=1 << 20,
            last_step_time=self._now,
        )
        return replace(status, num_slots_used=len(self._rows))

    async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        raise NotImplementedError

    async def drain(self) -> None:
        """Nothing runs on by itself."""

    async def set_role(self, role: Role) -> None:
        self._role = role

    def on_room(self, callback: Callable[[], None]) -> None:
        self._room_callbacks.append(callback)
