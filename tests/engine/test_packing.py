"""Several prompts in one chunk: what shares it, and that nobody notices."""

import random

import numpy as np
import pytest

from jpd.engine.buckets import ChunkLayout
from jpd.engine.packing import pack
from jpd.engine.prefill import PrefillDone, PrefillTask
from jpd.request import SamplingParams
from tests.engine.rig import PAGE, Rig, random_prompt, rig, run_prefill

SMALL, CUT, LARGE = ChunkLayout(1, 16), ChunkLayout(4, 16), ChunkLayout(4, 64)
LAYOUTS = (SMALL, CUT, LARGE)
CHUNK = 64  # as four rows of a page
MODELS = (
    "gemma3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "gpt_oss", "deepseek_v3")),
)


def as_large(layout: ChunkLayout) -> float:
    """Seconds on a device that is bound by its weights: every call takes as long."""
    return 1.0


def as_tokens(layout: ChunkLayout) -> float:
    """Seconds on a device that is bound by arithmetic."""
    return float(layout.num_tokens)


@pytest.mark.parametrize(
    ("num_left", "seconds", "layout", "num_tokens"),
    [
        ([1000], as_tokens, LARGE, (256,)),
        ([1000, 5], as_tokens, LARGE, (256,)),
        ([200, 5], as_large, LARGE, (200,)),  # the last row is not full, but nobody fits into it
        ([130, 5], as_large, LARGE, (130, 5)),
        ([10], as_large, LARGE, (10,)),  # all as fast: the largest
        ([10], as_tokens, SMALL, (10,)),
        ([10, 10], as_tokens, SMALL, (10,)),
        ([10, 10, 10, 10, 10], as_large, LARGE, (10, 10, 10, 10)),
        ([16, 16, 16, 16], as_tokens, CUT, (16, 16, 16, 16)),
        ([20, 40, 100], as_tokens, CUT, (20, 32)),
        ([17, 1], as_tokens, CUT, (17, 1)),  # never cut where a larger layout holds it
    ],
)
def test_the_layout_that_computes_most_per_second(num_left, seconds, layout, num_tokens) -> None:  # type: ignore[no-untyped-def]
    found = pack(num_left, LAYOUTS, seconds)
    assert (found.layout, found.num_tokens) == (layout, num_tokens)


def test_g11_chunks_are_full_while_work_is_queued() -> None:
    """Chunks of 64 in four rows: of a tail only its own row's rest is lost."""
    left, sizes = [70, 200, 200], []
    while left:
        packing = pack(left, (CUT,), as_tokens)
        sizes.append(sum(packing.num_tokens))
        taken = (*packing.num_tokens, *[0] * len(left))
        left = [n - t for n, t in zip(left, taken, strict=False) if n > t]
    assert sum(sizes) == 470
    assert min(sizes[:-1]) >= 64 - 15
    assert sum(sizes[:-1]) >= 0.9 * 64 * (len(sizes) - 1)


