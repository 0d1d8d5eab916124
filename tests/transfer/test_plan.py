"""The arithmetic of transfer plans, against figures worked out by hand and against real meshes."""

import math

import jax
import pytest

from jpd.nn.config import DecoderConfig, LayerConfig, MlaConfig, RopeConfig
from jpd.parallel.mesh import kv_partitions, make_worker_mesh, wire_view
from jpd.transfer.plan import LINKS, KVLayout, Link, kv_bytes_per_token, plan_transfer


def config(num_kv_heads: int, mla: MlaConfig | None = None) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=128,
        embed_dim=64,
        mlp_dim=64,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        max_len=1024,
        layers=(LayerConfig(rope=RopeConfig()),) * 80,
        mla=mla,
    )


def test_bytes_per_token_of_llama_70b_by_hand() -> None:
    # 80 layers x 8 heads x (K and V) x 128 dims x 2 bytes
    assert kv_bytes_per_token(config(8), 2) == 80 * 8 * 2 * 128 * 2 == 327_680


def test_mla_caches_its_latent_once() -> None:
    mla = MlaConfig(512, 1536, 128, 64, 128)
    assert kv_bytes_per_token(config(8, mla), 2) == 80 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("source", "target", "wire", "slices", "strands", "received", "busiest"),
    [
        (KVLayout(2, 2), KVLayout(2, 2), 2, 1, 1, 1000, 500),  # one to one
        (KVLayout(2, 2), KVLayout(4, 4), 2, 2, 1, 1000, 500),  # each sends two quarters
        (KVLayout(4, 4), KVLayout(2, 2), 4, 1, 2, 1000, 500),  # each gets two quarters
        (KVLayout(4, 4), KVLayout(1, 2), 4, 1, 4, 2000, 1000),  # all four to either
        (KVLayout(1, 4), KVLayout(1, 4), 1, 1, 1, 4000, 1000),  # one head on four: whole copies
        (KVLayout(1, 1), KVLayout(8, 8), 1, 8, 1, 1000, 1000),  # one sender of eight slices
        (KVLayout(2, 2), KVLayout(2, 4), 2, 1, 1, 2000, 1000),  # each half to two devices
        (KVLayout(3, 3), KVLayout(2, 2), 1, 1, 1, 2000, 2000),  # regrouped, and whole to each
    ],
)
def test_what_travels(
    source: KVLayout,
    target: KVLayout,
    wire: int,
    slices: int,
    strands: int,
    received: int,
    busiest: float,
) -> None:
    plan = plan_transfer(source, target, bytes_per_token=1000)
    assert (plan.wire_partitions, plan.slices, plan.strands) == (wire, slices, strands)
    assert plan.received_bytes_per_token == received
    assert plan.busiest_link_bytes_per_token == busiest
    assert plan.is_resharded == (source.partitions != target.partitions)


def test_seconds_are_bytes_over_the_link_rate() -> None:
    plan = plan_transfer(KVLayout(2, 2), KVLayout(2, 2), bytes_per_token=1000)
    assert plan.seconds(4096, Link("test", 1e6, "here")) == pytest.approx(4096 * 500 / 1e6)


def test_every_link_names_its_source() -> None:
    assert all(link.source and link.bytes_per_second > 0 for link in LINKS)
    assert len({link.name for link in LINKS}) == len(LINKS)


@pytest.mark.parametrize(("tensor", "heads"), [(4, 1), (4, 2), (4, 8), (2, 3)])
def test_the_plan_speaks_of_the_meshes_that_are_made(tensor: int, heads: int) -> None:
    devices = jax.devices()[:tensor]
    mesh = make_worker_mesh(devices, tensor=tensor, expert=1, num_cached_heads=heads)
    layout = KVLayout(math.gcd(heads, tensor), tensor)
    assert kv_partitions(mesh) == layout.partitions
    plan = plan_transfer(layout, KVLayout(math.gcd(heads, 2), 2), 1)
    assert wire_view(mesh, plan.wire_partitions).shape["tensor"] == plan.wire_partitions
