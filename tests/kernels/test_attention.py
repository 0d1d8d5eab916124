"""Every way of paged attention that runs here against a dense one in numpy that knows no pages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.kernels import batch_attention
from jpd.kernels.attention import paged_attention, write_pages
from jpd.kernels.batch_attention import attend_rows_at_once
from jpd.kernels.block_attention import KEYS_PER_BLOCK, QUERIES_PER_BLOCK, attend_in_blocks
from jpd.kernels.reference_attention import attend_all
from jpd.kernels.scores import AttentionSettings

PAGE_SIZE, KV_HEADS, GROUP, HEAD = 8, 2, 3, 4
WAYS: dict[str, Callable[..., jax.Array]] = {
    "all": attend_all,
    "blocks": attend_in_blocks,
    "rows_at_once": attend_rows_at_once,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tables are several blocks of 128 keys, as on an accelerator with far longer ones."""
    monkeypatch.setattr(batch_attention, "NUMBERS_PER_BLOCK", 1)


@dataclass(frozen=True)
class Case:
    """Rows that have `starts` tokens in the cache and add `counts`, padded to `width`."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    width: int
    pages_per_row: int
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False


LONG = 6 * KEYS_PER_BLOCK // PAGE_SIZE + 5  # pages of a row: six blocks and a bit

CASES = {
    "decode": Case((7, 0, 30), (1, 1, 1), 1, 4),
    "decode_beside_idle_rows": Case((7, 0, 0), (1, 0, 0), 1, 4),
    "decode_over_blocks": Case((600, 255, 256, 30), (1, 1, 1, 1), 1, LONG),
    "decode_window_over_blocks": Case((600, 255, 256, 30), (1, 1, 1, 1), 1, LONG, window=100),
    "decode_window_of_one": Case((600, 0), (1, 1), 1, LONG, window=1),
    "chunk": Case((0, 8, 3), (16, 5, 16), 16, 4),
    "chunk_over_blocks": Case((500, 0), (100, 60), 100, LONG),
    "chunk_window_over_blocks": Case((500, 0), (100, 60), 100, LONG, window=37),
    "chunk_wider_than_a_block": Case((11,), (300,), 2 * QUERIES_PER_BLOCK + 51, LONG),
    "chunk_of_padding": Case((500, 9), (3, 0), QUERIES_PER_BLOCK + 16, LONG, window=20),
    "softcap": Case((7, 0), (9, 16), 16, 4, softcap=2.0),
    "sinks": Case((300, 0), (9, 16), 16, LONG, sinks=True),
    "all_at_once": Case((500, 0), (9, 16), 16, LONG, window=300, softcap=3.0, sinks=True),
}


@dataclass(frozen=True)
class Inputs:
    queries: np.ndarray  # [B, T, K, G, H]
    keys_values: np.ndarray  # [B, S, K, 2H]: in order of positions
    pages: np.ndarray
    page_table: np.ndarray
    positions: np.ndarray
    kv_lengths: np.ndarray
    sinks: np.ndarray | None


def make_inputs(case: Case, *, stale: float = 0.0) -> Inputs:
    """Pages in no order; whatever is not written holds `stale`."""
    rng = np.random.default_rng(0)
    rows, seq = len(case.starts), case.pages_per_row * PAGE_SIZE
    kv_lengths = np.array(case.starts) + np.array(case.counts)
    keys_values = rng.normal(size=(rows, seq, KV_HEADS, 2 * HEAD)).astype(np.float32)
    written = np.arange(seq) < kv_lengths[:, None]
    keys_values = np.where(written[..., None, None], keys_values, stale).astype(np.float32)
    ids = 1 + rng.permutation(rows * case.pages_per_row).reshape(rows, -1)
    pages = np.full((1 + ids.size, PAGE_SIZE, KV_HEADS, 2 * HEAD), stale, np.float32)
    pages[ids] = keys_values.reshape(rows, -1, PAGE_SIZE, KV_HEADS, 2 * HEAD)
    used = -(-kv_lengths // PAGE_SIZE)
    page_table = np.where(np.arange(case.pages_per_row) < used[:, None], ids, 0)
    return Inputs(
        queries=rng.normal(size=(rows, case.width, KV_HEADS, GROUP, HEAD)).astype(np.float32),
        keys_values=keys_values,
        pages=pages,
        page_table=page_table.astype(np.int32),
        positions=(np.array(case.starts)[:, None] + np.arange(case.width)).astype(np.int32),
        kv_lengths=kv_lengths.astype(np.int32),
        sinks=rng.normal(size=(KV_HEADS, GROUP)).astype(np.float32) if case.sinks else None,
    )


def dense(case: Case, inputs: Inputs, row: int, query: int) -> np.ndarray:
    """One query's output [K, G, H], by the definition."""
    position = int(inputs.positions[row, query])
    first = 0 if case.window is None else max(0, position - case.window + 1)
    seen = inputs.keys_values[row, first : position + 1]
    scores = np.einsum("kgh,skh->kgs", inputs.queries[row, query], seen[..., :HEAD]) * 0.7
    if case.softcap:
        scores = np.tanh(scores / case.softcap) * case.softcap
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True)
    if inputs.sinks is not None:
        total = total + np.exp(inputs.sinks)[..., None]
    out: np.ndarray = np.einsum("kgs,skh->kgh", weights / total, seen[..., HEAD:])
    return out


