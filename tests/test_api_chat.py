"""Chat, sessions, tools and the progress bar of the Python API, over workers without devices."""

import asyncio
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jpd
from jpd.api import Server
from jpd.config import DeploymentConfig
from jpd.errors import RequestError
from tests.frontend.fake_router import make_tokenizer
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment

# The fake workers count on from the last letter of the prompt, which the template makes an "a".
TEMPLATE = (
    "{% if tools %}{{ tools | length }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> DeploymentConfig:
    return write_deployment(tmp_path_factory.mktemp("mesh"))


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def server(
    repo: Path, deployment: DeploymentConfig, fleet: FakeFleet
) -> Generator[Server, None, None]:
    model = replace(make_tiny_model(repo), tokenizer=make_tokenizer(TEMPLATE))
    with Server(model, deployment, lambda: fleet) as server:
        yield server


def prompts_of(fleet: FakeFleet) -> list[str]:
    return [
        bytes(i for i in attempt.token_ids if i < 256).decode()
        for attempt in fleet.decode.attempts["reserve"]
    ]


def test_chat_goes_through_the_template(server: Server, fleet: FakeFleet) -> None:
    answers = server.chat([{"role": "system", "content": "be"}, *HI], n=2, max_tokens=3)
    assert [answer.text for answer in answers] == ["bcd", "bcd"]
    assert prompts_of(fleet)[0] == "[s:be][u:hi]a"
    message = answers[0].as_message()
    assert message == {"role": "assistant", "content": "bcd"}
    deltas = list(server.stream_chat([*HI, message, *HI], max_tokens=3))
    assert "".join(delta.text for delta in deltas) == "bcd"
    assert prompts_of(fleet)[-1] == "[u:hi][a:bcd][u:hi]a"


async def test_async_twins_of_chat(server: Server) -> None:
    [answer] = await server.achat(HI, max_tokens=3)
    texts = [delta.text async for delta in server.astream_chat(HI, max_tokens=3)]
    assert answer.text == "".join(texts) == "bcd"
    chat = server.session()
    assert (await chat.asay("x", max_tokens=2)).text == "bc"
    assert "".join([d.text async for d in chat.astream("y", max_tokens=2)]) == "bc"
    assert [message["content"] for message in chat.messages] == ["x", "bc", "y", "bc"]


def test_a_session_remembers_its_turns(server: Server, fleet: FakeFleet) -> None:
    chat = server.session("mine", [{"role": "system", "content": "be"}])
    assert isinstance(chat, jpd.Session) and chat.id == "mine"
    assert chat.say("one", max_tokens=2).text == "bc"
    assert "".join(delta.text for delta in chat.stream("two", max_tokens=2)) == "bc"
    assert prompts_of(fleet)[-1] == "[s:be][u:one][a:bc][u:two]a"
    assert [message["role"] for message in chat.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert server.session().id != server.session().id


@pytest.mark.field_report("E21")
def test_e21_a_turn_that_is_left_or_fails_is_forgotten(
    repo: Path, deployment: DeploymentConfig
) -> None:
    fleet = FakeFleet(step_seconds=0.005)
    model = replace(make_tiny_model(repo), tokenizer=make_tokenizer(TEMPLATE))
    with Server(model, deployment, lambda: fleet) as server:
        chat = server.session()
        chat.say("one", max_tokens=2)
        for _ in chat.stream("dropped", max_tokens=100):
            break
        with pytest.raises(RequestError):
            chat.say("bad", temperature=-1.0)
        assert chat.say("two", max_tokens=2).text == "bc"
        assert prompts_of(fleet)[-1] == "[u:one][a:bc][u:two]a"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"session_id": "other"}, "session_id"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_what_a_turn_cannot_have_is_named(
    server: Server, options: dict[str, Any], field: str
) -> None:
    chat = server.session()
    chat.say("one", max_tokens=1)
    with pytest.raises(RequestError) as caught:
        chat.say("two", **options)
    assert caught.value.field == field
    with pytest.raises(RequestError, match="messages"):
        server.chat([])
    with pytest.raises(TypeError, match="temprature"):
        server.chat(HI, temprature=1)  # type: ignore[call-arg]


def test_tools_reach_the_template_and_special_tokens_the_reader(
    server: Server, fleet: FakeFleet
) -> None:
    [answer] = server.chat(HI, tools=TOOLS, max_tokens=2)
    assert prompts_of(fleet)[-1] == "1<tool_call>[u:hi]a"
    assert (answer.text, answer.tool_calls) == ("bc", ())
    [answer] = server.chat(HI, tools=TOOLS, tool_choice="none", max_tokens=2)
    assert prompts_of(fleet)[-1] == "[u:hi]a"
    call = jpd.ToolCallDelta(0, "c1", "now", "{}")
    message = replace(answer, text="", tool_calls=(call,)).as_message()
    assert message["content"] is None and message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    ]
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    server.chat([*HI, message, result], max_tokens=1)
    assert prompts_of(fleet)[-1] == "[u:hi][a:][t:noon]a"


def test_a_bar_shows_how_far_a_batch_is(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    silent = server.generate(["a", "b"], n=2, max_tokens=2)
    assert capsys.readouterr().err == ""
    shown = server.generate(["a", "b"], n=2, max_tokens=2, progress=True)
    told = capsys.readouterr().err
    assert "4/4" in told and "tokens/s" in told
    assert [answer.text for answer in shown] == [answer.text for answer in silent]
    asyncio.run(server.agenerate("a", max_tokens=2, progress=True))
    assert "1/1" in capsys.readouterr().err
    with pytest.raises(RequestError):
        server.generate("", progress=True)
