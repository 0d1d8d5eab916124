"""Every family through the whole path, every tensor size on either side, against the reference.

Rigs are compiled once per family, side and mesh. The fast run gives each family one pair of meshes,
so that all sizes occur on both sides; the rest are slow.
"""

import itertools

import numpy as np
import pytest

from jpd.config import EngineConfig
from tests.engine.pair import Pair
from tests.engine.rig import GOLDEN, GREEDY, Rig, expected, golden_config, rig

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
VARIANTS = (  # what no family's own folder has
    "variants/llama_bias_one_kv_head",
    "variants/llama_linear_odd_heads",
    "variants/phi3_longrope_long",
    "variants/qwen2_late_windows",
    "variants/qwen3_moe_mixed",
    "variants/smollm3_no_rope_layers",
)
ONE_SHAPE = EngineConfig(
    prefill_chunk=32,
    prefill_buckets=(32,),
    context_buckets=(96,),
    max_model_len=96,
    max_steps_per_call=1,
)
"""48 prompt tokens go through in two chunks, the second of them padded."""

Mesh = tuple[int, int]  # tensor, expert

TENSOR_PAIRS = [((1, 1), (2, 1)), ((2, 1), (4, 1)), ((4, 1), (1, 1))]
EXPERT_PAIRS = [((1, 2), (1, 4)), ((1, 4), (2, 2)), ((2, 2), (1, 2))]


def _cases() -> list[object]:
    """(name, mesh of the prefill side, mesh of the decode side)."""
    cases = []
    turns = itertools.cycle(range(len(TENSOR_PAIRS)))
    for name in VARIANTS:
        pair = TENSOR_PAIRS[0]
        cases.append(pytest.param(name, *pair, marks=pytest.mark.slow, id=_label(name, *pair)))
    for name in FAMILIES:
        fast = next(turns)
        for turn, pair in enumerate(TENSOR_PAIRS):
            marks = () if turn == fast else (pytest.mark.slow,)
            cases.append(pytest.param(name, *pair, marks=marks, id=_label(name, *pair)))
        for turn, pair in enumerate(EXPERT_PAIRS if name in MIXTURES else ()):
            marks = () if turn == fast else (pytest.mark.slow,)
            cases.append(pytest.param(name, *pair, marks=marks, id=_label(name, *pair)))
    return cases


def _label(name: str, source: Mesh, target: Mesh) -> str:
    sides = (f"t{tensor}e{expert}" for tensor, expert in (source, target))
    return "-".join((name.rpartition("/")[2], *sides))


@pytest.mark.parametrize(("name", "source_mesh", "target_mesh"), _cases())
def test_logits_and_tokens_of_the_reference(
    name: str, source_mesh: Mesh, target_mesh: Mesh
) -> None:
    source, target = _rig(name, source_mesh, 0), _rig(name, target_mesh, 4)
    golden = expected(name)
    logits = source.functions.logits(source.leaves, golden["prompts"][0].tolist())
    np.testing.assert_allclose(logits, golden["logits"][0], rtol=0, atol=2e-4)
    joined = Pair(source, target)
    for index, prompt in enumerate(golden["prompts"]):
        joined.add(str(index), tuple(prompt.tolist()), GREEDY)
    tokens = joined.run()
    assert tokens == {str(i): row.tolist() for i, row in enumerate(golden["greedy"])}


def _rig(name: str, mesh: Mesh, first_device: int) -> Rig:
    tensor, expert = mesh
    return rig(name, tensor, first_device, expert=expert, engine=ONE_SHAPE)


def test_the_fast_cases_have_every_size_on_both_sides() -> None:
    """And every family that has experts gets an expert axis."""
    fast = [case.values for case in _cases() if not case.marks]  # type: ignore[attr-defined]
    assert {name for name, *_ in fast} == set(FAMILIES)
    for side in (1, 2):
        assert {case[side][0] for case in fast} == {1, 2, 4}
    split = {name for name, (_, experts), _ in fast if experts > 1}
    mixtures = {
        name
        for name in FAMILIES
        if any(layer.moe is not None for layer in golden_config(name).layers)
    }
    assert split == mixtures == set(MIXTURES)