def run(way: Callable[..., jax.Array], case: Case, inputs: Inputs) -> np.ndarray:
    settings = AttentionSettings(0.7, case.window, case.softcap, (HEAD, 2 * HEAD))
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)
    operands = (inputs.queries, inputs.pages, inputs.page_table, inputs.positions)
    arrays = [jnp.asarray(x) for x in (*operands, inputs.kv_lengths)]
    return np.asarray(jax.jit(partial(way, settings=settings))(*arrays, sinks))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name: str, way: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, stale=1e4)
    got = run(WAYS[way], case, inputs)
    assert np.isfinite(got).all(), "padding and idle rows must not make NaN"
    for row, count in enumerate(case.counts):
        for query in {0, count // 2, count - 1} & set(range(count)):
            want = dense(case, inputs, row, query)
            np.testing.assert_allclose(got[row, query], want, rtol=1e-4, atol=1e-5)


def test_two_keys_by_hand() -> None:
    """Scores 0 and log 3: 1/4 of the value 8 and 3/4 of 16; a sink of log 4 halves both."""
    pages = np.zeros((2, 2, 1, 2), np.float32)
    pages[1, :, 0] = [[0.0, 8.0], [np.log(3.0), 16.0]]
    operands: list[Any] = [
        jnp.ones((1, 1, 1, 1, 1)),
        jnp.asarray(pages),
        jnp.array([[1]], jnp.int32),
        jnp.array([[1]], jnp.int32),
        jnp.array([2], jnp.int32),
    ]
    assert paged_attention(*operands, scale=1.0).item() == pytest.approx(14.0)
    sinks = jnp.full((1, 1), np.log(4.0), jnp.float32)
    assert paged_attention(*operands, scale=1.0, sinks=sinks).item() == pytest.approx(7.0)
    assert paged_attention(*operands, scale=1.0, sliding_window=1).item() == pytest.approx(16.0)


def test_values_may_be_part_of_the_keys() -> None:
    """Latent attention: the key is the whole row of a page, the value its beginning."""
    case = CASES["chunk"]
    inputs = make_inputs(case)
    queries = np.concatenate([inputs.queries, inputs.queries[..., ::-1]], axis=-1)
    settings = AttentionSettings(0.7, None, 0.0, (0, 5))
    operands = (queries, inputs.pages, inputs.page_table, inputs.positions, inputs.kv_lengths)
    arrays = [jnp.asarray(x) for x in operands]
    ways = [np.asarray(way(*arrays, None, settings=settings)) for way in WAYS.values()]
    assert ways[0].shape == (3, 16, KV_HEADS, GROUP, 5)
    for row, count in enumerate(case.counts):
        np.testing.assert_allclose(ways[0][row, :count], ways[1][row, :count], atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_storage_may_be_narrower_than_the_arithmetic(way: str) -> None:
    case = CASES["decode_over_blocks"]
    inputs = make_inputs(case)
    narrow = replace(inputs, pages=np.asarray(jnp.asarray(inputs.pages, jnp.bfloat16)))
    got = run(WAYS[way], case, narrow)
    np.testing.assert_allclose(got, run(WAYS[way], case, inputs), atol=0.05)
    assert got.dtype == np.float32


@pytest.mark.parametrize("way", ["blocks", "rows_at_once"])
def test_blocks_outside_the_reach_are_not_read(way: str) -> None:
    """NaN in pages that no query may see leaves no trace: those blocks are skipped, not masked."""
    case = Case((600, 555), (1, 1), 1, LONG, window=100)
    inputs = make_inputs(case)
    clean = run(WAYS[way], case, inputs)
    pages = inputs.pages.copy()
    pages[inputs.page_table[:, : KEYS_PER_BLOCK // PAGE_SIZE]] = np.nan  # 555 sees 456 to 555
    got = run(WAYS[way], case, replace(inputs, pages=pages))
    np.testing.assert_array_equal(got, clean)


def test_memory_of_rows_at_once_does_not_follow_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk of 2048 over 16k tokens has 4 GiB of scores; no more than a block of them exists."""
    monkeypatch.undo()
    width, kv_heads, group, head, page = 2048, 8, 4, 128, 32
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, width, kv_heads, group, head), jnp.bfloat16),
            ((1024, page, kv_heads, 2 * head), jnp.bfloat16),
            ((1, 16384 // page), jnp.int32),
            ((1, width), jnp.int32),
            ((1,), jnp.int32),
        )
    ]
    settings = AttentionSettings(0.1, None, 0.0, (head, 2 * head))
    attend = partial(attend_rows_at_once, sinks=None, settings=settings)
    memory: Any = jax.jit(attend).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * 2**30


def test_write_pages_touches_only_its_places() -> None:
    pages = jnp.zeros((3, 4, 1, 2))
    new = jnp.arange(1.0, 5.0).reshape(1, 2, 1, 2)
    page_ids, offsets = jnp.array([[2, 1]], jnp.int32), jnp.array([[3, 0]], jnp.int32)
    written = np.asarray(write_pages(pages, new, page_ids, offsets))
    assert written[2, 3, 0].tolist() == [1.0, 2.0]
    assert written[1, 0, 0].tolist() == [3.0, 4.0]
    assert np.count_nonzero(written) == 4
