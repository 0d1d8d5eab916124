"""A process with both doors over a fake engine, which answers questions about its own time.

The engine is a `SteppingWorker`: all else is what serves real models, from the router to the
sockets. Started by `jpd.bench.frontend`, spoken to over a pipe: "cpu" is answered with the seconds
of processor time of this process so far, "router" with those a token costs without a door.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from jpd.bench.simulated_worker import Pace, SimulatedWorker
from jpd.chat_template import ChatTemplates
from jpd.config import RouterConfig
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.prompts import ServedModel
from jpd.frontend.server import FrontendServer
from jpd.frontend.service import TextService
from jpd.metrics import Metrics
from jpd.request import Request, SamplingParams
from jpd.router.router import Router
from jpd.tokenizer import BYTE_LEVEL_LETTERS, HuggingFaceTokenizer

HOST = "127.0.0.1"
MODEL_NAME = "paper"
MAX_MODEL_LEN = 1 << 16
TIMEOUT_SECONDS = 120.0
PROMPT = (7,) * 8


@dataclass(frozen=True, slots=True)
class Load:
    """Streams at a time, and what each of them asks for."""

    num_streams: int = 64
    num_tokens: int = 400
    step_seconds: float = 0.02


class SteppingWorker(SimulatedWorker):
    """All rows have their next token at the same moment, as those of a batch do."""

    _step_end: asyncio.Event | None = None

    async def _steps(self, count: int) -> None:
        if self._step_end is None:
            self._step_end = asyncio.Event()
            asyncio.get_running_loop().call_later(self._pace.step_seconds, self._end_step)
        await self._step_end.wait()

    def _end_step(self) -> None:
        assert self._step_end is not None
        self._step_end.set()
        self._step_end = None


def main(connection: Connection, load: Load) -> None:
    """Tells both ports, then answers until the pipe is closed."""
    uvloop.run(_serve(connection, load))  # as LoopThread does


async def _serve(connection: Connection, load: Load) -> None:
    pace = Pace(step_seconds=load.step_seconds, step_seconds_per_row=0.0, tokens_per_event=1)
    workers = [
        SimulatedWorker("prefill-0", "prefill", pace),
        SteppingWorker("decode-0", "decode", pace, slots=load.num_streams),
    ]
    metrics = Metrics()
    router = Router(workers, RouterConfig(), (), metrics, max_model_len=MAX_MODEL_LEN, page_size=32)
    await router.start()
    model = ServedModel(MODEL_NAME, byte_tokenizer(), len(BYTE_LEVEL_LETTERS), MAX_MODEL_LEN)
    facts = ServerFacts(lambda: HealthReport(True, "ok"), metrics.render)
    service = TextService(router, model)
    doors = FrontendServer(service, facts)
    ports = await doors.start(HOST, 0, 0)
    connection.send((ports.http_port, ports.grpc_port))
    await _answer(connection, router, load)
    await doors.stop(1.0)
    await router.close()
    service.close()


async def _answer(connection: Connection, router: Router, load: Load) -> None:
    """Questions are read by a thread, which the loop's own work does not hold up."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                if connection.recv() == "cpu":
                    connection.send(time.process_time())
                else:
                    asked = asyncio.run_coroutine_threadsafe(_without_door(router, load), loop)
                    connection.send(asked.result())
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


async def _without_door(router: Router, load: Load) -> float:
    """Seconds of processor time a token, of router and engine alone."""
    start = time.process_time()
    await asyncio.gather(*(_read(router, number, load) for number in range(load.num_streams)))
    return (time.process_time() - start) / (load.num_streams * load.num_tokens)


async def _read(router: Router, number: int, load: Load) -> Sequence[int]:
    now = time.monotonic()
    sampling = SamplingParams(max_tokens=load.num_tokens)
    request = Request(str(number), PROMPT, sampling, now, now + TIMEOUT_SECONDS)
    found = list[int]()
    async with contextlib.aclosing(router.generate(request)) as outputs:
        async for output in outputs:
            found.extend(output.token_ids)
    return found


def byte_tokenizer() -> HuggingFaceTokenizer:
    """Every byte is a token."""
    backend = tokenizers.Tokenizer(models.BPE(dict(BYTE_LEVEL_LETTERS), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(backend, {}, ChatTemplates({}, {}))
