"""The Python API in one process: a batch, a stream, and several streams at once.

python examples/python_api.py --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
"""

import argparse
import asyncio

import jpd


def batch(server: jpd.Server) -> list[str]:
    """Several prompts together; a prompt may be text or token ids."""
    answers = server.generate(["Once upon a time", "The capital of France is"], max_tokens=16)
    for answer in answers:
        print(f"{answer.num_prompt_tokens} + {len(answer.token_ids)} tokens: {answer.text!r}")
    return [answer.text for answer in answers]


def stream(server: jpd.Server) -> str:
    """Text as it comes. Leaving the loop would cancel the request."""
    text = ""
    for delta in server.stream("Once upon a time", max_tokens=16, temperature=0.0, stop="\n"):
        print(delta.text, end="", flush=True)
        text += delta.text
        if delta.timeline is not None:
            print(f"\nfirst token after {delta.timeline.ttft_seconds * 1000:.1f} ms")
    return text


async def concurrent_streams(server: jpd.Server) -> list[str]:
    """Streams of two sessions side by side, on the caller's own event loop."""

    async def one(session_id: str) -> str:
        deltas = server.astream("Once upon a time", max_tokens=16, session_id=session_id)
        return "".join([delta.text async for delta in deltas])

    return list(await asyncio.gather(one("first"), one("second")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/gemma-3-270m.toml")
    parser.add_argument("--mesh", default="mesh_configs/1p1d-cpu.toml")
    options = parser.parse_args()
    with jpd.launch(model=options.model, mesh=options.mesh) as server:
        batch(server)
        stream(server)
        print(asyncio.run(concurrent_streams(server)))


if __name__ == "__main__":
    main()
