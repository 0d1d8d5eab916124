"""Every field of HTTP is there in gRPC and in Python, and means the same to the router."""

import dataclasses
import json
from typing import Any, get_type_hints

import grpc
import pytest

from jpd.frontend.job import GenerateJob
from jpd.frontend.options import ChatOptions, GenerateOptions, read_chat_options, read_options
from jpd.frontend.schemas import ChatBody, CompletionBody
from jpd.frontend.tool_formats import FORMATS
from jpd.request import Request
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import make_model, make_tokenizer

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
TEMPLATE = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}{{ tools | tojson }}"

SAMPLING: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "seed": 0,
    "stop": ["zz", "END"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "num_speculative_tokens": 2,
    "prompt_logprobs": 3,
}
OTHERS: dict[str, Any] = {
    "n": 2,
    "session_id": "s",
    "cache_salt": "salt",
    "priority": -2,
    "slo": "batch",
    "prefill_worker": "p",
    "decode_worker": "d",
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GUIDED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": jpd_pb2.Choices(texts=["yes", "no"])}),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
RPC_TOOL = jpd_pb2.Tool(name="f", parameters=json.dumps(SCHEMA))
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def module_chat_doors(open_doors: Opened) -> Doors:
    model = make_model(make_tokenizer(TEMPLATE), 2048, tool_format=FORMATS["hermes"])
    return open_doors(model)


def asked_of_router(doors: Doors) -> dict[str, Any]:
    """What the last request says, but for who asks and when."""
    request: Request = doors.router.requests[-1]
    fields = dataclasses.asdict(request)
    for name in ("request_id", "arrival_time", "deadline"):
        del fields[name]
    return fields


def over_http(doors: Doors, path: str, body: dict[str, Any]) -> dict[str, Any]:
    doors.http.post(f"/v1/{path}", json=body, headers=TRACE).raise_for_status()
    return asked_of_router(doors)


def over_grpc(doors: Doors, request: jpd_pb2.GenerateRequest) -> dict[str, Any]:
    with grpc.insecure_channel(doors.grpc_address) as channel:
        list(jpd_pb2_grpc.JpdStub(channel).Generate(request, metadata=tuple(TRACE.items())))
    return asked_of_router(doors)


def test_the_same_completion_is_asked_of_the_router(doors: Doors) -> None:
    biases = {104: 1.5, 9: -100.0}
    body = {"prompt": "a", "logprobs": 2, "logit_bias": biases} | SAMPLING | OTHERS
    http = over_http(doors, "completions", body)
    sampling = jpd_pb2.SamplingParams(logprobs=2, logit_bias=biases, **SAMPLING)
    assert over_grpc(doors, jpd_pb2.GenerateRequest(text="a", sampling=sampling, **OTHERS)) == http
    assert http["trace_context"] == TRACE and http["sampling"]["logit_bias"]
    options: dict[str, Any] = {"logprobs": 2, "logit_bias": biases} | SAMPLING | OTHERS
    job = read_options("a", options, {})  # type: ignore[arg-type]
    found = dataclasses.asdict(job)
    assert all(found[name] == value for name, value in OTHERS.items())
    # The last request is that of the last choice: its seed is one more, and it has no prompt's.
    first = dataclasses.replace(job.sampling, seed=1, prompt_logprobs=None)
    assert dataclasses.asdict(first) == http["sampling"]


@pytest.mark.parametrize(("http_fields", "grpc_fields"), GUIDED)
def test_the_same_grammar(
    doors: Doors, http_fields: dict[str, Any], grpc_fields: dict[str, Any]
) -> None:
    http = over_http(doors, "completions", {"prompt": "a", "max_tokens": 4} | http_fields)
    sampling = jpd_pb2.SamplingParams(max_tokens=4, **grpc_fields)
    grpc_ = over_grpc(doors, jpd_pb2.GenerateRequest(text="a", sampling=sampling))
    for asked in (http, grpc_):
        asked["sampling"]["grammar"].pop("field")  # of the API that was asked
    assert {**grpc_, "trace_context": TRACE} == http


@pytest.mark.parametrize(
    ("choice", "grpc_choice"),
    [("none", {"no_tool": True}), ("required", {"any_tool": True}), (NAMED, {"named_tool": "f"})],
)
def test_the_same_chat(module_chat_doors: Doors, choice: Any, grpc_choice: dict[str, Any]) -> None:
    doors = module_chat_doors
    messages = [{"role": "user", "content": "hi", "name": "Ann"}]
    chat_fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    http = over_http(doors, "chat/completions", {"messages": messages} | chat_fields)
    chat = jpd_pb2.ChatMessages(
        messages=[jpd_pb2.ChatMessage(role="user", content="hi", name="Ann")],
        tools=[RPC_TOOL],
        single_tool_call=True,
        **grpc_choice,
    )
    assert over_grpc(doors, jpd_pb2.GenerateRequest(chat=chat)) == http
    ask = read_chat_options(messages, chat_fields, make_model(None))  # type: ignore[arg-type]
    assert (ask.tools is None) == (choice == "none")


def test_echo_and_the_end_of_the_template(doors: Doors) -> None:
    with grpc.insecure_channel(doors.grpc_address) as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        parts = stub.Generate(jpd_pb2.GenerateRequest(text="hi", echo=True))
        assert "".join(part.text for part in parts) == "hihi"
        message = jpd_pb2.ChatMessage(role="assistant", content="so")
        chat = jpd_pb2.ChatMessages(messages=[message], add_generation_prompt=False)
        list(stub.Generate(jpd_pb2.GenerateRequest(chat=chat)))
        tokens = stub.Tokenize(jpd_pb2.TokenizeRequest(chat=chat)).token_ids
    assert doors.router.requests[-1].prompt_token_ids == tuple(tokens)
    assert bytes(tokens[1:]) == b"<assistant>so\n"


RENAMED = {  # of HTTP, by their names in gRPC; None: the transport does it, or always
    "stream": None,
    "stream_options": None,
    "return_token_ids": None,
    "return_tokens_as_token_ids": None,
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "messages": "messages",
    "prompt": "text",
    "tool_choice": "named_tool",
    "parallel_tool_calls": "single_tool_call",
    "response_format": "json_object",
    "structured_outputs": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
}


def test_no_field_is_missing_at_a_door() -> None:
    http = {*ChatBody.model_fields, *CompletionBody.model_fields}
    grpc_fields = {
        field.name
        for kind in (jpd_pb2.GenerateRequest, jpd_pb2.SamplingParams, jpd_pb2.ChatMessages)
        for field in kind.DESCRIPTOR.fields
    }
    missing = {name for name in http if RENAMED.get(name, name) not in {None, *grpc_fields}}
    assert not missing
    of_http_alone = {"model", "messages", "prompt", "include_details", *RENAMED} - {
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
        *("tool_choice", "parallel_tool_calls"),
    }
    options = {*get_type_hints(GenerateOptions), *get_type_hints(ChatOptions)}
    assert not http - options - of_http_alone
    in_jobs = {field.name for field in dataclasses.fields(GenerateJob)}
    assert {*OTHERS} <= in_jobs
