"""Every family through chunked prefill, transfer and paged decode, on meshes that split unequally.

What chooses tokens knows no family and is most of what there is to compile, so the steps here only
take the best token. The fast run gives each family one pair of meshes; the rest are slow. Logits on
meshes: tests/nn/test_sharded.py.
"""

import itertools

import jax
import pytest

from jpd.config import EngineConfig
from jpd.engine import choose, forward
from jpd.engine.logprobs import LogprobArrays, no_logprobs
from jpd.engine.sampling import best_tokens
from tests.engine.pair import Pair
from tests.engine.rig import GOLDEN, GREEDY, Rig, expected, golden_config, make_rig

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
ONE_SHAPE = EngineConfig(
    prefill_chunk=32,
    prefill_buckets=(32,),
    context_buckets=(96,),
    max_model_len=96,
    max_steps_per_call=1,
)
"""48 prompt tokens go through in two chunks, the second of them padded."""

Mesh = tuple[int, int]  # tensor, expert
Case = tuple[str, Mesh, Mesh]  # name, prefill side, decode side

DENSE_PAIRS: list[tuple[Mesh, Mesh]] = [((2, 1), (4, 1)), ((4, 1), (1, 1)), ((1, 1), (2, 1))]
"""One in turn for each family: they share the code that splits heads."""
EXPERT_PAIRS: list[tuple[Mesh, Mesh]] = [((4, 1), (2, 2)), ((1, 4), (4, 1)), ((2, 2), (1, 4))]
VARIANTS: list[Case] = [  # what no family's own folder has
    ("variants/llama_bias_one_kv_head", (1, 1), (4, 1)),
    ("variants/llama_linear_odd_heads", (1, 1), (2, 1)),
    ("variants/qwen3_moe_mixed", (2, 2), (1, 2)),
    ("variants/smollm3_no_rope_layers", (2, 1), (1, 1)),
]


def _fast_cases() -> list[Case]:
    turns = {True: itertools.cycle(EXPERT_PAIRS), False: itertools.cycle(DENSE_PAIRS)}
    return [(name, *next(turns[name in MIXTURES])) for name in FAMILIES]


def _slow_cases() -> list[Case]:
    cases = [(name, *pair) for name in MIXTURES for pair in EXPERT_PAIRS[:2]]
    return [case for case in cases if case not in _fast_cases()] + VARIANTS


def _params() -> list[object]:
    fast = [pytest.param(*case, id=_label(*case)) for case in _fast_cases()]
    slow = pytest.mark.slow
    return fast + [pytest.param(*case, id=_label(*case), marks=slow) for case in _slow_cases()]


def _label(name: str, source: Mesh, target: Mesh) -> str:
    sides = (f"t{tensor}e{expert}" for tensor, expert in (source, target))
    return "-".join((name.rpartition("/")[2], *sides))


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_prompt_logprobs(_: object, hidden: jax.Array, *rest: object) -> LogprobArrays:
        return no_logprobs(*hidden.shape[:2])

    monkeypatch.setattr(choose, "sample", lambda logits, *rest: best_tokens(logits))
    monkeypatch.setattr(
        choose, "token_logprobs", lambda logits, tokens, *wanted: no_logprobs(tokens.shape[0])
    )
    monkeypatch.setattr(forward, "prompt_logprobs", no_prompt_logprobs)


@pytest.mark.parametrize(("name", "source_mesh", "target_mesh"), _params())
def test_tokens_of_the_reference(name: str, source_mesh: Mesh, target_mesh: Mesh) -> None:
    joined = Pair(_rig(name, source_mesh, 0), _rig(name, target_mesh, 4))
    golden = expected(name)
    for index, prompt in enumerate(golden["prompts"]):
        joined.add(str(index), tuple(prompt.tolist()), GREEDY)
    tokens = joined.run()
    assert tokens == {str(i): row.tolist() for i, row in enumerate(golden["greedy"])}


def _rig(name: str, mesh: Mesh, first_device: int) -> Rig:
    """Of its own: other tests must not meet the steps compiled here."""
    tensor, expert = mesh
    return make_rig(name, tensor, first_device, expert=expert, engine=ONE_SHAPE)


def test_the_cases_have_every_size_on_both_sides() -> None:
    """Those with experts are the mixtures."""
    fast = _fast_cases()
    for side in (1, 2):
        assert {case[side][0] for case in fast} == {1, 2, 4}
        assert {case[side][1] for case in fast + _slow_cases()} == {1, 2, 4}
    mixtures = {
        name
        for name in FAMILIES
        if any(layer.moe is not None for layer in golden_config(name).layers)
    }
    assert mixtures == set(MIXTURES)
