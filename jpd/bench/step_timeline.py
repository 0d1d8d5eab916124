"""When the device had nothing to do while a decode batch ran: the host's share of a step.

Each dispatch of a step is noted when the call returns (the step is in the queue then), and a second
thread waits for the results of one step after the other and notes when they are there:

    dispatched   1   2     3     4          queue empty from ready n to dispatched n + 1,
    ready           1     2     3    4      if that is later; here never

The share of such gaps in the wall time is what the host costs. The engine dispatches a step before
it reads the one before, so there should be none. Called by the engine's benchmark.
"""

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax

from jpd.engine.decode_state import DecodeState
from jpd.engine.functions import ModelFunctions
from jpd.engine.results import StepResults


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one clock: when each step was in the queue, and when its results were there."""

    dispatched: tuple[float, ...]
    ready: tuple[float, ...]

    @property
    def empty_seconds(self) -> float:
        later = zip(self.ready, self.dispatched[1:], strict=False)
        return sum(max(0.0, dispatched - ready) for ready, dispatched in later)

    @property
    def wall_seconds(self) -> float:
        return self.ready[-1] - self.dispatched[0]

    @property
    def empty_share(self) -> float:
        return self.empty_seconds / self.wall_seconds


class TimedFunctions(ModelFunctions):
    """Model functions that note the times of their decode steps while they are watched."""

    _steps: "queue.SimpleQueue[tuple[float, jax.Array] | None] | None" = None

    def decode(
        self, leaves: Any, layers: Any, state: DecodeState, shape: Any, *rest: Any
    ) -> tuple[Any, DecodeState, StepResults]:
        layers, state, results = super().decode(leaves, layers, state, shape, *rest)
        if self._steps is not None:
            self._steps.put((time.perf_counter(), results.outcomes))
        return layers, state, results

    def watch(self) -> "Watch":
        """A context manager whose `times` are those of the steps dispatched inside it."""
        return Watch(self)


class Watch:
    """See TimedFunctions.watch."""

    def __init__(self, functions: TimedFunctions) -> None:
        self._functions = functions
        self._steps: queue.SimpleQueue[tuple[float, jax.Array] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_steps, name="step-times")
        self._found: list[tuple[float, float]] = []

    def __enter__(self) -> "Watch":
        self._functions._steps = self._steps
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._functions._steps = None
        self._steps.put(None)
        self._thread.join()

    def _wait_for_steps(self) -> None:
        while (step := self._steps.get()) is not None:
            dispatched, results = step
            results.block_until_ready()
            self._found.append((dispatched, time.perf_counter()))

    @property
    def times(self) -> StepTimes:
        """After the end."""
        dispatched, ready = zip(*self._found, strict=True)
        return StepTimes(dispatched, ready)
