"""What the router says to a worker and what it hears back. No jax here.

1. `reserve` on the decode worker: pages and a slot for the whole sequence, or None when there is no
room now. 2. `prefill` on the prefill worker (or on the decode worker itself: then nothing travels):
returns the first
   token; KV pieces go to the reserving worker on their own.
3. `decode` on the decode worker: tokens as they come, after the KV has arrived.
4. `cancel` on either at any time: idempotent, frees all that the attempt holds there.

A worker's answer to an attempt it does not know is UnknownAttemptError, which is counted, never
ignored.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from jpd.errors import WorkerError
from jpd.request import FinishReason, SamplingParams

Role = Literal["prefill", "decode", "colocated"]


class UnknownAttemptError(WorkerError):
    """A message named an attempt this worker does not hold (any more)."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at serving a request: all that a worker needs. Sampling is resolved: max_tokens and
    seed are set.

    On a replay the tokens already sent stand at the end of `token_ids`, and `max_tokens`,
    `min_tokens` are lessened.
    """

    attempt_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # EOS ids (unless ignored) and the request's own
    priority: int = 0
    deadline: float = float("inf")  # time.monotonic seconds


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages and a slot promised by a decode worker, and the prompt prefix it already holds."""

    attempt_id: str
    worker: str
    num_cached_tokens: int  # a multiple of the page size, less than the prompt's length


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The end of a prefill: the first token. Its KV may still be on its way."""

    attempt_id: str
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int
    num_computed_tokens: int
    queue_seconds: float  # in the worker's own queue, before its first chunk
    prefill_seconds: float  # first chunk dispatched → token on the host


@dataclass(frozen=True, slots=True)
class DecodeEvent:
    """Tokens of one attempt; the first event may carry none and say when KV was complete."""

    attempt_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    kv_complete_time: float | None = None  # time.monotonic seconds; on the first event only
    kv_bytes: int = 0  # moved to this worker for the attempt; on the first event only


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One look at a worker. At rest its gauges are zero but for capacities and cached pages."""

    name: str
    role: Role
    healthy: bool
    reason: str  # why it is not healthy, else ""
    draining: bool
    num_slots: int
    num_slots_used: int
    num_pages: int  # usable pages of the pool
    num_pages_used: int  # held by live attempts
    num_pages_cached: int  # held by the prefix cache alone, can be evicted
    num_prefills_waiting: int  # queued or being computed
    num_prefill_tokens_waiting: int  # prompt tokens not yet computed
    num_transfers_in_flight: int
    num_compilations_after_ready: int
    last_step_time: float  # time.monotonic seconds of the last completed loop turn
    can_prefill: bool = True  # has the compiled functions to prefill, for itself or for others
    num_late_pieces: int = 0  # KV pieces that arrived for nobody, dropped; since the start
    num_unknown_attempts: int = 0  # messages that named an attempt not held; since the start


class WorkerClient(Protocol):
    """The router's only view of a worker. All methods are called on the router's event loop."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> Role: ...

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        """Reserve room for the whole sequence. None: no room now. RequestError: can never fit."""
        ...

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        """Prefill and send the KV to `reservation.worker`. TransferError, WorkerLostError."""
        ...

    def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        """Decode a reserved attempt. TransferError: KV late or broken; WorkerLostError."""
        ...

    async def cancel(self, attempt_id: str) -> None:
        """Forget the attempt and free all it holds. Idempotent."""
        ...

    async def status(self) -> WorkerStatus: ...

    async def drain(self) -> None:
        """Take no new attempts; return when the running ones have ended."""
        ...

    async def set_role(self, role: Role) -> None: ...

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop whenever pages or slots were freed."""
        ...
