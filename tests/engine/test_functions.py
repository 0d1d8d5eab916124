"""The executables: right logits, pinned shardings, pools updated in place."""

import jax
import numpy as np
import pytest

from jpd.engine.buckets import ChunkShape
from jpd.engine.prefill_chunk import ChunkPrompt, ChunkRow, empty_chunk, make_chunk
from jpd.engine.sampling_rows import greedy_rows
from jpd.engine.token_masks import open_masks
from tests.engine.rig import CHUNK, NUM_SLOTS, SEVERAL_STEPS, expected, generate, rig

MODELS = ("gemma3", "llama3")


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_golden_logits_and_greedy_tokens(name: str, tensor: int) -> None:
    on, golden = rig(name, tensor), expected(name)
    for prompt, logits in zip(golden["prompts"], golden["logits"], strict=True):
        found = on.functions.logits(on.leaves, prompt.tolist())
        assert found.dtype == np.float32
        assert np.abs(found - logits).max() < 2e-4
    for prompt, tokens in zip(golden["prompts"], golden["greedy"], strict=True):
        assert generate(on, prompt.tolist()) == tokens.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_chunks_equal_logits_in_one_piece(name: str) -> None:
    prompt = expected(name)["prompts"].reshape(-1).tolist()
    chunked, whole = rig(name), rig(name, chunk=256)
    assert len(prompt) > 4 * CHUNK
    difference = chunked.functions.logits(chunked.leaves, prompt) - whole.functions.logits(
        whole.leaves, prompt
    )
    assert np.abs(difference).max() < 5e-5


def pool_bytes_per_device(layers: tuple[jax.Array, ...]) -> int:
    return sum(layer.addressable_shards[0].data.nbytes for layer in layers)


@pytest.mark.parametrize("tensor", [1, 2])
def test_prefill_updates_the_pool_in_place(tensor: int) -> None:
    on = rig("llama3", tensor)
    old = on.cache.layers
    shape = ChunkShape(1, CHUNK, on.functions.buckets.max_pages)
    chunk, ends = empty_chunk(shape, on.functions.no_history(1))
    compiled = on.functions._forward_chunk.lower(on.leaves, old, chunk, ends).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pool_bytes_per_device(old)
    on.cache.layers, results, _ = on.functions.prefill(on.leaves, old, chunk, ends)
    assert all(layer.is_deleted() for layer in old)
    assert [layer.sharding for layer in on.cache.layers] == [on.cache.sharding] * 3
    assert results.tokens.sharding.is_fully_replicated


def alias_bytes(function: jax.stages.Wrapped, *args: object) -> int:
    """What an executable updates in place; that it needs no other copy of a pool is checked."""
    memory = function.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pool_bytes_per_device(rig("llama3").cache.layers) / 4
    return int(memory.alias_size_in_bytes)


@pytest.mark.parametrize(("tensor", "num_steps"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_decode_updates_the_pool_and_its_state_in_place(tensor: int, num_steps: int) -> None:
    on = rig("llama3", tensor, engine=SEVERAL_STEPS)
    functions, old, state = on.functions, on.cache.layers, on.functions.new_state()
    shape = functions.buckets.decode_shapes(NUM_SLOTS)[0]._replace(num_steps=num_steps)
    assert shape.num_rows < NUM_SLOTS
    masks = open_masks(shape.num_rows, functions.vocab_size)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if num_steps > 1:
        found = alias_bytes(functions._several[shape], on.leaves, old, state, masks)
        assert found == pool_bytes_per_device(old) + state_bytes
    else:
        forward = functions._forward_step[shape.num_rows, shape.width]
        found = alias_bytes(forward, on.leaves, old, state, masks.paused)
        assert found == pool_bytes_per_device(old)
        logits = np.zeros((shape.num_rows, functions.vocab_size), np.float32)
        assert alias_bytes(functions._choose_next, state, logits, masks) == state_bytes
    on.cache.layers, new_state, _ = functions.decode(on.leaves, old, state, shape)
    assert all(array.is_deleted() for array in (*old, *jax.tree.leaves(state)))
    newest = functions.deactivate(new_state, 1)
    assert all(array.is_deleted() for array in jax.tree.leaves(new_state))
    assert not any(array.is_deleted() for array in jax.tree.leaves(newest))


def test_logits_stay_split_by_vocabulary_between_the_model_and_the_choice() -> None:
    on = rig("llama3", 2)
    shape = on.functions.buckets.decode_shapes(NUM_SLOTS)[0]
    forward = on.functions._forward_step[shape.num_rows, shape.width]
    masks = open_masks(shape.num_rows, on.functions.vocab_size)
    on.cache.layers, logits = forward(
        on.leaves, on.cache.layers, on.functions.new_state(), masks.paused
    )
    assert logits.dtype == np.float32
    assert logits.addressable_shards[0].data.shape == (1, on.functions.vocab_size // 2)


def test_padding_changes_no_page_but_the_bin() -> None:
    on = rig("llama3")
    before = [np.asarray(layer) for layer in on.cache.layers]
    tokens = list(range(3, 23))
    pages = on.take(len(tokens))
    shape = ChunkShape(1, CHUNK, on.functions.buckets.context_width(len(tokens)))
    prompt = ChunkPrompt(tokens, pages, greedy_rows(1), 99)
    chunk, ends = make_chunk(shape, [ChunkRow(prompt, 0, 20)], on.functions.no_history(1))
    assert chunk.tokens.shape == (1, CHUNK)
    on.cache.layers, *_ = on.functions.prefill(on.leaves, on.cache.layers, chunk, ends)
    untouched = [page for page in range(1, before[0].shape[0]) if page not in pages]
    for old, new in zip(before, on.cache.layers, strict=True):
        after = np.asarray(new)
        assert np.array_equal(old[untouched], after[untouched])
        assert np.array_equal(old[pages[1], 4:], after[pages[1], 4:]), "positions 20 to 31"
        assert not np.array_equal(old[pages[1], :4], after[pages[1], :4])
    on.allocator.free(pages)
