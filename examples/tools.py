"""Functions that the model may call, with the official `openai` client.

jpd serve --model models/qwen3-0.6b.toml --mesh mesh_configs/1p1d-cpu.toml
python examples/tools.py http://127.0.0.1:8000
"""

import json
import sys
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

TOOLS: list[ChatCompletionToolParam] = [
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


def temperature(city: str) -> str:
    return {"Rome": "25", "Oslo": "7"}[city]


def ask(client: openai.OpenAI, model: str, question: str, **settings: Any) -> str:
    """One call, which is required here, and the answer that the model makes of its result."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    first = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        **settings,
    ).choices[0]
    if first.finish_reason != "tool_calls" or first.message.tool_calls is None:
        raise RuntimeError(f"no whole call: {first}")
    messages.append(first.message.model_dump(exclude_none=True))
    for call in first.message.tool_calls:
        assert call.type == "function"
        result = temperature(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", **settings
    )
    print(second.choices[0].message.content)
    return second.choices[0].message.content or ""


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        ask(client, client.models.list().data[0].id, "How warm is it in Rome?", max_tokens=128)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
