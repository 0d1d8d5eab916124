"""The soak over a real fleet in a pool that is always short: nothing compiles, nothing is left,
every request ends once, and an answer is what its request gets alone."""

import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import jpd
from jpd.api import Server
from jpd.bench.soak import Effort, Soak
from jpd.bench.soak_requests import Draw, Limits
from jpd.request import RequestState
from tests.launch.tiny_fleets import CHUNK, MAX_LEN, PAGE_SIZE, deployment, fleet_of, worker
from tests.support.tiny_tokenizer import VOCAB_SIZE, copy_with_tokenizer

pytestmark = pytest.mark.slow  # a fleet of its own is compiled

NUM_PAGES = 13  # one and a half sequences of full length for four slots, and the bin
SEED = 20
EFFORT = Effort(num_requests=100, num_alone=24)


@pytest.fixture(scope="module")
def server(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prefill apart and on the decode worker; rows begin with pages for one page of output."""
    golden, folder = repo / "tests" / "golden" / "llama3", tmp_path_factory.mktemp("model")
    config = deployment(worker("prefill-0", "prefill", [0]), worker("decode-0", "decode", [1]))
    config = replace(
        config,
        cache=replace(config.cache, pages=NUM_PAGES, retain_seconds=60.0, reserve_tokens=16),
        engine=replace(
            config.engine,
            context_buckets=(32, MAX_LEN),
            max_speculative_tokens=3,
            max_steps_per_call=4,
        ),
    )
    model = str(copy_with_tokenizer(golden, folder))
    with jpd.launch(model, config, can_prefill_locally=True) as server:
        yield server


def num_live_arrays() -> int:
    return len(jax.live_arrays())


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """An array that a cycle keeps would be device memory that is free only some day."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.field_report("G03", "H06")
def test_a_soak_leaves_nothing_and_changes_no_answer(
    server: Server, caplog: pytest.LogCaptureFixture, no_garbage_collector: None
) -> None:
    """Memory is counted in arrays here: the process has more in it than this server.

    Records that pytest keeps hold their errors, and those the arrays of their frames: none here."""
    caplog.set_level(logging.ERROR, logger="jpd")
    draw = Draw(SEED, Limits(MAX_LEN, VOCAB_SIZE, PAGE_SIZE, CHUNK))
    at_rest = num_live_arrays()
    soak = Soak(server, draw, EFFORT, num_live_arrays)
    results = {result.name: result for result in soak.run()}
    assert not soak.ledger.words
    kept = [result for result in results.values() if result.target is not None]
    assert len(kept) == 9
    assert all(result.ok for result in kept if not result.name.startswith("memory"))
    deadline = time.monotonic() + 5.0  # workers let go of their last step a moment after its answer
    while num_live_arrays() > at_rest and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_live_arrays() <= at_rest, "what is live at rest does not grow"
    assert results["requests"].value == 100 and results["requests refused as they must be"].value
    assert results["answers compared with those alone"].value == 24
    check_reports(server, soak.ledger.num_refused)


def check_reports(server: Server, num_refused: int) -> None:
    """What the metrics do not tell: the workers' own words, and each request's record."""
    for member in fleet_of(server).members:
        status = member.worker.status()
        assert (status.num_slots_used, status.num_pages_used) == (0, 0)
        assert (status.num_prefills_waiting, status.num_prefill_tokens_waiting) == (0, 0)
        assert status.num_transfers_in_flight == 0
    assert fleet_of(server).compile_counter.num_after_ready == 0
    value = server.metrics.value
    ended = server.trace.requests()
    assert len({request.request_id for request in ended}) == len(ended)
    for state in RequestState:
        count = sum(one.state is state for one in ended)
        count += num_refused if state is RequestState.FAILED else 0
        assert value("jpd:requests_total", outcome=state.value) == count
    assert value("jpd:preemptions_total", worker="decode-0") >= 1, "the pool was not short"
    assert value("jpd:prefix_cache_hit_tokens_total") > 0
    assert value("jpd:spec_decode_num_draft_tokens_total", worker="decode-0") > 0
