"""F13 and F14 of the field reports; F01 to F12 and F15 to F17 stand beside what they try."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jpd.checkpoint.load import target_shardings
from jpd.nn.families import config_from_hf
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh
from tests.test_planner import TINY, plan_tiny, problems


def heads(query: int, kv: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": 8}


@pytest.mark.parametrize(
    ("query", "kv", "tensor", "parts"), [(6, 3, 2, 1), (8, 2, 8, 2), (4, 1, 4, 1), (4, 4, 2, 2)]
)
def test_f13_more_devices_than_kv_heads_share_their_query_heads(
    tmp_path: Path, query: int, kv: int, tensor: int, parts: int
) -> None:
    """`parts`: into how many the cache is split; each part is on several devices."""
    plan = plan_tiny(tmp_path, heads(query, kv), decode=tensor)
    assert plan.workers[1].kv_partitions == parts


@pytest.mark.parametrize(("query", "kv", "tensor"), [(4, 2, 8), (5, 5, 2)])
def test_f13_query_heads_that_do_not_divide_are_refused_by_the_rule(
    tmp_path: Path, query: int, kv: int, tensor: int
) -> None:
    (problem,) = problems(tmp_path, heads(query, kv), decode=tensor)
    assert problem.key == "worker.decode-0.mesh.tensor" and problem.value == tensor
    assert f"does not divide num_heads = {query} with num_kv_heads = {kv}" in problem.rule


def test_f14_a_mesh_of_one_device_holds_everything_whole() -> None:
    config = config_from_hf(TINY)
    abstract = abstract_params(config, jnp.float32)
    mesh = make_worker_mesh(
        jax.devices()[:1], tensor=1, expert=1, num_cached_heads=config.num_cached_heads
    )
    assert set(mesh.shape.values()) == {1}
    for (sharding,) in target_shardings(abstract, [mesh]):
        assert sharding.is_fully_replicated
