"""Chat over gRPC: turns of one conversation, through a generated stub."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import grpc
import pytest

from jpd.errors import DeadlineError, OverloadedError, WorkerLostError
from jpd.frontend.grpc_server import GrpcServer
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.prompts import ServedModel
from jpd.frontend.service import TextService
from jpd.frontend.tool_formats import FORMATS
from jpd.request import Request
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import FakeRouter, make_model, make_tokenizer, say

INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
CANCELLED = grpc.StatusCode.CANCELLED.value[0]
Calls = jpd_pb2_grpc.JpdStub
Response = jpd_pb2.ChatResponse


@pytest.fixture
async def stub(doors: Doors) -> AsyncIterator[Calls]:
    async with grpc.aio.insecure_channel(doors.grpc_address) as channel:
        yield jpd_pb2_grpc.JpdStub(channel)


def turn(text: str = "hi", role: str = "user", **fields: Any) -> jpd_pb2.ChatRequest:
    message = jpd_pb2.ChatMessage(role=role, content=text)
    chat = jpd_pb2.ChatMessages(messages=[message], **fields.pop("chat", {}))
    return jpd_pb2.ChatRequest(turn=jpd_pb2.GenerateRequest(chat=chat, **fields))


CANCEL = jpd_pb2.ChatRequest(cancel=True)


async def end_of(call: Any, number: int) -> list[Response]:
    """Responses up to the end of a turn, all of which are its own."""
    responses = []
    while True:
        response = await asyncio.wait_for(call.read(), 5.0)
        assert response is not grpc.aio.EOF, "the chat ended"
        assert response.turn == number
        responses.append(response)
        if response.HasField("error") or response.delta.finish_reason:
            return responses


def text_of(responses: Sequence[Response]) -> str:
    return "".join(response.delta.text for response in responses)


def prompts_of(doors: Doors) -> list[str]:
    return [
        bytes(i for i in request.prompt_token_ids if i < 256).decode()
        for request in doors.router.requests
    ]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_turns_are_one_conversation_in_one_session(stub: Calls, doors: Doors) -> None:
    doors.router.script = say("yes")
    call = stub.Chat()
    await call.write(turn("one", session_id="s", include_details=True))
    first = await end_of(call, 0)
    await call.write(turn("two"))
    second = await end_of(call, 1)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF and await call.code() == grpc.StatusCode.OK
    assert text_of(first) == text_of(second) == "yes"
    assert first[-1].delta.timeline.decode_worker == "decode-0"
    assert second[-1].delta.usage.num_output_tokens == 4
    assert not any(response.delta.HasField("usage") for response in first[:-1])
    assert prompts_of(doors) == [
        "<user>one\n<assistant>",
        "<user>one\n<assistant>yes\n<user>two\n<assistant>",
    ]
    assert {request.session_id for request in doors.router.requests} == {"s"}
    trailers = await call.trailing_metadata()
    timelines = [json.loads(value) for key, value in trailers if key == "jpd-timeline"]
    assert [timeline["index"] for timeline in timelines] == [0, 1]
    assert any(key == "jpd-request-id" for key, _ in trailers)


async def test_turns_sent_ahead_are_answered_in_order(stub: Calls, doors: Doors) -> None:
    doors.router.script = say("yes")
    call = stub.Chat()
    for text in ("a", "b", "c"):
        await call.write(turn(text))
    await call.done_writing()
    for number in range(3):
        await end_of(call, number)
    assert await call.read() is grpc.aio.EOF
    assert [prompt.count("<user>") for prompt in prompts_of(doors)] == [1, 2, 3]
    assert len({request.session_id for request in doors.router.requests}) == 1


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (turn(sampling=jpd_pb2.SamplingParams(temperature=-1)), "temperature"),
        (turn(role="nobody"), "messages[0].role"),
        (turn("x" * 600), "prompt"),
        (turn(n=2), "n"),
        (turn(echo=True), "echo"),
        (turn(session_id="another"), "session_id"),
        (turn(chat={"add_generation_prompt": False}), "add_generation_prompt"),
        (jpd_pb2.ChatRequest(turn=jpd_pb2.GenerateRequest(text="a")), "prompt"),
        (jpd_pb2.ChatRequest(turn=jpd_pb2.GenerateRequest(chat={})), "messages"),
        (jpd_pb2.ChatRequest(), "turn"),
    ],
)
async def test_a_bad_turn_is_an_error_and_the_chat_goes_on(
    stub: Calls, doors: Doors, bad: jpd_pb2.ChatRequest, field: str
) -> None:
    doors.router.script = say("yes")
    call = stub.Chat()
    await call.write(turn("one"))
    await end_of(call, 0)
    await call.write(bad)
    [refusal] = await end_of(call, 1)
    assert (refusal.error.code, refusal.error.field) == (INVALID, field)
    assert refusal.error.message.startswith(f"{field} = ")
    await call.write(turn("two"))
    assert text_of(await end_of(call, 2)) == "yes"
    assert prompts_of(doors)[-1] == "<user>one\n<assistant>yes\n<user>two\n<assistant>"
    call.cancel()


@pytest.mark.parametrize(
    ("error", "code", "wait"),
    [
        (OverloadedError("no room", 7.2), grpc.StatusCode.RESOURCE_EXHAUSTED, 7),
        (DeadlineError("too late"), grpc.StatusCode.DEADLINE_EXCEEDED, 0),
        (WorkerLostError("decode-0", "gone"), grpc.StatusCode.UNAVAILABLE, 0),
        (ValueError("secret"), grpc.StatusCode.INTERNAL, 0),
    ],
)
async def test_a_turn_that_fails_half_way_leaves_nothing_behind(
    stub: Calls, doors: Doors, error: Exception, code: grpc.StatusCode, wait: int
) -> None:
    doors.router.script = say("abcd")
    doors.router.error, doors.router.error_after = error, 2
    call = stub.Chat()
    await call.write(turn("one"))
    *deltas, end = await end_of(call, 0)
    assert text_of(deltas) == "ab"
    assert (end.error.code, end.error.retry_after_seconds) == (code.value[0], wait)
    assert "secret" not in end.error.message
    doors.router.error = None
    await call.write(turn("two"))
    assert text_of(await end_of(call, 1)) == "abcd"
    assert prompts_of(doors)[-1] == "<user>two\n<assistant>"
    call.cancel()


@pytest.mark.field_report("E21")
async def test_e21_a_cancelled_turn_is_gone_and_the_next_is_what_was_sent(
    stub: Calls, doors: Doors
) -> None:
    doors.router = FakeRouter(say("yes"))
    call = stub.Chat()
    await call.write(CANCEL)  # nothing runs: nothing happens
    await call.write(turn("one"))
    await end_of(call, 0)
    doors.router.script, doors.router.delay_seconds = lambda request: [97] * 400, 0.005
    await call.write(turn("dropped"))
    assert (await call.read()).delta.text == "a"
    await call.write(CANCEL)
    *_, end = await end_of(call, 1)
    assert end.error.code == CANCELLED and doors.router.num_running == 0
    doors.router.script = say("no")
    await call.write(turn("two"))
    assert text_of(await end_of(call, 2)) == "no"
    assert prompts_of(doors)[-1] == "<user>one\n<assistant>yes\n<user>two\n<assistant>"
    await call.write(turn("at once"))
    await call.write(CANCEL)
    assert (await end_of(call, 3))[-1].error.code == CANCELLED
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


@pytest.mark.field_report("E20")
@pytest.mark.parametrize("by", ["cancel", "deadline"])
async def test_e20_the_end_of_the_call_frees_the_turn(stub: Calls, doors: Doors, by: str) -> None:
    doors.router = FakeRouter(lambda request: [97] * 500, delay_seconds=0.005)
    call = stub.Chat(timeout=0.3 if by == "deadline" else 30)
    await call.write(turn())
    await call.read()
    if by == "cancel":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: doors.router.num_running == 0)
    assert doors.router.num_cancelled == 1


async def test_half_closing_lets_the_running_turn_end(stub: Calls, doors: Doors) -> None:
    doors.router = FakeRouter(say("slowly"), delay_seconds=0.01)
    call = stub.Chat()
    await call.write(turn())
    await call.done_writing()
    assert text_of(await end_of(call, 0)) == "slowly"
    assert await call.read() is grpc.aio.EOF and await call.code() == grpc.StatusCode.OK


async def test_bytes_that_are_no_message_are_a_bad_turn(doors: Doors) -> None:
    async with grpc.aio.insecure_channel(doors.grpc_address) as channel:
        call = channel.stream_stream("/jpd.v1.Jpd/Chat")()  # raw bytes in and out
        await call.write(b"\x0a\x03\xff\xff\xff")
        response = Response.FromString(await call.read())
        assert (response.error.code, response.error.field) == (INVALID, "request")
        await call.write(turn("a").SerializeToString())
        assert Response.FromString(await call.read()).delta.text
        call.cancel()


async def test_calls_of_functions_and_their_answers(open_doors: Opened) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
        "<tool_call>{{ c.function.arguments.city }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    )
    model = make_model(make_tokenizer(template), tool_format=FORMATS["hermes"])
    doors = open_doors(model)
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
    doors.router.script = say(called)
    tools = {"tools": [jpd_pb2.Tool(name="weather")]}
    async with grpc.aio.insecure_channel(doors.grpc_address) as channel:
        call = jpd_pb2_grpc.JpdStub(channel).Chat()
        await call.write(turn("hi", chat=tools))
        responses = await end_of(call, 0)
        assert responses[-1].delta.finish_reason == jpd_pb2.FINISH_REASON_TOOL_CALLS
        [made] = [made for response in responses for made in response.delta.tool_calls]
        doors.router.script = say("Sunny.")
        result = jpd_pb2.ChatMessage(role="tool", content="25 C", tool_call_id=made.id)
        chat = jpd_pb2.ChatMessages(messages=[result], **tools)
        request = jpd_pb2.GenerateRequest(chat=chat)
        await call.write(jpd_pb2.ChatRequest(turn=request))
        assert text_of(await end_of(call, 1)) == "Sunny."
        call.cancel()
    assert prompts_of(doors)[-1] == f"<user>hi<assistant><tool_call>Rom<tool>25 C{made.id}weather"


class LocalDoor:
    """A gRPC door on this event loop, so that a test can stop it."""

    def __init__(self, router: FakeRouter, model: ServedModel) -> None:
        self.service = TextService(router, model)
        facts = ServerFacts(lambda: HealthReport(True, "ok"), lambda: b"")
        self.server = GrpcServer(self.service, facts)


async def test_a_server_that_stops_ends_idle_chats_at_once_and_others_after_their_turn() -> None:
    router = FakeRouter(say("slowly"), delay_seconds=0.02)
    door = LocalDoor(router, make_model(make_tokenizer()))
    port = await door.server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        idle, busy = stub.Chat(), stub.Chat()
        await idle.write(CANCEL)
        await busy.write(turn())
        await busy.read()
        start = asyncio.get_running_loop().time()
        stopping = asyncio.create_task(door.server.stop(20.0))
        assert await idle.code() == grpc.StatusCode.UNAVAILABLE
        assert text_of(await end_of(busy, 0)) == "lowly"
        assert await busy.code() == grpc.StatusCode.UNAVAILABLE
        await stopping
        assert asyncio.get_running_loop().time() - start < 5.0
    door.service.close()


def test_a_blocking_client_can_chat(doors: Doors) -> None:
    """The twin of the asynchronous stub, with its iterator of requests."""

    def turns() -> Generator[jpd_pb2.ChatRequest, None, None]:
        yield turn("a")
        yield turn("b")

    with grpc.insecure_channel(doors.grpc_address) as channel:
        responses = list(jpd_pb2_grpc.JpdStub(channel).Chat(turns()))
    ends = [response.turn for response in responses if response.delta.finish_reason]
    assert ends == [0, 1]
    last: Request = doors.router.requests[-1]
    assert last.session_id == doors.router.requests[0].session_id is not None


@pytest.mark.slow
async def test_who_takes_no_answers_gets_no_further_ones(stub: Calls, doors: Doors) -> None:
    """Each turn fails behind half a megabyte, so that the conversation does not grow."""
    error = WorkerLostError("decode-0", "gone")
    tokens = [97] * 200_000
    doors.router = FakeRouter(lambda request: tokens, tokens_per_event=100_000, error=error)
    doors.router.error_after = 1
    num_turns, call = 60, stub.Chat()
    for _ in range(num_turns):
        await asyncio.wait_for(call.write(turn()), 5.0)
    await call.done_writing()
    seen = -1
    while seen < len(doors.router.requests):
        seen = len(doors.router.requests)
        await asyncio.sleep(0.5)
    assert seen < num_turns, "all answers are kept for a client that takes none"
    for number in range(num_turns):
        assert (await end_of(call, number))[-1].error.code == UNAVAILABLE
    assert await call.read() is grpc.aio.EOF and len(doors.router.requests) == num_turns
