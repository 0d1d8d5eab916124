"""Random protobufs and spoilt records for every method of the service between router and host."""

import asyncio
import contextlib
from random import Random
from typing import Any

import grpc
import pytest

from jpd.rpc import worker_pb2
from jpd.rpc.records import dump
from jpd.worker.protocol import Reservation
from jpd.worker.service import Peer, Peers
from tests.support.random_messages import RandomMessages
from tests.support.random_records import spoilt
from tests.worker.fleet import attempt_of
from tests.worker.paper import reference
from tests.worker.test_remote import FINGERPRINT, Remote, remote

WORKERS, IDS = ["prefill-0", "decode-0"], [f"attempt {number}" for number in range(4)]
NUM_EACH = 40
ENDLESS = ("Drain", "Watch")
"""One waits until the worker is drained, the other ends a session: no faults."""


def known_values(random: Random) -> dict[str, list[Any]]:
    """What lets a call get as far as the worker: a record is whole, or spoilt in one place."""
    records = {
        "attempt_record": [dump(attempt_of([5, 6, 7], attempt_id=name)) for name in IDS],
        "reservation_record": [dump(Reservation(name, "decode-0", 0)) for name in IDS],
        "peers_record": [dump(Peers((Peer("a", "127.0.0.1:1"),)))],
        "fingerprint_record": [dump(FINGERPRINT)],
    }
    values: dict[str, list[Any]] = {"worker": WORKERS, "attempt_id": IDS, "first_token_id": [5]}
    for name, whole in records.items():
        values[name] = [*whole * 20, *(spoilt(random, random.choice(whole)) for _ in range(200))]
    return values


async def throw(far: Remote, random: Random) -> None:
    """All that is drawn, one call after the other."""
    messages = RandomMessages(random.randrange(1 << 30), known_values(random))
    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerHost"]
    session = far.connection.session("decode-0").metadata
    async with grpc.aio.insecure_channel(far.place.address) as channel:
        for path, data in messages.calls(service, NUM_EACH):
            if path.endswith(ENDLESS):
                continue
            metadata = session if random.random() < 0.9 else ()
            call = channel.stream_stream(path)(iter([data]), timeout=0.2, metadata=metadata)
            with contextlib.suppress(grpc.RpcError):
                async for _ in call:
                    pass


async def test_random_calls_leave_the_host_as_it_was() -> None:
    async with remote() as far:
        await throw(far, Random(1))
        for name in WORKERS:
            assert far.fleet[name].status.healthy, far.fleet[name].status.reason
            for attempt_id in IDS:
                await far.client(name).cancel(attempt_id)
        await far.fleet.assert_at_rest()
        attempt = attempt_of(range(40), 5)
        async with asyncio.timeout(5):
            assert await far.run(attempt) == reference(attempt)


@pytest.mark.parametrize("seconds", [1e10, 1e12, 1e18])
async def test_a_deadline_may_be_in_a_million_years(seconds: float) -> None:
    """A gRPC client sets it. Locks wait for 292 years at most."""
    attempt = attempt_of(range(40), 5, deadline=seconds)
    async with remote() as far:
        assert await far.client("decode-0").reserve(attempt) is not None
        await asyncio.sleep(0.05)  # the worker has nothing to do but to wait for the deadline
        await far.client("decode-0").cancel(attempt.attempt_id)
        async with asyncio.timeout(5):
            assert await far.run(attempt) == reference(attempt)
