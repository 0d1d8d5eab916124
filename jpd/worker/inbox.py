"""What other threads ask of a worker's thread: a queue of calls, waited on without polling."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """Work for the worker's thread. `fail` is told when it raised, or will never be done."""

    action: Callable[[], None]
    fail: Callable[[Exception], None]


class Inbox:
    """Calls in the order of posting. `post` from any thread, `take` from the worker's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._closed = False

    def post(self, call: Call) -> bool:
        """Queue a call. False when closed: nothing will come of it, `fail` is not called."""
        with self._changed:
            if self._closed:
                return False
            self._calls.append(call)
            self._changed.notify()
            return True

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, timeout_seconds: float | None) -> list[Call]:
        """All queued calls; waits for the first one up to the timeout (None: for ever)."""
        with self._changed:
            if not self._calls and not self._closed and timeout_seconds != 0:
                self._changed.wait(_bounded(timeout_seconds))
            calls = list(self._calls)
            self._calls.clear()
            return calls

    def close(self) -> list[Call]:
        """Refuse further calls; returns those that nobody took."""
        with self._changed:
            self._closed = True
            calls = list(self._calls)
            self._calls.clear()
            self._changed.notify()
            return calls


def _bounded(timeout_seconds: float | None) -> float | None:
    """A client may give its call a million years, which a lock does not take."""
    return None if timeout_seconds is None else min(timeout_seconds, threading.TIMEOUT_MAX)
