"""Tools through the doors: the official client, and gRPC as its twin."""

import dataclasses
import json
from collections.abc import Generator, Iterator
from typing import Any

import grpc
import openai
import pytest

from jpd.frontend.tool_formats import FORMATS
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import FakeRouter, make_model, make_tokenizer, say
from tests.frontend.tool_models import MODEL, NAMED, PARAMETERS, SCHEMA_FORMAT, TOOLS, USER

CALL = 'See:\n<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'


@pytest.fixture(scope="module")
def module_tool_doors(open_doors: Opened) -> Doors:
    return open_doors(MODEL)


@pytest.fixture
def tool_doors(module_tool_doors: Doors) -> Doors:
    module_tool_doors.router = FakeRouter()
    return module_tool_doors


@pytest.fixture
def client(tool_doors: Doors) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_doors.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def stub(tool_doors: Doors) -> Generator[jpd_pb2_grpc.JpdStub, None, None]:
    with grpc.insecure_channel(tool_doors.grpc_address) as channel:
        yield jpd_pb2_grpc.JpdStub(channel)


def ask(client: openai.OpenAI, **fields: object) -> Any:
    settings: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": TOOLS} | fields
    return client.chat.completions.create(**settings)


def prompt_of(doors: Doors) -> str:
    [request] = doors.router.requests
    return bytes(i for i in request.prompt_token_ids if i < 256).decode()


def test_auto_finds_calls_and_keeps_the_text(client: openai.OpenAI, tool_doors: Doors) -> None:
    tool_doors.router.script = say(CALL)
    [choice] = ask(client).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "See:"
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rom"}')
    assert prompt_of(tool_doors).startswith(json.dumps(TOOLS))
    tool_doors.router.script = say("no call")
    [choice] = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "no call")
    assert choice.message.tool_calls is None


def test_streamed_deltas_make_the_same_message(client: openai.OpenAI, tool_doors: Doors) -> None:
    tool_doors.router.script = say(CALL + "\n" + CALL)
    whole = ask(client).choices[0].message
    with client.chat.completions.stream(
        model="tiny",
        messages=USER,
        tools=TOOLS,  # type: ignore[arg-type]
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls is not None
    assert streamed.message.content == whole.content
    made = [call.function for call in streamed.message.tool_calls]
    assert [(function.name, function.arguments) for function in made] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls
    ]
    assert len(made) == 2


PARALLEL = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Rom"}}; {"name": "now"}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "now"}]',
}


BROKEN = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "Rom}}</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": Rom}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": ["Rom"]}]',
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_streams_parallel_calls_and_keeps_broken_ones_as_text(
    open_doors: Opened, name: str
) -> None:
    doors = open_doors(dataclasses.replace(MODEL, tool_format=FORMATS[name]))
    settings: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": TOOLS}
    with openai.OpenAI(base_url=f"{doors.url}/v1", api_key="none", max_retries=0) as client:
        doors.router.script = say(PARALLEL[name])
        with client.chat.completions.stream(**settings) as stream:
            parts = [
                event for event in stream if event.type == "tool_calls.function.arguments.done"
            ]
            streamed = stream.get_final_completion().choices[0]
        assert [(part.index, part.name, part.arguments) for part in parts] == [
            (0, "weather", '{"city": "Rom"}'),
            (1, "now", "{}"),
        ]
        whole = ask(client).choices[0]
        for choice in (streamed, whole):
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            calls = choice.message.tool_calls or []
            made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
            assert made == [("weather", {"city": "Rom"}), ("now", {})]
            assert len({call.id for call in calls}) == 2
        doors.router.script = say(BROKEN[name])
        with client.chat.completions.stream(**settings) as stream:
            broken = stream.get_final_completion().choices[0]
        assert broken.message.content == BROKEN[name] and broken.finish_reason == "stop"
        assert not broken.message.tool_calls
        if FORMATS[name].is_text:
            ask(client, response_format=SCHEMA_FORMAT)
            grammar = doors.router.requests[-1].sampling.grammar
            assert grammar is not None and grammar.kind == "answer_or_calls"
        else:
            with pytest.raises(openai.BadRequestError, match="special token"):
                ask(client, response_format=SCHEMA_FORMAT)


def test_malformed_calls_are_text(client: openai.OpenAI, tool_doors: Doors) -> None:
    tool_doors.router.script = say('<tool_call>{"name": "weather", "arg')
    [choice] = ask(client).choices
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == '<tool_call>{"name": "weather", "arg'


