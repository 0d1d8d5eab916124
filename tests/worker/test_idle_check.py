"""An idle worker recounts its pages, seldom, and says what is wrong."""

import asyncio
import time

import pytest

from jpd.worker import idle_check
from jpd.worker.idle_check import IDLE_CHECK_SECONDS, IdleCheck
from tests.worker.fleet import attempt_of, fleet


def test_only_after_a_change_and_not_again_for_a_while() -> None:
    num_changes, checks = [0], []
    check = IdleCheck(lambda: checks.append(1), lambda: num_changes[0])
    check.run(100.0)
    assert (checks, check.next_time) == ([], float("inf"))
    num_changes[0] += 1
    check.run(100.0)
    check.run(200.0)
    assert len(checks) == 1, "nothing has changed since"
    num_changes[0] += 1
    check.run(100.0 + IDLE_CHECK_SECONDS - 0.1)
    assert len(checks) == 1 and check.next_time == 100.0 + IDLE_CHECK_SECONDS
    check.run(100.0 + IDLE_CHECK_SECONDS)
    assert len(checks) == 2


async def test_a_page_that_leaks_makes_the_worker_unhealthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_check, "IDLE_CHECK_SECONDS", 0.05)
    async with fleet() as running:
        decode = running["decode-0"]
        await running.run(attempt_of(range(10), 8))
        await running.assert_at_rest()
        assert decode.status.healthy
        decode.pool.take_page()  # by nobody
        await running.run(attempt_of(range(20, 30), 8))
        end = time.monotonic() + 5
        while decode.status.healthy and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert not decode.status.healthy
        assert "holders" in decode.status.reason
        assert running["prefill-0"].status.healthy
