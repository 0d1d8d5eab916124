"""Small deployments of the golden checkpoints, with few shapes to compile."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from jpd.api import Server
from jpd.config import (
    CacheConfig,
    DeploymentConfig,
    EngineConfig,
    HostConfig,
    RouterConfig,
    WorkerConfig,
)
from jpd.launch.fleet import Fleet
from jpd.mesh_file import resolve_platform
from jpd.request import SamplingParams
from jpd.worker.client import InProcessClient
from jpd.worker.protocol import Attempt, DecodeEvent, PrefillResult

PAGE_SIZE, CHUNK, MAX_LEN = 16, 32, 128
NUM_PAGES = 33  # four sequences of full length, and the bin


def worker(name: str, role: str, devices: Sequence[int], *, slots: int = 4) -> WorkerConfig:
    slots = 0 if role == "prefill" else slots
    return WorkerConfig(name, role, "host", tuple(devices), 1, len(devices), 1, slots)


def deployment(*workers: WorkerConfig, retain_seconds: float = 0.0) -> DeploymentConfig:
    """retain_seconds 0: no prompt finds its prefix from an earlier one."""
    config = DeploymentConfig(
        file="tiny.toml",
        hosts=(HostConfig("host", "cpu", 8),),
        workers=workers,
        cache=CacheConfig(PAGE_SIZE, "float32", NUM_PAGES, retain_seconds=retain_seconds),
        engine=EngineConfig(MAX_LEN, CHUNK, (CHUNK,), (MAX_LEN,), "float32"),
        router=RouterConfig(transfer_timeout_seconds=10),
        slos=(),
    )
    return resolve_platform(config)


def with_hosts(config: DeploymentConfig, *hosts: HostConfig) -> DeploymentConfig:
    return replace(config, hosts=hosts)


def fleet_of(server: Server) -> Fleet:
    """The workers behind a server of `jpd.launch`."""
    fleet = server._fleet
    assert isinstance(fleet, Fleet)
    return fleet


def client(fleet: Fleet, name: str) -> InProcessClient:
    return next(client for client in fleet.clients if client.name == name)


async def generate(
    fleet: Fleet,
    attempt_id: str,
    token_ids: Sequence[int],
    max_tokens: int,
    *,
    prefill: str,
    decode: str,
) -> tuple[list[int], PrefillResult, DecodeEvent]:
    """Greedy tokens of one attempt, how its prefill went, and the first event of its decode."""
    attempt = Attempt(
        attempt_id,
        tuple(int(token) for token in token_ids),
        SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
        (),
    )
    decoder = client(fleet, decode)
    while (reservation := await decoder.reserve(attempt)) is None:
        await asyncio.sleep(0.002)
    try:
        first = await client(fleet, prefill).prefill(attempt, reservation)
        tokens, events = [first.token_id], []
        async for event in decoder.decode(attempt_id, first.token_id):
            tokens += event.token_ids
            events.append(event)
        return tokens, first, events[0]
    finally:
        for name in {prefill, decode}:
            await client(fleet, name).cancel(attempt_id)
