"""Whose chunk a prefill worker computes next: earliest virtual deadline first.

A prompt's virtual deadline is its arrival plus an allowance in proportion to its length, never
later than its own deadline, and a second earlier for each step of priority. So a short prompt
overtakes a long one, and nobody starves: only what is due earlier comes first. Knows no pages.
"""

import heapq

ALLOWANCE = 4.0
"""Times the measured time of a prompt that it may take before others stop overtaking it."""

SECONDS_PER_PRIORITY = 1.0

FIRST_SECONDS_PER_TOKEN = 1e-3
"""Until something was measured."""

SMOOTHING = 0.2


class PrefillScheduler:
    """An order of tasks, each known by its id. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # due, number of arrival, task
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self.seconds_per_token = FIRST_SECONDS_PER_TOKEN

    def __len__(self) -> int:
        return len(self._numbers)

    def add(
        self, task_id: str, num_tokens: int, *, now: float, priority: int, deadline: float
    ) -> None:
        """Queue a task that has num_tokens to compute."""
        if task_id in self._numbers:
            raise ValueError(f"task {task_id} is queued already")
        allowance = ALLOWANCE * self.seconds_per_token * num_tokens
        due = min(now + allowance, deadline) - SECONDS_PER_PRIORITY * priority
        self._numbers[task_id] = self._next_number
        heapq.heappush(self._heap, (due, self._next_number, task_id))
        self._next_number += 1

    def remove(self, task_id: str) -> None:
        """Forget a task. Idempotent."""
        self._numbers.pop(task_id, None)

    def pick(self) -> str | None:
        """The task to work on now; it stays queued until it is removed."""
        while self._heap:
            _, number, task_id = self._heap[0]
            if self._numbers.get(task_id) == number:
                return task_id
            heapq.heappop(self._heap)
        return None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a computed chunk how long a token takes."""
        measured = seconds / num_tokens
        self.seconds_per_token += SMOOTHING * (measured - self.seconds_per_token)
