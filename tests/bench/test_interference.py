"""The interference benchmark on a server without a model: what it counts, and its picture."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jpd.bench.gap_plot import TITLE, draw_gaps
from jpd.bench.interference import (
    FULL,
    Gaps,
    deployments,
    gap_results,
    run,
)
from jpd.bench.report import write_report
from jpd.config import DeploymentConfig

EFFORT = replace(FULL, warm_seconds=0.05, alone_seconds=0.15, loaded_seconds=0.15, rounds=2)
STEP_SECONDS, STALL_SECONDS = 0.005, 0.05


class StallingServer:
    """Every stream stands still while a long prompt is there, where both share a worker."""

    def __init__(self, shares: bool) -> None:
        self._shares, self._num_prompts = shares, 0

    async def astream(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, ignore_eos: bool
    ) -> AsyncIterator[Any]:
        assert temperature == 0.0 and ignore_eos
        if len(prompt) == EFFORT.prompt_tokens:
            self._num_prompts += 1
            await asyncio.sleep(STALL_SECONDS)
            self._num_prompts -= 1
        for _ in range(max_tokens):
            await asyncio.sleep(STEP_SECONDS)
            while self._shares and self._num_prompts:
                await asyncio.sleep(STEP_SECONDS)
            yield SimpleNamespace(token_ids=(1,))


@contextlib.contextmanager
def launch(deployment: DeploymentConfig) -> Iterator[StallingServer]:
    yield StallingServer(deployment.workers[0].role == "colocated")


@pytest.fixture(scope="module")
def gaps() -> list[Gaps]:
    return run(launch, 100, (0, 1), EFFORT)


def test_modes_differ_in_roles_and_chunks_only() -> None:
    made = deployments((0, 1), FULL)
    assert [
        ([worker.role for worker in config.workers], config.engine.prefill_chunk)
        for config in made.values()
    ] == [
        (["prefill", "decode"], 128),
        (["colocated", "colocated"], 128),
        (["colocated", "colocated"], 2000),
    ]
    for config in made.values():
        assert [host.cores for host in config.hosts] == [(0,), (1,)]
        assert config.launch.kind == "subprocess" and config.engine.max_steps_per_call == 1


def test_what_the_load_costs_is_what_the_server_does(gaps: list[Gaps]) -> None:
    for mode in gaps:
        results = {result.name: result.value for result in gap_results(mode)}
        p50 = results[f"{mode.mode}: ITL p50, alone"]
        assert STEP_SECONDS * 1000 <= p50 < STALL_SECONDS * 1000
        longest = results[f"{mode.mode}: ITL longest, under load"]
        is_apart = mode.mode == "disaggregated"
        assert is_apart or longest >= STALL_SECONDS * 1000
        assert len(mode.prompts) >= 3
    targets = [result.target for mode in gaps for result in gap_results(mode) if result.target]
    assert targets == [1.2]


def test_the_picture_shows_every_mode(gaps: list[Gaps], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [result for mode in gaps for result in gap_results(mode)]
    png, page = write_report(tmp_path / "gaps", TITLE, draw_gaps(gaps), results)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text and all(result.name.split(":")[0] in text for result in results)
    assert "http://" not in text.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", ""), "the page needs no network"
