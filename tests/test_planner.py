"""The arithmetic of `jpd check` against numbers worked out by hand, and all ways to be bad."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.mesh_file import load_deployment
from jpd.nn.config import DecoderConfig
from jpd.nn.families import config_from_hf
from jpd.planner.deployment_plan import DeploymentPlan, plan_deployment
from jpd.planner.worker_plan import GIB

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TINY: dict[str, Any] = {
    **LLAMA_70B,
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

MESH = """
[[host]]
name = "a"
platform = "{platform}"
devices = 16
{memory}
[[worker]]
name = "prefill"
role = "prefill"
host = "a"
devices = {prefill}
mesh = {{ tensor = {prefill_tensor} }}
[[worker]]
name = "decode"
role = "decode"
host = "a"
devices = {decode}
mesh = {{ tensor = {decode_tensor} }}
slots = 4
[engine]
prefill_chunk = 64
{engine}
[cache]
page_size = 16
{cache}
"""


def deployment(
    folder: Path, *, prefill: int = 1, decode: int = 1, platform: str = "cpu", **texts: str
) -> DeploymentConfig:
    """A prefill and a decode worker with this `tensor`; `texts` are lines of their tables."""
    path = folder / "mesh.toml"
    values = {"memory": "", "engine": "", "cache": "pages = 17", **texts}
    values |= {
        "platform": platform,
        "prefill": str(list(range(prefill))),
        "prefill_tensor": str(prefill),
        "decode": str(list(range(8, 8 + decode))),
        "decode_tensor": str(decode),
    }
    path.write_text(MESH.format(**values))
    return load_deployment(path)


def plan_tiny(folder: Path, changes: dict[str, Any] | None = None, **mesh: Any) -> DeploymentPlan:
    return plan_deployment(config_from_hf({**TINY, **(changes or {})}), deployment(folder, **mesh))


def problems(folder: Path, changes: dict[str, Any] | None = None, **mesh: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        plan_tiny(folder, changes, **mesh)
    assert all(problem.file.endswith("mesh.toml") for problem in caught.value.problems)
    return list(caught.value.problems)


def test_llama_70b_over_eight_h200() -> None:
    plan = plan_deployment(config_from_hf(LLAMA_70B), load_deployment("2p1d-tp8-h200"))
    assert plan.num_params == 70_553_706_496  # as published
    (pair,) = plan.pairs
    assert (pair.sources, pair.targets) == (("prefill-a-0", "prefill-b-0"), ("decode-0",))
    assert pair.plan.bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert pair.plan.busiest_link_bytes_per_token == 2 * 80 * 128 * 2
    assert not pair.same_host and not pair.plan.is_resharded
    for worker in plan.workers:
        assert worker.weight_bytes == pytest.approx(70.55e9 * 2 / 8, rel=1e-3)
        assert worker.page_bytes == 32 * 2 * 80 * 128 * 2
        assert worker.weight_bytes + worker.pool_bytes <= 0.9 * 139 * GIB
        assert worker.largest_sequence_tokens == 32768


def tiny_weights(tensor: int) -> int:
    """Bytes per device of TINY in float32: what is split, and what every device holds whole."""
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24  # q and o, k and v (half the heads), mlp
    norms, embed = 2 * 2 * 16 + 16, 100 * 16
    return 4 * ((2 * layer + embed) // tensor + norms)


@pytest.mark.parametrize("tensor", [1, 2])
def test_bytes_per_device_by_hand(tmp_path: Path, tensor: int) -> None:
    plan = plan_tiny(tmp_path, decode=tensor)
    decode = plan.workers[1]
    assert decode.weight_bytes == tiny_weights(tensor)
    assert (
        decode.page_bytes == 16 * 2 * 2 * 8 * 4 // tensor
    )  # tokens, layers, heads, K and V, bytes
    assert decode.pool_bytes == 17 * decode.page_bytes
    assert decode.num_pool_tokens == decode.largest_sequence_tokens == 256
    assert decode.largest_sequence_bytes == 16 * decode.page_bytes


@pytest.mark.parametrize("tensor", [1, 2])
def test_int8_weights_by_hand(tmp_path: Path, tensor: int) -> None:
    """Numbers of a byte each; a float32 scale per output channel; norms as before."""
    config = replace(config_from_hf(TINY), weights="int8")
    plan = plan_deployment(config, deployment(tmp_path, decode=tensor))
    numbers = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 100 * 16
    split, whole = 2 * (16 + 2 * 8 + 2 * 24) + 100, 2 * 2 * 16  # q, k, v, gate, up; o and down
    floats = split // tensor + whole + 2 * 2 * 16 + 16
    assert plan.workers[1].weight_bytes == numbers // tensor + 4 * floats
    assert plan.num_params == plan_tiny(tmp_path).num_params


def test_pool_from_memory_fraction(tmp_path: Path) -> None:
    memory_gib = 0.125
    cache = "memory_fraction = 0.5"
    plan = plan_tiny(tmp_path, memory=f"device_memory_gib = {memory_gib}", cache=cache)
    for worker in plan.workers:
        assert worker.weight_bytes + worker.pool_bytes <= memory_gib * GIB / 2
        assert worker.weight_bytes + worker.pool_bytes + worker.page_bytes > memory_gib * GIB / 2


@pytest.mark.parametrize(
    ("prefill", "decode", "wire", "resharded"),
    [(1, 1, 1, False), (2, 2, 2, False), (1, 2, 1, True)],
)
def test_how_kv_travels(
    tmp_path: Path, prefill: int, decode: int, wire: int, resharded: bool
) -> None:
    (pair,) = plan_tiny(tmp_path, prefill=prefill, decode=decode).pairs
    assert (pair.plan.wire_partitions, pair.plan.is_resharded) == (wire, resharded)
    assert pair.plan.bytes_per_token == 2 * 2 * 8 * 4
    assert pair.same_host


def test_fewer_kv_heads_than_tensor_is_fine(tmp_path: Path) -> None:
    plan = plan_tiny(tmp_path, {"num_key_value_heads": 1}, decode=4)
    assert plan.workers[1].kv_partitions == 1
    assert dict(plan.workers[1].mesh_shape)["replica"] == 4


@pytest.mark.parametrize(
    ("changes", "tensor", "rule"),
    [
        ({"num_attention_heads": 6, "head_dim": 4}, 4, "num_heads = 6 with num_kv_heads = 2"),
        ({"intermediate_size": 25}, 2, "mlp = 25"),
        ({}, 3, "num_heads = 4"),
    ],
)
def test_tensor_that_does_not_divide_is_named(
    tmp_path: Path, changes: dict[str, Any], tensor: int, rule: str
) -> None:
    found = problems(tmp_path, changes, decode=tensor)
    assert {(p.key, p.value) for p in found} == {("worker.decode-0.mesh.tensor", tensor)}
    assert any(rule in p.rule for p in found), found


def test_vocabulary_may_be_uneven(tmp_path: Path) -> None:
    assert plan_tiny(tmp_path, {"vocab_size": 101}, decode=2).num_params


def test_both_sides_are_checked(tmp_path: Path) -> None:
    found = problems(tmp_path, prefill=3, decode=3)
    keys = {p.key for p in found}
    assert keys == {"worker.prefill-0.mesh.tensor", "worker.decode-0.mesh.tensor"}


def test_pool_too_small_for_one_sequence(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, cache="pages = 16")
    assert (problem.key, problem.value) == ("cache.pages", 16)
    assert "256 takes 17 pages" in problem.rule


def test_mesh_caps_the_length_of_the_model(tmp_path: Path) -> None:
    assert plan_tiny(tmp_path, engine="max_model_len = 100").max_model_len == 100
    assert plan_tiny(tmp_path, engine="max_model_len = 9999").max_model_len == 256


def test_attention_is_named_and_refused_where_it_cannot_work(tmp_path: Path) -> None:
    assert plan_tiny(tmp_path).attention == "blocks"
    assert plan_tiny(tmp_path, engine='attention = "reference"').attention == "reference"
    (problem,) = problems(tmp_path, engine='attention = "cudnn"')
    assert (problem.key, problem.value) == ("engine.attention", "cudnn")
    assert "needs platform gpu, not cpu" in problem.rule
    (problem,) = problems(tmp_path, engine='attention = "flash"')
    assert problem.key == "engine.attention"


def test_an_unknown_attention_of_the_python_api_is_refused(tmp_path: Path) -> None:
    mesh = deployment(tmp_path)
    wrong: Any = "flash"
    with pytest.raises(ConfigError, match="tpu_ragged"):
        plan_deployment(
            config_from_hf(TINY), replace(mesh, engine=replace(mesh.engine, attention=wrong))
        )


def test_a_step_needs_no_more_scores_than_those_of_a_block_of_keys(tmp_path: Path) -> None:
    """Heads by 2048 queries by 16k keys, twice in float32, would be 32 GiB."""
    mesh = load_deployment("2p1d-tp8-h200")
    long = replace(mesh.engine, max_model_len=16384, prefill_chunk=2048)
    config = config_from_hf(LLAMA_70B)
    blocks = plan_deployment(config, replace(mesh, engine=long)).workers[0]
    assert blocks.workspace_bytes < 2 * GIB
    whole = replace(mesh, engine=replace(long, attention="reference"))
    reference = plan_deployment(config, whole, sizes_memory=False).workers[0]
    scores = 64 // 8 * 2048 * 16384 * 4 * 2
    assert reference.workspace_bytes > scores


def test_memory_must_be_known_or_pages_given(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, cache="")
    assert problem.key == "host.a.device_memory_gib"
    config = config_from_hf(TINY)
    assert plan_deployment(config, deployment(tmp_path, cache=""), sizes_memory=False).workers


def test_more_than_the_device_holds(tmp_path: Path) -> None:
    found = problems(tmp_path, memory="device_memory_gib = 0.0001")
    assert {p.key for p in found} == {
        "worker.prefill-0: bytes per device",
        "worker.decode-0: bytes per device",
    }
    weights = problems(tmp_path, memory="device_memory_gib = 0.00001", cache="")
    assert any("takes 17 pages" in p.rule for p in weights)


def test_too_many_executables(tmp_path: Path) -> None:
    engine = f"prefill_buckets = {list(range(16, 65, 2))}\ncontext_buckets = {[64, 128, 192, 256]}"
    (problem,) = problems(tmp_path, engine=engine)
    assert "executables" in problem.rule


def test_every_fault_of_a_pair_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, {"intermediate_size": 25}, decode=2, cache="pages = 3")
    assert {p.key for p in found} == {"worker.decode-0.mesh.tensor", "cache.pages"}


def test_equal_replicas_are_one_line(tmp_path: Path) -> None:
    config: DecoderConfig = config_from_hf(TINY)
    base = deployment(tmp_path)
    first = base.workers[0]
    more = tuple(replace(first, name=f"prefill-{n}", devices=(n,)) for n in range(1, 4))
    plan = plan_deployment(config, replace(base, workers=(*base.workers, *more)))
    assert [len(pair.sources) for pair in plan.pairs] == [4]
