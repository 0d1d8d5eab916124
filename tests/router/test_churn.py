"""C05: workers come and go every 200 ms under load, and no request disappears."""

import asyncio
import random
from collections import Counter

from jpd.errors import JpdError
from tests.router.rig import Rig, counted, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker

SECONDS, PERIOD_SECONDS, REQUESTS_PER_SECOND = 60.0, 0.2, 20.0
DEADLINE_SECONDS = 10.0


def fake(name: str, role: str) -> FakeWorker:
    return FakeWorker(
        name, role, prefill_token_seconds=0.001, transfer_seconds=0.02, step_seconds=0.02
    )


async def churn(r: Rig, draw: random.Random) -> int:
    """Adds a worker, or removes one, again and again; returns how often."""
    number = 0
    start = r.now
    removing: set[asyncio.Task[None]] = set()
    while r.now < start + SECONDS:
        await asyncio.sleep(PERIOD_SECONDS)
        number += 1
        up = {line.name: line.role for line in r.router.roster.lines() if line.state == "up"}
        if len(up) < 5:
            role = min(("prefill", "decode"), key=list(up.values()).count)
            worker = fake(f"{role}-{number}", role)
            r.workers[worker.name] = worker
            await r.router.roster.add(worker)
            continue
        name = draw.choice(list(up))
        if draw.random() < 0.3 and list(up.values()).count(up[name]) > 1:
            r.workers[name].die("churn")  # without a word to anybody
        removing.add(asyncio.create_task(remove(r, name)))
    await asyncio.gather(*removing)
    return number


async def remove(r: Rig, name: str) -> None:
    try:
        await r.router.roster.remove(name)
    except JpdError:  # the last of its kind stays, or it is being removed already
        return
    r.workers.pop(name, None)


async def ask(r: Rig, draw: random.Random, outcomes: Counter[str]) -> None:
    prompt = [draw.randrange(200) for _ in range(draw.choice((3, 20, 40)))]
    start = r.now
    try:
        answer = await r.ask(r.request(prompt, max_tokens=8, timeout=DEADLINE_SECONDS))
    except JpdError as error:
        outcomes[type(error).__name__] += 1
    else:
        assert answer.token_ids == counted(prompt, 8)
        outcomes["finished"] += 1
    assert r.now - start <= DEADLINE_SECONDS + 0.01


@virtual
async def test_c05_every_request_ends_while_workers_come_and_go() -> None:
    draw, outcomes = random.Random(5), Counter[str]()
    workers = [fake(f"{role}-{n}x", role) for role in ("prefill", "decode") for n in range(2)]
    async with rig(*workers) as r:
        churning = asyncio.create_task(churn(r, draw))
        async with asyncio.TaskGroup() as group:
            num_requests = 0
            while not churning.done():
                group.create_task(ask(r, draw, outcomes))
                num_requests += 1
                await asyncio.sleep(draw.expovariate(REQUESTS_PER_SECOND))
        assert await churning >= 250
        assert outcomes.total() == num_requests > 800
        assert outcomes["finished"] > num_requests * 0.9, outcomes
        for worker in r.workers.values():
            if worker._lost_reason:
                worker.revive()
