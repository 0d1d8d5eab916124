"""Every family through chunked prefill, transfer and paged decode, on meshes of every size.

For each family three prefill and three decode rigs: what is split over 1, 2 and 4 devices on one
side is split otherwise on the other, and the second and third run their chunks in layer groups.
What chooses tokens knows no family and is most of what there is to compile, so the steps here only
take the best token; its logits are compared as well. The fast run has one family of each kind of
attention and of layer.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jpd.config import EngineConfig
from jpd.engine import choose, forward
from jpd.engine.functions import ModelFunctions
from jpd.engine.logprobs import LogprobArrays, no_logprobs
from jpd.engine.prefill import PrefillDone
from jpd.engine.sampling import best_tokens
from tests.engine.pair import Pair
from tests.engine.rig import GOLDEN, GREEDY, expected, golden_config, make_mesh, make_rigs

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
FAST = ("deepseek_v3", "gemma3", "llama3", "mixtral")
ATOL = 2e-4
ONE_SHAPE = EngineConfig(
    prefill_chunk=32,
    prefill_buckets=(32,),
    context_buckets=(96,),
    max_model_len=96,
    max_steps_per_call=1,
)
"""48 prompt tokens go through in two chunks, the second of them padded."""

LAYER_GROUPS = (1, 2, 3)
"""Of the first, second and third prefill side."""

Mesh = tuple[int, int]  # tensor, expert
Pairs = list[tuple[Mesh, Mesh]]  # prefill side, decode side

DENSE_PAIRS: Pairs = [((1, 1), (4, 1)), ((2, 1), (1, 1)), ((4, 1), (2, 1))]
EXPERT_PAIRS: Pairs = [((4, 1), (2, 2)), ((1, 4), (4, 1)), ((2, 2), (1, 4))]
VARIANTS: dict[str, Pairs] = {  # what no family's own folder has
    "variants/llama_bias_one_kv_head": [((1, 1), (4, 1))],
    "variants/llama_linear_odd_heads": [((1, 1), (2, 1))],
    "variants/qwen3_moe_mixed": [((2, 2), (1, 2))],
    "variants/smollm3_no_rope_layers": [((2, 1), (1, 1))],
}
CASES = {name: EXPERT_PAIRS if name in MIXTURES else DENSE_PAIRS for name in FAMILIES} | VARIANTS


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_prompt_logprobs(_: object, hidden: jax.Array, *rest: object) -> LogprobArrays:
        return no_logprobs(*hidden.shape[:2])

    monkeypatch.setattr(choose, "sample", lambda logits, *rest: best_tokens(logits))
    monkeypatch.setattr(
        choose, "token_logprobs", lambda logits, tokens, *wanted: no_logprobs(tokens.shape[0])
    )
    monkeypatch.setattr(forward, "prompt_logprobs", no_prompt_logprobs)


def _params() -> list[object]:
    slow = pytest.mark.slow
    return [
        pytest.param(name, marks=() if name in FAST else slow, id=_label(name)) for name in CASES
    ]


def _label(name: str) -> str:
    return name.rpartition("/")[2]


@pytest.mark.field_report("D01", "D02", "D09", "D11")
@pytest.mark.parametrize("name", _params())
def test_tokens_and_logits_of_the_reference(name: str) -> None:
    pairs = CASES[name]
    sources, targets = zip(*pairs, strict=True)
    # Rigs of its own: no other test may meet these steps.
    on_left = [
        make_rigs(name, [make_mesh(name, *sizes, 0)], replace(ONE_SHAPE, layer_groups=groups))[0]
        for sizes, groups in zip(sources, LAYER_GROUPS, strict=False)
    ]
    on_right = make_rigs(name, [make_mesh(name, *sizes, 4) for sizes in targets], ONE_SHAPE)
    for source, target, pair in zip(on_left, on_right, pairs, strict=True):
        _check(Pair(source, target), expected(name), f"{name}: {pair}")


def _check(joined: Pair, golden: dict[str, np.ndarray], label: str) -> None:
    noted = _note_logits(joined.source.functions)
    finished: list[PrefillDone] = []
    first = []
    for index, prompt in enumerate(golden["prompts"]):
        joined.add(str(index), tuple(prompt.tolist()), GREEDY)
        finished += joined.prefill_all()
        first.append(noted[-1][0])
    np.testing.assert_allclose(first, golden["logits"][:, -1], rtol=0, atol=ATOL, err_msg=label)
    noted = _note_logits(joined.target.functions)
    tokens = joined.decode_all(finished)
    assert tokens == {str(i): row.tolist() for i, row in enumerate(golden["greedy"])}, label
    steps = np.stack(noted, axis=1)[: len(finished), : GREEDY.max_tokens - 1]
    best = np.sort(steps, axis=-1)[..., -2:]
    gaps = best[..., 1] - best[..., 0]
    np.testing.assert_allclose(gaps, golden["margins"][:, 1:], rtol=0, atol=2 * ATOL, err_msg=label)


def _note_logits(functions: ModelFunctions) -> list[np.ndarray]:
    """What the tokens are chosen of, from now on."""
    noted: list[np.ndarray] = []

    def note(choice: Any, first: object, logits: jax.Array, masks: object) -> object:
        noted.append(np.asarray(logits))
        return choice(first, logits, masks)

    functions._choose_first = partial(note, functions._choose_first)
    functions._choose_next = partial(note, functions._choose_next)
    return noted


def test_the_cases_have_every_size_on_both_sides() -> None:
    """Those with experts are the mixtures."""
    for pairs in (DENSE_PAIRS, EXPERT_PAIRS):
        for side in zip(*pairs, strict=True):
            assert {tensor for tensor, _ in side} == {1, 2, 4}
    for side in zip(*EXPERT_PAIRS, strict=True):
        assert {expert for _, expert in side} == {1, 2, 4}
    mixtures = {
        name
        for name in FAMILIES
        if any(layer.moe is not None for layer in golden_config(name).layers)
    }
    assert mixtures == set(MIXTURES)