def test_named_function_is_its_arguments(client: openai.OpenAI, tool_doors: Doors) -> None:
    tool_doors.router.script = say('{"city": "Rom"}')
    [choice] = ask(client, tool_choice=NAMED).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rom"}')
    grammar = tool_doors.router.requests[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == PARAMETERS
    arguments, ids = "", []
    for chunk in ask(client, tool_choice=NAMED, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            arguments += part.function.arguments
            ids.append(part.id)
    assert arguments == '{"city": "Rom"}' and ids[0] and not any(ids[1:])
    [choice] = ask(client, tool_choice=NAMED, max_tokens=5).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"cit'


def test_required_is_a_list_of_calls(client: openai.OpenAI, tool_doors: Doors) -> None:
    calls = [
        {"name": "weather", "arguments": {"city": "Rom"}},
        {"name": "now", "arguments": {}},
    ]
    tool_doors.router.script = say(json.dumps(calls))
    [choice] = ask(client, tool_choice="required").choices
    made = [call.function for call in choice.message.tool_calls]
    assert [(f.name, json.loads(f.arguments)) for f in made] == [
        ("weather", {"city": "Rom"}),
        ("now", {}),
    ]


def test_none_tells_the_model_of_no_tools(client: openai.OpenAI, tool_doors: Doors) -> None:
    tool_doors.router.script = say(CALL)
    [choice] = ask(client, tool_choice="none").choices
    assert choice.message.content == CALL and choice.finish_reason == "stop"
    assert prompt_of(tool_doors) == "<user>hi"


def test_earlier_calls_and_their_answers_reach_the_template(
    client: openai.OpenAI, tool_doors: Doors
) -> None:
    tool_doors.router.script = say(CALL)
    message = ask(client).choices[0].message
    tool_doors.router.requests.clear()
    tool_doors.router.script = say("Sunny.")
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "25 C"}
    history = [*USER, message.model_dump(exclude_none=True), answer]
    assert ask(client, messages=history).choices[0].message.content == "Sunny."
    shown = f"<user>hi<assistant>See:<tool_call>Rom<tool>25 C{answer['tool_call_id']}"
    assert prompt_of(tool_doors).endswith(shown)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"type": "nothing"}}},
                        },
                    }
                ],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools[0].function.parameters",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_named(
    client: openai.OpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param


def test_a_model_without_a_format_or_a_place_for_tools_says_so(
    open_doors: Opened, client: openai.OpenAI
) -> None:
    for tokenizer, rule in (
        (make_tokenizer("{{ tools }}"), "--tool-call-parser"),
        (make_tokenizer(), "--tool-call-parser"),
    ):
        doors = open_doors(make_model(tokenizer))
        reply = doors.http.post(
            "/v1/chat/completions", json={"messages": USER, "tools": TOOLS}
        ).json()
        assert reply["error"]["param"] == "tools" and rule in reply["error"]["message"]
    doors = open_doors(
        dataclasses.replace(make_model(make_tokenizer()), tool_format=MODEL.tool_format)
    )
    reply = doors.http.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS}).json()
    assert "no place for them" in reply["error"]["message"]


def test_tokenize_counts_the_tools_too(tool_doors: Doors) -> None:
    def count(**fields: object) -> int:
        reply = tool_doors.http.post("/tokenize", json={"messages": USER} | fields)
        number: int = reply.json()["count"]
        return number

    assert count(tools=TOOLS) == count() + len(json.dumps(TOOLS))


def test_grpc_is_the_twin(stub: jpd_pb2_grpc.JpdStub, tool_doors: Doors) -> None:
    tool = jpd_pb2.Tool(name="weather", description="of today", parameters=json.dumps(PARAMETERS))
    earlier = jpd_pb2.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
    messages = [
        jpd_pb2.ChatMessage(role="user", content="hi"),
        jpd_pb2.ChatMessage(role="assistant", tool_calls=[earlier]),
        jpd_pb2.ChatMessage(role="tool", content="5 C", tool_call_id="c1"),
    ]
    tool_doors.router.script = say(CALL)
    chat = jpd_pb2.ChatMessages(messages=messages, tools=[tool])
    parts = list(stub.Generate(jpd_pb2.GenerateRequest(chat=chat)))
    assert "".join(part.text for part in parts) == "See:"
    [call] = [call for part in parts for call in part.tool_calls]
    assert (call.name, call.arguments) == ("weather", '{"city": "Rom"}') and call.id
    assert parts[-1].finish_reason == jpd_pb2.FINISH_REASON_TOOL_CALLS
    expected = json.dumps([TOOLS[1]]) + "<user>hi<assistant><tool_call>Bern<tool>5 Cc1"
    assert prompt_of(tool_doors) == expected
    tool_doors.router.script = say('{"city": "Rom"}')
    chat = jpd_pb2.ChatMessages(messages=messages[:1], tools=[tool], named_tool="weather")
    parts = list(stub.Generate(jpd_pb2.GenerateRequest(chat=chat)))
    assert "".join(c.arguments for part in parts for c in part.tool_calls) == '{"city": "Rom"}'
    tool.parameters = "{"
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(jpd_pb2.GenerateRequest(chat=jpd_pb2.ChatMessages(tools=[tool]))))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
