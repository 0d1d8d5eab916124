"""When an idle worker recounts its pages: after something changed, and not again for a while.

Knows only times and a count of changes. Owned by the worker's thread.
"""

from collections.abc import Callable

IDLE_CHECK_SECONDS = 5.0
"""A recount costs microseconds per page; nobody waits for it more often than this."""


class IdleCheck:
    """Calls `check`, which raises when something is wrong. `num_changes` ever rises."""

    def __init__(self, check: Callable[[], None], num_changes: Callable[[], int]) -> None:
        self._check, self._num_changes = check, num_changes
        self._num_checked = 0
        self._last_time = -float("inf")

    @property
    def next_time(self) -> float:
        """When to check, if the worker is idle then."""
        has_changed = self._num_changes() != self._num_checked
        return self._last_time + IDLE_CHECK_SECONDS if has_changed else float("inf")

    def run(self, now: float) -> None:
        """Check if it is time. Raises what the check raises."""
        if now >= self.next_time:
            self._num_checked, self._last_time = self._num_changes(), now
            self._check()
