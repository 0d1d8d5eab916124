"""Workers behind the worker service: real workers on fake engines, gRPC on loopback between."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from jpd.errors import DeadlineError, RequestError, WorkerError, WorkerLostError
from jpd.rpc.security import Security
from jpd.worker.connection import HostConnection
from jpd.worker.fingerprint import Fingerprint
from jpd.worker.host_server import HostServer
from jpd.worker.protocol import Attempt, Reservation, UnknownAttemptError
from jpd.worker.remote import RemoteClient
from jpd.worker.service import HostParts, WorkerService
from tests.support.tcp_link import TcpLink
from tests.worker.fleet import TestFleet, attempt_of, fleet
from tests.worker.paper import reference

OPEN = Security()
FINGERPRINT = Fingerprint(1, "model", 997, "float32", "float32", 4, 128, 8)


@dataclass
class FakePlace:
    """Where the launcher would say that the host is."""

    address: str | None
    reason: str = "not started yet"
    name: str = "host-a"


@dataclass
class Remote:
    """One host with all workers of a fleet, and clients of them across the wire."""

    fleet: TestFleet
    server: HostServer
    place: FakePlace
    connection: HostConnection

    def client(self, name: str) -> RemoteClient:
        return RemoteClient(name, "decode", self.connection)

    async def run(self, attempt: Attempt) -> list[int]:
        """As `TestFleet.run`, over the wire."""
        prefill, decode = self.client("prefill-0"), self.client("decode-0")
        tokens: list[int] = []
        while (got := await decode.reserve(attempt)) is None:
            await asyncio.sleep(0.005)
        try:
            first = await prefill.prefill(attempt, got)
            tokens.append(first.token_id)
            async for event in decode.decode(attempt.attempt_id, first.token_id):
                tokens += event.token_ids
        finally:
            for client in (prefill, decode):
                await client.cancel(attempt.attempt_id)
        return tokens


def parts_of(running: TestFleet, fingerprint: Fingerprint = FINGERPRINT) -> HostParts:
    clients = {name: member.client for name, member in running.members.items()}
    return HostParts("host-a", clients, fingerprint, lambda peers: None, lambda ids: None)  # type: ignore[arg-type, return-value]


async def start_server(
    running: TestFleet, security: Security = OPEN, fingerprint: Fingerprint = FINGERPRINT
) -> tuple[HostServer, FakePlace]:
    service = WorkerService(parts_of(running, fingerprint), silence_seconds=1.5)
    server = HostServer(service, security)
    port = await server.start("127.0.0.1")
    return server, FakePlace(f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def remote(security: Security = OPEN, **options: object) -> AsyncIterator[Remote]:
    async with fleet(**options) as running:
        server, place = await start_server(running, security)
        connection = HostConnection(place, FINGERPRINT, security)
        await connection.start()
        try:
            yield Remote(running, server, place, connection)
        finally:
            await connection.stop()
            await server.stop(0.0)


async def test_tokens_errors_and_statuses_are_those_of_the_worker() -> None:
    async with remote(security=Security(token="secret")) as far:
        attempts = [attempt_of(range(5, 5 + length), 9) for length in (1, 4, 7, 20, 33)]
        answers = await asyncio.gather(*(far.run(attempt) for attempt in attempts))
        assert answers == [reference(attempt) for attempt in attempts]
        decode = far.client("decode-0")
        with pytest.raises(UnknownAttemptError):
            await anext(aiter(decode.decode("nobody", 5)))
        with pytest.raises(RequestError) as refused:
            await decode.reserve(attempt_of([1], 1000))
        assert refused.value.field == "max_tokens" and refused.value.value == 1000
        with pytest.raises(WorkerError, match="reserves nothing"):
            await far.client("prefill-0").reserve(attempt_of([1]))
        await far.fleet.assert_at_rest()
        changes = await decode.prefix_changes("", 0)
        assert changes == await far.fleet["decode-0"].client.prefix_changes("", 0)
        await asyncio.sleep(0.6)
        for name in far.fleet.members:
            status = await far.client(name).status()
            assert status.host == "host-a"
            assert replace(status, last_step_time=0, host="") == replace(
                far.fleet[name].status, last_step_time=0
            )
            assert abs(status.last_step_time - far.fleet[name].status.last_step_time) < 0.1


async def test_deadlines_cross_the_wire() -> None:
    async with remote() as far:
        far.fleet["prefill-0"].prefill.before_step = lambda: time.sleep(0.02)  # type: ignore[union-attr]
        attempt = attempt_of(range(5, 90), 9, deadline=time.monotonic() + 0.1)
        with pytest.raises(DeadlineError):
            await far.run(attempt)
        await far.fleet.assert_at_rest()


async def test_leaving_a_call_frees_all_that_it_held() -> None:
    async with remote(slots=2) as far:
        far.fleet["decode-0"].decode.before_step = lambda: time.sleep(0.005)  # type: ignore[union-attr]
        for _ in range(3):
            tasks = [asyncio.create_task(far.run(attempt_of(range(40), 60))) for _ in range(5)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await far.fleet.assert_at_rest()
        attempt = attempt_of(range(40), 5)
        assert await far.run(attempt) == reference(attempt)


async def test_freed_room_is_told_at_once() -> None:
    async with remote(slots=1) as far:
        decode, freed = far.client("decode-0"), asyncio.Event()
        decode.on_room(freed.set)
        first = attempt_of([5, 6], attempt_id="first")
        assert isinstance(await decode.reserve(first), Reservation)
        assert await decode.reserve(attempt_of([7])) is None
        freed.clear()
        started = time.monotonic()
        await decode.cancel("first")
        await asyncio.wait_for(freed.wait(), 2)
        assert time.monotonic() - started < 0.2


@pytest.mark.parametrize("silently", [False, True])
async def test_a_cut_link_is_noticed_in_time_and_mended_with_nothing_held(silently: bool) -> None:
    async with fleet() as running:
        server, place = await start_server(running)
        running["decode-0"].decode.before_step = lambda: time.sleep(0.01)  # type: ignore[union-attr]
        async with TcpLink(place.address or "") as link:
            connection = HostConnection(FakePlace(link.address), FINGERPRINT, OPEN)
            far = Remote(running, server, place, connection)
            await connection.start()
            streams = [asyncio.create_task(far.run(attempt_of(range(9), 110))) for _ in range(2)]
            await asyncio.sleep(0.3)
            cut = time.monotonic()
            link.cut(silently)
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert time.monotonic() - cut < 2.0
            assert all(isinstance(end, WorkerLostError) for end in ends), ends
            with pytest.raises(WorkerLostError):
                await far.client("decode-0").status()
            await running.assert_at_rest()  # the host, too, has noticed
            link.mend()
            await eventually_up(far)
            attempt = attempt_of(range(20), 5)
            assert await far.run(attempt) == reference(attempt)
            await connection.stop()
        await server.stop(0.0)


async def eventually_up(far: Remote, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(WorkerLostError):
            await far.client("decode-0").status()
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the host did not come back")


@pytest.mark.field_report("C04")
async def test_a_host_that_comes_back_elsewhere_is_found() -> None:
    async with remote() as far:
        await far.server.stop(0.0)
        far.place.address, far.place.reason = None, "its process ended with status -9"
        await asyncio.sleep(0.2)
        with pytest.raises(WorkerLostError, match="status -9"):
            await far.client("decode-0").status()
        far.server, place = await start_server(far.fleet)
        far.place.address = place.address
        await eventually_up(far)
        attempt = attempt_of(range(20), 5)
        assert await far.run(attempt) == reference(attempt)


async def test_another_model_or_release_is_refused_with_both_values() -> None:
    async with fleet() as running:
        server, place = await start_server(running)
        for change, shown in (
            ({"page_size": 16}, "page_size = 4 here, 16 there"),
            ({"model": "other", "dtype": "bfloat16"}, "model = 'model' here, 'other' there"),
        ):
            connection = HostConnection(place, replace(FINGERPRINT, **change), OPEN)
            await connection.start()
            with pytest.raises(WorkerLostError, match=shown):
                await RemoteClient("decode-0", "decode", connection).status()
            await connection.stop()
        await server.stop(0.0)


async def test_a_caller_without_the_token_is_refused() -> None:
    async with fleet() as running:
        server, place = await start_server(running, Security(token="right"))
        for token in ("", "wrong"):
            connection = HostConnection(place, FINGERPRINT, Security(token=token))
            await connection.start()
            with pytest.raises(WorkerLostError, match="unauthenticated: the token is missing"):
                await RemoteClient("decode-0", "decode", connection).status()
            await connection.stop()
        await server.stop(0.0)


async def test_h05_an_idle_connection_serves_at_once() -> None:
    """Idle longer than the limit after which the other end would count as lost."""
    async with fleet() as running:
        service = WorkerService(parts_of(running), silence_seconds=0.6)
        server = HostServer(service, OPEN)
        place = FakePlace(f"127.0.0.1:{await server.start('127.0.0.1')}")
        connection = HostConnection(place, FINGERPRINT, Security(), silence_seconds=0.6)
        await connection.start()
        session = connection.session("decode-0")
        far = Remote(running, server, place, connection)
        await asyncio.sleep(1.3)
        for length in range(1, 6):
            attempt = attempt_of(range(3, 3 + length), 4)
            assert await far.run(attempt) == reference(attempt)
        assert connection.session("decode-0") is session, "it was never lost"
        await connection.stop()
        await server.stop(0.0)


async def test_a_drain_lasts_until_others_have_read_their_kv() -> None:
    async with fleet() as running:
        kept = [2]
        parts = replace(parts_of(running), num_kv_kept=lambda: kept[0])
        server = HostServer(WorkerService(parts), OPEN)
        place = FakePlace(f"127.0.0.1:{await server.start('127.0.0.1')}")
        connection = HostConnection(place, FINGERPRINT, OPEN)
        await connection.start()
        client = RemoteClient("prefill-0", "prefill", connection)
        draining = asyncio.create_task(client.drain())
        await asyncio.sleep(0.3)
        assert not draining.done()
        kept[0] = 0
        await asyncio.wait_for(draining, 2)
        with pytest.raises(WorkerError, match="its executables are those of prefill"):
            await client.set_role("decode")
        assert (await client.status()).draining
        await client.set_role("prefill")
        assert not (await client.status()).draining, "it is heard of with the answer"
        attempt = attempt_of(range(20), 5)
        assert await Remote(running, server, place, connection).run(attempt) == reference(attempt)
        await connection.stop()
        await server.stop(0.0)
