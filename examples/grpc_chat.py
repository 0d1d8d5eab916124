"""A chat over one gRPC call: each message is a turn, and the server remembers the conversation.

jpd serve --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
python examples/grpc_chat.py 127.0.0.1:8001
"""

import asyncio
import sys

import grpc

from jpd.rpc import jpd_pb2, jpd_pb2_grpc


def turn(text: str, max_tokens: int = 16) -> jpd_pb2.ChatRequest:
    message = jpd_pb2.ChatMessage(role="user", content=text)
    return jpd_pb2.ChatRequest(
        turn=jpd_pb2.GenerateRequest(
            chat=jpd_pb2.ChatMessages(messages=[message]),
            sampling=jpd_pb2.SamplingParams(max_tokens=max_tokens),
        )
    )


async def chat(address: str, questions: list[str]) -> list[str]:
    """The answers. What is wrong with a turn ends that turn; the chat goes on."""
    answers = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = jpd_pb2_grpc.JpdStub(channel).Chat(timeout=600.0)
        for question in questions:
            await call.write(turn(question))
            answer = ""
            while True:
                response = await call.read()
                if response.HasField("error"):
                    answer = f"({response.error.message})"
                    break
                answer += response.delta.text
                if response.delta.finish_reason:
                    break
            print(f"{question}\n  {answer}")
            answers.append(answer)
        await call.done_writing()
        for key, value in await call.trailing_metadata():
            print(f"{key}: {value}")
    return answers


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
    asyncio.run(chat(target, ["Name a colour.", "And another?"]))
