"""Prefill on one mesh, pages to another, decode there: the golden tokens, and nothing compiled."""

import random

import jax
import numpy as np
import pytest

from jpd.engine.compile_counter import CompileCounter
from jpd.request import SamplingParams
from tests.engine.pair import Pair
from tests.engine.rig import (
    GREEDY,
    NUM_SLOTS,
    PAGE,
    expected,
    generate,
    random_prompt,
    rig,
    run_decode,
)

MODELS = ("gemma3", "llama3")


def pair(name: str, source_tensor: int = 1, target_tensor: int = 1) -> Pair:
    return Pair(rig(name, source_tensor), rig(name, target_tensor, first_device=4))


@pytest.mark.parametrize(
    ("name", "source_tensor", "target_tensor"),
    [("gemma3", 1, 1), ("llama3", 1, 1), ("llama3", 2, 1)],
)
def test_golden_tokens_through_prefill_transfer_and_decode(
    name: str, source_tensor: int, target_tensor: int
) -> None:
    """With all that chooses tokens; other pairs of meshes are in test_every_family.py."""
    joined = pair(name, source_tensor, target_tensor)
    golden = expected(name)
    for index, prompt in enumerate(golden["prompts"]):
        joined.add(str(index), tuple(prompt.tolist()), GREEDY)
    tokens = joined.run()
    assert tokens == {str(i): row.tolist() for i, row in enumerate(golden["greedy"])}


@pytest.mark.parametrize("name", MODELS)
def test_a05_a14_prompt_lengths_around_page_and_chunk_boundaries(name: str) -> None:
    joined = pair(name)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    for num_tokens in (15, 16, 17, 31, 32, 33, 64, 65, 200):
        prompt = random_prompt(num_tokens, num_tokens)
        joined.add("one", prompt, sampling)
        assert joined.run()["one"] == generate(rig(name, chunk=256), prompt, sampling)


def test_one_corrupted_page_in_flight_changes_the_tokens() -> None:
    """What `jpd verify` must notice, and proof that the tests above can fail."""
    joined = pair("llama3")
    prompt = tuple(expected("llama3")["prompts"][0].tolist())
    joined.add("one", prompt, GREEDY)
    (done,) = [one for _ in range(3) for one in joined.prefill.step()]
    joined.pull()
    broken = [np.zeros((1, *layer.shape[1:]), np.float32) for layer in joined.target.cache.layers]
    joined.target.functions.moves.scatter(
        joined.target.cache,
        [jax.device_put(x, joined.target.cache.sharding) for x in broken],
        joined.target_pages["one"][1:2],
    )
    tokens = run_decode(joined.decode, joined.row(done))["one"]
    assert tokens != expected("llama3")["greedy"][0].tolist()
    joined.target.allocator.free(joined.target_pages["one"])


def test_g03_nothing_compiles_after_warm_up_whatever_is_asked_for() -> None:
    joined = pair("llama3", 2, 1)
    rng = random.Random(1)
    joined.prefill.warm_up()
    joined.decode.warm_up()
    with CompileCounter() as counter:
        counter.mark_ready()
        lengths = [*range(1, 40), *(rng.randint(40, 250) for _ in range(12))]
        rng.shuffle(lengths)
        for start in range(0, len(lengths), NUM_SLOTS - 1):
            for offset, num_tokens in enumerate(lengths[start : start + NUM_SLOTS - 1]):
                sampling = SamplingParams(
                    max_tokens=rng.randint(2, 12),
                    min_tokens=rng.randint(0, 2),
                    temperature=rng.choice([0.0, 0.7, 1.3]),
                    top_k=rng.choice([0, 1, 40]),
                    top_p=rng.choice([0.5, 1.0]),
                    min_p=rng.choice([0.0, 0.1]),
                    repetition_penalty=rng.choice([1.0, 1.2]),
                    frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
                    logit_bias=rng.choice([(), ((5, 1.0),)]),
                    logprobs=rng.choice([None, None, 3]),
                    prompt_logprobs=rng.choice([None, None, 1]),
                    seed=rng.getrandbits(63),
                )
                joined.add(str(start + offset), random_prompt(start, num_tokens), sampling)
            joined.run()
        assert counter.num_after_ready == 0


def test_pages_travel_while_the_prompt_is_still_computed() -> None:
    joined = pair("gemma3")
    joined.add("one", random_prompt(1, 200), GREEDY)
    joined.prefill.step()
    assert sum(piece.num_pages for piece in joined.pieces) == 32 // PAGE
    joined.pull()
    assert joined.run()["one"] == generate(rig("gemma3", chunk=256), random_prompt(1, 200))
