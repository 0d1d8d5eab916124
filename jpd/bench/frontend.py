"""What streaming costs the host: processor time a token at both doors, side by side.

1. A process of its own serves a fake engine over HTTP and gRPC, and tells its processor time.
2. 64 streams are read here; counted is what comes between the last of their first tokens and the
   first of their last ones, when all of them stream.
The same streams read off the router show what the doors add. Called by `jpd bench frontend`.
"""

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc

from jpd.bench import door_child
from jpd.bench.door_child import HOST, PROMPT, Load
from jpd.bench.results import Result
from jpd.rpc import jpd_pb2, jpd_pb2_grpc

TARGET_MICROSECONDS = 100.0
FULL, QUICK = Load(), Load(num_streams=8, num_tokens=40, step_seconds=0.005)
START_SECONDS = 60.0
TIMEOUT_SECONDS = 120.0

Events = AsyncIterator[int]
"""How many tokens came, each time that some do."""


@dataclass(slots=True)
class Counted:
    """Streams of one door: how many have begun and ended, and the tokens of all."""

    load: Load
    num_begun: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    all_stream: asyncio.Event = field(default_factory=asyncio.Event)
    first_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, events: Events) -> None:
        num_tokens = 0
        async for count in events:
            if num_tokens == 0:
                self.num_begun += 1
                if self.num_begun == self.load.num_streams:
                    self.all_stream.set()
            num_tokens += count
            self.num_tokens += count
        self.num_ended += 1
        self.first_ended.set()
        assert num_tokens == self.load.num_tokens, f"{num_tokens} tokens came"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one door, while all streams ran."""

    cpu_seconds: float
    seconds: float
    num_tokens: int

    @property
    def microseconds(self) -> float:
        """Processor time a token."""
        return 1e6 * self.cpu_seconds / self.num_tokens


def run(*, is_quick: bool = False) -> list[Result]:
    """Starts the server in a process of its own, and ends it."""
    load = QUICK if is_quick else FULL
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=door_child.main, args=(theirs, load), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise RuntimeError("the server of the benchmark did not start")
        http_port, grpc_port = ours.recv()
        ours.send("router")
        bare = 1e6 * float(ours.recv())
        http = asyncio.run(_measure(ours, load, lambda: _http(http_port, load)))
        rpc = asyncio.run(_measure_grpc(ours, load, grpc_port))
    finally:
        ours.close()
        child.join(START_SECONDS)
        child.kill()
    return [
        Result("streams at a time", load.num_streams, ""),
        Result("router and fake engine alone", bare, "us/token"),
        *_results("HTTP", http, bare),
        *_results("gRPC", rpc, bare),
        Result("gRPC over HTTP", rpc.microseconds / http.microseconds, "x"),
    ]


def _results(door: str, cost: Cost, bare: float) -> list[Result]:
    total = cost.microseconds
    return [
        Result(f"{door}: host time, router to socket", total, "us/token", TARGET_MICROSECONDS),
        Result(f"{door}: of this the door", total - bare, "us/token"),
        Result(f"{door}: tokens streamed", cost.num_tokens / cost.seconds, "tokens/s"),
        Result(f"{door}: of one core", 100 * cost.cpu_seconds / cost.seconds, "%"),
    ]


async def _measure(connection: Connection, load: Load, open_stream: Callable[[], Events]) -> Cost:
    counted = Counted(load)
    tasks = [asyncio.create_task(counted.read(open_stream())) for _ in range(load.num_streams)]
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await counted.all_stream.wait()
        before, start, num_before = _cpu(connection), time.perf_counter(), counted.num_tokens
        await counted.first_ended.wait()
        num_tokens = counted.num_tokens - num_before
        cost = Cost(_cpu(connection) - before, time.perf_counter() - start, num_tokens)
        await asyncio.gather(*tasks)
    return cost


async def _measure_grpc(connection: Connection, load: Load, port: int) -> Cost:
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        return await _measure(connection, load, lambda: _grpc(stub, load))


def _cpu(connection: Connection) -> float:
    connection.send("cpu")
    return float(connection.recv())


async def _http(port: int, load: Load) -> Events:
    """A stream of a completion, read off the socket: a client's own cost must not slow it."""
    fields = {"prompt": PROMPT, "max_tokens": load.num_tokens, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                yield 1
            assert line, "the server ended the stream"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _grpc(stub: jpd_pb2_grpc.JpdStub, load: Load) -> Events:
    sampling = jpd_pb2.SamplingParams(max_tokens=load.num_tokens)
    request = jpd_pb2.GenerateRequest(token_ids=jpd_pb2.TokenIds(ids=PROMPT), sampling=sampling)
    async for message in stub.Generate(request, timeout=TIMEOUT_SECONDS):
        yield len(message.token_ids)
