"""The official `openai` client against `jpd serve`.

jpd serve --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
python examples/openai_client.py http://127.0.0.1:8000
"""

import sys

import openai


def chat(client: openai.OpenAI, model: str) -> str:
    """A streamed chat completion; what OpenAI does not know of goes into extra_body."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"session_id": "example", "top_k": 40},
    )
    text = ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")
    return text


def phases(client: openai.OpenAI, model: str) -> dict[str, object]:
    """Where the time of one request went: jpd's details, on request."""
    answer = client.completions.create(
        model=model, prompt="Once upon a time", extra_body={"include_details": True}
    )
    details: dict[str, object] = answer.choices[0].model_dump()["details"]
    print(details)
    return details


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        chat(client, model)
        phases(client, model)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
