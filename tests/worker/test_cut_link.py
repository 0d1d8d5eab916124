"""Hosts with addresses of their own, and a link between router and host that is cut and mended.

No request is lost and none is doubled: real router, real workers on fake engines, gRPC between.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from jpd.config import RouterConfig
from jpd.metrics import Metrics
from jpd.request import Request, SamplingParams, TokenOutput
from jpd.router.router import Router
from jpd.rpc.security import Security
from jpd.worker.connection import HostConnection
from jpd.worker.host_server import HostServer
from jpd.worker.remote import RemoteClient
from jpd.worker.service import HostParts, WorkerService
from tests.support.tcp_link import TcpLink
from tests.worker.fleet import TestFleet, attempt_of, fleet
from tests.worker.paper import reference
from tests.worker.test_remote import FINGERPRINT, FakePlace

HOSTS = {"127.0.0.2": "prefill-0", "127.0.0.3": "decode-0", "127.0.0.4": "decode-1"}
ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
SECURITY = Security(token="between us")


@dataclass
class Deployment:
    fleet: TestFleet
    router: Router
    links: dict[str, TcpLink]
    services: list[WorkerService]

    def num_held(self) -> int:
        """Attempts that the hosts would free if the router were gone."""
        sessions = [s for service in self.services for s in service._sessions._sessions.values()]
        return sum(len(session.attempts) for session in sessions)

    async def ask(self, number: int, max_tokens: int) -> list[TokenOutput]:
        now = time.monotonic()
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(range(number, number + 9)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
            arrival_time=now,
            deadline=now + 60,
        )
        async with contextlib.aclosing(self.router.generate(request)) as outputs:
            return [output async for output in outputs]

    def states(self) -> dict[str, str]:
        return {worker.name: worker.state for worker in self.router.health().workers}


@contextlib.asynccontextmanager
async def deployed() -> AsyncIterator[Deployment]:
    """Each worker on a host with an address of its own, each behind a link of its own."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(fleet(roles=ROLES, slots=8))
        links, clients, services = {}, [], []
        for address, worker in HOSTS.items():
            parts = HostParts(
                address,
                {worker: running[worker].client},
                FINGERPRINT,
                lambda peers: None,
                lambda ids: None,  # type: ignore[arg-type, return-value]
            )
            services.append(WorkerService(parts))
            server = HostServer(services[-1], SECURITY)
            port = await server.start(address)
            stack.push_async_callback(server.stop, 0.0)
            links[worker] = await stack.enter_async_context(TcpLink(f"{address}:{port}"))
            place = FakePlace(links[worker].address, name=address)
            connection = HostConnection(place, FINGERPRINT, SECURITY)
            stack.push_async_callback(connection.stop)
            clients.append(RemoteClient(worker, ROLES[worker], connection))  # type: ignore[arg-type]
        config = RouterConfig()
        router = Router(clients, config, (), Metrics(), max_model_len=128, page_size=4)
        await router.start()
        stack.push_async_callback(router.close)
        yield Deployment(running, router, links, services)


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    assert [output.finish_reason is not None for output in outputs].count(True) == 1
    return [token for output in outputs for token in output.token_ids]


def expected(number: int, max_tokens: int) -> list[int]:
    return reference(attempt_of(range(number, number + 9), max_tokens))


async def eventually(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("silently", [False, True])
async def test_c10_a_cut_link_to_a_decode_host_loses_and_doubles_nothing(silently: bool) -> None:
    async with deployed() as made:
        for worker in ("decode-0", "decode-1"):
            engine = made.fleet[worker].decode
            assert engine is not None
            engine.before_step = lambda: time.sleep(0.01)
        asked = [asyncio.create_task(made.ask(number, 60)) for number in range(8)]
        await asyncio.sleep(0.3)
        cut_time = time.monotonic()
        made.links["decode-0"].cut(silently)
        await eventually(lambda: made.states()["decode-0"] == "down", 2.0)
        assert time.monotonic() - cut_time < 2.0
        answers = await asyncio.gather(*asked)
        assert [tokens_of(answer) for answer in answers] == [expected(n, 60) for n in range(8)]
        paths = [answer[-1].timeline.path for answer in answers if answer[-1].timeline]
        assert any("replay" in path for path in paths), "somebody was on the cut host"
        made.links["decode-0"].mend()
        await eventually(lambda: set(made.states().values()) == {"up"})
        again = await asyncio.gather(*(made.ask(number, 20) for number in range(8)))
        assert [tokens_of(answer) for answer in again] == [expected(n, 20) for n in range(8)]
        assert {a[-1].timeline.decode_worker for a in again if a[-1].timeline} == {
            "decode-0",
            "decode-1",
        }
        await made.router.settle()
        await made.fleet.assert_at_rest()
        made.router.check_integrity()


async def test_a_cut_link_to_the_prefill_host_is_waited_out_or_refused() -> None:
    """There is no other to prefill: running streams end, new requests are refused at once."""
    async with deployed() as made:
        first = asyncio.create_task(made.ask(1, 60))
        await asyncio.sleep(0.2)
        made.links["prefill-0"].cut(silently=True)
        assert tokens_of(await first) == expected(1, 60)
        await eventually(lambda: made.states()["prefill-0"] == "down", 3.0)
        assert not made.router.health().is_ready
        made.links["prefill-0"].mend()
        await eventually(lambda: made.router.health().is_ready)
        assert tokens_of(await made.ask(2, 20)) == expected(2, 20)
        await made.router.settle()
        await made.fleet.assert_at_rest()


async def test_h05_five_requests_after_an_idle_time_in_which_the_link_was_cut() -> None:
    async with deployed() as made:
        assert tokens_of(await made.ask(1, 5)) == expected(1, 5)
        for link in made.links.values():
            link.cut(silently=True)
        await asyncio.sleep(2.0)
        for link in made.links.values():
            link.mend()
        await eventually(lambda: set(made.states().values()) == {"up"})
        for number in range(5):
            assert tokens_of(await made.ask(number, 5)) == expected(number, 5)


async def test_c11_h04_mass_cancellation_over_the_wire_leaves_nothing_held() -> None:
    async with deployed() as made:
        for _ in range(3):
            asked = [asyncio.create_task(made.ask(number, 60)) for number in range(60)]
            await asyncio.sleep(0.1)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        answers = await asyncio.gather(*(made.ask(number, 9) for number in range(20)))
        assert [tokens_of(answer) for answer in answers] == [expected(n, 9) for n in range(20)]
        await made.ask(1, 1)  # ends with its first token
        await made.router.settle()
        await made.fleet.assert_at_rest()
        assert made.num_held() == 0
