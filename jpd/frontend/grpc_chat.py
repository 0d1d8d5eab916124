"""One Chat call: turns of a conversation come in, answers go out, until the client is done.

    the call ── reads turns and cancels, one turn at a time ──► turn ── deltas ──► writer ──► client

A turn is a task of its own, so that a cancel can reach it; what it has to say goes through one
queue to one writer, because a write must not be cancelled half-way. Made by `grpc_servicer`.
"""

import asyncio
import dataclasses
from collections import deque
from contextlib import aclosing

import grpc

from jpd.errors import RequestCancelledError, RequestError, WorkerError
from jpd.frontend.conversation import Conversation
from jpd.frontend.grpc_calls import (
    MAX_TIMELINE_TRAILERS,
    Context,
    Trailers,
    abort,
    begin_call,
    logged_failure,
    parsed,
    status_of,
)
from jpd.frontend.grpc_messages import (
    answer_messages,
    begins_answer,
    read_chat,
    read_job,
    timeline_trailer,
)
from jpd.frontend.job import PreparedJob
from jpd.frontend.messages import ChatMessage
from jpd.frontend.service import TextService
from jpd.frontend.tool_calls import ToolCallDelta, join_calls
from jpd.rpc import jpd_pb2


class ChatCall:
    """Runs once, on the router's event loop. Once `stopping` is set it takes no further turn."""

    def __init__(self, service: TextService, context: Context, stopping: asyncio.Event) -> None:
        self._service, self._context, self._stopping = service, context, stopping
        self._request_id = begin_call(context, "Chat")
        self._conversation = Conversation()
        self._turn: asyncio.Task[None] | None = None
        self._num_turns = 0
        self._is_answering = False
        self._responses: asyncio.Queue[jpd_pb2.ChatResponse | None] = asyncio.Queue()
        self._timelines: deque[tuple[str, str]] = deque(maxlen=MAX_TIMELINE_TRAILERS)

    async def run(self) -> None:
        """Until the client has half-closed and has its last answer. Ends the RPC otherwise."""
        writer = asyncio.create_task(self._write())
        try:
            is_done = await self._take_turns()
            self._responses.put_nowait(None)
            await writer
            if not is_done:
                raise WorkerError("router", "the server is shutting down")
            self._context.set_trailing_metadata(tuple(self._trailers()))
        except Exception as error:
            await abort(self._context, error, self._request_id, self._trailers())
        finally:
            tasks = [writer] if self._turn is None else [writer, self._turn]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_turns(self) -> bool:
        """Whether the client has no more of them; else the server stops."""
        while not self._stopping.is_set():
            request = await self._read()
            if request is grpc.aio.EOF:
                break
            if request is not None and request.WhichOneof("action") == "cancel":
                if request.cancel:
                    await self._cancel_turn()
                continue
            await self._end_of_turn()
            await self._responses.join()  # who takes no answers gets no further ones
            self._is_answering = True
            self._turn = asyncio.create_task(self._run_turn(self._num_turns, request))
            self._num_turns += 1
        await self._end_of_turn()
        return not self._stopping.is_set()

    async def _read(self) -> jpd_pb2.ChatRequest | None:
        """The next message, also EOF; None: it cannot be parsed. One of no use when the server
        stops."""
        reading = asyncio.ensure_future(self._context.read())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else jpd_pb2.ChatRequest(cancel=False)
        finally:
            reading.cancel()
            stopping.cancel()

    async def _end_of_turn(self) -> None:
        if self._turn is not None:
            await asyncio.wait((self._turn,))

    async def _cancel_turn(self) -> None:
        if self._turn is None or not self._is_answering:
            return
        self._turn.cancel()
        await self._end_of_turn()
        if self._is_answering:
            self._fail(RequestCancelledError("the client cancelled this turn"))

    async def _run_turn(self, number: int, request: jpd_pb2.ChatRequest | None) -> None:
        """Answer one turn. Raises nothing but CancelledError; then nothing was said of its end."""
        try:
            turn = parsed(request)
            if turn.WhichOneof("action") is None:
                raise RequestError("turn", None, "give turn or cancel")
            await self._answer(number, turn.turn)
        except Exception as error:
            self._fail(error)

    async def _answer(self, number: int, turn: jpd_pb2.GenerateRequest) -> None:
        with self._service.counting_refusals():
            new = _new_messages(turn)
            prepared = await self._prepare(number, turn)
        session_id = prepared.job.session_id or self._conversation.session_id
        text, calls = list[str](), list[ToolCallDelta]()
        answers = answer_messages(self._service, prepared, turn.include_details)
        async with aclosing(answers) as pairs:
            async for delta, message in pairs:
                text.append(delta.text)
                calls.extend(delta.tool_calls)
                if delta.finish_reason is not None:
                    self._is_answering = False
                    self._conversation.add(session_id, new, "".join(text), join_calls(calls))
                if delta.timeline is not None:
                    trailer = timeline_trailer(number, delta.timeline)
                    self._timelines.append(("jpd-timeline", trailer))
                self._responses.put_nowait(jpd_pb2.ChatResponse(turn=number, delta=message))

    async def _prepare(self, number: int, turn: jpd_pb2.GenerateRequest) -> PreparedJob:
        """Raises RequestError."""
        session_id = self._conversation.session_of_turn(turn.session_id or None)
        earlier = self._conversation.messages
        job = await read_job(turn, self._service, self._context, earlier)
        request_id = f"{self._request_id}-{number}"
        job = dataclasses.replace(job, session_id=session_id, request_id=request_id)
        return await self._service.prepare(job)

    def _fail(self, error: Exception) -> None:
        """The end of the present turn as its client sees it."""
        self._is_answering = False
        failure = logged_failure(error, self._request_id)
        wait = failure.retry_after_seconds
        told = jpd_pb2.TurnError(
            code=status_of(failure).value[0],
            message=failure.message,
            field=failure.param or "",
            retry_after_seconds=0 if wait is None else max(1, round(wait)),
        )
        self._responses.put_nowait(jpd_pb2.ChatResponse(turn=self._num_turns - 1, error=told))

    async def _write(self) -> None:
        while (response := await self._responses.get()) is not None:
            await self._context.write(response)
            self._responses.task_done()

    def _trailers(self) -> Trailers:
        return [("jpd-request-id", self._request_id), *self._timelines]


def _new_messages(turn: jpd_pb2.GenerateRequest) -> tuple[ChatMessage, ...]:
    """What a turn adds to the conversation. Raises RequestError for what no turn can have."""
    if turn.WhichOneof("prompt") != "chat":
        raise RequestError("prompt", turn.WhichOneof("prompt"), "a turn of a chat needs chat")
    if turn.n > 1:
        raise RequestError("n", turn.n, "a turn of a chat has one answer")
    if not begins_answer(turn.chat):
        rule = "the answer to a turn is a message of its own"
        raise RequestError("add_generation_prompt", False, rule)
    return read_chat(turn.chat)
