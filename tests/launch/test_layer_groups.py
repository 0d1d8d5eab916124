"""A fleet whose KV leaves layer group by layer group: the same tokens, over every form of wire."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jpd.checkpoint.model_source import open_model
from jpd.errors import TransferError
from jpd.launch.fleet import Fleet
from jpd.launch.inprocess import launch_workers
from jpd.transfer.faulty import Fault, FaultyTransfer
from tests.launch.tiny_fleets import CHUNK, PAGE_SIZE, client, deployment, generate, worker

pytestmark = pytest.mark.slow

Golden = list[tuple[list[int], list[int]]]
FAULTS = (
    Fault("corrupt", piece_index=3, attempt_id="corrupt"),
    Fault("raise", piece_index=1, attempt_id="raise"),
    Fault("drop", piece_index=2, attempt_id="drop"),
    Fault("delay", piece_index=0, attempt_id="delay", delay_seconds=0.2),
)


@pytest.fixture(scope="module")
def fleet(repo: Path) -> Iterator[Fleet]:
    """Of three layers a group of two and one of one, in slices to a finer split; quantised."""
    config = deployment(
        replace(worker("prefill-0", "prefill", [0]), page_size=CHUNK),
        worker("decode-0", "decode", [4, 5]),
        retain_seconds=60.0,
    )
    config = replace(
        config,
        cache=replace(config.cache, checksum=True, wire_dtype="int8"),
        engine=replace(config.engine, layer_groups=2),
        router=replace(config.router, send_back="always", transfer_timeout_seconds=2),
    )
    running = launch_workers(
        open_model(str(repo / "tests" / "golden" / "llama3")),
        config,
        transfer_wrapper=lambda inner: FaultyTransfer(inner, FAULTS),
    )
    yield running
    running.check_integrity()
    running.close()


async def tokens_of(fleet: Fleet, name: str, prompt: list[int]) -> list[int]:
    tokens, _, _ = await generate(fleet, name, prompt, 12, prefill="prefill-0", decode="decode-0")
    return tokens


@pytest.fixture(scope="module")
def golden(repo: Path) -> Golden:
    """Prompts, and their greedy tokens; int8 does not move those of this model."""
    arrays = dict(np.load(repo / "tests" / "golden" / "llama3" / "expected.npz"))
    greedy = arrays["greedy"][:, :12].tolist()
    return list(zip(arrays["prompts"].tolist(), greedy, strict=True))


async def test_decode_waits_for_a_group_that_is_late(fleet: Fleet, golden: Golden) -> None:
    prompt, greedy = golden[0]
    assert await tokens_of(fleet, "delay", prompt) == greedy


async def test_tokens_are_those_of_the_reference(fleet: Fleet, golden: Golden) -> None:
    for number, (prompt, greedy) in enumerate(golden):
        assert await tokens_of(fleet, f"golden-{number}", prompt) == greedy
    for num_tokens in (1, PAGE_SIZE - 1, PAGE_SIZE, CHUNK, CHUNK + 1, 100):
        await tokens_of(fleet, f"length-{num_tokens}", [7] * num_tokens)
    assert fleet.compile_counter.num_after_ready == 0


@pytest.mark.parametrize("name", ["corrupt", "raise", "drop"])
async def test_a_group_that_is_broken_or_lost_fails_the_attempt(fleet: Fleet, name: str) -> None:
    prompt = [ord(name[0]), *range(3, 80)]
    with pytest.raises(TransferError, match="KV pages of drop" if name == "drop" else "worker"):
        await tokens_of(fleet, name, prompt)
    assert (await client(fleet, "decode-0").status()).num_slots_used == 0
