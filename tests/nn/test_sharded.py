"""The network on a mesh gives the logits of one device, and moves nothing but partial sums."""

import re

import numpy as np
import pytest

from tests.nn.golden import golden_model
from tests.nn.sharded import ShardedModel

CASES = [  # every family on 1, 2 and 4 devices, in chunks: tests/engine/test_every_family.py
    ("llama3", 4, 1),  # more devices than kv heads
    ("olmo2", 4, 1),  # queries and keys normed over all heads, that is over devices
    ("gpt_oss", 4, 2),
    ("deepseek_v3", 2, 4),  # one latent for all heads
]


@pytest.mark.parametrize(("name", "tensor", "expert"), CASES)
def test_logits_do_not_depend_on_the_mesh(name: str, tensor: int, expert: int) -> None:
    model = golden_model(name)
    sharded = ShardedModel(model, tensor=tensor, expert=expert)
    prompts = model.expected["prompts"]
    got = sharded.whole_pass(prompts)
    np.testing.assert_allclose(got, model.expected["logits"], rtol=0, atol=2e-4)
    np.testing.assert_allclose(got, model.whole(prompts), rtol=0, atol=1e-4)


def test_each_device_holds_its_share_of_the_weights() -> None:
    sharded = ShardedModel(golden_model("llama3"), tensor=4)
    for spec, leaf in zip(sharded.model.abstract.specs, sharded.leaves, strict=True):
        share = leaf.addressable_shards[0].data.size / leaf.size
        kv = spec.path.endswith((".k.weight", ".v.weight"))  # two heads: each on two devices
        assert share == (1.0 if "norm" in spec.path else 0.5 if kv else 0.25), spec.path


@pytest.mark.parametrize(("name", "tensor"), [("llama3", 2), ("gemma3", 4)])
def test_only_partial_sums_and_logits_travel(name: str, tensor: int) -> None:
    """Two sums per layer, one for the embedding; no weight, page or activation is ever gathered."""
    model = golden_model(name)
    text = ShardedModel(model, tensor=tensor).compiled_text(model.expected["prompts"])
    found = re.findall(r"= (\S+) (all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    shapes = [shape.partition("{")[0] for shape, _ in found]
    assert shapes == ["f32[3,48,160]"], "more than the logits was gathered"
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 2 * model.config.num_layers + 1
