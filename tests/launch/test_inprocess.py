"""The embedded launcher on tiny checkpoints: real workers, real engines, real transfers."""

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from jax._src.array import ArrayImpl

from jpd.checkpoint.model_source import open_model
from jpd.launch.fleet import Fleet
from jpd.launch.inprocess import launch_workers
from jpd.transfer.faulty import Fault, FaultyTransfer
from tests.launch.tiny_fleets import CHUNK, MAX_LEN, client, deployment, generate, worker

FLEETS = {
    # KV in 1 part, in 2 parts, and computed on the decode worker itself
    "llama3": (
        worker("split-0", "prefill", [1, 2]),
        worker("whole-0", "prefill", [0]),
        worker("decode-0", "decode", [4, 5]),
    ),
    # one KV head: both sides hold whole copies of it on each device
    "gemma3": (worker("split-0", "prefill", [1, 2]), worker("decode-0", "decode", [4])),
}
SOURCES = [
    ("llama3", "split-0"),
    ("llama3", "whole-0"),
    ("llama3", "decode-0"),
    ("gemma3", "split-0"),
    ("gemma3", "decode-0"),
]
numbers = itertools.count()


@pytest.fixture(scope="module")
def fleets(repo: Path) -> Iterator[dict[str, Fleet]]:
    """The second piece of attempts named `broken` is corrupted in flight: after the first chunk."""
    fault = Fault("corrupt", piece_index=1, attempt_id="broken")
    running = {
        name: launch_workers(
            open_model(str(repo / "tests" / "golden" / name)),
            deployment(*workers),
            transfer_wrapper=lambda inner: FaultyTransfer(inner, [fault]),
            can_prefill_locally=True,
        )
        for name, workers in FLEETS.items()
    }
    yield running
    for fleet in running.values():
        fleet.check_integrity()
        assert [m.worker.status().num_pages_used for m in fleet.members] == [0] * len(fleet.members)
        fleet.close()


@pytest.fixture(scope="module")
def expected(repo: Path) -> dict[str, dict[str, np.ndarray]]:
    files = {name: repo / "tests" / "golden" / name / "expected.npz" for name in FLEETS}
    return {name: dict(np.load(path)) for name, path in files.items()}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * length + seed).integers(3, 150, length).tolist()


async def tokens_of(
    fleet: Fleet, prompt: list[int], max_tokens: int, prefill: str, name: str = ""
) -> list[int]:
    name = name or f"attempt-{next(numbers)}"
    tokens, _, _ = await generate(
        fleet, name, prompt, max_tokens, prefill=prefill, decode="decode-0"
    )
    return tokens


@pytest.mark.field_report("D09", "D11")  # gemma3: windows of 16, every sixth layer without
@pytest.mark.parametrize(("model", "prefill"), SOURCES)
async def test_tokens_are_those_of_the_reference_implementation(
    fleets: dict[str, Fleet], expected: dict[str, dict[str, np.ndarray]], model: str, prefill: str
) -> None:
    golden = expected[model]
    num_tokens = golden["greedy"].shape[1]
    outputs = await asyncio.gather(
        *(
            generate(
                fleets[model],
                f"{prefill}-{row}",
                prompt,
                num_tokens,
                prefill=prefill,
                decode="decode-0",
            )
            for row, prompt in enumerate(golden["prompts"])
        )
    )
    for (tokens, first, event), greedy in zip(outputs, golden["greedy"], strict=True):
        assert tokens == greedy.tolist()
        assert first.num_computed_tokens == golden["prompts"].shape[1]
        assert (event.kv_bytes > 0) == (prefill != "decode-0")


@pytest.mark.parametrize("model", FLEETS)
def test_logits_are_those_of_the_reference_implementation(
    fleets: dict[str, Fleet], expected: dict[str, dict[str, np.ndarray]], model: str
) -> None:
    found = fleets[model].logits(expected[model]["prompts"][0].tolist())
    assert np.abs(found - expected[model]["logits"][0]).max() < 2e-4


