"""Cancels on their way to workers that leave."""

import asyncio
import gc
from typing import Any

from jpd.metrics import Metrics
from jpd.router.fleet import Fleet
from jpd.router.releases import Releases
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker


@virtual
async def test_a_cancel_of_a_worker_that_has_left_raises_nowhere() -> None:
    unheard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: unheard.append(context))
    worker = FakeWorker("d0", "decode")
    fleet = Fleet([worker], Metrics(), loop.time, lambda: None, 100, None)
    releases = Releases(fleet)
    releases.send("d0", "a")
    await releases.settle()
    assert list(worker.cancelled) == ["a"]
    releases.send("d0", "b")
    fleet.remove("d0")
    await releases.settle()
    gc.collect()
    assert not unheard and list(worker.cancelled) == ["a"]
