"""The gRPC door through a generated stub."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jpd.errors import DeadlineError, OverloadedError, WorkerLostError
from jpd.frontend.operations import HealthReport
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import BOS, EOS, VOCAB_SIZE, FakeRouter, make_model, piece

Sampling = jpd_pb2.SamplingParams
Request = jpd_pb2.GenerateRequest
StatusCode = grpc.StatusCode


@pytest.fixture
def channel(doors: Doors):  # type: ignore[no-untyped-def]
    with grpc.insecure_channel(doors.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> jpd_pb2_grpc.JpdStub:
    return jpd_pb2_grpc.JpdStub(channel)


def ids(*values: int) -> jpd_pb2.TokenIds:
    return jpd_pb2.TokenIds(ids=values)


def chat(*contents: str) -> jpd_pb2.ChatMessages:
    messages = [jpd_pb2.ChatMessage(role="user", content=content) for content in contents]
    return jpd_pb2.ChatMessages(messages=messages)


def status_of(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def test_text_in_text_and_tokens_out(stub: jpd_pb2_grpc.JpdStub, doors: Doors) -> None:
    messages = list(stub.Generate(Request(text="hé")))
    assert "".join(message.text for message in messages) == "hé"
    token_ids = [token_id for message in messages for token_id in message.token_ids]
    assert token_ids == [*"hé".encode(), EOS]
    reasons = [message.finish_reason for message in messages]
    assert reasons == [jpd_pb2.FINISH_REASON_UNSPECIFIED] * 3 + [jpd_pb2.FINISH_REASON_STOP]
    usage = messages[-1].usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens) == (4, 4, 2)
    assert not any(message.HasField("usage") for message in messages[:-1])


def test_token_ids_and_chat_in(stub: jpd_pb2_grpc.JpdStub, doors: Doors) -> None:
    list(stub.Generate(Request(token_ids=ids(104, 105))))
    list(stub.Generate(Request(chat=chat("hi"), sampling=Sampling(max_tokens=2))))
    prompts = [list(request.prompt_token_ids) for request in doors.router.requests]
    assert prompts == [[104, 105], [BOS, *b"<user>hi\n<assistant>"]]


def test_all_fields_reach_the_request(stub: jpd_pb2_grpc.JpdStub, doors: Doors) -> None:
    sampling = Sampling(
        max_tokens=9,
        min_tokens=1,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=0,
        stop=["zz"],
        stop_token_ids=[7],
        ignore_eos=True,
    )
    settings = {"session_id": "s", "priority": -2, "slo": "batch", "model": "tiny"}
    list(stub.Generate(Request(text="a", sampling=sampling, **settings), timeout=30))  # type: ignore[arg-type]
    [request] = doors.router.requests
    found = request.sampling
    assert (found.max_tokens, found.min_tokens, found.top_k, found.seed) == (9, 1, 3, 0)
    assert (found.temperature, found.top_p, found.min_p) == (0.0, 0.5, 0.25)
    assert (found.stop, found.stop_token_ids, found.ignore_eos) == (("zz",), (7,), True)
    assert (request.session_id, request.priority, request.slo) == ("s", -2, "batch")
    assert 25 < request.deadline - request.arrival_time < 31


def test_absent_fields_take_the_defaults(stub: jpd_pb2_grpc.JpdStub, doors: Doors) -> None:
    list(stub.Generate(Request(text="a")))
    [request] = doors.router.requests
    assert request.sampling.max_tokens is None and request.sampling.seed is None
    assert request.sampling.temperature == 1.0
    assert request.session_id is None and request.slo is None
    assert request.deadline - request.arrival_time > 500


def test_e02_stop_strings_and_n(stub: jpd_pb2_grpc.JpdStub, doors: Doors) -> None:
    tokens = [ord("x"), piece("Obs"), piece("erva"), piece("tion"), ord(":"), ord("y"), EOS]
    doors.router.script = lambda request: tokens
    sampling = Sampling(stop=["Observation:"], seed=3)
    messages = list(stub.Generate(Request(text="a", n=3, sampling=sampling)))
    for index in range(3):
        mine = [message for message in messages if message.index == index]
        assert "".join(message.text for message in mine) == "x"
        assert mine[-1].finish_reason == jpd_pb2.FINISH_REASON_STOP
    assert messages[-1].usage.num_output_tokens == 3 * 5
    assert messages[-1].usage.num_prompt_tokens == 2


def test_trailers_carry_the_timeline(stub: jpd_pb2_grpc.JpdStub) -> None:
    call = stub.Generate(Request(text="a", n=2))
    list(call)
    trailers = call.trailing_metadata()
    timelines = [json.loads(value) for key, value in trailers if key == "jpd-timeline"]
    assert sorted(item["index"] for item in timelines) == [0, 1]
    assert timelines[0]["prefill_seconds"] == 0.02 and timelines[0]["path"] == ["disaggregated"]
    assert any(key == "jpd-request-id" for key, _ in trailers)


def test_trailers_of_many_choices_stay_small(stub: jpd_pb2_grpc.JpdStub) -> None:
    call = stub.Generate(Request(text="a", n=64))
    assert sum(1 for message in call if message.finish_reason) == 64
    assert len(call.trailing_metadata()) == 9


def test_details_in_the_last_message_when_asked_for(stub: jpd_pb2_grpc.JpdStub) -> None:
    *_, last = stub.Generate(Request(text="a", include_details=True))
    assert last.timeline.decode_worker == "decode-0" and last.timeline.num_cached_tokens == 1
    *_, last = stub.Generate(Request(text="a"))
    assert not last.HasField("timeline")


@pytest.mark.field_report("E03", "E10", "E13", "E14", "E15")
@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (Request(), "prompt"),
        (Request(text=""), "prompt"),
        (Request(token_ids=ids()), "prompt"),
        (Request(token_ids=ids(-1)), "prompt[0]"),
        (Request(token_ids=ids(1, VOCAB_SIZE)), "prompt[1]"),
        (Request(token_ids=ids(1 << 40)), "prompt[0]"),
        (Request(text="x" * 600), "prompt"),
        (Request(chat=chat()), "messages"),
        (Request(text="a", n=1000), "n"),
        (Request(text="a", session_id="x" * 300), "session_id"),
        (Request(text="a", sampling=Sampling(max_tokens=0)), "max_tokens"),
        (Request(text="a", sampling=Sampling(max_tokens=-1)), "max_tokens"),
        (Request(text="a", sampling=Sampling(max_tokens=600)), "max_tokens"),
        (Request(text="a", sampling=Sampling(temperature=float("nan"))), "temperature"),
        (Request(text="a", sampling=Sampling(temperature=float("inf"))), "temperature"),
        (Request(text="a", sampling=Sampling(temperature=-1)), "temperature"),
        (Request(text="a", sampling=Sampling(top_p=float("nan"))), "top_p"),
        (Request(text="a", sampling=Sampling(min_p=1e308)), "min_p"),
        (Request(text="a", sampling=Sampling(top_k=-5)), "top_k"),
        (Request(text="a", sampling=Sampling(stop=[""])), "stop"),
        (Request(text="a", sampling=Sampling(stop_token_ids=[VOCAB_SIZE])), "stop_token_ids[0]"),
    ],
)
def test_e13_and_e14_invalid_arguments(
    stub: jpd_pb2_grpc.JpdStub, doors: Doors, request_message: Request, field: str
) -> None:
    error = status_of(lambda: list(stub.Generate(request_message)))
    assert error.code() == StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field} = ")
    assert ("jpd-error-field", field) in [tuple(item) for item in error.trailing_metadata()]
    assert not doors.router.requests
    assert list(stub.Generate(Request(text="a")))


def test_unknown_model(stub: jpd_pb2_grpc.JpdStub) -> None:
    error = status_of(lambda: list(stub.Generate(Request(text="a", model="other"))))
    assert error.code() == StatusCode.NOT_FOUND


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x02\xff\xfe"])
def test_e17_bytes_that_are_no_message(channel: grpc.Channel, data: bytes) -> None:
    call = channel.unary_stream("/jpd.v1.Jpd/Generate")  # raw bytes in and out
    assert status_of(lambda: list(call(data))).code() == StatusCode.INVALID_ARGUMENT
    unary = channel.unary_unary("/jpd.v1.Jpd/Tokenize")
    assert status_of(lambda: unary(data)).code() == StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OverloadedError("no room", 7.2), StatusCode.RESOURCE_EXHAUSTED),
        (DeadlineError("too late"), StatusCode.DEADLINE_EXCEEDED),
        (WorkerLostError("decode-0", "gone"), StatusCode.UNAVAILABLE),
        (ValueError("secret"), StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("error_after", [0, 2])
def test_e18_errors_end_the_rpc_with_their_status(
    stub: jpd_pb2_grpc.JpdStub, doors: Doors, error: Exception, code: StatusCode, error_after: int
) -> None:
    doors.router.error, doors.router.error_after = error, error_after
    received = []

    def call() -> None:
        for message in stub.Generate(Request(text="abcd")):
            received.append(message.text)

    found = status_of(call)
    assert found.code() == code
    assert len(received) == error_after
    assert "secret" not in found.details()
    trailers = dict(found.trailing_metadata())
    assert "jpd-request-id" in trailers
    assert trailers.get("retry-after") == ("7" if code == StatusCode.RESOURCE_EXHAUSTED else None)


def test_e20_cancelling_the_rpc_cancels_the_request(
    stub: jpd_pb2_grpc.JpdStub, doors: Doors
) -> None:
    doors.router = FakeRouter(lambda request: [97] * 500, delay_seconds=0.005)
    call = stub.Generate(Request(text="a", n=2))
    next(call)
    assert wait_until(lambda: doors.router.num_running == 2)
    call.cancel()
    assert wait_until(lambda: doors.router.num_running == 0)
    assert doors.router.num_cancelled == 2


@pytest.mark.parametrize("delay_seconds", [0.005, 60.0])
def test_e20_the_deadline_cancels_the_request(
    stub: jpd_pb2_grpc.JpdStub, doors: Doors, delay_seconds: float
) -> None:
    doors.router = FakeRouter(lambda request: [97] * 500, delay_seconds=delay_seconds)
    start = time.monotonic()
    error = status_of(lambda: list(stub.Generate(Request(text="a"), timeout=0.15)))
    assert error.code() == StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - start < 3.0
    assert wait_until(lambda: doors.router.num_running == 0)


def test_e22_large_messages(stub: jpd_pb2_grpc.JpdStub, open_doors: Opened) -> None:
    doors = open_doors(make_model(None, max_model_len=200_000))
    with grpc.insecure_channel(doors.grpc_address) as channel:
        big_stub = jpd_pb2_grpc.JpdStub(channel)
        prompt = ids(*[100] * 100_000)
        request = Request(token_ids=prompt, sampling=Sampling(max_tokens=1))
        [message] = big_stub.Generate(request)
        assert message.usage.num_prompt_tokens == 100_000
        request = Request(token_ids=ids(*[100] * 2_000_000))
        error = status_of(lambda: list(big_stub.Generate(request)))
        assert error.code() == StatusCode.INVALID_ARGUMENT
        assert "2000000 tokens" in error.details()
        error = status_of(lambda: list(big_stub.Generate(Request(text="x" * (17 << 20)))))
        assert error.code() == StatusCode.RESOURCE_EXHAUSTED


def test_tokenize_detokenize_and_model_info(stub: jpd_pb2_grpc.JpdStub) -> None:
    tokenize, detokenize = jpd_pb2.TokenizeRequest, jpd_pb2.DetokenizeRequest
    assert list(stub.Tokenize(tokenize(text="h")).token_ids) == [BOS, 104]
    plain = tokenize(text="h", add_special_tokens=False)
    assert list(stub.Tokenize(plain).token_ids) == [104]
    chat_ids = list(stub.Tokenize(tokenize(chat=chat("hi"))).token_ids)
    assert chat_ids == [BOS, *b"<user>hi\n<assistant>"]
    assert stub.Detokenize(detokenize(token_ids=[BOS, 104])).text == "<bos>h"
    error = status_of(lambda: stub.Detokenize(detokenize(token_ids=[1 << 40])))
    assert error.code() == StatusCode.INVALID_ARGUMENT
    info = stub.GetModelInfo(jpd_pb2.GetModelInfoRequest())
    assert (info.name, info.max_model_len, info.vocab_size) == ("tiny", 512, VOCAB_SIZE)
    assert info.has_tokenizer and info.has_chat_template


def test_health_follows_the_router(channel: grpc.Channel, doors: Doors) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    check, response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse

    def status(service: str = "") -> int:
        status: int = stub.Check(check(service=service)).status
        return status

    assert wait_until(lambda: status() == response.SERVING)
    assert status("jpd.v1.Jpd") == response.SERVING
    assert status_of(lambda: stub.Check(check(service="x"))).code() == StatusCode.NOT_FOUND
    doors.health = HealthReport(False, "unhealthy", ("decode-0 is lost",))
    assert wait_until(lambda: status("jpd.v1.Jpd") == response.NOT_SERVING)
    assert status() == response.NOT_SERVING
    for name in ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"):
        assert status(name) == response.SERVING  # the door's own


def test_reflection_lists_and_describes_the_service(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest
    [listed] = stub.ServerReflectionInfo(iter([ask(list_services="")]))
    names = {service.name for service in listed.list_services_response.service}
    assert {"jpd.v1.Jpd", "grpc.health.v1.Health"} <= names
    [answer] = stub.ServerReflectionInfo(iter([ask(file_containing_symbol="jpd.v1.Jpd")]))
    file = descriptor_pb2.FileDescriptorProto()
    file.ParseFromString(answer.file_descriptor_response.file_descriptor_proto[0])
    methods = {method.name for service in file.service for method in service.method}
    assert methods == {"Generate", "Chat", "Tokenize", "Detokenize", "GetModelInfo"}


@pytest.mark.field_report("E12", "E25")
def test_many_streams_with_one_id_of_the_clients_do_not_mix(stub: jpd_pb2_grpc.JpdStub) -> None:
    metadata = (("x-request-id", "x" * 4000),)
    calls = {
        index: stub.Generate(Request(text=f"prompt {index}"), metadata=metadata)
        for index in range(32)
    }
    for index, call in calls.items():
        assert "".join(message.text for message in call) == f"prompt {index}"
    ids = {dict(call.trailing_metadata())["jpd-request-id"] for call in calls.values()}
    assert len(ids) == 32 and all(len(name) == 32 for name in ids)


async def collect(doors: Doors, text: str) -> AsyncGenerator[str, None]:
    async with grpc.aio.insecure_channel(doors.grpc_address) as channel:
        async for message in jpd_pb2_grpc.JpdStub(channel).Generate(Request(text=text)):
            yield message.text


async def test_asyncio_clients(doors: Doors) -> None:
    async def whole(text: str) -> str:
        return "".join([part async for part in collect(doors, text)])

    assert await asyncio.gather(*map(whole, "abc")) == ["a", "b", "c"]
