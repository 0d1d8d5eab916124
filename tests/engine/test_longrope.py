"""Longrope around its original context: one kind of factors for a whole sequence, on both sides."""

import numpy as np
import pytest

from jpd.config import EngineConfig
from jpd.request import SamplingParams
from tests.engine.pair import Pair
from tests.engine.rig import random_prompt, rig
from tests.nn.golden import PAGE_SIZE, GoldenModel, golden_model

NAME = "variants/phi3_longrope_long"  # short up to 32 tokens
ONE_SHAPE = EngineConfig(
    prefill_chunk=32,
    prefill_buckets=(32,),
    context_buckets=(96,),
    max_model_len=96,
    max_steps_per_call=1,
)


def greedy(
    model: GoldenModel, prompt: tuple[int, ...], num_tokens: int, rope_length: int
) -> list[int]:
    """What the network says, which equals `transformers` with factors of that length."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        logits, _ = model.forward(
            row,
            np.arange(64)[None],
            model.empty_kv(1 + 64 // PAGE_SIZE),
            1 + np.arange(64 // PAGE_SIZE)[None],
            [len(tokens)],
            np.arange(64)[None] < len(tokens),
            rope_lengths=[rope_length],
        )
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"),
    [(20, 12), (20, 13), (30, 2), (32, 20), (33, 20), (50, 10)],
)
def test_the_longest_that_a_sequence_may_become_decides(
    num_prompt_tokens: int, max_tokens: int
) -> None:
    model = golden_model(NAME)
    assert model.config.short_context == 32
    prompt = tuple(token_id % 60 + 3 for token_id in random_prompt(7, num_prompt_tokens))
    sides = (rig(NAME, first_device=first, engine=ONE_SHAPE) for first in (0, 4))
    joined = Pair(*sides)
    joined.add("one", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    total = num_prompt_tokens + max_tokens
    assert joined.run()["one"] == greedy(model, prompt, max_tokens, total)


def test_the_factors_matter() -> None:
    """Or the tests above could not fail."""
    model, prompt = golden_model(NAME), tuple(range(3, 23))
    assert greedy(model, prompt, 12, 32) != greedy(model, prompt, 12, 33)
