"""Which workers a session's KV lives on, so that its next turn goes there.

A hint, never a pin: placement drops it when the worker is gone, full or much more loaded, and the
next reservation binds the session anew. Bounded in number and in time. Used by
`jpd.router.journey`.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class Binding:
    """The workers of the session's last turn; prefill is None when decode did it."""

    decode_worker: str
    prefill_worker: str | None
    expires: float


class SessionTable:
    """Session id → Binding, oldest use first."""

    def __init__(
        self, ttl_seconds: float, clock: Callable[[], float], max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._ttl_seconds, self._clock, self._max_sessions = ttl_seconds, clock, max_sessions
        self._bindings: OrderedDict[str, Binding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bindings)

    def find(self, session_id: str | None) -> Binding | None:
        """The binding, unless it has expired."""
        binding = self._bindings.get(session_id) if session_id is not None else None
        if binding is None or binding.expires < self._clock():
            return None
        return binding

    def bind(self, session_id: str | None, decode_worker: str, prefill_worker: str | None) -> None:
        """Remember who serves the session; a turn prefilled on decode keeps its prefill worker."""
        if session_id is None:
            return
        known = self.find(session_id)
        if prefill_worker is None and known is not None:
            prefill_worker = known.prefill_worker
        expires = self._clock() + self._ttl_seconds
        self._bindings[session_id] = Binding(decode_worker, prefill_worker, expires)
        self._bindings.move_to_end(session_id)
        self._drop_old()

    def _drop_old(self) -> None:
        """Every use moves to the end with the same lifetime, so the front expires first."""
        now = self._clock()
        while self._bindings:
            binding = next(iter(self._bindings.values()))
            if binding.expires >= now and len(self._bindings) <= self._max_sessions:
                return
            self._bindings.popitem(last=False)
