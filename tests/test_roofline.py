"""What the router assumes of workers before it has measured any."""

from dataclasses import replace

import pytest

from jpd.checkpoint.model_source import open_model
from jpd.mesh_file import load_deployment
from jpd.planner.deployment_plan import DeploymentPlan, plan_deployment
from jpd.planner.roofline import COMPUTE_SHARE, MEMORY_SHARE, seed_rates


def plan(mesh: str, model: str = "models/llama-3.1-8b.toml", **host: float) -> DeploymentPlan:
    deployment = load_deployment(mesh)
    hosts = tuple(replace(found, **host) for found in deployment.hosts)
    config = open_model(model, need_weights=False).config
    return plan_deployment(config, replace(deployment, hosts=hosts), sizes_memory=False)


def test_the_roofline_by_hand() -> None:
    found = plan("mesh_configs/1p1d-gpu.toml", device_tflops=1000.0, device_gbps=4000.0)
    seed = seed_rates(found)["prefill-0"]
    flops, memory = 1e15 * COMPUTE_SHARE, 4e12 * MEMORY_SHARE
    assert seed.prefill.slope == pytest.approx(2.0 * found.num_params / flops)
    weights = found.num_params * 2.0
    assert seed.step.at(0) == pytest.approx(weights / memory, rel=0.5)
    assert seed.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2


def test_more_devices_and_faster_ones_are_assumed_faster() -> None:
    found = seed_rates(plan("mesh_configs/2p1d-tp2tp4-gpu.toml"))
    assert found["decode-0"].prefill.slope < found["prefill-0"].prefill.slope
    assert found["prefill-0"] == found["prefill-1"]
    slower = seed_rates(plan("mesh_configs/2p1d-tp2tp4-gpu.toml", device_tflops=10.0))
    assert slower["prefill-0"].prefill.slope > 10.0 * found["prefill-0"].prefill.slope


def test_of_experts_only_those_count_that_a_token_meets() -> None:
    found = plan("mesh_configs/2p1d-tp8-h200.toml", "models/mixtral-8x7b.toml")
    assert found.num_active_params == pytest.approx(13e9, rel=0.05)
    dense = plan("mesh_configs/1p1d-gpu.toml")
    assert dense.num_active_params == dense.num_params
