"""A second turn whose beginning only the decode worker has: appended, sent back or computed again.

Real engines, with other tensor sizes on either side: the same tokens by all ways, and no byte more
than is missing.
"""

import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from jpd.checkpoint.model_source import open_model
from jpd.config import RouterConfig, SendBackPolicy
from jpd.launch.fleet import Fleet
from jpd.launch.inprocess import launch_workers
from jpd.metrics import Metrics
from jpd.request import Request, SamplingParams, Timeline
from jpd.router.rates import Line, RateBook, RateSeed
from jpd.router.router import Router
from tests.launch.tiny_fleets import MAX_LEN, PAGE_SIZE, deployment, worker

NUM_FIRST, NUM_ANSWER, NUM_NEXT = 40, 20, 5
KNOWN_ON_PREFILL, KNOWN_ON_DECODE = 32, 48  # of 40 prompt tokens; of those and 19 answer tokens
SLOW_PREFILL = RateSeed(prefill=Line(0.0, 1.0), link=Line(1e-3, 1e-12), kv_bytes_per_token=1.0)
"""Sending back is worth it, by rates that stay as they are."""


@pytest.fixture(scope="module")
def fleet(golden_llama3: Path) -> Iterator[Fleet]:
    workers = worker("prefill-0", "prefill", [0]), worker("decode-0", "decode", [2, 3])
    config = deployment(*workers, retain_seconds=60.0)
    fleet = launch_workers(open_model(str(golden_llama3)), config, can_prefill_locally=True)
    yield fleet
    assert fleet.compile_counter.num_after_ready == 0
    fleet.check_integrity()
    fleet.close()


@pytest.fixture(scope="module")
def page_bytes(golden_llama3: Path) -> int:
    config = open_model(str(golden_llama3)).config
    return config.num_layers * config.num_cached_heads * config.kv_width * 4 * PAGE_SIZE


async def turn(
    router: Router, prompt: list[int], num_tokens: int, **fields: object
) -> tuple[list[int], Timeline]:
    now, tokens, timeline = time.monotonic(), [], None
    request = Request(
        request_id=f"turn-{len(prompt)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        arrival_time=now,
        deadline=now + 60,
        **fields,
    )
    async with aclosing(router.generate(request)) as outputs:
        async for output in outputs:
            tokens += output.token_ids
            timeline = output.timeline or timeline
    assert timeline is not None
    return tokens, timeline


@pytest.mark.field_report("G09", "G10")
@pytest.mark.parametrize(
    ("send_back", "is_apart", "num_cached", "num_back", "num_forward"),
    [
        ("cost", True, KNOWN_ON_DECODE, 1, 2),
        ("always", True, KNOWN_ON_DECODE, 1, 2),
        ("never", True, KNOWN_ON_PREFILL, 0, 2),
        ("cost", False, KNOWN_ON_DECODE, 0, 0),
    ],
    ids=["sent-back-by-cost", "sent-back", "computed-again", "appended"],
)
async def test_the_tokens_of_a_second_turn_and_the_bytes_it_moves(
    fleet: Fleet,
    page_bytes: int,
    send_back: SendBackPolicy,
    is_apart: bool,
    num_cached: int,
    num_back: int,
    num_forward: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RateBook, "_see", lambda *measured: None)
    draw = np.random.default_rng([num_cached, num_back, len(send_back)])
    first, more = draw.integers(3, 150, (2, NUM_FIRST)).tolist()
    metrics = Metrics()
    router = Router(
        fleet.clients,
        RouterConfig(send_back=send_back),
        (),
        metrics,
        max_model_len=MAX_LEN,
        page_size=PAGE_SIZE,
        seeds=dict.fromkeys(("prefill-0", "decode-0"), SLOW_PREFILL),
    )
    await router.start()
    try:
        answer, _ = await turn(router, first, NUM_ANSWER, session_id="s", disaggregate=True)
        prompt = [*first, *answer, *more[:NUM_NEXT]]
        naive, _ = await turn(router, prompt, 8, cache_salt="naive", disaggregate=False)
        tokens, timeline = await turn(router, prompt, 8, session_id="s", disaggregate=is_apart)
        assert tokens == naive
        assert timeline.num_cached_tokens == num_cached
        assert timeline.sent_back_kv_bytes == num_back * page_bytes
        assert timeline.kv_bytes == num_forward * page_bytes
        assert ("send_back" in timeline.path) == ("send_back" in timeline.cost_ms) == bool(num_back)
        assert metrics.value("jpd:kv_sent_back_total", outcome="sent") == num_back
    finally:
        await router.close()
