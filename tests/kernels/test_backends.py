"""Attention by kernels that cannot run here: the rules, their operands, and that they lower."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from jpd.kernels import attention
from jpd.kernels.backends import AttentionBackend, AttentionNeeds, broken_rule, resolve
from jpd.kernels.cudnn_attention import attend_with_cudnn
from jpd.kernels.reference_attention import attend_all
from jpd.kernels.scores import AttentionSettings
from jpd.kernels.tpu_attention import attend_with_tpu_kernel, kernel_settings, ragged_operands
from jpd.parallel.mesh import make_worker_mesh

PAGE_SIZE, KV_HEADS, GROUP = 8, 2, 2

GPU = AttentionNeeds("gpu", "bfloat16", "bfloat16", 128, False, False, False)
TPU = replace(GPU, platform="tpu")

REFUSALS: dict[str, tuple[Any, AttentionNeeds, str]] = {
    "cudnn_elsewhere": ("cudnn", replace(GPU, platform="cpu"), "platform gpu, not cpu"),
    "cudnn_float32": ("cudnn", replace(GPU, dtype="float32"), "not float32"),
    "cudnn_wide_head": ("cudnn", replace(GPU, head_dim=512), "up to 256, not 512"),
    "cudnn_odd_head": ("cudnn", replace(GPU, head_dim=100), "multiple of 8"),
    "cudnn_softcap": ("cudnn", replace(GPU, has_softcap=True), "no soft cap"),
    "cudnn_sinks": ("cudnn", replace(GPU, has_sinks=True), "no attention sinks"),
    "cudnn_latent": ("cudnn", replace(GPU, is_latent=True), "no latent attention"),
    "tpu_elsewhere": ("tpu_ragged", GPU, "platform tpu, not gpu"),
    "tpu_narrow_head": ("tpu_ragged", replace(TPU, head_dim=64), "multiple of 128, not 64"),
    "tpu_sinks": ("tpu_ragged", replace(TPU, has_sinks=True), "no attention sinks"),
    "tpu_latent": ("tpu_ragged", replace(TPU, is_latent=True), "no latent attention"),
    "tpu_cache": ("tpu_ragged", replace(TPU, cache_dtype="float32"), "cache.dtype equal"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_kernel_is_refused_with_the_rule_it_breaks(case: str) -> None:
    name, needs, rule = REFUSALS[case]
    found = broken_rule(name, needs)
    assert found is not None and rule in found
    assert broken_rule("blocks", needs) is None and broken_rule("reference", needs) is None


def test_kernels_serve_what_they_can_and_are_never_taken_unasked() -> None:
    assert broken_rule("cudnn", GPU) is None
    assert broken_rule("tpu_ragged", TPU) is None
    assert broken_rule("tpu_ragged", replace(TPU, has_softcap=True)) is None
    assert resolve("auto") == "blocks" and resolve("cudnn") == "cudnn"


def make_operands(num_queries: int, head_dim: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Three rows that have 0, 5 and 21 tokens in the cache and add some; the last is padded."""
    rng = np.random.default_rng(0)
    starts = np.array([0, 5, 21])
    counts = np.array([num_queries, num_queries, max(1, num_queries - 3)])
    table = 1 + rng.permutation(18).reshape(3, 6)
    queries = rng.normal(size=(3, num_queries, KV_HEADS, GROUP, head_dim))
    pages = rng.normal(size=(19, PAGE_SIZE, KV_HEADS, 2 * head_dim))
    return [
        jnp.asarray(queries, dtype),
        jnp.asarray(pages, dtype),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(starts[:, None] + np.arange(num_queries), jnp.int32),
        jnp.asarray(starts + counts, jnp.int32),
    ]


def settings_for(head_dim: int, window: int | None = None, cap: float = 0.0) -> AttentionSettings:
    return AttentionSettings(0.3, window, cap, (head_dim, 2 * head_dim))


def assert_equal_rows(got: jax.Array, want: jax.Array, operands: list[jax.Array]) -> None:
    """Where queries are real."""
    starts, kv_lengths = operands[3][:, 0], operands[4]
    for row, count in enumerate((kv_lengths - starts).tolist()):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=2e-5)


def reference(operands: list[jax.Array], settings: AttentionSettings) -> jax.Array:
    return jax.jit(partial(attend_all, sinks=None, settings=settings))(*operands)


@pytest.mark.parametrize(("num_queries", "window"), [(1, None), (16, 7)])
def test_the_call_of_cudnn_means_the_same_as_the_reference(
    num_queries: int, window: int | None
) -> None:
    operands, settings = make_operands(num_queries, 16), settings_for(16, window)
    attend = partial(attend_with_cudnn, settings=settings, implementation="xla")
    assert_equal_rows(jax.jit(attend)(*operands), reference(operands, settings), operands)


@pytest.mark.parametrize(("num_queries", "window", "softcap"), [(1, None, 0.0), (16, 7, 2.0)])
def test_the_operands_of_the_tpu_kernel_mean_the_same_as_the_reference(
    num_queries: int, window: int | None, softcap: float
) -> None:
    """By the reference that comes with it: neither interpreter of JAX can run the kernel itself."""
    operands, settings = make_operands(num_queries, 16), settings_for(16, window, softcap)
    queries, pages, *numbers = ragged_operands(*operands[:4])
    known: Any = [np.asarray(number) for number in numbers]  # lengths are slices in that reference
    got = jax.jit(
        lambda queries, pages: ref_ragged_paged_attention(
            queries, pages, *known, **kernel_settings(settings)
        )
    )(queries, pages)
    want = reference(operands, settings)
    assert_equal_rows(got.reshape(want.shape), want, operands)


@pytest.mark.parametrize("num_queries", [1, 64])
def test_the_tpu_kernel_lowers_for_a_tpu(num_queries: int) -> None:
    operands = make_operands(num_queries, 128, jnp.bfloat16)
    attend = partial(attend_with_tpu_kernel, settings=settings_for(128, 100, 30.0))
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(attend).trace(*operands).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


def test_the_call_of_cudnn_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX asks the GPU for its version of cuDNN: here it is told one."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    operands = make_operands(16, 64, jnp.bfloat16)
    attend = partial(attend_with_cudnn, settings=settings_for(64, 7))
    lowered = jax.jit(attend).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "__cudnn$fmha" in lowered.as_text()


@pytest.mark.parametrize(("tensor", "kv_heads"), [(2, 2), (4, 2)])
def test_kernels_are_mapped_over_the_heads_of_each_device(
    tensor: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two devices by KV heads; on four, two query heads of each as well."""
    mesh: Mesh = make_worker_mesh(
        jax.devices()[:tensor], tensor=tensor, expert=1, num_cached_heads=kv_heads
    )
    seen: list[tuple[int, ...]] = []

    def attend(*operands: jax.Array, settings: AttentionSettings) -> jax.Array:
        seen.append(operands[0].shape)
        return attend_with_cudnn(*operands, settings=settings, implementation="xla")

    monkeypatch.setattr(attention, "attend_with_cudnn", attend)
    operands = make_operands(16, 16)
    call: Callable[..., jax.Array] = partial(
        attention.paged_attention, scale=0.3, backend=AttentionBackend.on("cudnn", mesh)
    )
    got = jax.jit(call)(*operands)
    assert seen == [(3, 16, 1, GROUP * KV_HEADS // tensor, 16)]
    assert_equal_rows(got, reference(operands, settings_for(16)), operands)
