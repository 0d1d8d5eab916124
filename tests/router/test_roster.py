"""Workers come, go and change their role while streams run."""

import asyncio

import pytest

from jpd.errors import RequestError
from tests.router.rig import Rig, counted, rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker


def workers(**options: float) -> list[FakeWorker]:
    return [
        FakeWorker("prefill-0", "prefill", **options),
        FakeWorker("decode-0", "decode", step_seconds=0.1, **options),
        FakeWorker("decode-1", "decode", step_seconds=0.1, **options),
    ]


def gauges(made: Rig) -> bytes:
    wanted = (b"jpd:kv_pages", b"jpd:worker_up", b"jpd:requests_running")
    return b"".join(x for x in made.metrics.render().splitlines() if x.startswith(wanted))


def line(made: Rig, worker: str) -> tuple[str, str]:
    found = next(line for line in made.router.roster.lines() if line.name == worker)
    return found.role, found.state


@virtual
async def test_a_drained_worker_ends_what_it_has_and_gets_nothing_new() -> None:
    async with rig(*workers()) as made:
        running = [made.begin(made.request(max_tokens=20)) for _ in range(2)]
        await asyncio.sleep(0.5)
        draining = asyncio.create_task(made.router.roster.drain("decode-0"))
        await asyncio.sleep(0)
        assert line(made, "decode-0") == ("decode", "draining")
        later = await made.ask(made.request(max_tokens=5))
        assert later.timeline is not None and later.timeline.decode_worker == "decode-1"
        for answer in await asyncio.gather(*running):
            assert answer.token_ids == counted([1, 2, 3], 20)
            assert answer.timeline is not None and answer.timeline.num_retries == 0
        await draining
        assert made.router.health().is_ready


@virtual
async def test_a_role_is_changed_while_streams_run_elsewhere() -> None:
    async with rig(*workers()) as made:
        running = [made.begin(made.request(max_tokens=40)) for _ in range(2)]
        await asyncio.sleep(0.5)
        await made.router.roster.set_role("decode-0", "prefill")
        assert line(made, "decode-0") == ("prefill", "up")
        for answer in await asyncio.gather(*running):
            assert answer.token_ids == counted([1, 2, 3], 40)
            assert answer.timeline is not None and answer.timeline.num_retries == 0
        answers = await asyncio.gather(*(made.ask(made.request()) for _ in range(8)))
        assert {a.timeline.prefill_worker for a in answers if a.timeline} == {
            "prefill-0",
            "decode-0",
        }
        await made.router.roster.set_role("decode-0", "decode")
        assert line(made, "decode-0") == ("decode", "up")


@virtual
async def test_what_would_stop_the_server_is_refused() -> None:
    async with rig(*workers()) as made:
        roster = made.router.roster
        with pytest.raises(RequestError, match="nobody else could prefill"):
            await roster.drain("prefill-0")
        with pytest.raises(RequestError, match="nobody else could prefill"):
            await roster.set_role("prefill-0", "decode")
        made["decode-1"].die()
        await asyncio.sleep(1.0)
        with pytest.raises(RequestError, match="nobody else could decode"):
            await roster.remove("decode-0")
        made["decode-1"].revive()
        await asyncio.sleep(1.0)
        assert {line(made, name)[1] for name in made.workers} == {"up"}
        made["decode-0"].roles = ("decode",)
        await asyncio.sleep(1.0)
        with pytest.raises(RequestError, match="decode-0 can be decode: it compiles"):
            await roster.set_role("decode-0", "prefill")
        with pytest.raises(RequestError, match="there are prefill-0, decode-0, decode-1"):
            await roster.drain("decode-7")


@virtual
async def test_workers_are_added_and_removed_while_serving() -> None:
    async with rig(*workers()) as made:
        added = FakeWorker("decode-2", "decode", step_seconds=0.1)
        running = [made.begin(made.request(max_tokens=30)) for _ in range(4)]
        await asyncio.sleep(0.3)
        await made.router.roster.add(added)
        assert line(made, "decode-2") == ("decode", "up")
        assert made.metrics.value("jpd:worker_up", worker="decode-2") == 1
        assert made.metrics.value("jpd:kv_pages", worker="decode-2") == added.num_pages
        await made.router.roster.remove("decode-0")
        assert [entry.name for entry in made.router.roster.lines()] == [
            "prefill-0",
            "decode-1",
            "decode-2",
        ]
        del made.workers["decode-0"]
        for answer in await asyncio.gather(*running):
            assert answer.token_ids == counted([1, 2, 3], 30)
        answers = await asyncio.gather(*(made.ask(made.request()) for _ in range(6)))
        assert "decode-2" in {a.timeline.decode_worker for a in answers if a.timeline}
        with pytest.raises(ValueError, match="two workers are named"):
            await made.router.roster.add(added)


@virtual
async def test_a_lost_worker_can_be_removed() -> None:
    async with rig(*workers()) as made:
        assert made.metrics.value("jpd:worker_up", worker="decode-0") == 1
        made["decode-0"].die()
        await asyncio.sleep(1.0)
        assert made.metrics.value("jpd:worker_up", worker="decode-0") == 0
        await made.router.roster.remove("decode-0")
        del made.workers["decode-0"]
        assert b'worker="decode-0"' not in gauges(made)
        assert made.router.health().status == "ok"
        assert (await made.ask(made.request())).token_ids == counted([1, 2, 3], 5)
