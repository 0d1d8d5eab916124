"""A chat that remembers, with functions that the model may call; Python API, sync and async.

python examples/chat_session.py --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
"""

import argparse
import asyncio
import json
from typing import Unpack

import jpd

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def talk(server: jpd.Server) -> list[str]:
    """Two turns: the second one's KV builds on what the first has left with its worker."""
    chat = server.session(messages=[{"role": "system", "content": "Be brief."}])
    first = chat.say("Name a colour.", max_tokens=8)
    second = ""
    for delta in chat.stream("And another?", max_tokens=8):
        second += delta.text
        print(delta.text, end="", flush=True)
    print(f"\n{len(chat.messages)} messages in session {chat.id}")
    return [first.text, second]


async def talk_to_many(server: jpd.Server, names: list[str]) -> list[str]:
    """Chats side by side, each streamed, on the caller's own event loop."""

    async def one(name: str) -> str:
        deltas = server.session(name).astream(f"I am {name}.", max_tokens=8)
        return "".join([delta.text async for delta in deltas])

    return list(await asyncio.gather(*map(one, names)))


def call_functions(server: jpd.Server, question: str, **options: Unpack[jpd.ChatOptions]) -> str:
    """A call is required here, and its result is told with the next turn."""
    chat = server.session()
    options |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    called = chat.say(question, **options)
    if called.finish_reason != "tool_calls":
        raise RuntimeError(f"no whole call: {called.text!r}")
    results: list[dict[str, object]] = []
    for call in called.tool_calls:
        degrees = {"Rome": "25", "Oslo": "7"}[json.loads(call.arguments)["city"]]
        results.append({"role": "tool", "tool_call_id": call.id, "content": degrees})
    return chat.say(results, **(options | {"tool_choice": "none"})).text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/gemma-3-270m.toml")
    parser.add_argument("--mesh", default="mesh_configs/1p1d-cpu.toml")
    parser.add_argument("--tools", action="store_true", help="the model's chat template has them")
    options = parser.parse_args()
    with jpd.launch(model=options.model, mesh=options.mesh) as server:
        print(talk(server))
        print(asyncio.run(talk_to_many(server, ["Ann", "Bob"])))
        if options.tools:
            print(call_functions(server, "How warm is it in Rome?", max_tokens=128))


if __name__ == "__main__":
    main()
