"""Every golden checkpoint against the reference's float32 logits: one pass, and chunk by chunk."""

import numpy as np
import pytest

from tests.nn.golden import GOLDEN, PAGE_SIZE, golden_model

NAMES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("**/expected.npz"))
BY_CHUNKS = (
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "llama3",
    "mistral",
    "variants/phi3_longrope_long",
    "variants/qwen2_late_windows",
    "variants/smollm3_no_rope_layers",
)
"""One of each kind of cache, mask and position. Whole families go in chunks through the engines:
tests/engine/test_every_family.py."""
ATOL = 2e-4


@pytest.mark.field_report("F06")
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_equals_the_reference(name: str) -> None:
    model = golden_model(name)
    logits = model.whole(model.expected["prompts"])
    np.testing.assert_allclose(logits, model.expected["logits"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", BY_CHUNKS)
def test_chunks_equal_the_whole(name: str) -> None:
    """Chunks that differ by row, padding, pages in no order, then decode beside an idle row."""
    model = golden_model(name)
    prompts, expected = model.expected["prompts"], model.expected["logits"]
    prompts, expected = np.resize(prompts, (3, 48)), np.resize(expected, (3, *expected.shape[1:]))
    rows, length = prompts.shape
    pages_per_row = length // PAGE_SIZE
    shuffled = np.random.default_rng(0).permutation(rows * pages_per_row)
    page_table = np.zeros((rows, pages_per_row + 2), np.int32)
    page_table[:, :pages_per_row] = 1 + shuffled.reshape(rows, pages_per_row)
    kv, done = model.empty_kv(1 + rows * pages_per_row), np.zeros(rows, int)
    for takes in ([16, 5, 1], [16, 16, 16], [3, 16, 16], *[[1, 1, 0]] * 11):
        width = 1 if max(takes) == 1 else 16
        offsets = np.arange(width)
        positions = done[:, None] + offsets
        valid = offsets < np.array(takes)[:, None]
        tokens = np.take_along_axis(prompts, np.minimum(positions, length - 1), 1)
        tokens = np.where(valid, tokens, 0)
        got, kv = model.forward(
            tokens, positions, kv, page_table, done + takes, valid, rope_lengths=[length] * rows
        )
        for row, take in enumerate(takes):
            want = expected[row, done[row] : done[row] + take]
            np.testing.assert_allclose(got[row, :take], want, rtol=0, atol=ATOL)
        done += takes
    assert done[1] == length


def test_one_row_equals_its_row_in_a_batch() -> None:
    model = golden_model("gemma3")
    logits = model.whole(model.expected["prompts"][1:2])
    np.testing.assert_allclose(logits, model.expected["logits"][1:2], rtol=0, atol=ATOL)


def test_a_wrong_weight_is_seen() -> None:
    model = golden_model("llama3")
    prompts, leaves = model.expected["prompts"][:1], model.leaves
    paths = [spec.path for spec in model.abstract.specs]
    broken = paths.index("layers.1.attn.v.weight")
    model.leaves = (*leaves[:broken], leaves[broken][:, ::-1], *leaves[broken + 1 :])
    try:
        assert np.abs(model.whole(prompts) - model.expected["logits"][:1]).max() > 0.1
    finally:
        model.leaves = leaves