def test_every_prompt_is_computed_once_in_any_layout() -> None:
    rng = random.Random(0)
    for _ in range(500):
        left = [rng.randint(1, 300) for _ in range(rng.randint(1, 6))]
        costs = {layout: rng.random() + 0.01 for layout in LAYOUTS}
        packing = pack(left, LAYOUTS, costs.__getitem__)
        rows = [-(-n // packing.layout.row_length) for n in packing.num_tokens]
        assert sum(rows) <= packing.layout.num_rows
        assert all(0 < n <= have for n, have in zip(packing.num_tokens, left, strict=False))
        whole = packing.num_tokens[:-1]
        assert list(whole) == left[: len(whole)], "only the last one is cut"


def task_of(on: Rig, name: str, length: int, **fields: object) -> PrefillTask:
    prompt = random_prompt(length, length)
    pages = fields.pop("page_ids", None) or on.take(length)
    sampling = fields.pop("sampling", SamplingParams(temperature=0.0, max_tokens=8))
    return PrefillTask(name, prompt, pages, fields.pop("cached", 0), sampling, **fields)  # type: ignore[arg-type]


def kv_of(on: Rig, task: PrefillTask) -> list[np.ndarray]:
    pages = [np.asarray(layer)[list(task.page_ids)] for layer in on.cache.layers]
    return [rows.reshape(-1, *rows.shape[2:])[: len(task.token_ids)] for rows in pages]


def assert_same_kv(on: Rig, task: PrefillTask, alone: list[np.ndarray]) -> None:
    for left, right in zip(kv_of(on, task), alone, strict=True):
        assert np.abs(left - right).max() < 5e-5


def alone_on(on: Rig, task: PrefillTask) -> tuple[PrefillDone, list[np.ndarray]]:
    done = run_prefill(on.prefill_engine(), task)[task.attempt_id]
    return done, kv_of(on, task)


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_alone(name: str) -> None:
    """Lengths around rows, pages and chunks, with the sampling of each."""
    on = rig(name, chunk=CHUNK)
    settings = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=1.0, seed=5, max_tokens=8),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=6, max_tokens=1),
    ]
    lengths = (5, 16, 17, 63, 64, 65, 150)
    tasks = [
        task_of(on, str(n), n, sampling=settings[i % 3], stop_token_ids=(n,))
        for i, n in enumerate(lengths)
    ]
    alone = {task.attempt_id: alone_on(on, task) for task in tasks}
    engine, chunks = on.prefill_engine(), []
    build = engine._build
    engine._build = lambda batch: chunks.append(batch) or build(batch)  # type: ignore[method-assign]
    packed = run_prefill(engine, *tasks)
    assert max(len(batch.parts) for batch in chunks) >= 3
    assert len(chunks) < sum(-(-n // CHUNK) for n in lengths)
    for task in tasks:
        done, kv = alone[task.attempt_id]
        assert packed[task.attempt_id].token_id == done.token_id
        assert packed[task.attempt_id].finish_reason == done.finish_reason
        assert_same_kv(on, task, kv)
        on.allocator.free(task.page_ids)


def test_a_cached_prefix_and_a_long_neighbour_in_one_chunk() -> None:
    on = rig("gemma3", chunk=CHUNK)
    cold, long = task_of(on, "cold", 70), task_of(on, "long", 200)
    (done, kv), (long_done, long_kv) = alone_on(on, cold), alone_on(on, long)
    fresh = on.take(70)
    pages = cold.page_ids[:3] + fresh[3:]
    warm = PrefillTask("warm", cold.token_ids, pages, 3 * PAGE, cold.sampling)
    packed = run_prefill(on.prefill_engine(), warm, long)
    assert packed["warm"].token_id == done.token_id
    assert packed["warm"].num_computed_tokens == 70 - 3 * PAGE
    assert packed["long"].token_id == long_done.token_id
    assert_same_kv(on, warm, kv)
    assert_same_kv(on, long, long_kv)
    for held in (cold.page_ids, long.page_ids, fresh):
        on.allocator.free(held)


def test_a12_a_neighbour_that_is_removed_changes_nobody() -> None:
    on = rig("llama3", chunk=CHUNK)
    tasks = [task_of(on, str(n), n) for n in (10, 30, 14)]
    alone = {task.attempt_id: alone_on(on, task) for task in tasks}
    engine = on.prefill_engine()
    for task in tasks:
        engine.add(task)
    assert engine.step() == []
    engine.remove("30")  # its part is on the device, between the others
    done = {one.attempt_id: one.token_id for _ in range(2) for one in engine.step()}
    assert done == {name: alone[name][0].token_id for name in ("10", "14")}
    assert not engine.has_work
    for task in tasks:
        on.allocator.free(task.page_ids)


def test_pages_leave_for_every_prompt_of_a_chunk() -> None:
    on = rig("llama3", chunk=CHUNK)
    on.pieces.clear()
    tasks = [task_of(on, str(n), n, destination="decode-0") for n in (10, 16, 150)]
    run_prefill(on.prefill_engine(**{"decode-0": on.wire_to(on)}), *tasks)
    for task in tasks:
        pieces = [piece for piece in on.pieces if piece.attempt_id == task.attempt_id]
        sent = [n for p in pieces for n in range(p.page_start, p.page_start + p.num_pages)]
        assert sent == list(range(len(task.page_ids)))
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        on.allocator.free(task.page_ids)