@pytest.mark.parametrize(("model", "prefill"), [("llama3", "whole-0"), ("gemma3", "split-0")])
async def test_a05_and_a14_prompts_at_the_borders_of_pages_and_chunks(
    fleets: dict[str, Fleet], model: str, prefill: str
) -> None:
    fleet = fleets[model]
    for length in (1, 15, 16, 17, 31, 32, 33, 64, 65, 100):
        prompt = prompt_of(length)
        coupled = await tokens_of(fleet, prompt, 20, "decode-0")
        apart, first, event = await generate(
            fleet, f"apart-{length}", prompt, 20, prefill=prefill, decode="decode-0"
        )
        assert apart == coupled, f"prompt of {length}"
        assert first.num_computed_tokens == length
        num_pages = -(-length // 16)
        assert event.kv_bytes == num_pages * fleet_page_bytes(fleet, model), "a page too many"


def fleet_page_bytes(fleet: Fleet, model: str) -> int:
    config = open_model(str(Path(__file__).parents[1] / "golden" / model)).config
    return config.num_layers * config.num_cached_heads * config.kv_width * 4 * 16


@pytest.mark.parametrize("model", FLEETS)
async def test_a_page_corrupted_in_flight_gives_other_tokens(
    fleets: dict[str, Fleet], model: str
) -> None:
    prompt = prompt_of(40)
    whole = await tokens_of(fleets[model], prompt, 20, "split-0")
    assert await tokens_of(fleets[model], prompt, 20, "split-0", name="broken") != whole
    assert await tokens_of(fleets[model], prompt, 20, "split-0") == whole


@contextmanager
def fetched_shapes() -> Iterator[set[tuple[int, ...]]]:
    """Shapes of all arrays whose values any thread fetched to the host."""
    shapes: set[tuple[int, ...]] = set()
    value = ArrayImpl._value.fget

    def fetch(array: ArrayImpl) -> np.ndarray:
        shapes.add(array.shape)
        return value(array)

    with mock.patch.object(ArrayImpl, "_value", property(fetch)):
        yield shapes


async def test_nothing_but_tokens_is_fetched_and_nothing_compiles(
    fleets: dict[str, Fleet],
) -> None:
    fleet = fleets["llama3"]
    before = fleet.compile_counter.num_compilations
    with fetched_shapes() as shapes:
        for length in range(1, MAX_LEN - 2, 3):
            source = ("split-0", "whole-0", "decode-0")[length // 3 % 3]
            await tokens_of(fleet, prompt_of(length), 2, source)
    assert shapes == {(1,), (1, 1)}, "results by row: counts and outcomes [1], tokens [1, 1]"
    assert fleet.compile_counter.num_compilations == before


async def test_a_compilation_after_ready_is_told_once_and_that_of_a_check_never(
    fleets: dict[str, Fleet],
) -> None:
    fleet = fleets["llama3"]

    async def told() -> int:
        statuses = [await client.status() for client in fleet.clients]
        return sum(status.num_compilations_after_ready for status in statuses)

    before = fleet.compile_counter.num_after_ready  # what another fleet of this process compiled
    await asyncio.to_thread(fleet.logits, prompt_of(40))
    assert fleet.compile_counter.num_after_ready == before
    with mock.patch.object(type(fleet.compile_counter), "num_after_ready", 1):
        await tokens_of(fleet, prompt_of(40), 2, "split-0")
        await tokens_of(fleet, prompt_of(40), 2, "whole-0")
        await tokens_of(fleet, prompt_of(40), 2, "decode-0")
        assert await told() == 1
    await tokens_of(fleet, prompt_of(40), 2, "split-0")


async def test_a18_cancelling_everything_leaves_a_working_fleet(fleets: dict[str, Fleet]) -> None:
    fleet, chance = fleets["llama3"], random.Random(3)
    probe = await tokens_of(fleet, prompt_of(50), 10, "split-0")
    for _ in range(2):
        tasks = [
            asyncio.ensure_future(tokens_of(fleet, prompt_of(chance.randrange(1, 90)), 30, source))
            for source in ("split-0", "whole-0", "decode-0") * 4
        ]
        for task in tasks:
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await tokens_of(fleet, prompt_of(50), 10, "split-0") == probe
    await asyncio.to_thread(fleet.check_integrity)


async def test_batch_mates_do_not_change_a_rows_tokens(fleets: dict[str, Fleet]) -> None:
    """Four rows at different depths join and leave while one is decoded."""
    fleet = fleets["gemma3"]
    prompt = prompt_of(2 * CHUNK)
    alone = await tokens_of(fleet, prompt, 40, "split-0")
    mates = [tokens_of(fleet, prompt_of(5 + 9 * i), 3 + 4 * i, "split-0") for i in range(6)]
    together, *_ = await asyncio.gather(tokens_of(fleet, prompt, 40, "split-0"), *mates)
    assert together == alone


async def test_status_names_what_the_worker_can(fleets: dict[str, Fleet]) -> None:
    status = await client(fleets["llama3"], "decode-0").status()
    assert (status.num_pages, status.num_slots, status.can_prefill) == (32, 4, True)
    status = await client(fleets["llama3"], "whole-0").status()
    assert (status.num_pages, status.num_slots, status.role) == (32, 0, "prefill")
