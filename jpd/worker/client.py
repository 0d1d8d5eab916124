"""WorkerClient of a worker in this process: the bridge from asyncio to the worker's thread.

Calls go into the worker's inbox; answers and events come back in one hop to the event loop per turn
of the worker's loop. An awaiting task that is cancelled cancels its attempt on the worker, so that
nothing stays held for nobody. Called by the router, on its event loop.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TypeVar

from jpd.cache.prefix_log import PrefixChanges
from jpd.errors import WorkerLostError
from jpd.guidance.compiler import GrammarCompiler
from jpd.worker.guided import completes, guide_to_begin
from jpd.worker.inbox import Call
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    Role,
    WorkerStatus,
)
from jpd.worker.worker import Worker

T = TypeVar("T")
Answer = Callable[[T | Exception], None]
Action = Callable[[], object]


class InProcessClient:
    """Implements WorkerClient, for one event loop at a time. Made before the worker starts."""

    def __init__(self, worker: Worker, grammars: GrammarCompiler | None = None) -> None:
        """`grammars` None: the model has no text, nothing can be guided."""
        self._worker = worker
        self._grammars = grammars
        self._loop: asyncio.AbstractEventLoop | None = None  # of the latest caller
        self._outgoing: list[tuple[asyncio.AbstractEventLoop, Action]] = []  # worker's thread only
        self._room_callbacks: list[Callable[[], None]] = []
        worker.on_room(self._tell_room)
        worker.on_turn_end(self._flush)

    @property
    def name(self) -> str:
        return self._worker.name

    @property
    def role(self) -> Role:
        return self._worker.role

    async def reserve(self, attempt: Attempt) -> Reservation | None:
        asked = self._ask(lambda: self._worker.reserve(attempt))
        return await self._or_cancel(attempt.attempt_id, asked)

    async def prefill(self, attempt: Attempt, reservation: Reservation) -> PrefillResult:
        guide = await guide_to_begin(self._grammars, attempt)
        mask = None if guide is None else guide.mask

        def start(answer: Answer[PrefillResult]) -> None:
            self._worker.prefill(attempt, reservation, answer, mask)

        result = await self._or_cancel(attempt.attempt_id, self._ask_for_answer(start))
        if guide is None or result.finish_reason is not None:
            return result
        is_complete = await completes(guide, result.token_id)
        return replace(result, finish_reason="stop") if is_complete else result

    async def decode(self, attempt_id: str, first_token_id: int) -> AsyncIterator[DecodeEvent]:
        loop = self._running_loop()
        events: asyncio.Queue[DecodeEvent | Exception] = asyncio.Queue()

        def sink(event: DecodeEvent | Exception) -> None:
            self._outgoing.append((loop, partial(events.put_nowait, event)))

        call = Call(lambda: self._worker.decode(attempt_id, first_token_id, sink), sink)
        if not self._worker.submit(call):
            raise self._worker.lost_error()
        is_over = False
        try:
            while not is_over:
                event = await events.get()
                is_over = isinstance(event, Exception) or event.finish_reason is not None
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not is_over:
                self._cancel_soon(attempt_id)

    async def cancel(self, attempt_id: str) -> None:
        with contextlib.suppress(WorkerLostError):  # a lost worker holds nothing
            await self._ask(lambda: self._worker.cancel(attempt_id))

    async def status(self) -> WorkerStatus:
        return self._worker.status()

    async def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        return await self._ask(lambda: self._worker.prefix_changes(incarnation, sequence))

    async def drain(self) -> None:
        await self._ask_for_answer(self._worker.drain)

    async def set_role(self, role: Role) -> None:
        await self._ask(lambda: self._worker.set_role(role))

    def on_room(self, callback: Callable[[], None]) -> None:
        self._room_callbacks.append(callback)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        return self._loop

    def _ask(self, action: Callable[[], T]) -> asyncio.Future[T]:
        """The result of this action, done on the worker's thread."""

        def start(answer: Answer[T]) -> None:
            answer(action())

        return self._ask_for_answer(start)

    def _ask_for_answer(self, start: Callable[[Answer[T]], None]) -> asyncio.Future[T]:
        """What this action, done on the worker's thread, will answer then or in a later turn."""
        loop = self._running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def answer(result: T | Exception) -> None:
            self._outgoing.append((loop, partial(_resolve, future, result)))

        if not self._worker.submit(Call(lambda: start(answer), answer)):
            future.set_exception(self._worker.lost_error())
        return future

    async def _or_cancel(self, attempt_id: str, asked: asyncio.Future[T]) -> T:
        """Await an answer; whoever stops waiting for it wants the attempt gone."""
        try:
            return await asked
        except asyncio.CancelledError:
            self._cancel_soon(attempt_id)
            raise

    def _cancel_soon(self, attempt_id: str) -> None:
        self._worker.submit(Call(lambda: self._worker.cancel(attempt_id), lambda error: None))

    # On the worker's thread.

    def _tell_room(self) -> None:
        if self._loop is not None:  # else nobody has asked for room yet
            self._outgoing += [(self._loop, callback) for callback in self._room_callbacks]

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for loop, group in itertools.groupby(outgoing, key=itemgetter(0)):
            actions = [action for _, action in group]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_schedule, loop, actions)


def _resolve(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _schedule(loop: asyncio.AbstractEventLoop, actions: list[Action]) -> None:
    """Each action on its own, so that one that raises does not swallow the others."""
    for action in actions:
        loop.call_soon(action)
