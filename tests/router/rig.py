"""A router over fake workers in virtual time, and the questions every test asks of it."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpd.config import FailureConfig, RouterConfig, SloConfig
from jpd.errors import WorkerLostError
from jpd.metrics import Metrics
from jpd.request import FinishReason, PromptLogprobs, Request, SamplingParams, Timeline
from jpd.router.policy import WorkerView
from jpd.router.router import Router
from jpd.worker.protocol import Attempt
from tests.support.fake_worker import FakeWorker

PAGE_SIZE = 16
VOCAB_SIZE = 256


@dataclass
class Answer:
    """What a client got from one request, read to its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    timeline: Timeline | None = None
    num_ends: int = 0


@dataclass
class Rig:
    workers: dict[str, FakeWorker]
    router: Router
    metrics: Metrics
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def __getitem__(self, worker: str) -> FakeWorker:
        return self.workers[worker]

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def request(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int | None = 5,
        timeout: float = 600.0,
        **fields: Any,
    ) -> Request:
        sampling = {
            name: fields.pop(name)
            for name in (item.name for item in dataclasses.fields(SamplingParams))
            if name in fields
        }
        return Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            arrival_time=self.now,
            deadline=self.now + timeout,
            **fields,
        )

    async def ask(self, request: Request) -> Answer:
        answer = Answer()
        async with contextlib.aclosing(self.router.generate(request)) as outputs:
            async for output in outputs:
                answer.token_ids += output.token_ids
                answer.logprobs += [entry.logprob for entry in output.logprobs]
                answer.prompt_logprobs += [output.prompt_logprobs] if output.prompt_logprobs else []
                if output.finish_reason is not None:
                    answer.finish_reason = output.finish_reason
                    answer.timeline = output.timeline
                    answer.num_ends += 1
        assert answer.num_ends == 1
        return answer

    def begin(self, request: Request) -> "asyncio.Task[Answer]":
        return asyncio.create_task(self.ask(request))

    def view(self, worker: str) -> WorkerView:
        return next(view for view in self.router.fleet_views() if view.name == worker)

    async def assert_idle(self) -> None:
        """Invariant: when nothing runs, every count is back at its baseline."""
        await self.router.settle()
        await asyncio.sleep(2.0)  # transfers that were under way have ended
        self.router.check_integrity()
        assert self.router.num_requests == 0
        for view in self.router.fleet_views():
            work = view.num_rows, view.num_reserved_pages, view.num_prefills
            assert (*work, view.num_prefill_tokens) == (0, 0, 0, 0), view
        for worker in self.workers.values():
            assert worker.num_held == 0, f"{worker.name} still holds {worker.num_held} attempts"
        assert self.metrics.value("jpd:requests_waiting") == 0


@contextlib.asynccontextmanager
async def rig(
    *workers: FakeWorker,
    failure: FailureConfig | None = None,
    slos: Sequence[SloConfig] = (),
    max_model_len: int = 512,
    check: bool = True,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Rig]:
    """A started router; on the way out all must be at its baseline, unless `check` is off."""
    metrics = Metrics()
    router = Router(
        workers,
        RouterConfig(failure=failure or FailureConfig(), **config),
        slos,
        metrics,
        max_model_len=max_model_len,
        page_size=PAGE_SIZE,
        vocab_size=VOCAB_SIZE,
        clock=asyncio.get_running_loop().time,
        **(options or {}),
    )
    await router.start()
    made = Rig({worker.name: worker for worker in workers}, router, metrics)
    try:
        yield made
        if check:
            await made.assert_idle()
    finally:
        await router.close()


def counted(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake workers' arithmetic gives."""
    return [(prompt[-1] + step) % VOCAB_SIZE for step in range(1, num_tokens + 1)]


def fleet(num_prefill: int, num_decode: int, **options: Any) -> list[FakeWorker]:
    return [FakeWorker(f"p{n}", "prefill", **options) for n in range(num_prefill)] + [
        FakeWorker(f"d{n}", "decode", **options) for n in range(num_decode)
    ]


def prefills(r: Rig) -> Counter[str]:
    done = {name: len(worker.attempts["prefill"]) for name, worker in r.workers.items()}
    return Counter({name: number for name, number in done.items() if number})


async def cancel(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def lost(worker: str) -> WorkerLostError:
    return WorkerLostError(worker, "its engine raised")


def chaotic(token_ids: Sequence[int], attempt: Attempt) -> int:
    """A token that depends on the whole sequence, its seed and its position: any slip shows."""
    seed = attempt.sampling.seed or 0
    return hash((tuple(token_ids), seed, len(token_ids))) % 250


async def expected(max_tokens: int, **options: Any) -> list[int]:
    async with rig(*fleet(1, 1, **options)) as r:
        return (await r.ask(r.request(max_tokens=max_tokens, seed=11))).token_ids
