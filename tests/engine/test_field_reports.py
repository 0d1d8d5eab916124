"""Field reports D13, D14, G01 and G04: every lane, shared prefixes, no double work, no padding."""

from dataclasses import replace
from unittest import mock

import pytest

from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillTask
from jpd.request import SamplingParams
from tests.engine.pair import Pair
from tests.engine.rig import NUM_SLOTS, PAGE, generate, random_prompt, rig, run_decode, run_prefill

SAMPLING = SamplingParams(temperature=0.0, max_tokens=8)
LENGTHS = (20, 61, 9, 33)


@pytest.mark.field_report("D10")
@pytest.mark.parametrize("num_rows", range(1, NUM_SLOTS + 1))
def test_d13_every_lane_of_a_batch_is_right(num_rows: int) -> None:
    on, rows, wanted = rig("llama3"), [], {}
    for lane, length in enumerate(LENGTHS[:num_rows]):
        name, prompt = str(lane), random_prompt(length, length)
        wanted[name] = generate(on, prompt, SAMPLING)
        pages = on.take(length + 8)
        task = PrefillTask(name, prompt, pages, 0, SAMPLING)
        first = run_prefill(on.prefill_engine(), task)[name].token_id
        rows.append(DecodeRow(name, pages, first, prompt, SAMPLING))
    assert run_decode(on.decode_engine(), *rows) == wanted
    for row in rows:
        on.allocator.free(row.page_ids)


def test_d14_requests_that_share_a_prefix_in_one_batch_see_all_of_it() -> None:
    """One computes the prompt, two find it cached and share its pages; all are decoded together."""
    on, prompt = rig("llama3"), random_prompt(5, 70)
    wanted, engine = generate(on, prompt, SAMPLING), on.prefill_engine()
    whole = on.take(len(prompt) + 8)
    num_shared = 4 * PAGE
    done = run_prefill(engine, PrefillTask("0", prompt, whole, 0, SAMPLING))
    own = [on.take(len(prompt) + 8 - num_shared) for _ in range(2)]
    tables = [whole, *(whole[:4] + pages for pages in own)]
    done |= run_prefill(
        engine,
        *(PrefillTask(str(i), prompt, tables[i], num_shared, SAMPLING) for i in (1, 2)),
    )
    rows = [DecodeRow(str(i), tables[i], done[str(i)].token_id, prompt, SAMPLING) for i in range(3)]
    found = run_decode(on.decode_engine(), *rows)
    assert found == dict.fromkeys(("0", "1", "2"), wanted)
    for pages in (whole, *own):
        on.allocator.free(pages)


def test_g01_the_decode_side_computes_no_prompt_again() -> None:
    joined = Pair(rig("llama3"), rig("llama3", first_device=4))
    lengths, num_computed = (20, 61, 9, 33), []
    functions, step = joined.target.functions, joined.prefill.step

    def counted() -> object:
        done = step()
        num_computed.extend(one.num_computed_tokens for one in done)
        return done

    with (
        mock.patch.object(functions, "prefill", side_effect=AssertionError("a prompt again")),
        mock.patch.object(joined.prefill, "step", counted),
    ):
        for number, length in enumerate(lengths[: NUM_SLOTS - 1]):
            joined.add(str(number), random_prompt(length, length), replace(SAMPLING, max_tokens=4))
        joined.run()
    assert sum(num_computed) == sum(lengths[: NUM_SLOTS - 1])


@pytest.mark.parametrize("max_model_len", [2048, 8192, 40960])
def test_g04_short_rows_do_not_pay_for_the_longest_context(max_model_len: int) -> None:
    cache = CacheConfig(page_size=32)
    buckets = ShapeBuckets.from_config(EngineConfig(), cache, max_model_len)
    assert buckets.context_width(1000) * cache.page_size <= 2560
