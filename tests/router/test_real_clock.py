"""The router without a virtual clock: what the other tests show holds on the machine's own too."""

import asyncio

import pytest

from tests.router.rig import counted, rig
from tests.support.fake_worker import one_each


async def test_a_request_and_a_reader_that_leaves() -> None:
    async with rig(*one_each(step_seconds=0.001), check=False) as r:
        answer = await r.ask(r.request((5,), max_tokens=10))
        assert answer.token_ids == counted((5,), 10)
        assert 0.0 < answer.timeline.ttft_seconds < 5.0
        stream = r.router.generate(r.request(max_tokens=500))
        await anext(stream)
        await stream.aclose()
        await r.router.settle()
        assert r["decode-0"].num_held == 0
        r.router.check_integrity()


async def test_a_stream_of_another_waiting_reader_can_be_cut_by_its_timeout() -> None:
    async with rig(*one_each(step_seconds=5.0), check=False) as r:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await r.ask(r.request(max_tokens=50))
        await r.router.settle()
        assert r["decode-0"].num_held == 0
