"""The client's end of a request: its tokens as they come, and the ways to stop it.

A request lives in a task of its own, so a slow reader holds no row and no page. Knows no workers;
made by `jpd.router.router`, read by the frontends.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from jpd.errors import RequestCancelledError
from jpd.request import Timeline, TokenOutput


class Mailbox:
    """What the request's task hands to the reader. One writer, one reader, one event loop."""

    def __init__(self) -> None:
        self._outputs: deque[TokenOutput] = deque()
        self._error: Exception | None = None
        self._is_ended = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def end(self, error: Exception | None) -> None:
        """Nothing follows; the reader gets `error` after what was put before."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._wake()

    async def get(self) -> TokenOutput | None:
        """The next output; None at the end, or the error once."""
        while not self._outputs:
            if self._is_ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._outputs.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Delivery:
    """A started request: its task, where its outputs come out, and how to end it early."""

    def __init__(
        self,
        task: asyncio.Task[None],
        mailbox: Mailbox,
        timeline: Timeline,
        stop: Callable[[], None],
    ) -> None:
        self.task, self.mailbox, self.timeline, self.stop = task, mailbox, timeline, stop


class TokenStream(AsyncGenerator[TokenOutput, None]):
    """Outputs of one request. The first read starts it; closing or dropping it cancels it."""

    def __init__(self, start: Callable[[], Delivery]) -> None:
        self._start = start
        self._delivery: Delivery | None = None
        self._is_closed = False

    async def asend(self, value: None = None) -> TokenOutput:
        if self._is_closed:
            raise StopAsyncIteration
        if self._delivery is None:
            self._delivery = self._start()
        try:
            output = await self._delivery.mailbox.get()
        except BaseException:
            self._cancel()
            raise
        if output is None:
            self._is_closed = True
            raise StopAsyncIteration
        return output

    async def __anext__(self) -> TokenOutput:
        return await self.asend()

    async def athrow(  # type: ignore[override]
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> TokenOutput:
        await self.aclose()
        raise value or kind

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the router holds nothing for it."""
        self._cancel()
        if self._delivery is not None and not self._delivery.task.done():
            await asyncio.wait((self._delivery.task,))

    async def finish(self) -> Timeline:
        """The client has what it wants (a stop string): end now, as a success, with a timeline."""
        if self._delivery is None:
            raise RequestCancelledError("the request was never started")
        self._delivery.stop()
        await self.aclose()
        return self._delivery.timeline

    def _cancel(self) -> None:
        self._is_closed = True
        if self._delivery is not None:
            self._delivery.task.cancel()

    def __del__(self) -> None:
        if self._delivery is None or self._delivery.task.done():
            return
        loop = self._delivery.task.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._delivery.task.cancel)
