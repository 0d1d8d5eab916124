"""Which prompts a prefill worker computes next: earliest virtual deadline first.

A prompt's virtual deadline is its arrival plus an allowance in proportion to its length, never
later than its own deadline, and a second earlier for each step of priority. So a short prompt
overtakes a long one, and nobody starves: only what is due earlier comes first. Knows no pages.
"""

import heapq

from jpd.engine.buckets import ChunkLayout

ALLOWANCE = 4.0
"""Times the measured time of a prompt that it may take before others stop overtaking it."""

SECONDS_PER_PRIORITY = 1.0

FIRST_SECONDS_PER_TOKEN = 1e-3
"""Until something was measured."""

OVERHEAD_TOKENS = 64
"""Until a layout was measured: what a call costs beside its tokens, in tokens."""

SMOOTHING = 0.2


class PrefillScheduler:
    """An order of tasks, each known by its id. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # due, number of arrival, task
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self.seconds_per_token = FIRST_SECONDS_PER_TOKEN
        self._layout_seconds: dict[ChunkLayout, float] = {}

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

    def first(self, num_tasks: int) -> list[str]:
        """The tasks to work on now, in this order; they stay queued until they are removed."""
        entries: list[tuple[float, int, str]] = []
        while self._heap and len(entries) < num_tasks:
            entry = heapq.heappop(self._heap)
            if self._numbers.get(entry[2]) == entry[1]:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [task_id for _, _, task_id in entries]

    def observe(self, layout: ChunkLayout, num_tokens: int, seconds: float) -> None:
        """Learn from a computed chunk how long a token and such a chunk take."""
        self.seconds_per_token += SMOOTHING * (seconds / num_tokens - self.seconds_per_token)
        before = self._layout_seconds.get(layout, seconds)
        self._layout_seconds[layout] = before + SMOOTHING * (seconds - before)

    def set_seconds(self, layout: ChunkLayout, seconds: float) -> None:
        """How long a chunk takes, measured before the first one."""
        self._layout_seconds[layout] = seconds

    def seconds(self, layout: ChunkLayout) -> float:
        """How long such a chunk is expected to take."""
        measured = self._layout_seconds.get(layout)
        guess = self.seconds_per_token * (layout.num_tokens + OVERHEAD_TOKENS)
        return guess if measured is None else measured
