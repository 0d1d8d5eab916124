"""Calls that must be made are made, by a model that knows nothing of them; as the examples do."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import openai
import pytest

from jpd.api import Server
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.support.tiny_tokenizer import tiny_vocabulary

VOCABULARY = tiny_vocabulary()
SETTINGS = {
    "max_tokens": 70,
    "temperature": 0,
    "logit_bias": {str(VOCABULARY[blank]): -100 for blank in "ĠĊĉ"},  # JSON may be full of them
}

GREEDY: dict[str, Any] = {
    "max_tokens": 70,
    "temperature": 0,
    "logit_bias": {VOCABULARY[blank]: -100.0 for blank in "ĠĊĉ"},
}

pytestmark = pytest.mark.slow  # a fleet of its own is compiled


def example(repo: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, repo / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_examples_that_need_a_grammar(repo: Path, server: Server) -> None:
    weather = example(repo, "guided_json").ask(server, "Warm?", **GREEDY)
    assert weather.city in ("Rome", "Oslo") and -90 <= weather.degrees <= 60
    assert example(repo, "chat_session").call_functions(server, "Warm?", **GREEDY)
    chosen = example(repo, "logprobs").alternatives(server, "the")
    assert len(chosen) == 8 and all(0 < probability <= 1 for _, probability in chosen)


def test_the_example(repo: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(repo, "tools")
    url = f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        module.ask(client, server.model_name, "Warm?", **SETTINGS)
        shown = capsys.readouterr().out
        assert shown.startswith('temperature({"city": "') and ") = " in shown
        stream = client.chat.completions.create(
            model=server.model_name,
            messages=[{"role": "user", "content": "Warm?"}],
            tools=module.TOOLS,
            tool_choice={"type": "function", "function": {"name": "temperature"}},
            stream=True,
            **SETTINGS,
        )
        choices = [chunk.choices[0] for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments)["city"] in ("Rome", "Oslo") and len(calls) > 1
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.field_report("E21", "G10")
async def test_a_turn_is_what_its_whole_history_gives_at_every_door(server: Server) -> None:
    address = f"127.0.0.1:{server.serve(http_port=None).grpc_port}"
    said = ("in the", "on", "a")
    history, answers, cached = list[dict[str, object]](), list[str](), list[int]()
    async with grpc.aio.insecure_channel(address) as channel:
        call = jpd_pb2_grpc.JpdStub(channel).Chat()
        for words in said:
            turn = {
                "chat": {"messages": [{"role": "user", "content": words}]},
                "sampling": {"max_tokens": 6, "temperature": 0},
            }
            await call.write(jpd_pb2.ChatRequest(turn=turn))
            text = ""
            while not (delta := (await call.read()).delta).finish_reason:
                text += delta.text
            answers.append(text + delta.text)
            cached.append(delta.usage.num_cached_tokens)
            history.append({"role": "user", "content": words})
            [whole] = await server.achat(history, max_tokens=6, temperature=0)
            assert whole.text == answers[-1]
            history.append(whole.as_message())
        await call.done_writing()
    chat = server.session()
    assert [(await chat.asay(w, max_tokens=6, temperature=0)).text for w in said] == answers
    assert list(chat.messages) == history
    assert (
        cached[0] < 16 and cached[-1] >= 16
    )  # a page: the first turn's prompt is not computed again
