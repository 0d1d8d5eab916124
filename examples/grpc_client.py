"""The generated gRPC stub against `jpd serve`: tokens as they come, and the phases in the trailers.

jpd serve --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
python examples/grpc_client.py 127.0.0.1:8001
"""

import json
import sys

import grpc

from jpd.rpc import jpd_pb2, jpd_pb2_grpc


def generate(address: str) -> str:
    """One answer. Cancelling the call, or its deadline, frees everything on the server."""
    request = jpd_pb2.GenerateRequest(
        text="Once upon a time",
        sampling=jpd_pb2.SamplingParams(max_tokens=16, temperature=0.0),
    )
    text = ""
    with grpc.insecure_channel(address) as channel:
        call = jpd_pb2_grpc.JpdStub(channel).Generate(request, timeout=60.0)
        for message in call:
            text += message.text
            print(message.text, end="", flush=True)
        for key, value in call.trailing_metadata():
            if key == "jpd-timeline":
                print("\n" + json.dumps(json.loads(value), indent=2))
    return text


if __name__ == "__main__":
    generate(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
