"""How far a load or a conversion has come: bytes, speed and time left. Knows no terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at a running load."""

    phase: str  # "checking", "loading" or "writing"
    done_bytes: int
    total_bytes: int
    elapsed_seconds: float
    tensor: str  # what has just been finished

    @property
    def seconds_left(self) -> float:
        """By the mean speed so far; infinite before anything is done."""
        if self.done_bytes == 0:
            return float("inf")
        rate = self.elapsed_seconds / self.done_bytes
        return rate * (self.total_bytes - self.done_bytes)


ProgressCallback: TypeAlias = Callable[[Progress], None]


class ProgressMeter:
    """Counts bytes of one phase and tells the callback after each tensor."""

    def __init__(self, phase: str, total_bytes: int, callback: ProgressCallback | None) -> None:
        self._phase, self._total, self._callback = phase, total_bytes, callback
        self._start = time.monotonic()
        self._done = 0

    def add(self, num_bytes: int, tensor: str) -> None:
        self._done += num_bytes
        if self._callback is not None:
            elapsed = time.monotonic() - self._start
            self._callback(Progress(self._phase, self._done, self._total, elapsed, tensor))
